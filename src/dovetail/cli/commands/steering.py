"""`dovetail runs watch|retry|resume|cancel|repair`: go on with a run, stop it, or see to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.cli import streams
from dovetail.cli.asking import ask, chosen_run, handlers_to_name
from dovetail.cli.driving import short_id
from dovetail.cli.ending import command, retry_hint, status_piece
from dovetail.cli.failures import InvalidInput
from dovetail.cli.json_output import document_if, print_json
from dovetail.cli.places import is_shared, settings_of_this_place
from dovetail.cli.session import Session, Shown
from dovetail.cli.several import Several
from dovetail.cli.text import Line, listed, plain
from dovetail.config import Settings
from dovetail.core.errors import Conflict
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.engine.commands import Commands
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import Registry
from dovetail.telemetry.logs import show_logs

MOST_NAMED = 20


def watch_run(given: str | None, *, as_json: bool) -> int:
    settings = settings_of_this_place()

    async def begin(commands: Commands) -> Shown:
        run_id = await chosen_run(commands, given)
        return Shown.from_the_start(await commands.store.load(run_id))

    with document_if(as_json) as write:
        return Session(settings, None, write).run(begin)


def retry_run(
    given: str | None,
    from_node: str | None,
    handlers: Sequence[str],
    *,
    detach: bool,
    as_json: bool,
) -> int:
    if is_shared(settings_of_this_place()):
        return _retry_shared(given, from_node, detach=detach, as_json=as_json)
    _refuse_detach(detach)
    with document_if(as_json) as write:
        settings, registry = _loaded(handlers)

        async def begin(commands: Commands) -> Shown:
            run_id = await _to_retry(commands, given, from_node)
            run = await commands.store.load(run_id)
            if await commands.owner(run_id) != "elsewhere":
                _require_handlers(run, await commands.plan_retry(run_id, from_node), registry)
            shown = Shown.from_now(run)
            # Whoever drives it gets to know of it through the file; if nobody does, we do.
            await commands.retry(run_id, from_node)
            return shown

        return Session(settings, registry, write, handlers).run(begin)


def _retry_shared(given: str | None, from_node: str | None, *, detach: bool, as_json: bool) -> int:
    """Where services drive runs: they run it again, and we look on."""

    async def begin(commands: Commands) -> Shown:
        run_id = await _to_retry(commands, given, from_node)
        shown = Shown.from_now(await commands.store.load(run_id))
        await commands.retry(run_id, from_node)
        return shown

    async def alone(commands: Commands) -> tuple[dict[str, Any], str]:
        run_id = (await begin(commands)).run_id
        return await commands.get_run(run_id), await short_id(commands, run_id)

    if not detach:
        with document_if(as_json) as write:
            return Session(settings_of_this_place(), None, write).run(begin)
    run, short = ask(alone)
    if as_json:
        print_json(run)
    else:
        streams.say([status_piece(run["status"]), (f" {short} {plain(run['workflow'])}", "")])
        streams.say([("follow it with:  ", "dim"), (command("runs", "watch", short), "bold")])
    return 0


def _require_handlers(run: RunState, plan: dict[str, list[str]], registry: Registry) -> None:
    """Before anything is reopened: without its handlers the run would only fail again."""
    needed = {run.graph.nodes[run.graph.index[node]].handler for node in plan["rerun"]}
    if unknown := sorted(name for name in needed if name not in registry):
        names = ", ".join(f"'{name}'" for name in unknown)
        raise Conflict(
            f"run {run.id} needs handlers that are not known here: {names}; "
            "load them with --handlers"
        )


def plan_retry(given: str | None, from_node: str | None, *, as_json: bool) -> None:
    async def question(commands: Commands) -> tuple[dict[str, list[str]], Line]:
        run_id = await _to_retry(commands, given, from_node)
        plan = await commands.plan_retry(run_id, from_node)
        return plan, [("run ", "dim"), (await short_id(commands, run_id), "bold")]

    plan, which = ask(question)
    if as_json:
        print_json(plan)
        return
    for verb, names in (("would rerun", plan["rerun"]), ("would reuse", plan["reuse"])):
        named = f": {listed(names, MOST_NAMED)}" if names else ""
        streams.say([*which, (f" {verb} {len(names):,}{named}", "")])


async def _to_retry(commands: Commands, given: str | None, from_node: str | None) -> str:
    # A run that completed can be rerun, but only from a node that somebody names.
    statuses = () if from_node else (RunStatus.FAILED.value, RunStatus.CANCELLED.value)
    return await chosen_run(commands, given, *statuses)


def resume_runs(given: str | None, handlers: Sequence[str], *, detach: bool, as_json: bool) -> int:
    if is_shared(settings_of_this_place()):
        ask(lambda commands: commands.resume(given))  # which says who does that there
    _refuse_detach(detach)
    with document_if(as_json) as write:
        settings, registry = _loaded(handlers)
        if given is None:
            return Several(settings, registry, write, handlers).resume()

        async def begin(commands: Commands) -> Shown:
            run_id = await commands.find_run(given)
            run = await commands.store.load(run_id)
            await commands.resume(run_id)
            return Shown.from_now(run)._replace(since=run.created_at)  # as `runs show` counts

        return Session(settings, registry, write, handlers).run(begin)


def cancel_run(given: str | None, *, as_json: bool) -> None:
    async def question(commands: Commands) -> dict[str, Any] | list[Line]:
        run_id = await chosen_run(commands, given, RunStatus.RUNNING.value)
        run = await commands.cancel(run_id)
        if as_json:
            return commands.view(run)
        short = await short_id(commands, run_id)
        if not run.nodes:  # it could not be read, and was ended unread
            told = "its log cannot be read and was left as it is; trigger the workflow anew"
            return [
                [status_piece(run.status), (f" {short} {plain(run.graph.name)}", "")],
                [(told, "wait")],
            ]
        plan = await commands.plan_retry(run_id)
        return [
            [status_piece(run.status), (f" {short} {plain(run.graph.name)}", "")],
            retry_hint(RunStatus.CANCELLED, short, plan, handlers_to_name(run.graph)),
        ]

    answer = ask(question)
    if isinstance(answer, dict):
        print_json(answer)
        return
    for line in answer:
        streams.say(line)


def repair_run(given: str, *, dry_run: bool, as_json: bool) -> None:
    async def question(commands: Commands) -> tuple[dict[str, Any], str, bool]:
        run_id = await chosen_run(commands, given)
        done = await commands.repair(run_id, dry_run=dry_run)
        gone = not dry_run and await commands.owner(run_id) == "gone"
        return done, await short_id(commands, run_id), gone

    done, short, gone = ask(question)
    if as_json:
        print_json(done)
        return
    found = done["differences"]
    if not found:
        streams.say(f"nothing to repair: {short} is as its log says")
        return
    verb = "would be repaired" if dry_run else "repaired"
    streams.say([(verb, "bold"), (f" {short} from its log", "")])
    for sentence in found[:MOST_NAMED]:
        streams.say(f"  {plain(sentence)}")
    if len(found) > MOST_NAMED:
        streams.say([(f"  and {len(found) - MOST_NAMED:,} more; --json prints all", "dim")])
    if gone:
        streams.say([("go on with:  ", "dim"), (command("runs", "resume", short), "bold")])


def _loaded(handlers: Sequence[str]) -> tuple[Settings, Registry]:
    settings = settings_of_this_place()
    registry = load_registry(settings, handlers)
    show_logs(settings)
    return settings, registry


def _refuse_detach(detach: bool) -> None:
    if detach:
        raise InvalidInput(
            "--detach needs a server that goes on with the run; here this process would be the "
            "one that drives it. Leave --detach out, or put the command in the background with &"
        )
