"""YAML, as much of it as plain data needs.

libyaml's events are read one by one into a `TextTree`: building its nodes first would take
three times as long, and its depth must be stopped while it grows (libyaml needs 30 s for
100,000 open brackets). Scalars follow YAML 1.2 and are typed only where nobody could mean text:
`true`, `false`, `null`, `~` (and their capitalised forms) and decimal numbers. `on`, `off`,
`yes`, `no`, dates, `0777`, `0x1f` and `1_000` stay text. Keys are always text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isfinite
from typing import Any

import yaml
from yaml import CSafeLoader
from yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from dovetail.core.definition.text_tree import MOST_VALUES, Refused, TextTree
from dovetail.core.findings import Path, one_line, shown
from dovetail.core.values import LARGEST_INT, SMALLEST_INT

_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
}
_MAY_BE_TYPED = frozenset("+-.0123456789")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z")
# libyaml takes quadratic time over them, and nothing here may be tagged.
_TAG_DIRECTIVE = re.compile("^%TAG", re.MULTILINE)
_ONLY_COMMENTS = re.compile(r"(?:\s++|\.\.\.(?=\s|\Z)|#[^\n]*+)*+")

NO_ALIASES = "anchors (&) and aliases (*) are not supported; write the value out where it is used"
QUOTE_TEMPLATE = 'a template must be in quotes: "{{ … }}"'


def load_yaml(text: str, tree: TextTree) -> YamlOffsets:
    """Read one document into the tree. Raises `Refused` where it cannot go on."""
    directive = _TAG_DIRECTIVE.search(text)
    if directive:
        tree.fail("%TAG directives are not supported", directive.start())
    loader = CSafeLoader(text)
    offsets = YamlOffsets()
    try:
        _read(loader, text, tree, offsets)
    except yaml.MarkedYAMLError as error:
        tree.fail(_explain(error, text), _offset(error))
    finally:
        loader.dispose()
    if tree.refusals:
        raise Refused
    offsets.data = tree.data
    return offsets


class YamlOffsets:
    """Where every key and value stands, in the order of the text.

    A flat list costs next to nothing while reading. Which entry is whose is found when a place is
    asked for, by walking down the data, whose order is that of the text.
    """

    def __init__(self) -> None:
        self.data: Any = None
        self.starts: list[int] = []
        self.behind: dict[int, int] = {}
        """Of a container's entry: the first one that is not in it."""
        self._inside: dict[int, dict[str | int, int]] = {}

    def find(self, path: Path, key: bool) -> int:
        """The offset of the value at `path`, which is there; with `key`, of its key."""
        if not self.starts:
            return 0  # an empty document
        entry, data = 0, self.data
        for step in path:
            if entry not in self._inside:
                self._inside[entry] = self._entries(entry, data)
            entry = self._inside[entry][step]
            before, data = data, data[step]
        return self.starts[entry - 1 if key and isinstance(before, dict) else entry]

    def _entries(self, entry: int, data: dict[str, Any] | list[Any]) -> dict[str | int, int]:
        """The entry of each value of a container, by its key or index."""
        found: dict[str | int, int] = {}
        at = entry + 1
        keyed = isinstance(data, dict)
        for step in data if keyed else range(len(data)):
            at += keyed  # a key has an entry of its own
            found[step] = at
            at = self.behind.get(at, at + 1)
        return found


