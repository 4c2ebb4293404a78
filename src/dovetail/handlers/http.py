"""One HTTP exchange with an untrusted server: guarded addresses, bounded time, size and redirects.

`_GuardedBackend` opens all connections, so neither a redirect nor a DNS server gets around the
address guard; TLS and the Host header still use the name. There are no proxies, cookies or netrc:
nothing from the environment or an earlier call gets into a request. A connection lives as long as
its request. That costs a handshake per call. In return no connection must be closed at the end,
none belongs to a closed event loop, and no half-closed one costs a node a retry.

Imported on first use: httpx2 is the extra `http` and takes a third of a second.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from ssl import SSLContext
from typing import Any

import httpcore2
import httpx2

from dovetail.core.errors import PermanentError, RetryableError
from dovetail.engine.listener import client_call
from dovetail.handlers.http_rules import AddressGuard, HttpResponse, plain_host

MAX_REDIRECTS = 5
CONNECT_SECONDS = 10.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_AUTHORITY = re.compile(r"([a-z]+://(?:[^/?#]*@)?)([^/?#@:\[\]]+)(.*)", re.IGNORECASE | re.DOTALL)
_NO_HOST = re.compile(r"[/?#@:\\%\s]")
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")

# A redirect to another origin keeps only these: any other header may be a key for the first origin.
_HARMLESS = frozenset(
    {
        "accept",
        "accept-encoding",
        "accept-language",
        "content-type",
        "idempotency-key",
        "user-agent",
    }
)
_ABOUT_THE_BODY = frozenset({"content-type", "content-encoding", "content-language"})


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request to send. Header names are lower case; `content` is None for no body."""

    method: str
    url: httpx2.URL
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None


def parse_url(text: str, params: Mapping[str, Any] | None = None) -> httpx2.URL:
    """An http or https URL whose host has one plain spelling, with params added to its query.

    Messages never quote the URL: it may carry a password in any of its parts.
    """
    if parts := _AUTHORITY.match(text):
        before, host, after = parts.groups()
        host = plain_host(host)
        if _NO_HOST.search(host):  # some characters become a slash when they are normalised
            raise _invalid("its host is no valid name or address")
        text = f"{before}{host}{after}"
    try:
        url = httpx2.URL(text).copy_with(fragment=None)
        url = url.copy_merge_params(params) if params else url
    except (httpx2.InvalidURL, ValueError):
        raise _invalid("it cannot be parsed") from None
    if url.scheme not in ("http", "https"):
        raise _invalid(f"its scheme is '{url.scheme}'" if url.scheme else "it has no scheme")
    if url.port is not None and not 0 < url.port < 65536:
        raise _invalid("its port is not between 1 and 65535")
    name = url.raw_host.decode("ascii")
    is_ipv6 = ":" in name and "%" not in name
    if not is_ipv6 and (len(name) > 253 or not all(map(_LABEL.fullmatch, name.split(".")))):
        raise _invalid("its host is no valid name or address")
    return url


def shown(url: httpx2.URL) -> str:
    """A URL for people: without user, password, query and fragment."""
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))


async def exchange(
    request: OutgoingRequest,
    guard: AddressGuard,
    *,
    timeout_seconds: float,
    max_bytes: int,
    stop_at: Collection[int] = (),
    check_host: Callable[[str], None] | None = None,
) -> HttpResponse:
    """Send a request, follow its redirects, read the answer.

    `check_host` is called before anything is sent to a host, also after a redirect; it raises to
    refuse. A redirect whose status is in `stop_at` is not followed. Raises `RetryableError` for
    errors of the network, `PermanentError` for requests that would be refused again.
    """
    request = _with_basic_auth(request)
    with client_call(request.method, _attributes(request)) as call:
        # A header of the definition goes before ours.
        request = replace(request, headers={**call.headers, **request.headers})
        try:
            answer = await _exchange(
                request, guard, timeout_seconds, max_bytes, stop_at, check_host
            )
        except (PermanentError, RetryableError) as error:
            call.failed(error.type)
            raise
        call.answered({"http.response.status_code": answer.status_code})
        if answer.status_code >= 400:
            call.failed(str(answer.status_code))
        return answer


def _attributes(request: OutgoingRequest) -> dict[str, Any]:
    """Of OpenTelemetry's conventions for HTTP clients; without what may be a secret."""
    url = request.url
    port = url.port or (443 if url.scheme == "https" else 80)
    return {
        "http.request.method": request.method,
        "url.full": shown(url),
        "server.address": url.host,
        "server.port": port,
    }


async def _exchange(
    request: OutgoingRequest,
    guard: AddressGuard,
    timeout_seconds: float,
    max_bytes: int,
    stop_at: Collection[int],
    check_host: Callable[[str], None] | None,
) -> HttpResponse:
    try:
        async with asyncio.timeout(timeout_seconds):
            for _ in range(MAX_REDIRECTS + 1):
                if check_host is not None:
                    check_host(request.url.raw_host.decode("ascii"))
                answer = await _send(request, guard, max_bytes, stop_at)
                if isinstance(answer, HttpResponse):
                    return answer
                request = answer
    except TimeoutError:
        raise RetryableError(
            f"{_line(request)}: no complete answer within {timeout_seconds:g} s", type="timeout"
        ) from None
    except httpcore2.TimeoutException:
        raise RetryableError(
            f"{_line(request)}: could not connect in time", type="timeout"
        ) from None
    except (httpcore2.NetworkError, httpcore2.ProtocolError, httpx2.DecodingError) as error:
        what = str(error) or type(error).__name__
        raise RetryableError(f"{_line(request)}: {what}", type="network_error") from error
    raise PermanentError(
        f"{_line(request)}: more than {MAX_REDIRECTS} redirects", type="too_many_redirects"
    )


