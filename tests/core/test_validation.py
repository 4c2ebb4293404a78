"""Every rule of the contract, every problem at once, each where it stands in the text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import dag
from dovetail.core.definition.model import Node
from dovetail.core.definition.source import line_of, read_text
from dovetail.core.definition.validation import Checked, DefinitionLimits, check
from dovetail.core.errors import Problem, Suggester, format_path, shown

from .pace import at_most

# Measuring coverage makes everything some times slower.

HANDLERS = {"input", "output", "sleep", "llm_service", "llm_generate"}


def check_yaml(text: str, **arguments: Any) -> Checked:
    return check(read_text(text, format="yaml"), HANDLERS, **arguments)


def nodes(text: str) -> str:
    return f"name: w\nnodes:\n{text}"


def marked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its marks ⟦, and where they were: what a test expects a problem at."""
    places = []
    for line, content in enumerate(text.split("\n"), 1):
        column = content.find("⟦")
        if column >= 0:
            places.append((line, column + 1))
    return text.replace("⟦", ""), places


def codes(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.code for problem in problems]


# One problem, and where it is

ONE: dict[str, tuple[str, str, str, str]] = {
    "no nodes": ("⟦name: w\n", "empty_graph", "nodes", "at least one node"),
    "nodes are null": ("name: w\nnodes: ⟦~", "empty_graph", "nodes", "at least one node"),
    "an empty list": ("name: w\nnodes: ⟦[]", "empty_graph", "nodes", "at least one node"),
    "an id twice": (
        nodes("- {id: a, handler: sleep}\n- {id: ⟦a, handler: sleep}"),
        "duplicate_id",
        "nodes[1].id",
        "'a' is already the id of nodes[0]",
    ),
    "a dependency that is not there": (
        nodes("- {id: fetch, handler: sleep}\n- {id: b, handler: sleep, dependencies: [⟦fetsch]}"),
        "missing_dependency",
        "nodes[1].dependencies[0]",
        "there is no node 'fetsch'; did you mean 'fetch'?",
    ),
    "by the other name": (
        nodes("- {id: a, handler: sleep, depends_on: [⟦zzz]}"),
        "missing_dependency",
        "nodes[0].depends_on[0]",
        "there is no node 'zzz'",
    ),
    "itself": (
        nodes("- id: a\n  handler: sleep\n  dependencies:\n  - ⟦a"),
        "self_dependency",
        "nodes[0].dependencies[0]",
        "'a' depends on itself",
    ),
    "the same twice": (
        nodes("- {id: a, handler: sleep}\n- {id: b, handler: sleep, dependencies: [a, ⟦a]}"),
        "invalid_field",
        "nodes[1].dependencies[1]",
        "'a' is listed twice",
    ),
    "a cycle": (
        nodes(
            "- {id: a, handler: sleep, dependencies: [⟦b]}\n"
            "- {id: b, handler: sleep, dependencies: [a]}"
        ),
        "cycle",
        "nodes[0].dependencies[0]",
        "2 nodes wait for each other: a needs b, b needs a",
    ),
    "an unknown handler": (
        nodes("- {id: a, handler: ⟦slep}"),
        "unknown_handler",
        "nodes[0].handler",
        "there is no handler 'slep'; did you mean 'sleep'?",
    ),
    "an unknown handler like no other": (
        nodes("- {id: a, handler: ⟦xyz}"),
        "unknown_handler",
        "nodes[0].handler",
        "`dovetail handlers` lists the known handlers",
    ),
    "a broken template": (
        nodes('- {id: a, handler: sleep, config: {x: {y z: [1, ⟦"{{ a. }}"]}}}'),
        "template_syntax",
        'nodes[0].config.x["y z"][1]',
        "",
    ),
    "a statement": (
        nodes('- {id: a, handler: sleep, config: {x: ⟦"{% for a in b %}{% endfor %}"}}'),
        "template_forbidden",
        "nodes[0].config.x",
        "",
    ),
    "a multiplication": (
        nodes("- {id: a, handler: sleep, config: {x: ⟦\"{{ 'a' * 10**9 }}\"}}"),
        "template_forbidden",
        "nodes[0].config.x",
        "",
    ),
    "a secret in a condition": (
        nodes('- {id: a, handler: sleep, condition: ⟦"{{ secrets.KEY }}"}'),
        "template_forbidden",
        "nodes[0].condition",
        "secrets",
    ),
    "a condition that is no expression": (
        nodes("- {id: a, handler: sleep, condition: ⟦yes please}"),
        "template_syntax",
        "nodes[0].condition",
        "",
    ),
    "a template that is too large": (
        nodes(f'- {{id: a, handler: sleep, config: {{x: ⟦"{{{{ params.x }}}}{"a" * 16384}"}}}}'),
        "too_large",
        "nodes[0].config.x",
        "",
    ),
    "a node that is not there": (
        nodes(
            "- {id: fetch, handler: sleep}\n"
            '- {id: b, handler: sleep, dependencies: [fetch], config: {x: ⟦"{{ fech.body }}"}}'
        ),
        "template_unknown_node",
        "nodes[1].config.x",
        "there is no node 'fech' to read; did you mean 'fetch'?",
    ),
    "a root that is not there": (
        nodes('- {id: a, handler: sleep, config: {x: ⟦"{{ param.x }}"}}'),
        "template_unknown_node",
        "nodes[0].config.x",
        "did you mean 'params'?",
    ),
    "a node that is not upstream": (
        nodes(
            "- {id: a, handler: sleep}\n"
            "- id: b\n  handler: sleep\n  config:\n    x: ⟦Text {{ a.x }}"
        ),
        "template_not_upstream",
        "nodes[1].config.x",
        "'a' need not be done before 'b' starts; add it to the dependencies",
    ),
    "its own output": (
        nodes('- {id: a, handler: sleep, config: {x: ⟦"{{ a.x }}"}}'),
        "template_not_upstream",
        "nodes[0].config.x",
        "'a' cannot read its own output",
    ),
    "a condition that reads sideways": (
        nodes("- {id: a, handler: sleep}\n- {id: b, handler: sleep, condition: ⟦'{{ a.x }}'}"),
        "template_not_upstream",
        "nodes[1].condition",
        "'a' need not be done before 'b'",
    ),
    "an unknown field": (
        nodes("- {id: a, handler: sleep, ⟦timeout: 5}"),
        "invalid_field",
        "nodes[0].timeout",
        "unknown field 'timeout'; did you mean 'timeout_seconds'?",
    ),
    "an unknown field at the top": (
        nodes("- {id: a, handler: sleep}\n⟦on_fail: x"),
        "invalid_field",
        "on_fail",
        "did you mean 'on_failure'?",
    ),
    "a field that is missing": (
        nodes("- ⟦id: a"),
        "invalid_field",
        "nodes[0].handler",
        "'handler' is required",
    ),
    "no name": (
        "⟦nodes: [{id: a, handler: sleep}]",
        "invalid_field",
        "name",
        "'name' is required",
    ),
    "retries of a node that must not start twice": (
        nodes("- {id: a, handler: sleep, delivery: at_most_once, max_retries: ⟦1}"),
        "invalid_field",
        "nodes[0].max_retries",
        "never retried by itself",
    ),
    "a bad params schema": (
        "name: w\nparams:\n  properties:\n    a: {$ref: ⟦'http://x/y'}\n"
        "nodes: [{id: a, handler: sleep}]",
        "invalid_field",
        'params.properties.a["$ref"]',
        "is remote",
    ),
    "a keyword that is not allowed": (
        "name: w\nparams:\n  ⟦$anchor: x\nnodes: [{id: a, handler: sleep}]",
        "invalid_field",
        'params["$anchor"]',
        "not supported",
    ),
    "a list": ("⟦- a", "invalid_field", "", "a definition is a mapping with 'name' and 'nodes'"),
    "nothing": ("⟦", "invalid_field", "", "a definition is a mapping with 'name' and 'nodes'"),
}


