"""Why a node of a run in Redis is where it is; who could start it is known from the heartbeats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.events import Token
from dovetail.core.transitions import Claim, Complete, Fail, Park
from dovetail.engine.commands import Commands
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.workers import WorkerFacts, WorkerRegistry
from dovetail.wiring.distributed import commanding

WORKER = WorkerFacts("host-7-ab", "host", 7, 1_700_000_000.0, ["input", "sleep"], 2, 32)


@pytest.fixture
async def commands(redis_url: str) -> AsyncIterator[Commands]:
    async with commanding(Settings(redis_url=redis_url)) as made:
        yield made


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[WorkerRegistry]:
    async with PipelinedRedis(redis_url) as pipe:
        yield WorkerRegistry(pipe)


async def begin(commands: Commands, nodes: dict[str, dict[str, Any]], **fields: Any) -> str:
    listed = [{"id": name, "handler": "input", **more} for name, more in nodes.items()]
    run_id, _ = await commands.trigger({"name": "t", "nodes": listed, **fields})
    return run_id


async def start(commands: Commands, run_id: str, name: str) -> tuple[str, str, Token]:
    token = (await commands.store.load(run_id)).node(name).token
    now = commands.clock()
    await commands.store.apply([Claim(run_id, name, token, "host-7-ab", now + 10)], now)
    return run_id, name, token


async def codes(commands: Commands, run_id: str) -> dict[str, str]:
    return {node["id"]: node["code"] for node in (await commands.explain(run_id))["nodes"]}


async def test_a_queued_node_waits_for_a_live_worker_with_its_handler(
    commands: Commands, fleet: WorkerRegistry
) -> None:
    nodes = {"a": {}, "b": {"handler": "fail"}, "c": {"dependencies": ["a"]}}
    run_id = await begin(commands, nodes)
    asleep = {"a": "no_worker", "b": "no_worker", "c": "waiting_for_parents"}
    assert await codes(commands, run_id) == asleep
    await fleet.beat(WORKER)
    assert await codes(commands, run_id) == {**asleep, "a": "queued"}
    explained = await commands.explain(run_id)
    assert explained["status"] == "RUNNING"
    assert explained["nodes"][1] == {
        "id": "b",
        "status": "QUEUED",
        "code": "no_worker",
        "why": "queued, no live worker serves handler 'fail'",
        "details": {"handler": "fail"},
    }
    await fleet.leave(WORKER.worker_id)
    assert await codes(commands, run_id) == asleep, "what is remembered of it starts nothing"


async def test_every_other_wait_is_explained_from_redis(
    commands: Commands, fleet: WorkerRegistry
) -> None:
    await fleet.beat(WORKER)
    retry = {"max_retries": 3, "retry": {"base_delay_seconds": 60, "jitter": 0}}
    nodes = {"a": {}, "b": {"resource_tag": "slow"}, "c": retry, "d": {}, "e": {}, "f": {}}
    run_id = await begin(commands, nodes, max_concurrency=3)
    error = {"type": "ValueError", "message": "no"}
    failed = await start(commands, run_id, "c")
    await commands.store.apply([Fail(*failed, error)], commands.clock())
    token = (await commands.store.load(run_id)).node("b").token
    until = commands.clock() + 40
    await commands.store.apply([Park(run_id, "b", token, until)], commands.clock())
    await start(commands, run_id, "a")
    assert await codes(commands, run_id) == {
        "a": "running",
        "b": "rate_limited",
        "c": "backing_off",
        "d": "queued",
        "e": "queued",
        "f": "max_concurrency",
    }
    reported = {node["id"]: node for node in (await commands.explain(run_id))["nodes"]}
    assert reported["a"]["details"]["worker"] == "host-7-ab"
    assert reported["b"]["details"]["resource_tag"] == "slow"
    assert 30 < reported["b"]["details"]["seconds"] <= 40
    assert 50 < reported["c"]["details"]["seconds"] <= 60
    assert reported["c"]["details"]["error"] == error
    assert reported["f"]["details"] == {"max_concurrency": 3, "active": 3}


async def test_a_finished_run_has_nothing_to_explain(commands: Commands) -> None:
    run_id = await begin(commands, {"a": {}})
    started = await start(commands, run_id, "a")
    await commands.store.apply([Complete(*started, {})], commands.clock())
    assert await commands.explain(run_id) == {
        "run_id": run_id,
        "status": "COMPLETED",
        "nodes": [],
        "damage": [],
    }
