"""The SQLite file: opened, migrated, its errors explained, and the processes that own its runs.

Ownership is about liveness only. Two owners of one run do no harm; a run without an owner would
wait for ever.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from dovetail.core.errors import StoreError, StoreLost
from dovetail.core.feed import KEPT_SECONDS, MAX_KEPT_EVENTS
from dovetail.stores.records import named_statements

APPLICATION_ID = 0x444F5645
"""Written into the file's header, so that another program's database is not taken for ours."""
SCHEMA_VERSION = 8
BUSY_SECONDS = 30.0
"""How long to wait for another process that writes; a commit takes milliseconds."""
_RETRY_SECONDS = 0.01
FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""Runs have params and outputs of people: what is made here is for its owner alone."""
ROOM_BYTES = 16 * 1024 * 1024
"""With less left on its disk, only a write shows whether there is room for one."""
_READABLE = partial(str, encoding="utf-8", errors="replace")
"""A text that is none is shown as far as it is one. SQLite would fail the whole list of rows."""


@cache
def statements() -> dict[str, str]:
    """The SQL of queries.sql, by name."""
    return named_statements("dovetail.stores.sqlite")


class SqliteFile:
    """Where it is and how it is opened. A connection of its own for every thread that needs one."""

    def __init__(
        self, path: Path, sync: Literal["full", "normal"] = "full", name: Path | None = None
    ) -> None:
        """`name` is what messages call it, if that is not its path."""
        self.path = path
        self.name = path if name is None else name
        self.sync = sync
        where = path.absolute()  # a handler may change the folder of the process
        self._watched = {"": where, "-wal": Path(f"{where}-wal")}
        self._opened: dict[str, tuple[int, int]] = {}

    # ── is it still the file that was opened? ────────────────────────────────────────────

    def remember(self) -> None:
        """From now on `check` compares with the files that are there now."""
        self._opened = {}
        for end in self._watched:
            if (found := self._identity(end)) is not None:
                self._opened[end] = found

    def check(self) -> None:
        """Raises `StoreLost` if the file, or its log, was deleted or replaced since it was opened.

        SQLite notices nothing: it goes on to write into a file that has no name any more.
        """
        for end, opened in self._opened.items():
            found = self._identity(end)
            if found != opened:
                what = "deleted or moved" if found is None else "replaced by another file"
                raise StoreLost(
                    f"{self.path}{end} was {what} while it was in use: whatever is written from "
                    "now on would be lost, so nothing is accepted any more. Put the file back, "
                    "or restore it from a copy, and start again"
                )

    def _identity(self, end: str) -> tuple[int, int] | None:
        try:
            found = self._watched[end].stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return self._opened.get(end)  # it cannot be asked now, which says nothing
        return found.st_dev, found.st_ino

    @staticmethod
    def abandon(connection: sqlite3.Connection) -> None:
        """Never close this connection, not even at the end of the process.

        The last connection that is closed deletes the log by its name. If the file was replaced,
        that is the log of another database.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))

    def create(self) -> None:
        """Make the file, or bring an older one to this version. Raises `StoreError`."""
        try:
            _make_folder(self.path.parent)
        except OSError as error:
            raise StoreError(
                f"cannot make the folder {self.path.parent}: {error.strerror}; "
                "DOVETAIL_DB names another file"
            ) from None
        connection = self.connect()
        connection.close()

    def connect(self, *, wait: bool = True) -> sqlite3.Connection:
        """Raises `StoreError` for a file that is not ours, not whole or not writable.

        Without `wait` a statement fails at once where another process holds the lock.
        """
        _make_file(self.path)
        try:
            connection = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self.explained(error) from error
        try:
            connection.text_factory = _READABLE
            connection.execute(f"PRAGMA synchronous = {self.sync.upper()}")
            self._check(connection)
            self._migrate(connection)
            if not wait:
                connection.execute("PRAGMA busy_timeout = 0")
        except sqlite3.Error as error:
            connection.close()
            raise self.explained(error) from error
        except UnicodeDecodeError as error:  # SQLite quotes a damaged schema in its message
            connection.close()
            raise self.explained(sqlite3.DatabaseError("malformed database schema")) from error
        except StoreError:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        version, application, tables = _header(connection)
        if application != APPLICATION_ID and (application or version or tables):
            raise StoreError(
                f"{self.path} is a database of another program; DOVETAIL_DB names another file"
            )
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer Dovetail (schema {version}, this one knows "
                f"{SCHEMA_VERSION}); upgrade Dovetail, or use another file with DOVETAIL_DB"
            )

    def _migrate(self, connection: sqlite3.Connection) -> None:
        version, _, _ = _header(connection)
        if version == SCHEMA_VERSION:
            return
        # Only a file without tables takes it. There the space of deleted rows is given back in
        # small steps.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _switch_to_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        try:
            version, _, _ = _header(connection)  # another process may have migrated meanwhile
            numbers = range(version + 1, SCHEMA_VERSION + 1)
            for name in ("drop_views", *(f"schema_{number}" for number in numbers), "views"):
                for statement in split_statements(statements()[name]):
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def has_room(self) -> bool:
        """Whether there is no doubt that the file can grow."""
        try:
            disk = os.statvfs(self.path.parent)
        except (OSError, AttributeError):  # not on this platform
            return True
        return disk.f_bavail * disk.f_frsize >= ROOM_BYTES and not disk.f_flag & os.ST_RDONLY

    def explained(self, error: sqlite3.Error) -> StoreError:
        """What went wrong, and what would help."""
        what = str(error)
        where = str(self.path)
        code = getattr(error, "sqlite_errorcode", None)
        primary = None if code is None else code & 0xFF
        reason = "the database file cannot be used"
        match primary:
            case sqlite3.SQLITE_FULL:
                why = f"the disk of {where} is full; free some space"
                reason = "the disk of the database file is full"
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
                why = (
                    f"{where} cannot be written; it or its folder is read-only for this user: "
                    "make it writable, or name another file by DOVETAIL_DB"
                )
                reason = "the database file is read-only"
            case sqlite3.SQLITE_CANTOPEN:
                why = f"{where} cannot be opened; its folder must exist and be writable"
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return StoreError(
                    f"{where} is damaged or no database ({what}); restore it from a copy, or "
                    "move it away to start anew"
                )
            case sqlite3.SQLITE_ERROR if what.startswith("no such "):
                return StoreError(
                    f"{where} is damaged: {what}; restore it from a copy, or move it away to "
                    "start anew"
                )
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                why = f"{where} was locked by another process for more than {BUSY_SECONDS:g} s"
                reason = "the database file is locked by another process"
            case sqlite3.SQLITE_IOERR:
                why = f"{where} cannot be read or written ({what}); is its disk full or failing?"
                reason = "the database file cannot be read or written; its disk may be full"
            case _:
                why = f"{where}: {what}"
        explained = StoreError(f"{why} (nothing that was acknowledged is lost)")
        explained.reason = reason
        return explained


def _make_folder(folder: Path) -> None:
    """With missing parents, for this user alone; `parents=True` would not do that."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def _make_file(path: Path) -> None:
    """An empty file for this user alone, unless there is one: SQLite would let all users read it.

    It gives the files beside it the mode of this one. An existing file keeps its mode: a
    user who has opened it to a group wants to share it. It is not opened here: closing it would
    drop the locks that this process holds on it by another connection.
    """
    with suppress(OSError):  # there is one; else SQLite says what is wrong
        if sys.platform == "linux":
            os.mknod(path, FILE_MODE | stat.S_IFREG)
        else:  # where only root may
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def readable_by_others(path: Path) -> list[Path]:
    """The file and those beside it, as far as others than their owner may read or write them."""
    found = []
    for one in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
        with suppress(OSError):
            if stat.S_IMODE(one.stat().st_mode) & 0o077:
                found.append(one)
    return found