@pytest.mark.parametrize("name", ONE)
def test_each_problem_has_its_code_path_line_and_column(name: str) -> None:
    text, code, path, message = ONE[name]
    text, (place,) = marked(text)
    checked = check_yaml(text)
    (problem,) = checked.errors
    assert (problem.code, problem.path) == (code, path)
    assert message in problem.message
    assert (problem.line, problem.column) == place
    assert not checked.valid
    assert checked.workflow is None


@pytest.mark.parametrize("name", [name for name in ONE if name != "nothing"])
def test_json_and_plain_data_give_the_same_problem(name: str) -> None:
    text, code, path, message = ONE[name]
    data = read_text(text.replace("⟦", ""), format="yaml").data
    source = read_text(json.dumps(data, indent=1), format="json")
    for definition in (source, data):
        (problem,) = check(definition, HANDLERS).errors
        assert (problem.code, problem.path) == (code, path)
        assert message in problem.message
        assert (problem.line is None) is (definition is data)


# More than one

MESSY = """\
name: ⟦bad name
nodes:
  - id: a
    handler: sleep
    timeout_seconds: ⟦-1
    dependencies: [⟦nobody]
    config:
      x: ⟦"{{ oops }"
  - ⟦just text
  - id: c
    handler: ⟦nothing_like_it
    max_retries: ⟦"3"
    dependencies: ⟦a
    config: ⟦[]
  - id: d
    handler: sleep
    dependencies: [⟦d]
    condition: ⟦5
"""


