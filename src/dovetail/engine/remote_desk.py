"""Where a worker gets its work if the orchestrators are other processes.

Messages are hints: a node is started only after its claim was granted, and its lease is renewed
while it runs. A message is settled once the run's own state has taken it over, so whatever dies
in between, somebody else reads it again or the lease runs out. What it must not know: any rule,
or how a handler is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from dovetail.core.transitions import Claim, Park, Progress, Renew, Stop, Transition
from dovetail.engine.clock import Clock
from dovetail.engine.ports import Limits, Result, Store, Task
from dovetail.engine.shared import Agenda, Start


class Inbox(Protocol):
    """The workers' end of a transport between processes."""

    async def tasks(self, limit: int) -> list[tuple[Any, Task]]:
        """Wait a moment for work; each task with what settles its message."""
        ...

    async def settle(self, messages: Sequence[Any]) -> None: ...
    async def send(self, results: Sequence[Result]) -> None: ...


class RemoteDesk:
    def __init__(
        self,
        inbox: Inbox,
        store: Store,
        agenda: Agenda,
        limits: Limits,
        clock: Clock,
        apply: Callable[[Sequence[Transition]], Awaitable[object]],
        *,
        worker_id: str,
        lease_seconds: float,
        result_seconds: float,
    ) -> None:
        """`apply` follows what is decided; `result_seconds` is how long a result may lie about."""
        self._inbox = inbox
        self._store = store
        self._agenda = agenda
        self._limits = limits
        self._clock = clock
        self._apply = apply
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        self._result_seconds = result_seconds

    async def take(self, limit: int) -> list[Task]:
        while True:
            found = await self._inbox.tasks(limit)
            if not found:
                continue
            admitted: list[Task] = []
            parked: list[Transition] = []
            for _, task in found:
                at = await self._admit(task)
                if at is None:
                    admitted.append(task)
                else:
                    parked.append(Park(task.run_id, task.node_id, task.token, at))
            if parked:
                await self._apply(parked)
            granted = await self._claim(admitted)
            await self._inbox.settle([message for message, _ in found])
            if granted:
                return granted

    async def _admit(self, task: Task) -> float | None:
        """None if the node may start now, else when to come back."""
        if task.resource_tag is None:
            return None
        now = self._clock()
        if await self._limits.start(task.resource_tag, now):
            return None
        return await self._limits.book(task.resource_tag, now)

    async def _claim(self, tasks: Sequence[Task]) -> list[Task]:
        if not tasks:
            return []
        now = self._clock()
        until = now + self._lease_seconds
        # The index first: a claim that nobody knows the lease of would never be reaped.
        await self._agenda.lease(map(_start, tasks), until)
        claims = [Claim(*_start(task), self._worker_id, until) for task in tasks]
        decisions = await self._store.apply(claims, now, durable=True)
        return [task for task, mine in zip(tasks, decisions, strict=True) if mine.changed]

    async def report(self, told: Sequence[Result | Progress]) -> None:
        progress = [one for one in told if isinstance(one, Progress)]
        results = [one for one in told if not isinstance(one, Progress)]
        if progress:
            await self._store.apply(progress, self._clock())
        if results:
            # A finished node shall not run again because its result has to wait.
            until = self._clock() + self._lease_seconds + self._result_seconds
            await self._renew([(r.run_id, r.node, r.token) for r in results], until)
            await self._inbox.send(results)

    async def slow(self, tag: str, until: float) -> None:
        await self._limits.slow(tag, until)

    async def renew(self, tasks: Sequence[Task]) -> list[Stop]:
        """Say that these still run; what must stop, because it is ours no longer."""
        starts = [_start(task) for task in tasks]
        kept = await self._renew(starts, self._clock() + self._lease_seconds)
        return [Stop(*start) for start, mine in zip(starts, kept, strict=True) if not mine]

    async def _renew(self, starts: Sequence[Start], until: float) -> list[bool]:
        if not starts:
            return []
        moves = [Renew(*start, until) for start in starts]
        decisions = await self._store.apply(moves, self._clock(), durable=True)
        kept = [bool(decision.changed) for decision in decisions]
        await self._agenda.lease(
            (start for start, mine in zip(starts, kept, strict=True) if mine), until
        )
        return kept


def _start(task: Task) -> Start:
    return task.run_id, task.node_id, task.token


async def keep_leases(
    desk: RemoteDesk,
    holding: Callable[[], Sequence[Task]],
    stop: Callable[[Stop], None],
    lease_seconds: float,
) -> None:
    """Renew every third of a lease, for ever; stop what was taken from us."""
    while True:
        await asyncio.sleep(lease_seconds / 3)
        for order in await desk.renew(holding()):
            stop(order)
