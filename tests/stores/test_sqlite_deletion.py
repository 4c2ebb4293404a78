"""Runs are deleted from the embedded file, which gives their space back."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import NotFound
from dovetail.core.run import RunState
from dovetail.core.transitions import Cancel, Claim, Complete, Retry, Submit
from dovetail.engine.prune import prune
from dovetail.handlers.builtin import builtin_registry
from dovetail.stores.sqlite import deletion
from dovetail.stores.sqlite.file import SqliteFile, split_statements, statements
from dovetail.stores.sqlite.records import SqliteRecords
from dovetail.stores.sqlite.store import SqliteStore
from dovetail.stores.sqlite.writer import piece
from dovetail.wiring.embedded import attached, embedded

MANY = 20_000
NODES = [{"id": "a", "handler": "work"}]


def graph(name: str = "t", nodes: Any = NODES) -> Graph:
    return build_graph(Workflow.model_validate({"name": name, "nodes": nodes}), {})


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[list[SqliteStore]]:
    """As two processes open the file."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(SqliteStore(tmp_path / "runs.db", sync="normal"))
            for _ in range(2)
        ]


async def cancelled(store: SqliteStore, made_of: Graph, **more: Any) -> str:
    run_id = os.urandom(16).hex()
    await store.create(Submit(run_id, made_of, {}, **more), time.time())
    await store.apply([Cancel(run_id)], time.time(), durable=True)
    return run_id


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


# --- what belongs to a run -----------------------------------------------------------------------


async def test_nothing_of_a_deleted_run_stays_in_the_file(stores: list[SqliteStore]) -> None:
    store, other = stores
    run_id = await cancelled(store, graph(), key=("runs", "key", "body"))
    assert await other.delete([run_id]) == [run_id]
    assert await other.delete([run_id]) == []
    for table in ("runs", "journal", "keys", "nudges", "definitions"):
        assert rows(store.file.path, f"SELECT COUNT(*) FROM {table}") == [(0,)], table
    with pytest.raises(NotFound):
        await store.load(run_id)


async def test_a_definition_that_another_run_or_a_version_uses_stays(
    stores: list[SqliteStore],
) -> None:
    store, _ = stores
    shared, alone = graph("shared"), graph("alone")
    first, second, third = [await cancelled(store, one) for one in (shared, shared, alone)]
    await store.delete([first, third])
    assert rows(store.file.path, "SELECT COUNT(*) FROM definitions") == [(1,)]
    assert (await store.load(second)).graph.name == "shared"


async def test_numbers_of_deleted_runs_and_definitions_are_not_given_again(
    stores: list[SqliteStore],
) -> None:
    """Another process knows them by number, and would take one for the other."""
    store, other = stores
    old = await cancelled(store, graph("old", [{"id": "of_old", "handler": "work"}]))
    await other.load(old)
    before = rows(store.file.path, "SELECT number, definition FROM runs")
    await store.delete([old])
    new = await cancelled(store, graph("new", [{"id": "of_new", "handler": "work"}]))
    after = rows(store.file.path, "SELECT number, definition FROM runs")
    assert [a > b for a, b in zip(after[0], before[0], strict=True)] == [True, True]
    assert list((await other.load(new)).graph.index) == ["of_new"]


async def test_only_finished_runs_that_ended_by_then_are_deleted(stores: list[SqliteStore]) -> None:
    store, _ = stores
    done = await cancelled(store, graph())
    going_on = os.urandom(16).hex()
    await store.create(Submit(going_on, graph(), {}), time.time())
    ended = (await store.load(done)).finished_at
    assert ended is not None
    assert await store.delete([going_on, done], ended_before=ended - 0.001) == []
    assert await store.delete([going_on, done], ended_before=ended) == [done]
    assert not (await store.load(going_on)).finished


async def test_a_batch_does_not_wait_for_a_deleted_run_and_goes_with_the_last_one(
    stores: list[SqliteStore],
) -> None:
    store, other = stores
    submits = [Submit(os.urandom(16).hex(), graph(), {}) for _ in range(2)]
    await store.create_batch("b" * 32, submits, ("batches", "key", "body"), time.time())
    runs = [submit.run_id for submit in submits]
    await store.apply([Cancel(run_id) for run_id in runs], time.time(), durable=True)
    records = SqliteRecords(other)
    ended = (await records.get_batch("b" * 32))["finished_at"]
    assert ended is not None
    await store.delete(runs[1:])
    batch = await records.get_batch("b" * 32)
    assert (batch["count"], batch["counts"], batch["finished_at"]) == (2, {"CANCELLED": 1}, ended)
    assert [run["run_id"] for run in batch["runs"]] == runs[:1]
    await store.delete(runs[:1])
    with pytest.raises(NotFound):
        await records.get_batch("b" * 32)
    assert rows(store.file.path, "SELECT COUNT(*) FROM keys") == [(0,)]


