"""`dovetail graph`: a workflow drawn as text, for Mermaid, for Graphviz, or as SVG.

The layout of the SVG is Sugiyama's method in its plainest form: an edge that spans several layers
gets a bend in each of them, every column is sorted by the mean index of its neighbours (the
barycentre), to and fro, and then moved towards them as far as the gaps allow. Its cost is linear in
nodes, bends and edges, except for the sorting. The SVG needs no fonts, scripts or network, and is
dark where the reader's system is dark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal
from xml.sax.saxutils import escape, quoteattr

import typer

from dovetail.cli.files import File, checked_file, print_report
from dovetail.cli.options import DefinitionFile, Handlers, declarations
from dovetail.cli.output import INVALID, print_lines
from dovetail.cli.text import Line, cells, clip, listed, pad, plain

if TYPE_CHECKING:
    from dovetail.core.definition.model import Node, Workflow

app = declarations()


@app.command()
def graph(
    file: DefinitionFile,
    format: Annotated[  # noqa: A002  (the name of the option)
        Literal["text", "mermaid", "dot", "svg"], typer.Option(help="How to draw it.")
    ] = "text",
    handlers: Handlers = None,
) -> int:
    """Draw the layers of a workflow and what depends on what."""
    from dovetail.config import load_settings
    from dovetail.handlers.builtin import load_registry
    from dovetail.wiring.embedded import definition_limits

    settings = load_settings()
    limits = definition_limits(settings)
    read = File(file, limits)
    # Without --handlers unknown ones are no error, because workers may know them; with --handlers
    # the files must have all that the workflow needs, as for `validate` and `run`.
    checked = checked_file(read, limits, load_registry(settings, handlers) if handlers else None)
    if checked.workflow is None:
        print_report(read, checked)
        return INVALID
    print_lines(_DRAW[format](picture_of(checked.workflow)))
    return 0


@dataclass(frozen=True, slots=True)
class Picture:
    """What every format draws. Nodes are their indexes in the definition."""

    name: str
    ids: list[str]
    handlers: list[str]
    conditions: list[str]
    """Of a node that may be skipped by a condition of its own, that condition; else empty."""
    parents: list[list[int]]
    layers: list[list[int]]


def picture_of(workflow: Workflow) -> Picture:
    from dovetail.core.dag import layers

    index_of = {node.id: index for index, node in enumerate(workflow.nodes)}
    parents = [[index_of[name] for name in node.dependencies] for node in workflow.nodes]
    return Picture(
        name=workflow.name,
        ids=[node.id for node in workflow.nodes],
        handlers=[node.handler for node in workflow.nodes],
        conditions=[_condition(node) for node in workflow.nodes],
        parents=parents,
        layers=layers(parents),
    )


def _condition(node: Node) -> str:
    """Without the braces, which say nothing there."""
    if node.condition is None or node.condition is True:
        return ""
    text = str(node.condition).strip()
    whole = text.startswith("{{") and text.endswith("}}") and text.count("{{") == 1
    return text[2:-2].strip(" -") if whole else text


SWEEPS = 8
# Edges of a graph with more bends are drawn straight: no reader could follow them anyway.
MAX_BENDS = 20_000
NODE_HEIGHT = 1.0
BEND_HEIGHT = 0.4


@dataclass(slots=True)
class SvgLayout:
    """Points are numbered: first the nodes, as they were given, then the bends."""

    columns: list[list[int]]
    heights: list[float]
    """What a point takes in its column, in units of one node."""
    column_of: list[int]
    y: list[float] = field(default_factory=list)
    """The middle of each point, from 0 on."""
    routes: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """For each edge, parent to child, the points it runs through."""


def lay_out(layers: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> SvgLayout:
    layout, left, right = _with_bends(layers, parents)
    for sweep in range(SWEEPS):
        forwards = sweep % 2 == 0
        _sort(layout.columns, left if forwards else right, forwards)
    _place(layout, left, right)
    return layout


def _with_bends(
    layers: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
) -> tuple[SvgLayout, list[list[int]], list[list[int]]]:
    """The columns with bends in them, and each point's neighbours in the columns beside it."""
    column_of = [0] * len(parents)
    for number, layer in enumerate(layers):
        for node in layer:
            column_of[node] = number
    spans = (column_of[node] - column_of[p] for node, above in enumerate(parents) for p in above)
    bends = sum(span - 1 for span in spans) <= MAX_BENDS
    layout = SvgLayout([list(layer) for layer in layers], [NODE_HEIGHT] * len(parents), column_of)
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
    """Order each column by the mean index of its neighbours in the columns already ordered."""
    place = {point: at for column in columns for at, point in enumerate(column)}

    def mean(point: int) -> float:
        others = neighbours[point]
        # A point without a neighbour there keeps its index; the sort is stable.
        return sum(place[other] for other in others) / len(others) if others else place[point]

    for column in columns if forwards else reversed(columns):
        column.sort(key=mean)
        place.update((point, at) for at, point in enumerate(column))