def test_a_broken_part_does_not_hide_the_problems_of_other_parts() -> None:
    text, places = marked(MESSY)
    checked = check_yaml(text)
    assert [(problem.line, problem.column) for problem in checked.errors] == places
    assert codes(checked.errors) == [
        "invalid_field",
        "invalid_field",
        "missing_dependency",
        "template_syntax",
        "invalid_field",
        "unknown_handler",
        "invalid_field",
        "invalid_field",
        "invalid_field",
        "self_dependency",
        "invalid_field",
    ]
    assert checked.layers == []


def test_an_empty_mapping_lacks_both_a_name_and_nodes() -> None:
    assert codes(check_yaml("{}").errors) == ["invalid_field", "empty_graph"]


def test_each_cycle_is_one_problem_and_the_nodes_behind_it_are_another() -> None:
    edges = {
        "a": ["c"], "b": ["a"], "c": ["b"],  # one cycle
        "x": ["y"], "y": ["x", "free"],  # another
        "free": [], "behind": ["b", "free"], "further": ["behind"],
    }  # fmt: skip
    flow = {
        "name": "w",
        "nodes": [
            {"id": name, "handler": "sleep", "dependencies": above} for name, above in edges.items()
        ],
    }
    checked = check(flow)
    waiting = "nodes wait for each other"
    assert [(p.code, p.path, p.message) for p in checked.errors] == [
        ("cycle", "nodes[0].dependencies[0]", f"3 {waiting}: a needs c, c needs b, b needs a"),
        ("cycle", "nodes[3].dependencies[0]", f"2 {waiting}: x needs y, y needs x"),
        ("unreachable", "nodes[6]", "'behind' can never start: it comes after a cycle"),
        ("unreachable", "nodes[7]", "'further' can never start: it comes after a cycle"),
    ]
    assert checked.layers == []


def test_a_long_cycle_is_abbreviated() -> None:
    flow = {
        "name": "w",
        "nodes": [
            {"id": f"n{i}", "handler": "sleep", "dependencies": [f"n{(i - 1) % 50}"]}
            for i in range(50)
        ],
    }
    (problem,) = check(flow).errors
    assert problem.message == (
        "50 nodes wait for each other: "
        "n0 needs n49, n49 needs n48, n48 needs n47, n47 needs n46, n46 needs n45, n45 needs n44, "
        "n44 needs n43, n43 needs n42, n42 needs n41, n41 needs n40, n40 needs n39, …, n1 needs n0"
    )


def test_on_a_cycle_templates_are_still_checked() -> None:
    flow = {
        "name": "w",
        "nodes": [
            {"id": "a", "handler": "sleep", "dependencies": ["b"], "config": {"x": "{{ b.x }}"}},
            {"id": "b", "handler": "sleep", "dependencies": ["a"], "config": {"x": "{{ c.x }}"}},
            {"id": "c", "handler": "sleep"},
            {"id": "d", "handler": "sleep", "dependencies": ["b"], "config": {"x": "{{ a.x }}"}},
        ],
    }
    assert codes(check(flow).errors) == ["cycle", "template_not_upstream", "unreachable"]


