"""Tasks that run a DAG, `dovetail.run_dag` first of all: how they are sent, retried and kept in
time, and what they answer.

What it must not know: how a DAG is run.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson
from celery import Task, shared_task  # type: ignore[import-untyped]
from celery.app.backends import by_url  # type: ignore[import-untyped]
from celery.exceptions import Ignore, SoftTimeLimitExceeded  # type: ignore[import-untyped]

from dovetail.celery.driving import prepare, run_to_its_end
from dovetail.celery.known import Dag, DagRefused, sendable, settings
from dovetail.core.errors import DovetailError, StoreError
from dovetail.core.retry import DEFAULT_RETRY, delay
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.values import NotJson, encode
from dovetail.core.words import died_during
from dovetail.executor import WorkflowResult, tell_end
from dovetail.redis_url import OfCelery, from_celery, of_celery, read

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
                self._backend = _made_backend(self.app, of_celery(read(url)))
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


def _made_backend(app: Any, place: OfCelery) -> Any:
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
