"""Runs in one SQLite file: the rules step them in memory, the journal stores the decisions.

A run that this process drives is in memory, and its decisions are staged; all staged decisions are
one commit. A decision that needs no promise (a result) travels with the next commit; one that does
(a trigger, a claim, a command) waits for it. So nothing outside this process follows from a
decision that a crash could undo.

Any number of processes may move a run. Two that append to its log at the same position collide, and
the second reads the new entries, decides again and retries: the log is the lock. The `owner` of a
run only says which process dispatches its nodes. If two believe to be the owner, the log still lets
one of them start a node.

A damaged run is set aside: all others go on.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import closing, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import orjson

from dovetail.core.audit.replay import JournalEntry, UnreadableJournal, is_taken, replay
from dovetail.core.caching import entries
from dovetail.core.dag import Graph
from dovetail.core.definition.model import Webhook
from dovetail.core.definition.source import gc_paused
from dovetail.core.effects import outstanding, stop_orders
from dovetail.core.errors import BrokenRun, Conflict, NotFound, StoreError, StoreLost, one_line
from dovetail.core.events import Event, Token
from dovetail.core.feed import FeedEntry, FeedPosition, check_position
from dovetail.core.items import split_name
from dovetail.core.node_logs import LogChunk
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.run import RunState
from dovetail.core.states import FINAL, NodeStatus, RunStatus
from dovetail.core.step import RULES, begin
from dovetail.core.transitions import (
    NOTHING,
    Complete,
    Decision,
    Stop,
    Submit,
    TakeOver,
    Transition,
    bounded_submit,
)
from dovetail.core.webhooks import Notification, notifications
from dovetail.engine.listener import Listener, SafeListener, end_in
from dovetail.engine.ports import Cached, Key, KeyUsed
from dovetail.engine.views import MAX_WHY_LENGTH, damage_error, unread_run
from dovetail.stores.records import Definitions, no_run
from dovetail.stores.sqlite.deletion import (
    BATCH_SIZE,
    Deleted,
    SpaceReclaimer,
    delete_runs,
    delete_unused,
    paced,
    runs_ended_before,
)
from dovetail.stores.sqlite.file import Owner, SqliteFile, statements
from dovetail.stores.sqlite.group_commit import CachedRun, GroupCommit, projection, shown
from dovetail.stores.sqlite.writer import (
    PIECES,
    CreatedRun,
    Creation,
    Staged,
    Writer,
    check_key,
    decoded,
    piece,
    projected,
    read_feed_row,
    refer_to_lists,
    thinned,
    write_batch,
)

T = TypeVar("T")

POLL_SECONDS = 0.1
"""How often to look whether another process has moved a run that matters here."""
NO_LIMIT = 1 << 31
"""Max crashes where a run is handed back without a crash."""
FEED_PAGE = 50
"""Rows that are read at once; each may have 100 events."""
FEED_PAUSE_SECONDS = 0.02
"""Between two reads of the feed: many events cost hardly more than one."""
MAX_LARGE_RUNS = 4
LARGE_RUN_EVENTS = 30_000
MAX_KEPT_BYTES = 8 << 20
"""Of the outputs of a long run that stays in memory when it has ended."""
ALL_OUTPUTS = ReadBudget(1 << 62, 1 << 62)
PART_BYTES = 4 << 20
"""Of a journal in one read: the event loop waits meanwhile."""
RUNNING = NodeStatus.RUNNING
LOOK_SIZE = 1000
"""Runs that are looked at in one read for whether they ended long ago."""
MAX_NAMED = 1000
"""Set-aside runs that are remembered, to log each once."""

log = logging.getLogger("dovetail.store")


class JournalPart(list[tuple[int, int, bytes]]):
    """Some pieces of a journal."""

    is_full = False
    """There may be more."""


async def _nothing() -> None: ...


class SqliteObserver(NamedTuple):
    """What the engine of a process does about what its store finds out."""

    on_effects: Callable[[Decision], None] = lambda effects: None
    """Another process stepped a run that this process owns: dispatch its outstanding effects."""
    on_crash: Callable[[BaseException], None] = lambda error: None
    """The store is lost."""
    on_change: Callable[[], Awaitable[None]] = _nothing
    """Another process wrote to the file."""
    is_alive: Callable[[], bool] = lambda: True
    """Whether this process still serves the runs that it owns; called from another thread."""


class SqliteStore:
    """Use `async with`; with `drives`, runs made here are driven here."""

    def __init__(
        self,
        path: Path,
        *,
        sync: Literal["full", "normal"] = "full",
        lease_seconds: float = 10.0,
        drives: bool = True,
        max_run_bytes: int | None = None,
        webhooks: Sequence[Webhook] = (),
        name: Path | None = None,
    ) -> None:
        """`name` is what messages call the file, if that is not its path.
        `max_run_bytes` is what the outputs of a run that is made here may have together.
        `webhooks` are notified of all runs that end here, beside those of their definitions."""
        self.file = SqliteFile(path, sync, name)
        self.owner = Owner(lease_seconds)
        self._engine = SqliteObserver()
        self._leaving = threading.Event()
        self._drives = drives
        self._max_run_bytes = max_run_bytes
        self._webhooks = webhooks
        self._definitions = Definitions()
        self._runs: dict[str, CachedRun] = {}
        self._by_number: dict[int, CachedRun] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._finishers: dict[str, list[asyncio.Future[RunState]]] = {}
        self.feeds: set[asyncio.Event] = set()
        """Set when something may be new in the file, for readers of what is about all runs."""
        self._large: dict[tuple[str, ReadBudget], tuple[RunState, int, ReadBudget]] = {}
        """Runs that take long to read and are not driven here, by the room that their outputs had;
        with the piece that would be new, and the room that is left. A caller that reads page after
        page pays only for what is new."""
        self._broken: BaseException | None = None
        self._lost: asyncio.Future[None] | None = None
        self._aside: set[str] = set()
        """Unreadable runs that were logged."""
        self._closing = False
        self._seen_version = -1

    def observe(self, observer: SqliteObserver) -> None:
        """Report to this observer from now on."""
        self._engine = observer

    # ── life ─────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> SqliteStore:
        self._loop = asyncio.get_running_loop()
        self.file.create()
        self.reader = self.file.connect()
        self.writer = Writer(self.file)
        self._commits = GroupCommit(
            self.writer,
            self.owner.name,
            catch_up=self._catch_up_or_leave,
            on_committed=self._on_committed,
            on_written=self._wake_feeds,
            notify=self._notifications,
            fail=self._break,
        )
        if self._drives:
            await self.transact(self.owner.register)
            self._keeper = threading.Thread(
                target=self._keep_lease, name="dovetail-owner", daemon=True
            )
            self._keeper.start()
        self.file.remember()
        self._polling = self._loop.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hand back unfinished runs, and close the file."""
        self._closing = True
        self._leaving.set()
        self._polling.cancel()
        with suppress(asyncio.CancelledError):
            await self._polling
        try:
            if self._broken is None:
                await self._hand_back()
        except StoreError as error:
            self._break(error)
        finally:
            closed = "the engine was closed before the run had finished; it goes on with `resume`"
            self._stop_waiting(self._broken or RuntimeError(closed))
            if isinstance(self._broken, StoreLost):
                self.file.abandon(self.reader)
            self.writer.close()
            self.reader.close()
            self._runs.clear()
            self._by_number.clear()

    async def _hand_back(self) -> None:
        await self._commits.flush()
        mine = [kept for kept in self._runs.values() if kept.mine]
        for kept in mine:
            if any(node.status is RUNNING for node in kept.run.nodes):
                now = max(time.time(), _newest(kept.run))
                self._step(kept, TakeOver(kept.run.id, NO_LIMIT), now)
        self._commits.release([kept.number for kept in mine])
        await self._commits.flush()
        if self._drives:
            await self.transact(self.owner.leave)

    def transact(self, work: Callable[[sqlite3.Connection], Any]) -> asyncio.Future[Any]:
        """Do this in a transaction of its own, in the writer's thread."""
        return self.writer.perform(lambda connection: self.writer.transaction(connection, work))

    def abort(self, error: BaseException) -> None:
        """The engine has stopped: fail all waiting callers."""
        self._broken = self._broken or error
        self._stop_waiting(error)

    async def lost(self) -> None:
        """Raises what ended this store, when something does."""
        if self._lost is None:
            self._lost = self._loop.create_future()
        self._check()
        await asyncio.shield(self._lost)

    def _break(self, error: BaseException) -> None:
        """Memory may be ahead of the file now, so nothing may build on it."""
        if self._broken is None:
            self._broken = error
            self._stop_waiting(error)
            if self._lost is not None and not self._lost.done():
                self._lost.set_exception(error)
                self._lost.exception()  # retrieved, so that asyncio does not warn
            if not self._closing:
                self._engine.on_crash(error)

    async def check_writable(self) -> None:
        """Raises `StoreError` if a write would fail, or one has failed: then none is tried again.

        While the disk has room, the next renewal of the lease shows what nothing else does.
        """
        if self._broken is not None and not isinstance(self._broken, StoreError):
            raise StoreError(f"the engine has ended: {self._broken}") from self._broken
        self._check()
        if self._drives and not self.file.has_room():
            await self.transact(self.owner.renew)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    # ── the port: runs are made and moved ────────────────────────────────────────────────

    async def create(self, submit: Submit, now: float) -> Decision:
        self._check()
        if submit.run_id in self._runs:
            return NOTHING
        run, creation, decision = self._prepare(submit, now)
        made = await self._commits.create(creation)
        return decision if self._entered(run, made) else NOTHING

    async def create_batch(
        self, batch_id: str, submits: Sequence[Submit], key: Key | None, now: float
    ) -> list[Decision]:
        """Make a batch and all its runs in one transaction. Raises `KeyUsed`."""
        self._check()
        prepared = [self._prepare(submit, now) for submit in submits]
        creations = [creation for _, creation, _ in prepared]
        made = await self.transact(partial(write_batch, batch_id, creations, key, now))
        self._wake_feeds()
        return [
            decision if self._entered(run, one) else NOTHING
            for (run, _, decision), one in zip(prepared, made, strict=True)
        ]

    async def made_under(self, key: Key) -> KeyUsed | None:
        found = self._query("find_key", *key[:2])
        if found is None:
            return None
        check_key(key[1], found)
        return KeyUsed(found[1], found[0] == key[2])

    def _prepare(self, submit: Submit, now: float) -> tuple[RunState, Creation, Decision]:
        submit = bounded_submit(submit, self._max_run_bytes)
        run, decision = begin(submit, now, 1)
        stored = self._definitions.stored(submit.graph)
        staged = Staged(submit, now, 1, decision)
        creation = Creation(
            run_id=run.id,
            workflow=submit.graph.name,
            version=submit.version,
            sha256=stored.sha256,
            content=stored.content,
            retries=stored.retries,
            params=submit.params,
            created_at=now,
            owner=self.owner.name if self._drives else None,
            staged=staged,
            projection=projection(run, 0),
            key=submit.key,
            place=submit.place,
            notifications=self._notifications(run, [staged]),
        )
        return run, creation, decision

    def _notifications(self, run: RunState, staged: Iterable[Staged]) -> Sequence[Notification]:
        if not self._webhooks and not run.graph.webhooks:
            return ()
        events = [event for one in staged for event in one.decision.events]
        webhooks = [*run.graph.webhooks, *self._webhooks]
        return notifications(run.id, run.graph.name, run.version, events, webhooks)

    def _entered(self, run: RunState, made: CreatedRun) -> bool:
        """Whether the run is new; it is then in memory. Raises `KeyUsed`."""
        if made.number is None:
            if made.known != run.id:
                raise KeyUsed(made.known or "", made.same_body)
            return False
        if not run.finished and self._drives and run.id not in self._runs:
            self._keep(CachedRun(run, made.number, 1, mine=True))
        return True

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        self._check()
        runs = self._runs
        for move in moves:
            kept = runs.get(move.run_id)
            if kept is None or not kept.mine:
                return await self._apply_anywhere(moves, now)
        staged = [self._step(runs[move.run_id], move, now) for move in moves]
        if durable:
            await self._commits.flush()
            for position, one in enumerate(staged):
                if not one.decision:
                    # Only what is kept meets what others kept. A refusal is kept nowhere, so
                    # it is made again with the newest state.
                    (one.decision,) = await self._apply_anywhere(
                        moves[position : position + 1], now
                    )
        else:
            self._commits.schedule()
        return [one.decision for one in staged]

    def log(self, chunks: Sequence[LogChunk]) -> None:
        """Write lines of handlers with the next commit, or soon. They are lost if that fails."""
        if self._broken is None and not self._closing:
            self._commits.log(chunks)

    async def _apply_anywhere(self, moves: Sequence[Transition], now: float) -> list[Decision]:
        """The same for runs of other owners: read first, answer when it is committed.

        A refusal rests on the run as the file had it, or on what was on its way there. If that
        did not arrive as it was, the refusal is made again.
        """
        decisions = [NOTHING] * len(moves)
        open_positions = list(range(len(moves)))
        while open_positions:
            tried = []
            for position in open_positions:
                try:
                    kept = self._fetch(moves[position].run_id)
                except BrokenRun as error:
                    # A result, say, of a run that was damaged meanwhile: nothing follows from it,
                    # and the caller goes on with others.
                    self._log_set_aside(moves[position].run_id, error)
                    continue
                if kept is not None:
                    unsure = kept.has_pending_writes
                    reading = kept.reading
                    tried.append(
                        (position, kept, unsure, reading, self._step(kept, moves[position], now))
                    )
            await self._commits.flush()
            open_positions = []
            for position, kept, unsure, reading, staged in tried:
                decisions[position] = staged.decision
                if staged.decision:
                    continue  # dropped once it is committed
                if unsure and kept.reading != reading:
                    open_positions.append(position)
                elif not kept.mine:
                    self._drop(kept)
        return decisions

    def _is_behind(self, run_id: str) -> bool:
        kept = self._runs.get(run_id)
        if kept is None:
            return True
        return self._query("has_piece", piece(kept.number, kept.pieces)) is not None

    def _step(self, kept: CachedRun, move: Transition, now: float) -> Staged:
        run = kept.run
        seq = run.seq + 1
        decision = RULES[type(move)](run, move, now, seq)
        staged = Staged(move, now, seq, decision)
        if decision.changed or decision.events:
            self._commits.stage(kept, staged)
            if type(move) is Complete and move.cache and is_taken(decision):
                for key, output in entries(move.cache, move.output):
                    self._commits.keep_output(key, now + move.cache.seconds, output, staged)
        return staged

    def _on_committed(self, kept: CachedRun) -> None:
        """What is in the file now may be known."""
        run = kept.run
        for watcher in self._watchers.get(run.id, ()):
            watcher.set()
        if kept.staged:
            return
        if run.finished:
            for waiter in self._finishers.pop(run.id, ()):
                if not waiter.done():
                    waiter.set_result(run)
        if run.finished or not kept.mine:
            self._drop(kept)
        if run.finished and run.seq > LARGE_RUN_EVENTS:
            self._keep_ended(kept)

    def _keep_ended(self, kept: CachedRun) -> None:
        """Keep a long run that has ended: its caller may look at it, and to read it again takes a
        second or more."""
        run = kept.run
        is_small = run.max_bytes is not None and run.kept_bytes <= MAX_KEPT_BYTES
        if is_small and run.id not in self._runs:
            at = piece(kept.number, kept.pieces)
            self._keep_large(run, at, ALL_OUTPUTS, ALL_OUTPUTS)

    def _wake_feeds(self) -> None:
        for news in self.feeds:
            news.set()

    def _stop_waiting(self, error: BaseException) -> None:
        self._wake_feeds()
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.set()
        for waiters in self._finishers.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)
        self._finishers.clear()

    # ── runs that others moved ───────────────────────────────────────────────────────────

    def _keep(self, kept: CachedRun) -> None:
        self._runs[kept.run.id] = kept
        self._by_number[kept.number] = kept

    def _drop(self, kept: CachedRun) -> None:
        """Hold it no longer, unless it is another by now or something of it is on its way.

        Of a run there is one at the most: of two in the same round, one's decisions would be lost.
        """
        if self._runs.get(kept.run.id) is kept and not kept.has_pending_writes:
            del self._runs[kept.run.id]
            del self._by_number[kept.number]

    def _fetch(self, run_id: str) -> CachedRun | None:
        """The run as the file has it now; with what of it is on its way there, if anything is."""
        kept = self._runs.get(run_id)
        if kept is not None:
            if kept.has_pending_writes or not self._is_behind(run_id):
                return kept
            ours = list(kept.staged)
            try:
                (self._catch_up if kept.mine else self._refresh)(kept)
            except (BrokenRun, NotFound) as error:
                self._set_aside(kept, ours, error)
                if isinstance(error, NotFound):
                    return None
                raise
            self._keep(kept)  # it was dropped if it has ended: the caller may retry it
            return kept
        row = self._query("read_run", run_id)
        if row is None:
            return None
        try:
            kept = self._read(row)
        except NotFound:  # it was deleted while it was read
            return None
        self._keep(kept)
        return kept

    def _outline(self, row: tuple[Any, ...]) -> tuple[RunState, int]:
        """A run of which nothing has happened yet, and its number. Raises `BrokenRun`."""
        number, run_id, _, version, definition, retries, params, created_at, _ = row
        try:
            graph = self._definitions.graph(definition, retries, lambda: self._content(definition))
            given = orjson.loads(params)
            if not isinstance(given, dict):
                raise UnreadableJournal("its params are no object")
            if not isinstance(created_at, float) or not isinstance(version, int | None):
                raise UnreadableJournal("its time or its version is no number")
        except (StoreError, MemoryError):
            raise
        except Exception as error:  # whatever a damaged record makes of our code
            raise self._unreadable(run_id, error) from error
        return RunState(run_id, graph, given, created_at, version), number

    def _read(self, row: tuple[Any, ...]) -> CachedRun:
        """Raises `BrokenRun` for what cannot be read."""
        run, number = self._outline(row)
        kept = CachedRun(run, number, 0, mine=row[-1] == self.owner.name)
        self._refresh(kept)
        return kept

    def _content(self, definition: Any) -> bytes:
        row = self._query("read_definition", definition)
        if row is None:
            raise UnreadableJournal("its definition is missing")
        if not isinstance(row[0], bytes):
            raise UnreadableJournal("its definition is no text that was written here")
        return row[0]

    def _unreadable(self, run_id: str, error: Exception) -> BrokenRun | NotFound:
        """What is wrong, where, and what can be done about it."""
        if self._query("is_finished", run_id) is None:  # it was deleted while it was read
            return no_run(run_id, self.file.name)
        why = one_line(" ".join(str(error).split()), MAX_WHY_LENGTH) or type(error).__name__
        if not isinstance(error, UnreadableJournal):
            why = f"its record makes no sense ({type(error).__name__}: {why})"
        short = run_id[:6]
        return BrokenRun(
            f"run {run_id} in {self.file.name} cannot be read: {why}. It is left as it is and all "
            "others go on. If a newer Dovetail wrote it, use that one; if the file is damaged, "
            f"restore it from a copy, or end the run with `dovetail runs cancel {short}` and "
            "trigger it anew"
        )

    def _refresh(self, kept: CachedRun) -> None:
        """Read what the file has beyond what is known of the run. Raises `BrokenRun`."""
        after, last = piece(kept.number, kept.pieces), piece(kept.number, PIECES - 1)
        rows = self.rows("read_entries", after, last)
        try:
            if rows and rows[-1][0] != after + len(rows) - 1:
                raise UnreadableJournal("a piece of its log is missing")
            with gc_paused():
                replay(kept.run, decoded(rows))
            if not kept.run.seq:
                raise UnreadableJournal("its log is empty")
        except UnreadableJournal as error:
            raise self._unreadable(kept.run.id, error) from error
        kept.pieces += len(rows)
        kept.reading += 1
        kept.projected = shown(kept.run)
        kept.stale = False

    def _catch_up_or_leave(self, kept: CachedRun) -> None:
        """The same; one that cannot be read any more is left, and all others go on."""
        ours = list(kept.staged)
        try:
            self._catch_up(kept)
        except (BrokenRun, NotFound) as error:
            self._set_aside(kept, ours, error)

    def _set_aside(
        self, kept: CachedRun, ours: Sequence[Staged], error: BrokenRun | NotFound
    ) -> None:
        """Drive it no longer, and void its staged decisions: it is damaged, or deleted."""
        run_id = kept.run.id
        kept.staged, kept.stale = [], False
        for one in ours:
            one.decision = NOTHING
        if self._runs.get(run_id) is kept:
            del self._runs[run_id]
            del self._by_number[kept.number]
        if kept.mine:
            kept.mine = False
            orders = Decision()
            orders.stop = [Stop(run_id, name, token) for name, token in _running(kept.run)]
            self._engine.on_effects(orders)
        self._refuse_waiting(run_id, error)
        if isinstance(error, BrokenRun):
            self._log_set_aside(run_id, error)

    def _refuse_waiting(self, run_id: str, error: BrokenRun | NotFound) -> None:
        for watcher in self._watchers.get(run_id, ()):
            watcher.set()
        for waiter in self._finishers.pop(run_id, ()):
            if not waiter.done():
                waiter.set_exception(error)

    def _log_set_aside(self, run_id: str, error: BrokenRun) -> None:
        """Once: it is met again and again."""
        if run_id not in self._aside and len(self._aside) < MAX_NAMED:
            self._aside.add(run_id)
            log.error("set aside: %s", error)

    def _catch_up(self, kept: CachedRun) -> None:
        """Another process moved the run: read it again, and step it by our transitions again.

        The run stays the same object: tasks under way and published nodes refer to it.
        """
        ran = _running(kept.run)
        ours, kept.staged = kept.staged, []
        row = self._query("read_run", kept.run.id)
        if row is None and kept.mine:  # it has not finished, so no process may delete it
            raise BrokenRun(f"run {kept.run.id} is no longer in {self.file.name}")
        if row is None:
            raise no_run(kept.run.id, self.file.name)
        fresh = self._read(row)
        for name in RunState.__slots__:
            setattr(kept.run, name, getattr(fresh.run, name))
        was_mine, kept.mine = kept.mine, fresh.mine
        kept.pieces, kept.projected, kept.stale = fresh.pieces, fresh.projected, False
        kept.reading += 1
        for one in ours:
            again = self._step(kept, one.move, one.now)  # type: ignore[arg-type]
            one.seq, one.decision = again.seq, again.decision
            if kept.staged and kept.staged[-1] is again:
                kept.staged[-1] = one  # the caller of this decision holds this object
        if was_mine:
            orders = outstanding(kept.run) if kept.mine else Decision()
            ended = ran - _running(kept.run) if kept.mine else ran
            orders.stop = [Stop(kept.run.id, name, token) for name, token in ended]
            self._engine.on_effects(orders)
        if not kept.staged:
            self._on_committed(kept)

    async def _poll(self) -> None:
        """Watch for writes of other processes."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._drives or self._runs or self._watchers or self._finishers or self.feeds:
                try:
                    await self._look()
                except Exception as error:
                    self._break(error)
                    return

    async def _look(self) -> None:
        changed, notified = await self.writer.perform(self._look_in_file)
        known = [self._by_number[number] for number in notified if number in self._by_number]
        self._commits.look_again(known)
        if changed:
            self._wake_waiters()
            await self._engine.on_change()

    def _look_in_file(self, connection: sqlite3.Connection) -> tuple[bool, list[int]]:
        """In the writer's thread: whether another process wrote, and which of our runs it moved."""
        self.file.check()
        # It changes with what other connections commit, so with what this process commits in the
        # event loop as well. That costs a look, no more.
        version = connection.execute("PRAGMA data_version").fetchone()[0]
        changed, self._seen_version = version != self._seen_version, version
        notified = self.owner.notifications(connection) if changed and self._drives else []
        if notified:
            self.writer.transaction(
                connection, lambda c: self.owner.drop_notifications(c, notified)
            )
        return changed, notified

    def _keep_lease(self) -> None:
        """In a thread of its own: a handler that blocks the event loop shall not look like a
        process that is gone, or others would take over what runs here."""
        try:
            while not self._leaving.wait(self.owner.pause_seconds):
                if self._engine.is_alive() and self.owner.must_renew:
                    self.writer.submit(self._renew_in_file, self._renewed)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._break, error)

    def _renew_in_file(self, connection: sqlite3.Connection) -> None:
        if self.owner.must_renew and not self._leaving.is_set():  # else it waited for another
            self.writer.transaction(connection, self.owner.renew)

    def _renewed(self, _: None, error: BaseException | None) -> None:
        if error is not None:
            self._break(error)

    def _wake_waiters(self) -> None:
        """Wake callers that wait for a run of another owner, or for any run."""
        self._wake_feeds()
        for run_id, watchers in self._watchers.items():
            kept = self._runs.get(run_id)
            if kept is None or not kept.mine:
                for watcher in watchers:
                    watcher.set()
        for run_id in list(self._finishers):
            kept = self._runs.get(run_id)
            if kept is not None and kept.mine:
                continue
            row = self._query("is_finished", run_id)
            if row is None:  # another process has deleted it
                self._refuse_waiting(run_id, no_run(run_id, self.file.name))
                continue
            try:
                found = self._fetch(run_id) if row[1] else None
            except BrokenRun as error:
                self._refuse_waiting(run_id, error)
                continue
            if found is not None:
                for waiter in self._finishers.pop(run_id, ()):
                    if not waiter.done():
                        waiter.set_result(found.run)
                self._on_committed(found)

    # ── the port: runs are read ──────────────────────────────────────────────────────────

    async def load(
        self, run_id: str, *, outputs: bool = True, room: ReadBudget | None = None
    ) -> RunState:
        self._check()
        apart = (not outputs or room is not None) and run_id not in self._runs
        if apart and (row := self._query("read_run", run_id)) is not None:
            return await self._read_apart(row, room if outputs else None)
        kept = self._fetch(run_id)
        if kept is None:
            raise no_run(run_id, self.file.name)
        if kept.has_pending_writes and kept.run.status in FINAL:
            await self._commits.flush()  # an end that could still be lost is not shown
        if not kept.mine:
            self._drop(kept)  # read, not held: the file is where it lives
        return kept.run

    async def graph(self, run_id: str) -> Graph:
        self._check()
        kept = self._runs.get(run_id)
        if kept is not None:
            return kept.run.graph
        row = self._query("read_run", run_id)
        if row is None:
            raise no_run(run_id, self.file.name)
        return self._outline(row)[0].graph

    async def _read_apart(self, row: tuple[Any, ...], room: ReadBudget | None) -> RunState:
        """A run that is not in memory, with as many outputs as there is room for.

        Its journal only grows, so it may be read in parts, and others have their turn in between.
        """
        run, number = self._outline(row)
        at, last = piece(number, 0), piece(number, PIECES - 1)
        wanted, is_large = room, False
        # A reader without outputs gets no references to them either.
        key = None if room is None else self._large_key(run.id, room, ALL_OUTPUTS)
        if key is not None:
            # Taken out: a caller that comes meanwhile must not read the same pieces into it.
            run, at, room = self._large.pop(key)
            wanted, is_large = key[1], True
        while rows := self.part(at, last):
            found: list[JournalEntry] = []
            try:
                if rows[-1][0] != at + len(rows) - 1:
                    raise UnreadableJournal("a piece of its log is missing")
                with gc_paused():
                    for one in rows:
                        room = thinned(one, room, found)
                    replay(run, found)
            except UnreadableJournal as error:
                raise self._unreadable(run.id, error) from error
            at = rows[-1][0] + 1
            if not rows.is_full:
                break
            is_large = True
            await asyncio.sleep(0)
        if not run.seq:
            raise self._unreadable(run.id, UnreadableJournal("its log is empty"))
        refer_to_lists(run)
        if is_large and wanted is not None and room is not None:
            self._keep_large(run, at, wanted, room)
        return run

    def _keep_large(self, run: RunState, at: int, wanted: ReadBudget, left: ReadBudget) -> None:
        while len(self._large) >= MAX_LARGE_RUNS:
            del self._large[next(iter(self._large))]
        self._large[run.id, wanted] = run, at, left

    def _large_key(self, run_id: str, *rooms: ReadBudget) -> tuple[str, ReadBudget] | None:
        """Under which a long run is kept, for a reader with one of these rooms or for any."""
        found = (key for key in self._large if key[0] == run_id)
        return next((key for key in found if not rooms or key[1] in rooms), None)

    async def read_items(
        self, run: RunState, index: int, numbers: Sequence[int], max_bytes: int
    ) -> int:
        """`load` leaves out no item."""
        return len(numbers)

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        def read(reader: sqlite3.Connection) -> list[bytes]:
            found = []
            for one in wanted:
                if type(one.where) is list:  # the outputs of items
                    parts = (p if type(p) is bytes else read_one(reader, p) for p in one.where)
                    found.append(b"[" + b",".join(parts) + b"]")
                else:
                    found.append(read_one(reader, one))
            return found

        def read_one(reader: sqlite3.Connection, one: OutputReference) -> bytes:
            row, offset = one.where
            with reader.blobopen("journal", "entries", row, readonly=True) as blob:
                blob.seek(offset)
                return bytes(blob.read(one.size))

        try:
            return self._reading(read)
        except StoreError:
            if self._query("is_finished", run.id) is None:
                raise StoreError(f"run {run.id} was deleted meanwhile") from None
            raise

    async def wait(self, run_id: str) -> RunState:
        while True:
            self._check()
            kept = self._runs.get(run_id)
            if kept is None or not kept.mine or kept.run.finished:
                row = self._query("is_finished", run_id)
                if row is None:
                    raise no_run(run_id, self.file.name)
                if row[1] and (kept is None or not kept.has_pending_writes):
                    return await self.load(run_id)
                if kept is None and (found := self._fetch(run_id)) is not None and not found.mine:
                    self._drop(found)  # it can be read: waiting makes sense
            run = await self._end_of(run_id)
            if run.finished:  # a retry may have reopened it
                return run

    async def ended(self, run_id: str) -> None:
        row = self._query("is_finished", run_id)
        if run_id in self._runs or row is None or not row[1]:
            await self.wait(run_id)  # which reads nothing of what is held here

    def _end_of(self, run_id: str) -> asyncio.Future[RunState]:
        waiter: asyncio.Future[RunState] = self._loop.create_future()
        self._finishers.setdefault(run_id, []).append(waiter)
        return waiter

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        row = self._query("is_finished", run_id)
        if row is None:
            raise no_run(run_id, self.file.name)
        number = row[0]
        last = piece(number, PIECES - 1)
        found = self._query("piece_with", piece(number, 0), last, after + 1)
        at = piece(number, 0) if found is None or found[0] is None else found[0]
        news = asyncio.Event()
        self._watchers.setdefault(run_id, set()).add(news)
        try:
            while True:
                news.clear()  # before reading, or what comes in between would wait for the next
                row = self._query("is_finished", run_id)
                if row is None:
                    raise no_run(run_id, self.file.name)
                finished = row[1]
                rows = self.part(at, last)
                for entry in self.entries_of(run_id, rows):
                    for event in entry.events:
                        if event.seq > after:
                            after = event.seq
                            yield event
                if rows:
                    at = rows[-1][0] + 1
                    continue  # reading took a while: there may be more
                if finished and not self._commits.has_staged(run_id):
                    return
                self._check()
                await news.wait()
        finally:
            self._watchers[run_id].discard(news)
            if not self._watchers[run_id]:
                del self._watchers[run_id]

    # ── the feed of all runs ─────────────────────────────────────────────────────────────

    async def feed_start(self, after: str | None) -> FeedPosition:
        self._check()
        given = None if after is None else FeedPosition.parse(after)
        dropped, newest = self._feed_range()
        if given is None:
            return newest
        check_position(given, dropped, newest)
        return given

    async def follow_feed(self, after: FeedPosition) -> AsyncGenerator[FeedEntry]:
        news = asyncio.Event()
        self.feeds.add(news)
        try:
            while True:
                news.clear()  # before reading, or what comes in between would wait for the next
                self._check()
                rows = self.rows("read_feed", after.number[0], FEED_PAGE)
                check_position(after, *self._feed_range())
                for row in rows:
                    for number, record in read_feed_row(*row):
                        if number > after.number[0]:
                            after = FeedPosition(after.feed, (number,))
                            run_id, workflow, seq, at, kind, epoch, data = record
                            event = Event(seq, at, kind, epoch, None, None, data)
                            yield FeedEntry(after, run_id, workflow, event)
                    after = FeedPosition(after.feed, (row[0],))
                if len(rows) < FEED_PAGE:
                    await news.wait()
                    await asyncio.sleep(FEED_PAUSE_SECONDS)
        finally:
            self.feeds.discard(news)

    def _feed_range(self) -> tuple[FeedPosition, FeedPosition]:
        """The last event that left the feed, and the last one of all."""
        name, dropped, newest = self._query("feed_range")
        return FeedPosition(name, (dropped,)), FeedPosition(name, (newest,))

    async def recall(self, key: str, now: float) -> Cached | None:
        staged = self._commits.staged_output(key)
        if staged is not None:
            until, output = staged
            return Cached(output) if now < until else None
        row = self._query("recall_output", key, now)
        try:
            return None if row is None else Cached(orjson.loads(row[0]))
        except orjson.JSONDecodeError:
            return None  # damaged: it is made anew

    def entries_of(self, run_id: str, rows: Iterable[tuple[int, int, bytes]]) -> list[JournalEntry]:
        """What these pieces of a run's log hold. Raises `BrokenRun`."""
        try:
            return list(decoded(rows))
        except UnreadableJournal as error:
            raise self._unreadable(run_id, error) from error

    def rows(
        self,
        name: str,
        *values: Any,
        stop: Callable[[Any], bool] | None = None,
        **conditions: Any,
    ) -> list[Any]:
        """What a statement of queries.sql finds; a condition is a column and its value.

        With `stop` no row is read after the first one of which that is true.
        """
        if isinstance(self._broken, StoreLost):
            raise self._broken  # the reply would come from a deleted file
        sql = statements()[name]
        if "{conditions}" in sql:
            numbered = enumerate(conditions, len(values) + 1)
            sql = sql.format(conditions="".join(f"AND {name} = ?{n} " for n, name in numbered))
        given = (*values, *conditions.values())
        try:
            if stop is None:
                return self._reading(lambda reader: reader.execute(sql, given).fetchall())
            return self._reading(lambda reader: _until(reader.execute(sql, given), stop))
        except (UnicodeEncodeError, OverflowError):
            return []  # what cannot be written down cannot have been

    def pragma(self, name: str) -> Any:
        return self._reading(lambda reader: reader.execute(f"PRAGMA {name}").fetchone()[0])

    def part(self, first: int, last: int) -> JournalPart:
        """Of these pieces of the journal the first ones: outputs are in there, and may be many."""

        size = 0

        def is_full(row: tuple[int, int, bytes]) -> bool:
            nonlocal size
            size += len(row[2])
            return size >= PART_BYTES

        found = JournalPart(self.rows("read_entries", first, last, stop=is_full))
        found.is_full = size >= PART_BYTES
        return found

    def _reading(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return work(self.reader)
        except sqlite3.Error as error:
            raise self.file.explained(error) from error

    def _query(self, name: str, *values: Any) -> Any:
        """The first row, or None."""
        rows = self.rows(name, *values)
        return rows[0] if rows else None

    # ── owners ───────────────────────────────────────────────────────────────────────────

    async def owner_of(self, run_id: str) -> Literal["here", "elsewhere", "gone", "none"]:
        row = self._query("read_run", run_id)
        if row is None:
            raise no_run(run_id, self.file.name)
        owner = row[-1]
        ended = self._query("is_finished", run_id)
        if ended is None:  # it was deleted between the two
            raise no_run(run_id, self.file.name)
        if ended[1]:
            return "none"
        if owner == self.owner.name:
            return "here"
        return "elsewhere" if owner in self._reading(self.owner.others) else "gone"

    async def orphans(self) -> list[str]:
        self._check()
        return self._reading(self.owner.orphans)

    async def adopt(
        self, run_ids: Iterable[str], now: float, max_crashes: int
    ) -> dict[str, Decision]:
        """Own those of these runs that have no live owner; returns their outstanding orders.

        Taking one over adds to its log. So an owner that was only silent, and wakes up, finds
        its next addition refused and learns that it drives the run no longer.
        """
        self._check()
        # Before they are ours: what cannot be read is left as it is.
        wanted = [run_id for run_id in run_ids if self._can_be_read(run_id)]
        staged = {}
        ended: list[str] = []
        taken = await self.transact(lambda c: self.owner.take(c, wanted))
        for run_id in set(wanted).difference(taken):
            if (others := self._runs.get(run_id)) is not None and not others.mine:
                self._drop(others)
        for run_id in taken:
            try:
                kept = self._fetch(run_id)
            except BrokenRun as error:  # damaged in this very moment
                self._log_set_aside(run_id, error)
                continue
            assert kept is not None  # noqa: S101 - it was there a moment ago, and runs stay
            if kept.run.finished:  # and the list has not heard of it
                self._drop(kept)
                ended.append(run_id)
                continue
            kept.mine = True
            behind = max(0.0, _newest(kept.run) - now)
            staged[run_id] = self._step(kept, TakeOver(run_id, max_crashes, behind), now)
        await self._commits.flush()
        for run_id in ended:
            await self.repair(run_id)
        return {run_id: one.decision for run_id, one in staged.items()}

    def _can_be_read(self, run_id: str) -> bool:
        try:
            return self._fetch(run_id) is not None
        except BrokenRun as error:
            self._log_set_aside(run_id, error)
            return False

    # ── runs are deleted ─────────────────────────────────────────────────────────────────

    async def delete(self, run_ids: Sequence[str], *, ended_before: float = inf) -> list[str]:
        self._check()
        deleted = Deleted([], set())
        for first in range(0, len(run_ids), BATCH_SIZE):
            some = run_ids[first : first + BATCH_SIZE]
            found = await self._delete_some(some, ended_before)
            deleted.run_ids.extend(found.run_ids)
            deleted.definitions.update(found.definitions)
        for one in deleted.definitions:
            await self.transact(partial(delete_unused, definition=one))
        return deleted.run_ids

    async def _delete_some(self, run_ids: Sequence[str], ended_before: float) -> Deleted:
        deleted: Deleted = await paced(
            self.writer,
            lambda connection: self.writer.transaction(
                connection, lambda c: delete_runs(c, run_ids, ended_before), makes_runs=False
            ),
        )
        for run_id in deleted.run_ids:
            while key := self._large_key(run_id):
                del self._large[key]
            self._refuse_waiting(run_id, no_run(run_id, self.file.name))
        return deleted

    async def delete_ended(self, before: float) -> int:
        """Delete all runs that ended at that time or before, oldest first; returns how many."""
        after, goes_on, deleted = 0, True, 0
        while goes_on:
            rows = self.rows("ended_runs", after, LOOK_SIZE)
            found, goes_on = runs_ended_before(rows, before)
            deleted += len(await self.delete(found, ended_before=before))
            after = rows[-1][0] if rows else after
            await asyncio.sleep(0)
        return deleted

    async def reclaim_space(self) -> None:
        """Give the space of deleted runs back to the disk, as far as that disturbs no process."""
        await SpaceReclaimer(self.writer).reclaim(
            is_alone=lambda connection: not self._drives and not self.owner.others(connection)
        )

    # ── runs that are damaged ────────────────────────────────────────────────────────────

    async def repair(self, run_id: str, *, dry_run: bool = False) -> list[str]:
        """Make what lists show of a run what its log says; where the two differed, as sentences.

        Raises `NotFound`, or `BrokenRun` for a log that cannot be read.
        """
        self._check()
        while True:
            if run_id in self._runs and self._runs[run_id].has_pending_writes:
                await self._commits.flush()
            kept, found = self._compared(run_id)
            if dry_run or not found:
                return found
            right = projected(projection(kept.run, kept.number))
            following = piece(kept.number, kept.pieces)

            def write(
                connection: sqlite3.Connection,
                right: tuple[Any, ...] = right,
                following: int = following,
            ) -> bool:
                if connection.execute(statements()["has_piece"], (following,)).fetchone():
                    return False  # the run moved meanwhile
                connection.execute(statements()["project_run"], right)
                return True

            if await self.transact(write):
                log.warning("run %s: repaired: %s", run_id, "; ".join(found))
                return found

    def _compared(self, run_id: str) -> tuple[CachedRun, list[str]]:
        """A run as its log makes it, and where the list has something else; at one moment."""
        self._reading(lambda reader: reader.execute("BEGIN"))
        try:
            row, shown_row = self._query("read_run", run_id), self._query("summary", run_id, None)
            if row is None:
                raise no_run(run_id, self.file.name)
            kept = self._read(row)
        finally:
            self._reading(lambda reader: reader.execute("COMMIT"))
        return kept, list(_differences(kept.run, shown_row))

    async def end_damaged(self, run_id: str, why: str, now: float) -> RunState:
        """End a run whose log cannot be read; that stays as it is.

        Raises `NotFound`, or `Conflict` for a run that has ended.
        """
        self._check()
        row = self._query("read_run", run_id)
        if row is None:
            raise no_run(run_id, self.file.name)
        number, _, workflow, version, *_ = row

        def write(connection: sqlite3.Connection) -> bool:
            connection.execute(statements()["notify_owner"], (number, self.owner.name))
            values = (RunStatus.CANCELLED.value, now, orjson.dumps(damage_error(why)), run_id)
            return connection.execute(statements()["end_damaged"], values).rowcount > 0

        if not await self.transact(write):
            raise Conflict(f"run {run_id} has ended already: there is nothing to cancel. {why}")
        kept = self._runs.get(run_id)
        if kept is not None:
            self._set_aside(kept, kept.staged, BrokenRun(why))
        created_at = row[7] if isinstance(row[7], float) else now
        return unread_run(
            run_id,
            workflow if isinstance(workflow, str) else "",
            version if isinstance(version, int) else None,
            created_at,
            RunStatus.CANCELLED,
            now,
            why,
        )

    def unreadable(self, newest: int, most: int) -> Iterator[tuple[str, str]]:
        """Runs that cannot be read or that disagree with their log, each with the reason, of the
        unfinished ones and of the newest."""
        for row in self.rows("looked_through", newest, most):
            run_id = row[1]
            if not isinstance(run_id, str):
                yield f"number {row[0]}", "its id cannot be read"
                continue
            try:
                _, found = self._compared(run_id)
            except NotFound:  # its id was written in no way that can be asked for
                yield run_id, "its id cannot be read"
            except BrokenRun as error:
                yield run_id, str(error).partition("cannot be read: ")[2].partition(". It is")[0]
            else:
                if found:
                    yield run_id, found[0]


def _until(cursor: sqlite3.Cursor, stop: Callable[[Any], bool]) -> list[Any]:
    # Closed before the next read, which would see the same snapshot of the file.
    with closing(cursor):
        found = []
        for row in cursor:
            found.append(row)
            if stop(row):
                break
        return found


def _differences(run: RunState, row: Sequence[Any]) -> Iterator[str]:
    """Between a run and what the list has of it."""
    status, epoch, started_at, finished_at, error, result, *_ = projected(projection(run, 0))
    kept = dict(zip(("status", "epoch"), row[4:6], strict=True))
    kept |= zip(("started_at", "finished_at", "error", "result"), row[8:12], strict=True)
    right = {"status": status, "epoch": epoch, "started_at": started_at}
    right |= {"finished_at": finished_at, "error": error, "result": result}
    for name, value in right.items():
        if kept[name] != value:
            has, makes = (
                one_line(one.decode(errors="replace") if isinstance(one, bytes) else str(one), 100)
                for one in (kept[name], value)
            )
            yield f"the run is kept with {name} {has}, the log makes it {makes}"


def _newest(run: RunState) -> float:
    """The latest time that the run knows of."""
    times = [run.created_at]
    for node in run.nodes:
        times += [at for at in (node.started_at, node.finished_at) if at is not None]
        if node.items is not None:
            times += [end.finished_at for end in node.items.ended.values()]
            times += [one.started_at for one in node.items.in_flight.values() if one.started_at]
    return max(times)


def _running(run: RunState) -> set[tuple[str, Token]]:
    return {(stop.node, stop.token) for stop in stop_orders(run, range(len(run.nodes)))}


MAX_CALLERS = 10_000
MAX_STARTED = 100_000
"""More cannot run here: the oldest are of runs that went on elsewhere."""
ENDS = frozenset({"node.completed", "node.failed", "node.retrying", "node.lost", "node.cancelled"})
MEASURED = frozenset({"node.completed", "node.failed"})


class InstrumentedSqliteStore(SqliteStore):
    def __init__(self, path: Path, listener: Listener, **options: Any) -> None:
        super().__init__(path, **options)
        self._listener = SafeListener(listener)
        self._started: dict[tuple[str, str], float] = {}
        """When each node that runs was started."""
        self._callers: dict[str, str] = {}

    async def __aenter__(self) -> InstrumentedSqliteStore:
        await super().__aenter__()
        self._commits.heard = self._written
        return self

    async def create(self, submit: Submit, now: float) -> Decision:
        self._note_caller([submit])
        decision = await super().create(submit, now)
        self._pass_on(submit.run_id, submit.graph, submit.version, decision)
        return decision

    async def create_batch(
        self, batch_id: str, submits: Sequence[Submit], key: tuple[str, str, str] | None, now: float
    ) -> list[Decision]:
        self._note_caller(submits)
        decisions = await super().create_batch(batch_id, submits, key, now)
        for submit, made in zip(submits, decisions, strict=True):
            self._pass_on(submit.run_id, submit.graph, submit.version, made)
        return decisions

    def caller_of(self, run_id: str) -> str | None:
        """The `traceparent` that a run was asked for under, if that was here."""
        return self._callers.get(run_id)

    def _note_caller(self, submits: Sequence[Submit]) -> None:
        caller = self._listener.caller()
        if caller is not None:
            while len(self._callers) > MAX_CALLERS:
                del self._callers[next(iter(self._callers))]
            self._callers.update((submit.run_id, caller) for submit in submits)

    def _written(self, run: RunState, staged: Sequence[Staged]) -> None:
        for one in staged:
            self._pass_on(run.id, run.graph, run.version, one.decision)
            status = end_in(one.decision.events)
            if status is not None:
                self._end(run, status)

    def _pass_on(self, run_id: str, graph: Graph, version: int | None, decision: Decision) -> None:
        events = decision.events
        if events:
            self._listener.on_events(run_id, graph, events, version)
        for _, at, kind, _, node, _, _ in events:
            if node is None:
                continue
            if kind == "node.started":
                if len(self._started) > MAX_STARTED:
                    del self._started[next(iter(self._started))]
                self._started[run_id, node] = at
            elif kind in ENDS:
                began = self._started.pop((run_id, node), None)
                if began is not None and kind in MEASURED:
                    node_id, item = split_name(node)
                    spec = graph.nodes[graph.index[node_id]]
                    if item is not None or spec.for_each is None:  # a mapped node calls no handler
                        self._listener.on_duration(spec.handler, at - began)
        if decision.ended and self._listener.whole_logs:
            log = self._log(run_id)
            self._listener.on_run_finished(run_id, graph, log, self._callers.get(run_id))

    def _end(self, run: RunState, status: RunStatus) -> None:
        wanted = self._listener.outputs_wanted(run.graph)
        if wanted is None:
            return
        index = run.graph.index
        outputs = {name: run.nodes[index[name]].output for name in wanted}
        self._listener.on_outcome(run.id, run.graph, status, outputs)

    def _log(self, run_id: str) -> list[Event]:
        number, _ = self._query("is_finished", run_id)
        rows = self.rows("read_entries", piece(number, 0), piece(number, PIECES - 1))
        return [event for entry in self.entries_of(run_id, rows) for event in entry.events]
