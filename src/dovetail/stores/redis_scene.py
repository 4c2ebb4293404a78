"""Some nodes of a run in Redis, as they are: enough to render others.

What it must not know: how they were read.
"""

from __future__ import annotations

from typing import Any

from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.templates import NodeValue


class RedisScene:
    __slots__ = ("_nodes", "run")

    def __init__(self, run: RunState) -> None:
        self.run = run
        self._nodes: dict[int, tuple[NodeStatus, Any, Any]] = {}

    def add(self, place: int, status: NodeStatus, output: Any, error: Any) -> None:
        self._nodes[place] = (status, output, error)

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
