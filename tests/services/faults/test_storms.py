"""Random runs over an API, two orchestrators and two workers, while everything breaks.

A few short storms, each with a family of faults, all of them tried at least once; `./dev faults`
has long ones. The seed of a storm that failed is printed, and FAULTS_SEED sets it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from .conftest import NewStage
from .stage import IMPATIENT
from .storm import FAULTS, Storm
from .workload import draw_mapped, draw_quick

SEED = int(os.environ.get("FAULTS_SEED", random.randrange(1 << 32)))
SECONDS = 4.0
FAMILIES = {
    "processes die and sleep": ("worker", "orchestrator", "API"),
    "Redis dies, sleeps and forgets, and messages come often, late or never": (
        *("Redis", "lost", "forgotten"),
        *("come", "deleted"),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_run_ends_correctly_under_faults(
    new_stage: NewStage, tmp_path: Path, family: str
) -> None:
    print(f"FAULTS_SEED={SEED}")  # shown when the test fails
    words = FAMILIES[family]
    faults = [fault for fault in FAULTS if any(word in fault for word in words)]
    async with new_stage(SEED, IMPATIENT) as stage:
        storm = Storm(stage, faults)
        await storm.rage(SECONDS)
        report = await storm.calm()
        await storm.leave_evidence(report, tmp_path / "evidence")
        assert report.wrong == {}, f"see {tmp_path / 'evidence'}"
        assert report.runs >= 3
        assert report.executions >= 10
        assert storm.tried == set(faults)


async def test_every_run_of_many_ends_correctly_under_faults(
    new_stage: NewStage, tmp_path: Path
) -> None:
    """Hundreds at once: what a fault leaves is more than anybody takes up in one go."""
    print(f"FAULTS_SEED={SEED}")
    faults = [fault for fault in FAULTS if "oversleeps" not in fault]
    async with new_stage(SEED, {**IMPATIENT, "concurrency": 64}) as stage:
        storm = Storm(stage, faults, plan=draw_quick, crowd=500, batch=100)
        await storm.rage(SECONDS, pause=(0.2, 0.4))
        report = await storm.calm()
        await storm.leave_evidence(report, tmp_path / "evidence")
        assert report.wrong == {}, f"see {tmp_path / 'evidence'}"
        assert report.runs >= 500


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_item_of_a_mapped_node_is_joined_once_under_faults(
    new_stage: NewStage, tmp_path: Path, family: str
) -> None:
    print(f"FAULTS_SEED={SEED}")
    words = FAMILIES[family]
    faults = [fault for fault in FAULTS if any(word in fault for word in words)]
    async with new_stage(SEED, IMPATIENT) as stage:
        storm = Storm(stage, faults, plan=draw_mapped)
        await storm.rage(SECONDS)
        report = await storm.calm()
        await storm.leave_evidence(report, tmp_path / "evidence")
        assert report.wrong == {}, f"see {tmp_path / 'evidence'}"
        assert report.runs >= 3
        assert report.executions >= 30


def test_every_fault_belongs_to_a_family() -> None:
    for fault in FAULTS:
        assert any(word in fault for words in FAMILIES.values() for word in words), fault
