"""Which callers may ask: host names, origins and bearer tokens, before any endpoint.

Everything is closed unless a line here opens it. An open path is compared as a whole, never by its
prefix or suffix.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from ipaddress import ip_address
from typing import Literal

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.api.problems import Refusal, refuse
from dovetail.config import NamedToken, SettingsError, env_name
from dovetail.core.errors import one_line

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
"""Need no token."""
BROWSER_PAGES = frozenset({"/docs"})
"""Need no token in a browser, which cannot send one when it opens an address. They hold nothing of
this server: the page then asks for a token, and sends it with each call."""
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MCP_PATH = "/mcp"
READING_POSTS = frozenset({"/api/v1/workflows/validate", MCP_PATH})
"""A token that may only read may post there; at `/mcp` it gets the tools that read."""
READ_SUFFIX = ":read"
NAME_DIGITS = 8
"""Of the SHA-256 of a token that has no name, in hex."""
ANONYMOUS = "anonymous"
"""The caller of a server without tokens."""

_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PROTECTIVE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", _POLICY.encode()),
]
"""On every answer that has none of its own: nothing is guessed, framed, embedded or fetched."""

Access = Literal["none", "read", "full"]


def page_policy(style: str, *, script: bool = False) -> str:
    """The `Content-Security-Policy` of a page that has this one style in it. With `script` it may
    load scripts of this server, and ask this server."""
    digest = b64encode(sha256(style.encode()).digest()).decode()
    own = "; script-src 'self'; connect-src 'self'" if script else ""
    return f"{_POLICY}; style-src 'sha256-{digest}'{own}"


def opens_page(accept: Iterable[str]) -> bool:
    """Whether a request with these `Accept` headers is a browser's that opens an address."""
    return any("text/html" in value.lower() for value in accept)


class Tokens:
    """The tokens of the settings, compared in constant time."""

    def __init__(self, given: Iterable[str], named: Mapping[str, NamedToken] | None = None) -> None:
        self._known: list[tuple[bytes, Access]] = []
        self._names: list[str] = []
        for name, known in (named or {}).items():
            self._known.append((_digest(known.token.encode()), known.scope))
            self._names.append(name)
        for entry in given:
            token = entry.removesuffix(READ_SUFFIX)
            if not token:
                raise SettingsError(f"{env_name('tokens')}: a token is empty; it would let all in")
            access: Access = "full" if token == entry else "read"
            digest = _digest(token.encode())
            self._known.append((digest, access))
            self._names.append(digest.hex()[:NAME_DIGITS])

    def __bool__(self) -> bool:
        return bool(self._known)

    def access(self, token: bytes) -> Access:
        return self.holder(token)[0]

    def name(self, place: int) -> str:
        """Of a token by its place: as `[tokens]` calls it, else the beginning of its digest."""
        return self._names[place]

    def holder(self, token: bytes) -> tuple[Access, int]:
        """What it may do, and which of the settings' tokens it is."""
        asked = _digest(token)
        found: Access = "none"
        place = -1
        for number, (known, access) in enumerate(self._known):
            # All of them, also after a hit. A token that is listed twice has its larger scope.
            if hmac.compare_digest(known, asked) and found != "full":
                found, place = access, number
        return found, place


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()


def actor_of(request: Request) -> str:
    """The caller, as histories and logs name it."""
    name: str = request.scope.get("state", {}).get("actor", ANONYMOUS)
    return name


def scope_of(request: Request) -> Literal["read", "full"]:
    """What the caller may do. A server without tokens allows everything to every caller."""
    return "full" if request.scope.get("state", {}).get("may_write", True) else "read"


def check_binding(addresses: Sequence[str], tokens: Sequence[str]) -> None:
    """Raises `SettingsError` where every machine on the network could do everything."""
    if not tokens and not all(is_loopback(address) for address in addresses):
        raise SettingsError(
            f"refusing to listen on {', '.join(addresses)} without a token: everybody who "
            f"reaches it could run workflows; set {env_name('tokens')}, or leave out --host"
        )


@lru_cache(256)
def is_loopback(name: str) -> bool:
    try:
        return ip_address(name.split("%")[0]).is_loopback
    except ValueError:
        return name == "localhost"


def host_names(given: Iterable[str]) -> set[str]:
    """The names of a setting in the spelling that clients send. Raises `SettingsError`."""
    return {_name(host) for host in given}


