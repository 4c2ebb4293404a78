"""What a worker over a queue holds: from its claim until its result has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dovetail.core.errors import StoreError
from dovetail.core.events import Token
from dovetail.core.transitions import NOTHING, Complete, Fail
from dovetail.engine.distributed import task_source
from dovetail.engine.distributed.task_source import QueueTaskSource
from dovetail.engine.lease_keeper import HeldStarts
from dovetail.engine.ports import Result, Task


def task(name: str, source: Any = {}) -> Task:  # noqa: B006
    return Task("r", name, Token(1, 1, 1), "h", {}, {}, source, 300.0, place=0)


class RecordingParts:
    """Inbox, store and agenda at once; what it is asked while something waits is noted."""

    has_more = False

    def __init__(self) -> None:
        self.held = HeldStarts()
        self.during: list[tuple[str, list[str]]] = []
        self.away = 0
        self.refused: set[str] = set()
        self.task_source = QueueTaskSource(
            *(self, self, self, self),  # type: ignore[arg-type]
            lambda: 100.0,
            self.follow,
            worker_id="w",
            lease_seconds=10.0,
            held=self.held,
        )

    def names(self) -> list[str]:
        return [one.node_id for one in self.held.tasks()]

    def note(self, what: str) -> None:
        self.during.append((what, self.names()))

    async def lease(self, run_ids: Any, until: float) -> None: ...

    async def claim(self, tasks: Sequence[Task], *_: Any) -> list[bool]:
        return [one.node_id not in self.refused for one in tasks]

    async def acknowledge(self, messages: Any) -> None:
        self.note("acknowledge")

    async def send(self, results: Sequence[Result]) -> None:
        self.note("send")
        if self.away:
            self.away -= 1
            raise StoreError("away")

    async def apply(self, moves: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        return [NOTHING] * len(moves)

    async def follow(self, moves: Sequence[Any]) -> None:
        self.note("reap")


async def test_a_granted_start_is_held_before_anything_else_happens() -> None:
    it = RecordingParts()
    it.refused = {"other"}
    await it.task_source.start([(None, task("mine", None)), (None, task("other"))])
    assert it.during == [("acknowledge", ["mine"])]


async def test_an_undelivered_result_is_held(monkeypatch: Any) -> None:
    monkeypatch.setattr(task_source, "PAUSE_SECONDS", 0)
    it = RecordingParts()
    await it.task_source.start([(None, task(name)) for name in "abc"])
    it.away = 2
    reported = [
        Complete("r", "a", Token(1, 1, 1), None),
        Fail("r", "b", Token(1, 1, 1), {"type": "x", "message": "y"}),
    ]
    await asyncio.wait_for(it.task_source.report(reported), 10)
    assert it.during[1:] == [("send", ["a", "b", "c"])] * 3
    assert it.names() == ["c"]


async def test_a_start_that_is_handed_back_is_released_before_it_is_reaped() -> None:
    it = RecordingParts()
    await it.task_source.start([(None, task(name)) for name in "ab"])
    await it.task_source.hand_back([task("a")])
    assert it.during[-1] == ("reap", ["b"])
