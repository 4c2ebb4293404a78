"""Reads YAML or JSON text into plain data with the position of each value: definitions and params.

The text may be hostile. Size is checked first and depth while it grows, nothing recurses, and
everything beyond plain data (anchors, tags, duplicate keys, NaN) is refused with its position.

JSON: the standard library reads it fast and without positions. Only if something is wrong, the
text is scanned again for all offsets. `JsonOffsets` finds the offset of a single value.

YAML: the events of libyaml go one by one into a `TextTree`. Building libyaml's nodes first would
take three times as long, and depth must be stopped while it grows (libyaml takes 30 s for 100,000
open brackets). Scalars follow YAML 1.2 and are typed only where text cannot be meant: `true`,
`false`, `null`, `~` (and their capitalised forms) and decimal numbers. `on`, `off`, `yes`, `no`,
dates, `0777`, `0x1f` and `1_000` stay text. Keys are always text.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import isfinite
from typing import Any, Literal, NamedTuple, NoReturn

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

from dovetail.core.errors import InvalidDefinition, Path, Problem, format_path, one_line, shown
from dovetail.core.values import MAX_INT, MIN_INT, is_json


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while a definition is read.

    A definition becomes some hundred thousand small containers that all stay, and each collection
    would visit all of them: half of the time that 10,000 nodes take. Only for work of bounded
    size. If two threads use it at once, the pause ends with the first.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


MAX_REFUSALS = 100
MAX_VALUES = 200_000
"""100,000 edges between 10,000 nodes are 190,000; a text of 1 MiB can hold 650,000."""


class TextProblem(NamedTuple):
    code: str
    message: str
    path: Path
    offset: int


class Refused(Exception):
    """The reader cannot go on; the reasons are in `TextTree.refusals`."""


class TextTree:
    """Takes keys, values and brackets in the order of the text."""

    __slots__ = ("_max_depth", "_stack", "data", "innermost", "key", "refusals")

    def __init__(self, max_depth: int) -> None:
        self.data: Any = None
        self.refusals: list[TextProblem] = []
        self.innermost: dict[str | None, Any] | list[Any] | None = None
        """The open container; `key` is the key in it that waits for its value."""
        self.key: str | None = None
        self._max_depth = max_depth
        self._stack: list[tuple[Any, str | None]] = []

    @property
    def expects_key(self) -> bool:
        return self.key is None and type(self.innermost) is dict

    def name(self, key: str, at: int) -> None:
        """The key of the value that comes next."""
        known = self.innermost
        self.key = key
        if known and key in known:
            self.refuse_twice(key, at)

    def value(self, value: Any) -> None:
        container = self.innermost
        if type(container) is list:
            container.append(value)
        elif type(container) is dict:
            container[self.key] = value
            self.key = None
        else:
            self.data = value

    def refuse_twice(self, key: str, at: int) -> None:
        self.refuse(f"key {shown(key)} appears twice in one mapping; keep one of them", at)

    def check_text(self, text: str, at: int) -> None:
        """Refuse characters that the text may not contain and an escape can spell."""
        if "\0" in text:
            self.refuse("a NUL character cannot be stored", at)
        if not text.isascii() and not is_json(text):
            self.refuse("a lone surrogate is no valid text", at)

    def open(self, container: dict[str | None, Any] | list[Any], at: int) -> None:
        if len(self._stack) >= self._max_depth:
            self.fail(f"nested deeper than {self._max_depth} levels", at, code="too_large")
        self._stack.append((self.innermost, self.key))
        self.innermost, self.key = container, None

    def close(self) -> None:
        closed = self.innermost
        self.innermost, self.key = self._stack.pop()
        self.value(closed)

    @property
    def path(self) -> Path:
        """The path of the next value."""
        steps: list[str | int] = []
        for container, key in [*self._stack[1:], (self.innermost, self.key)]:
            if type(container) is list:
                steps.append(len(container))
            elif key is not None:
                steps.append(key)
        return tuple(steps)

    def refuse(self, message: str, at: int, *, code: str = "invalid_field") -> None:
        """Note the problem and read on, so that all problems are reported at once."""
        self.refusals.append(TextProblem(code, message, self.path, at))
        if len(self.refusals) >= MAX_REFUSALS:
            raise Refused

    def fail(self, message: str, at: int, *, code: str = "invalid_field") -> NoReturn:
        """Note the problem and stop: the rest cannot be understood."""
        self.refusals.append(TextProblem(code, message, self.path, at))
        raise Refused


# An unclosed string matches up to the end, so that a text of quotes is not tried at each quote.
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
_JSON_INT = re.compile(r"-?[0-9]+\Z")
_JSON_WORDS = {"true": True, "false": False, "null": None}


def load_json(text: str, tree: TextTree, max_depth: int) -> Any:
    """The data; or raise `Refused`, with the problems in the tree."""
    if _roughly(text) > MAX_VALUES and _roughly(_STRING.sub("", text)) > MAX_VALUES:
        tree.fail(f"more than {MAX_VALUES:,} values in one text", 0, code="too_large")
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
    """An upper bound of its values: each has a comma or a bracket before it."""
    return text.count(",") + text.count("[") + text.count("{")


class JsonOffsets:
    """Finds the offset of a value in a text that `load_json` has read.

    It reads only the containers on the path, and only up to the value. Simple values are skipped by
    a pattern, containers by the standard library: a hundred times faster than noting all offsets.
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
    """One container: the offsets of its members, found as needed."""

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
    """The offset after a value and the comma or colon that follows it."""
    found = _VALUE.match(text, at)
    if found is not None:
        return found.end()
    return _next(text, _DECODER.raw_decode(text, at)[1]) + 1


