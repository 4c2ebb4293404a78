"""Forks on Redis: what is accepted is made, whatever dies, and what was reused comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from dovetail.core.audit.event_check import audit
from dovetail.core.dag import Graph
from dovetail.core.fork import plan_fork
from dovetail.core.run import RunState
from dovetail.core.transitions import Submit
from dovetail.engine.commands import new_id
from dovetail.engine.distributed.triggers import AGE_SECONDS, TriggerService
from dovetail.engine.ports import KeyUsed
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.tiered import ArchivedAcceptedRuns
from dovetail.wiring.distributed import _older_run

from ..contracts.stores import read
from .archive_world import DIAMOND, World, an_empty_world, graph, lose_everything

CHANGED = {**DIAMOND, "d": {**DIAMOND["d"], "config": {"right": True}}}
KEY = ("fork of x", "k", "digest")


@pytest.fixture
async def world(redis_url: str, postgres_url: str) -> AsyncIterator[World]:
    async with an_empty_world(redis_url, postgres_url) as made:
        made.orchestrator._older_run = partial(_older_run, made.store, made.archive)
        yield made


async def done(world: World) -> str:
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a", "b", "c", "d")
    return run_id


async def fork_of(world: World, old: str, made_of: Graph, **more: Any) -> Submit:
    """What `Commands.fork` submits."""
    older = await world.load(old)
    submit = Submit(new_id(), made_of, older.params, forked_from=old, **more)
    plan = plan_fork(older, submit)
    return submit._replace(reused=plan.reuse, reuse=[*plan.reuse])


async def as_the_rules_have_it(world: World, run_id: str) -> RunState:
    run = await world.load(run_id)
    events = await read(world.store, run_id, run.seq)
    bare = Submit(run_id, run.graph, run.params, run.version, max_bytes=run.max_bytes)
    assert audit(bare, events, run) == []
    return run


def reused(run: RunState) -> dict[str, Any]:
    return {
        spec.id: node.output
        for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
        if node.status == "COMPLETED" and not node.attempt
    }


OUTPUTS = {name: {"of": name} for name in "abc"}


async def test_a_fork_is_archived_and_restored_with_its_origin_and_its_outputs(
    world: World,
) -> None:
    submit = await fork_of(world, await done(world), graph(CHANGED))
    await world.records.accept(submit, world.now)
    await world.orchestrator.submit(submit)
    await world.archiver.archive_what_moved()
    await world.assert_archived(submit.run_id)
    assert (await world.archive.load(submit.run_id)).forked_from == submit.forked_from
    await lose_everything(world)
    await world.restorer.restore()
    run = await as_the_rules_have_it(world, submit.run_id)
    assert (run.forked_from, reused(run)) == (submit.forked_from, OUTPUTS)
    end = await world.finish(submit.run_id)
    assert (end.status, end.node("d").attempt) == ("COMPLETED", 1)


async def test_a_fork_whose_process_died_after_it_was_accepted_is_made_of_the_older_run(
    world: World,
) -> None:
    submit = await fork_of(world, await done(world), graph(CHANGED))
    await world.records.accept(submit, world.now)
    accepted = await world.archive.load(submit.run_id)
    assert (accepted.status, accepted.forked_from) == ("PENDING", submit.forked_from)
    world.now += 100
    assert await world.restorer.restore() == 1
    run = await as_the_rules_have_it(world, submit.run_id)
    assert (run.forked_from, reused(run)) == (submit.forked_from, OUTPUTS)
    assert (await world.finish(submit.run_id)).status == "COMPLETED"


async def test_a_fork_that_redis_lost_before_it_was_archived_is_made_again(world: World) -> None:
    old = await done(world)
    await world.archiver.archive_what_moved()
    submit = await fork_of(world, old, graph(CHANGED))
    await world.records.accept(submit, world.now)
    await world.orchestrator.submit(submit)
    await lose_everything(world)
    await world.restorer.restore()
    assert reused(await as_the_rules_have_it(world, submit.run_id)) == OUTPUTS, "by the archive"
    assert (await world.finish(submit.run_id)).status == "COMPLETED"


async def test_an_accepted_fork_whose_older_run_is_gone_runs_everything(world: World) -> None:
    submit = await fork_of(world, await done(world), graph(CHANGED))
    await world.records.accept(submit, world.now)
    forget = "DELETE FROM dovetail.runs WHERE run_id = $1"
    await world.pool.transact(lambda one: one.execute(forget, submit.forked_from))
    await lose_everything(world)
    await world.restorer.restore()
    run = await as_the_rules_have_it(world, submit.run_id)
    assert (run.forked_from, reused(run)) == (submit.forked_from, {})
    end = await world.finish(submit.run_id)
    assert [node.attempt for node in end.nodes] == [1, 1, 1, 1]


async def test_an_accepted_fork_reuses_no_more_than_it_was_accepted_with(world: World) -> None:
    old = await world.begin(graph(DIAMOND))
    await world.do(old, "a")
    submit = await fork_of(world, old, graph(DIAMOND))
    await world.records.accept(submit, world.now)
    await world.do(old, "b", "c", "d")
    world.now += 100
    await world.restorer.restore()
    assert reused(await world.load(submit.run_id)) == {"a": {"of": "a"}}


async def test_two_processes_that_make_the_same_fork_make_one_and_it_goes_on(
    world: World, redis_url: str
) -> None:
    submit = await fork_of(world, await done(world), graph(CHANGED))
    await world.records.accept(submit, world.now)
    await asyncio.gather(*(world.orchestrator.submit(submit, world.now) for _ in range(5)))
    run = await as_the_rules_have_it(world, submit.run_id)
    tokens = {order.token for order in world.outbox.offered if order.run.id == submit.run_id}
    assert tokens == {run.node("d").token}
    assert (await world.finish(submit.run_id)).status == "COMPLETED"


async def test_a_fork_that_was_written_before_the_connection_broke_is_published(
    world: World,
) -> None:
    """The reply was lost: the repeated call finds the run there."""
    submit = await fork_of(world, await done(world), graph(CHANGED))
    world.outbox.offered.clear()
    await world.store.create(submit, world.now)
    await world.orchestrator.submit(submit)
    assert [order.node_index for order in world.outbox.offered] == [3]


async def test_what_is_left_of_a_fork_that_was_half_written_expires(world: World) -> None:
    submit = await fork_of(world, await done(world), graph(CHANGED))

    async def die(*_: Any) -> Any:
        raise asyncio.CancelledError

    call_script = world.pipe.call_script
    world.pipe.call_script = die  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await world.store.create(submit, world.now)
    world.pipe.call_script = call_script  # type: ignore[method-assign]
    names = await world.pipe.call("KEYS", f"wf:{{{submit.run_id}}}:*")
    assert names
    assert all([await world.pipe.call("TTL", name) > 0 for name in names])
    assert await world.store.create(submit, world.now)


# ── without an archive ───────────────────────────────────────────────────────────────────


def accepting(world: World, accepted: RedisRecords) -> TriggerService:
    return TriggerService(accepted, world.orchestrator, world.clock, lambda error: None)


async def test_a_fork_with_a_key_is_made_by_an_orchestrator_if_its_process_died(
    world: World,
) -> None:
    accepted = RedisRecords(world.pipe, limits=world.limits)
    submit = await fork_of(world, await done(world), graph(CHANGED), key=KEY)
    await accepted.accept(submit, world.now)  # and here its process dies
    world.now += AGE_SECONDS + 1
    await accepting(world, accepted).recover_accepted()
    run = await as_the_rules_have_it(world, submit.run_id)
    assert (run.forked_from, reused(run)) == (submit.forked_from, OUTPUTS)
    assert (await world.finish(submit.run_id)).status == "COMPLETED"


async def test_a_fork_with_a_key_is_made_by_a_caller_that_asks_again(world: World) -> None:
    accepted = RedisRecords(world.pipe, limits=world.limits)
    submit = await fork_of(world, await done(world), graph(CHANGED), key=KEY)
    await accepted.accept(submit, world.now)
    again = submit._replace(run_id=new_id())
    with pytest.raises(KeyUsed) as used:
        await accepting(world, accepted).submit(again)
    assert (used.value.made, used.value.same_body) == (submit.run_id, True)
    assert reused(await world.load(submit.run_id)) == OUTPUTS
    key = await world.pipe.call("HGET", keys_of(submit.run_id)[0], "key")
    assert key == b"wf:key:fork of x:k", "the key is deleted with the run"
    with pytest.raises(KeyUsed):
        await accepting(world, accepted).submit(again)


async def test_a_key_that_was_accepted_in_postgres_makes_the_fork_that_is_missing(
    world: World,
) -> None:
    accepted = ArchivedAcceptedRuns(world.records, world.restorer)
    submit = await fork_of(world, await done(world), graph(CHANGED), key=KEY)
    await accepted.accept(submit, world.now)
    again = submit._replace(run_id=new_id())
    with pytest.raises(KeyUsed):
        await accepted.accept(again, world.now)
    assert reused(await world.load(submit.run_id)) == OUTPUTS
