"""Whatever a handler raises fails its node, never the worker."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, field_validator

from dovetail import PermanentError, RetryableError
from dovetail.core.errors import InvalidDefinition
from dovetail.engine.views import run_view

from .harness import engine

RETRY = {"max_retries": 1, "retry": {"base_delay_seconds": 0}}


class Custom(BaseException):
    """Not even an Exception."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS: list[BaseException] = [
    ValueError("plain"),
    Custom("base"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration("value"),
    StopAsyncIteration(),
    asyncio.CancelledError("by itself"),
    MemoryError(),
    RecursionError(),
    ExceptionGroup("several", [ValueError("one"), OSError("two")]),
    Unspeakable(),
]
HOW = ["at_once", "after_a_wait", "in_a_thread"]


async def noop(config: dict[str, Any], ctx: Any) -> str:
    return "alive"


def raising(error: BaseException, how: str) -> Any:
    async def at_once(config: dict[str, Any], ctx: Any) -> None:
        raise error

    async def after_a_wait(config: dict[str, Any], ctx: Any) -> None:
        await asyncio.sleep(0)
        raise error

    def in_a_thread(config: dict[str, Any], ctx: Any) -> None:
        raise error

    return {"at_once": at_once, "after_a_wait": after_a_wait, "in_a_thread": in_a_thread}[how]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_any_raised_object_fails_the_node_but_not_the_worker(
    error: BaseException, how: str
) -> None:
    async with engine(raising(error, how), noop, concurrency=1) as it:
        run = await it.run({"a": how})
        assert (await it.run({"b": "noop"})).nodes[0].output == "alive"
        view = run_view(run)
    assert (run.status, run.nodes[0].attempt) == ("FAILED", 1)
    reported = run.nodes[0].error
    assert reported is not None
    # A coroutine cannot raise StopIteration; Python itself turns it into a RuntimeError.
    expected = "RuntimeError" if isinstance(error, StopIteration) else type(error).__name__
    assert reported["type"] == expected
    assert reported["message"]
    orjson.dumps(view)


@pytest.mark.parametrize("how", HOW)
async def test_any_exception_is_retried_up_to_max_retries(how: str) -> None:
    async with engine(raising(ValueError("again"), how)) as it:
        run = await it.run({"a": {"handler": how, **RETRY}})
        events = [event.type for event in await it.events(run.id)]
    assert (run.nodes[0].attempt, run.status) == (2, "FAILED")
    assert events.count("node.retrying") == 1


@pytest.mark.parametrize("how", HOW)
async def test_a_permanent_error_is_never_retried(how: str) -> None:
    error = PermanentError("no use", type="bad_input")
    async with engine(raising(error, how)) as it:
        run = await it.run({"a": {"handler": how, **RETRY}})
    assert run.nodes[0].attempt == 1
    assert run.nodes[0].error is not None
    assert (run.nodes[0].error["type"], run.nodes[0].error["message"]) == ("bad_input", "no use")


async def test_a_retryable_error_sets_its_delay() -> None:
    async def shaky(config: dict[str, Any], ctx: Any) -> str:
        if ctx.attempt == 1:
            raise RetryableError("busy", after=0.01)
        return "ok"

    async with engine(shaky) as it:  # the default backoff would be ten seconds
        run = await it.run({"a": {"handler": "shaky", "max_retries": 1}})
        events = await it.events(run.id)
    assert run.nodes[0].output == "ok"
    retrying = next(event for event in events if event.type == "node.retrying")
    assert retrying.data is not None
    assert retrying.data["delay"] == 0.01


@pytest.mark.parametrize("after", [float("nan"), float("inf"), -1, "soon", None])
async def test_a_delay_that_is_none_falls_back_to_the_policy(after: Any) -> None:
    async def shaky(config: dict[str, Any], ctx: Any) -> str:
        if ctx.attempt == 1:
            raise RetryableError("busy", after=after, at_least=after)
        return "ok"

    async with engine(shaky) as it:
        retry = {"max_retries": 1, "retry": {"base_delay_seconds": 0.001, "jitter": 0}}
        run = await it.run({"a": {"handler": "shaky", **retry}})
    assert run.nodes[0].output == "ok"


async def test_an_error_names_the_line_in_the_code_of_the_user(tmp_path: Path) -> None:
    source = tmp_path / "broken.py"
    source.write_text("def handle(config, ctx):\n    return {}['missing']\n")
    space: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), space)
    async with engine(space["handle"]) as it:
        run = await it.run({"a": "handle"})
    assert run.nodes[0].error == {
        "type": "KeyError",
        "message": "'missing'",
        "where": f"{source}:2 in handle",
    }


