"""What of the runs in Redis is not exported yet.

Unfinished runs are found in the timers, and runs that began or ended in the feed. How far a run is
exported is a key beside the run, deleted with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic

from dovetail.core.errors import BrokenRun, Expired
from dovetail.core.feed import FeedPosition
from dovetail.core.run import RunState
from dovetail.engine.event_export import UnexportedRun
from dovetail.engine.supervisor import describe_error
from dovetail.redis_client.pipelined import Command, PipelinedRedis, scanned
from dovetail.stores.redis.archive import RedisSnapshots
from dovetail.stores.redis.codec import event_of, keys_of
from dovetail.stores.redis.feed import PAGE_SIZE, RedisFeed
from dovetail.stores.redis.store import RedisStore

OWNER, POSITION = "wf:export:{all}:owner", "wf:export:{all}:position"
EXPORTED = "exported"
"""The end of the key of a run: how many of its events are exported."""
POLL_SECONDS = 0.5

log = logging.getLogger("dovetail.events")


class RedisEventSource:
    def __init__(
        self, redis: PipelinedRedis, store: RedisStore, feed: RedisFeed, name: str
    ) -> None:
        """`name` is of this process, and of no other."""
        self._redis = redis
        self._store = store
        self._feed = feed
        self._name = name
        self._lengths = RedisSnapshots(redis).lengths
        self._position: FeedPosition | None = None
        self._until = 0.0
        self._has_more = False
        """The feed has events that `changed` has not looked at."""
        self._left_out: set[str] = set()

    async def leads(self, seconds: float) -> bool:
        if monotonic() < self._until - seconds / 2:
            return True  # it was noted a moment ago
        self._until = 0.0
        now = monotonic()
        if await self._take_lead(int(seconds * 1000)):
            self._until = now + seconds
        return self._until > 0.0

    async def _take_lead(self, life: int) -> bool:
        if await self._redis.call("SET", OWNER, self._name, "NX", "PX", life):
            return True
        if await self._redis.call("GET", OWNER) != self._name.encode():
            return False
        return bool(await self._redis.call("PEXPIRE", OWNER, life))

    async def leave(self) -> None:
        if await self._redis.call("GET", OWNER) == self._name.encode():
            await self._redis.call("DEL", OWNER)

    async def changed(self) -> Sequence[str]:
        found: dict[str, None] = {}
        stored = await self._redis.call("GET", POSITION)
        try:
            start = await self._feed.feed_start(None if stored is None else stored.decode())
        except Expired:  # this long no process exported, or Redis was emptied
            start = await self._feed.feed_start(None)
            async for keys in scanned(self._redis, "wf:{*}:meta"):
                found.update(
                    (key.removeprefix("wf:{").removesuffix("}:meta"), None) for key in keys
                )
        self._position = start
        page = await self._feed.page(start)
        self._has_more = len(page) == PAGE_SIZE
        for entry in page:
            found[entry.run_id] = None
            self._position = entry.position
        async for lengths in self._lengths():
            counts: list[Command] = [("GET", _key(run_id)) for run_id in lengths]
            done = await self._redis.call_many(counts)
            for (run_id, length), count in zip(lengths.items(), done, strict=True):
                if length > int(count or 0):
                    found[run_id] = None
        return list(found)

    async def settle(self) -> None:
        if self._position is not None:
            await self._redis.call("SET", POSITION, str(self._position))

    async def unexported(self, run_ids: Sequence[str], limit: int) -> list[UnexportedRun]:
        outlines = await asyncio.gather(*map(self._outline, run_ids))
        runs = [run for run in outlines if run is not None]
        counts: list[Command] = [("GET", _key(run.id)) for run in runs]
        done = [int(count or 0) for count in await self._redis.call_many(counts)]
        parts: list[Command] = [
            ("LRANGE", keys_of(run.id)[5], after, after + limit - 1)
            for run, after in zip(runs, done, strict=True)
        ]
        logs = await self._redis.call_many(parts)
        found = map(partial(self._page, limit), runs, done, logs)
        return [page for page in found if page is not None]

    async def _outline(self, run_id: str) -> RunState | None:
        try:
            return await self._store.find_outline(run_id)
        except BrokenRun as problem:
            self._leave_out(run_id, problem)
            return None

    def _page(
        self, limit: int, run: RunState, after: int, texts: Sequence[bytes]
    ) -> UnexportedRun | None:
        try:
            events = [event_of(text, seq, run.graph) for seq, text in enumerate(texts, after + 1)]
        except (ValueError, LookupError, TypeError) as problem:
            self._leave_out(run.id, problem)
            return None
        if not events:
            return None
        return UnexportedRun(run.id, run.graph.name, events, len(texts) == limit)

    def _leave_out(self, run_id: str, problem: Exception) -> None:
        """A damaged run does not stop the others."""
        if run_id not in self._left_out:
            self._left_out.add(run_id)
            log.error("events of run %s cannot be exported: %s", run_id, describe_error(problem))

    async def exported(self, runs: Sequence[UnexportedRun]) -> None:
        await self._redis.call_many([("SET", _key(run.run_id), run.events[-1].seq) for run in runs])

    async def news(self, seconds: float) -> None:
        if not self._has_more:
            await asyncio.sleep(min(seconds, POLL_SECONDS))


def _key(run_id: str) -> str:
    return f"wf:{{{run_id}}}:{EXPORTED}"
