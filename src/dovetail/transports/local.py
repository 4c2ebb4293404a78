"""Published nodes inside one process: a queue, first come, first served."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from dovetail.core.transitions import Dispatch, Stop


class NoTransport:
    """Where nobody works: whoever drives a run publishes its nodes itself."""

    async def publish(self, dispatches: Sequence[Dispatch]) -> None:
        pass

    async def stop(self, order: Stop) -> None:
        pass


class LocalTransport:
    on_stop: Callable[[Stop], None]
    """Set by the wiring: the worker's, which needs the queue before it can be made."""

    def __init__(self) -> None:
        self._waiting: deque[Dispatch] = deque()
        self._takers: list[asyncio.Future[None]] = []

    async def publish(self, dispatches: Sequence[Dispatch]) -> None:
        self._waiting.extend(dispatches)
        if self._takers:
            for taker in self._takers:
                if not taker.done():
                    taker.set_result(None)
            self._takers.clear()

    def next(self, limit: int) -> list[Dispatch]:
        """At most `limit` published nodes, each of them given once."""
        waiting = self._waiting
        if len(waiting) > limit:
            return [waiting.popleft() for _ in range(limit)]
        batch = list(waiting)
        waiting.clear()
        return batch

    def depths(self) -> dict[str, int]:
        """How many wait, by handler."""
        return Counter(run.graph.nodes[place].handler for run, place, _ in self._waiting)

    async def news(self) -> None:
        """Return when there is a published node."""
        while not self._waiting:
            taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            await taker

    async def stop(self, order: Stop) -> None:
        self.on_stop(order)
