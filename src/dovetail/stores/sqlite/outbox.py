"""Notifications of runs in the file, until receivers have accepted them."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from typing import Any

import orjson

from dovetail.core.webhooks import Notification
from dovetail.engine.views import dead_letter_view
from dovetail.engine.webhooks import dead_letter, requeued
from dovetail.stores.sqlite.file import statements
from dovetail.stores.sqlite.store import SqliteStore

MAX_DEAD_LETTERS = 1000
PAUSE_SECONDS = 0.02
"""Between two looks: commits come close together."""


class SqliteOutbox:
    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._writes: list[tuple[str, tuple[Any, ...]]] = []
        self._writing = asyncio.Lock()

    async def claim(self, now: float, until: float, limit: int) -> list[Notification]:
        rows = self._store.rows("due_notifications", now, limit)
        if not rows:
            return []

        def take(connection: sqlite3.Connection) -> list[bytes]:
            claim = statements()["claim_notification"]
            return [
                content
                for name, content in rows
                if connection.execute(claim, (name, now, until)).rowcount
            ]

        taken = await self._store.transact(take)
        return [Notification(**orjson.loads(content)) for content in taken]

    async def settle(self, notification: Notification) -> None:
        await self._execute("remove_notification", notification.id)

    async def postpone(self, notification: Notification, at: float) -> None:
        content = orjson.dumps(notification._asdict())
        await self._execute("change_notification", notification.id, at, content)

    async def bury(self, notification: Notification, reason: str) -> None:
        letter = orjson.dumps({**dead_letter(notification, reason), "time": time.time()})

        def move(connection: sqlite3.Connection) -> None:
            sql = statements()
            if connection.execute(sql["remove_notification"], (notification.id,)).rowcount:
                connection.execute(sql["add_dead_letter"], (letter,))
                connection.execute(sql["trim_dead_letters"], (MAX_DEAD_LETTERS,))

        await self._store.transact(move)

    async def news(self, now: float, seconds: float) -> None:
        ((due,),) = self._store.rows("next_notification")
        if due is not None:
            seconds = min(seconds, max(0.0, due - now))
        news = asyncio.Event()
        self._store.feeds.add(news)
        try:
            await asyncio.wait_for(news.wait(), seconds)
        except TimeoutError:
            return
        finally:
            self._store.feeds.discard(news)
        await asyncio.sleep(PAUSE_SECONDS)

    async def dead_letters(self) -> list[dict[str, Any]]:
        """The newest first, in the fields of `GET /dead-letters`."""
        letters = {
            str(number): orjson.loads(content)
            for number, content in self._store.rows("dead_letters", MAX_DEAD_LETTERS)
        }
        return [dead_letter_view(letter_id, letter) for letter_id, letter in letters.items()]

    async def drop_dead_letter(self, letter_id: str) -> bool:
        """Whether it was there."""
        number = _number(letter_id)
        sql = statements()["drop_dead_letter"]
        return bool(await self._store.transact(lambda c: c.execute(sql, (number,)).rowcount))

    async def requeue_notification(self, letter_id: str, now: float) -> Notification | None:
        number = _number(letter_id)

        def move(connection: sqlite3.Connection) -> Notification | None:
            sql = statements()
            row = connection.execute(sql["dead_letter"], (number,)).fetchone()
            found = None if row is None else requeued(orjson.loads(row[0]))
            if found is not None:
                again = (found.id, now, orjson.dumps(found._asdict()))
                connection.execute(sql["add_notification"], again)
                connection.execute(sql["drop_dead_letter"], (number,))
            return found

        moved: Notification | None = await self._store.transact(move)
        return moved

    async def _execute(self, name: str, *values: Any) -> None:
        """In one transaction with what others write meanwhile. If it fails, one of them gets the
        error; for all of them the claim ends, and the notification is sent again."""
        self._writes.append((statements()[name], values))
        async with self._writing:
            writes, self._writes = self._writes, []

            def write(connection: sqlite3.Connection) -> None:
                for sql, row in writes:
                    connection.execute(sql, row)

            if writes:  # else another caller has written it
                await self._store.transact(write)


def _number(letter_id: str) -> int:
    """Zero for what is no id of a letter."""
    is_one = letter_id.isascii() and letter_id.isdigit() and len(letter_id) < 16
    return int(letter_id) if is_one else 0
