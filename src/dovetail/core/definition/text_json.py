"""JSON, strictly: no duplicate keys, no NaN, nothing deeper or larger than a store can keep.

The standard library reads it; it is fast but knows no positions. Only where something is wrong,
or a problem needs its place, is the text scanned again by `scan_json`, which is slower and
finds every offset.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any

from dovetail.core.definition.text_tree import Mark, Refused, TextTree
from dovetail.core.findings import one_line
from dovetail.core.values import LARGEST_INT, SMALLEST_INT, is_json

# An unclosed string reaches to the end, so that a text of quotes is not tried from each of them.
_TOKEN = re.compile(r'[{}\[\]]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[^\s{}\[\],:"]+', re.DOTALL)
_INT = re.compile(r"-?[0-9]+\Z")
_WORDS = {"true": True, "false": False, "null": None}


def load_json(text: str, tree: TextTree, max_depth: int) -> Any:
    """The data, if all is well; else what is wrong is in the tree and `Refused` is raised."""
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


def scan_json(text: str) -> Mark:
    """Where everything stands in a text that `load_json` has read."""
    tree = TextTree(max_depth=len(text))
    _scan(text, tree)
    return tree.mark


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
