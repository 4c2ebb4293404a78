"""What a store of many processes promises beyond `Store`: many runs or starts in one go.

Each is a short cut for something that a store does one by one, and must end the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import pytest

from dovetail.core.dag import Graph
from dovetail.core.events import Token
from dovetail.core.run import RunState
from dovetail.core.step import begin, step
from dovetail.core.transitions import Cancel, Claim, Complete, Decision, Fail, Retry, Submit
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis import scope
from dovetail.stores.redis.store import RedisStore

from ..core.walk import graph
from .stores import new_run_id, plain, read, redis_url
from .twins import decided

T = 1000.0
SHAPES: dict[str, Graph] = {
    "plain": graph({"a": [], "b": [], "c": ["a", "b"]}),
    "narrow": graph({f"n{i}": [] for i in range(6)}, max_concurrency=2),
    "conditional": graph(
        {"a": [], "b": [], "c": ["a"]}, a={"condition": False}, b={"condition": "{{ params.p }}"}
    ),
    "skipped": graph({"a": [], "b": ["a"]}, a={"condition": False}),
    "wide": graph({f"n{i}": [] for i in range(2500)}),
}


@pytest.fixture
async def stores() -> AsyncIterator[list[RedisStore]]:
    """Two handles, as two processes have them."""
    async with PipelinedRedis(redis_url()) as one, PipelinedRedis(redis_url()) as other:
        await one.call("FLUSHDB")
        yield [RedisStore(one), RedisStore(other)]


def task(run: RunState, name: str, token: Token | None = None, *, placed: bool = True) -> Task:
    place = run.graph.index.get(name) if placed else None
    start = (run.id, name, token or run.node(name).token)
    return Task(*start, "h", {}, {}, {}, 1.0, place=place)


async def make(store: RedisStore, shape: Graph) -> RunState:
    run_id = new_run_id()
    await store.create_many([Submit(run_id, shape, {"p": 1})], T)
    return await store.load(run_id)


async def test_runs_created_in_one_call_equal_the_runs_of_the_core(
    stores: list[RedisStore],
) -> None:
    submits = [Submit(new_run_id(), shape, {"p": 1}) for shape in SHAPES.values() for _ in "ab"]
    made = await stores[0].create_many(submits, T)
    for submit, theirs, nonce in zip(submits, made, count(1), strict=False):
        run, ours = begin(submit, T, nonce)
        assert decided(theirs) == decided(ours)
        assert plain(await stores[1].load(submit.run_id)) == plain(run)
        assert await read(stores[1], submit.run_id, run.seq) == ours.events


async def test_creating_an_existing_run_in_redis_changes_nothing(stores: list[RedisStore]) -> None:
    submits = [Submit(new_run_id(), shape, {"p": 1}) for shape in SHAPES.values()]
    await stores[0].create_many(submits, T)
    before = [plain(await stores[0].load(submit.run_id)) for submit in submits]
    fresh = Submit(new_run_id(), SHAPES["plain"], {})
    *again, new = await stores[1].create_many([*submits, fresh], T + 1)
    assert not any(again)
    assert len(new.dispatch) == 2
    assert [plain(await stores[0].load(submit.run_id)) for submit in submits] == before


@pytest.mark.parametrize("placed", [True, False])
async def test_starts_claimed_in_one_call_equal_starts_claimed_one_by_one(
    stores: list[RedisStore], placed: bool
) -> None:
    one, other = [await make(stores[0], SHAPES["wide"]) for _ in "ab"]
    names = [f"n{i}" for i in range(0, 2500, 2)]
    tasks = [task(run, name, placed=placed) for name in names for run in (one, other)]
    assert all(await stores[1].claim(tasks, "w|1", T + 11, T + 1))
    for run in (one, other):
        core, _ = begin(Submit(run.id, run.graph, {"p": 1}), T, 1)
        events = []
        for name in names:
            token = core.node(name).token
            claim = Claim(run.id, name, token, "w/1", T + 11)
            events += step(core, claim, T + 1, 2).events
        assert plain(await stores[0].load(run.id)) == plain(core)
        assert await read(stores[0], run.id, len(events), core.seq - len(events)) == events


async def test_a_start_is_granted_once_for_any_number_of_claims(
    stores: list[RedisStore],
) -> None:
    run = await make(stores[0], SHAPES["plain"])
    twice = [task(run, "a"), task(run, "a"), task(run, "b")]
    assert await stores[0].claim(twice, "w", T + 10, T) == [True, False, True]
    assert await stores[0].claim(twice, "w", T + 11, T + 1) == [False, False, False]
    assert (await stores[0].load(run.id)).seq == run.seq + 2


async def test_a_claim_of_a_node_that_may_not_start_is_refused(stores: list[RedisStore]) -> None:
    run = await make(stores[0], SHAPES["narrow"])
    token = run.node("n0").token
    strangers = [
        task(run, "n0", token._replace(nonce=token.nonce ^ 1)),
        task(run, "n0", token._replace(attempt=2)),
        task(run, "n0", token._replace(epoch=2)),
        task(run, "n5"),  # held
        task(run, "nobody", token)._replace(place=None),
        task(run, "n0")._replace(run_id="nobody"),
        task(run, "n0")._replace(run_id="nobody", place=None),
    ]
    before = plain(run)
    assert not any(await stores[0].claim(strangers, "w", T + 10, T))
    assert plain(await stores[0].load(run.id)) == before
    await stores[0].apply([Cancel(run.id)], T)
    assert await stores[0].claim([task(run, "n0")], "w", T + 10, T) == [False]


async def test_of_workers_that_claim_the_same_starts_each_start_has_one_worker(
    stores: list[RedisStore],
) -> None:
    run = await make(stores[0], SHAPES["wide"])
    tasks = [task(run, f"n{i}") for i in range(300)]
    asked = [stores[at % 2].claim(tasks[at:] + tasks[:at], f"w{at}", T + 10, T) for at in range(8)]
    granted = [
        [tasks[(at + k) % 300].node_id for k, mine in enumerate(flags) if mine]
        for at, flags in enumerate(await asyncio.gather(*asked))
    ]
    assert sorted(name for one in granted for name in one) == sorted(t.node_id for t in tasks)
    now = await stores[1].load(run.id)
    for at, names in enumerate(granted):
        assert {now.node(name).worker for name in names} <= {f"w{at}"}


async def test_a_store_without_events_returns_decisions_without_node_events() -> None:
    async with PipelinedRedis(redis_url()) as pipe:
        store = RedisStore(pipe, events=False)
        run = await make(store, SHAPES["plain"])
        core, _ = begin(Submit(run.id, run.graph, {"p": 1}), T, 1)
        for names in (["a", "b"], ["c"]):
            run = await store.load(run.id)
            await store.claim([task(run, name) for name in names], "w", T + 10, T)
            results = [Complete(run.id, name, run.node(name).token, name) for name in names]
            theirs = await store.apply(results, T)
            for name, decision in zip(names, theirs, strict=True):
                start = (run.id, name, core.node(name).token)
                step(core, Claim(*start, "w", T + 10), T, 2)
                ours = step(core, Complete(*start, name), T, 3)
                assert orders(decision) == orders(ours)
                assert of_the_run(decision) == of_the_run(ours)
        last = await store.load(run.id)
        assert plain(last) | {"seq": 0} == plain(core) | {"seq": 0}
        assert [event.type for event in await read(store, run.id, last.seq)][-1] == "run.completed"


def orders(decision: Decision) -> dict[str, Any]:
    return {**decided(decision), "events": None}


def of_the_run(decision: Decision) -> list[str]:
    return [event.type for event in decision.events if event.node is None]


async def test_only_the_result_of_this_start_counts_and_only_once(
    stores: list[RedisStore],
) -> None:
    run = await make(stores[0], SHAPES["plain"])
    await stores[0].claim([task(run, "a"), task(run, "b")], "w", T + 10, T)
    a, b = run.node("a").token, run.node("b").token
    results = [
        Complete(run.id, "a", a, 1),
        Complete(run.id, "a", a, 2),
        Complete(run.id, "b", b._replace(nonce=b.nonce ^ 1), 3),
    ]
    for moves in (results, results[2:]):  # also where nothing before it is refused
        theirs = await stores[0].apply(moves, T)
        assert not any(decision.dispatch for decision in theirs)
    now = await stores[1].load(run.id)
    assert [now.node(name).status for name in "abc"] == ["COMPLETED", "RUNNING", "PENDING"]
    assert (now.node("a").output, now.node("c").waiting) == (1, 1)


async def test_a_failure_among_results_is_applied_in_order(stores: list[RedisStore]) -> None:
    """The short cut ends where something is not plain; what comes after it still follows."""
    run = await make(stores[0], SHAPES["plain"])
    await stores[0].claim([task(run, "a"), task(run, "b")], "w", T + 10, T)
    a, b = run.node("a").token, run.node("b").token
    theirs = await stores[0].apply(
        [
            Complete(run.id, "a", a, 1),
            Complete(run.id, "a", a, 2),
            Fail(run.id, "b", b, {"type": "E", "message": "m"}),
            Complete(run.id, "b", b, 3),
        ],
        T,
    )
    assert [bool(decision) for decision in theirs] == [True, False, True, False]
    ended = await stores[1].load(run.id)
    assert (ended.status, ended.node("a").output, ended.node("c").reason) == (
        "FAILED",
        1,
        "dependency_failed",
    )


class Stalling(RedisStore):
    """Stands still between asking a condition and telling the verdict."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def _call(self, run_id: str, requests: Sequence[Any], graph: bytes) -> Any:
        if requests[0]["kind"] == "settle" and self.meanwhile is not None:
            going_on, self.meanwhile = self.meanwhile, None
            await going_on()
        return await super()._call(run_id, requests, graph)


