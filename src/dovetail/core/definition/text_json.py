"""JSON, strictly: no duplicate keys, no NaN, nothing deeper or larger than a store can keep.

The standard library reads it; it is fast but knows no positions. Only where something is wrong
is the text scanned again, which is slower and finds every offset; and where a problem of what
was read needs its place, `JsonOffsets` looks for just that one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count
from math import isfinite
from typing import Any

from dovetail.core.definition.text_tree import MOST_VALUES, Refused, TextTree
from dovetail.core.findings import Path, one_line
from dovetail.core.values import LARGEST_INT, SMALLEST_INT, is_json

# An unclosed string reaches to the end, so that a text of quotes is not tried from each of them.
_TOKEN = re.compile(r'[{}\[\]]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[^\s{}\[\],:"]+', re.DOTALL)
_ANY_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRING = re.compile(_ANY_STRING, re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*+")
_PLAIN = rf"(?:{_ANY_STRING}|[^][{{}}\",\s]++)"
_VALUE = re.compile(rf"{_PLAIN}[ \t\n\r]*+,?", re.DOTALL)
_MEMBER = re.compile(
    rf"[ \t\n\r]*+({_ANY_STRING})[ \t\n\r]*+:[ \t\n\r]*+(?:({_PLAIN})[ \t\n\r]*+,?)?+", re.DOTALL
)
_DECODER = json.JSONDecoder()
_INT = re.compile(r"-?[0-9]+\Z")
_WORDS = {"true": True, "false": False, "null": None}


def load_json(text: str, tree: TextTree, max_depth: int) -> Any:
    """The data, if all is well; else what is wrong is in the tree and `Refused` is raised."""
    if _roughly(text) > MOST_VALUES and _roughly(_STRING.sub("", text)) > MOST_VALUES:
        tree.fail(f"more than {MOST_VALUES:,} values in one text", 0, code="too_large")
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        tree.fail(f"not valid JSON: {_lower(error.msg)}", error.pos)
    except (RecursionError, ValueError):
        # Too deep, a duplicate key, or an integer so long that Python does not read it.
        _scan(text, tree)
        if not tree.refusals:
            raise
        raise Refused from None
    if "\\u0000" in text or not is_json(data, max_depth=max_depth, max_values=len(text)):
        _scan(text, tree)
        if tree.refusals:
            raise Refused
    return data


def _roughly(text: str) -> int:
    """No fewer than its values: a comma before each, or a bracket."""
    return text.count(",") + text.count("[") + text.count("{")


class JsonOffsets:
    """Finds where a value stands in a text that `load_json` has read.

    It looks into the containers on the way and into no others, and no further than it must. What
    lies before a place is stepped over by a pattern, or where that has containers of its own by
    the standard library: a hundred times faster than all offsets could be noted.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._inside: dict[int, _Inside] = {}

    def find(self, path: Path, key: bool) -> int:
        """The offset of the value at `path`, which is there; with `key`, of its key."""
        key_at = at = _next(self._text, 0)
        for step in path:
            if at not in self._inside:
                self._inside[at] = _Inside(self._text, at)
            key_at, at = self._inside[at].find(step)
        return key_at if key else at


class _Inside:
    """One container: the offsets of its members, as far as they were asked for."""

    def __init__(self, text: str, at: int) -> None:
        self._found: dict[str | int, tuple[int, int]] = {}
        self._rest = _items(text, at + 1) if text[at] == "[" else _members(text, at + 1)

    def find(self, step: str | int) -> tuple[int, int]:
        """Where the member's key and value begin; an item of a list has no key."""
        while step not in self._found:
            name, key_at, value_at = next(self._rest)
            self._found[name] = key_at, value_at
        return self._found[step]


def _items(text: str, at: int) -> Iterator[tuple[str | int, int, int]]:
    for index in count():
        at = _next(text, at)
        yield index, at, at
        at = _behind(text, at)


def _members(text: str, at: int) -> Iterator[tuple[str | int, int, int]]:
    while (found := _MEMBER.match(text, at)) is not None:
        name, plain = found[1], found[2]
        value_at = found.end() if plain is None else found.start(2)
        yield json.loads(name) if "\\" in name else name[1:-1], found.start(1), value_at
        at = _behind(text, value_at) if plain is None else found.end()


def _behind(text: str, at: int) -> int:
    """Past a value and the sign after it."""
    found = _VALUE.match(text, at)
    if found is not None:
        return found.end()
    return _next(text, _DECODER.raw_decode(text, at)[1]) + 1


def _next(text: str, at: int) -> int:
    """Past what may stand between two signs."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _scan(text: str, tree: TextTree) -> None:
    """Read the offsets of all values, and refuse what must be.

    The text was found to be JSON at least up to the first thing to refuse; after that it may
    be anything, and the scan just ends where it makes no sense.
    """
    depth = 0
    for match in _TOKEN.finditer(text):
        word, at = match.group(), match.start()
        if word in ("{", "["):
            if tree.expects_key:
                return
            tree.open({} if word == "{" else [], at)
            depth += 1
        elif word in ("}", "]"):
            if not depth:
                return
            tree.close()
            depth -= 1
        elif word[0] == '"':
            try:
                value = json.loads(word) if "\\" in word else word[1:-1]
            except ValueError:
                return
            if tree.expects_key:
                tree.name(value, at)
                tree.check_text(value, at)
            else:
                tree.check_text(value, at)
                tree.value(value)
        elif tree.expects_key:
            return
        else:
            tree.value(_literal(word, tree, at))


def _literal(token: str, tree: TextTree, at: int) -> Any:
    if token in _WORDS:
        return _WORDS[token]
    if _INT.match(token):
        number = int(token) if len(token) <= 20 else LARGEST_INT + 1
        if not SMALLEST_INT <= number <= LARGEST_INT:
            tree.refuse(f"{one_line(token)} does not fit into 64 bits; write it as text", at)
        return number
    try:
        real = float(token)  # takes NaN and Infinity too, as the standard library does
    except ValueError:
        return None
    if not isfinite(real):
        tree.refuse(f"{one_line(token)} is not a JSON number; numbers are finite", at)
    return real


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
