"""Records in Redis: the suite of every keeper of records, and what only Redis has to show."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from dovetail.core.errors import Conflict, NotFound
from dovetail.core.transitions import Cancel, Claim, Complete, Decision, Fail, Retry, Submit
from dovetail.engine.ports import KeyUsed, RunQuery
from dovetail.redis_client.pipelined import Command, PipelinedRedis
from dovetail.stores.records import Definitions
from dovetail.stores.redis import run_index
from dovetail.stores.redis.accepted import RedisAcceptedRuns
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.redis.run_index import RUNS, batch_number, batch_of
from dovetail.stores.redis.store import RedisStore

from .test_records import (
    BY,
    NOW,
    Key,
    TestBatches,
    TestDeletedVersions,
    TestHistory,
    TestKeys,
    TestLimits,
    TestRuns,
    TestWeightedAliases,
    TestWorkflows,
    graph,
    register,
    submit,
)

__all__ = [
    "TestBatches",
    "TestDeletedVersions",
    "TestHistory",
    "TestKeys",
    "TestLimits",
    "TestRuns",
    "TestWeightedAliases",
    "TestWorkflows",
]

DAY = 86400.0


class RedisKeeper:
    """Accepts, makes and lists runs, as an orchestrator does."""

    def __init__(self, pipe: PipelinedRedis) -> None:
        self.pipe = pipe
        self.store = RedisStore(pipe)
        self.records = RedisRecords(pipe, origin=self.store.origin)

    async def accept(self, asked: Submit, now: float) -> Decision:
        accepted = await self.records.accept(asked, now)
        decision = await self.store.create(accepted, now)
        await self.records.made(accepted)
        if decision:
            await self.records.begun([accepted], now)
        if accepted.run_id != asked.run_id:
            raise KeyUsed(accepted.run_id, same_body=True)
        return decision

    async def accept_batch(
        self, batch_id: str, asked: list[Submit], key: Key | None, now: float
    ) -> None:
        accepted = await self.records.accept_batch(batch_id, asked, key, now)
        for one in accepted:
            await self.store.create(one, now)
        await self.records.batch_made(batch_id)
        await self.records.begun(accepted, now)

    async def cancel(self, run: Submit, now: float) -> None:
        await self.store.apply([Cancel(run.run_id)], now)
        await self.records.refresh([run.run_id])

    async def complete(self, run: Submit, decision: Decision, output: Any, now: float) -> None:
        """Its only node."""
        token = decision.dispatch[0].token
        claim = Claim(run.run_id, "a", token, "w", now + 10)
        await self.store.apply([claim, Complete(run.run_id, "a", token, output)], now)
        await self.records.refresh([run.run_id])

    async def follow(self, run: Submit, decision: Decision) -> None:
        """Tell the lists what was decided, as an orchestrator does."""
        if decision.ended:
            last = decision.events[-1] if decision.events else None
            await self.records.moved([run.run_id], [], {run.run_id: last})
        else:
            await self.records.moved([run.run_id], [run.run_id])

    async def recover_accepted(self, before: float) -> list[str]:
        """What an orchestrator does for makers that died."""
        made = []
        for left in await self.records.unmade(before):
            for one in left.submits:
                await self.store.create(one, left.created_at)
                made.append(one.run_id)
            await self.records.settle(left)
            await self.records.refresh(one.run_id for one in left.submits)
        return made

    async def statuses(self, **wanted: Any) -> list[str]:
        listed = await self.records.list_runs(RunQuery(limit=1000, **wanted))
        return [item["run_id"] for item in listed["items"]]

    async def keys(self) -> set[str]:
        return {key.decode() for key in await self.pipe.call("KEYS", "*")}


@pytest.fixture
async def keeper(single_or_cluster: Any) -> AsyncIterator[RedisKeeper]:
    single_or_cluster.flush()
    async with PipelinedRedis(single_or_cluster.url) as pipe:
        yield RedisKeeper(pipe)


# --- lists are indexes, not truth ----------------------------------------------------------------


async def test_runs_are_counted_off_the_lists(keeper: RedisKeeper) -> None:
    done, open_, free = submit(version=1), submit(version=1), submit()
    await keeper.complete(done, await keeper.accept(done, NOW), 1, NOW + 1)
    await keeper.accept(open_, NOW + 3600)
    await keeper.accept(free, NOW + 3600)  # of a definition that is not registered
    for workflow in (None, "test"):
        found = await keeper.records.count_runs(workflow, [NOW, NOW + 3600, NOW + 7200])
        counted = {status: runs for status, runs in found.by_status.items() if runs}
        assert counted == {"RUNNING": 2, "COMPLETED": 1}
        assert [sum(one.values()) for one in found.created] == [1, 2]
        assert [one["COMPLETED"] for one in found.created] == [1, 0]


async def test_a_finished_run_has_its_result_in_the_list(keeper: RedisKeeper) -> None:
    run = submit()
    await keeper.complete(run, await keeper.accept(run, NOW), {"x": [1, None]}, NOW + 1.5)
    (item,) = (await keeper.records.list_runs(RunQuery(status="COMPLETED")))["items"]
    assert (item["result"], item["duration"]) == ({"a": {"x": [1, None]}}, 1.5)
    single = submit(graph("out", nodes=[{"id": "a", "handler": "output"}]))
    await keeper.complete(single, await keeper.accept(single, NOW), 7, NOW + 1)
    assert (await keeper.records.summary(single.run_id))["result"] == 7


async def test_a_failed_run_has_its_error_and_its_node_in_the_list(keeper: RedisKeeper) -> None:
    run = submit()
    decision = await keeper.accept(run, NOW)
    token = decision.dispatch[0].token
    error = {"type": "ValueError", "message": "broken"}
    moves = [Claim(run.run_id, "a", token, "w", NOW + 10)]
    await keeper.store.apply([*moves, Fail(run.run_id, "a", token, error)], NOW + 1)
    await keeper.records.refresh([run.run_id])
    (item,) = (await keeper.records.list_runs(RunQuery(status="FAILED")))["items"]
    assert item["error"] == {**error, "node": "a"}


async def test_an_outdated_status_is_not_shown_and_is_corrected(
    keeper: RedisKeeper,
) -> None:
    runs = [submit() for _ in range(5)]
    for at, run in enumerate(runs):
        await keeper.accept(run, NOW + at)
    await keeper.store.apply([Cancel(runs[2].run_id)], NOW + 9)  # and its orchestrator dies
    shown = await keeper.statuses(status="RUNNING")
    assert shown == [runs[at].run_id for at in (4, 3, 1, 0)]
    assert await keeper.statuses(status="CANCELLED") == [runs[2].run_id]


async def test_repeated_and_concurrent_refreshes_end_with_the_current_status(
    keeper: RedisKeeper,
) -> None:
    runs = [submit() for _ in range(20)]
    for run in runs:
        await keeper.accept(run, NOW)

    async def end(run: Submit) -> None:
        await keeper.store.apply([Cancel(run.run_id)], NOW + 1)
        await keeper.records.refresh([run.run_id])

    ids = [run.run_id for run in runs]
    others = [keeper.records.refresh(ids) for _ in range(10)]
    await asyncio.gather(*others[:5], *map(end, runs), *others[5:])
    assert await keeper.statuses(status="RUNNING") == []
    assert sorted(await keeper.statuses(status="CANCELLED")) == sorted(ids)


async def test_a_run_that_changed_before_it_was_listed_is_listed_with_its_current_status(
    keeper: RedisKeeper,
) -> None:
    await register(keeper.records)
    fresh, ended, retried, gone = asked = [submit(version=1) for _ in range(4)]
    for run in asked[:3]:
        decision = await keeper.store.create(run, NOW)
        if run is not fresh:
            await keeper.complete(run, decision, 1, NOW + 1)
    await keeper.store.apply([Retry(retried.run_id, "a")], NOW + 2)
    await keeper.records.begun(asked, NOW)
    assert await keeper.pipe.call("ZCARD", f"{RUNS}:RUNNING") == 3  # with the one that is not there
    running = await keeper.statuses(status="RUNNING")
    assert sorted(running) == sorted([fresh.run_id, retried.run_id])
    assert await keeper.statuses(status="COMPLETED") == [ended.run_id]
    assert gone.run_id not in await keeper.statuses()


async def test_a_process_that_lists_an_outdated_status_corrects_it(keeper: RedisKeeper) -> None:
    run = submit(version=1)
    await keeper.accept(run, NOW)
    slow = Overtaken(keeper.pipe, lambda: keeper.cancel(run, NOW + 1))
    await RedisRecords(slow).refresh([run.run_id])  # type: ignore[arg-type]
    assert await keeper.pipe.call("ZCARD", "wf:list:{runs}:RUNNING") == 0
    assert await keeper.pipe.call("ZCARD", "wf:workflow:{test}:open") == 0
    assert await keeper.statuses(status="CANCELLED") == [run.run_id]


async def test_a_process_that_lists_an_end_that_was_retried_meanwhile_corrects_it(
    keeper: RedisKeeper,
) -> None:
    async def retry() -> None:
        await keeper.store.apply([Retry(run.run_id)], NOW + 2)
        await keeper.records.refresh([run.run_id])

    run = submit(version=1)
    await keeper.accept(run, NOW)
    await keeper.store.apply([Cancel(run.run_id)], NOW + 1)
    await RedisRecords(Overtaken(keeper.pipe, retry)).refresh([run.run_id])  # type: ignore[arg-type]
    assert await keeper.statuses(status="RUNNING") == [run.run_id]
    assert await keeper.statuses(status="CANCELLED") == []
    assert await keeper.pipe.call("ZCARD", "wf:list:{runs}:finished") == 0
    assert await keeper.pipe.call("ZCARD", "wf:workflow:{test}:open") == 1


@pytest.mark.parametrize("seed", range(4))
async def test_concurrent_refreshes_leave_every_index_equal_to_the_runs(
    keeper: RedisKeeper, single_or_cluster: Any, seed: int
) -> None:
    chance = random.Random(seed)
    batch = batch_number("batch")
    runs = [
        submit(graph(f"w{at % 3}"), version=at % 2 or None, place=(batch, at) if at > 20 else None)
        for at in range(30)
    ]
    async with (
        PipelinedRedis(single_or_cluster.url) as second,
        PipelinedRedis(single_or_cluster.url) as third,
    ):
        crowd = [keeper, RedisKeeper(second), RedisKeeper(third)]

        async def life(run: Submit) -> None:
            """Moved by any process; the one that moved it lists it, sooner or later."""
            late = []
            for step in range(8):
                one, pause = chance.choice(crowd), chance.random() * 0.003
                move = chance.choice([Cancel, Retry])(run.run_id)
                if step == 0:
                    decision = await one.store.create(run, NOW)
                else:
                    (decision,) = await one.store.apply([move], NOW + step)
                if not decision:
                    continue
                await asyncio.sleep(pause)
                late.append(asyncio.create_task(one.follow(run, decision)))
            await asyncio.gather(*late)

        await asyncio.gather(*map(life, runs))
    wheres = {"wf:list:{runs}": runs, "wf:batch:{batch}": [run for run in runs if run.place]}
    for name in ("w0", "w1", "w2"):
        wheres[f"wf:workflow:{{{name}}}"] = [run for run in runs if run.graph.name == name]
    states = {run.run_id: await keeper.store.load(run.run_id) for run in runs}

    async def listed(key: str) -> set[str]:
        names = await keeper.pipe.call("ZRANGE", key, 0, -1)
        return {name.decode().rpartition("-")[2] for name in names}

    for where, some in wheres.items():
        if "batch" in where:  # the others are in order of age whatever became of them
            assert await listed(f"{where}:all") == {run.run_id for run in some}
        for status in ("RUNNING", "CANCELLED"):
            expected = {run.run_id for run in some if states[run.run_id].status == status}
            if "batch" in where and status == "RUNNING":
                expected = set()  # of which a batch has no list
            elif "workflow" in where and status == "RUNNING":
                expected -= {run.run_id for run in some if run.version is not None}
            assert await listed(f"{where}:{status}") == expected
    unfinished = {run.run_id for run in runs if not states[run.run_id].finished}
    assert await listed("wf:list:{runs}:finished") == set(states) - unfinished
    registered = {run.run_id for run in runs if run.version is not None}
    found = [await listed(f"wf:workflow:{{{name}}}:open") for name in ("w0", "w1", "w2")]
    assert set().union(*found) == unfinished & registered


@pytest.mark.parametrize("workflow", [None, "test"])
async def test_a_run_that_changes_its_status_is_never_missing_from_the_list_of_all(
    keeper: RedisKeeper, workflow: str | None
) -> None:
    runs = [submit(version=at % 2 or None) for at in range(12)]
    for run in runs:
        await keeper.accept(run, NOW)

    async def life(run: Submit) -> None:
        for step in range(12):
            move = (Cancel, Retry)[step % 2](run.run_id)
            (decision,) = await keeper.store.apply([move], NOW + step)
            await keeper.follow(run, decision)

    async def watch() -> None:
        while True:
            page = await keeper.records.list_runs(RunQuery(workflow=workflow, limit=12))
            assert [run["run_id"] for run in page["items"]] == expected
            looks.append(page["next_cursor"])

    looks: list[None] = []
    page = await keeper.records.list_runs(RunQuery(workflow=workflow, limit=12))
    expected = [run["run_id"] for run in page["items"]]
    assert set(expected) == {run.run_id for run in runs}
    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(life, runs))
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert len(looks) > 3
    assert set(looks) == {None}


@pytest.mark.parametrize("count", [1, 100])
async def test_a_run_that_starts_or_ends_costs_two_reads_and_few_shared_commands(
    keeper: RedisKeeper, count: int
) -> None:
    runs = [submit(version=1) for _ in range(count)]
    for run in runs:
        await keeper.store.create(run, NOW)
    for lists in (7, 10):
        before = keeper.pipe.commands, keeper.pipe.roundtrips
        await keeper.records.refresh(run.run_id for run in runs)
        assert keeper.pipe.commands - before[0] <= 2 * count + lists
        assert keeper.pipe.roundtrips - before[1] == 2
        await keeper.store.apply([Cancel(run.run_id) for run in runs], NOW + 1)


@pytest.mark.parametrize("count", [1, 100])
async def test_a_known_end_costs_one_read_and_one_roundtrip(
    keeper: RedisKeeper, count: int
) -> None:
    number = batch_number("batch")
    runs = [submit(version=1, place=(number, at)) for at in range(count)]
    for run in runs:
        await keeper.store.create(run, NOW)
    await keeper.records.begun(runs, NOW)
    decided = await keeper.store.apply([Cancel(run.run_id) for run in runs], NOW + 1.1)
    before = keeper.pipe.commands, keeper.pipe.roundtrips
    ends = {run.run_id: one.events[-1] for run, one in zip(runs, decided, strict=True)}
    await keeper.records.moved([*ends], [], ends)
    assert keeper.pipe.commands - before[0] <= count + 9
    assert keeper.pipe.roundtrips - before[1] == 1
    assert len(await keeper.statuses(status="CANCELLED")) == count
    for where in (RUNS, "wf:batch:{batch}"):
        last = await keeper.pipe.call("ZREVRANGE", f"{where}:finished", 0, 0, "WITHSCORES")
        assert float(last[1]) == NOW + 1.1


async def test_a_known_end_that_was_retried_meanwhile_is_not_listed(
    keeper: RedisKeeper,
) -> None:
    async def retry() -> None:
        await keeper.store.apply([Retry(run.run_id)], NOW + 2)
        await keeper.records.refresh([run.run_id])

    run = submit(version=1, place=(batch_number("batch"), 0))
    await keeper.accept(run, NOW)
    (decision,) = await keeper.store.apply([Cancel(run.run_id)], NOW + 1)
    slow = RedisRecords(Overtaken(keeper.pipe, retry), origin=keeper.store.origin)  # type: ignore[arg-type]
    await slow.moved([run.run_id], [], {run.run_id: decision.events[-1]})
    assert await keeper.statuses(status="RUNNING") == [run.run_id]
    for where in (RUNS, "wf:workflow:{test}", "wf:batch:{batch}"):
        assert await keeper.pipe.call("EXISTS", f"{where}:CANCELLED", f"{where}:finished") == 0
    assert await keeper.pipe.call("ZCARD", "wf:workflow:{test}:open") == 1


async def test_a_known_end_lists_a_run_whose_creator_died_before_listing_it(
    keeper: RedisKeeper,
) -> None:
    run = submit(version=1)
    await keeper.store.create(run, NOW)
    (decision,) = await keeper.store.apply([Cancel(run.run_id)], NOW + 1)
    await keeper.follow(run, decision)
    assert await keeper.statuses() == [run.run_id]
    assert await keeper.statuses(status="CANCELLED", workflow="test") == [run.run_id]
    assert await keeper.records.find_run(run.run_id[:8]) == run.run_id


async def test_an_end_without_details_or_of_a_later_epoch_is_read(
    keeper: RedisKeeper,
) -> None:
    two = graph("two", nodes=[{"id": "a", "handler": "h"}, {"id": "b", "handler": "h"}])
    silent, again = submit(two), submit()
    moves = []
    for one in (await keeper.accept(silent, NOW)).dispatch:
        name = two.nodes[one.node_index].id
        await keeper.store.apply([Claim(silent.run_id, name, one.token, "w", NOW + 10)], NOW)
        moves.append(Fail(silent.run_id, name, one.token, {"type": "E", "message": "m"}))
    for at, move in enumerate(moves, 1):
        (decision,) = await keeper.store.apply([move], NOW + at)
        await keeper.follow(silent, decision)
    assert (decision.ended, decision.events[-1].type) == (True, "node.failed")
    await keeper.accept(again, NOW)
    for at, move in enumerate((Cancel, Retry, Cancel), 3):
        (decision,) = await keeper.store.apply([move(again.run_id)], NOW + at)
        await keeper.follow(again, decision)
    assert await keeper.statuses(status="FAILED") == [silent.run_id]
    assert await keeper.statuses(status="CANCELLED") == [again.run_id]
    ended = await keeper.pipe.call("ZRANGE", f"{RUNS}:finished", 0, -1, "WITHSCORES")
    assert [float(at) for at in ended[1::2]] == [NOW + 2, NOW + 5]


async def test_on_unordered_cluster_nodes_the_second_read_waits_for_the_changes(
    keeper: RedisKeeper,
) -> None:
    class Unordered(Overtaken):
        keeps_order = False

        async def call_many(self, commands: Sequence[Command]) -> Any:
            asked.append({str(command[0]) for command in commands})
            return await super().call_many(commands)

    async def nothing() -> None: ...

    asked: list[set[str]] = []
    run = submit()
    await keeper.store.create(run, NOW)
    records = RedisRecords(Unordered(keeper.pipe, nothing), origin=keeper.store.origin)  # type: ignore[arg-type]
    await records.begun([run], NOW)
    (decision,) = await keeper.store.apply([Cancel(run.run_id)], NOW + 1)
    await records.moved([run.run_id], [], {run.run_id: decision.events[-1]})
    await records.refresh([run.run_id])
    reads, writes = {"HMGET", "ZMSCORE"}, {"ZADD", "ZREM"}
    assert all(not some & reads or not some & writes for some in asked)
    assert await keeper.statuses(status="CANCELLED") == [run.run_id]


class Overtaken:
    """A connection of a process that is held up between reading a run and listing it."""

    keeps_order = True

    def __init__(self, pipe: PipelinedRedis, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self.call = pipe.call
        self.call_script = pipe.call_script
        self._pipe = pipe
        self._meanwhile: Callable[[], Awaitable[None]] | None = meanwhile

    async def call_many(self, commands: Sequence[Command]) -> Any:
        if self._meanwhile is not None and commands[0][0] == "ZADD":
            meanwhile, self._meanwhile = self._meanwhile, None
            await meanwhile()
        return await self._pipe.call_many(commands)


async def test_a_retried_run_moves_back_to_the_running_runs(keeper: RedisKeeper) -> None:
    run = submit(version=1)
    await keeper.accept(run, NOW)
    await keeper.cancel(run, NOW + 1)
    await keeper.store.apply([Retry(run.run_id)], NOW + 2)
    await keeper.records.refresh([run.run_id])
    assert await keeper.statuses(status="RUNNING", workflow="test") == [run.run_id]
    assert await keeper.statuses(status="CANCELLED", workflow="test") == []
    assert await keeper.records.expire(NOW + 30 * DAY) == 0


async def test_pages_by_status_and_workflow_cost_only_the_shown_runs(keeper: RedisKeeper) -> None:
    for at in range(300):
        run = submit(graph("many"))
        await keeper.accept(run, NOW + at)
        if at % 100 == 0:
            await keeper.cancel(run, NOW + at)
    before = keeper.pipe.commands
    page = await keeper.records.list_runs(RunQuery(status="CANCELLED", workflow="many", limit=2))
    assert [item["workflow"] for item in page["items"]] == ["many"] * 2
    assert keeper.pipe.commands - before < 12
    rest = await keeper.records.list_runs(
        RunQuery(status="CANCELLED", workflow="many", limit=2, cursor=page["next_cursor"])
    )
    assert (len(rest["items"]), rest["next_cursor"]) == (1, None)


async def test_a_batch_of_one_workflow_has_no_runs_of_another(keeper: RedisKeeper) -> None:
    await keeper.accept_batch("batch", [submit(), submit()], None, NOW)
    assert len(await keeper.statuses(batch="batch", workflow="test")) == 2
    assert await keeper.statuses(batch="batch", workflow="other") == []
    assert len(await keeper.statuses(batch="batch", status="RUNNING")) == 2


async def test_the_running_runs_of_a_batch_are_counted_and_listed_newest_first_in_pages(
    keeper: RedisKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "BATCH_SIZE", 3)
    runs = [submit() for _ in range(20)]
    await keeper.accept_batch("batch", runs, None, NOW)
    for at in (*range(4, 12), 19):
        await keeper.cancel(runs[at], NOW + 1)
    await keeper.store.apply([Cancel(runs[2].run_id)], NOW + 2)  # and its orchestrator dies
    seen: list[str] = []
    cursor = None
    while True:
        page = await keeper.records.list_runs(
            RunQuery(status="RUNNING", batch="batch", limit=4, cursor=cursor)
        )
        seen += [item["run_id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        assert len(page["items"]) == 4
    assert seen == [runs[at].run_id for at in (*range(18, 11, -1), 3, 1, 0)]
    assert (await keeper.records.get_batch("batch"))["counts"] == {"RUNNING": 11, "CANCELLED": 9}
    await keeper.records.refresh([runs[2].run_id])
    assert (await keeper.records.get_batch("batch"))["counts"] == {"RUNNING": 10, "CANCELLED": 10}


async def test_a_failed_run_blocks_the_deletion_of_its_workflow_until_its_last_node_ends(
    keeper: RedisKeeper,
) -> None:
    await register(keeper.records)
    two = graph("test", nodes=[{"id": "a", "handler": "h"}, {"id": "b", "handler": "h"}])
    run = submit(two, version=1)
    moves = []
    for one in (await keeper.accept(run, NOW)).dispatch:
        name = two.nodes[one.node_index].id
        await keeper.store.apply([Claim(run.run_id, name, one.token, "w", NOW + 10)], NOW)
        moves.append(Fail(run.run_id, name, one.token, {"type": "E", "message": "m"}))
    (decision,) = await keeper.store.apply(moves[:1], NOW + 1)
    await keeper.follow(run, decision)
    for listed in ({"status": "FAILED"}, {}):
        assert await keeper.statuses(workflow="test", **listed) == [run.run_id]
    assert await keeper.statuses(workflow="test", status="RUNNING") == []
    with pytest.raises(Conflict, match="1 run not finished"):
        await keeper.records.delete_workflow("test", BY)
    (decision,) = await keeper.store.apply(moves[1:], NOW + 2)
    await keeper.follow(run, decision)
    await keeper.records.delete_workflow("test", BY)


async def test_a_workflow_can_be_deleted_even_if_the_index_is_outdated(keeper: RedisKeeper) -> None:
    await register(keeper.records)
    run = submit(version=1)
    await keeper.accept(run, NOW)
    with pytest.raises(Conflict, match="1 run not finished"):
        await keeper.records.delete_workflow("test", BY)
    await keeper.store.apply([Cancel(run.run_id)], NOW + 1)
    await keeper.records.delete_workflow("test", BY)


async def test_a_run_has_events_and_no_journal(keeper: RedisKeeper) -> None:
    run = submit()
    await keeper.accept(run, NOW)
    assert await keeper.records.entries(run.run_id) is None


# --- what was accepted is made -------------------------------------------------------------------


async def test_a_repeated_request_creates_the_run_whose_creator_died(keeper: RedisKeeper) -> None:
    asked = submit(params={"x": 1}, key=("run", "k", "body"))
    await keeper.records.accept(asked, NOW)  # and the maker dies
    with pytest.raises(KeyUsed) as known:
        await keeper.accept(submit(params={"x": 1}, key=("run", "k", "body")), NOW + 1)
    assert (known.value.made, known.value.same_body) == (asked.run_id, True)
    assert await keeper.statuses() == [asked.run_id]
    assert await keeper.recover_accepted(NOW + 100) == []


async def test_an_accepted_run_that_can_no_longer_be_created_blocks_nothing(
    keeper: RedisKeeper,
) -> None:
    broken = submit(graph("broken"), key=("run", "b", "body"))
    asked = submit(key=("run", "k", "body"))
    await keeper.records.accept(broken, NOW - 1)
    await keeper.records.accept(asked, NOW)
    for key in await keeper.keys():
        if key.startswith("wf:def:") and b"broken" in await keeper.pipe.call("GET", key):
            await keeper.pipe.call("DEL", key)
    assert await keeper.recover_accepted(NOW) == [asked.run_id]
    assert await keeper.pipe.call("ZCARD", "wf:accepted") == 0


async def test_an_orchestrator_creates_the_run_whose_creator_died(keeper: RedisKeeper) -> None:
    params = {"x": [1, "é\0"]}
    asked = submit(params=params, version=2, key=("run of test", "a:b {c}", "body"))
    await keeper.records.accept(asked, NOW)
    assert await keeper.recover_accepted(NOW - 1) == [], "its maker may still be at it"
    assert await keeper.recover_accepted(NOW) == [asked.run_id]
    shown = await keeper.records.summary(asked.run_id)
    assert (shown["params"], shown["version"]) == (params, 2)
    assert await keeper.recover_accepted(NOW + 100) == []
    with pytest.raises(KeyUsed) as known:
        await keeper.accept(submit(key=("run of test", "a:b {c}", "other")), NOW)
    assert (known.value.made, known.value.same_body) == (asked.run_id, False)


async def test_a_created_run_keeps_no_second_copy_of_its_params(keeper: RedisKeeper) -> None:
    run = submit(params={"x": "y" * 10_000}, key=("run", "k", "body"))
    await keeper.accept(run, NOW)
    fields = await keeper.pipe.call("HGETALL", "wf:key:run:k")
    assert sorted(fields[::2]) == [b"body", b"made"]
    assert not await keeper.pipe.call("EXISTS", "wf:accepted")


async def test_a_batch_whose_creator_died_is_created_completely(keeper: RedisKeeper) -> None:
    asked = [submit(params={"x": at}) for at in range(5)]
    accepted = await keeper.records.accept_batch("batch", asked, ("batch", "k", "body"), NOW)
    await keeper.store.create(accepted[0], NOW)  # and the maker dies
    await keeper.recover_accepted(NOW)
    batch = await keeper.records.get_batch("batch")
    assert [run["run_id"] for run in batch["runs"]] == [one.run_id for one in asked]
    assert [run["index"] for run in batch["runs"]] == list(range(5))
    assert await keeper.recover_accepted(NOW + 100) == []


async def test_a_batch_whose_creator_died_before_storing_its_key_gets_the_key(
    keeper: RedisKeeper,
) -> None:
    key = ("batch", "k", "body")
    asked = [submit(), submit()]
    await keeper.records.accept_batch("batch", asked, key, NOW)
    await keeper.pipe.call("DEL", "wf:key:batch:k")  # as if it had not come so far
    assert sorted(await keeper.recover_accepted(NOW)) == sorted(one.run_id for one in asked)
    with pytest.raises(KeyUsed) as known:
        await keeper.accept_batch("other", [submit()], key, NOW + 1)
    assert known.value.made == "batch"


async def test_a_batch_that_lost_its_key_to_another_is_not_created(keeper: RedisKeeper) -> None:
    key = ("batch", "k", "body")
    await keeper.records.accept_batch("late", [submit(), submit()], key, NOW)
    await keeper.pipe.call("HSET", "wf:key:batch:k", "made", "early")
    assert await keeper.recover_accepted(NOW) == []
    with pytest.raises(NotFound, match="no batch 'late'"):
        await keeper.records.get_batch("late")
    assert await keeper.statuses() == []
    assert await keeper.records.batch_ids() == ([], None)
    with pytest.raises(NotFound, match="no batch 'late'"):
        await keeper.records.find_batch("late")


async def test_batches_are_listed_by_age_including_batches_without_runs(
    keeper: RedisKeeper,
) -> None:
    await keeper.records.open_batch("zzzz-old", "test", 2, None, NOW)
    await keeper.accept_batch("mmmm-mid", [submit()], None, NOW + 1)
    await keeper.records.open_batch("aaaa-new", "test", 2, None, NOW + 2)
    page, cursor = await keeper.records.batch_ids(limit=2)
    assert page == ["aaaa-new", "mmmm-mid"]
    assert await keeper.records.batch_ids(limit=2, cursor=cursor) == (["zzzz-old"], None)
    assert await keeper.records.find_batch("mmmm") == "mmmm-mid"
    await keeper.records.open_batch("mmmm-too", "test", 2, None, NOW + 3)
    with pytest.raises(Conflict, match="could be any of mmmm-mid, mmmm-too"):
        await keeper.records.find_batch("mmmm")


async def test_an_item_whose_creator_died_is_created_with_the_same_id(keeper: RedisKeeper) -> None:
    await keeper.records.open_batch("batch", "test", 2, ("batch", "k", "b"), NOW)
    number = await keeper.records.batch_number("batch")
    first = submit(place=(number, 0))
    await keeper.records.accept(first, NOW)  # and the maker dies
    assert (await keeper.records.get_batch("batch"))["runs"] == []
    with pytest.raises(KeyUsed) as known:
        await keeper.accept(submit(place=(number, 0)), NOW)
    assert known.value.made == first.run_id
    (only,) = (await keeper.records.get_batch("batch"))["runs"]
    assert only == {"index": 0, "run_id": first.run_id, "status": "RUNNING"}


@pytest.mark.parametrize(
    "batch_id", ["b", "batch", "00ff", "5a9c72d83d26c2a98383f4d5c90edeb1", "ä-1"]
)
def test_a_batch_is_found_by_its_number(batch_id: str) -> None:
    assert batch_of(batch_number(batch_id)) == batch_id


# --- the end -------------------------------------------------------------------------------------


async def test_a_run_is_deleted_completely_a_week_after_its_end(keeper: RedisKeeper) -> None:
    await register(keeper.records)
    before = await keeper.keys()
    run = submit(version=1, key=("run of test", "k", "body"))
    other = submit()
    await keeper.accept(other, NOW)
    await keeper.complete(run, await keeper.accept(run, NOW), 1, NOW + 1)
    await keeper.records.expire(NOW + 7 * DAY)
    assert (await keeper.records.summary(run.run_id))["status"] == "COMPLETED"
    await keeper.records.expire(NOW + 1 + 7 * DAY)
    with pytest.raises(NotFound):
        await keeper.records.summary(run.run_id)
    assert await keeper.statuses() == [other.run_id], "what is not finished stays"
    await keeper.cancel(other, NOW + 2)
    await keeper.records.expire(NOW + 9 * DAY)
    assert await keeper.keys() == before
    await keeper.accept(submit(version=1, key=("run of test", "k", "other")), NOW + 10 * DAY)


async def test_a_batch_is_deleted_a_week_after_the_end_of_its_last_run(keeper: RedisKeeper) -> None:
    runs = [submit(), submit(), submit()]
    await keeper.accept_batch("batch", runs, ("batch", "k", "body"), NOW)
    before = await keeper.keys()
    await keeper.cancel(runs[0], NOW + 1)
    assert await keeper.records.expire(NOW + 8 * DAY) == 1
    assert await keeper.records.expire(NOW + 8 * DAY) == 0, "it is not in the way of others"
    await keeper.cancel(runs[1], NOW + 9 * DAY)
    await keeper.cancel(runs[2], NOW + 10 * DAY)
    while await keeper.records.expire(NOW + 16.5 * DAY):
        pass
    batch = await keeper.records.get_batch("batch")
    assert batch["counts"] == {"CANCELLED": 3}
    assert len(before) > 5
    while await keeper.records.expire(NOW + 17 * DAY):
        pass
    left = {key for key in await keeper.keys() if not key.startswith("wf:def:")}
    assert left == set()


async def test_a_retried_run_is_not_deleted_even_if_the_index_is_outdated(
    keeper: RedisKeeper,
) -> None:
    run = submit()
    await keeper.accept(run, NOW)
    await keeper.cancel(run, NOW + 1)
    await keeper.store.apply([Retry(run.run_id)], NOW + 2)  # and no process refreshes it
    assert await keeper.records.expire(NOW + 30 * DAY) == 1
    assert (await keeper.records.summary(run.run_id))["status"] == "RUNNING"
    assert await keeper.records.expire(NOW + 30 * DAY) == 0


@pytest.mark.parametrize("crash", range(1, 12))
async def test_a_crash_during_a_deletion_leaves_nothing(keeper: RedisKeeper, crash: int) -> None:
    runs = [submit(key=("run", "k", "b")), submit()]
    await keeper.accept(runs[0], NOW)
    await keeper.cancel(runs[0], NOW)
    await keeper.accept_batch("batch", [runs[1]], ("batch", "k", "b"), NOW)
    await keeper.cancel(runs[1], NOW)
    records = RedisRecords(Crashing(keeper.pipe, crash))  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        await records.expire(NOW + 8 * DAY)
    while await keeper.records.expire(NOW + 8 * DAY):
        pass
    assert {key for key in await keeper.keys() if not key.startswith("wf:def:")} == set()


async def test_concurrent_expirations_do_not_disturb_each_other(keeper: RedisKeeper) -> None:
    runs = [submit() for _ in range(20)]
    for run in runs:
        await keeper.accept(run, NOW)
        await keeper.cancel(run, NOW)
    await asyncio.gather(*(RedisRecords(keeper.pipe).expire(NOW + 8 * DAY) for _ in range(4)))
    assert await keeper.statuses() == []
    assert {key for key in await keeper.keys() if not key.startswith("wf:def:")} == set()


@pytest.mark.parametrize("claimed", [False, True])
async def test_an_opened_batch_without_runs_is_deleted_a_week_later(
    keeper: RedisKeeper, claimed: bool
) -> None:
    records = keeper.records
    if claimed:
        await records.open_batch("batch", "test", 2, ("batch", "k", "body"), NOW)
    else:  # its maker dies before it has claimed the key
        acceptance = RedisAcceptedRuns(Crashing(keeper.pipe, 1), Definitions())  # type: ignore[arg-type]
        with pytest.raises(ConnectionError):
            await acceptance.open_batch("batch", "test", 2, ("batch", "k", "body"), NOW)
    await records.expire(NOW + 7 * DAY - 1)
    assert (await records.get_batch("batch"))["count"] == 2
    await records.expire(NOW + 7 * DAY)
    assert await keeper.keys() == set()
    await records.open_batch("other", "test", 2, ("batch", "k", "body"), NOW)


async def test_an_opened_batch_with_a_run_is_deleted_with_the_run(keeper: RedisKeeper) -> None:
    await keeper.records.open_batch("batch", "test", 2, ("batch", "k", "body"), NOW)
    run = submit(place=(await keeper.records.batch_number("batch"), 0))
    await keeper.accept(run, NOW)
    await keeper.records.expire(NOW + 8 * DAY)
    assert (await keeper.records.get_batch("batch"))["counts"] == {"RUNNING": 1}
    await keeper.cancel(run, NOW + 8 * DAY)
    await keeper.records.expire(NOW + 15 * DAY)
    assert {key for key in await keeper.keys() if not key.startswith("wf:def:")} == set()


async def test_a_key_is_free_as_soon_as_its_run_is_deleted(keeper: RedisKeeper) -> None:
    old = submit(key=("run", "k", "b"))
    await keeper.accept(old, NOW)
    await keeper.cancel(old, NOW)
    dropping = RedisRecords(Crashing(keeper.pipe, 3))  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        await dropping.expire(NOW + 8 * DAY)
    assert await keeper.pipe.call("HEXISTS", keys_of(old.run_id)[0], "dropped")
    new = submit(key=("run", "k", "other"))
    await keeper.accept(new, NOW + 8 * DAY)
    await keeper.records.expire(NOW + 8 * DAY)
    assert await keeper.statuses() == [new.run_id]
    with pytest.raises(KeyUsed):
        await keeper.accept(submit(key=("run", "k", "other")), NOW + 8 * DAY)


@pytest.mark.parametrize("commands", range(1, 9))
async def test_a_deletion_that_crashed_is_completed_later_and_shows_nothing_meanwhile(
    keeper: RedisKeeper, commands: int
) -> None:
    run = submit(key=("run", "k", "b"))
    await keeper.accept(run, NOW)
    await keeper.cancel(run, NOW)
    crashing = RedisRecords(Crashing(keeper.pipe, commands))  # type: ignore[arg-type]
    with suppress(ConnectionError):
        await crashing.delete([run.run_id])
    with pytest.raises(NotFound):
        await keeper.records.summary(run.run_id)
    assert await keeper.statuses() == []
    assert await keeper.records.delete([run.run_id]) == [], "it is gone for its caller"
    await keeper.records.expire(NOW + 8 * DAY)
    assert {key for key in await keeper.keys() if not key.startswith("wf:def:")} == set()


async def test_only_a_finished_run_is_deleted_and_its_key_with_it(keeper: RedisKeeper) -> None:
    run = submit(key=("run", "k", "b"))
    await keeper.accept(run, NOW)
    assert await keeper.records.delete([run.run_id]) == []
    await keeper.cancel(run, NOW + 1)
    assert await keeper.records.delete([run.run_id], ended_before=NOW) == []
    assert await keeper.records.delete([run.run_id], ended_before=NOW + 1) == [run.run_id]
    assert {key for key in await keeper.keys() if not key.startswith("wf:def:")} == set()


class Crashing:
    """A connection of a process that dies after so many commands."""

    def __init__(self, pipe: PipelinedRedis, commands: int) -> None:
        self._pipe = pipe
        self._left = commands

    async def call(self, *command: Any) -> Any:
        self._count()
        return await self._pipe.call(*command)

    async def call_many(self, commands: Any) -> Any:
        self._count()
        return await self._pipe.call_many(commands)

    async def call_script(self, *given: Any) -> Any:
        self._count()
        return await self._pipe.call_script(*given)

    def _count(self) -> None:
        if not self._left:
            raise ConnectionError
        self._left -= 1


async def test_no_key_of_existing_records_has_a_time_to_live(keeper: RedisKeeper) -> None:
    await register(keeper.records)
    await keeper.records.set_alias("test", "stable", 1, BY)
    await keeper.records.set_limit("t", 1, 1, BY)
    await keeper.accept(submit(version=1, key=("run of test", "k", "b")), NOW)
    await keeper.accept_batch("batch", [submit(), submit()], ("batch", "k", "b"), NOW)
    run = submit()
    await keeper.accept(run, NOW)
    await keeper.cancel(run, NOW + 1)
    for key in await keeper.keys():
        assert await keeper.pipe.call("TTL", key) == -1, key


async def test_a_missing_run_is_not_listed(keeper: RedisKeeper) -> None:
    runs = [submit() for _ in range(4)]
    for at, run in enumerate(runs):
        await keeper.accept(run, NOW + at)
    await keeper.pipe.call("DEL", *keys_of(runs[3].run_id))
    page = await keeper.records.list_runs(RunQuery(limit=2))
    assert [item["run_id"] for item in page["items"]] == [runs[2].run_id, runs[1].run_id]
    rest = await keeper.records.list_runs(RunQuery(limit=2, cursor=page["next_cursor"]))
    assert [item["run_id"] for item in rest["items"]] == [runs[0].run_id]


async def test_an_accepted_batch_keeps_the_version_of_each_run_until_it_is_made(
    keeper: RedisKeeper,
) -> None:
    graphs = [graph(description=text) for text in "12"]
    runs = [submit(graphs[n % 2], {"n": n}, version=1 + n % 2) for n in range(5)]
    await keeper.records.accept_batch(os.urandom(16).hex(), runs, None, NOW)
    (left,) = await RedisRecords(keeper.pipe).unmade(NOW + 60)  # another process, after a crash
    found = [(one.run_id, one.version, one.graph.workflow) for one in left.submits]
    assert found == [(one.run_id, one.version, one.graph.workflow) for one in runs]