def test_a_repeated_id_means_its_first_node() -> None:
    text = nodes(
        "- {id: a, handler: sleep, dependencies: [b]}\n"
        "- {id: b, handler: sleep}\n"
        "- {id: b, handler: sleep, dependencies: [a]}\n"
    )
    assert codes(check_yaml(text).errors) == ["duplicate_id"]


# What is fine


def test_a_valid_definition_gives_its_workflow_and_its_layers() -> None:
    checked = check_yaml(
        nodes(
            "- {id: end, handler: output, dependencies: [b, c]}\n"
            "- {id: b, handler: sleep, depends_on: [a]}\n"
            "- {id: a, handler: input}\n"
            "- {id: c, handler: llm_generate, dependencies: [a], "
            'config: {p: "{{ a.x }} {{ params.y }} {{ run.id }}", n: 5}}\n'
        )
    )
    assert (checked.errors, checked.warnings) == ((), ())
    assert checked.valid
    assert checked.layers == [["a"], ["b", "c"], ["end"]]
    assert checked.workflow is not None
    assert [node.id for node in checked.workflow.nodes] == ["end", "b", "a", "c"]


def test_a_template_may_read_any_ancestor_not_just_parents() -> None:
    checked = check_yaml(
        nodes(
            "- {id: a, handler: input}\n"
            "- {id: b, handler: sleep, dependencies: [a]}\n"
            "- {id: c, handler: sleep, dependencies: [b], condition: '{{ a.ok }}'}\n"
            "- {id: d, handler: sleep, dependencies: [c], config: {x: ['{{ a.x }}']}}\n"
        )
    )
    assert checked.valid


def test_keys_and_text_without_a_template_are_not_checked() -> None:
    assert check_yaml(nodes('- {id: a, handler: sleep, config: {"{{ x": "{a} }}", b: {}}}')).valid


def test_layers_are_given_even_if_there_are_other_problems() -> None:
    checked = check_yaml(
        nodes("- {id: a, handler: nope, dependencies: [b]}\n- {id: b, handler: x}")
    )
    assert codes(checked.errors) == ["unknown_handler", "unknown_handler"]
    assert checked.layers == [["b"], ["a"]]


def test_layers_are_not_given_if_a_node_has_no_name() -> None:
    checked = check_yaml(nodes("- {handler: sleep}"))
    assert checked.layers == []


def test_handlers_are_not_checked_if_none_are_known() -> None:
    assert check({"name": "w", "nodes": [{"id": "a", "handler": "whatever"}]}, None).valid


def test_handlers_may_be_any_container() -> None:
    class Everything:
        def __contains__(self, name: object) -> bool:
            return name == "sleep"

    flow = {"name": "w", "nodes": [{"id": "a", "handler": "slep"}]}
    (problem,) = check(flow, Everything()).errors
    assert "dovetail handlers" in problem.message


# The warning

READERS = [
    ("{{ maybe.x }}", True),
    ("Text {{ maybe.x }}", True),
    ("{{ maybe.x | default('') }}", False),
    ("{{ maybe.status }}", False),
    ("{{ maybe.x if maybe.status == 'COMPLETED' else '' }}", None),
    ("{{ sure.x }}", False),
    ("{{ never_skipped.x }}", False),
]


@pytest.mark.parametrize(("template", "warned"), READERS)
def test_reading_a_node_that_may_be_skipped_is_a_warning(template: str, warned: bool) -> None:
    checked = check_yaml(
        nodes(
            "- {id: sure, handler: input}\n"
            "- {id: never_skipped, handler: input, condition: true}\n"
            "- {id: maybe, handler: sleep, condition: '{{ params.x }}'}\n"
            "- id: reader\n  handler: sleep\n  dependencies: [maybe, sure, never_skipped]\n"
            f"  config:\n    x: {json.dumps(template)}\n"
        )
    )
    assert checked.valid
    assert checked.workflow is not None
    if warned is None:
        return  # whether such a guard is understood is for the templates to say
    assert codes(checked.warnings) == ["template_may_be_skipped"] * warned
    for problem in checked.warnings:
        assert (problem.path, problem.line, problem.column) == ("nodes[3].config.x", 10, 8)
        assert "'maybe' has a condition" in problem.message
        assert "default(" in problem.message