def _header(connection: sqlite3.Connection) -> tuple[int, int, int]:
    # The mark last: another process may make the file between two reads, and tables without it
    # would be another program's.
    tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    return version, application, tables


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """SQLite does not wait here by itself when several processes open a new file at once."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > give_up:
                raise
            time.sleep(_RETRY_SECONDS)


def split_statements(script: str) -> list[str]:
    found, statement = [], ""
    for part in script.split(";"):
        statement += f"{part};"
        if sqlite3.complete_statement(statement):  # else it is a trigger, which has statements
            found.append(statement.strip(" \n;"))
            statement = ""
    return [statement for statement in found if statement]


# ── is another process still there? ──────────────────────────────────────────────────────


@cache
def this_machine() -> str:
    """Names this boot of this machine, and the room (container) whose process ids we see."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        room = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return " "  # not Linux: then only leases say
    return f"{boot} {room}"


def started_at(pid: int) -> str:
    """Tells a process from a later one with the same number; empty if there is none, or no way.

    A zombie is none.
    """
    try:
        # The name of the command, in parentheses, may contain anything; 20 fields after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        return ""


def is_gone(machine: str, pid: int, started: str, lease_until: float) -> bool:
    """Whether this owner drives nothing any more: dead, or silent for longer than its lease."""
    here = this_machine()
    if machine.split(" ")[0] != here.split(" ")[0]:
        return True  # of an earlier boot: the file does not travel between machines while open
    if time.monotonic() > lease_until:
        return True
    if machine != here or not started:
        return False
    return started_at(pid) != started


