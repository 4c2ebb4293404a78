"""Tasks and results on Redis Streams: one stream of tasks per handler, one of results.

A message is read by one consumer of its group, and removed once the run's own state has what it
asked for. Losing one costs time: any queued node can be published again from state, and any result
whose start is not current is refused. A message that cannot be read becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import hiredis

from dovetail.core.effects import new_tuple
from dovetail.core.redaction import Redactor
from dovetail.core.transitions import Stop
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import (
    RETRY_SECONDS,
    Command,
    PipelinedRedis,
    RedisError,
    every_key,
    is_replaced,
    is_temporary,
    load_script,
)
from dovetail.transports.messages import (
    MIN_MESSAGES,
    MISREAD,
    RESULTS,
    TASKS,
    dead_letter_commands,
    packed_task_messages,
    read_results,
    read_tasks,
    stream_of,
    task_messages,
)

STOPS = "wf:stream:stops"
ENDS = "wf:stream:ends"
WORKERS, ORCHESTRATORS = "workers", "orchestrators"
MARK = "dovetail-mark"
"""A consumer that reads nothing: a group without it is of a stream that was lost, and made anew."""
MAX_STOPS = 10_000
MAX_ENDS, ENDS_PER_MESSAGE = 250, 16
"""Messages in the stream, and run ids in each. Few: they stay in memory, and a listener that misses
one reads the run a second later."""
FEW_AT_ONCE, MAX_SETTLED = 4, 1000
"""So many messages are acknowledged by plain commands, and so many by one call of a script."""
BLOCK_MILLISECONDS = 1000
COMPANY_SECONDS = 0.001
"""How long results wait for other commands, to travel together."""
LEARN_SECONDS = 5.0
"""How old the list of quick handlers may be."""


class StreamMessage(NamedTuple):
    """A message that was read and is not acknowledged yet, or one of its tasks or results."""

    stream: str
    id: str
    content: Any
    """A `Task`, a `Complete` or a `Fail`."""
    unacknowledged: list[int] | None = None
    """How many tasks of its message are not acknowledged, shared by all of them. None for a message
    with one task, and for results, which are acknowledged together."""

    def is_last(self) -> bool:
        """Acknowledge this one; returns whether it was the last of its message."""
        if self.unacknowledged is None:
            return True
        self.unacknowledged[0] -= 1
        return self.unacknowledged[0] <= 0


Entry = tuple[str, Any]
"""The name of a stream, and a message of it as it was read."""
Quick = Callable[[], Awaitable[frozenset[str]]]
"""Returns the handlers that workers report as quick."""


def _time(message_id: bytes) -> float:
    """When a message was sent, by the clock of Redis."""
    return int(message_id.partition(b"-")[0]) / 1000


async def _oldest_unread(pipe: PipelinedRedis, stream: str, group: str) -> float | None:
    """When the oldest message that this group has not read was sent."""
    (groups,) = await pipe.send([("XINFO", "GROUPS", stream)])
    if isinstance(groups, hiredis.ReplyError):
        return None
    after = b"0-0"
    for flat in groups:
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        if facts[b"name"] == group.encode():
            after = facts[b"last-delivered-id"]
    found = await pipe.call("XRANGE", stream, b"(" + after, "+", "COUNT", 1)
    return _time(found[0][0]) if found else None


class StreamSender:
    """Sends tasks and orders to stop, for orchestrators, and says what waits in the streams."""

    sends_ahead = True
    """Whether a task that is sent right behind a script is read only after that script."""

    def __init__(self, pipe: PipelinedRedis, quick: Quick | None = None) -> None:
        """`quick` lists the handlers that take but a moment. Several of their tasks may travel in
        one message: the worker that gets them has soon done all of them."""
        self._pipe = pipe
        self._sent_to: set[str] = set()
        self._marked: set[str] = set()
        self._ask_for_quick = quick
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")
        self._quick: frozenset[str] = frozenset()

    async def send(self, tasks: Sequence[Task]) -> None:
        await self.sending(tasks)

    def sending(self, tasks: Sequence[Task]) -> Awaitable[object]:
        """Enqueue these tasks; the awaitable ends when Redis has them.

        The tasks of a handler go as one transaction: the first of them would wake a waiting worker,
        which would begin with that task alone.
        """
        by_handler: dict[str, list[Task]] = {}
        for task in tasks:
            by_handler.setdefault(task.handler, []).append(task)
        self._sent_to.update(by_handler)
        messages = [self._messages(handler, own) for handler, own in by_handler.items()]
        if len(messages) == 1:
            return self._pipe.transaction(messages[0])
        return asyncio.gather(*map(self._pipe.transaction, messages))

    def _messages(self, handler: str, tasks: Sequence[Task]) -> list[Command]:
        if len(tasks) < MIN_MESSAGES:
            return task_messages(tasks)
        self._learn_quick()
        return packed_task_messages(tasks) if handler in self._quick else task_messages(tasks)

    def _learn_quick(self) -> None:
        """Ask which handlers are quick, for the next call: this one does not wait for the reply."""
        now = time.monotonic()
        if self._ask_for_quick is not None and now - self._asked_at > LEARN_SECONDS:
            self._asked_at = now
            self._asking = asyncio.ensure_future(self.learn_quick(self._ask_for_quick))

    async def learn_quick(self, quick: Quick) -> None:
        with contextlib.suppress(RedisError):  # while Redis is away, all that is known stays true
            self._quick = await quick()

    async def stop(self, order: Stop) -> None:
        fields = ("run_id", order.run_id, "node_id", order.node, "token", str(order.token))
        await self._pipe.call("XADD", STOPS, "MAXLEN", "~", MAX_STOPS, "*", *fields)

    async def announce(self, run_ids: Iterable[str]) -> None:
        """Announce the end of these runs to callers that wait for it."""
        ended = list(run_ids)
        messages = [
            " ".join(ended[at : at + ENDS_PER_MESSAGE])
            for at in range(0, len(ended), ENDS_PER_MESSAGE)
        ]
        await self._pipe.call_many(
            [("XADD", ENDS, "MAXLEN", "~", MAX_ENDS, "*", "run_ids", some) for some in messages]
        )

    async def oldest_result(self) -> float | None:
        """When the oldest result that is not acknowledged was sent."""
        (held,) = await self._pipe.send([("XPENDING", RESULTS, ORCHESTRATORS)])
        waits = await _oldest_unread(self._pipe, RESULTS, ORCHESTRATORS)
        if isinstance(held, hiredis.ReplyError) or not held[0]:
            return waits
        oldest = _time(held[1])
        return oldest if waits is None else min(oldest, waits)

    async def waiting(self) -> int:
        """How many messages lie in the one queue that all handlers share; here they have none."""
        return 0

    async def oldest_waiting(self, handler: str) -> float | None:
        """When the oldest task that no worker has read yet was sent."""
        return await _oldest_unread(self._pipe, stream_of(handler), WORKERS)

    async def lost(self) -> list[str]:
        """Handlers whose tasks were lost with their stream since this was last asked."""
        handlers = sorted(self._sent_to)
        marks: list[Command] = [
            ("XGROUP", "CREATECONSUMER", stream_of(handler), WORKERS, MARK) for handler in handlers
        ]
        lost = []
        for handler, new in zip(
            handlers, await self._pipe.send(marks) if marks else (), strict=True
        ):
            if is_temporary(new):
                continue
            if new != 0 and handler in self._marked:
                lost.append(handler)
            if isinstance(new, hiredis.ReplyError):  # no stream, or no reader yet
                self._marked.discard(handler)
            else:
                self._marked.add(handler)
        return lost


_script = partial(load_script, __package__)


def _reads_later(reply: Any) -> bool:
    """Whether Redis only asks to come back later: the reply does not say what the stream has."""
    return is_temporary(reply) or (
        isinstance(reply, hiredis.ReplyError) and str(reply).startswith("UNBLOCKED")
    )


class StreamReader:
    """One consumer of a group, on a connection of its own: its reads block."""

    def __init__(
        self,
        blocking: PipelinedRedis,
        pipe: PipelinedRedis,
        group: str,
        consumer: str,
        redactor: Redactor | None = None,
    ) -> None:
        """`redactor` removes from dead letters what must not be stored."""
        self._redact = (redactor or Redactor({})).redact_shown
        self._blocking = blocking
        self._pipe = pipe
        self._group = group
        self.consumer = consumer
        self._known: set[str] = set()
        self._breaks = blocking.breaks
        self.is_reading = False

    async def read(self, streams: Sequence[str], limit: int) -> list[StreamMessage]:
        """New messages of these streams, at most so many of each; waits a second for some."""
        return await self.understood(await self.received(streams, limit))

    async def received(
        self, streams: Sequence[str], limit: int, *, wait: bool = True
    ) -> list[Entry]:
        """The same, not decoded; without `wait`, only messages that are there already."""
        for stream in streams:
            if stream not in self._known:
                await self._open(stream)
        command = ("XREADGROUP", "GROUP", self._group, self.consumer, "COUNT", limit)
        if (breaks := self._blocking.breaks) != self._breaks:
            # Messages whose reply was lost belong to this consumer all the same.
            (reply,) = await self._pipe.send(
                [(*command, "STREAMS", *streams, *["0"] * len(streams))]
            )
            found = await self._entries(reply)
            if found or _reads_later(reply):
                return found  # there may be more: of several breaks, or of a longer read
            self._breaks = breaks
        block: Command = ("BLOCK", BLOCK_MILLISECONDS) if wait else ()
        reading: Command = (*command, *block, "STREAMS", *streams, *[">"] * len(streams))
        self.is_reading = True
        try:
            asked = self._blocking.send([reading])
            self._blocking.flush()
            (reply,) = await asked
        finally:
            self.is_reading = False
        return await self._entries(reply)

    async def _entries(self, reply: Any) -> list[Entry]:
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith("NOGROUP"):  # the stream was deleted, its group with it
                self._known.clear()
                return []
            if _reads_later(reply):
                if is_replaced(reply):
                    self._blocking.reconnect()
                await asyncio.sleep(RETRY_SECONDS)
                return []
            raise RedisError(f"XREADGROUP: {reply}")
        name_of = self._pipe.key_name
        return [(name_of(stream), entry) for stream, entries in reply or () for entry in entries]

    def send(
        self,
        commands: Sequence[Command],
        *,
        now: bool,
        ahead: Callable[[PipelinedRedis], None] | None = None,
    ) -> asyncio.Future[list[Any]] | None:
        """Send commands on the connection of the reads: `now`, or with the next read. None while a
        read blocks the connection. `ahead` may send others, which go before these."""
        if self.is_reading:
            return None
        if ahead is not None:
            ahead(self._blocking)
        asked = self._blocking.send(commands, delay=COMPANY_SECONDS)
        if now:
            self._blocking.flush()
        return asked

    async def claim_stale(
        self, streams: Sequence[str], idle_seconds: float, limit: int
    ) -> list[StreamMessage]:
        """Messages that another consumer read so long ago and did not acknowledge, at most `limit`
        of each stream. Messages that were acknowledged and not removed are removed."""
        idle = int(idle_seconds * 1000)
        await self._pipe.call_many(
            [self._pipe.script_command(_script("trim"), [stream], []) for stream in streams]
        )
        replies = await self._pipe.send(
            [
                ("XAUTOCLAIM", stream, self._group, self.consumer, idle, "0-0", "COUNT", limit)
                for stream in streams
            ]
        )
        return await self.understood(
            (stream, entry)
            for stream, reply in zip(streams, replies, strict=True)
            # No such stream or group: nothing was read.
            if not isinstance(reply, hiredis.ReplyError)
            for entry in reply[1]
        )

    async def claim_from(
        self, stream: str, consumer: str, limit: int, *, idle_seconds: float = 0.0
    ) -> list[StreamMessage]:
        """Take over messages that this consumer has read and not acknowledged for so long. The
        consumer is gone, or it is this one and failed to apply them."""
        idle = ("IDLE", int(idle_seconds * 1000))
        pending: Command = ("XPENDING", stream, self._group, *idle, "-", "+", limit, consumer)
        (held,) = await self._pipe.send([pending])
        if isinstance(held, hiredis.ReplyError) or not held:
            return []
        numbers = [entry[0] for entry in held]
        claimed = await self._pipe.call("XCLAIM", stream, self._group, self.consumer, 0, *numbers)
        return await self.understood([(stream, entry) for entry in claimed])

    async def has_unread(self, stream: str) -> bool:
        """Whether the stream has messages that no consumer has read."""
        return await _oldest_unread(self._pipe, stream, self._group) is not None

    async def remove_consumer(self, stream: str, consumer: str) -> None:
        """Remove a consumer that is gone, unless it still holds messages."""
        with contextlib.suppress(RedisError):  # there is no such stream, or group
            await self._pipe.call_script(_script("dismiss"), [stream], [self._group, consumer])

    async def acknowledge(self, messages: Iterable[StreamMessage]) -> None:
        """These are done: they are not read again."""
        await self._pipe.call_many(self._settling(messages))

    def acknowledge_soon(self, messages: Iterable[StreamMessage]) -> None:
        """Acknowledge these behind the next commands: a reply of its own would wake us for
        nothing."""
        self._pipe.enqueue(self._settling(messages), last=True)

    def _settling(self, messages: Iterable[StreamMessage]) -> list[Command]:
        by_stream: dict[str, dict[str, None]] = {}
        for message in messages:
            if message.is_last():
                by_stream.setdefault(message.stream, {})[message.id] = None
        commands: list[Command] = []
        for stream, ids in ((stream, list(known)) for stream, known in by_stream.items()):
            if len(ids) <= FEW_AT_ONCE:
                commands += [("XACK", stream, self._group, *ids), ("XDEL", stream, *ids)]
                continue
            for at in range(0, len(ids), MAX_SETTLED):
                args = [self._group, *ids[at : at + MAX_SETTLED]]
                commands.append(self._pipe.script_command(_script("settle"), [stream], args))
        return commands

    async def _open(self, stream: str) -> None:
        command = ("XGROUP", "CREATE", stream, self._group, "0", "MKSTREAM")
        (reply,) = await self._pipe.send([command])
        if isinstance(reply, hiredis.ReplyError) and not str(reply).startswith("BUSYGROUP"):
            raise RedisError(f"XGROUP CREATE {stream}: {reply}")
        self._known.add(stream)

    async def understood(self, entries: Iterable[Entry]) -> list[StreamMessage]:
        """Decode messages; one that cannot be read becomes a dead letter."""
        found = []
        for stream, entry in entries:
            if entry is None or entry[1] is None:
                continue  # deleted while a consumer held it
            number, fields = entry[0].decode(), entry[1]
            unacknowledged = None
            try:
                if stream == RESULTS:
                    contents: Sequence[Any] = read_results(fields)
                else:
                    contents = read_tasks(fields)
                    unacknowledged = [len(contents)] if len(contents) > 1 else None
            except MISREAD as problem:
                await self._bury(stream, number, fields, problem)
            else:
                found += [
                    new_tuple(StreamMessage, (stream, number, content, unacknowledged))
                    for content in contents
                ]
        return found

    async def bury(self, message: StreamMessage, problem: Exception) -> None:
        """Add a dead letter for a message that cannot be applied. Its reader acknowledges it, with
        the rest of its message."""
        stream, number = message.stream, message.id
        for _, fields in await self._pipe.call("XRANGE", stream, number, number):
            await self._write_letter(stream, number, fields, problem)

    async def _bury(self, stream: str, number: str, fields: Any, problem: Exception) -> None:
        await self._write_letter(stream, number, fields, problem)
        await self.acknowledge([StreamMessage(stream, number, None)])

    async def _write_letter(
        self, stream: str, number: str, fields: Any, problem: Exception
    ) -> None:
        texts = [field.decode(errors="replace") for field in fields]
        named = dict(zip(texts[::2], texts[1::2], strict=False))
        reason = str(problem) or type(problem).__name__
        await self._pipe.call_many(
            dead_letter_commands(stream, number, reason, named, self._redact)
        )


# ── garbage collection ────────────────────────────────────────────────────────────────────────


MAX_DISMISSED = 500
"""Consumers of one stream per look."""
MAX_LOOKED_AT, READ_TOGETHER = 1000, 50
"""Messages of one stream per look, and per read: each may be as large as a config."""

Workers = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
Over = Callable[[Iterable[str]], Awaitable[Collection[str]]]


class StreamGarbage:
    """Removes dead consumers and dead messages from the streams.

    A worker that was killed stays a consumer of every stream that it read, and each one makes Redis
    slower. Where no worker serves a handler, nothing refuses the messages of runs that have ended.
    A consumer that is removed by mistake is one again with its next read, and a message that is
    removed by mistake is sent again: any number of processes may do this at once.
    """

    def __init__(
        self, pipe: PipelinedRedis, workers: Workers, over: Over, *, idle_seconds: float
    ) -> None:
        """`workers` lists the workers, in the fields of the API; `over` says which of these runs
        have ended, or are gone. A consumer that was idle for less is left alone."""
        self._pipe = pipe
        self._workers = workers
        self._over = over
        self._idle_milliseconds = idle_seconds * 1000
        self._looked_up_to: dict[str, bytes] = {}
        """Of streams that are longer than one look."""

    async def clear(self) -> None:
        alive = [worker for worker in await self._workers() if worker["alive"]]
        names = {worker["worker_id"] for worker in alive}
        served = {TASKS + handler for worker in alive for handler in worker["handlers"]}
        for stream in await every_key(self._pipe, f"{TASKS}*", kind="stream"):
            await self._dismiss_idle(stream, names)
            if stream not in served:  # else a worker comes to them, and they are refused
                await self._drop_of_ended(stream)

    # ── consumers ────────────────────────────────────────────────────────────────────────

    async def _dismiss_idle(self, stream: str, alive: Collection[str]) -> None:
        """By name as well: Redis 7.0 takes one for idle that reads all the time and finds nothing.

        What they hold is looked at again with the dismissal, as one."""
        (reply,) = await self._pipe.send([("XINFO", "CONSUMERS", stream, WORKERS)])
        if isinstance(reply, hiredis.ReplyError):
            return  # it has no reader yet, or it is gone
        consumers = [dict(zip(one[::2], one[1::2], strict=True)) for one in reply]
        idle = [
            name
            for one in consumers
            if not one[b"pending"] and one[b"idle"] >= self._idle_milliseconds
            if (name := one[b"name"].decode()) != MARK and name not in alive
        ]
        await self._pipe.call_many(
            [
                self._pipe.script_command(
                    load_script(__package__, "dismiss"), [stream], [WORKERS, name]
                )
                for name in idle[:MAX_DISMISSED]
            ]
        )

    # ── messages ─────────────────────────────────────────────────────────────────────────

    async def _drop_of_ended(self, stream: str) -> None:
        """From where we were last time, and from the beginning once there is nothing behind it."""
        after = self._looked_up_to.pop(stream, b"0-0")
        for _ in range(MAX_LOOKED_AT // READ_TOGETHER):
            reading = ("XRANGE", stream, b"(" + after, "+", "COUNT", READ_TOGETHER)
            entries = await self._pipe.call(*reading)
            await self._drop(stream, {number: _runs_of(fields) for number, fields in entries})
            if len(entries) < READ_TOGETHER:
                return
            after = entries[-1][0]
        self._looked_up_to[stream] = after

    async def _drop(self, stream: str, messages: Mapping[bytes, Collection[str]]) -> None:
        over = set(await self._over({run for runs in messages.values() for run in runs}))
        useless = [number for number, runs in messages.items() if runs and over.issuperset(runs)]
        if useless:
            # Acknowledged first: a message that is deleted while pending stays pending for ever.
            await self._pipe.call_many(
                [("XACK", stream, WORKERS, *useless), ("XDEL", stream, *useless)]
            )


def _runs_of(fields: Any) -> set[str]:
    """The runs of the tasks in a message; none of a malformed message, which its reader rejects."""
    try:
        return {task.run_id for task in read_tasks(fields)}
    except MISREAD:
        return set()
