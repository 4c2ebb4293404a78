"""The PostgreSQL database: connections, migrations, and its errors explained.

Connections are opened at first use. A database that was away is tried again with the next call.

A pooler such as PgBouncer may give each transaction another session. Behind one, nothing of a
session is used: no named prepared statement, no setting, and every statement runs in a transaction
that pins its session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Protocol, TypeVar

from dovetail.core.errors import ArchiveDown, StoreError
from dovetail.postgres_url import connect_arguments, shown
from dovetail.stores.records import named_statements

T = TypeVar("T")

SCHEMA_VERSION = 6
MAX_CONNECTIONS = 10
CONNECT_SECONDS = 5.0
STATEMENT_SECONDS = 10.0
ANSWER_SECONDS = 12.0
"""After the server's own time-out: only a server that says nothing at all gets here."""
SOON_SECONDS = 5.0
"""For one statement: its caller waits, and wants to know soon that it fails."""
IDLE_TRANSACTION_SECONDS = 15.0
"""A process that was stopped amid a transaction must not hold its locks for longer."""
MIGRATION_SECONDS = 60.0
"""How long to wait for another process that migrates."""
LONGEST_MIGRATION_SECONDS = 3600.0
DOUBT_SECONDS = 3.0
"""After a write that found no room."""
READ_ONLY = "25006"
NO_ROOM = ("53100", "53200", "58")
UNWRITABLE = ("22000", "22021")
"""What asyncpg says of a number too large and of half a character, and PostgreSQL of U+0000."""
_LOCK = 0x444F5645
"""Of the migration, in the numbers that all programs of a database share."""


class PostgresConnection(Protocol):
    """As much of asyncpg's as is used here."""

    async def fetch(self, query: str, *values: Any) -> list[Any]: ...
    async def fetchrow(self, query: str, *values: Any) -> Any: ...
    async def fetchval(self, query: str, *values: Any) -> Any: ...
    async def execute(self, query: str, *values: Any, timeout: float = ...) -> str: ...  # noqa: ASYNC109
    def transaction(
        self, *, isolation: str | None = None, readonly: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Any]: ...
    def terminate(self) -> None: ...
    def get_settings(self) -> Any: ...


@cache
def statements() -> dict[str, str]:
    """The SQL of queries.sql, by name."""
    return named_statements("dovetail.stores.postgres")


