"""`Dovetail` in several processes on one file: killed, taken over, followed, side by side.

A child is a script like a user's. Its handler writes a line to `ran.txt` at every start, so
that what was executed is counted outside of everything that could be wrong about it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dovetail import Conflict, Dovetail

HANDLERS = """
import asyncio
from pathlib import Path

from dovetail import handler


@handler("work")
async def work(config, ctx):
    with open("ran.txt", "a") as ran:
        ran.write(f"{ctx.run_id} {ctx.node_id} {ctx.attempt}\\n")
    while "until" in config and not Path(config["until"]).exists():
        await asyncio.sleep(0.01)
    return ctx.attempt
"""

CHILD = """
import asyncio
import sys

from dovetail import Dovetail


async def main():
    async with Dovetail("runs.db", handlers="work.py") as dt:
{body}


asyncio.run(main())
"""

DRIVE = """
run = await dt.trigger("flow.json")
print(run.run_id, flush=True)
print((await dt.wait(run.run_id)).status, flush=True)
"""

Start = Callable[[str], Awaitable[Process]]


def chain(*ids: str, slow: str = "", **more: Any) -> dict[str, Any]:
    """Nodes one after the other; the slow one waits for a file `go`."""
    return {
        "name": "chain",
        "nodes": [
            {
                "id": name,
                "handler": "work",
                "dependencies": list(ids[:place][-1:]),
                "config": {"until": "go"} if name == slow else {},
                **(more if name == slow else {}),
            }
            for place, name in enumerate(ids)
        ],
    }


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in list(os.environ):
        if name.startswith("DOVETAIL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.py").write_text(HANDLERS)
    (tmp_path / "flow.json").write_text(json.dumps(chain("a", "b", "c", slow="b")))
    return tmp_path


@pytest.fixture
async def start(folder: Path) -> AsyncIterator[Start]:
    """Starts a child that does this inside `async with Dovetail(…) as dt`."""
    children: list[Process] = []

    async def start_child(body: str) -> Process:
        lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
        script = CHILD.replace("{body}\n", lines)
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=PIPE)
        children.append(child)
        return child

    yield start_child
    for child in children:
        with suppress(ProcessLookupError):
            child.kill()
        await child.communicate()


def here(**settings: Any) -> Dovetail:
    return Dovetail("runs.db", handlers="work.py", drain_seconds=0, **settings)


async def line_of(child: Process) -> str:
    assert child.stdout is not None
    return (await asyncio.wait_for(child.stdout.readline(), 30)).decode().strip()


async def kill(child: Process) -> None:
    child.send_signal(signal.SIGKILL)
    await child.wait()


def ran(run_id: str) -> list[str]:
    """The starts of a run's nodes, as `node attempt`."""
    with suppress(FileNotFoundError):
        lines = Path("ran.txt").read_text().splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith(run_id)]
    return []


async def until_ran(run_id: str, start: str) -> None:
    async with asyncio.timeout(30):
        while start not in ran(run_id):
            await asyncio.sleep(0.01)


async def test_a_run_whose_process_was_killed_goes_on_in_a_waiting_process(
    start: Start,
) -> None:
    child = await start(DRIVE)
    run_id = await line_of(child)
    await until_ran(run_id, "b 1")
    await kill(child)
    Path("go").touch()
    async with here() as dt:
        run = await dt.wait(run_id, timeout=30)
        lost = [event async for event in dt.events(run_id) if event.type == "node.lost"]
    assert run.status == "COMPLETED"
    assert run.outputs == {"a": 1, "b": 2, "c": 1}
    assert ran(run_id) == ["a 1", "b 1", "b 2", "c 1"], "what had completed did not run again"
    assert [event.node for event in lost] == ["b"]


async def test_a_wait_notices_the_death_of_the_owner(start: Start) -> None:
    child = await start(DRIVE)
    run_id = await line_of(child)
    await until_ran(run_id, "b 1")
    async with here() as dt:
        waiting = asyncio.create_task(dt.wait(run_id))
        with pytest.raises(Conflict):
            await dt.resume(run_id)
        await asyncio.sleep(0.2)
        await kill(child)
        await until_ran(run_id, "b 2")
        Path("go").touch()
        assert (await asyncio.wait_for(waiting, 30)).status == "COMPLETED"
    assert ran(run_id) == ["a 1", "b 1", "b 2", "c 1"]


DRIVE_BATCH = """
batch = await dt.batch("flow.json", [{}] * 5)
print(batch.batch_id, batch.runs[0].run_id, flush=True)
await dt.wait_batch(batch.batch_id)
"""


async def test_so_do_listeners_and_waiters_of_a_batch(start: Start) -> None:
    child = await start(DRIVE_BATCH)
    batch_id, run_id = (await line_of(child)).split()
    await until_ran(run_id, "b 1")
    async with here() as dt:
        listening = asyncio.create_task(types_of(dt, run_id))
        waiting = asyncio.create_task(dt.wait_batch(batch_id))
        await asyncio.sleep(0.2)
        await kill(child)
        Path("go").touch()
        batch = await asyncio.wait_for(waiting, 30)
        types = await asyncio.wait_for(listening, 30)
    assert batch.counts == {"COMPLETED": 5}
    assert types[-1] == "run.completed"
    for run in batch.runs:
        starts = Counter(line.split()[0] for line in ran(run.run_id))
        assert (starts["a"], starts["c"]) == (1, 1)
        assert starts["b"] <= 2


