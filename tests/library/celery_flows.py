"""The module of a team that runs Celery: its app, its DAGs, its handlers.

The workers of test_celery_dag.py load it, and the tests send from it, so both know the same. What
steps did is written to Redis, where the tests look.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import redis
from celery import Celery

from dovetail import Context, RetryPolicy, WorkflowDAG, handler
from dovetail.celery import register_dag, register_handlers, task

Ctx = dict[str, Any]

# Only the broker: that results are kept in Redis is what `dovetail.celery` adds.
app = Celery("team", broker=os.environ["FLOWS_BROKER"])
app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
task.RETRY = RetryPolicy(base_delay_seconds=0.05)


def seen() -> redis.Redis:
    return redis.Redis.from_url(os.environ["FLOWS_BROKER"], decode_responses=True)


def note(key: str, value: Any) -> None:
    with seen() as connection:
        connection.rpush(f"seen:{key}", str(value))


# ── a graph of functions ─────────────────────────────────────────────────────────────────────


async def extract(ctx: Ctx) -> Ctx:
    await asyncio.sleep(0.01)
    return {"doc": ctx["doc_id"], "confidence": 0.6 if ctx["doc_id"] % 2 else 0.9}


documents = WorkflowDAG("documents")
documents.add_step("extract", extract)
documents.add_step("save", lambda ctx: f"{ctx['doc_id']}.json", depends_on=["extract"])
documents.add_step(
    "review",
    lambda ctx: "somebody looks",
    depends_on=["save"],
    condition=lambda ctx: ctx["step_outputs"]["extract"]["confidence"] < 0.8,
)
register_dag(documents)


def fail(ctx: Ctx) -> None:
    note("failed", ctx["key"])
    raise ValueError("broken")


failing = register_dag(WorkflowDAG("failing"))
failing.add_step("good", lambda ctx: "done")
failing.add_step("bad", fail)
failing.add_step("below", lambda ctx: None, depends_on=["bad"])

opaque = register_dag(WorkflowDAG("opaque"))
opaque.add_step("load", lambda ctx: {1, 2, 3})
opaque.add_step("count", lambda ctx: len(ctx["step_outputs"]["load"]), depends_on=["load"])


def die(ctx: Ctx) -> int:
    if ctx.get("die"):
        os.kill(os.getpid(), 9)
    return os.getpid()


register_dag(WorkflowDAG("mortal").add_step("only", die))


def die_some_times(ctx: Ctx) -> int:
    with seen() as connection:
        starts = int(connection.incr(f"starts:{ctx['key']}"))
    if starts <= ctx["deaths"]:
        os.kill(os.getpid(), 9)
    return starts


register_dag(WorkflowDAG("unlucky").add_step("only", die_some_times))


@register_dag
def fan(context: Ctx) -> WorkflowDAG:
    """A graph that depends on what it is given."""
    dag = WorkflowDAG("fan")
    for place in range(context["width"]):
        dag.add_step(f"n{place}", lambda ctx, place=place: place * 10)
    return dag


@register_dag
def shaky(context: Ctx) -> WorkflowDAG:
    """Its surroundings fail so often before it can be made."""
    with seen() as connection:
        if connection.incr(f"made:{context['key']}") <= context["failures"]:
            raise ConnectionError("the catalogue does not answer")
    return WorkflowDAG("shaky").add_step("only", lambda ctx: "done")


# ── rates ────────────────────────────────────────────────────────────────────────────────────


async def meet(ctx: Ctx) -> None:
    """Go on when as many DAGs as `parties` are here, so that they run side by side."""
    note(f"met:{ctx['key']}", os.getpid())
    with seen() as connection:
        while connection.llen(f"seen:met:{ctx['key']}") < ctx["parties"]:
            await asyncio.sleep(0.01)


def start(ctx: Ctx) -> None:
    note(f"starts:{ctx['key']}", time.time())


limited = register_dag(WorkflowDAG("limited"))
limited.add_step("meet", meet)
for number in range(6):
    limited.add_step(f"n{number}", start, depends_on=["meet"], resource_tag="slow_api")


# ── time limits ──────────────────────────────────────────────────────────────────────────────


async def linger(ctx: Ctx) -> None:
    note(f"began:{ctx['key']}", os.getpid())
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        note(f"ended:{ctx['key']}", "cancelled")
        raise


slow = register_dag(WorkflowDAG("slow"))
slow.add_step("quick", lambda ctx: "kept")
slow.add_step("slow", linger, depends_on=["quick"], max_retries=3)
slow.add_step("never", lambda ctx: None, depends_on=["slow"])


async def block(ctx: Ctx) -> None:
    time.sleep(6)  # in an async step: nothing can reach it


register_dag(WorkflowDAG("blocking").add_step("only", block))


# ── handlers and a task of the team's own ────────────────────────────────────────────────────


@handler("shout")
async def shout(config: dict, ctx: Context) -> dict:
    return {"text": config["text"].upper(), "key": ctx.idempotency_key}


@handler("dawdle")
def dawdle(config: dict, ctx: Context) -> None:
    while not ctx.cancelled.is_set():
        time.sleep(0.01)
    note(f"ended:{ctx.params['key']}", "asked to stop")


register_handlers(shout, dawdle)


@app.task
def count_completed(result: dict[str, Any], key: str) -> None:
    note(f"completed:{key}", result["completed"])
