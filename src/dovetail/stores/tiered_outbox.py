"""Notifications that wait for their receivers, kept in PostgreSQL beside Redis.

Redis may be emptied, and PostgreSQL has the runs. So a notification is copied when an attempt to
send it has failed, and forgotten when it is accepted or given up. Most are accepted at once, and
are never copied.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import orjson

from dovetail.core.errors import StoreError
from dovetail.core.text import counted
from dovetail.core.webhooks import Notification
from dovetail.engine.clock import Clock
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.redis.outbox import RedisOutbox

RESTORE_SECONDS = 10.0
PAGE_SIZE = 500
PATIENCE_SECONDS = 1.0
"""For a copy. The outbox in Redis has the notification in any case."""

log = logging.getLogger("dovetail.webhooks")


class TieredOutbox:
    """The outbox in Redis, with a copy of what waits there."""

    def __init__(self, hot: RedisOutbox, pool: PostgresPool, clock: Clock) -> None:
        self._hot = hot
        self._pool = pool
        self._clock = clock
        self._ended: set[str] = set()
        """Copies that could not be forgotten yet."""
        self.claim = hot.claim
        self.news = hot.news

    async def settle(self, notification: Notification) -> None:
        await self._forget(notification)
        await self._hot.settle(notification)

    async def bury(self, notification: Notification, reason: str) -> None:
        await self._forget(notification)
        await self._hot.bury(notification, reason)

    async def postpone(self, notification: Notification, at: float) -> None:
        await self._hot.postpone(notification, at)
        if notification.attempts:
            content = orjson.dumps(notification._asdict())
            with suppress(StoreError, TimeoutError):  # the next attempt copies it
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._pool.execute("copy_notification", notification.id, content)

    async def _forget(self, notification: Notification) -> None:
        """Before Redis does: `restore` takes what only PostgreSQL has for lost."""
        if notification.attempts:
            self._ended.add(notification.id)
            with suppress(StoreError, TimeoutError):  # the next `restore` forgets it
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._forget_ended()

    async def _forget_ended(self) -> None:
        ended = list(self._ended)
        await self._pool.execute("forget_notifications", ended)
        self._ended.difference_update(ended)

    async def restore(self) -> None:
        """Put back what Redis has lost."""
        with suppress(StoreError):  # it is tried again soon
            await self._forget_ended()
            restored, after = 0, ""
            while page := await self._pool.rows("copied_notifications", after, PAGE_SIZE):
                after = page[-1][0]
                lost = await self._hot.missing([row[0] for row in page])
                # Looked at again: it may have been accepted since the page was read.
                for _, content in await self._pool.rows("read_notifications", lost) if lost else ():
                    await self._hot.add(Notification(**orjson.loads(content)), self._clock())
                    restored += 1
            if restored:
                log.warning("put back %s that Redis had lost", counted(restored, "notification"))
