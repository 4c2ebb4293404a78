"""What a service does for ever, whatever is away meanwhile.

What it must not know: what any duty is.

One run that cannot be dealt with stops nobody else.

What is done for many at once fails for all of them if one makes no sense: its record was damaged,
or a message tells what no store can keep. So the others are found and done, and that one is left
to whoever asked. What it must not know: what is done, or with what.

Work that goes on beside what its owner does, and not without him.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from dovetail.core.errors import BrokenRun, NotFound, StoreError

PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
log = logging.getLogger("dovetail.wiring.distributed")


async def run_every(seconds: float, duty: Callable[[], Awaitable[None]]) -> None:
    """Jittered, so that many of them do not come at the same moment."""
    while True:
        await asyncio.sleep(seconds * random.uniform(0.8, 1.2))  # noqa: S311
        await duty()


async def supervise(
    name: str,
    work: Callable[[], Awaitable[None]],
    on_failure: Callable[[], None] = lambda: None,
) -> None:
    """Begun again whenever a store was away, or lost a run that somebody was at.

    Anything else that it raises is a bug, and ends the service.
    """
    pause = PAUSE_SECONDS
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except* (StoreError, NotFound) as errors:
            log.warning("%s: %s; trying again", name, _cause(errors))
            on_failure()
        pause = PAUSE_SECONDS if time.monotonic() - began > LONGEST_PAUSE_SECONDS else 2 * pause
        await asyncio.sleep(min(pause, LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1))  # noqa: S311


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


T = TypeVar("T")
R = TypeVar("R")


async def bisect_failures(
    work: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
    items: Sequence[T],
    blame: Callable[[T, Exception], Awaitable[Sequence[R]]],
) -> Sequence[R]:
    """What `work` answers for these, and `blame` for those with which it fails.

    It is done again with halves of them, so it must be harmless to do it twice. That a store or
    the machine cannot go on is nobody's fault: it is raised.
    """
    try:
        return await work(items)
    except BrokenRun as error:
        problem: Exception = error
    except (StoreError, NotFound, OSError, MemoryError):
        raise
    except Exception as error:
        problem = error
    if not items:
        raise problem
    if len(items) == 1:
        return await blame(items[0], problem)
    half = len(items) // 2
    first = await bisect_failures(work, items[:half], blame)
    return [*first, *await bisect_failures(work, items[half:], blame)]


def describe_error(problem: Exception) -> str:
    """For a log: some say nothing but what they are."""
    return f"{type(problem).__name__}: {problem}"


class BackgroundTask:
    """One piece of it; use `async with`."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> BackgroundTask:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.create_task(work)

    async def done(self) -> None:
        """Returns when it is, and raises what it raised."""
        if self._work is not None:
            await self._work
            self._work = None
