"""The part `map` of the bench: a map over a list, and a join, on Dovetail and on its peers.

The list has 1,000 numbers, which are known only at run time. The function of an item adds one, and
the join adds all of them up; the sum is checked in every round. The time is from the call with the
list to the sum. Engines, servers and workers are started before.

Each contestant has a process of its own (see apart.py). Prefect and Dask have an environment of
their own, because Prefect needs other versions than Dovetail. Each contestant is used as its own
documentation shows a map, with the settings that were fastest here. The contestants differ in what
survives a crash, and a ratio between rows with different promises says little. So each row has its
promise, and the CPU time of an item in all processes together, servers included:

    process    nothing survives the process
    power cut  what the call returned, with every item, survives a power cut
    second     the same, but the last second may be lost with the machine (Redis, AOF everysec)
    states     only the states of the items are kept, not their results
    results    results are kept, but a worker that dies loses the items that it has taken
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apart import HERE, Failed, Job, Missing, Opener, SeparateProcess
from fleet import cpu_seconds, private_postgres, private_redis, server_module, services
from measuring import Times, ratio, rounds, summary

if TYPE_CHECKING:
    from dovetail import Dovetail

ITEMS = 1000
NUMBERS = list(range(ITEMS))
SUM = sum(NUMBERS) + ITEMS
START_SECONDS = 90.0
ENVIRONMENT = HERE.parent / ".cache" / "maps"
"""Where `./dev bench` installs requirements/maps.txt."""

MILLI = 1e3
MICRO = 1e6


def checked(run: Callable[[], int]) -> Callable[[], None]:
    """`run`, with a check of the sum that it returns."""

    def work() -> None:
        found = run()
        assert found == SUM, f"{found} instead of {SUM}"

    return work


def definition() -> dict[str, Any]:
    """As a user writes it: the window and the retries are the defaults."""
    each = {"id": "each", "handler": "add_one", "for_each": "{{ params.numbers }}"}
    join = {"id": "join", "handler": "add_up", "dependencies": ["each"]}
    return {"name": "map", "nodes": [{**each, "config": {"number": "{{ item }}"}}, join]}


# --- Dovetail --------------------------------------------------------------------------------


@contextmanager
def library() -> Iterator[Job]:
    """`WorkflowExecutor` with its default settings, awaited."""
    from dovetail import WorkflowDAG, WorkflowExecutor

    async def each(ctx: dict[str, Any]) -> int:
        number: int = ctx["item"]
        return number + 1

    async def join(ctx: dict[str, Any]) -> int:
        return sum(ctx["step_outputs"]["each"])

    dag, executor = WorkflowDAG("map"), WorkflowExecutor()
    dag.add_step("each", each, for_each=lambda ctx: ctx["numbers"])
    dag.add_step("join", join, depends_on=["each"])
    with asyncio.Runner() as runner:
        loop = runner.get_loop()

        def run() -> int:
            result = loop.run_until_complete(executor.execute(dag, context={"numbers": NUMBERS}))
            found: int = result.outputs["join"]
            return found

        yield Job({}, {"run": checked(run)})


@contextmanager
def embedded(folder: str) -> Iterator[Job]:
    """The embedded engine with its default settings: SQLite, a sync at every commit."""
    import map_handlers
    from dovetail import Dovetail

    handlers = [map_handlers.add_one, map_handlers.add_up]
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        opened = Dovetail(str(Path(folder) / "dovetail.db"), handlers=handlers)
        engine = loop.run_until_complete(opened.__aenter__())
        loop.run_until_complete(engine.register(definition()))

        try:
            yield _job(loop, engine)
        finally:
            loop.run_until_complete(opened.__aexit__(None, None, None))


@contextmanager
def distributed_services(url: str, transport: str, concurrency: int) -> Iterator[Job]:
    """One orchestrator and one worker, started by the commands of the documentation."""
    from dovetail import Dovetail, InvalidDefinition

    handlers = ["--handlers", str(HERE / "map_handlers.py"), "--concurrency", str(concurrency)]
    environment = {
        "DOVETAIL_REDIS_URL": url,
        "DOVETAIL_DATABASE_URL": "",
        "DOVETAIL_TRANSPORT": transport,
    }
    os.environ.update(environment)

    async def registered(engine: Dovetail) -> None:
        async with asyncio.timeout(START_SECONDS):
            while True:  # until a worker has announced its handlers
                try:
                    await engine.register(definition())
                    return
                except InvalidDefinition:
                    await asyncio.sleep(0.05)

    with ExitStack() as stack:
        commands = {
            "orchestrator": [["-m", "dovetail", "orchestrator"]],
            "worker": [["-m", "dovetail", "worker", *handlers]],
        }
        stack.enter_context(services(environment=environment, **commands))
        loop = stack.enter_context(asyncio.Runner()).get_loop()
        opened = Dovetail(url)
        engine = loop.run_until_complete(opened.__aenter__())
        stack.callback(lambda: loop.run_until_complete(opened.__aexit__(None, None, None)))
        loop.run_until_complete(registered(engine))
        yield _job(loop, engine)


def _job(loop: asyncio.AbstractEventLoop, engine: Dovetail) -> Job:
    """A run of the registered definition."""

    def run() -> int:
        ended = loop.run_until_complete(engine.run("map", {"numbers": NUMBERS}))
        found: int = ended.outputs["join"]
        return found

    return Job({}, {"run": checked(run)})


# --- Celery ----------------------------------------------------------------------------------


@contextmanager
def celery_chord(url: str) -> Iterator[Job]:
    """A chord: a group of tasks, and a task after them. map_tasks.py has its settings."""
    os.environ["BENCH_REDIS_URL"] = url
    from celery import chord

    import map_tasks

    words = ["-m", "celery", "-A", "map_tasks", "worker", "--concurrency", "2"]
    quiet = ["--loglevel", "ERROR", "--without-gossip", "--without-mingle"]
    with services(worker=[[*words, *quiet]]):
        map_tasks.add_one.delay(1).get(timeout=START_SECONDS)

        def run() -> int:
            tasks = chord([map_tasks.add_one.s(number) for number in NUMBERS], map_tasks.add_up.s())
            # Else it reads the result of every parent again at each wake-up: a core is busy.
            found: int = tasks.apply_async().get(timeout=START_SECONDS, follow_parents=False)
            return found

        yield Job({}, {"run": checked(run)})


# --- DBOS ------------------------------------------------------------------------------------


@contextmanager
def dbos_queue(folder: str = "", url: str = "") -> Iterator[Job]:
    """A workflow that enqueues one child workflow for each item: the map over workers of DBOS.

    Coroutines were faster here than functions. The queue is polled ten times a second, not once.
    """
    with _dbos(folder, url) as loop:
        from dbos import DBOS

        @DBOS.workflow()
        async def add_one(number: int) -> int:
            return number + 1

        @DBOS.step()
        async def add_up(numbers: list[int]) -> int:
            return sum(numbers)

        @DBOS.workflow()
        async def mapped(numbers: list[int]) -> int:
            begin = partial(DBOS.enqueue_workflow_async, "map", add_one)
            handles = [await begin(number) for number in numbers]
            return await add_up([await handle.get_result() for handle in handles])

        DBOS.launch()
        DBOS.register_queue("map", polling_interval_sec=0.1)
        yield Job({}, {"run": checked(lambda: loop.run_until_complete(mapped(NUMBERS)))})


@contextmanager
def dbos_steps(folder: str) -> Iterator[Job]:
    """A workflow that gathers its steps: the map of DBOS inside one process."""
    with _dbos(folder, "") as loop:
        from dbos import DBOS

        @DBOS.step()
        async def add_one(number: int) -> int:
            return number + 1

        @DBOS.step()
        async def add_up(numbers: list[int]) -> int:
            return sum(numbers)

        @DBOS.workflow()
        async def mapped(numbers: list[int]) -> int:
            return await add_up(await asyncio.gather(*[add_one(number) for number in numbers]))

        DBOS.launch()
        yield Job({}, {"run": checked(lambda: loop.run_until_complete(mapped(NUMBERS)))})


@contextmanager
def _dbos(folder: str, url: str) -> Iterator[asyncio.AbstractEventLoop]:
    """With its defaults, on PostgreSQL, which it recommends, or on SQLite. There with WAL, as the
    other contestants, which is faster than its default."""
    import sqlalchemy
    from dbos import DBOS

    if folder:

        @sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
        def opened(connection: Any, _: object) -> None:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")

        url = f"sqlite:///{folder}/dbos.db"
    DBOS(
        config={
            "name": "map",
            "system_database_url": url.replace("postgresql://", "postgresql+psycopg://"),
            "log_level": "CRITICAL",
            "enable_otlp": False,
        }
    )
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        DBOS.destroy()
        loop.close()


# --- Dask, in an environment of its own --------------------------------------------------------


def _find_dask_before_us() -> None:
    """This folder has a distributed.py, too, which must not hide Dask's package."""
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE] + [str(HERE)]


