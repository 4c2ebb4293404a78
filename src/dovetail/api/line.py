"""A line of work that is done one piece at a time, in turn by caller.

Whoever brings a hundred pieces waits behind its own; another caller's piece is done after the one
under way. A piece that cannot be begun in time is refused. What it must not know: what the work
is, or who a caller is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TooLong(Exception):
    """The line was too long to wait for."""


class FairLine:
    def __init__(self, patience: float) -> None:
        """`patience`: so many seconds a piece may wait."""
        self._patience = patience
        self._busy = False
        self._last = ""
        # The first caller is the next; it goes to the end when its piece is done.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Nothing else of this line is done meanwhile. Raises `TooLong`."""
        if self._busy:
            await self._wait(caller)
        self._busy, self._last = True, caller
        try:
            yield
        finally:
            self._busy = False
            self._call_next()

    async def _wait(self, caller: str) -> None:
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(called)
        try:
            await asyncio.wait_for(asyncio.shield(called), self._patience)
        except BaseException as error:
            if called.done():  # and yet it was called: the turn is another's
                self._busy = False
                self._call_next()
            else:
                self._leave(caller, called)
            if isinstance(error, TimeoutError):
                raise TooLong from None
            raise

    def _leave(self, caller: str, called: asyncio.Future[None]) -> None:
        called.cancel()
        if pieces := self._waiting.get(caller):
            pieces.remove(called)
            if not pieces:
                del self._waiting[caller]

    def _call_next(self) -> None:
        if self._last in self._waiting:  # it has just had its turn: all others are before it
            self._waiting[self._last] = self._waiting.pop(self._last)
        if not self._waiting:
            return
        self._last = caller = next(iter(self._waiting))
        pieces = self._waiting[caller]
        called = pieces.popleft()
        if not pieces:
            del self._waiting[caller]
        self._busy = True  # from now on: nobody may come between
        called.set_result(None)
