"""What happens to runs reaches the archive: all of it, whichever process writes it or dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dovetail.core.errors import ArchiveDown, NotFound, StoreError
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel, Complete, Fail, Retry
from dovetail.engine.distributed import archiver
from dovetail.engine.distributed.archiver import Archiver, ArchiveState, RunSnapshot
from dovetail.engine.views import result, run_view
from dovetail.stores.redis.archive import ARCHIVED, CLAIM_SECONDS, UNARCHIVED
from dovetail.stores.redis.definitions import GRACE_SECONDS, UnusedDefinitions
from dovetail.stores.redis.store import RedisStore

from .archive_world import DIAMOND, RETENTION, World, a_world, graph


@pytest.fixture
async def world(redis_url: str, postgres_url: str) -> AsyncIterator[World]:
    async with a_world(redis_url, postgres_url) as made:
        yield made


class Died(BaseException):
    """A process ends without another word: what it claimed is given back by nothing."""


async def waiting(world: World, key: str = UNARCHIVED) -> int:
    return int(await world.pipe.call("ZCARD", key))


class TestArchiving:
    async def test_the_archive_equals_redis_event_for_event(self, world: World) -> None:
        run_id = await world.begin(graph(DIAMOND), {"text": "ü\u2028"})
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        for name in "abcd":
            await world.do(run_id, name)
            await world.archiver.archive_what_moved()
            await world.assert_archived(run_id)
        assert await waiting(world) == 0
        run = await world.load(run_id)
        assert run.status is RunStatus.COMPLETED
        summary = await world.records.summary(run_id)
        assert (summary["status"], summary["result"]) == ("COMPLETED", {"d": {"of": "d"}})
        events = await world.records.events(run_id)
        assert [event["seq"] for event in events] == list(range(1, run.seq + 1))

    async def test_failed_skipped_retried_and_cancelled_nodes_are_archived_unchanged(
        self, world: World
    ) -> None:
        nodes = {
            **DIAMOND,
            "b": {"dependencies": ["a"], "max_retries": 1, "retry": {"jitter": 0}},
            "e": {"dependencies": ["a"], "condition": "{{ a.of == 'nobody' }}"},
        }
        run_id = await world.begin(graph(nodes, on_failure="continue"))
        await world.do(run_id, "a")
        for number in range(2):
            await world.start(run_id, "b")
            token = (await world.load(run_id)).node("b").token
            error = {"type": "x", "message": f"number {number}"}
            await world.orchestrator.apply([Fail(run_id, "b", token, error)])
            await world.archiver.archive_what_moved()
            await world.assert_archived(run_id)
            world.now += 60
            await world.orchestrator.wake_due()
        await world.do(run_id, "c")
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        summary = await world.records.summary(run_id)
        assert (summary["status"], summary["error"]["node"]) == ("FAILED", "b")
        await world.orchestrator.apply([Retry(run_id)])
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        await world.orchestrator.apply([Cancel(run_id)])
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        assert (await world.records.summary(run_id))["status"] == "CANCELLED"

    async def test_a_run_read_from_the_archive_equals_the_run(self, world: World) -> None:
        nodes = {**DIAMOND, "e": {"dependencies": ["a"], "condition": "{{ false }}"}}
        run_id = await world.begin(graph(nodes, max_concurrency=1), {"x": [1, {"y": None}]})
        await world.finish(run_id)
        await world.archiver.archive_what_moved()
        run, kept = await world.load(run_id), await world.archive.load(run_id)
        assert kept.snapshot() == run.snapshot()
        assert run_view(kept) == run_view(run)
        assert await world.archive.log(run_id, 3) == [
            event async for event in world.store.watch(run_id, 3)
        ]
        with pytest.raises(NotFound, match="no run 'nobody'"):
            await world.archive.load("nobody")
        with pytest.raises(NotFound, match="no run 'nobody'"):
            await world.archive.log("nobody")

    @pytest.mark.parametrize(
        ("nodes", "expected"),
        [
            ({"a": {}, "b": {}}, {"a": {"of": "a"}, "b": {"of": "b"}}),
            ({"a": {}, "b": {"handler": "output", "dependencies": ["a"]}}, {"of": "b"}),
            ({"a": {}, "b": {"condition": "{{ false }}"}}, {"a": {"of": "a"}, "b": None}),
        ],
    )
    async def test_the_result_is_derived_from_the_outputs(
        self, world: World, nodes: dict[str, Any], expected: Any
    ) -> None:
        run_id = await world.begin(graph(nodes))
        # One by one, so that not all of the result is in the last snapshot.
        for name in nodes:
            if "condition" not in nodes[name]:
                await world.do(run_id, name)
                await world.archiver.archive_what_moved()
        assert (await world.records.summary(run_id))["result"] == expected
        assert result(await world.load(run_id)) == expected

    async def test_only_changed_nodes_are_read_and_written(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written: list[RunSnapshot] = []
        write_many = world.archive.write_many

        async def watched(snapshots: list[RunSnapshot]) -> dict[str, ArchiveState]:
            written.extend(snapshots)
            return await write_many(snapshots)

        monkeypatch.setattr(world.archive, "write_many", watched)
        run_id = await world.begin(graph({f"n{i}": {} for i in range(50)}))
        await world.archiver.archive_what_moved()
        await world.do(run_id, "n3", "n7")
        await world.archiver.archive_what_moved()
        await world.hints.moved([run_id])
        await world.archiver.archive_what_moved()
        assert [sorted(one.nodes) for one in written] == [list(range(50)), [3, 7]]
        assert [len(one.events) for one in written] == [52, 4]
        assert "params" in written[0].meta
        assert "params" not in written[1].meta
        await world.assert_archived(run_id)

    async def test_a_retry_between_reading_states_and_reading_outputs_is_noticed(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id = await world.begin(graph(DIAMOND))
        await world.do(run_id, "a", "b", "c", "d")
        outputs = world.snapshots._outputs
        first = outputs.first

        async def retried(wanted: Any, most: int) -> Any:
            monkeypatch.setattr(outputs, "first", first)
            await world.orchestrator.apply([Retry(run_id, "b")])
            return await first(wanted, most)

        monkeypatch.setattr(outputs, "first", retried)
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        assert sorted((await world.raw(run_id))["outputs"]) == [0, 2]

    async def test_large_outputs_are_read_and_written_a_few_runs_at_a_time(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs, nodes, size = 12, ["n0", "n1", "n2"], 600_000
        written: list[int] = []
        write_many = world.archive.write_many

        async def watched(snapshots: list[RunSnapshot]) -> dict[str, ArchiveState]:
            written.append(sum(len(o) for one in snapshots for o in one.outputs.values()))
            return await write_many(snapshots)

        monkeypatch.setattr(world.archive, "write_many", watched)
        run_ids = [await world.begin(graph({name: {} for name in nodes})) for _ in range(runs)]
        for run_id in run_ids:
            await world.start(run_id, *nodes)
            run = await world.load(run_id)
            results = [Complete(run_id, n, run.node(n).token, "x" * (size - 2)) for n in nodes]
            await world.orchestrator.apply(results)
        await world.archiver.archive_what_moved()
        for run_id in run_ids:
            await world.assert_archived(run_id)
        assert sum(written) == runs * len(nodes) * size
        assert max(written) < archiver.MAX_TRANSACTION_BYTES + len(nodes) * size

    async def test_a_run_without_an_acceptance_record_is_archived_with_its_definition(
        self, world: World
    ) -> None:
        submit = (await world.accept(graph(DIAMOND)))._replace(
            run_id="f" * 32, graph=graph({"only": {}}, description="seen nowhere else")
        )
        await world.orchestrator.submit(submit)
        await world.archiver.archive_what_moved()
        await world.assert_archived(submit.run_id)

    async def test_a_late_result_is_archived_too(self, world: World) -> None:
        run_id = await world.begin(graph({"a": {}}))
        token = (await world.load(run_id)).node("a").token
        await world.do(run_id, "a")
        await world.archiver.archive_what_moved()
        stale = token._replace(nonce=token.nonce + 2)
        await world.orchestrator.apply([Complete(run_id, "a", stale, None)])
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        assert (await world.records.events(run_id))[-1]["type"] == "result.refused"


class TestManyArchivers:
    async def test_concurrent_archivers_lose_and_duplicate_nothing(self, world: World) -> None:
        drawn = random.Random(4)
        archivers = [world.another_archiver() for _ in range(3)]
        runs = [await world.begin(graph(DIAMOND)) for _ in range(12)]
        todo = {run_id: list("abcd") for run_id in runs}
        while todo:
            for run_id in drawn.sample(sorted(todo), min(4, len(todo))):
                await world.do(run_id, todo[run_id].pop(0))
                if not todo[run_id]:
                    del todo[run_id]
            at_once = [one.archive_what_moved() for one in archivers]
            # Every hint for every archiver: as if each claim had lapsed at once.
            late = archivers[0]._bring(drawn.sample(runs, 6))
            await asyncio.gather(*at_once, late)
            if drawn.random() < 0.5:
                world.now += CLAIM_SECONDS + 1
        world.now += CLAIM_SECONDS + 1
        await world.archiver.archive_what_moved()
        assert await waiting(world) == 0
        for run_id in runs:
            await world.assert_archived(run_id)

    async def test_a_run_claimed_by_one_archiver_is_not_taken_by_another(
        self, world: World
    ) -> None:
        await world.begin(graph(DIAMOND))
        (claim,) = await world.hints.claim(10)
        assert await world.hints.claim(10) == []
        world.now += CLAIM_SECONDS
        (again,) = await world.hints.claim(10)
        assert (again.run_id, again.since) == (claim.run_id, claim.until)

    async def test_a_run_that_just_changed_rests_for_a_moment(self, world: World) -> None:
        run_id = await world.begin(graph(DIAMOND))
        assert await world.hints.claim(10, rested=0.5) == []
        world.now += 0.3
        await world.do(run_id, "a")  # it waits from its first move on, not from its last
        world.now += 0.3
        assert [claim.run_id for claim in await world.hints.claim(10, rested=0.5)] == [run_id]

    async def test_an_archiver_that_dies_between_reading_and_writing_costs_a_moment(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id = await world.begin(graph(DIAMOND))

        async def die(_: Any) -> dict[str, ArchiveState]:
            raise Died

        doomed = world.another_archiver()
        with monkeypatch.context() as patch:
            patch.setattr(world.archive, "write_many", die)
            with pytest.raises(Died):
                await doomed.archive_what_moved()
        await world.archiver.archive_what_moved()
        assert (await world.archive.kept([run_id]))[run_id].last_seq == 0
        world.now += CLAIM_SECONDS
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)

    async def test_an_archiver_that_dies_before_it_settles_causes_the_same_write_again(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id = await world.begin(graph({"a": {}}))
        await world.do(run_id, "a")

        async def die(_: Any) -> None:
            raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(world.hints, "acknowledge", die)
            with pytest.raises(asyncio.CancelledError):
                await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        world.now += CLAIM_SECONDS
        await world.another_archiver().archive_what_moved()
        await world.assert_archived(run_id)
        assert (await waiting(world), await waiting(world, ARCHIVED)) == (0, 1)

    async def test_a_run_is_released_even_if_an_archiver_died_after_writing_its_end(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id = await world.begin(graph({"a": {}}))
        await world.do(run_id, "a")

        async def die(_: Any) -> None:
            raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(world.hints, "archived", die)
            with pytest.raises(asyncio.CancelledError):
                await world.archiver.archive_what_moved()
        world.now += CLAIM_SECONDS
        await world.another_archiver().archive_what_moved()
        assert (await waiting(world), await waiting(world, ARCHIVED)) == (0, 1)

    async def test_a_change_during_a_claim_is_not_settled_by_the_claim(self, world: World) -> None:
        run_id = await world.begin(graph(DIAMOND))
        claims = await world.hints.claim(10)
        await world.do(run_id, "a")
        await world.hints.acknowledge(claims)
        assert [one.run_id for one in await world.hints.claim(10)] == [run_id]


class TestSweep:
    async def test_the_sweep_finds_changed_runs_without_a_queue_entry(self, world: World) -> None:
        reported, unreported = [await world.begin(graph(DIAMOND)) for _ in range(2)]
        await world.archiver.archive_what_moved()
        await world.start(unreported, "a")  # a worker's claim
        await world.archiver.sweep()
        assert [claim.run_id for claim in await world.hints.claim(10)] == [unreported]
        await world.start(reported, "a")
        await world.pipe.call("DEL", UNARCHIVED)  # the claim as well
        another = world.another_archiver()
        await another.sweep()
        await another.archive_what_moved()
        assert await waiting(world) == 0
        await world.assert_archived(reported)
        await world.assert_archived(unreported)

    async def test_a_sweep_with_nothing_to_do_writes_nothing(self, world: World) -> None:
        await world.begin(graph(DIAMOND))
        await world.archiver.archive_what_moved()
        await world.archiver.sweep()
        await world.another_archiver().sweep()
        assert await waiting(world) == 0

    async def test_a_sweep_covers_many_runs(self, world: World) -> None:
        made_of = graph({"a": {}})
        submits = [await world.accept(made_of) for _ in range(30)]
        ids = [f"{i:032x}" for i in range(2500)]
        flat = [part for i, run_id in enumerate(ids) for part in (i, run_id)]
        await world.pipe.call("ZADD", "wf:active", *flat)
        await world.orchestrator.submit_many(submits)
        await world.pipe.call("DEL", UNARCHIVED)
        await world.archiver.sweep()
        await world.archiver.archive_what_moved()
        for submit in submits:
            await world.assert_archived(submit.run_id)
        assert await waiting(world) == 0


class TestLag:
    async def test_the_lag_is_the_age_of_the_longest_waiting_run(self, world: World) -> None:
        assert await world.hints.lag() == 0.0
        await world.begin(graph(DIAMOND))
        world.now += 2
        await world.begin(graph(DIAMOND))
        assert await world.hints.lag() == pytest.approx(2, abs=0.01)
        await world.archiver.archive_what_moved()
        assert await world.hints.lag() == 0.0

    async def test_the_lag_grows_while_the_archive_is_unavailable(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id = await world.begin(graph(DIAMOND))

        async def away(_: Any) -> dict[str, ArchiveState]:
            raise ArchiveDown("gone fishing")

        with monkeypatch.context() as patch:
            patch.setattr(world.archive, "write_many", away)
            for seconds in (3, 6, 9):
                world.now += 3
                with pytest.raises(ArchiveDown):
                    await world.archiver.archive_what_moved()
                assert await world.hints.lag() == pytest.approx(seconds, abs=0.01)
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        assert await world.hints.lag() == 0.0

    async def test_a_run_that_cannot_be_written_does_not_block_others(
        self, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        runs = [await world.begin(graph(DIAMOND)) for _ in range(3)]
        write_many = world.archive.write_many

        async def picky(snapshots: list[RunSnapshot]) -> dict[str, ArchiveState]:
            if any(one.run_id == runs[1] for one in snapshots):
                raise StoreError("not this one")
            return await write_many(snapshots)

        with monkeypatch.context() as patch:
            patch.setattr(world.archive, "write_many", picky)
            await world.archiver.archive_what_moved()
        assert f"run {runs[1]} cannot be archived" in caplog.text
        await world.assert_archived(runs[0])
        await world.assert_archived(runs[2])
        world.now += CLAIM_SECONDS
        await world.archiver.archive_what_moved()
        await world.assert_archived(runs[1])


class TestRetention:
    async def test_a_finished_run_is_dropped_after_its_retention_and_only_if_archived(
        self, world: World
    ) -> None:
        run_id = await world.begin(graph(DIAMOND), {"x": 1})
        run = await world.finish(run_id)
        world.now += 2 * RETENTION
        await world.archiver.retire()
        await world.load(run_id)
        await world.archiver.archive_what_moved()
        await world.archiver.retire()
        assert not await world.pipe.call("KEYS", f"*{run_id}*")
        assert (await waiting(world), await waiting(world, ARCHIVED)) == (0, 0)
        assert (await world.archive.load(run_id)).snapshot() == run.snapshot()

    async def test_a_run_is_not_dropped_too_early_or_while_it_is_unfinished(
        self, world: World
    ) -> None:
        young, retried, going_on = [await world.begin(graph(DIAMOND)) for _ in range(3)]
        await world.orchestrator.apply([Cancel(young), Cancel(retried)])
        await world.archiver.archive_what_moved()
        world.now += RETENTION - 1
        await world.archiver.retire()
        await world.orchestrator.apply([Retry(retried)])
        world.now += 2
        await world.archiver.retire()
        assert await world.snapshots.known([young, retried, going_on]) == {retried, going_on}
        await world.finish(retried)
        await world.archiver.archive_what_moved()
        assert await waiting(world, ARCHIVED) == 1

    async def test_events_that_the_archive_lacks_are_written_before_a_run_is_dropped(
        self, world: World
    ) -> None:
        run_id = await world.begin(graph({"a": {}}))
        token = (await world.load(run_id)).node("a").token
        await world.do(run_id, "a")
        await world.archiver.archive_what_moved()
        stale = token._replace(nonce=token.nonce + 2)
        await world.store.apply([Complete(run_id, "a", stale, None)], world.now)
        world.now += 2 * RETENTION
        await world.archiver.retire()
        assert await world.snapshots.known([run_id]) == {run_id}
        await world.archiver.archive_what_moved()
        await world.archiver.retire()
        assert await world.snapshots.known([run_id]) == set()
        assert (await world.records.events(run_id))[-1]["type"] == "result.refused"

    async def test_nothing_is_dropped_while_the_archive_is_unavailable(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id = await world.begin(graph({"a": {}}))
        await world.finish(run_id)
        await world.archiver.archive_what_moved()
        world.now += 2 * RETENTION

        async def away(_: Any) -> Any:
            raise ArchiveDown("gone fishing")

        with monkeypatch.context() as patch:
            patch.setattr(world.archive, "heads", away)
            with pytest.raises(ArchiveDown):
                await world.archiver.retire()
        assert await world.snapshots.known([run_id]) == {run_id}
        await world.archiver.retire()
        assert await world.snapshots.known([run_id]) == set()

    async def test_redis_returns_to_its_initial_size(self, world: World) -> None:
        made_of = graph(DIAMOND)

        async def some(count: int) -> None:
            for _ in range(count):
                await world.orchestrator.apply([Cancel(await world.begin(made_of))])
            await world.archiver.archive_what_moved()
            world.now += 2 * RETENTION
            await world.archiver.retire()

        await some(5)  # scripts, definitions and buffers
        before = await used_memory(world)
        await some(300)
        assert await used_memory(world) < 1.1 * before
        for _ in range(2):
            await UnusedDefinitions(world.pipe).look(world.now)
            world.now += GRACE_SECONDS
        assert await world.pipe.call("KEYS", "wf:*") == []

    async def test_a_definition_that_redis_dropped_is_restored_with_its_run(
        self, world: World
    ) -> None:
        run_id = await world.begin(graph(DIAMOND))
        await world.orchestrator.apply([Cancel(run_id)])
        await world.archiver.archive_what_moved()
        world.now += 2 * RETENTION
        await world.archiver.retire()
        for _ in range(2):
            await UnusedDefinitions(world.pipe).look(world.now)
            world.now += GRACE_SECONDS
        await world.restorer.bring_back(run_id)
        await world.orchestrator.apply([Retry(run_id)])
        elsewhere = await RedisStore(world.pipe).load(run_id)
        assert elsewhere.status is RunStatus.RUNNING


async def used_memory(world: World) -> int:
    text = (await world.pipe.call("INFO", "memory")).decode()
    (line,) = (line for line in text.splitlines() if line.startswith("used_memory_dataset:"))
    return int(line.partition(":")[2])


async def test_the_archive_duties_survive_outages(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(archiver, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(archiver, "FIRST_BACKOFF_SECONDS", 0.01)
    heads = world.archive.heads
    calls = 0

    async def at_first_away(run_ids: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise ArchiveDown("gone fishing")
        return await heads(run_ids)

    monkeypatch.setattr(world.archive, "heads", at_first_away)
    run_id = await world.begin(graph({"a": {}}))
    duties = asyncio.create_task(world.archiver.run())
    async with asyncio.timeout(10):
        while not (await world.archive.kept([run_id]))[run_id].last_seq:
            await asyncio.sleep(0.01)
            assert not duties.done()
    duties.cancel()
    await asyncio.wait([duties])
    assert calls >= 4
    assert caplog.text.count("the archive waits: gone fishing") == 1


async def test_an_archiver_that_is_stopped_leaves_its_runs_to_another_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await world.begin(graph({"a": {}}))
    world.now += 1
    writing = asyncio.Event()

    async def hangs(*_: object) -> None:
        writing.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(world.archive, "write_many", hangs)
        stopped = asyncio.create_task(world.archiver.archive_what_moved())
        await asyncio.wait_for(writing.wait(), 10)
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
    claims = await world.hints.claim(10)
    assert [claim.run_id for claim in claims] == [run_id]


async def test_a_bug_does_not_count_as_an_outage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def buggy(self: Archiver) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Archiver, "sweep", buggy)
    with pytest.raises(ExceptionGroup):
        await world.archiver.run()
