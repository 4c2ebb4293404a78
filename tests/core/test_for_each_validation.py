"""What a definition may say about `for_each`, and what its templates may read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow, definition_schema
from dovetail.core.definition.source import read_text
from dovetail.core.definition.validation import Checked, check
from dovetail.core.errors import MissingValue
from dovetail.core.items import MAX_ITEMS
from dovetail.core.templates import compile_list

FETCH = {"id": "fetch", "handler": "h"}


def checked(*nodes: dict[str, Any]) -> Checked:
    return check({"name": "w", "nodes": [FETCH, *nodes]})


def node(name: str = "each", **fields: Any) -> dict[str, Any]:
    return {"id": name, "handler": "h", "dependencies": ["fetch"], **fields}


def problems(*nodes: dict[str, Any]) -> list[tuple[str, str]]:
    return [(found.code, found.path) for found in checked(*nodes).errors]


@pytest.mark.parametrize(
    "for_each",
    [
        "{{ fetch.json.items }}",
        ["a", "b", {"c": "{{ fetch.x }}"}],
        [],
        {"items": "{{ fetch }}"},
        {"items": [1, 2], "max_concurrency": 1, "max_failures": 3},
        {"items": [1, 2], "max_failures": "5%"},
        {"items": [1, 2], "max_failures": "12.5%", "max_concurrency": None},
        None,
    ],
)
def test_a_list_is_a_template_or_literal_with_or_without_settings(for_each: Any) -> None:
    assert problems(node(for_each=for_each)) == []


@pytest.mark.parametrize(
    ("for_each", "path"),
    [
        (3, "for_each"),
        (True, "for_each"),
        ({}, "for_each.items"),
        ({"items": 3}, "for_each.items"),
        ({"items": {"a": 1}}, "for_each.items"),
        ({"items": [], "max_concurrency": 0}, "for_each.max_concurrency"),
        ({"items": [], "max_concurrency": "5"}, "for_each.max_concurrency"),
        ({"items": [], "max_failures": -1}, "for_each.max_failures"),
        ({"items": [], "max_failures": True}, "for_each.max_failures"),
        ({"items": [], "max_failures": 1.5}, "for_each.max_failures"),
        ({"items": [], "max_failures": "101%"}, "for_each.max_failures"),
        ({"items": [], "max_failures": "five"}, "for_each.max_failures"),
        ({"items": [], "window": 5}, "for_each.window"),
    ],
)
def test_a_wrong_field_is_found(for_each: Any, path: str) -> None:
    assert problems(node(for_each=for_each)) == [("invalid_field", f"nodes[1].{path}")]


@pytest.mark.parametrize(
    ("form", "path"),
    [
        (lambda items: items, "nodes[1].for_each"),
        (lambda items: {"items": items}, "nodes[1].for_each.items"),
    ],
)
def test_a_list_that_is_too_long_is_too_large_where_it_is_written(form: Any, path: str) -> None:
    assert problems(node(for_each=form([0] * MAX_ITEMS))) == []
    assert problems(node(for_each=form([0] * (MAX_ITEMS + 1)))) == [("too_large", path)]
    data = {"name": "w", "nodes": [FETCH, node(for_each=form([0] * (MAX_ITEMS + 1)))]}
    text = json.dumps(data, indent=1)
    (found,) = check(read_text(text, format="json", max_bytes=len(text))).errors
    key = f'"{path.rpartition(".")[2]}": ['
    assert found.line == text[: text.index(key)].count("\n") + 1


def test_a_list_of_texts_with_braces_has_no_templates() -> None:
    texts = [f'{{"number": {number}}}' for number in range(30_000)]
    assert problems(node(for_each=texts)) == []


@pytest.mark.parametrize(
    ("name", "form"),
    [("items", "{items: …}"), ("max_failures", "{items: …, max_failures: …}")],
)
def test_a_field_of_for_each_beside_it_is_said_to_belong_into_it(name: str, form: str) -> None:
    (found,) = checked(node(for_each="{{ fetch.list }}", **{name: 3})).errors
    assert found.path == f"nodes[1].{name}"
    assert found.message.startswith(f"unknown field '{name}'; it belongs into for_each")
    assert found.message.endswith(f", as in for_each: {form}")


def test_an_unknown_field_gets_a_hint() -> None:
    (found,) = checked(node(for_each={"items": [], "max_failure": 1})).errors
    assert "did you mean 'max_failures'" in found.message


@pytest.mark.parametrize("text", ["abc", "{{ fetch.x }}{{ fetch.y }}", "x {{ fetch }}", ""])
def test_a_template_is_one_expression(text: str) -> None:
    assert problems(node(for_each=text)) == [("template_syntax", "nodes[1].for_each")]


@pytest.mark.parametrize("spaces", [" {}", "{} ", "\n{}\n\n"])
def test_a_template_with_spaces_around_it_gives_the_list(spaces: str) -> None:
    text = spaces.format("{{ fetch.list }}")
    assert problems(node(for_each=text)) == []
    make = compile_list(text)
    assert make({"fetch": {"list": [1, 2]}}) == [1, 2]


def test_an_error_in_a_literal_list_names_its_place() -> None:
    make = compile_list([1, {"a": "{{ fetch.x }}"}])
    with pytest.raises(MissingValue, match=r"^items\[1\]\.a: {{ fetch\.x }} has no 'x'"):
        make({"fetch": {}})


def test_it_reads_only_ancestors_and_no_secrets() -> None:
    found = problems(node(for_each="{{ fetcj.x }}"))
    assert found == [("template_unknown_node", "nodes[1].for_each")]
    found = problems(node(for_each={"items": "{{ secrets.LIST }}"}))
    assert found == [("template_forbidden", "nodes[1].for_each.items")]
    found = problems(node(for_each=["{{ secrets.LIST }}"]))
    assert found == [("template_forbidden", "nodes[1].for_each[0]")]


class TestItemAndIndex:
    def test_exist_in_the_config_of_the_node(self) -> None:
        config = {"x": "{{ item.text }} {{ index + 1 }}", "y": "{{ item | upper }}"}
        assert problems(node(for_each=[1], config=config)) == []

    @pytest.mark.parametrize(
        "fields",
        [
            {"config": {"x": "{{ item.text }}"}},
            {"condition": "{{ index > 1 }}", "for_each": [1]},
            {"for_each": "{{ item }}"},
        ],
    )
    def test_do_not_exist_elsewhere(self, fields: dict[str, Any]) -> None:
        (found,) = checked(node(**fields)).errors
        assert found.code == "template_unknown_node"
        assert "only in the config of a node with for_each" in found.message

    def test_are_suggested_there(self) -> None:
        (found,) = checked(node(for_each=[1], config={"x": "{{ itm.text }}"})).errors
        assert found.message == "there is no node 'itm' to read; did you mean 'item'?"

    def test_hide_nodes_of_these_names_there_and_only_there(self) -> None:
        item = {"id": "item", "handler": "h", "dependencies": []}
        each = node(dependencies=["fetch", "item"], config={"x": "{{ item.y }}"}, for_each=[1])
        other = node("other", dependencies=["item"], config={"x": "{{ item.y }}"})
        assert problems(item, each, other) == []


class TestTheOutputOfAMappedNode:
    @pytest.mark.parametrize(
        "text",
        [
            "{{ each }}",
            "{{ each | length }}",
            "{{ each[0].text }}",
            "{{ each.status }}",
            "{{ each.error.message | default('') }}",
            "{{ each.error.where | default('') }}",
            "{{ each.output }}",
            "{{ each | map(attribute='text') }}",
        ],
    )
    def test_may_be_read_as_a_list(self, text: str) -> None:
        reader = node("z", dependencies=["each"], config={"x": text})
        assert problems(node(for_each=[1]), reader) == []

    @pytest.mark.parametrize(
        ("text", "key"),
        [
            ("{{ each.text }}", "text"),
            ("{{ each.a.b | default('') }}", "a.b"),
            ("{{ each['text'] ~ 'x' }}", "text"),
            ("{{ each.output.text }}", "text"),
            ("{{ each.output.status }}", "status"),
            ("a {{ each.text }} b", "text"),
        ],
    )
    def test_has_no_keys(self, text: str, key: str) -> None:
        reader = node("z", dependencies=["each"], config={"x": text})
        (found,) = checked(node(for_each=[1]), reader).errors
        assert found.code == "template_unknown_key"
        assert f"{{{{ each | map(attribute='{key}') }}}}" in found.message


def test_both_forms_are_the_same_definition() -> None:
    short, long = (
        Workflow.model_validate({"name": "w", "nodes": [{"id": "m", "handler": "h", **more}]})
        for more in ({"for_each": [1]}, {"for_each": {"items": [1]}})
    )
    assert short == long
    spec = build_graph(short, {}).nodes[0].for_each
    assert spec is not None
    assert (spec.window, spec.max_failures) == (100, 0)


def test_the_schema_for_editors_has_all_forms() -> None:
    field = definition_schema()["$defs"]["Node"]["properties"]["for_each"]
    kinds = {choice.get("type") or "ref" for choice in field["anyOf"]}
    assert kinds == {"string", "array", "ref", "null"}