def _next(text: str, at: int) -> int:
    """The offset after whitespace."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _scan(text: str, tree: TextTree) -> None:
    """Read the offsets of all values, and refuse what is not plain data.

    The text is JSON at least up to the first problem. After that it may be anything, and the scan
    ends where it cannot read on.
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
    if token in _JSON_WORDS:
        return _JSON_WORDS[token]
    if _JSON_INT.match(token):
        number = int(token) if len(token) <= 20 else MAX_INT + 1
        if not MIN_INT <= number <= MAX_INT:
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


_YAML_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
}
_MAY_BE_TYPED = frozenset("+-.0123456789")
_YAML_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z")
# libyaml takes quadratic time for tags, and no tag is allowed.
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
    """The offsets of all keys and values, in the order of the text.

    A flat list is cheap while reading. The entry of a path is found later, by walking down the
    data in the same order.
    """

    def __init__(self) -> None:
        self.data: Any = None
        self.starts: list[int] = []
        self.behind: dict[int, int] = {}
        """By a container's entry: the first entry after the container."""
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
    # Up to 200,000 iterations, so calls are inlined.
    next_event: Callable[[], Any] = loader.get_event
    starts, behind = offsets.starts, offsets.behind
    containers: list[int] = []
    escapes = "\\" in text
    for _ in range(MAX_VALUES):
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
                if value in _YAML_WORDS:
                    value = _YAML_WORDS[value]
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
    tree.fail(f"more than {MAX_VALUES:,} values in one text", at, code="too_large")


def _typed(value: str, tree: TextTree, at: int) -> Any:
    """The value of an unquoted scalar that may be a number."""
    if _YAML_INT.match(value):
        # Nothing longer can fit, and Python refuses to read very long ones.
        number = int(value) if len(value) <= 21 else MAX_INT + 1
        if not MIN_INT <= number <= MAX_INT:
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
    """Only comments may follow; checked here so that libyaml need not parse a refused text."""
    rest = _ONLY_COMMENTS.match(text, at)
    end = rest.end() if rest else at
    if end < len(text):
        tree.fail("the document ends before this; a text holds exactly one YAML document", end)


def _offset(error: yaml.MarkedYAMLError) -> int:
    # For an unclosed quote its beginning is more useful than the end of the text.
    mark = error.context_mark if _is_unclosed(error) else error.problem_mark
    return mark.index if mark else 0


def _is_unclosed(error: yaml.MarkedYAMLError) -> bool:
    return bool(error.context_mark) and "unexpected end of stream" in (error.problem or "")


def _explain(error: yaml.MarkedYAMLError, text: str) -> str:
    """A message about the usual mistake, else libyaml's own."""
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


MAX_TEXT_BYTES = 1 << 20
MAX_TEXT_DEPTH = 32

# What YAML calls a line break; positions in JSON are counted the same way.
_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_OTHER_BREAK = re.compile("[\r\x85\u2028\u2029]")
# Characters that a format does not allow; a lone surrogate comes from a str that is no text.
_FORBIDDEN = {
    "json": re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]"),
    "yaml": re.compile(
        "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufffe\uffff]"
    ),
}


@dataclass(slots=True)
class Source:
    """Plain data with the position of each part in its text."""

    data: Any
    name: str = ""
    text: str | None = field(default=None, repr=False)
    _offsets: YamlOffsets | JsonOffsets | None = field(default=None, repr=False)
    _lines: LineIndex | None = field(default=None, repr=False)

    def position(self, path: Path, *, key: bool = False) -> tuple[int, int] | None:
        """Line and column, from 1, of the value at `path`, or of its nearest known parent.

        With `key`, of the last key of the path rather than of the value under it.
        """
        if self.text is None or self._offsets is None:
            return None
        if self._lines is None:
            self._lines = LineIndex(self.text)
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
    """Read a text, or raise `InvalidDefinition` with all problems."""
    text = _decoded(text, max_bytes)
    tree = TextTree(max_depth)
    try:
        bad = _FORBIDDEN[format].search(text)
        if bad:
            tree.fail(f"the character U+{ord(bad.group()):04X} is not allowed", bad.start())
        with gc_paused():
            if format == "json":
                return Source(load_json(text, tree, max_depth), name, text, JsonOffsets(text))
            offsets = load_yaml(text, tree)
            return Source(offsets.data, name, text, offsets)
    except Refused:
        lines = LineIndex(text)
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
            place = LineIndex(before).place(len(before))
            message = "the text is not UTF-8"
            raise InvalidDefinition([Problem("invalid_field", message, "", *place)]) from None
    return text.removeprefix("\ufeff")


def _known(data: Any, path: Path) -> Path:
    """The part of the path that exists."""
    for depth, step in enumerate(path):
        is_there = isinstance(data, dict) and step in data
        is_there = is_there or (
            isinstance(data, list) and isinstance(step, int) and 0 <= step < len(data)
        )
        if not is_there:
            return path[:depth]
        data = data[step]
    return path


class LineIndex:
    """Finds the line and column of an offset.

    Line breaks are counted in blocks, because a text may have nothing but line breaks; then within
    the block of the offset.
    """

    _BLOCK = 4096

    def __init__(self, text: str) -> None:
        if _OTHER_BREAK.search(text):
            # Each becomes one `\n` at its end, so that all offsets stay the same.
            text = text.replace("\r\n", " \n")
            for other in "\r\x85\u2028\u2029":
                text = text.replace(other, "\n")
        self._text = text
        self._blocks: list[tuple[int, int]] = []
        """For each block the number and the start of its first line."""
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
