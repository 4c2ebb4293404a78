"""One connection to Redis that many share: what is asked in one turn of the loop travels together.

redis-py's asynchronous client spends most of a small command on itself; here a command is packed,
appended to what goes out next, and answered in order. A connection that breaks is opened again
and what was not answered is asked again: every command that goes through here may be executed
twice without harm. What it must not know: what any command means.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.connection import parse_url

from dovetail.core.errors import StoreError

Argument = str | bytes | int | float
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 1.0
PATIENCE_SECONDS = 30.0
"""So long a command waits for Redis to come back."""
READ_ONLY = ("READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN")
"""Answers of a server that will do later: one that starts, or is about to be replaced."""


def _packed(command: tuple[Argument, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


class RedisError(StoreError):
    """Redis refused a command."""


class _Asked:
    """A command on its way, and who waits for its answer."""

    __slots__ = ("answer", "packed")

    def __init__(self, packed: bytes, answer: asyncio.Future[Any]) -> None:
        self.packed = packed
        self.answer = answer


class _Wire(asyncio.Protocol):
    """The bytes of one connection."""

    def __init__(self, on_lost: Callable[[_Wire], None]) -> None:
        self._reader = hiredis.Reader()
        self._on_lost = on_lost
        self.asked: deque[_Asked] = deque()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while True:
            try:
                reply = self._reader.gets()
            except hiredis.ProtocolError:
                if self.transport is not None:
                    self.transport.abort()
                return
            if reply is False:
                return
            answer = self.asked.popleft().answer
            if not answer.done():
                answer.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(self)


class Pipe:
    """Use `async with`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._wire: _Wire | None = None
        self._opening: asyncio.Task[None] | None = None
        self._waiting: deque[_Asked] = deque()
        self._flushing = False
        self._closed = False
        self._scripts: dict[str, str] = {}
        self.roundtrips = 0
        """Writes to the socket, for tests that count them."""
        self.commands = 0

    async def __aenter__(self) -> Pipe:
        self._loop = asyncio.get_running_loop()
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        wire, self._wire = self._wire, None
        if wire is not None and wire.transport is not None:
            wire.transport.close()
            self._fail([*wire.asked, *self._waiting], RedisError("the connection was closed"))

    # ── asking ───────────────────────────────────────────────────────────────────────────

    async def call(self, *command: Argument, patience: float = PATIENCE_SECONDS) -> Any:
        """The answer to one command; it may be executed twice if the connection breaks."""
        deadline = self._loop.time() + patience
        pause = RETRY_SECONDS
        while True:
            reply = await self.ask(*command)
            if not isinstance(reply, hiredis.ReplyError):
                return reply
            text = str(reply)
            if not text.startswith(READ_ONLY) or self._loop.time() > deadline:
                raise RedisError(f"{command[0]!s}: {text}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY_SECONDS)

    def ask(self, *command: Argument) -> asyncio.Future[Any]:
        """The same without judging the answer: an error is one, too."""
        if self._closed:
            raise RedisError("the connection was closed")
        asked = _Asked(_packed(command), self._loop.create_future())
        self.commands += 1
        self._waiting.append(asked)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return asked.answer

    async def script(self, source: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script, by its digest if Redis knows it."""
        digest = self._scripts.get(source)
        if digest is None:
            digest = (await self.call("SCRIPT", "LOAD", source)).decode()
            self._scripts[source] = digest
        while True:
            reply = await self.ask("EVALSHA", digest, len(keys), *keys, *args)
            if not isinstance(reply, hiredis.ReplyError):
                return reply
            text = str(reply)
            if text.startswith("NOSCRIPT"):  # Redis was restarted
                await self.call("SCRIPT", "LOAD", source)
            elif text.startswith(READ_ONLY):
                await asyncio.sleep(RETRY_SECONDS)
            else:
                raise RedisError(f"script: {text}")

    def _flush(self) -> None:
        self._flushing = False
        wire = self._wire
        if wire is None or wire.transport is None or not self._waiting:
            return  # once it is open again
        self.roundtrips += 1
        wire.transport.write(b"".join(asked.packed for asked in self._waiting))
        wire.asked.extend(self._waiting)
        self._waiting.clear()

    # ── the connection ───────────────────────────────────────────────────────────────────

    async def _open(self) -> None:
        where: dict[str, Any] = parse_url(self._url)  # type: ignore[no-untyped-call]
        make = lambda: _Wire(self._lost)  # noqa: E731
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if "path" in where:
                    opening: Any = self._loop.create_unix_connection(make, where["path"])
                else:
                    opening = self._loop.create_connection(
                        make,
                        where.get("host", "localhost"),
                        where.get("port", 6379),
                        ssl=self._url.startswith("rediss://") or None,
                    )
                _, wire = await opening
                await self._greet(wire, where)
        except (OSError, TimeoutError) as error:
            raise RedisError(f"Redis cannot be reached: {error or 'no answer in time'}") from None
        self._wire = wire
        if self._waiting and not self._flushing:
            self._flush()

    async def _greet(self, wire: _Wire, where: Any) -> None:
        greetings: list[tuple[Argument, ...]] = []
        if where.get("password"):
            name = [where["username"]] if where.get("username") else []
            greetings.append(("AUTH", *name, where["password"]))
        if where.get("db"):
            greetings.append(("SELECT", where["db"]))
        for greeting in greetings:
            asked = _Asked(_packed(greeting), self._loop.create_future())
            wire.asked.append(asked)
            if wire.transport is not None:
                wire.transport.write(asked.packed)
            reply = await asked.answer
            if isinstance(reply, hiredis.ReplyError):
                raise RedisError(f"Redis refused {greeting[0]!s}: {reply}")

    def _lost(self, wire: _Wire) -> None:
        """Open it again, and ask again what was not answered."""
        if self._closed or wire is not self._wire:
            self._fail(wire.asked, RedisError("the connection to Redis broke"))
            return
        self._wire = None
        self._waiting.extendleft(reversed(wire.asked))
        self._opening = self._loop.create_task(self._reopen())

    async def _reopen(self) -> None:
        pause = RETRY_SECONDS
        give_up = self._loop.time() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(RedisError):
                await self._open()
                return
            if self._loop.time() > give_up:
                self._fail(self._waiting, RedisError("Redis did not come back"))
                self._waiting.clear()
                give_up = self._loop.time() + PATIENCE_SECONDS
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY_SECONDS)

    @staticmethod
    def _fail(asked: Any, error: Exception) -> None:
        for one in asked:
            if not one.answer.done():
                one.answer.set_exception(error)
