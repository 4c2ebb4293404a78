"""The fields of a definition: what each accepts, its bounds, and the schema for editors."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from pydantic import ValidationError

from dovetail.core.definition.model import (
    MAX_RETRIES,
    MAX_SECONDS,
    RESERVED_IDS,
    Workflow,
    definition_schema,
)
from dovetail.core.definition.validation import check
from dovetail.core.templates import ROOTS

CONTRACT = {
    "name": "summarise",
    "description": "optional text",
    "on_failure": "fail_fast",
    "max_concurrency": None,
    "params": {
        "type": "object",
        "required": ["topic"],
        "properties": {"topic": {"type": "string"}, "depth": {"type": "integer", "default": 2}},
    },
    "defaults": {"timeout_seconds": 60},
    "nodes": [
        {"id": "start", "handler": "input"},
        {
            "id": "fetch",
            "handler": "call_external_service",
            "dependencies": ["start"],
            "config": {"url": "https://api.example.com/{{ params.topic }}", "method": "GET"},
            "timeout_seconds": 30,
            "max_retries": 3,
            "retry": {"base_delay_seconds": 10, "max_delay_seconds": 300, "jitter": 0.5},
            "cache": {"ttl_seconds": 86400},
            "condition": "{{ params.topic != '' }}",
            "resource_tag": "search_api",
            "delivery": "at_least_once",
        },
        {
            "id": "summary",
            "handler": "llm_service",
            "depends_on": ["fetch"],
            "config": {"prompt": "Summarise: {{ fetch.body | default('') }}"},
        },
        {"id": "end", "handler": "output", "dependencies": ["summary"]},
    ],
}

EDITOR = jsonschema_rs.Draft202012Validator(definition_schema())


def with_field(path: str, value: Any) -> dict[str, Any]:
    """A small definition with one field set; `path` is below the workflow or below `node`."""
    node: dict[str, Any] = {"id": "a", "handler": "sleep"}
    flow: dict[str, Any] = {"name": "w", "nodes": [node]}
    *steps, last = path.split(".")
    here: dict[str, Any] = flow
    for step in steps:
        here = node if step == "node" else here.setdefault(step, {})
    here[last] = value
    return flow


def both_accept(definition: dict[str, Any]) -> bool:
    """What the model and the editor's schema say; they must not contradict each other."""
    try:
        Workflow.model_validate(definition)
        accepted = True
    except ValidationError:
        accepted = False
    assert EDITOR.is_valid(definition) is accepted
    return accepted


def test_the_example_of_the_contract_is_a_workflow() -> None:
    assert both_accept(CONTRACT)
    flow = Workflow.model_validate(CONTRACT)
    assert flow.nodes[2].dependencies == ["fetch"]
    assert flow.nodes[1].timeout_seconds == 30.0
    assert check(CONTRACT).errors == ()


OPTIONAL = [
    "description",
    "on_failure",
    "max_concurrency",
    "params",
    "defaults",
    "defaults.timeout_seconds",
    "defaults.max_retries",
    "defaults.retry",
    "defaults.resource_tag",
    "node.dependencies",
    "node.depends_on",
    "node.config",
    "node.timeout_seconds",
    "node.max_retries",
    "node.retry",
    "node.retry.base_delay_seconds",
    "node.retry.max_delay_seconds",
    "node.retry.jitter",
    "node.cache",
    "node.condition",
    "node.resource_tag",
    "node.delivery",
    "node.allow_failure",
]


@pytest.mark.parametrize("path", OPTIONAL)
def test_null_means_not_given(path: str) -> None:
    definition = with_field(path, None)
    assert both_accept(definition)
    flow = Workflow.model_validate(definition)
    assert (flow.on_failure, flow.nodes[0].delivery) == ("fail_fast", "at_least_once")
    assert flow.nodes[0].allow_failure is False
    assert (flow.nodes[0].dependencies, flow.nodes[0].config) == ([], {})


