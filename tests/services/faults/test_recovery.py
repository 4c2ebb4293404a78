"""How soon a run goes on after a death; the exact figures are those of `./dev faults`."""

from __future__ import annotations

from .conftest import NewStage
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


async def test_a_dead_workers_nodes_start_again_within_its_lease_and_two_seconds(
    new_stage: NewStage,
) -> None:
    async with new_stage(SEED, IMPATIENT) as stage:
        storm = Storm(stage, ["a worker dies"], plan=draw_slow, crowd=4, orders=False)
        await storm.rage(SECONDS, pause=(0.6, 1.0))
        assert (await storm.calm(wait_for_sweeps=False)).wrong == {}
        assert stage.recovery.workers
        assert max(stage.recovery.workers) < LEASE + 2 + SLACK


async def test_what_a_worker_says_that_slept_beyond_its_lease_changes_nothing(
    new_stage: NewStage,
) -> None:
    async with new_stage(SEED, IMPATIENT) as stage:
        storm = Storm(stage, ["a worker oversleeps"], plan=draw_slow, crowd=4, orders=False)
        await storm.rage(SECONDS, pause=(0.3, 0.5))
        report = await storm.calm(wait_for_sweeps=False)
        assert report.wrong == {}
        assert stage.counts["worker overslept"]
        assert report.refused, "nothing came late"


async def test_what_a_dead_orchestrator_held_is_taken_within_five_seconds(
    new_stage: NewStage,
) -> None:
    async with new_stage(SEED, PATIENT) as stage:
        storm = Storm(stage, ["an orchestrator dies over results"], orders=False)
        await storm.rage(SECONDS, pause=(0.8, 1.2))
        assert (await storm.calm(wait_for_sweeps=False)).wrong == {}
        assert stage.recovery.orchestrators
        assert max(stage.recovery.orchestrators) < 5 + SLACK


async def test_runs_go_on_soon_after_redis_was_killed_and_task_streams_were_lost(
    new_stage: NewStage,
) -> None:
    async with new_stage(SEED, IMPATIENT) as stage:
        storm = Storm(stage, ["Redis dies", "task streams are deleted"], orders=False)
        await storm.rage(SECONDS, pause=(0.4, 0.8))
        assert (await storm.calm(wait_for_sweeps=False)).wrong == {}
        assert stage.recovery.redis
        assert max(stage.recovery.redis) < 3 + SLACK
        assert max(stage.recovery.tasks, default=0) < LEASE + 10 + SLACK
