"""An orchestrator or a worker dies between two things that it does; somebody else goes on.

Nobody is killed here: what the dead one had done is done by hand, what it had not is left undone,
and another one's duties are called. So each point is met exactly, every time; that processes
really die is for the fault tests. Named by what was done last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from dovetail.config import Settings
from dovetail.core.dag import Graph
from dovetail.core.errors import NotFound, StoreError
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.transitions import NOTHING, Cancel, Complete, Fail, Renew, Retry, Submit
from dovetail.distributed import Parts, connected, orchestrate
from dovetail.engine import shared
from dovetail.engine.ports import Task
from dovetail.engine.remote_desk import RemoteDesk
from dovetail.engine.shared import EVER, SharedOrchestrator
from dovetail.stores import redis_shells
from dovetail.stores.redis import RedisStore
from dovetail.stores.redis_agenda import ACTIVE, LEASES
from dovetail.stores.redis_limits import RedisLimits
from dovetail.stores.redis_records import RedisRecords
from dovetail.transports.messages import read_task, result_fields, task_fields
from dovetail.transports.stream_inbox import StreamInbox
from dovetail.transports.stream_messages import RESULTS, stream_of
from dovetail.transports.streams import ORCHESTRATORS, WORKERS, StreamReader

from ..core.walk import graph

LONGEST_LEASE = 60.0
LEASE = 0.05
LONG_AGO = 1.0
FLOW = graph({"a": [], "b": ["a"], "c": ["a", "b"]}, a={"max_retries": 1})
CONDITIONAL = graph({"a": [], "b": ["a"]}, b={"condition": "{{ a == 1 }}"})


class Stage:
    """A run, what the dead one still does to it, and who goes on."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.living = parts.orchestrator
        self.store = parts.store
        self.store.ahead = None  # what is sent is sent by who follows, or was not sent
        self.agenda = parts.orchestrator.agenda

    async def tasks(self) -> list[Task]:
        """What lies in the stream of tasks, taken out of it."""
        found = await self.parts.pipe.call("XRANGE", stream_of("h"), "-", "+")
        if found:
            await self.parts.pipe.call("XDEL", stream_of("h"), *[number for number, _ in found])
        return [read_task(fields) for _, fields in found]

    async def submit(self, flow: Graph = FLOW) -> Task:
        await self.living.submit(Submit("r", flow, {}))
        (task,) = await self.tasks()
        return task

    async def claim(self, task: Task, lease: float = LONGEST_LEASE) -> None:
        now = self.parts.clock()
        await self.agenda.lease([task.run_id], now + lease)
        assert await self.store.claim([task], "w", now + lease, now) == [True]

    async def renew(self, task: Task, lease: float) -> None:
        desk = RemoteDesk(
            *(cast(Any, None), self.store, self.agenda, cast(Any, None), self.parts.clock),
            self.living.apply,
            worker_id="w",
            lease_seconds=lease,
        )
        assert await desk.renew([task]) == []

    async def listed(self) -> dict[str, float]:
        """Runs on the list of leases, and when each is looked at."""
        found = await self.parts.pipe.call("ZRANGE", LEASES, 0, -1, "WITHSCORES")
        return {
            run_id.decode(): float(at) for run_id, at in zip(found[::2], found[1::2], strict=True)
        }

    async def is_forgotten(self) -> None:
        """Nobody has heard of the run for long: the next sweep looks after it."""
        await self.parts.pipe.call("ZADD", ACTIVE, LONG_AGO, "r")
        await self.living.sweep()

    async def drive(self) -> RunState:
        """Run whatever is published; a run of which nothing is published is stuck."""
        while not (run := await self.store.load("r")).finished:
            await self.living.wake_due()
            tasks = await self.tasks()
            assert tasks, f"nobody knows how to go on: {run.snapshot()}"
            for task in tasks:
                now = self.parts.clock()
                if (await self.store.claim([task], "w", now + 60, now)) == [True]:
                    await self.living.take_in([Complete("r", task.node_id, task.token, 1)])
        return run


