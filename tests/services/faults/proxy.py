"""Between the services and Redis: answers are lost after their command was executed.

A lost answer is the hardest thing a store's client has to bear: whether the command was executed
cannot be known. Here it always was.
"""

from __future__ import annotations

import asyncio
import random
from typing import Self

HOST = "127.0.0.1"


class Proxy:
    """Use `async with`; many connections, each to the one Redis behind it."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self.behind = port
        self._chance = chance
        self.loses = 0.0
        """The share of answers that never arrive: the connection breaks instead."""
        self.lost = 0
        self.open: set[asyncio.Transport] = set()
        self.answering: set[_Answering] = set()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Asking(self), HOST, 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for transport in list(self.open):
            transport.abort()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def fall_silent(self) -> None:
        """From now on one of the connections, whichever, is open and answers nothing."""
        if self.answering:
            self._chance.choice(sorted(self.answering, key=id)).silent = True

    def arrives(self, answer: bytes) -> tuple[bytes, bool]:
        """How much of an answer arrives, and whether all is well after it."""
        if self._chance.random() >= self.loses:
            return answer, True
        self.lost += 1
        # Some of it may: an answer is lost as soon as its end is.
        return answer[: self._chance.randrange(len(answer))], False


class _End(asyncio.Protocol):
    """One end of a connection through the proxy; if it breaks, so does the other."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.proxy.open.add(transport)

    def connection_lost(self, error: Exception | None) -> None:
        assert self.transport is not None
        self.proxy.open.discard(self.transport)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()


class _Asking(_End):
    """To a service."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._early = b""
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        assert self.transport is not None
        loop = asyncio.get_running_loop()
        try:
            back, answering = await loop.create_connection(
                lambda: _Answering(self.proxy), HOST, self.proxy.behind
            )
        except OSError:  # Redis is down: so is the proxy before it
            self.transport.abort()
            return
        answering.other, self.other = self, answering
        back.write(self._early)
        if self.transport.is_closing():
            back.abort()

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early += data
        else:
            self.other.transport.write(data)


class _Answering(_End):
    """To Redis."""

    silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.proxy.answering.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.proxy.answering.discard(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self.silent:
            return
        assert self.other is not None
        assert self.other.transport is not None
        arriving, well = self.proxy.arrives(data)
        self.other.transport.write(arriving)
        if not well:
            self.other.transport.abort()
