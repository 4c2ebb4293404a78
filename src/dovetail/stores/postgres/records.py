"""Records in PostgreSQL: accepted triggers, workflows, lists of runs, batches, limits, and the
doctor.

A trigger is stored before it is answered, with its idempotency key, so it survives the loss of
Redis. Views have the fields of the HTTP API.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from dovetail.core.aliases import AliasTarget, versions_named
from dovetail.core.errors import StoreError
from dovetail.core.node_logs import StoredChunk
from dovetail.core.transitions import Submit
from dovetail.engine.ports import (
    ALL_RUNS,
    MAX_LOG_PAGE_BYTES,
    Author,
    DoctorFinding,
    HistoryOf,
    Key,
    KeyUsed,
    Registered,
    RunQuery,
    RunTally,
    Seen,
    WorkflowVersion,
)
from dovetail.engine.views import event_view, receipt_view
from dovetail.stores.postgres.pool import (
    MAX_CONNECTIONS,
    SCHEMA_VERSION,
    PostgresConnection,
    PostgresPool,
    statements,
)
from dovetail.stores.records import (
    LATEST,
    PAGE_BYTES,
    BaseRecords,
    Definitions,
    StoredDefinition,
    WorkflowHead,
    alias_details,
    batch_counts,
    batch_end,
    batch_page,
    batch_view,
    check_seen,
    conditions,
    history_page,
    id_range,
    limit_details,
    list_position,
    no_alias,
    no_batch,
    no_run,
    no_version,
    no_workflow,
    page_size,
    refuse_named,
    stored_chunk,
    stored_target,
    summary_of,
    target_of_row,
    until_cut,
    version_item,
    with_lost_lines,
    workflow_item,
)
from dovetail.stores.redis.codec import event_of

LARGEST_NUMBER = (1 << 63) - 1
MAX_COUNTED_RUNS = 200_000
"""The newest, where runs are counted by the time of their creation."""
MAX_LOG_CHUNKS = 1000
OLDEST_SERVER = 120000
MAX_APART_SECONDS = 5.0
ACCEPT_SECONDS = 4.0
"""A trigger fails soon if the database is away."""


class PostgresRecords(BaseRecords):
    def __init__(self, pool: PostgresPool) -> None:
        self._pool = pool
        self._definitions = Definitions()

    @property
    def _where(self) -> object:
        return self._pool.where

    # ── runs are accepted ────────────────────────────────────────────────────────────────

    async def accept(self, submit: Submit, now: float) -> None:
        """Keep a trigger: it is durable when this returns. Raises `KeyUsed`.

        Safe to repeat: a known id changes nothing.
        """
        stored = self._definitions.stored(submit.graph)
        if submit.key is None and submit.place is None:
            # One statement is a transaction by itself; it adds nothing if the definition is new.
            values = _values(stored, [submit], [None], None, now)
            if await self._pool.rows("add_runs", *values):
                return

        async def write(connection: PostgresConnection) -> None:
            if submit.key is not None and not await _take_key(
                connection, submit.key, submit.run_id
            ):
                return
            batch, place = submit.place or (None, None)
            if not await _add_runs(connection, stored, [submit], [place], batch, now) and batch:
                taken = await connection.fetchval(statements()["find_place"], batch, place)
                if taken not in (None, submit.run_id):
                    raise KeyUsed(taken, same_body=True)

        await self._pool.transact(write, within=ACCEPT_SECONDS)

    async def accept_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> None:
        """Keep a batch and all its runs, or none of them. Raises `KeyUsed`. Safe to repeat."""
        name = submits[0].graph.name
        # An alias may have divided the runs between versions.
        parts: dict[int, list[int]] = {}
        for place, submit in enumerate(submits):
            parts.setdefault(id(submit.graph), []).append(place)

        async def write(connection: PostgresConnection) -> None:
            number = await _add_batch(connection, batch_id, name, len(submits), key, now)
            if number is not None:
                for places in parts.values():
                    part = [submits[place] for place in places]
                    stored = self._definitions.stored(part[0].graph)
                    await _add_runs(connection, stored, part, places, number, now)

        await self._pool.transact(write, within=ACCEPT_SECONDS + len(submits) / 1000)

    async def known(self, key: Key) -> KeyUsed | None:
        """What was accepted under a key, without accepting anything."""
        scope, name, body = key
        found = await self._pool.row("find_key", scope, name.encode())
        return None if found is None else KeyUsed(found["made"], found["body"] == body)

    # ── registered workflows ─────────────────────────────────────────────────────────────

    async def register(
        self, name: str, sha256: str, content: bytes, by: Author, seen: Seen | None = None
    ) -> WorkflowVersion:
        now = by.time

        async def write(connection: PostgresConnection) -> WorkflowVersion:
            sql = statements()
            await connection.execute(sql["claim_name"], name, now)
            latest, deleted = await connection.fetchrow(sql["lock_workflow"], name)
            await connection.execute(sql["add_definition"], sha256, content)
            number = await connection.fetchval(sql["find_definition"], sha256)
            if not deleted:
                same = await connection.fetchrow(sql["read_version"], name, latest)
                if same is not None and same["definition"] == number:
                    return WorkflowVersion(name, latest, created=False)
            found = {} if deleted or not latest else await _now_seen(connection, name, latest)
            check_seen(name, seen, found)
            await connection.execute(sql["save_workflow"], name, latest + 1, now)
            await connection.execute(sql["add_version"], name, latest + 1, number, now)
            details = {"version": latest + 1, "sha256": sha256}
            await _remember(connection, "workflow", name, by, "register", details)
            return WorkflowVersion(name, latest + 1, created=True)

        return await self._pool.transact(write)

    async def _read_version(self, name: str, version: int) -> Registered | None:
        row = await self._pool.row("read_version", name, version)
        if row is None:
            return None
        return Registered(
            name, row["version"], row["definition"], row["content"], row["created_at"]
        )

    async def _latest(self, name: str) -> int:
        row = await self._pool.row("read_workflow", name)
        if row is None:
            raise no_workflow(name, self._where)
        latest: int = row["latest"]
        return latest

    async def _head(self, name: str, version: int | None = None) -> WorkflowHead:
        row = await self._pool.row("head", name, version)
        if row is None:
            raise no_workflow(name, self._where)
        latest, has_version, *aliases = row
        return WorkflowHead(latest, _aliases(latest, zip(*aliases, strict=True)), has_version)

    async def workflows(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        limit = page_size(limit)
        rows = await self._pool.rows("workflows", cursor or "", limit + 1)
        items = [
            workflow_item(
                name,
                latest,
                _aliases(latest, zip(*aliases, strict=True)),
                created_at,
                updated_at,
            )
            for name, latest, created_at, updated_at, *aliases in rows[:limit]
        ]
        return {"items": items, "next_cursor": rows[limit - 1][0] if len(rows) > limit else None}

    async def versions(self, name: str) -> dict[str, Any]:
        await self._latest(name)
        return {"items": [version_item(*row) for row in await self._pool.rows("versions", name)]}

    async def _delete_workflow(self, name: str, by: Author, seen: Seen | None) -> int:
        async def write(connection: PostgresConnection) -> int:
            sql = statements()
            latest, deleted = await connection.fetchrow(sql["lock_workflow"], name)
            if deleted:
                return 0
            now = await _now_seen(connection, name, latest)
            check_seen(name, seen, now)
            active = int(await connection.fetchval(sql["active_runs"], name, None))
            if not active:
                details = {"versions": await _versions(connection, name), "aliases": now}
                await _remember(connection, "workflow", name, by, "delete", details)
                for statement in ("delete_workflow", "drop_versions", "drop_aliases"):
                    await connection.execute(sql[statement], name)
            return active

        return await self._pool.transact(write)

    async def _delete_version(self, name: str, version: int, by: Author, seen: Seen | None) -> int:
        async def write(connection: PostgresConnection) -> int:
            sql = statements()
            latest, _ = await connection.fetchrow(sql["lock_workflow"], name)
            there = await _versions(connection, name)
            if version not in there:
                raise no_version(name, version, there)
            now = await _now_seen(connection, name, latest)
            check_seen(name, seen, now)
            refuse_named(name, version, now)
            active = int(await connection.fetchval(sql["active_runs"], name, version))
            if not active:
                await connection.execute(sql["drop_version"], name, version)
                details = {"version": version}
                await _remember(connection, "workflow", name, by, "delete", details)
            return active

        return await self._pool.transact(write)

    async def _set_alias(
        self, name: str, alias: str, target: AliasTarget, by: Author, seen: Seen | None
    ) -> int | None:
        async def write(connection: PostgresConnection) -> int | None:
            sql = statements()
            latest, _ = await connection.fetchrow(sql["lock_workflow"], name)
            there = await _versions(connection, name)
            for version in versions_named(target):
                if version not in there:
                    return version
            now = await _now_seen(connection, name, latest)
            before = now.get(alias)
            if before != target:
                check_seen(name, seen, now)
                await connection.execute(sql["set_alias"], name, alias, *stored_target(target))
                details = alias_details(alias, target, before)
                await _remember(connection, "workflow", name, by, "alias", details)
            return None

        return await self._pool.transact(write)

    async def _delete_alias(self, name: str, alias: str, by: Author, seen: Seen | None) -> None:
        async def write(connection: PostgresConnection) -> None:
            sql = statements()
            latest, _ = await connection.fetchrow(sql["lock_workflow"], name)
            now = await _now_seen(connection, name, latest)
            if alias not in now:
                raise no_alias(name, alias, now)
            check_seen(name, seen, now)
            await connection.execute(sql["delete_alias"], name, alias)
            details = {"alias": alias, "from": now[alias]}
            await _remember(connection, "workflow", name, by, "delete", details)

        await self._pool.transact(write)

    async def _was_registered(self, name: str) -> bool:
        return bool(await self._pool.rows("was_registered", name))

    async def _history(
        self, of: HistoryOf, name: str, limit: int, cursor: str | None
    ) -> dict[str, Any]:
        before = list_position(cursor, LARGEST_NUMBER)
        rows = await self._pool.rows("history", of, name.encode(), before, limit + 1)
        return history_page(rows, limit)

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def _runs_beginning_with(self, prefix: str) -> list[str]:
        return [str(row[0]) for row in await self._pool.rows("find_runs", *id_range(prefix))]

    async def list_runs(self, query: RunQuery = ALL_RUNS) -> dict[str, Any]:
        limit = page_size(query.limit)
        given = await self._conditions(query)
        before = list_position(query.cursor, LARGEST_NUMBER)
        rows = await self._summaries(before, limit + 1, query.max_result_bytes, given)
        found = until_cut(rows)[:limit]
        more = str(found[-1][0]) if len(rows) > len(found) else None
        return {"items": [summary_of(row) for row in found], "next_cursor": more}

    async def _conditions(self, query: RunQuery) -> dict[str, Any]:
        number = None if query.batch is None else (await self._batch(query.batch))["number"]
        return conditions(query, number)

    async def _summaries(
        self, before: int, limit: int, most: int | None, given: dict[str, Any]
    ) -> list[Any]:
        """Rows of a page; with `most` only as far as an answer has room, see `until_cut`."""
        heaviest = None if most is None else PAGE_BYTES
        return await self._pool.rows("summaries", before, limit, most, heaviest, **given)

    async def count_runs(self, workflow: str | None, edges: Sequence[float]) -> RunTally:
        given = {} if workflow is None else {"workflow": workflow}
        by_status = dict(await self._pool.rows("count_runs", **given))
        created: list[dict[str, int]] = [{} for _ in edges[1:]]
        rows = await self._pool.rows("count_new_runs", list(edges), MAX_COUNTED_RUNS, **given)
        for bucket, status, runs in rows:
            if bucket <= len(created):
                created[bucket - 1][status] = runs
        return RunTally(by_status, created)

    async def summary(self, run_id: str, most: int | None = None) -> dict[str, Any]:
        row = await self._pool.row("summary", run_id, most)
        if row is None:
            raise no_run(run_id, self._pool.where)
        return summary_of(row)

    async def receipt(self, run_id: str) -> dict[str, Any]:
        # Of our own, wherever else it may be looked for: here it is, whatever else is away.
        return receipt_view(await PostgresRecords.summary(self, run_id, 0))

    async def events(
        self, run_id: str, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """As far as they are archived."""
        row = await self._pool.row("definition_of_run", run_id)
        if row is None:
            raise no_run(run_id, self._pool.where)
        number, definition, retries, content = row
        graph = self._definitions.graph(definition, retries, lambda: content)
        rows = await self._pool.rows("read_events", number, after, limit)
        return [event_view(event_of(text, seq, graph)) for seq, text in rows]

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
        """As far as they are archived."""
        row = await self._pool.row("log_of_run", run_id)
        if row is None:
            raise no_run(run_id, self._pool.where)
        number, last_seq, *lost = row
        if after >= last_seq:
            return []
        given = {"node": node, "epoch": epoch, "attempt": attempt, "item": item}
        given = {name: value for name, value in given.items() if value is not None}
        rows = await self._pool.rows("read_logs", number, after, max_bytes, MAX_LOG_CHUNKS, **given)
        chunks = [stored_chunk(run_id, row) for row in rows]
        return with_lost_lines(chunks, run_id, after, lost)

    # ── batches ──────────────────────────────────────────────────────────────────────────

    async def _batch(self, batch_id: str) -> Any:
        row = await self._pool.row("read_batch", batch_id)
        if row is None:
            raise no_batch(batch_id, self._pool.where)
        return row

    async def open_batch(
        self, batch_id: str, workflow: str, count: int, key: Key | None, now: float
    ) -> None:
        """Make a batch whose runs come later. Raises `KeyUsed`."""
        await self._pool.transact(
            lambda connection: _add_batch(connection, batch_id, workflow, count, key, now)
        )

    async def _batches_beginning_with(self, prefix: str) -> list[str]:
        return [str(row[0]) for row in await self._pool.rows("find_batches", *id_range(prefix))]

    async def batch_ids(
        self, *, limit: int = 50, cursor: str | None = None
    ) -> tuple[list[str], str | None]:
        limit = page_size(limit)
        before = list_position(cursor, LARGEST_NUMBER)
        return batch_page(await self._pool.rows("list_batches", before, limit + 1), limit)

    async def batch_number(self, batch_id: str) -> int:
        return int((await self._batch(batch_id))["number"])

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]:
        limit = page_size(limit)
        first = list_position(cursor, 0)
        number, batch_id, workflow, count, created_at, *deleted = await self._batch(batch_id)
        by_status: dict[str, int] = {}
        ended = None
        if counts:
            by_status, finished, last = await self._counted(number)
            ended = batch_end(count, by_status, finished, last, *deleted)
        runs = await self._batch_runs(number, first, limit)
        return batch_view((batch_id, workflow, count, created_at), by_status, ended, runs, limit)

    async def _counted(self, number: int) -> tuple[dict[str, int], int, float]:
        """As `batch_counts`."""
        return batch_counts(await self._pool.rows("batch_counts", number))

    async def _batch_runs(
        self, number: int, first: int, limit: int
    ) -> Sequence[tuple[int, str, str]]:
        """Index, id and status of the runs of a page, and of one more."""
        return await self._pool.rows("batch_runs", number, first, limit + 1)

    # ── limits ───────────────────────────────────────────────────────────────────────────

    async def limits(self) -> dict[str, tuple[float, int]]:
        rows = await self._pool.rows("limits")
        return {tag.decode(): (rate, burst) for tag, rate, burst in rows}

    async def set_limit(self, tag: str, rate: float, burst: int, by: Author) -> None:
        async def write(connection: PostgresConnection) -> None:
            sql = statements()
            await connection.execute(sql["lock_limits"])
            row = await connection.fetchrow(sql["read_limit"], tag.encode())
            before = None if row is None else (float(row[0]), int(row[1]))
            if before != (rate, burst):
                kept = min(burst, LARGEST_NUMBER)
                await connection.execute(sql["set_limit"], tag.encode(), float(rate), kept)
                details = limit_details(rate, burst, before)
                await _remember(connection, "limit", tag, by, "limit", details)

        await self._pool.transact(write)

    # ── the doctor ───────────────────────────────────────────────────────────────────────

    async def doctor(self) -> list[DoctorFinding]:
        """What is found of the database; that it cannot be reached is a finding, too."""
        before = time.time()
        try:
            seen = await self._pool.row("health")
            unfinished = (await self._pool.row("count_unfinished"))[0]
        except StoreError as error:
            fix = "see to it that PostgreSQL runs and DOVETAIL_DATABASE_URL names it"
            return [DoctorFinding("database", False, str(error), fix)]
        after = time.time()
        found = [
            DoctorFinding(
                "database",
                True,
                f"{self._pool.where}, version {seen['version_text']}, {seen['size']:,} bytes, "
                f"{unfinished:,} unfinished runs",
            ),
            DoctorFinding("schema", True, f"version {SCHEMA_VERSION}"),
        ]
        if self._pool.is_pooled:
            found.append(DoctorFinding("pooler", True, "reached through a connection pooler"))
        fix = "" if seen["version"] >= OLDEST_SERVER else "upgrade PostgreSQL to 12 or newer"
        if fix:
            found.append(
                DoctorFinding("version", False, f"version {seen['version_text']} is old", fix)
            )
        fix = "name the primary in DOVETAIL_DATABASE_URL" if seen["read_only"] else ""
        said = "it is read-only" if fix else "it can be written"
        found.append(DoctorFinding("writable", not fix, said, fix))
        found.append(_durability(seen["fsync"], seen["synchronous_commit"]))
        free = seen["max_connections"] - seen["connections"]
        fix = "" if free >= MAX_CONNECTIONS else "raise max_connections, or start fewer processes"
        found.append(
            DoctorFinding("connections", not fix, f"{free} of its connections are free", fix)
        )
        apart = max(before - seen["time"], seen["time"] - after, 0.0)
        fix = "" if apart <= MAX_APART_SECONDS else "set the clocks of both machines"
        said = f"{apart:,.1f} s apart from this machine's" if apart else "as on this machine"
        found.append(DoctorFinding("database clock", not fix, said, fix))
        return found


def _durability(fsync: bool, synchronous_commit: str) -> DoctorFinding:
    if not fsync:
        said = "fsync is off: a power cut may destroy the database"
        return DoctorFinding("durability", False, said, "ALTER SYSTEM SET fsync = on")
    if synchronous_commit == "off":
        said = "synchronous_commit is off: a crash may lose runs that were acknowledged"
        return DoctorFinding("durability", False, said, "ALTER SYSTEM SET synchronous_commit = on")
    return DoctorFinding("durability", True, "a commit survives a crash")


# ── in a transaction ─────────────────────────────────────────────────────────────────────


async def _take_key(connection: PostgresConnection, key: Key, made: str) -> bool:
    """False if this request took it, before the connection broke. Raises `KeyUsed`."""
    scope, name, body = key
    sql = statements()
    if await connection.fetchval(sql["add_key"], scope, name.encode(), body, made) is not None:
        return True
    known_body, known = await connection.fetchrow(sql["find_key"], scope, name.encode())
    if known != made:
        raise KeyUsed(known, known_body == body)
    return False


async def _add_batch(
    connection: PostgresConnection,
    batch_id: str,
    workflow: str,
    count: int,
    key: Key | None,
    now: float,
) -> int | None:
    """The number of a new batch; None if it was made before. Raises `KeyUsed`."""
    if key is not None and not await _take_key(connection, key, batch_id):
        return None
    number: int | None = await connection.fetchval(
        statements()["add_batch"], batch_id, workflow, count, now
    )
    return number


async def _add_runs(
    connection: PostgresConnection,
    stored: StoredDefinition,
    submits: Sequence[Submit],
    places: Sequence[int | None],
    batch: int | None,
    now: float,
) -> int:
    """How many are new."""
    sql = statements()
    values = _values(stored, submits, places, batch, now)
    added = await connection.fetch(sql["add_runs"], *values)
    if not added:  # most definitions are known, so that is looked at only now
        await connection.execute(sql["add_definition"], stored.sha256, stored.content)
        added = await connection.fetch(sql["add_runs"], *values)
    return len(added)


def _values(
    stored: StoredDefinition,
    submits: Sequence[Submit],
    places: Sequence[int | None],
    batch: int | None,
    now: float,
) -> tuple[Any, ...]:
    """What `add_runs` takes."""
    first = submits[0]
    return (
        first.graph.name,
        first.version,
        stored.sha256,
        stored.retries,
        batch,
        now,
        [submit.run_id for submit in submits],
        [orjson.dumps(submit.params) for submit in submits],
        list(places),
        fork_meta(first),
    )


def fork_meta(submit: Submit) -> bytes | None:
    """What of a fork is accepted beside the params: enough to begin it from the older run."""
    if submit.forked_from is None:
        return None
    reuse = orjson.dumps(list(submit.reuse)).decode()
    return orjson.dumps({"forked_from": submit.forked_from, "reuse": reuse})


async def _now_seen(
    connection: PostgresConnection, name: str, latest: int
) -> dict[str, AliasTarget]:
    """The aliases of a registered workflow in this transaction, `latest` among them."""
    return _aliases(latest, await connection.fetch(statements()["aliases"], name))


def _aliases(latest: int, rows: Iterable[Sequence[Any]]) -> dict[str, AliasTarget]:
    found: dict[str, AliasTarget] = {}
    for alias, version, weights in rows:
        found[alias] = target_of_row(version, weights)
    return {**found, LATEST: latest}


async def _versions(connection: PostgresConnection, name: str) -> list[int]:
    return [row[0] for row in await connection.fetch(statements()["versions"], name)]


async def _remember(
    connection: PostgresConnection,
    of: HistoryOf,
    name: str,
    by: Author,
    action: str,
    details: dict[str, Any],
) -> None:
    row = (of, name.encode(), by.time, by.actor, action, orjson.dumps(details).decode())
    await connection.execute(statements()["add_history"], *row)
