"""`dovetail validate`: every problem of every file, to read or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dovetail.cli import output as streams
from dovetail.cli.failures import INVALID, InvalidInput, say_error
from dovetail.cli.files import STDIN, File, checked_file, report_of
from dovetail.cli.output import json_bytes
from dovetail.cli.target import KnownElsewhere, settings_of_this_place
from dovetail.cli.text import counted
from dovetail.core.definition.validation import Checked
from dovetail.core.errors import Problem
from dovetail.handlers.builtin import load_registry
from dovetail.wiring.embedded import definition_limits


def validate_files(paths: Sequence[str], handlers: Sequence[str], *, as_json: bool) -> int:
    if paths.count(STDIN) > 1:
        raise InvalidInput("stdin can be read once; give - only once")
    if as_json:
        with streams.document() as write:
            found = _found_in(paths, _Checks(handlers))
            write(json_bytes(found))
        return 0 if all(entry["valid"] for entry in found) else INVALID
    checks = _Checks(handlers)
    valid = sum(_is_valid(path, checks) for path in paths)
    if len(paths) > 1:
        files = counted(len(paths), "file")
        streams.say(f"{valid:,} of {files} valid")
    return 0 if valid == len(paths) else INVALID


class _Checks:
    """With the handlers known here, and those that workers announced, if it takes these."""

    def __init__(self, handlers: Sequence[str]) -> None:
        settings = settings_of_this_place()
        self.limits = definition_limits(settings)
        self._registry = load_registry(settings, handlers)
        self._elsewhere = KnownElsewhere(settings, self._registry)

    def of(self, file: File) -> Checked:
        return self._elsewhere.corrected(file, checked_file(file, self.limits, self._registry))


def _is_valid(path: str, checks: _Checks) -> bool:
    try:
        file = File(path, checks.limits)
    except InvalidInput as error:
        say_error(str(error))
        return False
    checked = checks.of(file)
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


def _found_in(paths: Sequence[str], checks: _Checks) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        try:
            checked = checks.of(File(path, checks.limits))
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
