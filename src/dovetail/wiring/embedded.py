"""Builds the engine inside one process, in memory or over an SQLite file."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from dovetail.config import Settings
from dovetail.core.definition.validation import DefinitionLimits
from dovetail.core.errors import StoreError, one_line
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.templates import MAX_CONFIG_SIZE
from dovetail.core.text import counted
from dovetail.core.transitions import Stop
from dovetail.engine.cache import NodeCache, Versions
from dovetail.engine.clock import Clock, steady_clock
from dovetail.engine.commands import Commands
from dovetail.engine.lease_keeper import Liveness
from dovetail.engine.limits import KeptLimits, LocalLimits, TokenBucket
from dovetail.engine.listener import Listener
from dovetail.engine.local.orchestrator import LocalOrchestrator
from dovetail.engine.local.task_source import LocalTaskSource, LoggingStore
from dovetail.engine.ports import Calls, DoctorFinding, Task
from dovetail.engine.ports import RateLimiter as RateLimits
from dovetail.engine.supervisor import run_every, supervise
from dovetail.engine.worker import Worker
from dovetail.handlers.calls import OutputSource, RegistryCalls
from dovetail.handlers.log_capture import LogRules, capturing
from dovetail.handlers.registry import Registry
from dovetail.stores.memory import MemoryStore
from dovetail.stores.records import stored_definition
from dovetail.stores.sqlite.event_source import SqliteEventSource
from dovetail.stores.sqlite.limits import BucketFile
from dovetail.stores.sqlite.outbox import SqliteOutbox
from dovetail.stores.sqlite.records import SqliteRecords
from dovetail.stores.sqlite.store import InstrumentedSqliteStore, SqliteObserver, SqliteStore
from dovetail.transports.local import LocalTransport, NoTransport
from dovetail.wiring.event_export import event_exporter
from dovetail.wiring.webhooks import webhook_sender

DAY_SECONDS = 86400.0
RETENTION_PAUSE_SECONDS = 15.0
LAST_SEND_SECONDS = 5.0
"""For webhooks that are being sent when the engine is closed."""

log = logging.getLogger("dovetail.store")


class LocalStore(LoggingStore, Protocol):
    def abort(self, error: BaseException) -> None: ...


class LocalEngine:
    """Orchestrator and worker in this process; state in its memory, unless a store is given."""

    def __init__(
        self,
        calls: Calls,
        *,
        concurrency: int,
        store: LocalStore | None = None,
        limits: RateLimits | None = None,
        isolate: bool = True,
        max_config_size: int = MAX_CONFIG_SIZE,
        clock: Clock | None = None,
        versions: Versions | None = None,
        secrets: Mapping[str, str] | None = None,
        on_event: Callable[[Event], None] | None = None,
        chance: Callable[[], float] = random.random,
        watches_loop: bool = True,
    ) -> None:
        """`versions` and `secrets` of the handlers decide what the node cache answers. `on_event`
        is called with each event of runs that are kept in memory. `chance` is the jitter of
        backoffs, from 0 to 1; `watches_loop` as in `Worker`."""
        clock = clock or steady_clock()
        transport = LocalTransport(self.stop)
        self._crashed: BaseException | None = None
        self._memory = MemoryStore(on_event) if store is None else None
        self.store: LocalStore = self._memory or store  # type: ignore[assignment]
        self.orchestrator = LocalOrchestrator(self.store, transport, clock, self.crash)
        self.task_source = LocalTaskSource(
            transport,
            self.store,
            self.orchestrator,
            limits or LocalLimits(),
            clock,
            worker_id=f"{_host()}-{os.getpid()}",
            isolate=isolate,
            max_config_size=max_config_size,
            cache=NodeCache(self.store, clock, versions, secrets or {}),
        )
        self.worker = Worker(
            *(self.task_source, calls, clock, self.crash),
            concurrency=concurrency,
            chance=chance,
            watches_loop=watches_loop,
        )
        self.depths = transport.depths

    async def __aenter__(self) -> LocalEngine:
        self.worker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.orchestrator.close()
        await self.worker.close()
        if self._memory is not None:
            self._memory.close()

    async def wait(self, run_id: str) -> RunState:
        """The run once it has finished. If a part of the engine died, that is raised instead."""
        if self._crashed is not None:
            raise self._crashed
        return await self.store.wait(run_id)

    def stop(self, order: Stop) -> None:
        """Stop a task that the worker runs."""
        self.worker.stop(order)

    def crash(self, error: BaseException) -> None:
        """A bug or a lost store must end the engine loudly, never leave it half alive."""
        if self._crashed is None:
            self._crashed = error
            self.store.abort(error)


def handler_calls(
    settings: Settings,
    registry: Registry,
    *,
    outputs_as_text: bool = False,
    elsewhere: Callable[[Task], OutputSource] | None = None,
) -> Calls:
    """Calls of these handlers, within the limits that are set. See `RegistryCalls`."""
    return RegistryCalls(
        registry,
        secrets=settings.secrets,
        sensitive=settings.sensitive(),
        max_config_bytes=settings.max_config_bytes,
        max_output_bytes=settings.max_output_bytes,
        max_input_bytes=settings.max_input_bytes,
        outputs_as_text=outputs_as_text,
        elsewhere=elsewhere,
        log_rules=log_rules(settings),
    )


def log_rules(settings: Settings) -> LogRules:
    return LogRules(
        level=logging.getLevelNamesMapping()[settings.log_level],
        output=settings.capture_output,
        max_bytes=settings.node_log_bytes,
    )


@asynccontextmanager
async def embedded(
    settings: Settings, registry: Registry, listener: Listener | None = None
) -> AsyncIterator[Commands]:
    """The durable engine inside this process, running, as the commands that drive it.

    Leaving it gives what runs `drain_seconds` to finish; whatever is unfinished then is handed
    back, for another process to go on with. An error takes it down at once. `listener` gets
    the events of runs.
    """
    calls = handler_calls(settings, registry)
    clock = steady_clock()
    shared = BucketFile(settings.db, clock)
    configured = buckets(settings).items()
    limits = LocalLimits(
        {tag: shared.bucket(tag, bucket.rate, bucket.burst) for tag, bucket in configured},
        shared.bucket,
    )
    options: dict[str, Any] = {
        "sync": settings.db_sync,
        "lease_seconds": settings.lease_seconds,
        "max_run_bytes": settings.max_run_bytes,
        "webhooks": settings.webhooks,
    }
    if listener is None:
        store = SqliteStore(settings.db, **options)
    else:
        store = heard = InstrumentedSqliteStore(settings.db, listener, **options)
        calls = listener.calls(calls, heard.caller_of)
    async with store:
        engine = LocalEngine(
            calls,
            concurrency=settings.concurrency,
            store=store,
            limits=limits,
            max_config_size=settings.max_config_bytes,
            clock=clock,
            versions=registry_versions(registry),
            secrets=settings.secrets,
        )
        rates = KeptLimits(limits, SqliteRecords(store), clock, engine.task_source.retime)
        commands = _commands(settings, store, engine.orchestrator, rates, clock, registry)
        commands = replace(commands, wait=engine.wait, drives=True)
        liveness = Liveness(asyncio.get_running_loop(), engine.worker.blocker)
        store.observe(
            SqliteObserver(
                on_effects=engine.orchestrator.dispatch_effects_soon,
                on_crash=engine.crash,
                on_change=rates.refresh,
                is_alive=liveness.is_alive,
            )
        )
        if listener is not None:
            listener.watch_queue(engine.depths)
        await rates.refresh()
        summary = commands.records.summary
        sender = webhook_sender(settings, SqliteOutbox(store), summary, clock, listener)
        duties = [
            asyncio.create_task(_retain(store, settings.retention_days, clock)),
            asyncio.create_task(supervise("webhooks", sender.run)),
        ]
        exporter = event_exporter(settings, SqliteEventSource(store), clock, listener)
        if exporter is not None:
            duties.append(asyncio.create_task(supervise("events", exporter.run)))
        try:
            with capturing(log_rules(settings)):
                async with engine:
                    yield commands
                    await engine.worker.drain(settings.drain_seconds)
                    await sender.drain(min(settings.drain_seconds, LAST_SEND_SECONDS))
                    if exporter is not None:
                        await exporter.drain(min(settings.drain_seconds, LAST_SEND_SECONDS))
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.gather(*duties, return_exceptions=True)
            shared.close()


async def _retain(store: SqliteStore, days: float | None, clock: Clock) -> None:
    """Delete runs that ended long ago, and give the space of deleted runs back, for ever.

    Any number of processes on a file may do so: a run is deleted once. A store that is lost ends
    the engine, and this with it.
    """

    async def once() -> None:
        try:
            if days is not None:
                deleted = await store.delete_ended(clock() - days * DAY_SECONDS)
                if deleted:
                    log.info(
                        "retention: deleted %s that ended more than %g days ago",
                        *(counted(deleted, "run"), days),
                    )
            await store.reclaim_space()
        except StoreError as error:
            log.warning("retention: %s; trying again", error)

    await run_every(RETENTION_PAUSE_SECONDS, once)


@asynccontextmanager
async def attached(
    settings: Settings, registry: Registry | None = None, *, create: bool = False
) -> AsyncIterator[Commands]:
    """The same commands over the same file, in a process that owns no runs.

    A file that is not there is made only with `create`; without, everything is found empty.
    """
    with TemporaryDirectory(prefix="dovetail-") as nowhere:
        path = settings.db
        if not create and not path.exists():
            path = Path(nowhere) / path.name
        most = settings.max_run_bytes
        store = SqliteStore(
            path,
            sync=settings.db_sync,
            drives=False,
            max_run_bytes=most,
            webhooks=settings.webhooks,
            name=settings.db,
        )
        async with store:
            clock = steady_clock()
            rates = KeptLimits(LocalLimits(buckets(settings)), SqliteRecords(store), clock)
            orchestrator = LocalOrchestrator(store, NoTransport(), clock, store.abort)
            store.observe(SqliteObserver(on_change=rates.refresh))
            await rates.refresh()
            yield _commands(settings, store, orchestrator, rates, clock, registry)


async def redis_findings(settings: Settings) -> list[DoctorFinding]:
    """What a doctor has to say about the Redis of the settings, whether it is there or not."""
    try:  # here: the embedded engine works without a client for Redis
        from dovetail.stores.redis.doctor import reach
    except ImportError as error:
        message = f"the client for Redis is not installed: {error}"
        return [DoctorFinding("redis", False, message, "pip install 'dovetail[redis]'")]
    return await reach(settings)


async def broker_findings(settings: Settings) -> list[DoctorFinding]:
    """The same about Celery's broker, where that carries tasks."""
    if settings.transport != "celery":
        return []
    try:
        from dovetail.transports.celery.sender import examine
    except ImportError as error:
        message = f"Celery is not installed: {error}"
        return [DoctorFinding("broker", False, message, "pip install 'dovetail[celery]'")]
    return await examine(settings)


