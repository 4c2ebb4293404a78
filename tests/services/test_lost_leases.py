"""A worker is gone, and its lease says so: who looks when, and what keeps a run on the list.

No process dies here either; see test_crash_points.py.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import pytest

from dovetail.core.errors import NotFound, StoreError
from dovetail.core.events import Token
from dovetail.core.states import RunStatus
from dovetail.core.transitions import NOTHING, Cancel, Complete, Renew, Retry, Submit
from dovetail.engine.distributed import orchestrator
from dovetail.engine.distributed.task_source import QueueTaskSource
from dovetail.stores.redis import scope
from dovetail.stores.redis.limits import RedisLimits
from dovetail.stores.redis.timers import LEASES
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.transports.messages import stream_of, task_fields
from dovetail.transports.streams.reader import StreamInbox
from dovetail.transports.streams.sender import WORKERS, StreamReader

from ..core.walk import graph
from .interrupted_run import FLOW, LEASE, LONG_AGO, LONGEST_LEASE, InterruptedRun


async def test_a_node_whose_worker_claimed_it_and_died_starts_again(stage: InterruptedRun) -> None:
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    await asyncio.sleep(LEASE)
    await stage.living.reap()
    run = await stage.drive()
    assert (run.status, run.node("a").crashes) == (RunStatus.COMPLETED, 1)
    assert await stage.listed() == {}


async def lost(stage: InterruptedRun, times: int) -> Token:
    """So many starts of the one node that is published, with their workers; the last one's."""
    for _ in range(times):
        (task,) = await stage.tasks()
        await stage.claim(task, lease=LEASE)
        await asyncio.sleep(LEASE)
        await asyncio.gather(stage.living.reap(), stage.living.reap())
    return task.token


async def letters(stage: InterruptedRun) -> list[dict[str, Any]]:
    return await WorkerRegistry(stage.parts.pipe).dead_letters()


async def test_a_node_that_killed_all_its_workers_is_one_dead_letter(stage: InterruptedRun) -> None:
    await stage.living.submit(Submit("r", FLOW, {}))
    await lost(stage, 2)
    assert await letters(stage) == [], "it may have been the machine's fault"
    token = await lost(stage, 1)
    (letter,) = await letters(stage)
    assert letter.pop("time") is not None
    assert letter.pop("letter_id")
    assert letter == {
        "stream": "tasks:h",
        "id": "r:a:1",
        "reason": "poison: its worker died during 3 attempts",
        "fields": {"run_id": "r", "node_id": "a", "token": str(token), "handler": "h"},
    }
    await stage.living.apply([Retry("r")])
    await lost(stage, 3)
    assert [one["id"] for one in await letters(stage)] == ["r:a:2", "r:a:1"]


