"""A blocking worker and its lease thread have a connection each.

Lines of a log, and the result behind them, stay in order all the same.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from dovetail.core.events import Token
from dovetail.core.node_logs import LogChunk
from dovetail.core.transitions import Complete
from dovetail.engine.blocking_worker import BlockingWorker, LeaseThread, LeaseThreadTasks
from dovetail.engine.ports import Result, Task
from dovetail.handlers.calls import RegistryCalls
from dovetail.handlers.log_capture import LogRules, capturing
from dovetail.handlers.registry import Registry, describe

from .harness import PATIENCE

RULES = LogRules()


class Connection:
    """What was written over one connection, in order."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.has_lines = threading.Event()

    def log(self, chunks: Sequence[LogChunk]) -> None:
        self.written += [line.message for chunk in chunks for line in chunk.lines]
        self.has_lines.set()

    def send(self, result: Result) -> None:
        self.written.append("result")

    async def report(self, results: Sequence[Result]) -> None:
        await asyncio.sleep(0)
        self.written += ["result" for _ in results]

    # ── what else a lease thread asks ────────────────────────────────────────────────────

    async def renew(self, tasks: Sequence[Task]) -> list[Any]:
        return []

    async def open(self) -> None: ...

    async def next(self) -> list[Any]:
        await asyncio.sleep(PATIENCE)
        return []


class Setup:
    def __init__(self) -> None:
        self.thread = Connection()
        """Of the lease thread."""
        self.own = Connection()
        """Of the worker."""
        self.registry = Registry()

    def run(self, handler: Callable[[dict[str, Any], Any], Any]) -> Result | None:
        self.registry.add(describe(handler))
        watch = LeaseThread(
            self._duties,
            _once,
            lambda error: None,
            lease_seconds=60,
            give_back_at=lambda: math.inf,
            confirm=lambda: None,
        )
        calls = RegistryCalls(self.registry, log_rules=RULES)
        worker = BlockingWorker(calls, watch, lambda: 0.0, log=self.own.log)
        task = Task("r", "a", Token(1, 1, 1), handler.__name__, {}, {}, {}, 60.0)
        return worker.run(task, self.own.send)

    @asynccontextmanager
    async def _duties(self) -> AsyncIterator[LeaseThreadTasks]:
        yield LeaseThreadTasks(cast(Any, self.thread), cast(Any, self.thread))


async def _once(name: str, duty: Callable[[], Awaitable[None]]) -> None:
    await duty()


@pytest.fixture
def setup() -> Iterator[Setup]:
    with capturing(RULES):
        yield Setup()


def test_lines_and_the_result_of_a_short_handler_travel_on_its_own_connection(
    setup: Setup,
) -> None:
    def short(config: dict[str, Any], ctx: Any) -> None:
        ctx.log.info("one")
        ctx.log.info("two")

    assert isinstance(setup.run(short), Complete)
    assert setup.own.written == ["one", "two", "result"]
    assert setup.thread.written == []


@pytest.mark.parametrize("last", [["two"], []], ids=["more lines", "no more lines"])
def test_behind_lines_that_the_lease_thread_has_sent_everything_follows_on_its_connection(
    setup: Setup, last: list[str]
) -> None:
    def long(config: dict[str, Any], ctx: Any) -> None:
        ctx.log.info("one")
        assert setup.thread.has_lines.wait(PATIENCE)
        for word in last:
            ctx.log.info(word)

    assert isinstance(setup.run(long), Complete)
    assert setup.thread.written == ["one", *last, "result"]
    assert setup.own.written == []
