"""Reads streams: the inbox of a worker, the results that an orchestrator applies, and broadcasts.

A fast worker reads ahead, and a message may hold several tasks. A worker gives back tasks that it
has read and cannot begin, if other workers are idle.

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

AGAIN_SECONDS = 0.5
LOOK_SECONDS = 1.0
"""How often a worker looks for what another has read and not begun."""
QUICK_SECONDS, QUICK_FOR_SECONDS = 0.05, 60.0
"""A worker that needs no longer for its tasks is fast, and counts as fast for a while."""
FARTHEST_AHEAD = 8
SHARE_SECONDS, LONG_SECONDS = 0.1, 1.0
"""So long a worker may do nothing with what it keeps, and so long it may take to begin all of it,
before that is for others."""
REPEAT_SECONDS, MAX_SENT_BYTES = 3.0, 16 << 20
"""While its log is synced, Redis replies up to two seconds before the log has a write."""

LOG_SECONDS = 0.05
"""Lines of handlers wait so long for the result of their node."""

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

        What a worker has read and not begun for `stale_seconds` is taken from it. `logs` writes
        lines of handlers.
        """
        streams = [stream_of(handler) for handler in handlers]
        if isinstance(reader, StreamReader):
            self._readers: list[tuple[StreamReader, list[str]]] = [(reader, streams)]
        else:
            self._readers = [(one, [s]) for one, s in zip(reader, streams, strict=True)]
        self._pipe = pipe
        self._reads: dict[int, asyncio.Task[list[Entry]]] = {}
        self._kept: list[StreamMessage] = []
        """Read and not asked for yet: a read may bring more than was wanted."""
        self._unopened: deque[Entry] = deque()
        """The same, behind these, which are not decoded yet."""
        self._asked_for = 0
        self._busy = 1
        """Streams that brought something last time."""
        self._in_a_message = 1.0
        """Tasks, of the messages that were opened last."""
        self._full, self._given_at, self._ahead = False, 0.0, 1
        self._given = 0
        self._is_more = False
        """The last read brought of a stream as much as it could, so there may be more."""
        self._handler: str | None = None
        """Of all that was given last."""
        self._pace = 0.0
        """Seconds for each of what was given before that."""
        self._quick: dict[str, float] = {}
        """Handlers that took but a moment for many, and when."""
        self._sent: deque[tuple[asyncio.Future[list[Any]], list[Command]]] = deque()
        """What is on its way. Handlers that end by themselves report by themselves, several at
        once."""
        self._last_sent: deque[tuple[float, int, list[Command]]] = deque()
        """What was sent lately: when, its size, and the messages."""
        self._last_sent_bytes = 0
        self._write = logs or _no_logs
        self._logs: list[LogChunk] = []
        """Lines of handlers that wait for the result of their node."""
        self._log_timer: asyncio.TimerHandle | None = None
        self._stale_seconds = stale_seconds
        self._look_at = time.monotonic() + LOOK_SECONDS

    async def tasks(self, limit: int) -> list[Received]:
        now = time.monotonic()
        # A worker that comes back at once for as many tasks may keep more. Of a worker
        # that takes longer, others would have to wait for what it keeps.
        if self._full:
            quick = now - self._given_at < QUICK_SECONDS
            self._ahead = min(self._ahead * 2, FARTHEST_AHEAD) if quick else 1
        elif not self._is_more:
            self._ahead = 1
        if self._given:
            self._pace = (now - self._given_at) / self._given
        if not self._kept and not self._unopened:
            self._kept = await self._stale(limit)
            if not self._kept:
                self._unopened.extend(await self._read(limit * self._ahead))
            await self._arrived()
        elif self._is_more and self._keeps < limit and len(self._readers) == 1:
            # A turn for the little that is left takes as long as one for all slots.
            lacking = limit * self._ahead - int(self._keeps)
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
        """Of what was read, something is left."""
        return bool(self._unopened)

    async def open_more(self) -> None:
        """See what they say that will be asked for next."""
        while self._unopened and (lacking := self._asked_for - len(self._kept)) > 0:
            some = min(len(self._unopened), max(1, int(lacking / self._in_a_message)))
            opened = await self._opened([self._unopened.popleft() for _ in range(some)])
            self._in_a_message = max(1.0, len(opened) / some)
            self._kept += opened

    async def _opened(self, entries: Sequence[Entry]) -> list[StreamMessage]:
        return await self._readers[0][0].understood(entries)

    @property
    def _keeps(self) -> float:
        """About how many tasks."""
        return len(self._kept) + len(self._unopened) * self._in_a_message

    async def _read(self, wanted: int, *, wait: bool = True) -> list[Entry]:
        # COUNT is for each stream, and usually few of them have something.
        share = max(1, int(wanted / self._busy / self._in_a_message))
        if len(self._readers) == 1:
            reader, streams = self._readers[0]
            self._readers[0] = (reader, [*streams[1:], streams[0]])  # none is always served last
            found = await reader.received(streams, share, wait=wait)
        else:
            found = await self._read_each(share)
        by_stream = Counter(stream for stream, _ in found)
        self._busy = max(1, len(by_stream))
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
        """What a worker has read and then died over, looked for now and then."""
        if self._stale_seconds is None or time.monotonic() < self._look_at:
            return []
        found: list[StreamMessage] = []
        for reader, streams in self._readers:
            found += await reader.claim_stale(streams, self._stale_seconds, limit)
        if len(found) < limit:  # else there may be more, and none has to wait any longer
            self._look_at = time.monotonic() + min(LOOK_SECONDS, self._stale_seconds / 2)
        return found

    async def acknowledge(self, messages: Sequence[StreamMessage]) -> None:
        """Soon, without waiting: a worker that reads one of these again is refused."""
        self._readers[0][0].acknowledge_soon(messages)

    async def send(self, results: Sequence[Result]) -> None:
        """On their way when this returns; whatever comes next sees to it that they arrive."""
        self._note_pace(results)
        commands = result_messages(results)
        await self._arrived()
        # As one: an orchestrator that waits would be woken by the first, and take in that alone.
        asked = in_transaction(commands)
        # On the connection that is used next: with the next read, or the claims of what is kept,
        # and behind these, as handlers wait for them.
        reply = None
        if len(self._readers) == 1 and not self._kept and not self._unopened:
            # Few are awaited here: building the next read is a twentieth of a chain's time.
            now = len(results) <= FEW_AT_ONCE
            reply = self._readers[0][0].send(asked, now=now, ahead=self._write_logs)
        if reply is None:
            self._write_logs(self._pipe)
            reply = self._pipe.send(asked, delay=COMPANY_SECONDS, last=True)
        self._sent.append((reply, commands))
        self._remember(commands)

    def log(self, chunks: Sequence[LogChunk]) -> None:
        """They go out with the next result, or a moment later."""
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
        """Handlers that took but a moment for many tasks, when they were last called."""
        since = time.monotonic() - QUICK_FOR_SECONDS
        known = list(self._quick.items())  # at once: another thread asks
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

    async def mend(self) -> None:
        """Whenever Redis was restarted, for ever."""
        async for is_another in self._pipe.after_breaks():
            if is_another:
                await self.tell_again()

    async def tell_again(self) -> None:
        """It may lack the end of its log: what was sent last is sent again. Whatever it still has
        is refused the second time."""
        await self._pipe.call_many(
            [command for _, _, commands in self._last_sent for command in commands]
        )

    async def _arrived(self) -> None:
        """Everything that was sent before has arrived."""
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
            if len(replies) > len(commands):  # they went as one, and the last answer is of all
                replies = replies[-1]
            if replies and not isinstance(replies, hiredis.ReplyError):
                answers = zip(commands, replies, strict=True)
                again = [one for one, bad in answers if isinstance(bad, hiredis.ReplyError)]
        while again:
            try:
                await self._pipe.call_many(again)
                return
            except RedisError:
                await asyncio.sleep(AGAIN_SECONDS)

    def put_back(self, found: Sequence[Received]) -> None:
        self._kept += [message for message, _ in found]

    async def share(self) -> None:
        """Let others have what would have to wait here, for ever."""
        while True:
            await asyncio.sleep(SHARE_SECONDS)
            await self.share_once()

    async def share_once(self) -> None:
        kept = self._keeps
        stands_still = time.monotonic() - self._given_at >= SHARE_SECONDS
        if not kept or not (stands_still or kept * self._pace >= LONG_SECONDS):
            return
        stream = self._kept[0].stream if self._kept else self._unopened[0][0]
        # A worker that finds tasks there needs none of ours, and ours would wait behind them.
        if not await self._readers[0][0].has_unread(stream):
            await self._give_away()

    async def _give_away(self) -> None:
        """Send back tasks that were read and not begun, one by one, for idle workers."""
        unopened, self._unopened = self._unopened, deque()
        left, self._kept = self._kept, []
        left += await self._opened(list(unopened))
        await self._pipe.call_many(task_messages(message.content for message in left))
        # After they are sent again: a process that dies in between leaves them twice, not lost.
        await self._readers[0][0].acknowledge(left)

    async def close(self) -> None:
        """Read no more, and let others have at once what was read and never begun."""
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
        """Renew the own lease; returns whose has lapsed."""
        lapsed = await self._pipe.call_script(
            load_script(__package__, "orchestrators_beat"),
            [ORCHESTRATORS_ALIVE],
            [self._me, repr(LEASE_SECONDS)],
        )
        return [name.decode() for name in lapsed]

    async def forget(self, name: str) -> None:
        """It is gone, and nothing of it is left to do."""
        await self._pipe.call("ZREM", ORCHESTRATORS_ALIVE, name)

    async def leave(self) -> None:
        await self.forget(self._me)