async def test_an_endless_or_undecodable_message_is_stored() -> None:
    async def weird(config: dict[str, Any], ctx: Any) -> None:
        raise ValueError(config["message"] * config["times"] + chr(0xD800))

    async with engine(weird) as it:
        for times in (1, 1_000_000):
            config = {"message": "x", "times": times}
            run = await it.run({"a": {"handler": "weird", "config": config}})
            assert run.status == "FAILED"
            assert len(orjson.dumps(run_view(run))) < 50_000


@pytest.mark.parametrize("kind", [5, None, "x" * 10_000])
async def test_an_unusual_error_type_does_no_harm(kind: Any) -> None:
    async def weird(config: dict[str, Any], ctx: Any) -> None:
        raise PermanentError("odd", type=kind)

    async with engine(weird, noop) as it:
        run = await it.run({"a": "weird"})
        assert (await it.run({"b": "noop"})).status == "COMPLETED"
    assert run.status == "FAILED"
    assert run.nodes[0].error is not None
    assert isinstance(run.nodes[0].error["type"], str)


async def test_an_error_in_a_deleted_directory_fails_only_the_node(tmp_path: Path) -> None:
    home = Path.cwd()

    async def lost(config: dict[str, Any], ctx: Any) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        raise ValueError("where am I?")

    try:
        async with engine(lost) as it:
            run = await it.run({"a": "lost"})
    finally:
        os.chdir(home)
    assert run.status == "FAILED"
    assert run.nodes[0].error is not None
    assert run.nodes[0].error["type"] == "ValueError"


class Picky(BaseModel):
    size: int
    name: str = "x"

    @field_validator("name")
    @classmethod
    def check_name(cls, value: str) -> str:
        if value == "key error":
            raise KeyError(value)
        if value == "exit":
            raise SystemExit(1)
        return value


async def picky(config: Picky, ctx: Any) -> int:
    return config.size


class TestTypedConfigs:
    async def test_a_valid_config_is_passed_as_the_model(self) -> None:
        async with engine(picky) as it:
            run = await it.run({"a": {"handler": "picky", "config": {"size": 3}}})
        assert run.nodes[0].output == 3

    async def test_a_violation_is_not_retried_and_names_every_field(self) -> None:
        async with engine(picky) as it:
            config = {"size": "large", "name": 3}
            # Known only where it runs: else validation would refuse the definition.
            object.__setattr__(it.commands, "known_handlers", None)
            run = await it.run({"a": {"handler": "picky", "config": config, **RETRY}})
        error = run.nodes[0].error
        assert error is not None
        assert error["type"] == "invalid_config"
        assert "size" in error["message"]
        assert "name" in error["message"]
        assert run.nodes[0].attempt == 1

    async def test_a_definition_that_was_registered_is_not_checked_again(self) -> None:
        flow = {
            "name": "w",
            "nodes": [{"id": "a", "handler": "picky", "config": {"size": "large", "nmae": "x"}}],
        }
        async with engine(picky) as it:
            with pytest.raises(InvalidDefinition) as refused:
                await it.commands.register(flow)
            assert {one.code for one in refused.value.problems} == {"invalid_config"}
            with pytest.raises(InvalidDefinition):
                await it.commands.trigger(flow)
            known = it.commands.known_handlers
            object.__setattr__(it.commands, "known_handlers", None)  # a server that knew less
            await it.commands.register(flow)
            object.__setattr__(it.commands, "known_handlers", known)
            made = await it.commands.trigger("w")
            run = await it.commands.wait(made.run_id)
        error = run.nodes[0].error
        assert error is not None
        assert error["type"] == "invalid_config"

    @pytest.mark.parametrize("name", ["key error", "exit"])
    async def test_a_broken_validator_fails_the_node_but_not_the_worker(self, name: str) -> None:
        async with engine(picky, noop) as it:
            run = await it.run({"a": {"handler": "picky", "config": {"size": 1, "name": name}}})
            assert (await it.run({"b": "noop"})).status == "COMPLETED"
        assert run.status == "FAILED"


async def test_a_handler_that_disappeared_fails_its_node() -> None:
    async with engine(noop) as it:
        it.commands.known_handlers._handlers.pop("noop")  # type: ignore[union-attr]
        checked = it.commands.validate({"name": "t", "nodes": [{"id": "a", "handler": "noop"}]})
        assert not checked.valid
        object.__setattr__(it.commands, "known_handlers", None)
        run = await it.run({"a": "noop"})
    error = run.nodes[0].error
    assert error is not None
    assert error["type"] == "not_found"
    assert "no handler 'noop'" in error["message"]
