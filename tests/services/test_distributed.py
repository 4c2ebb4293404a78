"""Orchestrators and workers as processes of their own, over a real Redis; some of them die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel, Claim, Submit
from dovetail.engine.distributed import orchestrator as shared
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.wiring.distributed import ServiceParts, connected

LEASE = 0.6
PATIENCE = 60.0
"""Four processes that start on a busy machine need some of it."""
SERVICE = """
import asyncio, os, sys, time
from dovetail.config import Settings
from dovetail.wiring.distributed import orchestrate, working
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import describe

SIDE = sys.argv[2]

def reported(ctx):
    file = os.open(SIDE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    name = ctx.idempotency_key.split(":")[1]  # of the node, or of the item
    os.write(file, f"{ctx.run_id} {name} {ctx.epoch} {ctx.attempt}\\n".encode())
    os.close(file)

async def work(config, ctx):
    reported(ctx)
    await asyncio.sleep(config.get("seconds", 0))
    return {"n": sum(config.get("of", [])) + 1}

async def block(config, ctx):
    reported(ctx)
    if ctx.attempt == 1:
        time.sleep(config["seconds"])  # as no handler should: nothing else goes on meanwhile
    return {"n": 1}

async def main():
    settings = Settings(redis_url=sys.argv[3], lease_seconds=%s, stale_result_timeout=1,
                        stale_claim_interval=0.5, drain_seconds=5,
                        heartbeat_interval=0.1, heartbeat_timeout=0.5)
    if sys.argv[1] == "orchestrator":
        await orchestrate(settings)
    registry = builtin_registry(settings)
    registry.add(describe(work, name="work"))
    registry.add(describe(block, name="block"))
    async with working(settings, registry):
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Services:
    """Real processes, ended with the test."""

    def __init__(self, folder: Path, url: str) -> None:
        self.side = folder / "executions"
        self._script = folder / "service.py"
        self._script.write_text(textwrap.dedent(SERVICE % LEASE))
        self._url = url
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, kind: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, str(self._script), kind, str(self.side), self._url]
        process = subprocess.Popen(words)
        self._all.append(process)
        return process

    def close(self) -> None:
        for process in self._all:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def executions(self) -> list[str]:
        return self.side.read_text().splitlines() if self.side.exists() else []


@pytest.fixture
def services(tmp_path: Path, redis_url: str) -> Iterator[Services]:
    found = Services(tmp_path, redis_url)
    yield found
    found.close()


@asynccontextmanager
async def parts_of(url: str) -> AsyncIterator[ServiceParts]:
    async with connected(Settings(redis_url=url, lease_seconds=LEASE)) as parts:
        yield parts


def graph(nodes: dict[str, dict[str, Any]]) -> Any:
    listed = [{"id": name, "handler": "work", **fields} for name, fields in nodes.items()]
    return build_graph(Workflow.model_validate({"name": "t", "nodes": listed}), {})


DIAMOND = {
    "a": {},
    "b": {"dependencies": ["a"], "config": {"of": ["{{ a.n }}"]}},
    "c": {"dependencies": ["a"], "config": {"of": ["{{ a.n }}"]}},
    "d": {"dependencies": ["b", "c"], "config": {"of": ["{{ b.n }}", "{{ c.n }}"]}},
}


async def ended(parts: ServiceParts, run_id: str, seconds: float = PATIENCE) -> RunState:
    return await asyncio.wait_for(parts.store.wait(run_id), seconds)


async def test_many_runs_complete_on_two_processes_of_each_service(
    services: Services, redis_url: str
) -> None:
    for kind in ("orchestrator", "orchestrator", "worker", "worker"):
        services.start(kind)
    async with parts_of(redis_url) as parts:
        compiled = graph(DIAMOND)
        ids = [f"run{i}" for i in range(40)]
        for run_id in ids:
            await parts.orchestrator.submit(Submit(run_id, compiled, {}))
        for run_id in ids:
            run = await ended(parts, run_id)
            assert run.status is RunStatus.COMPLETED
            assert run.node("d").output == {"n": 5}
    assert len(services.executions()) == 4 * len(ids)


async def test_a_condition_is_decided_by_the_orchestrator_that_applies_the_result(
    services: Services, redis_url: str
) -> None:
    nodes = {
        **DIAMOND,
        "b": {**DIAMOND["b"], "condition": "{{ a.n > 5 }}"},
        "d": {"dependencies": ["b", "c"], "config": {"of": ["{{ c.n }}"]}},
    }
    services.start("orchestrator")
    services.start("worker")
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        run = await ended(parts, "r")
        assert (run.node("b").status, run.node("d").output) == ("SKIPPED", {"n": 3})


