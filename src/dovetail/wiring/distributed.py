"""Builds the services on Redis: orchestrator, worker, and the commands of an API server or a
client.

Each service is a set of background tasks over the same parts, and any number of each may run. A
process with commands triggers and reads runs, and runs no nodes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import partial

from dovetail.config import Settings, SettingsError, env_name
from dovetail.core.errors import BrokenRun, DovetailError, NotFound, StoreError
from dovetail.core.redaction import Redactor
from dovetail.core.run import RunState
from dovetail.core.transitions import Stop
from dovetail.engine.cache import NodeCache
from dovetail.engine.clock import Clock, StoreClock
from dovetail.engine.commands import Commands, new_id
from dovetail.engine.distributed.archiver import ArchiveEntry, Archiver, ArchiveWriter, Restorer
from dovetail.engine.distributed.deletion import ArchiveRetention, RunDeleter
from dovetail.engine.distributed.orchestrator import (
    CrashLimit,
    DistributedOrchestrator,
    ParkedRescheduler,
)
from dovetail.engine.distributed.publisher import Publisher, TaskRenderer
from dovetail.engine.distributed.task_source import (
    QueueTaskSource,
    RemoteInputs,
    StoreReader,
    keep_leases,
)
from dovetail.engine.distributed.triggers import AcceptedRuns, TriggerService
from dovetail.engine.lease_keeper import DutyThread, HeldStarts, Liveness
from dovetail.engine.limits import SharedRates
from dovetail.engine.listener import Listener
from dovetail.engine.ports import Task
from dovetail.engine.supervisor import describe_error, run_every, supervise
from dovetail.engine.webhooks import Outbox
from dovetail.engine.worker import Worker
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.log_capture import capturing
from dovetail.handlers.registry import Registry
from dovetail.redis_client.pipelined import PATIENCE_SECONDS, Command, PipelinedRedis, RedisError
from dovetail.stores.postgres.archive import PostgresArchive
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.records import stored_definition
from dovetail.stores.redis.archive import RedisArchiveQueue, RedisSnapshots, queueing
from dovetail.stores.redis.definitions import UnusedDefinitions
from dovetail.stores.redis.doctor import (
    check_writable,
    follow_clock,
    refuse_eviction,
    set_clock,
    watch_eviction,
    watch_restarts,
)
from dovetail.stores.redis.event_source import RedisEventSource
from dovetail.stores.redis.feed import LEARN_SECONDS, FeedListener, RedisFeed, trim_feed
from dovetail.stores.redis.limits import RedisLimits
from dovetail.stores.redis.logs import LogAppender
from dovetail.stores.redis.outbox import RedisOutbox
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.redis.run_index import RunOrigin
from dovetail.stores.redis.store import (
    InstrumentedRedisStore,
    RedisLeases,
    RedisStore,
    SpeculativeDispatch,
    callers_of,
)
from dovetail.stores.redis.timers import RedisTimerIndex
from dovetail.stores.redis.workers import (
    AnnouncedService,
    AnnouncedVersions,
    Handlers,
    ServiceRegistry,
    WorkerFacts,
    WorkerRegistry,
    announced,
    conflict,
    mixture,
    schema_texts,
)
from dovetail.stores.tiered import ArchivedAcceptedRuns, ArchivedRuns, TieredRecords, TieredRuns
from dovetail.stores.tiered_outbox import RESTORE_SECONDS, TieredOutbox
from dovetail.transports.messages import RESULTS, DeadLetterQueue
from dovetail.transports.streams.reader import (
    OrchestratorPeers,
    ResultConsumer,
    RunFinishedListener,
    StopBroadcast,
    StreamInbox,
)
from dovetail.transports.streams.sender import (
    ORCHESTRATORS,
    WORKERS,
    StreamGarbage,
    StreamReader,
    StreamSender,
)
from dovetail.wiring.embedded import (
    buckets,
    definition_limits,
    handler_calls,
    log_rules,
    user_name,
)
from dovetail.wiring.event_export import event_exporter
from dovetail.wiring.health import ServicesHealth
from dovetail.wiring.webhooks import webhook_sender

log = logging.getLogger("dovetail.orchestrator")
GC_SECONDS, MAX_GC_SECONDS = 60.0, 3600.0
"""The shortest and longest pause between two garbage collections."""
GC_PAUSE_RATIO = 1000
"""The pause is so many times as long as a collection, which scans all keys."""
IDLE_LEASES = 30
"""A consumer that is silent for so many leases is dead."""


async def collect_garbage(pipe: PipelinedRedis, clock: Clock, settings: Settings) -> None:
    """Remove what dead workers and dropped runs have left in Redis, for ever.

    It scans all keys: a process may die before it notes what it leaves behind.
    """
    fleet = WorkerRegistry(pipe, heartbeat_timeout=settings.heartbeat_timeout)
    idle_seconds = IDLE_LEASES * settings.lease_seconds
    remains = StreamGarbage(
        pipe, fleet.workers, RedisTimerIndex(pipe).over, idle_seconds=idle_seconds
    )
    definitions = UnusedDefinitions(pipe)
    while True:
        began = time.monotonic()
        try:
            await remains.clear()
            await definitions.look(clock())
        except (BrokenRun, LookupError, ValueError) as problem:  # it would be met again at once
            log.error("garbage cannot be collected: %s", describe_error(problem))
        rest = GC_PAUSE_RATIO * (time.monotonic() - began)
        pause = min(max(GC_SECONDS, rest), MAX_GC_SECONDS)
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311


FAREWELL_SECONDS = 3.0
ASKING_SECONDS = 5.0
"""A caller soon gets an error if Redis is away; a service waits for Redis."""
MAX_EXPIRED = 100
EXPIRE_SECONDS = 10.0
RECOVER_SECONDS = 2.0
DAY_SECONDS = 86400.0
ARCHIVE_CHECK_SECONDS = 0.5
ARCHIVE = "wf:archive"
"""This key exists while orchestrators have an archive. A process without one would read lists in
Redis that are not kept."""
DRIVEN_BY_ORCHESTRATORS = (
    "runs in Redis go on by themselves while an orchestrator and a worker run: "
    "start them with `dovetail orchestrator` and `dovetail worker`"
)

log = logging.getLogger("dovetail.wiring.distributed")


@dataclass(frozen=True, slots=True)
class ArchiveParts:
    """The parts over PostgreSQL."""

    runs: PostgresArchive
    records: TieredRecords
    restorer: Restorer
    archiver: Archiver
    deleter: RunDeleter
    retention: ArchiveRetention
    pool: PostgresPool


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """What every service has: the store, and an orchestrator that steps runs."""

    pipe: PipelinedRedis
    store: RedisStore
    orchestrator: DistributedOrchestrator
    clock: StoreClock
    sender: StreamSender
    renderer: TaskRenderer
    archive: ArchiveParts | None
    feed: RedisFeed


@asynccontextmanager
async def connected(
    settings: Settings,
    *,
    patience: float = PATIENCE_SECONDS,
    listener: Listener | None = None,
    clock: StoreClock | None = None,
    archive_apart: bool = False,
) -> AsyncIterator[ServiceParts]:
    """The parts over the Redis of the settings, and over their PostgreSQL if they name one.

    Redis may be away for `patience`. `listener` receives the events of runs that are stepped here.
    `clock` is set by the clock of Redis. With `archive_apart` the archive reads over a connection
    of its own, so that no result waits behind megabytes of outputs.
    """
    clock = clock or StoreClock()
    has_archive = settings.database_url is not None
    async with AsyncExitStack() as stack:
        pipe = await stack.enter_async_context(PipelinedRedis(_url(settings), patience=patience))
        following = asyncio.create_task(follow_clock(pipe, clock))
        stack.callback(following.cancel)
        ends = await stack.enter_async_context(RunFinishedListener(_url(settings)))
        sender = await stack.enter_async_context(_sender(settings, pipe, clock))
        traced = sender if listener is None else listener.sender(sender, partial(callers_of, pipe))
        renderer = TaskRenderer(
            max_config_size=settings.max_config_bytes,
            has_archive=has_archive,
            breaks=lambda: pipe.breaks,
        )
        ahead = None
        if traced is sender and sender.sends_ahead and pipe.keeps_order:
            ahead = SpeculativeDispatch(renderer.render_ahead, sender.sending)
        make_store: Callable[..., RedisStore] = partial(RedisStore, events=False)
        if listener is not None:
            make_store = partial(InstrumentedRedisStore, listener=listener)
        store = make_store(
            pipe,
            listed=not has_archive,
            news=ends.next,
            max_input_bytes=settings.max_input_bytes,
            max_run_bytes=settings.max_run_bytes,
            ahead=ahead,
        )
        if isinstance(store, InstrumentedRedisStore):
            stack.push_async_callback(store.close)
        writer = pool = None
        if settings.database_url is not None:
            pool = await stack.enter_async_context(PostgresPool(settings.database_url))
            apart = pipe
            if archive_apart:
                apart = await stack.enter_async_context(PipelinedRedis(_url(settings)))
            writer = ArchiveWriter(
                RedisSnapshots(apart), RedisArchiveQueue(apart, clock), PostgresArchive(pool), clock
            )
        feed_listener = await stack.enter_async_context(FeedListener(_url(settings)))
        feed = RedisFeed(pipe, clock, store, feed_listener.next, settings.webhooks)
        fleet = WorkerRegistry(pipe, heartbeat_timeout=settings.heartbeat_timeout)
        publisher = Publisher(
            store,
            store,
            traced,
            clock,
            renderer=renderer,
            cache=NodeCache(store, clock, AnnouncedVersions(fleet).of),
            record=None if writer is None else writer.record,
        )
        bury = DeadLetterQueue(pipe, _redactor(settings)).bury
        orchestrator = DistributedOrchestrator(
            store,
            publisher,
            RedisTimerIndex(pipe),
            sender,
            clock,
            lease_seconds=settings.lease_seconds,
            max_crashes=settings.max_crashes,
            # Without an archive the lists of runs are in Redis.
            observer=RedisArchiveQueue(pipe, clock)
            if has_archive
            else _records(settings, pipe, store.origin),
            reaped=CrashLimit(store, bury, max_crashes=settings.max_crashes).reaped,
            older_run=partial(_older_run, store, None if pool is None else PostgresArchive(pool)),
            feed=feed,
        )
        archive = None
        if writer is not None and pool is not None:
            archive = _archive(settings, apart, pool, writer, orchestrator)
        yield ServiceParts(pipe, store, orchestrator, clock, sender, renderer, archive, feed)


async def _older_run(store: RedisStore, archive: PostgresArchive | None, run_id: str) -> RunState:
    """A run that was forked, from Redis or from the archive. Raises `NotFound`."""
    try:
        return await store.load(run_id)
    except NotFound:
        if archive is None:
            raise
    return await archive.load(run_id)


def _archive(
    settings: Settings,
    pipe: PipelinedRedis,
    pool: PostgresPool,
    writer: ArchiveWriter,
    orchestrator: DistributedOrchestrator,
) -> ArchiveParts:
    limits = RedisLimits(pipe, buckets(settings))
    records = TieredRecords(pool, pipe, _records(settings, pipe), limits)
    runs = PostgresArchive(pool)
    restorer = Restorer(
        *(writer.hot, writer.hints, runs, orchestrator, writer.clock),
        lease_seconds=settings.lease_seconds,
        recovery_timeout=settings.recovery_timeout,
        limits=records.limits,
        shared_limits=limits,
    )
    archiver = Archiver(
        writer,
        checkpoint_interval=settings.checkpoint_interval,
        retention_seconds=settings.redis_retention_days * DAY_SECONDS,
        restore=restorer.restore_lost,
    )
    deleter = RunDeleter(writer)
    days = settings.archive_retention_days
    retention = ArchiveRetention(deleter, writer, None if days is None else days * DAY_SECONDS)
    return ArchiveParts(runs, records, restorer, archiver, deleter, retention, pool)


@asynccontextmanager
async def _input_store(settings: Settings) -> AsyncIterator[RedisStore]:
    """For handlers that read outputs of parents. An outage of Redis soon raises, because the
    handler may block the worker's event loop."""
    async with PipelinedRedis(_url(settings), patience=ASKING_SECONDS) as pipe:
        yield RedisStore(pipe, events=False)


