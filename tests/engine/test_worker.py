"""The worker: how handlers are started, beside each other, each as if it were alone."""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import ContextVar
from typing import Any

import pytest

from dovetail.core.events import Token
from dovetail.core.transitions import Stop
from dovetail.engine.ports import Task
from dovetail.engine.worker import Worker
from dovetail.handlers.calls import RegistryCalls

from .harness import Gate, engine, registry_of, statuses

FAN = {"a": "noop", **{f"n{i}": {"handler": "noop", "after": ["a"]} for i in range(30)}}


async def noop(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
    return {}


def fan(handler: str, size: int) -> dict[str, Any]:
    return {f"n{i}": handler for i in range(size)}


async def test_handlers_that_never_wait_create_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    loop = asyncio.get_running_loop()
    create = loop.create_task

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return create(*args, **kwargs)

    async with engine(noop) as it:
        await it.run({"warm": "noop"})
        monkeypatch.setattr(loop, "create_task", counting)
        run = await it.run(FAN)
        monkeypatch.undo()
    assert run.status == "COMPLETED"
    assert made < 10, "a run of 31 nodes made tasks of its own for them"


async def test_handlers_that_wait_run_concurrently() -> None:
    gate = Gate()
    async with engine(gate) as it:
        run_id = await it.trigger(fan("gate", 20))
        async with asyncio.timeout(10):
            while gate.inside < 20:
                await asyncio.sleep(0)
        gate.opened.set()
        assert (await it.wait(run_id)).status == "COMPLETED"


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_async_handlers_never_exceed_the_concurrency(concurrency: int) -> None:
    inside = most = 0

    async def busy(config: dict[str, Any], ctx: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.001)
        inside -= 1

    async with engine(busy, concurrency=concurrency) as it:
        run = await it.run(fan("busy", 20))
    assert run.status == "COMPLETED"
    assert most == concurrency


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_handlers_in_threads_never_exceed_the_concurrency(concurrency: int) -> None:
    lock = threading.Lock()
    inside = most = 0

    def busy(config: dict[str, Any], ctx: Any) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.003)
        with lock:
            inside -= 1

    async with engine(busy, concurrency=concurrency) as it:
        run = await it.run(fan("busy", 12))
    assert run.status == "COMPLETED"
    assert most == concurrency


async def test_handlers_of_every_kind_share_the_slots_of_one_worker() -> None:
    lock = threading.Lock()
    inside = most = 0

    def enter(step: int) -> None:
        nonlocal inside, most
        with lock:
            inside += step
            most = max(most, inside)

    async def waits(config: dict[str, Any], ctx: Any) -> None:
        enter(1)
        await asyncio.sleep(0.001)
        enter(-1)

    def blocks(config: dict[str, Any], ctx: Any) -> None:
        enter(1)
        time.sleep(0.001)
        enter(-1)

    async def returns(config: dict[str, Any], ctx: Any) -> None:
        enter(1)
        enter(-1)

    kinds = ("waits", "blocks", "returns")
    async with engine(waits, blocks, returns, concurrency=2) as it:
        run = await it.run({f"n{i}": kinds[i % 3] for i in range(30)})
    assert run.status == "COMPLETED"
    assert most <= 2


async def test_a_context_variable_set_by_one_handler_is_not_seen_by_another() -> None:
    colour: ContextVar[str] = ContextVar("colour", default="none")
    seen: list[tuple[str, str]] = []

    async def paint(config: dict[str, Any], ctx: Any) -> None:
        seen.append((ctx.node_id, colour.get()))
        colour.set(ctx.node_id)
        if config.get("waits"):
            await asyncio.sleep(0)
            seen.append((ctx.node_id, colour.get()))

    def paint_thread(config: dict[str, Any], ctx: Any) -> None:
        seen.append((ctx.node_id, colour.get()))
        colour.set(ctx.node_id)

    waits = {"handler": "paint", "config": {"waits": True}}
    nodes: dict[str, Any] = {"a": "paint", "b": waits, "c": "paint", "d": waits}
    nodes |= {f"t{i}": {"handler": "paint_thread", "after": ["a"]} for i in range(4)}
    nodes["last"] = {"handler": "paint", "after": [f"t{i}" for i in range(4)]}
    async with engine(paint, paint_thread, concurrency=2) as it:
        await it.run(nodes)
    assert len(seen) == 11
    for node, value in seen:
        assert value in ("none", node)
    assert colour.get() == "none"


async def test_a_handler_keeps_its_context_variables_over_its_waits() -> None:
    colour: ContextVar[int] = ContextVar("colour")

    async def paint(config: dict[str, Any], ctx: Any) -> bool:
        colour.set(config["n"])
        for _ in range(5):
            await asyncio.sleep(0)
            if colour.get() != config["n"]:
                return False
        return True

    async with engine(paint) as it:
        run = await it.run({f"n{i}": {"handler": "paint", "config": {"n": i}} for i in range(10)})
    assert {node.output for node in run.nodes} == {True}