MAX_MESSAGES = 128
"""Messages of results per read: each may hold dozens."""
FEW, MANY = 16, 128
GATHER_SECONDS = 0.002
SINGLES_SECONDS = 0.02
"""Celery's processes send results one by one, each as expensive as many together."""
CROWD, CROWD_SECONDS = 32, 0.1
"""While so many messages wait, no worker waits for what follows from a result."""
UNDER_WAY_SECONDS = 1.0
"""So long after it was read, a result that is not acknowledged may still be under way."""

log = logging.getLogger("dovetail.wiring.distributed")


class ApplyResults(Protocol):
    async def __call__(self, results: Sequence[Result], *, again: bool = False) -> bool:
        """Whether more followed from these than their own completion. `again`: another process had
        them before, and may have died over them."""
        ...


class ResultConsumer:
    def __init__(
        self,
        reader: StreamReader,
        apply_results: ApplyResults,
        waiting: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`waiting` says how many tasks wait, where results come as singles."""
        self._reader = reader
        self._apply_results = apply_results
        self._waiting = waiting
        self.unapplied = asyncio.Event()
        """Set it if one of these could not go on: what it had read may not be applied."""

    async def take(self, stopping: asyncio.Event | None) -> None:
        """Apply new results until `stopping` is set, between two batches."""
        crowd, seen_at = 0, 0.0
        async with BackgroundTask() as beside:
            while stopping is None or not stopping.is_set():
                messages = await self._reader.read([RESULTS], MAX_MESSAGES)
                await beside.done()
                if len(messages) >= MANY:  # while Redis is busy with these, the next are read
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
        """Results that an orchestrator has read whose lease then lapsed."""
        while True:
            for name in await peers.beat():
                while messages := await self._reader.claim_from(RESULTS, name, MAX_MESSAGES):
                    await self._take_again(messages)
                await self._reader.remove_consumer(RESULTS, name)
                await peers.forget(name)
            await asyncio.sleep(BEAT_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311

    async def reclaim_stale(self, idle: float, pause: float) -> None:
        """Apply results that an unknown consumer read so long ago and did not acknowledge."""
        while True:
            while messages := await self._reader.claim_stale([RESULTS], idle, MAX_MESSAGES):
                await self._take_again(messages)
            await asyncio.sleep(pause)

    async def retry_unapplied(self) -> None:
        """Apply results that this orchestrator has read and was not able to apply. A result that it
        read just now may be under way and is left alone."""
        reader, idle = self._reader, UNDER_WAY_SECONDS
        while True:
            await self.unapplied.wait()
            self.unapplied.clear()  # first: what cannot be applied from now on is for next time
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
    """Orders to stop, as every worker hears them."""

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
