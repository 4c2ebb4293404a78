"""What was begun by a dead process, and how another goes on with it: the stage of both suites.

No process is killed: what the dead one had done is done by hand, what it had not is left undone,
and another one's duties are called. So each point is met exactly, every time; that processes really
die is for the fault tests.
"""

from __future__ import annotations

from typing import Any, cast

from dovetail.core.dag import Graph
from dovetail.core.run import RunState
from dovetail.core.transitions import Complete, Submit
from dovetail.engine.distributed.task_source import QueueTaskSource
from dovetail.engine.ports import Task
from dovetail.stores.redis.timers import ACTIVE, LEASES
from dovetail.transports.messages import read_task, stream_of
from dovetail.wiring.distributed import ServiceParts

from ..core.walk import graph

LONGEST_LEASE = 60.0
LEASE = 0.05
LONG_AGO = 1.0
FLOW = graph({"a": [], "b": ["a"], "c": ["a", "b"]}, a={"max_retries": 1})
CONDITIONAL = graph({"a": [], "b": ["a"]}, b={"condition": "{{ a == 1 }}"})


class InterruptedRun:
    """A run, what the dead one still does to it, and who goes on."""

    def __init__(self, parts: ServiceParts) -> None:
        self.parts = parts
        self.living = parts.orchestrator
        self.store = parts.store
        self.store.ahead = None  # what is sent is sent by who follows, or was not sent
        self.timers = parts.orchestrator.timers

    async def tasks(self) -> list[Task]:
        """What lies in the stream of tasks, taken out of it."""
        found = await self.parts.pipe.call("XRANGE", stream_of("h"), "-", "+")
        if found:
            await self.parts.pipe.call("XDEL", stream_of("h"), *[number for number, _ in found])
        return [read_task(fields) for _, fields in found]

    async def submit(self, flow: Graph = FLOW) -> Task:
        await self.living.submit(Submit("r", flow, {}))
        (task,) = await self.tasks()
        return task

    async def claim(self, task: Task, lease: float = LONGEST_LEASE) -> None:
        now = self.parts.clock()
        await self.timers.lease([task.run_id], now + lease)
        assert await self.store.claim([task], "w", now + lease, now) == [True]

    async def renew(self, task: Task, lease: float) -> None:
        task_source = QueueTaskSource(
            *(cast(Any, None), self.store, self.timers, cast(Any, None), self.parts.clock),
            self.living.apply,
            worker_id="w",
            lease_seconds=lease,
        )
        assert await task_source.renew([task]) == []

    async def listed(self) -> dict[str, float]:
        """Runs on the list of leases, and when each is looked at."""
        found = await self.parts.pipe.call("ZRANGE", LEASES, 0, -1, "WITHSCORES")
        return {
            run_id.decode(): float(at) for run_id, at in zip(found[::2], found[1::2], strict=True)
        }

    async def is_forgotten(self) -> None:
        """The run was silent for long: the next sweep looks after it."""
        await self.parts.pipe.call("ZADD", ACTIVE, LONG_AGO, "r")
        await self.living.sweep()

    async def drive(self) -> RunState:
        """Run whatever is published; a run of which nothing is published is stuck."""
        while not (run := await self.store.load("r")).finished:
            await self.living.wake_due()
            tasks = await self.tasks()
            assert tasks, f"no process knows how to go on: {run.snapshot()}"
            for task in tasks:
                now = self.parts.clock()
                if (await self.store.claim([task], "w", now + 60, now)) == [True]:
                    await self.living.apply_results([Complete("r", task.node_id, task.token, 1)])
        return run
