"""What a large run weighs in memory, and what a long history costs later runs.

Both are asked of a whole process, so they are done in one of their own (see apart.py). A history
is not lived through: three real runs are copied as rows until there are enough of them. That needs
to know the file's tables, and is the only thing here that does.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import workloads
from apart import Job
from workloads import Workload, definition, node

REPEATS = 50
"""Calls within one timing: one alone takes less than a millisecond."""
RARE = 50
"""Runs that failed and runs of another workflow, one page each: the oldest, so the last found."""


def shape(name: str, *sizes: int) -> Workload:
    made: Workload = getattr(workloads, name)(*sizes)
    return made


def settings_and_registry(folder: str) -> Any:
    from dovetail import Context, PermanentError
    from dovetail.config import Settings
    from dovetail.handlers.builtin import builtin_registry
    from dovetail.handlers.registry import describe

    async def noop(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
        return node(*config["of"])

    async def refuse(config: dict[str, Any], ctx: Context) -> None:
        raise PermanentError("refused")

    settings = Settings(db=Path(folder) / "dovetail.db")
    registry = builtin_registry(settings)
    registry.add(describe(noop, name="noop", max_retries=0, origin="bench"))
    registry.add(describe(refuse, name="refuse", max_retries=0, origin="bench"))
    return settings, registry


# --- memory ----------------------------------------------------------------------------------


@contextmanager
def memory(workload: tuple[Any, ...], folder: str) -> Iterator[Job]:
    """`run` tells how many bytes the process grew at most, beyond its idle size, in one run."""
    from dovetail.wiring.embedded import embedded

    settings, registry = settings_and_registry(folder)

    async def run() -> int:
        async with embedded(settings, registry) as engine:
            small = workloads.diamonds(1)
            accepted = await engine.trigger(definition(small))
            await engine.wait(accepted.run_id)  # whatever is imported on the way is there now
            idle = resident("VmRSS")
            work = shape(*workload)
            accepted = await engine.trigger(definition(work))
            ended = await engine.wait(accepted.run_id)
            work.check([ended.node(name).output for name in work.exits])
            return resident("VmHWM") - idle

    yield Job({}, {"run": lambda: asyncio.run(run())})


def resident(which: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at most so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {which}: this is measured on Linux only")


# --- history ---------------------------------------------------------------------------------


@contextmanager
def history(runs: int, folder: str) -> Iterator[Job]:
    """A file with so many finished runs, and what people do with such a file."""
    from dovetail.engine.ports import RunQuery
    from dovetail.wiring.embedded import attached, embedded

    settings, registry = settings_and_registry(folder)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()

        def wait_for(work: Coroutine[Any, Any, Any]) -> Any:
            return loop.run_until_complete(work)

        wait_for(_live(settings, registry))
        copies = _fill(settings.db, runs)
        chance = random.Random(7)
        opened = embedded(settings, registry)
        engine = wait_for(opened.__aenter__())

        async def listed(**wanted: str) -> None:
            for _ in range(REPEATS):
                found = await engine.list_runs(RunQuery(limit=RARE, **wanted))
                assert len(found["items"]) == RARE

        async def shown() -> None:
            for run_id in chance.choices(copies, k=REPEATS):
                found = await engine.get_run(await engine.find_run(run_id[:12]))
                assert found["status"] == "COMPLETED"

        async def ran() -> None:
            for _ in range(REPEATS):
                accepted = await engine.trigger("diamonds1")
                ended = await engine.wait(accepted.run_id)
                assert ended.node("d").output == {"n": 3}

        async def entered() -> None:
            for _ in range(REPEATS):
                async with attached(settings) as there:
                    await there.list_runs(RunQuery(limit=1))

        calls = {
            "list": lambda: wait_for(listed()),
            "list --status FAILED": lambda: wait_for(listed(status="FAILED")),
            "list --workflow rare": lambda: wait_for(listed(workflow="rare")),
            "show": lambda: wait_for(shown()),
            "a new run": lambda: wait_for(ran()),
            "open and close": lambda: wait_for(entered()),
        }
        try:
            yield Job({"calls": list(calls)}, calls)
        finally:
            wait_for(opened.__aexit__(None, None, None))


async def _live(settings: Any, registry: Any) -> None:
    """Three runs to be copied: one of the rare workflow, one that fails, one as usual."""
    from dovetail.wiring.embedded import embedded

    usual = definition(workloads.diamonds(1))
    failing = {"name": "failing", "nodes": [{"id": "a", "handler": "refuse"}]}
    async with embedded(settings, registry) as engine:
        await engine.register(usual)
        for workflow in (usual | {"name": "rare"}, failing, "diamonds1"):
            accepted = await engine.trigger(workflow)
            await engine.wait(accepted.run_id)


def _fill(db: Path, runs: int) -> list[str]:
    """Copy the three until there are so many runs. Gives some ids of the usual ones."""
    with sqlite3.connect(db) as connection:
        for original, copies in ((1, RARE - 1), (2, RARE - 1), (3, runs - 2 * RARE - 1)):
            _copy(connection, original, copies)
        found = connection.execute("SELECT COUNT(*) FROM runs").fetchone()
        assert found == (runs,)
        rows = connection.execute(
            "SELECT run_id FROM runs WHERE workflow = 'diamonds1' ORDER BY number % 97 LIMIT 1000"
        ).fetchall()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return [run_id for (run_id,) in rows]


def _copy(connection: sqlite3.Connection, original: int, copies: int) -> None:
    from dovetail.stores.sqlite.writer import PIECES

    (last,) = connection.execute("SELECT MAX(number) FROM runs").fetchone()
    columns = [row[1] for row in connection.execute("PRAGMA table_info(runs)")]
    kept = ", ".join(name for name in columns if name not in ("number", "run_id"))
    numbers = "WITH RECURSIVE new(i) AS (SELECT :first UNION ALL SELECT i + 1 FROM new LIMIT :n)"
    values = {"first": last + 1, "n": copies, "original": original, "pieces": PIECES}
    connection.execute(
        f"{numbers} INSERT INTO runs (number, run_id, {kept})"
        f" SELECT i, lower(hex(randomblob(16))), {kept} FROM new, runs WHERE number = :original",
        values,
    )
    connection.execute(
        f"{numbers} INSERT INTO journal (id, seq, entries)"
        " SELECT i * :pieces + id % :pieces, seq, entries FROM new, journal"
        " WHERE id BETWEEN :original * :pieces AND :original * :pieces + :pieces - 1",
        values,
    )
