"""The last lines about a run: its result, or every cause and the command to type next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.cli.board import LONGEST_ID
from dovetail.cli.target import target_options
from dovetail.cli.text import Line, clip, counted, duration, plain_lines, printable, seconds
from dovetail.core.errors import Conflict
from dovetail.core.items import NOT_A_LIST
from dovetail.core.states import NodeStatus, Reason, RunStatus

if TYPE_CHECKING:
    from dovetail.engine.api import EngineApi

MAX_RESULT_LINES = 40
MAX_RESULT_CHARACTERS = 8_000
MAX_CAUSES = 10
MAX_CAUSE_LINES = 5
_LONGEST_CAUSE_LINE = 1_000

_DEFINITION_ERRORS = frozenset(
    {
        "invalid_config",
        "invalid_url",
        "missing_value",
        NOT_A_LIST,
        "not_found",
        "template_error",
        "template_forbidden",
    }
)
"""Errors that a wrong definition may cause. A retry would only repeat them."""
_MAY_BE_WRONG = (
    "a wrong definition: correct the file and fork the run, as below; a retry uses the old one",
    "a wrong handler or service: correct it and retry the run, as below",
)

_STYLES = {
    "COMPLETED": "bold good",
    "FAILED": "bold bad",
    "CANCELLED": "bold wait",
}


SHORT_ID = 6
INTERRUPTED = "interrupted: no process is running it"


def interrupted(count: int, of_these: str) -> str:
    """`2 runs are interrupted`, the start of a sentence."""
    noun, verb = ("run", "is") if count == 1 else ("runs", "are")
    return f"{count:,} {noun}{of_these} {verb} interrupted"


async def short_id(commands: EngineApi, run_id: str) -> str:
    """The shortest beginning of the id that no other run has, at least six digits."""
    for length in range(SHORT_ID, len(run_id)):
        with suppress(Conflict):
            await commands.find_run(run_id[:length])
            return run_id[:length]
    return run_id


def run_ending(run: Mapping[str, Any], since: float | None = None) -> Iterator[Line]:
    """The last lines about a run that has ended. Its duration is counted from `since`."""
    if run["status"] == RunStatus.COMPLETED:
        yield from result_lines(run["result"])
    took = duration(seconds_taken(run, since))
    yield [status_piece(run["status"]), (f" {run['run_id'][:6]} in {took}", "")]
    if run["status"] == RunStatus.FAILED:
        yield from causes(run)
    yield from allowed_failures(run)


def allowed_failures(run: Mapping[str, Any]) -> Iterator[Line]:
    """One line that names the failed nodes of a run that completed."""
    if run["status"] != RunStatus.COMPLETED:
        return
    names = [node["id"] for node in run["nodes"] if node["status"] == NodeStatus.FAILED]
    if names:
        shown = ", ".join(clip(name, LONGEST_ID) for name in names[:MAX_CAUSES])
        more = ", …" if len(names) > MAX_CAUSES else ""
        verb = "was" if len(names) == 1 else "were"
        yield [(f"{counted(len(names), 'failure')} {verb} allowed: {shown}{more}", "wait")]


def seconds_taken(run: Mapping[str, Any], since: float | None = None) -> float:
    """From `since`, or from its creation, to its end."""
    began = seconds(run["created_at"]) if since is None else since
    return (began if run["finished_at"] is None else seconds(run["finished_at"])) - began


def status_piece(status: str) -> tuple[str, str]:
    return str(status), _STYLES.get(status, "bold")


async def retry_hint(
    commands: EngineApi, run: Mapping[str, Any], short_id: str, handlers: Sequence[str]
) -> Line:
    """The command to type once the cause is mended, and what that would do."""
    source = _source_of_no_list(run)
    plan = await commands.plan_retry(run["run_id"], source)
    words = ["runs", "retry", short_id, *(() if source is None else ("--from", source))]
    return [
        ("fix it, then:  " if run["status"] == RunStatus.FAILED else "go on with:  ", "dim"),
        (command(*words, handlers=handlers), "bold"),
        (f"      reruns {len(plan['rerun']):,}, reuses {len(plan['reuse']):,}", "dim"),
    ]


def _source_of_no_list(run: Mapping[str, Any]) -> str | None:
    """The node before a mapped node that got no list. If its handler was at fault, a retry must run
    it again, too: its output would be reused."""
    for node in run["nodes"]:
        if (node["error"] or {}).get("type") == NOT_A_LIST and len(node["dependencies"]) == 1:
            return str(node["dependencies"][0])
    return None


def fork_hint(
    run: Mapping[str, Any], short_id: str, file: str | None, handlers: Sequence[str]
) -> Iterator[Line]:
    """The command for a run whose definition may be at fault: what completed is not run again."""
    if run["status"] == RunStatus.FAILED and _is_definition_at_fault(run):
        name = "FILE.yaml" if file is None else file
        typed = command("runs", "fork", short_id, "--definition", name, handlers=handlers)
        yield [(f"fix {printable(name)}, then:  ", "dim"), (typed, "bold")]


def watch_hint(short_id: str) -> Line:
    """The command that follows a run that services drive."""
    return [("follow it with:  ", "dim"), (command("runs", "watch", short_id), "bold")]


def resume_hint(short_id: str, handlers: Sequence[str] = ()) -> Line:
    """The command that continues a run that no process drives."""
    typed = command("runs", "resume", short_id, handlers=handlers)
    return [("go on with:  ", "dim"), (typed, "bold")]


def command(*words: str, handlers: Sequence[str] = (), placed: bool = True) -> str:
    """A command line of Dovetail that can be copied as it is, with the options of this target."""
    given = [word for spec in handlers for word in ("--handlers", spec)]
    place = target_options() if placed else []
    return " ".join(plain_lines(shlex.join(["dovetail", *words, *given, *place])))


def typed_again(*more: str) -> str:
    """The command line of this process, to be typed again; without its token."""
    typed = list(sys.argv[1:])
    while "--token" in typed:
        at = typed.index("--token")
        del typed[at : at + 2]
    typed = [word for word in typed if not word.startswith("--token=")]
    words = ["dovetail", *typed, *(option for option in more if option not in typed)]
    return " ".join(plain_lines(shlex.join(words)))


def result_lines(value: Any) -> Iterator[Line]:
    """A result as JSON, cut where it gets too long for a screen."""
    if value is None:
        return
    text = printable(json.dumps(value, indent=2, ensure_ascii=False))
    lines = text[:MAX_RESULT_CHARACTERS].split("\n")[:MAX_RESULT_LINES]
    for line in lines:
        yield [(line, "")]
    if sum(map(len, lines)) + len(lines) - 1 < len(text):
        yield [(f"… {len(text):,} characters in all; --json prints everything", "dim")]


def causes(run: Mapping[str, Any]) -> Iterator[Line]:
    """Each node that failed by itself, not because a dependency failed."""
    found = _failures(run)
    for node_id, error in found[:MAX_CAUSES]:
        yield from _cause(node_id, error)
    if len(found) > MAX_CAUSES:
        more = counted(len(found) - MAX_CAUSES, "more failed node")
        yield [(f"  and {more}; --json prints all of them", "dim")]
    if _is_definition_at_fault(run):
        for advice in _MAY_BE_WRONG:
            yield [(advice, "dim")]


def _failures(run: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (node["id"], node["error"] or {})
        for node in run["nodes"]
        if node["status"] == NodeStatus.FAILED and node["reason"] != Reason.DEPENDENCY_FAILED
    ]


def _is_definition_at_fault(run: Mapping[str, Any]) -> bool:
    return any(error.get("type") in _DEFINITION_ERRORS for _, error in _failures(run))


def _cause(node_id: str, error: dict[str, Any]) -> Iterator[Line]:
    first, *rest = plain_lines(error_words(node_id, error)) or ["error"]
    where = error.get("where")
    yield [
        ("  ", ""),
        (clip(node_id, LONGEST_ID), "bold"),
        (f": {clip(first, _LONGEST_CAUSE_LINE)}", "bad"),
        (f"   ({' '.join(plain_lines(where))})" if where else "", "dim"),
    ]
    for line in rest[: MAX_CAUSE_LINES - 1]:
        yield [(f"    {clip(line, _LONGEST_CAUSE_LINE)}", "")]
    if len(rest) >= MAX_CAUSE_LINES:
        yield [("    …", "dim")]


def error_words(node_id: str, error: Mapping[str, Any]) -> str:
    """`PermissionError: out/ is not writable`, without naming the node twice."""
    kind = str(error.get("type", "error"))
    message = str(error.get("message", "")).removeprefix(f"node '{node_id}': ")
    return kind if message in ("", kind) else f"{kind}: {message}"
