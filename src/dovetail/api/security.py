"""Who may ask, and from where: host names, origins and bearer tokens, before any endpoint.

Everything is closed unless a line here opens it, and what is open is compared as a whole path,
never by how it ends. What it must not know: what a call does, beyond whether it only reads.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from hashlib import sha256
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.api.problems import Refusal, refuse
from dovetail.config import SettingsError, env_name
from dovetail.core.findings import one_line

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
"""Need no token."""
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
READING_POSTS = frozenset({"/api/v1/workflows/validate"})
READ_SUFFIX = ":read"

Access = Literal["none", "read", "full"]


class Tokens:
    """The tokens of the settings, compared without telling how much of one was right."""

    def __init__(self, given: Iterable[str]) -> None:
        self._known: list[tuple[bytes, Access]] = []
        for entry in given:
            token = entry.removesuffix(READ_SUFFIX)
            if not token:
                raise SettingsError(f"{env_name('tokens')}: a token is empty; it would let all in")
            access: Access = "full" if token == entry else "read"
            self._known.append((_digest(token.encode()), access))

    def __bool__(self) -> bool:
        return bool(self._known)

    def access(self, token: bytes) -> Access:
        asked = _digest(token)
        found: Access = "none"
        for known, access in self._known:
            # All of them, also after a hit. A token that is listed twice has its larger scope.
            if hmac.compare_digest(known, asked) and found != "full":
                found = access
        return found


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()


def check_binding(addresses: Sequence[str], tokens: Sequence[str]) -> None:
    """Raises `SettingsError` where everybody on the network could do everything."""
    if not tokens and not all(is_loopback(address) for address in addresses):
        raise SettingsError(
            f"refusing to listen on {', '.join(addresses)} without a token: everybody who "
            f"reaches it could run workflows; set {env_name('tokens')}, or leave out --host"
        )


def is_loopback(name: str) -> bool:
    try:
        return ip_address(name.split("%")[0]).is_loopback
    except ValueError:
        return name == "localhost"


class Guard:
    """ASGI: lets a request through to the application, or answers it with 401 or 403."""

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], tokens: Tokens) -> None:
        self._app = app
        self._hosts = {_name(host) for host in hosts} - _EVERY_ADDRESS
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Refusal as refusal:
                await refuse(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        host = self._check_host(_values(scope, b"host"))
        reads = scope["method"] in READING_METHODS
        self._check_token(scope, reads or scope["path"] in READING_POSTS)
        if not reads:
            self._check_origin(_values(scope, b"origin"), host)

    def _check_host(self, given: list[bytes]) -> str:
        """A page of another site may have its own name resolve to us; its `Host` gives it away."""
        if len(given) != 1:
            raise Refusal(403, "a request needs one Host header")
        host = given[0].decode("latin-1")
        name = _name(host)
        if not (name in self._hosts or is_loopback(name)):
            raise Refusal(
                403,
                f"this server is not called '{one_line(name)}'; if it should be, "
                f"add the name to {env_name('allowed_hosts')}",
            )
        return host

    def _check_token(self, scope: Scope, reads: bool) -> None:
        if not self._tokens or scope["path"] in OPEN_PATHS:
            return
        given = _values(scope, b"authorization")
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        access = self._tokens.access(token.strip()) if scheme.lower() == b"bearer" else "none"
        if access == "none":
            words = "wrong token" if given else "a token is needed: Authorization: Bearer <token>"
            raise Refusal(401, words, {"WWW-Authenticate": 'Bearer realm="dovetail"'})
        if access == "read" and not reads:
            challenge = 'Bearer realm="dovetail", error="insufficient_scope"'
            raise Refusal(403, "this token may only read", {"WWW-Authenticate": challenge})

    def _check_origin(self, given: list[bytes], host: str) -> None:
        """A browser names the page that writes; it must be one of ours. Programs send nothing."""
        for value in given:
            origin = value.decode("latin-1")
            scheme, _, place = origin.partition("://")
            default = _DEFAULT_PORTS.get(scheme.lower())
            if default is None or host_and_port(place, default) != host_and_port(host, default):
                raise Refusal(403, f"pages of '{one_line(origin)}' may not write here")


# Where to listen, not what to be called: a page of any site may write to http://0.0.0.0.
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def _name(host: str) -> str:
    """Without the port, in one spelling; also for a bare IPv6 address."""
    try:
        return str(ip_address(host))
    except ValueError:
        name = host_and_port(host)[0]
    try:
        return str(ip_address(name))
    except ValueError:
        return name


def host_and_port(text: str, default: str = "") -> tuple[str, str]:
    """`[::1]:8700` → `::1` and `8700`. What is no host is a name that nobody has."""
    try:
        parts = urlsplit(f"//{text}")
        port = default if parts.port is None else str(parts.port)
        name = parts.hostname or ""
    except ValueError:
        return "", default
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return "", default
    return name.rstrip("."), port


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]