ALLOWED_READERS = [
    ("{{ maybe.x }}", True),
    ("{{ maybe }}", True),
    ("{{ maybe.x | default('') }}", False),
    ("{{ maybe.status == 'FAILED' }}", False),
    ("{{ maybe.error.message | default('') }}", False),
    ("{{ sure.x }}", False),
]


@pytest.mark.parametrize(("template", "warned"), ALLOWED_READERS)
def test_reading_a_node_whose_failure_is_allowed_is_a_warning(template: str, warned: bool) -> None:
    checked = check_yaml(
        nodes(
            "- {id: sure, handler: input, allow_failure: false}\n"
            "- {id: maybe, handler: sleep, allow_failure: true}\n"
            "- id: reader\n  handler: sleep\n  dependencies: [maybe, sure]\n"
            f"  config:\n    x: {json.dumps(template)}\n"
        )
    )
    assert checked.valid
    assert codes(checked.warnings) == ["template_may_be_skipped"] * warned
    for problem in checked.warnings:
        assert "'maybe' has allow_failure: if it fails, its keys read as none" in problem.message


def test_an_ancestor_further_up_may_be_skipped_too() -> None:
    checked = check_yaml(
        nodes(
            "- {id: maybe, handler: sleep, condition: false}\n"
            "- {id: between, handler: sleep, dependencies: [maybe]}\n"
            "- {id: c, handler: sleep, dependencies: [between], condition: '{{ maybe.x }}'}\n"
        )
    )
    assert [(p.code, p.path) for p in checked.warnings] == [
        ("template_may_be_skipped", "nodes[2].condition")
    ]


# Size

LIMITS = DefinitionLimits(max_nodes=3, max_edges=3, max_template_bytes=30, max_templates=2)


def wide(count: int, **fields: Any) -> dict[str, Any]:
    listed = [{"id": f"n{i}", "handler": "sleep", **fields} for i in range(count)]
    return {"name": "w", "nodes": listed}


def test_nodes_have_a_limit() -> None:
    assert check(wide(3), limits=LIMITS).valid
    checked = check(wide(4, dependencies=["nobody"]), limits=LIMITS)
    assert [(p.code, p.path, p.message) for p in checked.errors] == [
        ("too_large", "nodes", "4 nodes; at most 3 are allowed"),
        ("too_large", "nodes", "4 dependencies; at most 3 are allowed"),
    ]


def test_edges_have_a_limit_under_either_name() -> None:
    flow = wide(3)
    flow["nodes"][2]["dependencies"] = ["n0", "n1"]
    flow["nodes"][1]["depends_on"] = ["n0"]
    assert check(flow, limits=LIMITS).valid
    flow["nodes"][0]["depends_on"] = ["n0"]
    assert codes(check(flow, limits=LIMITS).errors) == ["too_large"]


def test_the_default_limits_are_those_of_the_contract() -> None:
    limits = DefinitionLimits()
    assert (limits.max_nodes, limits.max_edges) == (10_000, 100_000)
    assert (limits.max_body_bytes, limits.max_depth) == (1 << 20, 32)
    assert limits.max_template_bytes == 16 * 1024
    assert codes(check(wide(10_001)).errors) == ["too_large"]


def test_a_template_has_a_limit_of_length() -> None:
    fits = wide(1, config={"x": "{{ params.x }}" + "a" * 16})
    assert check(fits, limits=LIMITS).valid
    longer = wide(1, config={"x": "{{ params.x }}" + "a" * 17})
    assert codes(check(longer, limits=LIMITS).errors) == ["too_large"]


def test_different_templates_have_a_limit() -> None:
    few = wide(1, config={"x": ["{{ params.a }}", "{{ params.b }}"] * 50})
    assert check(few, limits=LIMITS).valid
    many = wide(1, config={"x": ["{{ params.a }}", "{{ params.b }}", "{{ params.c }}"]})
    (problem,) = check(many, limits=LIMITS).errors
    assert (problem.code, problem.path) == ("too_large", "nodes[0].config.x[2]")


