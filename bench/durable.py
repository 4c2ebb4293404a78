"""Who runs the durable workloads: Dovetail embedded, DBOS, and the least that could be called one.

Each contestant writes to its own file and promises the same: what `run` returns survives a power
cut, and no node starts before the outputs it needs would. So all of them use SQLite with a
write-ahead log and a sync at every commit (WAL, FULL). DBOS by itself uses SQLite's older rollback
journal, which is slower; it is switched to WAL here, and measured as it comes beside that. The
facts of each say what its connections really used, asked of SQLite.

Engine and definition are there before; starting the runs, waiting for their ends and reading the
results is what is timed. Each runs in a process of its own (see apart.py), because DBOS can be
launched once in a process only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apart import Job, Opener
from workloads import Outputs, Workload, compared, definition, is_chain, node

SYNC = ["OFF", "NORMAL", "FULL", "EXTRA"]


def used(connection: Any) -> str:
    """How this connection keeps its promise."""
    (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
    (sync,) = connection.execute("PRAGMA synchronous").fetchone()
    return f"{journal.upper()}, {SYNC[sync]}"


def season(file: Path) -> None:
    """Make an open file as one that has been in use: its log has grown, and begins anew.

    Syncs of a log that still grows take up to twice as long, and some would grow through all of
    the rounds.
    """
    connection = sqlite3.connect(file, timeout=30, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE seasoning (filler BLOB)")
    connection.executemany("INSERT INTO seasoning VALUES (zeroblob(?))", [(4096,)] * 1500)
    connection.execute("COMMIT")
    connection.execute("DROP TABLE seasoning")
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    connection.close()


def sync_seconds(folder: Path) -> float:
    """What one sync to this disk takes: no chain can be faster."""
    times = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(100):
            file.seek(0)
            file.write(b"x" * 4096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


# --- Dovetail --------------------------------------------------------------------------------


@contextmanager
def dovetail(workload: dict[str, Any], folder: str) -> Iterator[Job]:
    """The embedded engine, with its default settings and a registered definition."""
    with _dovetail(Workload(**workload), folder, asyncio.new_event_loop) as job:
        yield job


@contextmanager
def dovetail_on_uvloop(workload: dict[str, Any], folder: str) -> Iterator[Job]:
    """The same in an application that has chosen uvloop."""
    import uvloop

    with _dovetail(Workload(**workload), folder, uvloop.new_event_loop) as job:
        yield job


@contextmanager
def _dovetail(
    work: Workload, folder: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> Iterator[Job]:
    from dovetail import Context
    from dovetail.config import Settings
    from dovetail.handlers.builtin import builtin_registry
    from dovetail.handlers.registry import describe
    from dovetail.stores.sqlite.file import SqliteFile
    from dovetail.wiring.embedded import embedded

    async def noop(config: dict[str, Any], ctx: Context) -> dict[str, Any]:
        return node(*config["of"])

    settings = Settings(db=Path(folder) / "dovetail.db")
    registry = builtin_registry(settings)
    registry.add(describe(noop, name="noop", max_retries=0, origin="bench"))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        loop = runner.get_loop()
        opened = embedded(settings, registry)
        engine = loop.run_until_complete(opened.__aenter__())
        loop.run_until_complete(engine.register(definition(work)))

        async def one() -> Outputs:
            accepted = await engine.trigger(work.name)
            ended = await engine.wait(accepted.run_id)
            return [ended.node(name).output for name in work.exits]

        async def execute() -> Outputs:
            if work.runs == 1:
                return await one()
            found = await asyncio.gather(*[one() for _ in range(work.runs)])
            return [output for outputs in found for output in outputs]

        try:
            season(settings.db)
            connection = SqliteFile(settings.db, settings.db_sync).connect()
            facts = {"uses": used(connection)}
            connection.close()
            # Not Runner.run: it sets a signal handler each time; a program that awaits does not.
            yield Job(facts, {"run": compared(work, lambda: loop.run_until_complete(execute()))})
        finally:
            loop.run_until_complete(opened.__aexit__(None, None, None))


# --- DBOS ------------------------------------------------------------------------------------


@contextmanager
def dbos(workload: dict[str, Any], folder: str) -> Iterator[Job]:
    """DBOS with the durability of the others; apart from that as it comes."""
    with _dbos(Workload(**workload), folder, ["journal_mode=WAL", "synchronous=FULL"]) as job:
        yield job


@contextmanager
def dbos_one_connection(workload: dict[str, Any], folder: str) -> Iterator[Job]:
    """The same with a pool of one: the quickest DBOS that we found."""
    work, pragmas = Workload(**workload), ["journal_mode=WAL", "synchronous=FULL"]
    with _dbos(work, folder, pragmas, sys_db_pool_size=1) as job:
        yield job


@contextmanager
def dbos_as_it_comes(workload: dict[str, Any], folder: str) -> Iterator[Job]:
    """DBOS with all of its defaults."""
    with _dbos(Workload(**workload), folder, []) as job:
        yield job


@contextmanager
def _dbos(work: Workload, folder: str, pragmas: list[str], **config: Any) -> Iterator[Job]:
    """A workflow whose steps are the nodes, wave after wave, those of a wave gathered.

    That is the shape its users write: a loop of calls for a chain, `gather` for a fan. A chain is
    an ordinary function, which is quicker there than a coroutine.
    """
    import sqlalchemy
    from dbos import DBOS

    uses = set()

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
    def opened(connection: sqlite3.Connection, _: object) -> None:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
        uses.add(used(connection))

    DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{folder}/dbos.db",
            "log_level": "CRITICAL",
            "enable_otlp": False,
            **config,
        }
    )
    loop = asyncio.new_event_loop()
    try:
        run = _dbos_runs(work, loop)
        DBOS.launch()
        season(Path(folder) / "dbos.db")
        yield Job({"uses": " / ".join(sorted(uses))}, {"run": compared(work, run)})
    finally:
        DBOS.destroy()
        loop.close()


def _dbos_runs(work: Workload, loop: asyncio.AbstractEventLoop) -> Callable[[], Outputs]:
    from dbos import DBOS

    waves = work.waves()
    if is_chain(work) and work.runs == 1:
        step = DBOS.step()(node)

        @DBOS.workflow()
        def chain() -> Outputs:
            outputs: dict[str, Any] = {}
            for (name,) in waves:
                outputs[name] = step(*[outputs[parent] for parent in work.graph[name]])
            return [outputs[name] for name in work.exits]

        return chain

    @DBOS.step()
    async def astep(*parents: dict[str, Any]) -> dict[str, Any]:
        return node(*parents)

    @DBOS.workflow()
    async def graph() -> Outputs:
        outputs: dict[str, Any] = {}
        for wave in waves:
            steps = [astep(*[outputs[parent] for parent in work.graph[name]]) for name in wave]
            if len(steps) == 1:
                outputs[wave[0]] = await steps[0]
            else:
                outputs.update(zip(wave, await asyncio.gather(*steps), strict=True))
        return [outputs[name] for name in work.exits]

    async def one() -> Outputs:
        handle = await DBOS.start_workflow_async(graph)
        found: Outputs = await handle.get_result()
        return found

    async def execute() -> Outputs:
        if work.runs == 1:
            found: Outputs = await graph()
            return found
        every = await asyncio.gather(*[one() for _ in range(work.runs)])
        return [output for outputs in every for output in outputs]

    return lambda: loop.run_until_complete(execute())


# --- the floor -------------------------------------------------------------------------------


@contextmanager
def floor(workload: dict[str, Any], folder: str) -> Iterator[Job]:
    """A loop over the graph, a row for each output, a commit for each wave. No engine at all.

    No retries, no attempts, no events, no limits, no API: what the promise alone costs.
    """
    work = Workload(**workload)
    connection = sqlite3.connect(Path(folder) / "floor.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE runs (number INTEGER PRIMARY KEY, graph TEXT, done INTEGER)")
    connection.execute(
        "CREATE TABLE outputs (run INTEGER, node TEXT, output TEXT, PRIMARY KEY (run, node))"
        " WITHOUT ROWID"
    )
    season(Path(folder) / "floor.db")
    try:
        facts = {"uses": used(connection)}
        yield Job(facts, {"run": compared(work, lambda: _floor_runs(connection, work))})
    finally:
        connection.close()


def _floor_runs(connection: sqlite3.Connection, work: Workload) -> Outputs:
    graph = work.graph
    children: dict[str, list[str]] = {name: [] for name in graph}
    for name, parents in graph.items():
        for parent in parents:
            children[parent].append(name)
    text, numbers = json.dumps(graph), []
    connection.execute("BEGIN")
    for _ in range(work.runs):
        added = connection.execute("INSERT INTO runs (graph, done) VALUES (?, 0)", (text,))
        numbers.append(added.lastrowid)
    connection.execute("COMMIT")
    outputs: dict[Any, dict[str, Any]] = {number: {} for number in numbers}
    waiting = {number: {name: len(graph[name]) for name in graph} for number in numbers}
    ready = deque((number, name) for number in numbers for name in graph if not graph[name])
    while ready:
        wave, rows, ended = list(ready), [], []
        ready.clear()
        for number, name in wave:
            known = outputs[number]
            known[name] = node(*[known[parent] for parent in graph[name]])
            rows.append((number, name, json.dumps(known[name])))
            if len(known) == len(graph):
                ended.append((number,))
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO outputs VALUES (?, ?, ?)", rows)
        connection.executemany("UPDATE runs SET done = 1 WHERE number = ?", ended)
        connection.execute("COMMIT")
        for number, name in wave:
            for child in children[name]:
                waiting[number][child] -= 1
                if not waiting[number][child]:
                    ready.append((number, child))
    return [outputs[number][name] for number in numbers for name in work.exits]


OURS = "dovetail embedded"
PEERS = ["dbos, WAL", "dbos, its defaults"]
PEER = PEERS[0]
"""Whom the targets are held against: the same journal as ours, and the quicker of the two."""
FLOOR = "floor"

CONTESTANTS: dict[str, Opener] = {
    OURS: dovetail,
    "dovetail on uvloop": dovetail_on_uvloop,
    PEERS[0]: dbos,
    "dbos, WAL, pool of 1": dbos_one_connection,
    PEERS[1]: dbos_as_it_comes,
    FLOOR: floor,
}
