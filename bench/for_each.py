"""Items of a mapped node beside the nodes of a static fan.

    .venv/bin/python bench/for_each.py [--items 1000] [--long 100000] [--rounds 3]
    .venv/bin/python bench/for_each.py --redis [--window 100] [--kill]

On the embedded engine, or with `--redis` over a private Redis, with one orchestrator and one
worker. Fan and map run in turns. Prints the items (or nodes) a second of wall time, and the CPU
time of each. The ratios are medians of the rounds, because other programs may run at the same time.
`--kill` kills the orchestrator in the middle of the long list, and prints after how many seconds
another orchestrator continues.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import workloads
from dovetail import Dovetail
from fleet import Pids, private_redis, services, used
from noop_handler import noop
from redis_contestants import ORCHESTRATOR, WORKER, registered


class Taken(NamedTuple):
    wall: float
    cpu: Mapping[str, float]
    """Seconds, by kind of process."""

    @property
    def all_cpu(self) -> float:
        return sum(self.cpu.values())


Work = tuple[dict[str, Any], dict[str, Any]]
"""A definition, and the params of its run."""


LONG = 10_000


def fan(size: int) -> Work:
    """As the other benches have it: a root, nodes that read its output, and a join of them all."""
    return workloads.definition(workloads.fan(size)), {}


def mapped(size: int, window: int = 100) -> Work:
    """The same with items instead of nodes. The outputs of a long list do not fit into a config."""
    for_each = {"items": "{{ params.list }}", "max_concurrency": window}
    each = _node("each", [{"n": "{{ item }}"}], dependencies=["root"], for_each=for_each)
    of: Any = "{{ each }}" if size < LONG else []
    nodes = [_node("root", []), each, _node("join", of, dependencies=["each"])]
    return {"name": f"mapped{window}", "nodes": nodes}, {"list": list(range(size))}


def _node(name: str, of: Any, **fields: Any) -> dict[str, Any]:
    return {"id": name, "handler": "noop", "config": {"of": of}, **fields}


Measure = Callable[[Work], Awaitable[Taken]]


async def embedded(work: Work) -> Taken:
    flow, params = work
    with tempfile.TemporaryDirectory() as folder:
        async with Dovetail(str(Path(folder) / "runs.db"), handlers=[noop], concurrency=32) as dt:
            await dt.run(*mapped(2))
            began, cpu = time.perf_counter(), time.process_time()
            run = await dt.run(flow, params)
            taken = Taken(time.perf_counter() - began, {"all": time.process_time() - cpu})
            if run.status != "COMPLETED":
                raise SystemExit(f"the run is {run.status}: {run.error}")
            return taken


async def compare(measure: Measure, asked: argparse.Namespace, warmup: float = 0.0) -> None:
    size = asked.items
    works = {"static fan": fan(size), "map": mapped(size, asked.window)}
    times: dict[str, list[Taken]] = {name: [] for name in works}
    await measure(works["map"])
    if warmup:
        until = time.monotonic() + warmup
        while time.monotonic() < until:
            await measure(works["map"])
            await asyncio.sleep(warmup / 10)
    for number in range(asked.rounds):
        for name in sorted(works, reverse=bool(number % 2)):
            times[name].append(await measure(works[name]))
    for name, found in times.items():
        show(f"{name} of {size:,}", size, found)
    both = list(zip(times["static fan"], times["map"], strict=True))
    wall = statistics.median(one.wall / other.wall for one, other in both)
    cpu = statistics.median(one.all_cpu / other.all_cpu for one, other in both)
    print(f"map : fan = {wall:.2f} (wall), {cpu:.2f} (CPU)")
    if asked.long:
        long = await measure(mapped(asked.long, asked.window))
        show(f"map of {asked.long:,}", asked.long, [long])
        short = statistics.median(one.all_cpu for one in times["map"]) / size
        price = long.all_cpu / asked.long / short
        print(f"an item of {asked.long:,} costs {price:.2f} times one of {size:,} (CPU)")


def show(what: str, size: int, found: list[Taken]) -> None:
    wall = statistics.median(one.wall for one in found)
    cpu = {kind: statistics.median(one.cpu[kind] for one in found) for kind in found[0].cpu}
    each = "  ".join(f"{kind} {spent / size * 1e6:.0f}" for kind, spent in cpu.items())
    print(f"{what:24} {size / wall:9,.0f}/s   µs CPU each: {each}", flush=True)


# --- over Redis --------------------------------------------------------------------------------


WARMUP_SECONDS = 12.0
"""After this an orchestrator knows that the handler is quick, and packs its tasks."""


class Fleet:
    """One orchestrator and one worker on a Redis of their own."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.redis = stack.enter_context(private_redis())
        self.commands: Any = None
        self.pids: Pids = {}
        self._last = ""
        worker = [*WORKER, "--concurrency", "128"]
        self.pids |= self._start(orchestrator=[ORCHESTRATOR], worker=[worker])

    def _start(self, **kinds: Any) -> Pids:
        environment = {"DOVETAIL_REDIS_URL": self.redis.url, "DOVETAIL_DATABASE_URL": ""}
        started = services(environment=environment | {"DOVETAIL_TRANSPORT": "streams"}, **kinds)
        return self._stack.enter_context(started)

    async def measure(self, work: Work) -> Taken:
        flow, params = work
        await registered(self.commands, flow)
        before, began = used(self.redis, self.pids), time.perf_counter()
        run_id = (await self.commands.trigger(flow["name"], params)).run_id
        await self.commands.ended(run_id)
        wall = time.perf_counter() - began
        taken = Taken(wall, (used(self.redis, self.pids) - before).cpu)
        found = await self.commands.get_run(run_id, nodes=False)
        if found["status"] != "COMPLETED":
            raise SystemExit(f"the run is {found['status']}: {found['error']}")
        self._last = run_id
        return taken

    def bytes_per_item(self) -> float:
        """The bytes of each item of the last run in Redis, with its events, without its output."""
        own = f"wf:{{{self._last}}}:"
        parts = ("items", "events", "maps", "queue")
        used = [self.redis.ask("MEMORY", "USAGE", own + part, "SAMPLES", "0") for part in parts]
        counts = self.redis.ask("HGET", own + "maps", "1").split("|")
        return (sum(int(one or 0) for one in used) - int(counts[-1])) / int(counts[0])

    def memory(self) -> dict[str, float]:
        """The MiB that the services occupy."""
        found = {}
        for kind, (pid, *_) in self.pids.items():
            status = Path(f"/proc/{pid}/status").read_text()
            found[kind] = int(status.split("VmRSS:")[1].split()[0]) / 1024
        return found

    async def kill_orchestrator(self, size: int) -> None:
        """Kill it in the middle of a list, and print after how many seconds another continues."""
        flow, params = mapped(size)
        await registered(self.commands, flow)
        run_id = (await self.commands.trigger(flow["name"], params)).run_id
        self._wait_for(run_id, size // 3)
        os.kill(self.pids["orchestrator"][0], signal.SIGKILL)
        died = time.perf_counter()
        self.pids |= self._start(orchestrator=[ORCHESTRATOR])
        done = self._completed(run_id)
        self._wait_for(run_id, done + 200)
        later = time.perf_counter() - died
        print(f"killed at {done:,} of {size:,} items; another one went on {later:.2f} s later")
        await self.commands.ended(run_id)
        found = await self.commands.get_run(run_id, nodes=False)
        print(f"the run is {found['status']} {time.perf_counter() - died:.1f} s later")

    def _wait_for(self, run_id: str, wanted: int) -> None:
        while self._completed(run_id) < wanted:
            time.sleep(0.02)

    def _completed(self, run_id: str) -> int:
        return int(self.redis.ask("HLEN", f"wf:{{{run_id}}}:items"))


async def over_redis(asked: argparse.Namespace) -> None:
    from dovetail.config import Settings
    from dovetail.wiring.distributed import commanding

    with ExitStack() as stack:
        fleet = Fleet(stack)
        settings = Settings(redis_url=fleet.redis.url, database_url=None, transport="streams")
        async with commanding(settings) as fleet.commands:
            print(f"{fleet.redis.url} redis {fleet.redis.pid}", fleet.pids, flush=True)
            print("MiB:", _rounded(fleet.memory()))
            await compare(fleet.measure, asked, WARMUP_SECONDS)
            print("MiB:", _rounded(fleet.memory()))
            if asked.long:  # else the last run may be the fan
                print(f"bytes of Redis for each item: {fleet.bytes_per_item():.0f}")
            if asked.kill:
                await fleet.kill_orchestrator(asked.long)


def _rounded(found: Mapping[str, float]) -> dict[str, int]:
    return {kind: round(value) for kind, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--redis", action="store_true")
    parser.add_argument("--kill", action="store_true")
    asked = parser.parse_args()
    asyncio.run(over_redis(asked) if asked.redis else compare(embedded, asked))


if __name__ == "__main__":
    main()
