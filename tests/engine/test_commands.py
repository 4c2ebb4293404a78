"""What a user can ask of the engine, and how a run looks from outside."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from dovetail.core.errors import Conflict, InvalidDefinition, InvalidParams, NotFound
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.engine.views import event_view, outputs, result, run_view, timestamp

from .harness import Gate, definition, engine, statuses

# fmt: off
RUN_FIELDS = [
    "run_id", "workflow", "version", "status", "epoch", "params", "created_at", "started_at",
    "finished_at", "duration", "error", "result", "forked_from",
    "nodes",
]
NODE_FIELDS = [
    "id", "handler", "status", "attempt", "epoch", "dependencies", "reason", "cause", "error",
    "started_at", "finished_at", "duration", "worker", "output", "items",
]
# fmt: on


async def noop(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    return {"node": ctx.node_id, **config}


async def shaky(config: dict[str, Any], ctx: Any) -> str:
    if ctx.epoch == 1:
        raise ValueError("not yet")
    return "ok"


class TestTriggering:
    async def test_an_invalid_definition_is_refused_with_every_problem(self) -> None:
        async with engine(noop) as it:
            with pytest.raises(InvalidDefinition) as caught:
                await it.trigger({"a": "unknown", "b": {"handler": "noop", "after": ["ghost"]}})
        assert {problem.code for problem in caught.value.problems} == {
            "unknown_handler",
            "missing_dependency",
        }

    async def test_params_are_checked_and_defaults_applied(self) -> None:
        schema = {
            "type": "object",
            "required": ["topic"],
            "properties": {"topic": {"type": "string"}, "depth": {"type": "integer", "default": 2}},
        }
        async with engine(noop) as it:
            with pytest.raises(InvalidParams):
                await it.trigger({"a": "noop"}, {"topic": 3}, params=schema)
            with pytest.raises(InvalidParams):
                await it.trigger({"a": "noop"}, params=schema)
            run = await it.run({"a": "input"}, {"topic": "x"}, params=schema)
        assert run.nodes[0].output == {"topic": "x", "depth": 2}

    async def test_validation_alone_starts_no_run(self) -> None:
        async with engine(noop) as it:
            checked = it.commands.validate(definition({"a": "noop"}))
        assert checked.valid
        assert checked.layers == [["a"]]

    async def test_every_run_has_its_own_id(self) -> None:
        async with engine(noop) as it:
            ids = {await it.trigger({"a": "noop"}) for _ in range(50)}
        assert len(ids) == 50
        assert len({run_id[:6] for run_id in ids}) == 50

    async def test_the_retries_of_a_handler_are_the_default_of_its_nodes(self) -> None:
        async with engine(noop) as it:
            run = await it.run({"a": {"handler": "llm_service", "config": {"prompt": "x"}}})
        assert run.graph.nodes[0].max_retries == 3


class TestRetrying:
    async def test_a_retry_continues_a_failed_run_where_it_failed(self) -> None:
        calls: list[str] = []

        async def counted(config: dict[str, Any], ctx: Any) -> str:
            calls.append(ctx.node_id)
            return "kept"

        nodes = {
            "a": "counted",
            "b": {"handler": "shaky", "after": ["a"]},
            "c": {"handler": "counted", "after": ["b"]},
        }
        async with engine(counted, shaky) as it:
            run = await it.run(nodes)
            assert statuses(run) == {"a": "COMPLETED", "b": "FAILED", "c": "FAILED"}
            retried = await it.commands.retry(run.id)
            assert retried.epoch == 2
            run = await it.wait(run.id)
        assert run.status == "COMPLETED"
        assert calls == ["a", "c"]

    async def test_a_completed_run_is_rerun_from_a_node(self) -> None:
        nodes = {"a": "noop", "b": {"handler": "noop", "after": ["a"]}}
        async with engine(noop) as it:
            run = await it.run(nodes)
            with pytest.raises(Conflict, match="name the node"):
                await it.commands.retry(run.id)
            await it.commands.retry(run.id, "b")
            run = await it.wait(run.id)
        assert [node.epoch for node in run.nodes] == [1, 2]

    async def test_a_running_run_cannot_be_retried(self) -> None:
        gate = Gate()
        async with engine(gate) as it:
            run_id = await it.trigger({"a": "gate"})
            with pytest.raises(Conflict, match="RUNNING"):
                await it.commands.retry(run_id)

    async def test_a_running_sibling_is_adopted_and_finishes_once(self) -> None:
        gate = Gate()
        starts: list[int] = []

        async def slow(config: dict[str, Any], ctx: Any) -> str:
            starts.append(ctx.epoch)
            return await gate(config, ctx)

        nodes = {
            "bad": "shaky",
            "slow": "slow",
            "join": {"handler": "noop", "after": ["bad", "slow"]},
        }
        async with engine(slow, shaky, noop) as it:
            run_id = await it.trigger(nodes)
            async with asyncio.timeout(5):
                while (await it.load(run_id)).status != "FAILED":
                    await asyncio.sleep(0)
            assert (await it.load(run_id)).node("slow").status == "RUNNING"
            await it.commands.retry(run_id)
            gate.opened.set()
            run = await it.wait(run_id)
        assert run.status == "COMPLETED"
        assert starts == [1]
        assert (run.node("slow").epoch, run.node("join").epoch) == (1, 2)

    async def test_a_running_descendant_is_stopped_and_started_again(self) -> None:
        gate = Gate()

        async def slow(config: dict[str, Any], ctx: Any) -> str:
            return await gate(config, ctx) if ctx.epoch == 1 else "second"

        nodes = {"a": "noop", "slow": {"handler": "slow", "after": ["a"]}, "bad": "late_fail"}

        async def late_fail(config: dict[str, Any], ctx: Any) -> None:
            if ctx.epoch == 1:
                await gate.entered.wait()
                raise ValueError

        async with engine(slow, noop, late_fail) as it:
            run_id = await it.trigger(nodes)
            async with asyncio.timeout(5):
                while (await it.load(run_id)).status != "FAILED":
                    await asyncio.sleep(0)
            await it.commands.retry(run_id, "a")
            run = await it.wait(run_id)
            async with asyncio.timeout(5):
                while gate.inside:
                    await asyncio.sleep(0)
        assert run.status == "COMPLETED"
        assert run.node("slow").output == "second"

    async def test_unknown_runs_and_nodes_are_not_found(self) -> None:
        async with engine(noop) as it:
            for command in (it.commands.cancel, it.commands.retry):
                with pytest.raises(NotFound, match="nobody"):
                    await command("nobody")
            run = await it.run({"a": "noop"})
            with pytest.raises(NotFound, match="has no node 'ghost'"):
                await it.commands.retry(run.id, "ghost")
            with pytest.raises(NotFound):
                await it.wait("nobody")


class TestViews:
    async def look(self, nodes: dict[str, Any], **fields: Any) -> tuple[RunState, list[Event]]:
        async with engine(noop, shaky) as it:
            run = await it.run(nodes, {"p": 1}, **fields)
            return run, await it.events(run.id)

    async def test_a_run_has_the_fields_of_the_contract(self) -> None:
        run, _ = await self.look(
            {"a": "noop", "b": {"handler": "shaky", "after": ["a"]}, "c": "noop"},
            on_failure="continue",
        )
        view = run_view(run)
        assert list(view) == RUN_FIELDS
        assert (view["workflow"], view["status"], view["epoch"]) == ("test", "FAILED", 1)
        assert view["params"] == {"p": 1}
        assert view["duration"] >= 0
        assert view["error"]["node"] == "b"
        assert list(view["nodes"][1]) == NODE_FIELDS
        failed = view["nodes"][1]
        assert (failed["id"], failed["status"], failed["attempt"]) == ("b", "FAILED", 1)
        assert failed["dependencies"] == ["a"]
        assert failed["error"]["type"] == "ValueError"
        assert "nodes" not in run_view(run, nodes=False)
        assert orjson.loads(orjson.dumps(view)) == view

    async def test_the_result_is_the_output_of_the_output_node_or_of_the_exit_nodes(self) -> None:
        run, _ = await self.look({"a": "noop", "end": {"handler": "output", "after": ["a"]}})
        assert result(run) == {"a": {"node": "a"}}
        run, _ = await self.look(
            {"a": "noop", "b": "noop", "c": {"handler": "noop", "after": ["a"]}}
        )
        assert result(run) == {"b": {"node": "b"}, "c": {"node": "c"}}
        run, _ = await self.look({"x": "output", "y": "output"})
        assert result(run) == {"x": {}, "y": {}}

    async def test_outputs_are_those_of_completed_nodes(self) -> None:
        run, _ = await self.look(
            {"a": "noop", "b": "shaky", "c": {"handler": "noop", "condition": False}},
            on_failure="continue",
        )
        assert outputs(run) == {"a": {"node": "a"}}

    async def test_an_event_has_the_fields_of_the_contract(self) -> None:
        _, events = await self.look({"a": "shaky", "b": {"handler": "noop", "after": ["a"]}})
        views = [event_view(event) for event in events]
        assert list(views[0]) == ["seq", "time", "type", "epoch", "workflow", "version"]
        failed = next(view for view in views if view["type"] == "node.failed")
        assert (failed["node"], failed["attempt"], failed["epoch"]) == ("a", 1, 1)
        assert failed["error"]["type"] == "ValueError"
        assert orjson.loads(orjson.dumps(views)) == views

    def test_times_are_rfc_3339_in_utc(self) -> None:
        assert timestamp(0.0) == "1970-01-01T00:00:00.000000Z"
        assert timestamp(1_700_000_000.25) == "2023-11-14T22:13:20.250000Z"
        assert timestamp(None) is None

    def test_a_time_beyond_the_calendar_is_still_shown(self) -> None:
        parked = Event(1, 1e9, "node.parked", 1, "a", 0, {"until": 1e300, "resource_tag": "t"})
        assert event_view(parked)["until"].startswith("9999-12-31T")

    def test_the_time_until_which_a_node_is_parked_is_shown_as_a_time(self) -> None:
        parked = Event(1, 0.0, "node.parked", 1, "a", 0, {"until": 1.5, "resource_tag": "t"})
        assert event_view(parked) == {
            "seq": 1,
            "time": "1970-01-01T00:00:00.000000Z",
            "type": "node.parked",
            "epoch": 1,
            "node": "a",
            "attempt": 0,
            "until": "1970-01-01T00:00:01.500000Z",
            "resource_tag": "t",
        }
