"""`dovetail run`: one workflow, from its file to its exit code, in this process."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.cli import output as streams
from dovetail.cli.failures import INVALID, InvalidInput
from dovetail.cli.files import (
    STDIN,
    File,
    checked_file,
    read_params,
    report_of,
    tell_violations,
    tell_warnings,
)
from dovetail.cli.output import Write, document_if
from dovetail.cli.session import Session, Shown
from dovetail.cli.target import choose, settings_of_this_place
from dovetail.core.errors import InvalidParams
from dovetail.engine.api import EngineApi
from dovetail.handlers.builtin import load_registry
from dovetail.telemetry.logs import show_logs
from dovetail.wiring.embedded import definition_limits


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
    with document_if(as_json) as write:
        return _run(path, pairs, params_path, handlers, write)


def _run(
    path: str,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    write: Write | None,
) -> int:
    choose(None, None, embedded=True)  # in this process, whatever the other commands work on
    settings = settings_of_this_place()
    registry = load_registry(settings, handlers)
    limits = definition_limits(settings)
    file = File(path, limits)
    checked = checked_file(file, limits, registry)
    for line in report_of(file, checked):
        streams.complain(line)
    if checked.workflow is None:
        return INVALID
    params = read_params(checked.workflow.params, pairs, params_path, limits)
    if params is None:
        return INVALID
    show_logs(settings)

    async def begin(commands: EngineApi) -> Shown:
        accepted = await commands.trigger(checked, params)
        tell_warnings(accepted.warnings)
        return Shown.from_the_start(await commands.get_run(accepted.run_id))

    try:
        return Session(settings, registry, write, handlers).run(begin)
    except InvalidParams as error:
        return tell_violations(error)