def _place(layout: SvgLayout, left: list[list[int]], right: list[list[int]]) -> None:
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


def _pull(layout: SvgLayout, column: list[int], neighbours: list[list[int]]) -> None:
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


LONGEST_NAME = 40
MAX_PARENTS = 8


def draw_words(picture: Picture) -> Iterator[Line]:
    """A table: layer, node, handler, and what it waits for. On a terminal, names are cut."""
    shorten = clip if sys.stdout.isatty() else _whole
    numbers = len(str(len(picture.layers) - 1))
    ids = [shorten(name, LONGEST_NAME) for name in picture.ids]
    handlers = [shorten(plain(name), LONGEST_NAME) for name in picture.handlers]
    id_width = max(map(len, ids))
    handler_width = max(map(cells, handlers))
    for number, layer in enumerate(picture.layers):
        label = str(number)
        for node in layer:
            line = [
                (f"{label:>{numbers}}  ", "dim"),
                (ids[node].ljust(id_width), "bold"),
                (f"  {pad(handlers[node], handler_width)}", "busy"),
            ]
            if picture.parents[node]:
                names = [ids[parent] for parent in picture.parents[node]]
                line.append((f"  ← {listed(names, MAX_PARENTS)}", ""))
            if picture.conditions[node]:
                line.append(
                    (f"  if {shorten(plain(picture.conditions[node]), LONGEST_NAME)}", "wait")
                )
            yield line
            label = ""


def _whole(text: str, _: int) -> str:
    return text


# Words of Mermaid's own: a node of that name would break the picture.
# fmt: off
_RESERVED = frozenset({
    "_blank", "_parent", "_self", "_top", "accDescr", "accTitle", "call", "class", "classDef",
    "click", "default", "direction", "end", "flowchart", "graph", "href", "interpolate",
    "linkStyle", "style", "subgraph",
})
# fmt: on
# What means something inside a label; entity codes are Mermaid's only way to quote it.
_ENTITIES = str.maketrans({sign: f"#{ord(sign)};" for sign in '#&<>"`\\'})


def draw_mermaid(picture: Picture) -> Iterator[str]:
    taken = set(picture.ids)
    names = [_name(node_id, taken) for node_id in picture.ids]
    yield "---"
    yield f'title: "{picture.name}"'
    yield "---"
    yield "flowchart LR"
    for layer in picture.layers:
        for node in layer:
            label = f"{_label(picture.ids[node])}<br/>{_label(picture.handlers[node])}"
            # What may be skipped is a hexagon: there is a decision in it.
            begin, end = ("{{", "}}") if picture.conditions[node] else ("(", ")")
            yield f'    {names[node]}{begin}"{label}"{end}'
    for node, parents in enumerate(picture.parents):
        for parent in parents:
            yield f"    {names[parent]} --> {names[node]}"


def _name(node_id: str, taken: set[str]) -> str:
    if node_id not in _RESERVED and node_id.lower() != "end":
        return node_id
    name = f"node_{node_id}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _label(text: str) -> str:
    return plain(text).translate(_ENTITIES)


def draw_dot(picture: Picture) -> Iterator[str]:
    yield f"digraph {_quoted(picture.name)} {{"
    yield "    rankdir=LR;"
    yield '    node [shape=box, style=rounded, fontname="sans-serif"];'
    for layer in picture.layers:
        for node in layer:
            label = f'"{_escaped(picture.ids[node])}\\n{_escaped(picture.handlers[node])}"'
            dashed = ', style="rounded,dashed"' if picture.conditions[node] else ""
            yield f"    {_quoted(picture.ids[node])} [label={label}{dashed}];"
    for node, parents in enumerate(picture.parents):
        for parent in parents:
            yield f"    {_quoted(picture.ids[parent])} -> {_quoted(picture.ids[node])};"
    yield "}"


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    # A backslash would begin one of Graphviz' own escapes, such as \N for the node's name.
    return plain(text).replace("\\", "\\\\").replace('"', '\\"')


