"""An orchestrator or a worker dies between two things that it does; another one goes on.

Named by what was done last. What becomes of leases is in test_lost_leases.py.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dovetail.config import Settings
from dovetail.core.errors import StoreError
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel, Complete, Fail, Retry, Submit
from dovetail.engine.distributed import orchestrator
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.distributed.task_source import QueueTaskSource
from dovetail.engine.ports import Task
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.redis.store import RedisStore
from dovetail.stores.redis.timers import ACTIVE
from dovetail.transports.messages import RESULTS, result_fields, stream_of
from dovetail.transports.streams.sender import ORCHESTRATORS, StreamReader
from dovetail.wiring.distributed import orchestrate

from ..core.walk import graph
from .interrupted_run import CONDITIONAL, FLOW, LONG_AGO, InterruptedRun


async def test_a_run_that_was_created_but_not_published_continues(stage: InterruptedRun) -> None:
    await stage.timers.moved(["r"], LONG_AGO)
    await stage.store.create(Submit("r", FLOW, {}), stage.parts.clock())
    assert await stage.tasks() == []
    await stage.living.sweep()
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_a_run_that_was_created_but_not_published_continues_when_it_is_created_again(
    stage: InterruptedRun,
) -> None:
    await stage.timers.moved(["r"], LONG_AGO)
    await stage.store.create(Submit("r", FLOW, {}), stage.parts.clock())
    await stage.living.submit(Submit("r", FLOW, {}))
    assert await stage.tasks() == []
    await stage.living.sweep()
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_a_run_that_was_created_but_not_listed_is_listed_when_it_is_created_again(
    stage: InterruptedRun,
) -> None:
    records = RedisRecords(stage.parts.pipe)
    await stage.store.create(Submit("r", FLOW, {}), stage.parts.clock())
    assert (await records.list_runs())["items"] == []
    await stage.living.submit(Submit("r", FLOW, {}))
    (run,) = (await records.list_runs())["items"]
    assert run["run_id"] == "r"


async def test_a_result_that_was_read_but_not_applied_is_applied(stage: InterruptedRun) -> None:
    task = await stage.submit()
    await stage.claim(task)
    result = Complete("r", "a", task.token, 1)
    await stage.parts.pipe.call("XADD", RESULTS, "*", *result_fields(result))
    pipe = stage.parts.pipe
    dead = StreamReader(pipe, pipe, ORCHESTRATORS, "dead")
    assert len(await dead.read([RESULTS], 10)) == 1
    heir = StreamReader(pipe, pipe, ORCHESTRATORS, "heir")
    await heir.remove_consumer(RESULTS, "dead")  # too early: it would take along what it holds
    left = await heir.claim_from(RESULTS, "dead", 10)
    assert [message.content for message in left] == [result]
    await stage.living.apply_results([message.content for message in left], again=True)
    await heir.acknowledge(left)
    await heir.remove_consumer(RESULTS, "dead")
    assert (await stage.drive()).status is RunStatus.COMPLETED
    known = [
        reported[1] for reported in await pipe.call("XINFO", "CONSUMERS", RESULTS, ORCHESTRATORS)
    ]
    assert known == [b"heir"]
    assert (await pipe.call("XPENDING", RESULTS, ORCHESTRATORS))[0] == 0


async def test_the_children_of_an_applied_result_are_published_after_a_crash(
    stage: InterruptedRun,
) -> None:
    task = await stage.submit()
    await stage.claim(task)
    result = Complete("r", "a", task.token, 1)
    (decision,) = await stage.store.apply([result], stage.parts.clock())
    assert decision.dispatch
    await stage.living.apply_results([result], again=True)
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_the_children_of_an_applied_and_settled_result_are_published_after_a_crash(
    stage: InterruptedRun,
) -> None:
    """Which no process does in this order; but messages may be lost, too."""
    task = await stage.submit()
    await stage.claim(task)
    await stage.store.apply([Complete("r", "a", task.token, 1)], stage.parts.clock())
    await stage.is_forgotten()
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_an_undecided_condition_is_decided_after_a_crash(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await stage.submit(CONDITIONAL)
    await stage.claim(task)

    async def die(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(RedisStore, "_settle", die)
        with pytest.raises(InterruptedError):
            await stage.living.apply_results([Complete("r", "a", task.token, 1)])
    await stage.is_forgotten()
    run = await stage.drive()
    assert (run.status, run.node("b").output) == (RunStatus.COMPLETED, 1)


async def test_two_conditions_left_undecided_by_two_crashes_are_decided(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = graph(
        {"a": [], "b": [], "c": ["a"], "d": ["b"]},
        c={"condition": "{{ a == 1 }}"},
        d={"condition": "{{ b == 2 }}"},
    )
    await stage.living.submit(Submit("r", flow, {}))
    for task in await stage.tasks():
        await stage.claim(task)

        async def die(*_: Any) -> None:
            raise InterruptedError

        with monkeypatch.context() as patched:
            patched.setattr(RedisStore, "_settle", die)
            with pytest.raises(InterruptedError):
                await stage.living.apply_results([Complete("r", task.node_id, task.token, 1)])
    await stage.is_forgotten()
    run = await stage.drive()
    assert (run.node("c").output, run.node("d").reason) == (1, "condition_false")


async def test_a_failure_whose_retry_was_not_scheduled_is_retried(stage: InterruptedRun) -> None:
    task = await stage.submit()
    await stage.claim(task)
    error = {"type": "E", "message": "m"}
    await stage.store.apply([Fail("r", "a", task.token, error, after=0.0)], stage.parts.clock())
    await stage.is_forgotten()
    run = await stage.drive()
    assert (run.status, run.node("a").attempt) == (RunStatus.COMPLETED, 2)


async def test_a_node_that_was_woken_but_not_published_is_published(stage: InterruptedRun) -> None:
    task = await stage.submit()
    await stage.claim(task)
    error = {"type": "E", "message": "m"}
    await stage.living.apply_results([Fail("r", "a", task.token, error, after=0.0)])
    ((_, wake),) = await stage.timers.due(stage.parts.clock(), 10)
    assert await stage.store.apply([wake], stage.parts.clock())
    await stage.is_forgotten()
    await stage.living.wake_due()
    assert await stage.timers.due(stage.parts.clock(), 10) == [], "it is on no list any more"
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_an_ended_run_that_is_still_active_in_the_index_is_removed(
    stage: InterruptedRun,
) -> None:
    await stage.submit()
    await stage.store.apply([Cancel("r")], stage.parts.clock())
    await stage.is_forgotten()
    assert await stage.timers.idle(stage.parts.clock() + 3600, 10) == []


async def test_a_run_retried_before_its_end_was_removed_from_the_index_continues(
    stage: InterruptedRun,
) -> None:
    await stage.submit()
    ended = stage.parts.clock()
    await stage.store.apply([Cancel("r")], ended)
    await stage.living.apply([Retry("r")])
    await stage.timers.ended(["r"], ended)
    assert [run_id for run_id, _ in await stage.timers.idle(ended + 60, 10)] == ["r"]


async def test_a_node_that_only_waits_for_a_worker_is_not_published_again(
    stage: InterruptedRun,
) -> None:
    """Else a long backlog would grow by itself."""
    await stage.living.submit(Submit("r", FLOW, {}))
    await stage.living.reconcile_run("r", stage.parts.clock(), {})
    assert await stage.parts.pipe.call("XLEN", stream_of("h")) == 1
    await stage.tasks()
    await stage.living.reconcile_run("r", stage.parts.clock(), {})
    assert await stage.parts.pipe.call("XLEN", stream_of("h")) == 1


async def test_a_retry_that_was_applied_but_not_published_continues(stage: InterruptedRun) -> None:
    await stage.submit()
    await stage.living.apply([Cancel("r")])
    await stage.store.apply([Retry("r")], stage.parts.clock())
    await stage.is_forgotten()
    run = await stage.drive()
    assert (run.status, run.epoch) == (RunStatus.COMPLETED, 2)


@pytest.mark.parametrize("copies", [1, 200])
async def test_an_orchestrator_that_dies_while_it_applies_leaves_the_result_unsettled(
    stage: InterruptedRun, redis_url: str, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    task = await stage.submit()
    await stage.claim(task)

    async def die(*_: Any, **__: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(DistributedOrchestrator, "apply_results", die)
        fields = result_fields(Complete("r", "a", task.token, 1))
        await stage.parts.pipe.transaction([("XADD", RESULTS, "*", *fields)] * copies)
        with pytest.raises(ExceptionGroup):
            await asyncio.wait_for(orchestrate(Settings(redis_url=redis_url)), 10)
    assert (await stage.parts.pipe.call("XPENDING", RESULTS, ORCHESTRATORS))[0] == copies


async def test_nodes_handed_back_are_queued_immediately_and_never_count_as_crashes(
    stage: InterruptedRun,
) -> None:
    task = await stage.submit()
    for attempt in range(1, 6):  # more often than a node may crash
        await stage.claim(task)
        task_source = QueueTaskSource(
            *(cast(Any, None), stage.store, stage.timers, cast(Any, None), stage.parts.clock),
            stage.living.apply,
            worker_id="w",
            lease_seconds=60,
        )
        await task_source.hand_back([task])
        (task,) = await stage.tasks()
        assert task.token.attempt == attempt + 1
    await stage.living.reap()
    assert await stage.listed() == {}


async def test_a_node_whose_worker_died_during_the_hand_back_is_queued_immediately(
    stage: InterruptedRun,
) -> None:
    task = await stage.submit()
    await stage.claim(task)

    async def die(*_: Any) -> None:
        raise InterruptedError

    task_source = QueueTaskSource(
        *(cast(Any, None), stage.store, stage.timers, cast(Any, None), stage.parts.clock),
        die,
        worker_id="w",
        lease_seconds=60,
    )
    with pytest.raises(InterruptedError):
        await task_source.hand_back([task])
    await stage.living.reap()
    (again,) = await stage.tasks()
    assert again.token.attempt == 2


class _Given:
    """An inbox with these tasks."""

    def __init__(self, *tasks: Task) -> None:
        self._tasks = list(tasks)

    async def tasks(self, limit: int) -> list[tuple[Any, Task]]:
        found, self._tasks = [(None, task) for task in self._tasks], []
        return found

    has_more = False

    async def acknowledge(self, messages: Any) -> None: ...


class _GivenAndLost(_Given):
    """The same; what it has beside these cannot be opened."""

    has_more = True

    async def open_more(self) -> None:
        raise StoreError("away")


async def test_a_claimed_node_runs_even_if_data_read_with_it_is_lost(stage: InterruptedRun) -> None:
    task = await stage.submit()
    inbox = cast(Any, _GivenAndLost(task))
    task_source = QueueTaskSource(
        *(inbox, stage.store, stage.timers, cast(Any, None), stage.parts.clock),
        stage.living.apply,
        worker_id="w",
        lease_seconds=60,
    )
    assert await task_source.take(1) == [task]


async def test_a_claim_granted_to_a_worker_that_is_leaving_is_handed_back(
    stage: InterruptedRun,
) -> None:
    task = await stage.submit()
    task_source = QueueTaskSource(
        *(cast(Any, _Given(task)), stage.store, stage.timers, cast(Any, None), stage.parts.clock),
        stage.living.apply,
        worker_id="w",
        lease_seconds=60,
    )
    taking = asyncio.create_task(task_source.take(1))
    while task_source._taking is None or not task_source._taking.done():
        await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await task_source.hand_back([])
    (again,) = await stage.tasks()
    assert again.token.attempt == 2


async def test_the_index_of_active_runs_is_rebuilt_after_it_was_lost(stage: InterruptedRun) -> None:
    ids = [f"r{i}" for i in range(30)]
    await stage.living.submit_many([Submit(run_id, FLOW, {}) for run_id in ids])
    await stage.living.apply([Cancel(run_id) for run_id in ids[:10]])
    await stage.parts.pipe.call("DEL", ACTIVE)
    await stage.timers.moved(["r29"], LONG_AGO)
    now = stage.parts.clock()
    await stage.timers.remember_all(now)
    found = dict(await stage.timers.idle(now + 60, 100))
    assert found == {**dict.fromkeys(ids[10:], pytest.approx(now)), "r29": LONG_AGO}


async def test_many_runs_that_were_created_but_not_published_continue(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "BATCH_SIZE", 3)
    ids = [f"r{i}" for i in range(8)]
    await stage.timers.moved(ids, LONG_AGO)
    await stage.store.create_many([Submit(one, FLOW, {}) for one in ids], stage.parts.clock())
    await stage.living.sweep()
    assert {task.run_id for task in await stage.tasks()} == set(ids)


async def test_a_result_whose_reply_was_lost_is_applied_once(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await stage.submit()
    await stage.claim(task)
    result, apply = Complete("r", "a", task.token, 1), stage.store.apply
    await apply([result], stage.parts.clock())

    async def asked_again(moves: Any, now: float, **more: Any) -> Any:
        stage.parts.pipe.breaks += 1
        return await apply(moves, now, **more)

    monkeypatch.setattr(stage.store, "apply", asked_again)
    await stage.living.apply_results([result])
    monkeypatch.undo()
    assert (await stage.drive()).status is RunStatus.COMPLETED
