"""What of the runs in Redis is not exported yet.

Unfinished runs are found in the timers, and runs that began or ended in the feed. How far a run is
exported is a key beside the run, deleted with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic

from dovetail.core.errors import Expired
from dovetail.core.feed import FeedPosition
from dovetail.engine.event_export import UnexportedRun
from dovetail.redis_client.pipelined import Command, PipelinedRedis, scanned
from dovetail.stores.redis.archive import RedisSnapshots
from dovetail.stores.redis.codec import event_of, keys_of
from dovetail.stores.redis.feed import RedisFeed
from dovetail.stores.redis.store import RedisStore

OWNER, POSITION = "wf:export:{all}:owner", "wf:export:{all}:position"
EXPORTED = "exported"
"""The end of the key of a run: how many of its events are exported."""
POLL_SECONDS = 0.5


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
        for entry in await self._feed.page(start):
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

    async def unexported(self, run_id: str, limit: int) -> UnexportedRun | None:
        run = await self._store.find_outline(run_id)
        if run is None:
            return None
        after = int(await self._redis.call("GET", _key(run_id)) or 0)
        texts = await self._redis.call("LRANGE", keys_of(run_id)[5], after, after + limit - 1)
        events = [event_of(text, seq, run.graph) for seq, text in enumerate(texts, after + 1)]
        return UnexportedRun(run_id, run.graph.name, events, len(texts) == limit)

    async def exported(self, run: UnexportedRun) -> None:
        await self._redis.call("SET", _key(run.run_id), run.events[-1].seq)

    async def news(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, POLL_SECONDS))


def _key(run_id: str) -> str:
    return f"wf:{{{run_id}}}:{EXPORTED}"
