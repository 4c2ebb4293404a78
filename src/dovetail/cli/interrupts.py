"""Ctrl-C and SIGTERM while a command works: the first asks, the second and the clock insist.

The asking is the event loop's part. The insisting is a thread's, because a handler may block
the loop, cling to its task or sit in a thread for an hour, and the prompt must be back in two
seconds all the same. Who is terminated may first finish what runs: there the clock is slower.
What it must not know: what a run is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any

from dovetail.cli.failures import FAILED, INTERRUPTED

GRACE_SECONDS = 1.8
"""From Ctrl-C to the end of the process, whatever the handlers do."""


class Ask(Enum):
    """How a command that works may be asked to stop; the value is the code to exit with."""

    CANCEL = INTERRUPTED
    NOBODY_READS = FAILED
    """The same, from whoever read the output and is gone."""
    HAND_BACK = 0

    @property
    def cancels(self) -> bool:
        return self is not Ask.HAND_BACK


_ASKED_BY = {signal.SIGINT: Ask.CANCEL, signal.SIGTERM: Ask.HAND_BACK}


class Interrupts:
    """While it is entered, the first signal calls `on_first` in the event loop, once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_first: Callable[[Ask], None],
        on_last: Callable[[Ask], None],
        drain_seconds: float,
    ) -> None:
        """`on_last` is called in another thread, right before the process is ended by force."""
        self._loop = loop
        self._on_first = on_first
        self._on_last = on_last
        self._patience = {
            Ask.CANCEL: GRACE_SECONDS,
            # Twice: the engine gives handlers that outlive the drain a grace of its own.
            Ask.HAND_BACK: drain_seconds + 2 * GRACE_SECONDS,
        }
        self._earlier: dict[signal.Signals, Any] = {}
        # Its `put` may interrupt itself, which is what a signal handler needs.
        self._signals: SimpleQueue[Ask] = SimpleQueue()
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
