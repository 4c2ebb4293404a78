"""`runs verify` where many move a run and only its events are kept: in Redis, in the archive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from random import Random
from typing import Any

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.audit.event_check import audit
from dovetail.core.errors import NotFound
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.transitions import Cancel, Claim, Complete, Fail, Retry, Submit, TakeOver
from dovetail.engine.commands import Commands
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import describe
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.store import RedisStore
from dovetail.wiring.distributed import commanding, orchestrate, working

from ..contracts.stores import read
from ..core.drawn import CONDITIONS, KINDS, TOKENS, DrawnAction, Meaning
from ..core.walk import graph
from .archive_world import World, a_world


async def differences(store: RedisStore, run_id: str) -> list[str]:
    run = await store.load(run_id)
    events = await read(store, run_id, run.seq)
    return audit(Submit(run_id, run.graph, run.params, run.version), events, run)


# ── many move one run ────────────────────────────────────────────────────────────────────


def drawn(random: Random) -> Any:
    """A workflow in which most nodes wait for verdicts, some for room, and some for a retry."""
    names = [f"n{place}" for place in range(9)]
    parents = {
        name: random.sample(names[:place], min(place, random.randint(0, 2)))
        for place, name in enumerate(names)
    }
    more: dict[str, dict[str, Any]] = {}
    for name, above in parents.items():
        if above and random.random() < 0.6:
            more[name] = {"condition": random.choice(CONDITIONS).format(parent=above[0])}
        elif random.random() < 0.3:
            more[name] = {"max_retries": 2}
        if random.random() < 0.3:
            more[name] = {**more.get(name, {}), "allow_failure": True}
    policy = random.choice(["continue", "continue", "fail_fast"])
    return graph(parents, on_failure=policy, max_concurrency=random.choice([None, 2, 3]), **more)


async def meddle(store: RedisStore, run_id: str, random: Random, clock: count[int]) -> None:
    """One of many that see the run as it was a moment ago, and do what they like to it."""
    meaning = Meaning(run_id, {})
    for _ in range(12):
        run = await store.load(run_id)
        meaning.learn(run)
        now = 1000.0 + next(clock) / 4
        moves = []
        for _ in range(random.randint(1, 3)):
            places = random.randrange(41), random.randrange(len(TOKENS))
            move = meaning.of(DrawnAction(random.randrange(len(KINDS)), *places, 0.0), run, now)
            moves.append(move._replace(behind=0.0) if isinstance(move, TakeOver) else move)
        await store.apply(moves, now)


async def test_any_concurrent_transitions_of_a_run_obey_the_rules(redis_url: str) -> None:
    random = Random(4)
    async with AsyncExitStack() as stack:
        pipes = [await stack.enter_async_context(PipelinedRedis(redis_url)) for _ in range(6)]
        stores = [RedisStore(pipe) for pipe in pipes]
        late = 0
        for number in range(20):
            run_id, clock = f"r{number}", count()
            await stores[0].create(
                Submit(run_id, drawn(random), {"p": 1}), 1000.0 + next(clock) / 4
            )
            await asyncio.gather(*(meddle(store, run_id, random, clock) for store in stores))
            assert await differences(stores[0], run_id) == []
            run = await stores[0].load(run_id)
            late += decided_late(await read(stores[0], run_id, run.seq))
        assert late, "verdicts came while others moved the run"


def decided_late(events: list[Event]) -> int:
    """Verdicts that do not stand beside what they are on."""
    verdicts = [e for e in events if (e.data or {}).get("reason") == "condition_false"]
    return sum(
        events[e.seq - 2].time != e.time or events[e.seq - 2].type == "node.started"
        for e in verdicts
    )


async def test_two_conditions_that_are_pending_at_once_are_both_decided(redis_url: str) -> None:
    async with PipelinedRedis(redis_url) as pipe, PipelinedRedis(redis_url) as other:
        slow, quick = RedisStore(pipe), RedisStore(other)
        ask = {
            "c": {"condition": "{{ a.n == 1 }}"},
            "d": {"condition": "{{ b.n == 1 }}"},
        }
        nodes: dict[str, list[str]] = {"a": [], "b": [], "c": ["a"], "d": ["b"]}
        await slow.create(Submit("r", graph(nodes, **ask), {}), 1.0)
        run = await slow.load("r")
        tokens = {name: run.node(name).token for name in "ab"}
        await slow.apply([Claim("r", name, tokens[name], "w", 10.0) for name in "ab"], 2.0)
        settle, gate = slow._settle, asyncio.Event()

        async def settle_late(*args: Any) -> Any:
            await gate.wait()
            return await settle(*args)

        slow._settle = settle_late  # type: ignore[method-assign]
        task = asyncio.create_task(slow.apply([Complete("r", "a", tokens["a"], {"n": 1})], 3.0))
        while (await quick.load("r")).node("a").status != "COMPLETED":
            await asyncio.sleep(0)
        assert await differences(quick, "r") == [], "a run may be looked at before its verdicts"
        await quick.apply([Complete("r", "b", tokens["b"], {"n": 1})], 4.0)
        gate.set()
        await task
        assert [(await quick.load("r")).node(name).status for name in "cd"] == ["QUEUED"] * 2
        assert await differences(quick, "r") == []


# ── through the commands ─────────────────────────────────────────────────────────────────


@pytest.fixture
async def commands(redis_url: str) -> AsyncIterator[Commands]:
    async with commanding(Settings(redis_url=redis_url)) as made:
        yield made


FLOW = {
    "name": "flow",
    "on_failure": "continue",
    "nodes": [
        {"id": "a", "handler": "input"},
        {"id": "b", "handler": "flaky", "dependencies": ["a"], "max_retries": 1}
        | {"retry": {"base_delay_seconds": 0.05}},
        {"id": "c", "handler": "input", "dependencies": ["a"], "condition": "{{ params.n > 9 }}"},
        {"id": "d", "handler": "input", "dependencies": ["a"], "resource_tag": "slow"},
        {"id": "e", "handler": "input", "dependencies": ["a"], "resource_tag": "slow"},
        {"id": "f", "handler": "fail", "dependencies": ["d"]},
        {"id": "g", "handler": "input", "dependencies": ["c", "f"]},
    ],
}


async def flaky(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    if ctx.attempt == 1:
        raise ValueError("not yet")
    return {}


async def test_a_run_driven_by_an_orchestrator_and_a_worker_is_verified(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, drain_seconds=1)
    registry = builtin_registry(settings)
    registry.add(describe(flaky, name="flaky"))
    orchestrator = asyncio.create_task(orchestrate(settings))
    async with commanding(settings, registry) as commands, working(settings, registry):
        run_id, _ = await commands.trigger(FLOW, {"n": 1})
        run = await asyncio.wait_for(commands.wait(run_id), 20)
        assert run.status == "FAILED"
        assert await commands.verify(run_id) == []
        await commands.retry(run_id, "d")
        await asyncio.wait_for(commands.wait(run_id), 20)
        assert await commands.verify(run_id) == []
    orchestrator.cancel()
    await asyncio.gather(orchestrator, return_exceptions=True)


async def driven(commands: Commands) -> RunState:
    """A run with a bit of everything, moved by hand, that goes on."""
    nodes = [
        {"id": "a", "handler": "input", "max_retries": 1},
        {"id": "b", "handler": "input", "dependencies": ["a"], "condition": "{{ a.n == 2 }}"},
        {"id": "c", "handler": "input", "dependencies": ["a"]},
        {"id": "d", "handler": "input", "dependencies": ["c"]},
    ]
    run_id, _ = await commands.trigger({"name": "t", "nodes": nodes})
    await commands.cancel(run_id)
    await commands.retry(run_id)
    for name in "abc":
        run = await commands.store.load(run_id)
        start = (run_id, name, run.node(name).token)
        now = commands.clock()
        await commands.store.apply([Claim(*start, "w", now + 10)], now)
        await commands.store.apply([Complete(*start, {"n": 2})], commands.clock())
    return await commands.store.load(run_id)


async def test_an_unfinished_run_is_verified(commands: Commands) -> None:
    run = await driven(commands)
    assert not run.finished
    assert await commands.verify(run.id) == []
    with pytest.raises(NotFound):
        await commands.verify("nobody")


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("node.started", {4: 2}, "the rules make it node.started of 'a' (attempt 1)"),
        ("node.completed", {1: "node.cached"}, "the log has node.cached of 'a' (attempt 1)"),
        ("node.cancelled", {5: {"reason": "run_failed"}}, "{'reason': 'run_cancelled'}"),
        ("run.retried", {2: 3}, "run.retried has epoch 3 in the log, 2 by the rules"),
        ("node.queued", {3: 1}, "the log has node.queued of 'b' (attempt 0)"),
    ],
)
async def test_a_changed_event_in_redis_is_detected(
    commands: Commands, redis_url: str, kind: str, change: dict[int, Any], sentence: str
) -> None:
    run = await driven(commands)
    log = keys_of(run.id)[5]
    async with PipelinedRedis(redis_url) as pipe:
        events = [orjson.loads(text) for text in await pipe.call("LRANGE", log, 0, -1)]
        place = next(at for at, event in enumerate(events) if event[1] == kind)
        for field, value in change.items():
            events[place][field] = value
        await pipe.call("LSET", log, place, orjson.dumps(events[place]))
    (difference,) = await commands.verify(run.id)
    assert sentence in difference


async def test_an_event_that_redis_lost_is_detected(commands: Commands, redis_url: str) -> None:
    run = await driven(commands)
    log = keys_of(run.id)[5]
    async with PipelinedRedis(redis_url) as pipe:
        for place in range(run.seq):
            (text,) = await pipe.call("LRANGE", log, place, place)
            await pipe.call("LSET", log, place, b"gone")
            await pipe.call("LREM", log, 1, b"gone")
            assert await commands.verify(run.id), f"without {text!r}"
            if place == run.seq - 1:
                break
            (after,) = await pipe.call("LRANGE", log, place, place)
            await pipe.call("LINSERT", log, "BEFORE", after, text)
    assert run.seq > 10


async def test_a_changed_state_in_redis_is_detected(commands: Commands, redis_url: str) -> None:
    run = await driven(commands)
    nodes = keys_of(run.id)[1]
    async with PipelinedRedis(redis_url) as pipe:
        kept, counts = await pipe.call("HMGET", nodes, 0, "counts")
        await pipe.call("HSET", nodes, 0, kept.replace(b"C|", b"F|", 1))
        await pipe.call("HSET", nodes, "counts", counts.replace(b"|1|", b"|2|"))
    assert await commands.verify(run.id) == [
        "node 'a' is kept with status FAILED, the log makes it COMPLETED",
        "the run counts 0 failed nodes; there are 1",
        "the run counts 2 active nodes; there are 1",
    ]


# ── the archive ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def world(redis_url: str, postgres_url: str) -> AsyncIterator[World]:
    async with a_world(redis_url, postgres_url) as made:
        yield made


async def test_a_run_that_redis_dropped_is_verified_from_the_archive(
    world: World, redis_url: str, postgres_url: str
) -> None:
    ask = {"condition": "{{ a.of == 'nobody' }}"}
    nodes: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["a"], "d": ["c"]}
    run_id = await world.begin(graph(nodes, b=ask))
    await world.do(run_id, "a")
    await world.orchestrator.apply([Cancel(run_id)])
    await world.orchestrator.apply([Retry(run_id)])
    await world.start(run_id, "c")
    token = (await world.load(run_id)).node("c").token
    await world.orchestrator.apply([Fail(run_id, "c", token, {"type": "x", "message": "y"})])
    await world.archiver.archive_what_moved()
    settings = Settings(redis_url=redis_url, database_url=postgres_url)
    async with commanding(settings) as commands:
        assert await commands.verify(run_id) == []
        await world.pipe.call("DEL", *keys_of(run_id))
        assert (await commands.store.load(run_id)).finished
        assert await commands.verify(run_id) == []
        await world.pool.transact(
            lambda connection: connection.execute(
                "UPDATE events SET event = convert_to(replace(convert_from(event, 'UTF8'), "
                "'node.skipped', 'node.queued'), 'UTF8')"
            )
        )
        (difference,) = await commands.verify(run_id)
        assert "the rules make it node.skipped of 'b'" in difference


async def test_an_accepted_run_that_was_not_created_has_nothing_to_verify_yet(
    world: World, redis_url: str, postgres_url: str
) -> None:
    accepted = await world.accept(graph({"a": []}))
    async with commanding(Settings(redis_url=redis_url, database_url=postgres_url)) as commands:
        assert await asyncio.wait_for(commands.verify(accepted.run_id), 10) == []
        (node,) = (await commands.explain(accepted.run_id))["nodes"]
        assert (node["code"], node["status"]) == ("queued", "PENDING")
