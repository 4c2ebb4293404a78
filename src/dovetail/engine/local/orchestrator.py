"""Applies transitions and dispatches their effects, inside one process.

It holds no state but timers: everything else can be read from the store again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count

from dovetail.core.transitions import Decision, Dispatch, Submit, Transition, Wake
from dovetail.engine.clock import Clock
from dovetail.engine.ports import Store, Transport


class LocalOrchestrator:
    def __init__(
        self,
        store: Store,
        transport: Transport,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._transport = transport
        self._clock = clock
        self._on_crash = on_crash
        self._timers: list[tuple[float, int, Wake]] = []
        self._order = count()
        self._alarm: asyncio.TimerHandle | None = None
        self._waking: asyncio.Task[None] | None = None
        self._dispatching: set[asyncio.Task[None]] = set()

    async def submit(self, submit: Submit) -> None:
        """Create the run; returns when it is durable."""
        decision = await self._store.create(submit, self._clock())
        if decision.dispatch and (rest := await self._transport.publish(decision.dispatch)):
            await self.apply(rest)

    async def apply(self, moves: Sequence[Transition], *, durable: bool = False) -> list[Decision]:
        """Apply these transitions and dispatch their effects."""
        decisions = await self._store.apply(moves, self._clock(), durable=durable)
        if len(decisions) == 1 and not (one := decisions[0]).wake and not one.stop:
            # As `dispatch_effects`, without the call: this is every node of a chain.
            if one.dispatch and (rest := await self._transport.publish(one.dispatch)):
                await self.apply(rest)
        else:
            await self.dispatch_effects(decisions)
        return decisions

    async def dispatch_effects(self, decisions: Iterable[Decision]) -> None:
        """Dispatch the effects of these decisions."""
        dispatches: list[Dispatch] = []
        for decision in decisions:
            if decision.dispatch:
                dispatches += decision.dispatch
            if decision.wake:
                self._set_timers(decision.wake)
            if decision.stop:
                for stop in decision.stop:
                    await self._transport.stop(stop)
        if dispatches and (rest := await self._transport.publish(dispatches)):
            await self.apply(rest)

    def dispatch_effects_soon(self, orders: Decision) -> None:
        """The same, from a plain function: another process stepped a run that this one owns."""
        following = asyncio.create_task(self.dispatch_effects([orders]))
        self._dispatching.add(following)
        following.add_done_callback(self._dispatched)

    def _dispatched(self, following: asyncio.Task[None]) -> None:
        self._dispatching.discard(following)
        self._woken(following)

    async def wake_due(self) -> None:
        """Wake every node whose time has come."""
        now = self._clock()
        due = []
        while self._timers and self._timers[0][0] <= now:
            due.append(heappop(self._timers)[2])
        if due:
            await self.apply(due)
        self._arm()

    async def close(self) -> None:
        """Cancel all timers."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._waking is not None:
            self._waking.cancel()
        for following in self._dispatching:
            following.cancel()

    def _set_timers(self, wakes: Iterable[tuple[float, Wake]]) -> None:
        for at, wake in wakes:
            heappush(self._timers, (at, next(self._order), wake))
        self._arm()

    def _arm(self) -> None:
        """One alarm, for the earliest timer."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._timers:
            wait = max(0.0, self._timers[0][0] - self._clock())
            self._alarm = asyncio.get_running_loop().call_later(wait, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._waking = asyncio.create_task(self.wake_due())
        self._waking.add_done_callback(self._woken)

    def _woken(self, waking: asyncio.Task[None]) -> None:
        if not waking.cancelled() and (error := waking.exception()):
            self._on_crash(error)
