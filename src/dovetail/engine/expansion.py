"""Renders the lists of mapped nodes, for the process that hands their items out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.core.effects import mapped
from dovetail.core.errors import TemplateError
from dovetail.core.events import Token
from dovetail.core.items import list_error
from dovetail.core.run import RunState
from dovetail.core.templates import Scope
from dovetail.core.text import counted
from dovetail.core.transitions import Expand


def expansion(
    run: RunState, index: int, token: Token, scope: Scope | None = None
) -> tuple[Expand, Any]:
    """The transition that makes the items of a mapped node, and its list. Without a list it fails
    the node. `scope` is what the list reads; by default the run."""
    spec = run.graph.nodes[index]
    assert spec.for_each is not None  # noqa: S101 - only such nodes are expanded
    try:
        value = spec.for_each.items(run if scope is None else scope)
        error = list_error(value)
    except TemplateError as problem:
        return failed_expansion(run, index, token, problem), None
    if error is not None:
        error["message"] = f"node '{spec.id}': {error['message']}"
        return Expand(run.id, spec.id, token, 0, error), None
    return Expand(run.id, spec.id, token, len(value)), value


def failed_expansion(run: RunState, index: int, token: Token, problem: TemplateError) -> Expand:
    name = run.graph.nodes[index].id
    error = {"type": problem.type, "message": f"node '{name}': for_each {problem}"}
    return Expand(run.id, name, token, 0, error)


def items_of(run: RunState, index: int) -> Sequence[Any]:
    """The list of a mapped node, rendered once for this run in this process. Raises
    `TemplateError`."""
    spec, items = mapped(run, index)
    if items.values is None:
        values = spec.items(run)
        error = list_error(values)
        if error is not None or len(values) != items.total:
            # Only if what is stored was changed: a template gives the same list each time.
            found = len(values) if isinstance(values, list) else "no"
            raise TemplateError(f"for_each had {counted(items.total, 'item')} and now has {found}")
        items.values = values
    return items.values
