"""A run that was recorded: its definition, its params, and how each node ended.

A replay runs the definition again with the recorded outputs, and compares. The format has a
number, which grows when an older Dovetail could not read what a newer one writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.core.dag import build_graph, layers
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import DovetailError, TemplateError, format_path, one_line
from dovetail.core.redaction import Redactor
from dovetail.core.run import RunState
from dovetail.core.states import FINISHED, NodeStatus, Reason, RunStatus
from dovetail.core.templates import MAX_CONFIG_SIZE, masked_config

FORMAT = 1
COMPUTED = frozenset({"input", "output"})
"""The handlers that a replay calls: they depend on the run alone."""
MAX_SHOWN_CHARS = 500
_ENDS = ("node.completed", "node.failed", "node.cached")

_STRICT = ConfigDict(extra="forbid", frozen=True)


class InvalidRecording(DovetailError):
    """A file that is no recording, or one that this version cannot read."""

    type = "invalid_recording"


class RecordedNode(BaseModel):
    """How one node ended."""

    model_config = _STRICT

    status: NodeStatus
    reason: str | None = None
    error: dict[str, Any] | None = None
    """`type` and `message`."""
    config: dict[str, Any] | None = None
    """As its handler got it, secrets as `***`; None for a node that was never ready."""
    output: Any = None
    started: bool = False
    """A handler was called for it. If not, its output came from the cache or from a fork."""
    reused: bool = False
    """It began with its output, which came from the run that this one is a fork of."""
    item_errors: dict[str, dict[str, Any]] | None = None
    """Of a mapped node: the errors of the items that failed for good, by their numbers."""
    item_ends: dict[str, int] | None = None
    """Of a mapped node in a run that did not complete: the numbers of the events with which its
    items ended by themselves, by the numbers of the items. The others were never started, or were
    cancelled."""
    ended: int | None = None
    """Of a node that ended by itself: the number of its last event, which gives the order."""


class Recording(BaseModel):
    """One finished run."""

    model_config = _STRICT

    dovetail_recording: Literal[1] = 1
    recorded_at: str
    run_id: str
    workflow: str
    version: int | None = None
    status: RunStatus
    params: dict[str, Any]
    definition: dict[str, Any]
    nodes: dict[str, RecordedNode] = Field(default_factory=dict)

    def to_json(self) -> bytes:
        """A text that a person can read and compare line by line."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        found = {"dovetail_recording": FORMAT, **data}
        return orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def read_recording(content: bytes) -> Recording:
    """Raises `InvalidRecording` with what is wrong with it."""
    try:
        data = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidRecording(f"no recording: not valid JSON: {error}") from None
    number = data.get("dovetail_recording") if isinstance(data, dict) else None
    if number is None:
        raise InvalidRecording(
            "no recording: it has no 'dovetail_recording'; `dovetail runs record RUN -o FILE` "
            "writes one"
        )
    if number != FORMAT:
        raise InvalidRecording(
            f"a recording of format {one_line(str(number))}; this version reads format {FORMAT}: "
            "record the run again"
        )
    try:
        return Recording.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise InvalidRecording(
            f"no whole recording: {format_path(first['loc'])}: {one_line(first['msg'], 200)}"
        ) from None


def record(
    view: Mapping[str, Any],
    definition: dict[str, Any],
    events: Iterable[Mapping[str, Any]],
    redactor: Redactor,
    recorded_at: str,
) -> Recording:
    """The recording of a finished run, from its view and its events as the API has them."""
    events = list(events)
    ends, reused = _ends(events)
    item_errors = _item_errors(events)
    epochs = {node["id"]: node["epoch"] for node in view["nodes"] if node["items"] is not None}
    is_complete = view["status"] == RunStatus.COMPLETED
    item_ends = {} if is_complete else _item_ends(events, epochs)
    nodes = {}
    run = _state(view, definition)
    for node in view["nodes"]:
        name, status = node["id"], NodeStatus(node["status"])
        by_itself = status is NodeStatus.COMPLETED or (
            status is NodeStatus.FAILED and node["reason"] != Reason.DEPENDENCY_FAILED
        )
        error = node["error"]
        was_ready = status is NodeStatus.COMPLETED or node["attempt"] > 0
        nodes[name] = RecordedNode(
            status=status,
            reason=node["reason"],
            error=_brief(error),
            config=config_of(run, run.graph.index[name]) if was_ready else None,
            output=node["output"],
            started=node["attempt"] > 0,
            reused=name in reused,
            item_errors=item_errors.get(name),
            item_ends=item_ends.get(name),
            ended=ends.get(name) if by_itself else None,
        )
    fields = {name: view[name] for name in ("run_id", "workflow", "version", "status", "params")}
    found = Recording(recorded_at=recorded_at, definition=definition, nodes=nodes, **fields)
    if not redactor:
        return found
    return Recording.model_validate(redactor.redact_shown(found.model_dump(mode="json")))


def _ends(events: Iterable[Mapping[str, Any]]) -> tuple[dict[str, int], set[str]]:
    """The number of the last end of each node, and the nodes that a fork reused."""
    ends: dict[str, int] = {}
    reused: set[str] = set()
    for event in events:
        name = event.get("node")
        if name is None or event.get("item") is not None:
            continue
        if event["type"] in _ENDS:
            ends[name] = event["seq"]
            reused.discard(name)
        elif event["type"] == "node.reused":
            ends[name] = event["seq"]
            reused.add(name)
    return ends, reused


