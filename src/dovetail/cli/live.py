"""A run as lines of a log: what ended, what is tried again, and a sign of life in between.

For pipes, files and continuous integration: no colours, nothing is painted over. Starts are
not told, because the end of a node tells them; a thousand nodes that share one fate are
counted instead. What it must not know: where the events come from.

A run on a terminal: painted in place, ten times a second, by a thread of its own.

In a thread, so that a handler which blocks the event loop does not stop the clock, and a
terminal that is paused (Ctrl-S) does not stop the run. An event costs O(1), a picture costs
what fits on the screen, so a run of ten thousand nodes is as fluent as one of ten. What it
must not know: where the events come from.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dovetail.cli.board import LONGEST_ID, Board, NodeRow, ending, id_width, row_line
from dovetail.cli.output import say
from dovetail.cli.text import JOINERS, Line, clip, counted, duration, listed
from dovetail.core.states import FINAL, FINISHED, NodeStatus
from dovetail.core.text import visible
from dovetail.engine.views import seconds

QUIET_SECONDS = 30.0
"""After so long without a line it says what runs."""
PROGRESS_SECONDS = 5.0
"""A node's progress is told at most this often."""
WORTH_TELLING_SECONDS = 1.0
"""Shorter waits for a rate limit are told nowhere."""
SAME_FATE = 5
"""So many nodes that did not run for the same reason are named, the others counted."""


class PlainView:
    refresh_seconds = 1.0

    def __init__(self, board: Board) -> None:
        self._board = board
        self._ids = id_width(board.rows)
        self._spoke = time.monotonic()
        self._progress_told: dict[str, float] = {}
        self._fates: Counter[str] = Counter()

    def begin(self, workflow: str, run_id: str, passed: float = 0.0) -> None:
        nodes = counted(len(self._board.rows), "node")
        done = self._board.counts[NodeStatus.COMPLETED]
        before = f", {done:,} completed before" if done else ""
        self._say(f"RUNNING {run_id[:6]} {workflow}, {nodes}{before}")

    def show(self, event: Mapping[str, Any]) -> None:
        row = self._board.apply(event)
        if event["type"] == "run.retried":
            self._fates.clear()
            nodes = counted(self._board.counts[NodeStatus.PENDING], "node")
            self._say(f"retried: {nodes} to run")
        elif row is not None and self._is_news(row, event):
            self._say(row_line(row, self._ids, seconds(event["time"])))

    def refresh(self) -> None:
        if time.monotonic() - self._spoke >= QUIET_SECONDS and self._board.running:
            names = [clip(name, LONGEST_ID) for name in self._board.running]
            self._say(f"● still running: {listed(names, 5)}")

    def end(self) -> None:
        for fate, count in self._fates.items():
            if count > SAME_FATE:
                self._say(f"– and {count - SAME_FATE:,} more {fate}")

    def _is_news(self, row: NodeRow, event: Mapping[str, Any]) -> bool:
        if event["type"] == "node.progress":
            now = seconds(event["time"])
            last = self._progress_told.get(row.id, row.started or now)
            if now - last < PROGRESS_SECONDS:
                return False
            self._progress_told[row.id] = now
            return True
        if event["type"] == "node.parked":
            wait = 0.0 if row.until is None else row.until - seconds(event["time"])
            return wait >= WORTH_TELLING_SECONDS
        if row.status in FINISHED and not (row.failed or row.status is NodeStatus.COMPLETED):
            fate = ending(row)
            self._fates[fate] += 1
            return self._fates[fate] <= SAME_FATE
        return row.status in FINISHED or event["type"] == "node.retrying"

    def _say(self, line: Line | str) -> None:
        self._spoke = time.monotonic()
        say(line)
        sys.stdout.flush()  # who follows a log sees each line when it happened


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
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def _live(console: Console, picture: Callable[[], Text]) -> Live:
    return Live(
        console=console,
        get_renderable=picture,
        refresh_per_second=PICTURES_PER_SECOND,
        vertical_overflow="crop",
    )


def _painted(lines: Iterable[Line]) -> Text:
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
        self._live.start(refresh=True)

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
        self._live.start(refresh=True)

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
        told = [
            f"{board.counts[status]:,} {word}"
            for status, word in _WORDS.items()
            if board.counts[status]
        ]
        return ", ".join([done, *told])


_WORDS = {
    NodeStatus.FAILED: "failed",
    NodeStatus.SKIPPED: "skipped",
    NodeStatus.CANCELLED: "cancelled",
    NodeStatus.RUNNING: "running",
    NodeStatus.QUEUED: "queued",
}
