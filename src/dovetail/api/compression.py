"""Answers of some size are compressed for whoever can read it. Streams of events never are.

What it must not know: what an answer is about.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import zlib
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.api.conditions import COMPRESSED

SMALLEST = 1024
"""Below this it costs more than it saves."""
LARGE = 256 * 1024
"""Above this it takes long enough to be noticed by everybody else: in a thread, then."""
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
        if scope["type"] != "http" or not _reads_gzip(scope):
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
                    if _is_worth_it(start, SMALLEST):
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


def _reads_gzip(scope: Scope) -> bool:
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
    return size >= SMALLEST and kind in _KINDS and b"content-encoding" not in headers


async def _compressed(start: Message, message: Message) -> tuple[Message, Message]:
    body = message["body"]
    if len(body) > LARGE:
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

    return await asyncio.to_thread(work) if len(body) >= LARGE else work()


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
