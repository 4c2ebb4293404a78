"""Embedded files that are damaged, each in one way: a family that grows by a row.

`furnished` makes a file with everything in it; each `Damage` spoils a copy. Those of a run spoil
the victim alone, so that everything else must go on as if nothing were wrong with the file.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import orjson

from dovetail.config import Settings
from dovetail.handlers.context import Context
from dovetail.stores.sqlite.writer import PIECES
from dovetail.wiring.embedded import embedded

from ..engine.harness import definition, registry_of

PATIENT = {"held": True}
"""Whether the nodes of the file wait; a test that resumes its runs lets them go."""


async def waits(config: dict[str, object], ctx: Context) -> str:
    while PATIENT["held"]:
        await asyncio.sleep(0.01)
    return "done"


FLOW = definition({"a": "input", "b": {"handler": "waits", "after": ["a"]}}, name="flow")
QUICK = definition({"a": "input"}, name="quick")


class File(NamedTuple):
    """What there is in a file: each id is of one run."""

    path: Path
    victim: str
    """Unfinished, and without an owner."""
    other: str
    """The same, and never damaged."""
    ended: str
    batch: str


def settings_of(path: Path) -> Settings:
    return Settings(db=path, db_sync="normal", drain_seconds=0.05)


async def furnished(path: Path) -> File:
    settings = settings_of(path)
    PATIENT["held"] = True
    async with embedded(settings, registry_of(waits)) as commands:
        await commands.register(QUICK)
        await commands.set_alias("quick", "live", 1)
        await commands.set_rate_limit("api", 5.0, 2)
        ended = (await commands.trigger("quick", {"x": 1}, idempotency_key="k")).run_id
        await commands.wait(ended)
        batch = (await commands.batch("quick", [{"n": n} for n in range(3)]))["batch_id"]
        await commands.wait_batch(batch)
        victim = (await commands.trigger(FLOW, {"who": "victim"})).run_id
        # Another definition, so that what spoils that of the victim spoils no other run.
        other = (await commands.trigger({**FLOW, "name": "other"}, {"who": "other"})).run_id
        for run_id in (victim, other):
            async for event in commands.store.watch(run_id):
                if event.type == "node.started" and event.node == "b":
                    break
    return File(path, victim, other, ended, batch)


Spoil = Callable[[File, sqlite3.Connection], object]


class Damage(NamedTuple):
    name: str
    spoil: Spoil
    of: str
    """`run`: the victim alone; `record`: something beside runs; `file`: the file as a whole."""
    is_read: bool = False
    """The victim can be read all the same: only what lists show of it is wrong."""
    all_fails: bool = True
    """Of a file: nothing can be done with it. Else it depends on what is asked."""


def _number(file: File, connection: sqlite3.Connection) -> int:
    found = connection.execute("SELECT number FROM runs WHERE run_id = ?", (file.victim,))
    return int(found.fetchone()[0])


def _pieces(file: File, connection: sqlite3.Connection) -> tuple[int, int]:
    number = _number(file, connection)
    return number * PIECES, (number + 1) * PIECES - 1


def entries(change: Callable[[list[list[object]]], object], at: int = -1) -> Spoil:
    """Change the decoded entries of one piece of the victim's log."""

    def spoil(file: File, connection: sqlite3.Connection) -> None:
        rows = connection.execute(
            "SELECT id, entries FROM journal WHERE id BETWEEN ? AND ? ORDER BY id",
            _pieces(file, connection),
        ).fetchall()
        piece, content = rows[at]
        found = orjson.loads(content)
        changed = change(found)
        content = changed if isinstance(changed, bytes | str) else orjson.dumps(found)
        connection.execute("UPDATE journal SET entries = ? WHERE id = ?", (content, piece))

    return spoil


def event(field: int, value: object) -> Spoil:
    """Put another value into the first event of the victim's last piece that has one."""

    def change(found: list[list[object]]) -> None:
        for entry in found:
            events = entry[4]
            assert isinstance(events, list)
            if events:
                events[0][field] = value
                return

    return entries(change, at=1)


