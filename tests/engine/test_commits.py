"""What durability costs, counted exactly: transactions, which are what waits for the disk."""

from __future__ import annotations

import asyncio
from typing import Any

from dovetail.core.node_logs import LogChunk, LogLine
from dovetail.core.states import RunStatus
from dovetail.engine.commands import Commands
from dovetail.stores.sqlite.group_commit import LOG_SECONDS
from dovetail.stores.sqlite.store import SqliteStore

from .harness import Engine, engine

RENEWALS = 1
"""Of the lease, which a slow machine may see in between."""


async def gives(config: dict[str, Any], ctx: Any) -> str:
    return "done"


def commits(commands: Commands) -> int:
    assert isinstance(commands.store, SqliteStore)
    return commands.store.writer.commits


async def commits_of(it: Engine, nodes: dict[str, Any]) -> int:
    """How many a run of these takes from its trigger to its end."""
    before = commits(it.commands)
    assert (await it.run(nodes)).status is RunStatus.COMPLETED
    return commits(it.commands) - before


async def test_a_chain_takes_one_commit_per_node() -> None:
    chain: dict[str, Any] = {"n0": "gives"}
    for place in range(1, 100):
        chain[f"n{place}"] = {"handler": "gives", "after": [f"n{place - 1}"]}
    async with engine(gives, concurrency=32) as it:
        count = await commits_of(it, chain)
    # The trigger, each result together with the claim that follows from it, the last result.
    assert count <= 1 + 100 + 1 + RENEWALS
    assert count / len(chain) <= 1.1


async def test_a_fan_out_takes_one_commit_per_group_of_concurrent_nodes() -> None:
    middle = [f"n{place}" for place in range(1000)]
    fan: dict[str, Any] = {"root": "gives"}
    fan |= {name: {"handler": "gives", "after": ["root"]} for name in middle}
    fan["join"] = {"handler": "gives", "after": middle}
    async with engine(gives, concurrency=32) as it:
        count = await commits_of(it, fan)
    # The trigger, the root, 32 at a time, the join, the last result.
    assert count <= 1 + 1 + 32 + 1 + 1 + RENEWALS
    assert count / len(fan) <= 0.05


async def test_a_mapped_node_takes_one_commit_per_group_of_concurrent_items() -> None:
    nodes: dict[str, Any] = {
        "each": {"handler": "gives", "for_each": list(range(1000))},
        "join": {"handler": "gives", "after": ["each"]},
    }
    async with engine(gives, concurrency=32) as it:
        count = await commits_of(it, nodes)
    # The trigger, the list with the first claims, 32 at a time, the join, the last result.
    assert count <= 1 + 1 + 32 + 1 + 1 + RENEWALS
    assert count / 1000 <= 0.05


async def test_an_idle_engine_commits_nothing() -> None:
    async with engine(gives) as it:
        await it.run({"a": "gives"})
        before = commits(it.commands)
        await asyncio.sleep(0.35)  # several times what it looks for others' writes
        assert commits(it.commands) - before <= RENEWALS


def ten_lines(run_id: str, node: str, number: int = 0) -> LogChunk:
    lines = [LogLine(1.0, "INFO", "mine", f"line {nth}") for nth in range(10)]
    return LogChunk(run_id, node, 1, 1, number, lines)


async def test_lines_that_are_followed_by_a_result_cost_no_commit() -> None:
    stores: list[SqliteStore] = []

    async def talks(config: dict[str, Any], ctx: Any) -> str:
        stores[0].log([ten_lines(ctx.run_id, ctx.node_id)])
        return "done"

    def chain(handler: str) -> dict[str, Any]:
        nodes: dict[str, Any] = {"n0": handler}
        for place in range(1, 50):
            nodes[f"n{place}"] = {"handler": handler, "after": [f"n{place - 1}"]}
        return nodes

    async with engine(gives, talks) as it:
        assert isinstance(it.commands.store, SqliteStore)
        stores.append(it.commands.store)
        without = await commits_of(it, chain("gives"))
        assert await commits_of(it, chain("talks")) <= without + RENEWALS
        run_id = await it.trigger(chain("talks"))
        await it.wait(run_id)
        found = await it.commands.records.logs(run_id)
    assert [one.seq for one in found] == list(range(1, 500, 10))


async def test_lines_without_a_result_share_a_commit_a_moment_later() -> None:
    async with engine(gives) as it:
        run_id = await it.trigger({"a": "gives"})
        await it.wait(run_id)
        store = it.commands.store
        assert isinstance(store, SqliteStore)
        before = commits(it.commands)
        for number in range(5):
            store.log([ten_lines(run_id, "a", number)])
            await asyncio.sleep(0)
        assert commits(it.commands) == before
        await asyncio.sleep(3 * LOG_SECONDS)
        assert before < commits(it.commands) <= before + 1 + RENEWALS
        assert len(await it.commands.records.logs(run_id)) == 5


async def test_a_chunk_that_is_dropped_before_it_is_written_never_is() -> None:
    async with engine(gives) as it:
        run_id = await it.trigger({"a": "gives"})
        await it.wait(run_id)
        store = it.commands.store
        assert isinstance(store, SqliteStore)
        store.log([ten_lines(run_id, "a", 0), ten_lines(run_id, "a", 1)])
        await asyncio.sleep(3 * LOG_SECONDS)
        store.log([ten_lines(run_id, "a", 2)._replace(drops=[1])])
        store.log([ten_lines(run_id, "a", 3)._replace(drops=[2])])
        await asyncio.sleep(3 * LOG_SECONDS)
        found = await it.commands.records.logs(run_id)
        assert [(one.seq, one.chunk.number) for one in found] == [(1, 0), (21, 3)]
