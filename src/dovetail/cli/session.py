"""Runs that a command drives or follows, from the start to the exit code.

`Session` shows one run while it goes on and prints its end, whether it was triggered, retried,
resumed or is driven by another process. `ResumeAll` takes over every interrupted run.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from dovetail.cli import output as streams
from dovetail.cli.board import Board, LiveView, PlainView
from dovetail.cli.interruptible import Stopping, StopRequest, cancel_tasks, run_interruptible
from dovetail.cli.node_report import failure_lines
from dovetail.cli.output import FAILED, Write, json_bytes, print_lines
from dovetail.cli.page import open_in_browser, page_beside, page_url, run_link
from dovetail.cli.run_pool import Refreshed, cancel_all, cancel_from_thread, tick, wait_for_end
from dovetail.cli.summary import (
    INTERRUPTED,
    SHORT_ID,
    command,
    error_words,
    fork_hint,
    resume_hint,
    retry_hint,
    run_ending,
    seconds_taken,
    short_id,
    status_piece,
)
from dovetail.cli.target import handlers_hint, open_engine, open_reader
from dovetail.cli.text import Line, bare, clip, counted, duration, plain, seconds
from dovetail.cli.unblocked import write_last_words
from dovetail.config import Settings
from dovetail.core.errors import BrokenRun, Conflict
from dovetail.core.states import RunStatus
from dovetail.engine.api import EngineApi
from dovetail.engine.views import RunDetail
from dovetail.handlers.registry import Registry

if TYPE_CHECKING:
    from dovetail.engine.api import ServedEngine

SHOW_CURSOR = b"\x1b[?25h"


class View(Refreshed, Protocol):
    """Shows a run while it goes on."""

    def begin(self, workflow: str, run_id: str, passed: float) -> None: ...
    def show(self, event: Mapping[str, Any]) -> None: ...


class Shown(NamedTuple):
    """A run, and the event after which it is shown."""

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
    def from_now(cls, run: RunDetail) -> Shown:
        """Earlier events are on the board, but are not shown again."""
        view = run.view
        return cls(view["run_id"], view["workflow"], Board.now(run), run.seq, time.time())


Begin = Callable[[EngineApi], Awaitable[Shown]]


class Session:
    """Follows one run to its end; a signal cancels it or hands it back."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry | None,
        write: Write | None,
        handlers: Sequence[str] = (),
        definition: str | None = None,
        *,
        web: bool = False,
    ) -> None:
        """Without a registry the run is not driven here, only followed.

        With `write` the run is not shown; at its end it is written as one JSON document.
        `handlers` were loaded for it, and `definition` is its file; the commands that the ending
        proposes repeat them. With `web` a page shows it, in a terminal until a signal comes.
        """
        self._settings = settings
        self._registry = registry
        self._write = write
        self._handlers = handlers
        self._definition = definition
        self._web = web
        self._paints = write is None and streams.is_terminal(sys.stdout)
        self._run_id = ""
        self._driven = registry is not None
        self._printed = False

    def run(self, begin: Begin) -> int:
        async def work(stopping: Stopping) -> int:
            return await self._run(begin, stopping)

        patience = self._settings.drain_seconds
        return run_interruptible(work, self._give_up, patience, go_on=self._go_on)

    def _go_on(self) -> Line | None:
        """What continues a run that this process began to drive."""
        if not self._run_id or not self._driven or self._printed:
            return None
        return [("then ", "dim"), *resume_hint(self._run_id[:SHORT_ID], self._handlers)]

    async def _run(self, begin: Begin, stopping: Stopping) -> int:
        async with self._open() as commands:
            shown = await begin(commands)
            self._run_id = shown.run_id
            async with self._page(commands, shown.run_id) as url:
                run = await self._follow(commands, shown, stopping)
                if run is not None:
                    await self._print_end(commands, run, shown.since)
                    if url is not None and stopping.asked is None and self._paints:
                        self._comment(f"the page stays at {url} until Ctrl-C")
                        await stopping.wait()
                        return 0 if run["status"] == RunStatus.COMPLETED else FAILED
        if run is None:
            run = await self._leave(shown, stopping.asked)
        if run is not None and run["status"] == RunStatus.COMPLETED:
            return 0
        if stopping.asked is None or (run is not None and not stopping.cancels):
            return FAILED
        return stopping.asked.value

    def _open(self) -> AbstractAsyncContextManager[EngineApi]:
        if self._registry is None:
            return open_reader(self._settings)
        return open_engine(self._settings, self._registry)

    @asynccontextmanager
    async def _page(self, commands: EngineApi, run_id: str) -> AsyncIterator[str | None]:
        """The address of its page, if one is wanted; its link is printed and opened."""
        if not self._web or self._registry is None:
            yield None
            return
        served = cast("ServedEngine", commands)  # the engine of this process
        async with page_beside(served, self._settings, self._registry) as url:
            link = run_link(url, run_id)
            self._comment([("the page:  ", "dim"), (link, "bold")])
            sys.stdout.flush()
            await asyncio.to_thread(open_in_browser, link)
            yield url

    async def _follow(
        self, commands: EngineApi, shown: Shown, stopping: Stopping
    ) -> dict[str, Any] | None:
        """The run at its end; None if it goes on, or will be resumed, without this process."""
        asked = asyncio.create_task(stopping.wait())
        ending = asyncio.create_task(
            wait_for_end(commands, shown.run_id, take_over=self._registry is not None)
        )
        view = None if self._write else _view_of(shown.board)
        showing: list[asyncio.Task[None]] = []
        if view is not None:
            with stopping.reading():
                view.begin(shown.workflow, shown.run_id, max(0.0, time.time() - shown.since))
            works = (_watch(commands, shown, view), tick(view))
            showing += [asyncio.create_task(stopping.while_read(work)) for work in works]
        try:
            await asyncio.wait({asked, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self._driven = await commands.owner(shown.run_id) == "here"
                if not self._driven or stopping.asked is StopRequest.HAND_BACK:
                    return None
                await cancel_all(commands, [shown.run_id])
            run = await ending
            if run is not None and showing:
                await showing[0]  # the last events
            return run
        finally:
            await cancel_tasks(asked, ending, *showing)
            if view is not None:
                view.end()
            if stopping.asked is StopRequest.HAND_BACK:
                self._say_drain(shown)

    def _say_drain(self, shown: Shown) -> None:
        running = len(shown.board.running)
        if self._driven and running and self._write is None:
            most = f"{self._settings.drain_seconds:g} s"
            nodes = counted(running, "running node")
            streams.complain([(f"handing back: {nodes} may finish within {most}", "dim")])

    async def _leave(self, shown: Shown, asked: StopRequest | None) -> dict[str, Any] | None:
        """Print how a run goes on without this process; returns it if it has ended meanwhile."""
        async with open_reader(self._settings) as commands:
            run = await commands.get_run(shown.run_id)
            if run["finished_at"] is not None:
                await self._print_end(commands, run, shown.since)
                return run
            self._document(run)
            short = await short_id(commands, shown.run_id)
            gone = await commands.owner(shown.run_id) == "gone"
        if asked is StopRequest.HAND_BACK and self._driven:
            self._comment([("handed back; ", ""), *resume_hint(short, self._handlers)])
        elif gone:
            hint = resume_hint(short, handlers_hint(run))
            self._comment([(f"{INTERRUPTED}; ", "wait"), *hint])
        else:
            self._comment(f"the run goes on without this view: {command('runs', 'watch', short)}")
        return None

    async def _print_end(self, commands: EngineApi, run: dict[str, Any], since: float) -> None:
        """Before the engine is closed: a handler that does not stop must not delay the output."""
        self._document(run)
        if self._write is None:
            print_lines(run_ending(run, since))
            if run["status"] != RunStatus.COMPLETED:
                short = await short_id(commands, run["run_id"])
                print_lines(await failure_lines(commands, run, short))
                with suppress(Conflict):  # another process has retried it already
                    hint = await retry_hint(commands, run, short, self._handlers)
                    print_lines(fork_hint(run, short, self._definition, self._handlers))
                    streams.say(hint)
                if (url := page_url(self._settings)) is not None:
                    link = run_link(url, run["run_id"])
                    streams.say([("on the page:  ", "dim"), (link, "bold")])
            sys.stdout.flush()
        self._printed = True

    def _document(self, run: dict[str, Any]) -> None:
        if self._write is not None:
            self._write(json_bytes(run))

    def _comment(self, line: Line | str) -> None:
        """A line for people, never in the document."""
        (streams.say if self._write is None else streams.complain)(line)

    # ── in another thread ────────────────────────────────────────────────────────────────

    def _give_up(self, request: StopRequest) -> None:
        """A handler did not stop. In another thread, so without the locks of the streams."""
        if self._printed:
            return
        if self._paints:
            os.write(1, SHOW_CURSOR + b"\n")
        short = self._run_id[:SHORT_ID]
        if not self._run_id or not self._driven:
            return
        if request is StopRequest.HAND_BACK:
            words = bare([("handed back as it was; ", ""), *resume_hint(short, self._handlers)])
        elif cancel_from_thread(self._settings, [self._run_id]):
            words = f"CANCELLED {short}, without waiting for what still runs"
        else:
            words = f"stopped, but could not cancel; try:  {command('runs', 'cancel', short)}"
        write_last_words(f"{words}\n")


async def _watch(commands: EngineApi, shown: Shown, view: View) -> None:
    async for event in commands.watch(shown.run_id, shown.after):
        view.show(event)


def _view_of(board: Board) -> View:
    if not streams.is_terminal(sys.stdout) or not streams.knows_signs(sys.stdout):
        return PlainView(board)
    return LiveView(board)


MAX_LEFT = 10
"""So many runs that cannot be driven here are printed with the reason."""


class ResumeAll:
    """Takes over every run that no process drives, and waits for their ends; one line for each."""

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

    def run(self) -> int:
        return run_interruptible(self._run, self._give_up, self._settings.drain_seconds)

    async def _run(self, stopping: Stopping) -> int:
        async with open_engine(self._settings, self._registry) as commands:
            run_ids = self._driven = await commands.resume()
            left = await self._report_left(commands, run_ids)
            self._say(_taken_over(len(run_ids), left))
            endings = [asyncio.create_task(self._follow(commands, run_id)) for run_id in run_ids]
            stop = asyncio.create_task(stopping.wait())
            whole: asyncio.Future[Any] = asyncio.gather(*endings)
            await asyncio.wait([whole, stop], return_when=asyncio.FIRST_COMPLETED)
            if not whole.done() and stopping.cancels:
                await cancel_all(commands, run_ids)
            elif not whole.done():
                whole.cancel()
            stop.cancel()
            with suppress(asyncio.CancelledError):
                await whole
        if self._write is not None:
            self._write(json_bytes({"items": self._ended}))
        if stopping.asked is not None:
            if stopping.asked is StopRequest.HAND_BACK:
                resume = command("runs", "resume", handlers=self._handlers)
                say = streams.say if self._write is None else streams.complain
                say([("handed back; go on with:  ", "dim"), (resume, "bold")])
            return stopping.asked.value
        failed = any(run["status"] != RunStatus.COMPLETED for run in self._ended)
        return FAILED if failed or left else 0

    async def _follow(self, commands: EngineApi, run_id: str) -> None:
        run = await wait_for_end(commands, run_id, take_over=True, nodes=False)
        if run is not None:
            self._ended.append(run)
            self._say(_ended_line(run))

    async def _report_left(self, commands: EngineApi, driven: list[str]) -> int:
        """Print which runs could not be taken over, and why; returns how many."""
        left = await commands.orphans()
        unable = max(0, len(left) - MAX_LEFT)
        for run_id in left[:MAX_LEFT]:
            try:
                driven += await commands.resume(run_id)
            except (Conflict, BrokenRun) as reason:
                unable += 1
                streams.complain([(f"{run_id[:6]}: ", "bold"), (plain(reason), "")])
        if len(left) > MAX_LEFT:
            streams.complain(f"and {len(left) - MAX_LEFT:,} more")
        return unable

    def _say(self, line: Line | str) -> None:
        if self._write is None:
            streams.say(line)
            sys.stdout.flush()

    def _give_up(self, request: StopRequest) -> None:
        """In another thread, because this one is stuck."""
        if request.cancels and cancel_from_thread(self._settings, self._driven):
            words = "CANCELLED all of them, without waiting for what still runs"
        else:
            resume = command("runs", "resume", handlers=self._handlers)
            words = f"handed back as they were; go on with:  {resume}"
        write_last_words(f"{words}\n")


def _taken_over(count: int, left: int) -> str:
    if count:
        return f"took over {counted(count, 'run')}"
    if left:  # each was printed with its reason
        return f"resumed none of {counted(left, 'interrupted run')}"
    return "nothing to resume: every unfinished run has a process that runs it"


def _ended_line(run: Mapping[str, Any]) -> Line:
    error = run["error"] or {}
    node = str(error.get("node", ""))
    why = f"  {clip(plain(f'{node}: {error_words(node, error)}'), 200)}" if error else ""
    return [
        status_piece(run["status"]),
        (f" {run['run_id'][:6]} {plain(run['workflow'])} in {duration(seconds_taken(run))}", ""),
        (why, "dim"),
    ]