@pytest.fixture
async def stage(redis_url: str) -> AsyncIterator[Stage]:
    async with connected(Settings(redis_url=redis_url, lease_seconds=LONGEST_LEASE)) as parts:
        yield Stage(parts)


async def test_the_run_was_made_and_not_published(stage: Stage) -> None:
    await stage.agenda.moved(["r"], LONG_AGO)
    await stage.store.create(Submit("r", FLOW, {}), stage.parts.clock())
    assert await stage.tasks() == []
    await stage.living.sweep()
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_the_run_was_made_and_not_published_and_made_again_by_another(stage: Stage) -> None:
    await stage.agenda.moved(["r"], LONG_AGO)
    await stage.store.create(Submit("r", FLOW, {}), stage.parts.clock())
    await stage.living.submit(Submit("r", FLOW, {}))
    assert await stage.tasks() == []
    await stage.living.sweep()
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_the_run_was_made_and_not_listed_and_made_again_by_another(stage: Stage) -> None:
    records = RedisRecords(stage.parts.pipe)
    await stage.store.create(Submit("r", FLOW, {}), stage.parts.clock())
    assert (await records.list_runs())["items"] == []
    await stage.living.submit(Submit("r", FLOW, {}))
    (run,) = (await records.list_runs())["items"]
    assert run["run_id"] == "r"


async def test_a_result_was_read_and_not_applied(stage: Stage) -> None:
    task = await stage.submit()
    await stage.claim(task)
    result = Complete("r", "a", task.token, 1)
    await stage.parts.pipe.call("XADD", RESULTS, "*", *result_fields(result))
    pipe = stage.parts.pipe
    dead = StreamReader(pipe, pipe, ORCHESTRATORS, "dead")
    assert len(await dead.read([RESULTS], 10)) == 1
    heir = StreamReader(pipe, pipe, ORCHESTRATORS, "heir")
    await heir.dismiss(RESULTS, "dead")  # too early: it would take along what it holds
    left = await heir.claim_from(RESULTS, "dead", 10)
    assert [message.content for message in left] == [result]
    await stage.living.take_in([message.content for message in left], again=True)
    await heir.settle(left)
    await heir.dismiss(RESULTS, "dead")
    assert (await stage.drive()).status is RunStatus.COMPLETED
    known = [told[1] for told in await pipe.call("XINFO", "CONSUMERS", RESULTS, ORCHESTRATORS)]
    assert known == [b"heir"]
    assert (await pipe.call("XPENDING", RESULTS, ORCHESTRATORS))[0] == 0


