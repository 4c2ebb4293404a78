"""`dovetail run`: one workflow, from its file to its exit code, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.cli import streams
from dovetail.cli.commands.validate import checked_file, report_of
from dovetail.cli.failures import INVALID, InvalidInput, say_error
from dovetail.cli.files import STDIN, File
from dovetail.cli.logs import show_logs
from dovetail.cli.session import Session, Write
from dovetail.config import load_settings
from dovetail.core.definition.model import Workflow
from dovetail.core.definition.params import typed
from dovetail.core.definition.validation import Checked, Limits
from dovetail.core.errors import InvalidDefinition, InvalidParams
from dovetail.handlers.builtin import load_registry
from dovetail.wiring import definition_limits


def run_file(
    path: str,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    *,
    as_json: bool,
) -> int:
    if path == STDIN and params_path == STDIN:
        raise InvalidInput("stdin can be read once: as the definition or as the params, not both")
    if not as_json:
        return _run(path, pairs, params_path, handlers, None)
    with streams.document() as write:
        return _run(path, pairs, params_path, handlers, write)


def _run(
    path: str,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    write: Write | None,
) -> int:
    settings = load_settings()
    registry = load_registry(settings, handlers)
    limits = definition_limits(settings)
    file = File(path, limits)
    checked = checked_file(file, limits, registry)
    _complain(file, checked)
    if checked.workflow is None:
        return INVALID
    params = _params(checked.workflow, pairs, params_path, limits)
    if params is None:
        return INVALID
    show_logs(settings.log_format)
    session = Session(settings, registry, checked.workflow, write)
    try:
        return session.run(checked, params)
    except InvalidParams as error:
        for problem in error.problems:
            say_error(f"{problem.path}: {problem.message}")
        streams.complain([("params are given as  -p name=value  or  --params FILE", "dim")])
        return INVALID


def _complain(file: File, checked: Checked) -> None:
    for line in report_of(file, checked):
        streams.complain(line)


def _params(
    workflow: Workflow, pairs: Sequence[str], path: str | None, limits: Limits
) -> dict[str, Any] | None:
    """Those of the file, and over them those of the command line. None: the file is invalid."""
    params: dict[str, Any] = {}
    if path is not None:
        file = File(path, limits)
        try:
            data = file.parse().data
        except InvalidDefinition as error:
            _complain(file, Checked(None, error.problems, (), []))
            return None
        if not isinstance(data, dict):
            raise InvalidInput(f"{file.name}: params must be an object, as in  topic: otters")
        params.update(data)
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise InvalidInput(f"-p {pair}: write it as name=value")
        params[name] = typed(workflow.params, name, text)
    return params