async def test_a_condition_value_of_an_earlier_epoch_decides_nothing(
    stores: list[RedisStore],
) -> None:
    shape = graph({"a": [], "b": ["a"]}, b={"condition": "{{ a == 1 }}"})
    async with PipelinedRedis(redis_url()) as pipe, PipelinedRedis(redis_url()) as another:
        slow, dying = Stalling(pipe), Stalling(another)
        run = await make(slow, shape)

        async def complete(store: RedisStore, output: int) -> None:
            now = await stores[0].load(run.id)
            assert await store.claim([task(now, "a")], "w", T + 10, T) == [True]
            await store.apply([Complete(run.id, "a", now.node("a").token, output)], T)

        async def die() -> None:
            raise InterruptedError

        async def run_again() -> None:
            await stores[0].apply([Cancel(run.id), Retry(run.id, "a")], T)
            dying.meanwhile = die
            with pytest.raises(InterruptedError):
                await complete(dying, 2)

        slow.meanwhile = run_again
        await complete(slow, 1)
    assert (await stores[0].load(run.id)).node("b").reason == "condition_false"


async def test_nodes_that_two_stores_make_ready_at_once_are_all_decided(
    stores: list[RedisStore],
) -> None:
    shape = graph(
        {"a": [], "b": [], "c": ["a"], "d": ["b"]},
        c={"condition": "{{ a == 1 }}"},
        d={"condition": "{{ b == 1 }}"},
    )
    for _ in range(5):
        run = await make(stores[0], shape)
        await stores[0].claim([task(run, "a"), task(run, "b")], "w", T + 10, T)
        decisions = await asyncio.gather(
            *(
                store.apply([Complete(run.id, name, run.node(name).token, 1)], T)
                for store, name in zip(stores, "ab", strict=True)
            )
        )
        published = [order.node_index for (one,) in decisions for order in one.dispatch]
        assert sorted(published) == [2, 3]


async def test_a_result_counts_even_if_its_run_was_evicted_by_another_run_of_the_same_call(
    stores: list[RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many runs are known at once, and new ones take the places of the oldest."""
    monkeypatch.setattr(scope, "MAX_CACHED_RUNS", 2)
    one, other = stores
    runs = [await make(store, SHAPES["plain"]) for store in (one, one, other)]
    tasks = [task(run, "a") for run in runs]
    assert all(await one.claim(tasks, "w", T + 10, T))
    results = [Complete(run.id, "a", run.node("a").token, 1) for run in runs]
    assert all(decision.changed for decision in await one.apply(results, T + 1))
