"""What must hold of every run, whatever broke while it ran: read from its log, state and side file.

The core audits the log by its own rules; beside that it is walked once more by hand, with no rule
of the core in between, so that a mistake there does not excuse itself. Each violation is a
sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.audit.event_check import audit
from dovetail.core.events import Event
from dovetail.core.items import split_name
from dovetail.core.run import RunState
from dovetail.core.transitions import Submit

from ...core.invariants import check_run
from .side_file import Start
from .workload import FAILING, Plan

SETTLED = ("COMPLETED", "SKIPPED")
UNFINISHED = ("PENDING", "QUEUED", "RUNNING", "LOST")
MOVES: dict[str, tuple[tuple[str, ...], str]] = {
    "node.queued": (("PENDING", "LOST"), "QUEUED"),
    "node.parked": (("QUEUED",), "QUEUED"),
    "node.started": (("QUEUED",), "RUNNING"),
    "node.progress": (("RUNNING",), "RUNNING"),
    "node.cached": (("QUEUED",), "COMPLETED"),
    "node.retrying": (("RUNNING",), "QUEUED"),
    "node.lost": (("RUNNING",), "LOST"),
    "node.completed": (("RUNNING",), "COMPLETED"),
    "node.failed": (("PENDING", "QUEUED", "RUNNING", "LOST"), "FAILED"),
    "node.skipped": (("PENDING",), "SKIPPED"),
    "node.cancelled": (UNFINISHED, "CANCELLED"),
}
"""From where an event takes a node, and where to. LOST is between an expired lease and what is
decided about it, in the same transition."""


@dataclass(slots=True)
class _Node:
    status: str = "PENDING"
    epoch: int = 1
    attempt: int = 0
    failures: int = 0
    crashes: int = 0


@dataclass(slots=True)
class Evidence:
    """All that is known of one run at the end."""

    plan: Plan
    run: RunState
    events: Sequence[Event]
    executions: Sequence[Start]
    max_crashes: int
    cancelled: bool
    """A caller has asked for that, at any time."""
    forgotten: int = 0
    """Of so many executions, the first ones, there may be no trace: Redis was emptied."""


def violations(evidence: Evidence) -> list[str]:
    """Whatever is wrong with one run."""
    nodes = {node: _Node() for node in evidence.plan.nodes}
    wrong = [*_walk(evidence, nodes)]
    wrong += _executions(evidence)
    if not evidence.run.finished:
        return [*wrong, f"it is stuck: {_states(evidence.run)}"]
    wrong += _end(evidence, nodes)
    wrong += _outcomes(evidence, nodes)
    run = evidence.run
    submit = Submit(run.id, run.graph, run.params, run.version, max_bytes=run.max_bytes)
    wrong += [f"audit: {one}" for one in audit(submit, evidence.events, run)]
    try:
        check_run(evidence.run)
    except AssertionError as problem:
        wrong.append(f"its state contradicts itself: {problem or 'see tests/core/invariants.py'}")
    return wrong


def _states(run: RunState) -> str:
    return ", ".join(
        f"{spec.id} {node.status}{f' ({node.phase})' if node.phase else ''}"
        for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
    )


# ── the log ──────────────────────────────────────────────────────────────────────────────


def _walk(evidence: Evidence, nodes: dict[str, _Node]) -> Iterator[str]:
    """Follow the log, and say what it must not say."""
    types = [event.type for event in evidence.events]
    if types[:2] != ["run.created", "run.started"] or types.count("run.created") != 1:
        yield f"its log begins with {types[:2]}, {types.count('run.created')} times run.created"
    epoch = 1
    for expected, event in enumerate(evidence.events, 1):
        if event.seq != expected:
            yield f"event {expected} is missing: the log goes on with {event.seq}"
            return
        if event.type == "run.retried":
            epoch += 1
            _reset(evidence.plan, nodes, (event.data or {}).get("from"), epoch)
        if event.node is None:
            if event.epoch != epoch:
                yield f"event {event.seq}: {event.type} is of epoch {event.epoch}, not {epoch}"
        elif event.type != "result.refused":
            yield from _move(evidence.plan, nodes, event)
    for kind in ("run.completed", "run.failed", "run.cancelled"):
        epochs = {event.epoch for event in evidence.events if event.type == kind}
        if len(epochs) != types.count(kind):
            yield f"{kind} is there {types.count(kind)} times in {len(epochs)} epochs"


def _move(plan: Plan, nodes: dict[str, _Node], event: Event) -> Iterator[str]:
    assert event.node is not None
    name, item = split_name(event.node)
    if item is not None and event.node not in nodes:
        nodes[event.node] = _Node(epoch=nodes[name].epoch)
    node, where = nodes[event.node], f"event {event.seq}: {event.type} of '{event.node}'"
    came_from, leads_to = MOVES[event.type]
    if item is None and plan.items(name) is not None:
        came_from = (*came_from, "QUEUED")  # its list becomes known; or it has no items
    if node.status not in came_from:
        yield f"{where}, which was {node.status} (epoch {node.epoch}, attempt {node.attempt})"
    if event.type == "node.started":
        node.attempt += 1
        spec = plan.nodes[name]
        above = [nodes[parent].status for parent in spec["dependencies"]]
        if above and not ("COMPLETED" in above and all(one in SETTLED for one in above)):
            yield f"{where}, whose parents were {', '.join(above)}"
        if node.attempt > 1 and spec.get("delivery") == "at_most_once":
            yield f"{where}, which is at_most_once, for the second time in epoch {node.epoch}"
    if (event.epoch, event.attempt) != (node.epoch, node.attempt):
        yield (
            f"{where} says epoch {event.epoch}, attempt {event.attempt}; "
            f"it should be {node.epoch} and {node.attempt}"
        )
    said = (event.data or {}).get("error", {}).get("message", "")
    if said.startswith("attempt ") and not said.startswith(f"attempt {node.attempt} "):
        yield f"{where} of attempt {node.attempt} has the error of another: '{said}'"
    node.status = leads_to
    node.failures += event.type == "node.retrying"
    node.crashes += event.type == "node.lost"


def _reset(plan: Plan, nodes: dict[str, _Node], first: str | None, epoch: int) -> None:
    again = {name for name, node in nodes.items() if node.status not in ("COMPLETED", "RUNNING")}
    if first is not None:
        again.add(first)
        again.update(name for name in plan.nodes if is_below(first, name, plan))
    for name, node in nodes.items():
        if plan.nodes.get(name, {}).get("for_each") and node.status == "RUNNING":
            node.epoch = epoch  # adopted: its running items keep theirs
    anew = {name for name in again if first is not None and _is_reset(first, name, plan)}
    for name in [*nodes]:
        owner, item = split_name(name)
        if item is not None and (owner in anew or name in again):
            del nodes[name]
    for name in again:
        if split_name(name)[1] is None:
            nodes[name] = _Node(epoch=epoch)


def _is_reset(first: str, name: str, plan: Plan) -> bool:
    name = split_name(name)[0]
    return name == first or is_below(first, name, plan)


def is_below(first: str, name: str, plan: Plan) -> bool:
    """Whether `name` is a descendant of `first`."""
    parents = plan.nodes[name]["dependencies"]
    return first in parents or any(is_below(first, parent, plan) for parent in parents)


# ── the side file ────────────────────────────────────────────────────────────────────────


def _executions(evidence: Evidence) -> Iterator[str]:
    logged = set(_of(evidence.events, "node.started"))
    for start, times in Counter(evidence.executions[evidence.forgotten :]).items():
        if times > 1:
            yield f"executed {times} times under one attempt: {start}"
        if start not in logged:
            yield f"executed without a start in the log: {start}"
    answered = {*_of(evidence.events, "node.completed"), *_of(evidence.events, "node.retrying")}
    for start in sorted(answered - set(evidence.executions)):
        if start[0] in evidence.plan.nodes and evidence.plan.items(start[0]) is not None:
            continue  # only its items are executed
        yield f"has a result, but was never executed: {start}"


def _of(events: Iterable[Event], kind: str) -> Iterator[Start]:
    for event in events:
        if event.type == kind:
            yield event.node or "", event.epoch, event.attempt or 0


# ── the end ──────────────────────────────────────────────────────────────────────────────


def _end(evidence: Evidence, nodes: dict[str, _Node]) -> Iterator[str]:
    """What is stored is what the log says."""
    run = evidence.run
    for name, walked in nodes.items():
        node = run.node(name)
        kept = (str(node.status), node.epoch, node.attempt, node.crashes)
        reported = (walked.status, walked.epoch, walked.attempt, walked.crashes)
        if split_name(name)[1] is not None:  # the crashes of an item that has ended are not kept
            kept, reported = kept[:3], reported[:3]
        if kept != reported:
            yield f"'{name}' is stored as {kept}, its log makes it {reported}"
    statuses = [nodes[name].status for name in evidence.plan.nodes]
    expected = (
        "FAILED"
        if "FAILED" in statuses
        else "CANCELLED"
        if "CANCELLED" in statuses
        else "COMPLETED"
    )
    if run.status != expected:
        yield f"the run is {run.status}, its nodes make it {expected}"
    if run.seq != len(evidence.events):
        yield f"the run counts {run.seq} events, its log has {len(evidence.events)}"


def _outcomes(evidence: Evidence, nodes: dict[str, _Node]) -> Iterator[str]:
    """Every node ended as its handler, its parents and the policy say."""
    plan, run = evidence.plan, evidence.run
    outputs = {name: run.node(name).output for name in nodes if nodes[name].status == "COMPLETED"}
    if lost := [name for name, output in outputs.items() if output is None]:
        yield f"completed without an output: {', '.join(lost)}"  # then nothing below is right
        return
    for name in plan.nodes:
        yield from _items(evidence, nodes, name, outputs)
    for name, walked in nodes.items():
        if name not in plan.nodes or plan.items(name) is not None:
            continue
        spec, node = plan.nodes[name], run.node(name)
        above = [nodes[parent].status for parent in spec["dependencies"]]
        ends = f"'{name}' ended {walked.status}"
        match walked.status, node.reason:
            case "COMPLETED", None:
                if spec["config"]["way"] in FAILING:
                    yield f"{ends}, its handler never works"
                right = {"n": plan.number(name, outputs), "attempt": node.attempt}
                if node.output != right:
                    yield f"{ends} with {node.output}, not {right}"
                if not plan.wanted(name, outputs):
                    yield f"{ends} against its condition"
            case "FAILED", None:
                others = [nodes[other].status for other in nodes if other != name]
                yield from _failure(ends, plan, spec, walked, others)
            case "FAILED", "worker_lost":
                # More, where a worker that was asked to end gave some back: that ends no node.
                once = spec.get("delivery") == "at_most_once"
                if walked.crashes < (1 if once else evidence.max_crashes):
                    yield f"{ends} as worker_lost after {walked.crashes} lost starts"
            case "FAILED" | "SKIPPED", "dependency_failed":
                fails = plan.definition["on_failure"] == "fail_fast"
                if fails != (walked.status == "FAILED"):
                    yield f"{ends} for its dependency, against the policy"
                cause = nodes[node.cause or name]
                if cause.status != "FAILED" or not is_below(node.cause or "", name, plan):
                    yield f"{ends} because of '{node.cause}', which is {cause.status}"
            case "SKIPPED", "condition_false":
                if plan.wanted(name, outputs):
                    yield f"{ends} though its condition is true"
            case "SKIPPED", "dependency_skipped":
                if set(above) != {"SKIPPED"}:
                    yield f"{ends} though its parents are {', '.join(above)}"
            case "CANCELLED", "run_failed":
                if run.status != "FAILED" or plan.definition["on_failure"] != "fail_fast":
                    yield f"{ends} because the run failed, which is {run.status}"
            case "CANCELLED", "run_cancelled":
                if not evidence.cancelled:
                    yield f"{ends}, and no caller has asked for that"
            case _:
                yield f"{ends} with reason {node.reason}"


def _items(
    evidence: Evidence, nodes: dict[str, _Node], name: str, outputs: dict[str, Any]
) -> Iterator[str]:
    """A mapped node that completed has the output of every item, in order."""
    plan, run = evidence.plan, evidence.run
    total = plan.items(name)
    if total is None or nodes[name].status != "COMPLETED":
        return
    made = run.node(name).output
    if len(made) != total:
        yield f"'{name}' has {len(made)} outputs of {total} items"
    for item, output in enumerate(made):
        own = f"{name}[{item}]"
        right = {"n": plan.number(own, outputs), "attempt": run.node(own).attempt}
        if output != right:
            yield f"'{own}' gave {output}, not {right}"


def _failure(
    ends: str, plan: Plan, spec: dict[str, Any], walked: _Node, others: list[str]
) -> Iterator[str]:
    way, retries = spec["config"]["way"], spec.get("max_retries", 0)
    # In a failed run nothing is tried again: whatever fails then has failed for good.
    cut_short = plan.definition["on_failure"] == "fail_fast" and "FAILED" in others
    if way == "works" or (way not in FAILING and not cut_short):
        yield f"{ends}, its handler works"
    if way == "failing" and walked.failures < retries and not cut_short:
        yield f"{ends} after {walked.failures} retries of {retries}"
