"""Metrics of DAGs that run inside a program: of `WorkflowExecutor` and of `run_dag` on Celery.

They are in the default registry of `prometheus_client`, so the program publishes them as it
publishes its own metrics, also from a pool of processes. Nothing is counted before `step_metrics`
is called.
"""

from __future__ import annotations

from typing import Any

from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.executor import hear_ended_runs

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
MAX_DAGS = 1000
"""Names of DAGs that are counted; later ones are counted under `OTHER`. Definitions that others
send to `run_dag` may have any names."""
MAX_STEPS = 10_000
"""Steps of all DAGs that are counted by their names, for the same reason."""
OTHER = "(other)"

_metrics: _DagMetrics | None = None


def step_metrics() -> None:
    """Count DAGs and their steps from now on. Calling it again changes nothing."""
    global _metrics
    if _metrics is None:
        _metrics = _DagMetrics()
        hear_ended_runs(_metrics.count)


class _DagMetrics:
    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram  # only programs that count load it

        self._dags: Any = Counter("dovetail_dags_total", "DAGs that ended", ["dag", "status"])
        self._steps: Any = Counter(
            "dovetail_steps_total", "Steps that ended", ["dag", "step", "status"]
        )
        self._retries: Any = Counter(
            "dovetail_step_retries_total", "Failed starts that were tried again", ["dag", "step"]
        )
        self._seconds: Any = Histogram(
            "dovetail_step_duration_seconds",
            "From the last start of a step to its end, COMPLETED or FAILED",
            ["dag", "step"],
            buckets=SECONDS,
        )
        self._names: set[str] = set()
        self._steps_named: set[tuple[str, str]] = set()

    def count(self, run: RunState) -> None:
        name = run.graph.name
        if name not in self._names:
            if len(self._names) >= MAX_DAGS:
                name = OTHER
            self._names.add(name)
        self._dags.labels(name, run.status.value).inc()
        for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
            if node.status is NodeStatus.COMPLETED and not node.attempt:
                continue  # of an earlier execution that is resumed
            step = self._step(name, spec.id)
            self._steps.labels(name, step, node.status.value).inc()
            if node.attempt > 1:
                self._retries.labels(name, step).inc(node.attempt - 1)
            if node.started_at is not None and node.finished_at is not None:
                self._seconds.labels(name, step).observe(node.finished_at - node.started_at)

    def _step(self, dag: str, step: str) -> str:
        """Its name as a label."""
        if dag == OTHER:
            return OTHER
        if (dag, step) not in self._steps_named:
            if len(self._steps_named) >= MAX_STEPS:
                return OTHER
            self._steps_named.add((dag, step))
        return step
