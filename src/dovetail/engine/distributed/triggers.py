"""Triggers runs where several processes create them: a run is accepted first, then created.

A process may die between the two. The accepted run is then created by a caller that repeats its
request, or by an orchestrator that finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from dovetail.core.errors import DovetailError, NotFound, StoreError
from dovetail.core.transitions import Decision, Retry, Submit, Transition
from dovetail.engine.clock import Clock
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.ports import Key, KeyUsed

MAKING_SECONDS, MAKING_SECONDS_EACH = 5.0, 0.01
"""A caller waits so long for Redis, once the run is accepted in PostgreSQL."""
AGE_SECONDS = 10.0
"""A run that was accepted so long ago and is not created has lost its process."""


def making_seconds(runs: int) -> float:
    return MAKING_SECONDS + runs * MAKING_SECONDS_EACH


class PendingRun(NamedTuple):
    """An accepted run or batch, with its runs that are not created yet."""

    name: Any
    """What its store calls it."""
    submits: list[Submit]
    created_at: float
    there: Sequence[str] = ()
    """Its runs that are created: their process may have died before it dispatched them."""


class AcceptedRuns(Protocol):
    """Keeps what was asked for."""

    outlives: bool
    """What is accepted is safe, whatever becomes of the store that runs are made in."""

    async def accept(self, submit: Submit, now: float) -> Submit:
        """Returns what is to be made: under another id, if it was accepted before and its
        maker died. Raises `KeyUsed`."""
        ...

    async def accept_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> list[Submit]:
        """All of them, or none. Raises `KeyUsed`."""
        ...

    async def made(self, submit: Submit) -> None: ...
    async def batch_made(self, batch_id: str) -> None: ...

    async def unmade(self, accepted_before: float) -> list[PendingRun]:
        """What was accepted and whose maker died; `settle` when its runs are there."""
        ...

    async def known(self, key: Key) -> KeyUsed | None:
        """What was accepted under a key, without accepting anything."""
        ...

    async def unmade_under(self, key: Key, made: str) -> PendingRun | None:
        """What of this run or batch, accepted under that key whenever it was, is not there."""
        ...

    async def settle(self, unmade: PendingRun) -> None: ...


class TriggerService:
    """Triggers runs, and leaves their nodes to workers."""

    def __init__(
        self,
        acceptance: AcceptedRuns,
        orchestrator: DistributedOrchestrator,
        clock: Clock,
        on_delay: Callable[[DovetailError], None],
        refused: StoreError | None = None,
    ) -> None:
        """`on_delay` gets the reason when an accepted run cannot be created at once. `refused` is
        why this process must not trigger runs: no service would receive its messages."""
        self._acceptance = acceptance
        self._orchestrator = orchestrator
        self._clock = clock
        self._on_delay = on_delay
        self._refused = refused

    async def submit(self, submit: Submit) -> None:
        self._check()
        now = self._clock()
        accepted = await self._acceptance.accept(submit, now)
        if await self._made_in_time([accepted], now):
            await self._acceptance.made(accepted)
        if accepted.run_id != submit.run_id:
            raise KeyUsed(accepted.run_id, same_body=True)

    async def submit_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> None:
        self._check()
        try:
            accepted = await self._acceptance.accept_batch(batch_id, submits, key, now)
        except KeyUsed as known:
            await self._recover(key, known)
            raise
        if await self._made_in_time(accepted, now):
            await self._acceptance.batch_made(batch_id)

    async def made_under(self, key: Key) -> KeyUsed | None:
        known = await self._acceptance.known(key)
        if known is not None:
            await self._recover(key, known)
        return known

    async def apply(self, moves: Sequence[Transition], *, durable: bool = False) -> list[Decision]:
        if any(isinstance(move, Retry) for move in moves):
            self._check()
        return await self._orchestrator.apply(moves, durable=durable)

    def _check(self) -> None:
        if self._refused is not None:
            raise self._refused

    async def dispatch_effects(self, decisions: Iterable[Decision]) -> None:
        await self._orchestrator.dispatch_effects(decisions)

    def now(self) -> float:
        return self._clock()

    async def reconcile_run(self, run_id: str) -> None:
        """Re-derive the outstanding work of a run."""
        await self._orchestrator.reconcile_run(run_id)

    async def announce_end(self, run_id: str) -> None:
        """Announce the end of a run that was ended by force."""
        await self._orchestrator.announce_end(run_id)

    async def recover_accepted(self) -> None:
        """A duty of orchestrators: create runs whose process died after it accepted them."""
        for left in await self._acceptance.unmade(self._clock() - AGE_SECONDS):
            await self._make(left)

    async def _recover(self, key: Key | None, known: KeyUsed) -> None:
        """A caller that repeats its request creates the runs that its first one did not."""
        if key is not None and known.same_body:
            left = await self._acceptance.unmade_under(key, known.made)
            if left is not None:
                await self._make(left)

    async def _make(self, left: PendingRun) -> None:
        await self._orchestrator.submit_many(left.submits, left.created_at)
        await self._acceptance.settle(left)

    async def _made_in_time(self, submits: Sequence[Submit], now: float) -> bool:
        if not self._acceptance.outlives:
            await self._orchestrator.submit_many(submits, now)
            return True
        patience = making_seconds(len(submits))
        try:
            async with asyncio.timeout(patience):
                await self._orchestrator.submit_many(submits, now)
        except (StoreError, NotFound) as error:  # it was lost again, with all of the store
            self._on_delay(error)
        except TimeoutError:
            self._on_delay(StoreError(f"not made within {patience:g} s"))
        else:
            return True
        return False
