"""Where the nodes and edges of a graph are drawn: in layers from top to bottom, with few crossings.

A layered drawing after Sugiyama. Each node is in the layer that `dag.layers` gives it. An edge over
several layers gets a bend in each layer between, so that it passes beside the nodes there. Sweeps
up and down order each layer by the mean position of its neighbours. Then each layer is moved as
near to its neighbours as the order and the gaps allow. The same graph has the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from dovetail.core.dag import Edges, layers

NODE_WIDTH = 180.0
NODE_HEIGHT = 40.0
"""The box of a node, around its `x` and `y`."""
GAP = 20.0
"""Between two boxes of a layer."""
BEND_WIDTH = 10.0
LAYER_DISTANCE = 100.0
MARGIN = 20.0
LANE_DISTANCE = 10.0
LANES = 24
"""Beside the drawing, for edges that are too long for bends."""
MAX_BENDS = 50_000
"""Of all edges together, counted for each edge. A chain in which every node has an edge to the last
node would need millions."""
SWEEPS = 24
MIN_SWEEPS = 4
MAX_SWEPT = 120_000
"""Points that all sweeps together visit: the larger the graph, the fewer the sweeps."""
MAX_COUNTED = 1_500
"""Points of a graph whose crossings are counted after each sweep, to keep the best order."""
ALIGNMENTS = 4

Point = tuple[float, float]


class Layout(NamedTuple):
    """`nodes` has the position and the layer of each node, `edges` the points of each edge from
    parent to child, in the order of the children and their parents."""

    nodes: list[tuple[float, float, int]]
    edges: list[tuple[int, int, list[Point]]]
    width: float
    height: float


class _Points:
    """The nodes and bends of a graph, by number: a node has its index, bends follow."""

    def __init__(self, parents: Edges) -> None:
        self.layer = [0] * len(parents)
        self.rows: list[list[int]] = layers(parents)
        for number, row in enumerate(self.rows):
            for node in row:
                self.layer[node] = number
        self.above: list[list[int]] = [[] for _ in parents]
        self.below: list[list[int]] = [[] for _ in parents]
        self.bends: dict[tuple[int, int], list[int]] = {}
        """Of each edge that has some."""
        self.laned: list[tuple[int, int]] = []
        """Edges that pass beside the drawing."""
        self._add_edges(parents)

    def _add_edges(self, parents: Edges) -> None:
        layer = self.layer
        edges = [(parent, child) for child, above in enumerate(parents) for parent in above]
        # The short ones first, so that the longest ones go without bends if there are too many.
        edges.sort(key=lambda edge: layer[edge[1]] - layer[edge[0]])
        trunks: dict[int, list[int]] = {}
        bends = 0
        for parent, child in edges:
            # The edges of a node share their bends, and part before the layer of the child.
            trunk = trunks.setdefault(parent, [])
            span = layer[child] - layer[parent] - 1
            bends += span
            if bends > MAX_BENDS:
                self.laned.append((parent, child))
                continue
            while len(trunk) < span:
                trunk.append(self._bend(trunk[-1] if trunk else parent))
            if span:
                self.bends[parent, child] = trunk[:span]
            self._join(trunk[span - 1] if span else parent, child)

    def _bend(self, above: int) -> int:
        bend = len(self.layer)
        self.layer.append(self.layer[above] + 1)
        self.above.append([])
        self.below.append([])
        self.rows[self.layer[bend]].append(bend)
        self._join(above, bend)
        return bend

    def _join(self, above: int, below: int) -> None:
        self.below[above].append(below)
        self.above[below].append(above)


def layout(parents: Edges) -> Layout:
    """Where to draw the nodes of an acyclic graph, and the edges from their parents to them."""
    points = _Points(parents)
    _order(points)
    x = _place(points, len(parents))
    left = min((x[i] - _width(i, len(parents)) / 2 for row in points.rows for i in row), default=0)
    x = [round(one - left + MARGIN, 1) for one in x]
    right = max((x[i] + _width(i, len(parents)) / 2 for i in range(len(x))), default=0)
    y = [MARGIN + NODE_HEIGHT / 2 + LAYER_DISTANCE * row for row in range(len(points.rows))]
    lanes = {edge: right + LANE_DISTANCE * (1 + at % LANES) for at, edge in enumerate(points.laned)}
    edges = []
    for child, above in enumerate(parents):
        for parent in above:
            ends = x[parent], y[points.layer[parent]], x[child], y[points.layer[child]]
            if (parent, child) in lanes:
                line = _beside(*ends, lanes[parent, child])
            else:
                bends = points.bends.get((parent, child), ())
                line = _along(*ends, [(x[bend], y[points.layer[bend]]) for bend in bends])
            edges.append((parent, child, line))
    return Layout(
        [(x[node], y[points.layer[node]], points.layer[node]) for node in range(len(parents))],
        edges,
        round(max(lanes.values(), default=right) + MARGIN, 1),
        (y[-1] + NODE_HEIGHT / 2 if y else 0.0) + MARGIN,
    )


def layout_view(ids: Sequence[str], found: Layout) -> dict[str, Any]:
    """A layout in the fields of the HTTP API."""
    return {
        "nodes": [
            {"id": name, "x": x, "y": y, "layer": layer}
            for name, (x, y, layer) in zip(ids, found.nodes, strict=True)
        ],
        "edges": [
            {"from": ids[parent], "to": ids[child], "points": line}
            for parent, child, line in found.edges
        ],
        "width": found.width,
        "height": found.height,
    }


# ── the order of each layer ──────────────────────────────────────────────────────────────


def _order(points: _Points) -> None:
    """Order each layer by the mean position of its neighbours, downwards and upwards in turn."""
    size = len(points.layer)
    sweeps = max(MIN_SWEEPS, min(SWEEPS, MAX_SWEPT // max(1, size)))
    is_counted = size <= MAX_COUNTED
    best, fewest = points.rows, _crossings(points, points.rows) if is_counted else 0
    place = [0.0] * size
    for row in points.rows:
        _number(row, place)
    rows = points.rows
    for sweep in range(sweeps):
        if is_counted and not fewest:
            break
        is_down = sweep % 2 == 0
        neighbours = points.above if is_down else points.below
        ordered = []
        for row in rows if is_down else reversed(rows):
            ordered.append(_sorted_row(row, neighbours, place))
            _number(ordered[-1], place)
        rows = ordered if is_down else ordered[::-1]
        if not is_counted:
            best = rows
        elif (crossings := _crossings(points, rows)) < fewest:
            best, fewest = rows, crossings
    points.rows = best


def _number(row: Sequence[int], place: list[float]) -> None:
    for at, point in enumerate(row):
        place[point] = at


def _sorted_row(row: Sequence[int], neighbours: Edges, place: Sequence[float]) -> list[int]:
    """A point without neighbours on that side stays where it is, as far as that can be."""
    mean = {}
    for point in row:
        near = neighbours[point]
        mean[point] = sum([place[one] for one in near]) / len(near) if near else place[point]
    return sorted(row, key=mean.__getitem__)


def _crossings(points: _Points, rows: Sequence[Sequence[int]]) -> int:
    """How many pairs of lines between neighbouring layers cross, by a binary indexed tree."""
    found = 0
    for upper, lower in pairwise(rows):
        place = {point: at for at, point in enumerate(lower)}
        tree = [0] * (len(lower) + 1)
        seen = 0
        for point in upper:
            ends = [place[below] for below in points.below[point]]
            for end in ends:
                at, before = end + 1, 0
                while at:
                    before += tree[at]
                    at &= at - 1
                found += seen - before
            for end in ends:
                at = end + 1
                while at <= len(lower):
                    tree[at] += 1
                    at += at & -at
            seen += len(ends)
    return found


# ── positions ────────────────────────────────────────────────────────────────────────────


def _width(point: int, nodes: int) -> float:
    return NODE_WIDTH if point < nodes else BEND_WIDTH


def _place(points: _Points, nodes: int) -> list[float]:
    """The x of each point: near its neighbours, in the order of its layer, with a gap between."""
    x = [0.0] * len(points.layer)
    offsets = []
    for row in points.rows:
        widths = [_width(point, nodes) for point in row]
        steps = [(left + right) / 2 + GAP for left, right in pairwise(widths)]
        offset = list(accumulate(steps, initial=0.0))
        offsets.append(offset)
        for point, at in zip(row, offset, strict=True):
            x[point] = at - offset[-1] / 2
    for turn in range(ALIGNMENTS):
        is_down = turn % 2 == 0
        neighbours = points.above if is_down else points.below
        order = range(len(points.rows)) if is_down else reversed(range(len(points.rows)))
        for number in order:
            _align(points.rows[number], offsets[number], neighbours, x)
    return x


def _align(row: Sequence[int], offset: Sequence[float], neighbours: Edges, x: list[float]) -> None:
    """Move a layer as near to its neighbours as its order and its gaps allow: an isotonic
    regression of the wanted positions, less the room that the points before need."""
    blocks: list[tuple[float, int]] = []
    for point, room in zip(row, offset, strict=True):
        near = neighbours[point]
        wanted = sum([x[one] for one in near]) / len(near) if near else x[point]
        total, count = wanted - room, 1
        while blocks and blocks[-1][0] * count >= total * blocks[-1][1]:
            before, many = blocks.pop()
            total, count = total + before, count + many
        blocks.append((total, count))
    at = 0
    for total, count in blocks:
        for index in range(at, at + count):
            x[row[index]] = total / count + offset[index]
        at += count


# ── edges ────────────────────────────────────────────────────────────────────────────────


def _along(x: float, y: float, to_x: float, to_y: float, bends: Sequence[Point]) -> list[Point]:
    """From the lower side of one box to the upper side of another, upright beside other boxes."""
    half = NODE_HEIGHT / 2
    line = [(x, y + half)]
    for bend_x, bend_y in bends:
        line += [(bend_x, bend_y - half), (bend_x, bend_y + half)]
    line.append((to_x, to_y - half))
    between = [
        point
        for before, point, after in zip(line, line[1:], line[2:], strict=False)
        if not before[0] == point[0] == after[0]
    ]
    return [line[0], *between, line[-1]]


def _beside(x: float, y: float, to_x: float, to_y: float, lane: float) -> list[Point]:
    """Through the gap below one layer, down the lane, and through the gap above another."""
    half = NODE_HEIGHT / 2
    turn = (LAYER_DISTANCE - NODE_HEIGHT) / 2
    leaves, comes = y + half + turn, to_y - half - turn
    across = [(x, leaves), (lane, leaves), (lane, comes), (to_x, comes)]
    return [(x, y + half), *across, (to_x, to_y - half)]
