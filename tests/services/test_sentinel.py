"""Redis behind sentinels: another server takes over, and services go on with what it knows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.engine.commands import Commands
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.context import Context
from dovetail.handlers.registry import describe
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.redis_client.sync import SyncRedis, done
from dovetail.wiring.distributed import commanding, orchestrate, working
from dovetail.wiring.embedded import redis_findings

from ..celery_crew import celery_worker
from ..servers.redis_server import RedisServer
from ..servers.sentinels import SERVICE, NamingSentinel, Sentinels, follow
from ..servers.server import free_port

SECONDS = 60.0


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[RedisServer, RedisServer]]:
    """Two servers that know nothing of each other until a test says so."""
    settings = {"repl-diskless-sync-delay": "0"}
    with RedisServer(settings=settings) as one, RedisServer(settings=settings) as other:
        yield one, other


@pytest.fixture
def pair(two: tuple[RedisServer, RedisServer]) -> Iterator[tuple[RedisServer, RedisServer]]:
    """The one that leads, and one that follows it."""
    for one in two:
        if not one.runs:
            one.start()
        one.ask("REPLICAOF", "NO", "ONE")
        one.flush()
    follow(two[1], two[0])
    return two


def take_over(sentinel: NamingSentinel, gone: RedisServer, next_one: RedisServer) -> None:
    gone.kill()
    next_one.ask("REPLICAOF", "NO", "ONE")
    sentinel.names = next_one.port


# ── connections ──────────────────────────────────────────────────────────────────────────


async def test_a_connection_follows_the_master(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    one, other = pair
    with NamingSentinel(one.port) as sentinel:
        async with PipelinedRedis(sentinel.url()) as pipe:
            await pipe.call("SET", "k", "v")
            assert pipe.where.endswith(f":{one.port}")
            await pipe.call("WAIT", 1, 5000)
            take_over(sentinel, one, other)
            assert await pipe.call("GET", "k") == b"v"
            assert pipe.where.endswith(f":{other.port}")


async def test_a_blocking_connection_follows_the_master(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    one, other = pair
    with NamingSentinel(one.port) as sentinel:
        pipe = SyncRedis(sentinel.url())
        done(pipe.call("SET", "k", "v"))
        done(pipe.call("WAIT", 1, 5000))
        take_over(sentinel, one, other)
        assert done(pipe.call("GET", "k")) == b"v"
        pipe.close()


async def test_a_server_that_is_not_the_master_is_rejected(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    """A sentinel may name a server before it leads, or one that leads no longer."""
    one, other = pair
    with NamingSentinel(other.port) as sentinel:
        with pytest.raises(RedisError, match="does not lead yet"):
            await PipelinedRedis(sentinel.url()).__aenter__()
        blocking = SyncRedis(sentinel.url(), patience=0.0)
        with pytest.raises(RedisError, match="does not lead yet"):
            done(blocking.call("PING"))
        blocking.close()
        asked = sentinel.asked
        waiting = PipelinedRedis(sentinel.url())
        waiting.open_in_background()
        answer = asyncio.ensure_future(waiting.call("ROLE"))
        while sentinel.asked < asked + 2:
            await asyncio.sleep(0.01)
        sentinel.names = one.port
        assert (await asyncio.wait_for(answer, SECONDS))[0] == b"master"
        await waiting.__aexit__()


async def test_a_connection_leaves_a_server_that_becomes_a_replica(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    one, other = pair
    with NamingSentinel(one.port) as sentinel:
        async with PipelinedRedis(sentinel.url()) as pipe:
            other.ask("REPLICAOF", "NO", "ONE")
            sentinel.names = other.port
            follow(one, other)  # its connections stay open, and what is written is refused
            await pipe.call("SET", "k", "v")
            assert other.ask("GET", "k") == "v"


async def test_a_blocking_read_moves_to_the_new_master(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    one, other = pair
    with NamingSentinel(one.port) as sentinel:
        async with PipelinedRedis(sentinel.url()) as pipe:
            read = asyncio.ensure_future(pipe.call("BLPOP", "list", 30))
            while "blocked_clients:1" not in one.ask("INFO", "clients"):
                await asyncio.sleep(0.01)
            other.ask("REPLICAOF", "NO", "ONE")
            sentinel.names = other.port
            one.ask("REPLICAOF", "127.0.0.1", str(other.port))
            while "blocked_clients:1" not in other.ask("INFO", "clients"):
                await asyncio.sleep(0.01)
            other.ask("RPUSH", "list", "x")
            assert await asyncio.wait_for(read, SECONDS) == [b"list", b"x"]


async def test_sentinels_are_tried_in_order_with_their_own_password(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    one, _ = pair
    with NamingSentinel(one.port, password="sesame") as sentinel:
        away = f"127.0.0.1:{free_port()}"
        hosts = f"redis+sentinel://{away},127.0.0.1:{sentinel.port}/{SERVICE}/3"
        async with PipelinedRedis(f"{hosts}?sentinel_password=sesame") as pipe:
            await pipe.call("SET", "in", "three")
        assert "db3:keys=1" in one.ask("INFO", "keyspace")
        with pytest.raises(RedisError, match=r"no sentinel answers \(.*refused.*; .*NOAUTH"):
            await PipelinedRedis(hosts).__aenter__()


async def test_an_unknown_service_name_is_reported_with_a_suggestion(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    with (
        NamingSentinel(pair[0].port) as sentinel,
        pytest.raises(RedisError, match="knows the service 'mymastr'; did you mean 'mymaster'"),
    ):
        await PipelinedRedis(sentinel.url("/mymastr")).__aenter__()


# ── services ─────────────────────────────────────────────────────────────────────────────


class SentinelServices:
    """An orchestrator, a worker and commands, in this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.release = asyncio.Event()
        self.started = asyncio.Event()

    async def hold(self, config: dict[str, Any], ctx: Context) -> str:
        self.started.set()
        await self.release.wait()
        return ctx.run_id

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Commands]:
        registry = builtin_registry(self.settings)
        registry.add(describe(self.hold, name="hold"))
        async with AsyncExitStack() as stack:
            leading = asyncio.create_task(orchestrate(self.settings))
            stack.callback(leading.cancel)
            await stack.enter_async_context(working(self.settings, registry))
            commands = await stack.enter_async_context(commanding(self.settings, registry))
            yield commands
            self.release.set()