async def test_each_waiting_handler_has_its_own_asyncio_task() -> None:
    tasks: dict[str, set[int]] = {}

    async def look(config: dict[str, Any], ctx: Any) -> None:
        mine = tasks.setdefault(ctx.node_id, set())
        for _ in range(3):
            task = asyncio.current_task()
            assert task is not None
            mine.add(id(task))
            await asyncio.sleep(0.001)

    async with engine(look) as it:
        await it.run(fan("look", 5))
    assert all(len(mine) == 1 for mine in tasks.values())
    assert len(set.union(*tasks.values())) == 5


async def test_timeouts_and_task_groups_work_inside_a_handler() -> None:
    async def careful(config: dict[str, Any], ctx: Any) -> list[Any]:
        said: list[Any] = []
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(10)
        except TimeoutError:
            said.append("timeout")
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(asyncio.sleep(0, n)) for n in (1, 2)]
        said += [task.result() for task in both]
        said.append(await asyncio.wait_for(asyncio.sleep(0, 3), 1))
        return said

    async with engine(careful) as it:
        run = await it.run(fan("careful", 3))
    assert {tuple(node.output) for node in run.nodes} == {("timeout", 1, 2, 3)}


async def test_a_timeout_that_did_not_fire_leaves_nothing() -> None:
    async def quick(config: dict[str, Any], ctx: Any) -> str:
        async with asyncio.timeout(0):
            return "done"

    async with engine(quick, noop) as it:
        nodes = {**fan("quick", 5), "after": {"handler": "noop", "after": ["n0"]}}
        run = await it.run(nodes)
        assert (await it.run(fan("noop", 5))).status == "COMPLETED"
    assert run.status == "COMPLETED"


@pytest.mark.parametrize("waits", [False, True])
async def test_a_handler_that_cancels_its_own_task_fails_or_returns_and_the_worker_continues(
    waits: bool,
) -> None:
    async def suicidal(config: dict[str, Any], ctx: Any) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if waits:
            await asyncio.sleep(0)
        return "returned"

    async with engine(suicidal, noop, concurrency=2) as it:
        run = await it.run(fan("suicidal", 4), on_failure="continue")
        assert (await it.run(fan("noop", 4))).status == "COMPLETED"
    if waits:
        assert {node.error["type"] for node in run.nodes if node.error} == {"CancelledError"}
        assert set(statuses(run).values()) == {"FAILED"}
    else:
        assert {node.output for node in run.nodes} == {"returned"}


async def test_a_plain_function_may_return_a_coroutine() -> None:
    async def later() -> int:
        await asyncio.sleep(0)
        return 7

    def lazy(config: dict[str, Any], ctx: Any) -> Any:
        return later()

    async with engine(lazy) as it:
        run = await it.run({"a": "lazy"})
    assert run.nodes[0].output == 7


async def test_an_object_with_an_async_call_is_a_handler() -> None:
    gate = Gate()
    gate.opened.set()
    async with engine(gate) as it:
        assert (await it.run({"a": "gate"})).nodes[0].output == "through"


async def test_handlers_that_never_wait_do_not_block_the_loop() -> None:
    async def slow_but_never_waiting(config: dict[str, Any], ctx: Any) -> None:
        time.sleep(0.003)

    longest = 0.0

    async def heartbeat() -> None:
        nonlocal longest
        last = time.monotonic()
        while True:
            await asyncio.sleep(0)
            now = time.monotonic()
            longest = max(longest, now - last)
            last = now

    pauses = []
    for _ in range(3):  # the best of some: the whole process may have to wait for a processor
        longest = 0.0
        async with engine(slow_but_never_waiting) as it:
            beating = asyncio.create_task(heartbeat())
            await it.run(fan("slow_but_never_waiting", 100))
            beating.cancel()
        pauses.append(longest)
    assert min(pauses) < 0.15, "0.3 s of work were done in one go"


async def test_a_handler_may_run_a_workflow_of_the_same_engine() -> None:
    async def nested(config: dict[str, Any], ctx: Any) -> Any:
        run = await it.run({"inner": "noop"})
        return run.status.value

    async with engine(nested, noop, concurrency=2) as it:
        run = await it.run({"outer": "nested"})
    assert run.nodes[0].output == "COMPLETED"


async def test_many_concurrent_runs_all_end() -> None:
    async with engine(noop, concurrency=4) as it:
        ids = [await it.trigger(FAN) for _ in range(20)]
        runs = await asyncio.gather(*(it.wait(run_id) for run_id in ids))
    assert {run.status.value for run in runs} == {"COMPLETED"}


