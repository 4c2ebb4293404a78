"""What may be known is in the file by then: seen through a connection that the engine knows not of.

A crash is the only thing that tells a promise from a hope; these tests ask, at the very moment at
which something is believed, what a crash would leave of it. Several stores in one process stand for
several processes: what tells them apart is in the file.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.caching import Caching
from dovetail.core.dag import Graph
from dovetail.core.events import Token
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.core.transitions import Cancel, Claim, Complete, Fail, Progress, Retry, Submit
from dovetail.engine.ports import KeyUsed
from dovetail.stores.sqlite import writer
from dovetail.stores.sqlite.store import SqliteObserver, SqliteStore
from dovetail.wiring.embedded import attached, embedded

from ..core.walk import graph
from ..engine.harness import definition, engine, registry_of

T = 1000.0
LATER = T + 1e6
SECONDS = 15.0
SINGLE = graph({"a": []})
_ids = count(1)


@pytest.fixture(autouse=True, params=["thread", "loop"])
def commits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounds are written: in the writer's thread, or in the event loop where they can be."""
    quick = -1.0 if request.param == "thread" else float("inf")
    monkeypatch.setattr(writer, "QUICK_SECONDS", quick)


def in_file(path: Path) -> list[tuple[str, str | None]]:
    """Type and node of every event that a crash would leave."""
    with closing(sqlite3.connect(path)) as connection:
        pieces = connection.execute("SELECT entries FROM journal ORDER BY id").fetchall()
    return [
        (event[0], event[2])
        for (piece,) in pieces
        for entry in orjson.loads(piece)
        for event in entry[4]
    ]


