"""Notices, from a thread, handlers that keep an event loop beyond their timeout.

A blocked loop cannot run its own timers. One thread serves all workers of a process. It sleeps
while none of them has work.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

LOOK_SECONDS = 0.1
LINGER_SECONDS = 5.0
"""So long the thread waits for another worker: engines may be opened one after the other."""

_PACKAGE = str(Path(__file__).parents[1])
_FOREIGN = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
log = logging.getLogger("dovetail.worker")


class Watched(Protocol):
    """A worker; its methods are called from the watchdog's thread."""

    @property
    def is_busy(self) -> bool: ...

    def unwatched(self) -> None:
        """It has no work: it has to ask to be watched again when it has."""
        ...

    def look(self, now: float) -> None:
        """Warn of a handler that blocks the loop."""
        ...


class Watchdog:
    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[int, Watched] = {}
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, worker: Watched) -> None:
        """Look at this worker from now on, until it has no work."""
        with self._lock:
            self._workers[id(worker)] = worker
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._main, name="dovetail-watchdog", daemon=True
                )
                self._thread.start()

    def forget(self, worker: Watched) -> None:
        with self._lock:
            self._workers.pop(id(worker), None)

    def _main(self) -> None:
        while self._waited():
            time.sleep(LOOK_SECONDS)
            for key, worker in list(self._workers.items()):
                if not worker.is_busy:
                    self._leave(key, worker)
                    continue
                try:
                    worker.look(time.monotonic())
                except Exception:  # it reads what the loop changes meanwhile
                    log.debug("the watchdog could not look at a worker", exc_info=True)

    def _waited(self) -> bool:
        """Wait for a worker with work; False if none comes and the thread ends."""
        with self._lock:
            self._wanted.clear()
            if self._workers:
                return True
        self._wanted.wait(LINGER_SECONDS)
        with self._lock:
            if not self._workers:
                self._thread = None
            return bool(self._workers)

    def _leave(self, key: int, worker: Watched) -> None:
        with self._lock:
            self._workers.pop(key, None)
        worker.unwatched()
        if worker.is_busy:  # since just now, when it was watched still
            self.watch(worker)


WATCHDOG = Watchdog()
os.register_at_fork(after_in_child=WATCHDOG._reset)  # a thread does not survive a fork


def place_of_thread(ident: int) -> str | None:
    """`shop.py:31 in fetch`: the innermost line of the user's own code that a thread is at."""
    frame = sys._current_frames().get(ident)
    return None if frame is None else place_of(frame)


def place_of(frame: FrameType) -> str:
    own = at = frame
    while not _is_own(own):
        if own.f_back is None:
            own = at
            break
        own = own.f_back
    path = Path(own.f_code.co_filename)
    with suppress(ValueError, OSError):  # in another directory, or this one is gone
        path = path.relative_to(Path.cwd())
    return f"{path}:{own.f_lineno} in {own.f_code.co_name}"


def _is_own(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(("<", _PACKAGE, *_FOREIGN))
