"""Where a command finds its runs: on a server, in the stores of a set-up on Redis, or in a file.

The first of these that is named wins; a flag is a name like any other. What it must not know:
what is asked there.

A short question to the place of runs, from a shell that drives nothing, and about which run.

What it must not know: what is asked, or how the answer looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, TypeVar

from dovetail.cli import output as streams
from dovetail.cli.failures import InvalidInput
from dovetail.cli.files import File, checked_file
from dovetail.cli.text import plain
from dovetail.config import Settings, load_settings
from dovetail.core.definition.validation import Checked, DefinitionLimits
from dovetail.core.errors import DovetailError, InvalidDefinition, NotFound, Problem
from dovetail.engine.api import EngineApi
from dovetail.engine.ports import RunQuery
from dovetail.handlers.builtin import builtin_registry, load_registry
from dovetail.handlers.registry import Registry
from dovetail.wiring.embedded import attached, embedded

_flags: dict[str, str | None] = {}
_embedded = False


def choose(server: str | None, token: str | None, *, embedded: bool = False) -> None:
    """What the command line of this process says about the place."""
    global _embedded
    if embedded and server is not None:
        raise InvalidInput("--embedded and --server name two places: leave one of them out")
    _flags.update(server=server, token=token)
    _embedded = embedded


def typed_place() -> list[str]:
    """The words that lead another command to the same place; a token is never repeated."""
    if _embedded and is_shared(load_settings()):
        return ["--embedded"]
    server = _flags.get("server")
    return [] if server is None else ["--server", server]


def settings_of_this_place() -> Settings:
    from dovetail.client.arguments import server_url

    settings = load_settings(server=_flags.get("server"), token=_flags.get("token"))
    if _embedded:
        return settings.model_copy(update={"redis_url": None, "server": None})
    if settings.server is None:
        return settings
    try:
        return settings.model_copy(update={"server": server_url(settings.server)})
    except DovetailError as error:
        raise InvalidInput(str(error)) from None


def is_shared(settings: Settings) -> bool:
    """Runs are driven by services, wherever these are, and not by whoever asks."""
    return settings.server is not None or settings.redis_url is not None


def drivers(settings: Settings) -> str:
    """Who drives runs there."""
    if settings.server is not None:
        return f"the server at {settings.server}"
    return "orchestrators" if is_shared(settings) else "a process that is alive"


def looking(
    settings: Settings, registry: Registry | None = None, *, create: bool = False
) -> AbstractAsyncContextManager[EngineApi]:
    """EngineApi that drive nothing; a file that is not there is made only with `create`."""
    if is_shared(settings):
        return _elsewhere(settings, registry)
    return attached(settings, registry, create=create)


def driving(settings: Settings, registry: Registry) -> AbstractAsyncContextManager[EngineApi]:
    """EngineApi whose runs go on: in this process, or in those that are there for it."""
    if is_shared(settings):
        return _elsewhere(settings, registry)
    return embedded(settings, registry)


def _elsewhere(
    settings: Settings, registry: Registry | None
) -> AbstractAsyncContextManager[EngineApi]:
    if settings.server is not None:
        from dovetail.client import http_client

        with http_client():
            from dovetail.client.server import calling
        return calling(settings)
    from dovetail.cli.services import redis_client

    with redis_client(settings, "this command"):
        from dovetail.wiring.distributed import commanding
    return commanding(settings, registry)


T = TypeVar("T")

UNKNOWN_HANDLER = "unknown_handler"
FORBIDDEN = "template_forbidden"
Question = Callable[[EngineApi], Awaitable[T]]


def ask(question: Question[T], registry: Registry | None = None, *, keeps: bool = False) -> T:
    """The answer from where runs are kept; only what `keeps` something makes the file."""
    settings = settings_of_this_place()

    async def answer() -> T:
        async with looking(settings, registry, create=keeps) as commands:
            return await question(commands)

    return asyncio.run(answer())


def checked_for_this_place(file: File, limits: DefinitionLimits, registry: Registry) -> Checked:
    """The definition with the handlers known here; where services run them, with theirs, too."""
    if not is_shared(settings_of_this_place()):
        return checked_file(file, limits, registry)
    try:
        definition = file.parse()
    except InvalidDefinition as error:
        return Checked(None, error.problems, (), [])
    return ask(lambda commands: commands.judge(definition), registry)


def handlers_to_name(run: Mapping[str, Any]) -> Sequence[str]:
    """What `--handlers` has to name in a command that goes on with this run: nothing
    where services run it, or where its handlers are known without; else a file that has them."""
    settings = settings_of_this_place()
    if is_shared(settings):
        return ()
    used = {node["handler"] for node in run["nodes"]}
    if used <= set(builtin_registry(settings)):
        return ()
    try:
        known = set(load_registry(settings, ()))
    except DovetailError:
        return ()  # who goes on is told what is wrong with them
    return () if used <= known else ("FILE.py",)


class KnownElsewhere:
    """Handlers that only those know who run them: asked where a definition names such a one.

    So nothing is asked for a file that is right or wrong by itself, and what cannot be asked
    keeps no file from being checked.
    """

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._can_be_asked = is_shared(settings)
        self._registry = registry

    def corrected(self, file: File, checked: Checked) -> Checked:
        """The findings without the unknown handlers that are known there."""
        if not self._can_be_asked or not _unknown(checked):
            return checked
        definition = file.parse()
        try:
            judged = ask(lambda commands: commands.judge(definition), self._registry)
        except DovetailError as error:
            self._can_be_asked = False  # once: others would be waited for as long
            told = f"handlers that workers announced are not known here: {plain(str(error))}"
            streams.complain([(told, "dim")])
            return checked
        still = _unknown(judged)
        errors = [
            still.get(problem.path) if problem.code == UNKNOWN_HANDLER else problem
            for problem in checked.errors
        ]
        # What is wrong with a secret in the config of a handler is known only where the handler is.
        errors += [
            problem
            for problem in judged.errors
            if problem.code == FORBIDDEN and problem not in checked.errors
        ]
        return replace(checked, errors=tuple(problem for problem in errors if problem))


def _unknown(checked: Checked) -> dict[str, Problem]:
    return {one.path: one for one in checked.errors if one.code == UNKNOWN_HANDLER}


async def chosen_run(commands: EngineApi, given: str | None, *statuses: str) -> str:
    """The full id of the run that was named, or of the newest one, of these statuses if any."""
    if given is not None:
        return await commands.find_run(given.strip().lower())
    newest: dict[str, Any] | None = None
    kind = " or ".join(statuses)
    for status in statuses or (None,):
        items = (await commands.list_runs(RunQuery(status=status, limit=1)))["items"]
        if items and (newest is None or items[0]["created_at"] > newest["created_at"]):
            newest = items[0]
    if newest is None:
        if statuses and (await commands.list_runs(RunQuery(limit=1)))["items"]:
            raise NotFound(f"no run here is {kind}")
        maker = "trigger NAME" if is_shared(settings_of_this_place()) else "run FILE"
        raise NotFound(f"there is no run here yet; dovetail {maker} makes one")
    run_id, workflow = newest["run_id"], plain(newest["workflow"])
    which = f"the newest {kind} run" if statuses else "the newest run"
    streams.complain([(f"{which}: {run_id[:6]} {workflow}", "dim")])
    return str(run_id)
