"""Dovetail as a library: a graph of Python functions, run in this process.

python examples/library.py
"""

from __future__ import annotations

import asyncio
from typing import Any

from dovetail import RetryPolicy, TokenBucketRateLimiter, WorkflowDAG, WorkflowExecutor

Ctx = dict[str, Any]
_asked: set[int] = set()


async def extract(ctx: Ctx) -> dict[str, Any]:
    """A step is a function of `ctx`: the context given to `execute`, plus `step_outputs`."""
    document = ctx["doc_id"]
    if document not in _asked:
        _asked.add(document)
        raise ConnectionError("the model did not answer")  # any exception is retried
    await asyncio.sleep(0.05)
    return {"text": f"document {document}", "confidence": 0.9 if document % 2 else 0.6}


def save(ctx: Ctx) -> str:
    """A plain function may block: it runs in a thread."""
    return f"{ctx['doc_id']}.json: {ctx['step_outputs']['extract']['text']}"


async def review(ctx: Ctx) -> str:
    return f"somebody looks at document {ctx['doc_id']}"


def is_unsure(ctx: Ctx) -> bool:
    return ctx["step_outputs"]["extract"]["confidence"] < 0.8


def build() -> WorkflowDAG:
    dag = WorkflowDAG("documents")
    dag.add_step(
        "extract",
        extract,
        resource_tag="model",  # the name of a rate limiter, see below
        max_retries=3,
        retry=RetryPolicy(base_delay_seconds=0.05),
        timeout_seconds=30,
    )
    dag.add_step("save", save, depends_on=["extract"])
    dag.add_step("review", review, depends_on=["extract"], condition=is_unsure)
    dag.validate()  # raises one error with every problem: duplicate, missing, cyclic steps
    return dag


async def main() -> None:
    dag = build()
    print("layers:", dag.get_execution_layers())
    print("ready after extract:", dag.get_ready_nodes(completed={"extract"}))

    # Both runs share one limiter: together they start `extract` at most 20 times a second.
    limiter = TokenBucketRateLimiter(rate_per_second=20, burst=1)
    executor = WorkflowExecutor(max_concurrency=4, rate_limiters={"model": limiter})
    results = await asyncio.gather(
        executor.execute(dag, context={"doc_id": 7}),
        executor.execute(dag, context={"doc_id": 8}),
    )
    for result in results:
        print(f"{result.status}: {result.completed} completed, {result.skipped} skipped")
        for name, step in result.steps.items():
            retried = f", {step.retry_count} retry" if step.retry_count else ""
            print(f"  {name}: {step.status}{retried}: {step.output or step.error or '-'}")


if __name__ == "__main__":
    asyncio.run(main())
