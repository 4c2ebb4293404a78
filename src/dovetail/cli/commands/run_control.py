"""Several runs at once that others have left behind: driven to their ends, one line for each.

What it must not know: how a run was started, or how one run is shown while it goes on.

`dovetail runs watch|retry|resume|cancel|repair`: go on with a run, stop it, or see to it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dovetail.cli import output as streams
from dovetail.cli.failures import FAILED, InvalidInput
from dovetail.cli.interruptible import Ask, Stopping, perform
from dovetail.cli.output import Write, document_if, json_bytes, print_json
from dovetail.cli.session import Session, Shown
from dovetail.cli.summary import command, error_words, retry_hint, seconds_taken, status_piece
from dovetail.cli.target import (
    ask,
    chosen_run,
    driving,
    handlers_to_name,
    is_shared,
    settings_of_this_place,
)
from dovetail.cli.text import Line, clip, counted, duration, listed, plain
from dovetail.cli.waiting import cancel_all, cancelled_from_outside, see_to_end, short_id
from dovetail.config import Settings
from dovetail.core.errors import BrokenRun, Conflict
from dovetail.core.states import RunStatus
from dovetail.engine.api import EngineApi
from dovetail.engine.views import seconds
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import Registry
from dovetail.telemetry.logs import show_logs

MOST_LEFT = 10
"""So many runs that cannot be driven here are told with the reason."""


class Several:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        write: Write | None,
        handlers: Sequence[str],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._write = write
        self._handlers = handlers
        self._driven: list[str] = []
        self._ended: list[dict[str, Any]] = []

    def resume(self) -> int:
        """Take over every run that nobody drives, and see them to their ends."""
        return perform(self._perform, self._give_up, self._settings.drain_seconds)

    async def _perform(self, stopping: Stopping) -> int:
        async with driving(self._settings, self._registry) as commands:
            run_ids = self._driven = await commands.resume()
            left = await self._left_behind(commands, run_ids)
            self._say(_taken_over(len(run_ids), left))
            endings = [asyncio.create_task(self._see(commands, run_id)) for run_id in run_ids]
            asked = asyncio.create_task(stopping.wait())
            whole: asyncio.Future[Any] = asyncio.gather(*endings)
            await asyncio.wait([whole, asked], return_when=asyncio.FIRST_COMPLETED)
            if not whole.done() and stopping.cancels:
                await cancel_all(commands, run_ids)
            elif not whole.done():
                whole.cancel()
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await whole
        if self._write is not None:
            self._write(json_bytes({"items": self._ended}))
        if stopping.asked is not None:
            if stopping.asked is Ask.HAND_BACK:
                resume = command("runs", "resume", handlers=self._handlers)
                say = streams.say if self._write is None else streams.complain
                say([("handed back; go on with:  ", "dim"), (resume, "bold")])
            return stopping.asked.value
        failed = any(run["status"] != RunStatus.COMPLETED for run in self._ended)
        return FAILED if failed or left else 0

    async def _see(self, commands: EngineApi, run_id: str) -> None:
        run = await see_to_end(commands, run_id, take_over=True, nodes=False)
        if run is not None:
            self._ended.append(run)
            self._say(_ending(run))

    async def _left_behind(self, commands: EngineApi, driven: list[str]) -> int:
        """Say which runs could not be taken over, and why; how many these are."""
        left = await commands.orphans()
        unable = max(0, len(left) - MOST_LEFT)
        for run_id in left[:MOST_LEFT]:
            try:
                driven += await commands.resume(run_id)
            except (Conflict, BrokenRun) as reason:
                unable += 1
                streams.complain([(f"{run_id[:6]}: ", "bold"), (plain(reason), "")])
        if len(left) > MOST_LEFT:
            streams.complain(f"and {len(left) - MOST_LEFT:,} more")
        return unable

    def _say(self, line: Line | str) -> None:
        if self._write is None:
            streams.say(line)
            sys.stdout.flush()

    def _give_up(self, asked: Ask) -> None:
        """In another thread, because this one is stuck."""
        if asked.cancels and cancelled_from_outside(self._settings, self._driven):
            words = "CANCELLED all of them, without waiting for what still runs"
        else:
            resume = command("runs", "resume", handlers=self._handlers)
            words = f"handed back as they were; go on with:  {resume}"
        os.write(2, words.encode() + b"\n")


def _taken_over(count: int, left: int) -> str:
    if count:
        return f"took over {counted(count, 'run')}"
    if left:  # each with its reason, which has been said
        return f"resumed none of {counted(left, 'interrupted run')}"
    return "nothing to resume: every unfinished run has a process that runs it"


def _ending(run: Mapping[str, Any]) -> Line:
    error = run["error"] or {}
    node = str(error.get("node", ""))
    why = f"  {clip(plain(f'{node}: {error_words(node, error)}'), 200)}" if error else ""
    return [
        status_piece(run["status"]),
        (f" {run['run_id'][:6]} {plain(run['workflow'])} in {duration(seconds_taken(run))}", ""),
        (why, "dim"),
    ]


MOST_NAMED = 20


def watch_run(given: str | None, *, as_json: bool) -> int:
    settings = settings_of_this_place()

    async def begin(commands: EngineApi) -> Shown:
        run_id = await chosen_run(commands, given)
        return Shown.from_the_start(await commands.get_run(run_id))

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

        async def begin(commands: EngineApi) -> Shown:
            run_id = await _to_retry(commands, given, from_node)
            run = await commands.snapshot(run_id)
            if await commands.owner(run_id) != "elsewhere":
                _require_handlers(run.view, await commands.plan_retry(run_id, from_node), registry)
            shown = Shown.from_now(run)
            # Whoever drives it gets to know of it through the file; if nobody does, we do.
            await commands.retry_run(run_id, from_node)
            return shown

        return Session(settings, registry, write, handlers).run(begin)


def _retry_shared(given: str | None, from_node: str | None, *, detach: bool, as_json: bool) -> int:
    """Where services drive runs: they run it again, and we look on."""

    async def begin(commands: EngineApi) -> Shown:
        run_id = await _to_retry(commands, given, from_node)
        shown = Shown.from_now(await commands.snapshot(run_id))
        await commands.retry_run(run_id, from_node)
        return shown

    async def alone(commands: EngineApi) -> tuple[dict[str, Any], str]:
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


def plan_retry(given: str | None, from_node: str | None, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> tuple[dict[str, list[str]], Line]:
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


async def _to_retry(commands: EngineApi, given: str | None, from_node: str | None) -> str:
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

        async def begin(commands: EngineApi) -> Shown:
            run_id = await commands.find_run(given)
            run = await commands.snapshot(run_id)
            await commands.resume(run_id)
            since = seconds(run.view["created_at"])  # as `runs show` counts
            return Shown.from_now(run)._replace(since=since)

        return Session(settings, registry, write, handlers).run(begin)


def cancel_run(given: str | None, *, as_json: bool) -> None:
    async def question(commands: EngineApi) -> dict[str, Any] | list[Line]:
        run_id = await chosen_run(commands, given, RunStatus.RUNNING.value)
        run = await commands.cancel_run(run_id)
        if as_json:
            return run
        short = await short_id(commands, run_id)
        title: Line = [status_piece(run["status"]), (f" {short} {plain(run['workflow'])}", "")]
        if not run["nodes"]:  # it could not be read, and was ended unread
            told = "its log cannot be read and was left as it is; trigger the workflow anew"
            return [title, [(told, "wait")]]
        plan = await commands.plan_retry(run_id)
        hint = retry_hint(RunStatus.CANCELLED, short, plan, handlers_to_name(run))
        return [title, hint]

    answer = ask(question)
    if isinstance(answer, dict):
        print_json(answer)
        return
    for line in answer:
        streams.say(line)


def repair_run(given: str, *, dry_run: bool, as_json: bool) -> None:
    async def question(commands: EngineApi) -> tuple[dict[str, Any], str, bool]:
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
