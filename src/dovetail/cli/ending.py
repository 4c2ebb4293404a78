"""How a run ended, in a few lines: its result, or every cause and what to type next.

What it must not know: how the run went; it reads the run as it is at the end.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from dovetail.cli.rows import LONGEST_ID
from dovetail.cli.text import Line, clip, counted, duration, plain_lines, printable
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus, Reason, RunStatus
from dovetail.engine.views import result

MOST_RESULT_LINES = 40
MOST_RESULT_CHARACTERS = 8_000
MOST_CAUSES = 10
MOST_CAUSE_LINES = 5
_LONGEST_CAUSE_LINE = 1_000

_STYLES = {RunStatus.COMPLETED: "bold good", RunStatus.FAILED: "bold bad"}


def run_ending(run: RunState, typed: Sequence[str]) -> Iterator[Line]:
    """The last lines of a run that the command line `typed` started."""
    again = f"dovetail {shlex.join(typed)}"
    if run.status is RunStatus.COMPLETED:
        yield from _result_lines(result(run))
    yield _status_line(run)
    if run.status is RunStatus.FAILED:
        yield from _causes(run)
        if "-" not in typed:  # what was read from stdin cannot be typed again
            yield [("fix it, then:  ", "dim"), (" ".join(plain_lines(again)), "bold")]


def _status_line(run: RunState) -> Line:
    passed = (run.finished_at or run.created_at) - run.created_at
    return [
        (run.status.value, _STYLES.get(run.status, "bold wait")),
        (f" {run.id[:6]} in {duration(passed)}", ""),
    ]


def _result_lines(value: Any) -> Iterator[Line]:
    if value is None:
        return
    text = printable(json.dumps(value, indent=2, ensure_ascii=False))
    lines = text[:MOST_RESULT_CHARACTERS].split("\n")[:MOST_RESULT_LINES]
    for line in lines:
        yield [(line, "")]
    if sum(map(len, lines)) + len(lines) - 1 < len(text):
        yield [(f"… {len(text):,} characters in all; --json prints everything", "dim")]


def _causes(run: RunState) -> Iterator[Line]:
    """Each node that failed by itself; those that failed because of it are no causes."""
    causes = [
        (spec.id, node.error or {})
        for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
        if node.status is NodeStatus.FAILED and node.reason is not Reason.DEPENDENCY_FAILED
    ]
    for node_id, error in causes[:MOST_CAUSES]:
        yield from _cause(node_id, error)
    if len(causes) > MOST_CAUSES:
        more = counted(len(causes) - MOST_CAUSES, "more failed node")
        yield [(f"  and {more}; --json prints all of them", "dim")]


def _cause(node_id: str, error: dict[str, Any]) -> Iterator[Line]:
    kind = str(error.get("type", "error"))
    message = str(error.get("message", "")).removeprefix(f"node '{node_id}': ")
    said = kind if message in ("", kind) else f"{kind}: {message}"
    first, *rest = plain_lines(said) or ["error"]
    where = error.get("where")
    yield [
        ("  ", ""),
        (clip(node_id, LONGEST_ID), "bold"),
        (f": {clip(first, _LONGEST_CAUSE_LINE)}", "bad"),
        (f"   ({' '.join(plain_lines(where))})" if where else "", "dim"),
    ]
    for line in rest[: MOST_CAUSE_LINES - 1]:
        yield [(f"    {clip(line, _LONGEST_CAUSE_LINE)}", "")]
    if len(rest) >= MOST_CAUSE_LINES:
        yield [("    …", "dim")]
