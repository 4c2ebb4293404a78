"""When a part of the engine itself dies, every caller that waits gets an error; nothing hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dovetail.core.step import begin
from dovetail.core.transitions import Claim, Complete, Decision, Fail, Submit
from dovetail.handlers.calls import RegistryCalls
from dovetail.wiring.embedded import LocalEngine

from ..core.walk import graph
from .harness import registry_of


async def h(config: dict[str, Any], ctx: Any) -> None:
    await asyncio.sleep(0)


async def breaks(config: dict[str, Any], ctx: Any) -> None:
    raise ValueError


def local(*handlers: Any) -> LocalEngine:
    return LocalEngine(RegistryCalls(registry_of(*handlers)), concurrency=2)


def sabotage(engine: LocalEngine, kind: type) -> None:
    """From now on the store fails when it shall apply such a transition."""
    apply = engine.store.apply

    async def broken(moves: Any, now: float, **how: Any) -> list[Decision]:
        if any(isinstance(move, kind) for move in moves):
            raise OSError("disk full")
        return await apply(moves, now, **how)

    engine.store.apply = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(("name", "kind"), [("h", Complete), ("breaks", Fail), ("h", Claim)])
async def test_an_error_of_the_store_is_raised_from_wait(name: str, kind: type) -> None:
    async with local(h, breaks) as engine:
        sabotage(engine, kind)
        compiled = graph({"a": []}, a={"handler": name})
        await engine.orchestrator.submit(Submit("r", compiled, {}))
        with pytest.raises(OSError, match="disk full"):
            await asyncio.wait_for(engine.wait("r"), 10)
        with pytest.raises(OSError, match="disk full"):
            await engine.wait("r")


async def test_every_waiter_gets_the_outcome() -> None:
    async with local(h) as engine:
        sabotage(engine, Complete)
        await engine.orchestrator.submit(Submit("r", graph({"a": []}), {}))
        waiters = [asyncio.create_task(engine.wait("r")) for _ in range(3)]
        reported = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 10)
        assert [str(error) for error in reported] == ["disk full"] * 3


async def test_a_watcher_gets_the_error_of_the_store() -> None:
    async with local(h) as engine:
        sabotage(engine, Complete)
        await engine.orchestrator.submit(Submit("r", graph({"a": []}), {}))

        async def watch() -> None:
            async for _ in engine.store.watch("r"):
                pass

        with pytest.raises(OSError, match="disk full"):
            await asyncio.wait_for(watch(), 10)


async def test_a_watcher_ends_when_the_engine_closes() -> None:
    async with local(h) as engine:
        await engine.store.create(Submit("r", graph({"a": []}), {}), 1.0)

        async def watch() -> int:
            return len([event async for event in engine.store.watch("r")])

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.01)
    with pytest.raises(Exception, match="closed"):
        await asyncio.wait_for(watching, 5)


async def test_an_unexpected_error_in_a_condition_stops_the_engine_loudly() -> None:
    # Only the library can make such a graph, and it turns every exception into a failed step.
    def explode(scope: Any) -> bool:
        raise ZeroDivisionError

    compiled = graph({"a": [], "b": ["a"]}, b={"condition": True})
    object.__setattr__(compiled.nodes[1], "condition", explode)
    async with local(h) as engine:
        await engine.orchestrator.submit(Submit("r", compiled, {}))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(engine.wait("r"), 10)


async def test_a_cancelled_wait_leaves_no_task() -> None:
    async with local(h) as engine:
        run, _ = begin(Submit("r", graph({"a": []}), {}), 1.0, 1)
        engine.store._runs["r"], engine.store._events["r"] = run, []
        before = asyncio.all_tasks()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.wait("r"), 0.005)
        assert asyncio.all_tasks() == before
