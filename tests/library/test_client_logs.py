"""Logs and nodes through the client: on a file, over Redis and over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dovetail import Dovetail, LoggedLine, NotFound, handler
from dovetail.core.node_logs import LogChunk
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.logs import LogAppender
from dovetail.stores.sqlite.store import SqliteStore

from ..log_writer import chunk
from .places import PLACES, on_a_file, over_http, over_redis

GO = threading.Event()
"""Of this process: each test has an event loop of its own."""


@handler
async def waits(config: dict[str, Any], ctx: Any) -> str:
    while not GO.is_set():
        await asyncio.sleep(0.01)
    return "went"


@handler
async def breaks(config: dict[str, Any], ctx: Any) -> None:
    raise ValueError("broken")


class Place(NamedTuple):
    dt: Dovetail
    write: Callable[..., Any]


@asynccontextmanager
async def file_writer(path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with SqliteStore(path, sync="normal") as store:

        async def write(*chunks: LogChunk) -> None:
            store.log(chunks)
            await store.apply([], 1000.0, durable=True)

        yield write


@asynccontextmanager
async def redis_writer(url: str) -> AsyncIterator[Callable[..., Any]]:
    async with PipelinedRedis(url) as pipe:
        appender = LogAppender(max_bytes=64 << 20)

        async def write(*chunks: LogChunk) -> None:
            await pipe.call_many(appender.commands(pipe, chunks))

        yield write


@pytest.fixture(params=PLACES)
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str
) -> AsyncIterator[Place]:
    GO.clear()
    handlers = [waits, breaks]
    if request.param == "redis":
        async with (
            over_redis(redis_url, handlers, {}) as dt,
            redis_writer(redis_url) as write,
        ):
            yield Place(dt, write)
        return
    at = on_a_file if request.param == "file" else over_http
    path = tmp_path / ("runs.db" if request.param == "file" else "served.db")
    async with at(tmp_path, handlers, {}) as dt, file_writer(path) as write:
        yield Place(dt, write)


def flow(handler: str) -> dict[str, Any]:
    return {"name": "flow", "nodes": [{"id": "a", "handler": handler, "config": {"n": 1}}]}


async def test_logs_are_objects_with_the_fields_of_the_api(place: Place) -> None:
    dt = place.dt
    run = await dt.run(flow("breaks"))
    await place.write(chunk(run.run_id, 0, "one", "two"), chunk(run.run_id, 0, "2nd", attempt=2))
    lines = [line async for line in dt.logs(run.run_id)]
    assert [type(line) for line in lines] == [LoggedLine] * 3
    first = lines[0]
    assert first.to_dict() == {
        "seq": 1,
        "time": "1970-01-01T00:16:40.500000Z",
        "node": "a",
        "epoch": 1,
        "attempt": 1,
        "item": None,
        "level": "INFO",
        "logger": "mine",
        "message": "one",
        "fields": None,
    }
    assert "one" in repr(first)
    assert [line.message async for line in dt.logs(run.run_id, node="a", attempt=2)] == ["2nd"]
    assert [line.seq async for line in dt.logs(run.run_id, follow=True)] == [1, 2, 3]


async def test_logs_have_every_line_of_a_long_log(place: Place) -> None:
    run = await place.dt.run(flow("breaks"))
    for number in range(5):
        await place.write(chunk(run.run_id, number, *map(str, range(500))))
    for follow in (False, True):
        found = [line.seq async for line in place.dt.logs(run.run_id, follow=follow)]
        assert found == list(range(1, 2501))


async def test_missing_lines_are_said_once(place: Place) -> None:
    run = await place.dt.run(flow("breaks"))
    await place.write(chunk(run.run_id, 0, "begin"))
    await place.write(chunk(run.run_id, 1, "end", missing_lines=12, missing_bytes=4_000))
    for follow in (False, True):
        lines = [line async for line in place.dt.logs(run.run_id, follow=follow)]
        assert [line.seq for line in lines] == [1, 1, 2]
        assert lines[1].message.startswith("… 12 lines (4.0 kB) are missing here")


async def test_logs_are_followed_until_the_run_ends(place: Place) -> None:
    run = await place.dt.trigger(flow("waits"))
    seen: list[str] = []
    first = asyncio.Event()

    async def follow() -> None:
        async for line in place.dt.logs(run.run_id, node="a", follow=True):
            seen.append(line.message)
            first.set()

    async with asyncio.timeout(30):
        following = asyncio.create_task(follow())
        await place.write(chunk(run.run_id, 0, "one"))
        await first.wait()
        await place.write(chunk(run.run_id, 1, "two"))
        GO.set()
        await following
    assert seen == ["one", "two"]
    assert (await place.dt.get_run(run.run_id)).status == "COMPLETED"


async def test_a_node_is_an_object_with_its_attempts(place: Place) -> None:
    run = await place.dt.run(flow("breaks"))
    node = await place.dt.node(run.run_id, "a")
    assert (node.id, node.status, node.handler) == ("a", "FAILED", "breaks")
    assert (node.template, node.config, node.config_error) == ({"n": 1}, {"n": 1}, None)
    assert (node.inputs, node.why) == ({}, None)
    (attempt,) = node.attempts
    assert (attempt.epoch, attempt.attempt, attempt.status) == (1, 1, "FAILED")
    assert attempt.error is not None
    assert attempt.error["traceback"].endswith("ValueError: broken")
    view = node.to_dict()
    assert view["attempts"] == [attempt.to_dict()]
    assert view.keys() >= {"output", "template", "config", "inputs", "why", "attempts"}
    assert node.error is not None
    assert "traceback" not in node.error


async def test_an_unknown_run_or_node_is_not_found(place: Place) -> None:
    run = await place.dt.run(flow("breaks"))
    for follow in (False, True):
        for run_id, node in (("0000", None), (run.run_id, "b")):
            with pytest.raises(NotFound):
                _ = [line async for line in place.dt.logs(run_id, node=node, follow=follow)]
    with pytest.raises(NotFound):
        await place.dt.node("0000", "a")
    with pytest.raises(NotFound):
        await place.dt.node(run.run_id, "b")