def test_plain_data_must_be_expressible_as_text() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert codes(check(wide(1, config={"x": deep})).errors) == ["too_large"]
    loop: list[Any] = []
    loop.extend([loop] * 10)
    assert "too_large" in codes(check(wide(1, config={"x": loop})).errors)
    flow = wide(1, config={"x": float("nan"), "y": {1: 2}, "z": object()}, dependencies=["b"])
    found = check(flow).errors
    assert [(p.code, p.path) for p in found] == [
        ("invalid_field", "nodes[0].config.x"),
        ("invalid_field", "nodes[0].config.y"),
        ("invalid_field", "nodes[0].config.z"),
        ("missing_dependency", "nodes[0].dependencies[0]"),
    ]


def test_of_very_many_problems_the_first_thousand_are_shown() -> None:
    flow = wide(2000, handler="nope", dependencies=["nobody"], timeout_seconds=0)
    checked = check(flow, HANDLERS)
    assert len(checked.errors) == 1001
    assert codes(checked.errors[:3]) == ["invalid_field", "missing_dependency", "unknown_handler"]
    last = checked.errors[-1]
    assert (last.code, last.message) == (
        "too_large",
        "more than these 1,000 problems; the others are not shown",
    )


# Speed


def chain(count: int) -> Iterator[list[str]]:
    return ([f"n{i - 1}"] if i else [] for i in range(count))


def fan(count: int) -> Iterator[list[str]]:
    for i in range(count):
        yield [] if i == 0 else ["n0"] if i < count - 1 else [f"n{j}" for j in range(1, count - 1)]


def mesh(count: int) -> Iterator[list[str]]:
    """Close to 100,000 edges between 10,000 nodes."""
    chance = random.Random(1)
    for i in range(count):
        near = range(max(0, i - 300), i)
        yield [f"n{j}" for j in sorted(chance.sample(near, min(10, len(near))))]


def large(shape: Any) -> dict[str, Any]:
    listed = [
        {"id": f"n{i}", "handler": "sleep", "dependencies": above}
        for i, above in enumerate(shape(10_000))
    ]
    return {"name": "w", "nodes": listed}


@pytest.mark.parametrize("shape", [chain, fan, mesh])
def test_ten_thousand_nodes_are_checked_in_a_second(shape: Any) -> None:
    flow = large(shape)
    with at_most(1):  # 0.1 to 0.2 s on an idle machine
        assert check(flow, HANDLERS, DefinitionLimits(max_body_bytes=1 << 21)).valid


