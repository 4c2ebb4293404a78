"""Metrics of DAGs inside a program, each in a process of its own: a registry is a process's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PROGRAM = """
import asyncio
from prometheus_client import generate_latest
from dovetail import RetryPolicy, WorkflowDAG, WorkflowExecutor, step_metrics

{start}
calls = []

def flaky(ctx):
    calls.append(1)
    if len(calls) == 1:
        raise RuntimeError("once")
    return 1

def broken(ctx):
    raise RuntimeError("always")

dag = WorkflowDAG("docs")
dag.add_step("a", flaky, max_retries=1, retry=RetryPolicy(base_delay_seconds=0.01))
dag.add_step("b", broken)
dag.add_step("c", lambda ctx: 1, depends_on=["b"])
result = WorkflowExecutor().execute_sync(dag)
again = WorkflowExecutor().execute_sync(dag, resume=result)
print(generate_latest().decode())
"""


def counted(start: str, tmp_path: Path) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(start=start))
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
        if sample.name.startswith("dovetail_")
    }


def test_steps_are_counted_once_a_program_asks_for_it(tmp_path: Path) -> None:
    found = counted("step_metrics(); step_metrics()", tmp_path)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset({"dag": "docs", **labels}.items())]

    assert value("dovetail_dags_total", status="FAILED") == 2
    assert value("dovetail_steps_total", step="a", status="COMPLETED") == 1  # resumed, not run
    assert value("dovetail_steps_total", step="b", status="FAILED") == 2
    assert value("dovetail_steps_total", step="c", status="SKIPPED") == 2
    assert value("dovetail_step_retries_total", step="a") == 1
    assert value("dovetail_step_duration_seconds_count", step="b") == 2


def test_names_of_dags_and_steps_are_bounded(tmp_path: Path) -> None:
    limits = "import dovetail.dag_metrics as m; m.MAX_DAGS, m.MAX_STEPS = 1, 2; step_metrics()"
    found = counted(limits, tmp_path)
    steps = {dict(labels).get("step") for _, labels in found} - {None}
    assert steps == {"a", "b", "(other)"}
    totals = [value for (name, _), value in found.items() if name == "dovetail_steps_total"]
    assert sum(totals) == 5


def test_nothing_is_counted_otherwise(tmp_path: Path) -> None:
    assert counted("", tmp_path) == {}
