"""Who drives a run: the processes that share a file, as the file knows them.

It is a matter of liveness only. Two that both believe to drive a run do no harm; a run that
nobody believes to drive would wait for ever. Everything here is called with a connection, in
whichever thread that belongs to. What it must not know: what a run is made of.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from dovetail.stores.sqlite_file import is_gone, started_at, statements, this_machine

LOOK_SECONDS = 0.5
TIDY_SECONDS = 60.0
FORGOTTEN_SECONDS = 3600.0
"""An owner that was silent for so long, and has nothing to drive, need not be remembered."""


class Owner:
    """This process, as one of those that share the file."""

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
        for statement in ("drop_owner", "drop_nudges_of"):
            connection.execute(statements()[statement], (self.name,))

    @property
    def must_renew(self) -> bool:
        return time.monotonic() >= self._renew_at

    def renew(self, connection: sqlite3.Connection) -> None:
        """Say that we are here, and now and then clear away what nobody needs."""
        sql = statements()
        now = time.monotonic()
        until = now + self._lease_seconds
        if not connection.execute(sql["renew_owner"], (until, self.name)).rowcount:
            self.register(connection)  # we were forgotten; what we drove is others' by now
        self._renew_at = now + self._lease_seconds / 3
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_SECONDS
            boot = this_machine().split(" ")[0] + " %"
            connection.execute(sql["drop_old_owners"], (boot, now - FORGOTTEN_SECONDS))
            connection.execute(sql["drop_old_nudges"])
            connection.execute(sql["drop_old_outputs"], (time.time(),))

    def nudges(self, connection: sqlite3.Connection) -> list[int]:
        """The runs of ours that somebody else has moved."""
        return [row[0] for row in connection.execute(statements()["nudges"], (self.name,))]

    def drop_nudges(self, connection: sqlite3.Connection, runs: Sequence[int]) -> None:
        rows = [(self.name, number) for number in runs]
        connection.executemany(statements()["drop_nudge"], rows)

    def others(self, connection: sqlite3.Connection) -> set[str]:
        """Everybody else who is alive."""
        rows = connection.execute(statements()["owners"]).fetchall()
        return {row[0] for row in rows if row[0] != self.name and not _is_gone(row)}

    def orphans(self, connection: sqlite3.Connection) -> list[str]:
        """The unfinished runs that nobody drives, oldest first."""
        driving = self.others(connection) | {self.name}
        rows = connection.execute(statements()["unfinished"]).fetchall()
        # What has no readable id cannot be asked for; the doctor lists it.
        return [
            run_id for _, run_id, owner in rows if owner not in driving and isinstance(run_id, str)
        ]

    def take(self, connection: sqlite3.Connection, wanted: Sequence[str]) -> list[str]:
        """Make us the owner of those of these runs that nobody drives. In a transaction."""
        sql = statements()
        driving = self.others(connection) | {self.name}
        taken = []
        for run_id in wanted:
            row = connection.execute(sql["read_run"], (run_id,)).fetchone()
            if row is None or row[-1] in driving:
                continue
            number = row[0]
            connection.execute(sql["nudge"], (number, self.name))  # it may only be silent
            if connection.execute(sql["own_run"], (self.name, number)).rowcount:
                taken.append(run_id)
        return taken


def _is_gone(row: Sequence[Any]) -> bool:
    """Who cannot be read drives nothing: at worst a run is taken over, which does no harm."""
    try:
        return is_gone(*row[1:])
    except (AttributeError, TypeError, ValueError):
        return True
