"""What is known of a run in Redis without all of it: its outline, and some nodes as they are,
enough to render others.

What it must not know: how they were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from dovetail.core.dag import Graph
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.templates import NodeValue
from dovetail.stores.redis_moves import nodes_of


class Outline(RunState):
    """What never changes of a run. It has no nodes: who follows orders needs none."""

    __slots__ = ()

    def __init__(
        self,
        run_id: str,
        graph: Graph,
        params: dict[str, Any],
        now: float,
        version: int | None = None,
    ) -> None:
        self.id, self.graph, self.params = run_id, graph, params
        self.created_at, self.version = now, version


class RedisScene:
    __slots__ = ("_nodes", "run")

    def __init__(self, run: RunState) -> None:
        self.run = run
        self._nodes: dict[int, tuple[NodeStatus, Any, Any]] = {}

    def add(self, place: int, status: NodeStatus, output: Any, error: Any) -> None:
        self._nodes[place] = (status, output, error)

    def fill(
        self,
        places: Sequence[int],
        states: Sequence[bytes | None],
        outputs: Sequence[bytes | None],
        ends: Sequence[bytes | None],
    ) -> None:
        """Add these nodes, from what their hashes answered."""
        kept = [output for output in outputs if output is not None]
        if len(kept) == len(places) and all(s is not None and s[:2] == b"C|" for s in states):
            # Nearly always, and a join may have thousands of parents.
            values = orjson.loads(b"[%b]" % b",".join(kept))
            for place, value in zip(places, values, strict=True):
                self.add(place, NodeStatus.COMPLETED, value, None)
            return
        for place, node in nodes_of(self.run.graph, places, states, outputs, ends).items():
            self.add(place, node.status, node.output, node.error)

    def get(self, name: str) -> Any:
        place = self.run.graph.index.get(name)
        if place is None:
            return self.run.get(name)
        return NodeValue(name, *self._nodes[place])

    def inputs(self, place: int) -> dict[str, Any]:
        names = self.run.graph.nodes
        return {
            names[parent].id: self._nodes[parent][1]
            for parent in names[place].parents
            if self._nodes[parent][0] is NodeStatus.COMPLETED
        }
