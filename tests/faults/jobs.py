"""What the processes of these tests do; `process_forker` starts them.

`ran` is the side file: a handler adds a line to it at every start, so that what was executed is
counted outside of everything that could be wrong about it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from effects import Counter, Tripwire, Watch, watch_connections
from process_forker import tell

from dovetail.cli import app, main
from dovetail.config import RateLimit, Settings
from dovetail.core.errors import PermanentError, RetryableError
from dovetail.core.states import RunStatus
from dovetail.engine.commands import Commands
from dovetail.engine.views import outputs
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.context import Context
from dovetail.handlers.registry import Registry, describe
from dovetail.stores.sqlite import file as sqlite_file
from dovetail.stores.sqlite import writer
from dovetail.wiring.embedded import attached, embedded

KEY = "the run of this test"
QUICK = {"thread": -1.0, "loop": float("inf")}
"""What a commit must not exceed to be made in the event loop, so that it always or never is."""
PRELOADED = [app]
"""What `main` would import: here once, and not in every process."""


def step(id: str, *dependencies: str, **fields: Any) -> dict[str, Any]:  # noqa: A002
    return {"id": id, "handler": "step", "dependencies": list(dependencies), **fields}


# Two roots and what joins them, a failure that is retried, a node that is parked, one that is
# found in the cache, and one that may start only once.
EVERYTHING = {
    "name": "everything",
    "on_failure": "continue",
    "nodes": [
        step("left"),
        step("right"),
        step("join", "left", "right", config={"says": "{{ left.says }} + {{ right.says }}"}),
        step(
            "flaky",
            "left",
            config={"fails": True},
            max_retries=2,
            retry={"base_delay_seconds": 0.03, "jitter": 0},
        ),
        step("paced", resource_tag="slow"),
        step("parked", resource_tag="slow"),
        step("costly", config={"says": "dear"}, cache={"ttl_seconds": 3600}),
        step("cached", "costly", config={"says": "dear"}, cache={"ttl_seconds": 3600}),
        step("once", "join", delivery="at_most_once"),
        {
            "id": "result",
            "handler": "output",
            "dependencies": ["join", "flaky", "parked", "cached"],
            "config": {"value": "{{ join.says }}, {{ cached.says }}"},
        },
    ],
}
SHORT = {"name": "short", "nodes": [step("a"), step("b", "a")]}
LONG = {"name": "long", "nodes": [step("first"), step("waits", "first", config={"until": "go"})]}
HALF = {
    "name": "half",
    "nodes": [step("waits", config={"until": "go"}), step("broken", config={"needs": "fixed"})],
}
BIG = {
    "name": "big",
    "nodes": [
        step(f"n{i}", *([f"n{i - 1}"] if i else []), config={"says": "x", "times": 60_000})
        for i in range(12)
    ],
}
DEFINITIONS = {one["name"]: one for one in (EVERYTHING, SHORT, LONG, HALF, BIG)}


class Place:
    """A folder with a file of runs, a side file, and handlers that write to it."""

    def __init__(self, folder: str, watch: Watch, settings: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self._watch = watch
        self.settings = Settings(
            **{
                "db": self.folder / "runs.db",
                "db_sync": "normal",  # the death of a process is all that is tried here
                "drain_seconds": 0,
                "rate_limits": {"slow": RateLimit(rate_per_second=20)},
                **settings,
            }
        )
        self._ran = os.open(self.folder / "ran", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def step(self, config: dict[str, Any], ctx: Context) -> dict[str, Any]:
        name = frozenset({ctx.node_id})
        self._watch("before", "handler", name)
        self._note(f"{ctx.run_id} {ctx.node_id} {ctx.epoch} {ctx.attempt}")
        self._watch("after", "handler", name)
        if config.get("fails") and ctx.attempt == 1:
            raise RetryableError("the first time it fails")
        if "needs" in config and not (self.folder / config["needs"]).exists():
            raise PermanentError(f"there is no {config['needs']}")
        await asyncio.sleep(0.001)
        try:
            while "until" in config and not (self.folder / config["until"]).exists():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self._note(f"{ctx.run_id} {ctx.node_id} {ctx.epoch} {ctx.attempt} stopped")
            raise
        said = {"says": config.get("says", ctx.node_id) * config.get("times", 1)}
        return {**said, "attempt": ctx.attempt} if "until" in config else said

    def _note(self, line: str) -> None:
        os.write(self._ran, f"{line}\n".encode())

    @property
    def registry(self) -> Registry:
        registry = builtin_registry(self.settings)
        registry.add(describe(self.step, name="step"))
        return registry


@asynccontextmanager
async def engine(
    folder: str,
    point: str | int | None = None,
    *,
    clock_ahead: float = 0.0,
    busy_seconds: float = sqlite_file.BUSY_SECONDS,
    commits: str = "thread",
    most_bytes: int = resource.RLIM_INFINITY,
    **settings: Any,
) -> AsyncIterator[Commands]:
    """The embedded engine, which dies at `point`; it `commits` in its thread or in its loop.

    No file may grow beyond `most_bytes`, as if the disk were full.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    true_time = time.time
    time.time = lambda: true_time() + clock_ahead
    sqlite_file.BUSY_SECONDS = busy_seconds
    writer.QUICK_SECONDS = QUICK[commits]
    watch: Watch = Counter(point) if isinstance(point, int) else Tripwire(point)
    watch_connections(watch)
    place = Place(folder, watch, settings)
    async with embedded(place.settings, place.registry) as commands:
        yield commands