@contextmanager
def dask_delayed(scheduler: str) -> Iterator[Job]:
    """One delayed call for each item."""
    _find_dask_before_us()
    import dask

    one = dask.delayed(lambda number: number + 1, pure=False)
    up = dask.delayed(sum, pure=False)

    def run() -> int:
        graph = up([one(number) for number in NUMBERS])
        found: int = graph.compute(scheduler=scheduler, num_workers=2)
        return found

    yield Job({}, {"run": checked(run)})


@contextmanager
def dask_bag() -> Iterator[Job]:
    """A bag with its default partitions, about 100 of ten items each, so a task has ten items."""
    _find_dask_before_us()
    import dask.bag

    def run() -> int:
        bag = dask.bag.from_sequence(NUMBERS).map(lambda number: number + 1)
        found: int = bag.sum().compute(scheduler="threads", num_workers=2)
        return found

    yield Job({}, {"run": checked(run)})


@contextmanager
def dask_futures() -> Iterator[Job]:
    """`Client.map` on a local cluster of two processes, one for each core."""
    _find_dask_before_us()
    import distributed

    shape = {"n_workers": 2, "threads_per_worker": 1, "processes": True}
    quiet = {"dashboard_address": None, "silence_logs": "CRITICAL"}
    with (
        distributed.LocalCluster(host="127.0.0.1", **shape, **quiet) as cluster,
        distributed.Client(cluster) as client,
    ):

        def run() -> int:
            futures = client.map(lambda number: number + 1, NUMBERS, pure=False)
            found: int = client.submit(sum, futures, pure=False).result()
            return found

        yield Job({}, {"run": checked(run)})


