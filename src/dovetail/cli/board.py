"""The nodes of a run as rows, kept up to date by its events: in a log, and live on a terminal.

An event costs O(1); only a retry, which opens the run again, reads every row. A terminal is
repainted ten times a second by a thread of its own: a handler that blocks the event loop does not
stop the clock, and a paused terminal (Ctrl-S) does not stop the run. A picture costs what fits on
the screen, however many nodes the run has. Rich is imported only for a terminal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from dovetail.cli.output import say
from dovetail.cli.text import (
    Line,
    Piece,
    clip,
    countdown,
    counted,
    duration,
    listed,
    pad,
    plain,
    seconds,
)
from dovetail.core.states import FINAL, FINISHED, NodeStatus, Reason, RunStatus
from dovetail.core.text import JOINERS, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from dovetail.core.dag import Edges
    from dovetail.engine.views import NodeWait, RunDetail


class NodeRow:
    """One node, as its events describe it."""

    __slots__ = (
        "attempt",
        "cached_items",
        "cause",
        "completed_items",
        "failed_items",
        "fraction",
        "id",
        "items",
        "message",
        "reason",
        "retry",
        "reuse",
        "started",
        "status",
        "stopped",
        "tag",
        "until",
    )

    def __init__(self, node_id: str) -> None:
        self.id = node_id
        self.forget()

    def forget(self) -> None:
        """Back to the state before its first event."""
        self.status = NodeStatus.PENDING
        self.attempt = 0
        self.started: float | None = None
        self.stopped: float | None = None
        """When it finished, by itself or not."""
        self.reuse = ""
        """Where its output came from, if it did not run: `cached`, or `reused` by a fork."""
        self.reason: str | None = None
        self.cause: str | None = None
        self.fraction: float | None = None
        self.message = ""
        self.until: float | None = None
        """It waits until then: for its rate limit, if `tag` is set, or for its next attempt."""
        self.tag: str | None = None
        self.retry = 0
        self.items: int | None = None
        """Of a mapped node, once its list is known: how many there are."""
        self.completed_items = self.failed_items = 0
        self.cached_items = 0
        """Of the completed items those from the cache, as far as their events were read: a
        snapshot of a run does not say how many there are."""

    def count_items(self) -> None:
        """The progress of a mapped node is how many of its items are completed."""
        if self.items:
            self.fraction = self.completed_items / self.items
            self.message = f"{self.completed_items:,} of {self.item_words()}"

    def item_words(self) -> str:
        """How many items a mapped node has, and what happened to some of them."""
        words = counted(self.items or 0, "item")
        if self.cached_items and not self.reuse:
            words += f", {self.cached_items:,} cached"
        return f"{words}, {self.failed_items:,} failed" if self.failed_items else words

    @property
    def failed(self) -> bool:
        """It failed itself, rather than because of another node."""
        return self.status is NodeStatus.FAILED and self.reason != Reason.DEPENDENCY_FAILED


class Board:
    def __init__(self, node_ids: Sequence[str], children: Edges = ()) -> None:
        """`children` by index are for a retry from one node."""
        self.rows = [NodeRow(node_id) for node_id in node_ids]
        self._by_id = {row.id: row for row in self.rows}
        self._children = children
        self.status = RunStatus.PENDING
        self.counts: Counter[NodeStatus] = Counter({NodeStatus.PENDING: len(self.rows)})
        # In the order in which they got there; dictionaries, because sets have no order.
        self.running: dict[str, NodeRow] = {}
        self.failed: dict[str, NodeRow] = {}
        self.delayed: dict[str, NodeRow] = {}

    @classmethod
    def before(cls, nodes: Sequence[Mapping[str, Any]]) -> Board:
        """Of a run with these nodes before its first event."""
        from dovetail.core.dag import children_of

        index = {node["id"]: n for n, node in enumerate(nodes)}
        parents = [[index[parent] for parent in node["dependencies"]] for node in nodes]
        return cls(list(index), children_of(parents))

    @classmethod
    def now(cls, run: RunDetail) -> Board:
        """Of a run after its newest event, without reading any of them."""
        nodes = run.view["nodes"]
        board = cls.before(nodes)
        board.status = RunStatus(run.view["status"])
        board.counts.clear()
        for row, node in zip(board.rows, nodes, strict=True):
            _read(row, node, run.waits.get(row.id))
            is_done = row.status is NodeStatus.COMPLETED and not row.attempt
            if is_done and run.view["forked_from"] and _begins_with(run.view, node):
                row.reuse = "reused"
            board.counts[row.status] += 1
            board._sort_in(row)
        return board

    @property
    def finished(self) -> int:
        return sum(self.counts[status] for status in FINISHED)

    def apply(self, event: Mapping[str, Any]) -> NodeRow | None:
        """Apply an event; returns the row of its node if the event changed it."""
        if "node" not in event:
            self.status = _RUN_STATUS.get(event["type"], self.status)
            if event["type"] == "run.retried":
                self._reopen(event.get("from"))
            return None
        row = self._by_id[event["node"]]
        if "item" in event:
            _count_item(row, event)
            return row
        change = _CHANGES.get(event["type"])
        if change is None:
            return None
        before = row.status
        row.attempt = event["attempt"] or 0
        change(row, seconds(event["time"]), event)
        if row.status is not before:
            self.counts[before] -= 1
            self.counts[row.status] += 1
        self._sort_in(row)
        return row

    def _reopen(self, from_node: str | None) -> None:
        """A retry: nodes that neither completed nor run wait again, and all below `from_node`."""
        from dovetail.core.dag import descendants

        again = {row.id for row in self.rows if row.status not in _KEPT_BY_A_RETRY}
        if from_node is not None:
            again.add(from_node)
            if self._children:
                index = next(n for n, row in enumerate(self.rows) if row.id == from_node)
                again.update(self.rows[n].id for n in descendants(self._children, index))
        for name in again:
            row = self._by_id[name]
            self.counts[row.status] -= 1
            kept = 0 if from_node is not None else row.completed_items
            row.forget()
            row.completed_items = kept
            self.counts[row.status] += 1
            self._sort_in(row)

    def _sort_in(self, row: NodeRow) -> None:
        _keep(self.running, row, row.status is NodeStatus.RUNNING)
        _keep(self.failed, row, row.failed)
        _keep(self.delayed, row, row.until is not None)


_KEPT_BY_A_RETRY = (NodeStatus.COMPLETED, NodeStatus.RUNNING)


def _keep(group: dict[str, NodeRow], row: NodeRow, belongs: bool) -> None:
    if belongs:
        group[row.id] = row
    else:
        group.pop(row.id, None)


def _read(row: NodeRow, node: Mapping[str, Any], wait: NodeWait | None) -> None:
    row.status, row.attempt = NodeStatus(node["status"]), node["attempt"]
    row.started, row.stopped = _seconds(node["started_at"]), _seconds(node["finished_at"])
    row.reuse = "cached" if row.status is NodeStatus.COMPLETED and not row.attempt else ""
    row.reason, row.cause = node["reason"], node["cause"]
    if (counts := node.get("items")) is not None:
        row.items = counts["total"]
        row.completed_items, row.failed_items = counts["completed"], counts["failed"]
        if not row.completed_items:
            row.reuse = ""  # no item was found in the cache: there is none, or they failed
        row.count_items()
    if wait is not None:
        row.until, row.tag, row.retry = wait.until, wait.resource_tag, wait.retry
        row.message = "" if wait.error is None else _words(wait.error)


def _begins_with(run: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Whether a node ended as its run began."""
    return bool(node["finished_at"] == run["created_at"])