async def described(commands: Commands, run_id: str) -> dict[str, Any]:
    """Everything that a test wants to know of a run."""
    run = await commands.store.load(run_id)
    return {
        "run_id": run_id,
        "status": run.status.value,
        "outputs": outputs(run),
        "nodes": {
            spec.id: [node.status.value, node.reason and node.reason.value]
            for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
        },
        "events": await commands.events(run_id),
        "differences": await commands.verify(run_id),
        "runs": len((await commands.list_runs())["items"]),
        "owner": await commands.owner(run_id),
    }


# ── jobs ─────────────────────────────────────────────────────────────────────────────────


async def run(folder: str, workflow: str, point: str | int | None = None, **settings: Any) -> None:
    """Trigger a workflow and drive it to its end; tells the id, then the end."""
    async with engine(folder, point, **settings) as commands:
        made = await commands.trigger(DEFINITIONS[workflow], idempotency_key=KEY)
        tell(made.run_id)
        await commands.wait(made.run_id)
        tell(await described(commands, made.run_id))


async def count(folder: str, workflow: str) -> None:
    """Tells how many sides of effects a run has."""
    seen = 0

    def watch(side: str, effect: str, details: frozenset[str]) -> None:
        nonlocal seen
        seen += 1

    watch_connections(watch)
    place = Place(folder, watch, {})
    async with embedded(place.settings, place.registry) as commands:
        await commands.wait((await commands.trigger(DEFINITIONS[workflow])).run_id)
    tell(seen)


async def leave(
    folder: str, workflow: str, node: str, point: str | None = None, **settings: Any
) -> None:
    """Trigger a workflow and leave the engine while a node runs."""
    async with engine(folder, point, **settings) as commands:
        made = await commands.trigger(DEFINITIONS[workflow])
        tell(made.run_id)
        while f" {node} " not in (Path(folder) / "ran").read_text():
            await asyncio.sleep(0.002)


async def finish(folder: str, workflow: str, **settings: Any) -> None:
    """What a user does after a crash: ask for the same again, and for a retry if it failed.

    Tells the run as it was found, as it ended then, and as it ended after that.
    """
    async with engine(folder, **settings) as commands:
        made = await commands.trigger(DEFINITIONS[workflow], idempotency_key=KEY)
        tell(await described(commands, made.run_id))
        await commands.resume()
        run = await commands.wait(made.run_id)
        tell(await described(commands, made.run_id))
        if run.status is not RunStatus.COMPLETED:
            await commands.retry(made.run_id)
            await commands.wait(made.run_id)
        tell(await described(commands, made.run_id))


async def resume(
    folder: str, point: str | None = None, run_id: str | None = None, **settings: Any
) -> None:
    """Drive the runs without an owner to their end; prints their ids, then each of them."""
    async with engine(folder, point, **settings) as commands:
        taken = await commands.resume(run_id)
        tell(taken)
        for one in taken:
            await commands.wait(one)
            tell(await described(commands, one))


async def look(folder: str, run_id: str) -> None:
    """Read a run that another process may drive."""
    place = Place(folder, Tripwire(None), {})
    async with attached(place.settings, place.registry) as commands:
        tell(await described(commands, run_id))


async def order(
    folder: str, command: str, run_id: str, point: str | None = None, commits: str = "thread"
) -> None:
    """Cancel or retry a run that another process may drive."""
    writer.QUICK_SECONDS = QUICK[commits]
    watch = Tripwire(point)
    watch_connections(watch)
    place = Place(folder, watch, {})
    async with attached(place.settings, place.registry) as commands:
        run = await getattr(commands, command)(run_id)
        tell(run.status.value)


async def batch(
    folder: str, workflow: str, count: int, point: str | int | None = None, **settings: Any
) -> None:
    """Make a batch with a key and see it to its end; tells its id, then it and its runs."""
    async with engine(folder, point, **settings) as commands:
        items = [{"number": number} for number in range(count)]
        made = await commands.batch(DEFINITIONS[workflow], items, idempotency_key=KEY)
        tell(made["batch_id"])
        await _see_to_end(commands, made["batch_id"])


async def stream(
    folder: str, workflow: str, count: int, point: str | int | None = None, **settings: Any
) -> None:
    """The same with runs that are made one by one."""
    async with engine(folder, point, **settings) as commands:
        definition = DEFINITIONS[workflow]
        made = await commands.open_batch(definition, count, idempotency_key=KEY)
        tell(made["batch_id"])
        for number in range(count):
            place = (made["batch_id"], number)
            await commands.trigger(definition, {"number": number}, place=place)
        await _see_to_end(commands, made["batch_id"])


async def _see_to_end(commands: Commands, batch_id: str) -> None:
    await commands.resume()
    ended = await commands.wait_batch(batch_id)
    tell(ended)
    for one in ended["runs"]:
        tell(await described(commands, one["run_id"]))


def hold(folder: str, seconds: float) -> None:
    """Keep the file locked for writing; tells when it is."""
    connection = sqlite3.connect(Path(folder) / "runs.db", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    tell("locked")
    time.sleep(seconds)
    connection.execute("ROLLBACK")


def dovetail(folder: str, args: list[str]) -> None:
    """`dovetail ARGS` in this folder."""
    os.chdir(folder)
    os.environ["DOVETAIL_DB"] = "runs.db"
    sys.argv = ["dovetail", *args]
    main()
