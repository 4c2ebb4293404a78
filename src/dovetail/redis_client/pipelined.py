"""The prefix of every key, put before it in each command, at the one place where commands leave.

A command whose keys are not known here is refused where there is a prefix: a key without it would
be somebody else's, or be refused by an ACL. Scripts get all their keys as KEYS. What it must not
know: what any key is for.

One connection to Redis that many share: what is asked at about the same time travels together.

redis-py's asynchronous client spends most of a small command on itself; here a command is packed,
appended to what goes out next, and answered in order. A connection that breaks is opened again
and what was not answered is asked again: every command that goes through here may be executed
twice without harm. What it must not know: what any command means.

All keys of Redis that match a pattern, on a cluster those of every node.
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
from functools import partial
from typing import Any

import hiredis

from dovetail.core.errors import BrokenRun, StoreError
from dovetail.redis_client import sentinel
from dovetail.redis_client import url as redis_url
from dovetail.redis_client.cluster import EXEC, MULTI, Address, Cluster, owners
from dovetail.redis_client.url import WrongUrl

AnyCommand = tuple[Any, ...] | bytes

# fmt: off
FIRST = frozenset({
    "EXPIRE", "GET", "HDEL", "HEXISTS", "HGET", "HGETALL", "HINCRBY", "HKEYS", "HLEN", "HMGET",
    "HSET", "HSETNX", "HSTRLEN", "HVALS", "INCR", "LLEN", "LPUSH", "LRANGE", "LTRIM", "PEXPIRE",
    "PTTL", "RPUSH", "SADD", "SCARD", "SET", "SMEMBERS", "SREM", "TTL", "TYPE", "XACK", "XADD",
    "XAUTOCLAIM", "XCLAIM", "XDEL", "XLEN", "XPENDING", "XRANGE", "XREVRANGE", "XTRIM", "ZADD",
    "ZCARD", "ZCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZRANK", "ZREM",
    "ZREMRANGEBYRANK", "ZREMRANGEBYSCORE", "ZREVRANGE", "ZREVRANGEBYLEX", "ZREVRANGEBYSCORE",
    "ZSCAN", "ZSCORE",
})
SECOND = frozenset({"XGROUP", "XINFO"})
EVERY = frozenset({"DEL", "EXISTS", "UNLINK"})
NONE = frozenset({
    "ASKING", "BGREWRITEAOF", "CLIENT", "CLUSTER", "CONFIG", "ECHO", "INFO", "PING", "ROLE",
    "SCRIPT", "TIME", "WAIT",
})
# fmt: on


class UnknownKeys(ValueError):
    """A command that this table does not know."""


class Keys:
    """Puts a prefix before the keys of commands, and takes it from names that come back."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._tag = f"{{{prefix}wf:"

    def all_of(self, commands: Sequence[AnyCommand]) -> list[AnyCommand]:
        return [self.of(command) for command in commands]

    def of(self, command: AnyCommand) -> AnyCommand:
        if isinstance(command, bytes):
            return self._sent(command)
        name = command[0]
        if name in FIRST:
            return (name, self.key(command[1]), *command[2:])
        if name in ("EVALSHA", "EVAL"):
            end = 3 + int(command[2])
            return (*command[:3], *map(self.key, command[3:end]), *command[end:])
        if name in EVERY:
            return (name, *map(self.key, command[1:]))
        if name in SECOND:
            return (*command[:2], self.key(command[2]), *command[3:])
        if name in ("XREADGROUP", "XREAD"):
            first = command.index("STREAMS") + 1
            end = first + (len(command) - first) // 2
            return (*command[:first], *map(self.key, command[first:end]), *command[end:])
        if name == "SCAN":
            at = command.index("MATCH") + 1
            return (*command[:at], self.key(command[at]), *command[at + 1 :])
        if name in NONE:
            return command
        raise UnknownKeys(f"which words of {name} are keys is not known: see {__name__}")

    def key(self, key: Any) -> Any:
        if isinstance(key, bytes):
            return self.prefix.encode() + key.replace(b"{wf:", self._tag.encode())
        # A hash tag that is the name of another key is in the slot of that key, as it is now.
        return self.prefix + str(key).replace("{wf:", self._tag)

    def without(self, key: bytes) -> str:
        return key.decode().removeprefix(self.prefix).replace(self._tag, "{wf:")

    def _sent(self, command: bytes) -> bytes:
        """Of a command as it is sent: the second word of it."""
        if command in (MULTI, EXEC):
            return command
        count, size, name, _, key, rest = command.split(b"\r\n", 5)
        if name.decode() not in FIRST:
            raise UnknownKeys(f"which words of {name.decode()} are keys is not known")
        key = self.key(key)
        return b"\r\n".join((count, size, name, b"$%d" % len(key), key, rest))


Argument = str | bytes | int | float
Command = tuple[Argument, ...] | bytes
"""What to ask Redis, or the same as it is sent."""
CONNECT_SECONDS = 5.0
FAREWELL_SECONDS = 1.0
"""So long the end of a TLS connection waits for the server to agree."""
RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 1.0
MOMENT_SECONDS = 0.01
LOOK_SECONDS = 0.1
SILENCE_SECONDS = 8.0
"""So long nothing may come in while somebody waits; who asks Redis to wait asks for less."""
PATIENCE_SECONDS = 30.0
"""So long a command waits for Redis to come back."""
FEWEST_TOGETHER = 3
TELL_SECONDS = 10.0
# fmt: off
LATER = (
    "READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "OOM", "MISCONF", "NOREPLICAS",
    "UNBLOCKED",
)
# fmt: on
"""Answers of a server that will do later: one that starts, is about to be replaced, or takes no
writes because its memory or its disk is full, or its replicas are away. A script is
refused so at its first write or never, so nothing of it was done."""
REPLACED = ("READONLY", "UNBLOCKED")
"""Answers of a server that leads no longer: another one does."""

PASSING = (*LATER, "BUSY", "NOPERM")
"""What says nothing about a command itself."""

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


def _met(reply: Any) -> str:
    """The error that was met; before Redis 7 that of a script stands behind where it came from."""
    text = str(reply)
    return text.partition(": -")[2] if text.startswith("ERR Error running script") else text


def comes_later(reply: Any) -> bool:
    """Redis will do later what it was asked: this says nothing about what there is."""
    return isinstance(reply, hiredis.ReplyError) and _met(reply).startswith(LATER)


def is_replaced(reply: Any) -> bool:
    """Another server leads now."""
    return isinstance(reply, hiredis.ReplyError) and _met(reply).startswith(REPLACED)


def _refusal(command: Command, reply: Any) -> RedisError:
    """For good: what to raise."""
    in_script = "user_script" in str(reply) and not _met(reply).startswith(PASSING)
    senseless = _met(reply).startswith(("WRONGTYPE", "CROSSSLOT")) or in_script
    return (WrongReply if senseless else RedisError)(f"{_name(command)}: {reply}")


def as_one(commands: Sequence[Command]) -> Sequence[Command]:
    """To be carried out as one, so that who waits for what they do finds all of it."""
    return commands if len(commands) < FEWEST_TOGETHER else [MULTI, *commands, EXEC]


class RedisError(StoreError):
    """Redis refused a command."""

    reason = "Redis cannot be used"


class WrongReply(RedisError, BrokenRun):
    """A key is of another kind than the command is for, or a script met what it cannot read."""


class RedisUnreachable(RedisError):
    """Nobody answers at its address, which may pass; a refusal does not."""

    reason = "Redis cannot be reached"


def _gone(what: str) -> RedisError:
    error = RedisError(what)
    error.reason = RedisUnreachable.reason
    return error


MISSED_CERTIFICATE = ("ALERT_CERTIFICATE", "ALERT_HANDSHAKE", "ALERT_UNKNOWN_CA", "ALERT_BAD_CERT")
CLOSED_AT_ONCE = (
    "it closed the connection after the TLS handshake; if it asks for a client certificate, name "
    "that with ssl_certfile and ssl_keyfile"
)
"""A server that misses a certificate says so at that moment, and what it says may be lost."""


def untrusted(error: ssl.SSLError, where: str) -> RedisError | None:
    """What to raise if waiting will not help: one of the two does not trust the other."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or error.strerror
        return RedisError(f"the certificate of Redis at {where} is not trusted: {why}")
    if any(sign in (error.reason or "") for sign in MISSED_CERTIFICATE):
        why = str(error.reason).lower().replace("_", " ")
        return RedisError(
            f"Redis at {where} refuses this client ({why}): name the certificate that it asks for "
            "with ssl_certfile and ssl_keyfile"
        )
    return None


class _PendingCommand:
    """Commands on their way, and who waits for the list of their answers."""

    __slots__ = ("answer", "count", "packed", "replies")

    def __init__(self, packed: bytes, count: int, answer: asyncio.Future[list[Any]]) -> None:
        self.packed = packed
        self.count = count
        self.answer = answer
        self.replies: list[Any] = []


class _Wire(asyncio.Protocol):
    """The bytes of one connection."""

    def __init__(self, on_lost: Callable[[_Wire], None]) -> None:
        self._reader = hiredis.Reader()
        self._on_lost = on_lost
        self.asked: deque[_PendingCommand] = deque()
        self.transport: asyncio.Transport | None = None
        self.heard = True
        """Something came in since this was last set to False."""
        self.is_lost = False
        self.error: Exception | None = None
        """What it was lost by, if that is known."""
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
            first = self.asked[0]
            first.replies.append(reply)
            if len(first.replies) == first.count:
                self.asked.popleft()
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
        """`node` is the one of a cluster to speak to, and to no other. Raises `RedisError` if the
        URL cannot work."""
        self._url = url
        try:
            self.target = redis_url.read(url)
        except WrongUrl as problem:
            raise RedisError(f"the Redis URL: {problem}") from None
        self._keys = Keys(self.target.prefix) if self.target.prefix and node is None else None
        self._leader: Address | None = None
        """Of the servers that sentinels watch, the one that led when it was last asked."""
        self._health: asyncio.TimerHandle | None = None
        self._patience = patience
        self._node = node
        self._on_break = on_break
        self._cluster: Cluster[PipelinedRedis] | None = None
        self._wire: _Wire | None = None
        self._opening: asyncio.Task[None] | None = None
        self._waiting: deque[_PendingCommand] = deque()
        self._behind: list[_PendingCommand] = []
        self._flushing = False
        self._later: asyncio.TimerHandle | None = None
        self._later_at = 0.0
        self._closed = False
        self._digests: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._unwatched: set[asyncio.Task[list[Any]]] = set()
        self._tell_at = 0.0
        """When it is told again that Redis refuses what it is asked."""
        self.roundtrips = 0
        """Writes to the socket, for tests that count them."""
        self.commands = 0
        self.breaks = 0
        """How often the connection was lost: what was asked then may have been executed twice."""
        self.refusals = 0
        """How often a command of many was refused and asked again, later than what followed it."""

    async def __aenter__(self) -> PipelinedRedis:
        self._loop = asyncio.get_running_loop()
        await self._open()
        self._begin_to_watch()
        try:
            await self._find_cluster()
        except BaseException:
            self.close()
            raise
        return self

    def begin(self) -> None:
        """Open it, with nobody waiting for that."""
        self._loop = asyncio.get_running_loop()
        self._begin_to_watch()
        self._opening = self._loop.create_task(self._reopen())

    async def __aexit__(self, *_: object) -> None:
        wire = self._wire
        self.close()
        if wire is not None and self.target.tls is not None:  # a farewell, and its answer
            await wire.over.wait()

    def close(self) -> None:
        self.flush()
        self._closed = True
        self._watch.cancel()
        if self._health is not None:
            self._health.cancel()
        if self._cluster is not None:
            self._cluster.close()
        for again in self._unwatched:
            again.cancel()
        if self._opening is not None:
            self._opening.cancel()
        wire, self._wire = self._wire, None
        left = list(self._waiting)
        if wire is not None and wire.transport is not None:
            wire.transport.close()
            left += wire.asked
        self._fail(left, RedisError("the connection was closed"))

    # ── asking ───────────────────────────────────────────────────────────────────────────

    async def call(self, *command: Argument, patience: float | None = None) -> Any:
        """The answer to one command; it may be executed twice if the connection breaks."""
        replies = await self.ask([command])
        if isinstance(replies[0], hiredis.ReplyError):
            await self._ask_again([command], replies, [0], patience or self._patience)
        return replies[0]

    async def many(self, commands: Sequence[Command], *, now: bool = False) -> list[Any]:
        """The answers to commands that travel together and are executed in this order, but for
        scripts that Redis has forgotten: these follow. `now`, with nobody to wait for who asks
        for something in the same turn of the loop."""
        if not commands:
            return []
        asked = self.ask(commands)
        if now:
            self.flush()
        return await self.judged(commands, await asked)

    async def judged(self, commands: Sequence[Command], replies: list[Any]) -> list[Any]:
        """The answers to what was asked; what was refused is asked again."""
        refused = [at for at, reply in enumerate(replies) if isinstance(reply, hiredis.ReplyError)]
        if not refused:
            return replies
        self.refusals += len(refused)
        await self._ask_again(commands, replies, refused, self._patience)
        return replies

    def together(self, commands: Sequence[Command]) -> Coroutine[Any, Any, list[Any]]:
        """As `many`, carried out as one: who waits for what they do finds all of it. On a cluster
        their keys must be in one slot. Asked for when this returns."""
        asked = self.ask(as_one(commands))
        if len(commands) < FEWEST_TOGETHER:
            return self._each(commands, asked)
        return self._whole(commands, asked)

    async def _each(
        self, commands: Sequence[Command], asked: asyncio.Future[list[Any]]
    ) -> list[Any]:
        return await self.judged(commands, await asked)

    async def _whole(
        self, commands: Sequence[Command], asked: asyncio.Future[list[Any]]
    ) -> list[Any]:
        *_, replies = await asked
        if isinstance(replies, hiredis.ReplyError):  # none of them is done
            return await self.many(commands)
        return await self.judged(commands, replies)

    def ask(
        self, commands: Sequence[Command], *, patience: float = 0.0, behind: bool = False
    ) -> asyncio.Future[list[Any]]:
        """The same without judging the answers: an error is one, too.

        What has `patience` travels with whatever is asked next, or so many seconds later. What
        goes `behind` comes after everything that it travels with.
        """
        if self._closed:
            raise RedisError("the connection was closed")
        if self._keys is not None:
            commands = self._keys.all_of(commands)
        if self._cluster is not None:
            return self._cluster.ask(commands, patience=patience, behind=behind)
        packed = b"".join(map(_packed, commands))
        asked = _PendingCommand(packed, len(commands), self._loop.create_future())
        if not commands:  # nobody would ever answer
            asked.answer.set_result([])
            return asked.answer
        self.commands += len(commands)
        (self._behind if behind else self._waiting).append(asked)
        if patience:
            at = self._loop.time() + patience
            if self._later is None or at < self._later_at:
                if self._later is not None:
                    self._later.cancel()
                self._later, self._later_at = self._loop.call_at(at, self.flush), at
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)
        return asked.answer

    def soon(self, commands: Sequence[Command], *, behind: bool = False) -> None:
        """Have these done, in this order among what is asked or `behind` all that they travel
        with, with nobody waiting for it."""
        if not commands or self._closed:
            return
        asked = self.ask(commands, patience=MOMENT_SECONDS, behind=behind)
        asked.add_done_callback(partial(self._done_soon, commands))

    def _done_soon(self, commands: Sequence[Command], answer: asyncio.Future[list[Any]]) -> None:
        if answer.cancelled() or answer.exception() is not None or self._closed:
            return  # it would be of no use by now: what is asked so can be made good
        refused = [
            command
            for command, reply in zip(commands, answer.result(), strict=True)
            if isinstance(reply, hiredis.ReplyError)
        ]
        if refused:
            again = self._loop.create_task(self.many(refused))
            self._unwatched.add(again)
            again.add_done_callback(self._seen)

    def _seen(self, again: asyncio.Task[list[Any]]) -> None:
        self._unwatched.discard(again)
        if not again.cancelled():
            again.exception()

    def evaluation(self, source: str, keys: Sequence[str], args: Sequence[Argument]) -> Command:
        """The command that runs a script; who asks it need not know whether Redis knows it."""
        digest = self._digests.get(source)
        if digest is None:
            digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            self._digests[source] = digest
            self._sources[digest] = source
        return ("EVALSHA", digest, len(keys), *keys, *args)

    async def script(self, source: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        return await self.call(*self.evaluation(source, keys, args))

    async def info(self, section: str = "default") -> dict[str, str]:
        """What the server says of itself."""
        text = (await self.call("INFO", section)).decode()
        lines = (line.partition(":") for line in text.splitlines())
        return {name: value for name, colon, value in lines if colon}

    async def server(self) -> bytes:
        """Which start of which server this is, or of which servers."""
        told = [await node.call("INFO", "server") for node in self.nodes()]
        return b" ".join(
            line for text in told for line in text.splitlines() if line.startswith(b"run_id:")
        )

    async def after_breaks(self) -> AsyncIterator[bool]:
        """After every break of the connection: whether it is another start of the server."""
        seen, server = self.breaks, await self.server()
        where = self.where
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if (breaks := self.breaks) != seen:
                log.warning("the connection to Redis at %s broke; waiting for it", where)
                try:
                    before, server = server, await self.server()
                except RedisError:
                    continue  # it is away for long: asked again
                seen = breaks
                again = " after a restart" if server != before else ""
                if where != self.where:
                    again = f", in place of {where}"
                where = self.where
                log.warning("Redis at %s answers again%s", where, again)
                yield server != before

    async def clustered(self) -> bool:
        """Whether it is a node of a cluster: a command may name keys of one slot only there."""
        return b"cluster_enabled:1" in await self.call("INFO", "cluster")

    async def _ask_again(
        self, commands: Sequence[Command], replies: list[Any], refused: list[int], patience: float
    ) -> None:
        """What was refused, all of it at once: Redis may have forgotten a script, or will do later.

        Raises `RedisError` if one of these is refused for good."""
        give_up = self._loop.time() + patience
        pause = RETRY_SECONDS
        while refused:
            later = [at for at in refused if comes_later(replies[at])]
            forgotten = [at for at in refused if str(replies[at]).startswith("NOSCRIPT")]
            if later and self._loop.time() < give_up:
                if any(is_replaced(replies[at]) for at in later):
                    self._break()  # our server was replaced: find the new one
                if pause > RETRY_SECONDS:
                    self._tell(_met(replies[later[0]]))
                await self._rest(pause)
                pause = min(pause * 2, LONGEST_RETRY_SECONDS)
            elif forgotten:
                later = []
            else:
                raise _refusal(commands[refused[0]], replies[refused[0]])
            for digest in {str(commands[at][1]) for at in forgotten}:  # it was restarted
                await self.call("SCRIPT", "LOAD", self._sources[digest])
            again = sorted([*later, *forgotten])
            answers = await self.ask([commands[at] for at in again])
            for at, reply in zip(again, answers, strict=True):
                replies[at] = reply
            refused = [at for at in refused if isinstance(replies[at], hiredis.ReplyError)]

    def _tell(self, refusal: str) -> None:
        """For whoever can help: many may wait for a long time, and it is told now and then."""
        if (now := self._loop.time()) >= self._tell_at:
            self._tell_at = now + TELL_SECONDS
            log.warning("Redis at %s refuses what it is asked: %s", self.where, refusal)

    async def _rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def flush(self) -> None:
        """Send what was asked so far, now."""
        if self._cluster is not None:
            self._cluster.flush()
        self._flushing = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._behind:
            self._waiting.extend(self._behind)
            self._behind.clear()
        wire = self._wire
        if wire is None or wire.transport is None or not self._waiting:
            return  # once it is open again
        self.roundtrips += 1
        wire.transport.write(b"".join(asked.packed for asked in self._waiting))
        wire.asked.extend(self._waiting)
        self._waiting.clear()

    # ── a cluster ────────────────────────────────────────────────────────────────────────

    @property
    def keeps_order(self) -> bool:
        """What is asked one after the other is done so, whatever it is about."""
        return self._cluster is None

    @property
    def is_open(self) -> bool:
        return self._wire is not None

    @property
    def where(self) -> str:
        """Of the one server that is asked here, as a person would name it."""
        address = self._node or self._leader
        return self.target.shown() if address is None else f"{address[0]}:{address[1]}"

    @property
    def fails_over(self) -> bool:
        """Whether another server may take over that lacks what this one wrote last."""
        return bool(self.target.service)

    def name_of(self, key: bytes) -> str:
        """Of a key that Redis has told: its name without the prefix."""
        return key.decode() if self._keys is None else self._keys.without(key)

    def leave(self) -> None:
        """This server has been replaced: find the one that leads now."""
        self._break()

    def nodes(self) -> Sequence[PipelinedRedis]:
        """A connection to each server."""
        return [self] if self._cluster is None else self._cluster.pipes()

    async def _find_cluster(self) -> None:
        """Where one node does not have everything, each command goes to the one that it is for."""
        try:
            if not await self.clustered():
                return
        except RedisError:
            return  # who may not ask that is told what it may ask
        home = self._leader or (self.target.addresses or (("localhost", 6379),))[0]
        slots = owners(await self.call("CLUSTER", "SLOTS"), home)
        if slots is None or len(set(slots)) == 1:
            return
        self._cluster = Cluster(slots, self._open_node)
        wire, self._wire = self._wire, None
        if wire is not None and wire.transport is not None:
            wire.transport.close()  # which of them it was does not matter any more

    def _open_node(self, address: Address) -> PipelinedRedis:
        node = PipelinedRedis(
            self._url, patience=self._patience, node=address, on_break=self._node_lost
        )
        node.begin()
        return node

    def _node_lost(self) -> None:
        self.breaks += 1
        if self._cluster is not None and not self._closed:
            self._cluster.learn()

    def bequeath(self, heir: PipelinedRedis) -> None:
        """What was not answered here is asked there; this one is closed."""
        self.flush()  # what would go behind, too
        left, self._waiting = self._waiting, deque()
        heir.inherit(left)
        self.close()

    def inherit(self, left: deque[_PendingCommand]) -> None:
        self._waiting.extendleft(reversed(left))
        self.flush()

    # ── the connection ───────────────────────────────────────────────────────────────────

    async def _open(self) -> None:
        wire: _Wire | None = None
        try:
            async with asyncio.timeout(self.target.connect_seconds or CONNECT_SECONDS):
                wire = await self._connected()
                try:
                    await self._greet(wire)
                except BaseException:  # refused, or not answered: nobody else would close it
                    wire.abort()
                    raise
                if wire.is_lost:  # by a server that was about to die
                    raise ConnectionResetError("the connection broke at once")
        except WrongUrl as problem:
            raise RedisError(f"the Redis URL: {problem}") from None
        except (OSError, TimeoutError, RedisError) as error:
            met = error if wire is None or wire.error is None else wire.error
            if isinstance(met, ssl.SSLError) and (refused := untrusted(met, self.where)):
                raise refused from None
            if isinstance(error, RedisError) and wire is not None and not wire.is_lost:
                raise
            what: object = error or "no answer in time"
            if self.target.tls is not None and wire is not None and wire.is_lost:
                what = CLOSED_AT_ONCE
            raise RedisUnreachable(f"Redis cannot be reached: {what}") from None
        self._wire = wire
        if self._waiting and not self._flushing:
            self.flush()

    async def _connected(self) -> _Wire:
        target = self.target
        make = lambda: _Wire(self._lost)  # noqa: E731
        if target.path:
            _, wire = await self._loop.create_unix_connection(make, target.path)
            return wire
        if target.service:
            self._leader = await self._loop.run_in_executor(None, sentinel.leader, target)
        host, port = self._node or self._leader or target.addresses[0]
        context = None if target.tls is None else target.tls.context()
        transport, wire = await self._loop.create_connection(
            *(make, host, port),
            ssl=context,
            ssl_shutdown_timeout=None if context is None else FAREWELL_SECONDS,
        )
        if target.keepalive:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return wire

    async def _greet(self, wire: _Wire) -> None:
        for greeting in self.target.greetings():
            reply = await self._said(wire, greeting)
            if isinstance(reply, hiredis.ReplyError):
                raise RedisError(f"Redis refused {greeting[0]!s}: {reply}")
        if self.target.service:
            if not sentinel.leads(await self._said(wire, sentinel.ROLE)):
                raise RedisUnreachable(f"Redis at {self.where} does not lead yet, or no longer")
        elif self.target.tls is not None:
            # A server that misses a certificate of ours says so after the handshake (TLS 1.3).
            await self._said(wire, ("PING",))

    async def _said(self, wire: _Wire, command: tuple[Argument, ...]) -> Any:
        asked = _PendingCommand(_packed(command), 1, self._loop.create_future())
        wire.asked.append(asked)
        if wire.is_lost:
            self._fail([asked], RedisError("the connection to Redis broke"))
        elif wire.transport is not None:
            wire.transport.write(asked.packed)
        (reply,) = await asked.answer
        return reply

    def _lost(self, wire: _Wire) -> None:
        """Open it again, and ask again what was not answered."""
        if self._closed or wire is not self._wire:
            self._fail(wire.asked, _gone("the connection to Redis broke"))
            return
        self._wire = None
        self.breaks += 1
        if self._on_break is not None:
            self._on_break()
        for asked in wire.asked:
            asked.replies.clear()
        self._waiting.extendleft(reversed(wire.asked))
        self._opening = self._loop.create_task(self._reopen())

    def _begin_to_watch(self) -> None:
        self._watch = self._loop.call_later(self._silence, self._look)
        if self.target.health_seconds is not None:
            self._health = self._loop.call_later(self.target.health_seconds, self._check_health)

    @property
    def _silence(self) -> float:
        return self.target.silence_seconds or SILENCE_SECONDS

    def _check_health(self) -> None:
        """With something asked, a connection that nobody answers any more is noticed by `_look`."""
        if self._wire is not None and not self._wire.asked:
            self.soon([("PING",)])
        self._health = self._loop.call_later(self.target.health_seconds or 0.0, self._check_health)

    def _look(self) -> None:
        """A connection that is open and silent, with somebody waiting, is as good as lost."""
        wire = self._wire
        if wire is not None and wire.asked:
            if not wire.heard:
                self._break()
            wire.heard = False
        elif wire is not None:
            wire.heard = True
        self._watch = self._loop.call_later(self._silence, self._look)

    def _break(self) -> None:
        if self._cluster is not None:
            self._cluster.learn()
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
                self._fail(self._waiting, _gone("Redis did not come back"))
                self._waiting.clear()
                give_up = self._loop.time() + self._patience
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY_SECONDS)

    @staticmethod
    def _fail(asked: Any, error: Exception) -> None:
        for one in asked:
            if not one.answer.done():
                one.answer.set_exception(error)


SCANNED = 1000


async def scanned(
    pipe: PipelinedRedis, pattern: str, *, kind: str | None = None
) -> AsyncIterator[list[str]]:
    """Some at a time, so that nobody has to wait for all of them; one may come twice. Of one
    `kind`, if that is given: `stream`, say."""
    cursor: Any = b"0"
    of_kind = () if kind is None else ("TYPE", kind)
    while True:
        asking = ("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED, *of_kind)
        cursor, keys = await pipe.call(*asking)
        yield [pipe.name_of(key) for key in keys]
        if cursor == b"0":
            return


async def every_key(pipe: PipelinedRedis, pattern: str, *, kind: str | None = None) -> list[str]:
    """All of them at once, each once."""
    return sorted({key async for keys in scanned(pipe, pattern, kind=kind) for key in keys})
