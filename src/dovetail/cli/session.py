"""One run from its trigger to the exit code: shown while it goes on, told when it has ended.

It brings together what each does one thing: the engine, a view, the signals and the end of the
process. What it must not know: where the definition and the params came from.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import orjson

from dovetail.cli import streams
from dovetail.cli.board import Board
from dovetail.cli.ending import run_ending
from dovetail.cli.failures import FAILED
from dovetail.cli.interrupts import Interrupts
from dovetail.cli.plain import PlainView
from dovetail.cli.process import Process
from dovetail.config import Settings
from dovetail.core.definition.model import Workflow
from dovetail.core.definition.validation import Checked
from dovetail.core.errors import Conflict
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.engine.views import run_view
from dovetail.handlers.registry import Registry
from dovetail.wiring import embedded

Write = Callable[[bytes], None]
SHOW_CURSOR = b"\x1b[?25h"


class View(Protocol):
    """Shows a run that goes on."""

    refresh_seconds: float

    def begin(self, workflow: str, run_id: str) -> None: ...
    def show(self, event: Event) -> None: ...
    def refresh(self) -> None: ...
    def end(self) -> None: ...


class Session:
    """One run, seen and, if a signal asks for it, cancelled."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        workflow: Workflow,
        write: Write | None,
    ) -> None:
        """With `write` the run is not shown; at its end it is written as one JSON document."""
        self._settings = settings
        self._registry = registry
        self._workflow = workflow
        self._write = write
        self._paints = write is None and streams.is_terminal(sys.stdout)
        self._view = None if write else _view_of(Board([node.id for node in workflow.nodes]))
        self._run_id = ""
        self._told = False

    def run(self, checked: Checked, params: dict[str, Any]) -> int:
        process = Process()
        stopping = asyncio.Event()
        with Interrupts(process.loop, stopping.set, self._give_up) as interrupts:
            run = process.run(self._drive(checked, params, stopping))
            if run.status is RunStatus.COMPLETED:
                return process.leave(0)
            return process.leave(interrupts.exit_code or FAILED)

    async def _drive(
        self, checked: Checked, params: dict[str, Any], stopping: asyncio.Event
    ) -> RunState:
        async with embedded(self._settings, self._registry) as commands:
            run_id = self._run_id = await commands.trigger(checked, params)

            async def stop() -> None:
                await stopping.wait()
                with suppress(Conflict):  # it has ended in this very moment
                    await commands.cancel(run_id)

            async def watch(view: View) -> None:
                async for event in commands.store.watch(run_id):
                    view.show(event)

            async def tick(view: View) -> None:
                while True:
                    await asyncio.sleep(view.refresh_seconds)
                    view.refresh()

            tasks = [asyncio.create_task(stop())]
            view = self._view
            try:
                if view is not None:
                    view.begin(self._workflow.name, run_id)
                    watching = asyncio.create_task(_while_read(watch(view), stopping))
                    tasks += [watching, asyncio.create_task(_while_read(tick(view), stopping))]
                run = await commands.wait(run_id)
                if view is not None:
                    await watching
            finally:
                for task in tasks:
                    task.cancel()
                if view is not None:
                    view.end()
            self._tell(run)
        return run

    def _tell(self, run: RunState) -> None:
        """Before the engine is closed: a handler that clings to life need not delay the news."""
        if self._write is not None:
            option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
            self._write(orjson.dumps(run_view(run), option=option))
        else:
            for line in run_ending(run, sys.argv[1:]):
                streams.say(line)
            sys.stdout.flush()
        self._told = True

    def _give_up(self) -> None:
        """A handler would not stop. In another thread, so past every lock of the streams."""
        if not self._told:
            if self._paints:
                os.write(1, SHOW_CURSOR + b"\n")
            words = f"CANCELLED {self._run_id[:6]}, without waiting for what still runs\n"
            os.write(2, words.encode())


async def _while_read(work: Awaitable[None], stopping: asyncio.Event) -> None:
    """Show the run; if nobody reads that any more (`| head -1`), stop it, as any command would."""
    try:
        await work
    except BrokenPipeError:
        streams.nobody_reads()
        stopping.set()


def _view_of(board: Board) -> View:
    if not streams.is_terminal(sys.stdout) or not streams.knows_signs(sys.stdout):
        return PlainView(board)
    from dovetail.cli.live import LiveView

    return LiveView(board)
