"""`Dovetail.feed`: the run events of all runs, on a file, over Redis and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from dovetail import Dovetail, Expired, FeedEvent, InvalidParams

from .places import PLACES, on_a_file, over_http, over_redis, serving

FLOW = {"name": "flow", "nodes": [{"id": "a", "handler": "output", "config": {"value": 1}}]}
SECONDS = 20.0
TYPES = ["run.created", "run.started", "run.completed"]


@pytest.fixture(params=PLACES)
async def dt(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str
) -> AsyncIterator[Dovetail]:
    if request.param == "redis":
        async with over_redis(redis_url, [], {}) as found:
            yield found
        return
    at = on_a_file if request.param == "file" else over_http
    async with at(tmp_path, [], {}) as found:
        yield found


async def first(dt: Dovetail, count: int, after: str | None = None) -> list[FeedEvent]:
    async with asyncio.timeout(SECONDS), aclosing(dt.feed(after)) as events:  # type: ignore[type-var]
        return [await anext(events) for _ in range(count)]


async def test_it_follows_all_runs_and_resumes_after_an_event(dt: Dovetail) -> None:
    following = asyncio.create_task(first(dt, 6))
    await asyncio.sleep(0.3)  # it begins now
    run_ids = [(await dt.run(FLOW, timeout=SECONDS)).run_id for _ in range(2)]
    found = await following
    assert [event.type for event in found] == TYPES * 2
    assert [event.run_id for event in found] == [run_ids[0]] * 3 + [run_ids[1]] * 3
    assert {event.workflow for event in found} == {"flow"}
    assert found[0].to_dict().items() >= {"seq": 1, "epoch": 1, "version": None}.items()
    assert run_ids[0] in repr(found[0])
    for at in range(5):
        assert await first(dt, 5 - at, found[at].id) == found[at + 1 :]


async def test_a_wrong_id_and_an_id_of_another_store_are_refused(dt: Dovetail) -> None:
    for wrong in ("seven", "", "é", "a\nb", "\0", "0" * 100_000):
        with pytest.raises(InvalidParams, match=r"after: .* is no id of the feed"):
            await first(dt, 1, wrong)
    for wrong in ("00000000-1", "00000000-1-0"):
        with pytest.raises(Expired, match="follow the feed without an id"):
            await first(dt, 1, wrong)


async def test_it_goes_on_with_a_server_that_was_started_anew(tmp_path: Path) -> None:
    """Also if no event had come before."""
    async with serving(tmp_path) as url, Dovetail(url) as dt:
        port = int(url.rpartition(":")[2])
        following = asyncio.create_task(_held(url))
        await asyncio.sleep(0.3)
        await dt.run(FLOW, timeout=SECONDS)
    async with serving(tmp_path, port=port) as url, Dovetail(url) as dt:
        await dt.run(FLOW, timeout=SECONDS)
        assert [event.type for event in await following] == TYPES * 2


async def _held(url: str) -> list[FeedEvent]:
    async with Dovetail(url) as dt:
        return await first(dt, 6)
