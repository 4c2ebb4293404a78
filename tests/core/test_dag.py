"""Order, cycles and relations of graphs, and the graph that a run is stepped through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import dag
from dovetail.core.dag import NodeSpec, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.retry import RetryPolicy

from .pace import at_most

Parents = list[list[int]]
# Measuring coverage makes everything some times slower.


@st.composite
def graphs(draw: st.DrawFn, acyclic: bool = False) -> Parents:
    """Any graph without self-loops, its nodes in any order."""
    size = draw(st.integers(0, 12))
    order = draw(st.permutations(range(size)))
    parents: Parents = [[] for _ in range(size)]
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)) if size else st.nothing()
    for one, other in draw(st.sets(pairs, max_size=25)) if size else ():
        if one == other:
            continue
        if acyclic and order[one] > order[other]:
            one, other = other, one
        if one not in parents[other]:
            parents[other].append(one)
    return parents


def reachable(parents: Parents, start: int) -> set[int]:
    """The plain definition of an ancestor, to compare with."""
    seen: set[int] = set()
    todo = list(parents[start])
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += parents[node]
    return seen


def bits(members: set[int]) -> int:
    return sum(1 << member for member in members)


@given(graphs(acyclic=True))
def test_layers_hold_every_node_once_right_after_its_last_parent(parents: Parents) -> None:
    found = dag.layers(parents)
    layer_of = {node: depth for depth, layer in enumerate(found) for node in layer}
    assert sorted(layer_of) == list(range(len(parents)))
    assert all(layer == sorted(layer) for layer in found)
    for node, above in enumerate(parents):
        assert layer_of[node] == 1 + max((layer_of[parent] for parent in above), default=-1)


@given(graphs())
def test_nodes_on_or_behind_a_cycle_are_in_no_layer(parents: Parents) -> None:
    ordered = {node for layer in dag.layers(parents) for node in layer}
    for node in range(len(parents)):
        above = reachable(parents, node) | {node}
        assert (node in ordered) is not any(other in reachable(parents, other) for other in above)


@given(graphs())
def test_ancestors_are_the_nodes_that_can_be_reached_upwards(parents: Parents) -> None:
    expected = [bits(reachable(parents, node)) for node in range(len(parents))]
    assert dag.ancestors(parents) == expected


@given(graphs())
def test_descendants_are_the_inverse_of_ancestors(parents: Parents) -> None:
    children = dag.children_of(parents)
    for start in range(len(parents)):
        found = dag.descendants(children, start)
        below = [n for n in range(len(parents)) if n != start and start in reachable(parents, n)]
        assert found == below


@given(graphs())
def test_each_cycle_is_named_once_with_a_path_around_it(parents: Parents) -> None:
    found = dag.cycles(parents)
    on_cycles = [node for cycle in found for node in cycle.members]
    assert sorted(on_cycles) == [n for n in range(len(parents)) if n in reachable(parents, n)]
    for members, way in found:
        assert way[0] == members[0]
        assert set(way) <= set(members)
        assert len(set(way)) == len(way) >= 2
        for node, after in zip(way, way[1:] + way[:1], strict=True):
            assert node in parents[after]
        for member in members:
            assert set(members) <= reachable(parents, member)


@given(graphs())
def test_every_step_of_a_reported_cycle_is_an_edge_and_the_cycle_closes(
    parents: Parents,
) -> None:
    for _, way in dag.cycles(parents):
        said = [pair.split(" needs ") for pair in dag.spell_out([str(n) for n in way]).split(", ")]
        assert all(int(needed) in parents[int(node)] for node, needed in said)
        assert [needed for _, needed in said] == [node for node, _ in said[1:] + said[:1]]
        assert sorted(int(node) for node, _ in said) == sorted(way)


@given(graphs(acyclic=True), st.data())
def test_running_the_ready_nodes_finishes_every_graph(
    parents: Parents, data: st.DataObject
) -> None:
    completed: set[int] = set()
    while ready := dag.ready_nodes(parents, completed):
        assert all(set(parents[node]) <= completed for node in ready)
        assert ready == sorted(ready)
        completed.add(data.draw(st.sampled_from(ready)))
    assert len(completed) == len(parents)


def chain(size: int) -> Parents:
    return [[node - 1] if node else [] for node in range(size)]


def fan(size: int) -> Parents:
    return [[], *([0] for _ in range(size - 2)), list(range(1, size - 1))]


def ring(size: int) -> Parents:
    return [[(node - 1) % size] for node in range(size)]


def pairs(size: int) -> Parents:
    """A chain of cycles of two."""
    return [[node ^ 1, node - 2] if node > 1 else [node ^ 1] for node in range(size)]


def mesh(size: int) -> Parents:
    return [[node - back for back in range(1, 11) if node >= back] for node in range(size)]


@pytest.mark.parametrize("shape", [chain, fan, ring, pairs, mesh])
def test_ten_thousand_nodes_need_little_time_and_no_recursion(
    shape: Callable[[int], Parents],
) -> None:
    parents = shape(10_000)
    with at_most(2):  # 0.2 s on an idle machine
        dag.layers(parents)
        dag.cycles(parents)
        dag.ancestors(parents)
        dag.descendants(dag.children_of(parents), 0)


# The compiled graph


def workflow(nodes: list[dict[str, Any]], **fields: Any) -> Workflow:
    full = [{"handler": "sleep", **node} for node in nodes]
    return Workflow.model_validate({"name": "w", "nodes": full, **fields})


def spec(node: dict[str, Any], retries: dict[str, int] | None = None, **defaults: Any) -> NodeSpec:
    flow = workflow([{"id": "a", **node}], defaults=defaults or None)
    return build_graph(flow, retries or {}).nodes[0]


def test_the_graph_finds_its_nodes_by_index_and_by_name() -> None:
    graph = build_graph(
        workflow(
            [
                {"id": "end", "handler": "output", "dependencies": ["b", "a"]},
                {"id": "a"},
                {"id": "b", "depends_on": ["a"]},
                {"id": "lone"},
            ],
            on_failure="continue",
            max_concurrency=3,
        ),
        {},
    )
    assert dict(graph.index) == {"end": 0, "a": 1, "b": 2, "lone": 3}
    assert [node.index for node in graph.nodes] == [0, 1, 2, 3]
    assert [node.parents for node in graph.nodes] == [(2, 1), (), (1,), ()]
    assert [node.children for node in graph.nodes] == [(), (0, 2), (0,), ()]
    assert (graph.roots, graph.exits, graph.output_node) == ((1, 3), (0, 3), 0)
    assert (graph.name, graph.fail_fast, graph.max_concurrency) == ("w", False, 3)
    assert list(graph.descendants(1)) == [0, 2]
    assert list(graph.descendants(0)) == []


def test_there_is_an_output_node_only_if_there_is_exactly_one() -> None:
    two = [{"id": "a", "handler": "output"}, {"id": "b", "handler": "output"}]
    assert build_graph(workflow(two), {}).output_node is None
    assert build_graph(workflow([{"id": "a"}]), {}).output_node is None


def test_fields_that_are_not_given_have_the_contracts_defaults() -> None:
    node = spec({})
    assert (node.timeout_seconds, node.max_retries) == (300.0, 0)
    assert node.retry == RetryPolicy(10.0, 300.0, 0.5)
    assert (node.cache_ttl, node.resource_tag, node.condition) == (None, None, None)
    assert (node.at_most_once, node.allow_failure, node.config.raw) == (False, False, {})


def test_node_fields_override_defaults_and_defaults_override_the_handler() -> None:
    retries = {"sleep": 3}
    assert spec({}, retries).max_retries == 3
    assert spec({}, retries, max_retries=2).max_retries == 2
    assert spec({"max_retries": 0}, retries, max_retries=2).max_retries == 0
    assert spec({}, timeout_seconds=60).timeout_seconds == 60.0
    assert spec({"timeout_seconds": 1}, timeout_seconds=60).timeout_seconds == 1.0
    assert spec({}, resource_tag="t").resource_tag == "t"
    assert spec({"resource_tag": "u"}, resource_tag="t").resource_tag == "u"


def test_retry_fields_are_inherited_one_by_one() -> None:
    node = spec(
        {"retry": {"base_delay_seconds": 0, "jitter": None}},
        retry={"base_delay_seconds": 7, "max_delay_seconds": 20},
    )
    assert node.retry == RetryPolicy(0.0, 20.0, 0.5)


def test_an_at_most_once_node_is_never_retried_even_if_defaults_have_retries() -> None:
    node = spec({"delivery": "at_most_once"}, {"sleep": 3}, max_retries=2)
    assert (node.max_retries, node.at_most_once) == (0, True)


def test_templates_and_conditions_are_compiled() -> None:
    node = spec(
        {"config": {"a": "{{ params.x }}"}, "condition": "{{ true }}", "cache": {"ttl_seconds": 5}}
    )
    assert node.config.templates
    assert node.cache_ttl == 5.0

    class Nothing:
        def get(self, name: str) -> Any:
            raise KeyError(name)

    assert node.condition is not None
    assert node.condition(Nothing()) is True
    never = spec({"condition": False})
    assert never.condition is not None
    assert never.condition(Nothing()) is False
