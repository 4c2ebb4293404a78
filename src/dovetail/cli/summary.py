"""How a run ended, in a few lines: its result, or every cause and what to type next.

What it must not know: how the run went; it reads the run as it is at the end.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.cli.board import LONGEST_ID
from dovetail.cli.target import typed_place
from dovetail.cli.text import Line, clip, counted, duration, plain_lines, printable
from dovetail.core.states import NodeStatus, Reason, RunStatus
from dovetail.engine.views import seconds

MOST_RESULT_LINES = 40
MOST_RESULT_CHARACTERS = 8_000
MOST_CAUSES = 10
MOST_CAUSE_LINES = 5
_LONGEST_CAUSE_LINE = 1_000

_OF_THE_DEFINITION = ("invalid_config", "invalid_url", "missing_value", "template_error")
"""Errors that a definition may be to blame for, and then a retry would only repeat."""
_MAY_BE_WRONG = (
    "a wrong definition: correct the file and run it again; a retry would use the stored one",
    "a wrong handler or service: correct it and retry the run, as below",
)

_STYLES = {
    "COMPLETED": "bold good",
    "FAILED": "bold bad",
    "CANCELLED": "bold wait",
}


def run_ending(run: Mapping[str, Any], since: float | None = None) -> Iterator[Line]:
    """The last lines about a run that has ended; it took its time from `since` on."""
    if run["status"] == RunStatus.COMPLETED:
        yield from result_lines(run["result"])
    took = duration(seconds_taken(run, since))
    yield [status_piece(run["status"]), (f" {run['run_id'][:6]} in {took}", "")]
    if run["status"] == RunStatus.FAILED:
        yield from causes(run)


def seconds_taken(run: Mapping[str, Any], since: float | None = None) -> float:
    """From `since`, or from its creation, to its end."""
    began = seconds(run["created_at"]) if since is None else since
    return (began if run["finished_at"] is None else seconds(run["finished_at"])) - began


def status_piece(status: str) -> tuple[str, str]:
    return str(status), _STYLES.get(status, "bold")


def retry_hint(
    status: str, short_id: str, plan: Mapping[str, Sequence[str]], handlers: Sequence[str]
) -> Line:
    """What to type once the cause is gone, and what that would do."""
    return [
        ("fix it, then:  " if status == RunStatus.FAILED else "go on with:  ", "dim"),
        (command("runs", "retry", short_id, handlers=handlers), "bold"),
        (f"      reruns {len(plan['rerun']):,}, reuses {len(plan['reuse']):,}", "dim"),
    ]


def resume_hint(short_id: str, handlers: Sequence[str]) -> Line:
    """What to type to go on with a run that nobody drives."""
    typed = command("runs", "resume", short_id, handlers=handlers)
    return [("go on with:  ", "dim"), (typed, "bold")]


def command(*words: str, handlers: Sequence[str] = (), placed: bool = True) -> str:
    """A command line of ours that can be typed, or copied, as it stands.

    It leads to where runs are, unless it has nothing to do with them.
    """
    given = [word for spec in handlers for word in ("--handlers", spec)]
    place = typed_place() if placed else []
    return " ".join(plain_lines(shlex.join(["dovetail", *words, *given, *place])))


def typed_again(*more: str) -> str:
    """The command line of this process, so that it can be typed again; without its token."""
    typed = list(sys.argv[1:])
    while "--token" in typed:
        place = typed.index("--token")
        del typed[place : place + 2]
    typed = [word for word in typed if not word.startswith("--token=")]
    words = ["dovetail", *typed, *(option for option in more if option not in typed)]
    return " ".join(plain_lines(shlex.join(words)))


def result_lines(value: Any) -> Iterator[Line]:
    """A result as JSON, cut where it gets too long for a screen."""
    if value is None:
        return
    text = printable(json.dumps(value, indent=2, ensure_ascii=False))
    lines = text[:MOST_RESULT_CHARACTERS].split("\n")[:MOST_RESULT_LINES]
    for line in lines:
        yield [(line, "")]
    if sum(map(len, lines)) + len(lines) - 1 < len(text):
        yield [(f"… {len(text):,} characters in all; --json prints everything", "dim")]


def causes(run: Mapping[str, Any]) -> Iterator[Line]:
    """Each node that failed by itself; those that failed because of it are no causes."""
    found = [
        (node["id"], node["error"] or {})
        for node in run["nodes"]
        if node["status"] == NodeStatus.FAILED and node["reason"] != Reason.DEPENDENCY_FAILED
    ]
    for node_id, error in found[:MOST_CAUSES]:
        yield from _cause(node_id, error)
    if len(found) > MOST_CAUSES:
        more = counted(len(found) - MOST_CAUSES, "more failed node")
        yield [(f"  and {more}; --json prints all of them", "dim")]
    if any(error.get("type") in _OF_THE_DEFINITION for _, error in found):
        for advice in _MAY_BE_WRONG:
            yield [(advice, "dim")]


def _cause(node_id: str, error: dict[str, Any]) -> Iterator[Line]:
    first, *rest = plain_lines(error_words(node_id, error)) or ["error"]
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


def error_words(node_id: str, error: Mapping[str, Any]) -> str:
    """`PermissionError: out/ is not writable`, without naming the node twice."""
    kind = str(error.get("type", "error"))
    message = str(error.get("message", "")).removeprefix(f"node '{node_id}': ")
    return kind if message in ("", kind) else f"{kind}: {message}"
