"""Threads for handlers that block.

The standard executor joins its threads when the interpreter exits, so one handler stuck in a
`sleep` would hold up Ctrl-C. These are daemons: one that will not end is left behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

_Job = tuple[
    Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], None] | None
]


class Threads:
    """As many threads as calls at once, reused; the caller bounds how many that are."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0
        self._closed = False

    def submit(
        self, work: Callable[[], Any], late: Callable[[], None] | None = None
    ) -> asyncio.Future[Any]:
        """`late` is called, in the loop, if it returns when nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((partial(copy_context().run, work), loop, future, late))
        if not self._idle.acquire(blocking=False):
            self._started += 1
            name = f"dovetail-handler-{self._started}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        return future

    def close(self) -> None:
        """Let idle threads end; busy ones end after their call."""
        self._closed = True
        for _ in range(self._started):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, future, late = job
            output: Any = None
            error: BaseException | None = None
            try:
                output = work()
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(_resolve, future, late, output, error)
            except RuntimeError:
                return  # the loop is gone: nobody waits for this any more
            del job, work, future, late, output, error  # an idle thread holds nobody's data
            if self._closed:
                return
            self._idle.release()


def _resolve(
    future: asyncio.Future[Any],
    late: Callable[[], None] | None,
    output: Any,
    error: BaseException | None,
) -> None:
    if future.done():  # it ran out of time or was stopped
        if error is None and late is not None:
            late()
        return
    if error is None:
        future.set_result(output)
    # Not `isinstance`, which asks the object: what that raises here would end the loop.
    elif issubclass(type(error), StopIteration):  # a future cannot carry it
        future.set_exception(RuntimeError("the handler raised StopIteration"))
    else:
        future.set_exception(error)
