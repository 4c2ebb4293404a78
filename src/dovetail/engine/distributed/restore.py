"""Puts runs that Redis has lost back from the archive.

An unfinished run that Redis does not know is restored as it was archived, or created for the first
time if its process died after it was accepted. Any number of processes may do it at once: a run
that Redis has is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from dovetail.core.errors import BrokenRun, NotFound, StoreError
from dovetail.core.text import counted
from dovetail.core.transitions import Submit
from dovetail.engine.clock import Clock
from dovetail.engine.distributed.archiver import (
    ArchiveEntry,
    ArchiveQueue,
    HotRuns,
    RunSnapshot,
    in_spite_of_outages,
)
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.ports import Rates
from dovetail.engine.supervisor import bisect_failures, describe_error

RESTORE_SECONDS = 60.0
PAGE = 1000
MAX_CONCURRENT = 8

log = logging.getLogger("dovetail.archive")

KeptRates = Callable[[], Awaitable[dict[str, tuple[float, int]]]]


class RestoreSource(Protocol):
    """What is asked of an archive here. Raises `ArchiveDown` while it is away."""

    async def read(self, run_id: str) -> RunSnapshot | None:
        """Everything there is of a run; no status in `meta` if it was never made."""
        ...

    def submission(self, snapshot: RunSnapshot) -> Submit:
        """What was asked for, of a run that was read."""
        ...

    async def unfinished(
        self, created_before: float, limit: int = ..., after: str | None = None
    ) -> list[str]: ...


class Restorer:
    def __init__(
        self,
        hot: HotRuns,
        hints: ArchiveQueue,
        archive: RestoreSource,
        orchestrator: DistributedOrchestrator,
        clock: Clock,
        *,
        lease_seconds: float,
        recovery_timeout: float,
        limits: KeptRates | None = None,
        shared_limits: Rates | None = None,
    ) -> None:
        """`limits` are the rates that are kept for good, `shared_limits` those that hold."""
        self._hot = hot
        self._hints = hints
        self._archive = archive
        self._orchestrator = orchestrator
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._recovery_timeout = recovery_timeout
        self._limits = limits
        self._shared_limits = shared_limits

    async def run(self) -> None:
        """At once, then every minute, for ever."""
        await in_spite_of_outages(self.restore, RESTORE_SECONDS)

    async def restore_after_loss(self) -> None:
        """Redis has just come back, perhaps without its last writes. Restore runs that are old
        enough now, and later those that were young at that moment."""
        for pause in (0.0, self._recovery_timeout + 1.0):
            await asyncio.sleep(pause)
            with contextlib.suppress(StoreError):  # it is tried again every minute
                await self.restore()

    async def restore(self) -> int:
        """Put back what is lost; how many runs that were. Younger ones may still be made."""
        await self.restore_limits()
        before = self._clock() - self._recovery_timeout
        after, restored = None, 0
        while page := await self._archive.unfinished(before, PAGE, after):
            restored += await self.restore_lost(page)
            after = page[-1]
        if restored:
            log.warning("restored %s that Redis did not know", counted(restored, "run"))
        return restored

    async def restore_lost(self, run_ids: Sequence[str]) -> int:
        """Those of these that are not finished and that Redis does not know, however young."""
        return sum(await bisect_failures(self._restore_some, run_ids, self._leave))

    async def _leave(self, run_id: str, problem: Exception) -> Sequence[int]:
        # A definition that is understood no more, say: it must not be in the way of others.
        log.error("run %s cannot be restored: %s", run_id, describe_error(problem))
        return ()

    async def _restore_some(self, run_ids: Sequence[str]) -> Sequence[int]:
        known = await self._hot.known(run_ids)
        # Of those that have ended there, the archive is behind, or Redis has lost a retry.
        await self._hints.moved(await self._hot.finished([*known]))
        lost = [run_id for run_id in run_ids if run_id not in known]
        restored = 0
        for first in range(0, len(lost), MAX_CONCURRENT):
            some = lost[first : first + MAX_CONCURRENT]
            restored += sum(await asyncio.gather(*map(self._restore, some)))
        return [restored]

    async def bring_back(self, run_id: str) -> None:
        """Make a run that is archived hot again, so that it can be moved. Raises `NotFound`."""
        if await self._hot.known([run_id]):
            return
        snapshot = await self._archive.read(run_id)
        if snapshot is None:
            raise NotFound(f"no run '{run_id}' in Redis or in the archive")
        if not snapshot.finished:
            await self._put_back(snapshot)
            return
        # From now on, not from its end: it is dropped again if it is not retried.
        await self._hints.archived([ArchiveEntry(run_id, self._clock())])
        await self._hot.put_back(_following(snapshot), 0.0)

    async def _restore(self, run_id: str) -> bool:
        snapshot = await self._archive.read(run_id)
        if snapshot is None or snapshot.finished:
            return False  # another process wrote its end meanwhile
        try:
            return await self._put_back(snapshot)
        except (ValueError, LookupError, BrokenRun) as problem:
            await self._leave(run_id, problem)
            return False

    async def _put_back(self, snapshot: RunSnapshot) -> bool:
        """Put it back; returns whether this process did it."""
        run_id = snapshot.run_id
        if "status" not in snapshot.meta:
            accepted_at = float(snapshot.meta["created_at"])
            await self._orchestrator.submit(self._archive.submission(snapshot), accepted_at)
            return True
        now = self._clock()
        # Before the run: if this process dies in between, the sweep finds no run, and no harm.
        await self._orchestrator.timers.moved([run_id], now)
        lease_until = now + self._lease_seconds
        ours = await self._hot.put_back(_following(snapshot), lease_until, now=now)
        await self._orchestrator.reconcile_run(run_id)
        return ours

    async def restore_limits(self) -> None:
        """Those that were set hold; without them every tag has the usual rate."""
        if self._limits is None or self._shared_limits is None:
            return
        kept, holding = await self._limits(), await self._shared_limits.all()
        for tag, (rate, burst) in kept.items():
            if holding.get(tag) != (rate, burst):
                await self._shared_limits.set(tag, rate, burst)


def _following(snapshot: RunSnapshot) -> RunSnapshot:
    """Under the next generation: a process that still writes the one before does no harm."""
    return replace(snapshot, generation=snapshot.generation + 1)