async def test_a_result_was_applied_and_its_children_not_published(stage: Stage) -> None:
    task = await stage.submit()
    await stage.claim(task)
    result = Complete("r", "a", task.token, 1)
    (decision,) = await stage.store.apply([result], stage.parts.clock())
    assert decision.dispatch
    await stage.living.take_in([result], again=True)
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_a_result_was_applied_and_settled_and_its_children_not_published(
    stage: Stage,
) -> None:
    """Which nobody does in this order; but messages may be lost, too."""
    task = await stage.submit()
    await stage.claim(task)
    await stage.store.apply([Complete("r", "a", task.token, 1)], stage.parts.clock())
    await stage.is_forgotten()
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_a_condition_was_left_to_decide(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await stage.submit(CONDITIONAL)
    await stage.claim(task)

    async def die(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(RedisStore, "_settle", die)
        with pytest.raises(InterruptedError):
            await stage.living.take_in([Complete("r", "a", task.token, 1)])
    await stage.is_forgotten()
    run = await stage.drive()
    assert (run.status, run.node("b").output) == (RunStatus.COMPLETED, 1)


async def test_two_conditions_were_left_to_decide_by_two_that_died(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
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
                await stage.living.take_in([Complete("r", task.node_id, task.token, 1)])
    await stage.is_forgotten()
    run = await stage.drive()
    assert (run.node("c").output, run.node("d").reason) == (1, "condition_false")


async def test_a_failure_was_applied_and_its_next_attempt_not_put_down(stage: Stage) -> None:
    task = await stage.submit()
    await stage.claim(task)
    error = {"type": "E", "message": "m"}
    await stage.store.apply([Fail("r", "a", task.token, error, after=0.0)], stage.parts.clock())
    await stage.is_forgotten()
    run = await stage.drive()
    assert (run.status, run.node("a").attempt) == (RunStatus.COMPLETED, 2)


async def test_a_node_was_woken_and_not_published(stage: Stage) -> None:
    task = await stage.submit()
    await stage.claim(task)
    error = {"type": "E", "message": "m"}
    await stage.living.take_in([Fail("r", "a", task.token, error, after=0.0)])
    (wake,) = await stage.agenda.due(stage.parts.clock(), 10)
    assert await stage.store.apply([wake], stage.parts.clock())
    await stage.is_forgotten()
    await stage.living.wake_due()
    assert await stage.agenda.due(stage.parts.clock(), 10) == [], "it is on nobody's list any more"
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_a_worker_had_claimed_and_not_answered(stage: Stage) -> None:
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    await asyncio.sleep(LEASE)
    await stage.living.reap()
    run = await stage.drive()
    assert (run.status, run.node("a").crashes) == (RunStatus.COMPLETED, 1)
    assert await stage.listed() == {}


async def test_a_worker_had_claimed_and_the_run_is_on_no_list(stage: Stage) -> None:
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    await stage.parts.pipe.call("DEL", LEASES)
    await asyncio.sleep(LEASE)
    await stage.is_forgotten()
    await stage.living.reap()
    assert (await stage.drive()).node("a").attempt == 2


async def test_what_a_dead_worker_had_claimed_is_reaped_in_time_though_another_asked_for_it(
    stage: Stage,
) -> None:
    """It died before it was done with the message, so that another worker reads that as well."""
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    pipe = stage.parts.pipe
    await pipe.call("XADD", stream_of("h"), "*", *task_fields(task))
    reader = StreamReader(pipe, pipe, WORKERS, "heir")
    heir = RemoteDesk(
        StreamInbox(reader, pipe, ["h"]),
        stage.store,
        stage.agenda,
        RedisLimits(pipe),
        stage.parts.clock,
        stage.living.apply,
        worker_id="heir",
        lease_seconds=60.0,
    )
    found = [(message, message.content) for message in await reader.read([stream_of("h")], 10)]
    assert await heir.start(found) == []
    await asyncio.sleep(LEASE)
    await stage.living.reap()
    assert (await stage.drive()).node("a").attempt == 2


async def test_many_leases_of_a_run_end_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "AT_ONCE", 3)
    wide = graph({f"n{i}": [] for i in range(8)})
    await stage.living.submit(Submit("r", wide, {}))
    tasks = await stage.tasks()
    for task in tasks:
        await stage.claim(task, lease=LEASE)
    await stage.store.apply([Complete("r", "n0", tasks[0].token, 1)], stage.parts.clock())
    await asyncio.sleep(LEASE)
    await stage.living.reap()
    assert await stage.listed() == {}
    run = await stage.drive()
    assert [node.attempt for node in run.nodes] == [1, *[2] * 7]


async def test_leases_of_many_runs_end_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some of them nothing runs any more, and in one somebody renews it just now."""
    monkeypatch.setattr(shared, "AT_ONCE", 3)
    ids = [f"r{i}" for i in range(10)]
    await stage.living.submit_many([Submit(run_id, FLOW, {}) for run_id in ids])
    tasks = {task.run_id: task for task in await stage.tasks()}
    for task in tasks.values():
        await stage.claim(task, lease=LEASE)
    over = [Complete(run_id, "a", tasks[run_id].token, 1) for run_id in ids[:4]]
    await stage.store.apply(over, stage.parts.clock())
    await asyncio.sleep(LEASE)
    renewed = stage.parts.clock() + LONGEST_LEASE
    apply = stage.store.apply

    async def renew_before(moves: Any, now: float, **more: Any) -> Any:
        if "r9" in {move.run_id for move in moves}:
            await apply([Renew("r9", "a", tasks["r9"].token, renewed)], now)
        return await apply(moves, now, **more)

    with monkeypatch.context() as patched:
        patched.setattr(stage.store, "apply", renew_before)
        await asyncio.wait_for(stage.living.reap(), 10)
    runs = [await stage.store.load(run_id) for run_id in ids]
    assert [run.node("a").crashes for run in runs] == [*[0] * 4, *[1] * 5, 0]
    (still,) = (await stage.listed()).items()
    assert still == ("r9", pytest.approx(stage.parts.clock(), abs=1)), "it is looked at soon"
    await asyncio.sleep(shared.REAP_SECONDS / 2)
    await stage.living.reap()
    assert await stage.listed() == {"r9": renewed}


async def test_what_is_never_reaped_keeps_nobody_else_waiting(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "AT_ONCE", 2)
    ids = [f"r{i}" for i in range(6)]
    await stage.living.submit_many([Submit(run_id, FLOW, {}) for run_id in ids])
    for at, task in enumerate(await stage.tasks()):
        await stage.claim(task, lease=LEASE + at / 1000)
    await asyncio.sleep(2 * LEASE)
    apply = stage.store.apply

    async def refuse(moves: Any, now: float, **more: Any) -> Any:
        stuck = {move.run_id for move in moves} & set(ids[:5])
        mine = [move for move in moves if move.run_id not in stuck]
        decisions = iter(await apply(mine, now, **more))
        return [NOTHING if move.run_id in stuck else next(decisions) for move in moves]

    monkeypatch.setattr(stage.store, "apply", refuse)
    for _ in range(2):
        await asyncio.wait_for(stage.living.reap(), 10)
    assert (await stage.store.load("r5")).node("a").crashes == 1
    assert sorted(await stage.listed()) == ids[:5]


async def test_of_two_workers_on_a_run_the_one_that_died_is_missed_and_the_other_is_not(
    stage: Stage,
) -> None:
    """Whoever of them came first, and though the one that lives has been renewed since."""
    await stage.living.submit(Submit("r", graph({"a": [], "b": [], "c": ["a", "b"]}), {}))
    first, second = await stage.tasks()
    await stage.claim(first, lease=LEASE)
    await stage.claim(second, lease=2 * LEASE)
    await stage.renew(first, LONGEST_LEASE)
    await asyncio.sleep(LEASE)
    await stage.living.reap()
    run = await stage.store.load("r")
    assert [node.crashes for node in run.nodes] == [0, 0, 0]
    assert await stage.listed() == {"r": run.node("b").lease_until}
    await asyncio.sleep(LEASE)
    await stage.living.reap()
    run = await stage.store.load("r")
    assert [node.crashes for node in run.nodes] == [0, 1, 0]
    assert await stage.listed() == {"r": run.node("a").lease_until}
    await stage.living.take_in([Complete("r", "a", first.token, 1)])
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_a_claim_that_comes_while_somebody_looks_keeps_the_run_on_the_list(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await stage.submit()
    await stage.agenda.lease(["r"], LONG_AGO)  # of a start that is over
    running = stage.store.running

    async def claimed_after(run_ids: Any) -> Any:
        found = await running(run_ids)
        await stage.claim(task, lease=LEASE)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(stage.store, "running", claimed_after)
        await stage.living.reap()
    until = (await stage.store.load("r")).node("a").lease_until
    assert await stage.listed() == {"r": until}
    await asyncio.sleep(LEASE)
    await stage.living.reap()
    assert (await stage.drive()).node("a").crashes == 1


async def test_somebody_had_put_off_a_look_and_not_looked(stage: Stage) -> None:
    """Another one does, two leases later."""
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    await asyncio.sleep(LEASE)
    await stage.agenda.put_off(["r"], stage.parts.clock() + 2 * LEASE)
    await stage.living.reap()
    assert (await stage.store.load("r")).node("a").crashes == 0
    await asyncio.sleep(2 * LEASE)
    await stage.living.reap()
    assert (await stage.drive()).node("a").crashes == 1


@pytest.mark.parametrize("error", [StoreError, NotFound, asyncio.CancelledError])
async def test_who_cannot_go_on_after_it_has_put_off_a_look_leaves_it_to_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    await asyncio.sleep(LEASE)

    async def stop(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(stage.store, "apply", stop)
        with pytest.raises(error):
            await stage.living.reap()
    await stage.living.reap()
    assert (await stage.drive()).node("a").crashes == 1


async def test_who_looks_leaves_a_look_that_another_has_put_off_later(stage: Stage) -> None:
    await stage.submit()
    await stage.agenda.lease(["r"], LONG_AGO)
    await stage.agenda.put_off(["r"], 2 * LONG_AGO)
    await stage.agenda.put_off(["r"], 3 * LONG_AGO)
    await stage.agenda.released(["r"], 2 * LONG_AGO)
    assert await stage.listed() == {"r": 3 * LONG_AGO}
    await stage.agenda.released(["r"], 3 * LONG_AGO)
    await stage.agenda.put_off(["r"], 4 * LONG_AGO)
    assert await stage.listed() == {}


async def test_renewals_write_nothing_to_the_list_and_a_death_after_them_is_missed_in_time(
    stage: Stage,
) -> None:
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    listed = await stage.listed()
    for _ in range(3):
        await stage.renew(task, 2 * LEASE)
        assert await stage.listed() == listed
        await asyncio.sleep(LEASE)
    await stage.living.reap()
    run = await stage.store.load("r")
    assert run.node("a").crashes == 0
    assert await stage.listed() == {"r": run.node("a").lease_until}
    await asyncio.sleep(LEASE)  # nobody renews it any more
    await stage.living.reap()
    assert (await stage.drive()).node("a").crashes == 1


async def test_who_has_not_heard_all_results_looks_at_nobody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    listed = await stage.listed()
    await asyncio.sleep(LEASE)

    async def of_long_ago() -> float:
        return LONG_AGO

    with monkeypatch.context() as patched:
        patched.setattr(stage.parts.sender, "oldest_result", of_long_ago)
        await stage.living.reap()
    assert (await stage.store.load("r")).node("a").crashes == 0
    assert await stage.listed() == listed


async def test_the_list_of_leases_is_behind_a_lease_that_was_renewed(stage: Stage) -> None:
    task = await stage.submit()
    await stage.claim(task)
    await stage.agenda.lease(["r"], LONG_AGO)
    await stage.living.reap()
    assert await stage.agenda.expired(stage.parts.clock() + 30, 10) == []
    assert await stage.agenda.expired(stage.parts.clock() + 61, 10), "it is still held by somebody"
    await stage.living.take_in([Complete("r", "a", task.token, 1)])
    assert (await stage.drive()).node("a").crashes == 0


async def test_a_run_that_has_ended_is_on_no_list(stage: Stage) -> None:
    task = await stage.submit()
    await stage.claim(task)
    await stage.living.take_in([Complete("r", "a", task.token, 1)])
    assert list(await stage.listed()) == ["r"], "it goes on"
    await stage.drive()
    assert await stage.listed() == {}
    assert await stage.agenda.idle(EVER, 10) == []


async def test_a_run_that_was_retried_before_its_end_was_noted_stays_on_the_list_of_leases(
    stage: Stage,
) -> None:
    await stage.submit()
    ended = stage.parts.clock()
    await stage.store.apply([Cancel("r")], ended)
    await stage.living.apply([Retry("r")])
    (task,) = await stage.tasks()
    await stage.claim(task)
    await stage.agenda.ended(["r"], ended)
    assert list(await stage.listed()) == ["r"]


async def test_a_run_had_ended_and_was_still_on_the_list(stage: Stage) -> None:
    await stage.submit()
    await stage.store.apply([Cancel("r")], stage.parts.clock())
    await stage.is_forgotten()
    assert await stage.agenda.idle(stage.parts.clock() + 3600, 10) == []


async def test_a_run_was_retried_before_its_end_was_taken_off_the_list(stage: Stage) -> None:
    await stage.submit()
    ended = stage.parts.clock()
    await stage.store.apply([Cancel("r")], ended)
    await stage.living.apply([Retry("r")])
    await stage.agenda.ended(["r"], ended)
    assert [run_id for run_id, _ in await stage.agenda.idle(ended + 60, 10)] == ["r"]


async def test_what_only_waits_for_a_worker_is_not_sent_again(stage: Stage) -> None:
    """Else a long backlog would grow by itself."""
    await stage.living.submit(Submit("r", FLOW, {}))
    await stage.living.look_after("r", stage.parts.clock(), {})
    assert await stage.parts.pipe.call("XLEN", stream_of("h")) == 1
    await stage.tasks()
    await stage.living.look_after("r", stage.parts.clock(), {})
    assert await stage.parts.pipe.call("XLEN", stream_of("h")) == 1


async def test_a_retry_was_applied_and_nothing_published(stage: Stage) -> None:
    await stage.submit()
    await stage.living.apply([Cancel("r")])
    await stage.store.apply([Retry("r")], stage.parts.clock())
    await stage.is_forgotten()
    run = await stage.drive()
    assert (run.status, run.epoch) == (RunStatus.COMPLETED, 2)


@pytest.mark.parametrize("copies", [1, 200])
async def test_what_ends_an_orchestrator_while_it_applies_leaves_the_result_unsettled(
    stage: Stage, redis_url: str, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    task = await stage.submit()
    await stage.claim(task)

    async def die(*_: Any, **__: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(SharedOrchestrator, "take_in", die)
        fields = result_fields(Complete("r", "a", task.token, 1))
        await stage.parts.pipe.together([("XADD", RESULTS, "*", *fields)] * copies)
        with pytest.raises(ExceptionGroup):
            await asyncio.wait_for(orchestrate(Settings(redis_url=redis_url)), 10)
    assert (await stage.parts.pipe.call("XPENDING", RESULTS, ORCHESTRATORS))[0] == copies


async def test_what_workers_hand_back_is_queued_at_once_and_no_crash_however_often(
    stage: Stage,
) -> None:
    task = await stage.submit()
    for attempt in range(1, 6):  # more often than a node may crash
        await stage.claim(task)
        desk = RemoteDesk(
            *(cast(Any, None), stage.store, stage.agenda, cast(Any, None), stage.parts.clock),
            stage.living.apply,
            worker_id="w",
            lease_seconds=60,
        )
        await desk.hand_back([task])
        (task,) = await stage.tasks()
        assert task.token.attempt == attempt + 1
    await stage.living.reap()
    assert await stage.listed() == {}


async def test_what_a_worker_wanted_to_hand_back_when_it_died_is_queued_at_once(
    stage: Stage,
) -> None:
    task = await stage.submit()
    await stage.claim(task)

    async def die(*_: Any) -> None:
        raise InterruptedError

    desk = RemoteDesk(
        *(cast(Any, None), stage.store, stage.agenda, cast(Any, None), stage.parts.clock),
        die,
        worker_id="w",
        lease_seconds=60,
    )
    with pytest.raises(InterruptedError):
        await desk.hand_back([task])
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

    async def settle(self, messages: Any) -> None: ...


class _GivenAndLost(_Given):
    """The same; what it has beside these cannot be opened."""

    has_more = True

    async def open_more(self) -> None:
        raise StoreError("away")


async def test_what_is_claimed_is_run_though_what_was_read_beside_it_is_lost(stage: Stage) -> None:
    task = await stage.submit()
    inbox = cast(Any, _GivenAndLost(task))
    desk = RemoteDesk(
        *(inbox, stage.store, stage.agenda, cast(Any, None), stage.parts.clock),
        stage.living.apply,
        worker_id="w",
        lease_seconds=60,
    )
    assert await desk.take(1) == [task]


async def test_a_claim_that_is_granted_to_whoever_has_just_left_is_handed_back(
    stage: Stage,
) -> None:
    task = await stage.submit()
    desk = RemoteDesk(
        *(cast(Any, _Given(task)), stage.store, stage.agenda, cast(Any, None), stage.parts.clock),
        stage.living.apply,
        worker_id="w",
        lease_seconds=60,
    )
    taking = asyncio.create_task(desk.take(1))
    while desk._taking is None or not desk._taking.done():
        await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await desk.hand_back([])
    (again,) = await stage.tasks()
    assert again.token.attempt == 2


async def test_the_list_of_runs_was_lost(stage: Stage) -> None:
    ids = [f"r{i}" for i in range(30)]
    await stage.living.submit_many([Submit(run_id, FLOW, {}) for run_id in ids])
    await stage.living.apply([Cancel(run_id) for run_id in ids[:10]])
    await stage.parts.pipe.call("DEL", ACTIVE)
    await stage.agenda.moved(["r29"], LONG_AGO)
    now = stage.parts.clock()
    await stage.agenda.remember_all(now)
    found = dict(await stage.agenda.idle(now + 60, 100))
    assert found == {**dict.fromkeys(ids[10:], pytest.approx(now)), "r29": LONG_AGO}


async def test_many_runs_were_made_and_not_published(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "AT_ONCE", 3)
    ids = [f"r{i}" for i in range(8)]
    await stage.agenda.moved(ids, LONG_AGO)
    await stage.store.create_many([Submit(one, FLOW, {}) for one in ids], stage.parts.clock())
    await stage.living.sweep()
    assert {task.run_id for task in await stage.tasks()} == set(ids)


async def test_a_result_was_applied_and_the_answer_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await stage.submit()
    await stage.claim(task)
    result, apply = Complete("r", "a", task.token, 1), stage.store.apply
    await apply([result], stage.parts.clock())

    async def asked_again(moves: Any, now: float, **more: Any) -> Any:
        stage.parts.pipe.breaks += 1
        return await apply(moves, now, **more)

    monkeypatch.setattr(stage.store, "apply", asked_again)
    await stage.living.take_in([result])
    monkeypatch.undo()
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_a_lease_is_known_though_its_run_was_forgotten_for_another_of_the_same_question(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_shells, "MOST_SHELLS", 1)
    starts = []
    for run_id in ("r", "s"):
        await stage.living.submit(Submit(run_id, FLOW, {}))
        (task,) = await stage.tasks()
        await stage.claim(task)
        starts.append((run_id, task.node_id, task.token))
    assert [start for start, _ in await stage.store.running(["r", "s"])] == starts


async def test_only_what_runs_is_found_to_run(stage: Stage) -> None:
    task = await stage.submit()
    assert await stage.store.running(["r", "ghost"]) == []
    await stage.claim(task)
    state = await stage.parts.pipe.call("HGET", "wf:{r}:nodes", 0)
    await stage.parts.pipe.call("HSET", "wf:{r}:nodes", "not a place", state)
    until = float(state.split(b"|")[10])
    assert await stage.store.running(["r", "ghost"]) == [(("r", "a", task.token), until)]
    await stage.living.take_in([Complete("r", "a", task.token, 1)])
    assert await stage.store.running(["r"]) == []
