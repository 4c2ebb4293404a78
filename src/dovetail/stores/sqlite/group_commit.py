"""Group commit: staged decisions become one transaction at a time.

A decision that needs a promise waits for its commit; others travel with it. A commit that another
process overtook is taken back, the runs in question are decided again, and it is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dovetail.core.audit.replay import is_taken
from dovetail.core.node_logs import LogChunk
from dovetail.core.run import RunState
from dovetail.core.webhooks import Notification
from dovetail.engine.views import result
from dovetail.stores.sqlite.writer import (
    Add,
    CommitOutcome,
    CommitRound,
    CreatedRun,
    Creation,
    FeedRecord,
    Projection,
    Staged,
    Writer,
    feed_records,
)

FEW = 128
"""So many runs of a round may be written without a thread."""
LOG_SECONDS = 0.05
"""Lines of logs wait so long for a commit that is made anyway, as that of their node's result."""
MAX_LOGS = 8
"""Chunks of a round that is written without a thread: each may have 64 KiB."""


class CachedRun:
    """A run in memory, and what of it is not in the file yet."""

    __slots__ = (
        "mine",
        "number",
        "pieces",
        "projected",
        "reading",
        "run",
        "staged",
        "stale",
        "writing",
    )

    def __init__(self, run: RunState, number: int, pieces: int, *, mine: bool) -> None:
        self.run = run
        self.number = number
        self.pieces = pieces
        """How many the file has of its log."""
        self.mine = mine
        """This process owns it, so no other process is expected to move it."""
        self.staged: list[Staged] = []
        self.writing: list[Staged] = []
        self.stale = False
        """Another process has appended to its log."""
        self.reading = 0
        """How often it was read from the file."""
        self.projected: tuple[Any, ...] | None = shown(run)

    @property
    def has_pending_writes(self) -> bool:
        return bool(self.staged or self.writing)


class _NextCommit:
    """The next transaction, and the futures that wait for it."""

    __slots__ = ("creations", "dirty", "logs", "outputs", "released", "waiting")

    def __init__(self) -> None:
        self.dirty: dict[str, CachedRun] = {}
        self.creations: list[tuple[Creation, asyncio.Future[CreatedRun]]] = []
        self.outputs: dict[str, tuple[float, Any, Staged]] = {}
        self.released: list[int] = []
        self.logs: dict[tuple[str, str], LogChunk] = {}
        """By run and name."""
        self.waiting: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        moves_runs = self.dirty or self.creations or self.outputs or self.released
        return bool(moves_runs or self.logs)

    @property
    def moves_runs(self) -> bool:
        return bool(self.dirty or self.creations or self.outputs or self.released)

    def log(self, chunk: LogChunk) -> None:
        """A chunk that gives way before it is written is never written."""
        drops = list(chunk.drops)
        for number in chunk.drops:
            name = f"{chunk.attempt_name}{number}"
            unwritten = self.logs.pop((chunk.run_id, name), None)
            if unwritten is not None:
                drops += unwritten.drops
        self.logs[chunk.run_id, chunk.name] = chunk._replace(drops=drops)

    def before(self, later: _NextCommit) -> _NextCommit:
        """Both, in this order."""
        both = _NextCommit()
        both.dirty = self.dirty | later.dirty
        both.creations = self.creations + later.creations
        both.outputs = self.outputs | later.outputs
        both.released = self.released + later.released
        both.logs = dict(self.logs)
        for chunk in later.logs.values():
            both.log(chunk)
        both.waiting = self.waiting + later.waiting
        return both


