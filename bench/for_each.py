"""Items of a mapped node beside the nodes of a static fan, on the embedded engine.

    .venv/bin/python bench/for_each.py [--items 1000] [--long 100000] [--rounds 3]

Prints the items (or nodes) a second of wall time, and the CPU time for one. The best of some rounds
counts: other programs may run beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from dovetail import Dovetail
from dovetail.handlers.registry import handler


@handler("noop")
async def noop(config: dict[str, Any], ctx: Any) -> int:
    return 1


class Taken(NamedTuple):
    wall: float
    cpu: float


def fan(size: int) -> dict[str, Any]:
    names = [f"n{i}" for i in range(size)]
    nodes = [{"id": name, "handler": "noop", "config": {"x": i}} for i, name in enumerate(names)]
    return {
        "name": "fan",
        "nodes": [*nodes, {"id": "join", "handler": "noop", "dependencies": names}],
    }


def mapped(size: int) -> dict[str, Any]:
    each = {"id": "each", "handler": "noop", "for_each": "{{ params.list }}"}
    each["config"] = {"x": "{{ item }}"}
    join = {"id": "join", "handler": "noop", "dependencies": ["each"]}
    return {"name": "mapped", "nodes": [each, join]}


async def measure(flow: dict[str, Any], params: dict[str, Any]) -> Taken:
    with tempfile.TemporaryDirectory() as folder:
        async with Dovetail(str(Path(folder) / "runs.db"), handlers=[noop], concurrency=32) as dt:
            await dt.run(mapped(2), {"list": [1, 2]})
            began, cpu = time.perf_counter(), time.process_time()
            run = await dt.run(flow, params)
            taken = Taken(time.perf_counter() - began, time.process_time() - cpu)
            if run.status != "COMPLETED":
                raise SystemExit(f"the run is {run.status}: {run.error}")
            return taken


async def best(rounds: int, flow: dict[str, Any], params: dict[str, Any]) -> Taken:
    found = [await measure(flow, params) for _ in range(rounds)]
    return Taken(min(one.wall for one in found), min(one.cpu for one in found))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    size = asked.items
    static = await best(asked.rounds, fan(size), {})
    short = await best(asked.rounds, mapped(size), {"list": list(range(size))})
    show(f"static fan of {size:,} nodes", size, static)
    show(f"map of {size:,} items", size, short)
    print(f"map : fan = {static.wall / short.wall:.2f} (wall), {static.cpu / short.cpu:.2f} (CPU)")
    if asked.long:
        long = await measure(mapped(asked.long), {"list": list(range(asked.long))})
        show(f"map of {asked.long:,} items", asked.long, long)
        price = long.cpu / asked.long / (short.cpu / size)
        print(f"an item of {asked.long:,} costs {price:.2f} times one of {size:,} (CPU)")


def show(what: str, size: int, taken: Taken) -> None:
    print(f"{what:32} {size / taken.wall:9,.0f}/s   {taken.cpu / size * 1e6:6.0f} µs CPU each")


if __name__ == "__main__":
    asyncio.run(main())
