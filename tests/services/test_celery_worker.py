"""A Celery worker from its start to its end: as `dovetail worker`, and as Celery starts one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Event
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.core.transitions import Cancel, Submit
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.transports.celery.application import QUEUE, make_app
from dovetail.wiring.distributed import ServiceParts

from ..celery_crew import CELERY, EXECUTED, SCRIPT, celery_worker
from ..cli.conftest import environment
from .test_celery_broker import led

APP = (CELERY, "-A", "dovetail.transports.celery", "worker", "--without-mingle")
LEASE = {"DOVETAIL_LEASE_SECONDS": "2"}


def submission(run_id: str, handler: str, seconds: float, count: int = 1, **fields: Any) -> Submit:
    node = {"handler": handler, "config": {"seconds": seconds}, **fields}
    nodes = [{"id": f"n{i}", **node} for i in range(count)]
    workflow = Workflow.model_validate({"name": "t", "nodes": nodes})
    return Submit(run_id, build_graph(workflow, {}), {})


async def executed(parts: ServiceParts) -> list[list[Any]]:
    return [orjson.loads(one) for one in await parts.pipe.call("LRANGE", EXECUTED, 0, -1)]


async def begun(parts: ServiceParts, count: int) -> None:
    async with asyncio.timeout(40):
        while len(await executed(parts)) < count:
            await asyncio.sleep(0.01)


async def ended(parts: ServiceParts, run_id: str) -> Any:
    return await asyncio.wait_for(parts.store.wait(run_id), 40)


async def test_a_terminated_worker_finishes_its_running_nodes_and_takes_no_more(
    redis_url: str, tmp_path: Path
) -> None:
    settings = Settings(redis_url=redis_url, transport="celery", lease_seconds=2)
    async with led(settings) as parts:
        with celery_worker(tmp_path, redis_url, **LEASE) as worker:
            await parts.orchestrator.submit(submission("r", "plain", 1.0, 6))
            await begun(parts, 2)
            assert await asyncio.to_thread(worker.terminate) == 0, worker.reported()
            assert len(await executed(parts)) == 2
            assert await WorkerRegistry(parts.pipe).workers() == []

            async def are_known() -> bool:
                nodes = (await parts.store.load("r")).nodes
                return [node.status for node in nodes].count(NodeStatus.COMPLETED) == 2

            async with asyncio.timeout(20):
                while not await are_known():
                    await asyncio.sleep(0.01)
        events = [event.type async for event in so_far(parts, "r")]
        assert await parts.pipe.call("LLEN", QUEUE) == 4
    assert events.count("node.started") == 2
    assert "node.lost" not in events


async def test_a_cancel_is_received_immediately_and_nodes_that_outlast_the_drain_are_handed_back(
    redis_url: str, tmp_path: Path
) -> None:
    """With leases so long that neither is learnt from one that runs out."""
    settings = Settings(redis_url=redis_url, transport="celery", lease_seconds=60)
    async with led(settings) as parts:
        how = {"DOVETAIL_DRAIN_SECONDS": "0.3", "DOVETAIL_LEASE_SECONDS": "60"}
        with celery_worker(tmp_path, redis_url, **how) as worker:
            await parts.orchestrator.submit(submission("cancelled", "cleans_up", 300))
            await begun(parts, 1)
            await parts.orchestrator.apply([Cancel("cancelled")])
            async with asyncio.timeout(15):
                while not await parts.pipe.call("LLEN", "test:cleaned"):
                    await asyncio.sleep(0.01)
            for handler in ("cleans_up", "thinks"):
                await parts.orchestrator.submit(submission(handler, handler, 300))
            await begun(parts, 3)
            assert await asyncio.to_thread(worker.terminate) == 0, worker.reported()
        for handler in ("cleans_up", "thinks"):
            assert (await parts.store.load(handler)).nodes[0].status is NodeStatus.QUEUED
            assert "node.lost" in [event.type async for event in so_far(parts, handler)]


async def so_far(parts: ServiceParts, run_id: str) -> AsyncIterator[Event]:
    """The events that there are."""
    left = (await parts.store.load(run_id)).seq
    async for event in parts.store.watch(run_id):
        yield event
        left -= 1
        if not left:
            return


async def test_celery_itself_starts_inspects_and_scales_a_worker(
    redis_url: str, tmp_path: Path
) -> None:
    settings = Settings(redis_url=redis_url, transport="celery")
    options = ("--autoscale", "3,1", "-n", "theirs@%h", "-l", "INFO", "-E")
    async with led(settings) as parts:
        with celery_worker(tmp_path, redis_url, *options, command=APP) as worker:
            await parts.orchestrator.submit(submission("r", "plain", 0.2, 12))
            assert (await ended(parts, "r")).status is RunStatus.COMPLETED
            app = make_app(settings)
            reported = await asyncio.to_thread(lambda: app.control.inspect(timeout=5).registered())
            (registered,) = reported.values()
            assert "dovetail.execute_node" in registered
            assert len({pid for *_, pid in await executed(parts)}) > 1, "it did not scale"
            assert await asyncio.to_thread(worker.terminate) == 0, worker.reported()
    assert "dovetail.execute_node" in worker.reported()


async def test_a_thread_pool_and_a_solo_pool_work_too(redis_url: str, tmp_path: Path) -> None:
    """There Celery has no time limits; nodes have theirs all the same."""
    settings = Settings(redis_url=redis_url, transport="celery", lease_seconds=2)
    async with led(settings) as parts:
        for pool in ("threads", "solo"):
            options = ("--pool", pool, "-c", "2")
            with celery_worker(tmp_path, redis_url, *options, command=APP, name=pool, **LEASE):
                await parts.orchestrator.submit(submission(pool, "plain", 0.05, 6))
                assert (await ended(parts, pool)).status is RunStatus.COMPLETED
                late = submission(f"{pool}-late", "plain", 20, timeout_seconds=0.3)
                await parts.orchestrator.submit(late)
                run = await ended(parts, f"{pool}-late")
                assert run.nodes[0].error["type"] == "timeout"


@pytest.mark.parametrize(
    ("command", "env", "words"),
    [
        ((SCRIPT, "worker"), {"DOVETAIL_REDIS_URL": ""}, "set DOVETAIL_REDIS_URL"),
        (APP, {"DOVETAIL_REDIS_URL": ""}, "DOVETAIL_BROKER_URL"),
        (APP, {"DOVETAIL_HANDLERS": "nowhere.py"}, "nowhere.py: there is no such file"),
        (
            (SCRIPT, "serve", "--port", "0", "--with", "worker"),
            {},
            "start `dovetail worker` beside it",
        ),
        ((SCRIPT, "orchestrator"), {"PYTHONPATH": "HERE"}, "pip install 'dovetail[celery]'"),
    ],
)
def test_an_impossible_setup_is_reported_at_the_start(
    redis_url: str, tmp_path: Path, command: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    (tmp_path / "celery.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'celery'\", name='celery')"
    )
    given = {"DOVETAIL_TRANSPORT": "celery", "DOVETAIL_REDIS_URL": redis_url, **env}
    if "PYTHONPATH" in env:
        given["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(**given),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert words in done.stdout + done.stderr


EAGER_THREAD = """
from dovetail.wiring import celery

class EagerThread:
    def __init__(self, *_, confirm, **__):
        confirm()

celery.LeaseThread = EagerThread
celery.PoolProcess()
"""


def test_a_process_of_the_pool_is_complete_before_its_lease_thread_begins(tmp_path: Path) -> None:
    own = environment(DOVETAIL_REDIS_URL="redis://127.0.0.1:1")
    subprocess.run(
        [sys.executable, "-c", EAGER_THREAD], env=own, cwd=tmp_path, check=True, timeout=60
    )
