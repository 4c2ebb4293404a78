"""A definition as a text: YAML or JSON read into plain data, with the position of every value.

Both readers take hostile text: size is checked first, depth as it grows, nothing recurses, and
whatever the two formats allow beyond plain data (anchors, tags, duplicate keys, NaN) is refused
where it stands. What it must not know: what a workflow is. It reads params files as well.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from dovetail.core.definition.text_json import JsonOffsets, load_json
from dovetail.core.definition.text_tree import Mark, Refused, TextTree
from dovetail.core.definition.text_yaml import load_yaml
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
    _mark: Mark | None = field(default=None, repr=False)
    _offsets: JsonOffsets | None = field(default=None, repr=False)
    _starts: array[int] | None = field(default=None, repr=False)

    def position(self, path: Path, *, key: bool = False) -> tuple[int, int] | None:
        """Line and column, from 1, of the value at `path`, or of its nearest known parent.

        With `key`, of the last key of the path rather than of the value under it.
        """
        if self.text is None:
            return None
        if self._starts is None:
            self._starts = _line_starts(self.text)
        if self._mark is not None:
            return _place(_offset(self._mark, path, key), self._starts)
        if self._offsets is None:
            self._offsets = JsonOffsets(self.text)
        return _place(self._offsets.find(path, key), self._starts)


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
        if format == "json":
            return Source(load_json(text, tree, max_depth), name, text)
        load_yaml(text, tree)
        if tree.refusals:
            raise Refused
    except Refused:
        starts = _line_starts(text)
        problems = [
            Problem(code, message, format_path(path), *_place(offset, starts))
            for code, message, path, offset in tree.refusals
        ]
        raise InvalidDefinition(problems) from None
    return Source(tree.data, name, text, tree.mark)


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
            place = _place(len(before), _line_starts(before))
            message = "the text is not UTF-8"
            raise InvalidDefinition([Problem("invalid_field", message, "", *place)]) from None
    return text.removeprefix("\ufeff")


def _offset(mark: Mark, path: Path, key: bool) -> int:
    """Walk down as far as the path is known."""
    for depth, step in enumerate(path, 1):
        inside = None if isinstance(mark, int) else mark[1]
        if isinstance(inside, dict) and step in inside:
            key_at, mark = inside[step]
            if key and depth == len(path):
                return int(key_at)
        elif isinstance(inside, list) and isinstance(step, int) and 0 <= step < len(inside):
            mark = inside[step]
        else:
            break
    return int(mark if isinstance(mark, int) else mark[0])


def _line_starts(text: str) -> array[int]:
    # An array, as a text may be a million line breaks and a list of numbers takes ten times that.
    if _OTHER_BREAK.search(text):
        starts = array("L", [0])
        starts.extend(match.end() for match in _BREAK.finditer(text))
        return starts
    lines = text.split("\n")
    return array("L", accumulate((len(line) + 1 for line in lines[:-1]), initial=0))


def _place(offset: int, starts: array[int]) -> tuple[int, int]:
    line = bisect_right(starts, offset)
    return line, offset - starts[line - 1] + 1
