"""`dovetail run` and `dovetail trigger`: one run, from a file in this process or of a registered
workflow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli import output as streams
from dovetail.cli.options import (
    AsJson,
    DefinitionFile,
    Handlers,
    Param,
    ParamsFile,
    Version,
    WorkflowName,
    declarations,
    number_or_alias,
    on_target,
)
from dovetail.cli.output import INVALID, InvalidInput, Write, document_if, json_bytes

if TYPE_CHECKING:
    from dovetail.cli.session import Shown
    from dovetail.engine.api import Accepted, EngineApi

app = declarations()


@app.command()
def run(
    file: DefinitionFile,
    param: Param = None,
    params: ParamsFile = None,
    handlers: Handlers = None,
    as_json: AsJson = False,
    web: Annotated[
        bool,
        typer.Option(
            "--web", help="Show it on the page, in a browser; in a terminal until Ctrl-C."
        ),
    ] = False,
) -> int:
    """Run a workflow here and show how it goes.

    Exit code: 0 completed, 1 failed or cancelled from elsewhere, 2 invalid definition or params,
    130 cancelled by Ctrl-C. SIGTERM hands the run back, to be resumed, with 0.
    """
    from dovetail.cli.files import STDIN
    from dovetail.cli.target import choose_target

    if file == STDIN and params == STDIN:
        raise InvalidInput("stdin can be read once: as the definition or as the params, not both")
    choose_target(None, None, embedded=True)  # in this process, whatever the other commands work on
    with document_if(as_json) as write:
        return _run(file, param or (), params, handlers or (), write, web=web)


def _run(
    path: str,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    write: Write | None,
    *,
    web: bool,
) -> int:
    from dovetail.cli.files import STDIN, print_violations, print_warnings, read_params
    from dovetail.cli.session import Session, Shown
    from dovetail.cli.target import load_file
    from dovetail.core.errors import InvalidParams, StoreError
    from dovetail.telemetry.logs import show_logs

    settings, registry, limits, checked = load_file(path, handlers)
    if checked.workflow is None:
        return INVALID
    name = checked.workflow.name
    params = read_params(checked.workflow.params, pairs, params_path, limits)
    if params is None:
        return INVALID
    show_logs(settings)

    async def begin(commands: EngineApi) -> Shown:
        with suppress(StoreError):  # an older run that is damaged
            await _mention_interrupted(commands, name, handlers)
        accepted = await commands.trigger(checked, params)
        print_warnings(accepted.warnings)
        return Shown.from_the_start(await commands.get_run(accepted.run_id))

    file = None if path == STDIN else path
    try:
        return Session(settings, registry, write, handlers, file, web=web).run(begin)
    except InvalidParams as error:
        return print_violations(error)


async def _mention_interrupted(commands: EngineApi, workflow: str, handlers: Sequence[str]) -> None:
    """Print how to go on with the newest interrupted run of this workflow: the caller may have
    expected that this command does."""
    from dovetail.cli.summary import resume_hint, short_id
    from dovetail.engine.ports import RunQuery

    if not (left := set(await commands.orphans())):
        return
    runs = (await commands.list_runs(RunQuery(workflow=workflow, status="RUNNING")))["items"]
    for run_id in (run["run_id"] for run in runs):
        if run_id in left:
            short = await short_id(commands, run_id)
            words = f"run {short} of this workflow was interrupted, and this is another one; "
            streams.complain([(words, "wait"), *resume_hint(short, handlers)])
            return


@app.command()
@on_target
def trigger(
    name: WorkflowName,
    version: Version = None,
    param: Param = None,
    params: ParamsFile = None,
    handlers: Handlers = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="K", help="The same key again is the same run, not another one."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a registered workflow and show how it goes.

    Exit codes are those of `dovetail run`.
    """
    with document_if(as_json) as write:
        return _trigger(name, version, param or (), params, handlers or (), idempotency_key, write)


def _trigger(
    name: str,
    version: str | None,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    idempotency_key: str | None,
    write: Write | None,
) -> int:
    from dovetail.cli.files import print_violations, print_warnings, read_params
    from dovetail.cli.session import Session, Shown
    from dovetail.cli.summary import SHORT_ID, command
    from dovetail.cli.target import ask, is_shared, target_settings
    from dovetail.core.errors import InvalidParams, NotFound
    from dovetail.handlers.builtin import load_registry
    from dovetail.telemetry.logs import show_logs
    from dovetail.wiring.embedded import definition_limits

    settings = target_settings()
    wanted = number_or_alias(version)
    is_file = Path(name).is_file()

    async def schema_of(commands: EngineApi) -> Mapping[str, Any] | None:
        try:
            found = await commands.workflow(name, wanted)
        except NotFound as error:
            if idempotency_key is not None:
                return None  # it may have made a run while the workflow was there: trigger knows
            if not is_file:
                raise
            raise NotFound(
                f"{error}: it is a file; `{command('run', name, handlers=handlers)}` runs it, "
                f"`{command('workflows', 'register', name, handlers=handlers)}` registers it"
            ) from None
        schema: Mapping[str, Any] | None = found["definition"].get("params")
        return schema

    params = read_params(ask(schema_of), pairs, params_path, definition_limits(settings))
    if params is None:
        return INVALID

    async def make(commands: EngineApi) -> Accepted:
        accepted = await commands.trigger(
            name, params, version=wanted, idempotency_key=idempotency_key
        )
        print_warnings(accepted.warnings)
        if not accepted.created:
            short = accepted.run_id[:SHORT_ID]
            streams.complain([(f"run {short} was made with this key before", "dim")])
        return accepted

    async def begin(commands: EngineApi) -> Shown:
        return Shown.from_the_start(await commands.get_run((await make(commands)).run_id))

    try:
        if is_shared(settings):
            return leave_to_services(make, write)
        registry = load_registry(settings, handlers)
        show_logs(settings)
        return Session(settings, registry, write, handlers).run(begin)
    except InvalidParams as error:
        return print_violations(error)


def leave_to_services(make: Callable[[EngineApi], Awaitable[Accepted]], write: Write | None) -> int:
    """Where services drive runs, it only prints which run it made."""
    from dovetail.cli.summary import short_id, watch_hint
    from dovetail.cli.target import ask
    from dovetail.cli.text import plain
    from dovetail.engine.views import with_warnings

    async def question(commands: EngineApi) -> tuple[dict[str, Any], str]:
        accepted = await make(commands)
        made = with_warnings(await commands.receipt(accepted.run_id), accepted.warnings)
        return made, await short_id(commands, accepted.run_id)

    made, short = ask(question)
    if write is not None:
        write(json_bytes(made))
        return 0
    version = "" if made["version"] is None else f" version {made['version']}"
    workflow = f"{plain(made['workflow'])}{version}"
    streams.say([("run ", ""), (short, "bold"), (f" of {workflow} is accepted", "")])
    streams.say(watch_hint(short))
    return 0