def _seconds(time: str | None) -> float | None:
    return None if time is None else seconds(time)


def _words(error: Mapping[str, Any]) -> str:
    return f"{error.get('type')}: {error.get('message')}"


def _queued(row: NodeRow, at: float, data: Mapping[str, Any]) -> None:
    row.status = NodeStatus.QUEUED
    row.until = None
    if "items" in data:
        row.items = data["items"]


def _count_item(row: NodeRow, event: Mapping[str, Any]) -> None:
    row.completed_items += event["type"] in ("node.completed", "node.cached")
    row.cached_items += event["type"] == "node.cached"
    row.failed_items += event["type"] == "node.failed"
    row.count_items()


def _started(row: NodeRow, at: float, data: Mapping[str, Any]) -> None:
    row.status = NodeStatus.RUNNING
    row.started, row.stopped = at, None
    row.until = row.tag = row.fraction = None
    row.message = ""
    row.count_items()


def _progressed(row: NodeRow, at: float, data: Mapping[str, Any]) -> None:
    row.fraction, row.message = data["fraction"], data["message"]


def _parked(row: NodeRow, at: float, data: Mapping[str, Any]) -> None:
    row.status = NodeStatus.QUEUED
    row.until, row.tag = seconds(data["until"]), data["resource_tag"]


