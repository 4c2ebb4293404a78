"""Where a command works that a signal may stop: one event loop, two kinds of end.

Every command that drives runs or follows them performs here, so that Ctrl-C, SIGTERM, a reader
that goes away and a store that fails mean the same to all of them. What it must not know: what
is performed.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from dovetail.cli import streams
from dovetail.cli.failures import say_if_possible, tell
from dovetail.cli.interrupts import Ask, Interrupts
from dovetail.cli.process import Process
from dovetail.core.errors import DovetailError, InvalidDefinition

# What a file on a disk may refuse; anything else is no matter of who reads.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Stopping:
    """Whether this command was asked to stop, and how; the first to ask decides."""

    def __init__(self) -> None:
        self.asked: Ask | None = None
        self._event = asyncio.Event()

    def ask(self, what: Ask) -> None:
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
            streams.nobody_reads()
            self.ask(Ask.NOBODY_READS)
            if error.errno in _FULL:
                say_if_possible(f"stdout cannot be written: {error.strerror}")


def perform(
    work: Callable[[Stopping], Coroutine[Any, Any, int]],
    give_up: Callable[[Ask], None],
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
            code = tell(error)
        return process.leave(code)
