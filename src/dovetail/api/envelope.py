"""What every answer has around it: a request id, protective headers, and an end without a crash.

The outermost layer, so that it also holds for what the layers below refuse. What it must not
know: who may ask, or what for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.api.problems import Refusal, refuse
from dovetail.api.security import PROTECTIVE_HEADERS
from dovetail.core.errors import DovetailError
from dovetail.engine.listening import REQUEST_ID

log = logging.getLogger("dovetail.api")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


Answered = Callable[[Scope, int, float], None]
"""Told of each answer once it is over: the request, its status, and how many seconds it took.

`scope["route"].path` is the call's template; it is missing where nothing was found or asked for.
"""


class Envelope:
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
