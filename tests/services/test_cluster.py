"""On a Redis Cluster: every command touches one slot, over the whole life of runs.

Where one node has all slots nothing has to be redirected, but it refuses whatever touches two. It
also counts what it refuses, so that an error that the code swallows is found as well. What several
nodes are for themselves is in test_cluster_nodes.py.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import resources
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.errors import RetryableError
from dovetail.core.node_logs import LogChunk, LogLine
from dovetail.engine.commands import Commands
from dovetail.engine.ports import RunQuery
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.context import Context
from dovetail.handlers.registry import Registry, describe
from dovetail.redis_client import pipelined as pipes
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.stores.redis.logs import LogAppender
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.transports.streams.sender import RESULTS, stream_of
from dovetail.wiring.distributed import commanding, orchestrate, working

from ..servers.postgres_server import Databases
from ..servers.redis_server import RedisServer

SLOTS = 16_384
HARMLESS = {"NOSCRIPT", "BUSYGROUP", "NOGROUP", "UNBLOCKED"}
"""What we ask for and expect to be refused now and then."""

FLOW: dict[str, Any] = {
    "name": "flow",
    "max_concurrency": 3,
    "nodes": [
        {"id": "start", "handler": "input"},
        {"id": "a", "handler": "add", "dependencies": ["start"], "config": {"to": 1}},
        {
            "id": "b",
            "handler": "twice",
            "dependencies": ["a"],
            "config": {"of": "{{ a.n }}"},
            "condition": "{{ a.n > 0 }}",
        },
        {
            "id": "never",
            "handler": "twice",
            "dependencies": ["a"],
            "condition": "{{ a.n > 100 }}",
        },
        {
            "id": "limited",
            "handler": "add",
            "dependencies": ["start"],
            "config": {"to": 3},
            "resource_tag": "tag",
        },
        {
            "id": "shaky",
            "handler": "shaky",
            "dependencies": ["start"],
            "max_retries": 1,
            "retry": {"base_delay_seconds": 0.01},
        },
        {
            "id": "cached",
            "handler": "add",
            "dependencies": ["start"],
            "config": {"to": 5},
            "cache": {"ttl_seconds": 60},
        },
        {
            "id": "end",
            "handler": "output",
            "dependencies": ["b", "never", "limited", "shaky", "cached"],
        },
    ],
}
BROKEN = {
    "name": "broken",
    "on_failure": "continue",
    "nodes": [
        {"id": "a", "handler": "add", "config": {"to": 1}},
        {"id": "bad", "handler": "fail", "dependencies": ["a"]},
        {"id": "after", "handler": "add", "dependencies": ["bad"], "config": {"to": 1}},
    ],
}
ENDLESS = {
    "name": "endless",
    "nodes": [{"id": "long", "handler": "sleep", "config": {"seconds": 60}}],
}


def handlers(settings: Settings) -> Registry:
    """Several, so that a worker reads several streams."""

    async def add(config: dict[str, Any], ctx: Context) -> dict[str, int]:
        ctx.progress(0.5, "half way")
        return {"n": config["to"] + 1}

    async def twice(config: dict[str, Any], ctx: Context) -> dict[str, int]:
        return {"n": 2 * config["of"]}

    async def shaky(config: dict[str, Any], ctx: Context) -> str:
        if ctx.attempt == 1:
            raise RetryableError("the first time it does")
        return "second"

    registry = builtin_registry(settings)
    for made in (add, twice, shaky):
        registry.add(describe(made, name=made.__name__))
    return registry


@asynccontextmanager
async def services(settings: Settings) -> AsyncIterator[Commands]:
    """An orchestrator, two workers and what asks them, in this process."""
    async with AsyncExitStack() as stack:
        leading = asyncio.create_task(orchestrate(settings))
        for _ in range(2):
            await stack.enter_async_context(working(settings, handlers(settings)))
        yield await stack.enter_async_context(commanding(settings, handlers(settings)))
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)


async def whole_life(commands: Commands, pipe: PipelinedRedis) -> None:
    """Everything that a user can ask for."""
    assert (await commands.register(FLOW)).version == 1
    assert not (await commands.register(FLOW)).created
    await commands.set_alias("flow", "live", 1)
    await commands.set_rate_limit("tag", 50.0, 2)
    assert (await commands.rate_limits())["items"]
    first = await commands.trigger("flow", {"x": 1}, version="live", idempotency_key="k")
    assert (await commands.trigger("flow", {"x": 1}, version="live", idempotency_key="k")) == (
        first.run_id,
        False,
    )
    run = await commands.wait(first.run_id)
    assert run.status == "COMPLETED"
    assert run.node("never").status == "SKIPPED"
    assert run.node("b").output == {"n": 4}
    assert (await commands.results(first.run_id))["result"]["shaky"] == "second"
    assert (await commands.events(first.run_id))[-1]["type"] == "run.completed"
    chunk = LogChunk(first.run_id, "a", 1, 1, 0, [LogLine(1.0, "INFO", "l", "text")])
    await pipe.call_many(LogAppender(max_bytes=1 << 20).commands(pipe, [chunk]))
    assert [one.seq for one in await commands.records.logs(first.run_id)] == [1]
    await commands.retry(first.run_id, "limited")
    assert (await commands.wait(first.run_id)).epoch == 2

    made = await commands.batch("flow", [{"x": n} for n in range(5)], idempotency_key="b")
    done = await commands.wait_batch(made["batch_id"])
    assert done["counts"] == {"COMPLETED": 5}
    listed = await commands.list_runs(RunQuery(batch=made["batch_id"], status="COMPLETED", limit=3))
    assert len(listed["items"]) == 3

    failed = await commands.trigger(BROKEN)
    assert (await commands.wait(failed.run_id)).status == "FAILED"
    assert (await commands.plan_retry(failed.run_id))["rerun"] == ["bad", "after"]
    await commands.retry(failed.run_id)
    assert (await commands.wait(failed.run_id)).epoch == 2

    endless = await commands.trigger(ENDLESS)
    while (await commands.get_run(endless.run_id))["nodes"][0]["status"] != "RUNNING":
        await asyncio.sleep(0.01)
    assert (await commands.explain(endless.run_id))["nodes"][0]["code"] == "running"
    await commands.cancel(endless.run_id)
    assert (await commands.wait(endless.run_id)).status == "CANCELLED"

    for stream in (RESULTS, stream_of("add")):
        await pipe.call("XADD", stream, "*", "no", "message")
    fleet = WorkerRegistry(pipe)
    while len(await fleet.dead_letters()) < 2:
        await asyncio.sleep(0.01)
    assert [worker["alive"] for worker in await fleet.workers()] == [True, True]

    statuses = {one["status"] for one in (await commands.list_runs())["items"]}
    assert statuses == {"COMPLETED", "FAILED", "CANCELLED"}
    await commands.workflows()
    await commands.delete_workflow("flow")
    await commands.records.doctor()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisServer]:
    with RedisServer(cluster=True) as server:
        yield server


def slot(key: bytes) -> int:
    tag = re.search(rb"\{([^}]+)\}", key)
    return binascii.crc_hqx(tag.group(1) if tag else key, 0) % SLOTS


@pytest.mark.parametrize("archive", [False, True], ids=["redis alone", "with an archive"])
async def test_a_cluster_refuses_no_command_of_a_full_run_lifecycle(
    cluster: RedisServer, postgres_server: Databases, archive: bool
) -> None:
    cluster.flush()
    cluster.ask("CONFIG", "RESETSTAT")
    database = postgres_server.new_database() if archive else None
    settings = Settings(redis_url=cluster.url, database_url=database, drain_seconds=1)
    try:
        async with (
            asyncio.timeout(20),
            PipelinedRedis(cluster.url) as pipe,
            services(settings) as commands,
        ):
            await whole_life(commands, pipe)
    finally:
        refused = set(re.findall(r"errorstat_(\w+):", cluster.ask("INFO", "errorstats")))
        assert refused <= HARMLESS


async def test_every_command_has_keys_of_one_slot(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of a Redis alone, where only a blocking read may cover several streams."""
    asked: set[tuple[Any, ...]] = set()
    pack = pipes._packed

    def heard(command: tuple[Any, ...]) -> bytes:
        asked.add(command)
        return pack(command)

    monkeypatch.setattr(pipes, "_packed", heard)
    settings = Settings(redis_url=redis_url, drain_seconds=1)
    async with (
        asyncio.timeout(20),
        PipelinedRedis(redis_url) as pipe,
        services(settings) as commands,
    ):
        await whole_life(commands, pipe)
    monkeypatch.undo()
    several: Counter[str] = Counter()
    async with PipelinedRedis(redis_url) as pipe:
        for command in asked:
            if command[0] in ("XREADGROUP", "XREAD"):
                continue
            try:
                keys = await pipe.call("COMMAND", "GETKEYS", *command)
            except RedisError:
                continue  # it has none
            assert len({slot(key) for key in keys}) == 1, command[:8]
            several[str(command[0])] += len(keys) > 1
    assert several["EVALSHA"] > 20, "a life that runs no script proves nothing"


def test_scripts_build_no_keys_themselves() -> None:
    """A cluster must know from the call which slot a script is for."""
    for file in resources.files("dovetail.stores.redis").joinpath("lua").iterdir():
        text = re.sub(r"--.*", "", file.read_text())
        assert "wf:" not in text, file.name
