"""Published nodes inside one process: a queue, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from dovetail.core.transitions import Dispatch, Stop


class LocalTransport:
    on_stop: Callable[[Stop], None]
    """Set by the wiring: the worker's, which needs the queue before it can be made."""

    def __init__(self) -> None:
        self._waiting: deque[Dispatch] = deque()
        self._news = asyncio.Event()

    async def publish(self, dispatches: Sequence[Dispatch]) -> None:
        self._waiting.extend(dispatches)
        self._news.set()

    async def next(self, limit: int) -> list[Dispatch]:
        """Wait for published nodes; give at most `limit`, each of them once."""
        waiting = self._waiting
        while not waiting:
            self._news.clear()
            await self._news.wait()
        if len(waiting) > limit:
            return [waiting.popleft() for _ in range(limit)]
        batch = list(waiting)
        waiting.clear()
        return batch

    async def stop(self, order: Stop) -> None:
        self.on_stop(order)
