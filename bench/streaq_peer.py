"""streaQ: tasks with dependencies on Redis Streams, set up as its users would at its best.

Two worker processes, one for each core, 64 tasks at once in each. Outputs travel along `.then()`;
a task with several parents has them as `after` and reads their results itself, all at once, because
asking for them one by one opens a subscription each. This module is also what its workers load.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from streaq import Worker

from apart import Job
from fleet import services
from measuring import cpu_taken
from workloads import Outputs, Workload, compared, is_chain, node

PROCESSES = 2
AT_ONCE = 100
"""Enqueued together: more at once are not quicker, and need a connection each."""
POLL_SECONDS = 0.003

worker: Worker[Any] = Worker(
    redis_url=os.environ["BENCH_REDIS_URL"], concurrency=64, queue_name="bench"
)
kept = {"silent": True, "ttl": timedelta(minutes=5)}


@worker.task(**kept)
async def first() -> dict[str, Any]:
    return node()


@worker.task(**kept)
async def step(parent: dict[str, Any]) -> dict[str, Any]:
    return node(parent)


@worker.task(**kept)
async def join(parents: list[str]) -> dict[str, Any]:
    return node(*await results(parents))


async def results(ids: list[str]) -> list[dict[str, Any]]:
    raw = await worker.redis.mget([worker.results_key + one for one in ids])
    return [(await worker.deserialize(each))["r"] for each in raw]


@contextmanager
def opened(works: Iterable[Workload]) -> Iterator[Job]:
    with ExitStack() as stack:
        words = ["-m", "streaq", "run", "streaq_peer:worker"]
        pids = stack.enter_context(services(worker=[words] * PROCESSES))
        loop = stack.enter_context(asyncio.Runner()).get_loop()
        loop.run_until_complete(worker.__aenter__())
        stack.callback(lambda: loop.run_until_complete(worker.__aexit__(None, None, None)))

        def execute(work: Workload) -> Outputs:
            graph = chained if is_chain(work) and work.runs == 1 else joined
            return loop.run_until_complete(graph(work))

        calls = {work.name: cpu_taken(compared(work, partial(execute, work))) for work in works}
        yield Job({"pids": pids}, calls)


async def chained(work: Workload) -> Outputs:
    task: Any = first.enqueue()
    for _ in range(len(work.graph) - 1):
        task = task.then(step)
    await task
    return await awaited([task.id])


async def joined(work: Workload) -> Outputs:
    ends: list[str] = []

    async def one() -> None:
        tasks: dict[str, Any] = {}
        for name, parents in work.graph.items():
            if parents:
                ids = [tasks[parent].id for parent in parents]
                tasks[name] = join.enqueue(ids).start(after=ids)
            else:
                tasks[name] = first.enqueue()
        ends.extend(tasks[name].id for name in work.exits)
        # The first wave last: who depends on it is registered before it can finish.
        for wave in [*work.waves()[1:], work.waves()[0]]:
            for begin in range(0, len(wave), AT_ONCE):
                await asyncio.gather(*[tasks[name] for name in wave[begin : begin + AT_ONCE]])

    for begin in range(0, work.runs, AT_ONCE):
        await asyncio.gather(*[one() for _ in range(min(AT_ONCE, work.runs - begin))])
    return await awaited(ends)


async def awaited(ids: list[str]) -> Outputs:
    """Asked for again and again: its own way to wait holds a connection for each task."""
    keys = [worker.results_key + one for one in ids]
    found: dict[str, Any] = {}
    while len(found) < len(keys):
        left = [key for key in keys if key not in found]
        answers = zip(left, await worker.redis.mget(left), strict=True)
        found.update({key: raw for key, raw in answers if raw})
        await asyncio.sleep(POLL_SECONDS)
    results = [await worker.deserialize(found[key]) for key in keys]
    assert all(result["s"] for result in results), results[:3]
    return [result["r"] for result in results]
