"""The feed of all runs in Redis: one stream, written beside the runs' own logs.

The stream is in another slot than a run, so an event is added after the script that logged it.
A mark for each run says up to which event the feed has its run events: an event that is added twice
is there once, and events of a run come in their order, whichever processes add them. A process that
dies before it has added an event leaves its run in the timers, and the sweep has the run caught up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import Protocol

import orjson

from dovetail.core.definition.model import Webhook
from dovetail.core.errors import BrokenRun, StoreError
from dovetail.core.events import RUN_ENDS, Event
from dovetail.core.feed import (
    KEPT_SECONDS,
    MAX_KEPT_EVENTS,
    FeedEntry,
    FeedPosition,
    check_position,
)
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.webhooks import notifications
from dovetail.engine.clock import Clock
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis
from dovetail.stores.redis.codec import event_of, keys_of, source

FEED = "wf:feed:{all}"
OUTBOX, NOTIFICATIONS = f"{FEED}:outbox", f"{FEED}:notifications"
ANNOUNCED_WEBHOOKS = f"{FEED}:webhooks"
"""Those of the orchestrators' settings."""
LEARN_SECONDS = 30.0
"""A process without these settings reads them so often, when it ends runs."""
_KEYS = (FEED, f"{FEED}:marks", f"{FEED}:facts")
_ALL_KEYS = (*_KEYS, OUTBOX, NOTIFICATIONS)
BATCH_SIZE = 100
"""Runs whose events are added by one script."""
PAGE_SIZE = 500
"""Events that are read at once."""
TRIM_SIZE = 500
BIRTH_SECONDS = 60.0
"""A new feed begins so long before its first event. What a restored run did before is not news."""
GATHER_SECONDS = 0.02
"""Between two reads: many events cost hardly more than one."""
BLOCK_MILLISECONDS = 1000
LISTEN_SECONDS = 1.0
IDLE_SECONDS = 5.0
"""The connection of a process without readers is closed after so long."""
RUN_EVENT = b'"run.'
RUNNING = RunStatus.RUNNING.value.encode()


class Outlines(Protocol):
    """What never changes of runs."""

    def outline(self, run_id: str) -> RunState | None:
        """If it is known here."""
        ...

    async def find_outline(self, run_id: str) -> RunState | None:
        """None if the run is not there."""
        ...


class RedisFeed:
    def __init__(
        self,
        redis: PipelinedRedis,
        clock: Clock,
        runs: Outlines,
        news: Callable[[], Awaitable[None]] | None = None,
        webhooks: Sequence[Webhook] = (),
    ) -> None:
        """`news` returns when it is worth to look for events, for readers. `webhooks` of the
        settings are notified of all runs, beside those of their definitions."""
        self._redis = redis
        self._clock = clock
        self._runs = runs
        self._news = news or _a_moment
        self._own_webhooks = self._webhooks = webhooks
        self._learn_at = 0.0
        self.has_notifications = asyncio.Event()
        """Set when this process has added a notification."""

    # ── written ──────────────────────────────────────────────────────────────────────────

    async def announce_webhooks(self) -> None:
        """Let other processes know the webhooks of these settings: a shell that cancels a run may
        lack them."""
        self._learn_at = inf
        content = orjson.dumps([one.model_dump() for one in self._own_webhooks])
        await self._redis.call("SET", ANNOUNCED_WEBHOOKS, content)

    async def _learn_webhooks(self) -> None:
        if monotonic() < self._learn_at:
            return
        content = await self._redis.call("GET", ANNOUNCED_WEBHOOKS)
        with contextlib.suppress(ValueError):  # of another version
            announced = [Webhook.model_validate(one) for one in orjson.loads(content or b"[]")]
            self._webhooks = [*self._own_webhooks, *announced]
        self._learn_at = monotonic() + LEARN_SECONDS

    async def append(self, events: Mapping[str, Sequence[Event]]) -> None:
        if any(event.type in RUN_ENDS for news in events.values() for event in news):
            await self._learn_webhooks()
        entries = []
        unclear = []
        for run_id, news in events.items():
            run = self._runs.outline(run_id)
            if run is None or not (news[0].seq == 1 or _are_first(news)):
                unclear.append(run_id)
            else:
                # The process that made the run may not have added its first two events yet.
                entries.append(self._entry(run, 0, news, 0 if news[0].seq == 1 else 2))
        for _, *early in await self._add(entries):
            unclear += [run_id.decode() for run_id in early]
        if unclear:
            await self.catch_up(unclear)

    async def catch_up(self, run_ids: Sequence[str]) -> None:
        await self._learn_webhooks()
        marks = await self._redis.call("ZMSCORE", _KEYS[1], *run_ids)
        entries = []
        for run_id, mark in zip(run_ids, marks, strict=True):
            try:
                run = await self._runs.find_outline(run_id)
                if run is not None:
                    entries.append(await self._missing(run, 0 if mark is None else int(mark)))
            except BrokenRun:
                continue  # the feed cannot name the workflow of a run that cannot be read
        await self._add(entries)

    async def _missing(self, run: RunState, after: int) -> list[Argument]:
        """What the feed lacks of a run: its run events after that number."""
        meta, log = keys_of(run.id)[0], keys_of(run.id)[5]
        found: list[Event] = []
        while True:
            page: list[Command] = [
                ("HGET", meta, "status"),
                ("LRANGE", log, after, after + PAGE_SIZE - 1),
            ]
            status, texts = await self._redis.call_many(page)
            for seq, text in enumerate(texts, after + 1):
                if RUN_EVENT in text:
                    event = event_of(text, seq, run.graph)
                    if event.node is None:
                        found.append(event)
            after += len(texts)
            if len(texts) < PAGE_SIZE:
                # Read no further than the end of a run: its mark leaves the feed with its end.
                read = after if status == RUNNING else 0
                return self._entry(run, read, found)

    def _entry(
        self, run: RunState, read: int, events: Sequence[Event], follows: int = 0
    ) -> list[Argument]:
        """A run as `feed_append` takes it. Its events follow the one with that number."""
        entry: list[Argument] = [run.id, run.graph.name, read, follows, len(events)]
        webhooks = [*run.graph.webhooks, *self._webhooks]
        for event in events:
            entry += (event.seq, event.type, repr(event.time))
            entry.append(orjson.dumps([event.time, event.epoch, event.data]))
            if not webhooks:
                entry.append(0)
                continue
            found = notifications(run.id, run.graph.name, run.version, [event], webhooks)
            entry.append(len(found))
            for one in found:
                entry += (one.id, orjson.dumps(one._asdict()))
                self.has_notifications.set()
        return entry

    async def _add(self, entries: Sequence[list[Argument]]) -> list[list[bytes]]:
        """What `feed_append` returns for each batch."""
        if not entries:
            return []
        batches = range(0, len(entries), BATCH_SIZE)
        return await self._redis.call_many(
            [self._appending(entries[first : first + BATCH_SIZE]) for first in batches]
        )

    def _appending(self, entries: Sequence[list[Argument]]) -> Command:
        born = int((self._clock() - BIRTH_SECONDS) * 1000)
        given: list[Argument] = [os.urandom(4).hex(), born]
        for entry in entries:
            given += entry
        return self._redis.script_command(source("feed_append"), _ALL_KEYS, given)

    # ── read ─────────────────────────────────────────────────────────────────────────────

    async def feed_start(self, after: str | None) -> FeedPosition:
        given = None if after is None else FeedPosition.parse(after)
        facts, last = await self._redis.call_many(
            [self._appending([]), ("XREVRANGE", FEED, "+", "-", "COUNT", 1)]
        )
        dropped = _dropped(facts[0])
        newest = FeedPosition(dropped.feed, _number(last[0][0])) if last else dropped
        if given is None:
            return newest
        check_position(given, dropped, newest)
        return given

    async def page(self, after: FeedPosition) -> list[FeedEntry]:
        """The next events that are there by now. Raises `Expired`."""
        number = "{}-{}".format(*after.number)
        found, facts = await self._redis.call_many(
            [("XRANGE", FEED, f"({number}", "+", "COUNT", PAGE_SIZE), ("GET", _KEYS[2])]
        )
        dropped = _dropped(facts or b"00000000 0-0")
        check_position(after, dropped, FeedPosition(dropped.feed, after.number))
        return [
            _event(FeedPosition(after.feed, _number(entry_id)), fields)
            for entry_id, fields in found
        ]

    async def follow_feed(self, after: FeedPosition) -> AsyncGenerator[FeedEntry]:
        while True:
            page = await self.page(after)
            for entry in page:
                after = entry.position
                yield entry
            if len(page) < PAGE_SIZE:
                await self._news()
                await asyncio.sleep(GATHER_SECONDS)


