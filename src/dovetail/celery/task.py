"""Celery tasks that run a whole DAG (`dovetail.run_dag`), and groups of such tasks.

The DAG runs inside one process of a Celery pool and is stopped at its soft time limit. A group is
no chord: the callback of a chord does not run if one task is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import orjson
from celery import Task, group, shared_task, states  # type: ignore[import-untyped]
from celery.app.backends import by_url  # type: ignore[import-untyped]
from celery.exceptions import (  # type: ignore[import-untyped]
    Ignore,
    SoftTimeLimitExceeded,
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.exceptions import TimeoutError as NotReady
from celery.utils.dispatch import Signal  # type: ignore[import-untyped]

from dovetail.celery.dag_registry import (
    Dag,
    DagRefused,
    compiled,
    is_name,
    known_dag,
    known_handlers,
    sendable,
    settings,
    text_of,
)
from dovetail.core.definition.params import apply_params
from dovetail.core.errors import DovetailError, StoreError
from dovetail.core.retry import DEFAULT_RETRY, delay
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.text import died_during
from dovetail.core.transitions import Cancel, Submit
from dovetail.core.values import NotJson, encode
from dovetail.engine.limits import LocalLimits
from dovetail.engine.ports import Calls, RateLimiter
from dovetail.executor import (
    WorkflowDAG,
    WorkflowResult,
    call_on_end,
    report_ended,
    reusable,
    submission,
)
from dovetail.handlers.calls import RegistryCalls
from dovetail.redis_client.url import CeleryConnection, from_celery, read, to_celery
from dovetail.wiring.embedded import LocalEngine, buckets, registry_versions, shared_limits

log = logging.getLogger("dovetail.celery")
SOFT_SECONDS = 270
HARD_SECONDS = 300
MAX_RETRIES = 3
RETRY = DEFAULT_RETRY
RETRIED = (StoreError, ConnectionError, TimeoutError)
"""Errors of the environment, after which the task is retried. A failed step is not among them: it
has its own retries, and another task would repeat the completed steps."""
CRASHES = "dovetail_crashes"
"""A header of the message: how many workers were lost with this DAG."""
STOP_SECONDS = 10.0
"""How long a DAG may take to stop at its soft limit: well before the hard limit."""


class DagTask(Task):  # type: ignore[misc]
    """The base of a task that runs a DAG, `run_dag` or one of your own: its limits, its redelivery
    and its result backend."""

    soft_time_limit = SOFT_SECONDS
    time_limit = HARD_SECONDS
    max_retries = MAX_RETRIES
    # If a worker or a process of its pool is lost, the task is delivered again, at most
    # `max_crashes` times: a DAG that kills its process would do so again and again.
    acks_late = True
    reject_on_worker_lost = True
    track_started = True
    serializer = "json"
    ignore_result = False

    _backend: Any = None

    def run_here(
        self,
        dag: Dag,
        context: Mapping[str, Any] | None = None,
        *,
        max_concurrency: int = 4,
        resume: WorkflowResult | Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run a DAG in this process and answer as `run_dag` does. Call it in a bound task: errors
        of the environment are raised as its retry."""
        request = self.request
        if (lost := self._crashed(request)) is not None:
            with suppress(DovetailError):  # a DAG that cannot be prepared needs no end
                prepared = prepare(request.id, dag, context, resume)
                call_on_end(prepared.on_end, RunStatus.FAILED)
            return _answer(None, lost)
        if isinstance(max_concurrency, bool) or max_concurrency < 1:
            raise DagRefused(f"max_concurrency is a number of at least 1, not {max_concurrency!r}")
        on_end = None
        try:
            prepared = prepare(request.id or os.urandom(8).hex(), dag, context, resume)
            on_end, patience = prepared.on_end, _patience(request)
            run, stopped = run_to_its_end(prepared, max_concurrency, redis_of(self.app), patience)
            report_ended(run)
            call_on_end(on_end, RunStatus.FAILED if stopped else run.status)
            return _answer(run, _timeout(request) if stopped else None)
        except SoftTimeLimitExceeded:  # raised outside the run, or the run did not stop
            call_on_end(on_end, RunStatus.FAILED)
            return _answer(None, _timeout(request))
        except RETRIED as error:
            if request.retries >= self.max_retries:
                call_on_end(on_end, RunStatus.FAILED)
            wait = delay(RETRY, request.retries + 1, random.random())  # noqa: S311
            raise self.retry(exc=error, countdown=wait) from error
        except DovetailError as problem:
            call_on_end(on_end, RunStatus.FAILED)
            raise DagRefused(str(problem), problem.type) from None

    def _crashed(self, request: Any) -> dict[str, Any] | None:
        """The answer if this delivery is one too many. Otherwise the task is sent again with the
        count of crashes: a broker says that it redelivers, but not how often."""
        if request.is_eager or not (request.delivery_info or {}).get("redelivered"):
            return None
        crashes = _crashes(request) + 1
        max_crashes = settings().max_crashes
        if crashes >= max_crashes:
            message = f"{died_during(crashes, 1)}: DOVETAIL_MAX_CRASHES allows no more"
            return {"type": "worker_lost", "message": message}
        log.warning(
            "DAG %s starts again: its worker died (%s of %s)", request.id, crashes, max_crashes
        )
        again = self.signature_from_request(
            request, retries=request.retries, headers={CRASHES: crashes}
        )
        again.apply_async()
        raise Ignore

    @property
    def backend(self) -> Any:
        """The app's result backend; Redis if the app has none, because callers need the result."""
        if self._backend is None and not (self.app.backend_cls or self.app.conf.result_backend):
            url = redis_of(self.app)
            if url is not None:
                self._backend = _made_backend(self.app, to_celery(read(url)))
        return self.app.backend if self._backend is None else self._backend

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value


