"""The params of a run as a command line gives them: a file, and over it `-p name=value`.

What it must not know: what a param is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.cli import streams
from dovetail.cli.checking import report_of
from dovetail.cli.failures import INVALID, InvalidInput, say_error
from dovetail.cli.files import File
from dovetail.cli.text import plain
from dovetail.core.definition.params import typed
from dovetail.core.definition.validation import Checked, Limits
from dovetail.core.errors import InvalidDefinition, InvalidParams, Problem


def read_params(
    schema: Mapping[str, Any] | None, pairs: Sequence[str], path: str | None, limits: Limits
) -> dict[str, Any] | None:
    """The params, each typed by the schema. None: the file is invalid, and that has been said."""
    params: dict[str, Any] = {}
    if path is not None:
        file = File(path, limits)
        try:
            data = file.parse().data
        except InvalidDefinition as error:
            for line in report_of(file, Checked(None, error.problems, (), [])):
                streams.complain(line)
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


def tell_warnings(warnings: Sequence[Problem]) -> None:
    """Each in its own line; the run is made all the same."""
    for problem in warnings:
        line = f"{problem.path}: {problem.message}"
        streams.complain([("warning: ", "bold wait"), (plain(line), "")])


def tell_violations(error: InvalidParams) -> int:
    """Each violation of the schema in its own line; the code to exit with."""
    for problem in error.problems:
        say_error(f"{problem.path}: {problem.message}")
    streams.complain([("params are given as  -p name=value  or  --params FILE", "dim")])
    return INVALID
