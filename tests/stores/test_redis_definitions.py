"""Definitions in Redis: one that nothing refers to goes, and no run ever misses its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dovetail.core.transitions import Retry, Submit
from dovetail.redis_client.pipelined import Command, PipelinedRedis
from dovetail.stores.redis import store as redis
from dovetail.stores.redis.definitions import (
    GRACE_SECONDS,
    UnusedDefinitions,
    aside_key,
    definition_key,
)
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.redis.scope import SMALL_DEFINITION_BYTES, RunHeaderCache
from dovetail.stores.redis.store import RedisStore

from .test_records import BY, NOW, graph, register, submit
from .test_redis_records import DAY, RedisKeeper

LARGE = "x" * SMALL_DEFINITION_BYTES
"""It is not sent with every run: who makes one only asks whether it is there."""


class KeptDefinitions(RedisKeeper):
    def __init__(self, pipe: PipelinedRedis) -> None:
        super().__init__(pipe)
        self.unused = UnusedDefinitions(pipe)

    async def kept(self) -> int:
        return len(await self.pipe.call("KEYS", "wf:def:*"))

    async def there(self) -> int:
        """With the ones set aside."""
        return await self.kept() + len(await self.pipe.call("KEYS", "wf:unused:*"))

    async def forget_runs(self, now: float) -> None:
        while await self.records.expire(now):
            pass

    async def look_twice(self, now: float) -> None:
        await self.unused.look(now)
        await self.unused.look(now + GRACE_SECONDS)

    async def found_by_another(self, run: Submit) -> bool:
        """By a process that has not read its definition before."""
        elsewhere = await RedisStore(self.pipe).load(run.run_id)
        return elsewhere.graph.workflow == run.graph.workflow


@pytest.fixture
async def shelf(single_or_cluster: Any) -> AsyncIterator[KeptDefinitions]:
    single_or_cluster.flush()
    async with PipelinedRedis(single_or_cluster.url) as pipe:
        yield KeptDefinitions(pipe)


def inline(number: int = 0, *, large: bool = False) -> Submit:
    return submit(graph(description=f"{number} {LARGE if large else ''}"))


# --- what goes -----------------------------------------------------------------------------------


async def test_definitions_of_deleted_runs_are_deleted(shelf: KeptDefinitions) -> None:
    before = await shelf.keys()
    runs = [inline(number, large=number % 2 == 0) for number in range(20)]
    for run in runs:
        await shelf.accept(run, NOW)
        await shelf.cancel(run, NOW + 1)
    await shelf.look_twice(NOW + DAY)
    assert await shelf.kept() == 20
    await shelf.forget_runs(NOW + 8 * DAY)
    await shelf.look_twice(NOW + 8 * DAY)
    assert await shelf.keys() == before


async def test_an_unused_definition_is_set_aside_before_it_is_deleted(
    shelf: KeptDefinitions,
) -> None:
    run = inline()
    await shelf.accept(run, NOW)
    await shelf.cancel(run, NOW)
    await shelf.forget_runs(NOW + 8 * DAY)
    await shelf.unused.look(NOW + 8 * DAY)
    assert (await shelf.kept(), await shelf.there()) == (0, 1)
    await shelf.unused.look(NOW + 8 * DAY + GRACE_SECONDS - 1)
    assert await shelf.there() == 1
    await shelf.unused.look(NOW + 8 * DAY + GRACE_SECONDS)
    assert await shelf.there() == 0


async def test_definitions_of_a_deleted_workflow_are_deleted_with_its_last_run(
    shelf: KeptDefinitions,
) -> None:
    await register(shelf.records)
    run = submit(version=1)
    await shelf.accept(run, NOW)
    await shelf.cancel(run, NOW)
    await shelf.records.delete_workflow("test", BY)
    await shelf.look_twice(NOW)
    assert await shelf.found_by_another(run)
    await shelf.forget_runs(NOW + 8 * DAY)
    await shelf.look_twice(NOW + 8 * DAY)
    assert await shelf.there() == 0


async def test_the_definition_of_a_batch_refused_by_its_key_is_deleted(
    shelf: KeptDefinitions,
) -> None:
    await shelf.accept_batch("first", [inline(1)], ("batch", "k", "body"), NOW)
    with pytest.raises(Exception, match="first"):
        await shelf.accept_batch("second", [inline(2)], ("batch", "k", "other"), NOW)
    assert await shelf.kept() == 2
    await shelf.look_twice(NOW)
    assert await shelf.there() == 1


# --- what stays ----------------------------------------------------------------------------------


async def test_the_definition_of_a_registered_version_stays(shelf: KeptDefinitions) -> None:
    await register(shelf.records)
    await register(shelf.records, description="newer")
    await shelf.look_twice(NOW)
    await shelf.look_twice(NOW + DAY)
    for version in (1, 2):
        assert (await shelf.records.registered("test", version)).content
    assert await shelf.kept() == 2


async def test_the_definition_of_an_accepted_run_that_was_not_created_stays(
    shelf: KeptDefinitions,
) -> None:
    keyed, placed = inline(1), [inline(2)]
    await shelf.records.accept(keyed._replace(key=("run", "k", "body")), NOW)
    await shelf.records.accept_batch("batch", placed, None, NOW)  # and their maker dies
    await shelf.look_twice(NOW)
    made = await shelf.recover_accepted(NOW + 1)
    assert sorted(made) == sorted([keyed.run_id, placed[0].run_id])
    assert await shelf.found_by_another(keyed)


async def test_while_all_definitions_are_registered_no_run_is_read(
    shelf: KeptDefinitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register(shelf.records)
    await shelf.accept(submit(version=1), NOW)
    monkeypatch.delattr(UnusedDefinitions, "_of_runs")
    await shelf.unused.look(NOW)
    assert await shelf.kept() == 1


# --- who comes in between ------------------------------------------------------------------------


async def forgotten(shelf: KeptDefinitions, run: Submit) -> None:
    """A definition that nothing refers to any more."""
    await shelf.accept(run, NOW)
    await shelf.cancel(run, NOW)
    await shelf.forget_runs(NOW + 8 * DAY)


def in_between(monkeypatch: pytest.MonkeyPatch, what: Callable[[], Awaitable[object]]) -> None:
    """Once the definition was seen to be there, and before the run is made."""
    keeping = RunHeaderCache.keeping

    async def and_then(self: RunHeaderCache, submits: Any) -> list[Command]:
        commands = await keeping(self, submits)
        monkeypatch.setattr(RunHeaderCache, "keeping", keeping)
        await what()
        return commands

    monkeypatch.setattr(RunHeaderCache, "keeping", and_then)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
async def test_a_definition_that_is_triggered_while_it_is_judged_unused_stays(
    shelf: KeptDefinitions, monkeypatch: pytest.MonkeyPatch, large: bool, is_read: bool
) -> None:
    await forgotten(shelf, inline(large=large))
    in_between(monkeypatch, lambda: shelf.unused.look(NOW + 8 * DAY))
    again = inline(large=large)
    await shelf.accept(again, NOW + 8 * DAY)
    if is_read:
        assert await shelf.found_by_another(again)
    await shelf.unused.look(NOW + 8 * DAY + GRACE_SECONDS)
    await shelf.unused.look(NOW + 8 * DAY + 2 * GRACE_SECONDS)
    assert await shelf.found_by_another(again)
    assert await shelf.there() == 1, "it is in one place"


@pytest.mark.parametrize("large", [False, True])
async def test_a_definition_whose_trigger_stalled_until_it_was_deleted_is_stored_again(
    shelf: KeptDefinitions, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(redis, "monotonic", lambda: now[0])
    await forgotten(shelf, inline(large=large))

    async def stand_still() -> None:
        now[0] += 2 * GRACE_SECONDS
        await shelf.look_twice(NOW + 8 * DAY)

    in_between(monkeypatch, stand_still)
    again = inline(large=large)
    await shelf.accept(again, NOW + 9 * DAY)
    assert await shelf.found_by_another(again)


async def test_a_definition_that_was_set_aside_again_is_not_deleted_by_an_earlier_check(
    shelf: KeptDefinitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that made a run of it a moment ago may not have come further yet."""
    run = inline()
    await forgotten(shelf, run)
    await shelf.unused.look(NOW + 8 * DAY)
    runs = UnusedDefinitions._of_runs

    async def while_others_look(self: UnusedDefinitions) -> set[str]:
        monkeypatch.setattr(UnusedDefinitions, "_of_runs", runs)
        used = await self._of_runs()
        await shelf.pipe.call_many(await RunHeaderCache(shelf.pipe).keeping([run]))
        await UnusedDefinitions(shelf.pipe).look(NOW + 9 * DAY)
        return used

    monkeypatch.setattr(UnusedDefinitions, "_of_runs", while_others_look)
    await shelf.unused.look(NOW + 9 * DAY)
    assert await shelf.there() == 1


