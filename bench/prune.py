"""Prunes many runs from an embedded file while runs are triggered.

Prints the size of the file before and after, how long the prune took, and how long a trigger took
at most meanwhile. The prune is a process of its own, as `dovetail runs prune` is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from dovetail.config import Settings
from dovetail.handlers.builtin import builtin_registry
from dovetail.stores.sqlite.file import SqliteFile, statements
from dovetail.stores.sqlite.writer import piece
from dovetail.wiring.embedded import embedded

FLOW = {"name": "meanwhile", "nodes": [{"id": "a", "handler": "output"}]}
PAUSE_SECONDS = 0.02


def fill(path: Path, count: int, output_bytes: int) -> None:
    """So many finished runs with an output each, written by SQL."""
    file = SqliteFile(path, "normal")
    file.create()
    connection = file.connect()
    sql = statements()
    ended = time.time() - 100.0
    content = orjson.dumps({"name": "old", "nodes": [{"id": "a", "handler": "output"}]})
    text = orjson.dumps("x" * output_bytes)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(sql["add_definition"], ("digest", content))
    for number in range(count):
        row = connection.execute(
            sql["add_run"],
            (
                *(f"{number:032x}", "old", None, 1, b"{}", b"{}", None, None, ended, None),
                *("COMPLETED", 1, ended, ended, None, text),
            ),
        )
        connection.execute(sql["add_entries"], (piece(row.lastrowid or 0, 0), 1, text))
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*"))


async def measure(path: Path) -> tuple[float, list[float]]:
    settings = Settings(db=path)
    latencies: list[float] = []
    async with embedded(settings, builtin_registry(settings)) as commands:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dovetail", "runs", "prune", "--embedded"),
            *("--older-than", "50s", "--workflow", "old"),
            env={"DOVETAIL_DB": str(path)},
        )
        while process.returncode is None:
            asked = time.perf_counter()
            await commands.trigger(FLOW)
            latencies.append(time.perf_counter() - asked)
            await asyncio.sleep(PAUSE_SECONDS)
        return time.perf_counter() - began, latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--output-bytes", type=int, default=1000)
    given = parser.parse_args()
    with TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "runs.db"
        fill(path, given.runs, given.output_bytes)
        before = size(path)
        took, latencies = asyncio.run(measure(path))
        latencies.sort()
        print(f"file before      {before:>14,} bytes, {given.runs:,} runs")
        print(f"file after       {size(path):>14,} bytes, with {len(latencies):,} new runs")
        print(f"prune            {took:>14.1f} s")
        print(f"trigger, median  {latencies[len(latencies) // 2] * 1e3:>14.1f} ms")
        print(f"trigger, longest {latencies[-1] * 1e3:>14.1f} ms")


if __name__ == "__main__":
    main()
