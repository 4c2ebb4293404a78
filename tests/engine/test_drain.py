"""A worker that is drained reports all that it has done, whatever it was at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.core.events import Token
from dovetail.core.transitions import Complete
from dovetail.engine.ports import Task
from dovetail.engine.worker import Worker
from dovetail.handlers.calls import RegistryCalls
from dovetail.handlers.registry import Registry, describe


def task(number: int, handler: str) -> Task:
    return Task("r", f"n{number}", Token(1, 1, number), handler, {}, {}, {}, 60.0)


class SlowTaskSource:
    """Gives its tasks at once, then none; the first report is slow."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = list(tasks)
        self.reporting = asyncio.Event()
        self.go_on = asyncio.Event()
        self.reported: list[str] = []
        self.given_back: list[str] = []

    async def take(self, limit: int) -> list[Task]:
        if not self._tasks:
            await asyncio.Event().wait()
        taken, self._tasks = self._tasks[:limit], self._tasks[limit:]
        return taken

    async def report(self, reports: Sequence[Any]) -> None:
        if not self.reporting.is_set():
            self.reporting.set()
            await self.go_on.wait()
        self.reported += [one.node for one in reports if isinstance(one, Complete)]

    async def slow(self, tag: str, until: float) -> None: ...

    async def give_back(self, tasks: list[Task]) -> None:
        self.given_back += [one.node_id for one in tasks]


async def at_once(config: dict[str, Any], ctx: Any) -> int:
    return 1


async def in_a_moment(config: dict[str, Any], ctx: Any) -> int:
    await asyncio.sleep(0)
    return 1


@pytest.mark.parametrize("handler", [at_once, in_a_moment])
async def test_a_result_that_is_being_reported_during_a_drain_is_not_lost(handler: Any) -> None:
    registry = Registry()
    registry.add(describe(handler, name="h"))
    crashes: list[BaseException] = []
    task_source = SlowTaskSource([task(1, "h")])
    worker = Worker(
        task_source, RegistryCalls(registry), lambda: 0.0, crashes.append, concurrency=4
    )
    worker.start()
    await task_source.reporting.wait()
    draining = asyncio.ensure_future(worker.drain(5, task_source.give_back))
    await asyncio.sleep(0.01)
    task_source.go_on.set()
    await draining
    assert task_source.reported == ["n1"]
    assert task_source.given_back == []
    await worker.close()
    assert crashes == []
