"""Workers and dead letters in Redis, in the shapes of the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest

from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.workers import Handlers, WorkerFacts, WorkerRegistry, schema_texts
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


async def test_the_key_of_a_worker_has_its_fields_and_expires_if_it_falls_silent(
    pipe: PipelinedRedis,
) -> None:
    await WorkerRegistry(pipe, heartbeat_timeout=15).beat(WORKER)
    key = "wf:worker:host-7-ab"
    assert 14_000 < await pipe.call("PTTL", key) <= 15_000
    kept = await pipe.call("HMGET", key, "pid", "handlers", "running")
    assert kept == [b"7", b'["sleep","input"]', b"2"]


async def test_a_silent_worker_is_shown_as_dead_for_a_day(pipe: PipelinedRedis) -> None:
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


async def test_a_worker_that_left_is_not_shown_but_its_handlers_stay_known(
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


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
OTHER = {"type": "object", "properties": {"y": {"type": "integer"}}}


async def commands_sent(pipe: PipelinedRedis) -> int:
    stats = (await pipe.call("INFO", "commandstats")).decode()
    lines = [line for line in stats.splitlines() if line.startswith("cmdstat_hset:")]
    return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in lines)


def announcing(pipe: PipelinedRedis, **schemas: object) -> tuple[WorkerRegistry, WorkerFacts]:
    digests, texts = schema_texts(schemas)  # type: ignore[arg-type]
    handlers = ["input", *schemas]
    return WorkerRegistry(pipe, schemas=texts), WORKER._replace(handlers=handlers, schemas=digests)


async def schemas_shown(pipe: PipelinedRedis) -> dict[str, object]:
    return {one["name"]: one["config_schema"] for one in await WorkerRegistry(pipe).catalogue()}


async def test_a_worker_announces_schemas_with_its_first_heartbeat_only(
    pipe: PipelinedRedis,
) -> None:
    fleet, facts = announcing(pipe, mine=SCHEMA)
    before = await commands_sent(pipe)
    await fleet.beat(facts)
    first = await commands_sent(pipe)
    await fleet.beat(facts)
    second = await commands_sent(pipe)
    # Two of them are the heartbeat itself: one inside its script, one beside it.
    assert (first - before, second - first) == (3, 2)
    kept = orjson.loads(await pipe.call("HGET", "wf:workers", facts.worker_id))
    assert len(str(kept["schemas"])) < 60, "a heartbeat names schemas and does not repeat them"
    assert await schemas_shown(pipe) == {"mine": SCHEMA, "input": None}
    (worker,) = await fleet.workers(with_schemas=True)
    assert [one["config_schema"] for one in worker["handler_details"]] == [None, SCHEMA]


async def test_a_worker_announces_its_schemas_again_when_redis_has_lost_them(
    pipe: PipelinedRedis,
) -> None:
    fleet, facts = announcing(pipe, mine=SCHEMA)
    await fleet.beat(facts)
    await pipe.call("DEL", "wf:workers")
    await pipe.call("DEL", "wf:schemas")
    await fleet.beat(facts)
    assert (await schemas_shown(pipe))["mine"] == SCHEMA


async def test_the_schema_of_the_worker_that_was_started_last_counts(pipe: PipelinedRedis) -> None:
    old, facts = announcing(pipe, mine=SCHEMA)
    await old.beat(facts)
    new, facts = announcing(pipe, mine=OTHER)
    await new.beat(facts._replace(worker_id="newer", started_at=NOW + 1))
    assert (await schemas_shown(pipe))["mine"] == OTHER
    details = [one["handler_details"][1] for one in await new.workers(with_schemas=True)]
    assert [one["config_schema"] for one in details] == [SCHEMA, OTHER], "each has its own"


async def test_schemas_are_forgotten_with_the_last_worker_that_had_them(
    pipe: PipelinedRedis,
) -> None:
    fleet, facts = announcing(pipe, mine=SCHEMA, both=OTHER)
    await fleet.beat(facts)
    other, others = announcing(pipe, both=OTHER)
    await other.beat(others._replace(worker_id="other"))
    kept = orjson.loads(await pipe.call("HGET", "wf:workers", facts.worker_id))
    old = {**kept, "last_heartbeat": kept["last_heartbeat"] - 86_401}
    await pipe.call("HSET", "wf:workers", facts.worker_id, orjson.dumps(old))
    assert await schemas_shown(pipe) == {"both": OTHER, "input": None}
    assert await pipe.call("HLEN", "wf:schemas") == 1


async def test_a_server_reads_each_announced_schema_once_and_keeps_it(
    pipe: PipelinedRedis,
) -> None:
    fleet, facts = announcing(pipe, mine=SCHEMA, own=SCHEMA)
    await fleet.beat(facts)
    handlers = Handlers({"own": 0}, WorkerRegistry(pipe), own_schemas=lambda name: OTHER)
    assert handlers.config_schema("mine") is None
    await handlers.learn()
    await pipe.call("DEL", "wf:schemas")
    await handlers.learn()
    assert handlers.config_schema("mine") == SCHEMA
    assert handlers.config_schema("own") == OTHER, "as it is known here"
    assert handlers.config_schema("input") is None


async def test_a_worker_of_an_older_version_has_no_schemas(pipe: PipelinedRedis) -> None:
    await WorkerRegistry(pipe).beat(WORKER)
    kept = orjson.loads(await pipe.call("HGET", "wf:workers", WORKER.worker_id))
    del kept["schemas"]
    await pipe.call("HSET", "wf:workers", WORKER.worker_id, orjson.dumps(kept))
    handlers = Handlers({}, WorkerRegistry(pipe))
    await handlers.learn()
    assert "sleep" in handlers
    assert handlers.config_schema("sleep") is None
    assert await schemas_shown(pipe) == {"sleep": None, "input": None}