@asynccontextmanager
async def _sender(
    settings: Settings, pipe: PipelinedRedis, clock: Clock
) -> AsyncIterator[StreamSender]:
    """The orchestrators' end of the transport that the settings name."""
    fleet = WorkerRegistry(pipe, heartbeat_timeout=settings.heartbeat_timeout)
    if settings.transport == "streams":
        yield StreamSender(pipe, fleet.quick)
        return
    from dovetail.transports.celery.application import broker_url, check_broker, make_app
    from dovetail.transports.celery.sender import CelerySender, broker_at

    app = make_app(settings)
    check_broker(app)
    broker = broker_at(broker_url(settings), app, pipe, settings.redis_url)

    async def hands() -> int:
        return sum(one["concurrency"] for one in await fleet.workers() if one["alive"])

    async with CelerySender(app, broker, pipe, hands, clock) as sender:
        yield sender


def _redactor(settings: Settings) -> Redactor:
    """For dead letters: they are kept, and may come from anywhere."""
    return Redactor(settings.sensitive())


async def orchestrate(
    settings: Settings,
    stopping: asyncio.Event | None = None,
    listener: Listener | None = None,
) -> None:
    """Run an orchestrator until it is cancelled, or `stopping` is set between two batches."""
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(
            connected(settings, listener=listener, archive_apart=True)
        )
        archive = parts.archive
        await set_clock(parts.pipe, parts.clock)
        blocking = await stack.enter_async_context(PipelinedRedis(_url(settings)))
        me = service_id()
        reader = StreamReader(blocking, parts.pipe, ORCHESTRATORS, me, _redactor(settings))
        peers = OrchestratorPeers(parts.pipe, me)
        await peers.beat()
        await parts.feed.announce_webhooks()
        await stack.enter_async_context(_announced(settings, parts.pipe, "orchestrator", me))
        limits = RedisLimits(parts.pipe, buckets(settings), clock=parts.clock)
        parked = ParkedRescheduler(
            *(parts.orchestrator.timers, parts.store, limits, parts.clock),
            parts.orchestrator.apply_each,
        )
        duties: list[Duty] = [
            ("duties", parts.orchestrator.run),
            ("after a break", lambda: _mend(parts, archive)),
            ("garbage collection", lambda: collect_garbage(parts.pipe, parts.clock, settings)),
            ("parked nodes", parked.run),
            ("eviction", lambda: watch_eviction(parts.pipe, log.warning)),
        ]
        records = _records(settings, parts.pipe) if archive is None else archive.records
        letters = DeadLetterQueue(parts.pipe, _redactor(settings))
        hot = RedisOutbox(parts.pipe, parts.feed.has_notifications, letters.add)
        outbox: Outbox = hot
        if archive is not None:
            outbox = copied = TieredOutbox(hot, archive.pool, parts.clock)
            restoring = partial(run_every, RESTORE_SECONDS, copied.restore)
            duties.append(("lost notifications", restoring))
        webhooks = webhook_sender(settings, outbox, records.summary, parts.clock, listener)
        announcing = partial(run_every, LEARN_SECONDS, parts.feed.announce_webhooks)
        duties += [("webhooks", webhooks.run), ("announcing webhooks", announcing)]
        source = RedisEventSource(parts.pipe, parts.store, parts.feed, me)
        exporter = event_exporter(settings, source, parts.clock, listener)
        if exporter is not None:
            duties.append(("events", exporter.run))
        consumer = ResultConsumer(
            reader,
            parts.orchestrator.apply_results,
            parts.sender.waiting if settings.transport == "celery" else None,
        )
        idle, pause = settings.stale_result_timeout, settings.stale_claim_interval
        taking: list[Duty] = [
            ("results of dead peers", lambda: consumer.reclaim_from_dead_peers(peers)),
            ("stale results", lambda: consumer.reclaim_stale(idle, pause)),
            ("unapplied results", consumer.retry_unapplied),
        ]
        if archive is None:
            duties += _upkeep(settings, parts)
            await parts.pipe.call("DEL", ARCHIVE)
        else:
            duties += [
                ("restoring", archive.restorer.run),
                ("archiving", archive.archiver.run),
                ("retention of the archive", archive.retention.run),
                ("announcing the archive", lambda: _announce_archive(parts, archive.restorer)),
                ("feed", lambda: run_every(EXPIRE_SECONDS, partial(_trim_feed, parts))),
            ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(supervise(*duty)) for duty in duties]
            failed = consumer.unapplied.set
            tasks += [group.create_task(supervise(*duty, failed)) for duty in taking]
            await supervise("results", lambda: consumer.take(stopping), failed)
            parts.pipe.flush()  # acknowledgements arrive before this orchestrator leaves
            for task in tasks:
                task.cancel()
        await reader.remove_consumer(RESULTS, me)
        await peers.leave()


