"""Copies runs from Redis, the hot state, to the archive, drops from Redis what is safe there, and
restores runs that Redis has lost.

It runs in every orchestrator. Any number of archivers side by side do no harm: each writes what it
has read, as late and as often as it likes. No run waits for it. While the archive is away the queue
grows and runs go on.

States, outputs and events are handed over byte for byte. What is decided here is whether hot state
and archive still have the same log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol

from dovetail.core.errors import ArchiveDown, BrokenRun, NotFound, StoreError
from dovetail.core.node_logs import LogChunk
from dovetail.core.text import counted
from dovetail.core.transitions import Submit
from dovetail.engine.clock import Clock
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.supervisor import bisect_failures, describe_error


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run as its keys in Redis have it at one moment, and a piece of its log up to then.

    A node that is in `nodes` is meant whole: without its output here, it has none. One that is
    not has not changed since before `first_seq`; the first of a generation must have them all.
    """

    run_id: str
    generation: int
    """From 1."""
    meta: dict[str, str]
    nodes: dict[int, str]
    """By place, as are the outputs and ends. Items of mapped nodes have places, too."""
    outputs: dict[int, bytes]
    ends: dict[int, bytes]
    first_seq: int
    events: Sequence[bytes]
    """From `first_seq` on, without a gap."""
    result: bytes | None = None
    """JSON, of a run that is finished."""
    content: bytes | None = None
    """The definition. Only needed for a run that was never accepted in the archive."""
    has_logs: bool = False
    """There are lines of handlers that the archive lacks."""
    has_all_items: bool = False
    """Of mapped nodes: an item that is not in `nodes` is not there, or waits. Else, as for a node,
    it has not changed."""

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.events) - 1

    @property
    def epoch(self) -> int:
        return int(self.meta["epoch"])

    @property
    def finished_at(self) -> float | None:
        return float(self.meta["finished_at"]) if self.meta.get("finished_at") else None

    @property
    def finished(self) -> bool:
        return bool(self.meta.get("finished_at"))


class LostLines(NamedTuple):
    """Lines of a run's log that the bound of the log took away before they were archived."""

    seq: int = 0
    """Of the last one."""
    lines: int = 0
    bytes: int = 0


class UnarchivedChunk(NamedTuple):
    """A chunk of a log as Redis has it."""

    seq: int
    chunk: LogChunk
    """Without its lines."""
    lines: int
    content: bytes | None
    """The lines. None if the chunk was dropped: only what it drops is left of it."""

    @property
    def last_seq(self) -> int:
        return self.seq + max(1, self.lines) - 1


class UnarchivedLog(NamedTuple):
    """What the archive lacks of a run's log, or the first part of it."""

    lost: LostLines
    chunks: Sequence[UnarchivedChunk]


class LogHead(NamedTuple):
    """Where the archive's log of a run ends."""

    last_seq: int = 0
    seq: int = 0
    """Of the last chunk that it has."""
    name: str = ""


class ArchiveState(NamedTuple):
    """How far the archive is with a run.

    After a write: of another generation than the snapshot, it refused that one for good, because
    it has a newer one or the run is finished. With an earlier event, it lacks those in between,
    or has others in their place.
    """

    generation: int
    """Zero: accepted, and nothing seen of it since."""
    last_seq: int
    finished: bool


class ArchiveHead(NamedTuple):
    """Where the archive's log of a run ends."""

    kept: ArchiveState
    epoch: int
    event: bytes | None
    """The last one."""


class HotReading(NamedTuple):
    """What the hot state has beyond a head."""

    snapshot: RunSnapshot
    continues: bool
    """The log has the head's last event where the archive has it: nothing was lost between."""


class SyncAction(Enum):
    """What is to be done about a run."""

    LEAVE = auto()
    WRITE = auto()
    """The archive gets what it lacks."""
    RENUMBER = auto()
    """The hot state came back without its end: it goes on under the next generation."""
    REPLACE = auto()
    """The same, of a run that is finished in the archive: what is finished is not lost_retries."""
    RESUME = auto()
    """The hot state has lost the retry of a finished run: the run is restored from the archive."""


