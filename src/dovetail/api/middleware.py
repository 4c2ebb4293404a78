"""Around every reply: request id, protective headers, `HEAD`, compression, an end without a crash.

`RequestContext` is the outermost layer, so that it also holds for requests that the layers below
refuse. Streams of events are not compressed.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import re
import time
import zlib
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.api.problems import Refusal, refuse
from dovetail.api.responses import COMPRESSED
from dovetail.api.security import PROTECTIVE_HEADERS
from dovetail.core.errors import DovetailError
from dovetail.engine.listener import REQUEST_ID

log = logging.getLogger("dovetail.api")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


Answered = Callable[[Scope, int, float], None]
"""Told of each answer once it is over: the request, its status, and how many seconds it took.

`scope["route"].path` is the call's template; it is missing where nothing was found or asked for.
"""


class RequestContext:
    """ASGI: the application, wrapped."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        closing: asyncio.Event,
        answered: Answered | None = None,
    ) -> None:
        self._app = app
        self._closing = closing
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)  # for whatever is logged; each request has a context of its own
        status = 0
        began = 0.0 if self._answered is None else time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": _complete(message["headers"], request_id)}
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if not self._closing.is_set():
                raise
            # The server ends and this took too long for it.
            if not status:
                await refuse(Refusal(503, "the server is stopping"), scope, receive, sending)
        except Exception as error:
            # It has been answered, as far as it could be. One of ours gets here only out of a
            # stream: what is left to do is to break it off, which the server does now.
            ours = isinstance(error.__cause__, DovetailError)
            call = f"{scope['method']} {scope['path']} ({request_id})"
            log.error("%s: %s", call, error.__cause__ if ours else error, exc_info=not ours)
        finally:
            if self._answered is not None:
                self._answered(scope, status, time.perf_counter() - began)


def _request_id(scope: Scope) -> str:
    """The caller's own, if it is harmless; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value).decode()
    return os.urandom(8).hex()


def _complete(headers: Any, request_id: str) -> list[tuple[bytes, bytes]]:
    given = list(headers)
    names = {name.lower() for name, _ in given}
    more = [
        *PROTECTIVE_HEADERS,
        (b"cache-control", b"no-store"),
        (b"x-request-id", request_id.encode()),
    ]
    return given + [(name, value) for name, value in more if name not in names]


class Heads:
    """ASGI: an application that knows `GET` alone answers `HEAD` as well."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        enough = asyncio.Event()

        async def sending(message: Message) -> None:
            if enough.is_set():
                return
            if message["type"] == "http.response.body":
                if message.get("more_body"):
                    enough.set()
                message = {"type": message["type"], "body": b"", "more_body": False}
            await send(message)

        asked = {**scope, "method": "GET"}
        answering = asyncio.ensure_future(self._app(asked, receive, sending))
        stream = asyncio.ensure_future(enough.wait())
        try:
            await asyncio.wait({answering, stream}, return_when=asyncio.FIRST_COMPLETED)
            if not enough.is_set():
                await answering
        finally:
            if "route" in asked:  # the metrics look for it there
                scope["route"] = asked["route"]
            for work in (answering, stream):
                work.cancel()
            await asyncio.gather(answering, stream, return_exceptions=True)


MIN_COMPRESSED_BYTES = 1024
"""Below this it costs more than it saves."""
THREAD_BYTES = 256 * 1024
"""Above this it takes long enough to delay other requests: it is done in a thread."""
LEVEL = 1
"""JSON shrinks to a fifth; more trouble makes it a sixth, in three times the time."""
GZIP = 31
"""Of zlib: its largest window, in the form of gzip."""
_ZERO = re.compile(rb"\s*q\s*=\s*0(\.0*)?\s*")
_KINDS = (b"application/json", b"application/problem+json", b"text/html", b"text/plain")


class Compression:
    """ASGI: compresses the answers of the application, in one piece or in parts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not reads_gzip(scope):
            await self._app(scope, receive, send)
            return
        held: Message | None = None
        parts: Any = None

        async def sending(message: Message) -> None:
            nonlocal held, parts
            if message["type"] == "http.response.start":
                held = message  # until it is known what comes with it
                return
            if held is not None:
                start, held = held, None
                if message.get("more_body"):
                    if _is_worth_it(start, MIN_COMPRESSED_BYTES):
                        parts = zlib.compressobj(LEVEL, wbits=GZIP)
                        start = {**start, "headers": _headers(start, None)}
                elif _is_worth_it(start, len(message.get("body", b""))):
                    start, message = await _compressed(start, message)
                await send(start)
            if parts is not None:
                message = {**message, "body": await _part(parts, message)}
                if not message["body"] and message.get("more_body"):
                    return  # it is put together with what follows
            await send(message)

        await self._app(scope, receive, sending)


def reads_gzip(scope: Scope) -> bool:
    """Whether the client names it, or anything, and does not rule it out."""
    named: dict[bytes, bool] = {}
    for name, value in scope["headers"]:
        if name == b"accept-encoding":
            for entry in value.lower().split(b","):
                coding, _, quality = entry.partition(b";")
                named[coding.strip()] = not _ZERO.fullmatch(quality)
    return named.get(b"gzip", named.get(b"*", False))


def _is_worth_it(start: Message, size: int) -> bool:
    headers = dict(start["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0]
    return size >= MIN_COMPRESSED_BYTES and kind in _KINDS and b"content-encoding" not in headers


async def _compressed(start: Message, message: Message) -> tuple[Message, Message]:
    body = message["body"]
    if len(body) > THREAD_BYTES:
        small = await asyncio.to_thread(gzip.compress, body, LEVEL, mtime=0)
    else:
        small = gzip.compress(body, LEVEL, mtime=0)
    return {**start, "headers": _headers(start, len(small))}, {**message, "body": small}


async def _part(parts: Any, message: Message) -> bytes:
    """What comes of the next part; with the last one, all that is left."""
    body, is_last = message.get("body", b""), not message.get("more_body")

    def work() -> bytes:
        made: bytes = parts.compress(body)
        return made + parts.flush() if is_last else made

    return await asyncio.to_thread(work) if len(body) >= THREAD_BYTES else work()


def _headers(start: Message, size: int | None) -> list[tuple[bytes, bytes]]:
    """Those of a compressed answer; its size may not be known yet."""
    headers = [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    for name, value in start["headers"]:
        if name == b"content-length":
            if size is None:
                continue
            value = b"%d" % size
        elif name == b"etag":
            value = value[:-1] + COMPRESSED.encode() + b'"'
        headers.append((name, value))
    return headers