async def test_a_run_whose_definition_was_set_aside_is_still_retried_and_listed(
    shelf: KeptDefinitions,
) -> None:
    """As if the look had missed it: all who read a definition find it."""
    run = submit(version=1)
    await register(shelf.records)
    await shelf.accept(run, NOW)
    await shelf.cancel(run, NOW)
    digest = shelf.store._headers.definitions.stored(run.graph).sha256

    async def put_aside() -> None:
        content = await shelf.pipe.call("GETDEL", definition_key(digest))
        await shelf.pipe.call("HSET", aside_key(digest), "content", content, "since", "0")

    await put_aside()
    assert (await RedisRecords(shelf.pipe).registered("test")).content
    await put_aside()
    (item,) = (await RedisRecords(shelf.pipe).list_runs())["items"]
    assert item["result"] == {"a": None}
    await put_aside()
    assert await RedisRecords(shelf.pipe).events(run.run_id)
    await put_aside()
    (retried,) = await RedisStore(shelf.pipe).apply([Retry(run.run_id)], NOW + 1)
    assert retried.dispatch
    assert (await shelf.kept(), await shelf.there()) == (1, 1)


async def test_runs_created_and_deleted_during_many_checks_find_their_definitions(
    shelf: KeptDefinitions,
) -> None:
    ended = asyncio.Event()

    async def look_on() -> None:
        while not ended.is_set():
            await UnusedDefinitions(shelf.pipe).look(NOW + 8 * DAY)

    async def come_and_go(number: int) -> None:
        for _ in range(15):
            run = inline(number % 3, large=number % 2 == 0)
            await shelf.accept(run, NOW)
            assert await shelf.found_by_another(run)
            await shelf.cancel(run, NOW)
            await shelf.records.expire(NOW + 8 * DAY)

    looking = [asyncio.create_task(look_on()) for _ in range(3)]
    await asyncio.gather(*map(come_and_go, range(6)))
    ended.set()
    await asyncio.gather(*looking)
    await shelf.forget_runs(NOW + 8 * DAY)
    await shelf.look_twice(NOW + 20 * DAY)
    assert await shelf.keys() == set()