class Guard:
    """ASGI: lets a request through to the application, or answers it with 401 or 403.

    `is_static` says whether a path is one of the page's static files, which need no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Iterable[str],
        tokens: Tokens,
        is_static: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self._app = app
        self._is_static = is_static
        self._hosts = host_names(host for host in hosts if host not in _EVERY_ADDRESS)
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # Nothing here speaks it, and an unchecked request must not get through.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Refusal as refusal:
                await refuse(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        given: dict[bytes, list[bytes]] = {name: [] for name in _LOOKED_AT}
        for name, value in scope["headers"]:
            if name in given:
                given[name].append(value)
        if given[b"transfer-encoding"] and given[b"content-length"]:
            # A proxy in front may have believed the other one, and seen another request.
            words = "a body has either a Content-Length or a Transfer-Encoding"
            raise Refusal(400, words, {"Connection": "close"})
        host = self._check_host(given[b"host"])
        reads = scope["method"] in READING_METHODS
        path = scope["path"]
        is_open = path in OPEN_PATHS or self._is_static(path)
        if path in BROWSER_PAGES and reads:
            is_open = opens_page(value.decode("latin-1") for value in given[b"accept"])
        state = scope.setdefault("state", {})
        if self._tokens and not is_open:
            only_reads = reads or path in READING_POSTS
            number, access = self._check_token(given[b"authorization"], only_reads)
            state["token"], state["may_write"] = number, access == "full"
            state["actor"] = self._tokens.name(number)
        if not reads:
            self._check_origin(given[b"origin"], host)
        if not is_open and (visit := state.get("visit")) is not None:
            visit.known = True

    def _check_host(self, given: list[bytes]) -> str:
        """A page of another site may have its own name resolve to us; its `Host` gives it away."""
        if len(given) != 1:
            raise Refusal(403, "a request needs one Host header")
        host = given[0].decode("latin-1")
        name, _ = host_and_port(host)
        if not (name in self._hosts or is_loopback(name)):
            raise Refusal(
                403,
                f"this server is not called '{one_line(host)}'; if it should be, "
                f"add the name to {env_name('allowed_hosts')}",
            )
        return host

    def _check_token(self, given: list[bytes], reads: bool) -> tuple[int, Access]:
        """Which of the tokens it is, and what it may do."""
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        access: Access = "none"
        number = -1
        if scheme.lower() == b"bearer":
            access, number = self._tokens.holder(token.strip())
        if access == "none":
            words = "wrong token" if given else "a token is needed: Authorization: Bearer <token>"
            raise Refusal(401, words, {"WWW-Authenticate": 'Bearer realm="dovetail"'})
        if access == "read" and not reads:
            challenge = 'Bearer realm="dovetail", error="insufficient_scope"'
            raise Refusal(403, "this token may only read", {"WWW-Authenticate": challenge})
        return number, access

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
MAX_HOST_LENGTH = 260  # of DNS, and a port
_LOOKED_AT = (
    *(b"host", b"origin", b"authorization", b"accept"),
    *(b"transfer-encoding", b"content-length"),
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{0,5}))?")


def _name(given: str) -> str:
    """What a setting calls a host, as `host_and_port` gives it; also a bare IPv6 address."""
    try:
        return str(ip_address(given))
    except ValueError:
        pass
    try:
        spelled = given if given.isascii() else given.encode("idna").decode()
    except UnicodeError:
        spelled = ""
    name, _ = host_and_port(spelled)
    if not name:
        raise SettingsError(
            f"{env_name('allowed_hosts')}: '{one_line(given)}' is no host name; write names as in "
            "dovetail.example,10.0.0.5, without a scheme, a path or a wildcard"
        )
    return name


def host_and_port(text: str, default: str = "") -> tuple[str, str]:
    """`[::1]:8700` → `::1` and `8700`. Text that is no host matches no name."""
    return _host_and_port(text, default) if len(text) <= MAX_HOST_LENGTH else ("", default)


@lru_cache(256)  # the same few with every request, and an address takes long to parse
def _host_and_port(text: str, default: str) -> tuple[str, str]:
    parts = _HOST.fullmatch(text)
    if parts is None:
        return "", default
    address, name, port = parts.groups()
    if port and int(port) > 65535:
        return "", default
    try:
        found = str(ip_address(address or name))
    except ValueError:
        # In brackets only an address may stand; a name may end in the root's dot.
        found = "" if address else name.lower().removesuffix(".")
    return found, port.lstrip("0") or "0" if port else default
