"""Reviews in an SQLite file in the folder of results.

Several processes may use it. Threads of one process that write at the same time share a
transaction, and so the cost of its sync.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail import DovetailError, PermanentError, RetryableError, StoreError
from dovetail.documents.files import explained, is_file, opened_folder, refused
from dovetail.documents.reviews import SqlReviewStore, T, statements

SQL = "reviews_sqlite.sql"
SCHEMA_VERSION = 1
BUSY_SECONDS = 30.0
_RETRY_SECONDS = 0.01
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

_connecting = threading.Lock()

Work = Callable[[sqlite3.Connection], Any]


class SqliteReviewStore(SqlReviewStore):
    """A `ReviewStore` in an SQLite file."""

    no_limit = -1

    def __init__(self, path: Path, sync: str) -> None:
        self._path = path
        self._sync = sync
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._alone = threading.RLock()
        self._waiting: deque[_Request] = deque()

    def close(self) -> None:
        with self._alone:
            connection, self._connection, self._file = self._connection, None, None
            if connection is not None:
                connection.close()

    # --- work ----------------------------------------------------------------------------------

    def _read(self, name: str, *values: Any) -> list[Any]:
        sql = statements(SQL)[name]
        with self._alone:
            if not is_file(self._path):
                return []  # reading creates no file
            try:
                return self._opened().execute(sql, values).fetchall()
            except sqlite3.Error as error:
                raise self._explained(error) from error

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

        def work(connection: sqlite3.Connection) -> tuple[T | None, T]:
            row = connection.execute(sql[get], keys).fetchone()
            before = None if row is None else decode(row)
            after = rule(before)
            if after is not before:
                connection.execute(sql[put], encode(after))
            return before, after

        change: tuple[T | None, T] = self._write(work)
        return change

    def _write(self, work: Work) -> Any:
        request = _Request(work)
        self._waiting.append(request)
        with self._alone:
            if not request.done:  # else another thread has done it in its transaction
                requests = [self._waiting.popleft() for _ in range(len(self._waiting))]
                self._commit(requests)
        if request.error is not None:
            raise request.error
        return request.answer

    def _commit(self, requests: list[_Request]) -> None:
        """Do all requests in one transaction."""
        try:
            self._transact(requests)
        except sqlite3.Error as error:
            if len(requests) == 1:
                requests[0].settle(error=self._explained(error))
            else:
                for request in requests:  # one request must not fail the others
                    self._commit([request])
        except BaseException as error:
            for request in requests:
                request.settle(error=error)
            if not isinstance(error, Exception):
                raise

    def _transact(self, requests: list[_Request]) -> None:
        connection = self._opened()
        connection.execute("BEGIN IMMEDIATE")
        try:
            answers = [request.do(connection) for request in requests]
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        for request, (answer, error) in zip(requests, answers, strict=True):
            request.settle(answer, error)

    # --- the file ------------------------------------------------------------------------------

    def _opened(self) -> sqlite3.Connection:
        # The folder may have been deleted and created again; the open file is then a deleted one.
        if self._connection is not None and self._file == self._identity():
            return self._connection
        self.close()
        try:
            connection = self._connect()
        except OSError as error:
            raise explained(error, self._path) from error
        try:
            connection.execute(f"PRAGMA synchronous = {self._sync.upper()}")
            self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._file = connection, self._identity()
        return connection

    def _connect(self) -> sqlite3.Connection:
        """SQLite opens by path and follows links, so check afterwards which file it has opened.

        The check comes before any read or write. The file is created before SQLite opens it:
        SQLite would make it, and the files beside it, readable for all users.
        """
        name = self._path.name
        with _connecting, opened_folder(self._path.parent, create=True) as folder:
            folder.make_file(name)
            found = folder.stat(name)
            if not stat.S_ISREG(found.st_mode):
                raise refused(self._path, " is a link or no regular file; documents may use")
            connection = sqlite3.connect(
                f"{(folder.path / name).as_uri()}?mode=rw",
                uri=True,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            if not _has_open(found):
                connection.close()
                raise refused(self._path, " became a link while it was used; documents may use")
        return connection

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def _migrate(self, connection: sqlite3.Connection) -> None:
        if _version(connection) == SCHEMA_VERSION:
            return
        _switch_to_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = _version(connection)  # another process may have created it meanwhile
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"{self._path} was written by a newer Dovetail (schema {version}, this one "
                    f"knows {SCHEMA_VERSION}); upgrade Dovetail, or use another --out"
                )
            if version == 0:
                for statement in statements(SQL)["schema"].split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _explained(self, error: sqlite3.Error) -> DovetailError:
        """The error as a Dovetail error, with a remedy."""
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_FULL:
                why = f"{self._path}: the disk is full; free some space"
                return RetryableError(why, type="disk_full")
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                why = f"{self._path} was locked by another process for {BUSY_SECONDS:g} s"
                return RetryableError(why, type="locked")
            case sqlite3.SQLITE_IOERR:
                why = f"{self._path} cannot be read or written ({error}); is its disk failing?"
                return RetryableError(why, type="write_failed")
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
                why = f"{self._path} cannot be written ({error}); --out names another folder"
                return PermanentError(why, type="not_writable")
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                why = f"{self._path} is damaged or no database ({error}); restore it from a copy"
                return StoreError(f"{why}, or move it away to start anew")
        return StoreError(f"{self._path}: {error}")


class _Request:
    """The work of one thread, and its result."""

    __slots__ = ("_work", "answer", "done", "error")

    def __init__(self, work: Work) -> None:
        self._work = work
        self.done = False
        self.answer: Any = None
        self.error: BaseException | None = None

    def do(self, connection: sqlite3.Connection) -> tuple[Any, Exception | None]:
        """An error of a rule concerns this request only: the rule ran before any write."""
        try:
            return self._work(connection), None
        except sqlite3.Error:
            raise
        except Exception as error:
            return None, error

    def settle(self, answer: Any = None, error: BaseException | None = None) -> None:
        self.answer, self.error, self.done = answer, error, True


def _has_open(found: os.stat_result) -> bool:
    """Whether this process has that file open; True if the system cannot say."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return any(_is_same(int(name), found) for name in os.listdir(folder))  # noqa: PTH208
    return True


def _is_same(handle: int, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), found)
    except OSError:  # closed meanwhile, as the handle of the listing
        return False


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Retries: SQLite itself does not wait here if several processes open a new file at once."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _BUSY or time.monotonic() > give_up:
                raise
        time.sleep(_RETRY_SECONDS)
