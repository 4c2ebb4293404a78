"""Translates a PostgreSQL URL with libpq's options into arguments of asyncpg.

asyncpg knows fewer options. It sends unknown ones to the server as settings, and the server then
refuses the connection with an unhelpful message.
"""

from __future__ import annotations

import os
import ssl
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from dovetail.core.errors import StoreError

NAME = "DOVETAIL_DATABASE_URL"
MAX_CONNECT_SECONDS = 60.0

# libpq's options that asyncpg reads from the URL.
# fmt: off
_READ = frozenset({
    "host", "port", "dbname", "database", "user", "password", "passfile", "service",
    "sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation",
    "ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs", "krbsrvname",
    "gsslib",
})
# Options that the server reads.
_SENT = frozenset({"application_name", "options"})
# Options without effect: asyncpg sends no keepalives, speaks UTF-8 and offers what the server asks
# for.
_IDLE = frozenset({
    "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
    "gssencmode", "channel_binding", "sslcompression", "sslsni", "sslcertmode",
    "fallback_application_name", "client_encoding", "load_balance_hosts", "requirepeer",
})
# fmt: on
_OWN = frozenset({"connect_timeout"})
_KNOWN = sorted(_READ | _SENT | _IDLE | _OWN)
_VERIFYING = ("verify-ca", "verify-full")


def connect_arguments(url: str, connect_seconds: float) -> dict[str, Any]:
    """The arguments of `asyncpg.connect` and `create_pool` for this URL.

    Raises `StoreError`, which never shows a part of the URL that may be a password.
    """
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError as error:
        if not url.partition("?")[2]:
            return {"dsn": url.rstrip("?"), "timeout": connect_seconds}
        raise StoreError(f"{NAME}: what follows '?' cannot be read: {error}") from None
    _refuse_unknown(given)
    timeout = _timeout(given.pop("connect_timeout", ""), connect_seconds)
    arguments: dict[str, Any] = {"timeout": timeout}
    if context := _tls(given):
        arguments["ssl"] = context
    kept = {name: value for name, value in given.items() if name not in _IDLE}
    arguments["dsn"] = parts._replace(query=urlencode(kept, quote_via=quote)).geturl()
    return arguments


def shown(url: str) -> str:
    """The URL for messages, without user and password."""
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query))
        host = given.get("host") or parts.hostname or "localhost"
        port = given.get("port") or parts.port or 5432
    except ValueError:
        return "PostgreSQL"
    name = parts.path if parts.path not in ("", "/") else f"/{given.get('dbname', '')}".rstrip("/")
    if host.startswith(("/", "%2F", "%2f")):
        return f"PostgreSQL at the socket in {host.replace('%2F', '/').replace('%2f', '/')}"
    return f"PostgreSQL at {host}:{port}{name}"


def _refuse_unknown(given: dict[str, str]) -> None:
    for name in given:
        if name not in _KNOWN:
            near = get_close_matches(name, _KNOWN, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "it takes the options of libpq"
            raise StoreError(f"{NAME}: there is no option '{name[:80]}'; {hint}")


def _timeout(text: str, usual: float) -> float:
    if not text:
        return usual
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise StoreError(f"{NAME}: connect_timeout is a number of seconds, as in connect_timeout=5")
    # With 0 libpq waits without end; a service must not hang.
    return min(seconds or MAX_CONNECT_SECONDS, MAX_CONNECT_SECONDS)


def _tls(given: dict[str, str]) -> ssl.SSLContext | None:
    """A TLS context if libpq would use the system's authorities, which asyncpg cannot. Raises if
    there is no authority to verify a certificate with."""
    mode = given.get("sslmode") or os.environ.get("PGSSLMODE", "")
    root = given.get("sslrootcert") or os.environ.get("PGSSLROOTCERT", "")
    if root == "system":
        if mode not in ("", "verify-full"):
            raise StoreError(f"{NAME}: sslrootcert=system needs sslmode=verify-full, not {mode}")
        context = ssl.create_default_context()
        if given.get("sslcert"):
            context.load_cert_chain(given["sslcert"], given.get("sslkey"), given.get("sslpassword"))
        for name in ("sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword"):
            given.pop(name, None)
        return context
    if root or mode in _VERIFYING:
        _check_file(root, mode)
    return None


def _check_file(root: str, mode: str) -> None:
    file = Path(root or "~/.postgresql/root.crt").expanduser()
    if file.is_file():
        return
    if not root:
        raise StoreError(
            f"{NAME}: sslmode={mode} needs the certificate of an authority, and there is none in "
            "~/.postgresql/root.crt; name its file with sslrootcert=/path/ca.crt, or use the "
            "system's authorities with sslrootcert=system"
        )
    raise StoreError(f"{NAME}: there is no file {file}, which sslrootcert names")
