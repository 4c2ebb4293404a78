"""What a run may keep in all, in every store: counted alike, and never passed."""

from __future__ import annotations

import pytest

from dovetail.core.run import Phase
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Claim, Complete, Retry, Submit, Transition
from dovetail.engine.ports import Store
from dovetail.stores.redis.codec import keys_of
from dovetail.stores.redis.store import RedisStore

from ..core.walk import graph
from .stores import STORES, Peers, new_run_id
from .test_store_promises import T
from .twins import Twins, in_silence

WIDE = {**{f"a{i}": [] for i in range(8)}, "z": [f"a{i}" for i in range(8)]}


def published(twins: Twins) -> list[tuple[str, str, object]]:
    nodes = zip(twins.graph.nodes, twins.core.nodes, strict=True)
    return [(twins.id, spec.id, node.token) for spec, node in nodes if node.phase]


@pytest.mark.parametrize("fields", [{}, {"on_failure": "continue"}])
async def test_in_a_batch_the_outputs_beyond_the_limit_fail_their_nodes(
    peers: Peers, fields: dict[str, str]
) -> None:
    """Also within one call: the count goes on from one result to the next."""
    twins = Twins(peers, graph(WIDE, **fields), in_silence, max_bytes=45)  # type: ignore[arg-type]
    await twins.begin()
    starts = published(twins)
    await twins.together([Claim(*start, "w", T + 100) for start in starts], 1.0)  # type: ignore[arg-type]
    results: list[Transition] = [Complete(*start, "x" * 8) for start in starts]  # type: ignore[arg-type]
    await twins.together([*results, results[0]], 1.0)
    assert twins.core.kept_bytes == 40
    done = [node.status for node in twins.core.nodes[:8]]
    assert done == [NodeStatus.COMPLETED] * 4 + [NodeStatus.FAILED] * 4
    await twins.together([Retry(twins.id, "a0")], 1.0)
    assert twins.core.kept_bytes == 30
    await twins.end()


async def test_an_output_above_the_limit_of_its_run_is_not_cached(store: Store) -> None:
    run_id = new_run_id()
    submit = Submit(run_id, graph({"a": []}), {}, max_bytes=5)
    ((_, _, token, _),) = (await store.create(submit, T)).dispatch
    key = new_run_id()
    done = Complete(run_id, "a", token, "too long", (key, 60.0))
    await store.apply([Claim(run_id, "a", token, "w", T + 10), done], T)
    assert (await store.load(run_id)).node("a").status is NodeStatus.FAILED
    assert await store.recall(key, T) is None


async def test_a_run_in_redis_from_an_earlier_version_continues_without_a_limit() -> None:
    async with STORES["redis"](1) as (store,):
        assert isinstance(store, RedisStore)
        run_id = new_run_id()
        ((_, _, token, _),) = (await store.create(Submit(run_id, graph({"a": []}), {}), T)).dispatch
        assert await store._redis.call("HGET", keys_of(run_id)[1], "counts") == b"1|1|1"
        limited = RedisStore(store._redis, max_run_bytes=1)
        done = Complete(run_id, "a", token, "anything")
        await limited.apply([Claim(run_id, "a", token, "w", T + 10), done], T)
        run = await limited.load(run_id)
        assert run.node("a").status is NodeStatus.COMPLETED
        assert run.max_bytes is None


async def test_a_store_fixes_the_byte_limit_of_the_runs_that_it_creates() -> None:
    async with STORES["redis"](1) as (store,):
        assert isinstance(store, RedisStore)
        run_id, own = new_run_id(), new_run_id()
        limited = RedisStore(store._redis, max_run_bytes=7)
        await limited.create(Submit(run_id, graph({"a": []}), {}), T)
        await limited.create(Submit(own, graph({"a": []}), {}, max_bytes=3), T)
        other = RedisStore(store._redis, max_run_bytes=9)
        assert (await other.load(run_id)).max_bytes == 7
        assert (await other.load(own)).max_bytes == 3
        assert (await other.load(run_id)).node("a").phase is Phase.PUBLISHED
