"""`HEAD`: what `GET` would answer, without its body.

Of a stream there is a head as well; nobody listens to the rest, so it is not made. What it must
not know: what is asked for.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
            if "route" in asked:  # whoever counts calls looks for it there
                scope["route"] = asked["route"]
            for work in (answering, stream):
                work.cancel()
            await asyncio.gather(answering, stream, return_exceptions=True)
