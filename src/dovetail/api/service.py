"""What every endpoint works with: the engine, the workers, readiness, memory for large replies."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from dovetail.api.admission import FairLine, TooLong
from dovetail.config import Settings, env_name
from dovetail.core.errors import DovetailError, StoreError
from dovetail.core.text import counted
from dovetail.engine.api import ServedEngine
from dovetail.engine.queues import QueueInspector

log = logging.getLogger("dovetail.api")

READY_SECONDS = 3.0
"""A caller has given up by then."""
KNOWN_SECONDS = 1.0
"""So long a verdict holds."""


class Readiness:
    def __init__(self) -> None:
        self._verdict: StoreError | None = None
        self._known_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def __call__(self, probe: Callable[[], Awaitable[None]]) -> StoreError | None:
        """Why a run would be refused now; None if it would not."""
        now = asyncio.get_running_loop().time()
        if now - self._known_at > KNOWN_SECONDS:
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._ask(probe))
                self._asking.add_done_callback(self._asked)
            await asyncio.shield(self._asking)
        return self._verdict

    def doubt(self) -> None:
        """A request has failed for what the stores said: the verdict may be another by now."""
        self._known_at = float("-inf")

    async def _ask(self, probe: Callable[[], Awaitable[None]]) -> None:
        before, self._verdict = self._verdict, await self._found(probe)
        self._known_at = asyncio.get_running_loop().time()
        if str(before) != str(self._verdict):  # once for each: probes come for as long as it lasts
            if self._verdict is None:
                log.warning("ready again")
            else:
                log.error("not ready: %s", self._verdict)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # raised to the requests that wait

    @staticmethod
    async def _found(probe: Callable[[], Awaitable[None]]) -> StoreError | None:
        try:
            async with asyncio.timeout(READY_SECONDS):
                await probe()
        except StoreError as error:
            return error
        except TimeoutError:
            late = StoreError(f"no answer within {READY_SECONDS:g} s")
            late.reason = f"what runs are kept in does not answer within {READY_SECONDS:g} s"
            return late
        return None


ANSWER_BYTES = 64 << 20
"""Parts of large answers that are read and not sent yet, over all requests."""


class Budget:
    """First come, first served: a large piece is not overtaken by small ones for ever."""

    def __init__(self, most: int = ANSWER_BYTES) -> None:
        self.most = most
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taking(self, size: int) -> AsyncIterator[None]:
        """So many bytes are ours inside; one piece is never more than there is."""
        size = min(size, self.most)
        await self._take(size)
        try:
            yield
        finally:
            self.taken -= size
            self._serve()

    async def _take(self, size: int) -> None:
        if not self._waiting and self.taken + size <= self.most:
            self.taken += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.taken -= size  # it came too late for this request
            elif (size, turn) in self._waiting:
                self._waiting.remove((size, turn))
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting and self.taken + self._waiting[0][0] <= self.most:
            size, turn = self._waiting.popleft()
            if not turn.done():
                self.taken += size
                turn.set_result(None)


T = TypeVar("T")

MAX_CONCURRENT_TRIGGERS = 16
"""Runs that are triggered together share a commit and are answered together. More of them would
share more, but reads would wait until all are answered."""


MAX_QUEUE_SECONDS = 10.0
"""So long a body waits to be read; a client would rather hear when to come back."""


class Overloaded(DovetailError):
    """More work waits than a caller should add to."""

    type = "overloaded"
    retry_after = 5.0


def _line_too_long() -> Overloaded:
    return Overloaded(
        f"this body waited for {MAX_QUEUE_SECONDS:g} s behind other large ones of the same caller; "
        "send fewer at once"
    )


class Fleet(QueueInspector, Protocol):
    """The workers: this process, or workers on many machines."""

    async def backlog(self) -> int:
        """How many nodes wait for a worker, as of a moment ago."""
        ...

    async def check(self) -> None:
        """Raises `StoreError`, soon, if what work travels by is away."""
        ...


@dataclass(frozen=True, slots=True)
class ApiService:
    commands: ServedEngine
    fleet: Fleet
    settings: Settings
    hosts: Sequence[str] = ()
    """Names and addresses it is reached by, beside loopback and those of the settings."""
    metrics: Callable[[], Awaitable[tuple[bytes, str]]] | None = None
    """The text of `/metrics` and its content type."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Not ready any more: it serves what still comes until load balancers know."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is asked to stop: requests that wait or stream come to an end."""

    answers: Budget = field(default_factory=Budget)
    """Memory for answers that are sent in parts."""
    making: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_TRIGGERS)
    )
    """Held while a run is made."""
    readiness: Readiness = field(default_factory=Readiness)
    _aside: FairLine = field(default_factory=lambda: FairLine(MAX_QUEUE_SECONDS))
    _between: FairLine = field(default_factory=lambda: FairLine(MAX_QUEUE_SECONDS))

    async def aside(self, work: Callable[[], T], caller: str, *, goes_on: bool = False) -> T:
        """Work that would delay other requests, in a thread; one piece at a time.

        Two would not be done sooner, and the event loop gets its turn between
        any two threads. Callers take turns. Raises `Overloaded` if the line is too long. What goes
        on with a body that was read comes first, or all that are read would be in memory.
        """
        try:
            async with self._aside.turn(caller, goes_on=goes_on):
                return await asyncio.to_thread(work)
        except TooLong:
            raise _line_too_long() from None

    async def between(self, work: Callable[[], T], caller: str, *, goes_on: bool = False) -> T:
        """What takes milliseconds, right here; one such thing in each turn of the loop.

        A hundred of them in one turn would delay other requests as long as a large one.
        """
        try:
            async with self._between.turn(caller, goes_on=goes_on):
                done = work()
                await asyncio.sleep(0)  # other requests have their turn before the next in line
                return done
        except TooLong:
            raise _line_too_long() from None

    async def admit(self) -> None:
        """Raises `Overloaded` if no more runs should be made at the moment."""
        waiting, most = await self.fleet.backlog(), self.settings.max_backlog
        if waiting > most:
            raise Overloaded(
                f"{counted(waiting, 'node waits', 'nodes wait')} for a worker, and "
                f"{env_name('max_backlog')} is {most:,}; "
                "come back later, or start more workers"
            )

    async def unless_closing(self, work: Awaitable[T], seconds: float | None = None) -> T | None:
        """The outcome; None if the time is over or the server is about to stop."""
        return await unless(self.closing.wait(), work, seconds)


async def unless(
    end: Awaitable[object], work: Awaitable[T], seconds: float | None = None
) -> T | None:
    """The outcome of the work; None if `end` comes first, or the time is over.

    The work is then cancelled.
    """
    doing = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(end)
    try:
        await asyncio.wait({doing, ending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        doing.cancel()
        ending.cancel()
        await asyncio.gather(doing, ending, return_exceptions=True)
