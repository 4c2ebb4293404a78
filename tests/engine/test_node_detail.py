"""A look into one node: its config as its last attempt got it, its inputs, its attempts."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, field_validator

from dovetail.config import Settings
from dovetail.core.errors import NotFound
from dovetail.core.outputs import LARGE_OUTPUT
from dovetail.wiring.embedded import attached

from .harness import Gate, engine

AGAIN = {"max_retries": 1, "retry": {"base_delay_seconds": 0}}


async def echo(config: dict[str, Any], ctx: Any) -> Any:
    return config.get("value", config)


async def shaky(config: dict[str, Any], ctx: Any) -> str:
    if ctx.attempt == 1:
        try:
            raise KeyError("page")
        except KeyError as error:
            raise ValueError("no such page") from error
    return "ok"


def spins(config: dict[str, Any], ctx: Any) -> None:
    while not ctx.cancelled.is_set():
        time.sleep(0.001)


async def sleeps(config: dict[str, Any], ctx: Any) -> None:
    await nap()


async def nap() -> None:
    await asyncio.sleep(60)


class TestAttempts:
    async def test_each_attempt_is_listed_with_its_outcome(self) -> None:
        async with engine(shaky) as it:
            run = await it.run({"a": {"handler": "shaky", **AGAIN}})
            detail = await it.commands.node_detail(run.id, "a")
            events = await it.commands.events(run.id)
        first, second = detail["attempts"]
        assert (first["epoch"], first["attempt"], first["status"]) == (1, 1, "FAILED")
        assert (second["attempt"], second["status"], second["error"]) == (2, "COMPLETED", None)
        assert second["worker"] == detail["worker"]
        assert second["finished_at"] == detail["finished_at"]
        assert first["duration"] >= 0
        error = first["error"]
        assert (error["type"], error["message"]) == ("ValueError", "no such page")
        assert error["where"].endswith(" in shaky")
        lines = [line for line in error["traceback"].splitlines() if line.startswith("  File ")]
        assert len(lines) == 2, "the frames of Dovetail above the handler are left out"
        assert "KeyError: 'page'\n\nThe above exception was the direct cause" in error["traceback"]
        assert not any("traceback" in event for event in events)

    @pytest.mark.parametrize("name", ["spins", "sleeps"])
    async def test_a_timeout_says_where_the_handler_was(self, name: str) -> None:
        async with engine(spins, sleeps) as it:
            run = await it.run({"a": {"handler": name, "timeout_seconds": 0.05}})
            detail = await it.commands.node_detail(run.id, "a")
        (one,) = detail["attempts"]
        error = one["error"]
        assert (error["type"], error["message"]) == (
            "timeout",
            "did not finish within 0.05 s (timeout_seconds)",
        )
        function = "nap" if name == "sleeps" else "spins"
        assert error["where"].endswith(f" in {function}")
        assert f" in {name}\n" in error["traceback"]
        assert "dovetail/engine" not in error["traceback"]
        assert "threading.py" not in error["traceback"]
        assert detail["error"] == {key: error[key] for key in ("type", "message", "where")}

    async def test_a_validator_that_is_broken_has_a_traceback(self) -> None:
        class Picky(BaseModel):
            name: str

            @field_validator("name")
            @classmethod
            def check_name(cls, value: str) -> str:
                raise KeyError(value)

        async def picky(config: Picky, ctx: Any) -> None:
            """Never called."""

        picky.__annotations__["config"] = Picky
        async with engine(picky) as it:
            run = await it.run({"a": {"handler": "picky", "config": {"name": "x"}}})
            detail = await it.commands.node_detail(run.id, "a")
        error = detail["attempts"][0]["error"]
        assert error["type"] == "invalid_config"
        assert error["where"].endswith(" in check_name")
        assert error["traceback"].endswith("KeyError: 'x'")

    async def test_one_that_runs_and_the_ones_of_earlier_epochs_are_listed(self) -> None:
        gate = Gate()

        async def waits(config: dict[str, Any], ctx: Any) -> None:
            if ctx.epoch == 1:
                raise ValueError("first")
            await gate(config, ctx)

        async with engine(waits) as it:
            run = await it.run({"a": "waits"})
            await it.commands.retry(run.id)
            await gate.entered.wait()
            detail = await it.commands.node_detail(run.id, "a")
            gate.opened.set()
            await it.wait(run.id)
        assert [(one["epoch"], one["status"]) for one in detail["attempts"]] == [
            (1, "FAILED"),
            (2, "RUNNING"),
        ]
        assert detail["why"]["code"] == "running"
        assert detail["attempts"][1]["finished_at"] is None


class TestConfig:
    async def test_it_is_rendered_as_the_last_attempt_got_it(self) -> None:
        template = {"url": "{{ params.host }}/{{ a.id }}", "all": "{{ a }}", "n": 3}
        async with engine(echo) as it:
            run = await it.run(
                {
                    "a": {"handler": "echo", "config": {"id": 7}},
                    "b": {"handler": "echo", "config": template, "after": ["a"]},
                },
                {"host": "h"},
            )
            detail = await it.commands.node_detail(run.id, "b")
        assert detail["template"] == template
        assert detail["config"] == {"url": "h/7", "all": {"id": 7}, "n": 3}
        assert detail["config"] == detail["output"]
        assert (detail["config_error"], detail["inputs"]) == (None, {"a": {"id": 7}})
        assert detail["why"] is None

    async def test_secrets_are_masked(self) -> None:
        from dovetail import handler

        @handler("keyed", secrets=True)
        async def keyed(config: dict[str, Any], ctx: Any) -> str:
            raise ValueError(f"refused {config['auth']}")

        config = {"auth": "Bearer {{ secrets.KEY }}", "key": "{{ secrets.KEY }}"}
        async with engine(keyed, secrets={"KEY": "t0p-s3cret-key"}) as it:
            run = await it.run({"a": {"handler": "keyed", "config": config}})
            detail = await it.commands.node_detail(run.id, "a")
        assert detail["config"] == {"auth": "Bearer ***", "key": "***"}
        assert detail["template"] == config
        assert "t0p-s3cret-key" not in orjson.dumps(detail).decode()
        assert "refused Bearer ***" in detail["attempts"][0]["error"]["traceback"]

    async def test_a_config_that_cannot_be_rendered_says_why(self) -> None:
        async with engine(echo) as it:
            run = await it.run(
                {
                    "a": {"handler": "echo", "config": {"id": 7}},
                    "b": {"handler": "echo", "config": {"x": "{{ a.name }}"}, "after": ["a"]},
                }
            )
            detail = await it.commands.node_detail(run.id, "b")
        assert detail["config"] is None
        assert detail["config_error"] == detail["error"]["message"]
        assert "has no 'name'" in detail["config_error"]
        assert detail["attempts"] == []

    async def test_a_node_that_was_never_ready_has_none(self) -> None:
        async with engine(echo, shaky) as it:
            run = await it.run(
                {
                    "a": "shaky",
                    "b": {"handler": "echo", "config": {"x": "{{ a }}"}, "after": ["a"]},
                    "c": {"handler": "echo", "condition": "{{ params.x == 1 }}"},
                },
                {"x": 2},
                on_failure="continue",
            )
            skipped = await it.commands.node_detail(run.id, "b")
            false = await it.commands.node_detail(run.id, "c")
        assert (skipped["config"], skipped["config_error"], skipped["inputs"]) == (None, None, {})
        assert skipped["why"] == {
            "code": "dependency_failed",
            "why": "skipped: 'a' failed",
            "details": {"cause": "a"},
        }
        assert (false["why"]["code"], false["why"]["why"]) == (
            "condition_false",
            "skipped: its condition is false",
        )

    async def test_a_node_of_another_name_is_not_found(self) -> None:
        async with engine(echo) as it:
            run = await it.run({"fetch": "echo"})
            with pytest.raises(NotFound, match=r"no node 'fetsh'; did you mean 'fetch'\?"):
                await it.commands.node_detail(run.id, "fetsh")

    async def test_a_violation_of_the_model_has_a_traceback_too(self) -> None:
        async with engine() as it:
            run = await it.run({"a": {"handler": "sleep", "config": {"seconds": "{{ 'long' }}"}}})
            (one,) = (await it.commands.node_detail(run.id, "a"))["attempts"]
        assert one["error"]["type"] == run.nodes[0].error["type"]  # type: ignore[index]
        assert one["error"]["traceback"].startswith("Traceback (most recent call last):\n")


class TestOtherProcesses:
    async def test_a_process_that_drives_nothing_shows_the_same(self, tmp_path: Path) -> None:
        db = tmp_path / "runs.db"
        nodes = {
            "a": {"handler": "echo", "config": {"id": 7}},
            "b": {"handler": "echo", "config": {"x": "{{ a.id }}"}, "after": ["a"]},
            "c": {"handler": "shaky", "after": ["b"]},
        }
        async with engine(echo, shaky, db=db) as it:
            run = await it.run(nodes)
            here = [await it.commands.node_detail(run.id, name) for name in nodes]
            async with attached(Settings(db=db)) as commands:
                there = [await commands.node_detail(run.id, name) for name in nodes]
        async with attached(Settings(db=db)) as commands:
            later = [await commands.node_detail(run.id, name) for name in nodes]
        assert here == there == later
        assert here[1]["config"] == {"x": 7}
        assert here[2]["attempts"][0]["error"]["type"] == "ValueError"


class TestInputs:
    async def test_a_large_one_is_a_reference_and_is_still_rendered(self) -> None:
        async with engine(echo) as it:
            run = await it.run(
                {
                    "big": {"handler": "echo", "config": {"value": "{{ params.text }}"}},
                    "small": {"handler": "echo", "config": {"value": 1}},
                    "b": {
                        "handler": "echo",
                        "config": {"value": "{{ big | length }}"},
                        "after": ["big", "small"],
                    },
                },
                {"text": "x" * (LARGE_OUTPUT + 1)},
            )
            detail = await it.commands.node_detail(run.id, "b")
            own = await it.commands.node_detail(run.id, "big")
        href = f"/api/v1/runs/{run.id}/nodes/big/output"
        reference = {"$output": {"size": LARGE_OUTPUT + 3, "href": href}}
        assert detail["inputs"] == {"big": reference, "small": 1}
        assert (detail["config"], detail["output"]) == (
            {"value": LARGE_OUTPUT + 1},
            LARGE_OUTPUT + 1,
        )
        assert own["output"] == reference

    async def test_many_small_ones_are_bounded_together(self) -> None:
        names = [f"n{at}" for at in range(40)]
        nodes: dict[str, Any] = {
            name: {"handler": "echo", "config": {"value": "{{ params.text }}"}} for name in names
        }
        nodes["end"] = {"handler": "echo", "after": names}
        async with engine(echo) as it:
            run = await it.run(nodes, {"text": "x" * 60_000})
            detail = await it.commands.node_detail(run.id, "end")
        assert len(orjson.dumps(detail)) < 1_200_000
        assert list(detail["inputs"]) == names
        assert isinstance(detail["inputs"]["n0"], str)
        assert "$output" in detail["inputs"]["n39"]


class TestLog:
    async def test_a_worker_logs_each_failed_attempt_once_with_its_traceback(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, logger="dovetail.attempts")
        async with engine(shaky) as it:
            run = await it.run({"a": {"handler": "shaky", **AGAIN}})
        records = [one for one in caplog.records if one.name == "dovetail.attempts"]
        (record,) = records
        assert record.levelno == logging.WARNING
        fields = {key: record.__dict__[key] for key in ("run_id", "node_id", "attempt")}
        assert fields == {"run_id": run.id, "node_id": "a", "attempt": 1}
        text = record.getMessage()
        assert text.startswith(f"attempt 1 of node 'a' of run {run.id} failed\nTraceback ")
        assert text.endswith("ValueError: no such page")
