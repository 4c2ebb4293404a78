"""A run as lines of a log: what ended, what is tried again, and a sign of life in between.

For pipes, files and continuous integration: no colours, nothing is painted over. Starts are
not told, because the end of a node tells them; a thousand nodes that share one fate are
counted instead. What it must not know: where the events come from.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from dovetail.cli.board import Board, Row
from dovetail.cli.rows import LONGEST_ID, ending, id_width, row_line
from dovetail.cli.streams import say
from dovetail.cli.text import Line, clip, counted, listed
from dovetail.core.events import Event
from dovetail.core.states import FINISHED, NodeStatus

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

    def show(self, event: Event) -> None:
        row = self._board.apply(event)
        if event.type == "run.retried":
            self._fates.clear()
            nodes = counted(self._board.counts[NodeStatus.PENDING], "node")
            self._say(f"retried: {nodes} to run")
        elif row is not None and self._is_news(row, event):
            self._say(row_line(row, self._ids, event.time))

    def refresh(self) -> None:
        if time.monotonic() - self._spoke >= QUIET_SECONDS and self._board.running:
            names = [clip(name, LONGEST_ID) for name in self._board.running]
            self._say(f"● still running: {listed(names, 5)}")

    def end(self) -> None:
        for fate, count in self._fates.items():
            if count > SAME_FATE:
                self._say(f"– and {count - SAME_FATE:,} more {fate}")

    def _is_news(self, row: Row, event: Event) -> bool:
        if event.type == "node.progress":
            last = self._progress_told.get(row.id, row.started or event.time)
            if event.time - last < PROGRESS_SECONDS:
                return False
            self._progress_told[row.id] = event.time
            return True
        if event.type == "node.parked":
            return row.until is not None and row.until - event.time >= WORTH_TELLING_SECONDS
        if row.status in FINISHED and not (row.failed or row.status is NodeStatus.COMPLETED):
            fate = ending(row)
            self._fates[fate] += 1
            return self._fates[fate] <= SAME_FATE
        return row.status in FINISHED or event.type == "node.retrying"

    def _say(self, line: Line | str) -> None:
        self._spoke = time.monotonic()
        say(line)
        sys.stdout.flush()  # who follows a log sees each line when it happened
