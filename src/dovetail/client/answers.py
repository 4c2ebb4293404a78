"""The client's replies: objects whose attributes are the fields of the HTTP API.

Each is a copy of one moment: it does not change when the run does, and changing it changes no run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Self


class _Answer:
    """Fields in, the same fields out; a field that only a newer server has is left out."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> Self:
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})

    def to_dict(self) -> dict[str, Any]:
        """As the HTTP API answers: plain data that `json.dumps` takes."""
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}

    def _shown(self, *names: str) -> str:
        """For a repr: what identifies it and how it stands, without what does not apply."""
        fields = {name: getattr(self, name) for name in names}
        words = [f"{name}={value!r}" for name, value in fields.items() if value is not None]
        return f"{type(self).__name__}({', '.join(words)})"


@dataclass(frozen=True, slots=True)
class WorkflowVersion(_Answer):
    """A registered definition. `created` is false if the same content was there already."""

    name: str
    version: int
    created: bool


@dataclass(frozen=True, slots=True)
class HistoryItem(_Answer):
    """One change of a workflow or of a rate limit. `actor` is who made it; `details` depend on the
    `action`: `register`, `alias`, `delete` or `limit`."""

    time: str
    actor: str
    action: str
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HistoryPage(_Answer):
    """Changes, newest first; `next_cursor` is None on the last page."""

    items: tuple[HistoryItem, ...]
    next_cursor: str | None

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> HistoryPage:
        items = tuple(map(HistoryItem.from_api, fields["items"]))
        return cls(items, fields["next_cursor"])


@dataclass(frozen=True, slots=True)
class WorkflowDiff(_Answer):
    """What one version of a workflow has that another has not. `changed` has an `id` and `fields`,
    and of each field `from` and `to`, as has `workflow`."""

    added: list[str]
    removed: list[str]
    changed: list[dict[str, Any]]
    workflow: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Layout(_Answer):
    """Where a graph is drawn. `nodes` have `id`, `x`, `y`, `layer`, and `edges` have `from`, `to`
    and `points`."""

    nodes: list[dict[str, Any]]
    edges: list[dict[str, Any]]
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class RunCounts(_Answer):
    """`counts` by status; `hours`, oldest first, have `time`, `total` (runs that were created in
    this hour) and `failed` (how many of these failed)."""

    counts: dict[str, int]
    hours: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RunOutcome(_Answer):
    """What became of one run of many. `error` has `type` and `message`, or is None."""

    run_id: str
    ok: bool
    status: str | None
    error: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Queues(_Answer):
    """What waits and runs. `items` have `handler`, `waiting` and `workers`; `parked` the rate
    limits that nodes wait for; `running` the nodes that run. `looked_at` runs were read, the newest
    first; `complete` is false if there are more."""

    items: list[dict[str, Any]]
    parked: list[dict[str, Any]]
    running: list[dict[str, Any]]
    complete: bool
    looked_at: int


@dataclass(frozen=True, slots=True)
class DeadLetter(_Answer):
    """A message that was refused as malformed or poison, or a notification that was given up."""

    letter_id: str
    time: str | None
    stream: str
    id: str
    reason: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Requeued(_Answer):
    """The run that a dead letter named, after its retry; of a notification, the end that it is
    about."""

    letter_id: str
    run_id: str
    status: str


@dataclass(frozen=True, slots=True)
class Repaired(_Answer):
    """Where a run's state was not what its log says, and whether that was changed."""

    run_id: str
    differences: list[str]
    repaired: bool


@dataclass(frozen=True, slots=True, repr=False)
class RunNode(_Answer):
    """One node of a run."""

    id: str
    handler: str
    status: str
    attempt: int
    epoch: int
    dependencies: list[str]
    reason: str | None
    cause: str | None
    error: dict[str, Any] | None
    started_at: str | None
    finished_at: str | None
    duration: float | None
    worker: str | None
    output: Any
    items: dict[str, int] | None
    """Of a node with `for_each`: how many items are in which state. None for any other node."""

    def __repr__(self) -> str:
        return self._shown("id", "status", "attempt", "reason", "cause", "duration", "error")


