"""A run, or a batch, on a terminal: repainted in place, ten times a second, by a thread of its own.

In a thread, so that a handler that blocks the event loop does not stop the clock, and a paused
terminal (Ctrl-S) does not stop the run. An event costs O(1) and a picture costs what fits on the
screen, however many nodes the run has.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dovetail.cli.board import Board, NodeRow, id_width, row_line
from dovetail.cli.text import JOINERS, Line, counted, duration
from dovetail.core.states import FINAL, NodeStatus
from dovetail.core.text import visible
from dovetail.handlers.log_capture import cover_streams

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


def _start(live: Live) -> None:
    """The view replaces both streams. What handlers print must reach their logs before the view,
    which would put it on the screen as its own."""
    live.start(refresh=True)
    cover_streams()


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
