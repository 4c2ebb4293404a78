"""`dovetail runs watch|retry|fork|resume|cancel|repair`: follow, continue, end or repair a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dovetail.cli.options import (
    AsJson,
    Detach,
    Handlers,
    Param,
    ParamsFile,
    Run,
    declarations,
    number_or_alias,
    on_target,
    run_or,
)
from dovetail.cli.output import INVALID, InvalidInput, document_if, print_answer, print_reply
from dovetail.cli.summary import (
    resume_hint,
    retry_hint,
    short_id,
    status_piece,
    watch_hint,
)
from dovetail.cli.target import ask, chosen_run, handlers_hint, is_shared, target_settings
from dovetail.cli.text import Line, listed, plain, seconds
from dovetail.core.errors import Conflict
from dovetail.core.states import RunStatus

if TYPE_CHECKING:
    from dovetail.cli.session import Shown
    from dovetail.config import Settings
    from dovetail.core.definition.validation import Checked
    from dovetail.engine.api import Accepted, EngineApi
    from dovetail.handlers.registry import Registry

app = declarations()

MAX_NAMED = 20


@app.command()
@on_target
def watch(run: Run = None, as_json: AsJson = False) -> int:
    """Follow a run to its end, whichever process drives it.

    Ctrl-C stops looking, not the run. Exit code: 0 completed, 1 failed, cancelled, or driven by
    no process.
    """
    from dovetail.cli.session import Session, Shown

    settings = target_settings()

    async def begin(commands: EngineApi) -> Shown:
        run_id = await chosen_run(commands, run)
        return Shown.from_the_start(await commands.get_run(run_id))

    with document_if(as_json) as write:
        return Session(settings, None, write).run(begin)


@app.command()
@on_target
def retry(
    run: Annotated[str | None, run_or("the newest that did not complete")] = None,
    from_node: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="NODE", help="Also rerun this node and all that depends on it."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be rerun and reused.")
    ] = False,
    handlers: Handlers = None,
    detach: Detach = False,
    as_json: AsJson = False,
) -> int:
    """Run again what did not complete.

    Outputs that are there are reused. Drives the run here and waits, with the exit codes of
    `dovetail run`; if another process still drives it, that one does, and this one follows.
    """
    from dovetail.cli.session import Session, Shown

    if dry_run:
        _print_retry_plan(run, from_node, as_json=as_json)
        return 0
    if is_shared(target_settings()):
        return _retry_on_services(run, from_node, detach=detach, as_json=as_json)
    _refuse_detach(detach)
    with document_if(as_json) as write:
        settings, registry = _loaded(handlers or ())

        async def begin(commands: EngineApi) -> Shown:
            run_id = await _run_to_retry(commands, run, from_node)
            before = await commands.snapshot(run_id)
            if await commands.owner(run_id) != "elsewhere":
                plan = await commands.plan_retry(run_id, from_node)
                _require_handlers(before.view, plan, registry)
            shown = Shown.from_now(before)
            # Its driver learns of the retry from the file; without a driver, this process drives.
            await commands.retry_run(run_id, from_node)
            return shown

        return Session(settings, registry, write, handlers or ()).run(begin)


def _retry_on_services(
    given: str | None, from_node: str | None, *, detach: bool, as_json: bool
) -> int:
    """Where services drive runs: they run it again, and this process shows it."""
    from dovetail.cli.session import Session, Shown

    async def begin(commands: EngineApi) -> Shown:
        run_id = await _run_to_retry(commands, given, from_node)
        shown = Shown.from_now(await commands.snapshot(run_id))
        await commands.retry_run(run_id, from_node)
        return shown

    async def alone(commands: EngineApi) -> tuple[dict[str, Any], str]:
        run_id = (await begin(commands)).run_id
        return await commands.get_run(run_id), await short_id(commands, run_id)

    if not detach:
        with document_if(as_json) as write:
            return Session(target_settings(), None, write).run(begin)
    run, short = ask(alone)
    title = [status_piece(run["status"]), (f" {short} {plain(run['workflow'])}", "")]
    print_reply(run, lambda _: [title, watch_hint(short)], as_json=as_json)
    return 0


def _require_handlers(
    run: Mapping[str, Any], plan: dict[str, list[str]], registry: Registry
) -> None:
    """Before anything is reopened: without its handlers the run would only fail again."""
    rerun = set(plan["rerun"])
    needed = {node["handler"] for node in run["nodes"] if node["id"] in rerun}
    if unknown := sorted(name for name in needed if name not in registry):
        names = ", ".join(f"'{name}'" for name in unknown)
        raise Conflict(
            f"run {run['run_id']} needs handlers that are not known here: {names}; "
            "load them with --handlers"
        )


def _print_retry_plan(given: str | None, from_node: str | None, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> tuple[dict[str, list[str]], Line]:
        run_id = await _run_to_retry(commands, given, from_node)
        plan = await commands.plan_retry(run_id, from_node)
        return plan, [("run ", "dim"), (await short_id(commands, run_id), "bold")]

    _print_plan(*ask(question), as_json=as_json)


def _print_plan(plan: dict[str, list[str]], which: Line, *, as_json: bool) -> None:
    print_reply(plan, lambda plan: _plan_lines(plan, which), as_json=as_json)


def _plan_lines(plan: dict[str, list[str]], which: Line) -> Iterator[Line]:
    for verb, names in (("would rerun", plan["rerun"]), ("would reuse", plan["reuse"])):
        named = f": {listed(names, MAX_NAMED)}" if names else ""
        yield [*which, (f" {verb} {len(names):,}{named}", "")]


async def _run_to_retry(commands: EngineApi, given: str | None, from_node: str | None) -> str:
    # A run that completed can be rerun, but only from a named node.
    statuses = () if from_node else (RunStatus.FAILED.value, RunStatus.CANCELLED.value)
    return await chosen_run(commands, given, *statuses)


@app.command()
@on_target
def fork(
    run: Annotated[str | None, run_or("the newest that did not complete")] = None,
    definition: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The definition of the new run; default: the one of the old run."
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(metavar="V", help="A version of its workflow instead: a number or an alias."),
    ] = None,
    from_node: Annotated[
        str | None,
        typer.Option("--from", metavar="NODE", help="Run this node and all that depends on it."),
    ] = None,
    param: Param = None,
    params: ParamsFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be rerun and reused.")
    ] = False,
    handlers: Handlers = None,
    detach: Detach = False,
    as_json: AsJson = False,
) -> int:
    """Make a new run that begins with the finished nodes of an old one.

    A node is reused if it is equal in both definitions, COMPLETED in the old run, and everything
    before it is reused. Params replace all of the old ones; with other params nothing is reused,
    unless --from says where to begin. The old run stays as it is. Drives the new run here and
    waits, with the exit codes of `dovetail run`.
    """
    from dovetail.cli.commands.run import leave_to_services
    from dovetail.cli.files import print_violations
    from dovetail.cli.session import Session
    from dovetail.cli.target import load_file
    from dovetail.core.errors import InvalidParams

    if definition is not None and version is not None:
        raise InvalidInput("--definition and --version name two definitions: leave one of them out")
    checked: Checked | None = None
    with document_if(as_json and not dry_run) as write:
        if definition is None:
            settings, registry = _loaded(handlers or ())
        else:
            settings, registry, _, checked = load_file(definition, handlers or ())
            if checked.workflow is None:
                return INVALID
        wanted = number_or_alias(version)
        asked = _Fork(run, checked, wanted, from_node, param or (), params, settings, registry)
        try:
            if dry_run:
                _print_plan(*ask(asked.plan, registry), as_json=as_json)
                return 0
            if detach:
                if not is_shared(settings):
                    _refuse_detach(detach)
                return leave_to_services(asked.make, write)
            own = None if is_shared(settings) else registry
            return Session(settings, own, write, handlers or (), definition).run(asked.begin)
        except InvalidParams as error:
            return print_violations(error)


class _Fork(NamedTuple):
    """What a command line says of a fork."""

    run: str | None
    checked: Checked | None
    version: int | str | None
    from_node: str | None
    pairs: Sequence[str]
    params_path: str | None
    settings: Settings
    registry: Registry

    async def make(self, commands: EngineApi) -> Accepted:
        from dovetail.cli.files import print_warnings

        run_id = await _run_to_retry(commands, self.run, self.from_node)
        accepted = await commands.fork(run_id, **await self._given(commands, run_id))
        print_warnings(accepted.warnings)
        return accepted

    async def begin(self, commands: EngineApi) -> Shown:
        from dovetail.cli.session import Shown

        return Shown.from_the_start(await commands.get_run((await self.make(commands)).run_id))

    async def plan(self, commands: EngineApi) -> tuple[dict[str, list[str]], Line]:
        run_id = await _run_to_retry(commands, self.run, self.from_node)
        plan = await commands.plan_fork(run_id, **await self._given(commands, run_id))
        return plan, [("a fork of ", "dim"), (await short_id(commands, run_id), "bold")]

    async def _given(self, commands: EngineApi, run_id: str) -> dict[str, Any]:
        return {
            "definition": self.checked,
            "version": self.version,
            "params": await self._params(commands, run_id),
            "from_node": self.from_node,
        }

    async def _params(self, commands: EngineApi, run_id: str) -> dict[str, Any] | None:
        """The params of the new run, each typed by its schema; None for those of the old run."""
        from dovetail.cli.files import read_params
        from dovetail.wiring.embedded import definition_limits

        if not self.pairs and self.params_path is None:
            return None
        schema = await self._schema(commands, run_id)
        limits = definition_limits(self.settings)
        params = read_params(schema, self.pairs, self.params_path, limits)
        if params is None:
            raise InvalidInput(f"{self.params_path} has no params that can be read")
        return params

    async def _schema(self, commands: EngineApi, run_id: str) -> Mapping[str, Any] | None:
        if self.checked is not None and self.checked.workflow is not None:
            return self.checked.workflow.params
        old = await commands.get_run(run_id, nodes=False)
        wanted = old["version"] if self.version is None else self.version
        if wanted is None:
            # Only the engine has a definition that is not registered: the old values show types.
            return {"properties": {name: _like(value) for name, value in old["params"].items()}}
        found = await commands.workflow(old["workflow"], wanted)
        schema: Mapping[str, Any] | None = found["definition"].get("params")
        return schema


def _like(value: Any) -> dict[str, Any]:
    """A schema for values of the same type."""
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "boolean"),
        (int, "number"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    )
    return next(({"type": name} for kind, name in kinds if isinstance(value, kind)), {})


@app.command()
@on_target
def resume(
    run: Annotated[str | None, run_or("every interrupted run")] = None,
    handlers: Handlers = None,
    detach: Detach = False,
    as_json: AsJson = False,
) -> int:
    """Go on with runs whose process is gone.

    What completed is not run again. Drives them here and waits, with the exit codes of
    `dovetail run`.
    """
    from dovetail.cli.session import ResumeAll, Session, Shown

    if is_shared(target_settings()):
        ask(lambda commands: commands.resume(run))  # its error names what resumes runs there
    _refuse_detach(detach)
    with document_if(as_json) as write:
        settings, registry = _loaded(handlers or ())
        if run is None:
            return ResumeAll(settings, registry, write, handlers or ()).run()

        async def begin(commands: EngineApi) -> Shown:
            run_id = await commands.find_run(run)
            before = await commands.snapshot(run_id)
            await commands.resume(run_id)
            since = seconds(before.view["created_at"])  # as in `runs show`
            return Shown.from_now(before)._replace(since=since)

        return Session(settings, registry, write, handlers or ()).run(begin)


@app.command()
@on_target
def cancel(
    run: Annotated[str | None, run_or("the newest unfinished one")] = None,
    as_json: AsJson = False,
) -> None:
    """Cancel what has not finished, whichever process drives it."""

    async def question(commands: EngineApi) -> dict[str, Any] | list[Line]:
        run_id = await chosen_run(commands, run, RunStatus.RUNNING.value)
        cancelled = await commands.cancel_run(run_id)
        if as_json:
            return cancelled
        short = await short_id(commands, run_id)
        title = f" {short} {plain(cancelled['workflow'])}"
        ended = [status_piece(cancelled["status"]), (title, "")]
        if not cancelled["nodes"]:  # its log could not be read
            words = "its log cannot be read and was left as it is; trigger the workflow anew"
            return [ended, [(words, "wait")]]
        return [ended, await retry_hint(commands, cancelled, short, handlers_hint(cancelled))]

    print_answer(ask(question))


@app.command()
@on_target
def repair(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id or its first digits.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be changed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the state of a damaged run from its own log.

    Exit code: 0 it is as its log says, 1 the log itself is damaged.
    """

    async def question(commands: EngineApi) -> tuple[dict[str, Any], str, bool]:
        run_id = await chosen_run(commands, run)
        done = await commands.repair(run_id, dry_run=dry_run)
        gone = not dry_run and await commands.owner(run_id) == "gone"
        return done, await short_id(commands, run_id), gone

    done, short, gone = ask(question)
    verb = "would be repaired" if dry_run else "repaired"

    def lines(done: dict[str, Any]) -> Iterator[Line | str]:
        found = done["differences"]
        if not found:
            yield f"nothing to repair: {short} is as its log says"
            return
        yield [(verb, "bold"), (f" {short} from its log", "")]
        yield from (f"  {plain(sentence)}" for sentence in found[:MAX_NAMED])
        if len(found) > MAX_NAMED:
            yield [(f"  and {len(found) - MAX_NAMED:,} more; --json prints all", "dim")]
        if gone:
            yield resume_hint(short)

    print_reply(done, lines, as_json=as_json)


def _loaded(handlers: Sequence[str]) -> tuple[Settings, Registry]:
    from dovetail.handlers.builtin import load_registry
    from dovetail.telemetry.logs import show_logs

    settings = target_settings()
    registry = load_registry(settings, handlers)
    show_logs(settings)
    return settings, registry


def _refuse_detach(detach: bool) -> None:
    if detach:
        raise InvalidInput(
            "--detach needs a server that goes on with the run; here this process would be the "
            "one that drives it. Leave --detach out, or put the command in the background with &"
        )
