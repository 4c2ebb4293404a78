"""Params: schemas that are accepted, defaults, violations in plain words, text from a terminal."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.definition.params import (
    apply_params,
    check_items,
    check_params,
    check_schema,
    typed,
)
from dovetail.core.errors import InvalidParams

from .pace import at_most

# Measuring coverage makes everything some times slower.

CONTRACT = {
    "type": "object",
    "required": ["topic"],
    "properties": {"topic": {"type": "string"}, "depth": {"type": "integer", "default": 2}},
}


def props(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def violations(schema: dict[str, Any] | None, params: Any, **limits: int) -> list[tuple[str, str]]:
    with pytest.raises(InvalidParams) as error:
        apply_params(schema, params, **limits)
    return [(problem.path, problem.message) for problem in error.value.problems]


# Which schemas are accepted


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": ["object", "null"]},
        {"properties": {"a": True, "b": False}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **CONTRACT},
        {"$defs": {"a/b %": {}}, "properties": {"x": {"$ref": "#/$defs/a~1b%20%25"}}},
        {"allOf": [{"type": "object"}], "$ref": "#/allOf/0"},
        {"$defs": {"not_used": {"not": {"$ref": "#"}}}, "type": "object"},
        props(a={"enum": [{"$ref": "http://not.a/reference"}], "x-unknown": {"$id": "y"}}),
        props(**{"$ref": {"type": "string"}, "$id": {"type": "string"}}),
        props(a={"type": "string", "pattern": "^.{1,255}$"}),
        {"$id": "https://example.com/s", **CONTRACT},
        {"$id": "urn:x", "$defs": {"n": {}}, "properties": {"a": {"$ref": "#/$defs/n"}}},
        {"$defs": {"any": True, "none": False}, "properties": {"a": {"$ref": "#/$defs/any"}}},
        {"properties": {"a": True, "b": {"$ref": "#/properties/a"}}},
        {"prefixItems": [True], "not": {"$ref": "#/prefixItems/0"}},
        CONTRACT,
    ],
)  # fmt: skip
def test_a_reasonable_schema_is_accepted(schema: dict[str, Any]) -> None:
    assert check_schema(schema) == []


def chained(links: int, copies: int) -> dict[str, Any]:
    """Definitions that each refer to the one before, several times."""
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for link in range(1, links):
        ref = {"$ref": f"#/$defs/d{link - 1}"}
        definitions[f"d{link}"] = {"allOf": [ref] * copies}
    return {"$defs": definitions, "properties": {"a": {"$ref": f"#/$defs/d{links - 1}"}}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


REFUSED = [
    (5, "invalid_field", "params", "must be a JSON Schema, not 5"),
    ({"type": "array"}, "invalid_field", "params.type", "must be 'object', not 'array'"),
    ({"type": ["array", "null"]}, "invalid_field", "params.type", "must be 'object'"),
    ({"topic": {"type": "string"}}, "invalid_field", "params", "put 'topic' under 'properties'"),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        "invalid_field",
        'params["$schema"]',
        "must be written for https://json-schema.org/draft/2020-12/schema",
    ),
    (props(a={"$schema": "x"}), "invalid_field", 'params.properties.a["$schema"]', "at the top"),
    ({"type": "foo"}, "invalid_field", "params.type", "'foo' is not a JSON type"),
    (props(a={"minimum": "3"}), "invalid_field", "params.properties.a.minimum", "number"),
    ({"required": "topic"}, "invalid_field", "params.required", "array"),
    ({"properties": []}, "invalid_field", "params.properties", "object"),
    ({"allOf": {}}, "invalid_field", "params.allOf", "array"),
    ({"items": [{}]}, "invalid_field", "params.items", "boolean"),
    # References
    ({"$ref": "http://127.0.0.1/x"}, "invalid_field", 'params["$ref"]', "is remote"),
    ({"$ref": "file:///etc/passwd"}, "invalid_field", 'params["$ref"]', "is remote"),
    ({"$ref": "other.json#/a"}, "invalid_field", 'params["$ref"]', "is remote"),
    ({"$ref": "#/nowhere"}, "invalid_field", 'params["$ref"]', "not point to a subschema"),
    ({"$ref": "#name"}, "invalid_field", 'params["$ref"]', "not point to a subschema"),
    ({"$ref": "#/x", "x": {}}, "invalid_field", 'params["$ref"]', "not point to a subschema"),
    ({"$ref": 5}, "invalid_field", 'params["$ref"]', "string"),
    ({"$ref": "#"}, "invalid_field", "params", "contains itself"),
    (props(a={"$ref": "#"}), "invalid_field", "params", "contains itself"),
    (
        {"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "type": "object"},
        "invalid_field",
        'params["$defs"].a',
        "contains itself",
    ),
    (props(a={"$id": "http://x/y"}), "invalid_field", 'params.properties.a["$id"]', "as a whole"),
    ({"$id": 5}, "invalid_field", 'params["$id"]', "string"),
    ({"$id": "http://x/y#z"}, "invalid_field", 'params["$id"]', "does not match"),
    ({"$id": "http://x/y", "$ref": "y#/$defs/a"}, "invalid_field", 'params["$ref"]', "is remote"),
    (props(a={"$anchor": "b"}), "invalid_field", 'params.properties.a["$anchor"]', "by its place"),
    ({"$dynamicRef": "#"}, "invalid_field", 'params["$dynamicRef"]', "use '$ref'"),
    ({"$recursiveRef": "#"}, "invalid_field", 'params["$recursiveRef"]', "use '$ref'"),
    # Patterns
    (props(a={"pattern": "("}), "invalid_field", "params.properties.a.pattern", "linear time"),
    (props(a={"pattern": r"(a)\1"}), "invalid_field", "params.properties.a.pattern", "linear"),
    (props(a={"pattern": "(?=a)b"}), "invalid_field", "params.properties.a.pattern", "linear"),
    (
        props(a={"pattern": "(a{1000}){1000}"}),
        "invalid_field",
        "params.properties.a.pattern",
        "huge repetitions",
    ),
    (
        {"patternProperties": {"(": {}}},
        "invalid_field",
        'params.patternProperties["("]',
        "linear time",
    ),
    (props(a={"pattern": "a" * 1001}), "too_large", "params.properties.a.pattern", "1,000"),
    (
        props(**{f"p{i}": {"pattern": "a"} for i in range(201)}),
        "too_large",
        "params",
        "201 patterns",
    ),
    # Size
    (chained(20, 2), "too_large", "params", "more than 10,000 parts"),
    (chained(200, 9), "too_large", "params", "more than 10,000 parts"),
    (deep(33), "too_large", "params" + ".not" * 32, "deeper than 32 levels"),
    ({"description": "x" * 200_000}, "too_large", "params", "more than 131,072 bytes"),
    ({"$defs": chained(20, 2)["$defs"]}, "too_large", "params", "more than 10,000 parts"),
    (
        {"items": props(**{f"p{i}": {"default": 1} for i in range(200)}), "default": [{}] * 200},
        "too_large",
        "params",
        "its defaults are too large",
    ),
    (
        {
            "$defs": {
                "big": props(**{f"p{i}": {"default": 1} for i in range(200)}),
                **{f"d{i}": {"default": {}, "$ref": "#/$defs/big"} for i in range(200)},
            }
        },
        "too_large",
        "params",
        "shared by too many parts",
    ),
    (
        {
            "$defs": {
                "big": props(a={"default": [0] * 1000, "items": {}}),
                **{f"d{i}": {"default": {}, "$ref": "#/$defs/big"} for i in range(100)},
            }
        },
        "too_large",
        "params",
        "30,000 values and parts",
    ),
    # Defaults
    (
        props(a={"type": "integer", "default": "2"}),
        "invalid_field",
        "params.properties.a.default",
        "the default '2' violates its own schema",
    ),
    (
        props(a={"type": "object", "required": ["b"], "default": {}}),
        "invalid_field",
        "params.properties.a.default",
        "violates its own schema",
    ),
    (
        {"$defs": {"n": {"minimum": 5}}, "properties": {"a": {"$ref": "#/$defs/n", "default": 1}}},
        "invalid_field",
        "params.properties.a.default",
        "violates its own schema",
    ),
    ({"const": {1: 2}}, "invalid_field", "params.const", "key 1 is not text"),
]


@pytest.mark.parametrize(("schema", "code", "path", "message"), REFUSED)
def test_a_dangerous_or_wrong_schema_is_refused(
    schema: Any, code: str, path: str, message: str
) -> None:
    with at_most(0.5):
        (problem,) = check_schema(schema)
    assert (problem.code, problem.path) == (code, path)
    assert message in problem.message


def test_every_problem_of_a_schema_is_reported_at_once() -> None:
    schema = {
        "type": "array",
        "properties": {"a": {"type": 5, "pattern": "("}, "b": {"$ref": "#/x"}},
        "$anchor": "y",
    }
    assert sorted(problem.path for problem in check_schema(schema)) == [
        "params.properties.a.pattern",
        "params.properties.a.type",
        'params.properties.b["$ref"]',
        "params.type",
        'params["$anchor"]',
    ]


def test_of_a_very_large_schema_only_the_first_violation_is_reported() -> None:
    schema = props(**{f"p{i}": 5 for i in range(5000)})
    with at_most(1):
        (problem,) = check_schema(schema)
        assert "is not of types" in problem.message
        assert check_schema(props(**{f"p{i}": {"type": "null"} for i in range(2000)})) == []


def test_a_refused_schema_also_refuses_params() -> None:
    assert violations({"type": "array"}, {})[0][0] == "params.type"


def test_a_default_may_rely_on_the_defaults_inside_its_value() -> None:
    inner = {"required": ["b"], "properties": {"b": {"default": 1}}, "default": {}}
    assert apply_params(props(a=inner), {}) == {"a": {"b": 1}}


# Defaults

WITH_DEFAULT = props(b={"default": 7})
TO_O = {"$ref": "#/$defs/o"}


@pytest.mark.parametrize(
    ("schema", "params", "result"),
    [
        (None, None, {}),
        (None, {"any": ["thing"]}, {"any": ["thing"]}),
        (CONTRACT, {"topic": "x"}, {"topic": "x", "depth": 2}),
        (CONTRACT, {"topic": "x", "depth": 3}, {"topic": "x", "depth": 3}),
        (props(a={"default": None}), {}, {"a": None}),
        (props(a={"default": 1}), {"a": None}, {"a": None}),
        # An object that is not there is not made up.
        (props(a=WITH_DEFAULT), {}, {}),
        (props(a=WITH_DEFAULT), {"a": {}}, {"a": {"b": 7}}),
        (props(a={**WITH_DEFAULT, "default": {}}), {}, {"a": {"b": 7}}),
        (props(a={"items": WITH_DEFAULT}), {"a": [{}, {"b": 2}]}, {"a": [{"b": 7}, {"b": 2}]}),
        (props(a={"items": {"items": WITH_DEFAULT}}), {"a": [[{}]]}, {"a": [[{"b": 7}]]}),
        ({"allOf": [WITH_DEFAULT]}, {}, {"b": 7}),
        ({"$defs": {"o": {"default": 7}}, **props(a=TO_O)}, {}, {"a": 7}),
        ({"$defs": {"o": {"default": 7}}, **props(a={**TO_O, "default": 8})}, {}, {"a": 8}),
        ({"$defs": {"o": WITH_DEFAULT}, **props(a=TO_O)}, {"a": {}}, {"a": {"b": 7}}),
        (props(a=True), {}, {}),
    ],
)
def test_defaults_are_applied_where_a_value_is_missing(
    schema: dict[str, Any] | None, params: Any, result: dict[str, Any]
) -> None:
    assert apply_params(schema, params) == result


def test_neither_the_params_given_nor_the_schema_is_changed() -> None:
    schema = props(a=props(b={"default": [1]}))
    before = copy.deepcopy(schema)
    params: dict[str, Any] = {"a": {}}
    found = apply_params(schema, params)
    assert params == {"a": {}}
    found["a"]["b"].append(2)
    assert schema == before
    assert apply_params(schema, params) == {"a": {"b": [1]}}


# Violations


@pytest.mark.parametrize(
    ("schema", "params", "expected"),
    [
        (None, [1], [("params", "params must be a JSON object, not a list")]),
        (None, "x", [("params", "params must be a JSON object, not 'x'")]),
        (
            None,
            {"a": float("nan"), "b": [b""]},
            [
                ("params.a", "nan is not a JSON number; numbers are finite"),
                (
                    "params.b[0]",
                    "a Python bytes is not a JSON value: give value.decode() of a text, "
                    "else base64.b64encode(value).decode()",
                ),
            ],
        ),
        (CONTRACT, {}, [("params.topic", "'topic' is required")]),
        (
            CONTRACT,
            {"topic": 1, "depth": "2"},
            [
                ("params.depth", "must be a whole number, not '2'"),
                ("params.topic", "must be text, not 1"),
            ],
        ),
        (
            {**CONTRACT, "additionalProperties": False},
            {"topic": "x", "dept": 1, "zzz": 2},
            [
                ("params.dept", "'dept' is not expected; did you mean 'depth'?"),
                ("params.zzz", "'zzz' is not expected"),
            ],
        ),
        (
            props(a={**props(b={}), "unevaluatedProperties": False}),
            {"a": {"c d": 1}},
            [('params.a["c d"]', "'c d' is not expected")],
        ),
        (
            props(a={"type": ["integer", "null"]}),
            {"a": "x"},
            [("params.a", "must be a whole number or null, not 'x'")],
        ),
        (
            props(a={"enum": ["x", 1, None]}),
            {"a": "y"},
            [("params.a", "must be one of 'x', 1, null; not 'y'")],
        ),
        (
            props(a={"items": {"minimum": 3}}),
            {"a": [3, 2]},
            [("params.a[1]", "2 is less than the minimum of 3")],
        ),
        (
            props(a={"pattern": "^b"}),
            {"a": "a" * 500},
            [("params.a", f"'{'a' * 59}…' violates 'pattern' of the params schema")],
        ),
    ],
)
def test_every_violation_has_a_plain_message(
    schema: dict[str, Any] | None, params: Any, expected: list[tuple[str, str]]
) -> None:
    assert sorted(violations(schema, params)) == expected


def test_params_have_a_size_limit() -> None:
    with pytest.raises(InvalidParams) as error:
        apply_params(None, {"a": "x" * 100}, max_bytes=50)
    (problem,) = error.value.problems
    assert (problem.code, problem.path) == ("too_large", "params")


def test_no_more_than_a_hundred_violations_are_listed() -> None:
    found = violations(props(a={"items": {"type": "string"}}), {"a": list(range(1000))})
    assert len(found) == 101
    assert found[-1] == ("params", "and 900 more problems")


def test_of_very_many_values_only_the_first_violation_is_reported() -> None:
    with at_most(1):
        found = violations(props(a={"items": {"type": "string"}}), {"a": [1] * 100_000})
        assert found == [("params.a[0]", "must be text, not 1")]


# Attacks on the check


def test_patterns_have_a_common_limit_of_size() -> None:
    dear = [f"\\p{{L}}{{50}}{at}" for at in range(200)]
    found = check_schema(props(**{f"p{at}": {"pattern": each} for at, each in enumerate(dear)}))
    assert [problem.code for problem in found] == ["invalid_field"] * 5 + ["too_large"]
    assert "more than 4,194,304 bytes" in found[-1].message
    same = props(**{f"p{at}": {"pattern": dear[0]} for at in range(200)})
    assert [problem.code for problem in check_schema(same)] == ["invalid_field"] * 200
    cheap = props(**{f"p{at}": {"pattern": f"^[a-z]+-[0-9]{{1,9}}{at}$"} for at in range(200)})
    assert check_schema(cheap) == []


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", "^(a*)*b$", "(x+x+)+y"])
def test_patterns_are_matched_in_linear_time(pattern: str) -> None:
    schema = props(a={"type": "string", "pattern": pattern})
    with at_most(1):
        assert violations(schema, {"a": "a" * 500_000 + "!"})
        assert violations(schema, {"a": "x" * 500_000 + "!"})


def test_an_expensive_pattern_is_not_matched_against_long_text() -> None:
    schema = props(a={"pattern": "(a[ab]{0,900}){2}[^ab]{2}"})
    assert check_schema(schema) == []
    chance = random.Random(1)
    text = "".join(chance.choice("ab") for _ in range(500_000))
    with at_most(2):
        ((path, message),) = violations(schema, {"a": text})
        assert (path, "too much for the patterns" in message) == ("params", True)
        assert violations(schema, {"a": text[:2_000]})[0][0] == "params.a"


def test_a_large_schema_is_not_checked_against_very_many_values() -> None:
    schema = props(a={"items": {"allOf": [{"minimum": i} for i in range(5000)]}})
    ((path, message),) = violations(schema, {"a": list(range(100_000))})
    assert (path, "too many values" in message) == ("params", True)
    # Much text in few values is no trouble.
    assert apply_params(schema, {"a": [], "b": "x" * 100_000})["b"]


KEYWORDS = ["$ref", "$defs", "a", "allOf", "anyOf", "default", "dependencies", "enum", "items"]
KEYWORDS += ["pattern", "patternProperties", "properties", "required", "type"]


@given(
    st.recursive(
        st.booleans() | st.integers(-5, 5) | st.sampled_from(["#", "a", "object", "("]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
        ),
        max_leaves=25,
    )
)
def test_any_schema_is_accepted_and_usable_or_refused(schema: Any) -> None:
    if check_schema(schema):
        assert violations(schema, {})
        return
    for params in ({}, {"a": 1}, {"a": [{}, {"a": None}]}):
        typed(schema, "a", "1")
        with contextlib.suppress(InvalidParams):
            assert set(apply_params(schema, params)) >= set(params)


# References to true and false, and a name of the whole


def test_a_reference_to_a_boolean_schema_behaves_like_the_boolean() -> None:
    schema: dict[str, Any] = {"$id": "https://example.com/s", "$defs": {"any": True, "none": False}}
    schema["properties"] = {name: {"$ref": f"#/$defs/{name}"} for name in ("any", "none")}
    assert apply_params(schema, {"any": 5}) == {"any": 5}
    assert [path for path, _ in violations(schema, {"any": 5, "none": 5})] == ["params.none"]
    assert typed(schema, "any", "5") == "5"


def test_a_default_is_found_beside_a_reference_to_a_boolean() -> None:
    schema = props(a={"$ref": "#/$defs/any", "default": 3}, b={"$ref": "#/$defs/any"})
    assert apply_params({**schema, "$defs": {"any": True}}, {}) == {"a": 3}


def test_booleans_add_nothing_to_the_size_of_a_schema() -> None:
    assert check_schema(props(**{f"{i:x}": True for i in range(11_000)})) == []


# Params that the schema does not name


def warnings(schema: dict[str, Any] | None, params: Any) -> list[tuple[str, str, str]]:
    return [(p.code, p.path, p.message) for p in check_params(schema, params)[1]]


def test_a_param_that_the_schema_does_not_name_gives_a_warning_with_a_suggestion() -> None:
    assert warnings(CONTRACT, {"topic": "x", "dept": 3, "zzz": 1, "a b": 2}) == [
        (
            "unknown_param",
            "params.dept",
            "'dept' is not in the params schema; did you mean 'depth'?",
        ),
        ("unknown_param", "params.zzz", "'zzz' is not in the params schema"),
        ("unknown_param", 'params["a b"]', "'a b' is not in the params schema"),
    ]


A = {"a": {"type": "integer"}}


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"type": "object"},
        {"required": ["a"]},
        {"properties": A, "additionalProperties": True},
        {"properties": A, "additionalProperties": {}},
        {"properties": A, "unevaluatedProperties": True},
        {"properties": A, "propertyNames": {"minLength": 1}},
        {"properties": A, "patternProperties": {"^b": {}}},
        {"properties": A, "required": ["a", "b"]},
        {"properties": A, "allOf": [{"patternProperties": {"b$": True}}]},
        {"properties": A, "allOf": [{"$ref": "#/$defs/more"}], "$defs": {"more": props(b={})}},
        {"properties": A, "$ref": "#/$defs/more", "$defs": {"more": {"anyOf": [props(b={})]}}},
        {"properties": A, "oneOf": [props(b={}), {"required": ["c"]}]},
        {"properties": A, "if": {}, "then": props(b={})},
        {"properties": A, "dependentSchemas": {"a": props(b={})}},
        {"properties": A, "dependentRequired": {"a": ["b"]}},
        {"properties": A, "dependentRequired": {"b": ["a"]}},
        {"properties": A, "$ref": "#/$defs/any", "$defs": {"any": {"additionalProperties": True}}},
    ],
)
def test_no_warning_is_given_where_the_schema_covers_a_param_or_is_silent(
    schema: dict[str, Any] | None,
) -> None:
    assert warnings(schema, {"a": 1, "b": 2}) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": A, "patternProperties": {"^c": {}}},
        {"properties": {**A, "nested": props(b={})}},
        {"properties": A, "$defs": {"unused": props(b={})}},
        {"properties": A, "items": props(b={})},
        {"properties": A, "$ref": "#/$defs/any", "$defs": {"any": True}},
    ],
)
def test_a_param_that_is_only_named_elsewhere_in_the_schema_is_unknown(
    schema: dict[str, Any],
) -> None:
    assert [path for _, path, _ in warnings(schema, {"a": 1, "b": 2})] == ["params.b"]


def test_a_param_that_the_schema_forbids_is_an_error_and_no_warning() -> None:
    assert violations({"properties": A, "additionalProperties": False}, {"b": 1})


def test_at_most_a_hundred_warnings_are_reported() -> None:
    with at_most(1):
        found = warnings({"properties": A}, {f"p{i}": i for i in range(20_000)})
    assert (len(found), found[-1][2]) == (
        101,
        "and 19,900 more params are not in the params schema",
    )
    _, of_items = check_items([{"properties": A}] * 300, [{"b": 1}] * 300)
    assert (len(of_items), of_items[2].path) == (101, "items[2].b")


@given(
    st.dictionaries(st.text("abc", max_size=3), st.integers(0, 9), max_size=5),
    st.sets(st.text("abc", max_size=3)),
)
def test_exactly_the_params_that_the_schema_does_not_name_give_warnings(
    params: dict[str, int], named: set[str]
) -> None:
    schema = props(**{name: {"type": "integer"} for name in named})
    given_params, found = check_params(schema, params)
    assert given_params == params
    assert {p.message.split("'")[1] for p in found} == params.keys() - named
    # What is warned of is what a strict schema refuses.
    strict = {**schema, "additionalProperties": False}
    if found:
        refused = violations(strict, params)
        assert {path for path, _ in refused} == {p.path for p in found}
    else:
        assert apply_params(strict, params) == params


# Text from a terminal

TYPED = props(
    s={"type": "string"},
    i={"type": "integer"},
    n={"type": "number"},
    b={"type": "boolean"},
    l={"type": "array"},
    o={"type": "object"},
    maybe={"type": ["integer", "null"]},
    text_or_null={"type": ["string", "null"]},
    either={"type": ["string", "integer"]},
    choice={"enum": ["a", 1, None, "2"]},
    fixed={"const": 5},
    one={"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "boolean"}]}]},
    ref={"$ref": "#/properties/i"},
    auto={"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]},
    free={},
    all=True,
)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("s", "5", "5"),
        ("s", "true", "true"),
        ("i", "5", 5),
        ("i", "-5", -5),
        ("i", "5.5", "5.5"),
        ("i", "true", "true"),
        ("i", "x", "x"),
        ("n", "5", 5),
        ("n", "5.5", 5.5),
        ("n", "1e3", 1000.0),
        ("n", "NaN", "NaN"),
        ("b", "true", True),
        ("b", "false", False),
        ("b", "1", "1"),
        ("b", "True", "True"),
        ("l", "[1, 2]", [1, 2]),
        ("l", "1,2", "1,2"),
        ("o", '{"a": 1}', {"a": 1}),
        ("o", "[]", "[]"),
        ("maybe", "null", None),
        ("maybe", "5", 5),
        ("text_or_null", "null", "null"),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("choice", "a", "a"),
        ("choice", "1", 1),
        ("choice", "null", None),
        ("choice", "2", "2"),
        ("choice", "9", "9"),
        ("fixed", "5", 5),
        ("one", "5", 5),
        ("one", "true", True),
        ("ref", "5", 5),
        ("auto", "auto", "auto"),
        ("auto", "5", 5),
        ("free", "5", "5"),
        ("all", "5", "5"),
        ("unknown", "5", "5"),
    ],
)
def test_text_params_are_typed_by_the_schema_or_stay_text(name: str, text: str, value: Any) -> None:
    found = typed(TYPED, name, text)
    assert (found, type(found)) == (value, type(value))


def test_without_a_usable_schema_text_stays_text() -> None:
    assert typed(None, "a", "5") == "5"
    assert typed({"type": "array"}, "a", "5") == "5"
