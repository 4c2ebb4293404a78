"""Memory for large answers: so much for all of them, in pieces for which each waits its turn.

A small answer takes none of it, so it never waits. What it must not know: what is sent, or how.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
                self.taken -= size  # it came, and nobody is there to use it
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
