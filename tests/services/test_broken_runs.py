"""Nonsense stops no other run: damaged records, messages that cannot be applied."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.errors import BrokenRun, NotFound, StoreError
from dovetail.core.events import Token
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel, Claim, Complete, Fail, Submit
from dovetail.engine.distributed import orchestrator
from dovetail.engine.distributed.archiver import ArchiveEntry
from dovetail.engine.distributed.task_source import QueueTaskSource
from dovetail.engine.supervisor import bisect_failures
from dovetail.handlers.builtin import builtin_registry
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.codec import PARTS
from dovetail.stores.redis.definitions import UnusedDefinitions
from dovetail.stores.redis.store import RedisLeases
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.transports.messages import (
    DEAD,
    RESULTS,
    read_task,
    result_fields,
    result_messages,
    stream_of,
)
from dovetail.transports.streams.reader import StopBroadcast
from dovetail.transports.streams.sender import ORCHESTRATORS, STOPS, WORKERS
from dovetail.wiring.distributed import ServiceParts, connected, orchestrate, working

from ..core.walk import graph
from .archive_world import DIAMOND, RECOVERY, RETENTION, World
from .archive_world import graph as archived_graph
from .interrupted_run import InterruptedRun

LEASE = 0.5
SECONDS = 20.0
SLOW = {"handler": "sleep", "config": {"seconds": 0.2}}
FLOW = graph({"a": [], "b": ["a"]}, a=SLOW, b={"handler": "output"})
RETRIED_LATER = graph({"a": []}, a={"handler": "nobody", "max_retries": 3})
RETRIED = graph({"a": []}, a={"handler": "output", "max_retries": 3})


# ── isolating ────────────────────────────────────────────────────────────────────────────


async def blamed(at: int, problem: Exception) -> Sequence[str]:
    return [f"{at}: {problem}"]


@pytest.mark.parametrize("bad", [{0}, {7}, {3, 4}, set(range(8))])
async def test_the_failing_items_of_a_batch_are_found(bad: set[int]) -> None:
    async def work(items: Sequence[int]) -> Sequence[str]:
        if found := bad & set(items):
            raise ValueError(min(found))
        return list(map(str, items))

    expected = [f"{at}: {at}" if at in bad else str(at) for at in range(8)]
    assert await bisect_failures(work, range(8), blamed) == expected


@pytest.mark.parametrize("error", [StoreError("away"), NotFound("gone"), OSError("interrupted")])
async def test_an_unavailable_store_is_not_blamed_on_an_item(error: Exception) -> None:
    calls = 0

    async def work(items: Sequence[int]) -> Sequence[str]:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(type(error)):
        await bisect_failures(work, range(8), blamed)
    assert calls == 1


# ── records that were damaged ────────────────────────────────────────────────────────────


class BrokenRunServices:
    def __init__(self, parts: ServiceParts, services: Sequence[asyncio.Future[None]]) -> None:
        self.parts = parts
        self.call = parts.pipe.call
        self.services = services

    async def submit(self, run_id: str, flow: Any = FLOW) -> None:
        await self.parts.orchestrator.submit(Submit(run_id, flow, {}))

    async def status(self, run_id: str) -> RunStatus:
        run = await asyncio.wait_for(self.parts.store.wait(run_id), SECONDS)
        return run.status

    async def until(self, question: Callable[[], Any]) -> None:
        async with asyncio.timeout(SECONDS):
            while not await question():
                self.check()
                await asyncio.sleep(0.02)

    def check(self) -> None:
        for service in self.services:
            assert not service.done(), service

    async def token(self, run_id: str) -> Token:
        """Of the first node, claimed by a worker that is never heard of again."""
        token: Token = (await self.parts.store.load(run_id)).nodes[0].token
        return token


@asynccontextmanager
async def services(settings: Settings) -> AsyncIterator[BrokenRunServices]:
    orchestrating = asyncio.create_task(orchestrate(settings))
    try:
        async with (
            connected(settings) as parts,
            working(settings, builtin_registry(settings)) as at_work,
        ):
            parts.store.ahead = None  # what is only made is not sent
            yield BrokenRunServices(parts, [orchestrating, at_work.crashed])
    finally:
        orchestrating.cancel()
        with suppress(asyncio.CancelledError):
            await orchestrating


@pytest.fixture
async def scene(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[BrokenRunServices]:
    """All duties, often."""
    monkeypatch.setattr(orchestrator, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(orchestrator, "BACKLOG_SECONDS", 0.0)
    monkeypatch.setattr(orchestrator, "REAP_SECONDS", 0.1)
    settings = Settings(
        redis_url=redis_url,
        lease_seconds=LEASE,
        stale_result_timeout=1,
        stale_claim_interval=0.2,
        heartbeat_interval=0.2,
    )
    async with services(settings) as found:
        yield found


async def damage_definition(scene: BrokenRunServices, text: bytes) -> None:
    for key in await scene.call("KEYS", "wf:def:*"):
        await scene.call("SET", key, text)


@pytest.mark.parametrize("how", ["gone", "of another kind", "nonsense"])
@pytest.mark.parametrize("part", ["meta", "nodes", "deps", "out", "events"])
async def test_a_damaged_run_does_not_stop_other_runs(
    scene: BrokenRunServices, part: str, how: str
) -> None:
    await scene.submit("bad")
    key = f"wf:{{bad}}:{part}"
    await scene.until(lambda: scene.call("EXISTS", "wf:{bad}:nodes"))
    was_hash = await scene.call("TYPE", key) == b"hash"
    await scene.call("DEL", key)
    if how == "of another kind":
        await scene.call("SET", key, "junk")
    if how == "nonsense":
        await scene.call(*("HSET", key, "0", "junk") if was_hash else ("RPUSH", key, "junk"))
    await lost_and_failed_nodes_go_on(scene)


@pytest.mark.parametrize("text", [b"", b"{}", b'{"name": "w", "nodes": [], "of_tomorrow": 1}'])
async def test_an_unreadable_definition_does_not_stop_other_runs(
    scene: BrokenRunServices, redis_url: str, text: bytes
) -> None:
    await scene.submit("bad", RETRIED_LATER)
    await damage_definition(scene, text)
    settings = Settings(redis_url=redis_url, lease_seconds=LEASE)
    async with services(settings) as others:  # who have never read it
        now = scene.parts.clock()
        await scene.call("ZADD", "wf:leases", now, "bad")
        await scene.call("ZADD", "wf:active", 1, "bad")
        with pytest.raises(BrokenRun):
            await others.parts.store.load("bad")
        await lost_and_failed_nodes_go_on(others)


async def lost_and_failed_nodes_go_on(scene: BrokenRunServices) -> None:
    """Of other runs, in the same looks as the one that is damaged."""
    store, clock = scene.parts.store, scene.parts.clock
    await store.create_many([Submit("lost", RETRIED, {}), Submit("failed", RETRIED, {})], clock())
    for run_id, until in (("lost", clock() - 1), ("failed", clock() + 60)):
        move = Claim(run_id, "a", await scene.token(run_id), "w", until)
        (claimed,) = await store.apply([move], clock())
        assert claimed.changed
    await scene.call("ZADD", "wf:leases", 1, "lost", 1, "bad")
    error = {"type": "E", "message": "m"}
    retried = Fail("failed", "a", await scene.token("failed"), error, after=0.1)
    await scene.call("XADD", RESULTS, "*", *result_fields(retried))
    await scene.call("ZADD", "wf:active", 1, "bad")
    await scene.submit("good")
    for run_id in ("good", "failed", "lost"):
        assert await scene.status(run_id) is RunStatus.COMPLETED
    scene.check()


@pytest.mark.parametrize("part", ["meta", "nodes", "events", "out"])
async def test_a_damaged_run_does_not_block_the_archive(
    world: World, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    bad, ended, going_on = [await world.begin(archived_graph(DIAMOND)) for _ in range(3)]
    await world.do(bad, "a")
    key = f"wf:{{{bad}}}:{part}"
    await world.pipe.call("DEL", key)
    await world.pipe.call("SET", key, "junk")
    await world.finish(ended)
    await world.archiver.sweep()
    await world.archiver.archive_what_moved()
    assert f"run {bad} cannot be archived" in caplog.text
    for run_id in (ended, going_on):
        await world.assert_archived(run_id)
    world.now += 2 * RETENTION
    await world.hints.archived([ArchiveEntry(bad, world.now - 1.5 * RETENTION)])
    await world.archiver.retire()
    assert await world.snapshots.known([ended]) == set()
    # It is said to be there whatever is left of it, and the lost ones are put back.
    await world.pipe.call("DEL", *[f"wf:{{{going_on}}}:{each}" for each in PARTS])
    world.now += RECOVERY
    assert await world.restorer.restore() == 1
    assert (await world.finish(going_on)).status is RunStatus.COMPLETED


async def test_a_damaged_run_does_not_block_a_scan_of_all_runs(
    redis_url: str,
) -> None:
    async with connected(Settings(redis_url=redis_url)) as parts:
        agenda, now = parts.orchestrator.timers, parts.clock()
        parts.store.ahead = None
        await parts.store.create_many([Submit("r", FLOW, {})], now)
        await parts.pipe.call("SET", "wf:{bad}:meta", "junk")
        await agenda.remember_all(now)
        assert await agenda.idle(now + 1, 10) == [("r", pytest.approx(now))]
        await parts.pipe.call("SET", "wf:def:nobodys", "{}")
        await UnusedDefinitions(parts.pipe).look(now)
        assert await parts.pipe.call("KEYS", "wf:def:*") == [
            b"wf:def:" + (await parts.pipe.call("HGET", "wf:{r}:meta", "definition"))
        ]


async def test_a_parked_node_is_not_lost_if_an_old_wake_is_removed_late(redis_url: str) -> None:
    async with connected(Settings(redis_url=redis_url)) as parts:
        agenda, now = parts.orchestrator.timers, parts.clock()
        wake = orchestrator.Wake("r", "a", Token(1, 1, 1))
        await agenda.delay([(now - 1, wake)])
        due = await agenda.due(now, 10)
        assert due == [(now - 1, wake)]
        await agenda.delay([(now + 5, wake)])  # another process woke it, and it was parked again
        await agenda.woken(due)
        assert await agenda.due(now + 6, 10) == [(now + 5, wake)]
        await agenda.woken([(now + 5, wake)])
        assert await agenda.due(now + 6, 10) == []


def damaged(run_id: str, part: str = "events") -> list[tuple[str, ...]]:
    """So that its nodes can be read, and nothing be done with them; or another part of it."""
    key = f"wf:{{{run_id}}}:{part}"
    return [("DEL", key), ("SET", key, "junk")]


async def test_nodes_claimed_beside_a_damaged_run_belong_to_the_worker(
    stage: InterruptedRun,
) -> None:
    ids = ["r0", "r1", "bad", "r2"]
    await stage.living.submit_many([Submit(run_id, RETRIED, {}) for run_id in ids])
    found = await stage.parts.pipe.call("XRANGE", stream_of("output"), "-", "+")
    tasks = [read_task(fields) for _, fields in found]
    await stage.parts.pipe.call_many(damaged("bad", "nodes"))
    task_source = QueueTaskSource(
        *(Settled(), stage.store, stage.timers, cast(Any, None), stage.parts.clock),
        stage.living.apply_each,
        worker_id="w",
        lease_seconds=60.0,
    )
    started = await task_source.start([(None, task) for task in tasks])
    assert [task.run_id for task in started] == ["r0", "r1", "r2"]


class Settled:
    """An inbox whose messages do not matter."""

    has_more = False

    async def acknowledge(self, messages: Sequence[Any]) -> None:
        pass


async def test_effects_decided_beside_a_damaged_run_are_carried_out(stage: InterruptedRun) -> None:
    ids = ["r0", "bad", "r1"]
    await stage.living.submit_many([Submit(run_id, RETRIED, {}) for run_id in ids])
    await stage.parts.pipe.call("DEL", stream_of("output"))
    now = stage.parts.clock()
    claims = [Claim(one, "a", (await stage.store.load(one)).nodes[0].token, "w", 1) for one in ids]
    assert all(await stage.store.apply(claims, now))
    await stage.timers.lease(ids, 1)
    await stage.parts.pipe.call_many(damaged("bad"))
    await stage.living.reap()
    found = await stage.parts.pipe.call("XRANGE", stream_of("output"), "-", "+")
    assert {read_task(fields).run_id for _, fields in found} == {"r0", "r1"}


async def test_results_in_one_message_with_an_inapplicable_result_are_applied(
    scene: BrokenRunServices,
) -> None:
    store, clock = scene.parts.store, scene.parts.clock
    ids = ["bad", *(f"r{at}" for at in range(9))]
    await store.create_many([Submit(one, RETRIED, {}) for one in ids], clock())
    starts = [(one, "a", await scene.token(one)) for one in ids]
    assert all(await store.apply([Claim(*start, "w", clock() + 60) for start in starts], clock()))
    await scene.parts.pipe.call_many(damaged("bad"))
    await scene.parts.pipe.call_many(result_messages([Complete(*start, 1) for start in starts]))
    for one in ids[1:]:
        assert await scene.status(one) is RunStatus.COMPLETED
    await scene.until(lambda: is_settled(scene, RESULTS, ORCHESTRATORS))
    assert await scene.call("LLEN", DEAD) == 1


async def test_an_empty_request_gets_an_empty_reply(redis_url: str) -> None:
    async with PipelinedRedis(redis_url) as pipe:
        assert await asyncio.wait_for(pipe.send([]), 5) == []
        assert await pipe.call("PING") == b"PONG"


async def test_a_failure_of_an_empty_batch_is_raised() -> None:
    async def fails(items: Sequence[int]) -> Sequence[str]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await bisect_failures(fails, [], blamed)


# ── messages ─────────────────────────────────────────────────────────────────────────────

JUNK = ["", "null", "nan", "[]", "{}", "-1", "1e999", "99999999999999999999", '"\\u0000"', b"\xff"]
TOKENS = ["99999999999999999999.1.1", "1.99999999999999999999.1", "-1.1.1", "1_0.1.1", "1.1. 1"]


def results(run_id: str, token: Token) -> list[list[str | bytes]]:
    """A right one with each of its fields wrong."""
    right: dict[str, str | bytes] = {
        "run_id": run_id,
        "node_id": "a",
        "token": str(token),
        "success": "0",
        "output": "null",
        "error": '{"type": "E", "message": "m"}',
        "hints": '{"chance": 0, "after": 0}',
        "cache": '["k", 1]',
    }
    wrong: list[dict[str, str | bytes]] = [
        right | {name: junk} for name in ("run_id", "node_id", "token", "success") for junk in JUNK
    ]
    wrong += [right | {"token": junk} for junk in TOKENS]
    for success in "01":
        own = right | {"success": success, "token": "7.7.7"}
        wrong += [own | {name: j} for name in ("output", "error", "hints", "cache") for j in JUNK]
    for hint in ("chance", "after", "at_least"):
        reported = [f'{{"{hint}": {value}}}' for value in ('"nan"', "[]", "-1", "1e999", "true")]
        wrong += [right | {"hints": text} for text in reported]
    wrong += [right | {"success": "1", "cache": f'["k", {value}]'} for value in ('"1"', "null")]
    wrong += [right | {"success": "1", "reads": j} for j in (*JUNK, '{"params": 1}', "[]")]
    wrong += [right | {"success": "1", "cache": "[1, 1]"}, right | {"more": '[["r"]]'}]
    return [[part for item in one.items() for part in item] for one in wrong]


async def test_no_message_ends_an_orchestrator_or_stays_forever(scene: BrokenRunServices) -> None:
    await scene.parts.store.create_many([Submit("r", RETRIED, {})], scene.parts.clock())
    token = await scene.token("r")
    (claimed,) = await scene.parts.store.apply(
        [Claim("r", "a", token, "w", scene.parts.clock() + 60)], scene.parts.clock()
    )
    assert claimed.changed
    for fields in results("r", token):
        await scene.call("XADD", RESULTS, "*", *fields)
    await scene.until(lambda: is_settled(scene, RESULTS, ORCHESTRATORS))
    run = await scene.parts.store.load("r")
    assert run.nodes[0].token == token, "one of them has been believed"
    await scene.submit("good")
    assert await scene.status("good") is RunStatus.COMPLETED


async def is_settled(scene: BrokenRunServices, stream: str, group: str) -> bool:
    waiting = await scene.call("XLEN", stream)
    held = (await scene.call("XPENDING", stream, group))[0]
    return not waiting and not held


async def test_no_message_ends_a_worker_or_stays_forever(scene: BrokenRunServices) -> None:
    ids = [f"r{at}" for at in range(150)]
    submits = [Submit(run_id, RETRIED, {}) for run_id in ids]
    await scene.parts.store.create_many(submits, scene.parts.clock())
    sent = 0
    names = ("node_id", "handler", "config", "inputs", "params", "place", "timeout_seconds")
    names += ("resource_tag", "deferred", "cache", "traceparent", "more")
    for name in names:
        for junk in (*JUNK, '[[["x"], 1, {}]]'):
            run_id = ids[sent]
            right: dict[str, Any] = {
                "run_id": run_id,
                "node_id": "a",
                "token": str(await scene.token(run_id)),
                "handler": "output",
                "config": "{}",
                "inputs": "{}",
            }
            fields = [part for item in (right | {name: junk}).items() for part in item]
            await scene.call("XADD", stream_of("output"), "*", *fields)
            sent += 1
    await scene.until(lambda: is_settled(scene, stream_of("output"), WORKERS))
    await scene.parts.orchestrator.timers.moved(ids, 1)
    for run_id in ids:  # the dead letters are sent again, as they should be
        assert await scene.status(run_id) in (RunStatus.COMPLETED, RunStatus.FAILED)


async def test_a_result_that_a_script_cannot_apply_becomes_a_dead_letter(
    scene: BrokenRunServices,
) -> None:
    """And the results that came with it are applied."""
    await scene.parts.store.create_many([Submit("bad", RETRIED, {})], scene.parts.clock())
    await scene.call("DEL", "wf:{bad}:nodes")
    await scene.call("SET", "wf:{bad}:nodes", "junk")
    reported = Fail("bad", "a", Token(1, 1, 1), {"type": "E", "message": "m"})
    await scene.submit("good")
    for _ in range(3):
        await scene.call("XADD", RESULTS, "*", *result_fields(reported))
    assert await scene.status("good") is RunStatus.COMPLETED
    await scene.until(lambda: is_settled(scene, RESULTS, ORCHESTRATORS))
    letters = [orjson.loads(one) for one in await scene.call("LRANGE", DEAD, 0, -1)]
    assert [letter["fields"]["run_id"] for letter in letters] == ["bad"] * 3
    assert all("WRONGTYPE" in letter["reason"] for letter in letters)


async def test_a_malformed_stop_message_is_ignored(scene: BrokenRunServices) -> None:
    long = graph({"a": []}, a={"handler": "sleep", "config": {"seconds": 60}})
    await scene.submit("r", long)
    await scene.until(lambda: is_running(scene))
    for token in (*TOKENS, "", "junk"):
        await scene.call("XADD", STOPS, "*", "run_id", "r", "node_id", "a", "token", token)
    await scene.call("XADD", STOPS, "*", "run_id", "r")
    await scene.call("XADD", STOPS, "*", "run_id", b"\xff", "node_id", "a", "token", "1.1.1")
    await scene.parts.orchestrator.apply([Cancel("r")])
    assert await scene.status("r") is RunStatus.CANCELLED
    scene.check()


async def is_running(scene: BrokenRunServices) -> bool:
    return bool(await scene.parts.store.running(["r"]))


@pytest.mark.parametrize(
    ("who", "duty"), [(RedisLeases, "renew"), (WorkerRegistry, "beat"), (StopBroadcast, "next")]
)
async def test_a_worker_ends_when_one_of_its_duties_fails(
    scene: BrokenRunServices, monkeypatch: pytest.MonkeyPatch, who: type, duty: str
) -> None:
    """One that renewed no leases any more would go on to claim, and lose all of it."""

    async def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(who, duty, fails)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(asyncio.shield(scene.services[1]), 10)
