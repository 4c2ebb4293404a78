"""What durability costs, counted exactly: transactions, which are what waits for the disk."""

from __future__ import annotations

import asyncio
from typing import Any

from dovetail.core.states import RunStatus
from dovetail.engine.commands import Commands
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


async def test_an_idle_engine_commits_nothing() -> None:
    async with engine(gives) as it:
        await it.run({"a": "gives"})
        before = commits(it.commands)
        await asyncio.sleep(0.35)  # several times what it looks for others' writes
        assert commits(it.commands) - before <= RENEWALS
