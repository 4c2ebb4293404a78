"""The floor: the least code that moves a graph over Redis Streams, to tell what an engine adds.

A worker reads up to 256 tasks, runs the no-op and tells all outputs in one call of a script, which
keeps each once, counts down what the children wait for, and adds the ready ones together with
their inputs. There is no orchestrator: the worker's call decides. And there is nothing else: no
lease, attempt, retry, time limit, condition, cancel, status, event or list of runs; nothing is ever
deleted, and who dies takes along what it had read. This module is also what its worker runs.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import redis.asyncio
import uvloop

from apart import Job
from fleet import services
from measuring import cpu_taken
from workloads import Outputs, Workload, compared, node

TASKS, ENDS, GROUP = "tasks", "ends", "workers"
AT_ONCE = 256
RUNS_AT_ONCE = 50
BLOCK_MILLISECONDS = 1000
COMPLETE = """
-- KEYS: tasks, ends. ARGV: run, node, output; and so on.
for at = 1, #ARGV, 3 do
  local run, name, output = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if redis.call('HSETNX', run .. ':outputs', name, output) == 1 then
    for child in string.gmatch(redis.call('HGET', run .. ':children', name) or '', '%S+') do
      if redis.call('HINCRBY', run .. ':waiting', child, -1) == 0 then
        local inputs, parents = {}, {}
        for parent in string.gmatch(redis.call('HGET', run .. ':parents', child), '%S+') do
          parents[#parents + 1] = parent
        end
        for from = 1, #parents, 1000 do
          local some = {unpack(parents, from, math.min(from + 999, #parents))}
          for _, input in ipairs(redis.call('HMGET', run .. ':outputs', unpack(some))) do
            inputs[#inputs + 1] = input
          end
        end
        local given = '[' .. table.concat(inputs, ',') .. ']'
        redis.call('XADD', KEYS[1], '*', 'run', run, 'node', child, 'inputs', given)
      end
    end
    if redis.call('HINCRBY', run .. ':waiting', '', -1) == 0 then
      redis.call('XADD', KEYS[2], '*', 'run', run)
    end
  end
end
"""


def connected() -> Any:
    return redis.asyncio.Redis.from_url(os.environ["BENCH_REDIS_URL"])


async def work_on() -> None:
    async with connected() as server:
        complete = await server.script_load(COMPLETE)
        while True:
            found = await server.xreadgroup(
                GROUP, "w", {TASKS: ">"}, count=AT_ONCE, block=BLOCK_MILLISECONDS
            )
            for _, messages in found:
                reported: list[Any] = []
                for _, task in messages:
                    output = node(*json.loads(task[b"inputs"]))
                    reported += task[b"run"], task[b"node"], json.dumps(output)
                async with server.pipeline(transaction=False) as calls:
                    calls.evalsha(complete, 2, TASKS, ENDS, *reported)
                    calls.xack(TASKS, GROUP, *[number for number, _ in messages])
                    await calls.execute()


@contextmanager
def opened(works: Iterable[Workload]) -> Iterator[Job]:
    with ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop)).get_loop()
        server = connected()
        loop.run_until_complete(server.xgroup_create(TASKS, GROUP, mkstream=True))
        stack.callback(lambda: loop.run_until_complete(server.aclose()))
        pids = stack.enter_context(services(worker=[["-m", "redis_floor"]]))
        numbers = count()

        def execute(work: Workload) -> Outputs:
            runs = [f"run:{next(numbers)}" for _ in range(work.runs)]
            return loop.run_until_complete(executed(server, work, runs))

        calls = {work.name: cpu_taken(compared(work, partial(execute, work))) for work in works}
        yield Job({"pids": pids}, calls)


async def executed(server: Any, work: Workload, runs: list[str]) -> Outputs:
    children: dict[str, list[str]] = {}
    for name, parents in work.graph.items():
        for parent in parents:
            children.setdefault(parent, []).append(name)
    last = await server.xrevrange(ENDS, count=1)
    ended = last[0][0] if last else "0"
    for begin in range(0, len(runs), RUNS_AT_ONCE):
        async with server.pipeline(transaction=False) as calls:
            for run in runs[begin : begin + RUNS_AT_ONCE]:
                submit(calls, run, work.graph, children)
            await calls.execute()
    left = len(runs)
    while left:
        for _, messages in await server.xread({ENDS: ended}, block=BLOCK_MILLISECONDS):
            left -= len(messages)
            ended = messages[-1][0]
    async with server.pipeline(transaction=False) as calls:
        for run in runs:
            calls.hmget(f"{run}:outputs", work.exits)
        return [json.loads(output) for some in await calls.execute() for output in some]


def submit(calls: Any, run: str, graph: dict[str, list[str]], children: dict[str, Any]) -> None:
    joined = {name: " ".join(those) for name, those in graph.items() if those}
    if joined:
        calls.hset(f"{run}:parents", mapping=joined)
        calls.hset(f"{run}:children", mapping={n: " ".join(c) for n, c in children.items()})
    waiting = {name: len(those) for name, those in graph.items() if those}
    calls.hset(f"{run}:waiting", mapping={"": len(graph), **waiting})
    for name, those in graph.items():
        if not those:
            calls.xadd(TASKS, {"run": run, "node": name, "inputs": "[]"})


if __name__ == "__main__":
    uvloop.run(work_on())
