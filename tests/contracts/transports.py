"""Every transport that must keep the transport's promises. The next is one line in `TRANSPORTS`.

A transport has two ends. `Ends` is what the suite needs of both: the orchestrator's, which is the
port, and a worker's, which each transport shapes as it likes. Between processes every taker is a
consumer of its own, as another worker would be.
"""

from __future__ import annotations

import asyncio
from atexit import register
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from dovetail.config import Settings
from dovetail.core.dag import Graph
from dovetail.core.events import Token
from dovetail.core.step import begin
from dovetail.core.transitions import Dispatch, Stop, Submit
from dovetail.engine.clock import steady_clock
from dovetail.engine.distributed.publisher import Publisher
from dovetail.engine.ports import Task, Transport
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.store import RedisStore
from dovetail.transports.local import LocalTransport
from dovetail.transports.streams.reader import StopBroadcast, StreamInbox
from dovetail.transports.streams.sender import WORKERS, StreamMessage, StreamReader, StreamSender
from dovetail.wiring.distributed import connected

from ..celery_crew import DELIVERED, celery_worker
from ..servers.redis_server import RedisServer
from .stores import redis_url

Taken = tuple[str, str, Token]
"""What a worker learns of a published node: its run, its id, its token."""


@dataclass
class TransportEnds:
    transport: Transport
    submit: Callable[[str, Graph], Awaitable[list[Dispatch]]]
    """Make a run and give its first orders."""
    take: Callable[[int], Awaitable[list[Taken]]]
    """Wait for published nodes and take at most so many."""
    stopped: list[Stop] = field(default_factory=list)
    """The orders to stop that have reached the worker."""


@asynccontextmanager
async def local() -> AsyncIterator[TransportEnds]:
    stopped: list[Stop] = []
    transport = LocalTransport(stopped.append)

    async def submit(run_id: str, graph: Graph) -> list[Dispatch]:
        return begin(Submit(run_id, graph, {}), 1000.0, 7)[1].dispatch

    async def take(limit: int) -> list[Taken]:
        while not (batch := transport.next(limit)):
            await transport.news()
        return [seen(dispatch) for dispatch in batch]

    yield TransportEnds(transport, submit, take, stopped)


class TransportWorkers:
    """Workers that take what is published. What one had read when its taker gave up, the next
    taker gets: to a worker that is gone for good, its lease and the sweep are the answer."""

    def __init__(self, stack: AsyncExitStack, pipe: PipelinedRedis) -> None:
        self._stack = stack
        self._pipe = pipe
        self._hired = 0
        self._idle: list[
            tuple[StreamInbox, asyncio.Task[list[tuple[StreamMessage, Task]]] | None]
        ] = []

    async def take(self, limit: int) -> list[Taken]:
        inbox, reading = self._idle.pop() if self._idle else (await self._hire(), None)
        try:
            while True:
                reading = reading or asyncio.create_task(inbox.tasks(limit))
                found = await asyncio.shield(reading)
                reading = None
                if found:
                    await inbox.acknowledge([message for message, _ in found])
                    return [(task.run_id, task.node_id, task.token) for _, task in found]
        finally:
            self._idle.append((inbox, reading))

    async def _hire(self) -> StreamInbox:
        self._hired += 1
        blocking = await self._stack.enter_async_context(PipelinedRedis(redis_url()))
        reader = StreamReader(blocking, self._pipe, WORKERS, f"w{self._hired}")
        return StreamInbox(reader, self._pipe, ["h", "another"])

    async def dismiss(self) -> None:
        left = [reading for _, reading in self._idle if reading is not None]
        for reading in left:
            reading.cancel()
        await asyncio.gather(*left, return_exceptions=True)


@asynccontextmanager
async def streams() -> AsyncIterator[TransportEnds]:
    async with AsyncExitStack() as stack:
        pipe, listening = [
            await stack.enter_async_context(PipelinedRedis(redis_url())) for _ in range(2)
        ]
        await pipe.call("FLUSHDB")
        store = RedisStore(pipe)
        publisher = Publisher(store, store, StreamSender(pipe), steady_clock())

        async def submit(run_id: str, graph: Graph) -> list[Dispatch]:
            return (await store.create(Submit(run_id, graph, {}), 1000.0)).dispatch

        crew = TransportWorkers(stack, pipe)
        ends = TransportEnds(publisher, submit, crew.take)
        feed = StopBroadcast(listening)

        async def hear() -> None:
            while True:
                ends.stopped += await feed.next()

        hearing = asyncio.create_task(hear())
        yield ends
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await crew.dismiss()


def seen(dispatch: Dispatch) -> Taken:
    run, place, token, _ = dispatch
    return run.id, run.graph.nodes[place].id, token


@asynccontextmanager
async def celery() -> AsyncIterator[TransportEnds]:
    """The worker is a process, and its pool another: what is delivered there is what is taken."""
    url = celery_redis()
    settings = Settings(redis_url=url, transport="celery")
    async with PipelinedRedis(url) as listening, connected(settings) as parts:
        await parts.pipe.call("FLUSHDB")
        parts.store.ahead = None

        async def submit(run_id: str, graph: Graph) -> list[Dispatch]:
            return (await parts.store.create(Submit(run_id, graph, {}), 1000.0)).dispatch

        async def take(limit: int) -> list[Taken]:
            while not (found := await parts.pipe.call("LPOP", DELIVERED, limit)):
                await asyncio.sleep(0.005)
            taken = [orjson.loads(one) for one in found]
            return [(run_id, node, Token.parse(token)) for run_id, node, token in taken]

        ends = TransportEnds(
            Publisher(parts.store, parts.store, parts.sender, parts.clock), submit, take
        )
        feed = StopBroadcast(listening)

        async def hear() -> None:
            while True:
                ends.stopped += await feed.next()

        hearing = asyncio.create_task(hear())
        yield ends
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


@cache
def celery_redis() -> str:
    """Of a Redis and a Celery worker of their own, with a pool of one process, so that what it is
    given stays in order; both are for all tests, until this process ends."""
    stack = ExitStack()
    register(stack.close)
    server = stack.enter_context(RedisServer())
    folder = Path(stack.enter_context(TemporaryDirectory()))
    stack.enter_context(celery_worker(folder, server.url, DOVETAIL_CONCURRENCY="1"))
    return server.url


TRANSPORTS: dict[str, Callable[[], AbstractAsyncContextManager[TransportEnds]]] = {
    "local": local,
    "streams": streams,
    "celery": celery,
}