def _retrying(row: NodeRow, at: float, data: Mapping[str, Any]) -> None:
    row.status = NodeStatus.QUEUED
    row.until, row.tag, row.retry = at + data["delay"], None, data["retry"]
    row.message = _words(data["error"])


def _reuses(word: str) -> Callable[[NodeRow, float, Mapping[str, Any]], None]:
    def end(row: NodeRow, at: float, data: Mapping[str, Any]) -> None:
        row.reuse = word
        row.items = data.get("items")
        _ended(row, NodeStatus.COMPLETED, at, data)

    return end


def _ended(row: NodeRow, status: NodeStatus, at: float, data: Mapping[str, Any]) -> None:
    row.status, row.stopped = status, at
    row.reason, row.cause = data.get("reason"), data.get("cause")
    row.until = None


def _completed(row: NodeRow, at: float, data: Mapping[str, Any]) -> None:
    if row.started is None and row.completed_items:
        row.reuse = "cached"  # a mapped node whose items were all found in the cache
    _ended(row, NodeStatus.COMPLETED, at, data)


def _ends_as(status: NodeStatus) -> Callable[[NodeRow, float, Mapping[str, Any]], None]:
    return lambda row, at, data: _ended(row, status, at, data)


_CHANGES: dict[str, Callable[[NodeRow, float, Mapping[str, Any]], None]] = {
    "node.queued": _queued,
    "node.started": _started,
    "node.progress": _progressed,
    "node.parked": _parked,
    "node.retrying": _retrying,
    "node.lost": _queued,
    "node.cached": _reuses("cached"),
    "node.reused": _reuses("reused"),
    "node.completed": _completed,
    "node.failed": _ends_as(NodeStatus.FAILED),
    "node.skipped": _ends_as(NodeStatus.SKIPPED),
    "node.cancelled": _ends_as(NodeStatus.CANCELLED),
}

_RUN_STATUS = {
    "run.started": RunStatus.RUNNING,
    "run.completed": RunStatus.COMPLETED,
    "run.failed": RunStatus.FAILED,
    "run.cancelled": RunStatus.CANCELLED,
    "run.retried": RunStatus.RUNNING,
}


LONGEST_ID = 40
_TIME = 4
_BAR = 20
_UNIT = re.compile(r"(?<=\d)(?=[a-zµ])")
"""Between a number and its unit: a sentence has a space there, a column has none."""

_SIGNS: dict[NodeStatus, Piece] = {
    NodeStatus.PENDING: ("○", "dim"),
    NodeStatus.QUEUED: ("◌", "wait"),
    NodeStatus.RUNNING: ("●", "busy"),
    NodeStatus.COMPLETED: ("✓", "good"),
    NodeStatus.FAILED: ("✗", "bad"),
    NodeStatus.SKIPPED: ("–", "dim"),
    NodeStatus.CANCELLED: ("–", "dim"),
}


