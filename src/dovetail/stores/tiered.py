"""Redis over PostgreSQL: live runs in Redis, all others in the archive.

A run is in Redis while it goes on and for a while after. Then it is read from the archive. The
archive is a moment behind with runs that move: lists and counts show these as Redis has them.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from contextlib import suppress
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

from dovetail.core.dag import Graph
from dovetail.core.errors import BrokenRun, Conflict, NotFound, StoreError
from dovetail.core.events import Event
from dovetail.core.node_logs import StoredChunk
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.run import RunState
from dovetail.core.states import FINAL, RunStatus
from dovetail.core.transitions import Decision, Submit, Transition
from dovetail.engine.distributed.archiver import Archiver, Restorer
from dovetail.engine.distributed.triggers import PendingRun, TriggerService, making_seconds
from dovetail.engine.idempotency import is_for_a_batch
from dovetail.engine.ports import (
    ALL_RUNS,
    MAX_LOG_PAGE_BYTES,
    Author,
    Cached,
    Key,
    KeyUsed,
    RunQuery,
    RunTally,
    Seen,
)
from dovetail.engine.views import unread_run
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.postgres.archive import PostgresArchive, StoredOutput
from dovetail.stores.postgres.pool import PostgresConnection, PostgresPool, statements
from dovetail.stores.postgres.records import LARGEST_NUMBER, PostgresRecords
from dovetail.stores.records import (
    batch_counts,
    list_position,
    page_size,
    summary_of,
    until_cut,
    with_lost_lines,
)
from dovetail.stores.redis.archive import UNARCHIVED
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.limits import RedisLimits
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.redis.store import WATCH_PAGE, RedisStore

RUN_POLL_SECONDS = 0.5
"""How often the archive is looked at for a run that will be back in Redis."""
MAX_REPORTED = 5

log = logging.getLogger("dovetail.store")


class RunArchive(Protocol):
    """Runs that Redis does not have."""

    async def load(
        self, run_id: str, *, outputs: bool = True, room: ReadBudget | None = None
    ) -> RunState:
        """Raises `NotFound`."""
        ...

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        """Those of a run that `load` gave. Raises `StoreError`."""
        ...

    async def log(self, run_id: str, after: int, limit: int) -> list[Event]:
        """As far as it is archived; no more than `limit` events."""
        ...

    async def bring_back(self, run_id: str) -> None:
        """Put it into Redis again. Raises `NotFound`."""
        ...

    async def has(self, run_id: str) -> bool:
        """Whether it can be put back as it was archived."""
        ...

    async def keep(self, run_ids: Sequence[str]) -> None:
        """Write down what became of these, if that can be done at once."""
        ...


class DeletesRuns(Protocol):
    """Where everything of a run can be deleted: Redis alone, or Redis and its archive."""

    async def delete(self, run_ids: Sequence[str], *, ended_before: float = ...) -> list[str]: ...


class TieredRuns:
    def __init__(
        self,
        redis: PipelinedRedis,
        hot: RedisStore,
        submissions: TriggerService,
        archive: RunArchive | None,
        deleter: DeletesRuns,
    ) -> None:
        self._redis = redis
        self._hot = hot
        self._submissions = submissions
        self._archive = archive
        self._deleter = deleter

    # ── runs are made and moved ──────────────────────────────────────────────────────────

    async def create(self, submit: Submit, now: float) -> Decision:
        return await self._hot.create(submit, now)

    async def create_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> list[Decision]:
        """Whatever follows is sent out as the runs are made."""
        await self._submissions.submit_batch(batch_id, submits, key, now)
        return []

    async def made_under(self, key: Key) -> KeyUsed | None:
        return await self._submissions.made_under(key)

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        if self._archive is not None:
            for run_id in {move.run_id for move in moves}:
                if not await self._is_hot(run_id):
                    await self._archive.bring_back(run_id)
        decisions = await self._submissions.apply(moves, durable=durable)
        if durable and self._archive is not None:  # Redis may still lose it, in the next second
            decided = zip(moves, decisions, strict=True)
            await self._archive.keep([move.run_id for move, decision in decided if decision])
        return decisions

    async def _is_hot(self, run_id: str) -> bool:
        return bool(await self._redis.call("HEXISTS", keys_of(run_id)[0], "status"))

    # ── runs that are damaged ────────────────────────────────────────────────────────────

    async def repair(self, run_id: str, *, dry_run: bool = False) -> list[str]:
        """From its log in Redis; if that is damaged, from the archive, as far as that has it."""
        now = self._submissions.now()
        try:
            found = await self._hot.repair(run_id, now, dry_run=dry_run)
        except BrokenRun as problem:
            found = await self._put_back(run_id, problem, now, dry_run=dry_run)
        if found and not dry_run:
            log.warning("run %s: repaired: %s", run_id, "; ".join(found[:MAX_REPORTED]))
            await self._submissions.reconcile_run(run_id)
            if self._archive is not None:
                await self._archive.keep([run_id])
        return found

    async def _put_back(
        self, run_id: str, problem: BrokenRun, now: float, *, dry_run: bool
    ) -> list[str]:
        if self._archive is None or not await self._archive.has(run_id):
            raise problem
        found = [f"what Redis has of it cannot be used ({problem}); the archive has it"]
        if not dry_run:
            await self._redis.call("UNLINK", *keys_of(run_id))
            self._hot.forget(run_id)
            await self._archive.bring_back(run_id)
            found += await self._hot.repair(run_id, now)
        return found

    async def end_damaged(self, run_id: str, why: str, now: float) -> RunState:
        if not await self._hot.end_by_force(run_id, now):
            raise Conflict(f"run {run_id} has ended already: there is nothing to cancel")
        log.warning("run %s was ended by force: %s", run_id, why)
        await self._submissions.announce_end(run_id)
        if self._archive is not None:
            await self._archive.keep([run_id])
        try:
            return await self._hot.load(run_id)
        except (BrokenRun, NotFound):  # its definition, say, is lost
            name, status = await self._redis.call("HMGET", keys_of(run_id)[0], "workflow", "status")
            return unread_run(
                run_id,
                (name or b"").decode(errors="replace"),
                None,
                now,
                RunStatus((status or b"CANCELLED").decode()),
                now,
                why,
            )

    # ── runs are deleted ─────────────────────────────────────────────────────────────────

    async def delete(self, run_ids: Sequence[str], *, ended_before: float = inf) -> list[str]:
        deleted = await self._deleter.delete(run_ids, ended_before=ended_before)
        for run_id in deleted:
            self._hot.forget(run_id)
        return deleted

    async def reclaim_space(self) -> None:
        """Redis and PostgreSQL do so themselves."""

    # ── runs are read ────────────────────────────────────────────────────────────────────

    async def load(
        self, run_id: str, *, outputs: bool = True, room: ReadBudget | None = None
    ) -> RunState:
        try:
            return await self._hot.load(run_id, outputs=outputs, room=room)
        except NotFound:
            if self._archive is None:
                raise
        return await self._archive.load(run_id, outputs=outputs, room=room)

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        archived = [one for one in wanted if isinstance(one.where, StoredOutput)]
        if archived and self._archive is not None:
            return await self._archive.read_outputs(run, archived)
        return await self._hot.read_outputs(run, wanted)

    async def read_items(
        self, run: RunState, index: int, numbers: Sequence[int], max_bytes: int
    ) -> int:
        """The archive leaves out no item."""
        return await self._hot.read_items(run, index, numbers, max_bytes)

    async def wait(self, run_id: str) -> RunState:
        while True:
            try:
                return await self._hot.wait(run_id)
            except NotFound:
                if self._archive is None:
                    raise
            run = await self._archive.load(run_id)
            if run.finished:
                return run
            await asyncio.sleep(RUN_POLL_SECONDS)

    async def ended(self, run_id: str) -> None:
        try:
            await self._hot.ended(run_id)
        except NotFound:
            await self.wait(run_id)

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        while True:
            try:
                async for event in self._hot.watch(run_id, after):
                    yield event
                    after = event.seq
                return
            except NotFound:
                if self._archive is None:
                    raise
            finished = (await self._archive.load(run_id, outputs=False)).finished
            while page := await self._archive.log(run_id, after, WATCH_PAGE):
                for event in page:
                    yield event
                    after = event.seq
            if finished:
                return
            await asyncio.sleep(RUN_POLL_SECONDS)

    async def recall(self, key: str, now: float) -> Cached | None:
        return await self._hot.recall(key, now)

    # ── drivers ──────────────────────────────────────────────────────────────────────────

    async def owner_of(self, run_id: str) -> Literal["here", "elsewhere", "gone", "none"]:
        """The orchestrators, all of them, as long as it is not finished."""
        status, finished_at = await self._redis.call(
            "HMGET", keys_of(run_id)[0], "status", "finished_at"
        )
        finished = (
            bool(finished_at) if status else (await self.load(run_id, outputs=False)).finished
        )
        return "none" if finished else "elsewhere"

    async def graph(self, run_id: str) -> Graph:
        return (await self.load(run_id, outputs=False)).graph

    async def orphans(self) -> list[str]:
        return []

    async def adopt(
        self, run_ids: Iterable[str], now: float, max_crashes: int
    ) -> dict[str, Decision]:
        return {}


MAX_LATE_RUNS = 1000
"""So many runs that the archive is behind with are looked at for one answer."""
ARCHIVED_SECONDS = 3.0
"""An end in Redis is in the archive within a second; so long is waited for it."""
RECORDS_POLL_SECONDS = 0.05


class _Live(NamedTuple):
    """A run as Redis has it now."""

    status: str
    finished_at: float | None


class TieredRecords(PostgresRecords):
    def __init__(
        self, pool: PostgresPool, redis: PipelinedRedis, hot: RedisRecords, limits: RedisLimits
    ) -> None:
        super().__init__(pool)
        self._redis = redis
        self._hot = hot
        self._shared_limits = limits

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def list_runs(self, query: RunQuery = ALL_RUNS) -> dict[str, Any]:
        limit, most = page_size(query.limit), query.max_result_bytes
        given = await self._conditions(query)
        status = given.pop("status", None)
        before = list_position(query.cursor, LARGEST_NUMBER)
        behind = await self._behind()
        if status is None:
            rows = await self._summaries(before, limit + 1, most, given)
            kept = until_cut(rows)[:limit]
            found = list((await self._as_they_are(kept, behind, most)).items())
            more = len(rows) > len(kept)
        else:
            found, more = await self._of_status(status, given, before, limit, behind, most)
        last = str(found[-1][0]) if more else None
        return {"items": [view for _, view in found], "next_cursor": last}

    async def _of_status(
        self,
        status: str,
        given: dict[str, Any],
        before: int,
        limit: int,
        behind: Collection[str],
        most: int | None,
    ) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
        """A page, newest first, though the archive has some runs under another status; and whether
        there may be more."""
        late = (
            await self._pool.rows("summaries_of", before, behind, most, **given) if behind else []
        )
        moved = _only(status, await self._as_they_are(late, behind, most))
        found: dict[int, dict[str, Any]] = {}
        wanted, lowest = limit + 1, 0
        while len(found) < wanted:
            rows = await self._summaries(before, wanted, most, {**given, "status": status})
            kept = until_cut(rows)
            found |= _only(status, await self._as_they_are(kept, behind, most))
            if len(kept) < wanted:
                lowest = kept[-1][0] if len(kept) < len(rows) else 0
                break
            before = rows[-1][0]
        # Runs that moved and come after a page that was cut belong to the next page.
        every = sorted((moved | found).items(), reverse=True)
        page = [(number, view) for number, view in every if number >= lowest]
        return page[:limit], bool(lowest) or len(page) > limit

    async def _behind(self) -> list[str]:
        """The runs that moved since they were archived."""
        names = await self._redis.call("ZRANGE", UNARCHIVED, 0, MAX_LATE_RUNS - 1)
        return [name.decode() for name in names]

    async def _as_they_are(
        self, rows: Sequence[Any], behind: Collection[str], most: int | None
    ) -> dict[int, dict[str, Any]]:
        """How the runs of these rows are to be shown, by their numbers."""
        moved = set(behind)
        shown = await asyncio.gather(*(self._shown(summary_of(row), moved, most) for row in rows))
        return dict(zip((row[0] for row in rows), shown, strict=True))

    async def _shown(
        self, view: dict[str, Any], moved: Collection[str], most: int | None
    ) -> dict[str, Any]:
        if view["finished_at"] is None or view["run_id"] in moved:
            with suppress(NotFound):  # not made yet, or lost with Redis: as it was archived
                return await self._hot.summary(view["run_id"], most)
        return view

    async def count_runs(self, workflow: str | None, edges: Sequence[float]) -> RunTally:
        tally = await super().count_runs(workflow, edges)
        behind = await self._behind()
        if not behind:
            return tally
        given = {} if workflow is None else {"workflow": workflow}
        late = await self._pool.rows("statuses_of", behind, **given)
        live = await self._live([run_id for run_id, _, _ in late])
        for run_id, status, created_at in late:
            if run_id not in live:
                continue
            at = bisect_right(edges, created_at) - 1
            for counts in (tally.by_status, *tally.created[at : at + 1 if at >= 0 else 0]):
                counts[status] = max(0, counts.get(status, 0) - 1)
                counts[live[run_id].status] = counts.get(live[run_id].status, 0) + 1
        return tally

    async def summary(self, run_id: str, most: int | None = None) -> dict[str, Any]:
        try:
            return await self._hot.summary(run_id, most)
        except NotFound:
            return await super().summary(run_id, most)

    async def events(
        self, run_id: str, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        try:
            return await self._hot.events(run_id, after, limit)
        except NotFound:
            return await super().events(run_id, after, limit)

    async def logs(
        self,
        run_id: str,
        after: int = 0,
        *,
        node: str | None = None,
        epoch: int | None = None,
        attempt: int | None = None,
        item: int | None = None,
        max_bytes: int = MAX_LOG_PAGE_BYTES,
    ) -> list[StoredChunk]:
        """From the archive as far as Redis may lack lines, and from there on from Redis."""
        given: dict[str, Any] = {"node": node, "epoch": epoch, "attempt": attempt, "item": item}
        try:
            # First: what leaves Redis after this is in the archive already.
            floor, lost, hot = await self._hot.log_reading(run_id, after, max_bytes, **given)
        except NotFound:
            return await super().logs(run_id, after, max_bytes=max_bytes, **given)
        if after < floor:
            with suppress(NotFound):  # not accepted there: a run of a time without an archive
                archived = await super().logs(run_id, after, max_bytes=max_bytes, **given)
                # By itself: the page may have been cut before it reached what Redis has.
                if older := [one for one in archived if one.seq <= floor]:
                    return older
        return with_lost_lines(hot, run_id, after, lost)

    async def _live(self, run_ids: Sequence[str]) -> dict[str, _Live]:
        """Which of these runs Redis has, and their state."""
        answers = await self._redis.call_many(
            [("HMGET", keys_of(run_id)[0], "status", "finished_at") for run_id in run_ids]
        )
        return {
            run_id: _Live(status.decode(), float(finished_at) if finished_at else None)
            for run_id, (status, finished_at) in zip(run_ids, answers, strict=True)
            if status is not None
        }

    # ── batches ──────────────────────────────────────────────────────────────────────────

    async def _batch_runs(
        self, number: int, first: int, limit: int
    ) -> Sequence[tuple[int, str, str]]:
        rows = await super()._batch_runs(number, first, limit)
        live = await self._live([run_id for _, run_id, _ in rows[:limit]])
        return [
            (index, run_id, live[run_id].status if run_id in live else status)
            for index, run_id, status in rows
        ]

    async def _counted(self, number: int) -> tuple[dict[str, int], int, float]:
        behind = await self._behind()

        async def read(connection: PostgresConnection) -> tuple[list[Any], list[Any]]:
            sql = statements()
            counted = await connection.fetch(sql["batch_counts"], number)
            return counted, await connection.fetch(sql["statuses_in_batch"], number, behind)

        # At one moment: what is archived in between would be counted twice, or not at all.
        counted, late = await self._pool.look(read)
        by_status, finished, ended = batch_counts(counted)
        live = await self._live([run_id for run_id, _, _ in late])
        for run_id, status, finished_at in late:
            if run_id in live:
                now = live[run_id]
                by_status[status] -= 1
                by_status[now.status] = by_status.get(now.status, 0) + 1
                finished += (now.finished_at is not None) - (finished_at is not None)
                ended = max(ended, now.finished_at or 0.0)
        by_status = {status: runs for status, runs in by_status.items() if runs}
        return by_status, finished, ended

    # ── workflows and limits ─────────────────────────────────────────────────────────────

    async def _delete_workflow(self, name: str, by: Author, seen: Seen | None) -> int:
        return await self._once_archived(
            lambda: super(TieredRecords, self)._delete_workflow(name, by, seen), name, None
        )

    async def _delete_version(self, name: str, version: int, by: Author, seen: Seen | None) -> int:
        return await self._once_archived(
            lambda: super(TieredRecords, self)._delete_version(name, version, by, seen),
            name,
            version,
        )

    async def _once_archived(
        self, delete: Callable[[], Awaitable[int]], name: str, version: int | None
    ) -> int:
        """Delete something unless it has unfinished runs; returns how many. Runs that have ended
        are about to be archived."""
        give_up = asyncio.get_running_loop().time() + ARCHIVED_SECONDS
        while active := await delete():
            if await self._is_active(name, version):
                return active
            if asyncio.get_running_loop().time() > give_up:
                return active
            await asyncio.sleep(RECORDS_POLL_SECONDS)
        return 0

    async def _is_active(self, name: str, version: int | None) -> bool:
        rows = await self._pool.rows("active_run_ids", name, MAX_LATE_RUNS, version)
        run_ids = [run_id for (run_id,) in rows]
        live = await self._live(run_ids)
        return any(run_id not in live or live[run_id].finished_at is None for run_id in run_ids)

    async def set_limit(self, tag: str, rate: float, burst: int, by: Author) -> None:
        await super().set_limit(tag, rate, burst, by)
        await self._shared_limits.set(tag, rate, burst)


def _only(status: str, views: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {number: view for number, view in views.items() if view["status"] == status}


class ArchivedAcceptedRuns:
    """What is asked for is in PostgreSQL before it is answered."""

    outlives = True

    def __init__(self, records: PostgresRecords, restorer: Restorer) -> None:
        self._records = records
        self._restorer = restorer

    async def accept(self, submit: Submit, now: float) -> Submit:
        try:
            await self._records.accept(submit, now)
        except KeyUsed as known:
            if known.same_body:
                await self._asked_again([known.made])
            raise
        return submit

    async def known(self, key: Key) -> KeyUsed | None:
        known = await self._records.known(key)
        if known is not None and known.same_body:
            made = known.made
            await self._asked_again(await self._going_on(made) if is_for_a_batch(key) else [made])
        return known

    async def accept_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> list[Submit]:
        try:
            await self._records.accept_batch(batch_id, submits, key, now)
        except KeyUsed as known:
            if known.same_body:
                await self._asked_again(await self._going_on(known.made))
            raise
        return list(submits)

    async def _asked_again(self, run_ids: Sequence[str]) -> None:
        """Their creator may have died before they were in Redis."""
        with suppress(StoreError, TimeoutError):  # then orchestrators find them, later
            async with asyncio.timeout(making_seconds(len(run_ids))):
                await self._restorer.restore_lost(run_ids)

    async def _going_on(self, batch_id: str) -> list[str]:
        found: list[str] = []
        cursor = None
        while True:
            page = await self._records.get_batch(batch_id, limit=1000, cursor=cursor, counts=False)
            found += [run["run_id"] for run in page["runs"] if run["status"] not in FINAL]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    async def made(self, submit: Submit) -> None:
        """Its row is not needed any less."""

    async def batch_made(self, batch_id: str) -> None:
        """As with a run."""

    async def unmade(self, accepted_before: float) -> list[PendingRun]:
        """They are restored with all others that Redis does not know."""
        return []

    async def unmade_under(self, key: Key, made: str) -> PendingRun | None:
        """The same; until then they are listed from here."""
        return None

    async def settle(self, unmade: PendingRun) -> None: ...


class ArchivedRuns:
    """Runs that Redis does not have."""

    def __init__(self, archive: PostgresArchive, restorer: Restorer, archiver: Archiver) -> None:
        self._archive = archive
        self.load = archive.load
        self.read_outputs = archive.read_outputs
        self.bring_back = restorer.bring_back
        self.keep = archiver.keep

    async def has(self, run_id: str) -> bool:
        kept = (await self._archive.kept([run_id])).get(run_id)
        return kept is not None and kept.generation > 0

    async def log(self, run_id: str, after: int, limit: int) -> list[Event]:
        events = await self._archive.log(run_id, after, limit)
        return [event for seq, event in enumerate(events, after + 1) if event.seq == seq]