@pytest.mark.parametrize("path", ["name", "nodes", "node.id", "node.handler"])
def test_a_required_field_may_not_be_null(path: str) -> None:
    assert not both_accept(with_field(path, None))


ACCEPTED = [
    ("name", "0a.b-C_d"),
    ("name", "a" * 128),
    ("on_failure", "continue"),
    ("max_concurrency", 1),
    ("params", {}),
    ("defaults", {}),
    ("node.id", "_x9"),
    ("node.id", "Params"),
    ("node.timeout_seconds", 0.001),
    ("node.timeout_seconds", 30),
    ("node.timeout_seconds", MAX_SECONDS),
    ("node.max_retries", 0),
    ("node.max_retries", MAX_RETRIES),
    ("node.retry", {}),
    ("node.retry", {"base_delay_seconds": 0, "max_delay_seconds": 0, "jitter": 0}),
    ("node.retry", {"jitter": 2}),
    ("node.condition", True),
    ("node.condition", "{{ true }}"),
    ("node.delivery", "at_most_once"),
    ("node.allow_failure", True),
    ("node.allow_failure", False),
    ("node.config", {"anything": [{"at": {"all": None}}]}),
]


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_a_field_accepts_the_values_that_the_contract_allows(path: str, value: Any) -> None:
    assert both_accept(with_field(path, value))