def _read(loader: CSafeLoader, text: str, tree: TextTree, offsets: YamlOffsets) -> None:
    # Up to 200,000 times around, so what happens each time is written out here.
    next_event: Callable[[], Any] = loader.get_event
    starts, behind = offsets.starts, offsets.behind
    containers: list[int] = []
    escapes = "\\" in text
    for _ in range(MOST_VALUES):
        event = next_event()
        kind = event.__class__
        if kind is ScalarEvent:
            at = event.start_mark.index
            starts.append(at)
            if event.anchor is not None or event.tag is not None:
                _refuse_properties(event, tree, at)
            value = event.value
            plain = event.implicit[0]
            innermost: Any = tree.innermost
            if tree.key is None and innermost.__class__ is dict:
                if plain and value == "<<":
                    tree.refuse("merge keys (<<) are not supported; write the fields out", at)
                tree.key = value
                if value in innermost:
                    tree.refuse_twice(value, at)
                if escapes and not plain:
                    tree.check_text(value, at)
                continue
            if plain:
                if value in _WORDS:
                    value = _WORDS[value]
                elif value[0] in _MAY_BE_TYPED:
                    value = _typed(value, tree, at)
            elif escapes:
                tree.check_text(value, at)
            if innermost.__class__ is list:
                innermost.append(value)
            elif innermost.__class__ is dict:
                innermost[tree.key] = value
                tree.key = None
            else:
                tree.data = value
        elif kind is MappingEndEvent or kind is SequenceEndEvent:
            behind[containers.pop()] = len(starts)
            tree.close()
        elif kind is MappingStartEvent or kind is SequenceStartEvent:
            at = event.start_mark.index
            if event.anchor is not None or event.tag is not None:
                _refuse_properties(event, tree, at)
            if tree.expects_key:
                if text.startswith("{{", at - 1):
                    tree.fail(QUOTE_TEMPLATE, at - 1)
                tree.fail("a key must be text, not a mapping or a list", at)
            tree.open({} if kind is MappingStartEvent else [], at)
            containers.append(len(starts))
            starts.append(at)
        elif kind is AliasEvent:
            at = event.start_mark.index
            tree.refuse(NO_ALIASES, at)
            if tree.expects_key:
                tree.name(f"*{event.anchor}", at)
            else:
                tree.value(None)
        elif kind is DocumentEndEvent:
            _expect_end(text, tree, event.start_mark.index)
            return
        elif kind is StreamEndEvent:
            return
    at = event.start_mark.index
    tree.fail(f"more than {MOST_VALUES:,} values in one text", at, code="too_large")


def _typed(value: str, tree: TextTree, at: int) -> Any:
    """What an unquoted scalar that may be a number stands for."""
    if _INT.match(value):
        # Nothing longer can fit, and Python refuses to read very long ones.
        number = int(value) if len(value) <= 21 else LARGEST_INT + 1
        if not SMALLEST_INT <= number <= LARGEST_INT:
            message = (
                f"{one_line(value)} does not fit into 64 bits; put it in quotes to keep it text"
            )
            tree.refuse(message, at)
        return number
    if _FLOAT.match(value):
        real = float(value)
        if not isfinite(real):
            message = (
                f"{one_line(value)} is too large for a number; put it in quotes to keep it text"
            )
            tree.refuse(message, at)
        return real
    if _NOT_FINITE.match(value):
        tree.refuse(f"{value} is not a number; put it in quotes to keep it text", at)
    return value


def _refuse_properties(event: Any, tree: TextTree, at: int) -> None:
    if event.anchor is not None:
        tree.refuse(NO_ALIASES, at)
    if event.tag is not None:
        tag = event.tag.replace("tag:yaml.org,2002:", "!!")
        tree.refuse(f"tags are not supported: leave out {shown(tag)}", at)


def _expect_end(text: str, tree: TextTree, at: int) -> None:
    """Only comments may follow. Looking here keeps libyaml from parsing what is refused anyway."""
    rest = _ONLY_COMMENTS.match(text, at)
    end = rest.end() if rest else at
    if end < len(text):
        tree.fail("the document ends before this; a text holds exactly one YAML document", end)


def _offset(error: yaml.MarkedYAMLError) -> int:
    # Of an unclosed quote the end of the text is of no interest.
    mark = error.context_mark if _is_unclosed(error) else error.problem_mark
    return mark.index if mark else 0


def _is_unclosed(error: yaml.MarkedYAMLError) -> bool:
    return bool(error.context_mark) and "unexpected end of stream" in (error.problem or "")


def _explain(error: yaml.MarkedYAMLError, text: str) -> str:
    """libyaml's message, or what the usual mistakes behind it are."""
    problem = error.problem or "not valid YAML"
    here = text[_offset(error) : _offset(error) + 1]
    if here == "\t" or "tab character" in problem:
        return "a tab cannot be used here; indent YAML with spaces"
    if "cannot start any token" in problem:
        return f"an unquoted value cannot start with {shown(here)}; put it in quotes"
    if "mapping values are not allowed" in problem:
        return (
            "a key is not expected here: check the indentation, "
            "or put a value that contains ': ' in quotes"
        )
    if _is_unclosed(error):
        return "a quote is opened here and never closed"
    if error.context and error.context_mark and error.context_mark.index < _offset(error):
        line = error.context_mark.line + 1
        return f"not valid YAML: {problem} ({error.context} that begins in line {line})"
    return f"not valid YAML: {problem}"