async def _send(
    request: OutgoingRequest, guard: AddressGuard, max_bytes: int, stop_at: Collection[int]
) -> HttpResponse | OutgoingRequest:
    """One hop: the answer, or the request for the next hop."""
    pool = httpcore2.AsyncConnectionPool(
        ssl_context=_tls() if request.url.scheme == "https" else None,
        network_backend=_GuardedBackend(guard),
        max_keepalive_connections=0,
    )
    url = httpcore2.URL(
        scheme=request.url.raw_scheme,
        host=request.url.raw_host,
        port=request.url.port,
        target=request.url.raw_path,
    )
    async with (
        pool,
        pool.stream(
            request.method,
            url,
            headers=_wire_headers(request),
            content=request.content,
            extensions={"timeout": {"connect": CONNECT_SECONDS}},
        ) as raw,
    ):
        answer = httpx2.Response(raw.status, headers=raw.headers, stream=_Stream(raw))
        location = answer.headers.get("location")
        if location and raw.status in _REDIRECTS and raw.status not in stop_at:
            return _redirected(request, raw.status, location)
        content = await _read(answer, request.method, max_bytes)
        complete = len(content) <= max_bytes
        return HttpResponse(raw.status, dict(answer.headers), content, _line(request), complete)


async def _read(answer: httpx2.Response, method: str, max_bytes: int) -> bytes:
    """The decompressed body; reading stops as soon as it is more than `max_bytes`.

    httpx2 decompresses in pieces of at most 1 MiB, so a bomb costs one piece.
    """
    content = bytearray()
    if method != "HEAD":
        async for part in answer.aiter_bytes():
            content += part
            if len(content) > max_bytes:
                break
    return bytes(content)


def _redirected(request: OutgoingRequest, status: int, location: str) -> OutgoingRequest:
    try:
        url = parse_url(str(request.url.join(location)))
    except (httpx2.InvalidURL, ValueError):
        raise PermanentError(
            f"{_line(request)}: redirects to a place that is no URL", type="invalid_url"
        ) from None
    except PermanentError as error:
        raise PermanentError(f"{_line(request)}: redirects: {error}", type=error.type) from None
    url = url.copy_with(userinfo=b"")  # only the definition may give a password
    moved = replace(request, url=url)
    if status in (301, 302, 303) and request.method != "HEAD":
        kept = {n: v for n, v in request.headers.items() if n not in _ABOUT_THE_BODY}
        moved = replace(moved, method="GET", content=None, headers=kept)
    if not _same_place(request.url, url):
        harmless = {n: v for n, v in moved.headers.items() if n in _HARMLESS}
        moved = replace(moved, headers=harmless)
    return moved


def _same_place(old: httpx2.URL, new: httpx2.URL) -> bool:
    if old.host != new.host:
        return False
    # An upgrade from http to https keeps the headers; the other direction must not.
    upgraded = (old.scheme, old.port, new.scheme, new.port) == ("http", None, "https", None)
    return upgraded or (old.scheme, old.port) == (new.scheme, new.port)


def _with_basic_auth(request: OutgoingRequest) -> OutgoingRequest:
    """Turn `https://user:password@host/` into a Basic header."""
    url = request.url
    if not url.userinfo:
        return request
    headers = dict(request.headers)
    basic = b64encode(f"{url.username}:{url.password}".encode()).decode()
    headers.setdefault("authorization", f"Basic {basic}")
    return replace(request, url=url.copy_with(userinfo=b""), headers=headers)


def _wire_headers(request: OutgoingRequest) -> list[tuple[bytes, bytes]]:
    headers = {
        "host": request.url.netloc.decode("ascii"),
        "accept": "*/*",
        "accept-encoding": "gzip, deflate",
        "user-agent": "dovetail",
        "connection": "close",
        **request.headers,
    }
    if request.content is not None or request.method in ("POST", "PUT", "PATCH"):
        headers["content-length"] = str(len(request.content or b""))
    return [(name.encode("ascii"), value.encode()) for name, value in headers.items()]


def _line(request: OutgoingRequest) -> str:
    return f"{request.method} {shown(request.url)}"


def _invalid(why: str) -> PermanentError:
    return PermanentError(
        f"the url is not valid: {why}; expected http://host/path or https://host/path",
        type="invalid_url",
    )


@cache
def _tls() -> SSLContext:
    # Once: reading the system's certificates takes 20 ms. SSL_CERT_FILE is used, because operators
    # add an authority with it.
    return httpx2.create_ssl_context()


class _GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Opens connections only to addresses that the guard has permitted."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (the base class has it)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            addresses = await self._guard.addresses(host, port)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise httpcore2.ConnectError(f"cannot resolve '{host}': {reason}") from error
        failure: Exception | None = None
        for address in addresses:
            try:
                return await self._inner.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = failure or error  # the resolver prefers the first address
        assert failure is not None  # noqa: S101  (the guard hands out at least one address)
        raise failure


class _Stream(httpx2.AsyncByteStream):
    """The raw body, for httpx2 to decompress."""

    def __init__(self, raw: httpcore2.Response) -> None:
        self._raw = raw

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._raw.aiter_stream():
            yield part