@dataclass(frozen=True, slots=True)
class NodeAttempt(_Answer):
    """One start of a node. `error` has `type`, `message`, `where` and `traceback`."""

    epoch: int
    attempt: int
    status: str
    worker: str | None
    started_at: str
    finished_at: str | None
    duration: float | None
    error: dict[str, Any] | None

    def __getitem__(self, name: str) -> Any:
        """A field as the HTTP API has it: `attempt["status"]`, beside `attempt.status`."""
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)


@dataclass(frozen=True, repr=False)
class InspectedNode(RunNode):
    """One node in detail. A large input or output is `{"$output": {"size", "href"}}`."""

    template: dict[str, Any]
    config: dict[str, Any] | None
    config_error: str | None
    inputs: dict[str, Any]
    why: dict[str, Any] | None
    attempts: tuple[NodeAttempt, ...]

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> Self:
        attempts = tuple(map(NodeAttempt.from_api, fields["attempts"]))
        return super().from_api({**fields, "attempts": attempts})


@dataclass(frozen=True, slots=True)
class MappedItem(_Answer):
    """One item of a node with `for_each`. A large output is `{"$output": {"size", "href"}}`."""

    index: int
    status: str
    attempt: int
    worker: str | None
    started_at: str | None
    finished_at: str | None
    reason: str | None
    error: dict[str, Any] | None
    output: Any


@dataclass(frozen=True, slots=True)
class ItemPage(_Answer):
    """Some items of a node, in order; with `cursor=page.next_cursor` come the next ones."""

    items: tuple[MappedItem, ...]
    counts: dict[str, int]
    next_cursor: str | None

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> Self:
        return super(ItemPage, cls).from_api(
            {**fields, "items": tuple(map(MappedItem.from_api, fields["items"]))}
        )

    def __iter__(self) -> Iterator[MappedItem]:
        return iter(self.items)


@dataclass(frozen=True, slots=True, repr=False)
class LoggedLine(_Answer):
    """One line that a handler logged or printed."""

    seq: int
    time: str
    node: str | None
    """None, as `epoch` and `attempt`, where lines of any node are missing."""
    epoch: int | None
    attempt: int | None
    item: int | None
    level: str
    logger: str
    message: str
    fields: dict[str, Any] | None

    def __repr__(self) -> str:
        return self._shown("seq", "node", "attempt", "item", "level", "logger", "message")


@dataclass(frozen=True, repr=False)
class Run(_Answer):
    """One run. `nodes` and `outputs` are by node id; only COMPLETED nodes have an output.

    `warnings` are of its params, `{code, message, path}` each, and come with the answer of
    `trigger` and `run` only.
    """

    run_id: str
    workflow: str
    version: int | None
    status: str
    epoch: int
    params: dict[str, Any]
    created_at: str
    started_at: str | None
    finished_at: str | None
    duration: float | None
    error: dict[str, Any] | None
    result: Any
    _forked_from: str | None
    _nodes: dict[str, RunNode] | None
    warnings: list[dict[str, Any]]

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> Self:
        nodes = None
        if "nodes" in fields:
            nodes = {node["id"]: RunNode.from_api(node) for node in fields["nodes"]}
        detail = {"_forked_from": fields.get("forked_from"), "_nodes": nodes}
        return super().from_api({"warnings": [], **fields, **detail})

    @property
    def nodes(self) -> dict[str, RunNode]:
        if self._nodes is None:
            # An empty dict would read as a run in which nothing happened.
            raise AttributeError(
                f"a list has its runs without nodes; get_run('{self.run_id}') has nodes and outputs"
            )
        return self._nodes

    @property
    def forked_from(self) -> str | None:
        """The run that it is a fork of, if it is one."""
        if self._nodes is None:
            raise AttributeError(
                f"a list has its runs without their origin; get_run('{self.run_id}') has it"
            )
        return self._forked_from

    @property
    def outputs(self) -> dict[str, Any]:
        nodes = self.nodes.items()
        return {name: node.output for name, node in nodes if node.status == "COMPLETED"}

    def to_dict(self) -> dict[str, Any]:
        """As `GET /runs/<id>` answers, so `nodes` is a list; a run of a list has none."""
        view = super().to_dict()
        nodes, forked_from = view.pop("_nodes"), view.pop("_forked_from")
        if not self.warnings:
            del view["warnings"]
        if nodes is None:
            return view
        listed = [node.to_dict() for node in nodes.values()]
        return {**view, "forked_from": forked_from, "nodes": listed}

    def __repr__(self) -> str:
        return self._shown("run_id", "workflow", "version", "status", "epoch", "duration", "error")


