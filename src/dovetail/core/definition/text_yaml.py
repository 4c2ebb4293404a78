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

from dovetail.core.definition.text_tree import MOST_VALUES, TextTree
from dovetail.core.findings import one_line, shown
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


def load_yaml(text: str, tree: TextTree) -> None:
    """Read one document into the tree. Raises `Refused` where it cannot go on."""
    directive = _TAG_DIRECTIVE.search(text)
    if directive:
        tree.fail("%TAG directives are not supported", directive.start())
    loader = CSafeLoader(text)
    try:
        _read(loader, text, tree)
    except yaml.MarkedYAMLError as error:
        tree.fail(_explain(error, text), _offset(error))
    finally:
        loader.dispose()


def _read(loader: CSafeLoader, text: str, tree: TextTree) -> None:
    next_event: Callable[[], Any] = loader.get_event
    for _ in range(MOST_VALUES):
        event = next_event()
        kind = type(event)
        at = event.start_mark.index
        if kind is yaml.ScalarEvent:
            value = event.value
            if event.anchor is not None or event.tag is not None:
                _refuse_properties(event, tree, at)
            plain = event.implicit[0]
            if tree.expects_key:
                if plain and value == "<<":
                    tree.refuse("merge keys (<<) are not supported; write the fields out", at)
                tree.key(value, at)
            else:
                if plain:
                    value = _typed(value, tree, at)
                else:
                    tree.check_text(value, at)
                tree.value(value, at)
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            tree.close()
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            if event.anchor is not None or event.tag is not None:
                _refuse_properties(event, tree, at)
            if tree.expects_key:
                if text.startswith("{{", at - 1):
                    tree.fail(QUOTE_TEMPLATE, at - 1)
                tree.fail("a key must be text, not a mapping or a list", at)
            tree.open({} if kind is yaml.MappingStartEvent else [], at)
        elif kind is yaml.AliasEvent:
            tree.refuse(NO_ALIASES, at)
            if tree.expects_key:
                tree.key(f"*{event.anchor}", at)
            else:
                tree.value(None, at)
        elif kind is yaml.DocumentEndEvent:
            _expect_end(text, tree, at)
            return
        elif kind is yaml.StreamEndEvent:
            return
    tree.fail(f"more than {MOST_VALUES:,} values in one text", at, code="too_large")


def _typed(value: str, tree: TextTree, at: int) -> Any:
    """What an unquoted scalar stands for."""
    if value in _WORDS:
        return _WORDS[value]
    if value[0] not in _MAY_BE_TYPED:
        return value
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
