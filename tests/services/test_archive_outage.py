"""PostgreSQL hangs, dies and comes back; Redis is emptied under processes that work on it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dovetail.config import Settings
from dovetail.core.errors import ArchiveDown
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel
from dovetail.engine.ports import RunQuery
from dovetail.stores.postgres import pool as postgres_pool
from dovetail.stores.postgres import records as postgres_records
from dovetail.wiring.distributed import commanding

from ..servers.postgres_server import PostgresServer
from ..servers.redis_server import RedisServer
from .archive_world import DIAMOND, RETENTION, World, a_world, graph

PATIENCE = 0.5


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as own:
        yield own


@pytest.fixture
async def world(
    redis_url: str, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    for name in ("SOON_SECONDS", "ANSWER_SECONDS", "CONNECT_SECONDS"):
        monkeypatch.setattr(postgres_pool, name, PATIENCE)
    monkeypatch.setattr(postgres_records, "ACCEPT_SECONDS", PATIENCE)
    url = await asyncio.to_thread(server.new_database)
    async with a_world(redis_url, url) as made:
        yield made


def stop(server: PostgresServer) -> list[int]:
    """SIGSTOP, with every child that serves a connection."""
    assert server.pid is not None
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    pids = [server.pid, *map(int, children)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def go_on(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def outage(world: World, old: str, ended: str) -> None:
    """What holds while the archive is away."""
    began = time.monotonic()
    with pytest.raises(ArchiveDown):
        await world.accept(graph(DIAMOND))
    assert time.monotonic() - began < PATIENCE + 10, "a caller that triggers learns it soon"
    await world.do(old, "a")
    with pytest.raises(ArchiveDown):
        await world.archiver.archive_what_moved()
    world.now += 2 * RETENTION
    with pytest.raises(ArchiveDown):
        await world.archiver.retire()
    with pytest.raises(ArchiveDown):
        await world.restorer.restore()
    assert await world.hints.lag() >= RETENTION
    assert (await world.finish(old)).status is RunStatus.COMPLETED
    assert await world.snapshots.known([old, ended]) == {old, ended}


async def afterwards(world: World, old: str, ended: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await world.archiver.archive_what_moved()
                break
            except ArchiveDown:
                await asyncio.sleep(0.05)
    await world.assert_archived(old)
    assert await world.hints.lag() == 0
    await world.archiver.retire()
    assert await world.snapshots.known([old, ended]) == {old}
    assert (await world.records.summary(old))["status"] == "COMPLETED"
    await world.finish(await world.begin(graph(DIAMOND)))


async def two_runs(world: World) -> tuple[str, str]:
    old, ended = [await world.begin(graph(DIAMOND)) for _ in range(2)]
    await world.orchestrator.apply([Cancel(ended)])
    await world.archiver.archive_what_moved()
    return old, ended


async def test_a_hanging_postgresql_delays_no_run_and_is_caught_up_later(
    world: World, server: PostgresServer
) -> None:
    runs = await two_runs(world)
    stopped = stop(server)
    try:
        await outage(world, *runs)
    finally:
        go_on(stopped)
    await afterwards(world, *runs)


async def test_a_dead_postgresql_delays_no_run_and_is_caught_up_later(
    world: World, server: PostgresServer
) -> None:
    runs = await two_runs(world)
    await asyncio.to_thread(server.kill)
    try:
        await outage(world, *runs)
    finally:
        await asyncio.to_thread(server.start)
    await afterwards(world, *runs)


# ── with processes of their own ──────────────────────────────────────────────────────────

SERVICE = """
import asyncio, sys
from dovetail.config import Settings
from dovetail.wiring.distributed import orchestrate, working
from dovetail.handlers.builtin import builtin_registry

async def main():
    settings = Settings(redis_url=sys.argv[2], database_url=sys.argv[3], lease_seconds=1,
                        recovery_timeout=0.1, checkpoint_interval=1, drain_seconds=1)
    if sys.argv[1] == "orchestrator":
        await orchestrate(settings)
    async with working(settings, builtin_registry(settings)):
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Processes:
    def __init__(self, folder: Path, *urls: str) -> None:
        self._script = folder / "service.py"
        self._script.write_text(SERVICE)
        self._urls = urls
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, kind: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, str(self._script), kind, *self._urls])
        self._all.append(process)
        return process

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


SLOW = {
    "name": "slow",
    "nodes": [
        {"id": "a", "handler": "input"},
        {"id": "b", "handler": "sleep", "config": {"seconds": 0.3}, "dependencies": ["a"]},
        {"id": "c", "handler": "sleep", "config": {"seconds": 0.3}, "dependencies": ["b"]},
        {"id": "d", "handler": "output", "dependencies": ["c"]},
    ],
}


async def test_unfinished_runs_complete_after_redis_was_emptied(
    tmp_path: Path, redis_server: RedisServer, redis_url: str, server: PostgresServer
) -> None:
    url = await asyncio.to_thread(server.new_database)
    processes = Processes(tmp_path, redis_url, url)
    settings = Settings(redis_url=redis_url, database_url=url)
    try:
        doomed = processes.start("orchestrator")
        processes.start("worker")
        async with commanding(settings) as commands:
            await commands.register(SLOW)
            ids = [(await commands.trigger("slow")).run_id for _ in range(10)]
            async with asyncio.timeout(20):
                while (await commands.get_run(ids[0]))["nodes"][1]["status"] == "PENDING":
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)  # so that the archive has something of them
            doomed.kill()
            doomed.wait()
            await asyncio.to_thread(redis_server.flush)
            processes.start("orchestrator")
            for run_id in ids:
                run = await asyncio.wait_for(commands.wait(run_id), 30)
                assert run.status is RunStatus.COMPLETED
            async with asyncio.timeout(10):
                while (await commands.list_runs(RunQuery(status="COMPLETED")))["items"][9:] == []:
                    await asyncio.sleep(0.1)
            for run_id in ids:
                reported = await commands.events(run_id)
                assert [event["seq"] for event in reported] == list(range(1, len(reported) + 1))
                assert reported[-1]["type"] == "run.completed"
    finally:
        processes.close()