def id_width(rows: Iterable[NodeRow]) -> int:
    return min(LONGEST_ID, max((len(row.id) for row in rows), default=0))


def row_line(row: NodeRow, ids: int, now: float, *, bar: bool = False) -> Line:
    """The line of a row. With `bar`, progress is drawn, as in the live view."""
    sign = _SIGNS[row.status]
    if row.status is NodeStatus.FAILED and not row.failed:
        sign = _SIGNS[NodeStatus.SKIPPED]  # it never ran: a dependency is the cause
    name = pad(clip(row.id, ids), ids)
    if row.status in (NodeStatus.COMPLETED, NodeStatus.RUNNING) or row.failed:
        return [sign, (f" {name}  ", "bold" if row.failed else ""), *_ran(row, now, bar)]
    return [sign, (f" {name}  ", "dim"), (not_run(row, now, live=bar), "dim")]


def _ran(row: NodeRow, now: float, bar: bool) -> Line:
    items = "" if row.items is None else row.item_words()
    if row.reuse:
        return [(f"{row.reuse}  {items}".rstrip(), "dim")]
    if row.started is None and items and row.status is NodeStatus.COMPLETED:
        return [(items, "dim")]  # an empty list, or no item of which could be started
    if row.started is None:
        return [("not started", "dim")]  # it failed before: its config could not be made
    running = row.status is NodeStatus.RUNNING
    until = now if running or row.stopped is None else row.stopped
    words: list[Piece] = [(pad(duration(until - row.started), _TIME if bar and running else 0), "")]
    if row.attempt > 1:
        attempts = f"attempt {row.attempt}" if running else counted(row.attempt, "attempt")
        words.append((f"  {attempts}", "wait"))
    if running and row.fraction is not None:
        words += _progress(row, row.fraction, bar)
    elif items:
        words.append((f"  {items}", "dim"))
    return words


def _progress(row: NodeRow, fraction: float, bar: bool) -> Line:
    done = round(fraction * _BAR)
    words: list[Piece] = []
    if bar:
        words = [("  " + "━" * done, "busy"), ("━" * (_BAR - done), "dim")]
    words.append((f"  {fraction:4.0%}", ""))
    if row.message:
        words.append((f"  {plain(row.message)}", "dim"))
    return words


def not_run(row: NodeRow, now: float, *, live: bool = False) -> str:
    """Why it does not run: yet, or at all. `live` is for lines that are repainted."""
    if row.status is NodeStatus.PENDING:
        return ""
    if row.status is NodeStatus.QUEUED:
        return _waiting(row, now, live)
    ran = f"{duration(row.stopped - row.started)}  " if row.started and row.stopped else ""
    return ran + ending(row)


def _waiting(row: NodeRow, now: float, live: bool) -> str:
    left = -1.0 if row.until is None else row.until - now
    if left < 0:
        items = f"  {plain(row.message)}" if row.completed_items and row.message else ""
        return f"queued{items}"
    wait = countdown(left) if live or left >= 1 else duration(left)
    if row.tag is not None:
        return f"rate limit {plain(row.tag)}: starts in {_UNIT.sub(' ', wait)}"
    return f"retry {row.retry} in {wait}: {clip(plain(row.message), 100)}"


def ending(row: NodeRow) -> str:
    """How a node ended that did not run to its end."""
    if row.status is NodeStatus.CANCELLED:
        why = ": the run failed" if row.reason == Reason.RUN_FAILED else ""
        return f"cancelled{why}"
    verb = "skipped" if row.status is NodeStatus.SKIPPED else "not run"
    if row.reason == Reason.DEPENDENCY_FAILED:
        return f"{verb}: {clip(row.cause or 'a dependency', LONGEST_ID)} failed"
    if row.reason == Reason.CONDITION_FALSE:
        return f"{verb}: its condition is false"
    return f"{verb}: all it depends on was skipped"


