"""What of the runs in the file is not exported yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dovetail.core.errors import BrokenRun
from dovetail.core.feed import MAX_KEPT_EVENTS
from dovetail.engine.event_export import UnexportedRun
from dovetail.stores.sqlite.file import statements
from dovetail.stores.sqlite.store import SqliteStore
from dovetail.stores.sqlite.writer import PIECES, piece, read_feed_row

PAUSE_SECONDS = 0.05
"""Between two looks: commits come close together."""


class SqliteEventSource:
    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._name = store.owner.name
        self._position = 0
        self._next: dict[str, int] = {}
        """How many pieces of each log are exported once the last pages are."""
        self._until = 0.0

    async def leads(self, seconds: float) -> bool:
        now = time.time()
        if now < self._until - seconds / 2:
            return True  # it was noted a moment ago

        def take(connection: Any) -> bool:
            row = (self._name, now + seconds, now)
            return bool(connection.execute(statements()["lead_export"], row).rowcount)

        leads = bool(await self._store.transact(take))
        self._until = now + seconds if leads else 0.0
        return leads

    async def leave(self) -> None:
        await self._execute("leave_export", self._name)

    async def changed(self) -> Sequence[str]:
        ((position, newest),) = self._store.rows("export_position")
        self._position = newest
        # At the very first time, from now on: but for runs that are under way.
        since = newest if position is None else position
        runs = [run_id for (run_id,) in self._store.rows("unexported_runs")]
        # A run that began and ended since then is among the events of the feed.
        for row in self._store.rows("read_feed", since, MAX_KEPT_EVENTS):
            runs += [record[0] for _, record in read_feed_row(*row)]
        return [run_id for run_id in dict.fromkeys(runs) if isinstance(run_id, str)]

    async def settle(self) -> None:
        ((position, _),) = self._store.rows("export_position")
        if position != self._position:
            await self._execute("set_export_position", self._position)

    async def unexported(self, run_ids: Sequence[str], limit: int) -> list[UnexportedRun]:
        self._next = {}
        found = [self._page(run_id, limit) for run_id in run_ids]
        return [page for page in found if page is not None]

    def _page(self, run_id: str, limit: int) -> UnexportedRun | None:
        rows = self._store.rows("exported_pieces", run_id)
        if not rows:
            return None
        ((number, workflow, pieces),) = rows
        first = piece(number, pieces)
        part = self._store.part(first, piece(number, PIECES - 1))[:limit]
        try:
            entries = self._store.entries_of(run_id, part)
        except BrokenRun:  # a damaged run does not stop the others
            return None
        events = [event for entry in entries for event in entry.events]
        if not events:
            return None
        self._next[run_id] = pieces + len(part)
        return UnexportedRun(run_id, workflow, events, True)

    async def exported(self, runs: Sequence[UnexportedRun]) -> None:
        sql, rows = statements()["set_exported"], list(self._next.items())
        await self._store.transact(lambda connection: connection.executemany(sql, rows) and None)

    async def news(self, seconds: float) -> None:
        news = asyncio.Event()
        self._store.feeds.add(news)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), seconds)
        finally:
            self._store.feeds.discard(news)
        await asyncio.sleep(PAUSE_SECONDS)

    async def _execute(self, name: str, *values: Any) -> None:
        sql = statements()[name]
        await self._store.transact(lambda connection: connection.execute(sql, values) and None)
