"""Who waits for the end of a run hears of it, instead of asking again and again.

One connection listens for all of them. It is a hint, like every message: who hears nothing for a
while looks by itself. What it must not know: what became of a run.
"""

from __future__ import annotations

import asyncio
import contextlib

from dovetail.core.errors import StoreError
from dovetail.pipe import Pipe
from dovetail.transports.feeds import Feed
from dovetail.transports.streams import ENDS

LOOK_SECONDS = 1.0


class EndFeed:
    """Use `async with`; it listens once somebody waits."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EndFeed:
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
                async with Pipe(self._url) as pipe:
                    feed = Feed(pipe, ENDS)
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