QUIET_SECONDS = 30.0
"""After so long without a line it prints which nodes run."""
PROGRESS_SECONDS = 5.0
"""A node's progress is printed at most this often."""
MIN_PARKED_SECONDS = 1.0
"""Shorter waits for a rate limit are not printed."""
MAX_SAME_ENDING = 5
"""So many nodes that did not run for the same reason are named; the others are counted."""


class PlainView:
    """A run as lines of a log, for pipes, files and CI: ends, retries, and a sign of life.

    Starts are not printed, because the end of a node implies them.
    """

    refresh_seconds = 1.0

    def __init__(self, board: Board) -> None:
        self._board = board
        self._ids = id_width(board.rows)
        self._printed_at = time.monotonic()
        self._progress_at: dict[str, float] = {}
        self._endings: Counter[str] = Counter()

    def begin(self, workflow: str, run_id: str, passed: float = 0.0) -> None:
        nodes = counted(len(self._board.rows), "node")
        done = self._board.counts[NodeStatus.COMPLETED]
        before = f", {done:,} completed before" if done else ""
        self._say(f"RUNNING {run_id[:6]} {workflow}, {nodes}{before}")

    def show(self, event: Mapping[str, Any]) -> None:
        row = self._board.apply(event)
        if event["type"] == "run.retried":
            self._endings.clear()
            nodes = counted(self._board.counts[NodeStatus.PENDING], "node")
            self._say(f"retried: {nodes} to run")
        elif row is not None and self._is_news(row, event):
            self._say(row_line(row, self._ids, seconds(event["time"])))

    def refresh(self) -> None:
        if time.monotonic() - self._printed_at >= QUIET_SECONDS and self._board.running:
            names = [clip(name, LONGEST_ID) for name in self._board.running]
            self._say(f"● still running: {listed(names, 5)}")

    def end(self) -> None:
        for reason, count in self._endings.items():
            if count > MAX_SAME_ENDING:
                self._say(f"– and {count - MAX_SAME_ENDING:,} more {reason}")

    def _is_news(self, row: NodeRow, event: Mapping[str, Any]) -> bool:
        if event["type"] == "node.progress" or "item" in event:
            if row.status is not NodeStatus.RUNNING:
                return False
            now = seconds(event["time"])
            last = self._progress_at.get(row.id, row.started or now)
            if now - last < PROGRESS_SECONDS:
                return False
            self._progress_at[row.id] = now
            return True
        if event["type"] == "node.parked":
            wait = 0.0 if row.until is None else row.until - seconds(event["time"])
            return wait >= MIN_PARKED_SECONDS
        if row.status in FINISHED and not (row.failed or row.status is NodeStatus.COMPLETED):
            reason = ending(row)
            self._endings[reason] += 1
            return self._endings[reason] <= MAX_SAME_ENDING
        return row.status in FINISHED or event["type"] == "node.retrying"

    def _say(self, line: Line | str) -> None:
        self._printed_at = time.monotonic()
        say(line)
        sys.stdout.flush()  # a reader of the log sees each line at once


# --- on a terminal -----------------------------------------------------------------------------

PICTURES_PER_SECOND = 10
# What is below the rows: the summary, and the line the cursor stands on.
_RESERVED = 2

_RICH_STYLES = {
    "": "",
    "good": "green",
    "bad": "red",
    "busy": "cyan",
    "wait": "yellow",
    "dim": "dim",
    "bold": "bold",
    "bold good": "bold green",
    "bold bad": "bold red",
    "bold wait": "bold yellow",
}


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def _live(console: Console, picture: Callable[[], Text]) -> Live:
    from rich.live import Live

    return Live(
        console=console,
        get_renderable=picture,
        refresh_per_second=PICTURES_PER_SECOND,
        vertical_overflow="crop",
    )


