"""`/health/ready` says what a trigger would meet: over real servers that refuse, and recover."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dovetail.api import service
from dovetail.api.app import create_app
from dovetail.api.service import ApiService, Readiness
from dovetail.config import Settings
from dovetail.core.errors import StoreError
from dovetail.stores.postgres import pool as postgres_pool
from dovetail.stores.sqlite.file import SqliteFile
from dovetail.stores.sqlite.store import SqliteStore
from dovetail.wiring import distributed, health
from dovetail.wiring.distributed import commanding
from dovetail.wiring.health import watching

from ..servers.postgres_server import PostgresServer
from ..servers.redis_server import RedisServer
from .conftest import Server, flow, wait_for

FLOW = flow("f")
SECONDS = 30.0


class Asked:
    """An application in this process."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def ready(self) -> tuple[int, list[str]]:
        answer = await self._client.get("/health/ready")
        reported = answer.json()
        if answer.status_code == 200:
            assert reported == {"status": "ok"}
            return 200, []
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) > 0
        assert reported["detail"] == ", ".join(reported["reasons"])
        assert "127.0.0.1" not in answer.text
        assert "/" not in reported["detail"]
        return answer.status_code, reported["reasons"]

    async def trigger(self) -> int:
        return (await self._client.post("/api/v1/workflows/f/runs")).status_code

    async def reads(self) -> int:
        return (await self._client.get("/api/v1/runs")).status_code

    async def until_fine(self) -> None:
        async with asyncio.timeout(SECONDS):
            while (await self.ready())[0] != 200:
                await asyncio.sleep(0.02)
        assert await self.trigger() == 202


@asynccontextmanager
async def asking(**settings: Any) -> AsyncIterator[Asked]:
    reported = Settings(**settings)
    async with commanding(reported) as commands, watching(reported, []) as workers:
        app = create_app(ApiService(commands, workers, reported), "1")
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=SECONDS
        ) as client:
            assert (await client.post("/api/v1/workflows", json=FLOW)).status_code in (200, 201)
            asked = Asked(client)
            assert await asked.ready() == (200, [])
            assert await asked.trigger() == 202
            yield asked


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KNOWN_SECONDS", 0.0)
    monkeypatch.setattr(distributed, "ASKING_SECONDS", 0.2)
    monkeypatch.setattr(postgres_pool, "DOUBT_SECONDS", 0.2)


# ── Redis ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        (server.folder / "dump.rdb" / "in the way").mkdir(parents=True)
        yield server


def cannot_save(server: RedisServer) -> None:
    server.ask("CONFIG", "SET", "save", "3600 1000000")
    server.ask("CONFIG", "SET", "stop-writes-on-bgsave-error", "yes")
    server.ask("BGSAVE")
    wait_for(
        lambda: "rdb_last_bgsave_status:err" in server.ask("INFO", "persistence"), "a failed save"
    )