def status_in_file(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        ((status,),) = connection.execute("SELECT status FROM runs").fetchall()
    return str(status)


# ── nothing follows from what is not committed ───────────────────────────────────────────


async def test_a_handler_starts_after_its_claim_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    unkept = []

    async def look(config: Any, ctx: Any) -> None:
        if ("node.started", ctx.node_id) not in in_file(path):
            unkept.append(ctx.node_id)

    chain: dict[str, Any] = {"a": "look", "b": "look", "c": {"handler": "look", "after": ["a"]}}
    async with engine(look, db=path) as it:
        await it.run(chain)
    assert unkept == []


async def test_a_trigger_returns_after_the_run_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with attached(Settings(db=path), registry_of(), create=True) as commands:
        await commands.trigger(definition({"a": "input"}))
        assert ("node.queued", "a") in in_file(path)


async def test_a_command_returns_after_its_change_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with attached(Settings(db=path), registry_of(), create=True) as commands:
        run_id = (await commands.trigger(definition({"a": "input"}))).run_id
        assert (await commands.cancel(run_id)).status is RunStatus.CANCELLED
        assert in_file(path)[-1][0] == "run.cancelled"
        await commands.retry(run_id)
        assert ("run.retried", None) in in_file(path)


async def test_waiters_and_watchers_see_only_committed_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.db"
    commit = writer.commit

    def slow_commit(*args: Any) -> writer.CommitOutcome:
        """Long enough for the end to be decided, and for who hears of it to look."""
        time.sleep(0.1)
        return commit(*args)

    async with SqliteStore(path) as store:
        run_id, token = await started(store)
        monkeypatch.setattr(writer, "commit", slow_commit)

        async def watch() -> list[str]:
            return [
                event.type
                async for event in store.watch(run_id)
                if (event.type, event.node) not in in_file(path)
            ]

        async def wait() -> str:
            await store.wait(run_id)
            return status_in_file(path)

        watching, waiting = asyncio.create_task(watch()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        # The end is decided while what came before it is still being written.
        await store.apply([Progress(run_id, "a", token, 0.5)], T)
        await asyncio.sleep(0)
        await store.apply([Complete(run_id, "a", token, 1)], T)
        assert await asyncio.wait_for(waiting, SECONDS) == "COMPLETED"
        assert await asyncio.wait_for(watching, SECONDS) == [], "these a crash would undo"


async def test_the_listed_status_is_committed_with_its_transition(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SqliteStore(path) as store:
        run_id, token = await started(store)
        assert status_in_file(path) == "RUNNING"
        await store.apply([Fail(run_id, "a", token, {"type": "E"})], T, durable=True)
        assert status_in_file(path) == "FAILED"
        await store.apply([Retry(run_id)], T, durable=True)
        assert status_in_file(path) == "RUNNING"
        await store.apply([Cancel(run_id)], T, durable=True)
        assert status_in_file(path) == "CANCELLED"


# ── what is in the file is enough ────────────────────────────────────────────────────────


async def test_published_nodes_are_published_again_by_the_next_owner(
    tmp_path: Path,
) -> None:
    settings = Settings(db=tmp_path / "runs.db", db_sync="normal")
    async with attached(settings, registry_of(), create=True) as commands:
        run_id = (await commands.trigger(definition({"a": "input", "b": "input"}))).run_id
    async with embedded(settings, registry_of()) as commands:
        assert await commands.resume() == [run_id]
        run = await asyncio.wait_for(commands.wait(run_id), SECONDS)
        assert run.status is RunStatus.COMPLETED
        assert await commands.verify(run_id) == []


async def test_a_node_that_waits_for_its_time_is_woken_by_the_next_owner(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs.db"
    calls = count(1)

    async def flaky(config: Any, ctx: Any) -> int:
        if next(calls) == 1:
            raise ValueError("the first time")
        return ctx.attempt

    retried = {"a": {"handler": "flaky", "max_retries": 1, "retry": {"base_delay_seconds": 0.2}}}
    async with engine(flaky, db=path) as it:
        run_id = await it.trigger(retried)
        async for event in it.commands.store.watch(run_id):
            if event.type == "node.retrying":
                break
    async with engine(flaky, db=path) as it:
        assert await it.commands.resume() == [run_id]
        run = await it.wait(run_id)
    assert (run.status, run.node("a").output) == (RunStatus.COMPLETED, 2)


async def test_a_handed_back_run_counts_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    entered = asyncio.Event()
    patient = True

    async def wait(config: Any, ctx: Any) -> int:
        entered.set()
        await asyncio.sleep(60 if patient else 0)
        return ctx.attempt

    async with engine(wait, db=path) as it:
        run_id = await it.trigger({"a": "wait"})
        await entered.wait()
    for _ in range(4):  # more often than a node may be lost
        entered.clear()
        async with engine(wait, db=path) as it:
            await it.commands.resume(run_id)
            await entered.wait()
    patient = False
    async with engine(wait, db=path) as it:
        await it.commands.resume(run_id)
        assert (await it.wait(run_id)).node("a").output == 6


# ── two who believe to drive the same run ────────────────────────────────────────────────


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """Whose lease runs out at once: it is silent, whatever it does."""
    async with SqliteStore(tmp_path / "runs.db", sync="normal", lease_seconds=1e-9) as store:
        yield store


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(tmp_path / "runs.db", sync="normal") as store:
        yield store


async def started(store: SqliteStore, compiled: Graph = SINGLE) -> tuple[str, Token]:
    """A run whose node `a` was started."""
    run_id = f"run-{next(_ids)}"
    token = (await store.create(Submit(run_id, compiled, {}), T)).dispatch[0].token
    await store.apply([Claim(run_id, "a", token, "w", LATER)], T, durable=True)
    return run_id, token


async def test_a_replaced_owner_cannot_complete_the_nodes_that_it_started(
    owner: SqliteStore, other: SqliteStore
) -> None:
    run_id, token = await started(owner)
    taken = await other.adopt([run_id], T, max_crashes=3)
    (late,) = await owner.apply([Complete(run_id, "a", token, "late")], T, durable=True)
    assert not late.changed
    (order,) = taken[run_id].dispatch
    _, done = await other.apply(
        [
            Claim(run_id, "a", order.token, "w", LATER),
            Complete(run_id, "a", order.token, "in time"),
        ],
        T,
        durable=True,
    )
    assert done.ended
    for store in (owner, other):
        assert (await store.load(run_id)).node("a").output == "in time"


async def test_a_replaced_owner_cannot_complete_an_at_most_once_node(
    owner: SqliteStore, other: SqliteStore
) -> None:
    once = graph({"a": []}, a={"delivery": "at_most_once"})
    run_id, token = await started(owner, once)
    taken = await other.adopt([run_id], T, max_crashes=3)
    assert taken[run_id].dispatch == []
    (late,) = await owner.apply([Complete(run_id, "a", token, "late")], T, durable=True)
    assert not late.changed
    node = (await owner.load(run_id)).node("a")
    assert (node.status, node.reason) == (NodeStatus.FAILED, "worker_lost")


async def test_a_replaced_owner_learns_which_nodes_to_stop(
    owner: SqliteStore, other: SqliteStore
) -> None:
    orders: asyncio.Queue[Any] = asyncio.Queue()
    owner.observe(SqliteObserver(on_effects=orders.put_nowait))
    run_id, token = await started(owner)
    await other.adopt([run_id], T, max_crashes=3)
    reported = await asyncio.wait_for(orders.get(), SECONDS)
    assert [(stop.node, stop.token) for stop in reported.stop] == [("a", token)]
    assert reported.dispatch == [], "another process publishes it"


async def test_the_owner_learns_that_another_process_cancelled_its_run(
    owner: SqliteStore, other: SqliteStore
) -> None:
    orders: asyncio.Queue[Any] = asyncio.Queue()
    owner.observe(SqliteObserver(on_effects=orders.put_nowait))
    run_id, token = await started(owner)
    waiting = asyncio.create_task(owner.wait(run_id))
    await other.apply([Cancel(run_id)], T, durable=True)
    reported = await asyncio.wait_for(orders.get(), SECONDS)
    assert [(stop.node, stop.token) for stop in reported.stop] == [("a", token)]
    assert (await asyncio.wait_for(waiting, SECONDS)).status is RunStatus.CANCELLED


async def test_a_command_is_decided_by_the_current_run_not_by_a_cached_one(
    owner: SqliteStore, other: SqliteStore
) -> None:
    run_id, _ = await started(owner)
    await other.apply([Cancel(run_id)], T, durable=True)
    (retried,) = await owner.apply([Retry(run_id)], T, durable=True)  # it had seen no end yet
    assert retried.changed
    assert (await other.load(run_id)).epoch == 2


async def test_a_result_sees_an_earlier_cancel(owner: SqliteStore, other: SqliteStore) -> None:
    run_id, token = await started(owner)
    await other.apply([Cancel(run_id)], T, durable=True)
    (late,) = await owner.apply([Complete(run_id, "a", token, "late")], T, durable=True)
    assert not late.changed
    assert [event.type for event in late.events] == ["result.refused"]
    for store in (owner, other):
        run = await store.load(run_id)
        assert (run.status, run.node("a").output) == (RunStatus.CANCELLED, None)


async def test_a_late_result_is_not_cached(owner: SqliteStore, other: SqliteStore) -> None:
    run_id, token = await started(owner)
    await other.apply([Cancel(run_id)], T, durable=True)
    late = Complete(run_id, "a", token, "late", Caching("key", 3600.0, {"version": "1"}))
    await owner.apply([late], T, durable=True)
    for store in (owner, other):
        assert await store.recall("key", T) is None


async def test_a_key_used_by_another_process_returns_its_run(
    owner: SqliteStore, other: SqliteStore
) -> None:
    key = ("run", "k", "the same body")
    await owner.create(Submit("first", SINGLE, {}, key=key), T)
    with pytest.raises(KeyUsed) as known:
        await other.create(Submit("second", SINGLE, {}, key=key), T)
    assert (known.value.made, known.value.same_body) == ("first", True)
