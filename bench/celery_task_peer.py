"""A plain no-op task on Celery, as many as the workload has nodes: nothing follows from them.

Set as Dovetail sets its own: acknowledged when it is done, one at a time in each process, no result
backend. So it is the floor of any system with a message per node. Without results its end is
seen in the queue: nothing waits, and nothing is unacknowledged. This module is also what its worker
loads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from celery import Celery
from redis import Redis

from apart import Job
from fleet import services
from measuring import cpu_taken
from workloads import Workload, node

PATIENCE = 170.0
LOOK_SECONDS = 0.002
LOOKS = 3
"""A message that was popped is unacknowledged a moment later, and in between nowhere: so often in a
row nothing must be there."""
QUEUE, UNACKED = "celery", "unacked"  # kombu's names
URL = os.environ["BENCH_REDIS_URL"]
app = Celery("bench", broker=URL)
app.conf.update(
    task_serializer="json",
    accept_content=["json"],
    task_acks_late=True,
    task_ignore_result=True,
    task_track_started=True,
    worker_prefetch_multiplier=1,
    worker_send_task_events=False,
    task_send_sent_event=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="noop")
def noop(parent: dict[str, Any]) -> dict[str, Any]:
    return node(parent)


@contextmanager
def opened(works: Iterable[Workload]) -> Iterator[Job]:
    words = ["-m", "celery", "-A", "celery_task_peer", "worker", "--concurrency", "2"]
    quiet = ["--loglevel", "ERROR", "--without-gossip", "--without-mingle"]
    with services(worker=[[*words, *quiet]]) as pids, Redis.from_url(URL) as redis:
        sender = _Sender(redis)
        sender.send(1)
        calls: dict[str, Callable[[], Any]] = {}
        for work in works:
            calls[work.name] = cpu_taken(partial(sender.send, work.nodes))
            calls[f"check {work.name}"] = sender.check
        yield Job({"pids": pids, "checks": True}, calls)


class _Sender:
    """Sends tasks and waits until all are done; whether they were, the worker is asked after."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._sent = 0

    def send(self, count: int) -> None:
        self._sent += count
        with app.producer_or_acquire() as producer:
            for _ in range(count):
                noop.apply_async(({"n": 1},), producer=producer)
        give_up = time.monotonic() + PATIENCE
        looks = 0
        while looks < LOOKS:
            looks = 0 if self._left() else looks + 1
            time.sleep(LOOK_SECONDS)
            assert time.monotonic() < give_up, f"{self._left()} tasks are not done"

    def _left(self) -> int:
        with self._redis.pipeline() as together:
            return sum(together.llen(QUEUE).hlen(UNACKED).execute())

    def check(self) -> None:
        (reported,) = app.control.inspect(timeout=10, limit=1).stats().values()
        assert reported["total"] == {"noop": self._sent}, reported["total"]