async def database_findings(settings: Settings) -> list[DoctorFinding]:
    """The same about the PostgreSQL of the settings, if they name one."""
    if settings.database_url is None:
        return []
    from dovetail.stores.postgres.pool import PostgresPool
    from dovetail.stores.postgres.records import PostgresRecords

    async with PostgresPool(settings.database_url, connections=1) as pool:
        return await PostgresRecords(pool).doctor()


async def migrate_database(url: str) -> None:
    """Bring the tables of this PostgreSQL up to date, which services do at their start as well."""
    from dovetail.stores.postgres.pool import PostgresPool

    async with PostgresPool(url, connections=1) as pool:
        await pool.migrate()


def _commands(
    settings: Settings,
    store: SqliteStore,
    orchestrator: LocalOrchestrator,
    rates: KeptLimits,
    clock: Clock,
    registry: Registry | None,
) -> Commands:
    return Commands(
        store=store,
        records=SqliteRecords(store),
        run_feed=store,
        orchestrator=orchestrator,
        wait=store.wait,
        clock=clock,
        known_handlers=registry,
        default_retries={} if registry is None else registry.default_retries(),
        limits=definition_limits(settings),
        rates=rates,
        max_crashes=settings.max_crashes,
        digest=stored_definition,
        max_config_bytes=settings.max_config_bytes,
        actor=user_name(),
        drives=False,
        check_writable=store.check_writable,
        lost=store.lost,
        letters=SqliteOutbox(store),
    )


