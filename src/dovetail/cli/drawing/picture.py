"""What every drawing is made of: the nodes of a valid workflow, their layers, their edges.

What it must not know: any format.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.dag import layers
from dovetail.core.definition.model import Node, Workflow


@dataclass(frozen=True, slots=True)
class Picture:
    """Nodes are their places in the definition, as in the graph itself."""

    name: str
    ids: list[str]
    handlers: list[str]
    conditions: list[str]
    """Of a node that may be skipped by a condition of its own, that condition; else empty."""
    parents: list[list[int]]
    layers: list[list[int]]


def picture_of(workflow: Workflow) -> Picture:
    place = {node.id: index for index, node in enumerate(workflow.nodes)}
    parents = [[place[name] for name in node.dependencies] for node in workflow.nodes]
    return Picture(
        name=workflow.name,
        ids=[node.id for node in workflow.nodes],
        handlers=[node.handler for node in workflow.nodes],
        conditions=[_condition(node) for node in workflow.nodes],
        parents=parents,
        layers=layers(parents),
    )


def _condition(node: Node) -> str:
    """Without the braces, which say nothing there."""
    if node.condition is None or node.condition is True:
        return ""
    text = str(node.condition).strip()
    whole = text.startswith("{{") and text.endswith("}}") and text.count("{{") == 1
    return text[2:-2].strip(" -") if whole else text
