"""What was executed, as the handlers themselves wrote it down, held against the log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Start = tuple[str, int, int]
"""Node, epoch, attempt."""


def starts(folder: str | Path, run_id: str) -> list[Start]:
    """The executions of a run's handlers, in order."""
    path = Path(folder) / "ran"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [
        (node, int(epoch), int(attempt))
        for run, node, epoch, attempt, *more in lines
        if run == run_id and not more
    ]


def stopped(folder: str | Path, run_id: str) -> list[Start]:
    """The executions that were asked to stop."""
    lines = [line.split() for line in (Path(folder) / "ran").read_text().splitlines()]
    return [
        (node, int(epoch), int(attempt))
        for run, node, epoch, attempt, *more in lines
        if run == run_id and more == ["stopped"]
    ]


def wait_for(condition: Callable[[], object], in_vain: str, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{in_vain} within {seconds:g} s"
        time.sleep(0.002)


def wait_for_start(folder: str | Path, run_id: str, start: Start) -> None:
    wait_for(lambda: start in starts(folder, run_id), f"{start} did not start")


UNSEEN = "result"
"""A node whose handler is built in, so that it writes nothing down."""


def check_executions(executed: list[Start], events: list[dict[str, Any]]) -> None:
    """Each execution is one start in the log; only a lost or cancelled start has none.

    `events` is the whole log of the run.
    """
    twice = [start for start, count in Counter(executed).items() if count > 1]
    assert not twice, f"executed twice under one attempt: {twice}"
    logged = {start for start in _of(events, "node.started") if start[0] != UNSEEN}
    unexplained = set(executed) - logged
    assert not unexplained, f"executed without a start in the log: {unexplained}"
    excused = _of(events, "node.lost") | _of(events, "node.cancelled")
    silent = logged - set(executed) - excused
    assert not silent, f"in the log, but never executed: {silent}"


def _of(events: list[dict[str, Any]], kind: str) -> set[Start]:
    return {
        (event["node"], event["epoch"], event["attempt"])
        for event in events
        if event["type"] == kind
    }
