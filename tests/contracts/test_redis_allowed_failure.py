"""A node that is allowed to fail, on Redis: its run stays on the fast path, and what a child of it
reads comes from Redis."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.dag import Graph
from dovetail.core.transitions import Claim, Complete, Decision, Fail, Submit
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.store import RedisStore, keys_of

from ..core.walk import BROKEN, graph

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
