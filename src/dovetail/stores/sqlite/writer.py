"""Commits to the file: in a thread, or in the event loop where that is faster.

A commit holds everything that was staged while the previous one was written: one transaction and
one sync, however many runs it moves. On a disk that syncs within milliseconds a small commit is
written in the event loop: a thread would take as long again.

Journal entries are JSON, so that people can read them. They are checked when they are read: a file
may be damaged, or written by a newer version.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import orjson

from dovetail.core.audit.replay import (
    KINDS,
    MAX_COUNT,
    JournalEntry,
    UnreadableJournal,
    extra_of,
    published,
)
from dovetail.core.effects import COMPLETED, new_tuple
from dovetail.core.errors import BrokenRecord, StoreError
from dovetail.core.events import Event
from dovetail.core.node_logs import LogChunk, encode_lines
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.run import RunState
from dovetail.core.transitions import Complete, Decision, Recall, Submit, Transition
from dovetail.core.webhooks import Notification
from dovetail.engine.ports import KeyUsed
from dovetail.stores.sqlite.file import SqliteFile, statements

log = logging.getLogger("dovetail.store")

OUTPUTS = frozenset({KINDS[Complete], KINDS[Recall]})
"""Entries whose extra is an output."""
BEGINNING = KINDS[Submit]
"""The entry whose extra has the reused outputs of a fork."""


class Staged:
    """A decision on its way into the file."""

    __slots__ = ("decision", "move", "now", "seq")

    def __init__(self, move: Submit | Transition, now: float, seq: int, decision: Decision) -> None:
        self.move = move
        self.now = now
        self.seq = seq
        """Of its first event."""
        self.decision = decision


def encoded(staged: Iterable[Staged]) -> bytes:
    """One piece of a run's log."""
    return orjson.dumps(
        [
            (
                one.now,
                KINDS[type(one.move)],
                extra_of(one.move, one.decision),
                published(one.decision.dispatch) if one.decision.dispatch else (),
                # Without `seq` and `time`, which follow from the piece and the entry.
                [event[2:] for event in one.decision.events],
            )
            for one in staged
        ]
    )


def decoded(rows: Iterable[tuple[int, int, bytes]]) -> Iterator[JournalEntry]:
    """The entries of these pieces (id, seq of the first event, bytes). Raises `Unreadable`."""
    for _, seq, piece in rows:
        if type(seq) is not int or not 0 < seq < 1 << 62:
            raise UnreadableJournal(f"{seq!r} is no number of an event")
        try:
            entries = orjson.loads(piece)
            if type(entries) is not list or not entries:
                raise UnreadableJournal(f"event {seq}: a piece of the log holds no entries")
            for time, kind, extra, dispatch, events in entries:
                made = _events(seq, time, events)
                if type(kind) is not str or type(dispatch) is not list:
                    raise UnreadableJournal(f"event {seq}: a field of its entry has another type")
                yield JournalEntry(seq, time, kind, extra, dispatch, made)
                seq += len(made)
        except UnreadableJournal:
            raise
        except (TypeError, ValueError) as problem:  # no JSON, or not as many fields as there are
            why = f"event {seq}: its entry cannot be read ({problem})"
            raise UnreadableJournal(why) from None


def _events(seq: int, time: float, events: Sequence[Sequence[Any]]) -> list[Event]:
    if type(time) is not float and type(time) is not int:
        raise UnreadableJournal(f"event {seq}: {time!r} is no time")
    made = []
    for number, (kind, epoch, node, attempt, data) in enumerate(events, seq):
        if (
            type(kind) is not str
            or type(epoch) is not int
            or not 0 <= epoch < MAX_COUNT
            or (node is not None and type(node) is not str)
            or (attempt is not None and (type(attempt) is not int or not 0 <= attempt < MAX_COUNT))
            or (data is not None and type(data) is not dict)
        ):
            raise UnreadableJournal(f"event {number}: a field of it has another type")
        made.append(new_tuple(Event, (number, time, kind, epoch, node, attempt, data)))
    return made


def has_outputs(extra: Any) -> bool:
    """Whether this is what a fork begins with."""
    return isinstance(extra, dict) and isinstance(extra.get("outputs"), dict)