class PostgresPool:
    """A few connections that everything in this process shares.

    Every failure of the database is raised as a `StoreError`; as an `ArchiveDown` if what was
    asked for may well succeed later.
    """

    def __init__(self, url: str, *, connections: int = MAX_CONNECTIONS) -> None:
        self._url = url
        self._connections = connections
        self._pool: Any = None
        self._opening: asyncio.Task[None] | None = None
        self._migrated = False
        self._refusal: tuple[StoreError, float] | None = None
        """The last write that was refused for want of room, and when."""
        self.is_pooled = False
        """A pooler is in between; known once the database was reached."""
        self.where = shown(url)

    async def __aenter__(self) -> PostgresPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        pool, self._pool, self._migrated = self._pool, None, False
        if pool is None:
            return
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await pool.close()
        except Exception:
            pool.terminate()

    # ── work ─────────────────────────────────────────────────────────────────────────────

    async def rows(self, name: str, *values: Any, **conditions: Any) -> list[Any]:
        """What a statement of queries.sql finds; a condition is a column and its value."""
        sql = statements()[name]
        if "{conditions}" in sql:
            numbered = enumerate(conditions, len(values) + 1)
            sql = sql.format(conditions="".join(f"AND {name} = ${n} " for n, name in numbered))
        try:
            return await self._use(lambda c: c.fetch(sql, *values, *conditions.values()))
        except _NeverWritten:
            return []  # what cannot be written down cannot have been

    async def row(self, name: str, *values: Any) -> Any:
        found = await self.rows(name, *values)
        return found[0] if found else None

    async def execute(self, name: str, *values: Any) -> None:
        await self._use(lambda connection: connection.execute(statements()[name], *values))

    async def transact(
        self, work: Callable[[PostgresConnection], Awaitable[T]], *, within: float | None = None
    ) -> T:
        """All of it or nothing, within so many seconds.

        The work is done again if the connection broke, even at the commit: then it may find
        its own traces, and must take them for what they are.
        """

        async def whole(connection: PostgresConnection) -> T:
            async with connection.transaction():
                await self._bound(connection)
                return await work(connection)

        return await self._use(whole, within, is_whole=True)

    async def look(self, work: Callable[[PostgresConnection], Awaitable[T]]) -> T:
        """Read several things as they were at one moment."""

        async def whole(connection: PostgresConnection) -> T:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                await self._bound(connection)
                return await work(connection)

        return await self._use(whole, within=None, is_whole=True)

    async def _bound(self, connection: PostgresConnection) -> None:
        """Set the time-outs of this transaction, where those of a session could not be set."""
        if self.is_pooled:
            await connection.execute(_transaction_limits())

    async def _in_one_session(
        self, connection: PostgresConnection, work: Callable[[PostgresConnection], Awaitable[T]]
    ) -> T:
        """A statement is prepared and executed in two steps. Only a transaction makes a pooler
        give both to one session."""
        async with connection.transaction():
            await self._bound(connection)
            return await work(connection)

    async def ping(self) -> None:
        """Raises `StoreError` unless the database is there and of this version."""
        await self._use(lambda connection: connection.fetchval(statements()["ping"]))

    async def check_writable(self) -> None:
        """Raises `StoreError`, with its reason, if a write would be refused.

        Asked without a write, unless one was refused: then a small one must succeed, and a while
        must have passed, because a larger one may still find no room.
        """
        if await self._use(lambda connection: connection.fetchval(statements()["is_read_only"])):
            await self._pool.expire_connections()  # the next may be to another server
            raise self._read_only()
        if self._refusal is not None:
            refusal, since = self._refusal
            if asyncio.get_running_loop().time() - since < DOUBT_SECONDS:
                raise refusal
            await self.execute("write_something")
            self._refusal = None

    def _read_only(self) -> StoreError:
        error = self._archive_down(f"{self.where} is read-only; is it a replica?")
        error.reason = _public(READ_ONLY)
        return error

    async def _use(
        self,
        work: Callable[[PostgresConnection], Awaitable[T]],
        within: float | None = SOON_SECONDS,
        *,
        is_whole: bool = False,
    ) -> T:
        try:
            async with asyncio.timeout(within):
                return await self._try(work, is_whole)
        except TimeoutError as error:
            raise self._store_error(error) from error

    async def _try(self, work: Callable[[PostgresConnection], Awaitable[T]], is_whole: bool) -> T:
        again = True
        while True:
            await self._open()
            connection = await self._taken()
            try:
                if self.is_pooled and not is_whole:
                    return await self._in_one_session(connection, work)
                return await work(connection)
            except Exception as error:
                await self._distrust(connection, error)
                if again and _is_passing(error):
                    again = False
                    continue
                raise self._store_error(error) from error
            except asyncio.CancelledError:
                self._break(connection)  # it may never answer, and no caller waits
                raise
            finally:
                await self._give_back(connection)

    async def _taken(self) -> PostgresConnection:
        try:
            connection: PostgresConnection = await self._pool.acquire(timeout=ANSWER_SECONDS)
            return connection
        except ValueError:
            raise _misnamed() from None  # its own text may have a piece of a password
        except Exception as error:
            raise self._store_error(error) from error

    async def _distrust(self, connection: PostgresConnection, error: Exception) -> None:
        broken = _is_broken(error)
        if broken or isinstance(error, TimeoutError):
            self._break(connection)  # it may never answer
        if broken or getattr(error, "sqlstate", None) == READ_ONLY:
            # The server has gone, or is the primary no longer: what else is connected to it is of
            # no more use, and a second try must not find another connection of that kind.
            await self._pool.expire_connections()

    @staticmethod
    def _break(connection: PostgresConnection) -> None:
        with contextlib.suppress(_library().InterfaceError):  # the pool may have been faster
            connection.terminate()

    async def _give_back(self, connection: PostgresConnection) -> None:
        # It may break just now; what was asked of it is answered, and the pool makes another.
        with contextlib.suppress(Exception):
            await self._pool.release(connection, timeout=CONNECT_SECONDS)

    # ── the way there ────────────────────────────────────────────────────────────────────

    async def migrate(self) -> None:
        """Reach the database and bring its tables up to date, as the first use does."""
        await self._open()

    async def _open(self) -> None:
        if self._migrated:
            return
        # One attempt for all who wait: a database that does not answer costs each of them one
        # time-out and not as many as there are.
        if self._opening is None:
            self._opening = asyncio.create_task(self._reach())
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not warn

    async def _reach(self) -> None:
        asyncpg = _library()
        try:
            if self._pool is None:
                arguments = connect_arguments(self._url, CONNECT_SECONDS)
                self.is_pooled = await self._meets_a_pooler(arguments)
                self._pool = await asyncpg.create_pool(
                    **arguments,
                    min_size=0,
                    max_size=self._connections,
                    command_timeout=ANSWER_SECONDS,
                    reset=_nothing,
                    **(_pooled() if self.is_pooled else _direct()),
                )
        except StoreError:
            raise
        except ValueError:
            raise _misnamed() from None
        connection = await self._taken()
        try:
            self._check_encoding(connection.get_settings().server_encoding)
            if self.is_pooled:
                await self._in_one_session(connection, self._migrate)
            else:
                await self._migrate(connection)
        except Exception as error:
            await self._distrust(connection, error)
            raise self._store_error(error) from error
        finally:
            await self._give_back(connection)
        self._migrated = True

    async def _meets_a_pooler(self, arguments: dict[str, Any]) -> bool:
        """Whether the server's process is another than the one that the connection names: a pooler
        answers with a number of its own."""
        try:
            connection = await _library().connect(**arguments, statement_cache_size=0)
        except ValueError:
            raise _misnamed() from None
        except Exception as error:
            raise self._store_error(error) from error
        try:
            async with connection.transaction():
                process = await connection.fetchval("SELECT pg_backend_pid()")
            return bool(process != connection.get_server_pid())
        except Exception as error:
            raise self._store_error(error) from error
        finally:
            with contextlib.suppress(Exception):
                await connection.close(timeout=CONNECT_SECONDS)

    def _check_encoding(self, encoding: str) -> None:
        if encoding != "UTF8":
            raise StoreError(
                f"{self.where} keeps text as {encoding}, which does not have every character; "
                "create it with: createdb --encoding UTF8 --template template0"
            )

    async def _migrate(self, connection: PostgresConnection) -> None:
        sql = statements()
        if await self._version(connection) == SCHEMA_VERSION:
            return
        async with connection.transaction():
            await connection.execute("SET LOCAL statement_timeout = 0")
            limit = _milliseconds(MIGRATION_SECONDS)
            await connection.execute(f"SET LOCAL lock_timeout = {limit}")
            patience = MIGRATION_SECONDS + ANSWER_SECONDS
            await connection.execute(sql["lock_schema"], _LOCK, timeout=patience)
            version = await self._version(connection)  # another process may have migrated meanwhile
            has_schema, _ = await connection.fetchrow(sql["has_schema"])
            if not has_schema:
                await connection.execute("CREATE SCHEMA dovetail")
            numbers = range(version + 1, SCHEMA_VERSION + 1)
            for name in (*(f"schema_{number}" for number in numbers), "views"):
                await connection.execute(sql[name], timeout=LONGEST_MIGRATION_SECONDS)
            await connection.execute(sql["set_schema_version"], SCHEMA_VERSION)

    async def _version(self, connection: PostgresConnection) -> int:
        """Zero if there is nothing yet. Raises `StoreError` for one that we do not know."""
        _, has_version = await connection.fetchrow(statements()["has_schema"])
        version = await connection.fetchval(statements()["schema_version"]) if has_version else 0
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.where} was written by a newer Dovetail (schema {version}, this one knows "
                f"{SCHEMA_VERSION}); upgrade Dovetail, or use another database with "
                "DOVETAIL_DATABASE_URL"
            )
        return int(version)

    # ── failures ─────────────────────────────────────────────────────────────────────────

    def _store_error(self, error: Exception) -> StoreError:
        """What went wrong, and what would help. What is not of the database is raised as it is."""
        asyncpg = _library()
        if isinstance(error, asyncpg.PostgresError):
            found = self._refused(error)
            found.reason = _public(error.sqlstate or "")
            if (error.sqlstate or "").startswith(NO_ROOM):
                self._refusal = found, asyncio.get_running_loop().time()
            return found
        if isinstance(error, TimeoutError):
            found = self._archive_down(
                f"{self.where} did not answer in time; is it overloaded or cut off?"
            )
            found.reason = "PostgreSQL does not answer"
        elif isinstance(error, OSError):
            found = self._archive_down(
                f"{self.where} cannot be reached ({_reason(error)}); is PostgreSQL running, and "
                "is DOVETAIL_DATABASE_URL right?"
            )
            found.reason = "PostgreSQL cannot be reached"
        elif isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError):
            found = self._archive_down(
                f"{self.where} broke the connection ({error}); try again in a moment"
            )
            found.reason = "PostgreSQL cannot be reached"
        else:
            raise error
        return found

    def _refused(self, error: Any) -> StoreError:
        code = error.sqlstate or ""
        if code in UNWRITABLE:
            return _NeverWritten(f"{self.where}: {error}")
        for beginning, why in _REASONS:
            if code.startswith(beginning):
                return self._archive_down(why.format(where=self.where, what=error))
        return StoreError(f"{self.where}: {error} ({code}) {_CONSOLATION}")

    def _archive_down(self, what: str) -> ArchiveDown:
        return ArchiveDown(f"{what} {_CONSOLATION}")