async def test_a_handler_sees_its_run_node_attempt_and_epoch() -> None:
    async def who(config: dict[str, Any], ctx: Any) -> dict[str, Any]:
        return {
            "run": ctx.run_id,
            "node": ctx.node_id,
            "attempt": ctx.attempt,
            "epoch": ctx.epoch,
            "key": ctx.idempotency_key,
            "params": ctx.params,
            "inputs": ctx.inputs,
        }

    async with engine(who, noop) as it:
        nodes = {
            "a": "noop",
            "skipped": {"handler": "noop", "condition": False},
            "b": {"handler": "who", "after": ["a", "skipped"]},
        }
        run = await it.run(nodes, {"x": 1})
    assert run.node("b").output == {
        "run": run.id,
        "node": "b",
        "attempt": 1,
        "epoch": 1,
        "key": f"{run.id}:b:1",
        "params": {"x": 1},
        "inputs": {"a": {}},
    }


async def test_the_idempotency_key_is_the_same_for_every_attempt_of_an_epoch() -> None:
    keys: list[tuple[int, str]] = []

    async def shaky(config: dict[str, Any], ctx: Any) -> None:
        keys.append((ctx.attempt, ctx.idempotency_key))
        if len(keys) < 4:
            raise ValueError

    retry = {"max_retries": 1, "retry": {"base_delay_seconds": 0}}
    async with engine(shaky) as it:
        run = await it.run({"a": {"handler": "shaky", **retry}})
        await it.commands.retry(run.id)
        await it.wait(run.id)
    assert keys == [
        (1, f"{run.id}:a:1"),
        (2, f"{run.id}:a:1"),
        (1, f"{run.id}:a:2"),
        (2, f"{run.id}:a:2"),
    ]


class _Given:
    """A task_source with these tasks on it; it keeps the reports."""

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks = tasks
        self.reported: list[Any] = []

    async def take(self, limit: int) -> list[Task]:
        if not self.tasks:
            await asyncio.get_running_loop().create_future()
        taken, self.tasks = self.tasks[:limit], self.tasks[limit:]
        return taken

    async def report(self, reported: list[Any]) -> None:
        self.reported += reported


@pytest.mark.parametrize("same_token", [True, False])
async def test_a_node_that_starts_again_on_the_same_worker_does_not_end_the_worker(
    same_token: bool,
) -> None:
    """Its lease was lost, or Redis has forgotten that it was claimed."""
    gate = Gate()
    tokens = [Token(1, 1, 7), Token(1, 1, 7) if same_token else Token(1, 2, 8)]
    starts = [Task("run", "n", token, "gate", {}, {}, {}, 60.0) for token in tokens]
    other = Task("run", "other", tokens[0], "gate", {}, {}, {}, 60.0)
    task_source = _Given([*starts, other])
    crashes: list[BaseException] = []
    worker = Worker(
        task_source,  # type: ignore[arg-type]
        RegistryCalls(registry_of(gate)),
        time.time,
        crashes.append,
        concurrency=8,
    )
    worker.start()
    async with asyncio.timeout(10):
        while gate.inside < 3:
            await asyncio.sleep(0)
        worker.stop(Stop("run", "n", tokens[1]))
        assert worker.holding() == [*([] if same_token else starts[:1]), other]
        gate.opened.set()
        while not any(one.node == "other" for one in task_source.reported):
            await asyncio.sleep(0)
    await worker.close()
    assert not crashes
    assert sum(one.output is not None for one in task_source.reported) == (1 if same_token else 2)


async def test_a_task_stopped_before_its_start_does_not_start_and_takes_no_slot() -> None:
    gate, token = Gate(), Token(1, 1, 7)
    stopped, other = (
        Task("run", name, token, "gate", {}, {}, {}, 60.0) for name in ("stopped", "other")
    )
    worker = Worker(
        _Given([stopped, other]),  # type: ignore[arg-type]
        RegistryCalls(registry_of(gate)),
        time.time,
        lambda error: None,
        concurrency=1,
    )
    worker.stop(Stop("run", "stopped", token))
    worker.start()
    async with asyncio.timeout(10):
        while not gate.inside:
            await asyncio.sleep(0)
    assert worker.holding() == [other]
    await worker.close()


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_the_output_of_a_stopped_handler_completes_nothing(
    kind: str,
) -> None:
    """A store that came back without its end would take it for what the node has to say."""
    begun, release, token = threading.Event(), threading.Event(), Token(1, 1, 7)

    async def clinging(config: dict[str, Any], ctx: Any) -> str:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "half of it"
        return "never"

    def deaf(config: dict[str, Any], ctx: Any) -> str:
        begun.set()
        release.wait(10)
        return "half of it"

    name = {"async": "clinging", "thread": "deaf"}[kind]
    task_source = _Given([Task("run", "n", token, name, {}, {}, {}, 60.0)])
    worker = Worker(
        task_source,  # type: ignore[arg-type]
        RegistryCalls(registry_of(clinging, deaf)),
        time.time,
        lambda error: None,
        concurrency=1,
    )
    worker.start()
    async with asyncio.timeout(10):
        while not begun.is_set():
            await asyncio.sleep(0)
        worker.stop(Stop("run", "n", token))
        release.set()
        while not task_source.reported:
            await asyncio.sleep(0.001)
    await worker.close()
    (late,) = task_source.reported
    assert (late.node, late.token.epoch, late.token.attempt) == ("n", 1, 1)
    assert late.token != token
