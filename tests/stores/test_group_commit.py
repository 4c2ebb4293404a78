"""What a round answered is in the file, however often others come between.

The thread that writes is held at chosen points, so that each race happens on purpose. With one
process per store this would be two processes that share a file.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dovetail.core.events import Token
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Cancel, Claim, Complete, Decision, Retry, Transition
from dovetail.stores.sqlite.store import SqliteStore

from ..contracts.stores import create, read
from ..core.walk import graph

T = 1000.0


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[SqliteStore, SqliteStore]]:
    """Who drives the runs, and another process that moves them; the other writes in its thread."""
    async with AsyncExitStack() as stack:
        driver, other = [
            await stack.enter_async_context(SqliteStore(tmp_path / "runs.db", sync="normal"))
            for _ in range(2)
        ]
        other.writer.commit = lambda round_: None  # type: ignore[method-assign]
        yield driver, other


def held(store: SqliteStore) -> threading.Event:
    """The thread waits here, after what was submitted so far; set the event to let it go on."""
    gate = threading.Event()
    store.writer.submit(lambda connection: gate.wait(30), lambda result, error: None)
    return gate


async def until_written(store: SqliteStore, gate: threading.Event) -> None:
    """Let the thread go on to the next gate, and the loop hear of what it wrote."""
    before = store._commits._writing
    gate.set()
    async with asyncio.timeout(10):
        while store._commits._writing is before:
            await asyncio.sleep(0.001)


async def test_an_acknowledged_decision_is_in_the_file_even_if_others_interfered_twice(
    pair: tuple[SqliteStore, SqliteStore],
) -> None:
    driver, other = pair
    run_id, begun = await create(driver, graph({name: [] for name in "abcd"}))
    beside, begun_beside = await create(driver, graph({"a": []}))
    tokens = dict(zip("abcd", (order.token for order in begun.dispatch), strict=True))

    async def claim(
        store: SqliteStore, name: str, run_id: str = run_id, token: Token | None = None
    ) -> Decision:
        move = Claim(run_id, name, token or tokens[name], "w", T + 10)
        (decision,) = await store.apply([move], T, durable=True)
        return decision

    async def begun_claim(name: str, *of: object) -> asyncio.Task[Decision]:
        task = asyncio.create_task(claim(other, name, *of))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return task

    first = held(other)
    lost = await begun_claim("a")
    second = held(other)
    assert (await claim(driver, "a")).changed
    neighbour = await begun_claim("a", beside, begun_beside.dispatch[0].token)
    # What is decided anew comes to nothing, so only the neighbour of the round is written.
    await until_written(other, first)
    kept = await begun_claim("b")
    third = held(other)
    await until_written(other, second)
    assert (await claim(driver, "c")).changed
    last = await begun_claim("d")
    third.set()
    answers = await asyncio.wait_for(asyncio.gather(lost, neighbour, kept, last), 10)

    assert [bool(answer.changed) for answer in answers] == [False, True, True, True]
    run = await driver.load(run_id)
    assert {node.status for node in run.nodes} == {NodeStatus.RUNNING}


async def test_decisions_equal_the_log_even_if_the_run_ended_elsewhere_meanwhile(
    pair: tuple[SqliteStore, SqliteStore],
) -> None:
    other, driver = pair  # this time it is the driver that writes in its thread
    run_id, begun = await create(driver, graph({"a": []}))
    late = Complete(run_id, "a", begun.dispatch[0].token, 1)

    async def reported(store: SqliteStore, move: Transition) -> Decision:
        (decision,) = await store.apply([move], T, durable=True)
        return decision

    answers = [begun, await reported(other, Cancel(run_id))]
    gate = held(driver)
    # It is refused by what the driver knows, and then made with what the file has.
    retried = asyncio.create_task(reported(driver, Retry(run_id)))
    await asyncio.sleep(0)
    refused = asyncio.create_task(reported(driver, late))
    await asyncio.sleep(0)
    answers.append(await reported(other, late))
    gate.set()
    answers += await asyncio.wait_for(asyncio.gather(retried, refused), 10)

    events = [event for answer in answers for event in answer.events]
    run = await other.load(run_id)
    assert run.epoch == 2
    assert sorted(event.seq for event in events) == [
        event.seq for event in await read(other, run_id, run.seq)
    ]


async def test_a_store_does_not_cache_a_refused_run_that_it_does_not_own(
    pair: tuple[SqliteStore, SqliteStore],
) -> None:
    driver, other = pair
    run_id, _ = await create(driver, graph({"a": []}))
    for store in (other, driver):
        (refused,) = await store.apply([Retry(run_id)], T, durable=True)
        assert not refused
    assert list(driver._runs) == [run_id]
    assert not other._runs
