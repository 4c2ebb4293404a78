"""Runs are deleted from Redis and its archive: nothing that was on its way brings one back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dovetail.core.errors import ArchiveDown, NotFound
from dovetail.core.transitions import Complete, Retry
from dovetail.engine.distributed.archiver import RunSnapshot
from dovetail.engine.distributed.deletion import ArchiveRetention, RunDeleter
from dovetail.stores.redis.codec import all_keys_of

from .archive_world import DIAMOND, RECOVERY, World, graph, half_done


@pytest.fixture(autouse=True)
async def _no_leftovers(world: World) -> None:
    """Other tests leave rows of runs that they forgot."""
    empty = "TRUNCATE dovetail.events, dovetail.nodes, dovetail.generations"
    await world.pool.transact(lambda connection: connection.execute(empty))


@pytest.fixture
def deleter(world: World) -> RunDeleter:
    return RunDeleter(world.writer)


async def done(world: World, *, archived: bool = True) -> str:
    run_id = await world.begin(graph(DIAMOND))
    await world.finish(run_id)
    if archived:
        await world.archiver.archive_what_moved()
    return run_id


async def whole(world: World, run_id: str) -> RunSnapshot:
    """As an archiver reads it that knows nothing of it."""
    reading = world.snapshots.read({run_id: None})
    (found,) = [one.snapshot async for some in reading for one in some.values()]
    return replace(found, content=await world.snapshots.definition(found))


async def assert_gone(world: World, run_id: str) -> None:
    with pytest.raises(NotFound):
        await world.load(run_id)
    assert await world.archive.kept([run_id]) == {}
    for table in ("events", "nodes", "generations"):
        orphans = f"SELECT COUNT(*) FROM dovetail.{table} WHERE run NOT IN (SELECT number FROM dovetail.runs)"  # noqa: E501
        count = await world.pool.transact(lambda c, sql=orphans: c.fetchval(sql))  # type: ignore[misc]
        assert count == 0, table
    meta, *others = all_keys_of(run_id)
    assert await world.pipe.call("EXISTS", *others) == 0
    assert await world.pipe.call("HKEYS", meta) in ([], [b"dropped"])


@pytest.mark.parametrize("archived", [True, False])
async def test_a_run_is_deleted_from_both_whether_it_is_archived_yet_or_not(
    world: World, deleter: RunDeleter, archived: bool
) -> None:
    run_id, other = await done(world, archived=archived), await done(world)
    await world.pipe.call("SET", f"wf:{{{run_id}}}:caller", "a traceparent")
    assert await deleter.delete([run_id]) == [run_id]
    await assert_gone(world, run_id)
    assert await deleter.delete([run_id]) == []
    await world.assert_archived(other)


async def test_a_run_that_left_redis_is_deleted_from_the_archive(
    world: World, deleter: RunDeleter
) -> None:
    run_id = await done(world)
    await world.pipe.call("FLUSHALL")
    assert await deleter.delete([run_id]) == [run_id]
    await assert_gone(world, run_id)


async def test_an_unfinished_run_stays(world: World, deleter: RunDeleter) -> None:
    run_id = await half_done(world)
    assert await deleter.delete([run_id]) == []
    await world.pipe.call("FLUSHALL")
    assert await deleter.delete([run_id]) == [], "lost in Redis, and to be restored"
    world.now += RECOVERY + 1
    assert await world.restorer.restore() == 1
    await world.finish(run_id)


async def test_a_run_that_ended_later_stays_in_both(world: World, deleter: RunDeleter) -> None:
    run_id = await done(world)
    ended = (await world.load(run_id)).finished_at
    assert ended is not None
    assert await deleter.delete([run_id], ended_before=ended - 0.001) == []
    await world.assert_archived(run_id)
    assert await deleter.delete([run_id], ended_before=ended) == [run_id]


async def test_an_archiver_that_has_the_run_in_hand_does_not_write_it_again(
    world: World, deleter: RunDeleter
) -> None:
    run_id = await done(world)
    in_hand = await whole(world, run_id)
    assert await deleter.delete([run_id]) == [run_id]
    assert await world.archive.write_many([in_hand]) == {}
    assert await world.archive.write_many([replace(in_hand, content=None)]) == {}
    await assert_gone(world, run_id)
    await world.hints.moved([run_id])
    await world.archiver.archive_what_moved()
    assert await world.hints.lag() == 0.0, "and nothing waits for it any more"


async def test_an_archiver_that_writes_at_the_same_moment_does_not_bring_it_back(
    world: World, deleter: RunDeleter
) -> None:
    for _ in range(10):
        run_id = await done(world, archived=False)
        in_hand = await whole(world, run_id)
        deleted, _ = await asyncio.gather(
            deleter.delete([run_id]), world.archive.write_many([in_hand])
        )
        assert deleted == [run_id]
        await assert_gone(world, run_id)


async def test_the_sweep_of_the_restorer_does_not_bring_it_back(
    world: World, deleter: RunDeleter
) -> None:
    run_id = await half_done(world)
    await world.archiver.archive_what_moved()  # the archive has it as unfinished
    await world.finish(run_id)
    world.now += RECOVERY + 1
    await asyncio.gather(deleter.delete([run_id]), world.restorer.restore())
    assert await world.restorer.restore() == 0
    await world.archiver.sweep()
    await world.archiver.archive_what_moved()
    await world.archiver.retire()
    await assert_gone(world, run_id)


async def test_a_restorer_that_has_the_run_in_hand_does_not_put_it_back(
    world: World, deleter: RunDeleter
) -> None:
    run_id = await half_done(world)
    await world.archiver.archive_what_moved()
    in_hand = await world.archive.read(run_id)
    assert in_hand is not None
    await world.finish(run_id)
    assert await deleter.delete([run_id]) == [run_id]
    assert not await world.snapshots.put_back(replace(in_hand, generation=2), world.now + 10)
    await assert_gone(world, run_id)


async def test_a_process_that_is_late_to_create_the_run_does_not_create_it_again(
    world: World, deleter: RunDeleter
) -> None:
    submit = await world.accept(graph(DIAMOND))
    await world.orchestrator.submit(submit)
    await world.finish(submit.run_id)
    assert await deleter.delete([submit.run_id]) == [submit.run_id]
    await world.orchestrator.submit(submit)
    await assert_gone(world, submit.run_id)


async def test_a_retry_of_an_archived_run_does_not_bring_it_back(
    world: World, deleter: RunDeleter
) -> None:
    run_id = await done(world)
    await world.snapshots.delete(run_id, (await world.archive.heads([run_id]))[run_id])
    with pytest.raises(NotFound, match="is being deleted"):
        await world.restorer.bring_back(run_id)
    assert await deleter.delete([run_id]) == [run_id]
    with pytest.raises(NotFound):
        await world.restorer.bring_back(run_id)


async def test_a_retried_run_is_not_deleted(world: World, deleter: RunDeleter) -> None:
    run_id = await done(world)
    await world.orchestrator.apply([Retry(run_id, "d")])
    assert await deleter.delete([run_id]) == []
    await world.finish(run_id)
    assert await deleter.delete([run_id]) == [run_id]


async def test_a_late_result_is_refused_as_of_an_unknown_run(
    world: World, deleter: RunDeleter
) -> None:
    run_id = await world.begin(graph(DIAMOND))
    token = (await world.load(run_id)).node("a").token
    await world.finish(run_id)
    assert await deleter.delete([run_id]) == [run_id]
    for _ in range(2):
        (decision,) = await world.orchestrator.apply([Complete(run_id, "a", token, {"late": 1})])
        assert not decision
    await assert_gone(world, run_id)


class AwayFrom:
    """An archive that goes away before one of its calls."""

    def __init__(self, archive: Any, name: str) -> None:
        self._archive = archive
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise ArchiveDown("PostgreSQL is away")
        return getattr(self._archive, name)


@pytest.mark.parametrize("call", ["heads", "ended_by", "delete"])
async def test_a_run_stays_as_it_is_while_postgresql_is_away(world: World, call: str) -> None:
    run_id = await done(world)
    world.writer.archive = AwayFrom(world.archive, call)  # type: ignore[assignment]
    with pytest.raises(ArchiveDown):
        await RunDeleter(world.writer).delete([run_id])
    await world.restorer.bring_back(run_id)
    assert (await world.load(run_id)).finished, "it can be read and retried"


# --- retention of the archive --------------------------------------------------------------------


def retention(world: World, seconds: float | None) -> ArchiveRetention:
    return ArchiveRetention(RunDeleter(world.writer), world.writer, seconds)


async def test_the_archive_keeps_runs_for_ever_unless_it_is_told_for_how_long(world: World) -> None:
    run_id = await done(world)
    world.now += 1e9
    assert await retention(world, None).sweep() == 0
    await world.assert_archived(run_id)


async def test_the_archive_deletes_runs_that_ended_long_ago_and_no_others(world: World) -> None:
    unfinished = await half_done(world)
    await world.archiver.archive_what_moved()
    old = [await done(world) for _ in range(3)]
    world.now += 50
    young = await done(world)
    world.now += 60
    swept = await asyncio.gather(retention(world, 100).sweep(), retention(world, 100).sweep())
    assert sum(swept) == 3, "two orchestrators delete each run once"
    for run_id in old:
        await assert_gone(world, run_id)
    await world.assert_archived(young)
    await world.finish(unfinished)


async def test_the_age_of_a_run_counts_from_its_end(world: World) -> None:
    run_id = await half_done(world)
    world.now += 1000
    await world.finish(run_id)
    await world.archiver.archive_what_moved()
    assert await retention(world, 500).sweep() == 0
    world.now += 501
    assert await retention(world, 500).sweep() == 1


async def test_the_archive_forgets_in_time_what_it_has_deleted(
    world: World, deleter: RunDeleter
) -> None:
    run_id = await done(world)
    await deleter.delete([run_id])
    world.now += 2 * 86400
    await retention(world, None).sweep()
    assert await world.pool.rows("find_deleted", [run_id]) == []
