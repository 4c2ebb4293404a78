"""Progress: shown live, in order, not too often, and never after the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

from dovetail.core.events import Event, Token
from dovetail.core.transitions import Progress
from dovetail.engine.ports import Task
from dovetail.engine.worker import Worker
from dovetail.handlers.calls import RegistryCalls

from .harness import engine, registry_of


def fractions(events: list[Event], node: str = "a") -> list[float]:
    return [
        event.data["fraction"]
        for event in events
        if event.type == "node.progress" and event.node == node and event.data
    ]


async def test_progress_is_reported_while_the_handler_runs() -> None:
    release = asyncio.Event()

    async def working(config: dict[str, Any], ctx: Any) -> None:
        ctx.progress(0.5, "half way")
        await release.wait()

    async with engine(working) as it:
        run_id = await it.trigger({"a": "working"})
        async with asyncio.timeout(5):
            async for event in it.commands.store.watch(run_id):
                if event.type == "node.progress":
                    assert event.data == {"fraction": 0.5, "message": "half way"}
                    assert (event.node, event.attempt, event.epoch) == ("a", 1, 1)
                    break
        assert not release.is_set()
        release.set()
        await it.wait(run_id)


async def test_the_last_progress_comes_before_the_completion() -> None:
    async def quick(config: dict[str, Any], ctx: Any) -> None:
        ctx.progress(0.1)
        ctx.progress(1.0)

    async def slower(config: dict[str, Any], ctx: Any) -> None:
        ctx.progress(0.1)
        await asyncio.sleep(0.001)
        ctx.progress(1.0)

    def thread(config: dict[str, Any], ctx: Any) -> None:
        ctx.progress(0.1)
        ctx.progress(1.0)

    async with engine(quick, slower, thread) as it:
        for handler in ("quick", "slower", "thread"):
            run = await it.run({"a": handler})
            events = await it.events(run.id)
            assert fractions(events)[-1] == 1.0
            types = [event.type for event in events]
            assert types.index("node.completed") == len(types) - 2
            assert "node.progress" not in types[types.index("node.completed") :]


async def test_a_result_does_not_overtake_progress_that_is_being_reported() -> None:
    """The store is slow; progress of a node after its end is not shown."""
    entered, reported = asyncio.Event(), asyncio.Event()
    heard: list[Any] = []

    class Slow:
        async def take(self, limit: int) -> list[Task]:
            if entered.is_set():
                await asyncio.get_running_loop().create_future()
            entered.set()
            return [Task("run", name, Token(1, 1, 7), "half", {}, {}, {}, 60.0) for name in "ab"]

        async def report(self, said: Sequence[Any]) -> None:
            if any(isinstance(one, Progress) for one in said):
                telling.set()
                await reported.wait()
            heard.extend(said)

    telling, over = asyncio.Event(), asyncio.Event()

    async def half(config: dict[str, Any], ctx: Any) -> None:
        if ctx.node_id == "a":
            ctx.progress(0.5)
        await over.wait()

    calls = RegistryCalls(registry_of(half))
    worker = Worker(Slow(), calls, time.time, lambda error: None, concurrency=8)  # type: ignore[arg-type]
    worker.start()
    async with asyncio.timeout(10):
        await telling.wait()
        over.set()
        await asyncio.sleep(0.05)  # enough for a result that does not wait
        reported.set()
        while len(heard) < 3:
            await asyncio.sleep(0)
    await worker.close()
    kinds = [type(one).__name__ for one in heard if one.node == "a"]
    assert kinds == ["Progress", "Complete"]


async def test_a_flood_of_progress_is_throttled() -> None:
    async def chatty(config: dict[str, Any], ctx: Any) -> None:
        for step in range(2000):
            ctx.progress(step / 2000)
            if step % 100 == 0:
                await asyncio.sleep(0.005)

    async with engine(chatty) as it:
        run = await it.run({"a": "chatty"})
        reported = fractions(await it.events(run.id))
    assert reported == sorted(reported)
    assert 1 < len(reported) <= 10
    assert reported[-1] == 1999 / 2000


async def test_progress_of_several_nodes_is_kept_separate() -> None:
    async def working(config: dict[str, Any], ctx: Any) -> None:
        ctx.progress(config["to"])
        await asyncio.sleep(0.001)

    nodes = {f"n{i}": {"handler": "working", "config": {"to": i / 10}} for i in range(5)}
    async with engine(working) as it:
        run = await it.run(nodes)
        events = await it.events(run.id)
    for i in range(5):
        assert fractions(events, f"n{i}") == [i / 10]


async def test_progress_after_the_end_is_not_reported() -> None:
    late: list[Any] = []

    async def leaks(config: dict[str, Any], ctx: Any) -> None:
        late.append(ctx)

    async with engine(leaks) as it:
        run = await it.run({"a": "leaks"})
        late[0].progress(0.5)
        threading.Thread(target=late[0].progress, args=(0.7,)).start()
        await asyncio.sleep(0.1)
        assert fractions(await it.events(run.id)) == []
