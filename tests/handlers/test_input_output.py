"""`input`, `output`, `sleep` and `fail`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.errors import PermanentError
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.context import Context

REGISTRY = builtin_registry(Settings())


async def run(name: str, config: dict[str, Any], **given: Any) -> Any:
    known = REGISTRY.get(name)
    return await known.fn(known.prepare(config), Context(run_id="r", node_id=name, **given))


async def test_input_returns_the_params():
    assert await run("input", {}, params={"a": 1}) == {"a": 1}


async def test_input_merges_its_config_over_the_params():
    params = {"a": 1, "b": 2}
    assert await run("input", {"b": 3, "c": 4}, params=params) == {"a": 1, "b": 3, "c": 4}
    assert params == {"a": 1, "b": 2}


async def test_output_returns_the_outputs_of_its_parents():
    assert await run("output", {}, inputs={"p": 1, "q": None}) == {"p": 1, "q": None}


async def test_output_returns_its_config_when_it_has_one():
    assert await run("output", {"answer": 42}, inputs={"p": 1}) == {"answer": 42}


async def test_sleep_waits_for_its_duration():
    started = time.monotonic()
    assert await run("sleep", {"seconds": 0.05}) == {"seconds": 0.05}
    assert time.monotonic() - started >= 0.045
    assert await run("sleep", {"seconds": 0}) == {"seconds": 0.0}


async def test_sleep_ends_when_it_is_cancelled():
    ctx = Context(run_id="r", node_id="s")
    known = REGISTRY.get("sleep")
    sleeping = asyncio.create_task(known.fn(known.prepare({"seconds": 60}), ctx))
    await asyncio.sleep(0)
    ctx.cancel()
    with pytest.raises(PermanentError, match="stopped while sleeping"):
        await asyncio.wait_for(sleeping, 5)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "soon", None, 1e12])
async def test_sleep_refuses_an_invalid_duration(seconds):
    with pytest.raises(PermanentError, match="config of handler 'sleep': seconds:") as refused:
        await run("sleep", {"seconds": seconds})
    assert refused.value.type == "invalid_config"


async def test_sleep_names_every_violation():
    with pytest.raises(PermanentError) as refused:
        await run("sleep", {"second": 1})
    assert "seconds: Field required" in str(refused.value)
    assert "second: unknown field; did you mean 'seconds'?" in str(refused.value)


async def test_fail_fails_like_any_other_handler():
    with pytest.raises(RuntimeError, match=r"^no luck$"):
        await run("fail", {"message": "no luck"})
    with pytest.raises(RuntimeError, match="on purpose"):
        await run("fail", {})
    with pytest.raises(RuntimeError, match=r"^42$"):
        await run("fail", {"message": 42})
    with pytest.raises(PermanentError, match="unknown field"):
        await run("fail", {"mesage": "typo"})
