"""A connection to Redis without an event loop: each call blocks until its reply.

A pool process runs one task at a time, and an event loop would cost it more than Redis does. Code
that is written for `PipelinedRedis` and sends one thing after the other works here unchanged: it
never really waits, so `done` returns its result at once.

Commands of `send_nowait` do not block: their replies are read with the next ones, which saves a
roundtrip. They are kept until they are answered, so only the end of the process can lose them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import hiredis

from dovetail.redis_client.pipelined import (
    CLOSED_AT_ONCE,
    CONNECT_SECONDS,
    LONGEST_RETRY_SECONDS,
    PATIENCE_SECONDS,
    RETRY_SECONDS,
    ROLE,
    Command,
    PipelinedRedis,
    RedisError,
    RedisUnreachable,
    _packed,
    find_primary,
    is_primary,
    trust_error,
    why_unreachable,
)
from dovetail.redis_client.url import Address, WrongUrl

T = TypeVar("T")
READ_BYTES = 65536


def done(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as returned:
        outcome: T = returned.value
        return outcome
    work.close()
    raise RuntimeError("this coroutine waits, and there is no event loop to wake it")


class SyncRedis(PipelinedRedis):
    """Opened at first use. For one process, and one thread except for `flush_acks`."""

    def __init__(self, url: str, *, patience: float = PATIENCE_SECONDS) -> None:
        super().__init__(url, patience=patience)
        self._loop = asyncio.new_event_loop()  # never run: futures need one
        self._socket: socket.socket | None = None
        self._reader = hiredis.Reader()
        self._enqueued: list[bytes] = []
        """Commands that travel with the next ones; their replies are ignored."""
        self._unacknowledged: list[tuple[bytes, bool]] = []
        """Commands without a reply, each with whether it is sent again if Redis refuses it."""
        self._sent_count = 0
        """How many of the unacknowledged commands were sent over this connection."""
        self._lock = threading.Lock()
        self._used_at = 0.0

    def send(
        self, commands: Sequence[Command], *, delay: float = 0.0, last: bool = False
    ) -> asyncio.Future[list[Any]]:
        """The replies are there when this returns. Raises `RedisUnreachable` if Redis stays
        away."""
        if self._keys is not None:
            commands = self._keys.add_to_all(commands)
        with self._lock:
            ahead = len(self._enqueued)
            packed = b"".join([*self._enqueued, *map(_packed, commands)])
            replies = self._send(packed, ahead + len(commands))
            self._enqueued.clear()
            self.roundtrips += 1
            self.commands += ahead + len(commands)
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        answer.set_result(replies[ahead:])
        return answer

    def enqueue(
        self,
        commands: Sequence[Command],
        *,
        last: bool = False,
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        if self._keys is not None:
            commands = self._keys.add_to_all(commands)
        self._enqueued += map(_packed, commands)

    def send_nowait(self, commands: Sequence[Command], *, until_accepted: bool = True) -> None:
        """Have each executed at least once: sent now, and again until Redis replies. A command that
        Redis refuses is sent again, too, unless `until_accepted` is False."""
        if self._keys is not None:
            commands = self._keys.add_to_all(commands)
        with self._lock:
            packed = [*map(_packed, commands)]
            self._unacknowledged += [(command, until_accepted) for command in packed]
            self.commands += len(packed)
            if self._socket is not None and self._sent_count == len(self._unacknowledged) - len(
                packed
            ):
                try:
                    self._socket.sendall(b"".join(packed))
                    self._sent_count += len(packed)
                except OSError:
                    self._break()

    def flush_acks(self) -> None:
        """Returns when `send_nowait`'s commands are executed. From any thread. Raises `RedisError`
        if not."""
        with self._lock:
            if self._unacknowledged:
                self._send(b"", 0)
            if self._unacknowledged:  # Redis is loading, or is a replica
                raise RedisError("Redis refused a command that was sent without waiting")

    def close(self) -> None:
        self._closed = True
        self._break()
        self._loop.close()

    def _send(self, packed: bytes, count: int) -> list[Any]:
        give_up = time.monotonic() + self._patience
        pause = RETRY_SECONDS
        while True:
            try:
                self._check_idle()
                if self._socket is None:
                    self._connect()
                lost = b"".join(one for one, _ in self._unacknowledged[self._sent_count :])
                self._sent_count = len(self._unacknowledged)
                replies = self._roundtrip(lost + packed, self._sent_count + count)
                self._used_at = time.monotonic()
                return self._acknowledge(replies)
            except (OSError, hiredis.ProtocolError) as error:
                if self._socket is not None:
                    self.breaks += 1
                self._break()
                if time.monotonic() + pause > give_up:
                    refused = isinstance(error, ssl.SSLError) and trust_error(error, self.where)
                    why = why_unreachable(error, tls=self.target.tls is not None)
                    raise (refused or RedisUnreachable(f"Redis cannot be reached: {why}")) from None
                time.sleep(pause)
                pause = min(pause * 2, LONGEST_RETRY_SECONDS)

    def _acknowledge(self, replies: list[Any]) -> list[Any]:
        """Commands that were refused are sent again with the next ones."""
        posted, self._sent_count = self._unacknowledged, 0
        self._unacknowledged = [
            (command, until_accepted)
            for (command, until_accepted), reply in zip(posted, replies, strict=False)
            if until_accepted and isinstance(reply, hiredis.ReplyError)
        ]
        return replies[len(posted) :]

    def _roundtrip(self, packed: bytes, count: int) -> list[Any]:
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

    async def _sleep(self, seconds: float) -> None:
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
            self._greet_blocking()
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
            self._leader = find_primary(target)
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

    def _greet_blocking(self) -> None:
        for greeting in self.target.greetings():
            (reply,) = self._roundtrip(_packed(greeting), 1)
            if isinstance(reply, hiredis.ReplyError):
                self._break()
                raise RedisError(f"Redis refused {greeting[0]!s}: {reply}")
        if self.target.service:
            (role,) = self._roundtrip(_packed(ROLE), 1)
            if not is_primary(role):
                raise ConnectionError(f"Redis at {self.where} does not lead yet, or no longer")
        elif self.target.tls is not None:
            self._roundtrip(_packed(("PING",)), 1)

    def _check_idle(self) -> None:
        """Check a connection that was idle for long: it may have broken silently."""
        every = self.target.health_seconds
        if every is None or self._socket is None or self._sent_count:
            return
        if time.monotonic() - self._used_at < every:
            return
        try:
            self._socket.settimeout(self.target.connect_seconds or CONNECT_SECONDS)
            self._roundtrip(_packed(("PING",)), 1)
            self._socket.settimeout(self._silence)
        except OSError:
            self._break()

    def _break(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
        self._sent_count = 0