def thinned(
    row: tuple[int, int, bytes], room: ReadBudget | None, entries: list[JournalEntry]
) -> ReadBudget | None:
    """Add the entries of a piece, without the outputs that there is no room for.

    Returns the room that is left; without a room there is no output at all. One that is left out
    is an `Elsewhere` that says where in the piece its bytes are.
    """
    number, _, text = row
    if room is not None and len(text) <= min(room):
        entries += decoded([row])
        return ReadBudget(room.each, room.together - len(text))
    at = 0

    def thin(output: Any) -> Any:
        """The output, or where it is in the piece; outputs come in the order of the bytes."""
        nonlocal at, room
        if room is None:
            return None
        encoded = orjson.dumps(output)
        size = len(encoded)
        if size <= min(room):
            room = ReadBudget(room.each, room.together - size)
            return output
        found = text.find(encoded, at)
        if found < 0:
            return output
        at = found + size
        return OutputReference(size, (number, found))

    for entry in decoded([row]):
        extra = entry.extra
        if entry.kind in OUTPUTS:
            entries.append(entry._replace(extra=thin(extra)))
        elif entry.kind == BEGINNING and has_outputs(extra):
            outputs = {name: thin(output) for name, output in extra["outputs"].items()}
            entries.append(entry._replace(extra={**extra, "outputs": outputs}))
        else:
            entries.append(entry)
    return room


def refer_to_lists(run: RunState) -> None:
    """The output of a mapped node of which some items were left out is left out as a whole."""
    for node in run.nodes:
        if node.items is None or node.status is not COMPLETED:
            continue
        outputs = node.items.outputs
        if any(type(output) is OutputReference for output in outputs):
            parts = [o if type(o) is OutputReference else orjson.dumps(o) for o in outputs]
            sizes = [p.size if isinstance(p, OutputReference) else len(p) for p in parts]
            node.output = OutputReference(sum(sizes) + len(sizes) + 1, parts)


T = TypeVar("T")

CHECK_SECONDS = 0.1
QUICK_SECONDS = 0.002
"""A commit that takes longer is left to the thread; the event loop has other things to do."""
COMMITS_PER_CHECKPOINT = 500
PIECES = 1 << 24
"""How many pieces a run's log may have; its number is the rest of a piece's id."""


def piece(number: int, place: int) -> int:
    return number * PIECES + place


class Writer:
    """Runs pieces of work on a connection of its own, one after the other."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._work: SimpleQueue[tuple[Callable[[Any], Any], Callable[..., None]] | None]
        self._work = SimpleQueue()
        self._connection = file.connect()
        # For commits in the event loop. It never waits for a lock: then the thread does.
        self._here = file.connect(wait=False)
        self._here.execute("PRAGMA wal_autocheckpoint = 0")
        self._since_checkpoint = 0
        self._usual_seconds = 1.0
        self._check_at = 0.0
        self.commits = 0
        """Transactions that were committed, for tests that count them."""
        self._has_lost_logs = False
        self._thread = threading.Thread(target=self._run, name="dovetail-writer", daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Callable[[sqlite3.Connection], T],
        then: Callable[[T | None, BaseException | None], None],
    ) -> None:
        """Do `work` in the thread; `then` is called in the event loop with what came of it."""
        self._work.put((work, then))

    def perform(self, work: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()

        def then(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        self.submit(work, then)
        return future

    def commit(self, round_: CommitRound) -> CommitOutcome | None:
        """Write a round in the calling thread, if that is quick; None if it was left alone."""
        if self._usual_seconds > QUICK_SECONDS:
            return None
        began = time.perf_counter()
        try:
            outcome = commit(self, self._here, round_)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                return None
            raise self._file.explained(error) from error
        except sqlite3.Error as error:
            raise self._file.explained(error) from error
        self._note_time(time.perf_counter() - began)
        self._since_checkpoint += 1
        if self._since_checkpoint >= COMMITS_PER_CHECKPOINT:
            self._since_checkpoint = 0
            self.submit(_checkpoint, lambda result, error: None)
        return outcome

    def commit_in_thread(
        self,
        round_: CommitRound,
        then: Callable[[CommitOutcome | None, BaseException | None], None],
    ) -> None:
        def work(connection: sqlite3.Connection) -> CommitOutcome:
            began = time.perf_counter()
            outcome = commit(self, connection, round_)
            self._note_time(time.perf_counter() - began)
            return outcome

        self.submit(work, then)

    def lose_logs(self, error: BaseException) -> None:
        """Lines of handlers could not be written: said once, as the next will not be, either."""
        if not self._has_lost_logs:
            self._has_lost_logs = True
            log.warning("lines of logs are lost: %s", error)

    def _note_time(self, seconds: float) -> None:
        self._usual_seconds += (seconds - self._usual_seconds) / 4

    def close(self) -> None:
        """After everything that was submitted."""
        self._work.put(None)
        self._thread.join()
        self._here.close()
        self._connection.close()

    def transaction(
        self,
        connection: sqlite3.Connection,
        work: Callable[[sqlite3.Connection], T],
        *,
        makes_runs: bool = True,
    ) -> T:
        """All of it or nothing. To be called from `work`."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.commits += 1
        # Before the caller has its reply: other processes must find what was written. A commit that
        # makes no run is checked now and then: to ask for the file's identity costs a third of it.
        if makes_runs or time.monotonic() > self._check_at:
            self._file.check()
            self._check_at = time.monotonic() + CHECK_SECONDS
        return result

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            work, then = job
            result = None
            error: BaseException | None = None
            try:
                result = work(self._connection)
            except sqlite3.Error as problem:
                error = self._file.explained(problem)
            except BaseException as problem:
                error = problem
            try:
                self._loop.call_soon_threadsafe(then, result, error)
            except RuntimeError:
                return  # the loop is closed: no caller waits
            del work, then, job, result, error


def _checkpoint(connection: sqlite3.Connection) -> None:
    """Carry the log over into the file, as far as no reader is in the way."""
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


class Add(NamedTuple):
    """Pieces of logs to be added, each at its place; `staged` in the order it happened."""

    number: int
    place: int
    staged: Sequence[Staged]


class Projection(NamedTuple):
    """What lists show of a run."""

    number: int
    status: str
    epoch: int
    started_at: float | None
    finished_at: float | None
    error: Any
    result: Any


class Creation(NamedTuple):
    """A run to be made, unless it, its key or its place is there already."""

    run_id: str
    workflow: str
    version: int | None
    sha256: str
    content: bytes
    retries: bytes
    params: Any
    created_at: float
    owner: str | None
    staged: Staged
    projection: Projection
    key: tuple[str, str, str] | None
    """Scope, key and the digest of what was asked."""
    place: tuple[int, int] | None
    """The batch's number and the place in it."""
    notifications: Sequence[Notification] = ()
    """Of a run that ends when it is created."""


class CreatedRun(NamedTuple):
    """What became of a creation: a number, or the run that was there."""

    number: int | None
    known: str | None = None
    same_body: bool = True


class CommitRound(NamedTuple):
    creations: Sequence[Creation]
    additions: Sequence[Add]
    projections: Sequence[Projection]
    outputs: Sequence[tuple[str, float, Any]]
    """For the node cache: key, end of life, output."""
    notifications: Sequence[int]
    """Runs of other owners, which are notified."""
    released: Sequence[int]
    """Runs that we drive no longer."""
    owner: str
    logs: Sequence[LogChunk] = ()
    outbox: Sequence[Notification] = ()
    feed: Sequence[FeedRecord] = ()


FeedRecord = tuple[str, str, int, float, str, int, Any]
"""A run event in the feed: run, workflow, seq, time, type, epoch, data."""
FEED_ROW_EVENTS = 100
"""So many are kept in a row of the feed: a row costs more than what is in it."""


class CommitOutcome(NamedTuple):
    made: Sequence[CreatedRun]
    overtaken: frozenset[int]
    """Runs to which another process appended first, or which it deleted. If there is one, nothing
    was committed."""


class LogConflict(Exception):
    """Another process has appended to a log at the same position, or deleted its run."""


