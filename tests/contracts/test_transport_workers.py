"""What travels over streams, with the workers at its end that would take it.

The promises of `test_transport` are a transport's alone; these need somebody who claims, runs and
answers. Everything is delivered several times here, as it may be.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Submit
from dovetail.distributed import Parts, connected, orchestrate, working
from dovetail.handlers.context import Context
from dovetail.handlers.registry import Registry, describe
from dovetail.pipe import Pipe
from dovetail.transports.streams import RESULTS, WORKERS, stream_of

HANDLERS = ("plain", "rare", "slow")


class Staff:
    """Services in this process, and what their handlers did, in order."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.executed: list[tuple[str, str, int, str]] = []
        """Run, node, attempt and worker."""

    def registry(self, worker: str) -> Registry:
        async def note(config: dict[str, Any], ctx: Context) -> str:
            self.executed.append((ctx.run_id, ctx.node_id, ctx.attempt, worker))
            await asyncio.sleep(config.get("seconds", 0))
            return ctx.node_id

        registry = Registry()
        for name in HANDLERS:
            registry.add(describe(note, name=name))
        return registry

    @asynccontextmanager
    async def at_work(self, *workers: str, concurrency: int = 4) -> AsyncIterator[Parts]:
        settings = Settings(redis_url=self.url, concurrency=concurrency, drain_seconds=1)
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(connected(settings))
            leading = asyncio.create_task(orchestrate(settings))
            stack.push_async_callback(_end, leading)
            for worker in workers:
                await stack.enter_async_context(working(settings, self.registry(worker)))
            yield parts


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def submit(run_id: str, nodes: dict[str, dict[str, Any]]) -> Submit:
    listed = [{"id": name, "handler": "plain", **fields} for name, fields in nodes.items()]
    workflow = Workflow.model_validate({"name": "t", "nodes": listed})
    return Submit(run_id, build_graph(workflow, {}), {})


async def ended(parts: Parts, run_id: str) -> RunState:
    return await asyncio.wait_for(parts.store.wait(run_id), 20)


async def repeated(pipe: Pipe, stream: str, known: set[bytes]) -> None:
    """Nine copies of every message of a stream that was not seen before."""
    for _, fields in await pipe.call("XRANGE", stream, "-", "+"):
        token = fields[fields.index(b"token") + 1] + fields[fields.index(b"node_id") + 1]
        if token not in known:
            known.add(token)
            await asyncio.gather(*(pipe.call("XADD", stream, "*", *fields) for _ in range(9)))


async def test_several_workers_share_the_work_and_each_node_runs_once(redis_url: str) -> None:
    staff = Staff(redis_url)
    nodes = {f"n{i}": {"config": {"seconds": 0.005}} for i in range(60)}
    async with staff.at_work("one", "two") as parts:
        await parts.orchestrator.submit(submit("r", nodes))
        run = await ended(parts, "r")
        assert run.status is RunStatus.COMPLETED
    assert Counter(node for _, node, _, _ in staff.executed) == Counter(dict.fromkeys(nodes, 1))
    assert {worker for _, _, _, worker in staff.executed} == {"one", "two"}


async def test_tasks_and_results_that_come_ten_times_count_once(redis_url: str) -> None:
    staff = Staff(redis_url)
    nodes = {f"n{i}": {} for i in range(10)}
    async with connected(Settings(redis_url=redis_url)) as parts:
        await parts.orchestrator.submit(submit("r", {**nodes, "z": {"dependencies": [*nodes]}}))
        await repeated(parts.pipe, stream_of("plain"), set())
        assert await parts.pipe.call("XLEN", stream_of("plain")) == 100
    copied: set[bytes] = set()

    async def repeat(pipe: Pipe) -> None:
        while True:
            await repeated(pipe, RESULTS, copied)
            await asyncio.sleep(0)

    async with Pipe(redis_url) as pipe, staff.at_work("one", "two") as parts:
        repeating = asyncio.create_task(repeat(pipe))
        run = await ended(parts, "r")
        await _end(repeating)
        events = [event.type async for event in parts.store.watch("r")]
    assert run.status is RunStatus.COMPLETED
    assert Counter(events)["node.started"] == Counter(events)["node.completed"] == 11
    assert sorted(node for _, node, _, _ in staff.executed) == sorted([*nodes, "z"])
    assert copied


async def test_a_rare_handler_does_not_wait_for_the_backlog_of_another(redis_url: str) -> None:
    staff = Staff(redis_url)
    backlog = {f"n{i}": {"config": {"seconds": 0.002}} for i in range(150)}
    async with connected(Settings(redis_url=redis_url)) as parts:
        await parts.orchestrator.submit(submit("many", backlog))
        few = {f"n{i}": {"handler": "rare"} for i in range(3)}
        await parts.orchestrator.submit(submit("few", few))
    async with staff.at_work("one", concurrency=2) as parts:
        await ended(parts, "few")
        before = sum(run_id == "many" for run_id, *_ in staff.executed)
        await ended(parts, "many")
    assert before < 50


async def test_a_worker_that_leaves_takes_no_message_with_it(redis_url: str) -> None:
    staff = Staff(redis_url)
    async with staff.at_work("staying") as parts:
        async with staff.at_work("leaving"):
            pass
        await parts.orchestrator.submit(submit("r", {f"n{i}": {} for i in range(20)}))
        await ended(parts, "r")
        for name in HANDLERS:
            assert (await parts.pipe.call("XPENDING", stream_of(name), WORKERS))[0] == 0
            assert await parts.pipe.call("XLEN", stream_of(name)) == 0
    assert {worker for _, _, _, worker in staff.executed} == {"staying"}


async def test_what_a_worker_runs_is_on_the_list_of_leases(redis_url: str) -> None:
    """Before it is claimed: who dies right after that is missed by nobody else."""
    staff = Staff(redis_url)
    async with staff.at_work("one") as parts:
        await parts.orchestrator.submit(submit("r", {"n": {"config": {"seconds": 0.3}}}))
        while not staff.executed:
            await asyncio.sleep(0.005)
        agenda = parts.orchestrator.agenda
        held = await agenda.expired(parts.clock() + 3600, 10)
        assert [(run_id, name) for run_id, name, _ in held] == [("r", "n")]
        assert (await ended(parts, "r")).status is RunStatus.COMPLETED
        while await agenda.expired(parts.clock() + 3600, 10):
            await asyncio.sleep(0.005)