async def _mend(parts: ServiceParts, archive: ArchiveParts | None) -> None:
    """Reconcile after a break: a command may have been done without its reply arriving."""
    led = parts.pipe.where
    restoring: asyncio.Task[None] | None = None
    try:
        async for is_another in watch_restarts(parts.pipe):
            if is_another:  # it may have come back without its newest writes
                if parts.pipe.fails_over:
                    _warn_of_failover(led, parts.pipe.where, archive)
                    led = parts.pipe.where
                await parts.pipe.call("DEL", ARCHIVE)  # set again once limits are back
                await parts.orchestrator.timers.remember_all(parts.clock())
                if archive is not None:
                    if restoring is not None:
                        restoring.cancel()
                    restoring = asyncio.create_task(archive.restorer.restore_after_loss())
            await parts.orchestrator.sweep_all()
    finally:
        if restoring is not None:
            restoring.cancel()


def _warn_of_failover(before: str, now: str, archive: ArchiveParts | None) -> None:
    """Redis replicates after it has answered: what a server wrote last may have died with it."""
    if archive is None:
        log.warning(
            "Redis at %s leads now, in place of %s: what that one had not sent to it is lost, "
            "runs among it, and there is no PostgreSQL to restore it from; %s names one",
            *(now, before, env_name("database_url")),
        )
        return
    log.warning(
        "Redis at %s leads now, in place of %s: runs that it does not know are restored from "
        "PostgreSQL",
        *(now, before),
    )


