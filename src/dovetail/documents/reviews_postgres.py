"""Reviews in PostgreSQL, for workers on several machines.

A caller may be a thread, a Celery task with its own event loop, or a command. The connections live
in the event loop of one thread, so that all callers share a few.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import orjson

from dovetail import DovetailError, RetryableError, StoreError
from dovetail.documents.metrics import Measurement, MeasuringRule
from dovetail.documents.reviews import Change, Review, Rule, statements
from dovetail.postgres_url import connect_arguments, shown

T = TypeVar("T")
Work = Callable[[Any], Awaitable[T]]

SQL = "reviews_postgres.sql"
MAX_CONNECTIONS = 10
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
CLOSE_SECONDS = 2.0
_LOCK = 0x444F4353
"""The advisory lock for creating the tables; all programs of a database share these numbers."""

# SQLSTATEs, or their prefixes, of errors that a retry may solve.
_PASSING = ("08", "40", "53", "55P03", "57", "25006", "58")


class PostgresReviewStore:
    """A `ReviewStore` in two tables of a PostgreSQL database."""

    def __init__(self, url: str, out: Path) -> None:
        self._url = url
        self._owner = str(out)

    def get(self, document_id: str) -> Review | None:
        rows = self._read("get", document_id)
        return _review(rows[0]) if rows else None

    def page(self, status: str | None, prefix: str, limit: int | None, after: str) -> list[Review]:
        return [_review(row) for row in self._read("page", status, after, prefix, limit)]

    def change(self, document_id: str, rule: Rule) -> Review:
        sql = statements(SQL)

        async def work(connection: Any) -> Review:
            async with connection.transaction():
                await connection.execute(sql["alone"], self._owner, document_id)
                row = await connection.fetchrow(sql["get"], self._owner, document_id)
                before = None if row is None else _review(row)
                after = rule(before)
                if after is not before:
                    await connection.execute(sql["put"], self._owner, *_row(after))
            return after

        return _database(self._url).use(work)

    def measure(self, document_id: str, key: str, rule: MeasuringRule) -> Change:
        sql = statements(SQL)

        async def work(connection: Any) -> Change:
            async with connection.transaction():
                await connection.execute(sql["alone"], self._owner, document_id)
                row = await connection.fetchrow(sql["measured"], self._owner, document_id, key)
                before = None if row is None else Measurement(*row)
                after = rule(before)
                if after is not before:
                    await connection.execute(sql["measure"], self._owner, *astuple(after))
            return before, after

        return _database(self._url).use(work)

    def measured(self, document_id: str, key: str) -> Measurement | None:
        rows = self._read("measured", document_id, key)
        return Measurement(*rows[0]) if rows else None

    def measurements(self, since: float | None, until: float | None) -> list[Measurement]:
        first = float("-inf") if since is None else since
        last = float("inf") if until is None else until
        return [Measurement(*row) for row in self._read("measurements", first, last)]

    def close(self) -> None:
        """Nothing to close: all folders share the connections."""

    def _read(self, name: str, *values: Any) -> list[Any]:
        async def work(connection: Any) -> list[Any]:
            found: list[Any] = await connection.fetch(statements(SQL)[name], self._owner, *values)
            return found

        return _database(self._url).use(work)


class Database:
    """A few connections to one database, and the thread with their event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._where = shown(url)
        self._pool: Any = None
        self._opening = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        name = "dovetail-reviews"
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def use(self, work: Work[T]) -> T:
        """Do the work with a connection, again if the connection broke. Blocks."""
        return asyncio.run_coroutine_threadsafe(self._use(work), self._loop).result()

    def close(self) -> None:
        async def close() -> None:
            if self._pool is not None:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._pool.close()

        try:
            asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        except Exception:
            self._loop.call_soon_threadsafe(self._pool.terminate)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _use(self, work: Work[T]) -> T:
        asyncpg = _library()
        again = True
        while True:
            try:
                await self._open()
                # In a transaction: a pooler may give each statement another session.
                async with (
                    self._pool.acquire(timeout=CONNECT_SECONDS) as connection,
                    connection.transaction(),
                ):
                    return await work(connection)
            except DovetailError:
                raise
            except (OSError, asyncpg.PostgresError, *_broken()) as error:
                if again and _is_broken(error):
                    again = False
                    if self._pool is not None:
                        await self._pool.expire_connections()
                    continue
                raise self._explained(error) from error

    async def _open(self) -> None:
        async with self._opening:
            if self._pool is not None:
                return
            try:
                self._pool = await _opened(self._url)
            except DovetailError:
                raise
            except ValueError:  # its message may contain a part of the password
                raise StoreError(
                    "DOVETAIL_DATABASE_URL cannot be read; write it as in "
                    "postgresql://user:password@host:5432/database"
                ) from None

    def _explained(self, error: Exception) -> DovetailError:
        """The error as a Dovetail error, with a remedy."""
        code = getattr(error, "sqlstate", None) or ""
        if code.startswith("53100"):
            return RetryableError(f"{self._where}: its disk is full ({error})", type="disk_full")
        if isinstance(error, OSError) or _is_broken(error) or code.startswith(_PASSING):
            what = str(error) or type(error).__name__
            return RetryableError(
                f"{self._where} cannot be used ({what}); is PostgreSQL running, and is "
                "DOVETAIL_DATABASE_URL right?",
                type="database_down",
            )
        return StoreError(f"{self._where}: {error}")


