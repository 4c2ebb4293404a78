"""Random runs over Celery while workers, pools, messages and the broker come to harm.

Every run is read in the end, as in the storms over Streams (tests/services/faults). Leases are a
second here; `./dev faults --transport celery` has longer storms, and the default settings.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.core.states import RunStatus

from ..faults.process_forker import ProcessForker
from ..servers.redis_server import RedisServer
from .faults.celery_stage import CELERY_FAULTS, IMPATIENT_POOL, JOBS, CeleryStage
from .faults.side_file import executions
from .faults.storm import Storm
from .faults.workload import draw_mapped, draw_slow

SEED = int(os.environ.get("FAULTS_SEED", random.randrange(1 << 32)))
LEASE = IMPATIENT_POOL["lease_seconds"]
SLACK = 10.0
"""The machines of the continuous integration are slow and shared; `./dev faults` has none."""
PATIENCE = 60.0
NewStage = Callable[[], CeleryStage]


@pytest.fixture(scope="module")
def process_forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessForker]:
    with ProcessForker(JOBS, tmp_path_factory.mktemp("reported")) as process_forker:
        yield process_forker


@pytest.fixture
def new_stage(process_forker: ProcessForker, tmp_path: Path) -> Iterator[NewStage]:
    print(f"FAULTS_SEED={SEED}")  # shown when the test fails
    with RedisServer(fsync="always") as redis, RedisServer(fsync="always") as broker:
        yield lambda: CeleryStage(tmp_path, redis, broker, process_forker, SEED, IMPATIENT_POOL)
        process_forker.clear()


async def test_nodes_of_a_dead_worker_or_pool_process_start_again_within_the_lease(
    new_stage: NewStage,
) -> None:
    faults = ["a worker dies", "a process of a pool dies"]
    async with new_stage() as stage:
        storm = Storm(stage, faults, known=CELERY_FAULTS, plan=draw_slow, crowd=4, orders=False)
        await storm.rage(6.0, pause=(0.6, 1.0))
        assert (await storm.calm(wait_for_sweeps=False)).wrong == {}
        assert stage.counts["worker killed"]
        assert stage.counts["pool process killed"]
        assert stage.recovery.workers
        assert statistics.median(stage.recovery.workers) < LEASE + 5 + SLACK


async def test_every_run_ends_correctly_under_message_process_and_broker_faults(
    new_stage: NewStage, tmp_path: Path
) -> None:
    async with new_stage() as stage:
        storm = Storm(stage, CELERY_FAULTS, known=CELERY_FAULTS)
        await storm.rage(8.0)
        report = await storm.calm()
        await storm.leave_evidence(report, tmp_path / "evidence")
        assert report.wrong == {}, f"see {tmp_path / 'evidence'}"
        assert report.runs >= 5
        assert report.executions >= 10
        assert storm.tried == set(CELERY_FAULTS)
        assert not stage.canary.exists()


async def test_every_item_of_a_mapped_node_is_joined_once_under_faults(
    new_stage: NewStage, tmp_path: Path
) -> None:
    faults = ["a worker dies", "a process of a pool dies"]
    async with new_stage() as stage:
        storm = Storm(stage, faults, known=CELERY_FAULTS, plan=draw_mapped, crowd=4, orders=False)
        await storm.rage(5.0, pause=(0.6, 1.0))
        report = await storm.calm(wait_for_sweeps=False)
        await storm.leave_evidence(report, tmp_path / "evidence")
        assert report.wrong == {}, f"see {tmp_path / 'evidence'}"
        assert report.executions >= 30
        assert stage.counts["pool process killed"]


@pytest.mark.parametrize("victim", ["worker", "orchestrator"])
async def test_a_thousand_items_survive_a_death_and_are_joined_once(
    new_stage: NewStage, victim: str
) -> None:
    total = 1000
    quick = {"handler": "act_in_thread"}
    config = {"seconds": 0, "way": "works"}
    nodes = [
        {
            "id": "each",
            "for_each": list(range(total)),
            "config": {**config, "adds": "{{ index }}", "of": []},
            **quick,
        },
        {
            "id": "join",
            "dependencies": ["each"],
            "config": {**config, "adds": 0, "of": "{{ each | map(attribute='n') }}"},
            **quick,
        },
    ]
    async with new_stage() as stage:
        services = {kind: stage.start(kind) for kind in ("serve", "orchestrator", "worker")}
        await stage.ready()
        run_id = await stage.front.trigger("items", {"name": "items", "nodes": nodes}, {})
        async with asyncio.timeout(PATIENCE):
            while len(executions(stage.side)) < total // 4:
                await asyncio.sleep(0.02)
        stage.kill(services[victim])
        assert len(executions(stage.side)) < total
        stage.start(victim)
        run = await asyncio.wait_for(stage.commands.store.wait(run_id), PATIENCE)
        assert run.status is RunStatus.COMPLETED, run.error
        assert run.node("join").output["n"] == sum(range(total))
        starts = Counter(one.start for one in executions(stage.side))
        assert max(starts.values()) == 1  # each attempt of each item is one start
        assert [start for start in starts if start[0] == "join"] == [("join", 1, 1)]
        assert len({node for node, _, _ in starts}) == total + 1
        again = sum(attempt > 1 for _, _, attempt in starts)
        assert again <= IMPATIENT_POOL["concurrency"] * (victim == "worker")


async def test_a_handler_that_ignores_its_soft_limit_times_out_and_its_process_is_killed(
    new_stage: NewStage,
) -> None:
    nodes = [{"id": "n", "handler": "cling", "timeout_seconds": 1, "config": {"seconds": 600}}]
    working = {"adds": 1, "of": [], "seconds": 0, "way": "works"}
    later = [{"id": "n", "handler": "act", "config": working}]
    async with new_stage() as stage:
        worker = stage.start("worker")
        for kind in ("serve", "orchestrator"):
            stage.start(kind)
        await stage.ready()
        run_id = await stage.front.trigger("one", {"name": "clings", "nodes": nodes}, {})
        run = await asyncio.wait_for(stage.commands.store.wait(run_id), PATIENCE)
        assert run.status is RunStatus.FAILED
        assert (run.node("n").error or {})["type"] == "timeout"
        (begun,) = executions(stage.side)
        async with asyncio.timeout(PATIENCE):
            while begun.pid in stage.pool(worker):
                await asyncio.sleep(0.1)
        run_id = await stage.front.trigger("two", {"name": "later", "nodes": later}, {})
        run = await asyncio.wait_for(stage.commands.store.wait(run_id), PATIENCE)
        assert run.status is RunStatus.COMPLETED
        assert len(executions(stage.side)) == 2
        assert worker.runs
        assert stage.complaints == []
