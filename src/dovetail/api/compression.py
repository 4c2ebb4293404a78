"""Answers of some size are compressed for whoever can read it. Streams never are.

What it must not know: what an answer is about.
"""

from __future__ import annotations

import asyncio
import gzip
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.api.conditions import COMPRESSED

SMALLEST = 1024
"""Below this it costs more than it saves."""
LARGE = 256 * 1024
"""Above this it takes long enough to be noticed by everybody else: in a thread, then."""
LEVEL = 1
"""JSON shrinks to a fifth; more trouble makes it a sixth, in three times the time."""
_ZERO = re.compile(rb"\s*q\s*=\s*0(\.0*)?\s*")
_KINDS = (b"application/json", b"application/problem+json", b"text/html", b"text/plain")


class Compression:
    """ASGI: compresses the answers of the application that are sent in one piece."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _reads_gzip(scope):
            await self._app(scope, receive, send)
            return
        held: Message | None = None

        async def sending(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                held = message  # until it is known what comes with it
                return
            if held is not None:
                start, held = held, None
                if not message.get("more_body") and _is_worth_it(start, message):
                    start, message = await _compressed(start, message)
                await send(start)
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


def _is_worth_it(start: Message, message: Message) -> bool:
    headers = dict(start["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0]
    return (
        len(message.get("body", b"")) >= SMALLEST
        and kind in _KINDS
        and b"content-encoding" not in headers
    )


async def _compressed(start: Message, message: Message) -> tuple[Message, Message]:
    body = message["body"]
    if len(body) > LARGE:
        small = await asyncio.to_thread(gzip.compress, body, LEVEL, mtime=0)
    else:
        small = gzip.compress(body, LEVEL, mtime=0)
    headers = [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    for name, value in start["headers"]:
        if name == b"content-length":
            value = b"%d" % len(small)
        elif name == b"etag":
            value = value[:-1] + COMPRESSED.encode() + b'"'
        headers.append((name, value))
    return {**start, "headers": headers}, {**message, "body": small}
