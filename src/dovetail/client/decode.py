"""A run and its events as a server tells them, in the words of the core.

So that whoever reads runs, reads them the same way wherever they are kept. Only what the API
tells is there: such a run can be looked at, and not be moved. What it must not know: HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from dovetail.core.dag import Graph, NodeSpec, children_of
from dovetail.core.definition.model import DEFAULT_TIMEOUT_SECONDS
from dovetail.core.events import Event
from dovetail.core.retry import DEFAULT_RETRY
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import NodeStatus, Reason, RunStatus
from dovetail.core.templates import compile_config

_WAITS = {"node.parked": Phase.PARKED, "node.retrying": Phase.BACKING_OFF}
_USUAL = ("seq", "time", "type", "epoch", "node", "attempt")


class DecodedRun(RunState):
    """A run that a server told of."""

    __slots__ = ("fields",)
    fields: Mapping[str, Any]
    """As they were told: rounded times would not give the same durations again."""


def run_from(fields: Mapping[str, Any], events: Iterable[Event] = ()) -> DecodedRun:
    """The run of `GET /runs/<id>`; `events`, its log so far, tell what its nodes wait for."""
    tags: dict[str, str] = {}
    waits: dict[str, Event] = {}
    seq = 0
    for event in events:
        seq = event.seq
        if event.node is None:
            continue
        waits.pop(event.node, None)
        if event.type in _WAITS:
            waits[event.node] = event
            if event.data and "resource_tag" in event.data:
                tags[event.node] = event.data["resource_tag"]
    graph = _graph(fields["workflow"], fields["nodes"], tags)
    run = DecodedRun(
        fields["run_id"], graph, fields["params"], _seconds(fields["created_at"]), fields["version"]
    )
    run.fields = fields
    run.status = RunStatus(fields["status"])
    run.epoch = fields["epoch"]
    run.started_at = seconds_or_none(fields["started_at"])
    run.finished_at = seconds_or_none(fields["finished_at"])
    run.error = fields["error"]
    run.seq = seq
    for node, told in zip(run.nodes, fields["nodes"], strict=True):
        _tell(node, told)
        if told["id"] in waits and node.status is NodeStatus.QUEUED:
            _let_wait(node, waits[told["id"]])
    return run


def event_from(fields: Mapping[str, Any]) -> Event:
    """An event of `GET /runs/<id>/events`."""
    data = {name: value for name, value in fields.items() if name not in _USUAL}
    if data.get("until") is not None:
        data["until"] = _seconds(data["until"])
    return Event(
        fields["seq"],
        _seconds(fields["time"]),
        fields["type"],
        fields["epoch"],
        fields.get("node"),
        fields.get("attempt"),
        data or None,
    )


def seconds_or_none(time: str | None) -> float | None:
    return None if time is None else _seconds(time)


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _graph(name: str, nodes: list[Mapping[str, Any]], tags: Mapping[str, str]) -> Graph:
    index = {node["id"]: place for place, node in enumerate(nodes)}
    parents = [tuple(index[parent] for parent in node["dependencies"]) for node in nodes]
    children = children_of(parents)
    config = compile_config({})
    specs = tuple(
        NodeSpec(
            index=place,
            id=node["id"],
            handler=node["handler"],
            config=config,
            condition=None,
            parents=parents[place],
            children=tuple(children[place]),
            timeout_seconds=DEFAULT_TIMEOUT_SECONDS,
            max_retries=0,
            retry=DEFAULT_RETRY,
            cache_ttl=None,
            resource_tag=tags.get(node["id"]),
            at_most_once=False,
        )
        for place, node in enumerate(nodes)
    )
    outputs = [spec.index for spec in specs if spec.handler == "output"]
    return Graph(
        name=name,
        nodes=specs,
        index=index,
        fail_fast=True,
        max_concurrency=None,
        roots=tuple(spec.index for spec in specs if not spec.parents),
        exits=tuple(spec.index for spec in specs if not spec.children),
        output_node=outputs[0] if len(outputs) == 1 else None,
    )


def _tell(node: NodeState, told: Mapping[str, Any]) -> None:
    node.status = NodeStatus(told["status"])
    node.attempt, node.epoch = told["attempt"], told["epoch"]
    node.reason = None if told["reason"] is None else Reason(told["reason"])
    node.cause, node.error = told["cause"], told["error"]
    node.started_at = seconds_or_none(told["started_at"])
    node.finished_at = seconds_or_none(told["finished_at"])
    node.worker, node.output = told["worker"], told["output"]


def _let_wait(node: NodeState, event: Event) -> None:
    data = event.data or {}
    node.phase = _WAITS[event.type]
    if node.phase is Phase.PARKED:
        node.until = data["until"]
    else:
        node.until = event.time + data["delay"]
        node.error = data["error"]
        node.crashes = node.attempt - data["retry"]
