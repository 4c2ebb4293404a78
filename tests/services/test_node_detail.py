"""A look into one node where many processes drive its run: in Redis, and in the archive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.errors import NotFound
from dovetail.core.outputs import LARGE_OUTPUT
from dovetail.core.transitions import Complete, Fail, Retry
from dovetail.engine.commands import Commands
from dovetail.engine.ports import LogQuery
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import describe
from dovetail.stores.redis import store as redis_store
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.logs import LogAppender
from dovetail.wiring.distributed import commanding, orchestrate, working

from ..log_writer import chunk
from .archive_world import LEASE, World, graph, lose_everything

SECRET = "t0p-s3cret-key"
TRACED = {
    "type": "ValueError",
    "message": "broken",
    "where": "mine.py:3 in f",
    "traceback": "Traceback …\n\x00 é\nValueError: broken",
}
SMALL = {name: value for name, value in TRACED.items() if name != "traceback"}


async def flaky(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    if ctx.attempt == 1:
        try:
            raise KeyError("page")
        except KeyError as error:
            raise ValueError(f"refused {ctx.secrets['KEY']}") from error
    return {"got": config["size"]}


@pytest.fixture
async def commands(redis_url: str) -> AsyncIterator[Commands]:
    settings = Settings(redis_url=redis_url, drain_seconds=1, secrets={"KEY": SECRET})
    registry = builtin_registry(settings)
    registry.add(describe(flaky, name="flaky", secrets=True))
    orchestrator = asyncio.create_task(orchestrate(settings))
    async with commanding(settings, registry) as made, working(settings, registry):
        yield made
    orchestrator.cancel()
    await asyncio.gather(orchestrator, return_exceptions=True)


async def test_a_worker_reports_tracebacks_and_the_config_is_rendered_again(
    commands: Commands,
) -> None:
    config = {"size": "{{ big.text | length }}", "auth": "Bearer {{ secrets.KEY }}"}
    flow = {
        "name": "flow",
        "nodes": [
            {"id": "big", "handler": "input"},
            {"id": "small", "handler": "input", "config": {"n": 1, "text": ""}},
            {"id": "b", "handler": "flaky", "dependencies": ["big", "small"], "config": config}
            | {"max_retries": 1, "retry": {"base_delay_seconds": 0.01}},
        ],
    }
    run_id, _ = await commands.trigger(flow, {"text": "x" * LARGE_OUTPUT})
    run = await asyncio.wait_for(commands.wait(run_id), 20)
    assert run.status == "COMPLETED"
    detail = await commands.node_detail(run_id, "b")
    first, second = detail["attempts"]
    assert (first["status"], second["status"]) == ("FAILED", "COMPLETED")
    assert first["error"]["where"].endswith(" in flaky")
    assert first["error"]["traceback"].startswith("Traceback (most recent call last):\n")
    assert "\nKeyError: 'page'\n" in first["error"]["traceback"]
    assert first["error"]["traceback"].endswith("ValueError: refused ***")
    assert first["worker"] == second["worker"] == detail["worker"] is not None
    assert detail["config"] == {"size": LARGE_OUTPUT, "auth": "Bearer ***"}
    assert detail["template"] == config
    assert detail["inputs"]["small"] == {"n": 1, "text": ""}
    assert detail["inputs"]["big"]["$output"]["size"] > LARGE_OUTPUT
    assert SECRET not in orjson.dumps(detail).decode()
    assert not any("traceback" in event for event in await commands.events(run_id))
    assert await commands.verify(run_id) == []


async def test_the_archive_has_the_attempts_of_a_run_that_redis_dropped(
    world: World, redis_url: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "WATCH_PAGE", 3)
    monkeypatch.setattr("dovetail.stores.tiered.WATCH_PAGE", 3)
    nodes = {
        "a": {"handler": "input"},
        "b": {"dependencies": ["a"], "config": {"of": "{{ a.of }}"}},
    }
    run_id = await world.begin(graph(nodes))
    await world.do(run_id, "a")
    await world.start(run_id, "b")
    token = (await world.load(run_id)).node("b").token
    await world.orchestrator.apply([Fail(run_id, "b", token, TRACED, permanent=True)])
    assert (await world.load(run_id)).node("b").error == SMALL
    await world.orchestrator.apply([Retry(run_id)])
    await world.start(run_id, "b")
    token = (await world.load(run_id)).node("b").token
    await world.orchestrator.apply([Complete(run_id, "b", token, {"done": True})])
    await world.archiver.archive_what_moved()
    async with commanding(Settings(redis_url=redis_url, database_url=postgres_url)) as commands:
        hot = await commands.node_detail(run_id, "b")
        assert await commands.verify(run_id) == []
        await world.pipe.call("DEL", *keys_of(run_id))
        cold = await commands.node_detail(run_id, "b")
        assert await commands.verify(run_id) == []
    assert hot == cold
    first, second = cold["attempts"]
    assert (first["epoch"], first["status"], first["error"]) == (1, "FAILED", TRACED)
    assert (second["epoch"], second["status"], second["error"]) == (2, "COMPLETED", None)
    assert (cold["config"], cold["inputs"]) == ({"of": "a"}, {"a": {"of": "a"}})


async def test_a_restored_run_has_its_attempts(
    world: World, redis_url: str, postgres_url: str
) -> None:
    retry = {"max_retries": 1, "retry": {"base_delay_seconds": 10 * LEASE}}
    run_id = await world.begin(graph({"a": retry}))
    await world.start(run_id, "a")
    token = (await world.load(run_id)).node("a").token
    await world.orchestrator.apply([Fail(run_id, "a", token, TRACED)])
    await world.archiver.archive_what_moved()
    await lose_everything(world)
    assert await world.restorer.restore() == 1
    assert (await world.load(run_id)).node("a").error == SMALL
    async with commanding(Settings(redis_url=redis_url, database_url=postgres_url)) as commands:
        detail = await commands.node_detail(run_id, "a")
        assert await commands.verify(run_id) == []
    (one,) = detail["attempts"]
    assert (one["status"], one["error"]) == ("FAILED", TRACED)
    assert detail["why"]["code"] == "backing_off"
    assert detail["config"] == {}


async def test_a_run_that_is_not_made_yet_has_a_node_without_attempts(
    world: World, redis_url: str, postgres_url: str
) -> None:
    accepted = await world.accept(graph({"a": {"config": {"x": 1}}}))
    async with commanding(Settings(redis_url=redis_url, database_url=postgres_url)) as commands:
        detail = await asyncio.wait_for(commands.node_detail(accepted.run_id, "a"), 10)
    assert (detail["status"], detail["attempts"], detail["config"]) == ("PENDING", [], None)
    assert (detail["template"], detail["why"]["code"]) == ({"x": 1}, "queued")


async def test_the_archive_has_the_log_of_a_run_that_redis_lost(
    world: World, redis_url: str, postgres_url: str
) -> None:
    run_id = await world.begin(graph({"a": {}}))
    await world.do(run_id, "a")
    appender = LogAppender(max_bytes=64 << 20)
    chunks = [chunk(run_id, number, f"{number}", f"{number} again") for number in range(3)]
    await world.pipe.call_many(appender.commands(world.pipe, chunks))
    await world.hints.moved([run_id])
    await world.archiver.archive_what_moved()
    async with commanding(Settings(redis_url=redis_url, database_url=postgres_url)) as commands:
        hot = await commands.logs(run_id, LogQuery(node="a", level="info"))
        assert [item["seq"] for item in hot["items"]] == list(range(1, 7))
        await lose_everything(world)
        assert await commands.logs(run_id, LogQuery(node="a", level="info")) == hot
        followed = [item async for item in commands.follow_logs(run_id, LogQuery(after=4))]
        assert followed == hot["items"][4:]
        with pytest.raises(NotFound, match="has no node 'b'"):
            await commands.logs(run_id, LogQuery(node="b"))
