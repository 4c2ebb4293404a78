"""Outputs are data: checked, copied, redacted, and never anybody's to change."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, namedtuple
from dataclasses import replace
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import orjson
import pytest

from dovetail import handler
from dovetail.core.events import Token
from dovetail.core.run import RunState
from dovetail.core.templates import Template
from dovetail.engine.ports import Task
from dovetail.engine.views import event_view, run_view
from dovetail.handlers.calls import RegistryCalls

from .harness import Engine, engine, registry_of, statuses

MIB = 1 << 20
RETRY = {"max_retries": 3, "retry": {"base_delay_seconds": 0}}


async def test_the_stored_bytes_of_a_run_are_bounded() -> None:
    async def big(config: dict[str, Any], ctx: Any) -> str:
        return "x" * 998

    nodes: dict[str, Any] = {f"n{i}": {"handler": "big", **RETRY} for i in range(4)}
    async with engine(big, max_run_bytes=2500) as it:
        run = await it.run(nodes, on_failure="continue")
        assert sorted(statuses(run).values()) == ["COMPLETED"] * 2 + ["FAILED"] * 2
        failed = [node for node in run.nodes if node.error]
        assert all(node.error["type"] == "too_large" and node.attempt == 1 for node in failed)
        assert "DOVETAIL_MAX_RUN_BYTES" in failed[0].error["message"]
        assert await it.commands.verify(run.id) == []
        again = await it.run(nodes, on_failure="continue")  # each run has its own
        assert run.kept_bytes == again.kept_bytes == 2000


def looped() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


class Colour(StrEnum):
    RED = "red"


class Hostile(dict):  # type: ignore[type-arg]
    def values(self) -> Any:
        raise RuntimeError("look elsewhere")

    def items(self) -> Any:
        raise RuntimeError("look elsewhere")


Point = namedtuple("Point", "x y")

NOT_JSON = {
    "an_object": (object(), "invalid_output"),
    "bytes": (b"raw", "invalid_output"),
    "a_range": (range(2), "invalid_output"),
    "nan": (float("nan"), "invalid_output"),
    "infinity": ([1, {"x": float("inf")}], "invalid_output"),
    "a_number_as_key": ({1: "one"}, "invalid_output"),
    "a_huge_integer": (2**64, "invalid_output"),
    "a_lone_surrogate": ("\ud800", "invalid_output"),
    "a_function": ({"f": len}, "invalid_output"),
    "itself": (looped(), "too_large"),
    "too_deep": (deep(200), "too_large"),
    "too_large": ("x" * MIB, "too_large"),
    "too_many": ([0] * (MIB + 1), "too_large"),
}
FINE = {
    "none": (None, None),
    "text": ("ü", "ü"),
    "numbers": ([1, 2.5, -(2**63), 2**64 - 1, True], [1, 2.5, -(2**63), 2**64 - 1, True]),
    "nested": ({"a": [{"b": {}}]}, {"a": [{"b": {}}]}),
    "a_tuple": ((1, (2,)), [1, [2]]),
    "a_named_tuple": (Point(1, 2), [1, 2]),
    "an_enum": ({Colour.RED: Colour.RED}, {"red": "red"}),
    "an_ordered_dict": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "just_small_enough": ("x" * (MIB - 2), "x" * (MIB - 2)),
}


async def give(output: Any, **fields: Any) -> RunState:
    async def gives(config: dict[str, Any], ctx: Any) -> Any:
        return output

    async with engine(gives) as it:
        return await it.run({"a": {"handler": "gives", **fields}})


@pytest.mark.parametrize("name", NOT_JSON)
async def test_an_output_that_cannot_be_stored_fails_the_node_without_a_retry(name: str) -> None:
    output, expected = NOT_JSON[name]
    run = await give(output, **RETRY)
    error = run.nodes[0].error
    assert error is not None
    assert (run.status, error["type"], run.nodes[0].attempt) == ("FAILED", expected, 1)
    assert run.nodes[0].output is None
    assert len(error["message"]) < 500


@pytest.mark.parametrize("name", FINE)
async def test_every_json_value_is_an_output(name: str) -> None:
    output, expected = FINE[name]
    run = await give(output)
    assert run.status == "COMPLETED"
    assert run.nodes[0].output == expected
    assert type(run.nodes[0].output) is type(expected)


async def test_an_output_that_raises_when_it_is_read_fails_only_its_node() -> None:
    async def noop(config: dict[str, Any], ctx: Any) -> str:
        return "alive"

    async def gives(config: dict[str, Any], ctx: Any) -> Any:
        return Hostile(x=1)

    async with engine(gives, noop) as it:
        run = await it.run({"a": "gives"})
        assert (await it.run({"b": "noop"})).status == "COMPLETED"
    assert run.status == "FAILED"


class TestIsolation:
    async def test_a_handler_cannot_change_its_output_afterwards(self) -> None:
        kept: list[Any] = []

        async def gives(config: dict[str, Any], ctx: Any) -> Any:
            output = {"list": [1]}
            kept.append(output)
            return output

        async with engine(gives) as it:
            run = await it.run({"a": "gives"})
            kept[0]["list"].append("changed")
            kept[0]["more"] = 1
            assert run.nodes[0].output == {"list": [1]}

    async def test_a_handler_that_changes_its_inputs_changes_only_its_copy(self) -> None:
        async def gives(config: dict[str, Any], ctx: Any) -> Any:
            return {"list": [1], "deep": {"x": 1}}

        async def vandal(config: dict[str, Any], ctx: Any) -> Any:
            seen = [str(config), str(ctx.inputs), str(ctx.params)]
            config["list"].append("vandal")
            config["whole"]["deep"]["x"] = "vandal"
            config["fixed"]["plain"] = "vandal"
            ctx.inputs["a"]["list"].append("vandal")
            ctx.params["p"].append("vandal")
            return seen

        config = {"list": "{{ a.list }}", "whole": "{{ a.output }}", "fixed": {"plain": 1}}
        vandals = {
            f"v{i}": {"handler": "vandal", "after": ["a"], "config": config} for i in range(3)
        }
        async with engine(gives, vandal) as it:
            run = await it.run({"a": "gives", **vandals}, {"p": [1]})
            assert run.status == "COMPLETED", run.error
            again = await it.run({"a": "gives", **vandals}, {"p": [1]})
        assert run.node("a").output == {"list": [1], "deep": {"x": 1}}
        assert run.params == {"p": [1]}
        seen = [run.node(f"v{i}").output for i in range(3)]
        assert seen[0] == seen[1] == seen[2] == again.node("v0").output
        assert "vandal" not in str(seen)

    async def test_a_retry_of_a_handler_that_changed_its_config_sees_the_original(self) -> None:
        async def vandal(config: dict[str, Any], ctx: Any) -> Any:
            config["seen"].append(ctx.attempt)
            if ctx.attempt == 1:
                raise ValueError
            return config["seen"]

        async with engine(vandal) as it:
            nodes = {"a": {"handler": "vandal", "config": {"seen": []}, **RETRY}}
            assert (await it.run(nodes)).nodes[0].output == [2]

    async def test_the_caller_may_change_its_params_and_definition_afterwards(self) -> None:
        async def later(config: dict[str, Any], ctx: Any) -> Any:
            await asyncio.sleep(0.01)
            return ctx.params

        params = {"p": [1]}
        async with engine(later) as it:
            run_id = await it.trigger({"a": "later"}, params)
            params["p"].append(2)
            assert (await it.wait(run_id)).nodes[0].output == {"p": [1]}


class TestSecrets:
    KEY = "s3cr3t-value"

    async def test_a_secret_reaches_the_handler_but_no_stored_value(self) -> None:
        seen: list[Any] = []

        @handler(secrets=True)
        async def leaky(config: dict[str, Any], ctx: Any) -> Any:
            seen.append((config["auth"], ctx.secrets["KEY"]))
            ctx.progress(0.5, f"using {config['auth']}")
            await asyncio.sleep(0.06)
            return {"echo": config["auth"], "in": [f"x{ctx.secrets['KEY']}y"]}

        @handler(secrets=True)
        async def raises(config: dict[str, Any], ctx: Any) -> Any:
            raise ValueError(f"cannot use {config['auth']}")

        config = {"auth": "Bearer {{ secrets.KEY }}"}
        nodes = {
            "a": {"handler": "leaky", "config": config},
            "b": {"handler": "raises", "config": config, **RETRY},
            "c": {"handler": "output", "after": ["a"], "config": {"x": "{{ a.echo }}"}},
        }
        async with engine(leaky, raises, secrets={"KEY": self.KEY}) as it:
            run = await it.run(nodes, on_failure="continue")
            story = str(run_view(run)) + str([event_view(e) for e in await it.events(run.id)])
        assert seen == [("Bearer s3cr3t-value", "s3cr3t-value")]
        assert run.node("a").output == {"echo": "Bearer ***", "in": ["x***y"]}
        assert "s3cr3t-value" not in story
        assert "using Bearer ***" in story
        assert "cannot use Bearer ***" in story

    async def test_a_secret_that_does_not_exist_fails_the_node_without_a_retry(self) -> None:
        @handler(secrets=True)
        async def noop(config: dict[str, Any], ctx: Any) -> None:
            return None

        async with engine(noop, secrets={"KEY": self.KEY}) as it:
            nodes = {"a": {"handler": "noop", "config": {"x": "{{ secrets.OTHER }}"}, **RETRY}}
            run = await it.run(nodes)
        error = run.nodes[0].error
        assert error is not None
        assert "OTHER" in error["message"]
        assert "s3cr3t" not in str(error)
        assert run.nodes[0].attempt <= 1

    async def test_a_definition_older_than_the_secret_rule_fails_only_its_node(self) -> None:
        seen: list[Any] = []

        @handler(secrets=True)
        async def takes(config: dict[str, Any], ctx: Any) -> Any:
            seen.append(config)

        nodes = {
            "turned": {"handler": "takes", "config": {"k": "{{ secrets.KEY | reverse }}"}, **RETRY},
            "shown": {"handler": "input", "config": {"k": "{{ secrets.KEY }}"}, **RETRY},
            "other": {"handler": "input"},
        }
        async with engine(takes, secrets={"KEY": self.KEY}) as it:
            before = Engine(replace(it.commands, known_handlers=None))
            with patch.object(Template, "refusal", None):
                run_id = await before.trigger(nodes, on_failure="continue")
            run = await it.wait(run_id)
        assert seen == []
        errors = {name: run.node(name).error for name in ("turned", "shown")}
        assert {error and error["type"] for error in errors.values()} == {"template_forbidden"}
        assert {run.node(name).attempt for name in errors} == {1}
        assert statuses(run)["other"] == "COMPLETED"

    async def test_a_secret_that_is_a_common_word_does_not_change_outputs(self) -> None:
        async with engine(llm_api_key="token") as it:
            config = {"prompt": "what is a token?"}
            run = await it.run({"a": {"handler": "llm_service", "config": config}, "b": "input"})
        assert {"prompt_tokens", "completion_tokens", "total_tokens"} <= set(
            run.node("a").output["usage"]
        )


class TestTemplates:
    async def test_a_missing_value_fails_the_node_before_its_start(self) -> None:
        async def noop(config: dict[str, Any], ctx: Any) -> Any:
            return {"there": 1}

        nodes = {
            "a": "noop",
            "b": {"handler": "noop", "after": ["a"], "config": {"x": "{{ a.body }}"}, **RETRY},
        }
        async with engine(noop) as it:
            run = await it.run(nodes)
            types = [event.type for event in await it.events(run.id) if event.node == "b"]
        error = run.node("b").error
        assert error is not None
        assert error["type"] == "missing_value"
        for word in ("'b'", "a.body", "there"):
            assert word in error["message"]
        assert run.node("b").attempt == 0
        assert types == ["node.queued", "node.failed"]

    async def test_a_config_that_grows_too_large_fails_the_node(self) -> None:
        async def big(config: dict[str, Any], ctx: Any) -> Any:
            return "x" * 700_000

        nodes = {
            "a": "big",
            "b": {
                "handler": "big",
                "after": ["a"],
                "config": {"x": "{{ a.output }}{{ a.output }}"},
            },
        }
        async with engine(big) as it:
            run = await it.run(nodes)
        error = run.node("b").error
        assert error is not None
        assert (error["type"], run.node("b").attempt) == ("too_large", 0)

    async def test_a_template_inside_an_output_is_never_rendered(self) -> None:
        async def attack(config: dict[str, Any], ctx: Any) -> Any:
            return config.get("x", "{{ 7 * 7 }} {{ secrets.KEY }}")

        nodes = {
            "a": "attack",
            "b": {"handler": "attack", "after": ["a"], "config": {"x": "{{ a.output }}"}},
        }
        async with engine(attack, secrets={"KEY": "s3cr3t-value"}) as it:
            run = await it.run(nodes)
        assert run.node("b").output == "{{ 7 * 7 }} {{ secrets.KEY }}"


class TestTheCache:
    async def test_the_same_handler_and_config_are_not_run_again(self) -> None:
        calls: list[Any] = []

        async def costly(config: dict[str, Any], ctx: Any) -> Any:
            calls.append(config["x"])
            return {"made": len(calls)}

        def nodes(x: str) -> dict[str, Any]:
            return {
                "a": {"handler": "costly", "config": {"x": x}, "cache": {"ttl_seconds": 60}},
                "b": {"handler": "output", "after": ["a"]},
            }

        async with engine(costly) as it:
            first, again, other = [await it.run(nodes(x)) for x in ("1", "1", "2")]
            events = [event.type for event in await it.events(again.id) if event.node == "a"]
            uncached = await it.run({"a": {"handler": "costly", "config": {"x": "1"}}})
        assert calls == ["1", "2", "1"]
        assert first.node("a").output == again.node("a").output == {"made": 1}
        assert again.node("b").output == {"a": {"made": 1}}
        assert (again.node("a").attempt, first.node("a").attempt) == (0, 1)
        assert events == ["node.queued", "node.cached"]
        assert other.node("a").output == {"made": 2}
        assert uncached.node("a").output == {"made": 3}

    async def test_a_cached_output_expires(self) -> None:
        calls: list[int] = []

        async def costly(config: dict[str, Any], ctx: Any) -> int:
            calls.append(1)
            return len(calls)

        nodes = {"a": {"handler": "costly", "cache": {"ttl_seconds": 0.03}}}
        async with engine(costly) as it:
            await it.run(nodes)
            await asyncio.sleep(0.04)
            assert (await it.run(nodes)).nodes[0].output == 2

    async def test_a_failure_is_not_cached(self) -> None:
        calls: list[int] = []

        async def shaky(config: dict[str, Any], ctx: Any) -> str:
            calls.append(1)
            if len(calls) == 1:
                raise ValueError
            return "ok"

        nodes = {"a": {"handler": "shaky", "cache": {"ttl_seconds": 60}}}
        async with engine(shaky) as it:
            assert (await it.run(nodes)).status == "FAILED"
            assert (await it.run(nodes)).status == "COMPLETED"

    async def test_two_nodes_of_one_run_share_a_cached_output_but_not_one_copy(self) -> None:
        calls: list[int] = []

        async def costly(config: dict[str, Any], ctx: Any) -> Any:
            calls.append(1)
            return {"list": []}

        async def vandal(config: dict[str, Any], ctx: Any) -> Any:
            ctx.inputs["a"]["list"].append("vandal")
            return ctx.inputs

        cached = {"handler": "costly", "cache": {"ttl_seconds": 60}}
        nodes = {
            "a": cached,
            "v": {"handler": "vandal", "after": ["a"]},
            "b": {**cached, "after": ["v"]},
        }
        async with engine(costly, vandal) as it:
            run = await it.run(nodes)
        assert calls == [1]
        assert run.node("b").output == {"list": []}
        assert statuses(run) == dict.fromkeys("avb", "COMPLETED")

    async def test_secrets_enter_the_key_by_name(self) -> None:
        calls: list[Any] = []

        @handler(secrets=True)
        async def costly(config: dict[str, Any], ctx: Any) -> Any:
            calls.append(config["k"])
            return len(calls)

        def nodes(name: str) -> dict[str, Any]:
            config = {"k": f"{{{{ secrets.{name} }}}}"}
            return {"a": {"handler": "costly", "config": config, "cache": {"ttl_seconds": 60}}}

        async with engine(costly, secrets={"ONE": "first-secret", "TWO": "other-secret"}) as it:
            outputs = [
                (await it.run(nodes(name))).nodes[0].output for name in ("ONE", "TWO", "ONE")
            ]
        assert outputs == [1, 2, 1]
        assert calls == ["first-secret", "other-secret"]


@pytest.mark.parametrize(
    ("secrets", "reported"),
    [({}, {"a": ["first-secret", 1.5]}), ({"S": "first-secret"}, {"a": ["***", 1.5]})],
)
async def test_an_output_encoded_as_text_is_equal_and_redacted(
    secrets: dict[str, str], reported: Any
) -> None:
    async def h(config: Any, ctx: Any) -> Any: ...

    calls = RegistryCalls(registry_of(h), secrets=secrets, outputs_as_text=True)
    task = Task("r", "n", Token(1, 1, 1), "h", {}, {}, {}, 1.0)
    output: Any = {"a": ["first-secret", 1.5]}
    sealed = calls.open(task, lambda *_: None).seal(task, output)
    output["a"].clear()
    assert orjson.loads(orjson.dumps(sealed)) == reported
