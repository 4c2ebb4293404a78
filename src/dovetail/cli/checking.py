"""A definition's file, checked with the handlers that are known, and what is found put in lines.

What it must not know: who else knows handlers, or what becomes of the definition.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from dovetail.cli import streams
from dovetail.cli.files import File
from dovetail.cli.problems import report, summary
from dovetail.cli.text import Line
from dovetail.core.definition.validation import Checked, Limits, check
from dovetail.core.errors import InvalidDefinition


def checked_file(file: File, limits: Limits, known_handlers: Container[str] | None) -> Checked:
    """Parse and check it; problems of the text itself are errors like all others."""
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
