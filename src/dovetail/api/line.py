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
    async def turn(self, caller: str, *, goes_on: bool = False) -> AsyncIterator[None]:
        """Nothing else of this line is done meanwhile. Raises `TooLong`.

        `goes_on`: with something begun, which comes before what this caller has not begun.
        """
        if self._busy:
            await self._wait(caller, goes_on)
        self._busy, self._last = True, caller
        try:
            yield
        finally:
            self._busy = False
            self._call_next()

    async def _wait(self, caller: str, goes_on: bool) -> None:
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pieces = self._waiting.setdefault(caller, deque())
        if goes_on:
            pieces.appendleft(called)
        else:
            pieces.append(called)
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


class Gate:
    """Lets a few begin in each turn of the event loop, in turn by caller.

    A thousand requests that arrive together would otherwise all begin in the same turn of the
    loop, and everybody else would wait until the last of them has begun. If nobody waits, passing
    costs next to nothing.
    """

    def __init__(self, each_turn: int = 2) -> None:
        self._each_turn = each_turn
        self._left = each_turn
        self._opening = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def pass_through(self, caller: str) -> None:
        if not self._left:
            passes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(caller, deque()).append(passes)
            await passes  # who is cancelled meanwhile is passed over
            return
        self._left -= 1
        self._open_soon()

    def _open_soon(self) -> None:
        if not self._opening:
            self._opening = True
            asyncio.get_running_loop().call_soon(self._open)

    def _open(self) -> None:
        self._opening = False
        self._left = self._each_turn
        while self._left and self._waiting:
            caller = next(iter(self._waiting))
            waiting = self._waiting.pop(caller)
            passes = waiting.popleft()
            if waiting:
                self._waiting[caller] = waiting
            if not passes.done():
                passes.set_result(None)
                self._left -= 1
        if self._left < self._each_turn:
            self._open_soon()
