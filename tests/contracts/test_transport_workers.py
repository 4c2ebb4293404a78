"""What travels between processes, with the workers at its end that would take it.

The promises of `test_transport` are a transport's alone; these need a worker that claims, runs and
answers. Everything is delivered several times here, as it may be. Workers on streams are in this
process; workers of Celery are processes with a pool of processes each.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Submit
from dovetail.handlers.context import Context
from dovetail.handlers.registry import Registry, describe
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.transports.celery.application import QUEUE
from dovetail.transports.streams.sender import RESULTS, WORKERS, stream_of
from dovetail.wiring.distributed import ServiceParts, connected, orchestrate, working

from ..celery_crew import EXECUTED, CeleryWorker
from ..servers.redis_server import RedisServer

HANDLERS = ("plain", "rare", "slow")
STANDING = ("one", "two")
Executed = tuple[str, str, int, str]
"""Run, node, attempt and worker."""


class TransportServices(Protocol):
    """Services on one Redis, and what their handlers did."""

    settings: Settings

    @asynccontextmanager
    def at_work(self, *workers: str, concurrency: int = 4) -> AsyncIterator[ServiceParts]: ...
    async def executed(self, pipe: PipelinedRedis) -> list[Executed]: ...
    async def repeat_tasks(self, pipe: PipelinedRedis) -> int:
        """Nine copies of every task that waits; how many there are then."""
        ...

    async def nothing_left(self, pipe: PipelinedRedis) -> bool:
        """No worker waits for anything or holds anything."""
        ...


class StreamServices:
    def __init__(self, url: str) -> None:
        self.settings = Settings(redis_url=url, concurrency=4, drain_seconds=1)
        self._executed: list[Executed] = []

    def registry(self, worker: str) -> Registry:
        async def note(config: dict[str, Any], ctx: Context) -> str:
            self._executed.append((ctx.run_id, ctx.node_id, ctx.attempt, worker))
            await asyncio.sleep(config.get("seconds", 0))
            return ctx.node_id

        registry = Registry()
        for name in HANDLERS:
            registry.add(describe(note, name=name))
        return registry

    @asynccontextmanager
    async def at_work(self, *workers: str, concurrency: int = 4) -> AsyncIterator[ServiceParts]:
        settings = self.settings.model_copy(update={"concurrency": concurrency})
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(led(settings))
            for worker in workers:
                await stack.enter_async_context(working(settings, self.registry(worker)))
            yield parts

    async def executed(self, pipe: PipelinedRedis) -> list[Executed]:
        return self._executed

    async def repeat_tasks(self, pipe: PipelinedRedis) -> int:
        await repeated(pipe, stream_of("plain"), set())
        return int(await pipe.call("XLEN", stream_of("plain")))

    async def nothing_left(self, pipe: PipelinedRedis) -> bool:
        left = [await pipe.call("XLEN", stream_of(name)) for name in HANDLERS]
        left += [(await pipe.call("XPENDING", stream_of(name), WORKERS))[0] for name in HANDLERS]
        return not any(left)


class CeleryServices:
    """Two workers serve all of these tests; they stand still until one begins its work."""

    def __init__(self, crew: CeleryWorkers) -> None:
        self.settings = Settings(redis_url=crew.url, transport="celery")
        self._crew = crew

    @asynccontextmanager
    async def at_work(self, *workers: str, concurrency: int = 2) -> AsyncIterator[ServiceParts]:
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(led(self.settings))
            self._crew.go_on()
            hired = [
                CeleryWorker(self._crew.folder, self._crew.url, name=name)
                for name in workers
                if name not in STANDING
            ]
            for worker in hired:
                stack.callback(worker.kill)
            for worker in hired:
                await asyncio.to_thread(worker.wait_until_ready)
            yield parts
            for worker in hired:  # as `working` is left: what runs may finish
                assert await asyncio.to_thread(worker.terminate) == 0, worker.reported()

    async def executed(self, pipe: PipelinedRedis) -> list[Executed]:
        noted = [orjson.loads(one) for one in await pipe.call("LRANGE", EXECUTED, 0, -1)]
        return [(run_id, node, attempt, worker) for run_id, node, attempt, worker, _ in noted]

    async def repeat_tasks(self, pipe: PipelinedRedis) -> int:
        for text in await pipe.call("LRANGE", QUEUE, 0, -1):
            for number in range(9):
                copy = orjson.loads(text)
                copy["properties"]["delivery_tag"] += f"-{number}"
                await pipe.call("LPUSH", QUEUE, orjson.dumps(copy))
        return int(await pipe.call("LLEN", QUEUE))

    async def nothing_left(self, pipe: PipelinedRedis) -> bool:
        return not await pipe.call("LLEN", QUEUE) and not await pipe.call("HLEN", "unacked")


@asynccontextmanager
async def led(settings: Settings) -> AsyncIterator[ServiceParts]:
    async with connected(settings) as parts:
        leading = asyncio.create_task(orchestrate(settings))
        yield parts
        await _end(leading)


class CeleryWorkers:
    """Celery workers on a Redis of their own."""

    def __init__(self, redis: RedisServer, folder: Path) -> None:
        self._redis = redis
        self.url = redis.url
        self.folder = folder
        self.workers = [CeleryWorker(folder, redis.url, name=name) for name in STANDING]

    def stand_still(self) -> None:
        for worker in self.workers:
            worker.wait_until_ready()
            worker.process.send_signal(signal.SIGSTOP)
        self._redis.ask("FLUSHALL")  # scripts stay: Celery may load one just now

    def go_on(self) -> None:
        for worker in self.workers:
            worker.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryWorkers]:
    with RedisServer() as redis:
        crew = CeleryWorkers(redis, tmp_path_factory.mktemp("crew"))
        yield crew
        for worker in crew.workers:
            worker.kill()


@pytest.fixture(params=["streams", "celery"])
def staff(request: pytest.FixtureRequest) -> TransportServices:
    if request.param == "streams":
        return StreamServices(request.getfixturevalue("redis_url"))
    crew: CeleryWorkers = request.getfixturevalue("crew")
    crew.go_on()
    crew.stand_still()
    return CeleryServices(crew)


@pytest.fixture
def on_streams(redis_url: str) -> StreamServices:
    return StreamServices(redis_url)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def submit(run_id: str, nodes: dict[str, dict[str, Any]]) -> Submit:
    listed = [{"id": name, "handler": "plain", **fields} for name, fields in nodes.items()]
    workflow = Workflow.model_validate({"name": "t", "nodes": listed})
    return Submit(run_id, build_graph(workflow, {}), {})


async def ended(parts: ServiceParts, run_id: str) -> RunState:
    return await asyncio.wait_for(parts.store.wait(run_id), 60)


async def repeated(pipe: PipelinedRedis, stream: str, known: set[bytes]) -> None:
    """Nine copies of every message of a stream that was not seen before."""
    for _, fields in await pipe.call("XRANGE", stream, "-", "+"):
        token = fields[fields.index(b"token") + 1] + fields[fields.index(b"node_id") + 1]
        if token not in known:
            known.add(token)
            await asyncio.gather(*(pipe.call("XADD", stream, "*", *fields) for _ in range(9)))


async def test_several_workers_share_the_nodes_and_each_node_runs_once(
    staff: TransportServices,
) -> None:
    nodes = {f"n{i}": {"config": {"seconds": 0.005}} for i in range(60)}
    async with staff.at_work("one", "two") as parts:
        await parts.orchestrator.submit(submit("r", nodes))
        run = await ended(parts, "r")
        assert run.status is RunStatus.COMPLETED
        executed = await staff.executed(parts.pipe)
    assert Counter(node for _, node, _, _ in executed) == Counter(dict.fromkeys(nodes, 1))
    assert {worker for _, _, _, worker in executed} == {"one", "two"}


async def test_tasks_and_results_that_arrive_ten_times_count_once(staff: TransportServices) -> None:
    nodes = {f"n{i}": {} for i in range(10)}
    async with connected(staff.settings) as parts:
        await parts.orchestrator.submit(submit("r", {**nodes, "z": {"dependencies": [*nodes]}}))
        assert await staff.repeat_tasks(parts.pipe) >= 80  # one may be on its way to each worker
    copied: set[bytes] = set()

    async def repeat(pipe: PipelinedRedis) -> None:
        while True:
            await repeated(pipe, RESULTS, copied)
            await asyncio.sleep(0)

    assert staff.settings.redis_url is not None
    async with PipelinedRedis(staff.settings.redis_url) as pipe:
        repeating = asyncio.create_task(repeat(pipe))
        async with staff.at_work("one", "two") as parts:
            run = await ended(parts, "r")
            await _end(repeating)
            events = [event.type async for event in parts.store.watch("r")]
            executed = await staff.executed(pipe)
    assert run.status is RunStatus.COMPLETED
    assert Counter(events)["node.started"] == Counter(events)["node.completed"] == 11
    assert sorted(node for _, node, _, _ in executed) == sorted([*nodes, "z"])
    assert copied


async def test_a_rare_handler_does_not_wait_for_the_backlog_of_another(
    on_streams: StreamServices,
) -> None:
    """On streams alone: Celery has one queue for all."""
    staff = on_streams
    backlog = {f"n{i}": {"config": {"seconds": 0.002}} for i in range(150)}
    async with connected(staff.settings) as parts:
        await parts.orchestrator.submit(submit("many", backlog))
        few = {f"n{i}": {"handler": "rare"} for i in range(3)}
        await parts.orchestrator.submit(submit("few", few))
    async with staff.at_work("one", concurrency=2) as parts:
        await ended(parts, "few")
        before = sum(run_id == "many" for run_id, *_ in await staff.executed(parts.pipe))
        await ended(parts, "many")
    assert before < 50


async def test_a_stopping_worker_loses_no_message(staff: TransportServices) -> None:
    async with staff.at_work("one") as parts:
        async with staff.at_work("leaving"):
            pass
        await parts.orchestrator.submit(submit("r", {f"n{i}": {} for i in range(20)}))
        await ended(parts, "r")
        async with asyncio.timeout(60):
            while not await staff.nothing_left(parts.pipe):
                await asyncio.sleep(0.01)
        executed = await staff.executed(parts.pipe)
    assert len(executed) == 20
    assert "leaving" not in {worker for _, _, _, worker in executed}


async def test_a_run_is_in_the_lease_index_while_a_worker_runs_one_of_its_nodes(
    staff: TransportServices,
) -> None:
    """Before it is claimed: a worker that dies right after that is missed by no other."""
    async with staff.at_work("one") as parts:
        await parts.orchestrator.submit(submit("r", {"n": {"config": {"seconds": 0.3}}}))
        while not await staff.executed(parts.pipe):
            await asyncio.sleep(0.005)
        agenda = parts.orchestrator.timers
        assert await agenda.expired(parts.clock() + 3600, 10) == ["r"]
        assert (await ended(parts, "r")).status is RunStatus.COMPLETED
        while await agenda.expired(parts.clock() + 3600, 10):
            await asyncio.sleep(0.005)
