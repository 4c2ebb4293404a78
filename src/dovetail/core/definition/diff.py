"""The difference of two definitions: nodes that were added, removed or changed, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from dovetail.core.definition.model import Node, Workflow

_UNORDERED = frozenset({"dependencies"})
"""Lists whose order does not matter."""
_SETTINGS = frozenset({"retry", "cache", "defaults"})
"""Objects of settings: one without a value says nothing."""


def diff_definitions(old: Workflow, new: Workflow) -> dict[str, Any]:
    """What is different in `new`, in the fields of the HTTP API.

    A node is known by its id. A field that is null or has its default equals an absent one. The
    order of nodes, of dependencies and of keys makes no difference.
    """
    before = {node.id: node for node in old.nodes}
    after = {node.id: node for node in new.nodes}
    fields = {
        name: _changes(_fields(before[name]), _fields(node))
        for name, node in after.items()
        if name in before
    }
    return {
        "added": [name for name in after if name not in before],
        "removed": [name for name in before if name not in after],
        "changed": [{"id": name, "fields": found} for name, found in fields.items() if found],
        "workflow": _changes(_fields(old), _fields(new)),
    }


def _fields(part: Node | Workflow) -> dict[str, Any]:
    fields = part.model_dump(mode="json", exclude={"nodes", "id"})
    return {name: _given(fields[name]) if name in _SETTINGS else fields[name] for name in fields}


def _given(settings: Any) -> Any:
    """The settings that have a value; null if none has one."""
    if not isinstance(settings, dict):
        return settings
    given = {name: _given(value) for name, value in settings.items()}
    return {name: value for name, value in given.items() if value is not None} or None


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"from": old[name], "to": new[name]}
        for name in new
        if _text(name, old[name]) != _text(name, new[name])
    }


def _text(name: str, value: Any) -> bytes:
    """As JSON: Python's own comparison takes 1, 1.0 and true for the same."""
    value = sorted(value) if name in _UNORDERED else value
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
