"""Redis loses everything while runs are under way; PostgreSQL has them, and they go on."""

from __future__ import annotations

from pathlib import Path

from .conftest import NewStage
from .stage import IMPATIENT
from .storm import Storm

SEED = 3
SECONDS = 4.0
ARCHIVED = {**IMPATIENT, "recovery_timeout": 1.0, "checkpoint_interval": 2.0}


async def test_runs_that_redis_lost_are_restored_and_end_correctly(
    new_stage: NewStage, postgres_url: str, tmp_path: Path
) -> None:
    async with new_stage(SEED, {**ARCHIVED, "database_url": postgres_url}) as stage:
        storm = Storm(stage, ["Redis is emptied"])
        await storm.rage(SECONDS, pause=(1.5, 2.0))
        report = await storm.calm()
        await storm.leave_evidence(report, tmp_path / "evidence")
        assert report.wrong == {}, f"see {tmp_path / 'evidence'}"
        assert stage.counts["Redis emptied"]
        assert report.runs >= 5
