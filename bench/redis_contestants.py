"""Who runs the workloads over one Redis: Dovetail's services, streaQ, Celery's canvas, a floor.

Each has a database of that Redis, worker processes of its own and a client, which is the process it
is opened in (see apart.py). Services, connections and definitions are there before; timed is what
a client would wait for: from the first run that it starts until it knows that all have ended. The
peers tell that by the results, so these are read by then; Dovetail's are read and checked after.

A call answers the CPU time of the client. Who `checks` has another call that does so, untimed. Who
`rests` has work left when its runs have ended, and a call that returns once that is done: its time
does not count, but the CPU that it takes does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from apart import Job, Opener
from fleet import HERE, services
from measuring import cpu_taken
from workloads import Workload, definition

START_SECONDS = 60.0
POLL_SECONDS = 0.05
MAX_CHECKED_RUNS = 500
"""Of a batch: what one page of it has."""
ORCHESTRATOR = ["-m", "dovetail", "orchestrator"]
WORKER = ["-m", "dovetail", "worker", "--handlers", str(HERE / "noop_handler.py")]
CONCURRENCY = {"streams": "128", "celery": "2"}
"""Of a worker: as many at once as streaQ's two have together, as many processes as Celery's."""


@contextmanager
def dovetail(
    works: list[dict[str, Any]],
    url: str,
    database_url: str | None = None,
    orchestrators: int = 1,
    workers: int = 1,
    transport: str = "streams",
) -> Iterator[Job]:
    """Its services as anybody starts them, with their default settings and registered workflows."""
    from dovetail.config import Settings
    from dovetail.wiring.distributed import commanding

    settings = Settings(redis_url=url, database_url=database_url, transport=transport)
    environment = {
        "DOVETAIL_REDIS_URL": url,
        "DOVETAIL_DATABASE_URL": database_url or "",
        "DOVETAIL_TRANSPORT": transport,
    }
    worker = [*WORKER, "--concurrency", CONCURRENCY[transport]]
    with ExitStack() as stack:
        pids = stack.enter_context(
            services(
                orchestrator=[ORCHESTRATOR] * orchestrators,
                worker=[worker] * workers,
                environment=environment,
            )
        )
        loop = stack.enter_context(asyncio.Runner()).get_loop()
        entered = commanding(settings)
        commands = loop.run_until_complete(entered.__aenter__())
        stack.callback(lambda: loop.run_until_complete(entered.__aexit__(None, None, None)))
        calls: dict[str, Callable[[], Any]] = {}

        def in_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
            return lambda: loop.run_until_complete(work())

        for work in (Workload(**each) for each in works):
            loop.run_until_complete(registered(commands, definition(work)))
            client = _Client(commands, work)
            calls[work.name] = cpu_taken(in_loop(client.run))
            calls[f"check {work.name}"] = in_loop(client.check)
        if database_url is not None:
            calls["rest"] = in_loop(partial(_archived, url))
        yield Job({"pids": pids, "rests": database_url is not None, "checks": True}, calls)


class _Client:
    """Starts the runs of a workload and waits for their ends; what they say, it asks afterwards."""

    def __init__(self, commands: Any, work: Workload) -> None:
        self._commands = commands
        self._work = work
        self._last = ""
        """The run, or the batch of them, that was waited for last."""

    async def run(self) -> None:
        commands, work = self._commands, self._work
        if work.runs == 1:
            self._last = (await commands.trigger(work.name)).run_id
            await commands.ended(self._last)
            await commands.get_run(self._last, nodes=False)  # with its result, as peers give it
        else:
            self._last = (await commands.batch(work.name, [{}] * work.runs))["batch_id"]
            await commands.wait_batch(self._last)

    async def check(self) -> None:
        commands, work = self._commands, self._work
        ids = [self._last]
        if work.runs > 1:
            batch = await commands.get_batch(self._last, limit=min(work.runs, MAX_CHECKED_RUNS))
            ids = [run["run_id"] for run in batch["runs"]]
            work = replace(work, runs=min(work.runs, MAX_CHECKED_RUNS))
        runs = [await commands.store.load(run_id) for run_id in ids]
        work.check([run.node(name).output for run in runs for name in work.exits])


async def registered(commands: Any, flow: dict[str, Any]) -> None:
    """As soon as a worker has said that it knows the handler."""
    from dovetail.core.errors import InvalidDefinition

    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                await commands.register(flow)
                return
            except InvalidDefinition:
                await asyncio.sleep(POLL_SECONDS)


async def _archived(url: str) -> None:
    """Until the archive has everything, so that its work does not fall to the next contestant."""
    from dovetail.redis_client.pipelined import PipelinedRedis
    from dovetail.stores.redis.archive import UNARCHIVED

    async with asyncio.timeout(START_SECONDS), PipelinedRedis(url) as pipe:
        while True:
            if not await pipe.call("ZCARD", UNARCHIVED):
                return
            await asyncio.sleep(POLL_SECONDS)


@contextmanager
def peer(works: list[dict[str, Any]], url: str, module: str) -> Iterator[Job]:
    """One of the modules beside this, which reads where its Redis is when it is loaded."""
    os.environ["BENCH_REDIS_URL"] = url
    with import_module(module).opened([Workload(**each) for each in works]) as job:
        yield job


OURS = "dovetail"
ARCHIVED = "dovetail, archived"
DOUBLED = "dovetail, 2 + 2"
STREAQ = "streaq"
CELERY = "celery"
FLOOR = "floor"

CONTESTANTS: dict[str, tuple[Opener, dict[str, Any]]] = {
    OURS: (dovetail, {}),
    ARCHIVED: (dovetail, {"archive": True}),
    DOUBLED: (dovetail, {"orchestrators": 2, "workers": 2}),
    STREAQ: (peer, {"module": "streaq_peer"}),
    CELERY: (peer, {"module": "celery_peer"}),
    FLOOR: (peer, {"module": "redis_floor"}),
}
