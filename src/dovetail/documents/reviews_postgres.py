"""Reviews in PostgreSQL, for workers on several machines.

A caller may be a thread, a Celery task with its own event loop, or a command. The connections live
in the event loop of one thread, so that all callers share a few.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dovetail import DovetailError, RetryableError, StoreError
from dovetail.documents.reviews import SqlReviewStore, T, statements
from dovetail.postgres_url import connect_arguments, shown

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


class PostgresReviewStore(SqlReviewStore):
    """A `ReviewStore` in two tables of a PostgreSQL database."""

    no_limit = None

    def __init__(self, url: str, out: Path) -> None:
        self._url = url
        self._owner = str(out)

    def close(self) -> None:
        """Nothing to close: all folders share the connections."""

    def _read(self, name: str, *values: Any) -> list[Any]:
        async def work(connection: Any) -> list[Any]:
            found: list[Any] = await connection.fetch(statements(SQL)[name], self._owner, *values)
            return found

        return _database(self._url).use(work)

    def _update(
        self,
        get: str,
        keys: tuple[str, ...],
        decode: Callable[[Any], T],
        rule: Callable[[T | None], T],
        put: str,
        encode: Callable[[T], tuple[Any, ...]],
    ) -> tuple[T | None, T]:
        sql = statements(SQL)

        async def work(connection: Any) -> tuple[T | None, T]:
            async with connection.transaction():
                await connection.execute(sql["alone"], self._owner, keys[0])
                row = await connection.fetchrow(sql[get], self._owner, *keys)
                before = None if row is None else decode(row)
                after = rule(before)
                if after is not before:
                    await connection.execute(sql[put], self._owner, *encode(after))
            return before, after

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