HOSTILE: dict[str, dict[str, Any]] = {
    "wrong names": wide(10_000, handler="slep", dependencies=["n_1"], timeout="x"),
    "long wrong names": wide(400, dependencies=["n" * 1000]),
    "one cycle": {
        "name": "w",
        "nodes": [
            {"id": f"n{i}", "handler": "sleep", "dependencies": [f"n{i - 1 if i else 9999}"]}
            for i in range(10_000)
        ],
    },
    "broken templates": wide(1, config={"x": [f"{{{{ ({i} }}}}" for i in range(50_000)]}),
    "many templates": wide(1, config={"x": [f"{{{{ {i} }}}}" for i in range(50_000)]}),
    "unknown names": wide(1, config={"x": [f"{{{{ a{i} }}}}" for i in range(20_000)]}),
    "unknown fields": {"name": "w", "nodes": [{f"f{i}": 1 for i in range(50_000)}]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_definition_is_refused_in_bounded_time(name: str) -> None:
    with at_most(4):  # the slowest takes 1.5 s when idle
        checked = check(HOSTILE[name], HANDLERS)
        assert checked.errors
        assert len(checked.errors) <= 1001


DENSE = {
    "sums": [f"{{{{ 1{'+1' * 8000} }}}}{i}" for i in range(64)],
    "reads": ["{{a}}" * 3200 + str(i) for i in range(64)],
    "braces": ["{" * 16_000 + str(i) for i in range(64)],
    "unclosed": ["{{" * 8000 + "'" + str(i) for i in range(64)],
    "quotes": ["{{" + "'" * 16_001 + str(i) + "}}" for i in range(64)],
}


@pytest.mark.parametrize("name", DENSE)
def test_expensive_templates_are_not_parsed(name: str) -> None:
    with at_most(0.5):  # 0.05 s on an idle machine
        (problem,) = check(wide(1, config={"x": DENSE[name]})).errors
    assert (problem.code, "words and signs" in problem.message) == ("too_large", True)


def test_templates_have_a_limit_of_words() -> None:
    limits = DefinitionLimits(max_template_words=20)
    few = wide(
        1, config={"x": ["{{ params.a + 1 }}", "text " * 100, "{{ 'some words in a text' }}"]}
    )
    assert check(few, limits=limits).valid
    paths = wide(1, config={"x": [f"{{{{ params.a{i} }}}}" for i in range(20)]})
    assert check(paths, limits=limits).valid
    many = wide(1, config={"x": ["{{ params.a + 1 }}", "{{ 1 + 1 + 1 + 1 + 1 + 1 }}"]})
    (problem,) = check(many, limits=limits).errors
    assert (problem.code, problem.path) == ("too_large", "nodes[0].config.x[1]")


def test_templates_that_differ_only_in_names_and_numbers_count_once() -> None:
    flow = wide(5000)
    for at, node in enumerate(flow["nodes"]):
        node["condition"] = f"{{{{ params.x{at} > {at} and params.y != 'z{at}' }}}}"
    assert check(flow).valid
    for at, node in enumerate(flow["nodes"]):
        node["condition"] = "{{ " + " - ".join(f"{at:b}") + " > params.x }}"
    (problem,) = check(flow).errors
    assert problem.code == "too_large"
    assert "more than 10,000 words and signs, not counting" in problem.message


def test_with_very_many_invalid_templates_some_are_not_checked() -> None:
    wrong = [f"{{{{ params.a ** {at}{' + 1' * 100} }}}}" for at in range(1, 100)]
    *first, last = check(wide(1, config={"x": wrong})).errors
    assert {problem.code for problem in first} == {"template_forbidden"}
    assert 10 < len(first) < 99
    assert (last.code, last.path) == ("too_large", f"nodes[0].config.x[{len(first)}]")
    assert "from here on none was checked" in last.message


def test_an_error_is_shown_after_any_number_of_warnings() -> None:
    flow = wide(1500, condition="{{ params.x }}")
    for at, node in enumerate(flow["nodes"][1:]):
        node |= {"dependencies": [f"n{at}"], "config": {"x": f"{{{{ n{at}.x }}}}"}}
    assert check(flow).valid
    assert len(check(flow).warnings) == 1001
    flow["nodes"][-1]["config"]["y"] = "{{ params.__class__ }}"
    assert codes(check(flow).errors) == ["template_forbidden"]


def test_a_template_may_read_one_of_very_many_parents() -> None:
    flow = wide(40)
    flow["nodes"][38] |= {"dependencies": [f"n{at}" for at in range(30)]}
    flow["nodes"][39] |= {"dependencies": ["n38"]}
    for node in flow["nodes"][38:]:
        node["config"] = {"x": "{{ n29.x }}"}
    assert check(flow).valid
    for node in flow["nodes"][38:]:
        node["config"] = {"x": "{{ n30.x }}"}
    assert codes(check(flow).errors) == ["template_not_upstream"] * 2


def test_an_invalid_field_is_found_in_any_of_many_nodes() -> None:
    flow = wide(350)
    for at in (0, 99, 100, 250, 349):
        flow["nodes"][at] |= {"timeout_seconds": 0, "zz": 1}
        flow["nodes"][at]["retry"] = {"yy": 1, "jitter": "x"}
    found = {problem.path for problem in check(flow).errors}
    assert found == {
        f"nodes[{at}].{field}"
        for at in (0, 99, 100, 250, 349)
        for field in ("timeout_seconds", "zz", "retry.yy", "retry.jitter")
    }


@pytest.mark.parametrize(
    "flow",
    [
        {"name": "w", "nodes": [], **{f"z{at}": 1 for at in range(5000)}},
        wide(1, **{f"z{at}": 1 for at in range(5000)}),
        wide(500, **{f"z{at}": 1 for at in range(10)}),
        wide(1, retry={f"z{at}": 1 for at in range(5000)}),
        wide(1, depends_on=[1] * 5000),
    ],
)
def test_of_very_many_invalid_fields_the_first_thousand_are_shown(flow: dict[str, Any]) -> None:
    *shown_ones, last = check(flow).errors
    assert len(shown_ones) == 1000
    assert {problem.code for problem in shown_ones} <= {"invalid_field", "empty_graph"}
    assert (last.code, last.path) == ("too_large", "")


# Anything

names = st.sampled_from(["a", "b", "c", "params", "1", "", "é", "a b"])
strange = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.floats(), names, st.just("{{ a.x }}")
) | st.lists(st.none() | names, max_size=3)
raw_nodes = st.dictionaries(
    st.sampled_from([*Node.model_fields, "depends_on", "other"]),
    strange | st.dictionaries(names, strange, max_size=2),
    max_size=6,
)
likely_nodes = st.fixed_dictionaries(
    {"id": names, "handler": st.just("sleep")},
    optional={
        "dependencies": st.lists(names, max_size=3),
        "config": st.dictionaries(names, st.sampled_from(["{{ a.x }}", "{{ b }}", "{{", "x"])),
        "condition": st.sampled_from([True, "{{ c.x }}", "{{ secrets.k }}"]),
    },
)
definitions = st.fixed_dictionaries(
    {"name": names | strange, "nodes": st.lists(raw_nodes | likely_nodes | strange, max_size=6)},
    optional={"params": strange | st.dictionaries(names, strange), "on_failure": strange},
)


@given(definitions | strange | raw_nodes)
def test_any_data_is_valid_or_has_problems(data: Any) -> None:
    checked = check(data, HANDLERS)
    assert checked.valid is (checked.workflow is not None)
    for problem in (*checked.errors, *checked.warnings):
        assert problem.message
        assert "\n" not in problem.message
    if checked.workflow is not None:
        graph = dag.build_graph(checked.workflow, {})
        assert sum(map(len, checked.layers)) == len(graph.nodes)


@given(definitions.filter(lambda data: "nan" not in str(data) and "inf" not in str(data)))
def test_a_text_has_the_problems_of_its_data_each_with_a_position(data: Any) -> None:
    text = json.dumps(data, indent=1)
    in_text = check(read_text(text, format="json"), HANDLERS)
    in_data = check(data, HANDLERS)
    for found, same in ((in_text.errors, in_data.errors), (in_text.warnings, in_data.warnings)):
        assert sorted((p.code, p.path, p.message) for p in found) == sorted(
            (p.code, p.path, p.message) for p in same
        )
        for problem in found:
            assert problem.line is not None
            assert problem.column is not None
            assert line_of(text, problem.line)[problem.column - 1 :].strip()


# How a problem is put


def test_a_path_is_written_in_readable_form() -> None:
    assert format_path(()) == ""
    assert format_path(("nodes", 2, "dependencies", 0)) == "nodes[2].dependencies[0]"
    assert format_path(("a", "X-Header", "a b", "", "é")) == 'a.X-Header["a b"][""]["é"]'
    assert format_path(("a\nb\x1b", 0)) == '["a\\nb\\x1b"][0]'
    assert format_path(("x" * 100,)) == f'["{"x" * 59}…"]'


def test_a_value_is_shown_short_and_on_one_line() -> None:
    assert shown("a\nb") == "'a\\nb'"
    assert shown("é" * 100) == "'" + "é" * 59 + "…'"
    assert shown(None) == "null"
    assert shown(1.5) == "1.5"
    assert shown({}) == "a mapping"
    assert shown([]) == "a list"
    assert shown(()) == "a Python tuple"


def test_the_intended_name_is_suggested_from_many() -> None:
    many = [f"node_{i}" for i in range(5000)] + ["summarise_the_report"]
    assert Suggester().did_you_mean("sumarise_the_reprot", many) == (
        "; did you mean 'summarise_the_report'?"
    )
    assert Suggester().did_you_mean("FETCH", ["fetch", "x"]) == "; did you mean 'fetch'?"
    assert Suggester().did_you_mean("zzz", ["fetch", "x"]) == ""
    assert Suggester().did_you_mean("n" * 1000, ["n" * 999]) == ""


def test_suggestions_stop_when_they_would_cost_too_much() -> None:
    suggester = Suggester(budget=500)
    hints = [suggester.did_you_mean("fetsch", ["fetch"]) for _ in range(20)]
    assert 0 < len([hint for hint in hints if hint]) < 20
    assert hints[-1] == ""