async def test_the_children_of_a_node_that_was_allowed_to_fail_run_on_any_worker(
    services: Services, redis_url: str
) -> None:
    nodes = {
        **DIAMOND,
        "b": {"dependencies": ["a"], "handler": "fail", "allow_failure": True},
        "d": {
            "dependencies": ["b", "c"],
            "condition": "{{ b.status == 'FAILED' and b.error.message != '' }}",
            "config": {"of": ["{{ b.n | default(0) }}", "{{ c.n }}"]},
        },
        "e": {"dependencies": ["b"], "handler": "output"},
    }
    services.start("orchestrator")
    services.start("worker")
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        run = await ended(parts, "r")
        assert (run.status, run.error) == (RunStatus.COMPLETED, None)
        assert (run.node("b").status, run.node("d").output) == ("FAILED", {"n": 3})
        assert run.node("e").output == {}


async def test_a_node_with_many_large_parents_gets_all_their_outputs(
    services: Services, redis_url: str
) -> None:
    services.start("orchestrator")
    services.start("worker")
    size, parents = 50_000, [f"p{i}" for i in range(6)]
    nodes: dict[str, Any] = {
        name: {"handler": "input", "config": {"text": "x" * size}} for name in parents
    }
    nodes["all"] = {"handler": "output", "dependencies": parents}
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        run = await ended(parts, "r")
        assert {k: len(v["text"]) for k, v in run.node("all").output.items()} == dict.fromkeys(
            parents, size
        )


async def test_the_death_of_a_worker_costs_its_lease_but_no_run(
    services: Services, redis_url: str
) -> None:
    services.start("orchestrator")
    doomed = services.start("worker")
    async with parts_of(redis_url) as parts:
        nodes = {"a": {"config": {"seconds": 2}}, "b": {"dependencies": ["a"]}}
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        async with asyncio.timeout(PATIENCE):
            while not services.executions():
                await asyncio.sleep(0.01)
        doomed.kill()
        killed = time.monotonic()
        services.start("worker")
        run = await ended(parts, "r")
        assert time.monotonic() - killed < LEASE + 2 + 20
        assert (run.status, run.node("a").attempt) == (RunStatus.COMPLETED, 2)
    assert sorted(services.executions()) == ["r a 1 1", "r a 1 2", "r b 1 1"]


async def test_the_death_of_an_orchestrator_leaves_no_run_unfinished(
    services: Services, redis_url: str
) -> None:
    doomed = services.start("orchestrator")
    services.start("worker")
    async with parts_of(redis_url) as parts:
        compiled = graph(
            {
                "a": {},
                "b": {"dependencies": ["a"], "config": {"seconds": 0.2}},
                "c": {"dependencies": ["b"]},
            }
        )
        ids = [f"run{i}" for i in range(20)]
        for run_id in ids:
            await parts.orchestrator.submit(Submit(run_id, compiled, {}))
        await asyncio.sleep(0.5)
        doomed.kill()
        services.start("orchestrator")
        for run_id in ids:
            assert (await ended(parts, run_id)).status is RunStatus.COMPLETED


async def test_workers_send_heartbeats_and_share_one_rate_limit(
    services: Services, redis_url: str
) -> None:
    for kind in ("orchestrator", "worker", "worker"):
        services.start(kind)
    async with parts_of(redis_url) as parts:
        nodes = {f"n{i}": {"resource_tag": "slow"} for i in range(12)}
        began = time.monotonic()
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        run = await ended(parts, "r")
        assert run.status is RunStatus.COMPLETED
        assert time.monotonic() - began > 1.0, "a tag that is not configured: ten a second"
        workers = await WorkerRegistry(parts.pipe).workers()
        assert [worker["alive"] for worker in workers] == [True, True]
        assert "work" in workers[0]["handlers"]


async def test_lost_task_streams_are_published_again(services: Services, redis_url: str) -> None:
    services.start("orchestrator")
    async with parts_of(redis_url) as parts:
        await parts.orchestrator.submit(Submit("r", graph(DIAMOND), {}))
        await parts.pipe.call("DEL", "tasks:work")
        services.start("worker")
        run = await ended(parts, "r")
        assert run.status is RunStatus.COMPLETED


async def test_an_index_entry_without_a_run_is_removed_and_blocks_nothing(redis_url: str) -> None:
    async with parts_of(redis_url) as parts:
        agenda = parts.orchestrator.timers
        await agenda.moved(["ghost"], 1.0)  # its maker died before it was made
        await agenda.lease(["ghost"], 1.0)
        await parts.orchestrator.sweep()
        await parts.orchestrator.reap()
        assert await agenda.idle(2.0, 10) == []
        assert await agenda.expired(parts.clock() + 3600, 10) == []


