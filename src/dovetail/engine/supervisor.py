"""Background work of a service: restarted after an outage, repeated at intervals, and bisected, so
that one damaged run or message does not stop the others of its batch.
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
    """Repeat a duty at this interval, jittered, so that processes do not act at the same moment."""
    while True:
        await asyncio.sleep(seconds * random.uniform(0.8, 1.2))  # noqa: S311
        await duty()


async def supervise(
    name: str,
    work: Callable[[], Awaitable[None]],
    on_failure: Callable[[], None] = lambda: None,
) -> None:
    """Run `work`, and restart it after a store was away or lost a run in use.

    Any other exception is a bug, and ends the service.
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
    """The results of `work` for these items, and of `blame` for each item that makes it fail.

    `work` is repeated with halves of the items, so it must be safe to repeat. A store or a machine
    that fails is no item's fault: that is raised.
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
    """For a log: the type, because some messages are empty."""
    return f"{type(problem).__name__}: {problem}"


class BackgroundTask:
    """One task beside its owner, cancelled with it; use `async with`."""

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
        """Wait for the task, and raise what it raised."""
        if self._work is not None:
            await self._work
            self._work = None
