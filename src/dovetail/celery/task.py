"""Tasks that run a DAG, `dovetail.run_dag` first of all: how they are sent, retried and kept in
time, and what they answer.

What it must not know: how a DAG is run.

One DAG for many inputs: a `celery.group`, and what its results come to.

No chord: its callback would not run if one of them was lost. Whoever waits adds up what is there.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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

from dovetail.celery.dag_registry import Dag, DagRefused, sendable, settings
from dovetail.celery.runner import prepare, run_to_its_end
from dovetail.core.errors import DovetailError, StoreError
from dovetail.core.retry import DEFAULT_RETRY, delay
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.text import died_during
from dovetail.core.values import NotJson, encode
from dovetail.executor import WorkflowResult, tell_end
from dovetail.redis_client.url import CeleryConnection, from_celery, read, to_celery

log = logging.getLogger("dovetail.celery")
SOFT_SECONDS = 270
HARD_SECONDS = 300
MAX_RETRIES = 3
RETRY = DEFAULT_RETRY
RETRIED = (StoreError, ConnectionError, TimeoutError)
"""What the surroundings did. A step that failed is none of these: it has retries of its own, and
to run the whole DAG again would repeat what was completed."""
CRASHES = "dovetail_crashes"
"""A header of the message: how often a worker was lost with this DAG."""
STOP_SECONDS = 10.0
"""How long a DAG that ran out of time may take to stop: well before the hard limit."""


class DagTask(Task):  # type: ignore[misc]
    """The base of a task that runs a DAG inside itself, `run_dag` or one of your own: its limits,
    how it is given back, and where its result is kept."""

    soft_time_limit = SOFT_SECONDS
    time_limit = HARD_SECONDS
    max_retries = MAX_RETRIES
    # A worker that is gone, or a process of its pool, gives the task back. How often is bounded by
    # `max_crashes`: a DAG that kills its process would do so again and again.
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
        """Run a DAG in this process, as `run_dag` does, and answer as it does. For the body of a
        task that is bound: what the surroundings did is raised as a retry of it."""
        request = self.request
        if (lost := self._crashed(request)) is not None:
            with suppress(DovetailError):  # what cannot even be prepared has nothing to end
                prepared = prepare(request.id, dag, context, resume)
                tell_end(prepared.on_end, RunStatus.FAILED)
            return _told(None, lost)
        if isinstance(max_concurrency, bool) or max_concurrency < 1:
            raise DagRefused(f"max_concurrency is a number of at least 1, not {max_concurrency!r}")
        on_end = None
        try:
            prepared = prepare(request.id or os.urandom(8).hex(), dag, context, resume)
            on_end, patience = prepared.on_end, _patience(request)
            run, stopped = run_to_its_end(prepared, max_concurrency, redis_of(self.app), patience)
            tell_end(on_end, RunStatus.FAILED if stopped else run.status)
            return _told(run, _timeout(request) if stopped else None)
        except SoftTimeLimitExceeded:  # where there is nothing to stop, or it would not stop
            tell_end(on_end, RunStatus.FAILED)
            return _told(None, _timeout(request))
        except RETRIED as error:
            if request.retries >= self.max_retries:
                tell_end(on_end, RunStatus.FAILED)
            wait = delay(RETRY, request.retries + 1, random.random())  # noqa: S311
            raise self.retry(exc=error, countdown=wait) from error
        except DovetailError as problem:
            tell_end(on_end, RunStatus.FAILED)
            raise DagRefused(str(problem), problem.type) from None

    def _crashed(self, request: Any) -> dict[str, Any] | None:
        """What to answer if this delivery is one too many. Another one is sent on with its number:
        a broker says that it delivers again, and not how often."""
        if request.is_eager or not (request.delivery_info or {}).get("redelivered"):
            return None
        crashes = _crashes(request) + 1
        most = settings().max_crashes
        if crashes >= most:
            message = f"{died_during(crashes, 1)}: DOVETAIL_MAX_CRASHES allows no more"
            return {"type": "worker_lost", "message": message}
        log.warning("DAG %s starts again: its worker died (%s of %s)", request.id, crashes, most)
        again = self.signature_from_request(
            request, retries=request.retries, headers={CRASHES: crashes}
        )
        again.apply_async()
        raise Ignore

    @property
    def backend(self) -> Any:
        """The app's result backend; where it has none, Redis: a result nobody can read is none."""
        if self._backend is None and not (self.app.backend_cls or self.app.conf.result_backend):
            url = redis_of(self.app)
            if url is not None:
                self._backend = _made_backend(self.app, to_celery(read(url)))
        return self.app.backend if self._backend is None else self._backend

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value


class _RunDag(DagTask):
    """Sends names and definitions where it is given objects."""

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

    A hard limit of 300 s and a soft one of 270, acknowledged late and given back when a process
    of the pool is lost, one task fetched at a time, STARTED shown, JSON only.
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
    """The Redis that all workers share: that of the settings, or the broker if it is one."""
    if settings().redis_url is not None:
        return settings().redis_url
    brokers = app.conf.broker_read_url or app.conf.broker_url or ""
    listed = [brokers] if isinstance(brokers, str) else [str(one) for one in brokers]
    urls = [url for one in listed for url in one.split(";") if url]
    use_ssl = getattr(app.conf, "broker_use_ssl", None)
    return from_celery(urls, use_ssl, getattr(app.conf, "broker_transport_options", None) or {})


