"""The same connection to Redis for a thread that has nothing else to do: it waits for each answer.

All but those to what is posted: that is sent at once, and its answer is read with the next one. The
thread that posts it has the next thing to ask under way a roundtrip earlier, and what is posted is
kept until it is answered, so it is lost no sooner than with the process.

A process of a pool runs one thing at a time, and an event loop would cost it more than Redis does.
Whatever is written for a `Pipe` and asks one thing after the other works here as it is: nothing it
awaits ever waits, so `done` gives the outcome at once. What it must not know: what any command
means.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import hiredis

from dovetail.redis_client import sentinel
from dovetail.redis_client.pipelined import (
    CLOSED_AT_ONCE,
    CONNECT_SECONDS,
    LONGEST_RETRY_SECONDS,
    PATIENCE_SECONDS,
    RETRY_SECONDS,
    Command,
    PipelinedRedis,
    RedisError,
    RedisUnreachable,
    untrusted,
)
from dovetail.redis_client.url import Address, WrongUrl

T = TypeVar("T")
READ_BYTES = 65536


def done(work: Coroutine[Any, Any, T]) -> T:
    """The outcome of work that never waits."""
    try:
        work.send(None)
    except StopIteration as returned:
        outcome: T = returned.value
        return outcome
    work.close()
    raise RuntimeError("this work waits for something, and nobody here would wake it")


class SyncRedis(PipelinedRedis):
    """Opened when it is first used; of one process, and of one thread but for `confirm`."""

    def __init__(self, url: str, *, patience: float = PATIENCE_SECONDS) -> None:
        super().__init__(url, patience=patience)
        self._loop = asyncio.new_event_loop()  # never run: futures and times want to have one
        self._socket: socket.socket | None = None
        self._reader = hiredis.Reader()
        self._ahead: list[bytes] = []
        """Commands that travel with the next ones, and whose answers nobody looks at."""
        self._posted: list[bytes] = []
        self._under_way = 0
        """How many of those posted were sent over this very connection."""
        self._turn = threading.Lock()
        self._used_at = 0.0

    def ask(
        self, commands: Sequence[Command], *, patience: float = 0.0, behind: bool = False
    ) -> asyncio.Future[list[Any]]:
        """Answered when this returns. Raises `Unreachable` if Redis does not come back in time."""
        if self._keys is not None:
            commands = self._keys.all_of(commands)
        with self._turn:
            ahead = len(self._ahead)
            packed = b"".join([*self._ahead, *map(_packed, commands)])
            replies = self._asked(packed, ahead + len(commands))
            self._ahead.clear()
            self.roundtrips += 1
            self.commands += ahead + len(commands)
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        answer.set_result(replies[ahead:])
        return answer

    def soon(self, commands: Sequence[Command], *, behind: bool = False) -> None:
        if self._keys is not None:
            commands = self._keys.all_of(commands)
        self._ahead += map(_packed, commands)

    def post(self, commands: Sequence[Command]) -> None:
        """Have these done, each once or more often: sent now, and again until it is answered."""
        if self._keys is not None:
            commands = self._keys.all_of(commands)
        with self._turn:
            packed = [*map(_packed, commands)]
            self._posted += packed
            self.commands += len(packed)
            if self._socket is not None and self._under_way == len(self._posted) - len(packed):
                try:
                    self._socket.sendall(b"".join(packed))
                    self._under_way += len(packed)
                except OSError:
                    self._break()

    def confirm(self) -> None:
        """Returns if all that was posted is done; from any thread. Raises `RedisError` if not."""
        with self._turn:
            if self._posted:
                self._asked(b"", 0)
            if self._posted:  # it is there, but reads its files, or is not the one that writes
                raise RedisError("Redis has refused it")

    def close(self) -> None:
        self._closed = True
        self._break()
        self._loop.close()

    def _asked(self, packed: bytes, count: int) -> list[Any]:
        give_up = time.monotonic() + self._patience
        pause = RETRY_SECONDS
        while True:
            try:
                self._check_health_here()
                if self._socket is None:
                    self._connect()
                lost = b"".join(self._posted[self._under_way :])
                self._under_way = len(self._posted)
                replies = self._exchanged(lost + packed, self._under_way + count)
                self._used_at = time.monotonic()
                return self._without_posted(replies)
            except (OSError, hiredis.ProtocolError) as error:
                if self._socket is not None:
                    self.breaks += 1
                self._break()
                if time.monotonic() + pause > give_up:
                    refused = isinstance(error, ssl.SSLError) and untrusted(error, self.where)
                    raise (
                        refused or RedisUnreachable(f"Redis cannot be reached: {error}")
                    ) from None
                time.sleep(pause)
                pause = min(pause * 2, LONGEST_RETRY_SECONDS)

    def _without_posted(self, replies: list[Any]) -> list[Any]:
        """What was refused is sent again with whatever is next."""
        posted, self._under_way = self._posted, 0
        self._posted = [
            command
            for command, reply in zip(posted, replies, strict=False)
            if isinstance(reply, hiredis.ReplyError)
        ]
        return replies[len(posted) :]

    def _exchanged(self, packed: bytes, count: int) -> list[Any]:
        assert self._socket is not None  # noqa: S101
        self._socket.sendall(packed)
        replies: list[Any] = []
        while True:
            while len(replies) < count and (reply := self._reader.gets()) is not False:
                replies.append(reply)
            if len(replies) == count:
                return replies
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("the connection to Redis broke")
            self._reader.feed(data)

    async def _rest(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  (there is no loop to block)

    # ── the connection ───────────────────────────────────────────────────────────────────

    def _connect(self) -> None:
        try:
            made = self._opened()
        except WrongUrl as problem:
            raise RedisError(f"the Redis URL: {problem}") from None
        made.settimeout(self._silence)
        self._socket, self._reader = made, hiredis.Reader()
        self._used_at = time.monotonic()
        try:
            self._greet_here()
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            if self.target.tls is None or self.target.service:
                raise
            raise ConnectionError(CLOSED_AT_ONCE) from error

    def _opened(self) -> socket.socket:
        target = self.target
        patience = target.connect_seconds or CONNECT_SECONDS
        if target.path:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(patience)
            made.connect(target.path)
            return made
        if target.service:
            self._leader = sentinel.leader(target)
        address: Address = self._leader or target.addresses[0]
        made = socket.create_connection(address, patience)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if target.keepalive:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if target.tls is not None:
            try:
                made = target.tls.context().wrap_socket(made, server_hostname=address[0])
            except BaseException:
                made.close()
                raise
        return made

    def _greet_here(self) -> None:
        for greeting in self.target.greetings():
            (reply,) = self._exchanged(_packed(greeting), 1)
            if isinstance(reply, hiredis.ReplyError):
                self._break()
                raise RedisError(f"Redis refused {greeting[0]!s}: {reply}")
        if self.target.service:
            (role,) = self._exchanged(_packed(sentinel.ROLE), 1)
            if not sentinel.leads(role):
                raise ConnectionError(f"Redis at {self.where} does not lead yet, or no longer")
        elif self.target.tls is not None:
            self._exchanged(_packed(("PING",)), 1)

    def _check_health_here(self) -> None:
        """Of a connection that was idle for long: one that broke in silence is opened anew."""
        every = self.target.health_seconds
        if every is None or self._socket is None or self._under_way:
            return
        if time.monotonic() - self._used_at < every:
            return
        try:
            self._socket.settimeout(self.target.connect_seconds or CONNECT_SECONDS)
            self._exchanged(_packed(("PING",)), 1)
            self._socket.settimeout(self._silence)
        except OSError:
            self._break()

    def _break(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
        self._under_way = 0


def _packed(command: Command) -> bytes:
    if isinstance(command, bytes):
        return command
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed
