"""What a service does for ever, whatever is away meanwhile.

What it must not know: what any duty is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from dovetail.core.errors import NotFound, StoreError

PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
log = logging.getLogger("dovetail.distributed")


async def every(seconds: float, duty: Callable[[], Awaitable[None]]) -> None:
    """Jittered, so that many of them do not come at the same moment."""
    while True:
        await asyncio.sleep(seconds * random.uniform(0.8, 1.2))  # noqa: S311
        await duty()


async def kept_up(
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
        except* (StoreError, NotFound) as told:
            log.warning("%s: %s; trying again", name, _cause(told))
            on_failure()
        pause = PAUSE_SECONDS if time.monotonic() - began > LONGEST_PAUSE_SECONDS else 2 * pause
        await asyncio.sleep(min(pause, LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1))  # noqa: S311


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
