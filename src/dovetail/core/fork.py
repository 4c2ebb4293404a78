"""Which nodes of a fork are reused: a new run begins with the finished work of an older run.

A node is reused if the older run has a COMPLETED node that is equal in `EQUAL_FIELDS`, and if all
its ancestors are reused. A skipped node is asked its condition again: if it is skipped again, it
counts as reused. Everything else runs, also a node whose failure was allowed.
"""

from __future__ import annotations

from collections.abc import Container
from difflib import get_close_matches
from typing import Any, NamedTuple

import orjson

from dovetail.core.dag import Graph, layers
from dovetail.core.definition.model import Node
from dovetail.core.effects import COMPLETED, SKIPPED
from dovetail.core.errors import NotFound, TemplateError, shown
from dovetail.core.run import NodeState, RunState
from dovetail.core.transitions import Submit

EQUAL_FIELDS = ("handler", "config", "condition", "dependencies", "for_each")
"""The fields of a node that decide, beside its id, whether it is still the same node. The other
fields say how a node runs, not what it returns."""
_UNORDERED = frozenset({"dependencies"})
"""Lists whose order does not matter."""


class ForkPlan(NamedTuple):
    """What a fork begins with. Each node is in one of the three, in definition order."""

    reuse: dict[str, Any]
    """The outputs of the older run, by node."""
    skip: list[str]
    """Nodes that were skipped, and are skipped again."""
    rerun: list[str]


def plan_fork(
    old: RunState,
    new: Submit,
    from_node: str | None = None,
    *,
    only: Container[str] | None = None,
) -> ForkPlan:
    """What of the run `old` its fork `new` reuses.

    With other params than the older run has, nothing is reused, unless `from_node` says where to
    begin. That node and its descendants run in any case. Raises `NotFound` if the new graph does
    not have it. `only` are the nodes of a plan that was made before: no other one is reused.
    """
    graph = new.graph
    begins: set[int] = set()
    if from_node is not None:
        if from_node not in graph.index:
            raise _no_node(graph, from_node)
        start = graph.index[from_node]
        begins = {start, *graph.descendants(start)}
    elif only is None and not same_json(old.params, new.params):
        return ForkPlan({}, [], [spec.id for spec in graph.nodes])
    run = RunState(new.run_id, graph, new.params, 0.0, new.version)
    for layer in layers([spec.parents for spec in graph.nodes]):
        for index in layer:
            if index not in begins:
                _settle(run, index, _equal_node(old, graph, index), only)
    plan = ForkPlan({}, [], [])
    for spec, node in zip(graph.nodes, run.nodes, strict=True):
        if node.status is COMPLETED:
            plan.reuse[spec.id] = node.output
        else:
            (plan.skip if node.status is SKIPPED else plan.rerun).append(spec.id)
    return plan


def _settle(run: RunState, index: int, old: NodeState | None, only: Container[str] | None) -> None:
    """Give a node of the new run the state that it begins with; its parents have theirs."""
    spec, node = run.graph.nodes[index], run.nodes[index]
    parents = [run.nodes[parent].status for parent in spec.parents]
    if old is None or any(status not in (COMPLETED, SKIPPED) for status in parents):
        return
    if old.status is COMPLETED and (only is None or spec.id in only):
        node.status, node.output = COMPLETED, old.output
    elif old.status is SKIPPED and _is_skipped(run, index, parents):
        node.status = SKIPPED


def _is_skipped(run: RunState, index: int, parents: list[Any]) -> bool:
    """Whether a node whose parents are all settled is skipped, as `effects.resolve` decides."""
    if parents and COMPLETED not in parents:
        return True
    condition = run.graph.nodes[index].condition
    try:
        return condition is not None and not condition(run)
    except TemplateError:
        return False  # the node fails


def _equal_node(old: RunState, graph: Graph, index: int) -> NodeState | None:
    """The node of the older run that this node of the new graph is equal to."""
    at = old.graph.index.get(graph.nodes[index].id)
    if at is None or graph.workflow is None or old.graph.workflow is None:
        return None
    same = identity(graph.workflow.nodes[index]) == identity(old.graph.workflow.nodes[at])
    return old.nodes[at] if same else None


def identity(node: Node) -> bytes:
    """What makes a node the same node in two definitions. A field that is null or has its default
    equals an absent one."""
    fields = node.model_dump(mode="json", include=set(EQUAL_FIELDS))
    values = [sorted(fields[name]) if name in _UNORDERED else fields[name] for name in EQUAL_FIELDS]
    return orjson.dumps(values, option=orjson.OPT_SORT_KEYS)


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON. Python's own comparison takes 1, 1.0 and true for the
    same."""
    texts = [orjson.dumps(value, option=orjson.OPT_SORT_KEYS) for value in (one, other)]
    return texts[0] == texts[1]


def _no_node(graph: Graph, node_id: str) -> NotFound:
    near = get_close_matches(node_id, graph.index, 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return NotFound(f"workflow '{graph.name}' has no node {shown(node_id)}{hint}")
