"""One DAG for many inputs: a `celery.group`, and what its results come to.

No chord: its callback would not run if one of them was lost. Whoever waits adds up what is there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from celery import group, states  # type: ignore[import-untyped]
from celery.exceptions import (  # type: ignore[import-untyped]
    SoftTimeLimitExceeded,
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.exceptions import TimeoutError as NotReady

from dovetail.celery.known import Dag, sendable
from dovetail.celery.task import nothing_but, run_dag
from dovetail.executor import WorkflowResult

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
