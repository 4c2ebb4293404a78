"""What goes wrong between a service and Redis leaves a run as if nothing had.

An answer that is lost after its script was executed makes the script run twice; a Redis that was
restarted knows no script; one that is being replaced will not write. After each the run is held
against the core, which has seen every transition once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, get_args

import pytest

from dovetail.core.dag import Graph
from dovetail.core.events import Token
from dovetail.core.run import RunState
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Expand,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    Submit,
    TakeOver,
    Transition,
    Wake,
)
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.store import RedisStore
from dovetail.transports.messages import result_fields
from dovetail.transports.streams.sender import ORCHESTRATORS, RESULTS, StreamMessage, StreamReader

from ..core.drawn import LEASE, error_of
from ..core.walk import graph
from ..servers.redis_server import RedisServer
from ..services.faults.proxy import Proxy
from .stores import plain
from .twins import Twins, in_silence

GRAPH = graph(
    {"a": [], "b": [], "c": ["a", "b"], "d": ["b"], "e": ["c", "d"]},
    max_concurrency=2,
    b={"max_retries": 1},
    c={"condition": "{{ a.x > 0 }}"},
    d={"condition": "{{ b.x > 5 }}"},
)
Make = Callable[[str, str, Token, float], Transition]
STORY: list[tuple[Make, str, float]] = [
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "a", 0.0),
    (lambda run, name, token, now: Renew(run, name, token, now + LEASE), "a", 1.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "b", 1.0),
    (lambda run, name, token, now: Fail(run, name, token, error_of(name), after=2.0), "b", 1.0),
    (lambda run, name, token, now: Wake(run, name, token), "b", 5.0),
    (lambda run, name, token, now: Park(run, name, token, now + 3.0), "b", 1.0),
    (lambda run, name, token, now: Wake(run, name, token), "b", 5.0),
    (lambda run, name, token, now: Reap(run, name, token, 3), "a", 30.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "b", 1.0),
    (lambda run, name, token, now: Complete(run, name, token, {"x": 3}), "b", 1.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "a", 1.0),
    (lambda run, name, token, now: Complete(run, name, token, {"x": 3}), "a", 1.0),
    (lambda run, name, token, now: Recall(run, name, token, {"x": 4}), "c", 1.0),
    (lambda run, name, token, now: Cancel(run), "e", 1.0),
    (lambda run, name, token, now: Retry(run), "e", 1.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "e", 1.0),
    (lambda run, name, token, now: TakeOver(run, 3), "e", 1.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "e", 1.0),
    (
        lambda run, name, token, now: Fail(run, name, token, error_of(name), permanent=True),
        "e",
        1.0,
    ),
    (lambda run, name, token, now: Retry(run, "a"), "e", 1.0),
]


MAPPED = graph(
    {"a": [], "b": ["a"]},
    max_concurrency=2,
    a={"for_each": {"items": [1, 2, 3, 4], "max_failures": 1, "max_concurrency": 3}},
    b={"condition": "{{ a | length == 4 }}"},
)
STORY_OF_ITEMS: list[tuple[Make, str, float]] = [
    (lambda run, name, token, now: Expand(run, name, token, 4), "a", 0.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "a[0]", 0.0),
    (lambda run, name, token, now: Renew(run, name, token, now + LEASE), "a[0]", 1.0),
    (lambda run, name, token, now: Park(run, name, token, now + 3.0), "a[1]", 1.0),
    (lambda run, name, token, now: Wake(run, name, token), "a[1]", 5.0),
    (lambda run, name, token, now: Reap(run, name, token, 3), "a[0]", 30.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "a[2]", 1.0),
    (lambda run, name, token, now: Complete(run, name, token, {"x": 3}), "a[2]", 1.0),
    (lambda run, name, token, now: Recall(run, name, token, {"x": 4}), "a[0]", 1.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "a[1]", 1.0),
    (
        lambda run, name, token, now: Fail(run, name, token, error_of(name), permanent=True),
        "a[1]",
        1.0,
    ),
    (lambda run, name, token, now: Cancel(run), "a", 1.0),
    (lambda run, name, token, now: Retry(run), "a", 1.0),
    (lambda run, name, token, now: Expand(run, name, token, 4), "a", 1.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "a[3]", 1.0),
    (lambda run, name, token, now: TakeOver(run, 3), "a", 1.0),
    (lambda run, name, token, now: Recall(run, name, token, {"x": 4}), "a[3]", 1.0),
    (lambda run, name, token, now: Claim(run, name, token, "w", now + LEASE), "a[1]", 1.0),
    (lambda run, name, token, now: Complete(run, name, token, {"x": 3}), "a[1]", 1.0),
    (lambda run, name, token, now: Recall(run, name, token, {"x": 5}), "b", 1.0),
    (lambda run, name, token, now: Retry(run, "a"), "a", 1.0),
]
STORIES = [(GRAPH, STORY), (MAPPED, STORY_OF_ITEMS)]


class Forgetful(Proxy):
    """Loses so many of the next answers. Whole: the command was executed, unknown to the caller."""

    losing = 0

    def arrives(self, answer: bytes) -> tuple[bytes, bool]:
        if not self.losing:
            return answer, True
        self.losing -= 1
        self.lost += 1
        return b"", False


@asynccontextmanager
async def behind_a_proxy(url: str) -> AsyncIterator[tuple[RedisStore, Forgetful]]:
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    async with Forgetful(port, random.Random(1)) as proxy, PipelinedRedis(proxy.url) as pipe:
        yield RedisStore(pipe), proxy


async def live(
    store: RedisStore,
    trouble: Callable[[], Awaitable[None]],
    *,
    heard: bool,
    told: tuple[Graph, list[tuple[Make, str, float]]] = (GRAPH, STORY),
) -> RunState:
    """The story, with trouble before every step of it; the run as the core has it in the end."""
    flow, story = told
    twins = Twins([store], flow, in_silence)
    await twins.begin()
    for make, name, wait in story:
        await trouble()
        token = twins.core.node(name).token
        move = make(twins.id, name, token, twins.now + wait)
        await twins.together([move], wait, heard=heard)
        assert twins.met[type(move), True], f"{move} was refused: it says nothing"
    await twins.end()
    return twins.core


async def test_the_scenario_contains_every_transition(redis_url: str) -> None:
    moves = [*STORY, *STORY_OF_ITEMS]
    reported = {type(make("r", "a", Token(1, 1, 1), 0.0)) for make, _, _ in moves}
    assert reported == {*get_args(Transition)} - {Progress}  # which is an event and nothing else


@pytest.mark.parametrize("told", STORIES, ids=["nodes", "items"])
async def test_a_transition_whose_reply_was_lost_is_applied_once(redis_url: str, told: Any) -> None:
    async with behind_a_proxy(redis_url) as (store, proxy):

        async def lose() -> None:
            proxy.losing = 1

        await live(store, lose, heard=False, told=told)
        assert proxy.lost == len(told[1])


async def test_a_run_whose_creation_reply_was_lost_is_created_once(redis_url: str) -> None:
    async with behind_a_proxy(redis_url) as (store, proxy):
        twins = Twins([store], GRAPH, in_silence)
        await twins.begin()  # so that the scripts are known
        proxy.losing = 2
        submit = Submit("unheard", GRAPH, {"p": 1})
        await store.create(submit, twins.now)
        again = await store.create(submit, twins.now)
        assert not again, "a known id decides nothing"
        made, known = plain(await store.load("unheard")), plain(twins.core)
        assert {**made, "id": known["id"]} == known


async def test_a_claim_whose_reply_was_lost_is_granted_to_the_same_worker(redis_url: str) -> None:
    """Else no worker would run the node, and a start would be counted as lost that never was."""
    async with behind_a_proxy(redis_url) as (store, proxy):
        twins = Twins([store], GRAPH, in_silence)
        await twins.begin()
        starts = [(twins.id, name, (await store.load(twins.id)).node(name).token) for name in "ab"]
        a, b = [Task(*start, "h", {}, {}, {}, 1.0) for start in starts]
        assert await store.claim([b], "w", twins.now + LEASE, twins.now) == [True]
        proxy.losing = 1
        asked = await store.claim([a, a, b], "w", twins.now + LEASE, twins.now + 1)
        assert proxy.lost == 1
        assert asked == [True, False, False]
        assert await store.claim([a, b], "w", twins.now + LEASE, twins.now + 2) == [False, False]
        assert (await store.load(twins.id)).seq == len(twins.log) + 2


async def test_scripts_that_redis_forgot_are_loaded_again(redis_url: str) -> None:
    async with PipelinedRedis(redis_url) as pipe, PipelinedRedis(redis_url) as other:

        async def forget() -> None:
            await other.call("SCRIPT", "FLUSH")

        await live(RedisStore(pipe), forget, heard=True)


async def test_a_killed_connection_is_opened_again(redis_url: str) -> None:
    async with PipelinedRedis(redis_url) as pipe, PipelinedRedis(redis_url) as other:

        async def kill() -> None:
            await other.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        await live(RedisStore(pipe), kill, heard=False)


async def test_a_read_only_redis_is_waited_for() -> None:
    """As after a failover, when the one that we know has become a replica."""
    with RedisServer() as server:
        async with PipelinedRedis(server.url) as pipe:
            left = [3, 9, 15]

            async def recover() -> None:
                await asyncio.sleep(0.1)
                await asyncio.to_thread(server.ask, "REPLICAOF", "NO", "ONE")

            recovering: list[asyncio.Task[Any]] = []

            async def fail_over() -> None:
                left[:] = [steps - 1 for steps in left]
                if 0 in left:
                    await asyncio.to_thread(server.ask, "REPLICAOF", "127.0.0.1", "1")
                    recovering.append(asyncio.create_task(recover()))

            await live(RedisStore(pipe), fail_over, heard=False)
            await asyncio.gather(*recovering)
        assert "errorstat_READONLY" in server.ask("INFO", "errorstats")


@pytest.mark.parametrize("loses", [1, 2, 3])
async def test_replies_lost_in_the_middle_of_a_long_batch_lose_nothing(
    redis_url: str, loses: int
) -> None:
    """Many commands travel together: some were executed, some answered, some neither."""
    wide = graph({f"n{i}": [] for i in range(50)})
    async with behind_a_proxy(redis_url) as (store, proxy):
        many = [Twins([store], wide, in_silence) for _ in range(10)]
        for twins in many:
            await twins.begin()
        proxy.losing = loses

        async def claim(twins: Twins) -> None:
            starts = [(twins.id, f"n{i}", twins.core.node(f"n{i}").token) for i in range(50)]
            moves: list[Transition] = [Claim(*start, "w", 1e9) for start in starts]
            await twins.together(moves, 1.0, heard=False)

        await asyncio.gather(*map(claim, many))
        for twins in many:
            await twins.end()


@pytest.mark.parametrize("loses", [1, 3])
async def test_messages_whose_delivery_reply_was_lost_are_read_again(
    redis_url: str, loses: int
) -> None:
    """They are ours in the eyes of Redis, and no other consumer would ask for them."""
    port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    async with (
        Forgetful(port, random.Random(1)) as proxy,
        PipelinedRedis(redis_url) as pipe,
        PipelinedRedis(proxy.url) as blocking,
    ):
        reader = StreamReader(blocking, pipe, ORCHESTRATORS, "o")
        assert await reader.read([RESULTS], 10) == []
        results = [Complete("r", f"n{i}", Token(1, 1, i + 1), i) for i in range(70)]
        for result in results:
            await pipe.call("XADD", RESULTS, "*", *result_fields(result))
        proxy.losing = loses
        read: list[StreamMessage] = []
        async with asyncio.timeout(10):
            while len({message.id for message in read}) < len(results):
                found = await reader.read([RESULTS], 20)
                await reader.acknowledge(found)
                read += found
        assert proxy.lost == loses
        assert {message.content for message in read} == set(results)
        assert (await pipe.call("XPENDING", RESULTS, ORCHESTRATORS))[0] == 0
