"""Redis loses runs, or their end: they come back from PostgreSQL, and what is finished stays so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.audit.event_check import audit
from dovetail.core.errors import NotFound
from dovetail.core.events import Token
from dovetail.core.run import Phase, RunState
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.core.step import restore
from dovetail.core.transitions import Cancel, Complete, Dispatch, Fail, Park, Retry, Submit
from dovetail.engine.distributed.archiver import ArchiveWriter, RunSnapshot
from dovetail.engine.distributed.publisher import Publisher
from dovetail.engine.ports import Author
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis import staging
from dovetail.stores.redis.archive import RedisSnapshots
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.limits import RedisLimits
from dovetail.wiring.distributed import (
    ARCHIVE,
    ARCHIVE_CHECK_SECONDS,
    _announce_archive,
    commanding,
    connected,
)

from ..contracts.stores import read
from .archive_world import (
    DIAMOND,
    LEASE,
    RECOVERY,
    RETENTION,
    World,
    graph,
    half_done,
    lose_everything,
)
from .test_duties import beside

# ── in every state ───────────────────────────────────────────────────────────────────────

Make = Callable[[World], Awaitable[str]]


async def queued(world: World) -> str:
    return await world.begin(graph(DIAMOND))


async def running(world: World) -> str:
    run_id = await world.begin(graph(DIAMOND))
    await world.start(run_id, "a")
    return run_id


async def parked(world: World) -> str:
    run_id = await world.begin(graph({"a": {"resource_tag": "slow"}, "b": {"dependencies": ["a"]}}))
    token = (await world.load(run_id)).node("a").token
    await world.orchestrator.apply([Park(run_id, "a", token, world.now + 40)])
    return run_id


async def backing_off(world: World) -> str:
    run_id = await world.begin(graph({"a": {"max_retries": 2}, "b": {"dependencies": ["a"]}}))
    await world.start(run_id, "a")
    token = (await world.load(run_id)).node("a").token
    await world.orchestrator.apply([Fail(run_id, "a", token, {"type": "x", "message": "y"})])
    return run_id


async def held(world: World) -> str:
    run_id = await world.begin(graph({f"n{i}": {} for i in range(5)}, max_concurrency=2))
    await world.start(run_id, "n0")
    return run_id


async def conditional(world: World) -> str:
    """Its conditions were to be asked when their asker died."""
    nodes = {
        "a": {},
        "b": {"dependencies": ["a"], "condition": "{{ a.of == 'a' }}"},
        "c": {"dependencies": ["a"], "condition": "{{ a.of == 'z' }}"},
        "d": {"dependencies": ["b", "c"]},
    }
    run_id = await world.begin(graph(nodes))
    await world.start(run_id, "a")

    async def die(*_: Any) -> Any:
        raise asyncio.CancelledError

    settle, world.store._settle = world.store._settle, die  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await world.complete(run_id, "a")
    world.store._settle = settle  # type: ignore[method-assign]
    assert await world.pipe.call("HGET", keys_of(run_id)[0], "pending")
    await world.hints.moved([run_id])
    return run_id


async def failing(world: World) -> str:
    """Failed at once, while another node runs."""
    run_id = await world.begin(graph({"a": {}, "b": {}, "c": {"dependencies": ["a"]}}))
    await world.start(run_id, "a", "b")
    token = (await world.load(run_id)).node("a").token
    error = {"type": "x", "message": "y"}
    await world.orchestrator.apply([Fail(run_id, "a", token, error, permanent=True)])
    return run_id


async def allowed_to_fail(world: World) -> str:
    """Failed and going on: a join counts the failed parent, and waits for the other."""
    nodes: dict[str, dict[str, Any]] = {
        "a": {"allow_failure": True},
        "b": {},
        "join": {"dependencies": ["a", "b"]},
        "after": {"dependencies": ["a"]},
    }
    run_id = await world.begin(graph(nodes))
    await world.start(run_id, "a", "b")
    token = (await world.load(run_id)).node("a").token
    error = {"type": "x", "message": "y"}
    await world.orchestrator.apply([Fail(run_id, "a", token, error, permanent=True)])
    return run_id


async def retried(world: World) -> str:
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a", "b")
    await world.orchestrator.apply([Cancel(run_id)])
    await world.orchestrator.apply([Retry(run_id)])
    return run_id


async def weighed(world: World) -> str:
    """It may keep only so many bytes, and nearly has them."""
    submit = (await world.accept(graph(DIAMOND)))._replace(max_bytes=44)
    await world.orchestrator.submit(submit)
    await world.do(submit.run_id, "a", "b")
    return submit.run_id


def with_map(**fields: Any) -> dict[str, dict[str, Any]]:
    each = {"items": [1, 2, 3, 4, 5, 6], "max_concurrency": 4, "max_failures": 2, **fields}
    return {"a": {"for_each": each, "max_retries": 1}, "b": {}, "c": {"dependencies": ["a", "b"]}}


async def mapped(world: World) -> str:
    """Some items completed, one failed, one backs off, one runs, one is published, one waits."""
    run_id = await world.begin(graph(with_map()))
    await world.expand(run_id)
    await world.do(run_id, "a[0]", "a[2]")
    await world.start(run_id, "a[1]", "a[3]", "a[4]")
    error = {"type": "x", "message": "y"}
    for name, permanent in (("a[1]", True), ("a[3]", False)):
        token = (await world.load(run_id)).node(name).token
        move = Fail(run_id, name, token, error, permanent=permanent)
        await world.orchestrator.apply([move])
    return run_id


async def expanding(world: World) -> str:
    return await world.begin(graph(with_map()))


async def held_items(world: World) -> str:
    run_id = await world.begin(graph(with_map(), max_concurrency=2))
    await world.do(run_id, "b")
    await world.expand(run_id)
    await world.start(run_id, "a[0]")
    return run_id


async def mapped_and_retried(world: World) -> str:
    """What had failed, and what was cancelled, waits again, and only some of it has begun: what was
    archived of the rest is gone."""
    run_id = await world.begin(graph(with_map(max_concurrency=2)))
    await world.expand(run_id)
    await world.do(run_id, "a[0]", "a[2]")
    await world.start(run_id, "a[1]")
    token = (await world.load(run_id)).node("a[1]").token
    failed = Fail(run_id, "a[1]", token, {"type": "x", "message": "y"}, permanent=True)
    await world.orchestrator.apply([failed])
    await world.orchestrator.apply([Cancel(run_id)])
    await world.hints.moved([run_id])
    await world.archiver.archive_what_moved()
    await world.orchestrator.apply([Retry(run_id)])
    await world.expand(run_id)
    items = (await world.load(run_id)).node("a").items
    assert items is not None
    assert sorted(items.in_flight) == [1, 3]
    assert items.next_waiting() == 4, "it was cancelled, and waits again"
    return run_id


async def mapped_and_weighed(world: World) -> str:
    submit = (await world.accept(graph(with_map())))._replace(max_bytes=200)
    await world.orchestrator.submit(submit)
    await world.expand(submit.run_id)
    await world.do(submit.run_id, "a[0]", "a[1]", "b")
    return submit.run_id


STATES = [
    mapped,
    expanding,
    held_items,
    mapped_and_retried,
    mapped_and_weighed,
    weighed,
    queued,
    half_done,
    running,
    parked,
    backing_off,
    held,
    conditional,
    failing,
    allowed_to_fail,
    retried,
]


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
class TestARunThatRedisLost:
    async def test_is_restored_unchanged(self, world: World, make: Make) -> None:
        run_id = await make(world)
        await world.hints.moved([run_id])
        await world.archiver.archive_what_moved()
        before = (await world.load(run_id)).snapshot()
        raw = await world.raw(run_id)
        await lose_everything(world)
        world.now -= RECOVERY + 1  # for this one look, no time passes
        snapshot = await world.archive.read(run_id)
        assert snapshot is not None
        await world.snapshots.put_back(snapshot, 0.0)
        after = (await world.load(run_id)).snapshot()
        pairs = [*zip(after["nodes"], before["nodes"], strict=True)]
        for node, was in [*pairs]:
            items, had = node["items"], was["items"]
            if items is not None:
                states = items["in_flight"].items()
                pairs += [(state, had["in_flight"][item]) for item, state in states]
        for node, was in pairs:
            if node["phase"] is Phase.PUBLISHED:
                assert node["token"][:2] == was["token"][:2]
                assert node["token"] != was["token"], "who had it may run it already"
                was["token"] = node["token"]
        assert after == before
        again = await world.raw(run_id)
        assert {**again, "nodes": None} == {**raw, "nodes": None}
        assert again["nodes"].keys() == raw["nodes"].keys()

    async def test_is_restored_and_completed_by_the_regular_duties(
        self, world: World, make: Make
    ) -> None:
        run_id = await make(world)
        await world.hints.moved([run_id])
        await world.archiver.archive_what_moved()
        log = (await world.raw(run_id))["events"]
        completed = [
            (spec.id, node.output)
            for run in [await world.load(run_id)]
            for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
            if node.status is NodeStatus.COMPLETED
        ]
        await lose_everything(world)
        assert await world.restorer.restore() == 1
        assert await world.generation(run_id) == 2
        run = await world.finish(run_id)
        assert run.status is (RunStatus.FAILED if make is failing else RunStatus.COMPLETED)
        for name, output in completed:
            assert (run.node(name).output, run.node(name).attempt) == (output, 1)
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        assert (await world.raw(run_id))["events"][: len(log)] == log
        assert (await world.records.summary(run_id))["status"] == run.status.value
        assert await world.restorer.restore() == 0


async def test_a_restored_run_keeps_its_byte_limit(world: World) -> None:
    submit = (await world.accept(graph(DIAMOND)))._replace(max_bytes=30)
    await world.orchestrator.submit(submit)
    await world.do(submit.run_id, "a", "b")
    await world.archiver.archive_what_moved()
    await lose_everything(world)
    assert await world.restorer.restore() == 1
    assert (await world.load(submit.run_id)).kept_bytes == 2 * len('{"of":"a"}')
    run = await world.finish(submit.run_id)
    assert run.status is RunStatus.FAILED
    assert run.error is not None
    assert (run.error["type"], run.error["node"]) == ("too_large", "d")


class TestRestoring:
    async def test_an_accepted_run_that_was_never_created_is_created(self, world: World) -> None:
        submit = await world.accept(graph(DIAMOND), {"x": 1})
        world.now += RECOVERY - 1
        assert await world.restorer.restore() == 0, "its maker may still be at it"
        world.now += 2
        assert await world.restorer.restore() == 1
        run = await world.finish(submit.run_id)
        assert (run.status, run.params) == (RunStatus.COMPLETED, {"x": 1})
        await world.archiver.archive_what_moved()
        await world.assert_archived(submit.run_id)

    async def test_runs_in_redis_and_finished_runs_are_not_restored(self, world: World) -> None:
        going_on, finished = [await world.begin(graph(DIAMOND)) for _ in range(2)]
        await world.orchestrator.apply([Cancel(finished)])
        await world.archiver.archive_what_moved()
        world.now += RECOVERY + RETENTION + 1
        await world.archiver.retire()
        assert await world.restorer.restore() == 0
        assert await world.snapshots.known([going_on, finished]) == {going_on}
        assert await world.generation(going_on) == 1

    async def test_two_concurrent_restorers_restore_one_run(self, world: World) -> None:
        runs = [await half_done(world) for _ in range(5)]
        made = [(await world.accept(graph(DIAMOND))).run_id for _ in range(2)]
        await world.archiver.archive_what_moved()
        await lose_everything(world)
        await asyncio.gather(*(world.restorer.restore() for _ in range(3)))
        for run_id in [*runs, *made]:
            assert (await world.finish(run_id)).status is RunStatus.COMPLETED
        await world.archiver.archive_what_moved()
        for run_id in [*runs, *made]:
            await world.assert_archived(run_id)
        assert not await world.pipe.call("KEYS", "*restoring*")

    async def test_a_restorer_that_dies_leaves_no_permanent_keys(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_id = await half_done(world)
        await world.archiver.archive_what_moved()
        await lose_everything(world)

        async def die(*_: Any) -> None:
            raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(world.orchestrator, "reconcile_run", die)
            with pytest.raises(asyncio.CancelledError):
                await world.restorer.restore()
        # The run is there, and only the timer index knows of it.
        assert (await world.finish(run_id)).status is RunStatus.COMPLETED
        await world.pipe.call("DEL", *keys_of(run_id))
        monkeypatch.setattr(staging, "source", _no_script)
        with pytest.raises(LookupError):
            await world.snapshots.put_back((await world.archive.read(run_id)), 0.0)  # type: ignore[arg-type]
        left = await world.pipe.call("KEYS", "*restoring*")
        assert left
        assert all(0 < ttl <= 600 for ttl in [await world.pipe.call("TTL", key) for key in left])

    async def test_no_key_of_a_restored_run_expires(self, world: World) -> None:
        run_id = await held(world)
        await world.archiver.archive_what_moved()
        await lose_everything(world)
        await world.restorer.restore()
        keys = await world.pipe.call("KEYS", f"*{run_id}*")
        assert len(keys) >= 4
        assert {await world.pipe.call("TTL", key) for key in keys} == {-1}

    async def test_a_live_worker_may_still_report_to_a_restored_run(self, world: World) -> None:
        run_id = await running(world)
        token = (await world.load(run_id)).node("a").token
        await world.archiver.sweep()
        await world.archiver.archive_what_moved()
        await lose_everything(world)
        await world.restorer.restore()
        await world.orchestrator.reap()  # its lease in the archive has long ended
        assert (await world.load(run_id)).node("a").status is NodeStatus.RUNNING
        world.now += LEASE / 2
        await world.orchestrator.apply([Complete(run_id, "a", token, {"of": "a"})])
        run = await world.finish(run_id)
        assert run.node("a").attempt == 1

    async def test_a_dead_worker_loses_its_node_after_a_restore(self, world: World) -> None:
        run_id = await running(world)
        await world.archiver.sweep()
        await world.archiver.archive_what_moved()
        await lose_everything(world)
        await world.restorer.restore()
        run = await world.finish(run_id)
        assert (run.status, run.node("a").attempt) == (RunStatus.COMPLETED, 2)

    async def test_a_start_published_before_the_loss_can_no_longer_start(
        self, world: World
    ) -> None:
        run_id = await queued(world)
        await world.archiver.archive_what_moved()
        old = (await world.load(run_id)).node("a").token
        await lose_everything(world)
        await world.restorer.restore()
        await world.orchestrator.apply([Complete(run_id, "a", old, {"of": "another time"})])
        run = await world.finish(run_id)
        assert run.node("a").output == {"of": "a"}

    async def test_nodes_published_without_an_event_are_found_after_a_restore(
        self, world: World
    ) -> None:
        """A node that was held back, or waited, is published: nothing of that is in the log."""
        run_id = await held(world)
        waits = await parked(world)
        await world.archiver.archive_what_moved()
        await world.complete(run_id, "n0")
        world.now += 50
        await world.orchestrator.wake_due()
        await world.archiver.archive_what_moved()
        for one, name in ((run_id, "n2"), (waits, "a")):
            assert (await world.load(one)).node(name).phase is Phase.PUBLISHED
            assert (await world.archive.load(one)).node(name).phase is not Phase.PUBLISHED
        await lose_everything(world)
        await world.restorer.restore()
        run = await world.load(run_id)
        assert (run.active, run.node("n2").phase) == (2, Phase.PUBLISHED)
        for one in (run_id, waits):
            assert (await world.finish(one)).status is RunStatus.COMPLETED

    async def test_counters_are_recomputed_when_a_run_is_restored(self, world: World) -> None:
        """One that waited is published without a word, and the counts are archived with it."""
        nodes = {"a": {"resource_tag": "slow"}, "b": {}, "c": {"dependencies": ["b"]}}
        run_id = await world.begin(graph(nodes, max_concurrency=2))
        token = (await world.load(run_id)).node("a").token
        await world.orchestrator.apply([Park(run_id, "a", token, world.now + 1)])
        await world.archiver.archive_what_moved()
        world.now += 2
        await world.orchestrator.wake_due()
        await world.start(run_id, "b")
        await world.hints.moved([run_id])
        await world.archiver.archive_what_moved()
        kept = await world.archive.load(run_id)
        assert (kept.active, kept.node("a").phase) == (2, Phase.PARKED)
        await lose_everything(world)
        await world.restorer.restore()
        assert (await world.load(run_id)).active == 1
        run = await world.finish(run_id)
        assert (run.status, run.active) == (RunStatus.COMPLETED, 0)

    async def test_an_existing_run_is_not_restored(self, world: World) -> None:
        run_id = await half_done(world)
        await world.archiver.archive_what_moved()
        older = await world.archive.read(run_id)
        assert older is not None
        run = await world.finish(run_id)
        assert not await world.snapshots.put_back(older, world.now)
        assert (await world.load(run_id)).snapshot() == run.snapshot()
        assert not await world.pipe.call("KEYS", "*restoring*")

    @pytest.mark.parametrize(
        ("verb", "part", "more"),
        [
            ("DEL", "meta", []),
            ("DEL", "nodes", []),
            ("DEL", "events", []),
            ("RPUSH", "events", [1]),
        ],
    )
    async def test_a_damaged_or_duplicated_part_of_a_restore_is_written_again(
        self, world: World, monkeypatch: pytest.MonkeyPatch, verb: str, part: str, more: list[int]
    ) -> None:
        run_id = await half_done(world)
        await world.archiver.archive_what_moved()
        await lose_everything(world)
        script, harmed = world.pipe.call_script, []

        async def after_a_restart(source: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
            if not harmed:
                harmed.extend(key for key in keys if "restoring" in key and key.endswith(part))
                assert await world.pipe.call(verb, *harmed, *more)
            return await script(source, keys, args)

        monkeypatch.setattr(world.pipe, "call_script", after_a_restart)
        assert await world.restorer.restore() == 1
        assert (await world.finish(run_id)).status is RunStatus.COMPLETED
        assert not await world.pipe.call("KEYS", "*restoring*")

    async def test_an_unreadable_archived_run_does_not_block_others(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        odd = await world.begin(graph({"a": {}}, description="of another version"))
        run_id = await half_done(world)
        await world.archiver.archive_what_moved()
        spoil = """UPDATE dovetail.definitions SET content = '{"nodes":"many"}'
            WHERE number = (SELECT definition FROM dovetail.runs WHERE run_id = $1)"""
        await world.pool.transact(lambda connection: connection.execute(spoil, odd))
        await lose_everything(world)
        world.restorer._hot = RedisSnapshots(world.pipe)  # which has not compiled it yet
        assert await world.restorer.restore() == 1
        assert f"run {odd} cannot be restored" in caplog.text
        assert (await world.finish(run_id)).status is RunStatus.COMPLETED

    async def test_rate_limits_are_restored(self, world: World) -> None:
        await world.records.set_limit("slow", 2.0, 3, Author("test", 1.0))
        await world.restorer.restore()
        assert await world.limits.all() == {"slow": (2.0, 3)}
        await lose_everything(world)
        await world.restorer.restore()
        assert await world.limits.all() == {"slow": (2.0, 3)}

    async def test_rate_limits_are_restored_immediately_where_services_run(
        self, redis_url: str, postgres_url: str
    ) -> None:
        settings = Settings(redis_url=redis_url, database_url=postgres_url)
        async with (
            commanding(settings) as commands,
            beside(settings),
            PipelinedRedis(redis_url) as pipe,
        ):
            limits = RedisLimits(pipe)
            async with asyncio.timeout(10):
                while not await pipe.call("EXISTS", ARCHIVE):
                    await asyncio.sleep(0.02)
            await commands.set_rate_limit("slow", 0.5, 1)
            await pipe.call("FLUSHALL")
            async with asyncio.timeout(3):  # a minute, if no process had noticed
                while await limits.all() != {"slow": (0.5, 1)}:
                    await asyncio.sleep(0.02)

    async def test_every_orchestrator_forgets_its_lists_when_redis_was_emptied(
        self, redis_url: str, postgres_url: str
    ) -> None:
        """Connections stay when Redis is only flushed. The first orchestrator to notice sets the
        key again; the others learn of the loss all the same."""
        settings = Settings(redis_url=redis_url, database_url=postgres_url)
        async with AsyncExitStack() as stack:
            all_parts = [await stack.enter_async_context(connected(settings)) for _ in range(3)]
            pipe = all_parts[0].pipe
            for parts in all_parts:
                assert parts.archive is not None
                announcing = asyncio.create_task(_announce_archive(parts, parts.archive.restorer))
                stack.callback(announcing.cancel)
            run, token = RunState("r", graph(DIAMOND), {}, 1.0), Token(1, 1, 1)
            order = Dispatch(run, 0, token)
            async with asyncio.timeout(20):
                # Each forgets them once, when it finds the key for the first time.
                while not all(parts.renderer.kept_list(order) for parts in all_parts):
                    for parts in all_parts:
                        parts.renderer.keep_list(order, [1, 2])
                    await asyncio.sleep(2 * ARCHIVE_CHECK_SECONDS)
            await pipe.call("FLUSHALL")
            async with asyncio.timeout(10):
                while any(parts.renderer.kept_list(order) for parts in all_parts):
                    await asyncio.sleep(0.02)

    async def test_a_large_run_is_restored_in_parts(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(staging, "PIECE_SIZE", 7)
        monkeypatch.setattr(staging, "OUTPUT_PIECE_SIZE", 3)
        run_id = await world.begin(graph({f"n{i}": {} for i in range(40)}))
        await world.do(run_id, *(f"n{i}" for i in range(25)))
        await world.archiver.archive_what_moved()
        before = await world.raw(run_id)
        await lose_everything(world)
        await world.restorer.restore()
        assert {**await world.raw(run_id), "nodes": None} == {**before, "nodes": None}
        assert (await world.finish(run_id)).status is RunStatus.COMPLETED


def _no_script(name: str) -> str:
    raise LookupError(name)


class TestRestoringOnDemand:
    async def test_a_finished_run_that_redis_dropped_can_be_retried(self, world: World) -> None:
        run_id = await half_done(world)
        await world.orchestrator.apply([Cancel(run_id)])
        await world.archiver.archive_what_moved()
        world.now += RETENTION + 1
        await world.archiver.retire()
        with pytest.raises(NotFound):
            await world.load(run_id)
        await world.restorer.bring_back(run_id)
        await world.restorer.bring_back(run_id)
        await world.hints.moved([run_id])
        await world.archiver.archive_what_moved()
        await world.archiver.retire()  # not at once: a process is about to use it
        await world.orchestrator.apply([Retry(run_id)])
        run = await world.finish(run_id)
        assert (run.status, run.epoch, run.node("b").epoch) == (RunStatus.COMPLETED, 2, 1)
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)
        summary = await world.records.summary(run_id)
        assert (summary["status"], summary["epoch"]) == ("COMPLETED", 2)

    async def test_a_run_that_continues_is_not_dropped_before_the_archive_has_its_changes(
        self, world: World
    ) -> None:
        run_id = await half_done(world)
        await world.orchestrator.apply([Cancel(run_id)])
        await world.archiver.archive_what_moved()
        world.now += RETENTION + 1
        await world.archiver.retire()
        await world.restorer.bring_back(run_id)
        await world.orchestrator.apply([Retry(run_id)])
        world.now += RETENTION + 1
        await world.archiver.retire()
        assert (await world.finish(run_id)).status is RunStatus.COMPLETED

    async def test_a_run_that_was_brought_back_but_not_changed_is_dropped_again(
        self, world: World
    ) -> None:
        run_id = await half_done(world)
        await world.orchestrator.apply([Cancel(run_id)])
        await world.archiver.archive_what_moved()
        world.now += RETENTION + 1
        await world.archiver.retire()
        await world.restorer.bring_back(run_id)
        # What comes after the end, of a generation that the archive did not see the end of.
        token = (await world.load(run_id)).node("a").token
        stale = token._replace(nonce=token.nonce + 2)
        await world.orchestrator.apply([Complete(run_id, "a", stale, None)])
        await world.archiver.archive_what_moved()
        world.now += RETENTION + 1
        await world.archiver.retire()
        assert await world.snapshots.known([run_id]) == set()
        assert (await world.records.summary(run_id))["status"] == "CANCELLED"

    async def test_an_unfinished_or_pending_run_continues(self, world: World) -> None:
        run_id, unmade = await half_done(world), (await world.accept(graph(DIAMOND))).run_id
        await world.archiver.archive_what_moved()
        await world.pipe.call("FLUSHALL")
        for one in (run_id, unmade):
            await world.restorer.bring_back(one)
            assert (await world.finish(one)).status is RunStatus.COMPLETED

    async def test_an_unknown_run_is_not_found_when_it_is_brought_back(self, world: World) -> None:
        with pytest.raises(NotFound, match="no run 'nobody' in Redis or in the archive"):
            await world.restorer.bring_back("nobody")


# ── at most once ─────────────────────────────────────────────────────────────────────────

ONCE = {"delivery": "at_most_once"}


async def audited(world: World, run_id: str) -> list[str]:
    run = await world.load(run_id)
    submit = Submit(run_id, run.graph, run.params, run.version)
    return audit(submit, await read(world.store, run_id, run.seq), run)


class TestARestoredAtMostOnceNode:
    async def test_is_not_started_again_if_it_was_published(self, world: World) -> None:
        """It had started, and the archive had not heard of that."""
        run_id = await world.begin(graph({"a": {**ONCE}, "b": {"dependencies": ["a"]}}))
        await world.archiver.archive_what_moved()
        await world.start(run_id, "a")
        await lose_everything(world)
        assert await world.restorer.restore() == 1
        run = await world.load(run_id)
        assert run.node("a").status is NodeStatus.RUNNING
        assert world.outbox.offered == []
        run = await world.finish(run_id)
        assert (run.status, run.node("a").status) == (RunStatus.FAILED, NodeStatus.FAILED)
        assert run.node("a").error["type"] == "worker_lost"  # type: ignore[index]
        assert await audited(world, run_id) == []
        await world.hints.moved([run_id])
        await world.archiver.archive_what_moved()
        await world.assert_archived(run_id)

    async def test_is_completed_by_the_worker_that_had_started_it(self, world: World) -> None:
        run_id = await world.begin(graph({"a": {**ONCE}}))
        await world.archiver.archive_what_moved()
        token = (await world.load(run_id)).node("a").token
        await world.start(run_id, "a")
        await lose_everything(world)
        await world.restorer.restore()
        await world.orchestrator.apply([Complete(run_id, "a", token, {"of": "a"})])
        run = await world.load(run_id)
        assert (run.status, run.node("a").output) == (RunStatus.COMPLETED, {"of": "a"})
        assert await audited(world, run_id) == []

    async def test_starts_in_its_turn_if_it_was_not_published(self, world: World) -> None:
        run_id = await world.begin(graph({"a": {}, "b": {"dependencies": ["a"], **ONCE}}))
        await world.start(run_id, "a")
        await world.hints.moved([run_id])
        await world.archiver.archive_what_moved()
        await lose_everything(world)
        await world.restorer.restore()
        run = await world.finish(run_id)
        assert (run.status, run.node("b").attempt) == (RunStatus.COMPLETED, 1)
        assert await audited(world, run_id) == []

    async def test_is_restored_in_every_phase_like_in_the_core(self, world: World) -> None:
        nodes = {name: {**ONCE, "resource_tag": name} for name in "abcd"}
        run_id = await world.begin(graph(nodes, max_concurrency=2))
        token = (await world.load(run_id)).node("a").token
        await world.orchestrator.apply([Park(run_id, "a", token, world.now + 40)])
        await world.hints.moved([run_id])
        await world.archiver.archive_what_moved()
        expected = await world.load(run_id)
        await lose_everything(world)
        restore(expected, world.now + LEASE, world.now)
        await world.restorer.restore()
        assert (await world.load(run_id)).snapshot() == expected.snapshot()
        assert await audited(world, run_id) == []

    async def test_is_archived_before_a_worker_can_receive_it(self, world: World) -> None:
        sent: list[tuple[str, bool]] = []

        class Sender:
            async def send(self, tasks: Sequence[Any]) -> None:
                for task in tasks:
                    kept = await world.archive.read(task.run_id)
                    place = task.place
                    known = kept is not None and kept.nodes.get(place, "W").startswith("Q")
                    sent.append((task.node_id, known))

        publisher = Publisher(
            *(world.store, world.store, Sender(), world.clock),  # type: ignore[arg-type]
            record=world.writer.record,
        )
        world.orchestrator._transport = publisher
        nodes = {"a": {}, "b": {"dependencies": ["a"], **ONCE}, "c": {"dependencies": ["b"]}}
        run_id = await world.begin(graph(nodes))
        await world.do(run_id, "a")
        await world.do(run_id, "b")
        assert [name for name, _ in sent] == ["a", "b", "c"]
        assert dict(sent)["b"]

    async def test_is_recorded_although_another_archiver_writes_the_run_at_the_same_time(
        self, world: World
    ) -> None:
        """As two orchestrators do that publish items of one mapped node. What the other one has
        written may be less than this one has seen, or more."""
        run_id = await world.begin(graph({name: {**ONCE} for name in "abcd"}))
        first, other = (
            world.writer,
            ArchiveWriter(world.snapshots, world.hints, world.archive, world.clock),
        )
        assert await first.record([run_id])
        raced = iter("ab")

        class Raced:
            """Another archiver writes between the reading and the writing of this one."""

            async def write_many(self, snapshots: Sequence[RunSnapshot]) -> Any:
                if (name := next(raced, None)) is not None:
                    await world.start(run_id, name)
                    assert await other.record([run_id])
                return await world.archive.write_many(snapshots)

            def __getattr__(self, name: str) -> Any:
                return getattr(world.archive, name)

        first.archive = Raced()  # type: ignore[assignment]
        await world.start(run_id, "c")
        assert await first.record([run_id])
        await world.assert_archived(run_id)

    async def test_is_still_sent_while_the_archive_is_unavailable(self, world: World) -> None:
        asked: list[Sequence[str]] = []
        sent: list[str] = []

        class Sender:
            async def send(self, tasks: Sequence[Any]) -> None:
                sent.extend(task.node_id for task in tasks)

        async def away(run_ids: Sequence[str]) -> bool:
            asked.append(run_ids)
            return False

        publisher = Publisher(
            *(world.store, world.store, Sender(), world.clock),  # type: ignore[arg-type]
            record=away,
        )
        world.orchestrator._transport = publisher
        await world.begin(graph({"a": {**ONCE}}))
        await world.begin(graph({"a": {**ONCE}}))
        assert (len(sent), len(asked)) == (2, 1), "who is away is not asked at every message"
