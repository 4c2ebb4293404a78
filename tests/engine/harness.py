"""The embedded engine with handlers that a test writes down, and workflows in one line.

    async with engine(double) as it:
        run = await it.run({"a": {"handler": "double", "config": {"x": 2}}})

Everything is real: the validation, the store, the transport, the worker. Only the handlers are
the test's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dovetail.config import RateLimit, Settings
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.engine.commands import Commands
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.registry import Registry, describe, marked
from dovetail.wiring.embedded import embedded

PATIENCE = 15.0
"""A run that takes longer hangs. Nothing here takes a second."""

Nodes = Mapping[str, str | Mapping[str, Any]]


@dataclass
class Engine:
    commands: Commands

    async def trigger(
        self, nodes: Nodes, given: dict[str, Any] | None = None, /, **fields: Any
    ) -> str:
        """Trigger a workflow of these nodes with `given` as params; `fields` are its own."""
        return (await self.commands.trigger(definition(nodes, **fields), given)).run_id

    async def run(
        self, nodes: Nodes, given: dict[str, Any] | None = None, /, **fields: Any
    ) -> RunState:
        return await self.wait(await self.trigger(nodes, given, **fields))

    async def wait(self, run_id: str) -> RunState:
        return await asyncio.wait_for(self.commands.wait(run_id), PATIENCE)

    async def load(self, run_id: str) -> RunState:
        return await self.commands.store.load(run_id)

    async def events(self, run_id: str) -> list[Event]:
        """The whole log of a finished run."""
        return [event async for event in self.commands.store.watch(run_id)]


def definition(nodes: Nodes, **fields: Any) -> dict[str, Any]:
    """`{id: handler}` or `{id: {fields}}` as a definition; `after` is short for dependencies."""
    listed = []
    for name, node in nodes.items():
        entry = {"handler": node} if isinstance(node, str) else dict(node)
        if "after" in entry:
            entry["dependencies"] = entry.pop("after")
        listed.append({"id": name, **entry})
    return {"name": "test", "nodes": listed, **fields}


def registry_of(*handlers: Callable[..., Any], settings: Settings | None = None) -> Registry:
    registry = builtin_registry(settings or Settings())
    for fn in handlers:
        name = getattr(fn, "__name__", None) or type(fn).__name__.lower()
        for known in marked(fn, "tests") or [describe(fn, name=name)]:
            registry.add(known)
    return registry


@asynccontextmanager
async def engine(
    *handlers: Callable[..., Any],
    concurrency: int = 32,
    secrets: Mapping[str, str] | None = None,
    rate_limits: Mapping[str, tuple[float, int]] | None = None,
    **fields: Any,
) -> AsyncIterator[Engine]:
    with TemporaryDirectory() as folder:
        fields = {"db": Path(folder) / "runs.db", "db_sync": "normal", "drain_seconds": 0, **fields}
        async with _engine(handlers, concurrency, secrets, rate_limits, fields) as it:
            yield it


@asynccontextmanager
async def _engine(
    handlers: Sequence[Callable[..., Any]],
    concurrency: int,
    secrets: Mapping[str, str] | None,
    rate_limits: Mapping[str, tuple[float, int]] | None,
    fields: Mapping[str, Any],
) -> AsyncIterator[Engine]:
    settings = Settings(
        concurrency=concurrency,
        secrets=dict(secrets or {}),
        rate_limits={
            tag: RateLimit(rate_per_second=rate, burst=burst)
            for tag, (rate, burst) in (rate_limits or {}).items()
        },
        **fields,
    )
    async with embedded(settings, registry_of(*handlers, settings=settings)) as commands:
        yield Engine(commands)


def statuses(run: RunState) -> dict[str, str]:
    names = (spec.id for spec in run.graph.nodes)
    return dict(zip(names, (node.status.value for node in run.nodes), strict=True))


class Gate:
    """A handler that says when it has begun and waits until it is let go."""

    __name__ = "gate"

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.opened = asyncio.Event()
        self.inside = 0
        self.most = 0

    async def __call__(self, config: dict[str, Any], ctx: Any) -> str:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        try:
            await self.opened.wait()
        finally:
            self.inside -= 1
        return "through"
