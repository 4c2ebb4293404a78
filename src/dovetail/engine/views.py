"""A run in the fields of the HTTP API, for every edge; and a run that cannot be read, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from dovetail.core.attempts import Attempt
from dovetail.core.dag import Graph, NodeSpec
from dovetail.core.errors import Problem
from dovetail.core.events import TRACEBACK, Event
from dovetail.core.feed import FeedEntry
from dovetail.core.items import MapState, item_name, split_name
from dovetail.core.outputs import OutputReference, is_shown, reference
from dovetail.core.run import NodeState, Phase, RunState, encoded_size
from dovetail.core.states import FINISHED, NodeStatus, Reason, RunStatus

FIRST_SECOND = -62_135_596_800.0  # of the year 1
LAST_SECOND = 253_402_300_799.0  # of the year 9999


def run_view(run: RunState, *, nodes: bool = True) -> dict[str, Any]:
    """As `GET /runs/<id>` answers."""
    view = summary_view(
        run_id=run.id,
        workflow=run.graph.name,
        version=run.version,
        status=run.status.value,
        epoch=run.epoch,
        params=run.params,
        created_at=run.created_at,
        started_at=run.started_at,
        finished_at=run.finished_at,
        error=run.error,
        result=result(run),
    )
    if nodes:
        view["forked_from"] = run.forked_from
        names = [spec.id for spec in run.graph.nodes]
        view["nodes"] = [
            _node_view(spec, node, names)
            for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
        ]
    return view


def small_run_view(run: RunState, *, nodes: bool = True) -> dict[str, Any]:
    """The same with a reference for each output that was not read, or is large."""

    def small(index: int) -> Any:
        output = run.nodes[index].output
        size = 0 if output is None else encoded_size(output)
        if isinstance(output, OutputReference) or not is_shown(output, size):
            return reference(size, output_href(run.id, run.graph.nodes[index].id))
        return output

    view = run_view(run, nodes=nodes)
    for index, node in enumerate(view.get("nodes", ())):
        node["output"] = small(index)
    return {**view, "result": _result(run.graph, small)}


def summary_view(
    *,
    run_id: str,
    workflow: str,
    version: int | None,
    status: str,
    epoch: int,
    params: dict[str, Any],
    created_at: float,
    started_at: float | None,
    finished_at: float | None,
    error: dict[str, Any] | None,
    result: Any,
) -> dict[str, Any]:
    """A run without its nodes, as lists show it."""
    return {
        "run_id": run_id,
        "workflow": workflow,
        "version": version,
        "status": status,
        "epoch": epoch,
        "params": params,
        "created_at": timestamp(created_at),
        "started_at": timestamp(started_at),
        "finished_at": timestamp(finished_at),
        "duration": _duration(started_at, finished_at),
        "error": error,
        "result": result,
    }


def receipt_view(summary: dict[str, Any]) -> dict[str, Any]:
    """A run as it was accepted, not as it is by now: the same key gets the same answer."""
    return {
        "run_id": summary["run_id"],
        "status": RunStatus.PENDING.value,
        "workflow": summary["workflow"],
        "version": summary["version"],
        "created_at": summary["created_at"],
    }


def with_warnings(reply: dict[str, Any], warnings: Sequence[Problem]) -> dict[str, Any]:
    """A reply that has `warnings` only if there are some."""
    if warnings:
        reply["warnings"] = [problem.as_dict() for problem in warnings]
    return reply


def _node_view(
    spec: NodeSpec, node: NodeState, names: Sequence[str] | Mapping[int, str]
) -> dict[str, Any]:
    return {
        "id": spec.id,
        "handler": spec.handler,
        "status": node.status.value,
        "attempt": node.attempt,
        "epoch": node.epoch,
        "dependencies": [names[parent] for parent in spec.parents],
        "reason": None if node.reason is None else node.reason.value,
        "cause": node.cause,
        "error": node.error,
        "started_at": timestamp(node.started_at),
        "finished_at": timestamp(node.finished_at),
        "duration": _duration(node.started_at, node.finished_at),
        "worker": node.worker,
        "output": node.output,
        "items": item_counts(spec, node),
    }


def item_counts(spec: NodeSpec, node: NodeState) -> dict[str, int] | None:
    """How many items of a mapped node are in which state: none while its list is not known. None
    for any other node."""
    if node.items is not None:
        return node.items.counts(node.status in FINISHED)
    return None if spec.for_each is None else MapState(0).counts(is_over=True)


def item_status(node: NodeState, item: int) -> NodeStatus:
    """An item that was never begun ends with its node."""
    assert node.items is not None  # noqa: S101 - it has items
    if item in node.items.in_flight:
        return node.items.in_flight[item].status
    is_over = node.status in FINISHED
    waits = NodeStatus.CANCELLED if is_over else NodeStatus.PENDING
    return node.items.status(item) or waits


def item_view(run: RunState, index: int, item: int) -> dict[str, Any]:
    """An item as `GET /runs/<id>/nodes/<node>/items` answers."""
    node = run.nodes[index]
    state = run.node(item_name(run.graph.nodes[index].id, item))
    reason = state.reason
    if state.status is NodeStatus.PENDING and node.status in FINISHED:  # it was never begun
        too_many = node.status is NodeStatus.FAILED
        reason = Reason.TOO_MANY_FAILURES if too_many else node.reason
    return {
        "index": item,
        "status": item_status(node, item).value,
        "attempt": state.attempt,
        "worker": state.worker,
        "started_at": timestamp(state.started_at),
        "finished_at": timestamp(state.finished_at),
        "reason": None if reason is None else reason.value,
        "error": state.error,
        "output": state.output,
    }


def node_view(run: RunState, index: int) -> dict[str, Any]:
    """A node in the fields that it has in `run_view`."""
    nodes = run.graph.nodes
    names = {parent: nodes[parent].id for parent in nodes[index].parents}
    return _node_view(nodes[index], run.nodes[index], names)


def attempt_view(attempt: Attempt) -> dict[str, Any]:
    duration = attempt.duration
    return {
        "epoch": attempt.epoch,
        "attempt": attempt.attempt,
        "status": attempt.status.value,
        "worker": attempt.worker,
        "started_at": timestamp(attempt.started_at),
        "finished_at": timestamp(attempt.finished_at),
        "duration": None if duration is None else round(duration, 6),
        "error": attempt.error,
    }


def output_href(run_id: str, node: str) -> str:
    """Where the API has one output."""
    return f"/api/v1/runs/{quote(run_id, safe='')}/nodes/{quote(node, safe='')}/output"


class NodeWait(NamedTuple):
    """What a queued node waits for: its rate limit, or its next attempt."""

    until: float
    resource_tag: str | None = None
    """Of a node that its rate limit has parked."""
    retry: int = 0
    error: Mapping[str, Any] | None = None
    """Of the attempt before, where the node backs off."""


class RunDetail(NamedTuple):
    """A run at one moment, for a display that follows it from there."""

    view: dict[str, Any]
    seq: int
    """The number of its last event. Events up to it are in the view."""
    waits: Mapping[str, NodeWait]
    """By node."""


def run_snapshot(run: RunState) -> RunDetail:
    waits = {
        spec.id: _node_wait(spec, node)
        for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
        if node.until is not None
    }
    return RunDetail(run_view(run), run.seq, waits)


def _node_wait(spec: NodeSpec, node: NodeState) -> NodeWait:
    until = node.until or 0.0
    if node.phase is Phase.PARKED:
        return NodeWait(until, spec.resource_tag)
    if node.phase is Phase.BACKING_OFF:
        return NodeWait(until, None, node.attempt - node.crashes, node.error)
    return NodeWait(until)


class RunWork(NamedTuple):
    """What a run does at the moment, for a view over all runs. Of a mapped node its items."""

    running: list[dict[str, Any]]
    parked: list[tuple[str, float]]
    """The `resource_tag` of each parked node, and until when."""
    waiting: list[str]
    """The handler of each node that a worker may claim."""


def run_work(run: RunState) -> RunWork:
    work = RunWork([], [], [])
    for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
        if node.items is None:
            _add_work(work, run, spec, node, None)
        else:
            for item, state in sorted(node.items.in_flight.items()):
                _add_work(work, run, spec, state, item)
    return work


def _add_work(
    work: RunWork, run: RunState, spec: NodeSpec, state: NodeState, item: int | None
) -> None:
    if state.status is NodeStatus.RUNNING:
        work.running.append(
            {
                "run_id": run.id,
                "workflow": run.graph.name,
                "node": spec.id,
                "item": item,
                "handler": spec.handler,
                "attempt": state.attempt,
                "worker": state.worker,
                "started_at": timestamp(state.started_at),
            }
        )
    elif state.status is NodeStatus.QUEUED and state.phase is Phase.PARKED:
        work.parked.append((spec.resource_tag or "", state.until or 0.0))
    elif state.status is NodeStatus.QUEUED and state.phase is Phase.PUBLISHED:
        work.waiting.append(spec.handler)


def result(run: RunState) -> Any:
    """The output of the only `output` node, else of every exit node by id."""
    return _result(run.graph, lambda index: run.nodes[index].output)


def _result(graph: Graph, output: Callable[[int], Any]) -> Any:
    if graph.output_node is not None:
        return output(graph.output_node)
    return {graph.nodes[index].id: output(index) for index in graph.exits}


def outputs(run: RunState) -> dict[str, Any]:
    """Every output there is, by node."""
    return {
        spec.id: node.output
        for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
        if node.status is NodeStatus.COMPLETED
    }


def event_view(event: Event) -> dict[str, Any]:
    """An event as users see it, without the traceback: `attempts_of` has that."""
    view: dict[str, Any] = {
        "seq": event.seq,
        "time": timestamp(event.time),
        "type": event.type,
        "epoch": event.epoch,
    }
    if event.node is not None:
        view["node"], item = split_name(event.node)
        view["attempt"] = event.attempt
        if item is not None:
            view["item"] = item
    for name, value in (event.data or {}).items():
        if name != TRACEBACK:
            view[name] = timestamp(value) if name == "until" else value
    return view


def feed_view(item: FeedEntry) -> dict[str, Any]:
    """An event of the feed, with the id to resume after it."""
    view = event_view(item.event)
    return {"id": str(item.position), **view, "run_id": item.run_id, "workflow": item.workflow}


def log_view(item: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a log as users see it."""
    return {**item, "time": timestamp(item["time"])}