class _NeverWritten(StoreError):
    """A value that PostgreSQL cannot hold: nothing with it can ever have been stored."""


# Public reasons, by SQLSTATE or its beginning.
_PUBLIC = (
    (READ_ONLY, "PostgreSQL accepts no writes: it is read-only"),
    ("53100", "PostgreSQL accepts no writes: its disk is full"),
    ("53300", "PostgreSQL has no connection left"),
    ("53", "PostgreSQL has run out of something it needs"),
    ("58", "PostgreSQL cannot read or write its files"),
    ("28", "PostgreSQL refuses the login"),
    ("57P", "PostgreSQL is starting or stopping"),
    ("08", "PostgreSQL cannot be reached"),
)


def _public(code: str) -> str:
    for beginning, reason in _PUBLIC:
        if code.startswith(beginning):
            return reason
    return "PostgreSQL cannot do what it is asked"


_CONSOLATION = "(nothing that was acknowledged is lost)"

# By SQLSTATE, or its beginning; the first that fits.
_REASONS = (
    (
        "28",
        "{where} refuses the login ({what}); check the user and password in DOVETAIL_DATABASE_URL",
    ),
    (
        "3D000",
        "{where}: {what}; create it with createdb, or name another in DOVETAIL_DATABASE_URL",
    ),
    (
        READ_ONLY,
        "{where} is read-only; is it a replica? DOVETAIL_DATABASE_URL must name the primary",
    ),
    ("53100", "the disk of {where} is full ({what}); free some space"),
    (
        "53300",
        "{where} has no connection left ({what}); raise its max_connections, or start fewer "
        f"processes: each may open {MAX_CONNECTIONS}",
    ),
    ("53", "{where} has run out of something ({what}); see its log"),
    (
        "42501",
        "{where}: {what}; its user needs the right to create the schema 'dovetail', or to own it: "
        "GRANT CREATE ON DATABASE",
    ),
    (
        "42P07",
        "{where} has a schema 'dovetail' of another program ({what}); use another database with "
        "DOVETAIL_DATABASE_URL",
    ),
    (
        "42P01",
        "{where} has lost its tables ({what}); restore them from a copy, or start Dovetail again "
        "to begin anew",
    ),
    ("57014", f"{{where}} took more than {STATEMENT_SECONDS:g} s ({{what}}); is it overloaded?"),
    (
        "55P03",
        f"another process has been migrating {{where}} for more than {MIGRATION_SECONDS:g} s; "
        "wait for it, or see what it waits for",
    ),
    ("57P", "{where} is starting or stopping ({what}); try again in a moment"),
    ("08", "{where} broke the connection ({what}); try again in a moment"),
    ("58", "{where} cannot read or write its files ({what}); is its disk full or failing?"),
    ("XX", "{where} may be damaged ({what}); see its log, and restore it from a copy"),
)


