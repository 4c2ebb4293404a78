"""The graph in Mermaid's language, for Markdown pages."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.cli.drawing.picture import Picture
from dovetail.cli.text import plain

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
