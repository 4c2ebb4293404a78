"""The orchestrator of a set-up with many processes: what it must remember, all of them can see.

Any number of them run side by side, all duties in each, and none knows of the others. Whatever
one does twice, or two do at once, the rules refuse the second time. What it must not know: how a
handler runs, or any rule.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from dovetail.core.errors import NotFound
from dovetail.core.events import Token
from dovetail.core.run import Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import (
    Decision,
    Dispatch,
    Reap,
    Submit,
    Transition,
    Wake,
)
from dovetail.engine.clock import Clock
from dovetail.engine.ports import Result, Store, Transport

WAKE_SECONDS = 0.1
REAP_SECONDS = 1.0
SWEEP_SECONDS = 2.0
AT_ONCE = 500
BACKLOG_SECONDS = 5.0
"""Beyond its lease a run may be silent for so long before somebody looks whether it is stuck."""

Start = tuple[str, str, Token]


class Agenda(Protocol):
    """What is due when, over all runs."""

    async def delay(self, wakes: Iterable[tuple[float, Wake]]) -> None: ...
    async def due(self, now: float, limit: int) -> list[Wake]: ...
    async def woken(self, wakes: Iterable[Wake]) -> None: ...
    async def lease(self, starts: Iterable[Start], until: float) -> None: ...
    async def expired(self, now: float, limit: int) -> list[Start]: ...
    async def released(self, starts: Iterable[Start]) -> None: ...
    async def moved(self, run_ids: Iterable[str], now: float) -> None: ...
    async def idle(self, since: float, limit: int) -> list[str]: ...
    async def ended(self, run_ids: Iterable[str]) -> None: ...


class Notices(Protocol):
    """Who else must know that runs have moved."""

    async def moved(self, run_ids: Sequence[str], turned: Sequence[str]) -> None:
        """These have new events; of `turned` the status is another, or they are new.

        Told before such a run leaves the agenda: if the teller dies, the sweep tells it again.
        """
        ...


class SharedStore(Store, Protocol):
    async def settle_pending(self, run_id: str, now: float) -> Decision:
        """Decide on conditions that somebody left undecided."""
        ...


class SharedOrchestrator:
    """Applies what happened and sends out what follows, with timers that outlive it."""

    def __init__(
        self,
        store: SharedStore,
        transport: Transport,
        agenda: Agenda,
        clock: Clock,
        *,
        lease_seconds: float,
        max_crashes: int,
        notices: Notices | None = None,
    ) -> None:
        self._store = store
        self._transport = transport
        self.agenda = agenda
        self.notices = notices
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._max_crashes = max_crashes

    async def submit(self, submit: Submit) -> None:
        now = self._clock()
        # Before the run: if we die in between, the sweep looks for a run that is not there.
        await self.agenda.moved([submit.run_id], now)
        decision = await self._store.create(submit, now)
        await self._follow([(submit.run_id, decision)])

    async def apply(self, moves: Sequence[Transition], *, durable: bool = False) -> list[Decision]:
        decisions = await self._store.apply(moves, self._clock(), durable=durable)
        runs = [move.run_id for move in moves]
        await self._follow(list(zip(runs, decisions, strict=True)))
        return decisions

    async def follow(self, decisions: Iterable[Decision]) -> None:
        await self._follow([("", decision) for decision in decisions])

    async def _follow(self, decided: Sequence[tuple[str, Decision]]) -> None:
        dispatches: list[Dispatch] = []
        wakes: list[tuple[float, Wake]] = []
        moved: dict[str, None] = {}
        turned: dict[str, None] = {}
        ended: dict[str, None] = {}
        work: list[Awaitable[object]] = []
        for run_id, decision in decided:
            dispatches += decision.dispatch
            wakes += decision.wake
            work += [self._transport.stop(order) for order in decision.stop]
            if run_id and decision:
                (ended if decision.ended else moved)[run_id] = None
                if any(event.node is None for event in decision.events):
                    turned[run_id] = None
        if dispatches:
            work.append(self._transport.publish(dispatches))
        if wakes:
            work.append(self.agenda.delay(wakes))
        if still := [run_id for run_id in moved if run_id not in ended]:
            work.append(self.agenda.moved(still, self._clock()))
        if self.notices is not None and (moved or ended):
            work.append(self.notices.moved([*moved, *ended], [*turned]))
        await asyncio.gather(*work)
        if ended:
            await self.agenda.ended(ended)

    # ── duties ───────────────────────────────────────────────────────────────────────────

    async def take_in(self, results: Sequence[Result], *, again: bool = False) -> None:
        """Results of handlers. `again`: somebody had them before, and may have died over them."""
        decisions = await self.apply(results)
        await self.agenda.released((result.run_id, result.node, result.token) for result in results)
        if again:
            for run_id in {r.run_id for r, d in zip(results, decisions, strict=True) if not d}:
                await self.look_after(run_id)

    async def wake_due(self) -> None:
        due = await self.agenda.due(self._clock(), AT_ONCE)
        if due:
            await self.apply(due)
            await self.agenda.woken(due)

    async def reap(self) -> None:
        """Nodes whose worker was not heard of for longer than its lease."""
        gone = await self.agenda.expired(self._clock(), AT_ONCE)
        if not gone:
            return
        moves = [Reap(*start, self._max_crashes) for start in gone]
        decisions = await self.apply(moves)
        for start, decision in zip(gone, decisions, strict=True):
            if not decision:
                await self._recheck(start)
        await self.agenda.released(
            start for start, decision in zip(gone, decisions, strict=True) if decision
        )

    async def _recheck(self, start: Start) -> None:
        """Nobody to reap: it has ended, or its lease was renewed and only the index is behind."""
        run_id, name, token = start
        try:
            node = (await self._store.load(run_id)).node(name)
        except NotFound:
            await self.agenda.released([start])
            return
        if node.status is NodeStatus.RUNNING and node.token == token and node.lease_until:
            await self.agenda.lease([start], node.lease_until)
        else:
            await self.agenda.released([start])

    async def sweep(self) -> None:
        """Runs that nothing was heard of: is something of theirs lost?"""
        quiet = self._clock() - self._lease_seconds - BACKLOG_SECONDS
        for run_id in await self.agenda.idle(quiet, AT_ONCE):
            await self.look_after(run_id)

    async def look_after(self, run_id: str) -> None:
        """Make everything that is outstanding of a run known again, from the run itself."""
        now = self._clock()
        run = await self._find(run_id)
        if run is not None and self.notices is not None:
            await self.notices.moved([run_id], [run_id])
        if run is None or run.finished:
            await self.agenda.ended([run_id])
            return
        await self.agenda.moved([run_id], now)
        await self._follow([(run_id, await self._store.settle_pending(run_id, now))])
        orders = Decision()
        wakes = []
        for place, (spec, node) in enumerate(zip(run.graph.nodes, run.nodes, strict=True)):
            if node.phase is Phase.PUBLISHED:
                orders.dispatch.append(Dispatch(run, place, node.token))
            elif node.until is not None:
                wakes.append((node.until, Wake(run_id, spec.id, node.token)))
            elif node.status is NodeStatus.RUNNING and node.lease_until is not None:
                await self.agenda.lease([(run_id, spec.id, node.token)], node.lease_until)
        orders.wake = wakes
        await self._follow([("", orders)])

    async def _find(self, run_id: str) -> RunState | None:
        try:
            return await self._store.load(run_id)
        except NotFound:
            return None

    async def run(self) -> None:
        """Every duty but the results, for ever."""
        async with asyncio.TaskGroup() as group:
            for duty, seconds in (
                (self.wake_due, WAKE_SECONDS),
                (self.reap, REAP_SECONDS),
                (self.sweep, SWEEP_SECONDS),
            ):
                group.create_task(_every(seconds, duty))


async def _every(seconds: float, duty: Callable[[], Awaitable[None]]) -> None:
    """Jittered, so that many of them do not come at the same moment."""
    while True:
        await asyncio.sleep(seconds * random.uniform(0.8, 1.2))  # noqa: S311
        await duty()
