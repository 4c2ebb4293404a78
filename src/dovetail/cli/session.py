"""One run from its beginning to the exit code: shown while it goes on, told when it has ended.

It brings together what each does one thing: the engine, a view, and what a signal asks for.
What it must not know: where the run comes from; a trigger, a retry, a take-over and a mere
look at what another process drives are all the same to it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, NamedTuple, Protocol

from dovetail.cli import output as streams
from dovetail.cli.board import Board
from dovetail.cli.failures import FAILED
from dovetail.cli.interruptible import Ask, Stopping, perform
from dovetail.cli.live import PlainView
from dovetail.cli.output import Write, json_bytes
from dovetail.cli.summary import command, resume_hint, retry_hint, run_ending
from dovetail.cli.target import driving, handlers_to_name, looking
from dovetail.cli.text import Line, bare, counted
from dovetail.cli.waiting import (
    INTERRUPTED,
    SHORT_ID,
    cancel_all,
    cancelled_from_outside,
    see_to_end,
    short_id,
)
from dovetail.config import Settings
from dovetail.core.errors import Conflict
from dovetail.core.states import RunStatus
from dovetail.engine.api import EngineApi
from dovetail.engine.views import RunSnapshot, seconds
from dovetail.handlers.registry import Registry

SHOW_CURSOR = b"\x1b[?25h"


class View(Protocol):
    """Shows a run that goes on."""

    refresh_seconds: float

    def begin(self, workflow: str, run_id: str, passed: float) -> None: ...
    def show(self, event: Mapping[str, Any]) -> None: ...
    def refresh(self) -> None: ...
    def end(self) -> None: ...


class Shown(NamedTuple):
    """A run and the place in its log from which on it is shown."""

    run_id: str
    workflow: str
    board: Board
    after: int
    since: float

    @classmethod
    def from_the_start(cls, run: Mapping[str, Any]) -> Shown:
        board = Board.before(run["nodes"])
        return cls(run["run_id"], run["workflow"], board, 0, seconds(run["created_at"]))

    @classmethod
    def from_now(cls, run: RunSnapshot) -> Shown:
        """What happened before is on the board, but no news."""
        view = run.view
        return cls(view["run_id"], view["workflow"], Board.now(run), run.seq, time.time())


Begin = Callable[[EngineApi], Awaitable[Shown]]


class Session:
    """One run, seen to its end and, if a signal asks for it, cancelled or handed back."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry | None,
        write: Write | None,
        handlers: Sequence[str] = (),
    ) -> None:
        """Without a registry nothing is driven here, only watched.

        With `write` the run is not shown; at its end it is written as one JSON document.
        `handlers` is what was loaded for it, for the commands that the ending proposes.
        """
        self._settings = settings
        self._registry = registry
        self._write = write
        self._handlers = handlers
        self._paints = write is None and streams.is_terminal(sys.stdout)
        self._run_id = ""
        self._driven = registry is not None
        self._told = False

    def run(self, begin: Begin) -> int:
        async def work(stopping: Stopping) -> int:
            return await self._perform(begin, stopping)

        return perform(work, self._give_up, self._settings.drain_seconds)

    async def _perform(self, begin: Begin, stopping: Stopping) -> int:
        async with self._open() as commands:
            shown = await begin(commands)
            self._run_id = shown.run_id
            run = await self._see(commands, shown, stopping)
            if run is not None:
                await self._tell(commands, run, shown.since)
        if run is None:
            run = await self._leave(shown, stopping.asked)
        if run is not None and run["status"] == RunStatus.COMPLETED:
            return 0
        if stopping.asked is None or (run is not None and not stopping.cancels):
            return FAILED
        return stopping.asked.value

    def _open(self) -> AbstractAsyncContextManager[EngineApi]:
        if self._registry is None:
            return looking(self._settings)
        return driving(self._settings, self._registry)

    async def _see(
        self, commands: EngineApi, shown: Shown, stopping: Stopping
    ) -> dict[str, Any] | None:
        """The run at its end; None if it goes on, or would, without this process."""
        asked = asyncio.create_task(stopping.wait())
        ending = asyncio.create_task(
            see_to_end(commands, shown.run_id, take_over=self._registry is not None)
        )
        view = None if self._write else _view_of(shown.board)
        showing: list[asyncio.Task[None]] = []
        if view is not None:
            with stopping.reading():
                view.begin(shown.workflow, shown.run_id, max(0.0, time.time() - shown.since))
            works = (_watch(commands, shown, view), _tick(view))
            showing += [asyncio.create_task(stopping.while_read(work)) for work in works]
        try:
            await asyncio.wait({asked, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self._driven = await commands.owner(shown.run_id) == "here"
                if not self._driven or stopping.asked is Ask.HAND_BACK:
                    return None
                await cancel_all(commands, [shown.run_id])
            run = await ending
            if run is not None and showing:
                await showing[0]  # the last events
            return run
        finally:
            await _cancelled([asked, ending, *showing])
            if view is not None:
                view.end()
            if stopping.asked is Ask.HAND_BACK:
                self._say_drain(shown)

    def _say_drain(self, shown: Shown) -> None:
        running = len(shown.board.running)
        if self._driven and running and self._write is None:
            seconds = f"{self._settings.drain_seconds:g} s"
            nodes = counted(running, "running node")
            streams.complain([(f"handing back: {nodes} may finish within {seconds}", "dim")])

    async def _leave(self, shown: Shown, asked: Ask | None) -> dict[str, Any] | None:
        """Say what becomes of a run that goes on without us; the run, if it has ended meanwhile."""
        async with looking(self._settings) as commands:
            run = await commands.get_run(shown.run_id)
            if run["finished_at"] is not None:
                await self._tell(commands, run, shown.since)
                return run
            self._document(run)
            short = await short_id(commands, shown.run_id)
            gone = await commands.owner(shown.run_id) == "gone"
        if asked is Ask.HAND_BACK and self._driven:
            self._comment([("handed back; ", ""), *resume_hint(short, self._handlers)])
        elif gone:
            hint = resume_hint(short, handlers_to_name(run))
            self._comment([(f"{INTERRUPTED}; ", "wait"), *hint])
        else:
            self._comment(f"the run goes on without this view: {command('runs', 'watch', short)}")
        return None

    async def _tell(self, commands: EngineApi, run: dict[str, Any], since: float) -> None:
        """Before the engine is closed: a handler that clings to life need not delay the news."""
        self._document(run)
        if self._write is None:
            for line in run_ending(run, since):
                streams.say(line)
            if run["status"] != RunStatus.COMPLETED:
                with suppress(Conflict):  # somebody has retried it already
                    plan = await commands.plan_retry(run["run_id"])
                    short = await short_id(commands, run["run_id"])
                    streams.say(retry_hint(run["status"], short, plan, self._handlers))
            sys.stdout.flush()
        self._told = True

    def _document(self, run: dict[str, Any]) -> None:
        if self._write is not None:
            self._write(json_bytes(run))

    def _comment(self, line: Line | str) -> None:
        """To who reads, never into the document."""
        (streams.say if self._write is None else streams.complain)(line)

    # ── in another thread ────────────────────────────────────────────────────────────────

    def _give_up(self, asked: Ask) -> None:
        """A handler would not stop. In another thread, so past every lock of the streams."""
        if self._told:
            return
        if self._paints:
            os.write(1, SHOW_CURSOR + b"\n")
        short = self._run_id[:SHORT_ID]
        if not self._run_id or not self._driven:
            return
        if asked is Ask.HAND_BACK:
            words = bare([("handed back as it was; ", ""), *resume_hint(short, self._handlers)])
        elif cancelled_from_outside(self._settings, [self._run_id]):
            words = f"CANCELLED {short}, without waiting for what still runs"
        else:
            words = f"stopped, but could not cancel; try:  {command('runs', 'cancel', short)}"
        os.write(2, words.encode() + b"\n")


async def _watch(commands: EngineApi, shown: Shown, view: View) -> None:
    async for event in commands.watch(shown.run_id, shown.after):
        view.show(event)


async def _tick(view: View) -> None:
    while True:
        await asyncio.sleep(view.refresh_seconds)
        view.refresh()


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _view_of(board: Board) -> View:
    if not streams.is_terminal(sys.stdout) or not streams.knows_signs(sys.stdout):
        return PlainView(board)
    from dovetail.cli.live import LiveView

    return LiveView(board)