async def test_an_orchestrator_that_was_cut_off_for_long_gives_workers_time_to_renew(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(shared, "monotonic", lambda: now)
    async with connected(Settings(redis_url=redis_url)) as parts:
        orchestrator, store = parts.orchestrator, parts.store
        await orchestrator.reap()
        await orchestrator.submit(Submit("r", graph({"a": {}}), {}))
        token = (await store.load("r")).node("a").token
        await store.apply([Claim("r", "a", token, "w", parts.clock() - 1)], parts.clock())
        await orchestrator.timers.lease(["r"], parts.clock() - 1)
        for leases, lost in ((1.0, 0), (0.4, 0), (0.2, 1)):
            now += leases * orchestrator._lease_seconds
            await orchestrator.reap()
            assert (await store.load("r")).node("a").crashes == lost


async def test_a_cancel_reaches_a_running_handler(services: Services, redis_url: str) -> None:
    services.start("orchestrator")
    services.start("worker")
    async with parts_of(redis_url) as parts:
        nodes = {"a": {"config": {"seconds": 60}}}
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        async with asyncio.timeout(PATIENCE):
            while not services.executions():
                await asyncio.sleep(0.01)
        await parts.orchestrator.apply([Cancel("r")])
        assert (await ended(parts, "r")).status is RunStatus.CANCELLED


async def executed(services: Services, *lines: str) -> None:
    """Returns once these nodes have begun."""
    async with asyncio.timeout(PATIENCE):
        while not {*lines} <= {*services.executions()}:
            await asyncio.sleep(0.01)


async def test_a_handler_that_blocks_the_event_loop_loses_no_lease(
    services: Services, redis_url: str
) -> None:
    services.start("orchestrator")
    services.start("worker")
    async with parts_of(redis_url) as parts:
        nodes = {
            "done": {},  # its result waits until the loop turns again
            "block": {"handler": "block", "config": {"seconds": 3 * LEASE}},
            "beside": {"config": {"seconds": 3 * LEASE}},
        }
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        await executed(services, "r block 1 1")
        await asyncio.sleep(2 * LEASE)  # longer than a lease, and than a heartbeat may take
        (worker,) = await WorkerRegistry(parts.pipe).workers()
        assert worker["alive"], "it works"
        run = await ended(parts, "r")
        assert run.status is RunStatus.COMPLETED
        assert [(node.attempt, node.crashes) for node in run.nodes] == [(1, 0)] * 3
        types = {event.type async for event in parts.store.watch("r")}
        assert not types & {"node.lost", "result.refused"}
    assert sorted(services.executions()) == ["r beside 1 1", "r block 1 1", "r done 1 1"]


async def test_a_handler_that_blocks_the_loop_beyond_its_timeout_loses_all_leases_of_its_worker(
    services: Services, redis_url: str
) -> None:
    services.start("orchestrator")
    services.start("worker")
    async with parts_of(redis_url) as parts:
        nodes = {
            "block": {"handler": "block", "config": {"seconds": 60}, "timeout_seconds": 0.3},
            "beside": {"config": {"seconds": 0.5}},
        }
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        await executed(services, "r block 1 1", "r beside 1 1")
        services.start("worker")
        run = await ended(parts, "r")
        assert run.status is RunStatus.COMPLETED
        assert [(node.attempt, node.crashes) for node in run.nodes] == [(2, 1)] * 2
        alive = [worker["alive"] for worker in await WorkerRegistry(parts.pipe).workers()]
        assert alive == [False, True]


async def test_a_late_result_of_a_sleeping_worker_changes_nothing(
    services: Services, redis_url: str
) -> None:
    services.start("orchestrator")
    sleeper = services.start("worker")
    async with parts_of(redis_url) as parts:
        nodes = {"a": {"config": {"seconds": 1.5}}}
        await parts.orchestrator.submit(Submit("r", graph(nodes), {}))
        async with asyncio.timeout(PATIENCE):
            while not services.executions():
                await asyncio.sleep(0.01)
        os.kill(sleeper.pid, signal.SIGSTOP)
        services.start("worker")
        run = await ended(parts, "r")
        assert run.node("a").attempt == 2
        before = (await parts.store.load("r")).snapshot()["nodes"]
        os.kill(sleeper.pid, signal.SIGCONT)
        await asyncio.sleep(1)
        assert (await parts.store.load("r")).snapshot()["nodes"] == before
