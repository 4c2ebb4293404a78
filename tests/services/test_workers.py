"""What a server knows of the services around it, and what it costs to ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest

from dovetail.config import load_settings
from dovetail.core.definition.validation import check
from dovetail.core.errors import StoreError
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis import workers as redis_fleet
from dovetail.stores.redis.workers import WORKERS, Handlers, WorkerFacts, WorkerRegistry
from dovetail.wiring import health as module
from dovetail.wiring.health import ServicesHealth, watching

from ..servers.redis_server import RedisServer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def pipe(redis_url: str) -> AsyncIterator[PipelinedRedis]:
    async with PipelinedRedis(redis_url) as pipe:
        yield pipe


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_the_backlog_covers_local_and_announced_handlers(
    pipe: PipelinedRedis, clock: Clock
) -> None:
    fleet = ServicesHealth(pipe, ["output"], clock)
    assert await fleet.backlog() == 0
    await WorkerRegistry(pipe).beat(WorkerFacts("w", "host", 7, 0.0, ["theirs"], 0, 1))
    for stream in ("tasks:output", "tasks:theirs", "tasks:theirs"):
        await pipe.call("XADD", stream, "*", "x", "1")
    assert await fleet.backlog() == 0, "a moment old"
    clock.now += module.BACKLOG_SECONDS * 1.01
    assert await fleet.backlog() == 3


async def test_announced_handlers_stay_known_while_an_emptied_redis_has_none(
    pipe: PipelinedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = Handlers({}, WorkerRegistry(pipe))
    await WorkerRegistry(pipe).beat(
        WorkerFacts("w", "host", 7, 0.0, ["theirs"], 0, 1, {"theirs": 2})
    )
    await handlers.learn()
    await pipe.call("DEL", WORKERS)
    await handlers.learn()
    assert handlers.retries == {"theirs": 2}
    monkeypatch.setattr(redis_fleet, "REMEMBERED_SECONDS", 0.0)
    await handlers.learn()
    assert not handlers.retries


async def test_the_secrets_declaration_of_a_handler_comes_from_its_worker(
    pipe: PipelinedRedis,
) -> None:
    fleet = WorkerRegistry(pipe)
    handlers = Handlers({"own": 0}, fleet, lambda name: ("headers",))
    names = ["all", "own", "plain", "some"]
    facts = WorkerFacts("w", "host", 7, 0.0, names, 0, 1, {}, {"all": True, "some": ["body"]})
    await fleet.beat(facts)
    await handlers.learn()
    assert handlers.secret_fields("all") is True
    assert handlers.secret_fields("some") == {"body"}
    assert handlers.secret_fields("plain") is False
    assert handlers.secret_fields("own") == ("headers",), "what is known here is known best"
    node = {"id": "a", "handler": "all", "config": {"k": "{{ secrets.KEY }}"}}
    definition = {"name": "w", "nodes": [node]}
    assert check(definition, handlers).valid
    reported = orjson.loads(await pipe.call("HGET", WORKERS, "w"))
    del reported["secrets"]  # as a worker from before the rule announces itself
    await pipe.call("HSET", WORKERS, "w", orjson.dumps(reported))
    await handlers.learn()
    (problem,) = check(definition, handlers).errors
    assert problem.code == "template_forbidden"
    assert "the worker that announced it does not say so" in problem.message


async def test_a_caller_with_a_short_patience_learns_quickly_that_redis_is_down() -> None:
    with RedisServer() as server:
        async with PipelinedRedis(server.url, patience=0.2) as pipe, asyncio.timeout(20):
            server.kill()
            with pytest.raises(StoreError, match="did not come back"):
                await pipe.call("PING")
            server.start()
            while True:  # it goes on trying
                try:
                    assert await pipe.call("PING") == b"PONG"
                    break
                except StoreError:
                    continue


async def test_many_concurrent_health_checks_cost_one_request(
    pipe: PipelinedRedis, clock: Clock
) -> None:
    fleet = ServicesHealth(pipe, ["output", "input"], clock)
    before = pipe.roundtrips
    await asyncio.gather(*(fleet.backlog() for _ in range(100)))
    assert pipe.roundtrips - before <= 10  # three where nothing comes in between
    before = pipe.commands
    await asyncio.gather(*(fleet.check() for _ in range(100)))
    await fleet.check()
    assert pipe.commands - before == 1
    clock.now += module.SEEN_SECONDS * 1.01
    await fleet.check()
    assert pipe.commands - before == 2


async def test_an_unreachable_redis_is_checked_only_now_and_then(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    with RedisServer() as server:
        async with watching(load_settings(environ={}, redis_url=server.url), []) as watched:
            await watched.check()
        async with PipelinedRedis(server.url) as pipe:
            fleet = ServicesHealth(pipe, [], clock)
            await fleet.check()
            server.pause()
            try:
                await fleet.check()  # it was there a moment ago
                clock.now += module.SEEN_SECONDS * 1.01
                with pytest.raises(StoreError, match=r"within 0.2 s"):
                    await fleet.check()
                with pytest.raises(StoreError, match="a moment ago"):
                    await fleet.check()
                with pytest.raises(StoreError, match=r"within 0.2 s"):
                    await fleet.workers()
            finally:
                server.resume()
            clock.now += module.AWAY_SECONDS * 1.01
            await fleet.check()
