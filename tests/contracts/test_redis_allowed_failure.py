"""A node that is allowed to fail, on Redis: its run stays on the fast path, and what a child of it
reads comes from Redis."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.dag import Graph
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Fail,
    Reap,
    Submit,
    TakeOver,
    Transition,
)
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.store import RedisStore

from ..core.walk import BROKEN, graph
from .twins import Twins, in_silence

ALLOWED = {"allow_failure": True}
#   a (may fail) ─┐
#   b ────────────┴─ join ─ end
NODES: dict[str, list[str]] = {"a": [], "b": [], "join": ["a", "b"], "end": ["join"]}


async def started(store: RedisStore, of: Graph, *names: str) -> None:
    await store.create(Submit("r", of, {}), 1.0)
    run = await store.load("r")
    await store.apply([Claim("r", name, run.node(name).token, "w", 60.0) for name in names], 2.0)


async def failed(store: RedisStore, name: str) -> Decision:
    token = (await store.load("r")).node(name).token
    (decision,) = await store.apply([Fail("r", name, token, dict(BROKEN))], 3.0)
    return decision


async def completed(store: RedisStore, name: str, output: Any = None) -> Decision:
    token = (await store.load("r")).node(name).token
    (decision,) = await store.apply([Complete("r", name, token, output)], 4.0)
    return decision


async def is_on_the_fast_path(pipe: PipelinedRedis) -> bool:
    counts: bytes = await pipe.call("HGET", keys_of("r")[1], "counts")
    return counts.split(b"|")[2].startswith(b"1")


@pytest.mark.parametrize("policy", ["fail_fast", "continue"])
async def test_a_run_stays_on_the_fast_path_after_an_allowed_failure(
    redis_url: str, policy: str
) -> None:
    async with PipelinedRedis(redis_url) as pipe:
        store = RedisStore(pipe)
        await started(store, graph(NODES, on_failure=policy, a=ALLOWED), "a", "b")
        assert not (await failed(store, "a")).dispatch
        assert await is_on_the_fast_path(pipe)
        (order,) = (await completed(store, "b")).dispatch
        assert order.run.graph.nodes[order[1]].id == "join"
        for name in ("join", "end"):
            token = (await store.load("r")).node(name).token
            await store.apply([Claim("r", name, token, "w", 60.0)], 5.0)
            decision = await completed(store, name)
        assert decision.ended
        run = await store.load("r")
        assert (run.status, run.failed, run.error) == ("COMPLETED", 0, None)


async def test_a_run_whose_failure_is_not_allowed_leaves_the_fast_path(redis_url: str) -> None:
    async with PipelinedRedis(redis_url) as pipe:
        store = RedisStore(pipe)
        of = graph(NODES, on_failure="continue", a=ALLOWED)
        await started(store, of, "a", "b")
        await failed(store, "b")
        assert not await is_on_the_fast_path(pipe)


async def test_a_child_that_is_published_reads_the_status_and_the_error(redis_url: str) -> None:
    async with PipelinedRedis(redis_url) as pipe:
        store = RedisStore(pipe)
        await started(store, graph(NODES, a=ALLOWED), "a", "b")
        await failed(store, "a")
        decision = await completed(store, "b", {"n": 1})
        (scope,) = await store.scopes({"r": decision.dispatch})
        assert scope.get("a") == ("a", "FAILED", None, BROKEN)
        assert scope.inputs(decision.dispatch[0][1]) == {"b": {"n": 1}}


# ── event for event as in the core ───────────────────────────────────────────────────────


class Story:
    """One run on Redis and in the core, moved by hand."""

    def __init__(self, store: RedisStore, of: Graph) -> None:
        self.twins = Twins([store], of, in_silence)

    async def happens(self, *moves: Transition, wait: float = 1.0) -> None:
        await self.twins.together(list(moves), wait)

    async def start(self, *names: str) -> None:
        now = self.twins.now + 10.0
        await self.happens(*(Claim(*self.start_of(name), "w", now) for name in names))

    async def fail(self, name: str) -> None:
        await self.happens(Fail(*self.start_of(name), dict(BROKEN)))

    async def complete(self, name: str, output: Any = None) -> None:
        await self.happens(Complete(*self.start_of(name), output))

    def start_of(self, name: str) -> Any:
        return self.twins.id, name, self.twins.core.node(name).token

    @property
    def states(self) -> dict[str, str]:
        run = self.twins.core
        return {spec.id: run.node(spec.id).status.value for spec in run.graph.nodes}


IF_FAILED = {"condition": "{{ a.status == 'FAILED' }}"}


async def test_a_broken_condition_of_a_node_that_may_fail_lets_its_children_run(
    redis_url: str,
) -> None:
    broken = {**ALLOWED, "condition": "{{ a.x.y }}"}
    nodes = {"a": [], "b": ["a"], "c": ["b"], "d": ["b"], "e": ["d"]}
    of = graph(nodes, b=broken, d={"condition": "{{ b.status == 'COMPLETED' }}"})
    async with PipelinedRedis(redis_url) as pipe:
        story = Story(RedisStore(pipe), of)
        await story.twins.begin()
        await story.start("a")
        await story.complete("a", {})
        await story.twins.end()
        ended = {"a": "COMPLETED", "b": "FAILED", "c": "QUEUED", "d": "SKIPPED", "e": "SKIPPED"}
        assert story.states == ended


async def test_a_node_that_failed_along_with_its_parent_is_counted_by_a_cancel(
    redis_url: str,
) -> None:
    nodes = {"x": [], "along": ["x"], "own": [], "runs": []}
    of = graph(nodes, along=ALLOWED, own=ALLOWED)
    async with PipelinedRedis(redis_url) as pipe:
        story = Story(RedisStore(pipe), of)
        await story.twins.begin()
        await story.start("x", "own", "runs")
        await story.fail("own")
        await story.fail("x")
        await story.happens(Cancel(story.twins.id))
        await story.twins.end()
        assert story.twins.core.failed == 2
        assert story.states["runs"] == "CANCELLED"


@pytest.mark.parametrize("limit", [None, 1, 2])
async def test_children_with_conditions_follow_nodes_that_were_lost_for_good(
    redis_url: str, limit: int | None
) -> None:
    once = {**ALLOWED, "delivery": "at_most_once"}
    nodes = {"d": ["b"], "a": [], "b": [], "c": ["a"], "e": ["a", "b"], "f": []}
    more = {"a": once, "b": once, "c": IF_FAILED, "d": {"condition": "{{ b.x.y }}", **ALLOWED}}
    async with PipelinedRedis(redis_url) as pipe:
        for reaped in (True, False):
            story = Story(RedisStore(pipe), graph(nodes, max_concurrency=limit, **more))
            await story.twins.begin()
            ready = [name for name in ("a", "b", "f") if story.twins.core.node(name).phase]
            published = [n for n in ready if story.twins.core.node(n).phase == "published"]
            await story.start(*published)
            if reaped:
                moves = [Reap(*story.start_of(name), 3) for name in published]
                await story.happens(*moves, wait=20.0)
            else:
                await story.happens(TakeOver(story.twins.id, 3, 0.5), wait=20.0)
            await story.twins.end()
            assert story.states["a"] == "FAILED"
            assert story.states["c"] == "QUEUED"
