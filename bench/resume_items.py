"""A mapped node in the embedded file: killed in the middle, resumed, and its items read in pages.

    .venv/bin/python bench/resume_items.py [--items 100000]

A process runs the items and kills itself with SIGKILL after three quarters of them. Prints how long
a new process takes from `resume` to the start of the next item, and how long a process that does
not drive the run takes for the first page of items and for the next pages, before and after the end
of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dovetail import Dovetail
from dovetail.config import Settings
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import handler
from dovetail.wiring.embedded import attached
from for_each import mapped

started = 0
on_start: Callable[[], None] = lambda: None  # noqa: E731


@handler("noop")
async def noop(config: dict[str, Any], ctx: Any) -> int:
    global started
    started += 1
    on_start()
    return 1


async def die(db: Path, items: int) -> None:
    """Run three quarters of the items, and end as by kill -9."""
    global on_start

    def count() -> None:
        if started == items * 3 // 4:
            os.kill(os.getpid(), signal.SIGKILL)

    on_start = count
    async with Dovetail(db, handlers=[noop], concurrency=32) as dt:
        await dt.run(*mapped(items))


@asynccontextmanager
async def timed(what: str) -> AsyncIterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what:44} {wall:7.3f} s   {cpu:7.3f} s CPU")


async def read_pages(reader: Commands, run_id: str, items: int, when: str) -> None:
    for what, cursor in (
        ("first page", 0),
        ("next page", 50),
        ("a page in the middle", items // 2),
    ):
        async with timed(f"{what}, {when}"):
            await reader.node_items(run_id, "each", cursor=str(cursor))


async def resume(db: Path, items: int) -> None:
    global on_start
    going_on = asyncio.Event()
    on_start = going_on.set
    async with attached(Settings(db=db)) as reader:
        run_id = (await reader.list_runs())["items"][0]["run_id"]
        await read_pages(reader, run_id, items, "not finished")
        async with Dovetail(db, handlers=[noop], concurrency=32) as dt:
            async with timed("from `resume` to the next start"):
                await dt.resume(run_id)
                await going_on.wait()
            run = await dt.wait(run_id)
            print(f"{run.status}: {started:,} of {items:,} items were started after the kill")
            async with timed("a page in the process that drove it"):
                await dt.items(run_id, "each")
        await read_pages(reader, run_id, items, "the reader goes on")
    async with attached(Settings(db=db)) as reader:
        await read_pages(reader, run_id, items, "a new reader")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--die", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.die is not None:
        asyncio.run(die(asked.die, asked.items))
        return
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "runs.db"
        words = [sys.executable, __file__, "--items", str(asked.items), "--die", str(db)]
        if subprocess.run(words, check=False).returncode != -signal.SIGKILL:
            raise SystemExit("the first process ended in another way")
        asyncio.run(resume(db, asked.items))


if __name__ == "__main__":
    main()
