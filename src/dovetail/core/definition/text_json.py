"""JSON, strictly: no duplicate keys, no NaN, nothing deeper or larger than a store can keep.

The standard library reads it; it is fast but knows no positions. Only where something is wrong
is the text scanned again, which is slower and finds every offset; and where a problem of what
was read needs its place, `JsonOffsets` looks for just that one.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any

from dovetail.core.definition.text_tree import MOST_VALUES, Refused, TextTree
from dovetail.core.findings import Path, one_line
from dovetail.core.values import LARGEST_INT, SMALLEST_INT, is_json

# An unclosed string reaches to the end, so that a text of quotes is not tried from each of them.
_TOKEN = re.compile(r'[{}\[\]]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[^\s{}\[\],:"]+', re.DOTALL)
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*")
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


Inside = list[int] | dict[str, tuple[int, int]]


class JsonOffsets:
    """Finds where a value stands in a text that `load_json` has read.

    It looks into the containers on the way and into no others: the standard library steps over
    those, a hundred times faster than all offsets could be noted.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._inside: dict[int, Inside] = {}
        self._step_over = json.JSONDecoder().raw_decode

    def find(self, path: Path, key: bool) -> int:
        """The offset of the value at `path`, or of its nearest parent; with `key`, of its key."""
        at = self._next(0)
        for depth, step in enumerate(path, 1):
            inside = self._look_inside(at)
            if isinstance(inside, dict) and step in inside:
                key_at, at = inside[str(step)]
                if key and depth == len(path):
                    return key_at
            elif isinstance(inside, list) and isinstance(step, int) and 0 <= step < len(inside):
                at = inside[step]
            else:
                break
        return at

    def _look_inside(self, at: int) -> Inside:
        if at not in self._inside:
            match self._text[at]:
                case "[":
                    self._inside[at] = self._items(at)
                case "{":
                    self._inside[at] = self._members(at)
                case _:
                    return []
        return self._inside[at]

    def _items(self, at: int) -> list[int]:
        text, found = self._text, []
        at = self._next(at + 1)
        while text[at] != "]":
            found.append(at)
            at = self._next(self._step_over(text, at)[1])
            if text[at] == ",":
                at = self._next(at + 1)
        return found

    def _members(self, at: int) -> dict[str, tuple[int, int]]:
        text = self._text
        found: dict[str, tuple[int, int]] = {}
        at = self._next(at + 1)
        while text[at] != "}":
            name, colon = self._step_over(text, at)
            value_at = self._next(self._next(colon) + 1)
            found[name] = at, value_at
            at = self._next(self._step_over(text, value_at)[1])
            if text[at] == ",":
                at = self._next(at + 1)
        return found

    def _next(self, at: int) -> int:
        """Past what may stand between two signs."""
        if self._text[at] > " ":
            return at
        found = _SPACE.match(self._text, at)
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
                tree.key(value, at)
            else:
                tree.check_text(value, at)
                tree.value(value, at)
        elif tree.expects_key:
            return
        else:
            tree.value(_literal(word, tree, at), at)


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
