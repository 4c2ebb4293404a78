"""Runs in the memory of this process: the core itself, behind the store's port.

It survives nothing, which is right for the library and for tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import Any

from dovetail.core.audit.replay import is_taken
from dovetail.core.caching import entries
from dovetail.core.errors import NotFound, StoreError
from dovetail.core.events import Event
from dovetail.core.node_logs import LogChunk
from dovetail.core.outputs import OutputReference, ReadBudget
from dovetail.core.run import RunState
from dovetail.core.step import RULES, begin
from dovetail.core.transitions import NOTHING, Complete, Decision, Submit, Transition
from dovetail.engine.ports import Cached

MAX_CACHED = 10_000
"""Outputs that the node cache holds; they stay in memory until the process ends."""


class MemoryStore:
    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        """`on_event` is called with each event, in order, where it happens."""
        self._on_event = on_event
        self._runs: dict[str, RunState] = {}
        # Tokens only distinguish starts within this process: no secret, so no entropy.
        self._nonces = count(1)
        self._events: dict[str, list[Event]] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._cache: dict[str, tuple[float, Cached]] = {}
        self._aborted: BaseException | None = None

    async def create(self, submit: Submit, now: float) -> Decision:
        if submit.run_id in self._runs:
            return NOTHING
        run, decision = begin(submit, now, next(self._nonces))
        self._runs[run.id] = run
        self._events[run.id] = decision.events.copy()
        self._report(decision.events)
        return decision

    async def apply(
        self, moves: Sequence[Transition], now: float, *, durable: bool = False
    ) -> list[Decision]:
        nonce = next(self._nonces)
        decisions = []
        runs = self._runs
        for move in moves:
            run = runs.get(move.run_id)
            if run is None:
                decisions.append(NOTHING)
                continue
            decision = RULES[type(move)](run, move, now, nonce)
            decisions.append(decision)
            if decision.events or decision.ended:
                self._tell(run, decision)
            if type(move) is Complete and move.cache and is_taken(decision):
                for key, kept in entries(move.cache, move.output):
                    self._keep(key, now + move.cache.seconds, kept)
        return decisions

    def log(self, chunks: Sequence[LogChunk]) -> None:
        """Nothing is kept: the library's caller has its own log."""

    def _report(self, events: list[Event]) -> None:
        if self._on_event is not None:
            for event in events:
                self._on_event(event)

    def _tell(self, run: RunState, decision: Decision) -> None:
        self._events[run.id] += decision.events
        self._report(decision.events)
        if self._watchers:
            for watcher in self._watchers.get(run.id, ()):
                watcher.set()
        if decision.ended:
            for waiter in self._waiters.pop(run.id, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def close(self) -> None:
        """Let every run go now, rather than when the garbage collector comes round."""
        self.abort(RuntimeError("the store was closed before the run had finished"))
        self._runs.clear()
        self._events.clear()
        self._cache.clear()

    async def load(
        self, run_id: str, *, outputs: bool = True, room: ReadBudget | None = None
    ) -> RunState:
        try:
            return self._runs[run_id]
        except KeyError:
            raise NotFound(f"no run '{run_id}' here") from None

    async def read_items(
        self, run: RunState, index: int, numbers: Sequence[int], max_bytes: int
    ) -> int:
        """`load` leaves out no item."""
        return len(numbers)

    async def read_outputs(self, run: RunState, wanted: Sequence[OutputReference]) -> list[bytes]:
        if wanted:
            raise StoreError(f"run {run.id}: every output is in memory here, and none elsewhere")
        return []

    async def wait(self, run_id: str) -> RunState:
        run = await self.load(run_id)
        while not run.finished:  # again: a retry may have reopened it
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(run_id, []).append(waiter)
            await waiter
        return run

    async def ended(self, run_id: str) -> None:
        await self.wait(run_id)

    def abort(self, error: BaseException) -> None:
        """The engine has stopped: fail all waiting callers."""
        self._aborted = error
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.set()
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)
        self._waiters.clear()

    async def watch(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        run = await self.load(run_id)
        events = self._events[run_id]
        news = asyncio.Event()
        self._watchers.setdefault(run_id, set()).add(news)
        try:
            while True:
                news.clear()  # before reading, or what comes in between would wait for the next
                while after < len(events):
                    after += 1
                    yield events[after - 1]
                if run.finished:
                    return
                if self._aborted is not None:
                    raise self._aborted
                await news.wait()
        finally:
            self._watchers[run_id].discard(news)
            if not self._watchers[run_id]:
                del self._watchers[run_id]

    def _keep(self, key: str, expires: float, output: Any) -> None:
        self._cache.pop(key, None)
        if len(self._cache) >= MAX_CACHED:
            del self._cache[next(iter(self._cache))]  # the one that was written first
        self._cache[key] = (expires, Cached(output))

    async def recall(self, key: str, now: float) -> Cached | None:
        expires, cached = self._cache.get(key, (now, None))
        return cached if now < expires else None
