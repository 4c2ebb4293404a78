"""The graph as one SVG file that needs nothing else: no fonts, no scripts, no network.

It is dark where whoever looks at it wants that.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from dovetail.cli.drawing.layout import Layout, lay_out
from dovetail.cli.drawing.picture import Picture
from dovetail.cli.text import cells, clip, plain

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


def _y(layout: Layout, point: int) -> float:
    return MARGIN + layout.y[point] * ROW


def _path(route: list[int], layout: Layout, starts: list[float], column_widths: list[float]) -> str:
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
