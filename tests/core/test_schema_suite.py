"""The official suite of JSON Schema, draft 2020-12: what is accepted means what the draft says, and
what is refused is refused for a reason that the guide names.

`./dev test` fetches the suite, which is not ours. Each schema stands in a property, because params
are an object.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.definition.params import apply_params, check_schema
from dovetail.core.errors import InvalidParams

ROOT = Path(__file__).resolve().parents[2]
SUITE = Path(os.environ.get("TEST_SCHEMA_SUITE", ROOT / ".cache" / "schema-suite-4.26.0"))
NUL = chr(0)


def wrapped(schema: Any) -> dict[str, Any]:
    """The schema as that of one param, its references with it; a name and a draft are the top's."""
    top: dict[str, Any] = {}
    if isinstance(schema, dict):
        top = {key: schema[key] for key in ("$schema", "$id") if key in schema}
        schema = {key: value for key, value in schema.items() if key not in top}
    return {**top, "type": "object", "properties": {"value": _moved(schema)}}


def _moved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_moved(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and re.match("#(/|$)", value):
            moved[key] = "#/properties/value" + value[1:]
        else:
            moved[key] = value if key in ("const", "enum") else _moved(value)
    return moved


@cache
def named_in_the_guide() -> tuple[str, ...]:
    """The words of the refusals, from the table in the guide."""
    guide = (ROOT / "docs" / "guide.md").read_text()
    table = guide.split("| refused with | reason |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return tuple(words for row in rows for words in re.findall("`([^`]+)`", row))


def groups() -> Iterator[Any]:
    for file in sorted(SUITE.glob("*.json")):
        for group in json.loads(file.read_text()):
            yield pytest.param(group, id=f"{file.stem}: {group['description']}")


def test_the_guide_lists_the_refused_keywords() -> None:
    assert len(named_in_the_guide()) > 15


def test_the_official_suite_is_complete() -> None:
    assert len(list(groups())) > 300, "the official suite is not here: ./dev test fetches it"


@pytest.mark.parametrize("group", list(groups()))
def test_the_official_suite_passes_or_is_refused_as_the_guide_says(group: dict[str, Any]) -> None:
    schema = wrapped(group["schema"])
    refused = [problem.message for problem in check_schema(schema)]
    for message in refused:
        assert any(words in message for words in named_in_the_guide()), message
    if refused:
        return
    for case in group["tests"]:
        if NUL in str(case["data"]):
            continue  # no param has one
        assert is_valid(schema, case["data"]) == case["valid"], case["description"]


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    try:
        apply_params(schema, {"value": value})
    except InvalidParams:
        return False
    return True


# Every keyword of the draft, whether or not the suite is here


WHOLE = st.integers(0, 3)
VALUES = st.none() | st.booleans() | WHOLE | st.text("ab", max_size=3) | st.lists(WHOLE, max_size=3)
NAMES = st.sampled_from(["a", "b", "c"])
TYPES = st.sampled_from(["array", "boolean", "integer", "null", "number", "object", "string"])
_SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "const": VALUES,
    "multipleOf": st.integers(1, 3),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"), WHOLE),
    **dict.fromkeys(("maxLength", "minLength", "maxItems", "minItems", "maxProperties"), WHOLE),
    **dict.fromkeys(("minProperties", "maxContains", "minContains"), WHOLE),
    "pattern": st.sampled_from(["^a", "b$", "[ab]+"]),
    "uniqueItems": st.booleans(),
    "required": st.lists(NAMES, max_size=3, unique=True),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True)),
    "format": st.sampled_from(["date", "email", "unknown"]),
    "contentEncoding": st.just("base64"),
    "contentMediaType": st.just("application/json"),
    **dict.fromkeys(("title", "description", "$comment"), st.text(max_size=3)),
    **dict.fromkeys(("deprecated", "readOnly", "writeOnly"), st.booleans()),
    "examples": st.lists(VALUES, max_size=2),
    "$ref": st.sampled_from(["#/$defs/any", "#/$defs/none", "#/$defs/number"]),
}
_ONE = ("additionalProperties", "contains", "contentSchema", "else", "if", "items", "not")
_ONE += ("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")


def _with(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=2)
    optional = {
        **_SIMPLE,
        **dict.fromkeys(_ONE, inner),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(("properties", "dependentSchemas"), st.dictionaries(NAMES, inner)),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b|c"]), inner),
    }
    keywords = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)
    return keywords.flatmap(lambda names: st.fixed_dictionaries({n: optional[n] for n in names}))


SCHEMAS = st.recursive(st.booleans(), _with, max_leaves=6)
DEFS = {"any": True, "none": False, "number": {"type": "number"}}


@given(SCHEMAS, VALUES | st.dictionaries(NAMES, VALUES))
def test_every_keyword_is_accepted_and_not_inverts_it(schema: Any, value: Any) -> None:
    """What a schema accepts, `not` of it refuses; with a `$id` it is the same."""
    whole = {"type": "object", "properties": {"value": schema}, "$defs": DEFS}
    assert check_schema(whole) == []
    accepted = is_valid(whole, value)
    opposite = {**whole, "properties": {"value": {"not": schema}}}
    assert is_valid(opposite, value) != accepted
    assert is_valid({**whole, "$id": "https://example.com/params"}, value) == accepted
