"""`dovetail run`: one workflow, from its file to its exit code, in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import orjson

from dovetail.cli import streams
from dovetail.cli.board import Board
from dovetail.cli.commands.validate import checked_file, report_of
from dovetail.cli.ending import run_ending
from dovetail.cli.failures import FAILED, INVALID, InvalidInput, say_error
from dovetail.cli.files import STDIN, File
from dovetail.cli.interrupts import Interrupts
from dovetail.cli.logs import show_logs
from dovetail.cli.plain import PlainView
from dovetail.cli.process import Process
from dovetail.config import Settings, load_settings
from dovetail.core.errors import Conflict, InvalidDefinition, InvalidParams
from dovetail.core.events import Event
from dovetail.core.model import Workflow
from dovetail.core.params import typed
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.validation import Checked, Limits
from dovetail.engine.views import run_view
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import Registry
from dovetail.wiring import definition_limits, embedded


def run_file(
    path: str,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    *,
    as_json: bool,
) -> int:
    if path == STDIN and params_path == STDIN:
        raise InvalidInput("stdin can be read once: as the definition or as the params, not both")
    if not as_json:
        return _run(path, pairs, params_path, handlers, None)
    with streams.document() as write:
        return _run(path, pairs, params_path, handlers, write)


Write = Callable[[bytes], None]


def _run(
    path: str,
    pairs: Sequence[str],
    params_path: str | None,
    handlers: Sequence[str],
    write: Write | None,
) -> int:
    settings = load_settings()
    registry = load_registry(settings, handlers)
    limits = definition_limits(settings)
    file = File(path, limits)
    checked = checked_file(file, limits, registry)
    _complain(file, checked)
    if checked.workflow is None:
        return INVALID
    params = _params(checked.workflow, pairs, params_path, limits)
    if params is None:
        return INVALID
    show_logs(settings.log_format)
    session = Session(settings, registry, checked.workflow, write)
    try:
        return session.run(checked, params)
    except InvalidParams as error:
        for problem in error.problems:
            say_error(f"{problem.path}: {problem.message}")
        streams.complain([("params are given as  -p name=value  or  --params FILE", "dim")])
        return INVALID


def _complain(file: File, checked: Checked) -> None:
    for line in report_of(file, checked):
        streams.complain(line)


def _params(
    workflow: Workflow, pairs: Sequence[str], path: str | None, limits: Limits
) -> dict[str, Any] | None:
    """Those of the file, and over them those of the command line. None: the file is invalid."""
    params: dict[str, Any] = {}
    if path is not None:
        file = File(path, limits)
        try:
            data = file.parse().data
        except InvalidDefinition as error:
            _complain(file, Checked(None, error.problems, (), []))
            return None
        if not isinstance(data, dict):
            raise InvalidInput(f"{file.name}: params must be an object, as in  topic: otters")
        params.update(data)
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise InvalidInput(f"-p {pair}: write it as name=value")
        params[name] = typed(workflow.params, name, text)
    return params


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
        self._settings = settings
        self._registry = registry
        self._workflow = workflow
        self._write = write
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
            words = f"CANCELLED {self._run_id[:6]}, without waiting for what still runs\n"
            show_cursor = "\x1b[?25h\n" if streams.is_terminal(sys.stderr) else ""
            os.write(2, (show_cursor + words).encode())


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
