"""The graphs that every contestant runs, as plain data.

A workload is `{node: [parents]}`, parents first. The node of each is the same no-op: it takes its
parents' real outputs and returns `{"n": max(parents) + 1}`, so the last values prove that outputs
travelled along every edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Graph = dict[str, list[str]]
Outputs = list[dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    name: str
    graph: Graph
    exits: list[str]
    """The nodes whose outputs are asked for."""
    depth: int
    """What each of them must have counted up to."""
    runs: int = 1
    """How many runs of the graph are started at once."""
    bytes: int = 0
    """A text of this size is in the output of each node, and so in the input of its children."""

    @property
    def nodes(self) -> int:
        return len(self.graph) * self.runs

    def check(self, outputs: Outputs) -> None:
        """The outputs of the exits, run after run."""
        if self.bytes:
            outputs = [{"n": output["n"]} for output in outputs]
        expected = [{"n": self.depth}] * len(self.exits) * self.runs
        assert outputs == expected, f"{self.name}: {outputs[:3]}…"

    def waves(self) -> list[list[str]]:
        """The nodes that may start together, wave after wave."""
        depth: dict[str, int] = {}
        waves: list[list[str]] = []
        for name, parents in self.graph.items():
            depth[name] = max([depth[parent] + 1 for parent in parents], default=0)
            if depth[name] == len(waves):
                waves.append([])
            waves[depth[name]].append(name)
        return waves


def compared(workload: Workload, run: Callable[[], Outputs]) -> Callable[[], None]:
    """Runs it, and does not believe it."""
    return lambda: workload.check(run())


def chain(length: int) -> Workload:
    graph = {f"x{i}": [f"x{i - 1}"] if i else [] for i in range(length)}
    return Workload(f"chain{length}", graph, [f"x{length - 1}"], length)


def fan(width: int) -> Workload:
    """One root, `width` nodes beside each other, and a join that gets the outputs of all."""
    leaves = [f"f{i}" for i in range(width)]
    graph: Graph = {"root": []} | {leaf: ["root"] for leaf in leaves} | {"join": leaves}
    return Workload(f"fan{width}", graph, ["join"], 3)


def layered(layers: int, width: int) -> Workload:
    """Each node has two parents in the layer before."""

    def name(layer: int, i: int) -> str:
        return f"n{layer * width + i % width}"

    graph: Graph = {
        name(layer, i): [name(layer - 1, i), name(layer - 1, i + 1)] if layer else []
        for layer in range(layers)
        for i in range(width)
    }
    exits = [name(layers - 1, i) for i in range(width)]
    return Workload(f"layered{layers}x{width}", graph, exits, layers)


def diamonds(runs: int) -> Workload:
    """Many small runs at once: a → b, c → d."""
    graph: Graph = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    return Workload(f"diamonds{runs}", graph, ["d"], 3, runs)


def standard() -> list[Workload]:
    return [chain(100), fan(1000), layered(10, 100)]


def durable() -> list[Workload]:
    return [chain(100), fan(1000), diamonds(500)]


def is_chain(workload: Workload) -> bool:
    return all(len(wave) == 1 for wave in workload.waves())


def node(*parents: dict[str, Any]) -> dict[str, Any]:
    """The no-op of every workload."""
    return {"n": max([parent["n"] for parent in parents], default=0) + 1}


def definition(workload: Workload) -> dict[str, Any]:
    """The same as a workflow definition: a template for each edge, a handler that is the no-op."""
    return {
        "name": workload.name,
        "nodes": [
            {
                "id": name,
                "handler": "noop",
                "dependencies": parents,
                "config": {"of": [f"{{{{ {parent} }}}}" for parent in parents]}
                | ({"bytes": workload.bytes} if workload.bytes else {}),
            }
            for name, parents in workload.graph.items()
        ],
    }


def yaml_text(workload: Workload) -> str:
    """The definition as a person would type it, one node a line."""
    lines = [f"name: {workload.name}", "nodes:"]
    for name, parents in workload.graph.items():
        depends = ", ".join(parents)
        reads = ", ".join(f'"{{{{ {parent} }}}}"' for parent in parents)
        config = f"{{of: [{reads}]}}"
        lines.append(
            f"- {{id: {name}, handler: noop, dependencies: [{depends}], config: {config}}}"
        )
    return "\n".join(lines) + "\n"
