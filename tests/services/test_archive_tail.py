"""Redis was started again and has lost the last seconds, of which the archive knows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dovetail.config import Settings
from dovetail.core.errors import ArchiveDown
from dovetail.core.events import Token
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel, Complete, Fail, Progress, Retry
from dovetail.engine.distributed import archiver
from dovetail.engine.distributed.archiver import RunSnapshot
from dovetail.stores.redis.archive import UNARCHIVED
from dovetail.wiring.distributed import commanding

from .archive_world import (
    DIAMOND,
    RETENTION,
    Keys,
    World,
    come_back_with,
    everything,
    graph,
    half_done,
    lose_everything,
)


async def whole(world: World, run_id: str) -> list[RunSnapshot]:
    """As an archiver reads it that knows nothing of it."""
    readings = world.snapshots.read({run_id: None})
    return [reading.snapshot async for some in readings for reading in some.values()]


async def test_an_unfinished_run_continues_from_the_older_state_and_hides_no_event(
    world: World,
) -> None:
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a")
    await world.archiver.archive_what_moved()
    older = await everything(world)
    await world.do(run_id, "b", "c")
    await world.archiver.archive_what_moved()
    archived = (await world.raw(run_id))["events"]
    await come_back_with(world, older)
    await world.archiver.sweep()
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    assert await world.generation(run_id) == 2
    run = await world.finish(run_id)
    assert run.status is RunStatus.COMPLETED
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    assert (await world.raw(run_id))["events"][: len(archived)] != archived


async def test_a_run_that_outgrew_the_archive_before_the_check_is_archived_correctly(
    world: World,
) -> None:
    run_id = await world.begin(graph(DIAMOND))
    older = await everything(world)
    await world.do(run_id, "a")
    await world.archiver.archive_what_moved()
    await come_back_with(world, older)
    await world.do(run_id, "a", "b")
    for each in (world.archiver, world.another_archiver()):
        await world.hints.moved([run_id])
        await each.archive_what_moved()
        await world.assert_archived(run_id)
    assert await world.generation(run_id) == 2


@pytest.mark.parametrize("again", [("b",), ("b", "c")], ids=["as far", "farther"])
async def test_an_archiver_that_did_not_write_the_lost_events_archives_correctly(
    world: World, again: tuple[str, ...]
) -> None:
    """It remembers an event that both logs have, and would go on from there."""
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a")
    await world.archiver.archive_what_moved()
    older = await everything(world)
    await world.do(run_id, "b")
    await world.another_archiver().archive_what_moved()
    await come_back_with(world, older)
    await world.do(run_id, *again)
    await world.hints.moved([run_id])
    for _ in range(2):  # noticed at the write; when its claim has lapsed, it is put right
        await world.archiver.archive_what_moved()
        world.now += 10
    await world.assert_archived(run_id)
    assert await world.generation(run_id) == 2


@pytest.mark.parametrize("when", ["at once", "after more work", "after another end"])
async def test_a_run_that_is_finished_in_the_archive_is_not_reopened(
    world: World, when: str
) -> None:
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a", "b")
    older = await everything(world)
    run = await world.finish(run_id)
    await world.archiver.archive_what_moved()
    events = await world.records.events(run_id)
    await come_back_with(world, older)
    if when == "after more work":
        await world.do(run_id, "c")
    elif when == "after another end":
        await world.orchestrator.apply([Cancel(run_id)])
    else:
        await world.archiver.sweep()
    await world.archiver.archive_what_moved()
    assert (await world.load(run_id)).snapshot() == run.snapshot()
    assert (await world.records.summary(run_id))["status"] == "COMPLETED"
    assert await world.records.events(run_id) == events
    await world.orchestrator.reconcile_run(run_id)
    await world.archiver.archive_what_moved()
    assert await world.hints.claim(10) == []
    world.now += RETENTION + 1
    await world.archiver.retire()
    assert await world.snapshots.known([run_id]) == set()


async def test_a_late_result_after_a_rollback_of_redis_is_archived(world: World) -> None:
    """Of a start that Redis has lost: the run is as it was archived, and has one event more."""
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a", "b")
    older = await everything(world)
    await world.finish(run_id)
    await world.archiver.archive_what_moved()
    await come_back_with(world, older)
    await world.archiver.sweep()
    await world.archiver.archive_what_moved()
    await world.orchestrator.apply([Complete(run_id, "c", Token(1, 1, 99), None)])
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    assert (await world.records.events(run_id))[-1]["type"] == "result.refused"
    world.now += RETENTION + 1
    await world.archiver.retire()
    assert await world.snapshots.known([run_id]) == set()


async def test_an_archived_end_gives_way_to_a_later_epoch(world: World) -> None:
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a")
    older = await everything(world)
    await world.do(run_id, "b", "c", "d")
    await world.archiver.archive_what_moved()
    await come_back_with(world, older)
    await world.orchestrator.apply([Cancel(run_id)])
    await world.orchestrator.apply([Retry(run_id)])
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    run = await world.finish(run_id)
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    assert (run.status, run.epoch) == (RunStatus.COMPLETED, 2)


async def test_two_archivers_that_notice_a_rollback_start_one_generation(world: World) -> None:
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a")
    older = await everything(world)
    archivers = [world.archiver, world.another_archiver(), world.another_archiver()]
    await world.do(run_id, "b")
    for each in archivers:
        await world.hints.moved([run_id])
        await each.archive_what_moved()
        await world.start(run_id, "c")
    await come_back_with(world, older)
    for each in archivers:  # each remembers what the archive had before
        await world.hints.moved([run_id])
        await each.archive_what_moved()
        await world.assert_archived(run_id)
    assert await world.generation(run_id) == 2


async def test_an_end_is_not_taken_as_archived_because_another_log_is_longer(world: World) -> None:
    """A process wrote what Redis then lost, after we had looked."""
    run_id = await world.begin(graph({"a": {}, "b": {}}))
    await world.archiver.archive_what_moved()
    older = await everything(world)
    await world.do(run_id, "a")
    for fraction in (0.1, 0.2, 0.3):
        await world.start(run_id, "b")
        token = (await world.load(run_id)).node("b").token
        await world.store.apply([Progress(run_id, "b", token, fraction, "")], world.now)
    lost = await whole(world, run_id)
    await come_back_with(world, older)
    await world.do(run_id, "a", "b")
    await world.archive.write_many(lost)
    await world.archiver.archive_what_moved()
    world.now += 10
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    assert (await world.records.summary(run_id))["status"] == "COMPLETED"


async def test_a_run_that_was_restored_before_is_archived_correctly(world: World) -> None:
    run_id = await half_done(world)
    await world.archiver.archive_what_moved()
    older = await everything(world)
    await lose_everything(world)
    await world.restorer.restore()
    await world.hints.moved([run_id])
    await world.archiver.archive_what_moved()
    assert (await world.archive.kept([run_id]))[run_id].generation == 2
    await come_back_with(world, older)
    await world.hints.moved([run_id])
    await world.archiver.archive_what_moved()
    assert await world.generation(run_id) == 3
    await world.finish(run_id)
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)


async def test_an_archiver_that_still_writes_lost_events_does_no_harm(world: World) -> None:
    """An archiver has read the end of a run, Redis loses everything, and then it writes."""
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a")
    await world.archiver.archive_what_moved()
    await world.do(run_id, "b")
    late = await whole(world, run_id)
    await world.finish(run_id)
    ends = await whole(world, run_id)
    await lose_everything(world)
    await world.restorer.restore()
    await world.archive.write_many(late)
    await world.do(run_id, "c")
    await world.archiver.archive_what_moved()
    world.now += 10
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    await world.archive.write_many(ends)
    run = await world.finish(run_id)
    await world.archiver.archive_what_moved()
    world.now += 10
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    assert (await world.records.summary(run_id))["status"] == run.status.value


async def failed(world: World) -> str:
    run_id = await world.begin(graph({"a": {}, "b": {"dependencies": ["a"]}}))
    await world.start(run_id, "a")
    token = (await world.load(run_id)).node("a").token
    error = {"type": "x", "message": "y"}
    await world.orchestrator.apply([Fail(run_id, "a", token, error, permanent=True)])
    await world.archiver.archive_what_moved()
    return run_id


@pytest.mark.parametrize("done", [(), ("a",)], ids=["at once", "half done"])
async def test_a_retry_in_the_archive_is_not_undone(world: World, done: tuple[str, ...]) -> None:
    run_id = await failed(world)
    older = await everything(world)
    await world.orchestrator.apply([Retry(run_id)])
    await world.do(run_id, *done)
    await world.archiver.archive_what_moved()
    events = await world.records.events(run_id)
    await come_back_with(world, older)
    assert (await world.load(run_id)).status is RunStatus.FAILED
    world.now += 31
    await world.restorer.restore()  # no other process looks for a run that has ended
    await world.archiver.archive_what_moved()
    run = await world.load(run_id)
    assert (run.status, run.epoch) == (RunStatus.RUNNING, 2)
    assert (await world.records.events(run_id))[: len(events)] == events
    run = await world.finish(run_id)
    assert (run.status, run.epoch, run.seq > len(events)) == (RunStatus.COMPLETED, 2, True)
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)


async def test_an_archived_retry_gives_way_to_another_later_retry(world: World) -> None:
    run_id = await failed(world)
    older = await everything(world)
    await world.orchestrator.apply([Retry(run_id)])
    await world.archiver.archive_what_moved()
    await come_back_with(world, older)
    world.now += 1
    await world.orchestrator.apply([Retry(run_id, "a")])
    ours = (await world.raw(run_id))["events"]
    await world.restorer.restore()
    await world.archiver.archive_what_moved()
    await world.assert_archived(run_id)
    assert (await world.raw(run_id))["events"] == ours
    assert (await world.finish(run_id)).status is RunStatus.COMPLETED


async def test_an_end_that_the_archive_lacks_is_not_a_lost_retry(world: World) -> None:
    run_id = await half_done(world)
    await world.archiver.archive_what_moved()
    run = await world.finish(run_id)
    await world.pipe.call("DEL", UNARCHIVED)
    world.now += 31
    await world.restorer.restore()
    await world.archiver.archive_what_moved()
    assert (await world.load(run_id)).snapshot() == run.snapshot()
    await world.assert_archived(run_id)


async def test_an_acknowledged_cancel_or_retry_survives_the_loss_of_redis(
    world: World, redis_url: str, postgres_url: str
) -> None:
    """Only the caller is there: no archiver comes round."""
    settings = Settings(redis_url=redis_url, database_url=postgres_url)
    async with commanding(settings) as commands:
        flow = {"name": "kept", "nodes": [{"id": "a", "handler": "input"}]}
        ids = [(await commands.trigger(flow)).run_id for _ in range(20)]
        for order, status, epoch in (
            (commands.cancel, "CANCELLED", 1),
            (commands.retry, "RUNNING", 2),
        ):
            await asyncio.gather(*map(order, ids))
            await world.pipe.call("FLUSHALL")
            for reported in [await commands.get_run(run_id) for run_id in ids]:
                assert (reported["status"], reported["epoch"]) == (status, epoch)


@pytest.mark.parametrize("loss", ["everything", "the end of its log"])
@pytest.mark.parametrize("order", ["cancel", "retry"])
async def test_a_command_that_redis_loses_before_it_is_archived_is_repeated(
    world: World,
    redis_url: str,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    loss: str,
) -> None:
    to_lose: list[Keys] = []
    keep = archiver.Archiver.keep

    async def lose_and_keep(self: archiver.Archiver, run_ids: Sequence[str]) -> None:
        if to_lose:
            await come_back_with(world, to_lose.pop())
        await keep(self, run_ids)

    monkeypatch.setattr(archiver.Archiver, "keep", lose_and_keep)
    settings = Settings(redis_url=redis_url, database_url=postgres_url)
    async with commanding(settings) as commands:
        flow = {"name": "kept", "nodes": [{"id": "a", "handler": "input"}]}
        run_id = (await commands.trigger(flow)).run_id
        if order == "retry":
            await commands.cancel(run_id)
        to_lose.append([] if loss == "everything" else await everything(world))
        run = await getattr(commands, order)(run_id)
        wanted = ("CANCELLED", 1) if order == "cancel" else ("RUNNING", 2)
        assert not to_lose
        assert (run.status, run.epoch) == wanted
        await world.pipe.call("FLUSHALL")
        reported = await commands.get_run(run_id)
        assert (reported["status"], reported["epoch"]) == wanted


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_command_does_not_wait_for_an_unavailable_archive(
    world: World, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    async def fails(_: object) -> None:
        if hangs:
            await asyncio.sleep(60)
        raise ArchiveDown("away")

    monkeypatch.setattr(archiver, "KEEP_SECONDS", 0.1)
    monkeypatch.setattr(world.archive, "heads", fails)
    run_id = await world.begin(graph(DIAMOND))
    async with asyncio.timeout(10):
        await world.archiver.keep([run_id])
    assert (await world.finish(run_id)).status is RunStatus.COMPLETED