def _made_backend(app: Any, place: CeleryConnection) -> Any:
    """A backend for results. What its URL cannot say it is given beside it."""
    url = place.url
    if place.use_ssl is not None and not place.transport_options.get("master_name"):
        url += "?ssl_cert_reqs=CERT_REQUIRED"  # it asks for one; the next lines have the last word
    made, where = by_url(url, app.loader)
    backend = made(app=app, url=where)
    if place.use_ssl is not None:
        backend.connparams.update(place.use_ssl)
        backend.connparams["connection_class"] = backend.connection_class_ssl
    asking = {"master_name", "sentinel_kwargs"}
    if prefix := place.transport_options.get("global_keyprefix"):
        for name in ("task_keyprefix", "group_keyprefix", "chord_keyprefix"):
            setattr(backend, name, prefix.encode() + getattr(backend, name))
    apart = {*asking, "global_keyprefix"}
    more = {name: value for name, value in place.transport_options.items() if name not in apart}
    if "path" in backend.connparams:  # a socket knows no such times
        more.pop("socket_connect_timeout", None)
        more.pop("socket_keepalive", None)
    backend.connparams.update(more)
    if "master_name" in place.transport_options:
        backend._transport_options = {
            **backend._transport_options,
            **{name: place.transport_options[name] for name in asking},
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
    """Run a DAG inside this one task; gives `WorkflowResult.to_dict()`, with what is `withheld`.

    `dag` is a registered `WorkflowDAG` or its name, or a definition: a dict, YAML or JSON text;
    whoever sends it may also give a file. `context` are then its params. A DAG that failed is a
    result like any other; what could not be run at all raises, and the task fails. Given such a
    result as `resume`, only what did not complete in it runs.
    """
    return self.run_here(dag, context, max_concurrency=max_concurrency, resume=resume)


def _told(run: RunState | None, timeout: dict[str, Any] | None) -> dict[str, Any]:
    told = nothing_but("FAILED", timeout) if run is None else WorkflowResult(run).to_dict()
    if timeout is not None:
        told.update(status="FAILED", error=timeout)
    told["withheld"] = {}
    most = settings().max_output_bytes
    for step_id, output in list(told["outputs"].items()):
        try:
            plain = orjson.loads(encode(output, max_bytes=most))
        except NotJson as problem:
            # Between steps an output may be anything; what leaves the process is JSON.
            told["withheld"][step_id] = str(problem)
            del told["outputs"][step_id]
            plain = None
        else:
            told["outputs"][step_id] = plain
        told["steps"][step_id]["output"] = plain
    return told


def nothing_but(status: str, error: dict[str, Any] | None) -> dict[str, Any]:
    """A result of which no more is known than that."""
    counts = {"completed": 0, "failed": 0, "skipped": 0, "duration": 0.0}
    return {"status": status, **counts, "error": error, "outputs": {}, "steps": {}}


def _time_limits(request: Any) -> tuple[float, float]:
    """Hard and soft, as of this call."""
    hard, soft = request.timelimit or (None, None)
    return hard or HARD_SECONDS, soft or SOFT_SECONDS


def _patience(request: Any) -> float:
    hard, soft = _time_limits(request)
    return max(0.0, min(STOP_SECONDS, (hard - soft) / 2))


def _timeout(request: Any) -> dict[str, Any]:
    _, soft = _time_limits(request)
    message = f"did not finish within {soft:g} s (the task's soft time limit)"
    return {"type": "timeout", "message": message}


# What Celery says of a task whose process could not.
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
    """Send one `run_dag` for each item, its context, as a `celery.group`.

    `options` are those of `apply_async`: `queue=`, `priority=`, `soft_time_limit=`.
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
    """The `WorkflowResult`s of a group and what they come to."""

    results: list[WorkflowResult | None]
    """In the order of the items; None for one that has not ended."""
    counts: dict[str, int]
    """How many by status; those that have not ended are PENDING or RUNNING."""
    duration: float
    """Of all of them together, in seconds: what they would have taken one after the other."""
    failures: dict[int, dict[str, Any]]
    """Why, by place in the order: `type`, `message` and, where one step is the cause, `node`."""


class DagGroup:
    """The DAGs that `run_dag_group` sent. Made of its two fields, it is the same elsewhere."""

    def __init__(self, group_id: str, task_ids: list[str]) -> None:
        self.id = group_id
        self.task_ids = task_ids

    def wait(self, timeout: float | None = None) -> DagGroupResult:
        """What they came to, once all have ended. Raises `TimeoutError`; see `collect` then."""
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
        """What is known now, without waiting: one that is lost does not hide the others."""
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
            place: result.error or {"type": "unknown", "message": "no step failed"}
            for place, result in enumerate(results)
            if result is not None and result.status != "COMPLETED"
        }
        duration = sum(result.duration for result in results if result is not None)
        return DagGroupResult(results, dict(counts), duration, failures)

    def revoke(self, *, terminate: bool = False) -> None:
        """Let those that have not begun never begin; with `terminate` kill those that have."""
        run_dag.app.control.revoke(self.task_ids, terminate=terminate)

    def _results(self) -> list[Any]:
        return [run_dag.AsyncResult(task_id) for task_id in self.task_ids]


def result_of(ended: Any) -> WorkflowResult:
    """Of what a task that runs a DAG ended with: its answer, or what Celery raised in its place."""
    if isinstance(ended, Mapping):
        return WorkflowResult.from_dict(ended)
    status = "CANCELLED" if isinstance(ended, TaskRevokedError) else "FAILED"
    kind = next((word for sort, word in _KINDS.items() if isinstance(ended, sort)), None)
    kind = kind or getattr(ended, "type", type(ended).__name__)
    return WorkflowResult.from_dict(nothing_but(status, {"type": kind, "message": str(ended)}))