async def test_an_open_batch_waits_for_runs_that_were_not_made_yet(
    stores: list[SqliteStore],
) -> None:
    store, _ = stores
    records = SqliteRecords(store)
    await records.open_batch("c" * 32, "t", 2, None, time.time())
    number = await records.batch_number("c" * 32)
    first = await cancelled(store, graph(), place=(number, 0))
    await store.delete([first])
    assert (await records.get_batch("c" * 32))["finished_at"] is None
    await cancelled(store, graph(), place=(number, 1))
    assert (await records.get_batch("c" * 32))["finished_at"] is not None


# --- at the same moment --------------------------------------------------------------------------


async def test_a_retry_that_comes_after_the_deletion_decides_nothing(
    stores: list[SqliteStore],
) -> None:
    store, other = stores
    run_id = await cancelled(store, graph())
    held = other._fetch(run_id)  # as a process has it that is about to retry it
    assert held is not None
    assert await store.delete([run_id]) == [run_id]
    (decision,) = await other.apply([Retry(run_id, None)], time.time(), durable=True)
    assert not decision
    assert rows(store.file.path, "SELECT COUNT(*) FROM journal") == [(0,)]
    await other.check_writable()


async def test_of_a_deletion_and_a_retry_one_wins(stores: list[SqliteStore]) -> None:
    store, other = stores
    for _ in range(30):
        run_id = await cancelled(store, graph())
        deleted, (decision,) = await asyncio.gather(
            store.delete([run_id]),
            other.apply([Retry(run_id, None)], time.time(), durable=True),
        )
        assert bool(deleted) != bool(decision)


async def test_a_late_result_of_a_deleted_run_leaves_nothing(stores: list[SqliteStore]) -> None:
    store, other = stores
    run_id = os.urandom(16).hex()
    made = await store.create(Submit(run_id, graph(), {}), time.time())
    (order,) = made.dispatch
    now = time.time()
    await store.apply([Claim(run_id, "a", order.token, "w", now + 10)], now, durable=True)
    await store.apply([Complete(run_id, "a", order.token, {})], now, durable=True)
    other._fetch(run_id)
    await store.delete([run_id])
    for one in stores:
        (decision,) = await one.apply([Complete(run_id, "a", order.token, {})], now, durable=True)
        assert not decision
    assert rows(store.file.path, "SELECT COUNT(*) FROM journal") == [(0,)]


async def test_callers_that_wait_for_a_run_of_another_process_hear_of_its_deletion(
    stores: list[SqliteStore],
) -> None:
    store, other = stores
    run_id = await cancelled(store, graph())
    waiting: list[asyncio.Future[RunState]] = [other._end_of(run_id)]
    await store.delete([run_id])
    with pytest.raises(NotFound):
        await asyncio.wait_for(waiting[0], 10)


# --- many runs -----------------------------------------------------------------------------------


def fill(path: Path, count: int, ended: float) -> None:
    """So many runs that ended then, each with a few KB, written by SQL."""
    file = SqliteFile(path, "normal")
    file.create()
    with closing(file.connect()) as connection:
        connection.execute("BEGIN IMMEDIATE")
        content = orjson.dumps({"name": "t", "nodes": NODES})
        connection.execute(statements()["add_definition"], ("digest", content))
        text = orjson.dumps("x" * 1000)
        for number in range(count):
            made = connection.execute(
                statements()["add_run"],
                (
                    *(f"{number:032x}", "t", None, 1, b"{}", b"{}", None, None, ended - 1.0, None),
                    *("COMPLETED", 1, ended - 1.0, ended, None, text),
                ),
            ).lastrowid
            assert made is not None
            connection.execute(statements()["add_entries"], (piece(made, 0), 1, text))
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*"))