REFUSALS: Mapping[str, tuple[Callable[[RedisServer], object], tuple[str, ...], str]] = {
    "memory": (
        lambda server: server.ask("CONFIG", "SET", "maxmemory", "1"),
        ("CONFIG", "SET", "maxmemory", "0"),
        "its memory is full",
    ),
    "saving": (
        cannot_save,
        ("CONFIG", "SET", "stop-writes-on-bgsave-error", "no"),
        "it could not save its data to its disk",
    ),
    "replica": (
        lambda server: server.ask("REPLICAOF", "127.0.0.1", "1"),
        ("REPLICAOF", "NO", "ONE"),
        "it is a replica",
    ),
    "replicas": (
        lambda server: server.ask("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
        "too few of its replicas are there",
    ),
}


@pytest.mark.parametrize("how", REFUSALS)
async def test_the_server_is_not_ready_while_redis_refuses_writes(
    redis: RedisServer, how: str
) -> None:
    begin, end, why = REFUSALS[how]
    async with asking(redis_url=redis.url) as api:
        try:
            begin(redis)
            await asyncio.sleep(health.SEEN_SECONDS)  # who has just answered is not asked again
            assert await api.ready() == (503, [f"Redis accepts no writes: {why}"])
            assert await api.trigger() == 503
            assert await api.reads() == 200
        finally:
            redis.ask(*end)
        await api.until_fine()


async def test_the_server_is_not_ready_while_redis_is_down() -> None:
    with RedisServer(fsync="always") as server:
        async with asking(redis_url=server.url) as api:
            server.kill()
            # Who was just there is not asked again for a moment.
            async with asyncio.timeout(SECONDS):
                while (found := await api.ready())[0] == 200:
                    await asyncio.sleep(0.01)
            assert found == (503, ["Redis cannot be reached"])
            assert await api.trigger() == 503
            server.start()
            await api.until_fine()


# ── PostgreSQL ───────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


FULL = """
CREATE FUNCTION dovetail.no_room() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
  RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100';
END $$
"""


async def test_the_server_is_not_ready_while_postgresql_refuses_or_is_down(
    redis: RedisServer, postgres: PostgresServer
) -> None:
    url = postgres.new_database()
    writable = url + ("&" if "?" in url else "?") + "default_transaction_read_only=off"
    redis.flush()
    async with asking(redis_url=redis.url, database_url=url) as api:
        postgres.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        postgres.execute("SELECT pg_reload_conf()")
        try:
            async with asyncio.timeout(SECONDS):
                while (found := await api.ready())[0] == 200:  # its processes read it in a moment
                    await asyncio.sleep(0.01)
            assert found == (503, ["PostgreSQL accepts no writes: it is read-only"])
            assert await api.trigger() == 503
        finally:
            postgres.execute("ALTER SYSTEM RESET default_transaction_read_only", writable)
            postgres.execute("SELECT pg_reload_conf()", writable)
        await api.until_fine()

        postgres.execute(FULL, url)
        on_runs = "no_room BEFORE INSERT ON dovetail.runs"
        postgres.execute(f"CREATE TRIGGER {on_runs} EXECUTE FUNCTION dovetail.no_room()", url)
        assert await api.trigger() == 503
        assert await api.ready() == (503, ["PostgreSQL accepts no writes: its disk is full"])
        postgres.execute("DROP TRIGGER no_room ON dovetail.runs", url)
        await api.until_fine()

        # Where runs are accepted by PostgreSQL, Redis may have them later.
        redis.ask("CONFIG", "SET", "maxmemory", "1")
        try:
            assert (await api.trigger(), await api.ready()) == (202, (200, []))
        finally:
            redis.ask("CONFIG", "SET", "maxmemory", "0")

        postgres.stop()
        assert await api.ready() == (503, ["PostgreSQL cannot be reached"])
        assert await api.trigger() == 503
        postgres.start()
        await api.until_fine()


# ── the file ─────────────────────────────────────────────────────────────────────────────


async def test_with_little_disk_space_readiness_is_checked_by_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = True
    monkeypatch.setattr(SqliteFile, "has_room", lambda self: room)
    async with SqliteStore(tmp_path / "f.db", lease_seconds=600.0) as store:

        async def only_read(mode: str) -> None:
            await store.writer.perform(lambda c: c.execute(f"PRAGMA query_only = {mode}"))

        commits = store.writer.commits
        await store.check_writable()
        assert store.writer.commits == commits  # with enough room nothing is written
        room = False
        await store.check_writable()
        assert store.writer.commits == commits + 1
        await only_read("on")
        with pytest.raises(StoreError) as caught:
            await store.check_writable()
        assert caught.value.reason == "the database file is read-only"
        await only_read("off")
        await store.check_writable()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (sqlite3.SQLITE_FULL, "the disk of the database file is full"),
        (sqlite3.SQLITE_READONLY, "the database file is read-only"),
        (sqlite3.SQLITE_IOERR, "cannot be read or written"),
        (sqlite3.SQLITE_BUSY, "locked"),
        (sqlite3.SQLITE_MISUSE, "cannot be used"),
    ],
)
def test_the_reason_of_a_file_error_has_no_path(code: int, reason: str) -> None:
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    explained = SqliteFile(Path("/private/place.db")).explained(error)
    assert reason in explained.reason
    assert "place" not in explained.reason


def test_a_server_whose_file_cannot_grow_reports_it_and_the_next_server_works(
    start: Callable[..., Server], name: str
) -> None:
    server = start(DOVETAIL_DRAIN_SECONDS="0")
    api = server.client()
    api.register(flow(name))
    pid, limit = server.process.pid, resource.RLIMIT_FSIZE
    _, hard = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (1, hard))  # every write to a file fails from here on
    assert api("POST", f"/workflows/{name}/runs").status_code == 503
    # It ends by itself, a moment later: its memory may be ahead of the file.
    with suppress(httpx2.TransportError):
        answer = api("GET", "//health/ready")
        assert answer.status_code == 503
        assert str(server.folder) not in answer.text
    assert server.process.wait(30) == 1
    server.close()
    mended = start().client()
    assert mended.get("//health/ready") == {"status": "ok"}
    mended.post(f"/workflows/{name}/runs")


# ── how often ────────────────────────────────────────────────────────────────────────────


async def test_readiness_checks_the_stores_once_per_second_for_any_number_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "KNOWN_SECONDS", 1.0)
    ready, asked = Readiness(), 0
    verdict: StoreError | None = StoreError("x")

    async def probe() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        if verdict is not None:
            raise verdict

    began = time.monotonic()
    answers = await asyncio.gather(*(ready(probe) for _ in range(50)))
    answers += [await ready(probe) for _ in range(50)]
    if time.monotonic() - began < 1.0:
        assert asked == 1
    assert answers == [verdict] * 100
    before, verdict = asked, None
    monkeypatch.setattr(service, "KNOWN_SECONDS", 0.0)
    assert await ready(probe) is None
    assert asked == before + 1


async def test_a_readiness_check_does_not_wait_for_a_hanging_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "READY_SECONDS", 0.05)
    found = await Readiness()(lambda: asyncio.sleep(SECONDS))
    assert found is not None
    assert "does not answer" in found.reason
