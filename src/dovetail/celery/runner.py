"""Runs one DAG inside a process of a Celery pool, and stops it at its time limit."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import cache, partial
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded  # type: ignore[import-untyped]
from celery.utils.dispatch import Signal  # type: ignore[import-untyped]

from dovetail.celery.dag_registry import (
    Dag,
    DagRefused,
    compiled,
    is_name,
    known_dag,
    known_handlers,
    settings,
    text_of,
)
from dovetail.core.definition.params import apply_params
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel, Submit
from dovetail.engine.limits import LocalLimits
from dovetail.engine.ports import Calls, RateLimiter
from dovetail.executor import WorkflowDAG, WorkflowResult, reusable, submission
from dovetail.handlers.calls import RegistryCalls
from dovetail.wiring.embedded import LocalEngine, buckets, registry_versions, shared_limits

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