@asynccontextmanager
async def shared_limits(url: str, settings: Settings, clock: Clock) -> AsyncIterator[RateLimits]:
    """The token buckets that all workers on this Redis share; times are on the given clock."""
    from dovetail.redis_client.pipelined import PipelinedRedis
    from dovetail.stores.redis.limits import RedisLimits

    async with PipelinedRedis(url) as pipe:
        yield RedisLimits(pipe, buckets(settings), clock=clock)


def registry_versions(registry: Registry) -> Versions:
    """The versions of handlers that run in this very process."""
    later = registry.later_versions()

    async def version(handler: str) -> int:
        return later.get(handler, 1)

    return version


def buckets(settings: Settings) -> dict[str, TokenBucket]:
    return {
        tag: TokenBucket(limit.rate_per_second, limit.burst)
        for tag, limit in settings.rate_limits.items()
    }


@cache
def user_name() -> str:
    """The user of this process, as a history names it."""
    try:
        return one_line(getpass.getuser())
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid {os.getuid()}"


@cache
def _host() -> str:
    return socket.gethostname()


def definition_limits(settings: Settings) -> DefinitionLimits:
    return DefinitionLimits(
        max_nodes=settings.max_nodes,
        max_edges=settings.max_edges,
        max_body_bytes=settings.max_body_bytes,
        max_depth=settings.max_nesting,
        max_template_bytes=settings.max_template_bytes,
    )
