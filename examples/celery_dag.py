"""On your own Celery: a graph of Python functions inside one task, for many documents at once.

It needs a Redis (BROKER_URL; the default is this machine) and a worker in another terminal:

celery --workdir examples -A celery_dag worker --concurrency 2
python examples/celery_dag.py
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from dovetail import PermanentError, WorkflowDAG
from dovetail.celery import register_dag, run_dag, run_dag_group

Ctx = dict[str, Any]

# A normal Celery app. `run_dag` is a shared task: importing it is enough.
app = Celery("documents", broker=os.environ.get("BROKER_URL", "redis://localhost:6379/0"))
app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)


async def extract(ctx: Ctx) -> dict[str, Any]:
    if ctx["doc_id"] == 3:
        raise PermanentError("document 3 is empty")  # any other exception is retried
    return {"text": f"document {ctx['doc_id']}", "confidence": 0.9 if ctx["doc_id"] % 2 else 0.6}


def save(ctx: Ctx) -> str:
    """A plain function may block: it runs in a thread."""
    return f"{ctx['doc_id']}.json"


def review(ctx: Ctx) -> str:
    return f"somebody looks at {ctx['step_outputs']['save']}"


documents = WorkflowDAG("documents")
# All processes of all workers together start `extract` at most ten times a second: the default
# rate of a tag.
documents.add_step("extract", extract, resource_tag="model", max_retries=3, timeout_seconds=30)
documents.add_step("save", save, depends_on=["extract"])
documents.add_step(
    "review",
    review,
    depends_on=["save"],
    condition=lambda ctx: ctx["step_outputs"]["extract"]["confidence"] < 0.8,
)
register_dag(documents)  # its steps are code, so a message carries only its name


def main() -> None:
    told = run_dag.delay(documents, {"doc_id": 8}).get(timeout=60)
    print(f"one: {told['status']}, {told['outputs']['review']}")

    group = run_dag_group(documents, [{"doc_id": number} for number in range(1, 6)])
    outcome = group.wait(timeout=60)
    print(f"group: {outcome.counts}")
    for number, result in enumerate(outcome.results, start=1):
        print(f"  {number}: {result.completed} completed, {result.skipped} skipped")
    for place, error in outcome.failures.items():
        print(f"item {place} failed in '{error['node']}': {error['message']}")


if __name__ == "__main__":
    main()
