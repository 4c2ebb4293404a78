"""What one definition has that another has not."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.definition.diff import diff_definitions
from dovetail.core.definition.model import Workflow


def flow(*nodes: dict[str, Any], **more: Any) -> Workflow:
    return Workflow.model_validate({"name": "w", "nodes": list(nodes), **more})


def node(name: str = "a", **more: Any) -> dict[str, Any]:
    return {"id": name, "handler": "output", **more}


NOTHING = {"added": [], "removed": [], "changed": [], "workflow": {}}


def test_nodes_are_known_by_their_ids() -> None:
    found = diff_definitions(flow(node("a"), node("b")), flow(node("c"), node("b"), node("d")))
    assert found == {**NOTHING, "added": ["c", "d"], "removed": ["a"]}


def test_each_field_that_changed_has_its_two_values() -> None:
    old = flow(node(config={"x": 1}, max_retries=2, delivery="at_most_once"), on_failure="continue")
    new = flow(node(handler="input", config={"x": 1.0}), description="new")
    found = diff_definitions(old, new)
    assert found["changed"] == [
        {
            "id": "a",
            "fields": {
                "handler": {"from": "output", "to": "input"},
                "config": {"from": {"x": 1}, "to": {"x": 1.0}},
                "max_retries": {"from": 2, "to": None},
                "delivery": {"from": "at_most_once", "to": "at_least_once"},
            },
        }
    ]
    assert found["workflow"] == {
        "description": {"from": None, "to": "new"},
        "on_failure": {"from": "continue", "to": "fail_fast"},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"max_retries": None},
        {"config": None},
        {"config": {}},
        {"delivery": "at_least_once"},
        {"allow_failure": False},
        {"retry": {}},
        {"retry": {"jitter": None}},
        {"dependencies": []},
    ],
)
def test_a_field_that_says_nothing_equals_an_absent_one(fields: dict[str, Any]) -> None:
    assert diff_definitions(flow(node()), flow(node(**fields))) == NOTHING


def test_defaults_without_a_value_equal_none() -> None:
    assert diff_definitions(flow(node()), flow(node(), defaults={"retry": {}})) == NOTHING


def test_the_order_of_dependencies_and_keys_and_the_other_name_make_no_difference() -> None:
    first = [node("a"), node("b")]
    old = flow(*first, node("c", dependencies=["a", "b"], config={"x": 1, "y": None}))
    new = flow(*first, node("c", depends_on=["b", "a"], config={"y": None, "x": 1}))
    assert diff_definitions(old, new) == NOTHING
    other = diff_definitions(old, flow(*first, node("c", depends_on=["b"], config={"x": 1})))
    assert other["changed"][0]["fields"] == {
        "dependencies": {"from": ["a", "b"], "to": ["b"]},
        "config": {"from": {"x": 1, "y": None}, "to": {"x": 1}},
    }
