"""The target of a command: a server, the stores of a set-up on Redis, or a file.

The first of these that an option or a setting names is used. The heavy imports are inside the
functions, because every module of commands imports this one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dovetail.cli import output as streams
from dovetail.cli.files import File, checked_file, print_report
from dovetail.cli.output import InvalidInput
from dovetail.cli.text import plain
from dovetail.core.errors import Conflict, DovetailError, InvalidDefinition, NotFound, Problem

if TYPE_CHECKING:
    from dovetail.config import Settings
    from dovetail.core.definition.validation import Checked, DefinitionLimits
    from dovetail.engine.api import EngineApi
    from dovetail.handlers.registry import Registry

_flags: dict[str, str | None] = {}
_embedded = False


def choose_target(server: str | None, token: str | None, *, embedded: bool = False) -> None:
    """Keep what the command line of this process says about the target."""
    global _embedded
    if embedded and server is not None:
        raise InvalidInput("--embedded and --server name two places: leave one of them out")
    _flags.update(server=server, token=token)
    _embedded = embedded


def target_options() -> list[str]:
    """The options that give another command the same target; a token is never repeated."""
    from dovetail.config import load_settings

    if _embedded and is_shared(load_settings()):
        return ["--embedded"]
    server = _flags.get("server")
    return [] if server is None else ["--server", server]


def target_settings() -> Settings:
    """The settings, with the target that the command line names. Raises `InvalidInput`."""
    from dovetail.client.arguments import server_url
    from dovetail.config import load_settings

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
    """Whether services drive the runs, rather than this process."""
    return settings.server is not None or settings.redis_url is not None


def drivers(settings: Settings) -> str:
    """The words for what drives runs there."""
    if settings.server is not None:
        return f"the server at {settings.server}"
    return "orchestrators" if is_shared(settings) else "a process that is alive"


def open_reader(
    settings: Settings, registry: Registry | None = None, *, create: bool = False
) -> AbstractAsyncContextManager[EngineApi]:
    """An engine that drives no run. A missing file is made only with `create`."""
    if is_shared(settings):
        return _remote(settings, registry)
    from dovetail.wiring.embedded import attached

    return attached(settings, registry, create=create)


def open_engine(settings: Settings, registry: Registry) -> AbstractAsyncContextManager[EngineApi]:
    """An engine whose runs are driven: by this process, or by services."""
    if is_shared(settings):
        return _remote(settings, registry)
    from dovetail.wiring.embedded import embedded

    return embedded(settings, registry)


def _remote(
    settings: Settings, registry: Registry | None
) -> AbstractAsyncContextManager[EngineApi]:
    if settings.server is not None:
        from dovetail.client import open_server

        return open_server(settings)
    from dovetail.cli.services import redis_imports

    with redis_imports(settings, "this command"):
        from dovetail.wiring.distributed import commanding
    return commanding(settings, registry)


T = TypeVar("T")

UNKNOWN_HANDLER = "unknown_handler"
ONLY_THERE = frozenset({"template_forbidden", "invalid_config"})
"""Problems that only the target can find: it knows what its handlers take."""


def ask(
    question: Callable[[EngineApi], Awaitable[T]],
    registry: Registry | None = None,
    *,
    create: bool = False,
) -> T:
    """Ask the target one question. A missing file is made only with `create`."""
    import asyncio

    settings = target_settings()

    async def answer() -> T:
        async with open_reader(settings, registry, create=create) as commands:
            return await question(commands)

    return asyncio.run(answer())


async def act_on_each(
    given: Sequence[str], act: Callable[[str], Awaitable[T]], what: str
) -> tuple[list[T], list[dict[str, str]]]:
    """Apply `act` to each; returns the results, and the refused ones with the reason of each.

    `what` is the name of one of them in the reply, as in "run".
    """
    done: list[T] = []
    refused: list[dict[str, str]] = []
    for one in dict.fromkeys(given):
        try:
            done.append(await act(one))
        except (Conflict, NotFound) as error:
            refused.append({what: one, "type": error.type, "message": str(error)})
    return done, refused


def report_refused(refused: Sequence[Mapping[str, str]]) -> int:
    """Print why each was refused; returns the exit code."""
    for one in refused:
        streams.complain([("error: ", "bold bad"), (plain(one["message"]), "")])
    return streams.FAILED if refused else 0


class LoadedFile(NamedTuple):
    """A definition that was checked for the target, and what it was checked with."""

    settings: Settings
    registry: Registry
    limits: DefinitionLimits
    checked: Checked


def load_file(path: str, handlers: Sequence[str]) -> LoadedFile:
    """Load the handlers, and check the definition for the target; its problems are printed."""
    from dovetail.handlers.builtin import load_registry
    from dovetail.wiring.embedded import definition_limits

    settings = target_settings()
    registry = load_registry(settings, handlers)
    limits = definition_limits(settings)
    file = File(path, limits)
    checked = _check_on_target(file, limits, registry)
    print_report(file, checked)
    return LoadedFile(settings, registry, limits, checked)


def _check_on_target(file: File, limits: DefinitionLimits, registry: Registry) -> Checked:
    """Check the definition with the handlers known here; on services, with their handlers too."""
    from dovetail.core.definition.validation import Checked

    if not is_shared(target_settings()):
        return checked_file(file, limits, registry)
    try:
        definition = file.parse()
    except InvalidDefinition as error:
        return Checked(None, error.problems, (), [])
    return ask(lambda commands: commands.judge(definition), registry)


def handlers_hint(run: Mapping[str, Any]) -> Sequence[str]:
    """What `--handlers` must name in a command that continues this run: nothing where services
    run it or all its handlers are known; else a file."""
    from dovetail.handlers.builtin import builtin_registry, load_registry

    settings = target_settings()
    if is_shared(settings):
        return ()
    used = {node["handler"] for node in run["nodes"]}
    if used <= set(builtin_registry(settings)):
        return ()
    try:
        known = set(load_registry(settings, ()))
    except DovetailError:
        return ()  # the command that continues the run reports the error
    return () if used <= known else ("FILE.py",)


class RemoteHandlers:
    """Handlers that only workers have announced. The target is asked when a definition names one.

    Files that need no answer are checked without asking; a target that does not answer stops no
    check.
    """

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._can_be_asked = is_shared(settings)
        self._registry = registry

    def corrected(self, file: File, checked: Checked) -> Checked:
        """The findings without the unknown handlers that the target knows."""
        if not self._can_be_asked or not _unknown(checked):
            return checked
        definition = file.parse()
        try:
            judged = ask(lambda commands: commands.judge(definition), self._registry)
        except DovetailError as error:
            self._can_be_asked = False  # once: each try may wait for a timeout
            message = f"handlers that workers announced are not known here: {plain(str(error))}"
            streams.complain([(message, "dim")])
            return checked
        still = _unknown(judged)
        errors = [
            still.get(problem.path) if problem.code == UNKNOWN_HANDLER else problem
            for problem in checked.errors
        ]
        errors += [
            problem
            for problem in judged.errors
            if problem.code in ONLY_THERE and problem not in checked.errors
        ]
        return replace(checked, errors=tuple(problem for problem in errors if problem))


def _unknown(checked: Checked) -> dict[str, Problem]:
    return {one.path: one for one in checked.errors if one.code == UNKNOWN_HANDLER}


async def chosen_run(commands: EngineApi, given: str | None, *statuses: str) -> str:
    """The full id of the run that was named; without a name, of the newest run with a status of
    these. Raises `NotFound`."""
    from dovetail.engine.ports import RunQuery

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
        maker = "trigger NAME" if is_shared(target_settings()) else "run FILE"
        raise NotFound(f"there is no run here yet; dovetail {maker} makes one")
    run_id, workflow = newest["run_id"], plain(newest["workflow"])
    which = f"the newest {kind} run" if statuses else "the newest run"
    streams.complain([(f"{which}: {run_id[:6]} {workflow}", "dim")])
    return str(run_id)