def sync_action(head: ArchiveHead | None, reading: HotReading) -> SyncAction:
    """Which of the two is behind, if any."""
    here = reading.snapshot
    if head is None or head.kept.generation == 0:
        return SyncAction.WRITE
    kept = head.kept
    if kept.finished and here.epoch <= head.epoch:
        if not (reading.continues and here.finished):
            return SyncAction.REPLACE
        # What comes after the end, a late result that was refused, only a log may add that goes on
        # from there: the same, or that of a run that was made again as it is archived.
        news = here.generation >= kept.generation and here.events
        return SyncAction.WRITE if news else SyncAction.LEAVE
    if here.finished and here.epoch < head.epoch:
        return SyncAction.RESUME
    if not reading.continues or here.generation < kept.generation:
        return SyncAction.RENUMBER
    return (
        SyncAction.WRITE if here.events or here.generation > kept.generation else SyncAction.LEAVE
    )


BATCH_SIZE = 200
"""Runs that one turn takes."""
READ_BATCH_SIZE = 50
MAX_TRANSACTION_BYTES = 8 << 20
"""About so much goes into one transaction; runs may be large."""
PAUSE_SECONDS = 0.2
"""Between two turns."""
REST_SECONDS = 0.4
"""So long what moved is left alone: a short run is written once, a busy one twice a second."""
RETIRE_SECONDS = 30.0
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.25, 2.0
MAX_HEADS = 10_000
KEEP_SECONDS = 1.0
MAX_RECORD_TRIES = 8
"""Against other archivers that write the same run; within KEEP_SECONDS."""
RECORD_PAUSE_SECONDS = 0.02
ALL_EVENTS = 1 << 53

log = logging.getLogger("dovetail.archive")


class ArchiveClaim(NamedTuple):
    """A run that moved, ours to archive for a while."""

    run_id: str
    since: float
    until: float


class ArchiveEntry(NamedTuple):
    """A finished run that is archived, and since when only readers need it in Redis."""

    run_id: str
    since: float


class ArchiveQueue(Protocol):
    """Which runs the archive may be behind with, and which finished ones it has."""

    async def moved(self, run_ids: Sequence[str], turned: Sequence[str] = ()) -> None: ...
    async def claim(self, limit: int, rested: float = 0.0) -> list[ArchiveClaim]:
        """Some runs that changed so many seconds ago, oldest first, for this archiver alone."""
        ...

    async def acknowledge(self, claims: Sequence[ArchiveClaim]) -> None:
        """Remove these, except runs that moved since they were claimed."""
        ...

    async def give_back(self, claims: Sequence[ArchiveClaim]) -> None: ...
    async def archived(self, entries: Sequence[ArchiveEntry]) -> None: ...
    async def archived_before(self, before: float, limit: int) -> list[ArchiveEntry]: ...
    async def forget(self, entries: Sequence[ArchiveEntry]) -> None: ...


class HotRuns(Protocol):
    """The runs where they live."""

    def lengths(self) -> AsyncIterator[dict[str, int]]:
        """How many events each unfinished run has, some runs at a time."""
        ...

    async def known(self, run_ids: Sequence[str]) -> set[str]: ...
    async def finished(self, run_ids: Sequence[str]) -> list[str]:
        """The ones of these that are there, and have ended."""
        ...

    def read(self, heads: Mapping[str, ArchiveHead | None]) -> AsyncIterator[dict[str, HotReading]]:
        """What each run has beyond a head, or everything; a run that is not there is left out. Some
        runs at a time, so that memory holds only these."""
        ...

    async def definition(self, snapshot: RunSnapshot) -> bytes: ...
    async def logs(self, heads: Mapping[str, LogHead], max_bytes: int) -> dict[str, UnarchivedLog]:
        """What each run has beyond where the archive's log ends, without runs that are not there.

        No more than `max_bytes` together, but at least a chunk of each. What the archive has is
        noted: only that may be dropped."""
        ...

    async def renumber(self, run_id: str, was: int, generation: int) -> None:
        """Its log goes on under another generation, unless another archiver has done that."""
        ...

    async def put_back(
        self,
        snapshot: RunSnapshot,
        lease_until: float,
        *,
        replacing: int | None = None,
        now: float = ...,
    ) -> bool:
        """Make the run as it was, if it is not there, or in place of that generation. What may
        have started since it was archived, and must not twice, counts as started `now`."""
        ...

    async def drop(self, run_id: str, head: ArchiveHead) -> int:
        """Forget a run that the archive has: 1 it is gone, 0 it goes on, -1 it has more."""
        ...

    async def delete(self, run_id: str, head: ArchiveHead) -> int:
        """The same, and for a while nothing puts the run back."""
        ...

    async def unmark(self, run_ids: Sequence[str]) -> None:
        """These may be put back again: the archive has not deleted them."""
        ...


