"""Ctrl-C and SIGTERM while a run goes on: the first asks, the second and the clock insist.

The asking is the event loop's part. The insisting is a thread's, because a handler may block
the loop, cling to its task or sit in a thread for an hour, and the prompt must be back in two
seconds all the same. What it must not know: what a run is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any

from dovetail.cli.failures import FAILED, INTERRUPTED

GRACE_SECONDS = 1.8
"""From the first signal to the end of the process, whatever the handlers do."""


class Interrupts:
    """While it is entered, signals call `on_first` in the event loop, once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_first: Callable[[], None],
        on_last: Callable[[], None],
    ) -> None:
        """`on_last` is called in another thread, right before the process is ended by force."""
        self._loop = loop
        self._on_first = on_first
        self._on_last = on_last
        self._earlier: dict[int, Any] = {}
        # Its `put` may interrupt itself, which is what a signal handler needs.
        self._signals: SimpleQueue[int] = SimpleQueue()
        self.exit_code: int | None = None
        """What to exit with because of a signal; None while there was none."""

    def __enter__(self) -> Interrupts:
        threading.Thread(target=self._insist, name="dovetail-interrupts", daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._earlier[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.exit_code is not None:
            return  # still ending: the thread and the handlers stay until the process is gone
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code is None:
            self.exit_code = INTERRUPTED if number == signal.SIGINT else FAILED
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_first)
        self._signals.put(number)

    def _insist(self) -> None:
        self._signals.get()
        with suppress(Empty):
            self._signals.get(timeout=GRACE_SECONDS)
        self._on_last()
        os._exit(self.exit_code or FAILED)
