"""`dovetail validate`: every problem of every file, to read or as JSON."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dovetail.cli import streams
from dovetail.cli.failures import INVALID, InvalidInput, say_error
from dovetail.cli.files import STDIN, File
from dovetail.cli.json_output import json_bytes
from dovetail.cli.problems import report, summary
from dovetail.cli.text import Line, counted
from dovetail.config import load_settings
from dovetail.core.definition.validation import Checked, Limits, check
from dovetail.core.errors import InvalidDefinition, Problem
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import Registry
from dovetail.wiring import definition_limits


def validate_files(paths: Sequence[str], handlers: Sequence[str], *, as_json: bool) -> int:
    if paths.count(STDIN) > 1:
        raise InvalidInput("stdin can be read once; give - only once")
    if as_json:
        with streams.document() as write:
            found = _found_in(paths, handlers)
            write(json_bytes(found))
        return 0 if all(entry["valid"] for entry in found) else INVALID
    settings = load_settings()
    registry = load_registry(settings, handlers)
    limits = definition_limits(settings)
    valid = sum(_is_valid(path, limits, registry) for path in paths)
    if len(paths) > 1:
        files = counted(len(paths), "file")
        streams.say(f"{valid:,} of {files} valid")
    return 0 if valid == len(paths) else INVALID


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


def _is_valid(path: str, limits: Limits, registry: Registry) -> bool:
    try:
        file = File(path, limits)
    except InvalidInput as error:
        say_error(str(error))
        return False
    checked = checked_file(file, limits, registry)
    for line in report_of(file, checked):
        streams.say(line)
    if not checked.valid:
        return False
    nodes = counted(sum(map(len, checked.layers)), "node")
    layers = counted(len(checked.layers), "layer")
    warned = f", {counted(len(checked.warnings), 'warning')}" if checked.warnings else ""
    streams.say(
        [(f"{file.name}: ", "bold"), ("valid", "good"), (f", {nodes} in {layers}{warned}", "")]
    )
    return True


def _found_in(paths: Sequence[str], handlers: Sequence[str]) -> list[dict[str, Any]]:
    settings = load_settings()
    registry = load_registry(settings, handlers)
    limits = definition_limits(settings)
    found = []
    for path in paths:
        try:
            checked = checked_file(File(path, limits), limits, registry)
        except InvalidInput as error:
            checked = Checked(None, (Problem("unreadable_file", str(error), ""),), (), [])
        found.append(
            {
                "file": path,
                "valid": checked.valid,
                "errors": [asdict(problem) for problem in checked.errors],
                "warnings": [asdict(problem) for problem in checked.warnings],
            }
        )
    return found
