"""Broadcasts: streams that every process reads from the moment it begins to listen.

Orders to stop, and the ends of runs for callers that wait for them. One connection listens for all
callers of a process. A broadcast is a hint: a caller that receives none for a while reads the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from dovetail.core.errors import StoreError
from dovetail.core.events import Token
from dovetail.core.transitions import Stop
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.transports.streams.sender import BLOCK_MILLISECONDS, ENDS, STOPS

log = logging.getLogger("dovetail.worker")


class StopBroadcast:
    """Orders to stop, as every worker hears them."""

    def __init__(self, blocking: PipelinedRedis) -> None:
        self._feed = Broadcast(blocking, STOPS)

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


class Broadcast:
    """A stream that every listener reads, from the moment it begins to listen."""

    def __init__(self, blocking: PipelinedRedis, stream: str) -> None:
        self._blocking = blocking
        self._stream = stream
        self._after = ""

    async def open(self) -> None:
        """Listen from now on."""
        # Not "$", which would mean another moment at each call.
        newest = await self._blocking.call("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        self._after = newest[0][0].decode() if newest else "0-0"

    async def next(self) -> list[dict[bytes, bytes]]:
        """The messages since the last call; waits a second for one."""
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


LOOK_SECONDS = 1.0


class RunFinishedListener:
    """Use `async with`; it listens once a caller waits."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RunFinishedListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def next(self, run_id: str) -> None:
        """Return when it is worth to look whether this run has ended: it has, or some time has
        passed."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, set()).add(told)
        try:
            await asyncio.wait([told], timeout=LOOK_SECONDS)
        finally:
            waiting = self._waiting.get(run_id)
            if waiting is not None:
                waiting.discard(told)
                if not waiting:
                    del self._waiting[run_id]

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(StoreError):
                async with PipelinedRedis(self._url) as pipe:
                    feed = Broadcast(pipe, ENDS)
                    await feed.open()
                    self._wake(list(self._waiting))  # it may have ended before we listened
                    while True:
                        for told in await feed.next():
                            self._wake(told[b"run_ids"].decode().split(" "))
            await asyncio.sleep(LOOK_SECONDS)

    def _wake(self, run_ids: list[str]) -> None:
        for run_id in run_ids:
            for told in self._waiting.pop(run_id, ()):
                if not told.done():
                    told.set_result(None)