# --- Prefect, in an environment of its own -----------------------------------------------------


@contextmanager
def prefect_map(folder: str, port: int) -> Iterator[Job]:
    """`.map` of a task in a flow, against `prefect server start` on SQLite, which is its default.

    Task runs are reported to the server. Results are not kept: Prefect keeps them only on request.
    """
    api = f"http://127.0.0.1:{port}/api"
    os.environ.update(
        PREFECT_HOME=folder,
        PREFECT_API_URL=api,
        PREFECT_LOGGING_LEVEL="CRITICAL",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        PREFECT_UI_ENABLED="false",
        DO_NOT_TRACK="1",
    )
    words = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with services(server=[words]):
        _wait_for(f"{api}/health")
        from prefect import flow, task
        from prefect.cache_policies import NO_CACHE
        from prefect.task_runners import ThreadPoolTaskRunner

        @task(cache_policy=NO_CACHE)
        def add_one(number: int) -> int:
            return number + 1

        @task(cache_policy=NO_CACHE)
        def add_up(numbers: list[int]) -> int:
            return sum(numbers)

        @flow(task_runner=ThreadPoolTaskRunner(max_workers=16))
        def mapped(numbers: list[int]) -> int:
            found: int = add_up(add_one.map(numbers))
            return found

        yield Job({}, {"run": checked(lambda: mapped(NUMBERS))})


