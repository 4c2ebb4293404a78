"""Nodes parked by a shared rate limit. When nodes ahead of them are cancelled, or the limit is
raised, they are rescheduled earlier, in the same order.

Nothing here takes a token, so no mistake starts a node too early. Any number of processes may do it
at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Protocol

from dovetail.core.events import Token
from dovetail.core.run import Phase
from dovetail.core.transitions import Park, Transition, Wake
from dovetail.engine.clock import Clock
from dovetail.engine.limits import TokenBucket
from dovetail.engine.ports import ParkedIndex, ParkedNode
from dovetail.engine.supervisor import bisect_failures, describe_error

log = logging.getLogger("dovetail.orchestrator")
LOOK_SECONDS = 1.0
MAX_TIME_SHARE = 0.1
"""A look at a line of a hundred thousand takes its time: so much of ours, and no more."""
LATE_SECONDS, LATE_SHARE = 1.0, 0.1
"""A node is rescheduled if it would start so many seconds too late, and by such a share of its
wait: it is an event in the log of its run."""
BATCH_SIZE = 500
IN_LINE = (Phase.PARKED, Phase.PUBLISHED)
"""A node that was woken and has not asked for its token yet comes before the others."""


class StartPhases(Protocol):
    async def phases(self, starts: Sequence[tuple[str, str, Token]]) -> list[Phase | None]:
        """What these starts wait for; None of one that is no longer queued."""
        ...


class Buckets(Protocol):
    async def look(self, tag: str, now: float) -> TokenBucket: ...
    async def pull_back(self, tag: str, until: float, now: float) -> None: ...


class ParkedRescheduler:
    def __init__(
        self,
        parked: ParkedIndex,
        store: StartPhases,
        buckets: Buckets,
        clock: Clock,
        apply: Callable[[Sequence[Transition]], Awaitable[object]],
    ) -> None:
        self._parked = parked
        self._store = store
        self._buckets = buckets
        self._clock = clock
        self._apply = apply

    async def run(self) -> None:
        """Every second, for ever."""
        while True:
            began = monotonic()
            await self.look()
            pause = max(LOOK_SECONDS, (monotonic() - began) / MAX_TIME_SHARE)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311

    async def look(self) -> None:
        """Reschedule the nodes whose time is later than their place in the queue needs."""
        waits = await self._parked.parked(self._clock(), LATE_SECONDS)
        if not waits:
            return
        phases = await bisect_failures(
            self._store.phases, [wait.wake for wait in waits], _taken_for_gone
        )
        lines: dict[str, list[tuple[ParkedNode, Phase | None]]] = {}
        for wait, phase in zip(waits, phases, strict=True):
            lines.setdefault(wait.tag, []).append((wait, phase))
        for tag, line in lines.items():
            await self._move_up(tag, [one for one in line if one[1] in IN_LINE])
        gone = [wait for wait, phase in zip(waits, phases, strict=True) if phase not in IN_LINE]
        for at in range(
            0, len(gone), BATCH_SIZE
        ):  # last: if this process dies, another one finds them again
            await self._parked.remove_parked(gone[at : at + BATCH_SIZE])

    async def _move_up(self, tag: str, line: Sequence[tuple[ParkedNode, Phase | None]]) -> None:
        now = self._clock()
        bucket = await self._buckets.look(tag, now)
        booked = bucket.booked
        times = bucket.rebook(len(line), now)
        if booked > bucket.booked + LATE_SECONDS:
            await self._buckets.pull_back(tag, bucket.booked, now)
        late = [
            wait._replace(at=time)
            for (wait, phase), time in zip(line, times, strict=True)
            if phase is Phase.PARKED
            and wait.at - time > max(LATE_SECONDS, LATE_SHARE * (wait.at - now))
        ]
        for first in range(0, len(late), BATCH_SIZE):
            some = late[first : first + BATCH_SIZE]
            await self._parked.add_parked(some)
            await self._apply([Park(*wait.wake, wait.at) for wait in some])


async def _taken_for_gone(wake: Wake, problem: Exception) -> Sequence[Phase | None]:
    log.error("run %s, node %s cannot be rescheduled: %s", *wake[:2], describe_error(problem))
    return [None]