LONGEST_LABEL = 32
# In pixels: of the letters, of a box, of the room between boxes and between columns.
LETTER, SMALL_LETTER = 7.9, 6.7
BOX_HEIGHT, PADDING = 42.0, 12.0
ROW, GAP, MARGIN = 60.0, 70.0, 24.0

_STYLE = """
    text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
    .id { font-size: 13px; fill: #1f2933; }
    .handler { font-size: 11px; fill: #7b8794; }
    .box { fill: #ffffff; stroke: #9aa5b1; }
    .may-skip { stroke-dasharray: 5 3; }
    .edge { fill: none; stroke: #9aa5b1; stroke-width: 1.2; }
    .tip { fill: #9aa5b1; }
    .paper { fill: #fafbfc; }
    @media (prefers-color-scheme: dark) {
      .id { fill: #e4e7eb; }
      .handler { fill: #9aa5b1; }
      .box { fill: #1f2933; stroke: #7b8794; }
      .edge { stroke: #7b8794; }
      .tip { fill: #7b8794; }
      .paper { fill: #12171d; }
    }
""".strip("\n")
_TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    ' orient="auto"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
)


def draw_svg(picture: Picture) -> Iterator[str]:
    layout = lay_out(picture.layers, picture.parents)
    ids = [clip(plain(name), LONGEST_LABEL) for name in picture.ids]
    handlers = [clip(plain(name), LONGEST_LABEL) for name in picture.handlers]
    widths = [
        max(cells(ids[node]) * LETTER, cells(handlers[node]) * SMALL_LETTER) + 2 * PADDING
        for node in range(len(ids))
    ]
    starts, column_widths = _columns(picture, widths)
    width = starts[-1] + column_widths[-1] + MARGIN
    height = max(layout.y) * ROW + ROW / 2 + 2 * MARGIN

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}">'
    )
    yield f"  <title>{escape(picture.name)}</title>"
    yield f"  <style>\n{_STYLE}\n  </style>"
    yield f"  <defs>{_TIP}</defs>"
    yield '  <rect width="100%" height="100%" class="paper"/>'
    for route in layout.routes.values():
        path = _path(route, layout, starts, column_widths)
        yield f'  <path class="edge" marker-end="url(#tip)" d="{path}"/>'
    for layer in picture.layers:
        for node in layer:
            x, y = starts[layout.column_of[node]], _y(layout, node)
            box = column_widths[layout.column_of[node]]
            kind = quoteattr("box may-skip" if picture.conditions[node] else "box")
            middle = x + box / 2
            tip = f"{plain(picture.ids[node])}: {plain(picture.handlers[node])}"
            yield f"  <g><title>{escape(tip)}</title>"
            yield (
                f'    <rect class={kind} x="{x:.1f}" y="{y - BOX_HEIGHT / 2:.1f}"'
                f' width="{box:.1f}" height="{BOX_HEIGHT:.0f}" rx="6"/>'
            )
            yield _text("id", middle, y - 3, ids[node])
            yield _text("handler", middle, y + 13, handlers[node]) + "</g>"
    yield "</svg>"


def _columns(picture: Picture, widths: list[float]) -> tuple[list[float], list[float]]:
    """Where each column begins, and how wide its boxes are."""
    starts, column_widths = [], []
    x = MARGIN
    for layer in picture.layers:
        starts.append(x)
        column_widths.append(max(widths[node] for node in layer))
        x += column_widths[-1] + GAP
    return starts, column_widths


def _y(layout: SvgLayout, point: int) -> float:
    return MARGIN + layout.y[point] * ROW


def _path(
    route: list[int], layout: SvgLayout, starts: list[float], column_widths: list[float]
) -> str:
    """From box to box in curves, straight through the columns in between."""
    column = layout.column_of[route[0]]
    x, y = starts[column] + column_widths[column], _y(layout, route[0])
    path = f"M{x:.1f} {y:.1f}"
    for point in route[1:]:
        column = layout.column_of[point]
        to_x, to_y = starts[column], _y(layout, point)
        bend = (to_x - x) / 2
        path += f" C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
        if point != route[-1]:
            x = starts[column] + column_widths[column]
            path += f" L{x:.1f} {y:.1f}"
    return path


def _text(kind: str, x: float, y: float, words: str) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}"'
    return f'    <text class="{kind}" {at} text-anchor="middle">{escape(words)}</text>'


_DRAW: dict[str, Callable[[Picture], Iterable[Line | str]]] = {
    "text": draw_words,
    "mermaid": draw_mermaid,
    "dot": draw_dot,
    "svg": draw_svg,
}
