"""The report of a validation: each problem with its place, its line and a caret.

    flow.yaml:12:20: missing_dependency there is no node 'fecth'; did you mean 'fetch'?
        dependencies: [fecth]
                       ^

What it must not know: what makes a definition valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from dovetail.cli.text import Line, cells, counted, plain
from dovetail.core.errors import Problem

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