def column(name: str, value: object, table: str = "runs") -> Spoil:
    def spoil(file: File, connection: sqlite3.Connection) -> None:
        where = {"runs": "run_id", "batches": "batch_id"}.get(table)
        if table == "journal":
            first, last = _pieces(file, connection)
            sql = f"UPDATE journal SET {name} = ? WHERE id BETWEEN {first + 1} AND {last}"
            connection.execute(sql, (value,))
        elif where is None:
            connection.execute(f"UPDATE {table} SET {name} = ?", (value,))
        else:
            which = file.victim if table == "runs" else file.batch
            connection.execute(f"UPDATE {table} SET {name} = ? WHERE {where} = ?", (value, which))

    return spoil


def without_rules(spoil: Spoil) -> Spoil:
    """With no constraint in the way, as a file that another program wrote may be."""

    def unruled(file: File, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL,', ',')")
        connection.commit()
        with sqlite3.connect(file.path) as again:
            spoil(file, again)
            again.commit()
        again.close()

    return unruled


def journal(sql: str) -> Spoil:
    """A statement over the ids of the victim's pieces, `first` and `last`."""

    def spoil(file: File, connection: sqlite3.Connection) -> None:
        first, last = _pieces(file, connection)
        connection.execute(sql, {"first": first, "last": last, "second": first + 1})

    return spoil


def definition_of(value: object) -> Spoil:
    def spoil(file: File, connection: sqlite3.Connection) -> None:
        sql = "UPDATE definitions SET content = ? WHERE number = "
        sql += "(SELECT definition FROM runs WHERE run_id = ?)"
        connection.execute(sql, (value, file.victim))

    return spoil


def statement(sql: str) -> Spoil:
    return lambda file, connection: connection.execute(sql)


def whole(change: Callable[[Path], object]) -> Spoil:
    """Something that happens to the file itself."""

    def spoil(file: File, connection: sqlite3.Connection) -> None:
        connection.close()
        change(file.path)

    return spoil


def _flipped(seed: int) -> Callable[[Path], object]:
    def flip(path: Path) -> None:
        content, dice = bytearray(path.read_bytes()), random.Random(seed)
        for _ in range(40):
            content[dice.randrange(100, len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)

    return flip


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [
    Damage("truncated json", entries(lambda found: orjson.dumps(found)[:-3]), "run"),
    Damage("no json", entries(lambda found: b"junk"), "run"),
    Damage("no bytes", entries(lambda found: b""), "run"),
    Damage("not a list", entries(lambda found: b"{}"), "run"),
    Damage("a number for a log", entries(lambda found: b"7"), "run"),
    Damage("nan", entries(lambda found: b"[NaN]"), "run"),
    Damage("a text for a blob", entries(lambda found: "junk"), "run"),
    Damage("invalid utf-8 in json", entries(lambda found: b'[["\xff\xfe"]]'), "run"),
    Damage("nested too deep", entries(lambda found: b"[" * 5000), "run"),
    Damage("unknown field of an entry", entries(lambda found: found[0].append(1)), "run"),
    Damage("missing field of an entry", entries(lambda found: found[0].pop()), "run"),
    Damage("unknown transition", entries(lambda found: found[0].__setitem__(1, "teleport")), "run"),
    Damage("a list for a kind", entries(lambda found: found[0].__setitem__(1, [])), "run"),
    Damage("a text for a time", entries(lambda found: found[0].__setitem__(0, "now")), "run"),
    Damage("a huge time", entries(lambda found: found[0].__setitem__(0, 1e300)), "run", True),
    Damage("null for a time", entries(lambda found: found[0].__setitem__(0, None)), "run"),
    Damage("a node that is not there", event(2, "nobody"), "run"),
    Damage("unknown event", event(0, "node.teleported"), "run"),
    Damage("a number for an event", event(0, 7), "run"),
    Damage("an epoch that is a text", event(1, "1"), "run"),
    Damage("a huge epoch", event(1, 1 << 63), "run"),
    Damage("a negative attempt", event(3, -1), "run"),
    Damage("a list for data", event(4, [1]), "run"),
    Damage(
        "unknown field of an event",
        entries(lambda found: found[-1][4][0].append(1), at=1),  # type: ignore[index]
        "run",
    ),
    Damage(
        "published at no place",
        entries(lambda found: found[0].__setitem__(3, [99]), at=0),
        "run",
    ),
    Damage(
        "published from the end",
        entries(lambda found: found[0].__setitem__(3, [-1]), at=0),
        "run",
    ),
    Damage("an empty log", journal("DELETE FROM journal WHERE id BETWEEN :first AND :last"), "run"),
    Damage("no beginning", journal("DELETE FROM journal WHERE id = :first"), "run"),
    Damage("a missing piece", journal("DELETE FROM journal WHERE id = :second"), "run"),
    Damage("a gap in the numbers", column("seq", 1000, "journal"), "run"),
    Damage("a text for a number", column("seq", "x", "journal"), "run"),
    Damage("an empty definition", definition_of(b"{}"), "run"),
    Damage("a cut definition", definition_of(b'{"name": "w", "nodes": ['), "run"),
    Damage(
        "a definition of tomorrow",
        definition_of(b'{"name": "w", "nodes": [{"id": "a", "handler": "input"}], "x": 1}'),
        "run",
    ),
    Damage("a text for a definition", definition_of("junk"), "run"),
    Damage("a definition that is not there", column("definition", 999), "run"),
    Damage("params that are no json", column("params", b"{"), "run"),
    Damage("params that are a list", column("params", b"[1]"), "run"),
    Damage("retries that are no json", column("retries", b"\xff"), "run"),
    Damage("a text for a creation", column("created_at", "yesterday"), "run"),
    Damage("a text for a version", column("version", "one"), "run"),
    Damage("nothing for params", without_rules(column("params", None)), "run"),
    Damage("a status of tomorrow", column("status", "DREAMING"), "run", True),
    Damage("a blob for a status", column("status", b"\xff"), "run", True),
    Damage("another status", column("status", "COMPLETED"), "run", True),
    Damage("another epoch", column("epoch", 7), "run", True),
    Damage("an infinite beginning", column("started_at", float("-inf")), "run", True),
    Damage("an error that is no json", column("error", b"{"), "run", True),
    Damage(
        "a workflow's name that is no text",
        lambda file, c: c.execute(
            "UPDATE runs SET workflow = CAST(x'ff' AS TEXT) WHERE run_id = ?", (file.victim,)
        ),
        "run",
        True,
    ),
    Damage("a blob for a limit", column("rate_per_second", b"x", "limits"), "record"),
    Damage("a negative limit", column("rate_per_second", -1.0, "limits"), "record"),
    Damage("a text for a burst", column("burst", "many", "limits"), "record"),
    Damage("a text for a latest version", column("latest", "x", "workflows"), "record"),
    Damage("a text for a registration", column("created_at", "x", "versions"), "record"),
    Damage("versions that are gone", statement("DELETE FROM versions"), "record"),
    Damage("an alias to nothing", column("version", 99, "aliases"), "record"),
    Damage("a blob for an alias", column("version", b"x", "aliases"), "record"),
    Damage("a text for a count", column("count", "three", "batches"), "record"),
    Damage("a blob for a batch", column("workflow", b"\xff", "batches"), "record"),
    Damage("a key that made nothing", column("made", "nobody", "keys"), "record"),
    Damage("a blob for a key", column("made", b"\xff", "keys"), "record"),
    Damage(
        "an owner of nowhere",
        statement("INSERT INTO owners VALUES ('x', x'00', 'pid', x'00', 'ever')"),
        "record",
    ),
    Damage("an index that is gone", statement("DROP INDEX runs_by_status"), "record"),
    Damage("a table that is gone", statement("DROP TABLE limits"), "file", all_fails=False),
    Damage("runs that are gone", statement("DROP TABLE runs"), "file", all_fails=False),
    Damage("a newer schema", statement("PRAGMA user_version = 99"), "file"),
    Damage("another program's", statement("PRAGMA application_id = 7"), "file"),
    Damage("cut in half", whole(_cut), "file"),
    Damage("a header of zeros", whole(lambda path: path.write_bytes(bytes(4096))), "file"),
    Damage("a text", whole(lambda path: path.write_text("hello\n" * 500)), "file"),
    Damage("a folder", whole(_folder), "file"),
    Damage("nothing in it", whole(lambda path: path.write_bytes(b"")), "file", all_fails=False),
    *(
        Damage(f"bits flipped, {seed}", whole(_flipped(seed)), "file", all_fails=False)
        for seed in range(4)
    ),
]


def damaged(base: File, damage: Damage, folder: Path) -> File:
    """A copy of the file with this damage done to it."""
    copy = base._replace(path=folder / "runs.db")
    copy.path.write_bytes(base.path.read_bytes())
    connection = sqlite3.connect(copy.path, isolation_level=None)
    damage.spoil(copy, connection)
    with suppress(sqlite3.Error):
        connection.close()
    return copy
