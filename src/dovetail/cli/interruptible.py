"""Runs the work of a command so that Ctrl-C, SIGTERM or a closed pipe ends it in time.

The first signal asks the event loop to stop. A second one, or a timer, ends the process by force,
in a thread: a handler may block the event loop, ignore its cancellation or sit in a thread for an
hour. Ctrl-C ends the process within two seconds; SIGTERM first lets running nodes finish.

`asyncio.run` and Python's exit wait for every task and thread that is left; here they do not.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import Enum
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, TypeVar

from dovetail.cli import output as streams
from dovetail.cli.output import FAILED, INTERRUPTED, complain, report_error, try_print_error
from dovetail.cli.text import Line
from dovetail.core.errors import DovetailError, InvalidDefinition, StoreError

GRACE_SECONDS = 1.8
"""From Ctrl-C to the end of the process, whatever the handlers do."""


class StopRequest(Enum):
    """How a working command is asked to stop; the value is its exit code."""

    CANCEL = INTERRUPTED
    READER_GONE = FAILED
    """The reader of the output is gone, or its disk is full."""
    HAND_BACK = 0

    @property
    def cancels(self) -> bool:
        return self is not StopRequest.HAND_BACK


_ASKED_BY = {signal.SIGINT: StopRequest.CANCEL, signal.SIGTERM: StopRequest.HAND_BACK}


class Interrupts:
    """Within it, the first signal calls `on_first` in the event loop, once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_first: Callable[[StopRequest], None],
        on_last: Callable[[StopRequest], None],
        drain_seconds: float,
    ) -> None:
        """`on_last` is called in another thread, right before the process ends by force."""
        self._loop = loop
        self._on_first = on_first
        self._on_last = on_last
        self._patience = {
            StopRequest.CANCEL: GRACE_SECONDS,
            # Twice: the engine gives handlers that outlive the drain a grace of its own.
            StopRequest.HAND_BACK: drain_seconds + 2 * GRACE_SECONDS,
        }
        self._earlier: dict[signal.Signals, Any] = {}
        # Its `put` is reentrant, which a signal handler needs.
        self._signals: SimpleQueue[StopRequest] = SimpleQueue()
        self._asked = False

    def __enter__(self) -> Interrupts:
        threading.Thread(target=self._insist, name="dovetail-interrupts", daemon=True).start()
        for number in _ASKED_BY:
            self._earlier[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._asked:
            return  # the thread and the signal handlers stay until the process has ended
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        ask = _ASKED_BY[signal.Signals(number)]
        if not self._asked:
            self._asked = True
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_first, ask)
        self._signals.put(ask)

    def _insist(self) -> None:
        asked = self._signals.get()
        with suppress(Empty):
            self._signals.get(timeout=self._patience[asked])
        self._on_last(asked)
        os._exit(asked.value)


T = TypeVar("T")
LOOP_STOPPED = "Event loop stopped before Future completed."
"""What asyncio and uvloop say of `loop.stop()`."""
log = logging.getLogger("dovetail.process")

LAST_TASKS_SECONDS = 0.2
IDLE_THREAD_SECONDS = 0.05
HANDLER_THREADS = "dovetail-handler"
EXIT_SECONDS = 5.0
"""For `atexit` functions of handlers and for threads that still run."""


class Process:
    """Runs one coroutine in its own event loop, and then exits."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = new_loop()
        asyncio.set_event_loop(self.loop)
        # Not the default one: closing the loop would wait for every `asyncio.to_thread`.
        self._threads = ThreadPoolExecutor(thread_name_prefix=f"{HANDLER_THREADS}-pool")
        self.loop.set_default_executor(self._threads)
        self._has_leftovers = False
        self._exit_code = FAILED

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._persist(self.loop.create_task(work))
        finally:
            self._wind_up()

    def _persist(self, main: asyncio.Task[T]) -> T:
        """Run the loop until this task has ended, even if something else stops the loop.

        A handler may start its own tasks and callbacks. A `SystemExit` in one of them, or
        `loop.stop()`, stops the loop.
        """
        while True:
            try:
                return self.loop.run_until_complete(main)
            except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
                stopped = isinstance(error, RuntimeError)
                if main.done() or (stopped and str(error) != LOOP_STOPPED):
                    raise
                what = "loop.stop()" if stopped else type(error).__name__
                log.error("%s in a task or callback of a handler is ignored", what)

    def _wind_up(self) -> None:
        guard = threading.Timer(EXIT_SECONDS, lambda: os._exit(self._exit_code))
        guard.daemon = True
        guard.start()
        loop = self.loop
        # Errors of cancelled tasks do not matter any more.
        loop.set_exception_handler(lambda loop, context: None)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=LAST_TASKS_SECONDS))
        self._threads.shutdown(wait=False, cancel_futures=True)
        if asyncio.all_tasks(loop):
            self._has_leftovers = True  # closing the loop now would log an error for each
            return
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def leave(self, code: int) -> int:
        """Return the exit code or, if a task or thread would delay the exit, exit here."""
        self._exit_code = code
        _flush()
        if self._has_leftovers or _busy_handlers():
            os._exit(code)
        return code


def _busy_handlers() -> bool:
    """Whether a handler still runs in a thread; Python may crash if it prints during the exit."""
    handlers = [t for t in threading.enumerate() if t.name.startswith(HANDLER_THREADS)]
    for thread in handlers:  # an idle one was asked to end a moment ago
        thread.join(IDLE_THREAD_SECONDS)
    return any(thread.is_alive() for thread in handlers)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            streams.discard_output()


# Errors of a full disk; others are not about the reader of the output.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Stopping:
    """Whether this command was asked to stop, and how; the first request decides."""

    def __init__(self) -> None:
        self.asked: StopRequest | None = None
        self._event = asyncio.Event()

    def ask(self, what: StopRequest) -> None:
        if self.asked is None:
            self.asked = what
            self._event.set()

    @property
    def cancels(self) -> bool:
        return self.asked is not None and self.asked.cancels

    async def wait(self) -> None:
        await self._event.wait()

    async def while_read(self, showing: Awaitable[None]) -> None:
        with self.reading():
            await showing

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Write output; a closed pipe (`| head -1`) or a full disk asks the command to stop."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EPIPE and error.errno not in _FULL:
                raise
            streams.discard_output()
            self.ask(StopRequest.READER_GONE)
            if error.errno in _FULL:
                try_print_error(f"stdout cannot be written: {error.strerror}")


async def finished_before_stop(work: Coroutine[Any, Any, None], stopping: Stopping) -> bool:
    """Whether the work was done before a stop was requested; if not, it is cancelled."""
    doing = asyncio.create_task(work)
    asked = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({doing, asked}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        await cancel_tasks(doing, asked)


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their ends; their errors do not matter any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run_interruptible(
    work: Callable[[Stopping], Coroutine[Any, Any, int]],
    give_up: Callable[[StopRequest], None],
    drain_seconds: float,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    go_on: Callable[[], Line | None] = lambda: None,
) -> int:
    """Run the work to its exit code. `give_up` is called in another thread if it does not stop.

    `go_on` says what continues the work, for a store that failed, such as on a full disk.
    """
    process = Process(new_loop)
    stopping = Stopping()
    with Interrupts(process.loop, stopping.ask, give_up, drain_seconds):
        try:
            code = process.run(work(stopping))
        except InvalidDefinition:
            raise  # before any run began: the caller reports it
        except DovetailError as error:
            code = report_error(error)
            if error.type == StoreError.type and (line := go_on()) is not None:
                complain(line)
        return process.leave(code)