def commit(writer: Writer, connection: sqlite3.Connection, round_: CommitRound) -> CommitOutcome:
    """Write a round, whole or not at all."""
    # Encoded before the file is locked: others wait while we hold it.
    rows = [
        (piece(add.number, add.place), add.staged[0].seq, encoded(add.staged))
        for add in round_.additions
    ]
    lines = [encode_lines(chunk.lines).decode() for chunk in round_.logs]
    try:
        return writer.transaction(
            connection,
            lambda c: _write(c, round_, rows, lines, writer.lose_logs),
            makes_runs=bool(round_.creations),
        )
    except LogConflict:  # and all is undone, so what stands at our places is not ours
        taken = {
            add.number
            for add, row in zip(round_.additions, rows, strict=True)
            if connection.execute(statements()["has_piece"], row[:1]).fetchone()
            or not connection.execute(statements()["has_run"], (add.number,)).fetchone()
        }
        if not taken:  # to go on as if it were written would lose what was answered
            raise StoreError("a round adds to one log twice at the same place") from None
        return CommitOutcome((), frozenset(taken))


def _write(
    connection: sqlite3.Connection,
    round_: CommitRound,
    rows: Sequence[tuple[int, int, bytes]],
    lines: Sequence[str],
    lose_logs: Callable[[BaseException], None],
) -> CommitOutcome:
    sql = statements()
    if rows:
        added = connection.executemany(sql["add_entries"], rows).rowcount
        if added != len(rows):
            raise LogConflict
        _add_to_outbox(connection, round_.outbox)
    made = [_create(connection, creation) for creation in round_.creations]
    _add_to_feed(connection, [*round_.feed, *_beginnings(round_.creations, made)])
    # Before the projection, which lets go of a finished run's owner.
    for number in round_.notifications:
        connection.execute(sql["notify_owner"], (number, round_.owner))
    if round_.projections:
        connection.executemany(sql["project_run"], map(projected, round_.projections))
    if round_.outputs:
        kept = [(key, until, orjson.dumps(output)) for key, until, output in round_.outputs]
        connection.executemany(sql["keep_output"], kept)
    for number in round_.released:
        connection.execute(sql["disown_run"], (number, round_.owner))
    for chunk, content in zip(round_.logs, lines, strict=True):
        try:
            _add_log(connection, chunk, content)
        except (sqlite3.Error, ValueError, OverflowError) as error:
            if not connection.in_transaction:  # a full disk: SQLite has undone everything
                raise
            lose_logs(error)
    return CommitOutcome(made, frozenset())


def feed_records(run_id: str, workflow: str, staged: Iterable[Staged]) -> list[FeedRecord]:
    """The run events among these."""
    return [
        (run_id, workflow, seq, at, kind, epoch, data)
        for one in staged
        for seq, at, kind, epoch, node, _, data in one.decision.events
        if node is None
    ]


def _beginnings(creations: Sequence[Creation], made: Sequence[CreatedRun]) -> list[FeedRecord]:
    """The run events of runs that were not there before."""
    return [
        record
        for creation, created in zip(creations, made, strict=True)
        if created.number is not None
        for record in feed_records(creation.run_id, creation.workflow, [creation.staged])
    ]


def _add_to_feed(connection: sqlite3.Connection, records: Sequence[FeedRecord]) -> None:
    for first in range(0, len(records), FEED_ROW_EVENTS):
        part = records[first : first + FEED_ROW_EVENTS]
        row = (len(part), part[-1][3], orjson.dumps(part))
        connection.execute(statements()["add_to_feed"], row)


def read_feed_row(number: int, count: int, events: Any) -> list[tuple[int, FeedRecord]]:
    """The events of a row with their numbers. A damaged row has none: it must not end the feed."""
    try:
        records = [
            (run_id, workflow, seq, at, kind, epoch, data)
            for run_id, workflow, seq, at, kind, epoch, data in orjson.loads(events)
        ]
    except (TypeError, ValueError):
        return []
    return list(enumerate(records, number - count + 1))


def _add_to_outbox(connection: sqlite3.Connection, found: Iterable[Notification]) -> None:
    """In the transaction of the run's end: none is lost, and none is sent of an end that is not
    kept."""
    for one in found:
        row = (one.id, one.time, orjson.dumps(one._asdict()))
        connection.execute(statements()["add_notification"], row)


