"""The feed of all runs in Redis: each run event once, in the order of its run, whatever dies."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from dovetail.core.errors import Expired
from dovetail.core.events import Event
from dovetail.core.feed import KEPT_SECONDS, FeedPosition
from dovetail.core.step import first_events
from dovetail.core.transitions import Cancel, Claim, Complete, Fail, Retry, Submit
from dovetail.stores.redis import feed as feed_module
from dovetail.stores.redis.feed import FEED, RedisFeed, trim_feed

from ..core.walk import graph
from .interrupted_run import FLOW, LONG_AGO, InterruptedRun

ONE = graph({"a": []})
SECONDS = 5.0


async def fed(stage: InterruptedRun, count: int, after: str | None = None) -> list[Any]:
    """So many events of the feed, from its beginning or after an id; and no more are there."""
    feed = stage.parts.feed
    found: list[Any] = []
    start = await feed.feed_start(after)
    if after is None:
        facts = (await stage.parts.pipe.call("GET", f"{FEED}:facts")).decode()
        start = FeedPosition.parse(facts.replace(" ", "-"))
    async with asyncio.timeout(SECONDS), aclosing(feed.follow_feed(start)) as events:
        async for one in events:
            found.append(one)
            if len(found) == count:
                break
    assert await stage.parts.pipe.call("XLEN", FEED) == count or after is not None
    return found


def types(found: list[Any], run_id: str = "r") -> list[str]:
    return [one.event.type for one in found if one.run_id == run_id]


async def test_an_event_that_is_added_twice_or_by_two_processes_is_there_once(
    stage: InterruptedRun,
) -> None:
    await stage.living.submit(Submit("r", FLOW, {}))
    run = await stage.drive()
    other = RedisFeed(stage.parts.pipe, stage.parts.clock, stage.store)
    end = Event(run.seq, run.finished_at or 0.0, "run.completed", 1)
    writes = [feed.append({"r": [end]}) for feed in (stage.parts.feed, other) * 5]
    await asyncio.gather(*writes, stage.living.reconcile_run("r"), other.catch_up(["r"]))
    found = await fed(stage, 3)
    assert types(found) == ["run.created", "run.started", "run.completed"]
    assert [one.event.seq for one in found] == [1, 2, run.seq]
    assert {one.workflow for one in found} == {FLOW.name}


async def test_an_end_that_is_added_before_the_beginning_comes_after_it(
    stage: InterruptedRun,
) -> None:
    """The process that creates many runs hears of the first ones' ends late."""
    now = stage.parts.clock()
    submit = Submit("r", ONE, {})
    (order,) = (await stage.store.create(submit, now)).dispatch
    await stage.store.apply([Claim("r", "a", order.token, "w", now + 9)], now)
    (ended,) = await stage.store.apply([Complete("r", "a", order.token, 1)], now)
    end = ended.events[-1]
    assert end.type == "run.completed"
    await stage.parts.feed.append({"r": [end]})
    created, started = first_events(submit, now)
    await stage.parts.feed.append({"r": [created, started]})
    found = await fed(stage, 3)
    assert types(found) == ["run.created", "run.started", "run.completed"]
    assert found[0].event.data == created.data


async def test_a_run_whose_creator_died_is_in_the_feed_after_the_sweep(
    stage: InterruptedRun,
) -> None:
    await stage.timers.moved(["r"], LONG_AGO)
    await stage.store.create(Submit("r", FLOW, {}), stage.parts.clock())
    await stage.living.sweep()
    assert types(await fed(stage, 2)) == ["run.created", "run.started"]


async def test_an_end_whose_orchestrator_died_is_in_the_feed_after_the_sweep(
    stage: InterruptedRun,
) -> None:
    task = await stage.submit(ONE)
    await stage.claim(task)
    await stage.store.apply([Complete("r", "a", task.token, 1)], stage.parts.clock())
    assert types(await fed(stage, 2)) == ["run.created", "run.started"]
    await stage.is_forgotten()
    assert types(await fed(stage, 3))[-1] == "run.completed"
    await stage.is_forgotten()
    assert len(await fed(stage, 3)) == 3


async def test_a_failure_whose_orchestrator_died_is_in_the_feed_when_the_run_ends(
    stage: InterruptedRun,
) -> None:
    await stage.living.submit(Submit("r", graph({"a": [], "b": []}), {}))
    tasks = {task.node_id: task for task in await stage.tasks()}
    for task in tasks.values():
        await stage.claim(task)
    error = {"type": "X", "message": "m"}
    failing = Fail("r", "a", tasks["a"].token, error, permanent=True)
    await stage.store.apply([failing], stage.parts.clock())
    await stage.living.apply_results([Complete("r", "b", tasks["b"].token, 1)])
    found = await fed(stage, 3)
    assert types(found) == ["run.created", "run.started", "run.failed"]
    assert found[-1].event.data == {"error": {**error, "node": "a"}}


