"""Whether a run that is triggered now would be accepted: found out at most once a second.

However many ask, the stores are asked by one of them; all others get the same verdict. What it
must not know: HTTP, or which stores there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dovetail.core.errors import StoreError

log = logging.getLogger("dovetail.api")

READY_SECONDS = 3.0
"""Whoever asks has given up by then."""
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
            task.exception()  # told to whoever waits

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
