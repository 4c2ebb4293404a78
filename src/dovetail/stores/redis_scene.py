"""What is known of a run in Redis without all of it: its outline, and some nodes as they are,
enough to render others.

What it must not know: how they were read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from dovetail.core.dag import Graph
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.templates import NodeValue
from dovetail.core.transitions import Complete
from dovetail.stores.redis_moves import nodes_of

MOST_RUNS = 4096


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
    __slots__ = ("_inputs", "_nodes", "run")

    def __init__(self, run: RunState) -> None:
        self.run = run
        self._nodes: dict[int, tuple[NodeStatus, Any, Any]] = {}
        self._inputs: tuple[Sequence[int], dict[str, Any]] | None = None

    def add(self, place: int, status: NodeStatus, output: Any, error: Any) -> None:
        self._inputs = None
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
        """Outputs of the completed parents by id: the very same for siblings."""
        names = self.run.graph.nodes
        parents = names[place].parents
        if self._inputs is None or self._inputs[0] != parents:
            found = {
                names[parent].id: self._nodes[parent][1]
                for parent in parents
                if self._nodes[parent][0] is NodeStatus.COMPLETED
            }
            self._inputs = (parents, found)
        return self._inputs[1]


class AtHand:
    """Outputs that were just stored, for the nodes that are about to be published for them.

    No longer: Redis may lose what it had, and a node may have another output then.
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, Any]] = {}

    def keep(self, run: RunState, moves: Sequence[Complete]) -> None:
        if len(self._runs) >= MOST_RUNS:  # of publishes that failed
            self._runs.clear()
        index = run.graph.index
        self._runs[run.id] = {index[move.node]: move.output for move in moves}

    def forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    def taken(self, run_id: str) -> Mapping[int, Any]:
        """Outputs by place. Whatever is missing is read."""
        return self._runs.pop(run_id, {})