async def trim_feed(redis: PipelinedRedis, now: float) -> None:
    """Let events leave that are older than the feed keeps them, or beyond its length."""
    given: list[Argument] = [int((now - KEPT_SECONDS) * 1000), MAX_KEPT_EVENTS, TRIM_SIZE]
    while await redis.call_script(source("feed_trim"), _KEYS, given) == TRIM_SIZE:
        pass


def _are_first(news: Sequence[Event]) -> bool:
    """Whether only the first two events of a run can be before this one: it is the first end."""
    return len(news) == 1 and news[0].epoch == 1 and news[0].type in ("run.completed", "run.failed")


def _event(position: FeedPosition, fields: Sequence[bytes]) -> FeedEntry:
    run_id, workflow, seq, kind, rest = (part.decode() for part in fields[1::2])
    time, epoch, data = orjson.loads(rest)
    event = Event(int(seq), time, kind, epoch, None, None, data)
    return FeedEntry(position, run_id, workflow, event)


def _dropped(facts: bytes) -> FeedPosition:
    """The last event that left the feed."""
    name, _, number = facts.partition(b" ")
    return FeedPosition(name.decode(), _number(number))


def _number(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))


async def _a_moment() -> None:
    await asyncio.sleep(LISTEN_SECONDS)


class FeedListener:
    """Knows when the feed has new events, on one connection for all readers of a process.

    Use `async with`; it listens while there are readers.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: set[asyncio.Future[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    async def __aenter__(self) -> FeedListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def next(self) -> None:
        """Return when it is worth to look: there are events, or some time has passed."""
        self._asked_at = monotonic()
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._listen())
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        try:
            await asyncio.wait([news], timeout=LISTEN_SECONDS)
        finally:
            self._waiting.discard(news)

    async def _listen(self) -> None:
        with contextlib.suppress(StoreError):
            async with PipelinedRedis(self._url) as redis:
                # Not "$", which would mean another moment at each call.
                newest = await redis.call("XREVRANGE", FEED, "+", "-", "COUNT", 1)
                last = newest[0][0] if newest else b"0-0"
                self._wake()  # what came before we listened
                while monotonic() - self._asked_at < IDLE_SECONDS:
                    reading = ("XREAD", "BLOCK", BLOCK_MILLISECONDS, "STREAMS", FEED, last)
                    for _, entries in await redis.call(*reading) or ():
                        last = entries[-1][0]
                        self._wake()

    def _wake(self) -> None:
        for news in self._waiting:
            if not news.done():
                news.set_result(None)
