"""The embedded file: who may read it, and how it is made."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import orjson
import pytest

from dovetail.core.errors import Expired
from dovetail.core.feed import FeedEntry, FeedPosition
from dovetail.core.node_logs import LogChunk, LogLine
from dovetail.core.transitions import Submit
from dovetail.stores.sqlite.file import (
    SCHEMA_VERSION,
    SqliteFile,
    readable_by_others,
    split_statements,
    statements,
)
from dovetail.stores.sqlite.group_commit import LOG_SECONDS
from dovetail.stores.sqlite.records import SqliteRecords
from dovetail.stores.sqlite.store import SqliteStore

from ..services.archive_world import DIAMOND, graph


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {path.name: f"{path.stat().st_mode & 0o777:o}" for path in folder.rglob("*")}


def test_the_file_and_its_side_files_are_private_to_their_owner(tmp_path: Path, umask: int) -> None:
    file = SqliteFile(tmp_path / "deep" / ".dovetail" / "dovetail.db")
    file.create()
    connection = file.connect()
    connection.execute("UPDATE owners SET pid = pid")  # which makes what is beside it
    assert modes(tmp_path) == {
        "deep": "700",
        ".dovetail": "700",
        "dovetail.db": "600",
        "dovetail.db-wal": "600",
        "dovetail.db-shm": "600",
    }
    assert readable_by_others(file.path) == []
    connection.close()


def test_a_file_that_is_shared_with_others_keeps_its_mode_and_is_noticed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = SqliteFile(tmp_path / "dovetail.db")
    file.create()
    file.path.chmod(0o660)
    connection = file.connect()
    connection.execute("UPDATE owners SET pid = pid")
    assert set(modes(tmp_path).values()) == {"660"}, "what is beside it follows"
    assert readable_by_others(file.path)[0] == file.path
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    connection.close()


def test_opening_the_file_again_drops_no_lock_of_another_connection(tmp_path: Path) -> None:
    file = SqliteFile(tmp_path / "dovetail.db")
    file.create()
    first = file.connect()
    first.execute("BEGIN IMMEDIATE")
    second = file.connect(wait=False)
    refusals: list[Exception] = []

    def write() -> None:
        try:
            second.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            refusals.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert len(refusals) == 1
    first.execute("ROLLBACK")
    first.close()
    second.close()


TO_THE_FIRST_VERSION = """
DROP VIEW v_runs; DROP VIEW v_nodes; DROP VIEW v_events; DROP VIEW v_logs;
DROP TRIGGER logs_of_deleted_runs; DROP TABLE logs;
DROP TABLE last_numbers; DROP INDEX keys_by_made; DROP TABLE feed; DROP TABLE feed_name;
DROP TABLE outbox; DROP TABLE dead_letters;
DROP TRIGGER exported_of_deleted_runs; DROP TABLE exported; DROP TABLE export;
DROP TABLE history; ALTER TABLE aliases DROP COLUMN weights;
ALTER TABLE batches DROP COLUMN deleted; ALTER TABLE batches DROP COLUMN deleted_end;
PRAGMA user_version = 1;
"""


async def test_a_file_of_the_first_version_is_upgraded_with_its_runs(tmp_path: Path) -> None:
    path = tmp_path / "dovetail.db"
    async with SqliteStore(path) as store:
        await store.create(Submit("r", graph(DIAMOND), {}), 1000.0)
    connection = sqlite3.connect(path)
    connection.executescript(TO_THE_FIRST_VERSION)
    connection.close()
    async with SqliteStore(path) as store:
        store.log([one_line("r", 0)])
        await store.apply([], 1000.0, durable=True)
        assert len(await SqliteRecords(store).logs("r")) == 1
        assert store.pragma("user_version") == SCHEMA_VERSION


async def followed(store: SqliteStore, count: int, after: FeedPosition) -> list[FeedEntry]:
    async with asyncio.timeout(5), aclosing(store.follow_feed(after)) as feed:
        return [await anext(feed) for _ in range(count)]


async def test_a_reader_resumes_in_the_middle_of_the_events_of_a_commit(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "dovetail.db") as store:
        start = await store.feed_start(None)
        runs = [f"r{number}" for number in range(150)]
        await asyncio.gather(
            *[store.create(Submit(run, graph(DIAMOND), {}), 1000.0) for run in runs]
        )
        rows = store.rows("read_feed", 0, 1000)
        assert len(rows) <= 8, "a commit adds one row for each 100 events"
        found = await followed(store, 300, start)
        assert [(one.run_id, one.event.seq) for one in found] == [
            (run, seq) for run in runs for seq in (1, 2)
        ]
        for place in (0, 98, 99, 100, 150, 298):
            after = await store.feed_start(str(found[place].position))
            (following,) = await followed(store, 1, after)
            assert following == found[place + 1]
        await store.transact(lambda c: c.execute(statements()["trim_feed"], (0.0, 120)))
        kept = [one for one in found if one.position.number[0] > 300 - 120]
        (oldest,) = await followed(store, 1, kept[0].position)
        assert oldest == kept[1]
        with pytest.raises(Expired):
            await store.feed_start(str(found[0].position))


async def test_the_events_of_an_older_feed_are_kept_by_the_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "dovetail.db"
    async with SqliteStore(path) as store:
        start = await store.feed_start(None)
        await store.create(Submit("r", graph(DIAMOND), {}), 1000.0)
        before = await followed(store, 2, start)
    connection = sqlite3.connect(path)
    (old,) = [
        one for one in split_statements(statements()["schema_5"]) if "CREATE TABLE feed (" in one
    ]
    connection.executescript(f"DROP TABLE feed; {old}; PRAGMA user_version = 7;")
    for entry in before:
        seq, at, kind, epoch, _, _, data = entry.event
        row = (entry.position.number[0], "r", entry.workflow, seq, at, kind, epoch)
        text = None if data is None else orjson.dumps(data)
        connection.execute("INSERT INTO feed VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, text))
    connection.commit()
    connection.close()
    async with SqliteStore(path) as store:
        assert await followed(store, 2, start) == before


async def test_a_damaged_row_of_the_feed_does_not_end_it(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "dovetail.db") as store:
        start = await store.feed_start(None)
        await store.create(Submit("r", graph(DIAMOND), {}), 1000.0)
        change = "UPDATE feed SET events = ? WHERE number = 2"
        for damage in (b"\xff", b"[[1, 2]]", b"7", b'{"a": 1}'):
            await store.transact(lambda c, damage=damage: c.execute(change, (damage,)))
            await store.create(Submit(f"r{damage!r}", graph(DIAMOND), {}), 1000.0)
            (found,) = await followed(store, 1, start)
            assert found.event.type == "run.created"


def one_line(run_id: str, number: int) -> LogChunk:
    return LogChunk(run_id, "a", 1, 1, number, [LogLine(1.0, "INFO", "l", "text")])


def test_a_trigger_is_one_statement_of_the_schema() -> None:
    (trigger,) = [
        one
        for one in split_statements(statements()["schema_2"])
        if one.startswith("CREATE TRIGGER")
    ]
    assert trigger.endswith("END")


async def test_a_missing_table_of_logs_is_found_and_not_in_the_way_of_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SqliteStore(tmp_path / "dovetail.db") as store:
        await store.transact(lambda c: c.execute("DROP TABLE logs"))
        for number in range(3):
            store.log([one_line("r", number)])
            await asyncio.sleep(2 * LOG_SECONDS)
        store.log([one_line("r", 3)])
        await store.create(Submit("r", graph(DIAMOND), {}), 1000.0)
        assert (await store.load("r")).id == "r"
        found = await SqliteRecords(store).doctor()
    assert [one.message for one in found if one.check == "schema" and not one.ok] == [
        "the table logs is missing",
        "the index logs_in_order is missing",
        "the index logs_by_attempt is missing",
    ]
    assert caplog.text.count("lines of logs are lost") == 1
