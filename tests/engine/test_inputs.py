"""Parents' outputs in the embedded engine: referred to, copied when they are read, and bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.handlers import calls

from .harness import engine, statuses

PARENTS = [f"p{at}" for at in range(12)]
LARGE = "x" * 50_000


async def big(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    return {"of": ctx.node_id, "text": LARGE}


def one(config: dict[str, Any], ctx: Any) -> Any:
    return [len(ctx.inputs), list(ctx.inputs) == PARENTS, ctx.inputs["p7"]["of"]]


async def async_one(config: dict[str, Any], ctx: Any) -> Any:
    return one(config, ctx)


def every(config: dict[str, Any], ctx: Any) -> Any:
    return sum(len(parent["text"]) for parent in ctx.inputs.values())


async def idle(config: dict[str, Any], ctx: Any) -> str:
    return "read nothing"


def nodes(*handlers: str) -> dict[str, Any]:
    family: dict[str, Any] = dict.fromkeys(PARENTS, "big")
    return family | {name: {"handler": name, "after": PARENTS} for name in handlers}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Outputs that were copied for a handler."""
    found: list[str] = []
    texts = calls._InProcess.texts

    def counted(self: Any, *given: Any) -> Any:
        for name, text in texts(self, *given):
            found.append(name)
            yield name, text

    monkeypatch.setattr(calls._InProcess, "texts", counted)
    return lambda: sorted(found)


async def test_only_the_inputs_that_a_handler_reads_are_copied(
    copied: Callable[[], list[str]],
) -> None:
    async with engine(big, one, async_one, idle) as it:
        run = await it.run(nodes("one", "async_one", "idle"))
    assert set(statuses(run).values()) == {"COMPLETED"}
    assert run.node("one").output == run.node("async_one").output == [12, True, "p7"]
    assert copied() == ["p7", "p7"]


async def test_a_node_that_reads_beyond_the_limit_fails_once_and_others_continue() -> None:
    handlers = ("one", "idle", "every", "output")
    fields: dict[str, Any] = {"max_input_bytes": 300_000}
    async with engine(big, one, idle, every, **fields) as it:
        family = nodes(*handlers)
        family["every"]["max_retries"] = 3
        run = await it.run(family, on_failure="continue")
    found = statuses(run)
    assert {name: found[name] for name in handlers} == {
        "one": "COMPLETED",
        "idle": "COMPLETED",
        "every": "FAILED",
        "output": "FAILED",
    }
    for name in ("every", "output"):
        node = run.node(name)
        assert node.attempt == 1, "it would fail again"
        assert node.error is not None
        assert node.error["type"] == "too_large"
        assert "at most 300,000 (DOVETAIL_MAX_INPUT_BYTES)" in node.error["message"]


@pytest.mark.parametrize("limit", [100, 1000])
async def test_an_input_limit_below_the_inline_size_is_enforced(limit: int) -> None:
    async def small(config: dict[str, Any], ctx: Any) -> str:
        return "x" * 500

    async with engine(small, max_input_bytes=limit) as it:
        run = await it.run({"a": "small", "b": {"handler": "output", "after": ["a"]}})
    assert statuses(run)["b"] == ("FAILED" if limit == 100 else "COMPLETED")
