"""`./dev faults`: it says its seed, and its exit code tells whether anything was wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "faults.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", TOOL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module  # where its dataclasses look for their own module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (1, 1)])
async def test_a_violation_fails_the_tool(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: int, code: int
) -> None:
    async def rage(seed: int, tally: object, over: object, **_: bool) -> None:
        tally.wrong += wrong  # type: ignore[attr-defined]

    monkeypatch.setattr(tool, "rage", rage)
    assert await tool.run(7, 0.0, ["storms"]) == code


async def test_a_slow_recovery_fails_the_tool(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def recover(kind: str, *_: object, **__: bool) -> bool:
        return bool(kind not in ("redis", "broker"))

    async def rage(*_: object, **__: bool) -> None: ...

    monkeypatch.setattr(tool, "recover", recover)
    monkeypatch.setattr(tool, "rage", rage)
    for part in ("recovery", "crowds"):
        assert await tool.run(7, 0.0, [part]) == 1
        assert await tool.run(7, 0.0, [part], tool.CELERY) == 1


def test_every_trial_has_a_limit_a_meaning_and_known_faults(tool: ModuleType) -> None:
    for over in tool.TRANSPORTS.values():
        assert over.trials.keys() == over.limits.keys() <= tool.MEANS.keys()
        assert over.known.keys() >= {*over.faults, *(f for t in over.trials.values() for f in t[0])}


def test_of_a_hundred_recoveries_one_may_be_late_but_none_may_be_missing(tool: ModuleType) -> None:
    assert tool.figure("redis", [1.0] * 199 + [9.0], 3.0)
    assert not tool.figure("redis", [1.0] * 95 + [9.0] * 5, 3.0)
    assert not tool.figure("redis", [9.0], 3.0)
    assert not tool.figure("redis", [], 3.0)


def test_the_tool_prints_its_help() -> None:
    done = subprocess.run([sys.executable, TOOL, "--help"], capture_output=True, check=True)
    assert b"--seed" in done.stdout