@dataclass(frozen=True)
class Page(_Answer):
    """Some runs, newest first; with `cursor=page.next_cursor` come the next ones."""

    items: tuple[Run, ...]
    next_cursor: str | None

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> Self:
        return super().from_api({**fields, "items": tuple(map(Run.from_api, fields["items"]))})

    def __iter__(self) -> Iterator[Run]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class BatchRun(_Answer):
    """The run of the item at `index`."""

    index: int
    run_id: str
    status: str


@dataclass(frozen=True, repr=False)
class Batch(_Answer):
    """Many runs of one workflow. `counts` are runs by status, `runs` in the order of the items."""

    batch_id: str
    workflow: str
    count: int
    counts: dict[str, int]
    created_at: str
    finished_at: str | None
    runs: tuple[BatchRun, ...]
    next_cursor: str | None
    warnings: list[dict[str, Any]]
    """Of the items' params; in the answer of `batch` only."""

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> Self:
        runs = tuple(map(BatchRun.from_api, fields["runs"]))
        return super().from_api({"warnings": [], **fields, "runs": runs})

    def to_dict(self) -> dict[str, Any]:
        view = super().to_dict()
        if not self.warnings:
            del view["warnings"]
        return view

    def __repr__(self) -> str:
        return self._shown("batch_id", "workflow", "count", "counts", "finished_at")


@dataclass(frozen=True)
class BatchPage(_Answer):
    """Some batches, newest first, without their runs: `get_batch` has these."""

    items: tuple[Batch, ...]
    next_cursor: str | None

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> Self:
        listed = ({**item, "runs": (), "next_cursor": None} for item in fields["items"])
        return super().from_api({**fields, "items": tuple(map(Batch.from_api, listed))})

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, repr=False)
class Event(_Answer):
    """One line of a run's log. Other fields of its type, such as `error`, are attributes, too."""

    seq: int
    time: str
    type: str
    epoch: int
    node: str | None
    attempt: int | None
    more: Mapping[str, Any]
    """The fields that only some types have: `reason`, `error`, `fraction`, `worker`, …"""

    @classmethod
    def from_api(cls, fields: Mapping[str, Any]) -> Self:
        usual = {"node": None, "attempt": None, **fields}
        more = {name: usual.pop(name) for name in fields if name not in cls.__dataclass_fields__}
        return cls(**usual, more=more)

    def __getattr__(self, name: str) -> Any:
        # Python itself asks for names such as __deepcopy__, and may before there are any fields.
        if name.startswith("__") or name not in self.more:
            has = "" if name.startswith("__") else f"; it has: {', '.join(self.to_dict())}"
            raise AttributeError(f"this event has no '{name}'{has}")
        return self.more[name]

    def to_dict(self) -> dict[str, Any]:
        view = super().to_dict()
        del view["more"]
        if self.node is None:  # an event of the run itself
            del view["node"], view["attempt"]
        return {**view, **self.more}

    def __repr__(self) -> str:
        return self._shown("seq", "type", "epoch", "node", "attempt", *self.more)


@dataclass(frozen=True, repr=False)
class FeedEvent(Event):
    """One event of the feed of all runs. `id` resumes the feed after it."""

    id: str
    run_id: str
    workflow: str

    def __repr__(self) -> str:
        return self._shown("id", "type", "run_id", "workflow", "seq", "epoch", *self.more)


def _plain(value: Any) -> Any:
    return [item.to_dict() for item in value] if isinstance(value, tuple) else value
