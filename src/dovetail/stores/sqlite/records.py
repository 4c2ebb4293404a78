"""Records in the SQLite file: workflows, lists of runs, batches, limits, and the doctor.

Views have the fields of the HTTP API.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import orjson

from dovetail.core.aliases import AliasTarget, versions_named
from dovetail.core.audit.replay import JournalEntry
from dovetail.core.errors import BrokenRecord, StoreError
from dovetail.core.node_logs import StoredChunk
from dovetail.core.states import RunStatus
from dovetail.core.text import counted
from dovetail.engine.limits import FASTEST, LARGEST_BURST, SLOWEST
from dovetail.engine.ports import (
    ALL_RUNS,
    MAX_LOG_PAGE_BYTES,
    Author,
    DoctorFinding,
    HistoryOf,
    Key,
    Registered,
    RunQuery,
    RunTally,
    Seen,
    WorkflowVersion,
)
from dovetail.engine.views import event_view
from dovetail.engine.webhooks import outbox_findings
from dovetail.stores.records import (
    LATEST,
    PAGE_BYTES,
    BaseRecords,
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
    run_status,
    stored_chunk,
    stored_target,
    summary_of,
    target_of_row,
    version_item,
    workflow_item,
    workflow_view,
)
from dovetail.stores.sqlite.deletion import INCREMENTAL
from dovetail.stores.sqlite.file import (
    SCHEMA_VERSION,
    readable_by_others,
    split_statements,
    statements,
)
from dovetail.stores.sqlite.store import SqliteStore
from dovetail.stores.sqlite.writer import PIECES, add_batch, definition_number, piece

_LAST_NUMBER = 1 << 62
LEAST_FREE_BYTES = 64 << 20
MAX_NEWEST = 200
MAX_LOOKED_AT = 10_000
MAX_NAMED = 20
"""What the doctor examines and reports; `runs verify --all` examines everything."""

log = logging.getLogger("dovetail.store")

MAX_AHEAD_SECONDS = 60.0


class SqliteRecords(BaseRecords):
    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._aside: set[Any] = set()
        """Tags with unreadable limits that were logged."""

    @property
    def _where(self) -> object:
        return self._store.file.name

    def _one(self, name: str, *values: Any) -> Any:
        rows = self._store.rows(name, *values)
        return rows[0] if rows else None

    # ── registered workflows ─────────────────────────────────────────────────────────────

    async def register(
        self, name: str, sha256: str, content: bytes, by: Author, seen: Seen | None = None
    ) -> WorkflowVersion:
        now = by.time

        def write(connection: sqlite3.Connection) -> WorkflowVersion:
            sql = statements()
            known = connection.execute(sql["read_workflow"], (name,)).fetchone()
            latest = known[1] if known else 0
            number = definition_number(connection, sha256, content)
            if known and not known[4]:
                same = connection.execute(sql["read_version"], (name, latest)).fetchone()
                if same is not None and same[1] == number:
                    return WorkflowVersion(name, latest, created=False)
            check_seen(name, seen, _now_seen(connection, name))
            connection.execute(sql["save_workflow"], (name, latest + 1, now, now))
            connection.execute(sql["add_version"], (name, latest + 1, number, now))
            details = {"version": latest + 1, "sha256": sha256}
            _remember(connection, "workflow", name, by, "register", details)
            return WorkflowVersion(name, latest + 1, created=True)

        made: WorkflowVersion = await self._store.transact(write)
        return made

    async def _read_version(self, name: str, version: int) -> Registered | None:
        row = self._one("read_version", name, version)
        if row is None:
            return None
        if not _is_version(row):
            raise self._damaged(f"version {version} of workflow '{name}'", "register it again")
        return Registered(name, row[0], row[1], row[3], row[2])

    async def _latest(self, name: str) -> int:
        row = self._one("read_workflow", name)
        if row is None or row[4]:
            raise no_workflow(name, self._where)
        if not isinstance(row[1], int):
            raise self._damaged(f"workflow '{name}'", "delete it and register it again")
        return row[1]

    def _damaged(self, what: str, fix: str) -> BrokenRecord:
        return BrokenRecord(
            f"{what} in {self._where} cannot be read, and all others can: restore the "
            f"file from a copy, or {fix}"
        )

    async def _head(self, name: str, version: int | None = None) -> WorkflowHead:
        latest = await self._latest(name)
        has_version = version is not None and self._one("has_version", name, version) is not None
        return WorkflowHead(latest, self._aliases(name, latest), has_version)

    def _aliases(self, name: str, latest: int) -> dict[str, AliasTarget]:
        return {**_aliases(self._store.rows("aliases", name)), LATEST: latest}

    async def workflow(self, name: str, version: int | str | None = None) -> dict[str, Any]:
        found = await self.registered(name, version)
        try:
            definition = orjson.loads(found.content)
        except orjson.JSONDecodeError:
            what = f"version {found.version} of workflow '{name}'"
            raise self._damaged(what, "register it again") from None
        return workflow_view(found, (await self._head(name)).aliases, definition)

    async def workflows(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        limit = page_size(limit)
        rows = self._store.rows("workflows", cursor or "", limit + 1)
        items = [
            workflow_item(name, latest, self._aliases(name, latest), created_at, updated_at)
            for name, latest, created_at, updated_at in rows[:limit]
            if isinstance(name, str) and isinstance(latest, int)  # else the doctor reports it
        ]
        return {"items": items, "next_cursor": rows[limit - 1][0] if len(rows) > limit else None}

    async def versions(self, name: str) -> dict[str, Any]:
        await self._latest(name)
        return {"items": [version_item(*row) for row in self._store.rows("versions", name)]}

    async def _delete_workflow(self, name: str, by: Author, seen: Seen | None) -> int:
        def write(connection: sqlite3.Connection) -> int:
            sql = statements()
            now = _now_seen(connection, name)
            check_seen(name, seen, now)
            active = int(connection.execute(sql["active_runs"], (name, None)).fetchone()[0])
            if now and not active:
                details = {"versions": _versions(connection, name), "aliases": now}
                _remember(connection, "workflow", name, by, "delete", details)
                connection.execute(sql["delete_workflow"], (name,))
                connection.execute(sql["drop_versions"], (name,))
                connection.execute(sql["drop_aliases"], (name,))
            return active

        active: int = await self._store.transact(write)
        return active

    async def _delete_version(self, name: str, version: int, by: Author, seen: Seen | None) -> int:
        def write(connection: sqlite3.Connection) -> int:
            sql = statements()
            there = _versions(connection, name)
            if version not in there:
                raise no_version(name, version, there)
            now = _now_seen(connection, name)
            check_seen(name, seen, now)
            refuse_named(name, version, now)
            active = int(connection.execute(sql["active_runs"], (name, version)).fetchone()[0])
            if not active:
                connection.execute(sql["drop_version"], (name, version))
                _remember(connection, "workflow", name, by, "delete", {"version": version})
            return active

        active: int = await self._store.transact(write)
        return active

    async def _set_alias(
        self, name: str, alias: str, target: AliasTarget, by: Author, seen: Seen | None
    ) -> int | None:
        def write(connection: sqlite3.Connection) -> int | None:
            there = _versions(connection, name)
            for version in versions_named(target):
                if version not in there:
                    return version
            now = _now_seen(connection, name)
            before = now.get(alias)
            if before != target:
                check_seen(name, seen, now)
                row = (name, alias, *stored_target(target))
                connection.execute(statements()["set_alias"], row)
                details = alias_details(alias, target, before)
                _remember(connection, "workflow", name, by, "alias", details)
            return None

        missing: int | None = await self._store.transact(write)
        return missing

    async def _delete_alias(self, name: str, alias: str, by: Author, seen: Seen | None) -> None:
        def write(connection: sqlite3.Connection) -> None:
            now = _now_seen(connection, name)
            if alias not in now:
                raise no_alias(name, alias, now)
            check_seen(name, seen, now)
            connection.execute(statements()["delete_alias"], (name, alias))
            details = {"alias": alias, "from": now[alias]}
            _remember(connection, "workflow", name, by, "delete", details)

        await self._store.transact(write)

    async def _was_registered(self, name: str) -> bool:
        return self._one("read_workflow", name) is not None

    async def _history(
        self, of: HistoryOf, name: str, limit: int, cursor: str | None
    ) -> dict[str, Any]:
        before = list_position(cursor, _LAST_NUMBER)
        return history_page(self._store.rows("history", of, name, before, limit + 1), limit)

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def _runs_beginning_with(self, prefix: str) -> list[str]:
        return [row[0] for row in self._store.rows("find_runs", *id_range(prefix))]

    async def list_runs(self, query: RunQuery = ALL_RUNS) -> dict[str, Any]:
        limit, most = page_size(query.limit), query.max_result_bytes
        given = conditions(query, None if query.batch is None else self._batch(query.batch)[0])
        before = list_position(query.cursor, _LAST_NUMBER)
        stop = None if most is None else _is_enough()
        rows = self._store.rows("summaries", before, limit + 1, most, stop=stop, **given)
        items = rows[:limit]
        # Where the page was cut by its bytes, only the next one shows whether there are more.
        more = len(rows) > limit or (stop is not None and _weight(rows) > PAGE_BYTES)
        last = str(items[-1][0]) if more else None
        return {"items": [summary_of(row) for row in items], "next_cursor": last}

    async def count_runs(self, workflow: str | None, edges: Sequence[float]) -> RunTally:
        # There is no index by time: runs are numbered in the order of their creation.
        numbers = [self._first_since(edge) for edge in edges]
        created = [self._statuses(workflow, *between) for between in pairwise(numbers)]
        return RunTally(self._statuses(workflow, 0, _LAST_NUMBER), created)

    def _first_since(self, time: float) -> int:
        """The number from which on runs were created at this time or later."""
        low, high = 0, (self._one("last_run") or (0,))[0] + 1
        while low < high:
            middle = (low + high) // 2
            found = self._one("run_from", middle)
            if found is None or found[1] >= time:
                high = middle
            else:
                low = found[0] + 1
        return low

    def _statuses(self, workflow: str | None, first: int, end: int) -> dict[str, int]:
        """How many runs with these numbers are in each status."""
        if workflow is not None:
            return dict(self._store.rows("count_runs_of_workflow", workflow, first, end))
        counted = {
            status.value: self._one("count_runs", status.value, first, end)[0]
            for status in RunStatus
        }
        return {status: runs for status, runs in counted.items() if runs}

    async def summary(self, run_id: str, most: int | None = None) -> dict[str, Any]:
        row = self._one("summary", run_id, most)
        if row is None:
            raise no_run(run_id, self._where)
        return summary_of(row)

    async def entries(self, run_id: str, after: int = 0) -> list[JournalEntry]:
        """The journal of a run, from the piece that has the event `after` + 1 on."""
        rows = self._store.rows("read_entries", *self._pieces(run_id, after))
        return self._store.entries_of(run_id, rows)

    def _pieces(self, run_id: str, after: int) -> tuple[int, int]:
        """The first and the last piece that may have events after this one."""
        row = self._one("is_finished", run_id)
        if row is None:
            raise no_run(run_id, self._where)
        first, last = piece(row[0], 0), piece(row[0], PIECES - 1)
        found = self._one("piece_with", first, last, min(after, _LAST_NUMBER) + 1)
        return (first if found is None or found[0] is None else found[0]), last

    async def events(
        self, run_id: str, after: int = 0, limit: int | None = None
    ) -> list[dict[str, Any]]:
        at, last = self._pieces(run_id, after)
        found: list[dict[str, Any]] = []
        while rows := self._store.part(at, last):
            for row in rows:
                # Piece by piece: a page of events does not pay for all that follow it.
                found += [
                    event_view(event)
                    for entry in self._store.entries_of(run_id, (row,))
                    for event in entry.events
                    if event.seq > after
                ]
                if limit is not None and len(found) >= limit:
                    return found[:limit]
            if not rows.is_full:
                break
            at = rows[-1][0] + 1
            await asyncio.sleep(0)
        return found[:limit]

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
        run = self._one("is_finished", run_id)
        if run is None:
            raise no_run(run_id, self._store.file.name)
        given = {"node": node, "epoch": epoch, "attempt": attempt, "item": item}
        given = {name: value for name, value in given.items() if value is not None}
        size = 0

        def is_full(row: Any) -> bool:
            nonlocal size
            size += len(row[-1])
            return size >= max_bytes

        after = min(after, _LAST_NUMBER)
        rows = self._store.rows("read_logs", run[0], after, stop=is_full, **given)
        if size > max_bytes and len(rows) > 1:
            rows.pop()
        return [stored_chunk(run_id, row) for row in rows]

    # ── batches ──────────────────────────────────────────────────────────────────────────

    def _batch(self, batch_id: str) -> Any:
        row = self._one("read_batch", batch_id)
        if row is None:
            raise no_batch(batch_id, self._where)
        if not isinstance(row[2], str) or not isinstance(row[3], int):
            raise self._damaged(f"batch '{batch_id}'", "make another one of its items")
        return row

    async def open_batch(
        self, batch_id: str, workflow: str, count: int, key: Key | None, now: float
    ) -> None:
        """Make a batch whose runs come later. Raises `KeyUsed`."""

        await self._store.transact(
            lambda connection: add_batch(connection, batch_id, workflow, count, key, now)
        )

    async def _batches_beginning_with(self, prefix: str) -> list[str]:
        return [row[0] for row in self._store.rows("find_batches", *id_range(prefix))]

    async def batch_ids(
        self, *, limit: int = 50, cursor: str | None = None
    ) -> tuple[list[str], str | None]:
        limit = page_size(limit)
        before = list_position(cursor, _LAST_NUMBER)
        return batch_page(self._store.rows("list_batches", before, limit + 1), limit)

    async def batch_number(self, batch_id: str) -> int:
        return int(self._batch(batch_id)[0])

    async def get_batch(
        self, batch_id: str, *, limit: int = 100, cursor: str | None = None, counts: bool = True
    ) -> dict[str, Any]:
        limit = page_size(limit)
        number, batch_id, workflow, count, created_at, *deleted = self._batch(batch_id)
        counted = self._store.rows("batch_counts", number) if counts else ()
        by_status, finished, ended = batch_counts(counted)
        rows = self._store.rows("batch_runs", number, list_position(cursor, 0), limit + 1)
        return batch_view(
            (batch_id, workflow, count, created_at),
            by_status,
            batch_end(count, by_status, finished, ended, *deleted),
            [(index, run_id, run_status(status)) for index, run_id, status in rows],
            limit,
        )

    # ── limits ───────────────────────────────────────────────────────────────────────────

    async def limits(self) -> dict[str, tuple[float, int]]:
        found = {}
        for tag, rate, burst in self._store.rows("limits"):
            if _is_limit(tag, rate, burst):
                found[tag] = (float(rate), burst)
            elif tag not in self._aside:
                self._aside.add(tag)
                log.error(
                    "the rate limit of %r in %s cannot be read and does not hold; set it again: "
                    "dovetail limits set",
                    tag,
                    self._where,
                )
        return found

    async def set_limit(self, tag: str, rate: float, burst: int, by: Author) -> None:
        def write(connection: sqlite3.Connection) -> None:
            sql = statements()
            row = connection.execute(sql["read_limit"], (tag,)).fetchone()
            before = row if row is not None and _is_limit(tag, *row) else None
            if before != (rate, burst):
                connection.execute(sql["set_limit"], (tag, rate, burst))
                details = limit_details(rate, burst, before)
                _remember(connection, "limit", tag, by, "limit", details)

        await self._store.transact(write)

    def _schema_findings(self) -> Iterable[DoctorFinding]:
        """Tables and indexes that are missing."""
        there = {name for (name,) in self._store.rows("things")}
        made = (
            statement
            for part in (*(f"schema_{number}" for number in range(1, SCHEMA_VERSION + 1)), "views")
            for statement in split_statements(statements()[part])
            if statement.startswith("CREATE")
        )
        for statement in made:
            name = _named(statement)
            if name not in there:
                kind = _KINDS.get(statement.split()[1], "index")
                fix = "restore the file from a copy"
                if kind != "table":
                    sql = " ".join(statement.split())
                    fix = f'sqlite3 {self._where} "{sql}"'
                yield DoctorFinding("schema", False, f"the {kind} {name} is missing", fix)

    def _damage_findings(self) -> Iterable[DoctorFinding]:
        """Runs and records that cannot be read: each is left alone, and all others go on."""
        found = list(self._store.unreadable(MAX_NEWEST, MAX_LOOKED_AT))
        for run_id, why in found[:MAX_NAMED]:
            fix = f"dovetail runs repair {run_id[:6]}, or end it: dovetail runs cancel {run_id[:6]}"
            yield DoctorFinding("damaged", False, f"run {run_id}: {why}", fix)
        if len(found) > MAX_NAMED:
            what = f"and {len(found) - MAX_NAMED:,} more runs cannot be read"
            yield DoctorFinding("damaged", False, what, "dovetail runs verify --all")
        for tag, rate, burst in self._store.rows("limits"):
            if not _is_limit(tag, rate, burst):
                what = f"the rate limit of '{tag}' cannot be read and does not hold"
                yield DoctorFinding("damaged", False, what, "set it again: dovetail limits set")
        for name, latest, *_ in self._store.rows("workflows", "", MAX_LOOKED_AT):
            if not isinstance(name, str) or not isinstance(latest, int):
                what = f"workflow {name!r} cannot be read"
                yield DoctorFinding("damaged", False, what, "restore the file from a copy")

    # ── the doctor ───────────────────────────────────────────────────────────────────────

    async def doctor(self) -> list[DoctorFinding]:
        """What is found of the file."""
        file = self._store.file
        path = file.path
        mode, damage = self._store.pragma("journal_mode"), self._store.pragma("quick_check(1)")
        free = shutil.disk_usage(path.parent).free
        runs, unfinished = self._one("counts")
        newest = self._one("newest_run")[0]
        ahead = (newest if isinstance(newest, float) else 0.0) - time.time()
        orphans = await self._store.orphans()
        weight, many = counted(path.stat().st_size, "byte"), counted(runs, "run")
        size = f"{path}, {weight}, {many}, {unfinished:,} unfinished"
        found = [
            DoctorFinding("file", True, size),
            DoctorFinding("schema", True, f"version {SCHEMA_VERSION}, sync {file.sync}"),
        ]
        try:
            await self._store.transact(_touch)
            found.append(DoctorFinding("writable", True, "it can be written"))
        except StoreError as error:
            fix = f"give this user write access to {path} and its folder, and space on the disk"
            found.append(DoctorFinding("writable", False, str(error), fix))
        if damage == "ok":
            found.append(DoctorFinding("integrity", True, "no damage found"))
        else:
            found.append(DoctorFinding("integrity", False, damage, "restore the file from a copy"))
        found += [*self._schema_findings(), *self._damage_findings()]
        waiting, due, dead = self._one("count_notifications")
        found += outbox_findings(waiting, 0.0 if due is None else time.time() - due)
        if dead:
            what = counted(dead, "notification was given up", "notifications were given up")
            fix = "see dovetail dead-letters list; correct the receivers, then requeue or drop them"
            found.append(DoctorFinding("dead letters", True, what, fix))
        if mode != "wal":
            fix = f"sqlite3 {path} 'PRAGMA journal_mode = WAL'"
            found.append(
                DoctorFinding("journal", False, f"its journal mode is {mode}, not wal", fix)
            )
        if self._store.pragma("auto_vacuum") != INCREMENTAL:
            unused = self._store.pragma("freelist_count") * self._store.pragma("page_size")
            what = (
                f"{counted(unused, 'byte')} of deleted runs are used for new runs, not given back"
            )
            # A warning: an older version made the file, and it works.
            fix = f"stop what uses it, then: sqlite3 {path} 'PRAGMA auto_vacuum = 2; VACUUM'"
            found.append(DoctorFinding("space", True, what, fix))
        if exposed := readable_by_others(path):
            names = " ".join(map(str, exposed))
            what = f"others on this machine may read or write {names}"
            # A warning: it may be shared on purpose, and is left as it is.
            found.append(DoctorFinding("access", True, what, f"chmod 600 {names}"))
        fix = "" if free > LEAST_FREE_BYTES else "free some space, or move the file: DOVETAIL_DB"
        found.append(DoctorFinding("disk", not fix, f"{free >> 20:,} MiB free", fix))
        if ahead > MAX_AHEAD_SECONDS:
            what = f"the newest run was made {ahead:,.0f} s in the future"
            found.append(DoctorFinding("clock", False, what, "set the clock of this machine"))
        else:
            found.append(DoctorFinding("clock", True, "not behind the newest run"))
        if orphans:
            some = ", ".join(run_id[:6] for run_id in orphans[:5])
            many = counted(len(orphans), "run is", "runs are")
            what = f"{many} interrupted, no process is running: {some}"
            found.append(DoctorFinding("drivers", False, what, "dovetail runs resume"))
        else:
            found.append(
                DoctorFinding(
                    "drivers", True, "no run is interrupted: each unfinished one has its process"
                )
            )
        return found


_KINDS = {"TABLE": "table", "TRIGGER": "trigger", "VIEW": "view"}


def _named(statement: str) -> str:
    """What a statement of the schema makes: its name is the third word, or the fourth."""
    words = statement.split()
    return words[3] if words[1] == "UNIQUE" else words[2]


def _weight(rows: Iterable[Any]) -> int:
    """Bytes of params and results."""
    values = (value for row in rows for value in (row[6], row[11]))
    return sum(len(value) for value in values if isinstance(value, bytes | str))


def _is_enough() -> Callable[[Any], bool]:
    """Asked of each row in turn: whether the page is heavy enough with it."""
    weight = 0

    def enough(row: Any) -> bool:
        nonlocal weight
        weight += _weight([row])
        return weight > PAGE_BYTES

    return enough


def _touch(connection: sqlite3.Connection) -> None:
    """A write that changes nothing."""
    connection.execute("UPDATE owners SET pid = pid WHERE owner = ''")


def _remember(
    connection: sqlite3.Connection,
    of: HistoryOf,
    name: str,
    by: Author,
    action: str,
    details: dict[str, Any],
) -> None:
    row = (of, name, by.time, by.actor, action, orjson.dumps(details).decode())
    connection.execute(statements()["add_history"], row)


def _versions(connection: sqlite3.Connection, name: str) -> list[int]:
    return [row[0] for row in connection.execute(statements()["versions"], (name,))]


def _now_seen(connection: sqlite3.Connection, name: str) -> dict[str, AliasTarget]:
    """Its aliases in this transaction, `latest` among them; none if it is not registered."""
    known = connection.execute(statements()["read_workflow"], (name,)).fetchone()
    if known is None or known[4]:
        return {}
    return {**_aliases(connection.execute(statements()["aliases"], (name,))), LATEST: known[1]}


def _aliases(rows: Iterable[tuple[Any, Any, Any]]) -> dict[str, AliasTarget]:
    """Without unreadable ones: setting them again repairs them."""
    found: dict[str, AliasTarget] = {}
    for name, version, weights in rows:
        with suppress(TypeError, ValueError):
            if isinstance(name, str):
                found[name] = target_of_row(version, weights)
    return found


def _is_version(row: Sequence[Any]) -> bool:
    version, definition, created_at, content = row
    return (
        isinstance(version, int)
        and isinstance(definition, int)
        and isinstance(created_at, float)
        and isinstance(content, bytes)
    )


def _is_limit(tag: Any, rate: Any, burst: Any) -> bool:
    return (
        isinstance(tag, str)
        and isinstance(rate, float)
        and isinstance(burst, int)
        and SLOWEST <= rate <= FASTEST
        and 1 <= burst <= LARGEST_BURST
    )
