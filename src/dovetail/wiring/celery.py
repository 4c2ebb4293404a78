"""Puts together what works inside a Celery worker: its main process, and each process of its pool.

The main process says that it is alive and which handlers it has; it runs none. A process of the
pool gets one message at a time, claims the node or item of its task, runs the handler and sends the
result, over a connection of its own. Celery imports this module by its name.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import orjson
from billiard import current_process  # type: ignore[import-untyped]
from billiard.pool import SIG_SOFT_TIMEOUT  # type: ignore[import-untyped]
from celery import bootsteps, shared_task, signals  # type: ignore[import-untyped]
from celery.exceptions import SoftTimeLimitExceeded  # type: ignore[import-untyped]
from celery.worker import state as celery_state  # type: ignore[import-untyped]

from dovetail.config import Settings, env_name, load_settings
from dovetail.core.effects import failure_data
from dovetail.core.errors import DovetailError, StoreError
from dovetail.core.items import split_place
from dovetail.core.node_logs import LogChunk
from dovetail.core.redaction import Redactor
from dovetail.core.states import NodeStatus
from dovetail.core.text import counted, visible
from dovetail.core.transitions import Complete
from dovetail.engine.blocking_worker import BlockingWorker, LeaseThread, LeaseThreadTasks
from dovetail.engine.clock import StoreClock
from dovetail.engine.distributed.task_source import (
    QueueTaskSource,
    RemoteInputs,
    StoreWork,
    waited_for,
)
from dovetail.engine.listener import Listener
from dovetail.engine.ports import Result, Task
from dovetail.engine.supervisor import supervise
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.log_capture import capture_for_good
from dovetail.handlers.registry import Registry
from dovetail.redis_client.pipelined import Command, PipelinedRedis, RedisUnreachable
from dovetail.redis_client.sync import SyncRedis, done
from dovetail.stores.redis.codec import keys_of, node_of
from dovetail.stores.redis.doctor import refuse_eviction, warn_of_lost_writes
from dovetail.stores.redis.items import output_of_ended
from dovetail.stores.redis.limits import RedisLimits
from dovetail.stores.redis.store import RedisStore
from dovetail.stores.redis.timers import RedisTimerIndex
from dovetail.stores.redis.workers import (
    AnnouncedService,
    ServiceRegistry,
    WorkerFacts,
    WorkerRegistry,
    schema_texts,
)
from dovetail.transports.celery.application import QUEUE, TASK, MessageGuard, make_app
from dovetail.transports.celery.counts import taken
from dovetail.transports.messages import (
    MISREAD,
    RESULTS,
    Malformed,
    dead_letter_commands,
    read_task,
    result_fields,
)
from dovetail.transports.streams.reader import StopBroadcast
from dovetail.wiring.distributed import connected, log_appender, service_id
from dovetail.wiring.embedded import buckets, handler_calls, log_rules

BEAT_PATIENCE_SECONDS, FAREWELL_SECONDS = 0.5, 2.0
"""How long the main process waits for Redis: at a heartbeat, which must not block the consumer, and
at its end or for a refused message."""
PASS_ON_SECONDS = 0.2
"""A worker that lacks the handler waits so long before it sends the message on, so that another
worker may take it."""
MAIN_PROCESS = "MainProcess"
INTERRUPT = signal.SIGURG
"""No other code uses it, and a process without a handler for it ignores it."""

log = logging.getLogger("dovetail.worker")


# ── what every process of a worker knows ─────────────────────────────────────────────────


@dataclass
class WorkerState:
    """Configured in the main process before it forks; the processes of the pool inherit it."""

    settings: Settings | None = None
    registry: Registry | None = None
    listener: Listener | None = None
    in_child: Callable[[], None] = lambda: None
    """Called first in a process of the pool."""
    worker_id: str = field(default_factory=service_id)
    began: float = field(default_factory=time.time)
    _ends_at: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 8))
    """Shared by all processes: the time at which running tasks are given back, or 0 for no such
    time."""

    def configure(
        self,
        settings: Settings,
        registry: Registry,
        listener: Listener | None,
        in_child: Callable[[], None],
    ) -> None:
        self.settings, self.registry = settings, registry
        self.listener, self.in_child = listener, in_child

    def known(self) -> tuple[Settings, Registry]:
        """Settings and handlers: the configured ones, or from the environment."""
        if self.settings is None:
            self.settings = load_settings()
        if self.registry is None:
            self.registry = load_registry(self.settings)
        return self.settings, self.registry

    def end_within(self, seconds: float) -> None:
        self._ends_at[:] = struct.pack("d", time.time() + seconds)

    def ends_at(self) -> float:
        (at,) = struct.unpack("d", self._ends_at[:])
        return at or math.inf


state = WorkerState()


def redis_of(settings: Settings) -> str:
    if settings.redis_url is None:
        raise StoreError(f"{env_name('redis_url')} is not set: runs are kept in Redis")
    return settings.redis_url


# ── the main process ─────────────────────────────────────────────────────────────────────


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
def _prepare(instance: Any, **_: Any) -> None:
    """Before anything is forked: a worker that cannot work says so now, and once."""
    try:
        settings, _registry = state.known()
        redis_of(settings)
    except DovetailError as error:
        sys.stderr.write(f"dovetail: {visible(str(error))}\n")
        raise SystemExit(2) from None
    _check_redis(settings)
    instance.app.steps["consumer"].update({Heartbeat, MessageGuard})


def _me() -> AnnouncedService:
    return AnnouncedService("celery", "worker", state.worker_id)


def _check_redis(settings: Settings) -> None:
    """The checks of `dovetail worker` at its start. Celery itself waits for a Redis that is
    away."""
    pipe = SyncRedis(redis_of(settings), patience=BEAT_PATIENCE_SECONDS)
    try:
        done(refuse_eviction(pipe, settings, log.warning))
        done(warn_of_lost_writes(pipe, settings, log.warning))
        done(ServiceRegistry(pipe, heartbeat_timeout=settings.heartbeat_timeout).join(_me()))
    except RedisUnreachable as error:
        log.warning("the settings of Redis are not checked: %s", error)
    except StoreError as error:
        sys.stderr.write(f"dovetail: {visible(str(error))}\n")
        raise SystemExit(1) from None
    finally:
        pipe.close()


class Heartbeat(bootsteps.StartStopStep):  # type: ignore[misc]
    """Says that this worker is alive, for as long as it can take work."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        settings, registry = state.known()
        self._pipe = SyncRedis(redis_of(settings), patience=BEAT_PATIENCE_SECONDS)
        self._schemas, texts = schema_texts(registry.announced_schemas())
        self._workers = WorkerRegistry(
            self._pipe, heartbeat_timeout=settings.heartbeat_timeout, schemas=texts
        )
        self._services = ServiceRegistry(self._pipe, heartbeat_timeout=settings.heartbeat_timeout)
        self._logged: str | None = None
        self._retries = {name: many for name, many in registry.default_retries().items() if many}
        self._secrets = registry.taking_secrets()
        self._versions = registry.later_versions()
        self._beat(consumer)
        self._timer = consumer.timer.call_repeatedly(
            settings.heartbeat_interval, self._beat, (consumer,)
        )

    def _beat(self, consumer: Any) -> None:
        _, registry = state.known()
        facts = WorkerFacts(
            worker_id=state.worker_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=state.began,
            handlers=sorted(registry),
            running=len(celery_state.active_requests),
            concurrency=consumer.pool.num_processes or 1,
            retries=self._retries,
            secrets=self._secrets,
            versions=self._versions,
            schemas=self._schemas,
        )
        try:
            done(self._workers.beat(facts))
            problem = done(self._services.beat(_me()))
            if problem is not None and problem != self._logged:
                log.warning("%s", problem)
            self._logged = problem
        except StoreError as error:
            log.warning("no heartbeat: %s", error)

    def stop(self, consumer: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._pipe.close()

    shutdown = stop


@signals.worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _drain(how: str = "", **_: Any) -> None:
    if how == "Warm":
        state.end_within(state.known()[0].drain_seconds)


@signals.worker_shutdown.connect  # type: ignore[untyped-decorator]
def _leave(**_: Any) -> None:
    pipe = SyncRedis(redis_of(state.known()[0]), patience=FAREWELL_SECONDS)
    with suppress(StoreError):  # without this, the heartbeat times out a little later
        done(WorkerRegistry(pipe).leave(state.worker_id))
        done(ServiceRegistry(pipe).leave(_me()))
    pipe.close()


@signals.task_unknown.connect  # type: ignore[untyped-decorator]
@signals.task_rejected.connect  # type: ignore[untyped-decorator]
def _refused(message: Any = None, exc: Any = None, **_: Any) -> None:
    """Keep a message that Celery throws away, because it does not know or may not read it, as a
    dead letter."""
    settings = state.known()[0]
    pipe = SyncRedis(redis_of(settings), patience=FAREWELL_SECONDS)
    headers = getattr(message, "headers", None)
    headers = headers if isinstance(headers, dict) else {}
    fields = {str(name): str(value) for name, value in headers.items()}
    reason = f"no such task: {exc}" if isinstance(exc, KeyError) else str(exc or "no task at all")
    with suppress(StoreError):
        dead_letter(pipe, settings, str(headers.get("id")), fields, reason)
    pipe.close()


# ── a process of the pool ────────────────────────────────────────────────────────────────


@shared_task(  # type: ignore[untyped-decorator]
    bind=True,
    name=TASK,
    typing=False,
    acks_late=True,
    reject_on_worker_lost=False,
    ignore_result=True,
    track_started=True,
    serializer="json",
    max_retries=0,
)
def execute_node(self: Any, *args: Any, **fields: Any) -> dict[str, Any]:
    """Run the task with these fields, unless another worker has it, or it is done."""
    return _pool_process().task_runner().execute(self.request.id, args, fields)


class PoolProcess:
    """A process of the pool. Usually one thread runs handlers, and another keeps its lease."""

    def __init__(self) -> None:
        state.in_child()
        self.pid = os.getpid()
        self.settings, self.registry = state.known()
        self.worker_id = f"{state.worker_id}/{self.pid}"
        self.clock = StoreClock()
        elsewhere = partial(RemoteInputs, self.read_store)
        calls = handler_calls(self.settings, self.registry, elsewhere=elsewhere)
        capture_for_good(log_rules(self.settings))
        self.calls = calls if state.listener is None else state.listener.calls(calls)
        self.appender = log_appender(self.settings, self.clock)
        self._local = threading.local()
        self._runners: list[TaskRunner] = []
        # Last: its thread begins at once, and calls this object.
        self.lease_thread = LeaseThread(
            self._duties,
            supervise,
            _crash,
            lease_seconds=self.settings.lease_seconds,
            give_back_at=state.ends_at,
            confirm=self._confirm,
        )

    def task_runner(self) -> TaskRunner:
        """The one of this thread."""
        runner: TaskRunner | None = getattr(self._local, "runner", None)
        if runner is None:
            runner = self._local.runner = TaskRunner(self)
            self._runners.append(runner)
        return runner

    def read_store(self, work: StoreWork) -> Any:
        """Read from the store in the loop of the lease thread, for a handler in any thread."""
        return waited_for(self._with_store(work), self.lease_thread.loop)

    async def _with_store(self, work: StoreWork) -> Any:
        await self.lease_thread.opened()
        return await work(self._parts.store)

    def _confirm(self) -> None:
        for runner in self._runners:
            runner.pipe.flush_acks()

    async def pass_on(self, task: Task) -> bool:
        """Send the task to Celery again, if another worker has its handler."""
        parts = self._parts
        workers = WorkerRegistry(parts.pipe, heartbeat_timeout=self.settings.heartbeat_timeout)
        if task.handler not in await workers.served():
            return False  # once a worker has it, the sweep publishes the task again
        await asyncio.sleep(PASS_ON_SECONDS)
        await parts.sender.send([task])
        return True

    def _write_logs(self, pipe: PipelinedRedis, chunks: Sequence[LogChunk]) -> None:
        self.appender.write(pipe, chunks, alone=True)

    @asynccontextmanager
    async def _duties(self) -> AsyncIterator[LeaseThreadTasks]:
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(
                connected(self.settings, listener=state.listener, clock=self.clock)
            )
            listening = await stack.enter_async_context(PipelinedRedis(redis_of(self.settings)))
            self._parts = parts
            task_source = QueueTaskSource(
                ResultSender(parts.pipe, partial(self._write_logs, parts.pipe)),
                parts.store,
                parts.orchestrator.timers,
                RedisLimits(parts.pipe, buckets(self.settings), clock=parts.clock),
                parts.clock,
                parts.orchestrator.apply_each,
                worker_id=self.worker_id,
                lease_seconds=self.settings.lease_seconds,
                secrets=self.settings.secrets,
            )
            yield LeaseThreadTasks(task_source, StopBroadcast(listening))


@signals.worker_process_init.connect  # type: ignore[untyped-decorator]
def _begin(**_: Any) -> None:
    """Before the first task: its lease thread must listen by then."""
    _pool_process()


_process: PoolProcess | None = None


def _pool_process() -> PoolProcess:
    global _process
    if _process is None or _process.pid != os.getpid():
        _process = PoolProcess()
    return _process


def _crash(error: BaseException) -> None:
    """End this process, which would lose its leases without the thread. Celery starts another
    one."""
    log.critical("the lease thread of pid %d ended", os.getpid(), exc_info=error)
    os._exit(70)


class TaskRunner:
    """Executes the messages of one thread of the pool."""

    def __init__(self, process: PoolProcess) -> None:
        self._process = process
        settings = process.settings
        self.pipe = SyncRedis(redis_of(settings))
        self._task_source = QueueTaskSource(
            ResultSender(self.pipe, self.log),
            RedisStore(self.pipe, events=False),
            RedisTimerIndex(self.pipe),
            RedisLimits(self.pipe, buckets(settings), clock=process.clock),
            process.clock,
            _nothing_to_follow,
            worker_id=process.worker_id,
            lease_seconds=settings.lease_seconds,
            secrets=settings.secrets,
        )
        interrupt = None
        if threading.current_thread() is threading.main_thread():
            interrupt = partial(signal.pthread_kill, threading.get_ident(), INTERRUPT)
        self._worker = BlockingWorker(
            process.calls,
            process.lease_thread,
            process.clock,
            log=self._task_source.log,
            interrupt=interrupt,
        )
        if interrupt is not None:
            _install_signals(self._worker)

    def execute(
        self, message_id: str, args: Sequence[Any], fields: dict[str, Any]
    ) -> dict[str, Any]:
        try:
            task = _read_task(args, fields)
        except MISREAD as problem:
            self.pipe.enqueue(taken(None))
            reason = str(problem) or type(problem).__name__
            dead_letter(self.pipe, self._process.settings, message_id, fields, reason)
            return {"dead": reason}
        self.pipe.enqueue(taken(task.handler))
        if task.handler not in self._process.registry:
            passed = self._process.lease_thread.call(partial(self._process.pass_on, task))
            self._flush()
            return {"passed_on": passed}
        granted = self._claimed(task)
        if granted is None:
            return self._reason_of_refusal(task)
        result = self._worker.run(granted, self._send_result)
        if result is None:
            return {"stopped": True}
        if isinstance(result, Complete):
            return {"success": True}
        return {"success": False, "error": failure_data(result.error)["error"]}

    def _claimed(self, task: Task) -> Task | None:
        """The task, if this process has claimed it."""
        if task.resource_tag is None:
            found = done(self._task_source.start([(None, task)]))
        else:  # a rate limit may have to park the node, which takes an event loop
            self._flush()
            found = self._process.lease_thread.call(partial(self._process.lease_thread.start, task))
        return found[0] if found else None

    def _reason_of_refusal(self, task: Task) -> dict[str, Any]:
        """What Celery gets as the result of a task that was not claimed."""
        if task.place is None:
            return {"skipped": True}
        index, item = split_place(task.place)
        _, nodes, _, outputs, _, _, _, maps, items, _ = keys_of(task.run_id)
        if item is None:
            asked: list[Command] = [("HGET", nodes, index), ("HGET", outputs, index)]
        else:
            asked = [("HGET", maps, task.place), ("HGET", items, task.place), ("HGET", maps, index)]
        node_state, output, *counts = done(self.pipe.call_many(asked))
        node = None if node_state is None else node_of(node_state.decode())
        if node is None and item is not None:  # it is not in flight
            output = output_of_ended(item, counts[0], output)
            if output is not None:
                return {"skipped": True, "output": orjson.loads(output)}
        if node is not None and node.status is NodeStatus.COMPLETED:
            return {"skipped": True, "output": orjson.loads(output or b"null")}
        if node is not None and node.until is not None:
            return {"parked": True}
        return {"skipped": True}

    def log(self, chunks: Sequence[LogChunk]) -> None:
        """Send lines of handlers at once, before the result that follows. Lines that Redis refuses
        are not sent again: a log is never in the way of a result."""
        commands = self._process.appender.commands_by_source(chunks)
        self.pipe.send_nowait(commands, until_accepted=False)

    def _send_result(self, result: Result) -> None:
        """Send a result without waiting for the reply of Redis: the next claim reads it, or the
        lease thread. If the process dies together with Redis, the lease runs out."""
        self.pipe.send_nowait([result_command(result)])

    def _flush(self) -> None:
        done(self.pipe.call_many([("PING",)]))


async def _nothing_to_follow(moves: Sequence[Any]) -> None:
    raise AssertionError("only the lease thread applies transitions")


def result_command(result: Result) -> Command:
    return ("XADD", RESULTS, "*", *result_fields(result))


class ResultSender:
    """The inbox of a process that gets each task from Celery."""

    def __init__(self, pipe: PipelinedRedis, log: Callable[[Sequence[LogChunk]], None]) -> None:
        """`log` writes lines of handlers."""
        self._pipe = pipe
        self.log = log

    async def tasks(self, limit: int) -> list[tuple[Any, Task]]:
        return []

    has_more = False

    async def open_more(self) -> None:
        """There is nothing to open."""

    async def acknowledge(self, messages: Sequence[Any]) -> None:
        """Celery acknowledges its messages itself."""

    async def send(self, results: Sequence[Result]) -> None:
        await self._pipe.call_many([result_command(one) for one in results])

    def put_back(self, found: Sequence[tuple[Any, Task]]) -> None:
        """Celery keeps the messages."""

    async def close(self) -> None: ...


def _read_task(args: Sequence[Any], fields: dict[str, Any]) -> Task:
    if args:
        raise Malformed("it has arguments without names")
    if wrong := [name for name, value in fields.items() if not isinstance(value, str)]:
        raise Malformed(f"not a text: {', '.join(wrong)}")
    return read_task([part.encode() for pair in fields.items() for part in pair])


def dead_letter(
    pipe: SyncRedis, settings: Settings, message_id: str, fields: dict[str, Any], reason: str
) -> None:
    """Keep a message that cannot be read as a dead letter, as `StreamReader` does."""
    shown = {name: str(value) for name, value in fields.items()}
    redact = Redactor(settings.sensitive()).redact_shown
    done(pipe.call_many(dead_letter_commands(QUEUE, message_id, reason, shown, redact)))


def _install_signals(worker: BlockingWorker) -> None:
    """Signals of the pool: a soft time limit, and the end of this process. Of the lease thread: an
    interruption."""
    soft_limit, terminate = signal.getsignal(SIG_SOFT_TIMEOUT), signal.getsignal(signal.SIGTERM)

    def on_soft_limit(number: int, frame: FrameType | None) -> None:
        if worker.held is not None:
            worker.expire(SoftTimeLimitExceeded)
        elif callable(soft_limit):  # of a task of another application
            soft_limit(number, frame)

    def on_terminate(number: int, frame: FrameType | None) -> None:
        worker.leave()
        if callable(terminate):
            terminate(number, frame)
        raise SystemExit

    signal.signal(SIG_SOFT_TIMEOUT, on_soft_limit)
    signal.signal(INTERRUPT, lambda *_: worker.interrupted())
    if current_process().name != MAIN_PROCESS:  # else it is Celery's own business
        signal.signal(signal.SIGTERM, on_terminate)


# ── `dovetail worker` ────────────────────────────────────────────────────────────────────


def run_worker(
    settings: Settings,
    registry: Registry,
    listener: Listener | None = None,
    in_child: Callable[[], None] = lambda: None,
) -> int:
    """Run a Celery worker in this process until a signal ends it; return its exit code."""
    state.configure(settings, registry, listener, in_child)
    signals.setup_logging.connect(_logs_are_shown)
    for noisy in ("celery", "kombu"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    app = make_app(settings)
    worker = app.Worker(
        hostname=f"dovetail-{os.getpid()}@{socket.gethostname()}",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
    )
    log.info(
        "started, pid %d: %s, %s",
        os.getpid(),
        counted(len(registry.handlers()), "handler"),
        counted(worker.concurrency, "process", "processes"),
    )
    worker.start()
    log.info("stopped, pid %d", os.getpid())
    return int(worker.exitcode or 0)


def _logs_are_shown(**_: Any) -> None:
    """Keep Celery from changing the logging of this process."""
