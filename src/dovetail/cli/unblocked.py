"""stdout and stderr of a service, which works on while nothing reads them.

A pipe whose reader is gone refuses what is written, and one that is not read blocks once it is
full. In a service both would stop every run. Here a write never waits: what a pipe does not take
at once is held for a thread, and lost beyond a bound.
"""

from __future__ import annotations

import io
import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from dovetail.core.text import counted

MAX_HELD_BYTES = 1 << 20
"""For a reader that is slow. Of one that does not read, this is all that waits."""
LAST_SECONDS = 0.5
"""At the end of a service, for what is held."""
PAUSE_SECONDS = 0.01
log = logging.getLogger("dovetail.process")


class UnblockedFile(io.RawIOBase):
    """A file descriptor whose writes never wait and never fail."""

    def __init__(self, number: int) -> None:
        self._number = number
        is_plain = stat.S_ISREG(os.fstat(number).st_mode)
        # A pipe that is ready has room for so many bytes: the write does not wait.
        self._most = MAX_HELD_BYTES if is_plain else select.PIPE_BUF
        self.forget()

    def forget(self) -> None:
        """In a child process: its parent writes what is held, and has the thread."""
        self._ready = select.poll()
        self._ready.register(self._number, select.POLLOUT)
        self._lock = threading.RLock()  # a signal may log while this thread is inside
        self._held = bytearray()
        self._is_writing = False
        self._lost = 0

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        content = bytes(data)
        with self._lock:
            rest = content if self._is_writing else self.write_ready(content)
            if rest:
                self._hold(rest)
        return len(content)

    def write_ready(self, content: bytes) -> bytes:
        """Write as much as there is room for; returns the rest."""
        try:
            while content and self._ready.poll(0):
                content = content[os.write(self._number, content[: self._most]) :]
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone, or a disk is full: this is lost
            return b""
        return content

    def _hold(self, content: bytes) -> None:
        if len(self._held) + len(content) > MAX_HELD_BYTES:
            self._lost += content.count(b"\n")
            return
        self._held += content
        if not self._is_writing:
            self._is_writing = True
            threading.Thread(target=self._write_held, name="dovetail-output", daemon=True).start()

    def _write_held(self) -> None:
        """In the thread, the only one that writes meanwhile."""
        while self._held:
            self._ready.poll()
            part = bytes(self._held[: self._most])
            rest = self.write_ready(part)
            with self._lock:
                del self._held[: len(part) - len(rest)]
                if not self._held:
                    self._is_writing = False
                    break
            if rest:
                time.sleep(PAUSE_SECONDS)
        if lost := self._lost:
            self._lost = 0
            stream = "stdout" if self._number == 1 else "stderr"
            log.warning("%s of %s are lost: it was not read", counted(lost, "line"), stream)

    def wait(self, seconds: float) -> None:
        """Returns when nothing is held, or so much later."""
        until = time.monotonic() + seconds
        while self._is_writing and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)


@contextmanager
def unblocked(*names: str) -> Iterator[None]:
    """Around a service: these streams never wait, `stdout` and `stderr` without a name."""
    replaced: dict[str, tuple[TextIO, TextIO, UnblockedFile]] = {}
    for name in names or ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        with suppress(OSError, ValueError):  # a stream of a test has no descriptor
            stream.flush()
            file = UnblockedFile(stream.fileno())
            os.register_at_fork(after_in_child=file.forget)
            direct = getattr(stream, "write_through", False)
            buffer: Any = file if direct else io.BufferedWriter(file)
            text: TextIO = io.TextIOWrapper(
                buffer,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=getattr(stream, "line_buffering", False),
                write_through=direct,
            )
            replaced[name] = stream, text, file
            setattr(sys, name, text)
    try:
        yield
    finally:
        for name, (stream, text, file) in replaced.items():
            text.flush()
            file.wait(LAST_SECONDS)
            if getattr(sys, name) is text:
                setattr(sys, name, stream)


def write_last_words(words: str) -> None:
    """Write to stderr right before a process ends by force, if that does not wait."""
    with suppress(OSError):
        UnblockedFile(2).write_ready(words.encode())
