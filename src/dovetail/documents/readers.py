"""The processes that read what strangers made: started, asked, ended, and replaced.

A parser that crashes or does not return costs the document that it was given, and no other: it
runs `formats.py` in a process of its own, of which a few are kept. It must not know what is in
the answers.
"""

from __future__ import annotations

import atexit
import os
import queue
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import orjson

from dovetail import PermanentError
from dovetail.documents.formats import MAX_MEMORY

READERS = 2
LONGEST_READING = 60.0
LONGEST_START = 10.0
MOST_READINGS = 2
"""How many readers a document may cost."""
NEARLY_ALL = 0.7
"""Of the memory that a reader may have: one that has ended there had no more."""

# What a reader needs of the environment: no key and no password that a hostile file could look for.
_READERS_KNOW = frozenset(
    {
        *("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TESSDATA_PREFIX"),
        *("LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "HOME"),
    }
)
# A document that makes the reader do this would do it again; SIGKILL may have been anybody.
_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
}


class _Reader:
    """One process of `formats.py`."""

    def __init__(self) -> None:
        # By path, not by name: it needs nothing of the package. `-P` keeps the modules beside it
        # from taking the place of Python's own. A session of its own: Ctrl-C is for us alone.
        self.process = subprocess.Popen(  # noqa: S603  (our own file)
            [sys.executable, "-P", str(Path(__file__).with_name("formats.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name in _READERS_KNOW},
        )
        self.peak_bytes = 0
        """How much memory it had, once it has ended."""
        self._asked = cast("IO[bytes]", self.process.stdin)
        self._told = cast("IO[bytes]", self.process.stdout)

    def ask(self, kind: str, data: bytes, seconds: float) -> dict[str, Any] | None:
        """Its answer, or None if it was not done in time. Raises `EOFError` if it died."""
        try:
            self._asked.write(f"{kind} {len(data)}\n".encode())
            self._asked.write(data)
            self._asked.flush()
        except (BrokenPipeError, ValueError):
            raise EOFError from None
        until = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self._told, select.POLLIN)
        answer, length = bytearray(), -1
        while length < 0 or len(answer) < length:
            left = until - time.monotonic()
            if left <= 0 or not ready.poll(1000 * left):
                return None
            part = os.read(self._told.fileno(), 1 << 20)
            if not part:
                raise EOFError
            answer += part
            if length < 0 and b"\n" in answer:
                head, _, rest = answer.partition(b"\n")
                answer, length = rest, int(head)
        found: dict[str, Any] = orjson.loads(answer)
        return found

    def end(self) -> int:
        """End it and what it has started; its exit code."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self._asked, self._told):
            with suppress(OSError):
                pipe.close()
        if self.process.returncode is None:
            # Not by `wait`: that does not say how much memory it took.
            with suppress(ChildProcessError):
                _, status, used = os.wait4(self.process.pid, 0)
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return self.process.wait()


_readers: queue.LifoQueue[_Reader | None] = queue.LifoQueue()


def _start_anew() -> None:
    """Places for readers, none of them started; a forked process must not share its parent's."""
    global _readers
    _readers = queue.LifoQueue()
    for _ in range(READERS):
        _readers.put(None)


def start_readers() -> None:
    """Start those that are free and not started, and wait until they can read."""
    free = []
    with suppress(queue.Empty):
        while True:
            free.append(_readers.get_nowait())
    started = [reader or _Reader() for reader in free]  # all, before the first is waited for
    for reader in started:
        answer = None
        with suppress(EOFError):
            answer = reader.ask("html", b"<p>ready</p>", LONGEST_START)
        if answer is None:  # then let the first document find out why
            reader.end()
        _readers.put(reader if answer is not None else None)


def _end_readers() -> None:
    with suppress(queue.Empty):
        while True:
            reader = _readers.get_nowait()
            if reader is not None:
                reader.end()


_start_anew()
os.register_at_fork(after_in_child=_start_anew)
atexit.register(_end_readers)


def ask_reader(kind: str, data: bytes, path: Path) -> dict[str, Any]:
    """What `formats.py` makes of it. Raises `PermanentError` with the type that it says."""
    home = _readers
    reader = home.get()
    try:
        answer, reader = _answer(reader, kind, data, path)
    except BaseException:
        home.put(None)
        raise
    home.put(reader)
    if "error" not in answer:
        return answer
    if answer["error"] == "missing_package":
        raise PermanentError(
            f"the package '{answer['message']}' is not installed: "
            "pip install 'dovetail[documents]'",
            type="missing_package",
        )
    raise PermanentError(f"{path.name}: {answer['message']}", type=answer["error"])


def _answer(
    reader: _Reader | None, kind: str, data: bytes, path: Path
) -> tuple[dict[str, Any], _Reader]:
    """What a reader says, and who will read the next document.

    A reader that ends without a word may have been ended by anybody, so the document gets a
    second one; and no third: whoever runs the node again would spend the same time again.
    """
    if reader is not None and reader.process.poll() is not None:
        reader.end()  # it died while nobody asked, and this document has nothing to do with it
        reader = None
    ends: list[str] = []
    while True:
        reader = reader or _Reader()
        try:
            answer = reader.ask(kind, data, LONGEST_READING)
        except EOFError:
            ends.append(_told(reader.end(), reader.peak_bytes, kind, path))
            if len(ends) == MOST_READINGS:
                raise PermanentError(
                    f"{path.name}: {MOST_READINGS} processes that read it came to an end, "
                    f"{' and '.join(ends)}; it is not tried again. Where a reader gets the memory "
                    "that it needs, the document may be read",
                    type="reader_lost",
                ) from None
            reader = None
        except BaseException:
            reader.end()
            raise
        else:
            break
    if answer is None:
        reader.end()
        raise PermanentError(
            f"{path.name}: it could not be read within {LONGEST_READING:g} s", type="too_large"
        )
    return answer, reader


def _told(code: int, peak_bytes: int, kind: str, path: Path) -> str:
    """How a reader ended. Raises `PermanentError` if that is the document's doing for certain."""
    if peak_bytes > NEARLY_ALL * MAX_MEMORY:
        raise PermanentError(
            f"{path.name}: reading it takes more than the {MAX_MEMORY / 1e9:g} GB of memory that "
            "a reader may have",
            type="too_large",
        ) from None
    if -code in _CRASHES:
        raise PermanentError(
            f"{path.name}: whoever reads {kind} crashes on it ({signal.Signals(-code).name})",
            type="corrupt",
        ) from None
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
