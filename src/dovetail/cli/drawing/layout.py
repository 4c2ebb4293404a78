"""Where each node of a layered graph is drawn: columns by layer, few crossings, short edges.

Sugiyama's method in its plainest form: an edge that spans several layers gets a bend in each of
them, every column is sorted by the mean place of its neighbours (the barycentre), sweeping to
and fro, and then moved towards them as far as the gaps allow. All of it is linear in nodes,
bends and edges, but for the sorting. What it must not know: what is drawn, or in which format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SWEEPS = 8
# Edges of a graph with more bends than this are drawn straight: nobody could follow them anyway.
MOST_BENDS = 20_000
NODE_HEIGHT = 1.0
BEND_HEIGHT = 0.4


@dataclass(slots=True)
class Layout:
    """Points are numbered: first the nodes, as they were given, then the bends."""

    columns: list[list[int]]
    heights: list[float]
    """What a point takes in its column, in units of one node."""
    column_of: list[int]
    y: list[float] = field(default_factory=list)
    """The middle of each point, from 0 on."""
    routes: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """For each edge, parent to child, the points it runs through."""


def lay_out(layers: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Layout:
    layout, left, right = _with_bends(layers, parents)
    for sweep in range(SWEEPS):
        forwards = sweep % 2 == 0
        _sort(layout.columns, left if forwards else right, forwards)
    _place(layout, left, right)
    return layout


def _with_bends(
    layers: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
) -> tuple[Layout, list[list[int]], list[list[int]]]:
    """The columns with bends in them, and each point's neighbours in the columns beside it."""
    column_of = [0] * len(parents)
    for number, layer in enumerate(layers):
        for node in layer:
            column_of[node] = number
    spans = (column_of[node] - column_of[p] for node, above in enumerate(parents) for p in above)
    bends = sum(span - 1 for span in spans) <= MOST_BENDS
    layout = Layout([list(layer) for layer in layers], [NODE_HEIGHT] * len(parents), column_of)
    left: list[list[int]] = [[] for _ in parents]
    right: list[list[int]] = [[] for _ in parents]
    for node, above in enumerate(parents):
        for parent in above:
            route = [parent]
            for column in range(column_of[parent] + 1, column_of[node]) if bends else ():
                bend = len(layout.heights)
                layout.heights.append(BEND_HEIGHT)
                layout.column_of.append(column)
                layout.columns[column].append(bend)
                left.append([])
                right.append([])
                route.append(bend)
            route.append(node)
            for before, after in pairwise(route):
                right[before].append(after)
                left[after].append(before)
            layout.routes[parent, node] = route
    return layout, left, right


def _sort(columns: list[list[int]], neighbours: list[list[int]], forwards: bool) -> None:
    """Order each column by the mean place of its neighbours in the columns already ordered."""
    place = {point: at for column in columns for at, point in enumerate(column)}

    def mean(point: int) -> float:
        others = neighbours[point]
        # What has no neighbour there keeps its place; the sort is stable.
        return sum(place[other] for other in others) / len(others) if others else place[point]

    for column in columns if forwards else reversed(columns):
        column.sort(key=mean)
        place.update((point, at) for at, point in enumerate(column))


def _place(layout: Layout, left: list[list[int]], right: list[list[int]]) -> None:
    """Give each point its height, then pull it towards its neighbours as far as it can go."""
    layout.y = [0.0] * len(layout.heights)
    for column in layout.columns:
        at = -sum(layout.heights[point] for point in column) / 2
        for point in column:
            layout.y[point] = at + layout.heights[point] / 2
            at += layout.heights[point]
    for sweep in range(SWEEPS):
        forwards = sweep % 2 == 0
        for column in layout.columns if forwards else reversed(layout.columns):
            _pull(layout, column, left if forwards else right)
    top = min(y - height / 2 for y, height in zip(layout.y, layout.heights, strict=True))
    layout.y = [y - top for y in layout.y]


def _pull(layout: Layout, column: list[int], neighbours: list[list[int]]) -> None:
    """The heights nearest to what the neighbours want that keep the order and the gaps.

    Less the room of the points before it, each wish must not fall below the one before: points
    whose wishes do are pooled, and share the mean of them.
    """
    y, heights = layout.y, layout.heights
    pools: list[tuple[float, int]] = []  # the mean wish of so many points
    room = 0.0
    rooms = []
    for point in column:
        others = neighbours[point]
        wish = sum(y[other] for other in others) / len(others) if others else y[point]
        rooms.append(room + heights[point] / 2)
        mean, size = wish - rooms[-1], 1
        while pools and pools[-1][0] > mean:
            earlier, count = pools.pop()
            mean = (mean * size + earlier * count) / (size + count)
            size += count
        pools.append((mean, size))
        room += heights[point]
    at = 0
    for mean, size in pools:
        for point in column[at : at + size]:
            y[point] = mean + rooms[at]
            at += 1
