"""Random workflows of every kind of handler, cancelled and retried at random: all of them end.

The rules are walked elsewhere; this is the real engine with its real tasks, threads and timers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import pytest

from dovetail import PermanentError
from dovetail.core.errors import Conflict
from dovetail.core.run import RunState

from ..core.invariants import check_run
from .harness import Engine, engine

executions: Counter[tuple[str, str, int, int]] = Counter()


def enter(ctx: Any) -> random.Random:
    executions[ctx.run_id, ctx.node_id, ctx.epoch, ctx.attempt] += 1
    chance = random.Random(f"{ctx.node_id} {ctx.epoch} {ctx.attempt}")
    if chance.random() < 0.15:
        raise ValueError("by chance")
    if chance.random() < 0.05:
        raise PermanentError("for good")
    return chance


async def instant(config: dict[str, Any], ctx: Any) -> str:
    enter(ctx)
    return str(ctx.node_id)


async def waiting(config: dict[str, Any], ctx: Any) -> str:
    chance = enter(ctx)
    for step in range(3):
        ctx.progress(step / 3)
        await asyncio.sleep(chance.random() * 0.003)
    return str(ctx.node_id)


def blocking(config: dict[str, Any], ctx: Any) -> str:
    chance = enter(ctx)
    ctx.progress(0.5)
    time.sleep(chance.random() * 0.003)
    return str(ctx.node_id)


async def late(config: dict[str, Any], ctx: Any) -> str:
    chance = enter(ctx)
    await asyncio.sleep(chance.random() * 0.04)
    return str(ctx.node_id)


def workflow(chance: random.Random) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    for i in range(chance.randrange(1, 25)):
        above = chance.sample(list(nodes), min(len(nodes), chance.randrange(4)))
        node: dict[str, Any] = {
            "handler": chance.choice(["instant", "waiting", "blocking", "late"]),
            "after": above,
            "max_retries": chance.choice([0, 1, 3]),
            "retry": {"base_delay_seconds": 0.001},
            "timeout_seconds": 0.02,
        }
        if chance.random() < 0.2:
            node["condition"] = "{{ params.x > 0.5 }}"
        if chance.random() < 0.2:
            node["resource_tag"] = "api"
        if chance.random() < 0.1:
            node["cache"] = {"ttl_seconds": 60}
        nodes[f"n{i}"] = node
    return nodes


async def live(it: Engine, seed: int) -> RunState:
    """Trigger a workflow, meddle with it at random, and let it end."""
    chance = random.Random(seed)
    run_id = await it.trigger(
        workflow(chance),
        {"x": chance.random()},
        on_failure=chance.choice(["fail_fast", "continue"]),
        max_concurrency=chance.choice([None, 1, 3]),
    )
    for _ in range(chance.randrange(4)):
        await asyncio.sleep(chance.random() * 0.02)
        command = chance.choice([it.commands.cancel, it.commands.retry])
        try:
            await command(run_id)
        except Conflict:
            continue
    run = await it.wait(run_id)
    check_run(run)
    return run


@pytest.mark.parametrize("concurrency", [1, 4, 32])
async def test_every_run_of_the_soak_ends_and_no_start_is_executed_twice(concurrency: int) -> None:
    executions.clear()
    limits = {"api": (300.0, 2)}
    async with engine(
        instant, waiting, blocking, late, concurrency=concurrency, rate_limits=limits
    ) as it:
        runs = await asyncio.gather(*(live(it, seed) for seed in range(60)))
        await asyncio.sleep(0.05)
        for run in runs:
            check_run(run)
            events = await it.events(run.id)
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert len(events) >= run.seq  # on a busy machine something was refused even later
    assert set(executions.values()) == {1}
    assert len({run.status for run in runs}) > 1
