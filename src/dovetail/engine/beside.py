"""Work that goes on beside what its owner does, and not without him."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Beside:
    """One piece of it; use `async with`."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Beside:
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
