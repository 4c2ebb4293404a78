"""Ctrl-C and SIGTERM while a command works: the first asks, the second and the clock insist.

The asking is the event loop's part. The insisting is a thread's, because a handler may block
the loop, cling to its task or sit in a thread for an hour, and the prompt must be back in two
seconds all the same. Who is terminated may first finish what runs: there the clock is slower.
What it must not know: what a run is.

The event loop of a command, and an end of the process that nothing can hold up.

`asyncio.run` waits for every task and thread that is left, and so does Python at its exit; a
handler that ran out of time may never let go of its own. What it must not know: what is run.

Where a command works that a signal may stop: one event loop, two kinds of end.

Every command that drives runs or follows them performs here, so that Ctrl-C, SIGTERM, a reader
that goes away and a store that fails mean the same to all of them. What it must not know: what
is performed.
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
from dovetail.cli.failures import FAILED, INTERRUPTED, report_error, try_print_error
from dovetail.core.errors import DovetailError, InvalidDefinition

GRACE_SECONDS = 1.8
"""From Ctrl-C to the end of the process, whatever the handlers do."""


class StopRequest(Enum):
    """How a command that works may be asked to stop; the value is the code to exit with."""

    CANCEL = INTERRUPTED
    NOBODY_READS = FAILED
    """The same, from whoever read the output and is gone."""
    HAND_BACK = 0

    @property
    def cancels(self) -> bool:
        return self is not StopRequest.HAND_BACK


_ASKED_BY = {signal.SIGINT: StopRequest.CANCEL, signal.SIGTERM: StopRequest.HAND_BACK}


class Interrupts:
    """While it is entered, the first signal calls `on_first` in the event loop, once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_first: Callable[[StopRequest], None],
        on_last: Callable[[StopRequest], None],
        drain_seconds: float,
    ) -> None:
        """`on_last` is called in another thread, right before the process is ended by force."""
        self._loop = loop
        self._on_first = on_first
        self._on_last = on_last
        self._patience = {
            StopRequest.CANCEL: GRACE_SECONDS,
            # Twice: the engine gives handlers that outlive the drain a grace of its own.
            StopRequest.HAND_BACK: drain_seconds + 2 * GRACE_SECONDS,
        }
        self._earlier: dict[signal.Signals, Any] = {}
        # Its `put` may interrupt itself, which is what a signal handler needs.
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
            return  # still ending: the thread and the handlers stay until the process is gone
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
"""What handlers have registered with `atexit`, and threads that still run, get this long."""


class Process:
    """Runs one coroutine, and then leaves."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = new_loop()
        asyncio.set_event_loop(self.loop)
        # Ours, so that closing the loop need not wait for what `asyncio.to_thread` has begun.
        self._threads = ThreadPoolExecutor(thread_name_prefix=f"{HANDLER_THREADS}-pool")
        self.loop.set_default_executor(self._threads)
        self._clings = False
        self._exit_code = FAILED

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._persist(self.loop.create_task(work))
        finally:
            self._wind_up()

    def _persist(self, main: asyncio.Task[T]) -> T:
        """Run the loop until this task has ended, though something else in it ends the loop.

        A handler may start tasks and callbacks of its own. asyncio lets `SystemExit` in one of
        them out of the loop, and `loop.stop()` ends it, too: nothing else may end for that.
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
        # What a task says that was told to end is of no interest any more.
        loop.set_exception_handler(lambda loop, context: None)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=LAST_TASKS_SECONDS))
        self._threads.shutdown(wait=False, cancel_futures=True)
        if asyncio.all_tasks(loop):
            self._clings = True  # closed under them, the loop would complain about each
            return
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def leave(self, code: int) -> int:
        """Give the code to exit with, or, if something would hold that up, exit right here."""
        self._exit_code = code
        _flush()
        if self._clings or _busy_handlers():
            os._exit(code)
        return code


def _busy_handlers() -> bool:
    """Whether a handler still sits in a thread; Python may crash if it prints during the exit."""
    handlers = [t for t in threading.enumerate() if t.name.startswith(HANDLER_THREADS)]
    for thread in handlers:  # an idle one was told to end a moment ago
        thread.join(IDLE_THREAD_SECONDS)
    return any(thread.is_alive() for thread in handlers)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            streams.discard_output()


# What a file on a disk may refuse; anything else is no matter of who reads.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Stopping:
    """Whether this command was asked to stop, and how; the first to ask decides."""

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
        """Show something; if nobody reads it any more (`| head -1`), or nothing more can be kept
        of it (a full disk), stop, as any command would."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.EPIPE and error.errno not in _FULL:
                raise
            streams.discard_output()
            self.ask(StopRequest.NOBODY_READS)
            if error.errno in _FULL:
                try_print_error(f"stdout cannot be written: {error.strerror}")


def run_interruptible(
    work: Callable[[Stopping], Coroutine[Any, Any, int]],
    give_up: Callable[[StopRequest], None],
    drain_seconds: float,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> int:
    """Run it to its exit code. `give_up` is called in another thread, if it would not stop."""
    process = Process(new_loop)
    stopping = Stopping()
    with Interrupts(process.loop, stopping.ask, give_up, drain_seconds):
        try:
            code = process.run(work(stopping))
        except InvalidDefinition:
            raise  # before anything began: whoever called knows how to report it
        except DovetailError as error:
            code = report_error(error)
        return process.leave(code)
