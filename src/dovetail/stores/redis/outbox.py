"""Notifications of runs in Redis, until receivers have accepted them.

They are added by the script that adds the end of a run to the feed (`feed_append.lua`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson

from dovetail.core.webhooks import Notification
from dovetail.engine.webhooks import dead_letter
from dovetail.redis_client.pipelined import Argument, PipelinedRedis
from dovetail.stores.redis.codec import source
from dovetail.stores.redis.feed import NOTIFICATIONS, OUTBOX

_KEYS = (OUTBOX, NOTIFICATIONS)


class RedisOutbox:
    def __init__(
        self,
        redis: PipelinedRedis,
        added: asyncio.Event,
        bury: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """`added` is set when this process has added a notification; `bury` keeps a dead letter."""
        self._redis = redis
        self._added = added
        self._bury = bury

    async def claim(self, now: float, until: float, limit: int) -> list[Notification]:
        self._added.clear()
        given: list[Argument] = [repr(now), repr(until), limit]
        found = await self._redis.call_script(source("outbox_claim"), _KEYS, given)
        return [Notification(**orjson.loads(content)) for content in found]

    async def settle(self, notification: Notification) -> None:
        await self._redis.call_many(
            [("HDEL", NOTIFICATIONS, notification.id), ("ZREM", OUTBOX, notification.id)]
        )

    async def postpone(self, notification: Notification, at: float) -> None:
        content = orjson.dumps(notification._asdict())
        given: list[Argument] = [notification.id, repr(at), content]
        await self._redis.call_script(source("outbox_postpone"), _KEYS, given)

    async def add(self, notification: Notification, at: float) -> None:
        """Make it due then."""
        content = orjson.dumps(notification._asdict())
        await self._redis.call_many(
            [
                ("HSET", NOTIFICATIONS, notification.id, content),
                ("ZADD", OUTBOX, repr(at), notification.id),
            ]
        )
        self._added.set()

    async def missing(self, ids: Sequence[str]) -> list[str]:
        """The ones of these that are not there."""
        known = await self._redis.call_many([("HEXISTS", NOTIFICATIONS, one) for one in ids])
        return [one for one, is_there in zip(ids, known, strict=True) if not is_there]

    async def bury(self, notification: Notification, reason: str) -> None:
        await self._bury(dead_letter(notification, reason))
        await self.settle(notification)

    async def news(self, now: float, seconds: float) -> None:
        first = await self._redis.call("ZRANGE", OUTBOX, 0, 0, "WITHSCORES")
        if first:
            seconds = min(seconds, max(0.0, float(first[1]) - now))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._added.wait(), seconds)