LOOK_SECONDS = 0.5
TIDY_SECONDS = 60.0
FORGOTTEN_SECONDS = 3600.0
"""An owner that was silent for so long, and has nothing to drive, need not be remembered."""


class Owner:
    """This process, as one of the processes that share the file."""

    def __init__(self, lease_seconds: float) -> None:
        self.name = f"{os.getpid()}-{os.urandom(6).hex()}"
        self._lease_seconds = lease_seconds
        self.pause_seconds = min(LOOK_SECONDS, lease_seconds / 10)
        """How often to look whether it is time to renew the lease."""
        self._renew_at = self._tidy_at = 0.0

    def register(self, connection: sqlite3.Connection) -> None:
        pid = os.getpid()
        until = time.monotonic() + self._lease_seconds
        row = (self.name, this_machine(), pid, started_at(pid), until)
        connection.execute(statements()["add_owner"], row)
        self._renew_at = time.monotonic() + self._lease_seconds / 3

    def leave(self, connection: sqlite3.Connection) -> None:
        for statement in ("drop_owner", "drop_notifications_of"):
            connection.execute(statements()[statement], (self.name,))

    @property
    def must_renew(self) -> bool:
        return time.monotonic() >= self._renew_at

    def renew(self, connection: sqlite3.Connection) -> None:
        """Renew the lease of this process, and now and then delete old rows."""
        sql = statements()
        now = time.monotonic()
        until = now + self._lease_seconds
        if not connection.execute(sql["renew_owner"], (until, self.name)).rowcount:
            self.register(connection)  # this owner was deleted; its runs have other owners by now
        self._renew_at = now + self._lease_seconds / 3
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_SECONDS
            boot = this_machine().split(" ")[0] + " %"
            connection.execute(sql["drop_old_owners"], (boot, now - FORGOTTEN_SECONDS))
            connection.execute(sql["drop_old_notifications"])
            connection.execute(sql["drop_old_outputs"], (time.time(),))
            connection.execute(sql["trim_feed"], (time.time() - KEPT_SECONDS, MAX_KEPT_EVENTS))

    def notifications(self, connection: sqlite3.Connection) -> list[int]:
        """Runs of this process that another process has moved."""
        return [row[0] for row in connection.execute(statements()["notifications"], (self.name,))]

    def drop_notifications(self, connection: sqlite3.Connection, runs: Sequence[int]) -> None:
        rows = [(self.name, number) for number in runs]
        connection.executemany(statements()["drop_notification"], rows)

    def others(self, connection: sqlite3.Connection) -> set[str]:
        """All other owners that are alive."""
        rows = connection.execute(statements()["owners"]).fetchall()
        return {row[0] for row in rows if row[0] != self.name and not _is_gone(row)}

    def orphans(self, connection: sqlite3.Connection) -> list[str]:
        """Unfinished runs without a live owner, oldest first."""
        driving = self.others(connection) | {self.name}
        rows = connection.execute(statements()["unfinished"]).fetchall()
        # What has no readable id cannot be asked for; the doctor lists it.
        return [
            run_id for _, run_id, owner in rows if owner not in driving and isinstance(run_id, str)
        ]

    def take(self, connection: sqlite3.Connection, wanted: Sequence[str]) -> list[str]:
        """Own those of these runs that have no live owner. In a transaction."""
        sql = statements()
        driving = self.others(connection) | {self.name}
        taken = []
        for run_id in wanted:
            row = connection.execute(sql["read_run"], (run_id,)).fetchone()
            if row is None or row[-1] in driving:
                continue
            number = row[0]
            connection.execute(sql["notify_owner"], (number, self.name))  # it may only be silent
            if connection.execute(sql["own_run"], (self.name, number)).rowcount:
                taken.append(run_id)
        return taken


def _is_gone(row: Sequence[Any]) -> bool:
    """An unreadable owner counts as gone: at worst a run is taken over, which does no harm."""
    try:
        return is_gone(*row[1:])
    except (AttributeError, TypeError, ValueError):
        return True
