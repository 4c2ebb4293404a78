"""What every drawing is made of: the nodes of a valid workflow, their layers, their edges.

What it must not know: any format.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.dag import layers
from dovetail.core.model import Workflow


@dataclass(frozen=True, slots=True)
class Picture:
    """Nodes are their places in the definition, as in the graph itself."""

    name: str
    ids: list[str]
    handlers: list[str]
    conditional: list[bool]
    """Whether a node may be skipped by a condition of its own."""
    parents: list[list[int]]
    layers: list[list[int]]


def picture_of(workflow: Workflow) -> Picture:
    place = {node.id: index for index, node in enumerate(workflow.nodes)}
    parents = [[place[name] for name in node.dependencies] for node in workflow.nodes]
    return Picture(
        name=workflow.name,
        ids=[node.id for node in workflow.nodes],
        handlers=[node.handler for node in workflow.nodes],
        conditional=[node.condition not in (None, True) for node in workflow.nodes],
        parents=parents,
        layers=layers(parents),
    )