class Archive(Protocol):
    """Where runs are kept for good. Raises `ArchiveDown` while it is away."""

    async def write_many(self, snapshots: Sequence[RunSnapshot]) -> dict[str, ArchiveState]:
        """Keep them all, or none. A run whose `content` it lacks is left out of the reply."""
        ...

    async def kept(self, run_ids: Iterable[str]) -> dict[str, ArchiveState]: ...
    async def heads(self, run_ids: Iterable[str]) -> dict[str, ArchiveHead]: ...
    async def read(self, run_id: str) -> RunSnapshot | None: ...
    async def log_heads(self, run_ids: Iterable[str]) -> dict[str, LogHead]: ...
    async def write_logs(self, logs: Mapping[str, UnarchivedLog]) -> dict[str, LogHead]:
        """Keep these chunks of logs, each once, and remove what they drop; returns where the logs
        end now."""
        ...

    async def delete(
        self, epochs: Mapping[str, int], now: float, ended_before: float = ...
    ) -> list[str]:
        """Delete the runs that are finished in these epochs and ended by then, with everything
        that belongs to them; returns the deleted ones. A late write does not bring one back."""
        ...

    async def ended_by(self, run_ids: Iterable[str], before: float) -> set[str]:
        """The ones of these that ended by then."""
        ...

    async def ended(self, before: float, after: int, limit: int) -> tuple[list[str], int | None]:
        """Some runs that ended by then, oldest first, behind a number; and the number to go on
        with, if there may be more."""
        ...

    async def forget_deleted(self, before: float) -> None:
        """No writer is so late any more that it could bring back what was deleted before then."""
        ...


class Brought(NamedTuple):
    """What became of runs that were to be archived."""

    complete: set[str]
    """The archive has everything of these."""
    lost_retries: list[RunSnapshot]
    """Redis has lost the retry of these: the archive is ahead."""