REFUSED = [
    ("name", "", "is not a valid name"),
    ("name", "-a", "is not a valid name"),
    ("name", "a" * 129, "is not a valid name"),
    ("name", "a\n", "is not a valid name"),
    ("name", 5, "must be text, not 5"),
    ("description", 5, "must be text, not 5"),
    ("on_failure", "stop", "must be 'fail_fast' or 'continue', not 'stop'"),
    ("max_concurrency", 0, "must be at least 1, not 0"),
    ("max_concurrency", "4", "must be a whole number, not '4'"),
    ("max_concurrency", True, "must be a whole number, not true"),
    ("params", [], "must be a mapping, not a list"),
    ("params", True, "must be a mapping, not true"),
    ("defaults", 5, "must be a mapping, not 5"),
    ("defaults", {"cache": {}}, "unknown field 'cache'; known are: timeout_seconds,"),
    ("defaults", {"timeout_second": 1}, "did you mean 'timeout_seconds'?"),
    ("nodes", {}, "must be a list, not a mapping"),
    ("nodes", [5], "must be a mapping, not 5"),
    ("node.id", "1a", "'1a' is not a valid id"),
    ("node.id", "a-b", "letters, digits and underscores"),
    ("node.id", "é", "is not a valid id"),
    ("node.id", "secrets", "is reserved in templates and cannot be a node's id"),
    ("node.handler", "", "must not be empty"),
    ("node.handler", "h" * 201, "must have at most 200 characters"),
    ("node.dependencies", "start", "must be a list, not 'start'"),
    ("node.dependencies", [1], "must be text, not 1"),
    ("node.depends_on", [None], "must be text, not null"),
    ("node.config", "x", "must be a mapping, not 'x'"),
    ("node.timeout_seconds", 0, "must be more than 0, not 0"),
    ("node.timeout_seconds", -1, "must be more than 0, not -1"),
    ("node.timeout_seconds", MAX_SECONDS + 1, "must be at most ten years"),
    ("node.timeout_seconds", "30", "must be a number, not '30'"),
    ("node.timeout_seconds", True, "must be a number, not true"),
    ("node.max_retries", -1, "must be at least 0, not -1"),
    ("node.max_retries", MAX_RETRIES + 1, "must be at most 1000"),
    ("node.max_retries", 1.5, "must be a whole number, not 1.5"),
    ("node.max_retries", True, "must be a whole number, not true"),
    ("node.retry", {"base_delay_seconds": -1}, "must be at least 0, not -1"),
    ("node.retry", {"jitter": 11}, "must be at most 10, not 11"),
    ("node.retry", {"delay": 1}, "unknown field 'delay'"),
    ("node.retry", 3, "must be a mapping, not 3"),
    ("node.cache", {}, "'ttl_seconds' is required"),
    ("node.cache", {"ttl_seconds": 0}, "must be more than 0, not 0"),
    ("node.cache", True, "must be a mapping, not true"),
    ("node.condition", 1, "must be a template such as"),
    ("node.resource_tag", "", "must not be empty"),
    ("node.delivery", "exactly_once", "must be 'at_least_once' or 'at_most_once'"),
    ("node.delivry", "at_most_once", "unknown field 'delivry'; did you mean 'delivery'?"),
    ("node.allow_failure", "yes", "must be true or false, not 'yes'"),
    ("node.allow_failure", 1, "must be true or false, not 1"),
    ("node.allow_failures", True, "unknown field 'allow_failures'; did you mean 'allow_failure'?"),
    ("node.depend_on", [], "unknown field 'depend_on'; did you mean 'depends_on'?"),
    ("nmae", "x", "unknown field 'nmae'; did you mean 'name'?"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_a_field_refuses_values_with_a_plain_message(path: str, value: Any, message: str) -> None:
    definition = with_field(path, value)
    assert not both_accept(definition)
    (problem,) = check(definition).errors
    assert problem.code == "invalid_field"
    assert message in problem.message
    assert "Input" not in problem.message


def test_whole_floats_are_not_whole_numbers() -> None:
    # Only here the editor is more lenient: to JSON Schema 3.0 is an integer.
    (problem,) = check(with_field("node.max_retries", 3.0)).errors
    assert problem.message == "must be a whole number, not 3.0"


def test_numbers_that_are_not_finite_are_refused() -> None:
    (problem, _) = check(with_field("node.timeout_seconds", float("inf"))).errors
    assert "finite" in problem.message


@pytest.mark.parametrize("name", sorted(RESERVED_IDS))
def test_a_word_of_the_template_language_is_not_a_valid_id(name: str) -> None:
    assert not both_accept(with_field("node.id", name))


def test_every_root_of_a_template_is_reserved() -> None:
    assert ROOTS < RESERVED_IDS


def test_dependencies_may_use_either_name_but_not_both() -> None:
    node = {"id": "b", "handler": "sleep"}
    first = {"id": "a", "handler": "sleep"}
    for name in ("dependencies", "depends_on"):
        flow = Workflow.model_validate({"name": "w", "nodes": [first, {**node, name: ["a"]}]})
        assert flow.nodes[1].dependencies == ["a"]
    both = {"name": "w", "nodes": [first, {**node, "dependencies": ["a"], "depends_on": ["a"]}]}
    assert not both_accept(both)
    (problem,) = check(both).errors
    assert problem.path == "nodes[1].depends_on"
    assert problem.message == (
        "'depends_on' is another name for 'dependencies'; give only one of the two"
    )
    null = {"name": "w", "nodes": [first, {**node, "dependencies": ["a"], "depends_on": None}]}
    assert not check(null).errors, "null means that it is not given: generated clients send it"


def test_a_workflow_is_immutable_after_it_was_read() -> None:
    flow = Workflow.model_validate(CONTRACT)
    with pytest.raises(ValidationError):
        flow.name = "other"  # type: ignore[misc]


def test_the_schema_for_editors_describes_every_field() -> None:
    schema = definition_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    for part in (schema, *schema["$defs"].values()):
        assert part["description"]
        assert part["additionalProperties"] is False
        for name, field in part["properties"].items():
            assert field["description"], name
            assert "title" not in field
            assert field.get("default", 0) is not None
    node = schema["$defs"]["Node"]["properties"]
    assert node["depends_on"]["items"] == node["dependencies"]["items"] == {"type": "string"}
    assert schema["properties"]["nodes"]["minItems"] == 1
