"""A short question to the store, from a shell that drives nothing, and which run it is about.

What it must not know: what is asked, or how the answer looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dovetail.cli import streams
from dovetail.cli.failures import InvalidInput
from dovetail.cli.text import plain
from dovetail.config import Settings, env_name, load_settings
from dovetail.core.errors import NotFound
from dovetail.engine.commands import Commands
from dovetail.wiring import attached

T = TypeVar("T")

Question = Callable[[Commands], Awaitable[T]]


def ask(question: Question[T], *, keeps: bool = False) -> T:
    """The answer from where runs are kept; only what `keeps` something makes the file."""
    settings = settings_of_this_place()

    async def answer() -> T:
        async with attached(settings, create=keeps) as commands:
            return await question(commands)

    return asyncio.run(answer())


def settings_of_this_place() -> Settings:
    """The settings, if they lead to the embedded file; there is nothing else yet."""
    settings = load_settings()
    for field in ("server", "redis_url"):
        if getattr(settings, field) is not None:
            # Not the file instead: an answer from the wrong place is worse than none.
            raise InvalidInput(
                f"{env_name(field)} is set, but this version only knows the embedded file; "
                f"unset it to use {settings.db}"
            )
    return settings


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
        raise NotFound(f"there is {what}; dovetail run FILE makes one")
    run_id, workflow = newest["run_id"], plain(newest["workflow"])
    streams.complain([(f"the newest run: {run_id[:6]} {workflow}", "dim")])
    return str(run_id)
