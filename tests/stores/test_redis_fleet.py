"""Workers and dead letters in Redis, in the shapes of the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest

from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.workers import WorkerFacts, WorkerRegistry
from dovetail.transports.streams.sender import WORKERS, StreamReader

NOW = 1_700_000_000.25
WORKER = WorkerFacts("host-7-ab", "host", 7, NOW, ["sleep", "input"], 2, 32)


@pytest.fixture
async def pipe(redis_url: str) -> AsyncIterator[PipelinedRedis]:
    async with PipelinedRedis(redis_url) as pipe:
        yield pipe


async def test_a_worker_is_shown_in_the_fields_of_the_api(pipe: PipelinedRedis) -> None:
    fleet = WorkerRegistry(pipe)
    await fleet.beat(WORKER)
    (shown,) = await fleet.workers()
    assert shown.pop("last_heartbeat").endswith("Z")
    assert shown == {
        "worker_id": "host-7-ab",
        "host": "host",
        "pid": 7,
        "started_at": "2023-11-14T22:13:20.250000Z",
        "handlers": ["input", "sleep"],
        "handler_details": [
            {"name": name, "max_retries": 0, "secrets": False, "version": 1}
            for name in ("input", "sleep")
        ],
        "running": 2,
        "concurrency": 32,
        "alive": True,
    }


async def test_its_own_key_has_its_fields_and_goes_if_it_falls_silent(pipe: PipelinedRedis) -> None:
    await WorkerRegistry(pipe, heartbeat_timeout=15).beat(WORKER)
    key = "wf:worker:host-7-ab"
    assert 14_000 < await pipe.call("PTTL", key) <= 15_000
    kept = await pipe.call("HMGET", key, "pid", "handlers", "running")
    assert kept == [b"7", b'["sleep","input"]', b"2"]


async def test_a_worker_that_falls_silent_is_shown_as_dead_for_a_day(pipe: PipelinedRedis) -> None:
    fleet = WorkerRegistry(pipe, heartbeat_timeout=0.05)
    await fleet.beat(WORKER)
    while await pipe.call("EXISTS", "wf:worker:host-7-ab"):
        await asyncio.sleep(0.01)
    (shown,) = await fleet.workers()
    assert (shown["alive"], shown["running"]) == (False, 0)
    await fleet.beat(WORKER)
    assert (await fleet.workers())[0]["alive"], "it was only late"
    kept = orjson.loads(await pipe.call("HGET", "wf:workers", "host-7-ab"))
    old = {**kept, "last_heartbeat": kept["last_heartbeat"] - 86_401}
    await pipe.call("HSET", "wf:workers", "host-7-ab", orjson.dumps(old))
    assert await fleet.workers() == []
    assert not await pipe.call("EXISTS", "wf:workers")


async def test_a_worker_that_left_is_not_shown_and_its_handlers_are_known(
    pipe: PipelinedRedis,
) -> None:
    fleet = WorkerRegistry(pipe)
    await fleet.beat(WORKER)
    await fleet.beat(WORKER._replace(worker_id="other", handlers=["llm_service"]))
    await fleet.leave("host-7-ab")
    await fleet.leave("nobody")
    assert [one["worker_id"] for one in await fleet.workers()] == ["other"]
    assert await fleet.handlers() == {"sleep", "input", "llm_service"}


async def test_dead_letters_are_shown_newest_first(redis_url: str, pipe: PipelinedRedis) -> None:
    fleet = WorkerRegistry(pipe)
    assert await fleet.dead_letters() == []
    async with PipelinedRedis(redis_url) as blocking:
        reader = StreamReader(blocking, pipe, WORKERS, "me")
        await pipe.call("XADD", "tasks:x", "*", "what", "ever")
        await pipe.call("XADD", "tasks:x", "*", "run_id", b"\xff")
        assert await reader.read(["tasks:x"], 10) == []
    newest, oldest = await fleet.dead_letters()
    assert oldest["fields"] == {"what": "ever"}
    assert newest["stream"] == "tasks:x"
    assert "it has no" in newest["reason"]
    assert newest["time"].endswith("Z")