def _add_log(connection: sqlite3.Connection, chunk: LogChunk, content: str) -> None:
    """Safe to repeat. What a chunk drops is dropped even if the chunk is known: a chunk that was
    dropped may have been written again since."""
    sql = statements()
    run_id, node, epoch, attempt, number, lines, item, drops, missing, missing_bytes = chunk
    mine = (run_id, node, epoch, attempt, item)
    connection.execute(sql["add_log"], (*mine, number, len(lines), content))
    connection.executemany(sql["drop_log"], [(*mine, one) for one in drops])
    if missing:
        behind = max(drops) + 1 if drops else number
        connection.execute(sql["note_missing"], (*mine, behind, missing, missing_bytes))


def projected(run: Projection) -> tuple[Any, ...]:
    """As `project_run` takes it."""
    finished = run.finished_at is not None
    return (
        run.status,
        run.epoch,
        run.started_at,
        run.finished_at,
        None if run.error is None else orjson.dumps(run.error),
        orjson.dumps(run.result) if finished else None,
        finished,
        run.number,
    )


def _create(connection: sqlite3.Connection, creation: Creation) -> CreatedRun:
    sql = statements()
    if creation.key is not None:
        scope, key, body = creation.key
        known = connection.execute(sql["find_key"], (scope, key)).fetchone()
        if known is not None:
            check_key(key, known)
            return CreatedRun(None, known[1], known[0] == body)
    if creation.place is not None:
        known = connection.execute(sql["find_place"], creation.place).fetchone()
        if known is not None:
            return CreatedRun(None, known[0])
    definition = definition_number(connection, creation.sha256, creation.content)
    batch, place = creation.place or (None, None)
    projection = creation.projection
    finished = projection.finished_at is not None
    added = connection.execute(
        sql["add_run"],
        (
            creation.run_id,
            creation.workflow,
            creation.version,
            definition,
            creation.retries,
            orjson.dumps(creation.params),
            batch,
            place,
            creation.created_at,
            None if finished else creation.owner,
            *projected(projection)[:6],
        ),
    )
    if not added.rowcount:
        return CreatedRun(None, creation.run_id)
    number = added.lastrowid
    assert number is not None  # noqa: S101
    row = (piece(number, 0), creation.staged.seq, encoded([creation.staged]))
    connection.execute(sql["add_entries"], row)
    _add_to_outbox(connection, creation.notifications)
    if creation.key is not None:
        connection.execute(sql["add_key"], (*creation.key, creation.run_id))
    return CreatedRun(number)


def check_key(key: str, row: Sequence[Any]) -> None:
    """Raises `BrokenRecord` if what is kept under an idempotency key cannot be read."""
    if not all(isinstance(text, str) for text in row):
        raise BrokenRecord(
            f"what is kept under the idempotency key '{key[:80]}' cannot be read; use another key"
        )


def definition_number(connection: sqlite3.Connection, sha256: str, content: bytes) -> int:
    """The definition's number; it is added if it is new. In a transaction."""
    sql = statements()
    row = connection.execute(sql["find_definition"], (sha256,)).fetchone()
    if row is None:
        connection.execute(sql["add_definition"], (sha256, content))
        row = connection.execute(sql["find_definition"], (sha256,)).fetchone()
    return int(row[0])


def write_batch(
    batch_id: str,
    creations: Sequence[Creation],
    key: tuple[str, str, str] | None,
    now: float,
    connection: sqlite3.Connection,
) -> list[CreatedRun]:
    """A batch and all its runs. In a transaction. Raises `KeyUsed`."""
    number = add_batch(connection, batch_id, creations[0].workflow, len(creations), key, now)
    made = [
        _create(connection, creation._replace(place=(number, place)))
        for place, creation in enumerate(creations)
    ]
    _add_to_feed(connection, _beginnings(creations, made))
    return made


def add_batch(
    connection: sqlite3.Connection,
    batch_id: str,
    workflow: str,
    count: int,
    key: tuple[str, str, str] | None,
    now: float,
) -> int:
    """The number of a new batch. In a transaction. Raises `KeyUsed`."""
    sql = statements()
    if key is not None:
        known = connection.execute(sql["find_key"], key[:2]).fetchone()
        if known is not None:
            check_key(key[1], known)
            raise KeyUsed(known[1], known[0] == key[2])
        connection.execute(sql["add_key"], (*key, batch_id))
    added = connection.execute(sql["add_batch"], (batch_id, workflow, count, now))
    return added.lastrowid or 0
