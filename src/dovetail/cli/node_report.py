"""A node in detail and the lines of its log, for people."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.cli.board import LONGEST_ID
from dovetail.cli.summary import command, error_words, status_piece
from dovetail.cli.text import (
    Line,
    clip,
    duration,
    plain,
    plain_lines,
    printable,
    seconds,
    table,
)
from dovetail.core.items import item_name
from dovetail.core.states import FINISHED, NodeStatus, Reason, RunStatus
from dovetail.core.text import HARMLESS, visible

if TYPE_CHECKING:
    from dovetail.engine.api import EngineApi
    from dovetail.engine.ports import LogQuery

LAST_LINES = 20
"""Of the log of a node that is shown by itself."""
MAX_FAILURE_LINES = 10
"""Of the log of the node that failed, at the end of its run."""
MAX_ATTEMPTS = 20
MAX_VALUE_CHARACTERS = 2_000
_LONGEST_LINE = 1_000

_LEVEL_STYLES = {"DEBUG": "dim", "WARNING": "wait", "ERROR": "bad", "CRITICAL": "bold bad"}


# ── lines of a log ───────────────────────────────────────────────────────────────────────


def log_lines_of(item: Mapping[str, Any], indent: str = "") -> Iterator[Line]:
    """`time level node[attempt] logger: message`. Further lines of the message are indented, so
    that no message looks like a line of its own."""
    from dovetail.core.node_logs import log_words

    time, level, place, logger, message, fields = log_words(item)
    first, *rest = message.rstrip("\n").split("\n")
    style = _LEVEL_STYLES.get(level, "")
    more = f" {fields}" if fields else ""
    yield [
        (f"{indent}{time} ", "dim"),
        (level, style),
        (f" {place}", "bold"),
        (f" {logger}: ", "dim"),
        (_shown(first), style),
        ("" if rest else more, "dim"),
    ]
    for nth, line in enumerate(rest, 1):
        yield [(f"{indent}    {_shown(line)}", style), (more if nth == len(rest) else "", "dim")]


def _shown(line: str) -> str:
    return visible(line.replace("\t", "    ").removesuffix("\r"), HARMLESS)


async def last_items(
    commands: EngineApi, run_id: str, query: LogQuery, count: int
) -> Sequence[dict[str, Any]]:
    """The last lines of a log; all of it is read, and no more than these are held."""
    from dovetail.engine.api import log_lines

    kept: deque[dict[str, Any]] = deque(maxlen=count)
    async for item in log_lines(commands, run_id, query):
        kept.append(item)
    return kept


# ── a run that failed ────────────────────────────────────────────────────────────────────


async def failure_lines(commands: EngineApi, run: Mapping[str, Any], short: str) -> list[Line]:
    """The last lines of the log of the node that failed first, and the commands that show more."""
    from dovetail.engine.ports import LogQuery

    node = _failed_node(run)
    if node is None:
        return []
    query = LogQuery(node["id"], node["epoch"], node["attempt"] or None)
    of, logs = "its log", ["runs", "logs", short, "--node", node["id"]]
    if (item := await _first_failed_item(commands, run["run_id"], node)) is not None:
        # The lines of other items would push these out.
        query = LogQuery(node["id"], attempt=item["attempt"] or None, item=item["index"])
        of = f"the log of item {item['index']}"
        logs += ("--item", str(item["index"]))
    items = await last_items(commands, run["run_id"], query, MAX_FAILURE_LINES)
    lines: list[Line] = []
    if items:
        lines.append([(f"  the end of {of}, attempt {query.attempt or 0}:", "dim")])
        shown = [line for item in items for line in _clipped(log_lines_of(item, "    "))]
        lines += shown[-MAX_FAILURE_LINES:]  # a message may have many lines
    typed = [command("runs", "show", short, node["id"])]
    if items:
        typed.append(command(*logs))
    lines.append([("see more:  ", "dim"), (typed[0], "bold")])
    lines += ([("           ", ""), (words, "bold")] for words in typed[1:])
    return lines


def _failed_node(run: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The node that the run's error is about, or the first that failed by itself."""
    if run["status"] != RunStatus.FAILED:
        return None
    named = (run["error"] or {}).get("node")
    failed = [
        node
        for node in run["nodes"]
        if node["status"] == NodeStatus.FAILED and node["reason"] != Reason.DEPENDENCY_FAILED
    ]
    return next((one for one in failed if one["id"] == named), failed[0] if failed else None)