def timestamp(seconds: float | None) -> str | None:
    """RFC 3339 in UTC, to the microsecond."""
    if seconds is None:
        return None
    # A rate near zero parks a node beyond every calendar; and a damaged file may say anything.
    seconds = max(FIRST_SECOND, min(seconds, LAST_SECOND))
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def dead_letter_view(letter_id: str, letter: Mapping[str, Any]) -> dict[str, Any]:
    """A dead letter as it is shown. A notification in it may have a key in its URL."""
    shown = {name: letter[name] for name in letter if name != "notification"}
    return {"letter_id": letter_id, **shown, "time": timestamp(letter.get("time"))}


def seconds(time: str) -> float:
    """The reverse of `timestamp`."""
    return datetime.fromisoformat(time).timestamp()


def _duration(began: float | None, ended: float | None) -> float | None:
    return None if began is None or ended is None else round(max(0.0, ended - began), 6)


KIND = "run_damaged"
"""The `type` of the error that a damaged run ends with."""
MAX_WHY_LENGTH = 500


def unread_run(
    run_id: str,
    workflow: str,
    version: int | None,
    created_at: float,
    status: RunStatus,
    finished_at: float,
    why: str,
) -> RunState:
    """A run that was ended unread: what lists know of it, without any node."""
    graph = Graph(workflow, (), {}, True, None, (), (), None)
    run = RunState(run_id, graph, {}, created_at, version)
    run.status, run.finished_at = status, finished_at
    run.error = damage_error(why)
    return run


def damage_error(why: str) -> dict[str, Any]:
    return {"type": KIND, "message": why[:MAX_WHY_LENGTH]}
