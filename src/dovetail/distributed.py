"""Puts the services of a set-up with Redis together: the orchestrator and the worker.

Each is a handful of loops over the same parts, and any number of each may run. What it must not
know: what the parts do.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from dovetail.config import Settings
from dovetail.engine.clock import Clock, steady_clock
from dovetail.engine.limits import TokenBucket
from dovetail.engine.publishing import Publisher
from dovetail.engine.remote_desk import RemoteDesk, keep_leases
from dovetail.engine.shared import SharedOrchestrator
from dovetail.engine.worker import Worker
from dovetail.handlers.calls import RegistryCalls
from dovetail.handlers.registry import Registry
from dovetail.pipe import Pipe
from dovetail.stores.redis import RedisStore
from dovetail.stores.redis_agenda import RedisAgenda
from dovetail.stores.redis_fleet import RedisFleet, WorkerFacts
from dovetail.stores.redis_limits import RedisLimits
from dovetail.transports.streams import (
    ORCHESTRATORS,
    RESULTS,
    WORKERS,
    StopFeed,
    StreamInbox,
    StreamReader,
    StreamSender,
)

MOST_RESULTS = 500


@dataclass(frozen=True, slots=True)
class Parts:
    """What every service has: the runs, and an orchestrator that moves them."""

    pipe: Pipe
    store: RedisStore
    orchestrator: SharedOrchestrator
    clock: Clock


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[Parts]:
    """The parts over the Redis of the settings."""
    clock = steady_clock()
    async with Pipe(_url(settings)) as pipe:
        store = RedisStore(pipe)
        publisher = Publisher(
            store, store, StreamSender(pipe), clock, max_config_size=settings.max_config_bytes
        )
        orchestrator = SharedOrchestrator(
            store,
            publisher,
            RedisAgenda(pipe),
            clock,
            lease_seconds=settings.lease_seconds,
            max_crashes=settings.max_crashes,
        )
        publisher.apply = orchestrator.apply
        yield Parts(pipe, store, orchestrator, clock)


async def orchestrate(settings: Settings) -> None:
    """An orchestrator, until it is cancelled."""
    async with connected(settings) as parts, Pipe(_url(settings)) as blocking:
        me = service_id()
        reader = StreamReader(blocking, parts.pipe, ORCHESTRATORS, me)
        async with asyncio.TaskGroup() as group:
            group.create_task(parts.orchestrator.run())
            group.create_task(_take_stale(reader, parts, settings))
            while True:
                messages = await reader.read([RESULTS], MOST_RESULTS)
                if messages:
                    await parts.orchestrator.take_in([m.content for m in messages])
                    await reader.settle(messages)


async def _take_stale(reader: StreamReader, parts: Parts, settings: Settings) -> None:
    """Results that another orchestrator has read and then died over."""
    while True:
        idle = settings.stale_result_timeout
        messages = await reader.claim_stale(RESULTS, idle, MOST_RESULTS)
        if messages:
            await parts.orchestrator.take_in([m.content for m in messages], again=True)
            await reader.settle(messages)
        await asyncio.sleep(settings.stale_claim_interval)


@asynccontextmanager
async def working(settings: Settings, registry: Registry) -> AsyncIterator[Worker]:
    """A worker that runs; leaving it lets what runs finish within the drain time."""
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(connected(settings))
        blocking = await stack.enter_async_context(Pipe(_url(settings)))
        listening = await stack.enter_async_context(Pipe(_url(settings)))
        me = service_id()
        reader = StreamReader(blocking, parts.pipe, WORKERS, me)
        buckets = {
            tag: TokenBucket(limit.rate_per_second, limit.burst)
            for tag, limit in settings.rate_limits.items()
        }
        inbox = StreamInbox(reader, parts.pipe, list(registry))
        desk = RemoteDesk(
            inbox,
            parts.store,
            parts.orchestrator.agenda,
            RedisLimits(parts.pipe, buckets, clock=parts.clock),
            parts.clock,
            parts.orchestrator.apply,
            worker_id=me,
            lease_seconds=settings.lease_seconds,
            result_seconds=settings.stale_result_timeout + settings.stale_claim_interval,
        )
        calls = RegistryCalls(
            registry,
            secrets=settings.secrets,
            sensitive=settings.sensitive(),
            max_config_bytes=settings.max_config_bytes,
            max_output_bytes=settings.max_output_bytes,
        )
        crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def crash(error: BaseException) -> None:
            if not crashed.done():
                crashed.set_exception(error)

        fleet = RedisFleet(parts.pipe, heartbeat_timeout=settings.heartbeat_timeout)
        worker = Worker(desk, calls, parts.clock, crash, concurrency=settings.concurrency)
        worker.start()
        beside = [
            asyncio.create_task(
                keep_leases(desk, worker.holding, worker.stop, settings.lease_seconds)
            ),
            asyncio.create_task(_hear_stops(StopFeed(listening), worker)),
            asyncio.create_task(_beat(fleet, worker, registry, settings, me)),
        ]
        try:
            yield worker
            await worker.drain(settings.drain_seconds)
        finally:
            for task in beside:
                task.cancel()
            await worker.close()
            await asyncio.gather(*beside, return_exceptions=True)
            await fleet.leave(me)


async def _hear_stops(feed: StopFeed, worker: Worker) -> None:
    while True:
        for order in await feed.next():
            worker.stop(order)


async def _beat(
    fleet: RedisFleet, worker: Worker, registry: Registry, settings: Settings, me: str
) -> None:
    """Say that this worker is alive, and what it can do."""
    began = time.time()
    while True:
        await fleet.beat(
            WorkerFacts(
                worker_id=me,
                host=socket.gethostname(),
                pid=os.getpid(),
                started_at=began,
                handlers=sorted(registry),
                running=len(worker.holding()),
                concurrency=settings.concurrency,
            )
        )
        await asyncio.sleep(settings.heartbeat_interval)


def service_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


def _url(settings: Settings) -> str:
    return settings.redis_url or "redis://127.0.0.1:6379/0"