def _misnamed() -> StoreError:
    return StoreError(
        "DOVETAIL_DATABASE_URL cannot be understood; it is written like "
        "postgresql://user:password@host:5432/database"
    )


def _is_broken(error: Exception) -> bool:
    """Whether the connection is of no more use. asyncpg notices that in as many ways."""
    asyncpg = _library()
    kinds = (
        ConnectionError,
        asyncpg.PostgresConnectionError,
        asyncpg.AdminShutdownError,
        asyncpg.CrashShutdownError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,
    )
    return isinstance(error, kinds)


def _is_passing(error: Exception) -> bool:
    """Whether a second try, on another connection, may well succeed."""
    asyncpg = _library()
    again = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
    return _is_broken(error) or isinstance(error, again)


def _library() -> Any:
    """asyncpg, imported at first use: without a database it need not be installed."""
    try:
        import asyncpg  # type: ignore[import-untyped]
    except ImportError:
        raise StoreError(
            "PostgreSQL needs the package asyncpg: pip install 'dovetail[postgres]'"
        ) from None
    return asyncpg


def _direct() -> dict[str, Any]:
    return {
        "server_settings": {
            "application_name": "dovetail",
            "statement_timeout": _milliseconds(STATEMENT_SECONDS),
            "idle_in_transaction_session_timeout": _milliseconds(IDLE_TRANSACTION_SECONDS),
        }
    }


def _pooled() -> dict[str, Any]:
    """A pooler may refuse settings at the start of a session, and gives sessions to others."""
    return {"statement_cache_size": 0, "server_settings": {"application_name": "dovetail"}}


def _transaction_limits() -> str:
    return (
        f"SET LOCAL statement_timeout = {_milliseconds(STATEMENT_SECONDS)}; "
        "SET LOCAL idle_in_transaction_session_timeout = "
        f"{_milliseconds(IDLE_TRANSACTION_SECONDS)}"
    )


async def _nothing(connection: Any) -> None:
    """A connection is given back as it was taken: we set nothing on it, and a reset of its
    session would be another roundtrip for every statement."""


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
