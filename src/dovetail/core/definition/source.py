"""A definition as a text: YAML or JSON read into plain data, with the position of every value.

Both readers take hostile text: size is checked first, depth as it grows, nothing recurses, and
whatever the two formats allow beyond plain data (anchors, tags, duplicate keys, NaN) is refused
where it stands. What it must not know: what a workflow is. It reads params files as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from dovetail.core.definition.text_json import JsonOffsets, load_json
from dovetail.core.definition.text_tree import Refused, TextTree
from dovetail.core.definition.text_yaml import YamlOffsets, load_yaml
from dovetail.core.definition.uncollected import uncollected
from dovetail.core.errors import InvalidDefinition, Problem
from dovetail.core.findings import Path, format_path

MAX_TEXT_BYTES = 1 << 20
MAX_TEXT_DEPTH = 32

# What YAML calls a line break; positions in JSON are counted the same way.
_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_OTHER_BREAK = re.compile("[\r\x85\u2028\u2029]")
# What a format does not allow as it is; a lone surrogate comes from a str that is no text.
_FORBIDDEN = {
    "json": re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]"),
    "yaml": re.compile(
        "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufffe\uffff]"
    ),
}


@dataclass(slots=True)
class Source:
    """Plain data, and where each part of it stands in the text it was read from."""

    data: Any
    name: str = ""
    text: str | None = field(default=None, repr=False)
    _offsets: YamlOffsets | JsonOffsets | None = field(default=None, repr=False)
    _lines: Lines | None = field(default=None, repr=False)

    def position(self, path: Path, *, key: bool = False) -> tuple[int, int] | None:
        """Line and column, from 1, of the value at `path`, or of its nearest known parent.

        With `key`, of the last key of the path rather than of the value under it.
        """
        if self.text is None or self._offsets is None:
            return None
        if self._lines is None:
            self._lines = Lines(self.text)
        known = _known(self.data, path)
        offset = self._offsets.find(known, key and len(known) == len(path) > 0)
        return self._lines.place(offset)


def read_text(
    text: str | bytes,
    *,
    format: Literal["yaml", "json"],  # noqa: A002  the word everyone would look for
    name: str = "",
    max_bytes: int = MAX_TEXT_BYTES,
    max_depth: int = MAX_TEXT_DEPTH,
) -> Source:
    """Read a text, or raise `InvalidDefinition` with everything in it that is not plain data."""
    text = _decoded(text, max_bytes)
    tree = TextTree(max_depth)
    try:
        bad = _FORBIDDEN[format].search(text)
        if bad:
            tree.fail(f"the character U+{ord(bad.group()):04X} is not allowed", bad.start())
        with uncollected():
            if format == "json":
                return Source(load_json(text, tree, max_depth), name, text, JsonOffsets(text))
            offsets = load_yaml(text, tree)
            return Source(offsets.data, name, text, offsets)
    except Refused:
        lines = Lines(text)
        problems = [
            Problem(code, message, format_path(path), *lines.place(offset))
            for code, message, path, offset in tree.refusals
        ]
        raise InvalidDefinition(problems) from None


def line_of(text: str, number: int) -> str:
    """One line of a text, counted from 1 as positions are; empty if there is none."""
    lines = _BREAK.split(text.removeprefix("\ufeff"), number)
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _decoded(text: str | bytes, max_bytes: int) -> str:
    size = len(text)
    if size <= max_bytes and isinstance(text, str) and not text.isascii():
        size = len(text.encode(errors="surrogatepass"))
    if size > max_bytes:
        message = f"the text has {size:,} bytes; at most {max_bytes:,} are allowed"
        raise InvalidDefinition([Problem("too_large", message, "", 1, 1)])
    if isinstance(text, bytes):
        raw = text
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            before = raw[: error.start].decode().removeprefix("\ufeff")
            place = Lines(before).place(len(before))
            message = "the text is not UTF-8"
            raise InvalidDefinition([Problem("invalid_field", message, "", *place)]) from None
    return text.removeprefix("\ufeff")


def _known(data: Any, path: Path) -> Path:
    """As much of the path as leads to something."""
    for depth, step in enumerate(path):
        is_there = isinstance(data, dict) and step in data
        is_there = is_there or (
            isinstance(data, list) and isinstance(step, int) and 0 <= step < len(data)
        )
        if not is_there:
            return path[:depth]
        data = data[step]
    return path


class Lines:
    """Finds the line and column of an offset.

    Break after break would take long for a text of nothing else, so they are counted in blocks,
    and the rest in the block of the offset that is asked for.
    """

    _BLOCK = 4096

    def __init__(self, text: str) -> None:
        if _OTHER_BREAK.search(text):
            # One `\n` for each, where it ends: every offset stays what it was.
            text = text.replace("\r\n", " \n")
            for other in "\r\x85\u2028\u2029":
                text = text.replace(other, "\n")
        self._text = text
        self._blocks: list[tuple[int, int]] = []
        """The number and the start of the line that each block begins in."""
        line, start = 1, 0
        for block in range(0, len(text) + 1, self._BLOCK):
            self._blocks.append((line, start))
            line, start = self._within(block, block + self._BLOCK, line, start)

    def place(self, offset: int) -> tuple[int, int]:
        block = offset // self._BLOCK
        line, start = self._within(block * self._BLOCK, offset, *self._blocks[block])
        return line, offset - start + 1

    def _within(self, since: int, until: int, line: int, start: int) -> tuple[int, int]:
        last = self._text.rfind("\n", since, until)
        if last < 0:
            return line, start
        return line + self._text.count("\n", since, until), last + 1