def _item_errors(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By node and number. A retry runs such items again."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        name, item = event.get("node"), event.get("item")
        if name is None or item is None:
            continue
        if event["type"] == "node.failed":
            found.setdefault(name, {})[str(item)] = _brief(event.get("error") or {})
        elif event["type"] == "node.started":
            found.get(name, {}).pop(str(item), None)
    return found


def _item_ends(
    events: Iterable[Mapping[str, Any]], epochs: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """By node and number; `epochs` has the mapped nodes. A retry opens failed items again, and may
    begin only some of them."""
    found: dict[str, dict[str, int]] = {name: {} for name in epochs}
    for event in events:
        name, item = event.get("node"), event.get("item")
        if name is None or item is None:
            continue
        if event["type"] == "node.queued":
            found[name].pop(str(item), None)
        is_open = event["type"] == "node.failed" and event["epoch"] < epochs[name]
        if event["type"] in _ENDS and not is_open:
            found[name][str(item)] = event["seq"]
    return found


def _brief(error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if error is None else {key: error.get(key) for key in ("type", "message")}


def _state(view: Mapping[str, Any], definition: dict[str, Any]) -> RunState:
    """The run as far as templates read it."""
    graph = build_graph(Workflow.model_validate(definition), {})
    run = RunState(view["run_id"], graph, view["params"], 0.0, view["version"])
    for node in view["nodes"]:
        state = run.node(node["id"])
        state.status, state.output = NodeStatus(node["status"]), node["output"]
        state.error = node["error"]
    return run


def config_of(run: RunState, index: int) -> dict[str, Any] | None:
    """The config of a node as it is shown; None if it cannot be rendered."""
    try:
        return masked_config(run.graph.nodes[index].config, run, MAX_CONFIG_SIZE)
    except TemplateError:
        return None


# ── the first difference ─────────────────────────────────────────────────────────────────


class Difference(NamedTuple):
    """Where a run went another way than the recording."""

    node: str | None
    """None for a difference of the whole run."""
    field: str
    """Such as `status`, `config.url` or `output.items[3]`."""
    expected: Any
    got: Any

    def as_dict(self) -> dict[str, Any]:
        """As JSON; what is not there is null."""
        return {n: None if v is ABSENT else v for n, v in self._asdict().items()}

    def __str__(self) -> str:
        place = "the run" if self.node is None else f"node '{self.node}'"
        return f"{place}: {self.field}: expected {_text(self.expected)}, got {_text(self.got)}"


def compare(
    recording: Recording, run: RunState, unexpected: Mapping[str, str]
) -> Difference | None:
    """The first difference, parents before their children. `unexpected` says what a node did that
    the recording does not have, by its id."""
    graph = run.graph
    for layer in layers([spec.parents for spec in graph.nodes]):
        for index in layer:
            name = graph.nodes[index].id
            recorded = recording.nodes.get(name)
            if recorded is None:
                return Difference(name, "node", "no such node", "a node that the recording lacks")
            if found := _compare_node(recorded, run, index, unexpected.get(name)):
                return found
    for name in recording.nodes:
        if name not in graph.index:
            return Difference(name, "node", "a node", "no such node in the definition")
    if run.status is not recording.status:
        return Difference(None, "status", recording.status.value, run.status.value)
    return None


def _compare_node(
    recorded: RecordedNode, run: RunState, index: int, unexpected: str | None
) -> Difference | None:
    name, node = run.graph.nodes[index].id, run.nodes[index]
    if unexpected is not None:
        return Difference(name, "status", recorded.status.value, unexpected)
    if recorded.config is not None and node.status in FINISHED and not recorded.reused:
        config = config_of(run, index)
        if found := first_difference(recorded.config, config):
            return Difference(name, format_path(("config", *found[0])), *found[1:])
    if recorded.status is not node.status:
        return Difference(name, "status", recorded.status.value, node.status.value)
    reason = None if node.reason is None else node.reason.value
    if recorded.ended is None and recorded.reason != reason:
        return Difference(name, "reason", recorded.reason, reason)
    if recorded.status is NodeStatus.COMPLETED:
        if found := first_difference(recorded.output, node.output):
            return Difference(name, format_path(("output", *found[0])), *found[1:])
    elif recorded.ended is not None:
        expected, error = recorded.error, _brief(node.error)
        if recorded.item_errors and expected and error:
            # How many items had failed when the node did depends on their order.
            expected, error = ({"type": one["type"]} for one in (expected, error))
        if found := first_difference(expected, error):
            return Difference(name, format_path(("error", *found[0])), *found[1:])
    return None


def first_difference(expected: Any, got: Any) -> tuple[tuple[str | int, ...], Any, Any] | None:
    """Where two JSON values differ first: the path, and both values there."""
    if type(expected) is not type(got):
        return (), expected, got
    pairs: Iterable[tuple[str | int, Any, Any]] = ()
    if isinstance(expected, dict):
        keys = dict.fromkeys([*expected, *got])
        pairs = [(key, expected.get(key, ABSENT), got.get(key, ABSENT)) for key in keys]
    elif isinstance(expected, list) and len(expected) == len(got):
        pairs = [(place, *both) for place, both in enumerate(zip(expected, got, strict=True))]
    elif expected != got:
        return (), expected, got
    for step, one, other in pairs:
        if one is ABSENT or other is ABSENT:
            return (step,), one, other
        if found := first_difference(one, other):
            return (step, *found[0]), *found[1:]
    return None


class _Absent:
    """The value of a key that only the other side has."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


def _text(value: Any) -> str:
    text = "nothing" if value is ABSENT else orjson.dumps(value).decode()
    return one_line(text, MAX_SHOWN_CHARS)
