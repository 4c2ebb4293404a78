"""What is left on the streams: consumers that are gone, messages that no worker refuses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Token
from dovetail.core.transitions import Cancel, Retry, Submit
from dovetail.engine.ports import Task
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.definitions import definition_key
from dovetail.stores.redis.store import RedisStore
from dovetail.stores.redis.timers import RedisTimerIndex
from dovetail.stores.redis.workers import WorkerFacts, WorkerRegistry
from dovetail.transports.streams import sender as stream_sender
from dovetail.transports.streams.reader import StreamInbox
from dovetail.transports.streams.sender import (
    MARK,
    WORKERS,
    StreamGarbage,
    StreamReader,
    StreamSender,
    stream_of,
)
from dovetail.wiring import distributed
from dovetail.wiring.distributed import orchestrate

TOKEN = Token(1, 1, 77)
STREAM = stream_of("h")
SECONDS = 10.0


class StreamConsumers:
    """One Redis, runs in it, and any number of workers that read the tasks of one handler."""

    def __init__(self, pipe: PipelinedRedis, hire: Callable[..., Awaitable[StreamInbox]]) -> None:
        self.pipe = pipe
        self.hire = hire
        self.store = RedisStore(pipe)
        self.sender = StreamSender(pipe)
        self.sender._quick = frozenset({"h"})
        self.fleet = WorkerRegistry(pipe)

    def remains(self, idle_seconds: float = 0.0) -> StreamGarbage:
        over = RedisTimerIndex(self.pipe).over
        return StreamGarbage(self.pipe, self.fleet.workers, over, idle_seconds=idle_seconds)

    async def consumers(self) -> set[str]:
        reported = await self.pipe.call("XINFO", "CONSUMERS", STREAM, WORKERS)
        return {one[1].decode() for one in reported}

    async def length(self) -> int:
        return int(await self.pipe.call("XLEN", STREAM))

    async def pending(self) -> int:
        return int((await self.pipe.call("XPENDING", STREAM, WORKERS))[0])

    async def run(self) -> str:
        nodes = [{"id": "n", "handler": "h"}]
        graph = build_graph(Workflow.model_validate({"name": "w", "nodes": nodes}), {})
        run_id = os.urandom(8).hex()
        await self.store.create(Submit(run_id, graph, {}, None), 1.0)
        return run_id

    async def send(self, *run_ids: str) -> None:
        plain = Task("", "n", TOKEN, "h", {}, {}, {}, 300.0, None, (), None, 0)
        await self.sender.send([plain._replace(run_id=run_id) for run_id in run_ids])

    async def serve(self, name: str) -> None:
        """A worker of that name says that it is alive."""
        await self.fleet.beat(WorkerFacts(name, "host", 1, 1.0, ["h"], 0, 1))


@pytest.fixture
async def yard(single_or_cluster: Any) -> AsyncIterator[StreamConsumers]:
    single_or_cluster.flush()
    async with AsyncExitStack() as stack:
        pipe = await stack.enter_async_context(PipelinedRedis(single_or_cluster.url))

        async def hire(name: str, stale_seconds: float | None = None) -> StreamInbox:
            blocking = await stack.enter_async_context(PipelinedRedis(single_or_cluster.url))
            reader = StreamReader(blocking, pipe, WORKERS, name)
            return StreamInbox(reader, pipe, ["h"], stale_seconds=stale_seconds)

        yield StreamConsumers(pipe, hire)


async def taken(yard: StreamConsumers, name: str, *, settle: bool = True) -> StreamInbox:
    """A worker that has read a message, and is done with it if it was settled."""
    inbox = await yard.hire(name)
    await yard.send("run")
    found = await inbox.tasks(10)
    assert found
    if settle:
        await inbox.acknowledge([message for message, _ in found])
        await yard.pipe.call("PING")  # it travels with whatever comes next
    return inbox


# --- consumers -----------------------------------------------------------------------------------


async def test_a_consumer_that_was_idle_for_long_is_removed(yard: StreamConsumers) -> None:
    for name in ("dead1", "dead2"):
        await taken(yard, name)
    await yard.sender.lost()  # which leaves its mark
    assert await yard.consumers() == {"dead1", "dead2", MARK}
    await yard.remains(idle_seconds=60).clear()
    assert await yard.consumers() == {"dead1", "dead2", MARK}
    await yard.remains().clear()
    assert await yard.consumers() == {MARK}
    assert await yard.sender.lost() == [], "the mark is where it was"


async def test_a_consumer_with_pending_messages_stays_until_another_takes_them(
    yard: StreamConsumers,
) -> None:
    await yard.serve("alive")
    await taken(yard, "dead", settle=False)
    await yard.remains().clear()
    assert "dead" in await yard.consumers()
    other = await yard.hire("alive", stale_seconds=0.0)
    async with asyncio.timeout(SECONDS):
        while not (found := await other._stale(10)):
            await asyncio.sleep(0.05)
    await other.acknowledge(found)
    await yard.pipe.call("PING")
    await yard.remains().clear()
    assert "dead" not in await yard.consumers()


async def test_a_consumer_that_reads_during_its_removal_keeps_its_message(
    yard: StreamConsumers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await yard.serve("somebody else")
    inbox = await taken(yard, "slow")
    many, read = PipelinedRedis.call_many, []

    async def read_first(self: PipelinedRedis, commands: Any, **more: Any) -> list[Any]:
        if commands and commands[0][0] == "EVALSHA" and not read:  # the dismissal
            await yard.send("run")
            read.extend(await inbox.tasks(10))
        return await many(self, commands, **more)

    monkeypatch.setattr(PipelinedRedis, "call_many", read_first)
    await yard.remains().clear()
    assert read
    assert "slow" in await yard.consumers()
    assert await yard.pending() == 1


async def test_a_live_consumer_stays_even_if_it_is_idle(yard: StreamConsumers) -> None:
    await yard.serve("idle")
    await taken(yard, "idle")
    await yard.remains().clear()
    assert await yard.consumers() == {"idle"}


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_live_consumer_that_was_removed_continues_as_before(
    yard: StreamConsumers, is_waiting: bool
) -> None:
    inbox = await taken(yard, "slow")
    reading = asyncio.create_task(inbox.tasks(64)) if is_waiting else None
    await asyncio.sleep(0.05)
    await yard.remains().clear()
    assert await yard.consumers() == set()
    await yard.send(*["run"] * 64)  # in messages of several
    assert await yard.length() < 64
    found = []
    async with asyncio.timeout(SECONDS):
        while len(found) < 64:
            found += await (reading or inbox.tasks(64))
            reading = None
    assert await yard.consumers() == {"slow"}
    assert await yard.pending() == await yard.length() > 0
    await inbox.acknowledge([message for message, _ in found])
    await yard.pipe.call("PING")
    assert (await yard.pending(), await yard.length()) == (0, 0)
    await yard.remains().clear()
    reader = inbox._readers[0][0]
    await taken(yard, "other", settle=False)
    assert await reader.claim_stale([STREAM], 0.0, 10), "it can still take over from others"


# --- messages ------------------------------------------------------------------------------------


async def test_messages_of_ended_runs_without_a_serving_worker_are_removed(
    yard: StreamConsumers,
) -> None:
    ended, going_on, retried = [await yard.run() for _ in range(3)]
    await yard.store.apply([Cancel(ended), Cancel(retried)], 2.0)
    await yard.store.apply([Retry(retried)], 3.0)
    await yard.send(ended, going_on, retried, "gone")
    await taken(yard, "dead", settle=False)  # of another one that is gone
    await yard.remains().clear()
    left = [entry[1][1].decode() for entry in await yard.pipe.call("XRANGE", STREAM, "-", "+")]
    assert left == [going_on, retried]
    inbox = await yard.hire("new")
    assert (await yard.pipe.call("XPENDING", STREAM, WORKERS))[0] == 2, "that the dead one has read"
    await yard.store.apply([Cancel(going_on), Cancel(retried)], 4.0)
    await yard.remains().clear()
    await yard.remains().clear()
    assert (await yard.length(), await yard.pending(), await yard.consumers()) == (0, 0, set())
    await yard.send("anything")
    assert len(await inbox.tasks(10)) == 1


async def test_a_message_of_several_runs_is_removed_with_the_last_of_them(
    yard: StreamConsumers,
) -> None:
    runs = [await yard.run() for _ in range(16)]
    await yard.send(*runs)
    assert await yard.length() < len(runs)
    for run_id in runs:
        assert await yard.length() > 0
        await yard.store.apply([Cancel(run_id)], 2.0)
        await yard.remains().clear()
    assert await yard.length() == 0


async def test_messages_with_a_serving_worker_are_left_to_it(yard: StreamConsumers) -> None:
    await yard.serve("alive")
    await yard.send("gone")
    await yard.remains().clear()
    assert await yard.length() == 1


async def test_a_malformed_message_is_left_to_its_reader(yard: StreamConsumers) -> None:
    await yard.pipe.call("XADD", STREAM, "*", "x", "nonsense")
    await yard.pipe.call("SET", stream_of("no stream"), "x")
    await yard.remains().clear()
    assert await yard.length() == 1


async def test_a_long_stream_is_scanned_in_parts_and_again(
    yard: StreamConsumers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_sender, "READ_TOGETHER", 5)
    monkeypatch.setattr(stream_sender, "MAX_LOOKED_AT", 10)
    monkeypatch.setattr(yard.sender, "_quick", frozenset())
    first = await yard.run()
    await yard.send(first, *[await yard.run() for _ in range(20)])
    await yard.send(*["gone"] * 4)
    remains = yard.remains()
    for left in (25, 25, 21):
        await remains.clear()
        assert await yard.length() == left
    await yard.store.apply([Cancel(first)], 2.0)
    await remains.clear()
    assert await yard.length() == 20


# --- the duty ------------------------------------------------------------------------------------


async def test_an_orchestrator_collects_garbage(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "GC_SECONDS", 0.05)
    monkeypatch.setattr(distributed, "GC_PAUSE_RATIO", 0)
    settings = Settings(redis_url=redis_url, lease_seconds=0.01)
    async with PipelinedRedis(redis_url) as pipe:
        yard = StreamConsumers(pipe, lambda _: None)  # type: ignore[arg-type, return-value]
        await pipe.call("XGROUP", "CREATE", STREAM, WORKERS, "0", "MKSTREAM")
        await pipe.call("XGROUP", "CREATECONSUMER", STREAM, WORKERS, "dead")
        await yard.send("gone")
        await pipe.call("SET", definition_key("unused"), "{}")
        orchestrating = asyncio.create_task(orchestrate(settings))
        async with asyncio.timeout(SECONDS):
            while (
                await yard.length()
                or "dead" in await yard.consumers()
                or await pipe.call("EXISTS", definition_key("unused"))
            ):
                await asyncio.sleep(0.01)
        orchestrating.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await orchestrating
