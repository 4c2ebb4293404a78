"""The state of one run: stores keep it, and `step` changes it.

Nodes are addressed by their index in the definition, so that a fan-in is a decrement in a list.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from dovetail.core.dag import Graph
from dovetail.core.events import NO_TOKEN, Token
from dovetail.core.items import MapState, split_name
from dovetail.core.outputs import OutputReference
from dovetail.core.states import NodeStatus, Reason, RunStatus
from dovetail.core.templates import NodeValue


class Phase(StrEnum):
    """Where a QUEUED node is."""

    HELD = "held"
    """Waits for its run to fall under `max_concurrency`. A mapped node is held while items of it
    are, also while others run."""
    EXPANDING = "expanding"
    """A mapped node: its list is being rendered. Handed to the transport, but no worker starts it.
    """
    PUBLISHED = "published"
    """Handed to the transport; a worker may claim it."""
    PARKED = "parked"
    """Waits for its rate limit until `until`."""
    BACKING_OFF = "backing_off"
    """Waits for its next attempt until `until`."""


# Reading a member off its enum is a Python-level call in 3.11: ten times the look-up of a name.
_PENDING = NodeStatus.PENDING


class UnreadOutput(NamedTuple):
    """Replaces an output of which only the size is known."""

    size: int


def encoded_size(output: Any) -> int:
    """The bytes of an output as stores keep it: JSON without spaces."""
    if type(output) is UnreadOutput or type(output) is OutputReference:
        return int(output.size)
    return len(orjson.dumps(output))


class NodeState:
    """One node of a run. `attempt` counts its starts in this epoch, `crashes` the lost ones."""

    __slots__ = (
        "answered",
        "attempt",
        "cause",
        "crashes",
        "epoch",
        "error",
        "fed",
        "finished_at",
        "items",
        "lease_until",
        "output",
        "phase",
        "reason",
        "size",
        "started_at",
        "status",
        "token",
        "until",
        "waiting",
        "worker",
    )
    status: NodeStatus
    epoch: int
    waiting: int
    """Parents that are not settled yet; at zero the node is ready."""
    fed: bool
    """A parent completed, or its failure is allowed: once ready, the node runs. If all were
    skipped, so is the node."""
    attempt: int
    crashes: int
    token: Token
    answered: Token
    """The start whose result was applied last; a repetition of that result is ignored."""
    phase: Phase | None
    until: float | None
    lease_until: float | None
    worker: str | None
    output: Any
    size: int
    """Bytes of its output, in a run with a limit; else zero."""
    error: dict[str, Any] | None
    reason: Reason | None
    cause: str | None
    started_at: float | None
    finished_at: float | None
    items: MapState | None
    """Of a mapped node, once its list is known."""

    def __init__(self, epoch: int, waiting: int) -> None:
        self.status = _PENDING
        self.epoch = epoch
        self.waiting = waiting
        self.fed = False
        self.attempt = self.crashes = self.size = 0
        self.token = self.answered = NO_TOKEN
        self.phase = self.until = self.lease_until = self.worker = None
        self.output = self.error = self.reason = self.cause = None
        self.started_at = self.finished_at = self.items = None

    def snapshot(self) -> dict[str, Any]:
        """Every field, for comparing two stores."""
        kept = {name: getattr(self, name) for name in self.__slots__}
        kept["items"] = None if self.items is None else self.items.snapshot()
        return kept


class RunState:
    """One run. The counts are derived from the nodes and kept so that nothing costs O(run)."""

    __slots__ = (
        "active",
        "cancelled",
        "created_at",
        "epoch",
        "error",
        "failed",
        "finished_at",
        "forked_from",
        "graph",
        "held",
        "id",
        "kept_bytes",
        "logged",
        "max_bytes",
        "nodes",
        "params",
        "seq",
        "started_at",
        "status",
        "unfinished",
        "version",
    )

    def __init__(
        self,
        run_id: str,
        graph: Graph,
        params: dict[str, Any],
        now: float,
        version: int | None = None,
    ) -> None:
        self.id = run_id
        self.graph = graph
        self.params = params
        self.version = version
        self.forked_from: str | None = None
        """The run that this one is a fork of."""
        self.status: RunStatus = RunStatus.PENDING
        self.epoch = 1
        self.nodes = [NodeState(1, len(spec.parents)) for spec in graph.nodes]
        self.created_at = now
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self.error: dict[str, Any] | None = None
        self.logged = True
        """Whether its events are written; not for a run of the library, which has no log."""
        self.seq = 0
        """Of its newest event."""
        self.max_bytes: int | None = None
        """The limit on all its outputs, fixed when the run is made. None: no limit, and nothing is
        counted."""
        self.kept_bytes = 0
        """Of all its outputs."""
        self.unfinished = len(self.nodes)
        self.failed = 0
        """Nodes whose failure is not allowed."""
        self.cancelled = 0
        self.active = 0
        """Nodes and items published or RUNNING; `max_concurrency` limits them. A mapped node does
        not count itself."""
        self.held: list[int] = []
        """A heap of the ready nodes beyond `max_concurrency`, first in the definition first. A
        mapped node stands for its items."""

    @property
    def finished(self) -> bool:
        """Its status is final and no handler of it runs any more."""
        return self.finished_at is not None

    def node(self, name: str) -> NodeState:
        """The node or item of this name. Of an item that is not in flight, a copy."""
        index = self.graph.index.get(name)
        if index is not None:
            return self.nodes[index]
        found = self.find_item(name)
        if found is None:
            raise KeyError(name)
        node, item = self.nodes[found[0]], found[1]
        items = node.items
        assert items is not None  # noqa: S101 - else it has no such item
        return items.in_flight.get(item) or items.fill_state(item, NodeState(node.epoch, 0))

    def find_item(self, name: str) -> tuple[int, int] | None:
        """The index of a mapped node and the number of its item, by the item's name. None if the
        run has no such item, or does not know the list yet."""
        node_id, item = split_name(name)
        index = self.graph.index.get(node_id)
        if item is None or index is None:
            return None
        items = self.nodes[index].items
        return None if items is None or item >= items.total else (index, item)

    def get(self, name: str) -> Any:
        """What a template reads under `name` (the `Scope` of the templates)."""
        index = self.graph.index.get(name)
        if index is not None:
            node = self.nodes[index]
            return NodeValue(name, node.status, node.output, node.error)
        if name == "params":
            return self.params
        if name == "run":
            return {"id": self.id, "workflow": self.graph.name}
        raise KeyError(name)

    def snapshot(self) -> dict[str, Any]:
        """Every field, for comparing two stores."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name != "graph"}
        kept["nodes"] = [node.snapshot() for node in self.nodes]
        kept["held"] = sorted(self.held)
        return kept
