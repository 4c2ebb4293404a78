"""kill -9 at any moment, over and over: nothing is lost, nothing is stuck, nothing is unexplained.

`dovetail run` and `dovetail batch` are killed at random times, what goes on with them as well,
several at once on one file. DOVETAIL_KILLS says how often, DOVETAIL_SEED repeats what a failed
test has printed, as far as processes can.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.config import Settings
from dovetail.engine.commands import Commands
from dovetail.engine.ports import RunQuery
from dovetail.wiring.embedded import attached

from .side_file import check_executions, starts

KILLS = int(os.environ.get("DOVETAIL_KILLS", "12"))
LANES = 3
PATIENCE = 60.0

FLOW = """
name: flow
on_failure: continue
nodes:
  - {id: a, handler: step}
  - {id: b, handler: step}
  - {id: c, handler: step, dependencies: [a, b], config: {from: "{{ a.node }} {{ b.node }}"}}
  - {id: flaky, handler: step, dependencies: [a], config: {fails: true}, max_retries: 1,
     retry: {base_delay_seconds: 0.01}}
  - {id: paced, handler: step, dependencies: [b], resource_tag: slow}
  - {id: once, handler: step, dependencies: [c], delivery: at_most_once}
  - {id: d, handler: step, dependencies: [c, flaky, paced]}
"""
HANDLERS = """
import asyncio
import os

from dovetail import RetryableError, handler

SIDE = os.open("ran", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
open(f"loaded-{os.getpid()}", "w").close()


@handler
async def step(config, ctx):
    os.write(SIDE, f"{ctx.run_id} {ctx.node_id} {ctx.epoch} {ctx.attempt}\\n".encode())
    await asyncio.sleep(0.01)
    if config.get("fails") and ctx.attempt == 1:
        raise RetryableError("the first time it fails")
    return {"node": ctx.node_id}
"""
SMALL = """
name: small
nodes:
  - {id: a, handler: step}
  - {id: b, handler: step, dependencies: [a], config: {number: "{{ params.number }}"}}
"""
RUN = ["run", "flow.yaml", "--handlers", "mine.py"]
RESUME = ["runs", "resume", "--handlers", "mine.py"]
BATCH = ["batch", "small.yaml", "--items", "items.jsonl", "--handlers", "mine.py"]


@contextmanager
def chance() -> Iterator[random.Random]:
    seed = int(os.environ.get("DOVETAIL_SEED", random.randrange(1 << 32)))
    print(f"DOVETAIL_SEED={seed} DOVETAIL_KILLS={KILLS}")  # shown when the test fails
    yield random.Random(seed)


class Shell:
    """`dovetail` in a folder, where it can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kills = 0
        (folder / "mine.py").write_text(HANDLERS)
        (folder / "flow.yaml").write_text(FLOW)
        (folder / "small.yaml").write_text(SMALL)
        self.settings = Settings(db=folder / "runs.db")

    async def _start(self, args: list[str]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "dovetail", *args),
            cwd=self.folder,
            # A node that chance hits again and again is not one that kills its process.
            env={**os.environ, "DOVETAIL_DB": "runs.db", "DOVETAIL_MAX_CRASHES": "1000"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def kill(self, args: list[str], after: float) -> None:
        """Start a command and kill it so long after it has loaded the handlers."""
        process = await self._start(args)
        loaded = self.folder / f"loaded-{process.pid}"
        while not loaded.exists() and process.returncode is None:
            await asyncio.sleep(0.002)
        await asyncio.sleep(after)
        if process.returncode is None:
            process.kill()
        said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert b"Traceback" not in said, said.decode()
        self.kills += process.returncode == -9

    async def finish(self, args: list[str]) -> int:
        process = await self._start(args)
        said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert b"Traceback" not in said, said.decode()
        assert process.returncode in (0, 1), said.decode()
        return process.returncode or 0

    async def check_runs(self, commands: Commands) -> list[dict[str, Any]]:
        """Every run in the file has ended well, and so has every run that a handler has seen."""
        runs = []
        cursor = None
        while True:
            page = await commands.list_runs(RunQuery(limit=1000, cursor=cursor))
            runs += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        ran = (self.folder / "ran").read_text().splitlines()
        assert {line.split()[0] for line in ran} <= {run["run_id"] for run in runs}, "runs are lost"
        executions = starts_again = 0
        for run in runs:
            run_id = run["run_id"]
            assert run["finished_at"] is not None, f"run {run_id} is stuck"
            assert await commands.verify(run_id) == []
            nodes = (await commands.get_run(run_id))["nodes"]
            bad = [(one["id"], one["reason"]) for one in nodes if one["status"] != "COMPLETED"]
            assert bad in ([], [("once", "worker_lost")])
            assert run["status"] == ("FAILED" if bad else "COMPLETED")
            events = await commands.events(run_id)
            executed = starts(self.folder, run_id)
            check_executions(executed, events)
            executions += len(executed)
            # A start again is a retry, which only `flaky` has, or follows a lost one.
            lost = Counter(event["node"] for event in events if event["type"] == "node.lost")
            for node, times in Counter(node for node, _, _ in executed).items():
                assert times <= 1 + lost[node] + (node == "flaky")
            starts_again += lost.total()
        assert executions == len(ran)
        print(
            f"{self.kills} kills, {len(runs)} runs, {executions} executions: "
            f"{starts_again} starts were lost, 0 runs"
        )
        return runs


async def test_runs_survive_kill_9_at_any_moment(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    with chance() as random:

        async def lane() -> None:
            while shell.kills < KILLS:
                await shell.kill(RUN, random.uniform(0.0, 0.45))
                while shell.kills < KILLS and random.random() < 0.5:
                    await shell.kill(RESUME, random.uniform(0.0, 0.45))

        await asyncio.gather(*(lane() for _ in range(LANES)))
    await shell.finish(RESUME)
    async with attached(shell.settings) as commands:
        await shell.check_runs(commands)


async def test_a_batch_survives_kill_9_at_any_moment(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    # So many that hardly a process comes to the end of them before it is killed.
    items = 20 + 10 * KILLS
    lines = [json.dumps({"number": number}) for number in range(items)]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    with chance() as random:

        async def lane(key: str) -> None:
            command = [*BATCH, "--key", key]
            while shell.kills < KILLS:
                await shell.kill(command, random.uniform(0.0, 0.4))
            assert await shell.finish(command) == 0

        await asyncio.gather(lane("one"), lane("other"))
    async with attached(shell.settings) as commands:
        runs = await shell.check_runs(commands)
    numbers = Counter(run["params"]["number"] for run in runs)
    assert numbers == Counter(dict.fromkeys(range(items), 2))
