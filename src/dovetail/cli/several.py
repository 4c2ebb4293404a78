"""Several runs at once that others have left behind: driven to their ends, one line for each.

What it must not know: how a run was started, or how one run is shown while it goes on.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dovetail.cli import streams
from dovetail.cli.driving import cancel_all, cancelled_from_outside, see_to_end
from dovetail.cli.ending import command, error_words, status_piece
from dovetail.cli.failures import FAILED
from dovetail.cli.interrupts import Ask
from dovetail.cli.json_output import Write, json_bytes
from dovetail.cli.places import driving
from dovetail.cli.stage import Stopping, perform
from dovetail.cli.text import Line, clip, counted, duration, plain
from dovetail.config import Settings
from dovetail.core.errors import BrokenRun, Conflict
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.engine.commands import Commands
from dovetail.engine.views import run_view
from dovetail.handlers.registry import Registry

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
            self._say(_taken_over(len(run_ids)))
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

    async def _see(self, commands: Commands, run_id: str) -> None:
        run = await see_to_end(commands, run_id, take_over=True)
        if run is not None:
            self._ended.append(run_view(run, nodes=False))
            self._say(_ending(run))

    async def _left_behind(self, commands: Commands, driven: list[str]) -> int:
        """Say which runs could not be taken over, and why."""
        left = await commands.store.orphans()
        for run_id in left[:MOST_LEFT]:
            try:
                driven += await commands.resume(run_id)
            except (Conflict, BrokenRun) as reason:
                streams.complain([(f"{run_id[:6]}: ", "bold"), (plain(reason), "")])
        if len(left) > MOST_LEFT:
            streams.complain(f"and {len(left) - MOST_LEFT:,} more")
        return len(left)

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


def _taken_over(count: int) -> str:
    if not count:
        return "nothing to resume: every unfinished run that can be driven here has its process"
    return f"took over {counted(count, 'run')}"


def _ending(run: RunState) -> Line:
    passed = (run.finished_at or run.created_at) - run.created_at
    error = run.error or {}
    node = str(error.get("node", ""))
    why = f"  {clip(plain(f'{node}: {error_words(node, error)}'), 200)}" if error else ""
    return [
        status_piece(run.status),
        (f" {run.id[:6]} {plain(run.graph.name)} in {duration(passed)}", ""),
        (why, "dim"),
    ]
