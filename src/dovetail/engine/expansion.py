"""Renders the lists of mapped nodes, for the process that hands their items out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.core.effects import map_of
from dovetail.core.errors import TemplateError
from dovetail.core.events import Token
from dovetail.core.items import list_error
from dovetail.core.run import RunState
from dovetail.core.templates import Scope
from dovetail.core.text import counted
from dovetail.core.transitions import Expand


def render_list(
    run: RunState, index: int, token: Token, scope: Scope | None = None
) -> tuple[Expand, Any]:
    """The list of a mapped node, behind the transition that makes its items. Where there is no
    list, the transition fails the node, and None is behind it.

    The list is rendered from `scope`, by default from the run.
    """
    spec = run.graph.nodes[index]
    assert spec.for_each is not None  # noqa: S101 - only such nodes are expanded
    try:
        value = spec.for_each.items(run if scope is None else scope)
        error = list_error(value, spec.for_each.template)
    except TemplateError as problem:
        return list_failure(run, index, token, problem), None
    if error is not None:
        error["message"] = f"node '{spec.id}': {error['message']}"
        return Expand(run.id, spec.id, token, 0, error), None
    return Expand(run.id, spec.id, token, len(value)), value


def list_failure(run: RunState, index: int, token: Token, problem: TemplateError) -> Expand:
    """The transition that fails a mapped node whose list cannot be rendered."""
    name = run.graph.nodes[index].id
    error = {"type": problem.type, "message": f"node '{name}': for_each {problem}"}
    return Expand(run.id, name, token, 0, error)


def list_of(run: RunState, index: int) -> Sequence[Any]:
    """The list of a mapped node whose length is known. It is rendered once for a run in this
    process. Raises `TemplateError`."""
    spec, items = map_of(run, index)
    if items.values is None:
        values = spec.items(run)
        error = list_error(values)
        if error is not None or len(values) != items.total:
            # Only if what is stored was changed: a template gives the same list each time.
            found = f"{len(values):,}" if isinstance(values, list) else "no list"
            raise TemplateError(f"for_each had {counted(items.total, 'item')} and now has {found}")
        items.values = values
    return items.values
