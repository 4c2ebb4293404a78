"""Lines before a rate limit over Redis: a lost node holds up no other, a limit holds once set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dovetail import PermanentError, RetryableError
from dovetail.config import Settings
from dovetail.core.run import Phase
from dovetail.core.transitions import Park, Wake
from dovetail.engine.commands import Commands
from dovetail.engine.limits import LATENESS
from dovetail.engine.ports import ParkedNode
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import describe
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.timers import PARKED
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.wiring.distributed import commanding, working

from ..core.walk import graph
from .interrupted_run import InterruptedRun
from .test_duties import beside

SECONDS = 20.0
MOVED_UP_SECONDS = 4.0
"""A second until a process looks, and patience with a busy machine."""
SPREAD = 0.3
"""So much later than its token was taken a start may be seen, on a busy machine."""


class Services:
    """An orchestrator and a worker in this process, and when nodes were started."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.started: dict[str, list[float]] = {}

    async def notes(self, config: dict[str, Any], ctx: Any) -> None:
        self.started.setdefault(ctx.run_id, []).append(time.monotonic())
        if config.get("slow") and ctx.attempt == 1:
            raise RetryableError("429", at_least=config["slow"])

    async def breaks(self, config: dict[str, Any], ctx: Any) -> None:
        await asyncio.sleep(0.3)
        raise PermanentError("no")

    async def go(self, count: int, tag: str, *more: dict[str, Any], **fields: Any) -> str:
        nodes = [
            {"id": f"n{i}", "handler": "notes", "resource_tag": tag, **fields} for i in range(count)
        ]
        return (await self.commands.trigger({"name": tag, "nodes": [*nodes, *more]})).run_id

    async def parked(self, run_id: str, at_least: int) -> None:
        """Returns once so many nodes are."""
        while True:
            run = await self.commands.store.load(run_id)
            if sum(node.phase is Phase.PARKED for node in run.nodes) >= at_least:
                return
            await asyncio.sleep(0.02)

    async def took(self, run_id: str) -> float:
        began = time.monotonic()
        assert (await self.commands.wait(run_id)).status == "COMPLETED"
        return time.monotonic() - began

    def most_at_once(self, rate: float) -> float:
        """So many more starts than the rate allows were seen in one window, at most."""
        at = sorted(one for several in self.started.values() for one in several)
        return max(
            last - first + 1 - rate * (at[last] - at[first] + LATENESS + SPREAD)
            for first in range(len(at))
            for last in range(first, len(at))
        )


@asynccontextmanager
async def services(redis_url: str) -> AsyncIterator[Services]:
    settings = Settings(redis_url=redis_url)
    registry = builtin_registry(settings)
    async with commanding(settings) as commands, PipelinedRedis(redis_url) as pipe:
        it = Services(commands)
        registry.add(describe(it.notes, name="notes"))
        registry.add(describe(it.breaks, name="breaks"))
        async with beside(settings), working(settings, registry), asyncio.timeout(SECONDS):
            while "notes" not in await WorkerRegistry(pipe).served():
                await asyncio.sleep(0.02)
            yield it


@pytest.fixture
async def it(redis_url: str) -> AsyncIterator[Services]:
    async with services(redis_url) as made:
        yield made


async def test_a_cancelled_run_leaves_no_reservations(it: Services) -> None:
    await it.commands.set_rate_limit("five", 5, 1)
    cancelled = await it.go(100, "five")
    await it.parked(cancelled, 95)
    await it.commands.cancel(cancelled)
    assert await it.took(await it.go(4, "five")) < MOVED_UP_SECONDS
    assert it.most_at_once(5) <= 1


async def test_a_failed_run_leaves_no_reservations(it: Services) -> None:
    await it.commands.set_rate_limit("two", 2, 1)
    failed = await it.go(40, "two", {"id": "bad", "handler": "breaks"})
    assert (await it.commands.wait(failed)).status == "FAILED"
    assert await it.took(await it.go(2, "two")) < MOVED_UP_SECONDS
    assert it.most_at_once(2) <= 1


async def test_a_retried_epoch_leaves_no_reservations(it: Services) -> None:
    await it.commands.set_rate_limit("two", 2, 1)
    run_id = await it.go(10, "two")  # so many that it has not ended on a slow machine
    for _ in range(12):  # one after the other: none starts on what the one before had booked
        await it.parked(run_id, 1)
        await it.commands.cancel(run_id)
        await it.commands.retry(run_id)
    assert await it.took(run_id) < 10 / 2 + MOVED_UP_SECONDS
    assert it.most_at_once(2) <= 1


async def test_a_run_parked_behind_a_cancelled_run_moves_up(it: Services) -> None:
    await it.commands.set_rate_limit("five", 5, 1)
    first = await it.go(300, "five")
    await it.parked(first, 80)  # not all: one starts every 0.2 s, also while this waits
    behind = await it.go(4, "five")
    await it.parked(behind, 4)
    await it.commands.cancel(first)
    assert await it.took(behind) < MOVED_UP_SECONDS
    assert it.most_at_once(5) <= 1
    assert await it.commands.verify(behind) == []


async def test_a_raised_limit_applies_to_parked_and_new_nodes(
    it: Services,
) -> None:
    await it.commands.set_rate_limit("up", 0.05, 1)
    waits = await it.go(5, "up")
    await it.parked(waits, 4)
    await it.commands.set_rate_limit("up", 20, 3)
    comes = await it.go(10, "up")
    assert await it.took(comes) < MOVED_UP_SECONDS
    assert await it.took(waits) < MOVED_UP_SECONDS
    assert it.most_at_once(20) <= 3


async def test_setting_a_limit_frees_a_tag_that_a_service_had_slowed(it: Services) -> None:
    slowed = await it.go(1, "svc", max_retries=1, config={"slow": 600.0})
    while not it.started.get(slowed):
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    waits = await it.go(2, "svc")
    await it.parked(waits, 2)
    await it.commands.set_rate_limit("svc", 10, 1)
    assert await it.took(waits) < MOVED_UP_SECONDS


async def test_a_parked_node_missing_from_the_queue_is_found_by_the_sweep(
    stage: InterruptedRun,
) -> None:
    task = await stage.submit(graph({"a": []}, a={"resource_tag": "api"}))
    until = stage.parts.clock() + 600
    await stage.living.apply([Park("r", "a", task.token, until)])
    assert await stage.timers.parked(0.0, 0.0) == []
    await stage.is_forgotten()
    assert await stage.timers.parked(0.0, 0.0) == [
        ParkedNode(until, "api", Wake("r", "a", task.token))
    ]


async def test_in_a_complete_queue_each_node_is_parked_once(it: Services, redis_url: str) -> None:
    await it.commands.set_rate_limit("calm", 10, 2)
    run_id = await it.go(40, "calm")
    assert await it.took(run_id) > 3
    reported = [
        event for event in await it.commands.events(run_id) if event["type"] == "node.parked"
    ]
    assert len(reported) < 38 + 10, "a busy machine may make some come late"
    async with PipelinedRedis(redis_url) as pipe:
        while await pipe.call("EXISTS", PARKED):
            await asyncio.sleep(0.05)