class ArchiveWriter:
    """Writes what runs have in Redis, and the archive lacks, to the archive."""

    def __init__(self, hot: HotRuns, hints: ArchiveQueue, archive: Archive, clock: Clock) -> None:
        self.hot = hot
        self.hints = hints
        self.archive = archive
        self.clock = clock
        self.heads: OrderedDict[str, ArchiveHead] = OrderedDict()
        """Where the last write of some runs ended. The next write notices if another process has
        written since."""

    async def record(self, run_ids: Sequence[str]) -> bool:
        """Bring the archive up to these runs now; False if it is away or takes too long."""
        left = list(run_ids)
        try:
            async with asyncio.timeout(KEEP_SECONDS):
                for _ in range(MAX_RECORD_TRIES):
                    complete = (await self.bring(left, logs=False)).complete
                    left = [run_id for run_id in left if run_id not in complete]
                    if not left:
                        return True
                    # Another archiver wrote at the same time, maybe less than this one has seen.
                    await asyncio.sleep(random.uniform(0.0, RECORD_PAUSE_SECONDS))  # noqa: S311
        except (StoreError, TimeoutError):
            pass
        return False

    async def bring(self, run_ids: Sequence[str], *, logs: bool = True) -> Brought:
        """Bring the archive up to these runs, without their logs if a caller waits for it."""
        heads = await self._heads_of(run_ids)
        done: set[str] = set()
        lost_retries: list[RunSnapshot] = []
        group: list[RunSnapshot] = []
        for first in range(0, len(run_ids), READ_BATCH_SIZE):
            some = run_ids[first : first + READ_BATCH_SIZE]
            lacking: set[str] = set()
            with_logs: set[str] = set()
            async for snapshots in self._look(some, heads, lost_retries, with_logs):
                lacking |= {snapshot.run_id for snapshot in snapshots}
                group += snapshots
                if sum(map(_weight, group)) >= MAX_TRANSACTION_BYTES:
                    done |= await self._write(group)
                    group = []
            if with_logs and logs:
                # Their rows have to be there, and this is long before the runs may be dropped.
                done |= await self._write(group)
                group = []
                await self._write_logs(with_logs)
            done |= {run_id for run_id in some if run_id not in lacking}
        return Brought(done | await self._write(group), lost_retries)

    async def _write_logs(self, run_ids: Iterable[str]) -> None:
        """Write what the archive lacks of the logs of these runs, part by part."""
        heads = await self.archive.log_heads(run_ids)
        while heads:
            parts = await self.hot.logs(heads, MAX_TRANSACTION_BYTES)
            parts = {run_id: part for run_id, part in parts.items() if part.chunks}
            try:
                heads = await self.archive.write_logs(parts) if parts else {}
            except ArchiveDown:
                raise
            except StoreError as error:  # a log is never in the way of a run
                log.error("logs of %s cannot be archived: %s", ", ".join(parts), error)
                return

    async def _heads_of(self, run_ids: Sequence[str]) -> dict[str, ArchiveHead]:
        found = {one: self.heads[one] for one in run_ids if one in self.heads}
        if unknown := [one for one in run_ids if one not in found]:
            found |= await self.archive.heads(unknown)
        return found

    async def _look(
        self,
        run_ids: Sequence[str],
        heads: Mapping[str, ArchiveHead],
        lost_retries: list[RunSnapshot],
        with_logs: set[str],
    ) -> AsyncIterator[list[RunSnapshot]]:
        """What the archive lacks of these runs, some at a time. Runs whose retry Redis has lost are
        added to `lost_retries`, runs with lines of handlers that it lacks to `with_logs`."""
        remembered = {run_id for run_id in run_ids if self.heads.pop(run_id, None) is not None}
        unsure: list[str] = []
        async for readings in self.hot.read({run_id: heads.get(run_id) for run_id in run_ids}):
            lacking: list[RunSnapshot] = []
            complete: list[RunSnapshot] = []
            for run_id, reading in readings.items():
                head = heads.get(run_id)
                if reading.snapshot.has_logs:
                    with_logs.add(run_id)
                match sync_action(head, reading):
                    case SyncAction.LEAVE:
                        complete.append(reading.snapshot)
                        if head is not None and not head.kept.finished:
                            self._remember(run_id, head)
                    case SyncAction.WRITE:
                        lacking.append(reading.snapshot)
                    case _ if run_id in remembered:
                        unsure.append(run_id)  # another archiver may have repaired it since
                    case SyncAction.REPLACE:
                        await self._replace(reading.snapshot)
                    case SyncAction.RESUME:
                        lost_retries.append(reading.snapshot)
                    case SyncAction.RENUMBER:
                        assert head is not None  # noqa: S101
                        lacking += await self._renumber(reading.snapshot, head)
            await self._let_go(complete)
            yield lacking
        if unsure:
            known = await self.archive.heads(unsure)
            async for lacking in self._look(unsure, known, lost_retries, with_logs):
                yield lacking

    async def _let_go(self, snapshots: Iterable[RunSnapshot]) -> None:
        """The finished runs of these need not stay in Redis for ever."""
        await self.hints.archived(
            [ArchiveEntry(s.run_id, s.finished_at) for s in snapshots if s.finished_at is not None]
        )

    async def _renumber(self, here: RunSnapshot, head: ArchiveHead) -> list[RunSnapshot]:
        """The whole run, under a generation that neither side has used."""
        log.warning("run %s has lost the end of its log, and goes on from there", here.run_id)
        following = max(here.generation, head.kept.generation) + 1
        await self.hot.renumber(here.run_id, here.generation, following)
        whole = self.hot.read({here.run_id: None})
        return [reading.snapshot async for some in whole for reading in some.values()]

    async def _replace(self, here: RunSnapshot) -> None:
        kept = await self.archive.read(here.run_id)
        if kept is None or not kept.finished:
            return  # it was retried meanwhile, and is queued again by that
        log.warning("run %s was finished before the end of its log was lost", here.run_id)
        following = replace(kept, generation=max(here.generation, kept.generation) + 1)
        await self.hints.archived([ArchiveEntry(here.run_id, self.clock())])
        await self.hot.put_back(following, 0.0, replacing=here.generation)

    async def _write(self, snapshots: Sequence[RunSnapshot]) -> set[str]:
        """The runs that the archive has now."""
        if not snapshots:
            return set()
        try:
            kept = await self.archive.write_many(snapshots)
            if unknown := [one for one in snapshots if one.run_id not in kept]:
                whole = [replace(s, content=await self.hot.definition(s)) for s in unknown]
                kept |= await self.archive.write_many(whole)
        except ArchiveDown:
            raise
        except (StoreError, LookupError) as error:
            if len(snapshots) == 1:
                log.exception("run %s cannot be archived", snapshots[0].run_id, exc_info=error)
                return set()
            # One of them cannot be written, which must not be in the way of the others.
            return set().union(*[await self._write([one]) for one in snapshots])
        done = [one for one in snapshots if self._has_taken(one, kept.get(one.run_id))]
        # Before the hints are settled: if we die in between, we come again.
        await self._let_go(done)
        return {one.run_id for one in done}

    def _has_taken(self, written: RunSnapshot, kept: ArchiveState | None) -> bool:
        """If not, another archiver wrote more of it, or another log; or earlier events are missing.
        Then it comes again when its claim lapses, to be compared."""
        taken = kept == (written.generation, written.last_seq, written.finished)
        if kept is not None and taken and written.events and not written.finished:
            self._remember(written.run_id, ArchiveHead(kept, written.epoch, written.events[-1]))
        return taken

    def _remember(self, run_id: str, head: ArchiveHead) -> None:
        self.heads[run_id] = head
        if len(self.heads) > MAX_HEADS:
            self.heads.popitem(last=False)


