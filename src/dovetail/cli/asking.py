"""A short question to the place of runs, from a shell that drives nothing, and about which run.

What it must not know: what is asked, or how the answer looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dovetail.cli import streams
from dovetail.cli.commands.validate import checked_file
from dovetail.cli.files import File
from dovetail.cli.places import is_shared, looking, settings_of_this_place
from dovetail.cli.text import plain
from dovetail.core.definition.validation import Checked, Limits
from dovetail.core.errors import InvalidDefinition, NotFound
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import Registry

T = TypeVar("T")

Question = Callable[[Commands], Awaitable[T]]


def ask(question: Question[T], registry: Registry | None = None, *, keeps: bool = False) -> T:
    """The answer from where runs are kept; only what `keeps` something makes the file."""
    settings = settings_of_this_place()

    async def answer() -> T:
        async with looking(settings, registry, create=keeps) as commands:
            return await question(commands)

    return asyncio.run(answer())


def checked_for_this_place(file: File, limits: Limits, registry: Registry) -> Checked:
    """The definition with the handlers known here; where services run them, with theirs, too."""
    if not is_shared(settings_of_this_place()):
        return checked_file(file, limits, registry)
    try:
        definition = file.parse()
    except InvalidDefinition as error:
        return Checked(None, error.problems, (), [])
    return ask(lambda commands: commands.judge(definition), registry)


async def chosen_run(commands: Commands, given: str | None, *statuses: str) -> str:
    """The full id of the run that was named, or of the newest one, of these statuses if any."""
    if given is not None:
        return await commands.find_run(given.strip().lower())
    newest: dict[str, Any] | None = None
    for status in statuses or (None,):
        items = (await commands.list_runs(status=status, limit=1))["items"]
        if items and (newest is None or items[0]["created_at"] > newest["created_at"]):
            newest = items[0]
    if newest is None:
        what = f"no run here that is {' or '.join(statuses)}" if statuses else "no run here yet"
        maker = "trigger NAME" if is_shared(settings_of_this_place()) else "run FILE"
        raise NotFound(f"there is {what}; dovetail {maker} makes one")
    run_id, workflow = newest["run_id"], plain(newest["workflow"])
    streams.complain([(f"the newest run: {run_id[:6]} {workflow}", "dim")])
    return str(run_id)
