"""The graph in Graphviz' language."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.cli.drawing.picture import Picture
from dovetail.cli.text import plain


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
