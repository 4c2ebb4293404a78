"""Runs are deleted from the file, and the file gives their space back.

Both go in small transactions with pauses, so that other writers wait for milliseconds. A crash in
between leaves a whole file: a run is deleted with everything that belongs to it, or not at all.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple, TypeVar

from dovetail.stores.sqlite.file import statements
from dovetail.stores.sqlite.writer import PIECES, Writer, piece

RUN_TABLES = ("delete_journal", "delete_keys", "delete_notifications", "delete_run")
"""Everything that belongs to a run: a statement for each table, by name. They may use `:number`,
`:run_id`, `:first_piece` and `:last_piece`. The row of the run comes last."""
BATCH_SIZE = 50
"""Runs of one transaction: that takes some milliseconds."""
LEAST_PAUSE_SECONDS = 0.005
"""Between two transactions; and at least as long as a transaction took."""
PAGES_PER_STEP = 256
"""Pages that are given back in one transaction."""
MAX_VACUUM_BYTES = 1 << 30
"""A larger file is not rewritten as a whole: that would take too long."""
INCREMENTAL = 2
"""What `PRAGMA auto_vacuum` says of a file that can be shortened in steps."""

T = TypeVar("T")


class Deleted(NamedTuple):
    run_ids: list[str]
    definitions: set[tuple[int, str]]
    """The definitions of these runs, by number, each with its workflow."""


def delete_runs(
    connection: sqlite3.Connection, run_ids: Iterable[str], ended_before: float = inf
) -> Deleted:
    """Delete the ones of these runs that ended at that time or before. In a transaction."""
    sql = statements()
    deleted = Deleted([], set())
    for run_id in run_ids:
        row = connection.execute(sql["deletable_run"], (run_id, ended_before)).fetchone()
        if row is None:
            continue
        number, definition, workflow, batch, finished_at = row
        names = {
            "number": number,
            "run_id": run_id,
            "first_piece": piece(number, 0),
            "last_piece": piece(number, PIECES - 1),
        }
        for name in RUN_TABLES:
            connection.execute(sql[name], names)
        connection.execute(sql["keep_number"], (number, "runs"))
        if batch is not None:
            _leave_batch(connection, batch, finished_at)
        deleted.run_ids.append(run_id)
        deleted.definitions.add((definition, workflow))
    return deleted


def _leave_batch(connection: sqlite3.Connection, batch: int, finished_at: float) -> None:
    """A batch counts its deleted runs, and goes with the last of them."""
    sql = statements()
    connection.execute(sql["count_deleted"], (finished_at, batch))
    emptied = connection.execute(sql["emptied_batch"], (batch,)).fetchone()
    if emptied is not None:
        connection.execute(sql["delete_keys"], {"run_id": emptied[0]})
        connection.execute(sql["delete_batch"], (batch,))
        connection.execute(sql["keep_number"], (batch, "batches"))


def delete_unused(connection: sqlite3.Connection, definition: tuple[int, str]) -> None:
    """Delete a definition that no run and no version uses. In a transaction."""
    sql = statements()
    if connection.execute(sql["delete_unused_definition"], definition).rowcount:
        connection.execute(sql["keep_number"], (definition[0], "definitions"))


class SpaceReclaimer:
    """Gives the space of deleted rows back to the disk."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def reclaim(self, *, is_alone: Callable[[sqlite3.Connection], bool]) -> None:
        """Shorten the file by its free pages.

        A file that was made without this ability is rewritten once, if it is not too large and
        `is_alone` says that no other process works with it. Else it stays as long as it is, and
        its free pages are used for new runs.
        """
        if await self._ask("freelist_count") < PAGES_PER_STEP:
            return  # new runs need so many soon
        if await self._ask("auto_vacuum") != INCREMENTAL:
            await self._writer.perform(lambda connection: _rewrite(connection, is_alone))
            return
        while await self._ask("freelist_count"):
            await paced(self._writer, _free_some)
        await self._writer.perform(_shorten)

    def _ask(self, pragma: str) -> asyncio.Future[int]:
        return self._writer.perform(lambda connection: _pragma(connection, pragma))


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _free_some(connection: sqlite3.Connection) -> None:
    # As a script: `execute` would free one page, because the statement yields a row for each.
    connection.executescript(f"PRAGMA incremental_vacuum({PAGES_PER_STEP})")


def _rewrite(
    connection: sqlite3.Connection, is_alone: Callable[[sqlite3.Connection], bool]
) -> None:
    used = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
    if used * _pragma(connection, "page_size") > MAX_VACUUM_BYTES or not is_alone(connection):
        return
    connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
    with suppress(sqlite3.OperationalError):  # a reader is in the way: another time
        connection.execute("VACUUM")
        _shorten(connection)


def _shorten(connection: sqlite3.Connection) -> None:
    """Carry the log over, which shortens the file, and empty the log if no reader needs it."""
    usual = _pragma(connection, "busy_timeout")
    connection.execute("PRAGMA busy_timeout = 100")
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.execute(f"PRAGMA busy_timeout = {usual}")


async def paced(writer: Writer, work: Callable[[sqlite3.Connection], T]) -> T:
    """Do this in the writer's thread, then leave the file to others for as long as it took."""
    took = 0.0

    def timed(connection: sqlite3.Connection) -> T:
        nonlocal took
        began = time.perf_counter()
        try:
            return work(connection)
        finally:
            took = time.perf_counter() - began

    done = await writer.perform(timed)
    await asyncio.sleep(max(LEAST_PAUSE_SECONDS, took))
    return done


def runs_ended_before(rows: Sequence[Any], before: float) -> tuple[list[str], bool]:
    """Of these rows of `ended_runs` the runs that ended by then; whether later rows may, too."""
    found = [
        run_id
        for _, run_id, _, finished_at in rows
        if isinstance(run_id, str) and isinstance(finished_at, float) and finished_at <= before
    ]
    # A run ends after it was created, and numbers are given in this order.
    return found, bool(rows) and isinstance(rows[-1][2], float) and rows[-1][2] <= before
