"""Adds the configs of known handlers to the JSON Schema of a definition, for editors.

Only keywords of draft-07 have a meaning here, which the language servers for YAML and JSON read:
`if` a node has a handler, `then` its config has this schema. Every value may also be a template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

TEMPLATE = {"type": "string", "pattern": r"\{\{"}
"""A text that contains a template."""


class EditorHandler(NamedTuple):
    """A handler as an editor shows it."""

    name: str
    description: str = ""
    config: Mapping[str, Any] | None = None
    """The schema of its config, if it is known."""


def add_handlers(schema: dict[str, Any], handlers: Iterable[EditorHandler]) -> None:
    """Add to the schema of a definition what these handlers take; other handlers stay allowed."""
    node = schema["$defs"]["Node"]
    known = sorted(handlers)
    names = [
        {"const": one.name, **({"description": one.description} if one.description else {})}
        for one in known
    ]
    if names:
        # The last branch: a worker may have handlers that are not known here.
        node["properties"]["handler"]["anyOf"] = [*names, {"type": "string"}]
    cases = []
    for one in known:
        if one.config is None:
            continue
        definition = f"config.{one.name}"
        for name, below in (one.config.get("$defs") or {}).items():
            schema["$defs"][f"{definition}.{name}"] = _structure(below, definition, closed=False)
        root = {name: part for name, part in one.config.items() if name != "$defs"}
        schema["$defs"][definition] = {
            **_words(root),
            **_structure(root, definition, closed=True),
        }
        is_named = {"properties": {"handler": {"const": one.name}}, "required": ["handler"]}
        config: dict[str, Any] = {"$ref": f"#/$defs/{definition}"}
        if root.get("required"):
            then = {"properties": {"config": config}, "required": ["config"]}
        else:
            then = {"properties": {"config": {"anyOf": [config, {"type": "null"}]}}}
        cases.append({"if": is_named, "then": then})
    if cases:
        node["allOf"] = cases


_WORDS = ("description", "examples", "default")
# Formats are left out: editors check some of them more strictly than pydantic does.
_KEPT = (
    *("type", "enum", "const", "required", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "pattern"),
)
_OF_TEXT = frozenset({"enum", "const", "minLength", "maxLength", "pattern"})


def _words(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in _WORDS if name in schema}


def _value(schema: Any, definition: str, *, closed: bool) -> dict[str, Any]:
    """The schema of a value that may also be a template."""
    if not isinstance(schema, Mapping):
        return {}
    made = _structure(schema, definition, closed=closed)
    words = _words(schema)
    types = made.get("type", ())
    takes_all_text = "string" in ((types,) if isinstance(types, str) else types)
    if not made or (takes_all_text and not _OF_TEXT & made.keys()):
        return {**words, **made}
    return {**words, "anyOf": [*made.get("anyOf", [made]), TEMPLATE]}


def _structure(schema: Mapping[str, Any], definition: str, *, closed: bool) -> dict[str, Any]:
    """The same schema, with templates allowed for the values inside. With `closed`, fields that a
    model would ignore are refused."""
    if reference := schema.get("$ref"):
        return {"$ref": f"#/$defs/{definition}.{str(reference).removeprefix('#/$defs/')}"}
    if branches := schema.get("anyOf"):
        alone = sum("properties" in one or "$ref" in one for one in branches) == 1
        made = [_structure(one, definition, closed=closed and alone) for one in branches]
        return {"anyOf": made} if all(made) else {}
    found = {name: schema[name] for name in _KEPT if name in schema}
    if schema.get("uniqueItems"):
        found.pop("maxItems", None)  # of a set, which drops duplicates
    properties = schema.get("properties")
    if properties is not None:
        found["properties"] = {
            name: _value(below, definition, closed=closed) for name, below in properties.items()
        }
    others = schema.get("additionalProperties")
    if isinstance(others, Mapping):
        found["additionalProperties"] = _value(others, definition, closed=closed)
    elif others is False or (others is None and properties is not None and closed):
        found["additionalProperties"] = False
    if isinstance(items := schema.get("items"), Mapping):
        found["items"] = _value(items, definition, closed=closed)
    return found
