"""The event loop of a command, and an end of the process that nothing can hold up.

`asyncio.run` waits for every task and thread that is left, and so does Python at its exit; a
handler that ran out of time may never let go of its own. What it must not know: what is run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dovetail.cli import streams
from dovetail.cli.failures import FAILED

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
            streams.nobody_reads()
