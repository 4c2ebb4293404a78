"""Celery's canvas with Redis as broker and as result backend: chains and chords.

A worker of two processes, one for each core, with Celery's defaults: a task is acknowledged before
it runs, four are prefetched for each process. That is quicker than its safer settings, and promises
less than the others do. This module is also what its worker loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from celery import Celery, chain, chord

from apart import Job
from fleet import services
from measuring import cpu_taken
from workloads import Outputs, Workload, compared, is_chain, node

PATIENCE = 170.0
URL = os.environ["BENCH_REDIS_URL"]
app = Celery("bench", broker=URL, backend=URL)
app.conf.update(
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    result_expires=600,
    worker_send_task_events=False,
    task_send_sent_event=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="first")
def first() -> dict[str, Any]:
    return node()


@app.task(name="step")
def step(parent: dict[str, Any]) -> dict[str, Any]:
    return node(parent)


@app.task(name="join")
def join(parents: list[dict[str, Any]]) -> dict[str, Any]:
    return node(*parents)


@contextmanager
def opened(works: Iterable[Workload]) -> Iterator[Job]:
    words = ["-m", "celery", "-A", "celery_peer", "worker", "--concurrency", "2"]
    quiet = ["--loglevel", "ERROR", "--without-gossip", "--without-mingle"]
    with services(worker=[[*words, *quiet]]) as pids:
        first.delay().get(timeout=PATIENCE)
        calls = {work.name: cpu_taken(compared(work, partial(execute, work))) for work in works}
        yield Job({"pids": pids}, calls)


def execute(work: Workload) -> Outputs:
    results = [canvas(work).apply_async() for _ in range(work.runs)]
    # Else it reads the result of every parent again at each wake-up, which eats a core.
    return [result.get(timeout=PATIENCE, follow_parents=False) for result in results]


def canvas(work: Workload) -> Any:
    if is_chain(work):
        return chain(first.s(), *[step.s() for _ in range(len(work.graph) - 1)])
    beginning, middle, end = work.waves()
    assert len(beginning) == len(end) == 1, f"{work.name} is neither a chain nor a chord"
    return chain(first.s(), chord([step.s() for _ in middle], join.s()))
