"""Where a graph is drawn: nothing overlaps, edges go down and pass beside other nodes."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import layout as drawing
from dovetail.core.dag import layers
from dovetail.core.layout import GAP, NODE_HEIGHT, NODE_WIDTH, Layout, layout

MAX_CPU_SECONDS = 5.0
"""About half a second, on a machine that has nothing else to do."""


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    size = draw(st.integers(0, 24))
    return [
        draw(st.lists(st.integers(0, node - 1), unique=True, max_size=4)) if node else []
        for node in range(size)
    ]


def check(parents: list[list[int]], found: Layout) -> None:
    for number, row in enumerate(layers(parents)):
        assert all(found.nodes[node][2] == number for node in row)
        places = sorted(found.nodes[node][0] for node in row)
        assert all(b - a >= NODE_WIDTH + GAP - 1 for a, b in pairwise(places)), "boxes overlap"
    half_width, half = NODE_WIDTH / 2, NODE_HEIGHT / 2
    for x, y, _ in found.nodes:
        assert half_width <= x <= found.width - half_width
        assert half <= y <= found.height - half
    assert [(a, b) for a, b, _ in found.edges] == [
        (parent, child) for child, above in enumerate(parents) for parent in above
    ]
    for parent, child, points in found.edges:
        assert points[0] == (found.nodes[parent][0], found.nodes[parent][1] + half)
        assert points[-1] == (found.nodes[child][0], found.nodes[child][1] - half)
        assert all(a[1] <= b[1] for a, b in pairwise(points)), "an edge goes upwards"
        assert all(0 <= x <= found.width and 0 <= y <= found.height for x, y in points)


def hits(found: Layout) -> list[int]:
    """Nodes that a line of another node's edge touches. Beside boxes, every line is upright."""
    half_width, half = NODE_WIDTH / 2, NODE_HEIGHT / 2
    return [
        node
        for _, _, points in found.edges
        for (x, top), (to_x, bottom) in pairwise(points)
        for node, (at, y, _) in enumerate(found.nodes)
        if top < y + half and bottom > y - half and min(x, to_x) < at + half_width
        if max(x, to_x) > at - half_width
    ]


@given(graphs())
def test_no_box_overlaps_and_every_edge_goes_down_beside_the_others(
    parents: list[list[int]],
) -> None:
    found = layout(parents)
    check(parents, found)
    assert hits(found) == []
    assert layout(parents) == found, "the same graph has the same layout"


@given(graphs())
def test_edges_without_room_for_bends_pass_beside_the_drawing(parents: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "MAX_BENDS", 2)
        found = layout(parents)
    check(parents, found)
    assert hits(found) == []


def test_lines_that_need_not_cross_do_not() -> None:
    found = layout([[], [], [], [2], [1], [0]])
    above = sorted(range(3), key=lambda node: found.nodes[node][0])
    below = sorted(range(3, 6), key=lambda node: found.nodes[node][0])
    assert below == [5 - node for node in above]


def test_a_chain_is_a_straight_line() -> None:
    found = layout([[], [0], [1], [2]])
    assert len({x for x, _, _ in found.nodes}) == 1


def test_an_empty_graph_has_an_empty_layout() -> None:
    assert layout([])[:2] == ([], [])


def large(kind: str) -> list[list[int]]:
    size, draw = 10_000, random.Random(7)
    if kind == "random":
        return [sorted(draw.sample(range(node), min(node, 2))) for node in range(size)]
    if kind == "narrow":
        return [
            sorted({draw.randrange(max(0, node - 50), node) for _ in range(2)}) if node else []
            for node in range(size)
        ]
    if kind == "one parent of all":
        return [[], [0], *([node - 1, 0] for node in range(2, size))]
    if kind == "one child of all":
        chain = [[node - 1] if node else [] for node in range(size - 1)]
        return [*chain, [*range(size - 1)]]
    return [[], *([0] for _ in range(size - 2)), [*range(1, size - 1)]]


@pytest.mark.parametrize(
    "kind", ["random", "narrow", "one parent of all", "one child of all", "fan"]
)
def test_ten_thousand_nodes_are_laid_out_in_about_a_second(kind: str) -> None:
    parents = large(kind)
    began = time.process_time()
    found = layout(parents)
    assert time.process_time() - began < MAX_CPU_SECONDS
    check(parents, found)
    assert sum(len(points) for _, _, points in found.edges) < 400_000
