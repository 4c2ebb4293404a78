"""How one node of a run reads, in a line that stands as well in a log as in the live view.

What it must not know: whether it is printed once or painted ten times a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dovetail.cli.board import Row
from dovetail.cli.text import Line, Piece, clip, countdown, counted, duration, pad, plain
from dovetail.core.states import NodeStatus, Reason

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


def id_width(rows: Iterable[Row]) -> int:
    return min(LONGEST_ID, max((len(row.id) for row in rows), default=0))


def row_line(row: Row, ids: int, now: float, *, bar: bool = False) -> Line:
    """The line of a row. With `bar`, progress is drawn, as in the live view."""
    sign = _SIGNS[row.status]
    if row.status is NodeStatus.FAILED and not row.failed:
        sign = _SIGNS[NodeStatus.SKIPPED]  # it never ran: the one that did is the cause
    name = pad(clip(row.id, ids), ids)
    if row.status in (NodeStatus.COMPLETED, NodeStatus.RUNNING) or row.failed:
        return [sign, (f" {name}  ", "bold" if row.failed else ""), *_ran(row, now, bar)]
    return [sign, (f" {name}  ", "dim"), (not_run(row, now, live=bar), "dim")]


def _ran(row: Row, now: float, bar: bool) -> Line:
    if row.cached:
        return [("cached", "dim")]
    if row.started is None:
        return [("not started", "dim")]  # it failed before: its config could not be made
    running = row.status is NodeStatus.RUNNING
    until = now if running or row.stopped is None else row.stopped
    told: list[Piece] = [(pad(duration(until - row.started), _TIME if bar and running else 0), "")]
    if row.attempt > 1:
        attempts = f"attempt {row.attempt}" if running else counted(row.attempt, "attempt")
        told.append((f"  {attempts}", "wait"))
    if running and row.fraction is not None:
        told += _progress(row, row.fraction, bar)
    return told


def _progress(row: Row, fraction: float, bar: bool) -> Line:
    done = round(fraction * _BAR)
    told: list[Piece] = []
    if bar:
        told = [("  " + "━" * done, "busy"), ("━" * (_BAR - done), "dim")]
    told.append((f"  {fraction:4.0%}", ""))
    if row.message:
        told.append((f"  {plain(row.message)}", "dim"))
    return told


def not_run(row: Row, now: float, *, live: bool = False) -> str:
    """Why it does not run: yet, or at all. What is painted over and over is `live`."""
    if row.status is NodeStatus.PENDING:
        return ""
    if row.status is NodeStatus.QUEUED:
        return _waiting(row, now, live)
    ran = f"{duration(row.stopped - row.started)}  " if row.started and row.stopped else ""
    return ran + ending(row)


def _waiting(row: Row, now: float, live: bool) -> str:
    left = -1.0 if row.until is None else row.until - now
    if left < 0:
        return "queued"
    wait = countdown(left) if live or left >= 1 else duration(left)
    if row.tag is not None:
        return f"rate limit {plain(row.tag)}: starts in {_UNIT.sub(' ', wait)}"
    return f"retry {row.retry} in {wait}: {clip(plain(row.message), 100)}"


def ending(row: Row) -> str:
    """How a node that was not run to its end ended."""
    if row.status is NodeStatus.CANCELLED:
        why = ": the run failed" if row.reason == Reason.RUN_FAILED else ""
        return f"cancelled{why}"
    verb = "skipped" if row.status is NodeStatus.SKIPPED else "not run"
    if row.reason == Reason.DEPENDENCY_FAILED:
        return f"{verb}: {clip(row.cause or 'a dependency', LONGEST_ID)} failed"
    if row.reason == Reason.CONDITION_FALSE:
        return f"{verb}: its condition is false"
    return f"{verb}: all it depends on was skipped"