FLOW = {
    "name": "flow",
    "nodes": [
        {"id": "a", "handler": "hold"},
        {"id": "b", "handler": "input", "dependencies": ["a"]},
    ],
}


ECHO = {"name": "echo", "nodes": [{"id": "a", "handler": "input"}]}


async def ended(commands: Commands, run_id: str) -> str:
    """Its status; what is asked while there is no primary is asked again."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                return (await commands.wait(run_id)).status.value
            except RedisError:
                await asyncio.sleep(0.1)


async def triggered(commands: Commands, flow: dict[str, Any] = FLOW) -> str:
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                return (await commands.trigger(flow)).run_id
            except RedisError:
                await asyncio.sleep(0.1)


async def test_a_run_that_a_lagging_replica_lacks_is_restored_from_postgresql(
    pair: tuple[RedisServer, RedisServer], postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair
    with NamingSentinel(one.port) as sentinel:
        settings = Settings(
            redis_url=sentinel.url(),
            database_url=postgres_url,
            lease_seconds=2.0,
            recovery_timeout=0.0,
            drain_seconds=0.0,
        )
        team = SentinelServices(settings)
        async with team.at_work() as commands:
            other.ask("REPLICAOF", "NO", "ONE")  # from now on it gets nothing
            run_id = await triggered(commands)
            await asyncio.wait_for(team.started.wait(), SECONDS)
            with caplog.at_level(logging.WARNING):
                take_over(sentinel, one, other)
                team.release.set()
                # Well before the look that takes place every minute.
                run = asyncio.wait_for(ended(commands, run_id), SECONDS / 3)
                assert await run == "COMPLETED"
            assert other.ask("EXISTS", f"wf:{{{run_id}}}:meta") == "1"
    assert f":{other.port} leads now, in place of" in caplog.text
    assert "restored from PostgreSQL" in caplog.text


async def test_services_continue_when_three_sentinels_promote_the_replica(
    tmp_path: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Over streams and over Celery, each in a database of its own: one failover for both."""
    with Sentinels() as redis:
        streams = SentinelServices(
            Settings(redis_url=redis.url(0), lease_seconds=2.0, drain_seconds=0.0)
        )
        by_celery = Settings(redis_url=redis.url(1), transport="celery", lease_seconds=2.0)
        async with AsyncExitStack() as stack:
            commands = await stack.enter_async_context(streams.at_work())
            direct = redis.master.url.replace("/0", "/1")
            log = stack.enter_context(
                celery_worker(
                    tmp_path, direct, DOVETAIL_REDIS_URL=redis.url(1), CREW_REDIS_URL=redis_url
                )
            )
            leading = asyncio.create_task(orchestrate(by_celery))
            stack.callback(leading.cancel)
            others = await stack.enter_async_context(commanding(by_celery))
            assert await ended(others, await triggered(others, ECHO)) == "COMPLETED"

            run_id = await triggered(commands)
            await asyncio.wait_for(streams.started.wait(), SECONDS)
            findings = {one.check: one for one in await redis_findings(streams.settings)}
            redis.master.ask("WAIT", "1", "5000")
            with caplog.at_level(logging.WARNING):
                redis.master.kill()
                streams.release.set()
                assert await ended(commands, run_id) == "COMPLETED"
                assert await ended(commands, await triggered(commands)) == "COMPLETED"
            again = await triggered(others, ECHO)
            assert await ended(others, again) == "COMPLETED", log.reported()
        assert findings["sentinels"].message == "3 answer, 1 replica"
        assert findings["sentinels"].ok
        assert "DOVETAIL_DATABASE_URL" in findings["sentinels"].fix
        assert f":{redis.replica.port} leads now, in place of" in caplog.text
        assert "no PostgreSQL to restore it from" in caplog.text
