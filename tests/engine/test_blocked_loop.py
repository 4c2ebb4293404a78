"""A handler that blocks the event loop of the embedded engine: its process is not taken for dead,
unless it blocks for longer than it may."""

from __future__ import annotations

import asyncio
import linecache
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.events import Token
from dovetail.core.node_logs import LogChunk
from dovetail.core.run import RunState
from dovetail.engine import lease_keeper, watchdog
from dovetail.engine.lease_keeper import DutyThread, HeldStarts, Liveness
from dovetail.engine.local.task_source import LocalTaskSource
from dovetail.engine.ports import Task
from dovetail.executor import WorkflowDAG, WorkflowExecutor
from dovetail.stores.sqlite.store import SqliteStore
from dovetail.wiring.embedded import embedded

from .harness import PATIENCE, engine, registry_of

LEASE = 0.6
FILE = "tests/engine/test_blocked_loop.py"
ENGINE = """
import asyncio, sys, time
from pathlib import Path
from dovetail.config import Settings
from dovetail.handlers.registry import Registry, describe
from dovetail.wiring.embedded import embedded

async def block(config, ctx):
    time.sleep(config["seconds"])

async def beside(config, ctx):
    await asyncio.sleep(0)  # it has begun before the other one blocks
    await asyncio.sleep(0.1)

async def main(db, seconds, timeout):
    registry = Registry()
    for one in (block, beside):
        registry.add(describe(one, name=one.__name__))
    nodes = [
        {"id": "beside", "handler": "beside"},
        {"id": "block", "handler": "block", "config": {"seconds": float(seconds)},
         "timeout_seconds": float(timeout)},
    ]
    settings = Settings(db=Path(db), db_sync="normal", lease_seconds=%s, drain_seconds=0)
    async with embedded(settings, registry) as commands:
        made = await commands.trigger({"name": "t", "nodes": nodes})
        print(made.run_id, flush=True)
        await commands.wait(made.run_id)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    processes: list[subprocess.Popen[str]] = []

    def start(seconds: float, timeout: float) -> tuple[subprocess.Popen[str], str]:
        words = [sys.executable, "-c", ENGINE % LEASE, str(tmp_path / "runs.db")]
        words += [str(seconds), str(timeout)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


async def test_a_process_whose_handler_blocks_its_loop_keeps_its_runs(
    tmp_path: Path, started: Any
) -> None:
    process, run_id = await asyncio.to_thread(started, 3 * LEASE, 300)
    async with SqliteStore(tmp_path / "runs.db", sync="normal") as other:
        seen = set()
        while process.poll() is None:
            seen.add(await other.owner_of(run_id))
            assert await other.adopt([run_id], time.time(), 3) == {}
            await asyncio.sleep(0.02)
        assert process.returncode == 0
        assert seen <= {"elsewhere", "none"}
        run = await other.load(run_id)
        assert [(node.attempt, node.crashes) for node in run.nodes] == [(1, 0)] * 2
        assert [e.type async for e in other.watch(run_id)].count("node.started") == 2


async def test_a_process_whose_handler_blocks_beyond_its_timeout_loses_its_runs(
    tmp_path: Path, started: Any
) -> None:
    _, run_id = await asyncio.to_thread(started, 60, 0.3)

    async def quick(config: dict[str, Any], ctx: Any) -> None: ...

    settings = Settings(db=tmp_path / "runs.db", db_sync="normal", drain_seconds=0)
    async with SqliteStore(settings.db, sync="normal", drives=False) as other:
        async with asyncio.timeout(PATIENCE):
            while await other.owner_of(run_id) != "gone":
                await asyncio.sleep(0.02)
    registry = registry_of(quick)
    async with embedded(settings, registry) as commands:
        assert await commands.store.orphans() == [run_id]


# ── timeouts ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Lines of logs that were handed in: node, level, message."""
    found: list[tuple[str, str, str]] = []

    init = LocalTaskSource.__init__

    def log(chunks: Sequence[LogChunk]) -> None:
        found.extend((c.node, line.level, line.message) for c in chunks for line in c.lines)

    def made(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.log = log

    monkeypatch.setattr(LocalTaskSource, "__init__", made)
    return found


def timeout_of(run: RunState, name: str) -> str:
    error = run.node(name).error
    assert error is not None
    return f"{error['type']}: {error['message']}"


async def blocks(config: dict[str, Any], ctx: Any) -> str:
    time.sleep(config["seconds"])
    return "too late"


async def waits_and_blocks(config: dict[str, Any], ctx: Any) -> str:
    await asyncio.sleep(0.01)
    time.sleep(config["seconds"])
    return "too late"


async def blocks_and_waits(config: dict[str, Any], ctx: Any) -> str:
    time.sleep(config["seconds"])
    await asyncio.sleep(3600)
    return "never"


@pytest.mark.parametrize("handler", [blocks, waits_and_blocks, blocks_and_waits])
async def test_a_handler_that_blocks_the_loop_beyond_its_timeout_fails_and_its_log_says_where(
    handler: Any, lines: list[tuple[str, str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    name = handler.__name__
    async with engine(handler) as it:
        config = {"handler": name, "config": {"seconds": 0.9}, "timeout_seconds": 0.2}
        run = await it.run({"a": config})
        events = [event.type for event in await it.events(run.id)]
    assert run.status == "FAILED"
    assert timeout_of(run, "a") == "timeout: did not finish within 0.2 s (timeout_seconds)"
    assert run.node("a").output is None
    if handler is not blocks_and_waits:  # which is stopped where it waits
        assert "result.refused" in events
        ((_, level, message),) = lines
        assert level == "WARNING"
        found = re.match(rf"blocks the event loop in {FILE}:(\d+) in {name}, ", message)
        assert found is not None
        assert linecache.getline(__file__, int(found[1])).strip().startswith("time.sleep")
        assert "beyond its timeout of 0.2 s: it fails when it returns" in message
        (said,) = [r.getMessage() for r in caplog.records if r.name == "dovetail.worker"]
        assert said == f"run {run.id}, node a: {message}"


async def test_a_short_block_beyond_a_shorter_timeout_fails_too(
    lines: list[tuple[str, str, str]],
) -> None:
    async with engine(blocks) as it:
        config = {"handler": "blocks", "config": {"seconds": 0.06}, "timeout_seconds": 0.02}
        run = await it.run({"a": config})
    assert timeout_of(run, "a").startswith("timeout")
    ((_, _, message),) = lines
    assert message.startswith("kept the event loop beyond its timeout of 0.02 s, so it fails")


async def test_a_handler_that_blocks_within_its_timeout_succeeds(
    lines: list[tuple[str, str, str]],
) -> None:
    async with engine(blocks, waits_and_blocks) as it:
        config = {"config": {"seconds": 0.3}, "timeout_seconds": 30}
        for handler in ("blocks", "waits_and_blocks"):
            run = await it.run({"a": {"handler": handler, **config}})
            assert run.node("a").output == "too late"
    assert lines == []


async def test_other_nodes_are_not_blamed_for_a_blocked_loop(
    lines: list[tuple[str, str, str]],
) -> None:
    async def innocent(config: dict[str, Any], ctx: Any) -> str:
        await asyncio.sleep(0.3)
        return "in time"

    def in_a_thread(config: dict[str, Any], ctx: Any) -> str:
        time.sleep(0.3)
        return "in time"

    async def never(config: dict[str, Any], ctx: Any) -> None:
        await asyncio.sleep(3600)

    async with engine(innocent, in_a_thread, never, waits_and_blocks) as it:
        run = await it.run(
            {
                "innocent": {"handler": "innocent", "timeout_seconds": 1},
                "thread": {"handler": "in_a_thread", "timeout_seconds": 1},
                "never": {"handler": "never", "timeout_seconds": 1},
                "blocks": {
                    "handler": "waits_and_blocks",
                    "config": {"seconds": 1.5},
                    "timeout_seconds": 0.5,
                },
            },
            on_failure="continue",
        )
    assert run.node("innocent").output == run.node("thread").output == "in time"
    assert timeout_of(run, "blocks").startswith("timeout")
    assert timeout_of(run, "never").startswith("timeout"), "it gets its time back, and no more"
    never_took = run.node("never").finished_at - run.node("never").started_at  # type: ignore[operator]
    assert 2 < never_took < 2 + PATIENCE
    assert {name for name, *_ in lines} == {"blocks"}


async def test_the_library_refuses_late_results_as_well() -> None:
    async def late(ctx: Any) -> str:
        time.sleep(0.1)
        return "too late"

    dag = WorkflowDAG().add_step("a", late, timeout_seconds=0.05)
    result = await WorkflowExecutor().execute(dag)
    assert result.steps["a"].error == "timeout: did not finish within 0.05 s (timeout_seconds)"


class Busy:
    """A worker as the watchdog sees it."""

    def __init__(self) -> None:
        self.is_watched = True
        self.is_busy = True
        self.looked = threading.Semaphore(0)
        self.fails = False

    def unwatched(self) -> None:
        self.is_watched = False

    def look(self, now: float) -> None:
        self.looked.release()
        if self.fails:
            raise RuntimeError("dictionary changed size during iteration")


def test_one_thread_watches_all_workers_and_sleeps_while_they_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "LINGER_SECONDS", 0.5)
    dog, one, two = watchdog.Watchdog(), Busy(), Busy()
    dog.watch(one)
    dog.watch(two)
    one.fails = True
    for worker in (one, two, one, two):
        assert worker.looked.acquire(timeout=PATIENCE)
    thread = dog._thread
    one.is_busy = two.is_busy = False
    deadline = time.monotonic() + PATIENCE
    while one.is_watched or two.is_watched:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.is_busy = True
    while one.looked.acquire(blocking=False):
        pass
    dog.watch(one)
    assert one.looked.acquire(timeout=PATIENCE)
    dog.forget(one)
    assert thread is not None
    assert dog._thread in (thread, None), "both had one thread"
    thread.join(PATIENCE)
    assert not thread.is_alive()


# ── the parts ────────────────────────────────────────────────────────────────────────────


class Loop:
    """An event loop that turns when the test says so."""

    def __init__(self) -> None:
        self.turns: list[Any] = []

    def call_soon_threadsafe(self, work: Any) -> None:
        self.turns.append(work)

    def turn(self) -> None:
        while self.turns:
            self.turns.pop()()


def task(name: str, timeout: float = 300.0) -> Task:
    return Task("r", name, Token(1, 1, 1), "h", {}, {}, None, timeout)


class Watched:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, blocker: Task | None) -> None:
        self.now = 100.0
        monkeypatch.setattr(lease_keeper.time, "monotonic", lambda: self.now)
        self.loop = Loop()
        self.liveness = Liveness(self.loop, lambda: blocker)  # type: ignore[arg-type]
        self.held = [task("short", 5.0), task("long", 500.0)]

    def renewed(self) -> list[str]:
        return [one.node_id for one in self.liveness.renewable(self.held)]


def test_every_lease_is_renewed_while_the_loop_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Watched(monkeypatch, task("short", 5.0))
    for _ in range(10):
        assert it.renewed() == ["short", "long"]
        assert it.liveness.is_alive()
        it.loop.turn()
        it.now += 100


def test_a_blocked_loop_is_renewed_for_the_timeout_of_the_blocking_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Watched(monkeypatch, task("blocker", 20.0))
    assert it.renewed() == ["short", "long"]
    it.now += 5.9
    assert it.renewed() == ["short", "long"]
    it.now += 1
    assert it.renewed() == ["long"], "a start is renewed no longer than it may run"
    it.now += 14
    assert it.renewed() == ["long"]
    assert it.liveness.is_alive()
    it.now += 1
    assert it.renewed() == []
    assert not it.liveness.is_alive()
    it.loop.turn()
    assert it.renewed() == ["short", "long"], (
        "a worker that lost them learns it with the next renewal"
    )


def test_a_loop_blocked_without_a_handler_is_not_renewed_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Watched(monkeypatch, None)
    assert it.renewed()
    it.now += lease_keeper.UNKNOWN_SECONDS
    assert it.renewed() == ["long"]
    it.now += 2
    assert it.renewed() == []


def test_held_starts_are_the_claimed_and_unreported_ones() -> None:
    held = HeldStarts()
    held.add([task("a"), task("b")])
    held.drop([("r", "a", Token(1, 1, 1)), ("r", "b", Token(1, 2, 1)), ("r", "c", Token(1, 1, 1))])
    assert [one.node_id for one in held.tasks()] == ["b"]
    assert ("r", "b", Token(1, 1, 1)) in held
    assert len(held) == 1


async def test_a_duty_thread_reports_its_error_and_ends_when_it_is_closed() -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def fail() -> None:
        async with asyncio.TaskGroup():
            raise ZeroDivisionError

    async with DutyThread("failing", fail, failed.set_result):
        assert isinstance(await asyncio.wait_for(failed, PATIENCE), ZeroDivisionError)

    begun, left = threading.Event(), threading.Event()

    async def last() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            left.set()

    async with DutyThread("lasting", last, failed.set_result):
        assert await asyncio.to_thread(begun.wait, PATIENCE)
    assert left.is_set()


async def test_the_worker_knows_which_handler_blocks_the_loop(tmp_path: Path) -> None:
    found: list[str | None] = []

    def ask(it: Any) -> None:
        found.append(None if (one := it.blocker()) is None else one.node_id)

    async def at_once(config: dict[str, Any], ctx: Any) -> None:
        await_thread(ask)

    async def later(config: dict[str, Any], ctx: Any) -> None:
        await asyncio.sleep(0)
        await_thread(ask)

    def await_thread(work: Any) -> None:
        other = threading.Thread(target=work, args=(worker,))
        other.start()
        other.join()  # so the loop is blocked meanwhile

    settings = Settings(db=tmp_path / "runs.db", db_sync="normal", drain_seconds=0)
    async with embedded(settings, registry_of(at_once, later)) as commands:
        worker = commands.store._engine.is_alive.__self__._blocker.__self__  # type: ignore[attr-defined]
        nodes = [{"id": f"{h}_{i}", "handler": h} for i in "12" for h in ("at_once", "later")]
        run_id = (await commands.trigger({"name": "t", "nodes": nodes})).run_id
        await asyncio.wait_for(commands.wait(run_id), PATIENCE)
        assert sorted(map(str, found)) == ["at_once_1", "at_once_2", "later_1", "later_2"]
        await asyncio.to_thread(ask, worker)
        assert found[-1] is None