class _RunDag(DagTask):
    """Sends a name or a definition instead of a DAG object."""

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        args, kwargs = _sent(args, kwargs)
        return super().apply_async(args, kwargs, *more, **options)

    def signature(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        args, kwargs = _sent(args, kwargs)
        return super().signature(args, kwargs, *more, **options)

    subtask = signature


def _crashes(request: Any) -> int:
    value = (request.headers or {}).get(CRASHES, 0)
    return value if isinstance(value, int) and value >= 0 else 0


def configure(app: Any) -> Any:
    """Set up a Celery app for tasks that run whole DAGs, yours included; returns the app.

    A hard limit of 300 s and a soft limit of 270 s, acknowledgement after the task, redelivery when
    a process of the pool is lost, one task fetched at a time, STARTED shown, JSON only.
    """
    app.conf.update(
        task_time_limit=HARD_SECONDS,
        task_soft_time_limit=SOFT_SECONDS,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        task_track_started=True,
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
    )
    return app


def _sent(args: Any, kwargs: Any) -> tuple[Any, Any]:
    if args:
        args = (sendable(args[0]), *args[1:])
    elif kwargs and "dag" in kwargs:
        kwargs = {**kwargs, "dag": sendable(kwargs["dag"])}
    if kwargs and isinstance(kwargs.get("resume"), WorkflowResult):
        kwargs = {**kwargs, "resume": kwargs["resume"].to_dict()}
    return args, kwargs


def redis_of(app: Any) -> str | None:
    """The Redis that all workers share: of the settings, or the broker if it is a Redis."""
    if settings().redis_url is not None:
        return settings().redis_url
    brokers = app.conf.broker_read_url or app.conf.broker_url or ""
    listed = [brokers] if isinstance(brokers, str) else [str(one) for one in brokers]
    urls = [url for one in listed for url in one.split(";") if url]
    use_ssl = getattr(app.conf, "broker_use_ssl", None)
    return from_celery(urls, use_ssl, getattr(app.conf, "broker_transport_options", None) or {})


def _made_backend(app: Any, redis: CeleryConnection) -> Any:
    """A result backend. Options that its URL cannot have are set on it."""
    url = redis.url
    if redis.use_ssl is not None and not redis.transport_options.get("master_name"):
        url += "?ssl_cert_reqs=CERT_REQUIRED"  # the backend needs one; the next lines override it
    made, where = by_url(url, app.loader)
    backend = made(app=app, url=where)
    if redis.use_ssl is not None:
        backend.connparams.update(redis.use_ssl)
        backend.connparams["connection_class"] = backend.connection_class_ssl
    asking = {"master_name", "sentinel_kwargs"}
    if prefix := redis.transport_options.get("global_keyprefix"):
        for name in ("task_keyprefix", "group_keyprefix", "chord_keyprefix"):
            setattr(backend, name, prefix.encode() + getattr(backend, name))
    apart = {*asking, "global_keyprefix"}
    more = {name: value for name, value in redis.transport_options.items() if name not in apart}
    if "path" in backend.connparams:  # a Unix socket has no such timeouts
        more.pop("socket_connect_timeout", None)
        more.pop("socket_keepalive", None)
    backend.connparams.update(more)
    if "master_name" in redis.transport_options:
        backend._transport_options = {
            **backend._transport_options,
            **{name: redis.transport_options[name] for name in asking},
        }
    return backend


@shared_task(bind=True, base=_RunDag, name="dovetail.run_dag")  # type: ignore[untyped-decorator]
def run_dag(
    self: DagTask,
    dag: Dag,
    context: Mapping[str, Any] | None = None,
    *,
    max_concurrency: int = 4,
    resume: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a DAG inside this task; returns `WorkflowResult.to_dict()` and `withheld`.

    `dag` is a registered `WorkflowDAG` or its name, or a definition: a dict, YAML or JSON text; the
    sender may also give a file. `context` are the params of a definition. A DAG that failed is a
    normal result. A DAG that could not be run at all raises, and the task fails. With an earlier
    result as `resume`, only the steps that did not complete in it run.
    """
    return self.run_here(dag, context, max_concurrency=max_concurrency, resume=resume)


def _answer(run: RunState | None, timeout: dict[str, Any] | None) -> dict[str, Any]:
    answer = bare_result("FAILED", timeout) if run is None else WorkflowResult(run).to_dict()
    if timeout is not None:
        answer.update(status="FAILED", error=timeout)
    answer["withheld"] = {}
    max_bytes = settings().max_output_bytes
    for step_id, output in list(answer["outputs"].items()):
        try:
            plain = orjson.loads(encode(output, max_bytes=max_bytes))
        except NotJson as problem:
            # Between steps an output may be any object; a result of the task is JSON.
            answer["withheld"][step_id] = str(problem)
            del answer["outputs"][step_id]
            plain = None
        else:
            answer["outputs"][step_id] = plain
        answer["steps"][step_id]["output"] = plain
    return answer


def bare_result(status: str, error: dict[str, Any] | None) -> dict[str, Any]:
    """A result with a status and an error only."""
    counts = {"completed": 0, "failed": 0, "skipped": 0, "duration": 0.0}
    return {"status": status, **counts, "error": error, "outputs": {}, "steps": {}}


def _time_limits(request: Any) -> tuple[float, float]:
    """The hard and the soft limit of this call."""
    hard, soft = request.timelimit or (None, None)
    return hard or HARD_SECONDS, soft or SOFT_SECONDS


def _patience(request: Any) -> float:
    hard, soft = _time_limits(request)
    return max(0.0, min(STOP_SECONDS, (hard - soft) / 2))


def _timeout(request: Any) -> dict[str, Any]:
    _, soft = _time_limits(request)
    message = f"did not finish within {soft:g} s (the task's soft time limit)"
    return {"type": "timeout", "message": message}


# Errors that Celery raises for a task whose process is gone.
_KINDS = {
    TimeLimitExceeded: "timeout",
    SoftTimeLimitExceeded: "timeout",
    WorkerLostError: "worker_lost",
    TaskRevokedError: "revoked",
}


def run_dag_group(
    dag: Dag,
    items: Iterable[Mapping[str, Any]],
    *,
    max_concurrency: int = 4,
    **options: Any,
) -> DagGroup:
    """Send one `run_dag` per item, which is its context, as a `celery.group`.

    `options` are passed to `apply_async`: `queue=`, `priority=`, `soft_time_limit=`.
    """
    sent = sendable(dag)
    how = {"max_concurrency": max_concurrency}
    tasks = [run_dag.signature((sent, dict(item)), how).set(**options) for item in items]
    if not tasks:
        return DagGroup("", [])
    began = group(tasks, app=run_dag.app).apply_async()
    return DagGroup(began.id, [result.id for result in began.results])


@dataclass(frozen=True, slots=True)
class DagGroupResult:
    """The `WorkflowResult`s of a group, with counts."""

    results: list[WorkflowResult | None]
    """In the order of the items; None if the DAG has not ended."""
    counts: dict[str, int]
    """DAGs by status; DAGs that have not ended are PENDING or RUNNING."""
    duration: float
    """The sum of all durations, in seconds."""
    failures: dict[int, dict[str, Any]]
    """Errors by the index of the item: `type`, `message` and, if a step is the cause, `node`."""


class DagGroup:
    """The DAGs that `run_dag_group` sent. Another process can rebuild it from its two fields."""

    def __init__(self, group_id: str, task_ids: list[str]) -> None:
        self.id = group_id
        self.task_ids = task_ids

    def wait(self, timeout: float | None = None) -> DagGroupResult:
        """The results, once all have ended. Raises `TimeoutError`; use `collect` then."""
        until = None if timeout is None else time.monotonic() + timeout
        for result in self._results():
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                result.get(timeout=left, propagate=False)
            except NotReady:
                ended = sum(one is not None for one in self.collect().results)
                raise TimeoutError(
                    f"{ended} of {len(self.task_ids)} DAGs have ended within {timeout:g} s; "
                    "collect() tells of them"
                ) from None
        return self.collect()

    def collect(self) -> DagGroupResult:
        """The results so far, without waiting. A lost task does not hide the others."""
        results: list[WorkflowResult | None] = []
        counts: Counter[str] = Counter()
        for sent in self._results():
            state = sent.state
            if state not in states.READY_STATES:
                results.append(None)
                counts["RUNNING" if state == states.STARTED else "PENDING"] += 1
                continue
            result = result_of(sent.result)
            results.append(result)
            counts[result.status.value] += 1
        failures = {
            index: result.error or {"type": "unknown", "message": "no step failed"}
            for index, result in enumerate(results)
            if result is not None and result.status != "COMPLETED"
        }
        duration = sum(result.duration for result in results if result is not None)
        return DagGroupResult(results, dict(counts), duration, failures)

    def revoke(self, *, terminate: bool = False) -> None:
        """Revoke the tasks that have not begun; with `terminate` also kill the others."""
        run_dag.app.control.revoke(self.task_ids, terminate=terminate)

    def _results(self) -> list[Any]:
        return [run_dag.AsyncResult(task_id) for task_id in self.task_ids]


def result_of(ended: Any) -> WorkflowResult:
    """The result of a task that runs a DAG, from its answer or from Celery's error."""
    if isinstance(ended, Mapping):
        return WorkflowResult.from_dict(ended)
    status = "CANCELLED" if isinstance(ended, TaskRevokedError) else "FAILED"
    kind = next((word for sort, word in _KINDS.items() if isinstance(ended, sort)), None)
    kind = kind or getattr(ended, "type", type(ended).__name__)
    return WorkflowResult.from_dict(bare_result(status, {"type": kind, "message": str(ended)}))


log = logging.getLogger("dovetail.celery")


dag_ended = Signal(name="dag_ended", providing_args={"run_id", "handlers", "params", "status"})
"""Sent in the worker when a definition that `run_dag` runs has ended, with the id of its run (the
task's), the names of its handlers, its params and its status. A graph of functions has
`WorkflowDAG(on_end=…)` instead."""


class Prepared(NamedTuple):
    submit: Submit
    calls: Calls
    isolate: bool
    on_end: Callable[[RunStatus], object] | None


def prepare(
    run_id: str,
    dag: Dag,
    context: Mapping[str, Any] | None,
    resume: WorkflowResult | Mapping[str, Any] | None = None,
) -> Prepared:
    """`run_id` is the task's id. It is the same at each delivery, and so are idempotency keys."""
    earlier = _earlier(resume)
    if context is not None and not isinstance(context, Mapping):
        raise DagRefused(f"context is a JSON object, not {type(context).__name__}")
    if is_name(dag):
        dag = known_dag(str(dag))
    if callable(dag) and not isinstance(dag, WorkflowDAG):
        dag = _built(dag, dict(context or {}))
    if isinstance(dag, WorkflowDAG):
        submit, calls = submission(run_id, dag, context, resume=earlier)
        return Prepared(submit, calls, isolate=False, on_end=dag.on_end)
    graph, schema = compiled(text_of(dag))
    registry_calls = RegistryCalls(
        known_handlers(),
        secrets=settings().secrets,
        sensitive=settings().sensitive(),
        max_config_bytes=settings().max_config_bytes,
        max_output_bytes=settings().max_output_bytes,
        max_input_bytes=settings().max_input_bytes,
    )
    params = apply_params(schema, dict(context or {}))
    reused = reusable(graph, earlier)
    submit = Submit(run_id, graph, params, logged=False, reused=reused)
    return Prepared(submit, registry_calls, isolate=True, on_end=partial(_send_end, submit))


def _send_end(submit: Submit, status: RunStatus) -> None:
    dag_ended.send(
        sender=None,
        run_id=submit.run_id,
        handlers=frozenset(spec.handler for spec in submit.graph.nodes),
        params=submit.params,
        status=status,
    )


def _earlier(resume: WorkflowResult | Mapping[str, Any] | None) -> WorkflowResult | None:
    """The result that a DAG resumes from; in a message it is the answer of `run_dag`."""
    if resume is None or isinstance(resume, WorkflowResult):
        return resume
    try:
        return WorkflowResult.from_dict(resume)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DagRefused(
            "resume is what run_dag answered, or a WorkflowResult: it cannot be read "
            f"({type(error).__name__}: {error})"
        ) from None


def _built(builder: Any, context: dict[str, Any]) -> WorkflowDAG:
    made = builder(context)
    if not isinstance(made, WorkflowDAG):
        raise DagRefused(f"{builder!r} made no WorkflowDAG but {type(made).__name__}")
    return made


def run_to_its_end(
    prepared: Prepared, concurrency: int, redis_url: str | None, patience: float
) -> tuple[RunState, bool]:
    """Drive the DAG in an event loop in another thread, and wait for it.

    Returns the run, and whether it was stopped. The soft time limit is a signal that raises in the
    main thread: in a step it would look like a failure of that step and be retried.
    """
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()
    ended: Future[tuple[RunState, bool]] = Future()

    def drive() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                outcome = runner.run(_drive(prepared, concurrency, redis_url, stopping))
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(outcome)

    threading.Thread(target=drive, name="dovetail-dag", daemon=True).start()
    try:
        return ended.result()
    except BaseException as error:
        with suppress(RuntimeError):  # it has ended, and its loop is closed
            loop.call_soon_threadsafe(stopping.set)
        if not isinstance(error, SoftTimeLimitExceeded):
            raise
        with suppress(TimeoutError):  # an async step blocks the loop: only a kill ends it
            return ended.result(patience)
        raise


async def _drive(
    prepared: Prepared, concurrency: int, redis_url: str | None, stopping: asyncio.Event
) -> tuple[RunState, bool]:
    submit = prepared.submit
    async with AsyncExitStack() as stack:
        limits: RateLimiter = _limits_here()
        if any(spec.resource_tag is not None for spec in submit.graph.nodes):
            if redis_url is None:
                _warn_once()
            else:
                shared = shared_limits(redis_url, settings(), time.monotonic)
                limits = await stack.enter_async_context(shared)
        engine = LocalEngine(
            prepared.calls,
            concurrency=concurrency,
            limits=limits,
            isolate=prepared.isolate,
            max_config_size=settings().max_config_bytes,
            clock=time.monotonic,
            versions=registry_versions(known_handlers()) if prepared.isolate else None,
            secrets=settings().secrets,
        )
        await stack.enter_async_context(engine)
        await engine.orchestrator.submit(submit)
        end = asyncio.ensure_future(engine.wait(submit.run_id))
        stop = asyncio.ensure_future(stopping.wait())
        await asyncio.wait([end, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if end.done():
            return await end, False
        await engine.orchestrator.apply([Cancel(submit.run_id)])
        return await end, True


@cache
def _limits_here() -> LocalLimits:
    return LocalLimits(buckets(settings()))


@cache
def _warn_once() -> None:
    log.warning("rate limits hold in this process only: set DOVETAIL_REDIS_URL to share them")
