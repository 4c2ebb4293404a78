"""Streams that everybody hears: nothing is settled, and who comes later has missed what was told.

What it must not know: what follows from what is heard.
"""

from __future__ import annotations

import logging

from dovetail.core.events import Token
from dovetail.core.transitions import Stop
from dovetail.pipe import Pipe
from dovetail.transports.streams import BLOCK_MILLISECONDS, STOPS

log = logging.getLogger("dovetail.worker")


class StopFeed:
    """Orders to stop, as every worker hears them."""

    def __init__(self, blocking: Pipe) -> None:
        self._feed = Feed(blocking, STOPS)

    async def open(self) -> None:
        """Listen from now on; else from the first call of `next` on."""
        await self._feed.open()

    async def next(self) -> list[Stop]:
        """The orders since the last call; waits a second for some."""
        found: list[Stop] = []
        for given in await self._feed.next():
            try:
                token = Token.parse(given[b"token"].decode())
                order = Stop(given[b"run_id"].decode(), given[b"node_id"].decode(), token)
            except (LookupError, ValueError) as problem:
                log.warning("no order to stop: %s", problem)
            else:
                found.append(order)
        return found


class Feed:
    """A stream that everybody hears from the moment on when they begin to listen."""

    def __init__(self, blocking: Pipe, stream: str) -> None:
        self._blocking = blocking
        self._stream = stream
        self._after = ""

    async def open(self) -> None:
        """Listen from now on."""
        # Not "$", which would mean another moment at each call.
        newest = await self._blocking.call("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        self._after = newest[0][0].decode() if newest else "0-0"

    async def next(self) -> list[dict[bytes, bytes]]:
        """What was told since the last call; waits a second for something."""
        if not self._after:
            await self.open()
        command = ("XREAD", "BLOCK", BLOCK_MILLISECONDS, "STREAMS", self._stream, self._after)
        reply = await self._blocking.call(*command)
        found = []
        for _, entries in reply or ():
            for number, fields in entries:
                self._after = number.decode()
                found.append(dict(zip(fields[::2], fields[1::2], strict=True)))
        return found
