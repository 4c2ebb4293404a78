"""What every endpoint works with: the engine's commands, who runs nodes, and the end of it all.

What it must not know: HTTP, or which store and transport are behind the commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dovetail.api.budget import Budget
from dovetail.api.line import FairLine, TooLong
from dovetail.api.readiness import Readiness
from dovetail.config import Settings, env_name
from dovetail.core.errors import DovetailError
from dovetail.core.words import counted
from dovetail.engine.commands import Commands

T = TypeVar("T")

MOST_MADE_AT_ONCE = 16
"""Runs that are triggered together share a commit and are answered together. More of them would
share more, but whoever only reads waits until all are answered."""


LINE_SECONDS = 10.0
"""So long a body waits to be read; a client would rather hear when to come back."""


class Overloaded(DovetailError):
    """More waits to be done than anybody should add to."""

    type = "overloaded"
    retry_after = 5.0


def _line_too_long() -> Overloaded:
    return Overloaded(
        f"this body waited for {LINE_SECONDS:g} s behind other large ones of the same caller; "
        "send fewer at once"
    )


class Fleet(Protocol):
    """Whoever runs nodes: this process, or workers on many machines."""

    async def workers(self) -> list[dict[str, Any]]:
        """In the fields of `GET /workers`, the dead ones that are still remembered included."""
        ...

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Messages that were refused as malformed or poison."""
        ...

    async def backlog(self) -> int:
        """How many nodes wait for a worker, as of a moment ago."""
        ...

    async def check(self) -> None:
        """Raises `StoreError`, soon, if what work travels by is away."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    commands: Commands
    fleet: Fleet
    settings: Settings
    hosts: Sequence[str] = ()
    """Names and addresses it is reached by, beside loopback and those of the settings."""
    metrics: Callable[[], Awaitable[tuple[bytes, str]]] | None = None
    """The text of `/metrics` and its content type."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is asked to stop: whoever waits or streams comes to an end."""

    answers: Budget = field(default_factory=Budget)
    """Memory for answers that are sent in parts."""
    making: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_MADE_AT_ONCE))
    """Held while a run is made."""
    readiness: Readiness = field(default_factory=Readiness)
    _aside: FairLine = field(default_factory=lambda: FairLine(LINE_SECONDS))
    _between: FairLine = field(default_factory=lambda: FairLine(LINE_SECONDS))

    async def aside(self, work: Callable[[], T], caller: str, *, goes_on: bool = False) -> T:
        """What would keep everybody else waiting, in a thread; one such thing at a time.

        Two would not be done sooner, and the loop that serves everybody gets its turn between
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

        A hundred of them in one turn would keep everybody else waiting as long as a large one.
        """
        try:
            async with self._between.turn(caller, goes_on=goes_on):
                done = work()
                await asyncio.sleep(0)  # everybody else's turn before the next in line
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
        """The outcome; None if the time is over or the server is about to stop.

        The work is then cancelled.
        """
        doing = asyncio.ensure_future(work)
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            await asyncio.wait(
                {doing, closing}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            return doing.result() if doing.done() else None
        finally:
            doing.cancel()
            closing.cancel()
            await asyncio.gather(doing, closing, return_exceptions=True)