Duty = tuple[str, Callable[[], Awaitable[None]]]


def _upkeep(settings: Settings, parts: ServiceParts) -> list[Duty]:
    """Duties that the archive has where there is one."""
    records = _records(settings, parts.pipe)
    submissions = TriggerService(records, parts.orchestrator, parts.clock, _delayed)

    async def expire() -> None:
        while await records.expire(parts.clock(), MAX_EXPIRED) == MAX_EXPIRED:
            pass

    return [
        (
            "recovering accepted runs",
            lambda: run_every(RECOVER_SECONDS, submissions.recover_accepted),
        ),
        ("retention", lambda: run_every(EXPIRE_SECONDS, expire)),
    ]


async def _trim_feed(parts: ServiceParts) -> None:
    await trim_feed(parts.pipe, parts.clock())


async def _announce_archive(parts: ServiceParts, restorer: Restorer) -> None:
    """Keep the key that says that there is an archive. Without it Redis was emptied or has lost
    writes: limits that were set may be gone, so they are restored before the key is set. Its value
    is another one each time, so that every orchestrator learns of the loss."""
    known = None
    while True:
        found = await parts.pipe.call("GET", ARCHIVE)
        if found is None:
            await restorer.restore_limits()
            found = new_id().encode()
            await parts.pipe.call("SET", ARCHIVE, found)
        if found != known:
            known = found
            parts.renderer.forget_lists()
        await asyncio.sleep(ARCHIVE_CHECK_SECONDS)


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that runs."""

    crashed: asyncio.Future[None]
    """Raises the error that ended it."""
    holding: Callable[[], Sequence[Task]]
    """The tasks that it has claimed and not finished."""


@asynccontextmanager
async def working(
    settings: Settings, registry: Registry, listener: Listener | None = None
) -> AsyncIterator[RunningWorker]:
    """Run a worker; on exit, running handlers may finish within the drain time."""
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(connected(settings, listener=listener))
        await set_clock(parts.pipe, parts.clock)
        blocking = await stack.enter_async_context(PipelinedRedis(_url(settings)))
        listening = await stack.enter_async_context(PipelinedRedis(_url(settings)))
        me = service_id()
        await stack.enter_async_context(_announced(settings, parts.pipe, "worker", me))
        redactor = _redactor(settings)
        readers = [StreamReader(blocking, parts.pipe, WORKERS, me, redactor)]
        if (
            await parts.pipe.is_clustered()
        ):  # a read covers one stream there, and needs a connection
            for _ in list(registry)[1:]:
                blocking = await stack.enter_async_context(PipelinedRedis(_url(settings)))
                readers.append(StreamReader(blocking, parts.pipe, WORKERS, me, redactor))
        inbox = StreamInbox(
            readers[0] if len(readers) == 1 else readers,
            parts.pipe,
            list(registry),
            stale_seconds=settings.lease_seconds,
            logs=log_appender(settings, parts.clock).write,
        )
        held = HeldStarts()
        task_source = QueueTaskSource(
            inbox,
            parts.store,
            parts.orchestrator.timers,
            RedisLimits(parts.pipe, buckets(settings), clock=parts.clock),
            parts.clock,
            parts.orchestrator.apply_each,
            worker_id=me,
            lease_seconds=settings.lease_seconds,
            secrets=settings.secrets,
            held=held,
        )
        reader = StoreReader(partial(_input_store, settings))
        stack.callback(reader.close)
        calls = handler_calls(
            settings,
            registry,
            outputs_as_text=True,
            elsewhere=partial(RemoteInputs, reader.call),
        )
        if listener is not None:
            calls = listener.calls(calls)
        loop = asyncio.get_running_loop()
        crashed: asyncio.Future[None] = loop.create_future()

        def crash(error: BaseException) -> None:
            if not crashed.done():
                crashed.set_exception(error)

        def crash_with(duty: asyncio.Task[None]) -> None:
            if not duty.cancelled() and (error := duty.exception()):
                crash(error)

        fleet = WorkerRegistry(parts.pipe, heartbeat_timeout=settings.heartbeat_timeout)
        worker = Worker(task_source, calls, parts.clock, crash, concurrency=settings.concurrency)
        stack.enter_context(capturing(log_rules(settings)))
        worker.start()
        schemas, texts = schema_texts(registry.announced_schemas())
        facts = _facts(registry, settings, me)._replace(schemas=schemas)

        def stop(order: Stop) -> None:
            held.drop([order])
            worker.stop(order)

        def stop_lost(order: Stop) -> None:
            if order in held:  # else it was done while its renewal was on its way
                stop(order)

        def lose(order: Stop) -> None:
            loop.call_soon_threadsafe(stop_lost, order)

        keeper = DutyThread(
            "dovetail-leases",
            lambda: _keep_alive(
                settings,
                held,
                Liveness(loop, worker.blocker),
                parts.clock,
                lose,
                lambda: facts._replace(running=len(held), quick=inbox.quick()),
                texts,
            ),
            crash,
        )
        background = [
            asyncio.create_task(supervise(name, duty))
            for name, duty in (
                ("orders to stop", lambda: _receive_stops(StopBroadcast(listening), stop)),
                ("after a break", inbox.resend_after_restarts),
                ("sharing", inbox.share),
            )
        ]
        for task in background:  # a worker that renews no leases, say, must not go on
            task.add_done_callback(crash_with)
        await stack.enter_async_context(keeper)
        try:
            yield RunningWorker(crashed, worker.holding)
            await worker.drain(settings.drain_seconds, task_source.hand_back)
        finally:
            for task in background:
                task.cancel()
            await worker.close()
            await keeper.close()  # before this worker leaves the registry
            await asyncio.gather(*background, return_exceptions=True)
            crashed.cancel()
            # While Redis is away this is skipped: the heartbeat then ends by itself.
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await task_source.close()
                    await fleet.leave(me)


def log_appender(settings: Settings, clock: Clock) -> LogAppender:
    """What writes lines of handlers."""

    def behind(run_ids: Iterable[str]) -> Command:
        return queueing(ArchiveEntry(run_id, clock()) for run_id in run_ids)

    archive = None if settings.database_url is None else behind
    return LogAppender(max_bytes=settings.run_log_bytes, queueing=archive)


async def _keep_alive(
    settings: Settings,
    held: HeldStarts,
    liveness: Liveness,
    clock: Clock,
    stop: Callable[[Stop], None],
    facts: Callable[[], WorkerFacts],
    schemas: Mapping[str, bytes],
) -> None:
    """Renew a worker's leases and send its heartbeat while it is alive, in a thread and on a
    connection of their own, so that the worker cannot delay them. The first heartbeat announces
    the schemas."""
    async with PipelinedRedis(_url(settings)) as pipe:
        fleet = WorkerRegistry(pipe, heartbeat_timeout=settings.heartbeat_timeout, schemas=schemas)
        leases = RedisLeases(pipe, clock, settings.lease_seconds)

        def holding() -> list[Task]:
            return liveness.renewable(held.tasks())

        async def beat() -> None:
            while True:
                if liveness.is_alive():
                    await fleet.beat(facts())
                await asyncio.sleep(settings.heartbeat_interval)

        async def renew() -> None:
            await keep_leases(leases, holding, stop, settings.lease_seconds)

        async with asyncio.TaskGroup() as group:
            group.create_task(supervise("leases", renew))
            group.create_task(supervise("heartbeat", beat))


async def _receive_stops(feed: StopBroadcast, stop: Callable[[Stop], None]) -> None:
    while True:
        for order in await feed.next():
            stop(order)


def _facts(registry: Registry, settings: Settings, me: str) -> WorkerFacts:
    """What a worker announces about itself."""
    return WorkerFacts(
        worker_id=me,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=time.time(),
        handlers=sorted(registry),
        running=0,
        concurrency=settings.concurrency,
        retries={name: many for name, many in registry.default_retries().items() if many},
        secrets=registry.taking_secrets(),
        versions=registry.later_versions(),
    )


@asynccontextmanager
async def commanding(
    settings: Settings,
    registry: Registry | None = None,
    listener: Listener | None = None,
    *,
    kind: str | None = None,
) -> AsyncIterator[Commands]:
    """The commands over the stores of the settings.

    `kind` announces this process as a service. Without it, runs can be read even where the services
    have another transport, and none can be triggered.
    """
    async with (
        connected(settings, patience=ASKING_SECONDS, listener=listener) as parts,
        AsyncExitStack() as stack,
    ):
        archive = parts.archive
        await refuse_eviction(parts.pipe, settings, log.warning)
        if kind is not None:
            await stack.enter_async_context(_announced(settings, parts.pipe, kind, service_id()))
        services = ServiceRegistry(parts.pipe, heartbeat_timeout=settings.heartbeat_timeout)
        refused = conflict(settings.transport, await services.alive())
        if archive is None and await parts.pipe.call("EXISTS", ARCHIVE):
            raise SettingsError(
                f"the services on this Redis keep runs in PostgreSQL, too: set "
                f"{env_name('database_url')} as it is set for them"
            )
        hot = _records(settings, parts.pipe)
        acceptance: AcceptedRuns = hot
        past: ArchivedRuns | None = None
        if archive is not None:
            acceptance = ArchivedAcceptedRuns(archive.records, archive.restorer)
            past = ArchivedRuns(archive.runs, archive.restorer, archive.archiver)
        records = hot if archive is None else archive.records
        submissions = TriggerService(
            *(acceptance, parts.orchestrator, parts.clock, _delayed),
            None if refused is None else RedisError(refused),
        )
        deleter = hot if archive is None else archive.deleter
        runs = TieredRuns(parts.pipe, parts.store, submissions, past, deleter)
        fleet = WorkerRegistry(parts.pipe, heartbeat_timeout=settings.heartbeat_timeout)

        async def hindered() -> str | None:
            alive = await services.alive()
            return mixture(alive) or conflict(settings.transport, alive)

        own = builtin_registry(settings) if registry is None else registry
        handlers = Handlers(own.default_retries(), fleet, own.secret_fields, own.config_schema)
        yield Commands(
            store=runs,
            records=records,
            run_feed=parts.feed,
            orchestrator=submissions,
            wait=runs.wait,
            clock=parts.clock,
            known_handlers=handlers,
            default_retries=handlers.retries,
            limits=definition_limits(settings),
            rates=SharedRates(buckets(settings), records),
            max_crashes=settings.max_crashes,
            digest=stored_definition,
            max_config_bytes=settings.max_config_bytes,
            actor=user_name(),
            drives=False,
            why_not_here=DRIVEN_BY_ORCHESTRATORS,
            learn_handlers=handlers.learn,
            serving=fleet.served,
            check_writable=partial(_check_writable, parts, archive),
            hindered=hindered,
            letters=fleet,
            inspector=ServicesHealth(
                *(parts.pipe, own, parts.clock), heartbeat_timeout=settings.heartbeat_timeout
            ),
        )


async def _check_writable(parts: ServiceParts, archive: ArchiveParts | None) -> None:
    """Check the store that accepts runs: PostgreSQL if there is one, else Redis."""
    if archive is None:
        await check_writable(parts.pipe)
    else:
        await archive.pool.check_writable()


def _records(
    settings: Settings,
    pipe: PipelinedRedis,
    origin: Callable[[str], RunOrigin | None] | None = None,
) -> RedisRecords:
    return RedisRecords(
        pipe,
        limits=RedisLimits(pipe, buckets(settings)),
        retention_seconds=settings.redis_retention_days * DAY_SECONDS,
        origin=origin,
    )


def _announced(
    settings: Settings, pipe: PipelinedRedis, kind: str, me: str
) -> AbstractAsyncContextManager[None]:
    """Announce this service and its transport; refused if other services have another one."""
    return announced(
        pipe,
        AnnouncedService(settings.transport, kind, me),
        heartbeat_timeout=settings.heartbeat_timeout,
        pause=settings.heartbeat_interval,
    )


def _delayed(error: DovetailError) -> None:
    log.warning("accepted, and created later: %s", error)


def service_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


def _url(settings: Settings) -> str:
    return settings.redis_url or "redis://127.0.0.1:6379/0"
