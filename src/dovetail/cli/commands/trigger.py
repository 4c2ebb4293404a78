"""`dovetail trigger`: a run of a registered workflow; embedded, it is driven here to its end.

Where services drive runs it only says which one it made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.cli import output as streams
from dovetail.cli.failures import INVALID
from dovetail.cli.files import read_params, tell_violations, tell_warnings
from dovetail.cli.output import Write, document_if, json_bytes
from dovetail.cli.session import Session, Shown
from dovetail.cli.summary import command
from dovetail.cli.target import ask, is_shared, settings_of_this_place
from dovetail.cli.text import plain
from dovetail.cli.waiting import SHORT_ID, short_id
from dovetail.core.errors import InvalidParams, NotFound
from dovetail.engine.api import Accepted, EngineApi
from dovetail.engine.views import with_warnings
from dovetail.handlers.builtin import load_registry
from dovetail.telemetry.logs import show_logs
from dovetail.wiring.embedded import definition_limits


def trigger_workflow(
    name: str,
    version: str | None,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    *,
    idempotency_key: str | None,
    as_json: bool,
) -> int:
    with document_if(as_json) as write:
        return _trigger(name, version, pairs, params_path, handlers, idempotency_key, write)


def _trigger(
    name: str,
    version: str | None,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    idempotency_key: str | None,
    write: Write | None,
) -> int:
    settings = settings_of_this_place()
    wanted = int(version) if version is not None and version.isdecimal() else version

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
        tell_warnings(accepted.warnings)
        if not accepted.created:
            short = accepted.run_id[:SHORT_ID]
            streams.complain([(f"run {short} was made with this key before", "dim")])
        return accepted

    async def begin(commands: EngineApi) -> Shown:
        return Shown.from_the_start(await commands.get_run((await make(commands)).run_id))

    try:
        if is_shared(settings):
            return _leave_to_services(make, write)
        registry = load_registry(settings, handlers)
        show_logs(settings)
        return Session(settings, registry, write, handlers).run(begin)
    except InvalidParams as error:
        return tell_violations(error)


def _leave_to_services(
    make: Callable[[EngineApi], Awaitable[Accepted]], write: Write | None
) -> int:
    async def question(commands: EngineApi) -> tuple[dict[str, Any], str]:
        accepted = await make(commands)
        made = with_warnings(await commands.receipt(accepted.run_id), accepted.warnings)
        return made, await short_id(commands, accepted.run_id)

    made, short = ask(question)
    if write is not None:
        write(json_bytes(made))
        return 0
    workflow = f"{plain(made['workflow'])} version {made['version']}"
    streams.say([("run ", ""), (short, "bold"), (f" of {workflow} is accepted", "")])
    streams.say([("follow it with:  ", "dim"), (command("runs", "watch", short), "bold")])
    return 0
