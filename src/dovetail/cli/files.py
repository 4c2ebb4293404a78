"""The files of a command line: definitions and params, read within bounds, parsed and checked.

A path may name anything, also a directory or an endless device; each gives one line of error. The
report of a check has each problem with its position, its line and a caret:

    flow.yaml:12:20: missing_dependency there is no node 'fecth'; did you mean 'fetch'?
        dependencies: [fecth]
                       ^
"""

from __future__ import annotations

import codecs
import re
import stat
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dovetail.cli import output as streams
from dovetail.cli.output import INVALID, InvalidInput, print_error, warn
from dovetail.cli.text import Line, cells, counted, plain
from dovetail.core.errors import InvalidDefinition, InvalidParams, Problem

if TYPE_CHECKING:
    from dovetail.core.definition.source import Source
    from dovetail.core.definition.validation import Checked, DefinitionLimits

INDENT = "    "
TAB = "    "


def report(
    name: str,
    errors: Sequence[Problem],
    warnings: Sequence[Problem],
    line_of: Callable[[int], str],
    width: int,
) -> Iterator[Line]:
    """Errors and warnings in the order of the text."""
    marked = [(problem, False) for problem in errors]
    marked += [(problem, True) for problem in warnings]
    marked.sort(key=lambda item: (item[0].line or _LAST, item[0].column or 0))
    for problem, is_warning in marked:
        yield _headline(name, problem, is_warning)
        if problem.line is not None and problem.column is not None:
            yield from excerpt(line_of(problem.line), problem.column, width)


_LAST = 1 << 60


def _headline(name: str, problem: Problem, is_warning: bool) -> Line:
    place = f"{name}:{problem.line}:{problem.column}" if problem.line is not None else name
    return [
        (f"{place}: ", "bold"),
        (problem.code, "bold wait" if is_warning else "bold bad"),
        (f" {plain(problem.message)}", ""),
        (" (warning)" if is_warning else "", "wait"),
    ]