class Archiver:
    """The archive's duties in an orchestrator: write, sweep, retire."""

    def __init__(
        self,
        writer: ArchiveWriter,
        *,
        checkpoint_interval: float,
        retention_seconds: float,
        restore: Callable[[Sequence[str]], Awaitable[object]],
        rest_seconds: float = REST_SECONDS,
    ) -> None:
        """`restore` puts runs that Redis does not have back from the archive."""
        self._writer = writer
        self._hot = writer.hot
        self._hints = writer.hints
        self._archive = writer.archive
        self._clock = writer.clock
        self._heads = writer.heads
        self._restore = restore
        self._checkpoint_interval = checkpoint_interval
        self._retention_seconds = retention_seconds
        self._rest_seconds = rest_seconds
        self._keeping = asyncio.Lock()
        self._unkept: dict[str, None] = {}

    async def run(self) -> None:
        """Every duty, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(in_spite_of_outages(self.archive_what_moved, PAUSE_SECONDS))
            # So often that there is time left for an archiver to die over what was found.
            group.create_task(in_spite_of_outages(self.sweep, self._checkpoint_interval / 3))
            group.create_task(in_spite_of_outages(self.retire, RETIRE_SECONDS))

    # ── what moved is archived ───────────────────────────────────────────────────────────

    async def archive_what_moved(self) -> None:
        while True:
            claims = await self._hints.claim(BATCH_SIZE, self._rest_seconds)
            if claims:
                await self._take(claims)
            if len(claims) < BATCH_SIZE:
                return

    async def keep(self, run_ids: Sequence[str]) -> None:
        """Archive these now, before a caller gets its reply. If that takes long, or the archive is
        away, they are archived with all others."""
        self._unkept.update(dict.fromkeys(run_ids))
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(KEEP_SECONDS), self._keeping:
                # Together with the runs that waited meanwhile: the runs of a batch are retried side
                # by side.
                together, self._unkept = self._unkept, {}
                await self._bring([*together], logs=False)

    async def _take(self, claims: Sequence[ArchiveClaim]) -> None:
        try:
            await bisect_failures(self._taken, claims, self._leave)
        except StoreError:
            await self._hints.give_back(claims)
            raise
        except asyncio.CancelledError:  # another archiver takes them at once
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(KEEP_SECONDS):
                    await self._hints.give_back(claims)
            raise

    async def _taken(self, claims: Sequence[ArchiveClaim]) -> Sequence[ArchiveClaim]:
        done = await self._bring([claim.run_id for claim in claims])
        # What is not done comes again when its claim lapses.
        settled = [claim for claim in claims if claim.run_id in done]
        await self._hints.acknowledge(settled)
        return settled

    async def _leave(self, claim: ArchiveClaim, problem: Exception) -> Sequence[ArchiveClaim]:
        log.error("run %s cannot be archived: %s", claim.run_id, describe_error(problem))
        return ()

    async def _bring(self, run_ids: Sequence[str], *, logs: bool = True) -> set[str]:
        """Bring the archive up to these runs; returns those of which it has everything."""
        complete, lost_retries = await self._writer.bring(run_ids, logs=logs)
        for snapshot in lost_retries:
            await self._resume(snapshot)
        return complete

    async def _resume(self, here: RunSnapshot) -> None:
        log.warning("run %s was retried before the end of its log was lost", here.run_id)
        as_it_is = ArchiveHead(
            ArchiveState(here.generation, ALL_EVENTS, finished=True), here.epoch, None
        )
        if await self._hot.drop(here.run_id, as_it_is) == 1:
            await self._restore([here.run_id])

    # ── what is not in the queue ──────────────────────────────────────────────────────────

    async def sweep(self) -> None:
        """Give a hint of every run with which the archive is not where it should be."""
        async for lengths in self._hot.lengths():
            unsure = [
                run_id
                for run_id, count in lengths.items()
                if run_id not in self._heads or self._heads[run_id].kept.last_seq != count
            ]
            kept = await self._archive.kept(unsure) if unsure else {}
            behind = [
                run_id
                for run_id in unsure
                if run_id not in kept or kept[run_id].last_seq != lengths[run_id]
            ]
            await self._hints.moved(behind)

    # ── what is archived is dropped ──────────────────────────────────────────────────────

    async def retire(self) -> None:
        """Drop the hot state of runs that ended long ago and are in the archive."""
        while True:
            long_ago = self._clock() - self._retention_seconds
            entries = await self._hints.archived_before(long_ago, BATCH_SIZE)
            if not entries:
                return
            await bisect_failures(self._retire, entries, self._keep_hot)
            await self._hints.forget(entries)

    async def _retire(self, entries: Sequence[ArchiveEntry]) -> Sequence[ArchiveEntry]:
        heads = await self._archive.heads([entry.run_id for entry in entries])
        await asyncio.gather(*(self._drop(e.run_id, heads.get(e.run_id)) for e in entries))
        return entries

    async def _keep_hot(self, entry: ArchiveEntry, problem: Exception) -> Sequence[ArchiveEntry]:
        log.error("run %s stays in Redis: %s", entry.run_id, describe_error(problem))
        return ()

    async def _drop(self, run_id: str, head: ArchiveHead | None) -> None:
        if head is None or not head.kept.finished or await self._hot.drop(run_id, head) < 0:
            # The archive lacks something after all: once it has it, we hear of the run again.
            self._heads.pop(run_id, None)
            await self._hints.moved([run_id])


def _weight(snapshot: RunSnapshot) -> int:
    return sum(map(len, snapshot.events)) + sum(map(len, snapshot.outputs.values()))


async def in_spite_of_outages(duty: Callable[[], Awaitable[object]], seconds: float) -> None:
    """A duty at once and then for ever, jittered; a store that is away only delays it."""
    backoff = 0.0
    while True:
        try:
            await duty()
            if backoff:
                log.warning("the archive goes on")
            backoff = 0.0
        except StoreError as error:
            if not backoff:
                log.warning("the archive waits: %s", error)
            backoff = min(max(FIRST_BACKOFF_SECONDS, 2 * backoff), LONGEST_BACKOFF_SECONDS)
        await asyncio.sleep((backoff or seconds) * random.uniform(0.8, 1.2))  # noqa: S311


# ── restoring ─────────────────────────────────────────────────────────────────────────────────


RESTORE_SECONDS = 60.0
RESTORE_PAGE = 1000
MAX_CONCURRENT_RESTORES = 8


class SharedLimits(Protocol):
    """The limits of all workers, without their history."""

    async def all(self) -> dict[str, tuple[float, int]]: ...
    async def set(self, tag: str, rate_per_second: float, burst: int) -> None: ...


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
    """Puts runs that Redis has lost back from the archive.

    An unfinished run that Redis does not know is restored as it was archived, or created for the
    first time if its process died after it was accepted. Any number of processes may do it at once:
    a run that Redis has is left alone.
    """

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
        shared_limits: SharedLimits | None = None,
    ) -> None:
        """`limits` are the rates in the archive, `shared_limits` the rates in Redis, which hold."""
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
        enough now, and later the runs that were young at that moment."""
        for pause in (0.0, self._recovery_timeout + 1.0):
            await asyncio.sleep(pause)
            with contextlib.suppress(StoreError):  # it is tried again every minute
                await self.restore()

    async def restore(self) -> int:
        """Put back what is lost; how many runs that were. Younger ones may still be made."""
        await self.restore_limits()
        before = self._clock() - self._recovery_timeout
        after, restored = None, 0
        while page := await self._archive.unfinished(before, RESTORE_PAGE, after):
            restored += await self.restore_lost(page)
            after = page[-1]
        if restored:
            log.warning("restored %s that Redis did not know", counted(restored, "run"))
        return restored

    async def restore_lost(self, run_ids: Sequence[str]) -> int:
        """Restore the unfinished ones of these that Redis does not know, however young."""
        return sum(await bisect_failures(self._restore_some, run_ids, self._leave))

    async def _leave(self, run_id: str, problem: Exception) -> Sequence[int]:
        # A definition that is understood no more, say: it must not be in the way of others.
        log.error("run %s cannot be restored: %s", run_id, describe_error(problem))
        return ()

    async def _restore_some(self, run_ids: Sequence[str]) -> Sequence[int]:
        known = await self._hot.known(run_ids)
        # A run that has ended there: the archive is behind, or Redis has lost a retry.
        await self._hints.moved(await self._hot.finished([*known]))
        lost = [run_id for run_id in run_ids if run_id not in known]
        restored = 0
        for first in range(0, len(lost), MAX_CONCURRENT_RESTORES):
            some = lost[first : first + MAX_CONCURRENT_RESTORES]
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
        restored = await self._hot.put_back(_following(snapshot), 0.0)
        if not restored and not await self._hot.known([run_id]):
            raise NotFound(f"run '{run_id}' is being deleted")

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
        """Set the rates of the archive in Redis: without them every tag has the usual rate."""
        if self._limits is None or self._shared_limits is None:
            return
        kept, holding = await self._limits(), await self._shared_limits.all()
        for tag, (rate, burst) in kept.items():
            if holding.get(tag) != (rate, burst):
                await self._shared_limits.set(tag, rate, burst)


def _following(snapshot: RunSnapshot) -> RunSnapshot:
    """Under the next generation: a process that still writes the one before does no harm."""
    return replace(snapshot, generation=snapshot.generation + 1)
