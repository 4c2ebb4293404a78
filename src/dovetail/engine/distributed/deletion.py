"""Deletes finished runs from Redis and from the archive.

The hot state decides: it is deleted by one script, if it is finished and the archive has all of it,
and a mark in its place keeps a restore from putting it back. Then the archive deletes the run, and
remembers that for a while, so that an archiver that has read the run before does not write it
again. A crash in between leaves an archived run, which can be read and deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from math import inf

from dovetail.core.errors import StoreError
from dovetail.core.text import counted
from dovetail.engine.distributed.archiver import ArchiveHead, ArchiveWriter, in_spite_of_outages

BATCH_SIZE = 100
"""Runs that are deleted in one transaction."""
MAX_TRIES = 5
"""For runs of which the archive lacks an event, because it came at this very moment."""
RETENTION_PAUSE_SECONDS = 30.0
REMEMBERED_SECONDS = 86400.0
"""How long the archive remembers a deleted run: no archiver holds a snapshot for so long."""

log = logging.getLogger("dovetail.archive")


class RunDeleter:
    """Any number of them may work side by side, in API servers and orchestrators."""

    def __init__(self, writer: ArchiveWriter) -> None:
        self._writer = writer
        self._hot = writer.hot
        self._archive = writer.archive
        self._clock = writer.clock

    async def delete(self, run_ids: Sequence[str], *, ended_before: float = inf) -> list[str]:
        """As `DurableStore`. Raises `ArchiveDown` while the archive is away."""
        deleted: list[str] = []
        for first in range(0, len(run_ids), BATCH_SIZE):
            deleted += await self._delete_some(run_ids[first : first + BATCH_SIZE], ended_before)
        return deleted

    async def _delete_some(self, run_ids: Sequence[str], ended_before: float) -> list[str]:
        deleted: list[str] = []
        for _ in range(MAX_TRIES):
            # First: what leaves Redis is complete in the archive, whatever happens next.
            await self._writer.bring(run_ids)
            heads = await self._archive.heads(run_ids)
            ended = await self._archive.ended_by(run_ids, ended_before)
            finished = {
                run_id: head
                for run_id, head in heads.items()
                if head.kept.finished and run_id in ended
            }
            answers = await asyncio.gather(*(self._hot.delete(*one) for one in finished.items()))
            found = dict(zip(finished, answers, strict=True))
            gone = {run_id: finished[run_id] for run_id, answer in found.items() if answer == 1}
            deleted += await self._delete_archived(gone, ended_before)
            run_ids = [run_id for run_id, answer in found.items() if answer < 0]
            if not run_ids:
                return deleted
        raise StoreError(f"run {run_ids[0]} changes while it is deleted; try again")

    async def _delete_archived(
        self, heads: dict[str, ArchiveHead], ended_before: float
    ) -> list[str]:
        if not heads:
            return []
        epochs = {run_id: head.epoch for run_id, head in heads.items()}
        deleted: list[str] = []
        try:
            deleted = await self._archive.delete(epochs, self._clock(), ended_before)
        finally:
            # If the archive went away, the rest is what it was: archived, and out of Redis.
            if kept := [run_id for run_id in heads if run_id not in deleted]:
                with suppress(StoreError):
                    await self._hot.unmark(kept)
        return deleted


class ArchiveRetention:
    """Deletes what has been finished for longer than the archive keeps runs. A duty of every
    orchestrator."""

    def __init__(self, deleter: RunDeleter, writer: ArchiveWriter, seconds: float | None) -> None:
        """Without `seconds` the archive keeps all runs."""
        self._deleter = deleter
        self._archive = writer.archive
        self._clock = writer.clock
        self._seconds = seconds

    async def run(self) -> None:
        """At once, then twice a minute, for ever."""
        await in_spite_of_outages(self.sweep, RETENTION_PAUSE_SECONDS)

    async def sweep(self) -> int:
        """Returns how many runs were deleted."""
        now = self._clock()
        await self._archive.forget_deleted(now - REMEMBERED_SECONDS)
        if self._seconds is None:
            return 0
        before = now - self._seconds
        after: int | None = 0
        deleted = 0
        while after is not None:
            run_ids, after = await self._archive.ended(before, after, BATCH_SIZE)
            deleted += len(await self._deleter.delete(run_ids, ended_before=before))
        if deleted:
            log.info("retention: deleted %s from the archive", counted(deleted, "run"))
        return deleted
