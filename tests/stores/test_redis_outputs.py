"""Large outputs in Redis: read where needed, and in parts, so that no caller waits for long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.run import RunState
from dovetail.core.transitions import Claim, Complete, Retry, Submit
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.store import RedisStore
from dovetail.wiring.distributed import connected

from ..core.walk import graph
from ..servers.redis_server import RedisServer

NODES, SIZE = 10, 1_000_000
"""Four of these are a part."""
NAMES = [f"n{i}" for i in range(NODES)]
T = 1000.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """Of its own: what it is asked is counted."""
    with RedisServer() as own:
        yield own


async def with_large_outputs(store: RedisStore, *more: str) -> RunState:
    """A run all of whose nodes are completed, but for `more` of them that have not begun."""
    of = graph({name: [] for name in [*NAMES, *more]})
    await store.create_many([Submit("run", of, {})], T)
    run = await store.load("run")
    starts = [("run", name, run.node(name).token) for name in NAMES]
    await store.apply([Claim(*start, "w", T + 10) for start in starts], T)
    await store.apply([Complete(*start, "x" * (SIZE - 2)) for start in starts], T)
    return await store.load("run")


async def spent(pipe: PipelinedRedis) -> tuple[int, int]:
    """Scripts that were run and bytes that were answered, since they were last reset."""
    sent = (await pipe.info("stats"))["total_net_output_bytes"]
    scripts = (await pipe.info("commandstats"))["cmdstat_evalsha"]
    return int(scripts.split(",")[0].removeprefix("calls=")), int(sent)


async def test_a_run_is_read_in_parts_that_block_redis_only_for_milliseconds(
    server: RedisServer,
) -> None:
    async with PipelinedRedis(server.url) as pipe:
        await pipe.call("FLUSHALL")
        store = RedisStore(pipe)
        await with_large_outputs(store)
        await pipe.call("CONFIG", "RESETSTAT")
        run = await store.load("run")
        assert {node.output for node in run.nodes} == {"x" * (SIZE - 2)}
        assert (await spent(pipe))[0] == 3


async def test_a_read_without_outputs_gets_none(server: RedisServer) -> None:
    async with PipelinedRedis(server.url) as pipe:
        await pipe.call("FLUSHALL")
        store = RedisStore(pipe)
        expected = await with_large_outputs(store)
        await pipe.call("CONFIG", "RESETSTAT")
        run = await store.load("run", outputs=False)
        scripts, sent = await spent(pipe)
        assert (scripts, sent < 10_000) == (1, True)
        assert {node.output for node in run.nodes} == {None}
        for node in expected.nodes:
            node.output = None
        assert run.snapshot() == expected.snapshot()


async def test_reconciling_a_run_reads_no_output(server: RedisServer) -> None:
    async with (
        PipelinedRedis(server.url) as pipe,
        connected(Settings(redis_url=server.url)) as services,
    ):
        await pipe.call("FLUSHALL")
        await with_large_outputs(services.store, "last")
        await pipe.call("CONFIG", "RESETSTAT")
        await services.orchestrator.reconcile_run("run")
        assert (await spent(pipe))[1] < SIZE / 10


async def test_a_retry_between_two_parts_does_not_mix_states(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with PipelinedRedis(server.url) as pipe:
        await pipe.call("FLUSHALL")
        store = RedisStore(pipe)
        await with_large_outputs(store)
        read_all = store._outputs.all

        async def retried(run_id: str, places: Sequence[int], epoch: bytes) -> Any:
            monkeypatch.setattr(store._outputs, "all", read_all)
            await store.apply([Retry("run", NAMES[0]), Retry("run", NAMES[1])], T)
            return await read_all(run_id, places, epoch)

        monkeypatch.setattr(store._outputs, "all", retried)
        run = await store.load("run")
        assert (run.epoch, run.nodes[0].status, run.nodes[0].output) == (2, "QUEUED", None)
        assert {node.output for node in run.nodes[1:]} == {"x" * (SIZE - 2)}
