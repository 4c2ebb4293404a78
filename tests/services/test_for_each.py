"""Mapped nodes over a real Redis: every item once, whatever process dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from typing import Any

import pytest

from dovetail.core.dag import Graph
from dovetail.core.errors import BrokenRun
from dovetail.core.events import Token
from dovetail.core.outputs import ONLY_SIZES
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel, Complete, Retry, Submit
from dovetail.engine.ports import Task
from dovetail.transports.messages import read_task
from dovetail.wiring.distributed import ServiceParts

from .test_distributed import LEASE, Services, ended, graph, parts_of, services

__all__ = ["services"]


def mapped(total: int, window: int = 100, seconds: float = 0, **fields: Any) -> Graph:
    """A node that makes a list, a mapped node whose items take so long, and a join behind it."""
    each = {"items": "{{ params.list }}", "max_concurrency": window, **fields}
    return graph(
        {
            "first": {},
            "each": {
                "dependencies": ["first"],
                "for_each": each,
                "config": {
                    "of": ["{{ item }}", "{{ index }}", "{{ first.n }}"],
                    "seconds": seconds,
                },
            },
            "join": {
                "dependencies": ["each"],
                "config": {"of": "{{ each | map(attribute='n') }}"},
            },
        }
    )


def numbers(total: int) -> dict[str, Any]:
    return {"list": list(range(total))}


def check(run: RunState, total: int) -> None:
    assert run.status is RunStatus.COMPLETED, run.error
    outputs = [{"n": 2 * item + 2} for item in range(total)]
    assert run.node("each").output == outputs
    assert run.node("join").output == {"n": sum(one["n"] for one in outputs) + 1}
    items = run.node("each").items
    assert items is not None
    assert items.counts(True) == {
        "total": total, "pending": 0, "running": 0, "completed": total, "failed": 0, "cancelled": 0,
    }  # fmt: skip


async def test_the_items_of_a_list_run_and_their_join_reads_them_in_order(
    services: Services, redis_url: str
) -> None:
    for kind in ("orchestrator", "worker", "worker"):
        services.start(kind)
    async with parts_of(redis_url) as parts:
        for total in (0, 1, 7, 250):
            run_id = f"of{total}"
            await parts.orchestrator.submit(Submit(run_id, mapped(total, 20), numbers(total)))
            check(await ended(parts, run_id), total)
    assert max(Counter(services.executions()).values()) == 1
    assert len(services.executions()) == sum((0, 1, 7, 250)) + 8


async def most_in_flight(parts: Any, run_id: str, until: asyncio.Task[Any]) -> int:
    """The most items that were in flight at once, looked at until this is done."""
    most = 0
    while not until.done():
        found = await parts.pipe.call("HGETALL", f"wf:{{{run_id}}}:maps")
        most = max(most, len(found) // 2 - 1)
        await asyncio.sleep(0.005)
    return most


async def test_never_more_items_than_the_window_are_in_flight(
    services: Services, redis_url: str
) -> None:
    for kind in ("orchestrator", "worker", "worker"):
        services.start(kind)
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", mapped(200, 7), numbers(200)))
        ending = asyncio.create_task(ended(parts, "r"))
        assert await most_in_flight(parts, "r", ending) == 7
        check(await ending, 200)


@pytest.mark.parametrize("victim", ["worker", "orchestrator"])
async def test_a_thousand_items_survive_the_death_of_a_process(
    services: Services, redis_url: str, victim: str
) -> None:
    first = services.start(victim)
    services.start("worker" if victim == "orchestrator" else "orchestrator")
    total = 1000
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", mapped(total), numbers(total)))
        while len(services.executions()) < total // 4:
            await asyncio.sleep(0.01)
        first.kill()
        services.start(victim)
        run = await ended(parts, "r")
    check(run, total)
    starts = Counter(services.executions())
    assert len({line.rsplit(" ", 1)[0] for line in starts}) == total + 2
    assert max(starts.values()) == 1  # each attempt of each item is one start


async def test_an_item_that_runs_longer_than_its_lease_keeps_the_lease(
    services: Services, redis_url: str
) -> None:
    for kind in ("orchestrator", "worker"):
        services.start(kind)
    flow = mapped(3, seconds=3 * LEASE)
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", flow, numbers(3)))
        run = await ended(parts, "r")
        check(run, 3)
        each = run.node("each")
        assert each.finished_at - each.started_at > 3 * LEASE
    assert max(Counter(services.executions()).values()) == 1
    assert len(services.executions()) == 3 + 2, services.executions()


async def test_a_stopped_worker_changes_nothing_when_it_comes_back(
    services: Services, redis_url: str
) -> None:
    """Its items were started again by another worker; its late results are refused."""
    services.start("orchestrator")
    stopped = services.start("worker")
    total = 60
    flow = mapped(total, 30, seconds=0.2)
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", flow, numbers(total)))
        while len(services.executions()) < 20:
            await asyncio.sleep(0.01)
        os.kill(stopped.pid, signal.SIGSTOP)
        services.start("worker")
        await asyncio.sleep(3 * LEASE)
        os.kill(stopped.pid, signal.SIGCONT)
        check(await ended(parts, "r"), total)


async def test_a_repeated_or_late_result_of_an_item_counts_once(
    services: Services, redis_url: str
) -> None:
    for kind in ("orchestrator", "worker"):
        services.start(kind)
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", mapped(30, 5), numbers(30)))
        run = await ended(parts, "r")
        token = Token(1, 1, 12345)
        again = [Complete("r", f"each[{item}]", token, {"n": -1}) for item in range(31)]
        assert not any(await parts.store.apply(again, 0.0))
        late = Complete("r", "each[3]", Token(1, 7, 1), {"n": -1})
        (refused,) = await parts.store.apply([late], 0.0)
        assert [event.type for event in refused.events] == ["result.refused"]
        assert refused.events[0].node == "each[3]"
        check(await parts.store.load("r"), 30)
        assert run.seq + 1 == (await parts.store.load("r")).seq


async def list_made(parts: ServiceParts, values: list[int]) -> list[Task]:
    """A run with a mapped node whose list is this output of another node; its items that began."""
    each = {"dependencies": ["first"], "for_each": {"items": "{{ first.n }}", "max_concurrency": 1}}
    flow = graph({"first": {}, "each": {**each, "config": {"of": ["{{ item }}"]}}})
    await parts.orchestrator.submit(Submit("r", flow, {}))
    await complete(parts, await started(parts), {"n": values})
    return await started(parts)


async def started(parts: ServiceParts) -> list[Task]:
    """The tasks on the stream that may start, claimed."""
    entries = await parts.pipe.call("XRANGE", "tasks:work", "-", "+")
    tasks = [read_task(fields) for _, fields in entries]
    now = time.time()
    granted = await parts.store.claim(tasks, "w", now + 60, now)
    await parts.pipe.call("DEL", "tasks:work")
    return [task for task, mine in zip(tasks, granted, strict=True) if mine]


async def complete(parts: ServiceParts, tasks: list[Task], output: Any) -> None:
    results = [Complete(task.run_id, task.node_id, task.token, output) for task in tasks]
    await parts.orchestrator.apply(results)


async def test_a_page_of_items_with_large_outputs_is_read_in_part(redis_url: str) -> None:
    flow = graph({"each": {"for_each": [*range(12)]}})
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", flow, {}))
        tasks = await started(parts)
        while tasks:
            await complete(parts, tasks, "x" * 1_000_000)
            tasks = await started(parts)
        run = await parts.store.load("r", room=ONLY_SIZES)
        items = run.node("each").items
        assert items is not None
        assert (items.completed, len(items.ended)) == (12, 0)
        first = await parts.store.read_items(run, 0, range(12), 3_000_000)
        assert 3 <= first < 12
        assert sorted(items.ended) == [*range(first)]
        assert await parts.store.read_items(run, 0, [first], 1) == 1
        assert await parts.store.read_items(run, 0, [0, first, first + 1], 1) >= 2
        assert await parts.store.read_items(run, 0, range(12), 64_000_000) == 12
        assert sorted(items.ended) == [*range(12)]


async def test_items_are_of_the_list_that_was_made_again_after_redis_was_emptied(
    redis_url: str,
) -> None:
    """One orchestrator remembers the list of the run before the loss, another makes its items."""
    async with parts_of(redis_url) as one, parts_of(redis_url) as other:
        assert [task.item for task in await list_made(one, [1, 2, 3])] == [1]
        await other.pipe.call("FLUSHALL")
        await other.pipe.call("CLIENT", "KILL", "TYPE", "normal")  # as a restart does
        items = await list_made(other, [10, 20, 30])
        assert [(task.item, task.config) for task in items] == [(10, {"of": [10]})]
        await complete(one, items, {"n": 11})
        items = await started(one)
        assert [(task.item, task.config) for task in items] == [(20, {"of": [20]})]
        await complete(one, items, {"n": 21})
        assert [task.item for task in await started(one)] == [30]


async def test_a_retry_reruns_only_the_items_that_did_not_complete(
    services: Services, redis_url: str
) -> None:
    services.start("orchestrator")
    worker = services.start("worker")
    total = 60
    flow = mapped(total, 4, seconds=0.1)
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", flow, numbers(total)))
        while len(services.executions()) < 9:
            await asyncio.sleep(0.01)
        os.kill(worker.pid, signal.SIGSTOP)  # so that it does not come to an end meanwhile
        await parts.orchestrator.apply([Cancel("r")])
        os.kill(worker.pid, signal.SIGCONT)
        run = await ended(parts, "r")
        items = run.node("each").items
        assert run.status is RunStatus.CANCELLED
        assert items is not None
        done = items.completed
        assert 0 < done < total
        await parts.orchestrator.apply([Retry("r")])
        check(await ended(parts, "r"), total)
    again = [line for line in services.executions() if line.split()[2] == "2" and "each" in line]
    assert len(again) == total - done
    assert max(Counter(again).values()) == 1


async def test_a_finished_item_takes_little_memory(services: Services, redis_url: str) -> None:
    for kind in ("orchestrator", "worker"):
        services.start(kind)
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", mapped(2000), numbers(2000)))
        await ended(parts, "r")
        used = 0
        for part in ("items", "events", "maps", "queue"):
            used += await parts.pipe.call("MEMORY", "USAGE", f"wf:{{r}}:{part}", "SAMPLES", 0) or 0
        outputs = sum(len(str(2 * item + 2)) + 6 for item in range(2000))
    assert (used - outputs) / 2000 <= 200


async def test_a_list_in_the_params_does_not_travel_with_each_item(
    services: Services, redis_url: str
) -> None:
    services.start("orchestrator")
    each: dict[str, Any] = {"for_each": "{{ params.list }}", "config": {"of": ["{{ item }}"]}}
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", graph({"each": each}), numbers(2000)))
        while len(sent := await parts.pipe.call("XRANGE", "tasks:work", "-", "+")) < 100:
            await asyncio.sleep(0.01)
        task = read_task(sent[0][1])
        assert task.params is None
        assert await parts.store.params_of(task) == numbers(2000)  # if a handler asks


async def test_a_damaged_run_with_items_is_found_and_can_be_cancelled_and_retried(
    services: Services, redis_url: str
) -> None:
    for kind in ("orchestrator", "worker"):
        services.start(kind)
    flow = mapped(40, 4, seconds=0.3)
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", flow, numbers(40)))
        while len(services.executions()) < 6:
            await asyncio.sleep(0.01)
        services.close()  # the run stands still
        assert await parts.store.repair("r", 0.0, dry_run=True) == []
        counts = (await parts.pipe.call("HGET", "wf:{r}:maps", 1)).split(b"|")
        counts[7] = b"39"  # how many are completed
        await parts.pipe.call("HSET", "wf:{r}:maps", 1, b"|".join(counts))
        with pytest.raises(BrokenRun, match="cancel the run, then retry it"):
            await parts.store.repair("r", 0.0)
        ended_items = await parts.pipe.call("HKEYS", "wf:{r}:items")
        await parts.pipe.call("HDEL", "wf:{r}:items", ended_items[0])
        with pytest.raises(BrokenRun):
            await parts.store.repair("r", 0.0)
        assert await parts.store.end_by_force("r", 1.0)
        items = (await parts.store.load("r")).node("each").items
        assert items is not None
        assert (items.in_flight, items.running) == ({}, 0)
        await parts.orchestrator.apply([Retry("r", "each")])
        for kind in ("orchestrator", "worker"):
            services.start(kind)
        check(await ended(parts, "r"), 40)
