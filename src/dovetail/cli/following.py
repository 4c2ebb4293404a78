"""Print what happens to a run until it ends, and stop at a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dovetail.cli import output as streams
from dovetail.cli.interruptible import Stopping, cancel_tasks, run_interruptible
from dovetail.cli.output import FAILED
from dovetail.cli.run_pool import wait_for_end
from dovetail.cli.summary import INTERRUPTED, resume_hint, short_id
from dovetail.cli.target import chosen_run, handlers_hint, open_reader, target_settings
from dovetail.engine.api import EngineApi


def follow_run(given: str | None, print_news: Callable[[EngineApi, str], Awaitable[None]]) -> int:
    """Until `print_news` returns. The exit code does not depend on how the run ends."""
    settings = target_settings()

    async def follow(stopping: Stopping) -> int:
        async with open_reader(settings) as commands:
            run_id = await chosen_run(commands, given)
            printing = asyncio.create_task(stopping.while_read(print_news(commands, run_id)))
            end = wait_for_end(commands, run_id, take_over=False, nodes=False)
            ended = asyncio.create_task(end)
            stop = asyncio.create_task(stopping.wait())
            try:
                await asyncio.wait({printing, ended, stop}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done() and ended.result() is None:
                    needed = handlers_hint(await commands.get_run(run_id))
                    hint = resume_hint(await short_id(commands, run_id), needed)
                    streams.complain([(f"{INTERRUPTED}; ", "wait"), *hint])
                    return FAILED
                await asyncio.wait({printing, stop}, return_when=asyncio.FIRST_COMPLETED)
                if printing.done():
                    printing.result()
            finally:
                await cancel_tasks(printing, ended, stop)
        return 0 if stopping.asked is None else stopping.asked.value

    return run_interruptible(follow, lambda request: None, settings.drain_seconds)
