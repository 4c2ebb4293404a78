"""A node that killed every worker it was given to is told of where refused messages are.

Only whoever decided that it is given up tells of it, so it is told once; one who dies before that
leaves it to the run, which says so in any case. What it must not know: where it is told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dovetail.core.errors import NotFound
from dovetail.core.transitions import Decision
from dovetail.core.words import died_during
from dovetail.engine.ports import Store
from dovetail.engine.shared_ports import Start

Bury = Callable[[Start, str, str], Awaitable[None]]
"""Takes a start that nobody will be given any more, its handler, and why."""


class PoisonWatch:
    def __init__(self, store: Store, bury: Bury, *, max_crashes: int) -> None:
        self._store = store
        self._bury = bury
        self._max_crashes = max_crashes

    async def reaped(self, start: Start, decision: Decision) -> None:
        lost = decision.events[0].data or {}
        if lost["crashes"] < self._max_crashes:
            return  # it is tried again, or may start but once: that proves nothing
        try:
            graph = (await self._store.load(start[0], outputs=False)).graph
        except NotFound:
            return
        reason = f"poison: {died_during(lost['crashes'], decision.events[0].attempt or 0)}"
        await self._bury(start, graph.nodes[graph.index[start[1]]].handler, reason)
