"""A node that is allowed to fail, with real handlers: what the nodes after it are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import Conflict, PermanentError
from dovetail.core.states import RunStatus

from .harness import engine, statuses

FAILING = {"handler": "failing", "allow_failure": True}


async def failing(config: dict[str, Any], ctx: Any) -> None:
    raise PermanentError("no answer", type="Down")


async def names(config: dict[str, Any], ctx: Any) -> list[str]:
    return sorted(ctx.inputs)


async def same(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    return config


@pytest.mark.parametrize("policy", ["fail_fast", "continue"])
async def test_a_child_runs_without_the_output_of_the_failed_parent(policy: str) -> None:
    nodes = {
        "fetch": FAILING,
        "start": "input",
        "report": {"handler": "names", "after": ["fetch", "start"]},
        "end": {"handler": "output", "after": ["fetch", "start"]},
    }
    async with engine(failing, names) as it:
        run = await it.run(nodes, {"x": 1}, on_failure=policy)
    assert (run.status, run.error) == (RunStatus.COMPLETED, None)
    assert statuses(run)["fetch"] == "FAILED"
    assert run.node("report").output == ["start"]
    assert run.node("end").output == {"start": {"x": 1}}


async def test_templates_of_a_child_read_the_status_the_error_and_nothing_else() -> None:
    config = {
        "status": "{{ fetch.status }}",
        "why": "{{ fetch.error.type }}: {{ fetch.error.message }}",
        "body": "{{ fetch.body }}",
        "all": "{{ fetch }}",
        "other": "{{ fetch.body | default('nothing') }}",
    }
    nodes = {
        "fetch": FAILING,
        "fall_back": {
            "handler": "same",
            "after": ["fetch"],
            "condition": "{{ fetch.status == 'FAILED' }}",
            "config": config,
        },
        "use": {
            "handler": "same",
            "after": ["fetch"],
            "condition": "{{ fetch.status == 'COMPLETED' }}",
        },
    }
    async with engine(failing, same) as it:
        run = await it.run(nodes)
    assert run.status is RunStatus.COMPLETED
    assert statuses(run)["use"] == "SKIPPED"
    assert run.node("fall_back").output == {
        "status": "FAILED",
        "why": "Down: no answer",
        "body": None,
        "all": None,
        "other": "nothing",
    }


async def test_a_timeout_and_an_output_that_is_too_large_are_its_own_failures() -> None:
    async def large(config: dict[str, Any], ctx: Any) -> str:
        return "x" * 1000

    nodes = {
        "slow": {
            "handler": "sleep",
            "config": {"seconds": 60},
            "timeout_seconds": 0.01,
            "allow_failure": True,
        },
        "large": {"handler": "large", "allow_failure": True},
        "end": {"handler": "names", "after": ["slow", "large"]},
    }
    async with engine(large, names, max_run_bytes=100) as it:
        run = await it.run(nodes)
    assert run.status is RunStatus.COMPLETED
    assert [(run.node(n).error or {})["type"] for n in ("slow", "large")] == [
        "timeout",
        "too_large",
    ]
    assert run.node("end").output == []


async def test_another_process_reads_and_verifies_such_a_run(tmp_path: Path) -> None:
    nodes = {"fetch": FAILING, "report": {"handler": "names", "after": ["fetch"]}}
    async with engine(failing, names, db=tmp_path / "runs.db") as it:
        run_id = (await it.run(nodes)).id
    async with engine(failing, names, db=tmp_path / "runs.db") as it:
        run = await it.load(run_id)
        assert (run.status, run.failed) == (RunStatus.COMPLETED, 0)
        assert await it.commands.verify(run_id) == []
        with pytest.raises(Conflict, match=r"allowed failures \(fetch\): .* with `from`"):
            await it.commands.retry(run_id)
        await it.commands.retry(run_id, "report")
        again = await it.wait(run_id)
        assert (again.status, again.epoch) == (RunStatus.COMPLETED, 2)
        assert [again.node(name).epoch for name in ("fetch", "report")] == [2, 2]