def _start(live: Live) -> None:
    """The view replaces both streams. What handlers print must reach their logs before the view,
    which would put it on the screen as its own."""
    from dovetail.handlers.log_capture import cover_streams

    live.start(refresh=True)
    cover_streams()


def _painted(lines: Iterable[Line]) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis", end="")
    for number, line in enumerate(lines):
        if number:
            text.append("\n")
        for words, style in line:
            shown = "" if os.environ.get("NO_COLOR") else _RICH_STYLES[style]
            text.append(visible(words, JOINERS), shown)
    return text


class LiveLines:
    """A few lines that are painted over, such as a progress bar."""

    refresh_seconds = 3600.0  # its thread paints; the event loop has nothing to do for it

    def __init__(self, lines: Callable[[], Iterable[Line]]) -> None:
        self._lines = lines
        self._live = _live(_console(), self._picture)

    def begin(self) -> None:
        _start(self._live)

    def refresh(self) -> None:
        """Nothing to do here."""

    def end(self) -> None:
        self._live.stop()

    def _picture(self) -> Text:
        return _painted(self._lines())


class LiveView:
    refresh_seconds = 3600.0  # its thread paints; the event loop has nothing to do for it

    def __init__(self, board: Board) -> None:
        self._board = board
        self._ids = id_width(board.rows)
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._title = ""
        self._over = False
        self._console = _console()
        self._live = _live(self._console, self._picture)

    def begin(self, workflow: str, run_id: str, passed: float = 0.0) -> None:
        self._title = f"{run_id[:6]} {workflow}"
        self._began = time.monotonic() - passed
        _start(self._live)

    def show(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self._board.apply(event)

    def refresh(self) -> None:
        """Nothing to do here."""

    def end(self) -> None:
        """Leave the last picture where it is; what follows is printed below it."""
        with self._lock:
            self._over = True
        self._live.stop()

    def _picture(self) -> Text:
        with self._lock:  # rows must not change halfway through
            lines = list(self._lines(self._console.size.height - _RESERVED, time.time()))
        return _painted(lines)

    def _lines(self, room: int, now: float) -> Iterator[Line]:
        rows = self._board.rows
        shown = rows if len(rows) <= room else list(self._most_telling(room))
        for row in shown:
            yield row_line(row, self._ids, now, bar=True)
        if not self._over:
            yield self._summary()
        elif shown is not rows:
            yield [(self._counts(), "dim")]

    def _most_telling(self, room: int) -> Iterator[NodeRow]:
        """Of a run that does not fit: failures first, what runs, then what waits for a time."""
        board = self._board
        failed = min(len(board.failed), max(1, room // 3)) if not self._over else room
        yield from islice(board.failed.values(), failed)
        room -= min(failed, len(board.failed))
        yield from islice(board.running.values(), max(0, room))
        room -= len(board.running)
        yield from islice(board.delayed.values(), max(0, room))

    def _summary(self) -> Line:
        board = self._board
        passed = duration(time.monotonic() - self._began)
        if board.status in FINAL:
            left = counted(len(board.running), "running node")
            return [(board.status.value, "bold bad"), (f" {self._title}  waits for {left}", "")]
        return [
            ("RUNNING", "bold"),
            (f" {self._title}  {passed}  ", ""),
            (self._counts(), "dim"),
        ]

    def _counts(self) -> str:
        board = self._board
        done = f"{board.finished:,} of {len(board.rows):,} done"
        counts = (f"{board.counts[s]:,} {word}" for s, word in _WORDS.items() if board.counts[s])
        return ", ".join([done, *counts])


_WORDS = {
    NodeStatus.FAILED: "failed",
    NodeStatus.SKIPPED: "skipped",
    NodeStatus.CANCELLED: "cancelled",
    NodeStatus.RUNNING: "running",
    NodeStatus.QUEUED: "queued",
}
