"""`dovetail trigger`: a run of a registered workflow; embedded, it is driven here to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.cli import streams
from dovetail.cli.asking import ask, settings_of_this_place
from dovetail.cli.documents import Write, document_if
from dovetail.cli.failures import INVALID
from dovetail.cli.logs import show_logs
from dovetail.cli.params import read_params, tell_violations
from dovetail.cli.session import Session, Shown
from dovetail.core.errors import InvalidParams
from dovetail.engine.commands import Commands
from dovetail.handlers.builtin import load_registry
from dovetail.wiring import definition_limits


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

    async def schema_of(commands: Commands) -> Mapping[str, Any] | None:
        found = await commands.workflow(name, wanted)
        schema: Mapping[str, Any] | None = found["definition"].get("params")
        return schema

    params = read_params(ask(schema_of), pairs, params_path, definition_limits(settings))
    if params is None:
        return INVALID
    registry = load_registry(settings, handlers)
    show_logs(settings.log_format)

    async def begin(commands: Commands) -> Shown:
        accepted = await commands.trigger(
            name, params, version=wanted, idempotency_key=idempotency_key
        )
        run = await commands.store.load(accepted.run_id)
        if not accepted.created:
            streams.complain([(f"run {run.id[:6]} was made with this key before", "dim")])
        return Shown.from_the_start(run)

    try:
        return Session(settings, registry, write, handlers).run(begin)
    except InvalidParams as error:
        return tell_violations(error)
