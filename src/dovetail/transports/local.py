"""Published nodes inside one process: a queue, first come, first served."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from dovetail.core.transitions import Dispatch, Stop, Transition


class NoTransport:
    """For a process without a worker: the process that owns a run publishes its nodes."""

    async def publish(self, dispatches: Sequence[Dispatch]) -> Sequence[Transition]:
        return ()

    async def stop(self, order: Stop) -> None:
        pass


class LocalTransport:
    def __init__(self, on_stop: Callable[[Stop], None]) -> None:
        """`on_stop` stops a task that a worker runs."""
        self._on_stop = on_stop
        self._waiting: deque[Dispatch] = deque()
        self._takers: list[asyncio.Future[None]] = []

    async def publish(self, dispatches: Sequence[Dispatch]) -> Sequence[Transition]:
        self._waiting.extend(dispatches)
        if self._takers:
            for taker in self._takers:
                if not taker.done():
                    taker.set_result(None)
            self._takers.clear()
        return ()

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
        return Counter(run.graph.nodes[index].handler for run, index, *_ in self._waiting)

    async def news(self) -> None:
        """Return when there is a published node."""
        while not self._waiting:
            taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            await taker

    async def stop(self, order: Stop) -> None:
        self._on_stop(order)