async def test_a_run_that_is_triggered_while_many_are_pruned_is_answered_within_a_second(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs.db"
    fill(path, MANY, time.time() - 100)
    full = size(path)
    settings = Settings(db=path)
    flow = {"name": "quick", "nodes": [{"id": "a", "handler": "output"}]}
    latencies: list[float] = []
    async with (
        attached(settings) as pruner,
        embedded(settings, builtin_registry(settings)) as commands,
    ):
        pruning = asyncio.create_task(prune(pruner, ended_before=time.time() - 50, workflow="t"))
        while not pruning.done():
            began = time.perf_counter()
            await commands.trigger(flow)
            latencies.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)
        assert await pruning == MANY
        assert rows(path, "SELECT COUNT(*) FROM runs WHERE workflow = 't'") == [(0,)]
    assert size(path) < full / 10
    assert len(latencies) > 5
    assert max(latencies) < 1.0
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


PRUNE = """
import asyncio, sys, time
from pathlib import Path
from dovetail.config import Settings
from dovetail.engine.prune import prune
from dovetail.wiring.embedded import attached

async def main():
    async with attached(Settings(db=Path(sys.argv[1]))) as commands:
        print("begun", flush=True)
        await prune(commands)

asyncio.run(main())
"""


def test_a_prune_that_is_killed_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    fill(path, 4000, time.time())
    for seconds in (0.05, 0.15, 0.3):
        process = subprocess.Popen(
            [sys.executable, "-c", PRUNE, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]
        assert rows(path, "SELECT COUNT(*) FROM runs") == rows(path, "SELECT COUNT(*) FROM journal")
    done = subprocess.run([sys.executable, "-c", PRUNE, str(path)], check=True, timeout=60)
    assert done.returncode == 0
    assert rows(path, "SELECT COUNT(*) FROM runs") == [(0,)]


# --- space ---------------------------------------------------------------------------------------


def made_by_an_older_version(path: Path, count: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in split_statements(statements()["schema_1"]):
            connection.execute(statement)
        connection.execute("PRAGMA application_id = 0x444F5645")
        connection.execute("PRAGMA user_version = 1")
    fill(path, count, time.time() - 100)


async def test_a_file_of_an_older_version_is_rewritten_once_if_no_process_drives_its_runs(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs.db"
    made_by_an_older_version(path, 2000)
    full, inode = size(path), path.stat().st_ino
    assert rows(path, "PRAGMA auto_vacuum") == [(0,)]
    settings = Settings(db=path)
    async with attached(settings) as pruner:
        async with embedded(settings, builtin_registry(settings)):
            assert await prune(pruner, ended_before=time.time()) == 2000
            assert rows(path, "PRAGMA auto_vacuum") == [(0,)], "a process is at work"
        await pruner.reclaim_space()
    assert rows(path, "PRAGMA auto_vacuum") == [(deletion.INCREMENTAL,)]
    assert size(path) < full / 5
    assert path.stat().st_ino == inode


# --- retention -----------------------------------------------------------------------------------


async def test_the_engine_deletes_runs_that_ended_before_the_retention_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dovetail.wiring.embedded.RETENTION_PAUSE_SECONDS", 0.05)
    path = tmp_path / "runs.db"
    fill(path, 1500, time.time() - 100)
    flow = {"name": "young", "nodes": [{"id": "a", "handler": "output"}]}
    settings = Settings(db=path, retention_days=50 / 86400)
    caplog.set_level("INFO", "dovetail.store")
    async with embedded(settings, builtin_registry(settings)) as commands:
        young = (await commands.trigger(flow)).run_id
        await commands.wait(young)
        async with asyncio.timeout(20):
            while rows(path, "SELECT COUNT(*) FROM runs") != [(1,)]:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert (await commands.get_run(young))["status"] == "COMPLETED"
    said = [record.getMessage() for record in caplog.records if "retention" in record.getMessage()]
    assert said == ["retention: deleted 1,500 runs that ended more than 0.000578704 days ago"]


async def test_the_file_keeps_its_runs_without_a_retention_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.wiring.embedded.RETENTION_PAUSE_SECONDS", 0.02)
    path = tmp_path / "runs.db"
    fill(path, 10, time.time() - 1e9)
    async with embedded(Settings(db=path), builtin_registry(Settings())):
        await asyncio.sleep(0.3)
    assert rows(path, "SELECT COUNT(*) FROM runs") == [(10,)]
