"""A run in Redis whose state was changed by hand: it is reported, can be ended, can be rebuilt.

The runs are moved by the test alone: no orchestrator or worker is in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.config import Settings
from dovetail.core.errors import BrokenRun, Conflict
from dovetail.core.run import Phase, RunState
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.core.transitions import Claim, Complete, Fail, Wake
from dovetail.engine.commands import Commands
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis import store as redis
from dovetail.stores.redis.codec import PARTS, keys_of
from dovetail.stores.redis.doctor import reach
from dovetail.stores.redis.repair import write_back
from dovetail.wiring.distributed import commanding

from ..engine.harness import definition

LATER = 4e9
"""Seconds: by then every node that waits may go on."""
DIAMOND: dict[str, Any] = {
    "a": "input",
    "b": {"handler": "input", "after": ["a"], "max_retries": 2},
    "c": {"handler": "input", "after": ["a"], "condition": "{{ a.n > 0 }}"},
    "d": {"handler": "input", "after": ["b", "c"]},
}


class DamagedRun:
    """A run that is moved by hand."""

    def __init__(self, commands: Commands, pipe: PipelinedRedis) -> None:
        self.commands = commands
        self.call = pipe.call
        self.hot: Any = commands.store._hot  # type: ignore[attr-defined]

    async def begin(self, nodes: dict[str, Any] = DIAMOND, **fields: Any) -> str:
        self.hot.ahead = None
        return (await self.commands.trigger(definition(nodes, **fields), {})).run_id

    async def start(self, run_id: str, *names: str) -> None:
        run = await self.hot.load(run_id)
        now = self.commands.clock()
        moves = [Claim(run_id, name, run.node(name).token, "w", now + 60) for name in names]
        assert all(await self.hot.apply(moves, now))

    async def complete(self, run_id: str, *names: str) -> None:
        run = await self.hot.load(run_id)
        moves = [Complete(run_id, name, run.node(name).token, {"n": 1}) for name in names]
        assert all(await self.hot.apply(moves, self.commands.clock()))

    async def fail(self, run_id: str, name: str, **how: Any) -> None:
        run = await self.hot.load(run_id)
        error = {"type": "E", "message": "m"}
        move = Fail(run_id, name, run.node(name).token, error, **how)
        assert all(await self.hot.apply([move], self.commands.clock()))

    async def do(self, run_id: str, *names: str) -> None:
        for name in names:
            await self.start(run_id, name)
            await self.complete(run_id, name)

    async def set_node(self, run_id: str, place: int, status: str) -> None:
        text = await self.call("HGET", keys_of(run_id)[1], place) or b"W|1|0|0|0|0|0|0||||||"
        await self.call("HSET", keys_of(run_id)[1], place, status.encode() + text[1:])

    async def finish(self, run_id: str) -> RunState:
        for _ in range(20):
            run: RunState = await self.hot.load(run_id)
            if run.finished:
                return run
            await self.hot.settle_pending(run_id, self.commands.clock())
            waiting = [
                Wake(run_id, spec.id, node.token)
                for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
                if node.until is not None
            ]
            await self.hot.apply(waiting, LATER)
            run = await self.hot.load(run_id)
            named = list(zip([spec.id for spec in run.graph.nodes], run.nodes, strict=True))
            await self.start(run_id, *(n for n, node in named if node.phase is Phase.PUBLISHED))
            run = await self.hot.load(run_id)
            running = [n for n, _ in named if run.node(n).status is NodeStatus.RUNNING]
            await self.complete(run_id, *running)
        raise AssertionError(f"run {run_id} is stuck")


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[DamagedRun]:
    async with commanding(Settings(redis_url=url)) as commands, PipelinedRedis(url) as pipe:
        yield DamagedRun(commands, pipe)


@pytest.fixture
async def damaged_run(redis_url: str) -> AsyncIterator[DamagedRun]:
    async with opened(redis_url) as found:
        yield found


# ── it is reported ───────────────────────────────────────────────────────────────────────────


async def test_a_node_completed_by_hand_is_reported_as_damage(damaged_run: DamagedRun) -> None:
    run_id = await damaged_run.begin()
    assert (await damaged_run.commands.explain(run_id))["damage"] == []
    await damaged_run.set_node(run_id, 0, "C")
    reported = await damaged_run.commands.explain(run_id)
    assert reported["damage"]
    assert {node["code"] for node in reported["nodes"]} == {"damaged"}
    assert "dovetail runs repair" in reported["nodes"][0]["why"]
    assert await damaged_run.commands.damage(run_id) == reported["damage"]
    assert await damaged_run.commands.verify(run_id)


async def test_the_doctor_names_damaged_runs_and_the_fix(
    damaged_run: DamagedRun, redis_url: str
) -> None:
    whole, edited, unread = [await damaged_run.begin() for _ in range(3)]
    await damaged_run.set_node(edited, 0, "C")
    await damaged_run.call("HSET", keys_of(unread)[1], "0", "junk")
    found = await reach(Settings(redis_url=redis_url))
    reported = " ".join(f"{one.message} {one.fix}" for one in found if one.check == "damaged")
    assert f"run {edited}: " in reported
    assert f"run {unread}: " in reported
    assert whole not in reported
    assert f"dovetail runs repair {edited[:6]}" in reported


async def test_one_damaged_run_does_not_hide_the_others_in_a_list(damaged_run: DamagedRun) -> None:
    whole, unread = await damaged_run.begin(), await damaged_run.begin()
    await damaged_run.call("HSET", keys_of(unread)[0], "epoch", "x", "params", "{")
    listed = {run["run_id"]: run for run in (await damaged_run.commands.list_runs())["items"]}
    assert listed[whole]["error"] is None
    assert listed[unread]["error"]["type"] == "run_damaged"


async def test_a_consistent_change_is_detected_by_the_log(damaged_run: DamagedRun) -> None:
    run_id = await damaged_run.begin()
    text = await damaged_run.call("HGET", keys_of(run_id)[1], 0)
    await damaged_run.call("HSET", keys_of(run_id)[1], 0, text.replace(b"|1|0|0|1|", b"|1|2|1|3|"))
    reported = await damaged_run.commands.explain(run_id)
    assert "node 'a' is kept with attempt 2, the log makes it 0" in reported["damage"]


async def test_no_running_run_is_reported_as_damaged(damaged_run: DamagedRun) -> None:
    run_id = await damaged_run.begin(max_concurrency=1, on_failure="continue")
    for step in range(9):
        assert await damaged_run.commands.damage(run_id) == []
        run = await damaged_run.hot.load(run_id)
        for name in "abcd":
            node = run.node(name)
            if node.phase is Phase.PUBLISHED:
                await damaged_run.start(run_id, name)
            elif node.status is NodeStatus.RUNNING and name == "b":
                await damaged_run.fail(run_id, name, permanent=step > 5, after=1.0)
            elif node.status is NodeStatus.RUNNING:
                await damaged_run.complete(run_id, name)
            elif node.until is not None:
                await damaged_run.hot.apply([Wake(run_id, name, node.token)], LATER)
    assert (await damaged_run.hot.load(run_id)).finished
    assert await damaged_run.commands.damage(run_id) == []


# ── it can be ended ──────────────────────────────────────────────────────────────────────

DAMAGE = {
    "a node is completed": lambda k: [("HSET", k[1], "0", "C|1|1|0|1|7|1|7||||w|1.0|2.0")],
    "all nodes are completed": lambda k: [
        ("HSET", k[1], n, "C|1|1|0|1|7|1|7||||w|1.0|2.0") for n in range(4)
    ],
    "the counts are gone": lambda k: [("HDEL", k[1], "counts")],
    "the counts are junk": lambda k: [("HSET", k[1], "counts", "many")],
    "the counts are too high": lambda k: [("HSET", k[1], "counts", "99|7|1")],
    "the counts are at zero": lambda k: [("HSET", k[1], "counts", "0|0|1")],
    "a node is junk": lambda k: [("HSET", k[1], "0", "junk")],
    "a node has a state of tomorrow": lambda k: [("HSET", k[1], "0", "Z|1|0|0|1|7|0|0||||||")],
    "the nodes are gone": lambda k: [("DEL", k[1])],
    "the nodes are no hash": lambda k: [("DEL", k[1]), ("SET", k[1], "junk")],
    "the ends are junk": lambda k: [("HSET", k[4], "0", "junk")],
    "the ends are no hash": lambda k: [("DEL", k[4]), ("SET", k[4], "junk")],
    "the log is gone": lambda k: [("DEL", k[5])],
    "the log is no list": lambda k: [("DEL", k[5]), ("SET", k[5], "junk")],
    "the log has junk": lambda k: [("RPUSH", k[5], "junk")],
    "held is no set": lambda k: [("SET", k[6], "junk")],
    "it has ended, it says": lambda k: [("HSET", k[0], "finished_at", "1.0")],
    "its status is junk": lambda k: [("HSET", k[0], "status", "DREAMING")],
    "its epoch is junk": lambda k: [("HSET", k[0], "epoch", "x")],
    "its size is gone": lambda k: [("HDEL", k[0], "size")],
    "its limit is junk": lambda k: [("HSET", k[0], "limit", "x")],
    "its failures are junk": lambda k: [("HSET", k[0], "failed", "x", "cancelled", "y")],
}


@pytest.mark.parametrize("how", DAMAGE)
async def test_a_damaged_run_can_always_be_cancelled(damaged_run: DamagedRun, how: str) -> None:
    run_id = await damaged_run.begin()
    for command in DAMAGE[how](keys_of(run_id)):
        await damaged_run.call(*command)
    run = await damaged_run.commands.cancel(run_id)
    assert (run.status, run.finished) == (RunStatus.CANCELLED, True)
    status, finished_at = await damaged_run.call(
        "HMGET", keys_of(run_id)[0], "status", "finished_at"
    )
    assert status == b"CANCELLED"
    assert finished_at
    assert await damaged_run.call("ZSCORE", "wf:active", run_id) is None, (
        "it is on no agenda any more"
    )
    with pytest.raises(Conflict):
        await damaged_run.commands.cancel(run_id)


async def test_a_run_without_its_definition_can_be_cancelled(redis_url: str) -> None:
    async with opened(redis_url) as damaged_run:
        run_id = await damaged_run.begin()
    async with opened(redis_url) as damaged_run:  # who has never read it
        for key in await damaged_run.call("KEYS", "wf:def:*"):
            await damaged_run.call("SET", key, "{}")
        with pytest.raises(BrokenRun, match="cannot be read"):
            await damaged_run.commands.explain(run_id)
        run = await damaged_run.commands.cancel(run_id)
        assert (run.status, run.finished) == (RunStatus.CANCELLED, True)
        assert (await damaged_run.commands.get_run(run_id, nodes=False))["status"] == "CANCELLED"


# ── it is rebuilt ────────────────────────────────────────────────────────────────────────


async def test_a_run_is_rebuilt_from_its_log_and_has_the_same_end(damaged_run: DamagedRun) -> None:
    run_id = await damaged_run.begin()
    await damaged_run.set_node(run_id, 0, "C")
    reported = await damaged_run.commands.repair(run_id, dry_run=True)
    assert (
        "node 'a' is kept with status COMPLETED, the log makes it QUEUED" in reported["differences"]
    )
    assert not reported["repaired"]
    assert await damaged_run.commands.verify(run_id)
    done = await damaged_run.commands.repair(run_id)
    assert (done["repaired"], done["differences"]) == (True, reported["differences"])
    assert await damaged_run.commands.verify(run_id) == []
    again = await damaged_run.commands.repair(run_id)
    assert (again["repaired"], again["differences"]) == (False, [])
    assert (await damaged_run.finish(run_id)).status is RunStatus.COMPLETED
    assert await damaged_run.commands.verify(run_id) == []


ALLOWED: dict[str, Any] = {
    "a": {"handler": "input", "allow_failure": True},
    "b": "input",
    "c": {"handler": "input", "after": ["a", "b"]},
    "d": {"handler": "input", "after": ["a"], "condition": "{{ a.status == 'FAILED' }}"},
}


async def test_an_allowed_failure_is_counted_again_when_its_run_is_rebuilt(
    damaged_run: DamagedRun,
) -> None:
    run_id = await damaged_run.begin(ALLOWED)
    await damaged_run.start(run_id, "a", "b")
    await damaged_run.fail(run_id, "a", permanent=True)
    assert await damaged_run.commands.damage(run_id) == []
    assert await damaged_run.commands.verify(run_id) == []
    before = (await damaged_run.hot.load(run_id)).snapshot()
    await damaged_run.call("DEL", keys_of(run_id)[2])
    assert await damaged_run.commands.damage(run_id)
    assert (await damaged_run.commands.repair(run_id))["repaired"]
    after = (await damaged_run.hot.load(run_id)).snapshot()
    assert (after["failed"], after["nodes"][2]) == (0, before["nodes"][2])
    ended = await damaged_run.finish(run_id)
    assert ended.status is RunStatus.COMPLETED
    assert [node.status for node in ended.nodes] == ["FAILED", *["COMPLETED"] * 3]
    assert await damaged_run.commands.verify(run_id) == []


async def test_a_damaged_run_that_is_cancelled_does_not_count_an_allowed_failure(
    damaged_run: DamagedRun,
) -> None:
    run_id = await damaged_run.begin(ALLOWED)
    await damaged_run.start(run_id, "a")
    await damaged_run.fail(run_id, "a", permanent=True)
    await damaged_run.call("HSET", keys_of(run_id)[0], "epoch", "x")
    run = await damaged_run.commands.cancel(run_id)
    assert (run.status, run.failed) == (RunStatus.CANCELLED, 0)


async def test_a_start_that_survived_stays_with_its_worker(damaged_run: DamagedRun) -> None:
    run_id = await damaged_run.begin()
    await damaged_run.do(run_id, "a")
    await damaged_run.start(run_id, "b")
    token = (await damaged_run.hot.load(run_id)).node("b").token
    await damaged_run.set_node(run_id, 3, "F")
    assert (await damaged_run.commands.repair(run_id))["repaired"]
    (decision,) = await damaged_run.hot.apply(
        [Complete(run_id, "b", token, 1)], damaged_run.commands.clock()
    )
    assert decision.changed


async def test_a_start_whose_token_was_overwritten_is_lost_and_does_not_run_twice_at_once(
    damaged_run: DamagedRun,
) -> None:
    run_id = await damaged_run.begin()
    await damaged_run.start(run_id, "a")
    token = (await damaged_run.hot.load(run_id)).node("a").token
    await damaged_run.call("HSET", keys_of(run_id)[1], "0", "W|1|0|0|0|0|0|0||||||")
    assert (await damaged_run.commands.repair(run_id))["repaired"]
    node = (await damaged_run.hot.load(run_id)).node("a")
    assert node.status is NodeStatus.RUNNING
    assert node.token[:2] == token[:2]
    assert node.token != token
    assert node.lease_until is not None
    assert node.lease_until <= damaged_run.commands.clock()
    assert (await damaged_run.hot.apply([Complete(run_id, "a", token, 1)], 1.0))[0].changed == []


async def test_a_change_during_a_repair_is_not_undone(
    damaged_run: DamagedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await damaged_run.begin()
    await damaged_run.start(run_id, "a")
    await damaged_run.set_node(run_id, 3, "S")
    answers = []

    async def late(*given: Any) -> bool:
        if not answers:
            await damaged_run.complete(run_id, "a")
        answers.append(await write_back(*given))
        return answers[-1]

    monkeypatch.setattr(redis, "write_back", late)
    assert (await damaged_run.commands.repair(run_id))["repaired"]
    assert answers == [False, True]
    assert (await damaged_run.hot.load(run_id)).node("a").status is NodeStatus.COMPLETED
    assert await damaged_run.commands.verify(run_id) == []


@pytest.mark.parametrize("how", ["gone", "of another kind", "junk", "a gap", "another story"])
async def test_a_damaged_log_is_refused(damaged_run: DamagedRun, how: str) -> None:
    run_id = await damaged_run.begin()
    await damaged_run.do(run_id, "a")
    log = keys_of(run_id)[5]
    if how in ("gone", "of another kind"):
        await damaged_run.call("DEL", log)
    if how == "of another kind":
        await damaged_run.call("SET", log, "junk")
    if how == "junk":
        await damaged_run.call("LSET", log, 1, "junk")
    if how == "a gap":
        await damaged_run.call("LREM", log, 1, (await damaged_run.call("LRANGE", log, 3, 3))[0])
    if how == "another story":
        await damaged_run.call("RPUSH", log, '[1.0,"node.completed",1,3,1,null]')
    await damaged_run.set_node(run_id, 0, "F")
    with pytest.raises(BrokenRun, match=r"the log itself is damaged: .*cancel it"):
        await damaged_run.commands.repair(run_id)
    assert (await damaged_run.commands.cancel(run_id)).finished


async def test_a_lost_output_is_reported_and_not_invented(damaged_run: DamagedRun) -> None:
    run_id = await damaged_run.begin()
    await damaged_run.do(run_id, "a")
    await damaged_run.call("DEL", keys_of(run_id)[3])
    await damaged_run.set_node(run_id, 1, "F")
    with pytest.raises(BrokenRun, match="output of 'a' is lost"):
        await damaged_run.commands.repair(run_id)


JUNK = st.sampled_from([b"junk", b"", b"-1", b"9999", b"0|0|1", b"[]", b"C|1|1|0|1|7|1|7||||w|1|2"])
EDITS = st.one_of(
    st.tuples(st.just("status"), st.integers(0, 3), st.sampled_from("WQRCFSXZ")),
    st.tuples(st.just("nodes"), st.sampled_from([0, 1, 2, 3, "counts"]), JUNK),
    st.tuples(st.just("deps"), st.integers(0, 3), st.sampled_from([0, 100001, 200002, 999999])),
    st.tuples(st.just("ends"), st.integers(0, 3), JUNK),
    st.tuples(st.just("held"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(
        st.just("meta"),
        st.sampled_from(["status", "finished_at", "failed", "cancelled", "pending", "error"]),
        st.sampled_from([b"", b"1", b"FAILED", b"COMPLETED", b"RUNNING", b"7.5"]),
    ),
    st.tuples(st.just("gone"), st.sampled_from(["nodes", "deps", "ends", "held"]), st.none()),
)


async def _damage(damaged_run: DamagedRun, run_id: str, edits: list[Any]) -> None:
    keys = dict(zip(PARTS, keys_of(run_id), strict=True))
    for kind, where, value in edits:
        if kind == "status":
            await damaged_run.set_node(run_id, where, value)
        elif kind == "gone":
            await damaged_run.call("DEL", keys[where])
        elif kind == "held":
            await damaged_run.call("ZADD", keys["held"], value, where)
        else:
            await damaged_run.call("HSET", keys[kind], where, value)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.integers(0, 6),
    limit=st.sampled_from([None, 1]),
    edits=st.lists(EDITS, min_size=1, max_size=4),
)
def test_any_damaged_run_is_rebuilt_and_has_the_same_end(
    redis_url: str, steps: int, limit: int | None, edits: list[Any]
) -> None:
    async def tried() -> None:
        async with opened(redis_url) as damaged_run:
            run_id = await damaged_run.begin(max_concurrency=limit)
            script = ["a", "a", "b", "b failed", "c", "c"]
            for step in script[:steps]:
                node = (await damaged_run.hot.load(run_id)).node(step[0])
                if node.phase is Phase.PUBLISHED:
                    await damaged_run.start(run_id, step[0])
                elif node.status is NodeStatus.RUNNING and "failed" in step:
                    await damaged_run.fail(run_id, step[0], after=1.0)
                elif node.status is NodeStatus.RUNNING:
                    await damaged_run.complete(run_id, step[0])
            before = (await damaged_run.hot.load(run_id)).snapshot()
            await _damage(damaged_run, run_id, edits)
            await damaged_run.commands.repair(run_id)
            assert await damaged_run.commands.verify(run_id) == []
            after = (await damaged_run.hot.load(run_id)).snapshot()
            for name in ("status", "epoch", "unfinished", "failed", "cancelled", "error", "seq"):
                assert after[name] == before[name], name
            ended = await damaged_run.finish(run_id)
            assert ended.status is RunStatus.COMPLETED
            assert [node.output for node in ended.nodes] == [{"n": 1}] * 4
            assert await damaged_run.commands.verify(run_id) == []

    asyncio.run(tried())


# ── with an archive ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("part", ["events", "meta", "nodes"])
async def test_log_entries_that_redis_lost_come_from_the_archive(
    redis_url: str, postgres_url: str, part: str
) -> None:
    settings = Settings(redis_url=redis_url, database_url=postgres_url)
    async with commanding(settings) as commands, PipelinedRedis(redis_url) as pipe:
        archive = commands.store._archive  # type: ignore[attr-defined]
        damaged_run = DamagedRun(commands, pipe)
        run_id = await damaged_run.begin()
        await damaged_run.do(run_id, "a")
        await archive.keep([run_id])
        key = keys_of(run_id)[PARTS.index(part)]
        await damaged_run.call("DEL", key)
        await damaged_run.call("SET", key, "junk")
        damaged_run.hot.forget(run_id)
        reported = await commands.repair(run_id)
        assert reported["repaired"]
        assert await commands.verify(run_id) == []
        assert (await damaged_run.finish(run_id)).status is RunStatus.COMPLETED