def excerpt(line: str, column: int, width: int) -> Iterator[Line]:
    """The source line and, below it, a caret under the column; cut around it if too long."""
    if not line.strip():
        return
    room = max(20, width - len(INDENT))
    at = min(column - 1, len(line))
    whole = _fitting(line[: room + 1], room)
    if len(whole) == len(line):
        before, rest = whole[:at], whole[at:]
    else:
        before = _fitting(reversed(line[:at]), room * 2 // 3)[::-1]
        if len(before) < at:
            before[:1] = ["…"]
        rest = _fitting(line[at:], room - 1 - sum(map(cells, before)))
        if at + len(rest) < len(line):
            rest.append("…")
    yield [(INDENT + "".join(before + rest).rstrip(), "")]
    yield [(INDENT + " " * sum(map(cells, before)), ""), ("^", "bold bad")]


def _fitting(chars: Iterable[str], room: int) -> list[str]:
    """As many of them, as they are shown, as there is room for."""
    shown: list[str] = []
    for char in chars:
        text = _shown(char)
        room -= cells(text)
        if room < 0:
            break
        shown.append(text)
    return shown


def _shown(char: str) -> str:
    """As wide on every terminal as `cells` says."""
    if char == "\t":
        return TAB
    return char if char.isprintable() else "�"


def summary(name: str, errors: int, warnings: int) -> Line:
    found = [counted(number, noun) for number, noun in ((errors, "error"), (warnings, "warning"))]
    said = ", ".join(text for text in found if not text.startswith("0 "))
    return [(f"{name}: ", "bold"), (said, "bad" if errors else "wait")]


STDIN = "-"
_SEEN_NEIGHBOURS = 1000
# What YAML calls a line break, and so what positions are counted by.
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


class File:
    """One file as the command line names it, with its content."""

    def __init__(self, path: str, limits: DefinitionLimits) -> None:
        """Raises `InvalidInput` if it cannot be read at all."""
        self.name = "<stdin>" if path == STDIN else plain(path)
        self._limits = limits
        self._suffix = "" if path == STDIN else Path(path).suffix.lower()
        self._content = _read(path, limits.max_body_bytes + 1)
        self._lines: list[str] | None = None

    def parse(self) -> Source:
        """Raises `InvalidDefinition` with every problem of the text."""
        most = self._limits.max_body_bytes
        if len(self._content) > most:
            message = f"the file has more than {most:,} bytes, which is all that is allowed"
            raise InvalidDefinition([Problem("too_large", message, "", 1, 1)])
        if self._suffix == ".json":
            return self._parse_as("json")
        begins = self._content.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if self._suffix not in (".yaml", ".yml") and begins == b"{":
            # JSON may be indented with tabs, which YAML refuses.
            try:
                return self._parse_as("json")
            except InvalidDefinition:
                pass
        return self._parse_as("yaml")

    def line(self, number: int) -> str:
        """One line of it, counted as positions are; empty if there is none."""
        if self._lines is None:
            text = self._content.decode(errors="replace").removeprefix("\ufeff")
            self._lines = _LINE_BREAK.split(text)
        return self._lines[number - 1] if 0 < number <= len(self._lines) else ""

    def _parse_as(self, form: str) -> Source:
        from dovetail.core.definition.source import read_text

        return read_text(
            self._content,
            format="json" if form == "json" else "yaml",
            name=self.name,
            max_bytes=self._limits.max_body_bytes,
            max_depth=self._limits.max_depth,
        )


def _read(path: str, most: int) -> bytes:
    if path == STDIN:
        try:
            return sys.stdin.buffer.read(most)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from None
    with opened(path) as stream:
        return stream.read(most)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Open a file to read. Every error is an `InvalidInput`."""
    try:
        if stat.S_ISDIR(Path(path).stat().st_mode):
            raise InvalidInput(f"{path} is a directory; name a file in it")
        with Path(path).open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {path}{_did_you_mean(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        why = error.strerror if isinstance(error, OSError) else None
        raise InvalidInput(f"{path} cannot be read: {why or error}") from None


def _did_you_mean(path: str) -> str:
    """A neighbour with nearly that name: flow.yml for flow.yaml."""
    try:
        neighbours = islice(Path(path).parent.iterdir(), _SEEN_NEIGHBOURS)
        names = [found.name for found in neighbours if found.is_file()]
    except OSError:
        return ""
    near = get_close_matches(Path(path).name, names, n=1, cutoff=0.75)
    return f"; did you mean {Path(path).with_name(near[0])}?" if near else ""


def checked_file(
    file: File, limits: DefinitionLimits, known_handlers: Container[str] | None
) -> Checked:
    """Parse and check it; problems of the text itself are errors like all others."""
    from dovetail.core.definition.validation import Checked, check

    try:
        return check(file.parse(), known_handlers, limits)
    except InvalidDefinition as error:
        return Checked(None, error.problems, (), [])


def report_of(file: File, checked: Checked) -> Iterator[Line]:
    """Every problem, and how many there are."""
    yield from report(file.name, checked.errors, checked.warnings, file.line, streams.width())
    if checked.errors:
        yield summary(file.name, len(checked.errors), len(checked.warnings))
    if any(problem.code == "unknown_handler" for problem in checked.errors):
        yield [("handlers of your own are loaded with  --handlers FILE.py", "dim")]


def print_report(file: File, checked: Checked) -> None:
    """Print every problem to stderr."""
    for line in report_of(file, checked):
        streams.complain(line)


def read_params(
    schema: Mapping[str, Any] | None,
    pairs: Sequence[str],
    path: str | None,
    limits: DefinitionLimits,
) -> dict[str, Any] | None:
    """The params, each typed by the schema. None: the file is invalid and its report is printed."""
    from dovetail.core.definition.params import typed
    from dovetail.core.definition.validation import Checked

    params: dict[str, Any] = {}
    if path is not None:
        file = File(path, limits)
        try:
            data = file.parse().data
        except InvalidDefinition as error:
            print_report(file, Checked(None, error.problems, (), []))
            return None
        if not isinstance(data, dict):
            raise InvalidInput(f"{file.name}: params must be an object, as in  topic: otters")
        params.update(data)
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise InvalidInput(f"-p {pair}: write it as name=value")
        params[name] = typed(schema, name, text)
    return params


def print_warnings(warnings: Sequence[Problem]) -> None:
    """Each in its own line; the run is made nevertheless."""
    for problem in warnings:
        warn(plain(f"{problem.path}: {problem.message}"))


def print_violations(error: InvalidParams) -> int:
    """Each violation of the schema in its own line; the code to exit with."""
    for problem in error.problems:
        print_error(f"{problem.path}: {problem.message}")
    streams.complain([("params are given as  -p name=value  or  --params FILE", "dim")])
    return INVALID