async def _opened(url: str) -> Any:
    """A pool; the tables exist."""
    pool = await _library().create_pool(
        **connect_arguments(url, CONNECT_SECONDS),
        min_size=0,
        max_size=MAX_CONNECTIONS,
        command_timeout=ANSWER_SECONDS,
        statement_cache_size=0,
        reset=_nothing,
        server_settings={"application_name": "dovetail documents"},
    )
    try:
        async with pool.acquire() as connection, connection.transaction():
            await _make_tables(connection)
    except BaseException:
        pool.terminate()
        raise
    return pool


async def _make_tables(connection: Any) -> None:
    sql = statements(SQL)
    if await connection.fetchval(sql["has_tables"]):
        return
    async with connection.transaction():
        await connection.execute(sql["lock"], _LOCK)
        await connection.execute(sql["schema"])


def _is_broken(error: Exception) -> bool:
    """Whether the connection is lost or failed: another one may work."""
    return isinstance(error, _broken())


def _broken() -> tuple[type[Exception], ...]:
    asyncpg = _library()
    return (
        ConnectionError,
        asyncpg.PostgresConnectionError,
        asyncpg.AdminShutdownError,
        asyncpg.CrashShutdownError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,
    )


async def _nothing(connection: Any) -> None:
    """No reset of a connection: it would cost a roundtrip."""


def _library() -> Any:
    """asyncpg, imported at the first use: it is optional."""
    try:
        import asyncpg  # type: ignore[import-untyped]
    except ImportError:
        raise StoreError(
            "PostgreSQL needs the package asyncpg: pip install 'dovetail[postgres]'"
        ) from None
    return asyncpg


def _review(row: Any) -> Review:
    values = list(row)
    values[4:6] = orjson.loads(row[4]), tuple(orjson.loads(row[5]))
    return Review(*values)


def _row(review: Review) -> tuple[Any, ...]:
    return (
        *(review.document_id, review.file_path, review.sha256, review.extractor),
        *(orjson.dumps(review.fields).decode(), orjson.dumps(review.locked).decode()),
        *(review.status, review.approved_by, review.corrected_by, review.confidence),
        *(review.parquet_path, review.json_path),
        *(review.created_at, review.updated_at, review.corrected_at),
    )


# --- open in this process ----------------------------------------------------------------------

_open: dict[str, Database] = {}
_opening = threading.Lock()


def _database(url: str) -> Database:
    with _opening:
        if url not in _open:
            _open[url] = Database(url)
        return _open[url]


def close_databases() -> None:
    """Close all connections; the next call connects again."""
    with _opening:
        while _open:
            _open.popitem()[1].close()


def _leave_to_the_parent() -> None:
    """After a fork: thread and connections belong to the parent."""
    global _open, _opening
    _of_the_parent.append(_open)
    _open, _opening = {}, threading.Lock()


_of_the_parent: list[object] = []
os.register_at_fork(after_in_child=_leave_to_the_parent)
