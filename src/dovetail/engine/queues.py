"""The nodes that wait for a worker or a rate limit, and the nodes that run, of all running runs.

They are read from the runs themselves, within bounds: the reply says how many runs were read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from dovetail.core.errors import BrokenRun, NotFound
from dovetail.core.outputs import ONLY_SIZES
from dovetail.core.states import RunStatus
from dovetail.engine.api import ServedEngine
from dovetail.engine.ports import RunQuery
from dovetail.engine.views import RunWork, run_work, timestamp

PAGE = 200
RUNS_AT_ONCE = 20
MAX_RUNNING = 500
LOOK_SECONDS = 1.0


class QueueInspector(Protocol):
    """The workers, and how many tasks wait in the transport."""

    async def workers(self, *, with_schemas: bool = False) -> list[dict[str, Any]]:
        """In the fields of `GET /workers`, the dead ones that are still remembered included."""
        ...

    async def waiting(self, running: Mapping[str, int]) -> Mapping[str, int]:
        """How many nodes wait for a worker, by handler; every known handler is there.

        `running` is how many nodes of each handler run: a queue may hold these until they end.
        """
        ...


async def read_queues(commands: ServedEngine, inspector: QueueInspector | None) -> dict[str, Any]:
    """In the fields of `GET /queues`. Without an inspector, as for a file that other processes
    drive, what waits is counted in the runs, and the process of a run is the worker of its nodes.
    """
    look = _Look(commands, with_owners=inspector is None)
    await look.at_runs()
    waiting: Mapping[str, int] = look.waiting
    serving = look.serving
    if inspector is not None:
        alive = [one for one in await inspector.workers() if one["alive"]]
        serving = Counter(name for worker in alive for name in worker["handlers"])
        held = await inspector.waiting(Counter(one["handler"] for one in look.running))
        # A transport cannot tell which of the tasks that it holds were started.
        waiting = {name: look.waiting[name] for name in held} if look.complete else held
    return {
        "items": [
            {"handler": name, "waiting": count, "workers": serving[name]}
            for name, count in sorted(waiting.items())
        ],
        "parked": [
            {
                **await commands.rate_limit(tag),
                "nodes": len(times),
                "next_at": timestamp(min(times)),
            }
            for tag, times in sorted(look.parked.items())
        ],
        "running": look.running[:MAX_RUNNING],
        "complete": look.complete,
        "looked_at": look.runs,
    }


class _Look:
    def __init__(self, commands: ServedEngine, *, with_owners: bool) -> None:
        self._commands = commands
        self._with_owners = with_owners
        self.runs = 0
        self.complete = False
        self.running: list[dict[str, Any]] = []
        self.parked: dict[str, list[float]] = {}
        self.waiting: Counter[str] = Counter()
        self.serving: Counter[str] = Counter()
        """By handler: 1 if a process drives a run that waits for it."""

    async def at_runs(self) -> None:
        """The newest first, page by page, until all were looked at or a bound is reached."""
        until = time.monotonic() + LOOK_SECONDS
        cursor = None
        while True:
            query = RunQuery(status=RunStatus.RUNNING.value, limit=PAGE, cursor=cursor)
            page = await self._commands.list_runs(query)
            ids = [item["run_id"] for item in page["items"]]
            for first in range(0, len(ids), RUNS_AT_ONCE):
                if len(self.running) >= MAX_RUNNING or time.monotonic() > until:
                    return
                part = ids[first : first + RUNS_AT_ONCE]
                for work in await asyncio.gather(*map(self._work, part)):
                    self._add(work)
                self.runs += len(part)
                await asyncio.sleep(0)  # others get their turn, also where reading does not wait
            cursor = page["next_cursor"]
            if cursor is None:
                self.complete = len(self.running) <= MAX_RUNNING
                return

    async def _work(self, run_id: str) -> tuple[RunWork, bool]:
        """The work of a run, and whether a process drives it."""
        try:
            work = run_work(await self._commands.load_run(run_id, ONLY_SIZES))
        except (NotFound, BrokenRun):  # deleted meanwhile, or damaged: its own page says so
            return RunWork([], [], []), False
        driven = self._with_owners and await self._commands.owner(run_id) in ("here", "elsewhere")
        return work, driven

    def _add(self, found: tuple[RunWork, bool]) -> None:
        work, is_driven = found
        self.running += work.running
        self.waiting.update(work.waiting)
        for tag, at in work.parked:
            self.parked.setdefault(tag, []).append(at)
        if is_driven:
            self.serving |= Counter(set(work.waiting))
