"""One connection to Redis for a whole process: commands of the same moment travel together.

redis-py's asynchronous client spends most of a small command on itself. Here a command is packed,
added to the next write and answered in order. A connection that breaks is opened again, and
commands without a reply are sent again: every command sent through here may be executed twice
without harm.

The prefix of keys is added here, where commands leave. With a prefix, a command whose keys are not
known is refused: a key without the prefix may belong to another application. Scripts get all their
keys as KEYS.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from difflib import get_close_matches
from functools import cache, partial
from importlib import resources
from typing import Any

import hiredis

from dovetail.core.errors import BrokenRun, StoreError
from dovetail.redis_client import url as redis_url
from dovetail.redis_client.cluster import EXEC, MULTI, Cluster, slot_owners
from dovetail.redis_client.url import Address, RedisUrl, WrongUrl

AnyCommand = tuple[Any, ...] | bytes

# fmt: off
KEY_IS_FIRST = frozenset({
    "EXPIRE", "GET", "HDEL", "HEXISTS", "HGET", "HGETALL", "HINCRBY", "HKEYS", "HLEN", "HMGET",
    "HSET", "HSETNX", "HSTRLEN", "HVALS", "INCR", "LLEN", "LPUSH", "LRANGE", "LREM", "LTRIM",
    "PEXPIRE", "PTTL", "RPUSH", "SADD", "SCARD", "SET", "SMEMBERS", "SREM", "TTL", "TYPE",
    "XACK", "XADD", "XAUTOCLAIM", "XCLAIM", "XDEL", "XLEN", "XPENDING", "XRANGE", "XREVRANGE",
    "XTRIM", "ZADD", "ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYLEX",
    "ZRANGEBYSCORE", "ZRANK", "ZREM", "ZREMRANGEBYRANK", "ZREMRANGEBYSCORE", "ZREVRANGE",
    "ZREVRANGEBYLEX", "ZREVRANGEBYSCORE", "ZSCAN", "ZSCORE",
})
KEY_IS_SECOND = frozenset({"XGROUP", "XINFO"})
ALL_ARE_KEYS = frozenset({"DEL", "EXISTS", "UNLINK"})
WITHOUT_KEYS = frozenset({
    "ASKING", "BGREWRITEAOF", "CLIENT", "CLUSTER", "CONFIG", "ECHO", "INFO", "PING", "ROLE",
    "SCRIPT", "TIME", "WAIT",
})
# fmt: on


class UnknownKeyPositions(ValueError):
    """A command of which this table does not know the keys."""


class KeyPrefix:
    """Adds a prefix to the keys of commands, and removes it from keys in replies."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._tag = f"{{{prefix}wf:"

    def add_to_all(self, commands: Sequence[AnyCommand]) -> list[AnyCommand]:
        return [self.add(command) for command in commands]

    def add(self, command: AnyCommand) -> AnyCommand:
        if isinstance(command, bytes):
            return self._add_to_packed(command)
        name = command[0]
        if name in KEY_IS_FIRST:
            return (name, self.key(command[1]), *command[2:])
        if name in ("EVALSHA", "EVAL"):
            end = 3 + int(command[2])
            return (*command[:3], *map(self.key, command[3:end]), *command[end:])
        if name in ALL_ARE_KEYS:
            return (name, *map(self.key, command[1:]))
        if name in KEY_IS_SECOND:
            return (*command[:2], self.key(command[2]), *command[3:])
        if name in ("XREADGROUP", "XREAD"):
            first = command.index("STREAMS") + 1
            end = first + (len(command) - first) // 2
            return (*command[:first], *map(self.key, command[first:end]), *command[end:])
        if name == "SCAN":
            at = command.index("MATCH") + 1
            return (*command[:at], self.key(command[at]), *command[at + 1 :])
        if name in WITHOUT_KEYS:
            return command
        raise UnknownKeyPositions(
            f"the keys of {name} are not known: add it to the table in {__name__}"
        )

    def key(self, key: Any) -> Any:
        if isinstance(key, bytes):
            return self.prefix.encode() + key.replace(b"{wf:", self._tag.encode())
        # A hash tag that names another key must stay in the slot of that key, prefix included.
        return self.prefix + str(key).replace("{wf:", self._tag)

    def remove(self, key: bytes) -> str:
        return key.decode().removeprefix(self.prefix).replace(self._tag, "{wf:")

    def _add_to_packed(self, command: bytes) -> bytes:
        """The key of a packed command is its second word."""
        if command in (MULTI, EXEC):
            return command
        count, size, name, _, key, rest = command.split(b"\r\n", 5)
        if name.decode() not in KEY_IS_FIRST:
            raise UnknownKeyPositions(f"the keys of {name.decode()} are not known")
        key = self.key(key)
        return b"\r\n".join((count, size, name, b"$%d" % len(key), key, rest))


Argument = str | bytes | int | float
Command = tuple[Argument, ...] | bytes
"""A command as words, or packed as it is sent."""
CONNECT_SECONDS = 5.0
TLS_SHUTDOWN_SECONDS = 1.0
"""How long closing a TLS connection waits for the server."""
RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 1.0
ENQUEUE_SECONDS = 0.01
POLL_SECONDS = 0.1
SILENCE_SECONDS = 8.0
"""Without a byte from Redis for so long, while commands wait, the connection counts as lost. A
blocking command must block for less."""
PATIENCE_SECONDS = 30.0
"""How long a command waits for Redis to come back."""
MIN_TRANSACTION = 3
WARNING_SECONDS = 10.0
# fmt: off
TEMPORARY_ERRORS = (
    "READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "OOM", "MISCONF", "NOREPLICAS",
    "UNBLOCKED",
)
# fmt: on
"""Errors of a server that will accept the command later: it starts, is about to be replaced, or
takes no writes because its memory or its disk is full, or its replicas are away. A script gets such
an error at its first write or never, so nothing of it was done."""
REPLACED_ERRORS = ("READONLY", "UNBLOCKED")
"""Errors of a server that is no longer the primary."""

UNRELATED_ERRORS = (*TEMPORARY_ERRORS, "BUSY", "NOPERM")
"""Errors that say nothing about the command itself."""

log = logging.getLogger("dovetail.redis")


def _packed(command: Command) -> bytes:
    if isinstance(command, bytes):
        return command
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return packed


def _name(command: Command) -> str:
    if isinstance(command, bytes):
        return "a message"
    return "script" if command[0] == "EVALSHA" else str(command[0])


def _error_text(reply: Any) -> str:
    """The error itself: before Redis 7 a script's error is prefixed with its origin."""
    text = str(reply)
    return text.partition(": -")[2] if text.startswith("ERR Error running script") else text


def is_temporary(reply: Any) -> bool:
    """Redis will accept the command later."""
    return isinstance(reply, hiredis.ReplyError) and _error_text(reply).startswith(TEMPORARY_ERRORS)


def is_replaced(reply: Any) -> bool:
    """Another server is the primary now."""
    return isinstance(reply, hiredis.ReplyError) and _error_text(reply).startswith(REPLACED_ERRORS)


def _error_for(command: Command, reply: Any) -> RedisError:
    """The exception for an error that a retry will not mend."""
    if _error_text(reply).startswith("NOAUTH"):
        return NoPassword(
            "Redis asks for a password: put it into the URL, as in redis://:PASSWORD@host:6379/0"
        )
    in_script = "user_script" in str(reply) and not _error_text(reply).startswith(UNRELATED_ERRORS)
    wrong_type = _error_text(reply).startswith(("WRONGTYPE", "CROSSSLOT")) or in_script
    return (WrongReply if wrong_type else RedisError)(f"{_name(command)}: {reply}")


def in_transaction(commands: Sequence[Command]) -> Sequence[Command]:
    """Wrapped in MULTI and EXEC, so that no other client sees half of the changes."""
    return commands if len(commands) < MIN_TRANSACTION else [MULTI, *commands, EXEC]


class RedisError(StoreError):
    """Redis refused a command."""

    reason = "Redis cannot be used"


class NoPassword(RedisError):
    """The server asks for a password, and the URL has none."""


class WrongReply(RedisError, BrokenRun):
    """A key has another type than the command needs, or a script met a value that it cannot
    read."""


class RedisUnreachable(RedisError):
    """No server answers at the address. That may pass; a refusal does not."""

    reason = "Redis cannot be reached"


def _unreachable(message: str) -> RedisError:
    error = RedisError(message)
    error.reason = RedisUnreachable.reason
    return error


MISSING_CERTIFICATE = ("ALERT_CERTIFICATE", "ALERT_HANDSHAKE", "ALERT_UNKNOWN_CA", "ALERT_BAD_CERT")
CLOSED_AT_ONCE = (
    "it closed the connection after the TLS handshake; if it asks for a client certificate, name "
    "that with ssl_certfile and ssl_keyfile"
)
"""A server that misses a certificate says so at that moment, and its message may be lost."""


def trust_error(error: ssl.SSLError, where: str) -> RedisError | None:
    """The exception if waiting will not help: server or client does not trust the other."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or error.strerror
        return RedisError(f"the certificate of Redis at {where} is not trusted: {why}")
    if any(sign in (error.reason or "") for sign in MISSING_CERTIFICATE):
        why = str(error.reason).lower().replace("_", " ")
        return RedisError(
            f"Redis at {where} refuses this client ({why}): name the certificate that it asks for "
            "with ssl_certfile and ssl_keyfile"
        )
    return None


def why_unreachable(error: Exception, *, tls: bool) -> str:
    """What the error says. A timeout and a connection that ends at once say nothing."""
    if said := str(error):
        return said
    quiet = "no answer in time" if isinstance(error, TimeoutError) else "it closed the connection"
    return f"{quiet} (rediss:// needs a Redis that speaks TLS)" if tls else quiet


class _PendingCommand:
    """Commands on their way, and the future for the list of their replies."""

    __slots__ = ("answer", "count", "packed", "replies")

    def __init__(self, packed: bytes, count: int, answer: asyncio.Future[list[Any]]) -> None:
        self.packed = packed
        self.count = count
        self.answer = answer
        self.replies: list[Any] = []


class _Wire(asyncio.Protocol):
    """One connection: bytes out, replies in."""

    def __init__(self, on_lost: Callable[[_Wire], None]) -> None:
        self._reader = hiredis.Reader()
        self._on_lost = on_lost
        self.pending: deque[_PendingCommand] = deque()
        self.transport: asyncio.Transport | None = None
        self.heard = True
        """Whether data came in since this was last set to False."""
        self.is_lost = False
        self.error: Exception | None = None
        """Why it was lost, if that is known."""
        self.over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._reader.feed(data)
        while True:
            try:
                reply = self._reader.gets()
            except hiredis.ProtocolError:
                self.abort()
                return
            if reply is False:
                return
            first = self.pending[0]
            first.replies.append(reply)
            if len(first.replies) == first.count:
                self.pending.popleft()
                if not first.answer.done():
                    first.answer.set_result(first.replies)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost, self.error = True, error
        self.over.set()
        self._on_lost(self)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class PipelinedRedis:
    """Use `async with`."""

    def __init__(
        self,
        url: str,
        *,
        patience: float = PATIENCE_SECONDS,
        node: Address | None = None,
        on_break: Callable[[], None] | None = None,
    ) -> None:
        """`node` is the only node of a cluster to connect to. Raises `RedisError` if the URL cannot
        work."""
        self._url = url
        try:
            self.target = redis_url.read(url)
        except WrongUrl as problem:
            raise RedisError(f"the Redis URL: {problem}") from None
        self._keys = KeyPrefix(self.target.prefix) if self.target.prefix and node is None else None
        self._leader: Address | None = None
        """The primary that the sentinels named last."""
        self._health_timer: asyncio.TimerHandle | None = None
        self._patience = patience
        self._node = node
        self._on_break = on_break
        self._cluster: Cluster[PipelinedRedis] | None = None
        self._wire: _Wire | None = None
        self._opening: asyncio.Task[None] | None = None
        self._pending: deque[_PendingCommand] = deque()
        self._last_pending: list[_PendingCommand] = []
        self._flushing = False
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flush_at = 0.0
        self._closed = False
        self._digests: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._background_retries: set[asyncio.Task[list[Any]]] = set()
        self._warn_at = 0.0
        """When the log may warn again that Redis refuses commands."""
        self.roundtrips = 0
        """Writes to the socket, for tests that count them."""
        self.commands = 0
        self.breaks = 0
        """How often the connection was lost: commands that were pending may have been executed
        twice."""
        self.refusals = 0
        """How often a command of a batch was refused and sent again, after the commands behind
        it."""

    async def __aenter__(self) -> PipelinedRedis:
        self._loop = asyncio.get_running_loop()
        await self._open()
        self._start_checks()
        try:
            await self._find_cluster()
        except BaseException:
            self.close()
            raise
        return self

    def open_in_background(self) -> None:
        """Open the connection without waiting for it."""
        self._loop = asyncio.get_running_loop()
        self._start_checks()
        self._opening = self._loop.create_task(self._reopen())

    async def __aexit__(self, *_: object) -> None:
        wire = self._wire
        self.close()
        if wire is not None and self.target.tls is not None:  # TLS says goodbye in both directions
            await wire.over.wait()

    def close(self) -> None:
        self.flush()
        self._closed = True
        self._silence_timer.cancel()
        if self._health_timer is not None:
            self._health_timer.cancel()
        if self._cluster is not None:
            self._cluster.close()
        for again in self._background_retries:
            again.cancel()
        if self._opening is not None:
            self._opening.cancel()
        wire, self._wire = self._wire, None
        left = list(self._pending)
        if wire is not None and wire.transport is not None:
            wire.transport.close()
            left += wire.pending
        self._fail(left, RedisError("the connection was closed"))

    # ── sending ───────────────────────────────────────────────────────────────────────────

    async def call(self, *command: Argument, patience: float | None = None) -> Any:
        """The reply to one command. It may be executed twice if the connection breaks."""
        replies = await self.send([command])
        if isinstance(replies[0], hiredis.ReplyError):
            await self._retry([command], replies, [0], patience or self._patience)
        return replies[0]

    async def call_many(self, commands: Sequence[Command], *, now: bool = False) -> list[Any]:
        """The replies to commands that travel together. They are executed in this order, except
        scripts that Redis has forgotten: these follow. `now` sends them without waiting for other
        commands of this turn of the loop."""
        if not commands:
            return []
        pending = self.send(commands)
        if now:
            self.flush()
        return await self.retry_errors(commands, await pending)

    async def retry_errors(self, commands: Sequence[Command], replies: list[Any]) -> list[Any]:
        """The replies to commands; a refused command is sent again."""
        refused = [at for at, reply in enumerate(replies) if isinstance(reply, hiredis.ReplyError)]
        if not refused:
            return replies
        self.refusals += len(refused)
        await self._retry(commands, replies, refused, self._patience)
        return replies

    def transaction(self, commands: Sequence[Command]) -> Coroutine[Any, Any, list[Any]]:
        """As `call_many`, in one transaction. On a cluster all keys must be in one slot. Sent when
        this returns."""
        pending = self.send(in_transaction(commands))
        if len(commands) < MIN_TRANSACTION:
            return self._each(commands, pending)
        return self._whole(commands, pending)

    async def _each(
        self, commands: Sequence[Command], pending: asyncio.Future[list[Any]]
    ) -> list[Any]:
        return await self.retry_errors(commands, await pending)

    async def _whole(
        self, commands: Sequence[Command], pending: asyncio.Future[list[Any]]
    ) -> list[Any]:
        *_, replies = await pending
        if isinstance(replies, hiredis.ReplyError):  # none of them was executed
            return await self.call_many(commands)
        return await self.retry_errors(commands, replies)

    def send(
        self, commands: Sequence[Command], *, delay: float = 0.0, last: bool = False
    ) -> asyncio.Future[list[Any]]:
        """The replies as they are: an error is one, too.

        With a `delay` the commands travel with the next ones, or so many seconds later. `last` puts
        them behind all commands that they travel with.
        """
        if self._closed:
            raise RedisError("the connection was closed")
        if self._keys is not None:
            commands = self._keys.add_to_all(commands)
        if self._cluster is not None:
            return self._cluster.send(commands, delay=delay, last=last)
        packed = b"".join(map(_packed, commands))
        pending = _PendingCommand(packed, len(commands), self._loop.create_future())
        if not commands:  # Redis would never reply
            pending.answer.set_result([])
            return pending.answer
        self.commands += len(commands)
        (self._last_pending if last else self._pending).append(pending)
        if delay:
            at = self._loop.time() + delay
            if self._flush_timer is None or at < self._flush_at:
                if self._flush_timer is not None:
                    self._flush_timer.cancel()
                self._flush_timer, self._flush_at = self._loop.call_at(at, self.flush), at
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)
        return pending.answer

    def enqueue(
        self,
        commands: Sequence[Command],
        *,
        last: bool = False,
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """Have these executed soon, in order with other commands, without waiting for replies.
        `last` as in `send`. `on_done` is called when they are executed, or with the reason why they
        will not be."""
        if not commands or self._closed:
            return
        pending = self.send(commands, delay=ENQUEUE_SECONDS, last=last)
        pending.add_done_callback(partial(self._enqueued_done, commands, on_done))

    def _enqueued_done(
        self,
        commands: Sequence[Command],
        on_done: Callable[[BaseException | None], None] | None,
        answer: asyncio.Future[list[Any]],
    ) -> None:
        if answer.cancelled() or answer.exception() is not None or self._closed:
            # The caller can do without: enqueued commands are repaired elsewhere.
            if on_done is not None:
                on_done(None if answer.cancelled() else answer.exception())
            return
        refused = [
            command
            for command, reply in zip(commands, answer.result(), strict=True)
            if isinstance(reply, hiredis.ReplyError)
        ]
        if refused:
            again = self._loop.create_task(self.call_many(refused))
            self._background_retries.add(again)
            again.add_done_callback(partial(self._retry_done, on_done))
        elif on_done is not None:
            on_done(None)

    def _retry_done(
        self,
        on_done: Callable[[BaseException | None], None] | None,
        again: asyncio.Task[list[Any]],
    ) -> None:
        self._background_retries.discard(again)
        error = None if again.cancelled() else again.exception()
        if on_done is not None:
            on_done(error)

    def script_command(self, source: str, keys: Sequence[str], args: Sequence[Argument]) -> Command:
        """The command that runs a script. Redis need not know the script yet."""
        digest = self._digests.get(source)
        if digest is None:
            digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            self._digests[source] = digest
            self._sources[digest] = source
        return ("EVALSHA", digest, len(keys), *keys, *args)

    async def call_script(self, source: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        return await self.call(*self.script_command(source, keys, args))

    async def info(self, section: str = "default") -> dict[str, str]:
        """A section of INFO."""
        text = (await self.call("INFO", section)).decode()
        lines = (line.partition(":") for line in text.splitlines())
        return {name: value for name, colon, value in lines if colon}

    async def server(self) -> bytes:
        """Identifies this start of the server, or of all nodes."""
        replies = [await node.call("INFO", "server") for node in self.nodes()]
        return b" ".join(
            line for text in replies for line in text.splitlines() if line.startswith(b"run_id:")
        )

    async def after_breaks(self) -> AsyncIterator[bool]:
        """After every break of the connection: whether the server was restarted or replaced."""
        seen, server = self.breaks, await self.server()
        where = self.where
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if (breaks := self.breaks) != seen:
                log.warning("the connection to Redis at %s broke; waiting for it", where)
                try:
                    before, server = server, await self.server()
                except RedisError:
                    continue  # still away: try again
                seen = breaks
                again = " after a restart" if server != before else ""
                if where != self.where:
                    again = f", in place of {where}"
                where = self.where
                log.warning("Redis at %s answers again%s", where, again)
                yield server != before

    async def is_clustered(self) -> bool:
        """Whether the server is a node of a cluster."""
        return b"cluster_enabled:1" in await self.call("INFO", "cluster")

    async def _retry(
        self, commands: Sequence[Command], replies: list[Any], refused: list[int], patience: float
    ) -> None:
        """Send refused commands again, all at once: Redis has forgotten a script, or will accept
        them later.

        Raises `RedisError` if one of them is refused for good."""
        give_up = self._loop.time() + patience
        pause = RETRY_SECONDS
        while refused:
            later = [at for at in refused if is_temporary(replies[at])]
            forgotten = [at for at in refused if str(replies[at]).startswith("NOSCRIPT")]
            if later and self._loop.time() < give_up:
                if any(is_replaced(replies[at]) for at in later):
                    self._break()  # find the new primary
                if pause > RETRY_SECONDS:
                    self._warn(_error_text(replies[later[0]]))
                await self._sleep(pause)
                pause = min(pause * 2, LONGEST_RETRY_SECONDS)
            elif forgotten:
                later = []
            else:
                raise _error_for(commands[refused[0]], replies[refused[0]])
            for digest in {str(commands[at][1]) for at in forgotten}:  # it was restarted
                await self.call("SCRIPT", "LOAD", self._sources[digest])
            again = sorted([*later, *forgotten])
            answers = await self.send([commands[at] for at in again])
            for at, reply in zip(again, answers, strict=True):
                replies[at] = reply
            refused = [at for at in refused if isinstance(replies[at], hiredis.ReplyError)]

    def _warn(self, refusal: str) -> None:
        """Now and then: many commands may wait for long, and an operator can help."""
        if (now := self._loop.time()) >= self._warn_at:
            self._warn_at = now + WARNING_SECONDS
            log.warning("Redis at %s refuses what it is asked: %s", self.where, refusal)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def flush(self) -> None:
        """Send all pending commands now."""
        if self._cluster is not None:
            self._cluster.flush()
        self._flushing = False
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._last_pending:
            self._pending.extend(self._last_pending)
            self._last_pending.clear()
        wire = self._wire
        if wire is None or wire.transport is None or not self._pending:
            return  # once it is open again
        self.roundtrips += 1
        wire.transport.write(b"".join(pending.packed for pending in self._pending))
        wire.pending.extend(self._pending)
        self._pending.clear()

    # ── a cluster ────────────────────────────────────────────────────────────────────────

    @property
    def keeps_order(self) -> bool:
        """Whether commands are executed in the order in which they are sent, whatever their
        keys."""
        return self._cluster is None

    @property
    def is_open(self) -> bool:
        return self._wire is not None

    @property
    def where(self) -> str:
        """The address of the server, for messages."""
        address = self._node or self._leader
        return self.target.shown() if address is None else f"{address[0]}:{address[1]}"

    @property
    def fails_over(self) -> bool:
        """Whether a replica may take over that lacks the last writes of this server."""
        return bool(self.target.service)

    def key_name(self, key: bytes) -> str:
        """A key from a reply, without the prefix."""
        return key.decode() if self._keys is None else self._keys.remove(key)

    def reconnect(self) -> None:
        """This server was replaced: connect to the new primary."""
        self._break()

    def nodes(self) -> Sequence[PipelinedRedis]:
        """A connection to each server."""
        return [self] if self._cluster is None else self._cluster.nodes()

    async def _find_cluster(self) -> None:
        """On a cluster of several nodes, send each command to the node of its key."""
        try:
            if not await self.is_clustered():
                return
        except RedisError:
            return  # not allowed: a MOVED error will say so where it matters
        home = self._leader or (self.target.addresses or (("localhost", 6379),))[0]
        slots = slot_owners(await self.call("CLUSTER", "SLOTS"), home)
        if slots is None or len(set(slots)) == 1:
            return
        self._cluster = Cluster(slots, self._open_node)
        wire, self._wire = self._wire, None
        if wire is not None and wire.transport is not None:
            wire.transport.close()  # every node has a connection of its own now

    def _open_node(self, address: Address) -> PipelinedRedis:
        node = PipelinedRedis(
            self._url, patience=self._patience, node=address, on_break=self._node_lost
        )
        node.open_in_background()
        return node

    def _node_lost(self) -> None:
        self.breaks += 1
        if self._cluster is not None and not self._closed:
            self._cluster.refresh()

    def transfer_pending(self, target: PipelinedRedis) -> None:
        """Send commands without a reply to another node, and close this connection."""
        self.flush()  # moves the `last` ones, too
        target._pending.extendleft(reversed(self._pending))
        self._pending.clear()
        target.flush()
        self.close()

    # ── the connection ───────────────────────────────────────────────────────────────────

    async def _open(self) -> None:
        wire: _Wire | None = None
        try:
            async with asyncio.timeout(self.target.connect_seconds or CONNECT_SECONDS):
                wire = await self._connected()
                try:
                    await self._greet(wire)
                except BaseException:  # refused, or no reply: close it here
                    wire.abort()
                    raise
                if wire.is_lost:  # the server was about to stop
                    raise ConnectionResetError("the connection broke at once")
        except WrongUrl as problem:
            raise RedisError(f"the Redis URL: {problem}") from None
        except (OSError, TimeoutError, RedisError) as error:
            met = error if wire is None or wire.error is None else wire.error
            if isinstance(met, ssl.SSLError) and (refused := trust_error(met, self.where)):
                raise refused from None
            if isinstance(error, RedisError) and wire is not None and not wire.is_lost:
                raise
            what = why_unreachable(error, tls=self.target.tls is not None)
            if self.target.tls is not None and wire is not None and wire.is_lost:
                what = CLOSED_AT_ONCE
            raise RedisUnreachable(f"Redis cannot be reached: {what}") from None
        self._wire = wire
        if self._pending and not self._flushing:
            self.flush()

    async def _connected(self) -> _Wire:
        target = self.target
        make = lambda: _Wire(self._lost)  # noqa: E731
        if target.path:
            _, wire = await self._loop.create_unix_connection(make, target.path)
            return wire
        if target.service:
            self._leader = await self._loop.run_in_executor(None, find_primary, target)
        host, port = self._node or self._leader or target.addresses[0]
        context = None if target.tls is None else target.tls.context()
        transport, wire = await self._loop.create_connection(
            *(make, host, port),
            ssl=context,
            ssl_shutdown_timeout=None if context is None else TLS_SHUTDOWN_SECONDS,
        )
        if target.keepalive:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return wire

    async def _greet(self, wire: _Wire) -> None:
        for greeting in self.target.greetings():
            reply = await self._exchange(wire, greeting)
            if isinstance(reply, hiredis.ReplyError):
                raise RedisError(f"Redis refused {greeting[0]!s}: {reply}")
        if self.target.service:
            if not is_primary(await self._exchange(wire, ROLE)):
                raise RedisUnreachable(f"Redis at {self.where} does not lead yet, or no longer")
        elif self.target.tls is not None:
            # A server that misses a certificate of ours says so after the handshake (TLS 1.3).
            await self._exchange(wire, ("PING",))

    async def _exchange(self, wire: _Wire, command: tuple[Argument, ...]) -> Any:
        pending = _PendingCommand(_packed(command), 1, self._loop.create_future())
        wire.pending.append(pending)
        if wire.is_lost:
            self._fail([pending], RedisError("the connection to Redis broke"))
        elif wire.transport is not None:
            wire.transport.write(pending.packed)
        (reply,) = await pending.answer
        return reply

    def _lost(self, wire: _Wire) -> None:
        """Open the connection again, and send commands without a reply again."""
        if self._closed or wire is not self._wire:
            self._fail(wire.pending, _unreachable("the connection to Redis broke"))
            return
        self._wire = None
        self.breaks += 1
        if self._on_break is not None:
            self._on_break()
        for pending in wire.pending:
            pending.replies.clear()
        self._pending.extendleft(reversed(wire.pending))
        self._opening = self._loop.create_task(self._reopen())

    def _start_checks(self) -> None:
        self._silence_timer = self._loop.call_later(self._silence, self._check_silence)
        if self.target.health_seconds is not None:
            self._health_timer = self._loop.call_later(
                self.target.health_seconds, self._check_health
            )

    @property
    def _silence(self) -> float:
        return self.target.silence_seconds or SILENCE_SECONDS

    def _check_health(self) -> None:
        """While commands are pending, `_check_silence` notices a dead connection."""
        if self._wire is not None and not self._wire.pending:
            self.enqueue([("PING",)])
        self._health_timer = self._loop.call_later(
            self.target.health_seconds or 0.0, self._check_health
        )

    def _check_silence(self) -> None:
        """A connection that is silent while commands are pending counts as lost."""
        wire = self._wire
        if wire is not None and wire.pending:
            if not wire.heard:
                self._break()
            wire.heard = False
        elif wire is not None:
            wire.heard = True
        self._silence_timer = self._loop.call_later(self._silence, self._check_silence)

    def _break(self) -> None:
        if self._cluster is not None:
            self._cluster.refresh()
        if self._wire is not None:
            self._wire.abort()

    async def _reopen(self) -> None:
        pause = RETRY_SECONDS
        give_up = self._loop.time() + self._patience
        while True:
            with contextlib.suppress(RedisError):
                await self._open()
                return
            if self._loop.time() > give_up:
                self._fail(self._pending, _unreachable("Redis did not come back"))
                self._pending.clear()
                give_up = self._loop.time() + self._patience
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY_SECONDS)

    @staticmethod
    def _fail(pending: Any, error: Exception) -> None:
        for one in pending:
            if not one.answer.done():
                one.answer.set_exception(error)


SCAN_COUNT = 1000


async def scanned(
    pipe: PipelinedRedis, pattern: str, *, kind: str | None = None
) -> AsyncIterator[list[str]]:
    """All keys that match, some at a time; a key may come twice. With a `kind`, only keys of that
    type, such as `stream`."""
    cursor: Any = b"0"
    of_kind = () if kind is None else ("TYPE", kind)
    while True:
        asking = ("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT, *of_kind)
        cursor, keys = await pipe.call(*asking)
        yield [pipe.key_name(key) for key in keys]
        if cursor == b"0":
            return


async def every_key(pipe: PipelinedRedis, pattern: str, *, kind: str | None = None) -> list[str]:
    """All keys that match, each once."""
    return sorted({key async for keys in scanned(pipe, pattern, kind=kind) for key in keys})


# ── sentinels ─────────────────────────────────────────────────────────────────────────────────


SENTINEL_SECONDS = 1.0
"""A sentinel that takes longer counts as lost: the next one is asked."""
SENTINEL_READ_BYTES = 65536
PRIMARY_ADDRESS = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME")
ROLE = ("ROLE",)


def find_primary(target: RedisUrl) -> Address:
    """The address of the primary, as the sentinels name it.

    It blocks, with a connection for each question: it is called only when a connection is opened.
    A sentinel may be behind, so the caller checks the role of the server itself.

    Raises `OSError` if none of them answers, `WrongUrl` if none of them knows the service.
    """
    silent, ignorant = [], []
    for address in target.addresses:
        try:
            (reply,) = ask_sentinel(target, address, [(*PRIMARY_ADDRESS, target.service)])
        except OSError as error:
            silent.append(f"{address[0]}:{address[1]}: {error}")
            continue
        if reply is not None:
            return reply[0].decode(), int(reply[1])
        ignorant.append(address)
    if not ignorant:
        raise ConnectionError(f"no sentinel answers ({'; '.join(silent)})")
    hint = _known_services(target, ignorant[0])
    raise WrongUrl(f"no sentinel knows the service '{target.service}'{hint}")


def is_primary(role: Any) -> bool:
    """From a server's reply to ROLE; where ROLE is forbidden the sentinel is believed."""
    return isinstance(role, hiredis.ReplyError) or role[0] == b"master"


def _known_services(target: RedisUrl, address: Address) -> str:
    try:
        (reply,) = ask_sentinel(target, address, [("SENTINEL", "MASTERS")])
    except OSError:
        return ""
    names = [one[one.index(b"name") + 1].decode() for one in reply]
    near = get_close_matches(target.service, names, n=1)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; they know {', '.join(names)}" if names else "; they know none"


def ask_sentinel(
    target: RedisUrl, address: Address, commands: Sequence[tuple[str, ...]]
) -> list[Any]:
    """The replies of one sentinel. Raises `OSError` if it is away or refuses."""
    seconds = min(SENTINEL_SECONDS, target.connect_seconds or SENTINEL_SECONDS)
    with socket.create_connection(address, seconds) as plain:
        wire = plain
        if target.tls is not None:
            wire = target.tls.context().wrap_socket(plain, server_hostname=address[0])
        with wire:
            every = [*target.sentinel_greetings(), *commands]
            wire.sendall(b"".join(hiredis.pack_command(one) for one in every))  # type: ignore[arg-type]
            replies = _sentinel_replies(wire, len(every))
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise ConnectionRefusedError(str(reply))
    return replies[-len(commands) :]


def _sentinel_replies(wire: socket.socket, count: int) -> list[Any]:
    reader = hiredis.Reader()
    found: list[Any] = []
    while len(found) < count:
        data = wire.recv(SENTINEL_READ_BYTES)
        if not data:
            raise ConnectionResetError("the connection broke")
        reader.feed(data)
        while len(found) < count and (reply := reader.gets()) is not False:
            found.append(reply)
    return found


# ── scripts ───────────────────────────────────────────────────────────────────────────────────


@cache
def load_script(package: str, *names: str) -> str:
    """The text of these files, joined in this order."""
    folder = resources.files(package)
    return "\n".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in names)