def _wait_for(address: str) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(address, timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


# --- the contest -------------------------------------------------------------------------------

OURS = {
    "dovetail library": "library",
    "dovetail embedded": "embedded",
    "dovetail, streams": "Streams",
    "dovetail, celery": "Celery",
}
"""The contestants that each row is compared with, and the titles of these columns."""


@dataclass(frozen=True)
class Contestant:
    opener: Opener
    promise: str
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    """What it gets: a `folder`, the `url` of a Redis or of a `database`, or a `port`."""
    apart: bool = False
    """Whether it runs in the environment of the peers."""


_STREAMS = {"transport": "streams", "concurrency": 128}
_CELERY = {"transport": "celery", "concurrency": 2}

CONTESTANTS: dict[str, Contestant] = {
    "dovetail library": Contestant(library, "process"),
    "dask delayed, synchronous": Contestant(
        dask_delayed, "process", {"scheduler": "synchronous"}, apart=True
    ),
    "dask delayed, 2 threads": Contestant(
        dask_delayed, "process", {"scheduler": "threads"}, apart=True
    ),
    "dask bag, 2 threads": Contestant(dask_bag, "process", apart=True),
    "dask futures, 2 processes": Contestant(dask_futures, "process", apart=True),
    "dovetail embedded": Contestant(embedded, "power cut", needs="folder"),
    "dbos steps, SQLite": Contestant(dbos_steps, "power cut", needs="folder"),
    "dbos queue, SQLite": Contestant(dbos_queue, "power cut", needs="folder"),
    "dbos queue, PostgreSQL": Contestant(dbos_queue, "power cut", needs="database"),
    "prefect map, SQLite": Contestant(prefect_map, "states", needs="port", apart=True),
    "dovetail, streams": Contestant(distributed_services, "second", _STREAMS, needs="url"),
    "dovetail, celery": Contestant(distributed_services, "second", _CELERY, needs="url"),
    "celery chord": Contestant(celery_chord, "results", needs="url"),
}

Effort = Callable[[float], Mapping[str, int]]


@dataclass
class Running:
    """A contestant whose process runs, and the CPU time of its rounds."""

    process: SeparateProcess
    servers: list[int]
    """The process ids of the Redis or PostgreSQL that it uses."""
    cpu: Times = field(default_factory=list)

    def seconds(self) -> float:
        """The time of one run. Keeps the CPU time of all its processes in `cpu`."""
        pids = [self.process.pid, *self.servers]
        before = sum(map(cpu_seconds, pids))
        taken = self.process.call("run").seconds
        self.cpu.append(sum(map(cpu_seconds, pids)) - before)
        return taken


def measure(
    names: list[str], effort: Effort, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Rows by contestant. The row of a contestant that fails has the reason as `failed`."""
    rows: dict[str, Any] = {}
    running: dict[str, Running] = {}
    with ExitStack() as stack:
        redis = None
        for number, name in enumerate(names):
            one = CONTESTANTS[name]
            rows[name] = {"promise": one.promise, "items": ITEMS}
            own = folder / str(number)
            own.mkdir()
            arguments, servers = dict(one.arguments), []
            if one.needs == "url":
                redis = redis or stack.enter_context(private_redis())
                arguments["url"] = redis.url.removesuffix("/0") + f"/{number}"
                servers = [redis.pid]
            elif one.needs == "database":
                postgres = stack.enter_context(private_postgres())
                arguments["url"] = postgres.new_database()
                servers = [postgres.pid]
            elif one.needs:
                arguments["folder"] = str(own)
            if one.needs == "port":
                arguments["port"] = server_module("server").free_port()
            python = str(ENVIRONMENT / "bin" / "python") if one.apart else sys.executable
            say(f"… {name}")
            try:
                opener = f"maps:{one.opener.__name__}"
                process = SeparateProcess(opener, python=python, **arguments)
            except (Failed, Missing, FileNotFoundError) as error:
                rows[name]["failed"] = _why(error)
                continue
            stack.callback(process.close)
            running[name] = Running(process, servers)
        times = _times(rows, running, effort, say)
    for name, taken in times.items():
        reported = summary(taken)
        rows[name] |= {
            "median_seconds": reported.median,
            "best_seconds": reported.best,
            "spread": reported.spread,
            "items_per_second": ITEMS / reported.median,
            "cpu_seconds_per_item": statistics.median(running[name].cpu[-len(taken) :]) / ITEMS,
            "seconds": taken,
            "times": {ours: ratio(taken, times[ours]) for ours in OURS if ours in times},
        }
    return rows


def _times(
    rows: dict[str, Any], running: dict[str, Running], effort: Effort, say: Callable[[str], None]
) -> dict[str, Times]:
    def seconds(name: str) -> float:
        if "failed" in rows[name]:
            return inf
        try:
            return running[name].seconds()
        except (Failed, OSError) as error:  # OSError: one of its processes has ended
            rows[name]["failed"] = str(error)
            return inf

    first = {name: seconds(name) for name in running}
    planned = effort(sum(taken for taken in first.values() if taken < inf))
    say(f"… a map of {ITEMS:,} items: {planned['warmup']} + {planned['count']} rounds")
    times = rounds({name: name for name in running}, **planned, timed=seconds) if running else {}
    return {name: taken for name, taken in times.items() if "failed" not in rows[name]}


def _why(error: Exception) -> str:
    if isinstance(error, Missing):
        return f"{error} is not installed; ./dev bench installs it"
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename}; ./dev bench --map installs it"
    return str(error)


def table(rows: dict[str, Any]) -> str:
    head = f"a map of {ITEMS:,} items and a join"
    against = " ".join(f"{'× ' + title:>10}" for title in OURS.values())
    columns = f"{'promise':9}  {'median':>11} {'spread':>6} {'items/s':>8} {'CPU':>11}"
    # "× embedded" 90 in the row of a peer: the embedded engine is 90 times as fast as that peer.
    lines = [f"{head:32} {columns} {against}"]
    for name, row in rows.items():
        line = f"  {name:30} {row['promise']:9}"
        if "failed" in row:
            lines.append(f"{line}  failed: {row['failed']}")
            continue
        line += f"  {row['median_seconds'] * MILLI:8.1f} ms {row['spread']:6.0%}"
        line += f" {row['items_per_second']:8,.0f} {row['cpu_seconds_per_item'] * MICRO:8,.0f} µs"
        for ours in OURS:
            found = f"{row['times'][ours]:.2f}" if ours in row["times"] else "—"
            line += f" {found:>10}"
        lines.append(line)
    return "\n".join(lines)
