"""Every external effect of this process by name, and a crash at one of them.

An effect is a statement that changes the file, or what a handler does outside. A point is
a side of an effect: `before COMMIT of submit`, `after add_run 3`, `before handler of left`. The
number counts the effects of that name, or the matching ones, from 1. What follows `of` is found
in an effect's details: of a piece of a journal its entries (`claim`, `claim left`, `end`), of
a COMMIT all that its transaction did. It hooks into `sqlite3` from outside, so the code under
test does not know of it.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import orjson

from dovetail.stores.sqlite.file import statements

_POINT = re.compile(r"(?P<side>before|after) (?P<effect>[\w ]+?)( (?P<nth>\d+))?( of (?P<of>.+))?")
_ENDS = {"run.completed", "run.failed", "run.cancelled"}

Watch = Callable[[str, str, frozenset[str]], None]


class Tripwire:
    """Ends the process as kill -9 would, at a point; `None` is nowhere."""

    def __init__(self, point: str | None) -> None:
        self._left = 0
        if point is not None:
            found = _POINT.fullmatch(point)
            assert found, point
            self._side, self._effect, self._of = found["side"], found["effect"], found["of"]
            self._left = int(found["nth"] or 1)

    def __call__(self, side: str, effect: str, details: frozenset[str]) -> None:
        if not self._left or side != self._side or effect != self._effect:
            return
        if self._of is None or self._of in details:
            self._left -= 1
            if not self._left:
                os._exit(9)


class Counter:
    """Ends the process at the so many-th side of any effect, whatever it is."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, side: str, effect: str, details: frozenset[str]) -> None:
        self._left -= 1
        if not self._left:
            os._exit(9)


def watch_connections(watch: Watch) -> None:
    """From now on every connection of this process shows its effects."""
    sqlite3.connect = partial(_connect, sqlite3.connect, watch)


def _connect(connect: Callable[..., Any], watch: Watch, *args: Any, **kwargs: Any) -> Any:
    connection = connect(*args, factory=_Watched, **kwargs)
    connection.watch = watch
    return connection


class _Watched(sqlite3.Connection):
    watch: Watch
    done: frozenset[str] = frozenset()
    """What the transaction has done so far."""

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        return self._watched(super().execute, sql, values, [values])

    def executemany(self, sql: str, rows: Any, /) -> sqlite3.Cursor:
        rows = list(rows)
        return self._watched(super().executemany, sql, rows, rows)

    def _watched(
        self, run: Callable[..., sqlite3.Cursor], sql: str, given: Any, rows: list[Any]
    ) -> sqlite3.Cursor:
        name = _name(sql)
        if name is None:
            return run(sql, given)
        if name == "BEGIN":
            self.done = frozenset()
        details = self.done if name == "COMMIT" else _details(name, rows)
        self.watch("before", name, details)
        cursor = run(sql, given)
        self.watch("after", name, details)
        self.done |= {name, *details}
        return cursor


@cache
def _name(sql: str) -> str | None:
    """None for what only reads."""
    for name, text in statements().items():
        if sql == text:
            return None if text.startswith("SELECT") else name
    first = sql.split()[0]
    if first == "PRAGMA":
        return f"PRAGMA {sql.split()[1]}" if "=" in sql else None
    return "schema" if first == "CREATE" else first


def _details(name: str, rows: Iterable[Any]) -> frozenset[str]:
    found = set()
    if name == "add_entries":
        for _, _, entries in rows:
            for _, kind, _, _, events in orjson.loads(entries):
                found.add(kind)
                found |= {f"{kind} {event[2]}" for event in events[:1]}
                found |= {"end" for event in events if event[0] in _ENDS}
    return frozenset(found)
