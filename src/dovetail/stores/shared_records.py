"""What PostgreSQL keeps beside runs, with what goes on in Redis at this moment.

PostgreSQL has every run, and is a moment behind with those that move. Which ones these are, Redis
knows: they are shown as they are there, and counted so. What it must not know: how a run moves, or
how it is archived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from dovetail.core.errors import Conflict, NotFound, StoreError
from dovetail.core.events import Event
from dovetail.core.states import FINAL
from dovetail.core.transitions import Submit
from dovetail.engine.archiver import Archiver
from dovetail.engine.idempotency import is_for_a_batch
from dovetail.engine.ports import Key, KeyUsed, Seen
from dovetail.engine.restoring import Restorer
from dovetail.engine.submissions import Unmade, making_seconds
from dovetail.engine.views import timestamp
from dovetail.pipe import Pipe
from dovetail.stores.listing import page_size, place_in_list, summary_of, until_cut
from dovetail.stores.postgres import PostgresArchive
from dovetail.stores.postgres_pool import Connection, PostgresPool, statements
from dovetail.stores.postgres_records import LARGEST_NUMBER, PostgresRecords
from dovetail.stores.redis import keys_of
from dovetail.stores.redis_hints import UNARCHIVED
from dovetail.stores.redis_limits import RedisLimits
from dovetail.stores.redis_records import RedisRecords

MOST_LATE = 1000
"""So many runs that the archive is behind with are looked at for one answer."""
ARCHIVED_SECONDS = 3.0
"""An end in Redis is in the archive within a second; so long is waited for it."""
LOOK_SECONDS = 0.05


class _Live(NamedTuple):
    """A run as Redis has it now."""

    status: str
    finished_at: float | None


class SharedRecords(PostgresRecords):
    def __init__(
        self, pool: PostgresPool, pipe: Pipe, hot: RedisRecords, limits: RedisLimits
    ) -> None:
        super().__init__(pool)
        self._pipe = pipe
        self._hot = hot
        self._shared_limits = limits

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def list_runs(
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        batch: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        most: int | None = None,
    ) -> dict[str, Any]:
        limit = page_size(limit)
        number = None if batch is None else await self.batch_number(batch)
        wanted = {"workflow": workflow, "batch": number}
        given = {column: value for column, value in wanted.items() if value is not None}
        before = LARGEST_NUMBER if cursor is None else place_in_list(cursor)
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
        # Of those that moved, what comes behind a page that was cut is for the next one.
        every = sorted((moved | found).items(), reverse=True)
        page = [(number, view) for number, view in every if number >= lowest]
        return page[:limit], bool(lowest) or len(page) > limit

    async def _behind(self) -> list[str]:
        """The runs that moved since they were archived."""
        names = await self._pipe.call("ZRANGE", UNARCHIVED, 0, MOST_LATE - 1)
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

    async def _live(self, run_ids: Sequence[str]) -> dict[str, _Live]:
        """Those of these that Redis has."""
        answers = await self._pipe.many(
            [("HMGET", keys_of(run_id)[0], "status", "finished_at") for run_id in run_ids]
        )
        return {
            run_id: _Live(status.decode(), float(finished_at) if finished_at else None)
            for run_id, (status, finished_at) in zip(run_ids, answers, strict=True)
            if status is not None
        }

    # ── batches ──────────────────────────────────────────────────────────────────────────

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]:
        limit = page_size(limit)
        first = 0 if cursor is None else place_in_list(cursor)
        number, batch_id, workflow, count, created_at = await self._batch(batch_id)
        by_status, ended = await self._counted(number, count) if counts else ({}, None)
        rows = await self._pool.rows("batch_runs", number, first, limit + 1)
        live = await self._live([run_id for _, run_id, _ in rows[:limit]])
        return {
            "batch_id": batch_id,
            "workflow": workflow,
            "count": count,
            "counts": {status: runs for status, runs in by_status.items() if runs},
            "created_at": timestamp(created_at),
            "finished_at": None if ended is None else timestamp(ended or created_at),
            "runs": [
                {
                    "index": index,
                    "run_id": run_id,
                    "status": live[run_id].status if run_id in live else status,
                }
                for index, run_id, status in rows[:limit]
            ],
            "next_cursor": str(rows[limit][0]) if len(rows) > limit else None,
        }

    async def _counted(self, number: int, count: int) -> tuple[dict[str, int], float | None]:
        """How many runs have which status; when the last one ended, if all have."""
        behind = await self._behind()

        async def read(connection: Connection) -> tuple[list[Any], list[Any]]:
            sql = statements()
            counted = await connection.fetch(sql["batch_counts"], number)
            return counted, await connection.fetch(sql["statuses_in_batch"], number, behind)

        # At one moment: what is archived in between would be counted twice, or not at all.
        counted, late = await self._pool.look(read)
        by_status: dict[str, int] = {}
        finished, ended = 0, 0.0
        for status, runs, done, last in counted:
            by_status[status] = runs
            finished += done
            ended = max(ended, last or 0.0)
        live = await self._live([run_id for run_id, _, _ in late])
        for run_id, status, finished_at in late:
            if run_id in live:
                now = live[run_id]
                by_status[status] -= 1
                by_status[now.status] = by_status.get(now.status, 0) + 1
                finished += (now.finished_at is not None) - (finished_at is not None)
                ended = max(ended, now.finished_at or 0.0)
        return by_status, ended if finished == count else None

    # ── workflows and limits ─────────────────────────────────────────────────────────────

    async def delete_workflow(self, name: str, seen: Seen | None = None) -> None:
        give_up = asyncio.get_running_loop().time() + ARCHIVED_SECONDS
        while True:
            try:
                await super().delete_workflow(name, seen)
                return
            except Conflict:
                if await self._is_active(name) or asyncio.get_running_loop().time() > give_up:
                    raise
            await asyncio.sleep(LOOK_SECONDS)  # its runs have ended, and are about to be archived

    async def _is_active(self, name: str) -> bool:
        run_ids = [run_id for (run_id,) in await self._pool.rows("active_run_ids", name, MOST_LATE)]
        live = await self._live(run_ids)
        return any(run_id not in live or live[run_id].finished_at is None for run_id in run_ids)

    async def set_limit(self, tag: str, rate: float, burst: int) -> None:
        await super().set_limit(tag, rate, burst)
        await self._shared_limits.set(tag, rate, burst)


def _only(status: str, views: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {number: view for number, view in views.items() if view["status"] == status}


class ArchivedAcceptance:
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
        """Whoever made them may have died before they were in Redis."""
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

    async def unmade(self, accepted_before: float) -> list[Unmade]:
        """They are restored with all others that Redis does not know."""
        return []

    async def unmade_under(self, key: Key, made: str) -> Unmade | None:
        """The same; until then they are listed from here."""
        return None

    async def settle(self, unmade: Unmade) -> None: ...


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

    async def log(self, run_id: str, after: int) -> list[Event]:
        events = await self._archive.log(run_id, after)
        return [event for seq, event in enumerate(events, after + 1) if event.seq == seq]
