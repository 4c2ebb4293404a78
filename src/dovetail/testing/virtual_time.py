"""An event loop whose clock jumps to the next timer instead of waiting for it.

Backoffs, rate limits, timeouts and `asyncio.sleep` take no real time. While something outside the
loop is awaited, such as a thread or a connection, the clock runs as a real one does.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from asyncio import tasks
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from types import CoroutineType, GeneratorType
from typing import Any

_SLEEP = tasks.sleep.__code__
_IDLE_THREADS = ("asyncio_", "dovetail-")
"""Threads that wait for work. When they have some, it is counted."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Use it as the `loop_factory` of `asyncio.Runner`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._outside = 0
        """Threads that are awaited."""
        self._watched: dict[object, None] = {}
        """Coroutines that may wait for something outside the loop."""
        self._threads = set(threading.enumerate())
        super().__init__(_JumpingSelector(self._awaits_outside, self._advance))
        # asyncio adds this to the time, and the sum must be more than the time: after thirty years
        # a nanosecond is less than a float can tell.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, *args: Any, **named: Any
    ) -> asyncio.TimerHandle:
        # The loop calls what is due within its resolution and does not move its clock for that. A
        # caller that waits for less, until a time has really come, would wait for ever.
        if when > self._now:
            when = max(when, self._now + 2 * self._clock_resolution)
        return super().call_at(when, *args, **named)

    @contextmanager
    def waiting_outside(self) -> Iterator[None]:
        """Time is real in here: the caller waits for a thread."""
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1

    @contextmanager
    def watching(self, work: object) -> Iterator[None]:
        """Time is real in here, unless this coroutine is in an `asyncio.sleep`."""
        self._watched[work] = None
        try:
            yield
        finally:
            del self._watched[work]

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Any, *args: Any
    ) -> asyncio.Future[Any]:
        self._outside += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._outside -= 1

    def _advance(self, seconds: float) -> None:
        self._now += seconds

    def _awaits_outside(self) -> bool:
        if self._outside:
            return True
        if not self._watched:
            return False
        # A handler that sleeps again and again may ask each time whether its thread is done.
        return not all(map(is_asleep, self._watched)) or any(
            map(self._is_new, threading.enumerate())
        )

    def _is_new(self, thread: threading.Thread) -> bool:
        return thread not in self._threads and not thread.name.startswith(_IDLE_THREADS)


def is_asleep(work: object) -> bool:
    """Whether a coroutine is suspended in `asyncio.sleep`, and not in anything else."""
    one: Any = work
    while True:
        if type(one) is CoroutineType:
            if one.cr_code is _SLEEP:
                return True
            one = one.cr_await
        elif type(one) is GeneratorType:
            one = one.gi_yieldfrom
        else:
            return False


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait for a time-out, but moves the clock, unless something outside is awaited."""

    def __init__(
        self, awaits_outside: Callable[[], bool], advance: Callable[[float], None]
    ) -> None:
        super().__init__()
        self._awaits_outside = awaits_outside
        self._advance = advance

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if timeout is None or self._awaits_outside():
            began = time.monotonic()
            ready = super().select(timeout)
            self._advance(time.monotonic() - began)
            return ready
        ready = super().select(0)
        if not ready:
            self._advance(timeout)
        return ready