async def test_a_cancel_and_retries_are_in_the_feed_in_their_order(stage: InterruptedRun) -> None:
    await stage.submit()
    for _ in range(2):
        await stage.living.apply([Cancel("r")])
        await stage.living.apply([Retry("r")])
    await stage.drive()
    again = ["run.cancelled", "run.retried"]
    expected = ["run.created", "run.started", *again, *again, "run.completed"]
    assert types(await fed(stage, 7)) == expected


async def test_a_reader_gets_what_comes_while_it_waits(stage: InterruptedRun) -> None:
    feed = stage.parts.feed
    start = await feed.feed_start(None)

    async def first(count: int) -> list[Any]:
        async with aclosing(feed.follow_feed(start)) as events:
            return [await anext(events) for _ in range(count)]

    readers = [asyncio.create_task(first(3)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await stage.living.submit(Submit("r", FLOW, {}))
    await stage.drive()
    async with asyncio.timeout(SECONDS):
        for found in await asyncio.gather(*readers):
            assert types(found) == ["run.created", "run.started", "run.completed"]


async def test_old_events_leave_the_feed_with_the_marks_of_ended_runs(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "TRIM_SIZE", 2)
    pipe, feed = stage.parts.pipe, stage.parts.feed
    await stage.living.submit(Submit("r", FLOW, {}))
    await stage.drive()
    await stage.living.submit(Submit("unfinished", FLOW, {}))
    before = [str(one.position) for one in await fed(stage, 5)]
    now = stage.parts.clock()
    await trim_feed(pipe, now)
    assert await pipe.call("XLEN", FEED) == 5
    await trim_feed(pipe, now + KEPT_SECONDS + 1)
    assert await pipe.call("XLEN", FEED) == 0
    assert await pipe.call("ZRANGE", f"{FEED}:marks", 0, -1) == [b"unfinished"]
    with pytest.raises(Expired, match="not kept any more"):
        await feed.feed_start(before[3])
    assert str(await feed.feed_start(before[4])) == before[4]
    assert str(await feed.feed_start(None)) == before[4]
    for run_id in ("r", "unfinished"):  # what has left does not come back
        await stage.living.reconcile_run(run_id)
    assert await pipe.call("XLEN", FEED) == 0
    await stage.living.apply([Cancel("unfinished")])
    assert types(await fed(stage, 1, before[4]), "unfinished") == ["run.cancelled"]


async def test_more_than_the_feed_keeps_leave_it(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_KEPT_EVENTS", 2)
    await stage.living.submit(Submit("r", FLOW, {}))
    await stage.drive()
    await trim_feed(stage.parts.pipe, stage.parts.clock())
    assert await stage.parts.pipe.call("XLEN", FEED) == 2


async def test_a_reader_that_is_too_slow_is_refused_and_misses_nothing_unnoticed(
    stage: InterruptedRun,
) -> None:
    feed = stage.parts.feed
    start = await feed.feed_start(None)
    await stage.submit()
    await trim_feed(stage.parts.pipe, stage.parts.clock() + KEPT_SECONDS + 1)
    async with aclosing(feed.follow_feed(start)) as events:
        with pytest.raises(Expired):
            await asyncio.wait_for(anext(events), SECONDS)


async def test_an_id_of_a_redis_that_was_emptied_has_expired(stage: InterruptedRun) -> None:
    await stage.submit()
    before = str(await stage.parts.feed.feed_start(None))
    await stage.parts.pipe.call("FLUSHALL")
    with pytest.raises(Expired, match="emptied"):
        await stage.parts.feed.feed_start(before)


async def test_a_long_log_without_run_events_is_read_once(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "PAGE_SIZE", 2)
    await stage.living.submit(Submit("r", graph({f"n{i}": [] for i in range(9)}), {}))
    await stage.parts.feed.catch_up(["r"])
    length = await stage.parts.pipe.call("LLEN", "wf:{r}:events")
    assert int(await stage.parts.pipe.call("ZSCORE", f"{FEED}:marks", "r")) == length == 11
    await stage.living.apply([Cancel("r")])
    assert types(await fed(stage, 3)) == ["run.created", "run.started", "run.cancelled"]