async def _first_failed_item(
    commands: EngineApi, run_id: str, node: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Of a mapped node that failed: the item whose error it has."""
    if not node["items"] or not node["items"]["failed"]:
        return None
    failed = NodeStatus.FAILED
    found = await commands.node_items(run_id, node["id"], status=failed, limit=1)
    return next(iter(found["items"]), None)


def _clipped(lines: Iterator[Line]) -> Iterator[Line]:
    return ([(clip(text, _LONGEST_LINE), style) for text, style in line] for line in lines)


# ── a node ───────────────────────────────────────────────────────────────────────────────


async def node_lines(
    commands: EngineApi, run_id: str, detail: Mapping[str, Any], short: str
) -> list[Line]:
    """`runs show RUN NODE`."""
    from dovetail.engine.ports import LogQuery

    facts: list[tuple[str, str]] = [("handler", detail["handler"]), ("run", run_id)]
    if detail["dependencies"]:
        facts.append(("depends on", ", ".join(detail["dependencies"])))
    if detail["why"] is not None:
        facts.append(("why", detail["why"]["why"]))
    if detail["items"] is not None:
        counts = [f"{many:,} {state}" for state, many in detail["items"].items() if many]
        none = "none yet" if detail["status"] not in FINISHED else "none"
        facts.append(("items", ", ".join(counts) or none))
    title = f" {clip(plain(detail['id']), LONGEST_ID)} of run {short}"
    lines: list[Line] = [[status_piece(detail["status"]), (title, "")]]
    lines += table([[(f"  {name}", "dim"), (plain(value), "")] for name, value in facts])
    lines += _value_lines("config", detail["config"] or detail["template"], detail)
    for name, value in detail["inputs"].items():
        lines += _value_lines(f"input {clip(plain(name), LONGEST_ID)}", value)
    if detail["status"] == NodeStatus.COMPLETED:
        lines += _value_lines("output", detail["output"])
    lines += _attempt_lines(detail["attempts"])
    if detail["items"] is not None and detail["items"]["failed"]:
        name, most = detail["id"], MAX_ATTEMPTS
        found = await commands.node_items(run_id, name, status=NodeStatus.FAILED, limit=most)
        lines += _failed_items(found)
        if found["items"]:
            first = item_name(name, found["items"][0]["index"])
            typed = command("runs", "show", short, first)
            lines.append([("see one of them:  ", "dim"), (typed, "bold")])
    lines += _error_lines(detail)
    items = await last_items(commands, run_id, LogQuery(detail["id"]), LAST_LINES)
    if items:
        logs = command("runs", "logs", short, "--node", detail["id"])
        lines.append([("log, the last lines; all of it:  ", "dim"), (logs, "bold")])
        for item in items:
            lines += _clipped(log_lines_of(item, "  "))
    return lines


async def item_lines(
    commands: EngineApi, run_id: str, node: str, item: Mapping[str, Any], short: str
) -> list[Line]:
    """`runs show RUN NODE[3]`."""
    from dovetail.engine.ports import LogQuery

    index = item["index"]
    facts = [("run", run_id), ("attempt", str(item["attempt"]))]
    names = (("worker", "worker"), ("started", "started_at"), ("finished", "finished_at"))
    facts += [(name, item[field]) for name, field in names if item[field] is not None]
    if item["started_at"] is not None and item["finished_at"] is not None:
        took = seconds(item["finished_at"]) - seconds(item["started_at"])
        facts.append(("took", duration(max(0.0, took))))
    if item["reason"] is not None:
        facts.append(("reason", item["reason"].replace("_", " ")))
    title = f" {clip(plain(item_name(node, index)), LONGEST_ID)} of run {short}"
    lines: list[Line] = [[status_piece(item["status"]), (title, "")]]
    lines += table([[(f"  {name}", "dim"), (plain(value), "")] for name, value in facts])
    if item["status"] == NodeStatus.COMPLETED:
        lines += _value_lines("output", item["output"])
    if item["error"] is not None:
        lines += _error_lines({"id": node, "attempts": [], "error": item["error"]})
    query = LogQuery(node, item=index)
    items = await last_items(commands, run_id, query, LAST_LINES)
    if items:
        logs = command("runs", "logs", short, "--node", node, "--item", str(index))
        lines.append([("log, the last lines; all of it:  ", "dim"), (logs, "bold")])
        for line in items:
            lines += _clipped(log_lines_of(line, "  "))
    return lines


def _value_lines(name: str, value: Any, detail: Mapping[str, Any] | None = None) -> Iterator[Line]:
    """A JSON value; of the config also why it is not rendered."""
    if detail is not None and detail["config"] is None:
        name = f"{name}, as defined"
    text = printable(json.dumps(value, ensure_ascii=False, indent=2))
    first, *rest = text[:MAX_VALUE_CHARACTERS].split("\n")
    yield [(f"{name}  ", "dim"), (first, "")]
    for line in rest:
        yield [(f"  {line}", "")]
    if len(text) > MAX_VALUE_CHARACTERS:
        yield [(f"  … {len(text):,} characters in all; --json prints everything", "dim")]
    if detail is not None and detail["config_error"] is not None:
        # A mapped node has no config of its own, and nothing is wrong with that.
        tone = "bad" if detail["items"] is None else "dim"
        yield [(f"  {plain(detail['config_error'])}", tone)]


def _failed_items(page: Mapping[str, Any]) -> Iterator[Line]:
    many = page["counts"]["failed"]
    shown = f"the first {len(page['items'])} of {many:,}" if page["next_cursor"] else f"{many:,}"
    yield [(f"failed items: {shown}", "dim")]
    for item in page["items"]:
        error = item["error"] or {}
        words = f"{error.get('type')}: {error.get('message')}"
        yield [(f"  {item['index']}  ", "bold"), (clip(plain(words), _LONGEST_LINE), "")]


def _attempt_lines(attempts: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    if not attempts:
        return
    left_out = max(0, len(attempts) - MAX_ATTEMPTS)
    yield [("attempts", "dim")]
    if left_out:
        yield [(f"  {left_out:,} earlier ones; --json prints all", "dim")]
    yield from table([_attempt_row(one) for one in attempts[left_out:]])


def _attempt_row(attempt: Mapping[str, Any]) -> Line:
    took = "" if attempt["duration"] is None else duration(attempt["duration"])
    error = attempt["error"]
    return [
        (f"  {attempt['epoch']}.{attempt['attempt']}", "bold"),
        status_piece(attempt["status"]),
        (f"{attempt['started_at'][:-4]}Z", "dim"),
        (took, ""),
        (plain(attempt["worker"] or ""), "dim"),
        ("" if error is None else clip(plain(error_words("", _without_none(error))), 200), "bad"),
    ]


def _error_lines(detail: Mapping[str, Any]) -> Iterator[Line]:
    """The last failure as Python prints it; an error without a traceback in one line."""
    failed = [one for one in detail["attempts"] if one["error"] is not None]
    error = failed[-1]["error"] if failed else detail["error"]
    if error is None:
        return
    yield [
        ("error  ", "dim"),
        (clip(plain(error_words(detail["id"], _without_none(error))), _LONGEST_LINE), "bad"),
    ]
    if error.get("where"):
        yield [("  at ", "dim"), (plain(error["where"]), "bold")]
    for line in plain_lines(error.get("traceback") or ""):
        yield [(f"  {clip(line, _LONGEST_LINE)}", "")]


def _without_none(error: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in error.items() if value is not None}