class GroupCommit:
    def __init__(
        self,
        writer: Writer,
        owner: str,
        *,
        catch_up: Callable[[CachedRun], None],
        on_committed: Callable[[CachedRun], None],
        on_written: Callable[[], None],
        notify: Callable[[RunState, Sequence[Staged]], Sequence[Notification]],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._writer = writer
        self._owner = owner
        self._catch_up = catch_up
        """Decide a run's staged transitions again, from its state in the file."""
        self._on_committed = on_committed
        """Called when the staged decisions of a run are in the file."""
        self._on_written = on_written
        """Called when a transaction is committed."""
        self._notify = notify
        """The notifications that follow from decisions of a run."""
        self._fail = fail
        """Called when a transaction failed: none will be tried again."""
        self.heard: Callable[[RunState, Sequence[Staged]], None] | None = None
        """Called with the decisions of a run that were just committed."""
        self._loop = asyncio.get_running_loop()
        self._next = _NextCommit()
        self._writing: _NextCommit | None = None
        self._scheduled = False
        self._log_timer: asyncio.TimerHandle | None = None

    # ── staging ──────────────────────────────────────────────────────────────────────────

    def stage(self, kept: CachedRun, one: Staged) -> None:
        kept.staged.append(one)
        self._next.dirty[kept.run.id] = kept

    def keep_output(self, key: str, until: float, output: Any, one: Staged) -> None:
        """For the node cache, if this decision stands when it is written."""
        self._next.outputs[key] = (until, output, one)

    def log(self, chunks: Iterable[LogChunk]) -> None:
        """Write these with the next transaction, or in one of their own a moment later."""
        for chunk in chunks:
            self._next.log(chunk)
        if self._log_timer is None:
            self._log_timer = self._loop.call_later(LOG_SECONDS, self._begin_logs)

    def _begin_logs(self) -> None:
        self._log_timer = None
        self._begin()

    def staged_output(self, key: str) -> tuple[float, Any] | None:
        for gathering in (self._next, self._writing):
            if gathering is not None and key in gathering.outputs:
                return gathering.outputs[key][:2]
        return None

    def create(self, creation: Creation) -> asyncio.Future[CreatedRun]:
        made: asyncio.Future[CreatedRun] = self._loop.create_future()
        self._next.creations.append((creation, made))
        self._begin()
        return made

    def release(self, numbers: Iterable[int]) -> None:
        """These runs have no owner once the next transaction is committed."""
        self._next.released += numbers

    def look_again(self, stale: Iterable[CachedRun]) -> None:
        """Another process has moved these runs."""
        for kept in stale:
            kept.stale = True
            self._next.dirty[kept.run.id] = kept
        if self._next.dirty:
            self._begin()

    def has_staged(self, run_id: str) -> bool:
        return run_id in self._next.dirty

    async def flush(self) -> None:
        """Return when everything that was staged so far is in the file."""
        gathering = self._next if self._next else self._writing
        if gathering is None:
            return
        # A future for each caller: cancelling one must not cancel the others.
        waiter: asyncio.Future[None] = self._loop.create_future()
        gathering.waiting.append(waiter)
        self._begin()
        if waiter.done():
            waiter.result()  # written on the spot, or it could not be
        else:
            await waiter

    def schedule(self) -> None:
        """Write soon: after whatever else this turn of the loop brings, in the same commit."""
        if self._writing is None and not self._scheduled and self._next:
            self._scheduled = True
            self._loop.call_soon(self._begin_scheduled)

    def _begin_scheduled(self) -> None:
        self._scheduled = False
        self._begin()

    # ── writing ──────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        if self._writing is not None or not self._next:
            return  # the next round begins when this one ends
        gathering, self._next = self._next, _NextCommit()
        if self._log_timer is not None:
            self._log_timer.cancel()
            self._log_timer = None
        try:
            for kept in gathering.dirty.values():
                if kept.stale:
                    self._catch_up(kept)
            # Catching up stages again, into the next transaction: it belongs into this one. A run
            # whose decisions came to nothing was dropped, and may be read anew meanwhile.
            for run_id, kept in gathering.dirty.items():
                if self._next.dirty.get(run_id) is kept:
                    del self._next.dirty[run_id]
            gathering.dirty = {i: kept for i, kept in gathering.dirty.items() if kept.staged}
            round_ = self._round(gathering)
        except Exception as error:  # waiting callers must get an answer, whatever it is
            self._give_up(gathering, error)
            return
        if round_ is None:
            _resolve(gathering.waiting)
            self._begin()
            return
        self._writing = gathering
        outcome = None
        is_small = len(round_.additions) <= FEW and len(round_.logs) <= MAX_LOGS
        if not round_.creations and is_small:
            try:
                outcome = self._writer.commit(round_)
            except Exception as error:
                self._written(None, error)
                return
        if outcome is None:
            self._writer.commit_in_thread(round_, self._written)
        else:
            self._written(outcome, None)

    def _round(self, gathering: _NextCommit) -> CommitRound | None:
        additions, projections, notifications = [], [], []
        outbox: list[Notification] = []
        feed: list[FeedRecord] = []
        for kept in gathering.dirty.values():
            kept.writing, kept.staged = kept.staged, []
            additions.append(Add(kept.number, kept.pieces, kept.writing))
            if not kept.mine:
                notifications.append(kept.number)
            now_shown = shown(kept.run)
            if now_shown != kept.projected:
                kept.projected = now_shown
                projections.append(projection(kept.run, kept.number))
                outbox += self._notify(kept.run, kept.writing)
                # Here only: each run event changes what is shown of its run.
                feed += feed_records(kept.run.id, kept.run.graph.name, kept.writing)
        if not (additions or gathering.moves_runs or gathering.logs):
            return None
        return CommitRound(
            [creation for creation, _ in gathering.creations],
            additions,
            projections,
            [
                (key, until, output)
                for key, (until, output, one) in gathering.outputs.items()
                if is_taken(one.decision)
            ],
            notifications,
            gathering.released,
            self._owner,
            list(gathering.logs.values()),
            outbox,
            feed,
        )

    def _written(self, outcome: CommitOutcome | None, error: BaseException | None) -> None:
        written, self._writing = self._writing, None
        if written is None:
            return
        if error is not None and not written.moves_runs:
            self._writer.lose_logs(error)  # a log is never in the way of a run
            _resolve(written.waiting)
            self._begin()
            return
        if error is not None or outcome is None:
            self._give_up(written, error or RuntimeError("the writer gave no answer"))
            return
        if outcome.overtaken:
            self._take_back(written, outcome.overtaken)
            return
        for kept in written.dirty.values():
            if self.heard is not None:
                self.heard(kept.run, kept.writing)
            kept.writing = []
            kept.pieces += 1
            self._on_committed(kept)
        for (_, future), made in zip(written.creations, outcome.made, strict=True):
            if not future.done():
                future.set_result(made)
        self._on_written()
        _resolve(written.waiting)
        self._begin()

    def _take_back(self, written: _NextCommit, overtaken: frozenset[int]) -> None:
        """Nothing of the round was written: read what is new, decide anew, try again."""
        for kept in written.dirty.values():
            kept.staged = kept.writing + kept.staged
            kept.writing = []
            kept.projected = None
            kept.stale = kept.stale or kept.number in overtaken
        self._next = written.before(self._next)
        self._begin()

    def _give_up(self, written: _NextCommit, error: BaseException) -> None:
        lost = written.before(self._next)
        self._next = _NextCommit()
        for _, future in lost.creations:
            if not future.done():
                future.set_exception(error)
        for waiter in lost.waiting:
            if not waiter.done():
                waiter.set_exception(error)
        self._fail(error)


def _resolve(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def shown(run: RunState) -> tuple[Any, ...]:
    """What a projection depends on."""
    return run.status, run.epoch, run.finished_at


def projection(run: RunState, number: int) -> Projection:
    return Projection(
        number,
        run.status.value,
        run.epoch,
        run.started_at,
        run.finished_at,
        run.error,
        result(run) if run.finished else None,
    )
