"""Conditions on Redis: decided as the core does, at a price that does not grow with the run.

A store elsewhere has the whole run at hand. This one reads what a condition names, and tells Redis
only the part of the graph that is near; a skip that goes on beyond that is carried on from there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, note

from dovetail.core.dag import Graph
from dovetail.core.transitions import Claim, Complete, Submit
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis import codec
from dovetail.stores.redis import store as redis_store
from dovetail.stores.redis.store import RedisStore

from ..core.drawn import DrawnAction, deeds, examples, graphs
from ..core.walk import graph
from ..servers.redis_server import RedisServer
from .stores import STORES, opened
from .twins import Twins, in_silence

T, LEASE = 1000.0, 10.0
NONCE = 1 << 47
"""As long for every token: bytes are counted."""
FORK = 20


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """Of its own: what it is asked is counted."""
    with RedisServer() as own:
        yield own


def forking(length: int) -> Graph:
    """A chain, and beside it at one place a node that runs and a branch that does not."""
    beside = {"runs": [f"n{FORK}"], "skipped": [f"n{FORK}"], "below": ["skipped"]}
    chain = {f"n{i}": [f"n{i - 1}"] if i else [] for i in range(length)}
    return graph(
        {**beside, **chain},
        runs={"condition": f"{{{{ n{FORK}.ok and n3.ok }}}}"},
        skipped={"condition": f"{{{{ not n{FORK}.ok }}}}"},
    )


async def price(server: RedisServer, of: Graph) -> dict[str, int]:
    """What Redis does for the result at the fork: its commands, within scripts too, and bytes."""
    async with PipelinedRedis(server.url) as pipe:
        await pipe.call("FLUSHALL")
        store = RedisStore(pipe)
        (decision,) = await store.create_many([Submit("run", of, {})], T)
        token = decision.dispatch[0].token
        for at in range(FORK + 1):
            start = ("run", f"n{at}", token)
            await store.apply([Claim(*start, "w", T + LEASE)], T)
            await pipe.call("CONFIG", "RESETSTAT")
            await store.apply([Complete(*start, {"ok": True, "more": "x" * 1000})], T)
        sent = (await pipe.info("stats"))["total_net_output_bytes"]
        reported = await pipe.info("commandstats")
        spent = {
            name: int(what.split(",")[0].removeprefix("calls=")) for name, what in reported.items()
        }
        del spent["cmdstat_config|resetstat"]
        spent["bytes"] = int(sent)
        ended = await store.load("run")
        named = {name: ended.node(name).status.value for name in ("runs", "skipped", "below")}
        assert named == {"runs": "QUEUED", "skipped": "SKIPPED", "below": "SKIPPED"}
        return spent


async def test_the_cost_of_conditions_does_not_depend_on_the_size_of_the_run(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "new_nonce", lambda: NONCE)
    await price(server, forking(FORK + 1))  # so that Redis knows every script
    short, long = [await price(server, forking(length)) for length in (30, 300)]
    assert short == long


def test_skips_propagated_one_by_one_equal_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MAX_NODES_BELOW", 0)
    with opened("redis") as (runner, store):

        @examples(60)
        @given(graphs(), deeds)
        def walk(graph: Graph, story: list[DrawnAction]) -> None:
            runner.run(Twins([store], graph, note).walk(story))

        walk()


@pytest.mark.parametrize("condition", [None, "{{ params.p }}"], ids=["plain", "conditional"])
async def test_a_skip_propagates_to_the_end_of_its_branch(condition: str | None) -> None:
    length = 3 * codec.MAX_NODES_BELOW
    branch = {f"n{i}": [f"n{i - 1}"] if i else ["a"] for i in range(length)}
    each = {name: {"condition": condition} for name in branch if condition is not None}
    nodes = {"a": [], **branch, "z": [f"n{length - 1}", "a"]}
    of = graph(nodes, **{**each, "n0": {"condition": "{{ a.x == 0 }}"}})
    async with STORES["redis"](1) as peers:
        twins = Twins(peers, of, in_silence)
        await twins.begin()
        start = (twins.id, "a", twins.core.node("a").token)
        await twins.together([Claim(*start, "w", T + LEASE)], 1.0)
        await twins.together([Complete(*start, {"x": 1})], 1.0)
        await twins.end()
        assert twins.core.node("z").status == "QUEUED"