async def test_a_lost_worker_is_logged_with_its_nodes(
    stage: InterruptedRun, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.living.submit(Submit("0123456789", graph({"a": [], "b": []}), {}))
    for task in await stage.tasks():
        await stage.claim(task, lease=LEASE)
    await asyncio.sleep(LEASE)
    await asyncio.gather(stage.living.reap(), stage.living.reap())
    (line,) = [one.getMessage() for one in caplog.records if "lost worker" in one.getMessage()]
    told = "its lease on 2 nodes ran out: a of run 012345 (attempt 1), b of run 012345 (attempt 1)"
    assert re.fullmatch(rf"lost worker \S+: {re.escape(told)}", line)


async def test_an_at_most_once_node_is_not_a_dead_letter(stage: InterruptedRun) -> None:
    await stage.living.submit(Submit("r", graph({"a": []}, a={"delivery": "at_most_once"}), {}))
    await lost(stage, 1)
    run = await stage.store.load("r")
    assert run.node("a").reason == "worker_lost"
    assert await letters(stage) == []


async def test_a_claimed_node_of_a_run_without_an_index_entry_is_reaped(
    stage: InterruptedRun,
) -> None:
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    await stage.parts.pipe.call("DEL", LEASES)
    await asyncio.sleep(LEASE)
    await stage.is_forgotten()
    await stage.living.reap()
    assert (await stage.drive()).node("a").attempt == 2


async def test_a_node_of_a_dead_worker_is_reaped_on_time_even_if_another_worker_requests_it(
    stage: InterruptedRun,
) -> None:
    """It died before it was done with the message, so that another worker reads that as well."""
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    pipe = stage.parts.pipe
    await pipe.call("XADD", stream_of("h"), "*", *task_fields(task))
    reader = StreamReader(pipe, pipe, WORKERS, "heir")
    heir = QueueTaskSource(
        StreamInbox(reader, pipe, ["h"]),
        stage.store,
        stage.timers,
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


async def test_many_leases_of_one_run_expire_at_once(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "BATCH_SIZE", 3)
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


async def test_leases_of_many_runs_expire_at_once(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some of them nothing runs any more, and in one a worker renews it just now."""
    monkeypatch.setattr(orchestrator, "BATCH_SIZE", 3)
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
    await asyncio.sleep(orchestrator.REAP_SECONDS / 2)
    await stage.living.reap()
    assert await stage.listed() == {"r9": renewed}


async def test_a_run_that_cannot_be_reaped_does_not_delay_other_runs(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "BATCH_SIZE", 2)
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


async def test_of_two_workers_on_a_run_only_the_dead_one_is_reaped(
    stage: InterruptedRun,
) -> None:
    """Whichever of them came first, and though the one that lives has been renewed since."""
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
    await stage.living.apply_results([Complete("r", "a", first.token, 1)])
    assert (await stage.drive()).status is RunStatus.COMPLETED


async def test_a_claim_during_a_check_keeps_the_run_in_the_lease_index(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await stage.submit()
    await stage.timers.lease(["r"], LONG_AGO)  # of a start that is over
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


async def test_a_postponed_check_that_never_happened_is_done_two_leases_later(
    stage: InterruptedRun,
) -> None:
    """Another one does, two leases later."""
    task = await stage.submit()
    await stage.claim(task, lease=LEASE)
    await asyncio.sleep(LEASE)
    await stage.timers.put_off(["r"], stage.parts.clock() + 2 * LEASE)
    await stage.living.reap()
    assert (await stage.store.load("r")).node("a").crashes == 0
    await asyncio.sleep(2 * LEASE)
    await stage.living.reap()
    assert (await stage.drive()).node("a").crashes == 1


@pytest.mark.parametrize("error", [StoreError, NotFound, asyncio.CancelledError])
async def test_an_orchestrator_that_fails_after_postponing_a_check_leaves_it_to_the_next(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
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


async def test_a_check_does_not_remove_a_later_postponement(stage: InterruptedRun) -> None:
    await stage.submit()
    await stage.timers.lease(["r"], LONG_AGO)
    await stage.timers.put_off(["r"], 2 * LONG_AGO)
    await stage.timers.put_off(["r"], 3 * LONG_AGO)
    await stage.timers.released(["r"], 2 * LONG_AGO)
    assert await stage.listed() == {"r": 3 * LONG_AGO}
    await stage.timers.released(["r"], 3 * LONG_AGO)
    await stage.timers.put_off(["r"], 4 * LONG_AGO)
    assert await stage.listed() == {}


async def test_renewals_do_not_write_to_the_lease_index_and_a_later_death_is_noticed_on_time(
    stage: InterruptedRun,
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
    await asyncio.sleep(LEASE)  # no worker renews it any more
    await stage.living.reap()
    assert (await stage.drive()).node("a").crashes == 1


async def test_an_orchestrator_with_unread_results_reaps_nothing(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
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


async def test_the_lease_index_may_lag_behind_a_renewed_lease(stage: InterruptedRun) -> None:
    task = await stage.submit()
    await stage.claim(task)
    await stage.timers.lease(["r"], LONG_AGO)
    await stage.living.reap()
    assert await stage.timers.expired(stage.parts.clock() + 30, 10) == []
    assert await stage.timers.expired(stage.parts.clock() + 61, 10), "it is still held by a worker"
    await stage.living.apply_results([Complete("r", "a", task.token, 1)])
    assert (await stage.drive()).node("a").crashes == 0


async def test_an_ended_run_is_in_no_index(stage: InterruptedRun) -> None:
    task = await stage.submit()
    await stage.claim(task)
    await stage.living.apply_results([Complete("r", "a", task.token, 1)])
    assert list(await stage.listed()) == ["r"], "it goes on"
    await stage.drive()
    assert await stage.listed() == {}
    assert await stage.timers.idle(math.inf, 10) == []


async def test_a_run_retried_before_its_end_was_recorded_stays_in_the_lease_index(
    stage: InterruptedRun,
) -> None:
    await stage.submit()
    ended = stage.parts.clock()
    await stage.store.apply([Cancel("r")], ended)
    await stage.living.apply([Retry("r")])
    (task,) = await stage.tasks()
    await stage.claim(task)
    await stage.timers.ended(["r"], ended)
    assert list(await stage.listed()) == ["r"]


async def test_a_lease_is_known_even_if_its_run_was_evicted_by_another_run_of_the_same_call(
    stage: InterruptedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scope, "MAX_CACHED_RUNS", 1)
    starts = []
    for run_id in ("r", "s"):
        await stage.living.submit(Submit(run_id, FLOW, {}))
        (task,) = await stage.tasks()
        await stage.claim(task)
        starts.append((run_id, task.node_id, task.token))
    assert [start for start, _ in await stage.store.running(["r", "s"])] == starts


async def test_only_running_nodes_are_reported_as_running(stage: InterruptedRun) -> None:
    task = await stage.submit()
    assert await stage.store.running(["r", "ghost"]) == []
    await stage.claim(task)
    state = await stage.parts.pipe.call("HGET", "wf:{r}:nodes", 0)
    await stage.parts.pipe.call("HSET", "wf:{r}:nodes", "not a place", state)
    until = float(state.split(b"|")[10])
    assert await stage.store.running(["r", "ghost"]) == [(("r", "a", task.token), until)]
    await stage.living.apply_results([Complete("r", "a", task.token, 1)])
    assert await stage.store.running(["r"]) == []
