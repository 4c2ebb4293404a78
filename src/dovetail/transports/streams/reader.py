"""Reads streams: the inbox of a worker, the results that an orchestrator applies, and broadcasts.

A fast worker reads ahead, and a message may hold several tasks. A worker sends tasks back that it
has read and cannot begin soon, if other workers are idle.

An orchestrator acknowledges a result once it is applied. Each orchestrator holds a lease of a few
seconds; when it lapses, another one reclaims the results that it had read. Results that two
orchestrators apply are refused the second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import hiredis

from dovetail.core.errors import StoreError
from dovetail.core.events import Token
from dovetail.core.node_logs import LogChunk
from dovetail.core.transitions import Stop
from dovetail.engine.ports import Result, Task
from dovetail.engine.supervisor import BackgroundTask, bisect_failures, describe_error
from dovetail.redis_client.pipelined import (
    Command,
    PipelinedRedis,
    RedisError,
    in_transaction,
    load_script,
)
from dovetail.transports.messages import (
    MIN_RESULTS_PACKED,
    RESULTS,
    result_messages,
    stream_of,
    task_messages,
)
from dovetail.transports.streams.sender import (
    BLOCK_MILLISECONDS,
    COMPANY_SECONDS,
    ENDS,
    FEW_AT_ONCE,
    STOPS,
    Entry,
    StreamMessage,
    StreamReader,
)

RESEND_SECONDS = 0.5
"""Between two tries to send results that Redis did not take."""
LOOK_SECONDS = 1.0
"""How often a worker looks for tasks that another worker has read and not begun."""
QUICK_SECONDS, QUICK_FOR_SECONDS = 0.05, 60.0
"""How fast a worker must do its tasks to count as quick, and for how long its handler then does."""
MAX_READ_AHEAD = 8
"""How many times the tasks that a quick worker asks for one read may bring."""
SHARE_SECONDS, LONG_SECONDS = 0.1, 1.0
"""A worker sends kept tasks back once it has begun none for the first time, or if it would need the
second to begin all of them."""
REPEAT_SECONDS, MAX_SENT_BYTES = 3.0, 16 << 20
"""What is sent again after a restart of Redis: the results of so many seconds, so many bytes at
most. Redis may reply up to two seconds before its log has a write."""
LOG_SECONDS = 0.05
"""How long lines of handlers wait for the result of their node, to travel with it."""

Received = tuple[StreamMessage, Task]
WriteLogs = Callable[[PipelinedRedis, Sequence[LogChunk], bool], None]
"""Sends these lines over a connection, without waiting; True if no result travels with them."""


def _no_logs(pipe: PipelinedRedis, chunks: Sequence[LogChunk], alone: bool) -> None:
    """Where there are no logs."""


class StreamInbox:
    def __init__(
        self,
        reader: StreamReader | Sequence[StreamReader],
        pipe: PipelinedRedis,
        handlers: Sequence[str],
        *,
        stale_seconds: float | None = None,
        logs: WriteLogs | None = None,
    ) -> None:
        """One reader for all handlers or, where a read covers one stream only, one for each.

        Tasks that another worker has read and not begun for `stale_seconds` are taken from it.
        `logs` writes lines of handlers.
        """
        streams = [stream_of(handler) for handler in handlers]
        if isinstance(reader, StreamReader):
            self._readers: list[tuple[StreamReader, list[str]]] = [(reader, streams)]
        else:
            self._readers = [(one, [s]) for one, s in zip(reader, streams, strict=True)]
        self._pipe = pipe
        self._reads: dict[int, asyncio.Task[list[Entry]]] = {}
        self._kept: list[StreamMessage] = []
        """Tasks that were read, decoded and not asked for yet: a read may bring more than was
        wanted."""
        self._unopened: deque[Entry] = deque()
        """Messages that were read after these, and are not decoded yet."""
        self._asked_for = 0
        self._busy_streams = 1
        """How many streams had messages at the last read."""
        self._tasks_per_message = 1.0
        """In the messages that were decoded last."""
        self._read_ahead = 1
        """How many times the tasks that are asked for a read may bring."""
        self._given, self._given_at, self._full = 0, 0.0, False
        """How many tasks `tasks` returned last, when, and whether these were as many as asked
        for."""
        self._is_more = False
        """A stream gave as many messages as the last read allowed, so there may be more."""
        self._handler: str | None = None
        """The handler of all tasks that `tasks` returned last; None if they have several."""
        self._pace = 0.0
        """Seconds for each task, of those before."""
        self._quick: dict[str, float] = {}
        """Handlers that did many tasks in a moment, and when."""
        self._sent: deque[tuple[asyncio.Future[list[Any]], list[Command]]] = deque()
        """Results that were sent, with the futures of their replies. `send` may be called again
        before a reply is there."""
        self._last_sent: deque[tuple[float, int, list[Command]]] = deque()
        """Results that were sent lately: when, their size, and their messages."""
        self._last_sent_bytes = 0
        self._write = logs or _no_logs
        self._logs: list[LogChunk] = []
        """Lines of handlers that wait for the result of their node."""
        self._log_timer: asyncio.TimerHandle | None = None
        self._stale_seconds = stale_seconds
        self._look_at = time.monotonic() + LOOK_SECONDS

    async def tasks(self, limit: int) -> list[Received]:
        now = time.monotonic()
        # A worker that comes back at once for as many tasks may keep more. The tasks that a slower
        # worker keeps would wait for it.
        if self._full:
            quick = now - self._given_at < QUICK_SECONDS
            self._read_ahead = min(self._read_ahead * 2, MAX_READ_AHEAD) if quick else 1
        elif not self._is_more:
            self._read_ahead = 1
        if self._given:
            self._pace = (now - self._given_at) / self._given
        if not self._kept and not self._unopened:
            self._kept = await self._stale(limit)
            if not self._kept:
                self._unopened.extend(await self._read(limit * self._read_ahead))
            await self._arrived()
        elif self._is_more and self._keeps < limit and len(self._readers) == 1:
            # A turn with the few tasks that are left takes as long as one that fills all slots.
            lacking = limit * self._read_ahead - int(self._keeps)
            self._unopened.extend(await self._read(lacking, wait=False))
        self._asked_for = limit
        await self.open_more()
        taken, self._kept = self._kept[:limit], self._kept[limit:]
        self._full, self._given_at, self._given = len(taken) == limit, time.monotonic(), len(taken)
        handlers = {message.content.handler for message in taken}
        self._handler = handlers.pop() if len(handlers) == 1 else None
        return [(message, message.content) for message in taken]

    @property
    def has_more(self) -> bool:
        """Whether messages were read that are not decoded yet."""
        return bool(self._unopened)

    async def open_more(self) -> None:
        """Decode as many messages as the next call of `tasks` will ask for."""
        while self._unopened and (lacking := self._asked_for - len(self._kept)) > 0:
            some = min(len(self._unopened), max(1, int(lacking / self._tasks_per_message)))
            opened = await self._opened([self._unopened.popleft() for _ in range(some)])
            self._tasks_per_message = max(1.0, len(opened) / some)
            self._kept += opened

    async def _opened(self, entries: Sequence[Entry]) -> list[StreamMessage]:
        return await self._readers[0][0].understood(entries)

    @property
    def _keeps(self) -> float:
        """About how many tasks were read and not asked for yet."""
        return len(self._kept) + len(self._unopened) * self._tasks_per_message

    async def _read(self, wanted: int, *, wait: bool = True) -> list[Entry]:
        # COUNT is for each stream, and usually few streams have messages.
        share = max(1, int(wanted / self._busy_streams / self._tasks_per_message))
        if len(self._readers) == 1:
            reader, streams = self._readers[0]
            self._readers[0] = (
                reader,
                [*streams[1:], streams[0]],
            )  # so that no stream is always the last
            found = await reader.received(streams, share, wait=wait)
        else:
            found = await self._read_each(share)
        by_stream = Counter(stream for stream, _ in found)
        self._busy_streams = max(1, len(by_stream))
        self._is_more = max(by_stream.values(), default=0) >= share
        return found

    async def _read_each(self, share: int) -> list[Entry]:
        for at, (reader, streams) in enumerate(self._readers):
            if at not in self._reads:
                self._reads[at] = asyncio.create_task(reader.received(streams, share))
        done, _ = await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        self._reads = {at: read for at, read in self._reads.items() if read not in done}
        return [entry for read in done for entry in read.result()]

    async def _stale(self, limit: int) -> list[StreamMessage]:
        """Tasks that another worker has read and not begun for long. Looks only now and then."""
        if self._stale_seconds is None or time.monotonic() < self._look_at:
            return []
        found: list[StreamMessage] = []
        for reader, streams in self._readers:
            found += await reader.claim_stale(streams, self._stale_seconds, limit)
        if len(found) < limit:  # else there may be more: look again at once
            self._look_at = time.monotonic() + min(LOOK_SECONDS, self._stale_seconds / 2)
        return found

    async def acknowledge(self, messages: Sequence[StreamMessage]) -> None:
        """Acknowledge soon, without waiting. A worker that reads one of these again is refused."""
        self._readers[0][0].acknowledge_soon(messages)

    async def send(self, results: Sequence[Result]) -> None:
        """Send results without waiting for the reply. The next call makes sure that they
        arrived."""
        self._note_pace(results)
        commands = result_messages(results)
        await self._arrived()
        # One transaction: else the first message wakes an orchestrator, which applies it alone.
        asked = in_transaction(commands)
        # On the connection that is used next: that of the next read or, where tasks are kept, that
        # of their claims; behind the claims, because handlers wait for these.
        reply = None
        if len(self._readers) == 1 and not self._kept and not self._unopened:
            # Few are sent at once: making the next read takes a twentieth of a chain's time.
            now = len(results) <= FEW_AT_ONCE
            reply = self._readers[0][0].send(asked, now=now, ahead=self._write_logs)
        if reply is None:
            self._write_logs(self._pipe)
            reply = self._pipe.send(asked, delay=COMPANY_SECONDS, last=True)
        self._sent.append((reply, commands))
        self._remember(commands)

    def log(self, chunks: Sequence[LogChunk]) -> None:
        """Write lines of handlers with the next result, or a moment later."""
        self._logs += chunks
        if self._log_timer is None:
            loop = asyncio.get_running_loop()
            self._log_timer = loop.call_later(LOG_SECONDS, self._write_logs_alone)

    def _write_logs_alone(self) -> None:
        self._write_logs(self._pipe, alone=True)
        self._pipe.flush()  # a result may leave over the other connection in the next moment

    def _write_logs(self, pipe: PipelinedRedis, *, alone: bool = False) -> None:
        """Send the lines that wait. `alone` says that no result travels with them."""
        if self._log_timer is None:
            return
        self._log_timer.cancel()
        self._log_timer = None
        chunks, self._logs = self._logs, []
        self._write(pipe, chunks, alone)

    def _note_pace(self, results: Sequence[Result]) -> None:
        now, handler = time.monotonic(), self._handler
        if handler is None:
            return
        if now - self._given_at > QUICK_SECONDS:
            self._quick.pop(handler, None)
        elif len(results) >= MIN_RESULTS_PACKED:
            self._quick[handler] = now

    def quick(self) -> list[str]:
        """Handlers that did many tasks in a moment, not long ago."""
        since = time.monotonic() - QUICK_FOR_SECONDS
        known = list(self._quick.items())  # a copy: another thread calls this
        return sorted(handler for handler, at in known if at > since)

    def _remember(self, commands: list[Command]) -> None:
        now = time.monotonic()
        size = sum(len(one) if isinstance(one, bytes) else len(str(one)) for one in commands)
        self._last_sent.append((now, size, commands))
        self._last_sent_bytes += size
        while (
            self._last_sent[0][0] < now - REPEAT_SECONDS or self._last_sent_bytes > MAX_SENT_BYTES
        ):
            self._last_sent_bytes -= self._last_sent.popleft()[1]
            if not self._last_sent:
                return

    async def resend_after_restarts(self) -> None:
        """Send the last results again after each restart of Redis, for ever."""
        async for is_another in self._pipe.after_breaks():
            if is_another:
                await self.resend()

    async def resend(self) -> None:
        """Send the last results again: Redis may have lost the end of its log. A result that it
        still has is refused the second time."""
        await self._pipe.call_many(
            [command for _, _, commands in self._last_sent for command in commands]
        )

    async def _arrived(self) -> None:
        """Return when all results that were sent before have arrived."""
        while self._sent:
            reply, commands = self._sent.popleft()
            try:
                await self._deliver(reply, commands)
            except asyncio.CancelledError:  # the next call handles it
                self._sent.append((reply, commands))
                raise

    async def _deliver(self, reply: asyncio.Future[list[Any]], commands: list[Command]) -> None:
        again = commands
        with contextlib.suppress(RedisError):
            replies = [] if reply.cancelled() else await reply
            if len(replies) > len(commands):  # a transaction: the last reply has all
                replies = replies[-1]
            if replies and not isinstance(replies, hiredis.ReplyError):
                answers = zip(commands, replies, strict=True)
                again = [one for one, bad in answers if isinstance(bad, hiredis.ReplyError)]
        while again:
            try:
                await self._pipe.call_many(again)
                return
            except RedisError:
                await asyncio.sleep(RESEND_SECONDS)

    def put_back(self, found: Sequence[Received]) -> None:
        self._kept += [message for message, _ in found]

    async def share(self) -> None:
        """Send tasks back that would wait here while other workers are idle, for ever."""
        while True:
            await asyncio.sleep(SHARE_SECONDS)
            await self.share_once()

    async def share_once(self) -> None:
        kept = self._keeps
        stands_still = time.monotonic() - self._given_at >= SHARE_SECONDS
        if not kept or not (stands_still or kept * self._pace >= LONG_SECONDS):
            return
        stream = self._kept[0].stream if self._kept else self._unopened[0][0]
        # While the stream has messages, other workers are not idle.
        if not await self._readers[0][0].has_unread(stream):
            await self._give_away()

    async def _give_away(self) -> None:
        """Send tasks back that were read and not begun, each in a message of its own."""
        unopened, self._unopened = self._unopened, deque()
        left, self._kept = self._kept, []
        left += await self._opened(list(unopened))
        await self._pipe.call_many(task_messages(message.content for message in left))
        # After they were sent: a process that dies in between leaves them twice, and loses none.
        await self._readers[0][0].acknowledge(left)

    async def close(self) -> None:
        """Read no more, and send tasks back that were read and not begun."""
        self._write_logs(self._pipe)
        await self._arrived()
        for read in self._reads.values():
            read.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        await self._give_away()
        for reader, streams in self._readers:
            for stream in streams:
                await reader.remove_consumer(stream, reader.consumer)


ORCHESTRATORS_ALIVE = "wf:orchestrators"
LEASE_SECONDS = 3.0
BEAT_SECONDS = 0.5


class OrchestratorPeers:
    def __init__(self, pipe: PipelinedRedis, me: str) -> None:
        self._pipe = pipe
        self._me = me

    async def beat(self) -> list[str]:
        """Renew the own lease; return the names of orchestrators whose lease has lapsed."""
        lapsed = await self._pipe.call_script(
            load_script(__package__, "orchestrators_beat"),
            [ORCHESTRATORS_ALIVE],
            [self._me, repr(LEASE_SECONDS)],
        )
        return [name.decode() for name in lapsed]

    async def forget(self, name: str) -> None:
        """Remove an orchestrator that is gone: all that it had read is applied."""
        await self._pipe.call("ZREM", ORCHESTRATORS_ALIVE, name)

    async def leave(self) -> None:
        await self.forget(self._me)


MAX_MESSAGES = 128
"""Messages of results per read: each may hold dozens."""
FEW, MANY = 16, 128
"""Messages in a read. From the first on, an orchestrator waits a moment for more, if nothing
follows from these; from the second on, it reads the next while it applies these."""
GATHER_SECONDS = 0.002
SINGLES_SECONDS = 0.02
"""How long to wait for more results where Celery's processes send them one by one: one alone costs
as much as many together."""
CROWD, CROWD_SECONDS = 32, 0.1
"""While so many tasks wait, no worker waits for the next; and how often they are counted."""
UNDER_WAY_SECONDS = 1.0
"""A result that was read more recently may still be in work; an older one was not applied."""

log = logging.getLogger("dovetail.wiring.distributed")


class ApplyResults(Protocol):
    async def __call__(self, results: Sequence[Result], *, again: bool = False) -> bool:
        """Apply results; return whether anything followed but their own completion. `again`: they
        were read before, by a process that may have died over them."""
        ...


class ResultConsumer:
    def __init__(
        self,
        reader: StreamReader,
        apply_results: ApplyResults,
        waiting: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`waiting` counts the tasks that wait, where results come one by one (Celery)."""
        self._reader = reader
        self._apply_results = apply_results
        self._waiting = waiting
        self.unapplied = asyncio.Event()
        """Set if a duty of this orchestrator failed: results that it had read may not be
        applied."""

    async def take(self, stopping: asyncio.Event | None) -> None:
        """Apply new results until `stopping` is set, between two batches."""
        crowd, seen_at = 0, 0.0
        async with BackgroundTask() as beside:
            while stopping is None or not stopping.is_set():
                messages = await self._reader.read([RESULTS], MAX_MESSAGES)
                await beside.done()
                if len(messages) >= MANY:  # read the next while Redis is busy with these
                    beside.begin(self._take_many(messages))
                    continue
                followed = False
                if messages:
                    followed = await self._apply(messages)
                    self._reader.acknowledge_soon(messages)
                if len(messages) >= FEW and not followed:
                    await asyncio.sleep(GATHER_SECONDS)  # more will come: many cost less than few
                elif self._waiting is not None and messages:
                    if followed and time.monotonic() - seen_at > CROWD_SECONDS:
                        crowd, seen_at = await self._waiting(), time.monotonic()
                    if not followed or crowd >= CROWD:
                        await asyncio.sleep(SINGLES_SECONDS)
            await beside.done()

    async def _take_many(self, messages: Sequence[StreamMessage]) -> None:
        await self._apply(messages)
        self._reader.acknowledge_soon(messages)

    async def _apply(self, messages: Sequence[StreamMessage], *, again: bool = False) -> bool:
        """As `ApplyResults` says. A result that cannot be applied becomes a dead letter: an unread
        result would keep the orchestrators from reaping lost workers."""

        async def apply_results(some: Sequence[StreamMessage]) -> Sequence[bool]:
            nonlocal again
            had_before, again = again, True
            return [await self._apply_results([one.content for one in some], again=had_before)]

        return any(await bisect_failures(apply_results, messages, self._bury))

    async def _bury(self, message: StreamMessage, problem: Exception) -> Sequence[bool]:
        log.error(
            "a result of run %s is a dead letter: %s",
            message.content.run_id,
            describe_error(problem),
        )
        await self._reader.bury(message, problem)
        return ()

    # ── results that were read before ────────────────────────────────────────────────────

    async def reclaim_from_dead_peers(self, peers: OrchestratorPeers) -> None:
        """Apply, for ever, results that another orchestrator has read before its lease lapsed."""
        while True:
            for name in await peers.beat():
                while messages := await self._reader.claim_from(RESULTS, name, MAX_MESSAGES):
                    await self._take_again(messages)
                await self._reader.remove_consumer(RESULTS, name)
                await peers.forget(name)
            await asyncio.sleep(BEAT_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311

    async def reclaim_stale(self, idle: float, pause: float) -> None:
        """Apply, for ever, results that any consumer read `idle` seconds ago and did not
        acknowledge."""
        while True:
            while messages := await self._reader.claim_stale([RESULTS], idle, MAX_MESSAGES):
                await self._take_again(messages)
            await asyncio.sleep(pause)

    async def retry_unapplied(self) -> None:
        """Apply, for ever, results that this orchestrator has read and failed to apply. A result
        that it read a moment ago may still be in work and is left alone."""
        reader, idle = self._reader, UNDER_WAY_SECONDS
        while True:
            await self.unapplied.wait()
            self.unapplied.clear()  # first: a failure from now on is for the next round
            await asyncio.sleep(idle)
            while messages := await reader.claim_from(
                RESULTS, reader.consumer, MAX_MESSAGES, idle_seconds=idle
            ):
                await self._take_again(messages)

    async def _take_again(self, messages: Sequence[StreamMessage]) -> None:
        await self._apply(messages, again=True)
        await self._reader.acknowledge(messages)


# ── broadcasts ────────────────────────────────────────────────────────────────────────────────


worker_log = logging.getLogger("dovetail.worker")


class StopBroadcast:
    """The orders to stop: each worker reads all of them."""

    def __init__(self, blocking: PipelinedRedis) -> None:
        self._feed = Broadcast(blocking, STOPS)

    async def open(self) -> None:
        """Listen from now on; else from the first call of `next` on."""
        await self._feed.open()

    async def next(self) -> list[Stop]:
        """The orders since the last call; waits a second for some."""
        found: list[Stop] = []
        for given in await self._feed.next():
            try:
                token = Token.parse(given[b"token"].decode())
                order = Stop(given[b"run_id"].decode(), given[b"node_id"].decode(), token)
            except (LookupError, ValueError) as problem:
                worker_log.warning("no order to stop: %s", problem)
            else:
                found.append(order)
        return found


class Broadcast:
    """A stream that every listener reads, from the moment it begins to listen.

    A message is a hint: a caller that receives none for a while reads the run.
    """

    def __init__(self, blocking: PipelinedRedis, stream: str) -> None:
        self._blocking = blocking
        self._stream = stream
        self._after = ""

    async def open(self) -> None:
        """Listen from now on."""
        # Not "$", which would mean another moment at each call.
        newest = await self._blocking.call("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        self._after = newest[0][0].decode() if newest else "0-0"

    async def next(self) -> list[dict[bytes, bytes]]:
        """The messages since the last call; waits a second for one."""
        if not self._after:
            await self.open()
        command = ("XREAD", "BLOCK", BLOCK_MILLISECONDS, "STREAMS", self._stream, self._after)
        reply = await self._blocking.call(*command)
        found = []
        for _, entries in reply or ():
            for number, fields in entries:
                self._after = number.decode()
                found.append(dict(zip(fields[::2], fields[1::2], strict=True)))
        return found


LISTEN_SECONDS = 1.0


class RunFinishedListener:
    """The ends of runs, on one connection for all callers of a process that wait for one.

    Use `async with`; it listens once a caller waits.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RunFinishedListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def next(self, run_id: str) -> None:
        """Return when it is worth to look whether this run has ended: it has, or some time has
        passed."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, set()).add(finished)
        try:
            await asyncio.wait([finished], timeout=LISTEN_SECONDS)
        finally:
            waiting = self._waiting.get(run_id)
            if waiting is not None:
                waiting.discard(finished)
                if not waiting:
                    del self._waiting[run_id]

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(StoreError):
                async with PipelinedRedis(self._url) as pipe:
                    feed = Broadcast(pipe, ENDS)
                    await feed.open()
                    self._wake(list(self._waiting))  # it may have ended before we listened
                    while True:
                        for message in await feed.next():
                            self._wake(message[b"run_ids"].decode().split(" "))
            await asyncio.sleep(LISTEN_SECONDS)

    def _wake(self, run_ids: list[str]) -> None:
        for run_id in run_ids:
            for finished in self._waiting.pop(run_id, ()):
                if not finished.done():
                    finished.set_result(None)
