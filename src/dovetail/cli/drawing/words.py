"""The graph as a table for the terminal: layer, node, handler, and what it waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from dovetail.cli.drawing.picture import Picture
from dovetail.cli.text import Line, cells, clip, listed, pad, plain

LONGEST_NAME = 40
MOST_PARENTS = 8


def draw_words(picture: Picture) -> Iterator[Line]:
    """For a terminal names are cut; what reads a pipe wants them whole."""
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
                line.append((f"  ← {listed(names, MOST_PARENTS)}", ""))
            if picture.conditions[node]:
                line.append(
                    (f"  if {shorten(plain(picture.conditions[node]), LONGEST_NAME)}", "wait")
                )
            yield line
            label = ""


def _whole(text: str, _: int) -> str:
    return text