async def test_a_batch_is_unfinished_while_a_failed_run_has_a_lost_running_node(
    folder: Path, start: Start
) -> None:
    failing = chain("b", slow="b")
    failing["nodes"].append({"id": "no", "handler": "fail"})
    (folder / "flow.json").write_text(json.dumps(failing))
    child = await start(DRIVE_BATCH)
    batch_id, _ = (await line_of(child)).split()
    async with here() as dt:
        async with asyncio.timeout(30):
            while (await dt.get_batch(batch_id)).counts != {"FAILED": 5}:
                await asyncio.sleep(0.01)
        await kill(child)
        assert (await dt.get_batch(batch_id)).finished_at is None
        assert (await dt.wait_batch(batch_id, timeout=30)).finished_at is not None


async def types_of(dt: Dovetail, run_id: str) -> list[str]:
    return [event.type async for event in dt.events(run_id)]


async def test_an_at_most_once_node_is_not_started_again(folder: Path, start: Start) -> None:
    once = chain("a", "b", "c", slow="b", delivery="at_most_once")
    (folder / "flow.json").write_text(json.dumps(once))
    child = await start(DRIVE)
    run_id = await line_of(child)
    await until_ran(run_id, "b 1")
    await kill(child)
    Path("go").touch()
    async with here() as dt:
        run = await dt.wait(run_id, timeout=30)
        assert (run.status, run.nodes["b"].reason) == ("FAILED", "worker_lost")
        assert ran(run_id) == ["a 1", "b 1"]
        await dt.retry(run_id)
        assert (await dt.wait(run_id, timeout=30)).status == "COMPLETED"


async def test_a_killed_script_with_a_key_continues_when_it_is_run_again(
    start: Start,
) -> None:
    script = """
print("ready", flush=True)
run = await dt.run("flow.json", idempotency_key="nightly")
print(run.run_id, run.status, flush=True)
"""
    child = await start(script)
    await line_of(child)
    async with asyncio.timeout(30):
        while not Path("ran.txt").exists() or " b 1" not in Path("ran.txt").read_text():
            await asyncio.sleep(0.01)
    await kill(child)
    Path("go").touch()
    again = await start(script)
    assert await line_of(again) == "ready"
    run_id, status = (await line_of(again)).split()
    assert status == "COMPLETED"
    assert ran(run_id) == ["a 1", "b 1", "b 2", "c 1"]
    async with here() as dt:
        assert len(await dt.list_runs()) == 1


async def test_a_cancel_reaches_the_owning_process_immediately(start: Start) -> None:
    child = await start(DRIVE)
    run_id = await line_of(child)
    await until_ran(run_id, "b 1")
    async with here() as dt:
        assert (await dt.cancel(run_id)).status == "CANCELLED"
        assert await asyncio.wait_for(line_of(child), 8) == "CANCELLED"


async def test_events_of_another_process_arrive_live(start: Start) -> None:
    child = await start(DRIVE)
    run_id = await line_of(child)
    seen = []
    async with here() as dt:
        async for event in dt.events(run_id):
            seen.append((event.type, event.node))
            if seen[-1] == ("node.started", "b"):
                Path("go").touch()
    assert seen[-1] == ("run.completed", None)
    assert ran(run_id) == ["a 1", "b 1", "c 1"]


async def test_concurrent_processes_run_each_of_their_nodes_once(
    folder: Path, start: Start
) -> None:
    (folder / "flow.json").write_text(json.dumps(chain("a", "b", "c")))
    runs = """
runs = await asyncio.gather(*(dt.run("flow.json") for _ in range(30)))
print(*{run.status for run in runs}, flush=True)
"""
    children = [await start(runs) for _ in range(3)]
    async with here() as dt:
        own = await asyncio.gather(*(dt.run("flow.json") for _ in range(30)))
        assert {run.status for run in own} == {"COMPLETED"}
        assert [await line_of(child) for child in children] == ["COMPLETED"] * 3
        found = await dt.list_runs(limit=200)
    assert len(found) == 120
    for run in found:
        assert ran(run.run_id) == ["a 1", "b 1", "c 1"]


async def test_one_key_in_several_concurrent_processes_creates_one_run(
    folder: Path, start: Start
) -> None:
    (folder / "flow.json").write_text(json.dumps(chain("a")))
    script = """
run = await dt.run("flow.json", idempotency_key="nightly")
print(run.run_id, run.status, flush=True)
"""
    children = [await start(script) for _ in range(4)]
    reported = {await line_of(child) for child in children}
    assert len(reported) == 1
    run_id, status = reported.pop().split()
    assert (status, ran(run_id)) == ("COMPLETED", ["a 1"])


async def test_a_killed_process_leaves_nothing_that_blocks_a_new_run(start: Start) -> None:
    child = await start(DRIVE)
    run_id = await line_of(child)
    await until_ran(run_id, "b 1")
    await kill(child)
    async with here() as dt:
        assert (await dt.run(chain("x"), timeout=30)).status == "COMPLETED"
        assert (await dt.get_run(run_id)).status == "RUNNING"
        assert await dt.resume() == [run_id]
        Path("go").touch()
        assert (await dt.wait(run_id, timeout=30)).status == "COMPLETED"
