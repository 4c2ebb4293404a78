"""How soon a run goes on after a death; the exact figures are those of `./dev faults`."""

from __future__ import annotations

import asyncio
import time

from .conftest import NewStage
from .side_file import executions
from .stage import IMPATIENT
from .storm import Storm
from .workload import draw_slow

SEED = 1
SECONDS = 3.0
SLACK = 4.0
"""The machines of the continuous integration are slow and shared."""
LEASE = IMPATIENT["lease_seconds"]
PATIENT = {**IMPATIENT, "stale_result_timeout": 30.0, "stale_claim_interval": 15.0}
"""The backstop for results is far away: an orchestrator's lease has to do it."""


async def test_the_nodes_of_a_dead_worker_start_again_within_its_lease_and_two_seconds(
    new_stage: NewStage,
) -> None:
    async with new_stage(SEED, IMPATIENT) as stage:
        storm = Storm(stage, ["a worker dies"], plan=draw_slow, crowd=4, orders=False)
        await storm.rage(SECONDS, pause=(0.6, 1.0))
        assert (await storm.calm(wait_for_sweeps=False)).wrong == {}
        assert stage.recovery.workers
        assert max(stage.recovery.workers) < LEASE + 2 + SLACK


async def test_all_nodes_of_a_busy_worker_that_died_start_again_just_as_soon(
    new_stage: NewStage,
) -> None:
    """It has claimed many nodes a moment ago, and read many more."""
    lease, runs = 3.0, 1500
    step = {"handler": "act", "config": {"way": "fine", "seconds": 0, "adds": 1, "of": []}}
    after = [{"id": f"n{i}", **step, "dependencies": [f"n{i - 1}"]} for i in range(1, 4)]
    flow = {"name": "flow", "nodes": [{"id": "n0", **step}, *after]}
    settings = {**IMPATIENT, "lease_seconds": lease, "concurrency": 64}
    async with new_stage(SEED, settings) as stage:
        for kind in ("orchestrator", "worker", "worker"):
            stage.start(kind)
        await stage.workers_are_there()
        batch = await stage.commands.batch(flow, [{}] * runs)
        while len(executions(stage.side)) < runs:
            await asyncio.sleep(0.01)
        stage.kill(stage.all("worker")[0])
        died = time.monotonic()
        ended = await stage.commands.wait_batch(batch["batch_id"])
        assert ended["counts"]["COMPLETED"] == runs
        assert time.monotonic() - died < lease + 2 + SLACK


async def test_a_late_result_of_a_worker_that_slept_beyond_its_lease_changes_nothing(
    new_stage: NewStage,
) -> None:
    async with new_stage(SEED, IMPATIENT) as stage:
        storm = Storm(stage, ["a worker oversleeps"], plan=draw_slow, crowd=4, orders=False)
        # For longer than others: whether one that wakes up hears first that it shall stop is luck.
        await storm.rage(3 * SECONDS, pause=(0.3, 0.5))
        report = await storm.calm(wait_for_sweeps=False)
        assert report.wrong == {}
        assert stage.counts["worker overslept"]
        assert report.refused, "nothing came late"


async def test_the_messages_of_a_dead_orchestrator_are_reclaimed_within_five_seconds(
    new_stage: NewStage,
) -> None:
    async with new_stage(SEED, PATIENT) as stage:
        storm = Storm(stage, ["an orchestrator dies over results"], orders=False)
        await storm.rage(SECONDS, pause=(0.8, 1.2))
        assert (await storm.calm(wait_for_sweeps=False)).wrong == {}
        assert stage.recovery.orchestrators
        assert max(stage.recovery.orchestrators) < 5 + SLACK


async def test_runs_continue_soon_after_redis_was_killed_and_task_streams_were_lost(
    new_stage: NewStage,
) -> None:
    async with new_stage(SEED, IMPATIENT) as stage:
        storm = Storm(stage, ["Redis dies", "task streams are deleted"], orders=False)
        await storm.rage(SECONDS, pause=(0.4, 0.8))
        assert (await storm.calm(wait_for_sweeps=False)).wrong == {}
        assert stage.recovery.redis
        assert max(stage.recovery.redis) < 3 + SLACK
        assert max(stage.recovery.tasks, default=0) < LEASE + 10 + SLACK
