"""The hub and the task_source, driven step by step with a clock moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.core.dag import Graph
from dovetail.core.transitions import (
    Cancel,
    Complete,
    Decision,
    Dispatch,
    Fail,
    Retry,
    Stop,
    Submit,
)
from dovetail.engine.limits import LocalLimits, TokenBucket
from dovetail.engine.local.orchestrator import LocalOrchestrator
from dovetail.engine.local.task_source import LocalTaskSource
from dovetail.engine.ports import Task
from dovetail.stores.memory import MemoryStore
from dovetail.transports.local import LocalTransport

from ..core.walk import graph


class EngineParts:
    """Store, transport, orchestrator and task_source without a worker: the test is the worker."""

    def __init__(self, **buckets: TokenBucket) -> None:
        self.now = 1000.0
        self.store = MemoryStore()
        self.stopped: list[Stop] = []
        self.transport = LocalTransport(self.stopped.append)
        self.crashes: list[BaseException] = []
        self.orchestrator = LocalOrchestrator(
            self.store, self.transport, self.clock, self.crashes.append
        )
        self.limits = LocalLimits(buckets)
        self.task_source = LocalTaskSource(
            self.transport,
            self.store,
            self.orchestrator,
            self.limits,
            self.clock,
            worker_id="w",
        )

    def clock(self) -> float:
        return self.now

    async def submit(self, compiled: Graph, run_id: str = "r") -> None:
        await self.orchestrator.submit(Submit(run_id, compiled, {}))

    async def take(self, limit: int = 100) -> list[Task]:
        """What can be taken now."""
        try:
            return await asyncio.wait_for(self.task_source.take(limit), 0.01)
        except TimeoutError:
            return []

    async def report(self, *results: Any) -> None:
        await self.task_source.report(results)

    async def later(self, seconds: float) -> None:
        self.now += seconds
        await self.orchestrator.wake_due()


def done(task: Task, output: Any = None) -> Complete:
    cache = task.cache and task.cache._replace(facts={"version": "1"})  # it has read nothing
    return Complete(task.run_id, task.node_id, task.token, output, cache)


def failed(task: Task, **how: Any) -> Fail:
    return Fail(task.run_id, task.node_id, task.token, {"type": "E", "message": "m"}, **how)


def names(tasks: Sequence[Task]) -> list[str]:
    return [task.node_id for task in tasks]


async def test_the_children_of_a_result_are_published() -> None:
    house = EngineParts()
    await house.submit(graph({"a": [], "b": ["a"], "c": ["a"]}))
    (first,) = await house.take()
    assert (first.node_id, first.timeout_seconds, first.handler) == ("a", 300.0, "h")
    await house.report(done(first, {"x": 1}))
    tasks = await house.take()
    assert names(tasks) == ["b", "c"]
    assert tasks[0].inputs() == {"a": {"x": 1}}
    await house.report(*(done(task) for task in tasks))
    assert (await house.store.load("r")).status == "COMPLETED"


async def test_a_task_source_returns_at_most_the_requested_number() -> None:
    house = EngineParts()
    await house.submit(graph({name: [] for name in "abcde"}))
    assert names(await house.take(2)) == ["a", "b"]
    assert names(await house.take(2)) == ["c", "d"]
    assert names(await house.take(2)) == ["e"]


async def test_a_node_that_was_cancelled_after_publishing_is_not_started() -> None:
    house = EngineParts()
    await house.submit(graph({"a": []}))
    await house.orchestrator.apply([Cancel("r")])
    assert await house.take() == []


async def test_a_message_from_before_a_retry_is_not_started_again() -> None:
    house = EngineParts()
    await house.submit(graph({"a": []}))
    await house.orchestrator.apply([Cancel("r")])
    await house.orchestrator.apply([Retry("r")])
    tasks = await house.take()
    assert [task.token.epoch for task in tasks] == [2]


async def test_a_node_published_twice_is_claimed_once() -> None:
    house = EngineParts()
    await house.submit(graph({"a": [], "b": []}))
    run = await house.store.load("r")
    again = [Dispatch(run, 0, run.node("a").token)]
    await house.transport.publish(again)
    assert names(await house.take()) == ["a", "b"]
    await house.transport.publish(again)
    assert await house.take() == []


async def test_a_retry_is_woken_exactly_at_its_time() -> None:
    house = EngineParts()
    await house.submit(graph({"a": []}, a={"max_retries": 1}))
    (task,) = await house.take()
    await house.report(failed(task))
    await house.later(9.9)
    assert await house.take() == []
    await house.later(0.2)
    (again,) = await house.take()
    assert again.token.attempt == 2


async def test_timers_fire_by_themselves() -> None:
    house = EngineParts()
    loop = asyncio.get_running_loop()
    began = loop.time()
    house.clock = lambda: 1000.0 + loop.time() - began  # type: ignore[method-assign]
    house.orchestrator._clock = house.clock
    house.task_source._clock = house.clock
    nodes = graph({"a": [], "b": []}, a={"max_retries": 1}, b={"max_retries": 1})
    await house.submit(nodes)
    first, second = await house.take()
    await house.report(failed(first, after=0.05), failed(second, after=0.02))
    taken = await asyncio.wait_for(house.task_source.take(1), 5)
    assert names(taken) == ["b"], "the earlier of two timers rings first"
    assert names(await asyncio.wait_for(house.task_source.take(1), 5)) == ["a"]
    assert loop.time() - began >= 0.05
    await house.orchestrator.close()


async def test_a_closed_orchestrator_fires_no_timer() -> None:
    house = EngineParts()
    await house.submit(graph({"a": []}, a={"max_retries": 1}))
    (task,) = await house.take()
    await house.report(failed(task, after=0.0))
    await house.orchestrator.close()
    house.now += 60
    await asyncio.sleep(0.01)
    assert await house.take() == []


async def test_an_error_of_the_store_in_a_timer_reaches_the_engine() -> None:
    house = EngineParts()
    await house.submit(graph({"a": []}, a={"max_retries": 1}))
    (task,) = await house.take()

    async def broken(*_: Any, **__: Any) -> list[Decision]:
        raise OSError("disk full")

    await house.report(failed(task, after=0.0))
    house.store.apply = broken  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        while not house.crashes:
            await asyncio.sleep(0.001)
    assert str(house.crashes[0]) == "disk full"


async def test_a_cancel_stops_the_running_handlers() -> None:
    house = EngineParts()
    await house.submit(graph({"a": [], "b": []}))
    tasks = await house.take(1)
    await house.orchestrator.apply([Cancel("r")], durable=True)
    assert house.stopped == [Stop("r", "a", tasks[0].token)]


async def test_a_config_that_cannot_be_rendered_fails_only_its_node() -> None:
    house = EngineParts()
    nodes = graph(
        {"a": [], "b": []}, on_failure="continue", a={"config": {"x": "{{ params.missing }}"}}
    )
    await house.submit(nodes)
    assert names(await house.take()) == ["b"]
    run = await house.store.load("r")
    assert (run.node("a").status, run.node("a").attempt) == ("FAILED", 0)


class TestParking:
    async def test_nodes_beyond_the_rate_are_woken_one_by_one(self) -> None:
        house = EngineParts(api=TokenBucket(1, 1))
        compiled = graph(
            {name: [] for name in "abc"}, **{name: {"resource_tag": "api"} for name in "abc"}
        )
        await house.submit(compiled)
        assert names(await house.take()) == ["a"]
        assert await house.take() == []
        for name in "bc":
            await house.later(0.5)
            assert await house.take() == []
            await house.later(0.5)
            assert names(await house.take()) == [name]

    async def test_a_slowed_tag_parks_even_nodes_with_a_token(self) -> None:
        house = EngineParts(api=TokenBucket(1, 1))
        compiled = graph({"a": [], "b": []}, **{n: {"resource_tag": "api"} for n in "ab"})
        await house.submit(compiled)
        await house.take()
        await house.task_source.slow("api", house.now + 60)
        await house.later(1)
        assert await house.take() == []
        await house.later(58.5)
        assert await house.take() == []
        await house.later(1)
        assert names(await house.take()) == ["b"]

    async def test_nodes_that_missed_their_token_do_not_all_start_at_once(self) -> None:
        house = EngineParts(api=TokenBucket(1, 1))
        compiled = graph(
            {name: [] for name in "abcd"}, **{name: {"resource_tag": "api"} for name in "abcd"}
        )
        await house.submit(compiled)
        assert names(await house.take()) == ["a"]
        assert await house.take() == []
        await house.later(10)  # no worker had a slot for them meanwhile
        assert names(await house.take()) == ["b"]
        assert await house.take() == []
        await house.later(1)
        assert len(await house.take()) == 1

    async def test_cancelled_nodes_do_not_delay_the_nodes_after_them(self) -> None:
        house = EngineParts(api=TokenBucket(1, 1))
        size = 50
        compiled = graph(
            {f"n{i}": [] for i in range(size)},
            **{f"n{i}": {"resource_tag": "api"} for i in range(size)},
        )
        for number in range(5):
            await house.submit(compiled, f"r{number}")
            house.now += 2
            assert names(await house.take(size)) == ["n0"]
            assert await house.take(size) == []
            run = await house.store.load(f"r{number}")
            waits = [node.until - house.now for node in run.nodes if node.until is not None]
            assert len(waits) == size - 1
            assert max(waits) < size + 2, "it waits behind nodes that will never come"
            await house.orchestrator.apply([Cancel(f"r{number}")])
        assert len(house.task_source._booked) <= 2 * size


async def test_a_cached_output_completes_a_node_without_a_start() -> None:
    house = EngineParts()
    compiled = graph({"a": [], "b": ["a"]}, a={"cache": {"ttl_seconds": 60}})
    await house.submit(compiled, "one")
    (task,) = await house.take()
    assert task.cache is not None
    await house.report(done(task, {"x": 1}))
    await house.take()
    await house.submit(compiled, "two")
    assert names(await house.take()) == ["b"]
    house.now += 61
    await house.submit(compiled, "three")
    assert names(await house.take()) == ["a"]


async def test_inputs_are_copies_of_the_outputs_of_completed_parents() -> None:
    house = EngineParts()
    nodes = graph({"a": [], "skip": [], "b": ["a", "skip"]}, skip={"condition": False})
    await house.submit(nodes)
    (task,) = await house.take()
    await house.report(done(task, {"list": []}))
    (task,) = await house.take()
    inputs = task.inputs()
    assert inputs == {"a": {"list": []}}
    inputs["a"]["list"].append(1)
    assert task.inputs() == {"a": {"list": []}}


async def test_a_repeated_trigger_publishes_nothing() -> None:
    house = EngineParts()
    compiled = graph({"a": []})
    await house.submit(compiled)
    await house.submit(compiled)
    assert names(await house.take()) == ["a"]
    assert await house.take() == []


@pytest.mark.parametrize("policy", ["fail_fast", "continue"])
async def test_equal_outcomes_in_any_order_give_equal_final_states(policy: str) -> None:
    ends = []
    for backwards in (False, True):
        house = EngineParts()
        nodes = {"a": [], "b": [], "c": ["a"], "d": ["b"], "e": ["c", "d"]}
        await house.submit(graph(nodes, on_failure=policy))
        while tasks := await house.take():
            for task in reversed(tasks) if backwards else tasks:
                await house.report(done(task, task.node_id))
        run = await house.store.load("r")
        ends.append([(node.status, node.output) for node in run.nodes])
    assert ends[0] == ends[1]
