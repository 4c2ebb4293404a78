"""Every store that must keep the store's promises. The next one is one more line in `STORES`.

A store is opened for a whole test module's worth of runs; each test uses run ids of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dovetail.core.dag import Graph
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Decision, Submit
from dovetail.engine.ports import Store
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.memory import MemoryStore
from dovetail.stores.redis.store import RedisStore
from dovetail.stores.sqlite.store import SqliteStore

from ..servers.redis_server import RedisServer

Peers = list[Store]
"""The same runs seen through several handles: for a store that many processes may open, each
is one that another process would have."""


@asynccontextmanager
async def memory(handles: int) -> AsyncIterator[Peers]:
    store = MemoryStore()
    yield [store] * handles
    store.close()


@asynccontextmanager
async def sqlite(handles: int) -> AsyncIterator[Peers]:
    with TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            path = Path(folder) / "runs.db"
            yield [
                await stack.enter_async_context(SqliteStore(path, sync="normal"))
                for _ in range(handles)
            ]


@cache
def redis_url() -> str:
    """One Redis for all of these tests; it ends with them."""
    if given := os.environ.get("TEST_REDIS_URL"):
        return given
    server = RedisServer()
    server.__enter__()
    atexit.register(server.close)
    return server.url


@asynccontextmanager
async def redis(handles: int) -> AsyncIterator[Peers]:
    async with AsyncExitStack() as stack:
        pipes = [
            await stack.enter_async_context(PipelinedRedis(redis_url())) for _ in range(handles)
        ]
        await pipes[0].call("FLUSHDB")
        yield [RedisStore(pipe) for pipe in pipes]


STORES: dict[str, Callable[[int], AbstractAsyncContextManager[Peers]]] = {
    "memory": memory,
    "sqlite": sqlite,
    "redis": redis,
}

_ids = count(1)


def new_run_id() -> str:
    return f"run-{next(_ids)}"


@contextmanager
def opened(name: str) -> Iterator[tuple[asyncio.Runner, Store]]:
    """A store and the event loop it lives in, for tests that are not async themselves."""
    with asyncio.Runner() as runner:
        opening = STORES[name](1)
        (store,) = runner.run(opening.__aenter__())  # type: ignore[arg-type]
        try:
            yield runner, store
        finally:
            runner.run(opening.__aexit__(None, None, None))  # type: ignore[arg-type]


async def create(
    store: Store, graph: Graph, params: dict[str, Any] | None = None, now: float = 1000.0
) -> tuple[str, Decision]:
    run_id = new_run_id()
    return run_id, await store.create(Submit(run_id, graph, params or {}), now)


async def read(store: Store, run_id: str, count: int, after: int = 0) -> list[Event]:
    """So many events from the log, without waiting for more."""
    events: list[Event] = []
    if count:
        watching = store.watch(run_id, after)
        async for event in watching:
            events.append(event)
            if len(events) == count:
                break
        await watching.aclose()  # type: ignore[attr-defined]
    return events


def plain(run: RunState) -> dict[str, Any]:
    """A snapshot without nonces."""
    snapshot = run.snapshot()
    nodes: list[dict[str, Any]] = snapshot["nodes"]
    items = [
        item for node in nodes if node["items"] for item in node["items"]["in_flight"].values()
    ]
    for node in (*nodes, *items):
        node["token"], node["answered"] = node["token"][:2], node["answered"][:2]
    for node in nodes:
        if node["status"] is not NodeStatus.PENDING:
            del node["waiting"], node["fed"]  # of no meaning once a node was ready
        for item in (node["items"] or {"in_flight": {}})["in_flight"].values():
            item["token"], item["answered"] = item["token"][:2], item["answered"][:2]
    return snapshot
