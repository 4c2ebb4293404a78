"""What the doctor finds of a Redis, each with what would help."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dovetail.config import Settings, load_settings
from dovetail.engine.ports import DoctorFinding
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.stores.redis.doctor import disagreements, examine, reach
from dovetail.stores.redis.workers import WorkerFacts, WorkerRegistry
from dovetail.transports.streams.reader import OrchestratorPeers
from dovetail.wiring.health import await_redis

from ..servers.redis_cluster import RedisCluster
from ..servers.redis_server import RedisServer
from ..servers.server import free_port

WORKER = WorkerFacts("w", "host", 7, 0.0, ["sleep"], 1, 4)
SAFE = {"database_url": "postgresql://host/db"}


def settings(**given: Any) -> Settings:
    return load_settings(environ={}, **given)


def by_check(findings: list[DoctorFinding]) -> dict[str, DoctorFinding]:
    assert all(found.fix for found in findings if not found.ok), "what would help?"
    assert not any(found.fix for found in findings if found.ok)
    return {found.check: found for found in findings}


@pytest.fixture
async def pipe(redis_url: str) -> AsyncIterator[PipelinedRedis]:
    async with PipelinedRedis(redis_url) as pipe:
        yield pipe


async def found_of(pipe: PipelinedRedis, **given: Any) -> dict[str, DoctorFinding]:
    return by_check(await examine(pipe, settings(**{**SAFE, **given})))


async def test_a_redis_with_an_aof_a_database_and_a_worker_is_healthy(pipe: PipelinedRedis) -> None:
    await WorkerRegistry(pipe).beat(WORKER)
    assert await OrchestratorPeers(pipe, "me").beat() == []
    found = await found_of(pipe)
    assert [check for check, one in found.items() if not one.ok] == []
    assert found["workers"].message == "1 alive, 1 of 4 slots busy"
    assert found["persistence"].message == "logged, appendfsync everysec"


async def test_without_postgresql_every_write_must_reach_the_disk() -> None:
    with RedisServer() as server:
        alone = settings(redis_url=server.url)
        found = by_check(await reach(alone))["persistence"]
        assert not found.ok
        assert "appendfsync is everysec" in found.message
        assert "CONFIG SET appendfsync always" in found.fix
        server.ask("CONFIG", "SET", "appendfsync", "always")
        assert by_check(await reach(alone))["persistence"].ok


async def test_a_redis_that_may_lose_data_is_reported() -> None:
    wrong = {"appendonly": "no", "maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"}
    with RedisServer(settings=wrong) as server:
        found = by_check(await reach(settings(redis_url=server.url, **SAFE)))
        assert "appendonly yes" in found["persistence"].fix
        assert "noeviction" in found["eviction"].fix
        assert found["memory"].message.endswith("of 100")
        server.ask("CONFIG", "SET", "maxmemory", "1mb")
        full = by_check(await reach(settings(redis_url=server.url, **SAFE)))["memory"]
        assert not full.ok
        server.ask("CONFIG", "SET", "appendonly", "yes")
        server.ask("CONFIG", "SET", "appendfsync", "no")
        assert not by_check(await reach(settings(redis_url=server.url, **SAFE)))["persistence"].ok


async def test_without_permission_for_config_the_doctor_uses_info() -> None:
    with RedisServer() as server:
        server.ask("ACL", "SETUSER", "default", "-config")
        found = by_check(await reach(settings(redis_url=server.url, **SAFE)))
        assert found["persistence"].ok
        assert found["eviction"].ok
        alone = by_check(await reach(settings(redis_url=server.url)))["persistence"]
        assert "cannot be read" in alone.message


async def test_an_unreachable_redis_is_one_finding() -> None:
    (only,) = await reach(settings(redis_url=f"redis://127.0.0.1:{free_port()}/0"))
    assert (only.check, only.ok) == ("redis", False)
    assert "DOVETAIL_REDIS_URL" in only.fix
    assert await reach(settings()) == []


async def test_a_wrong_redis_password_is_reported() -> None:
    with RedisServer() as server:
        server.ask("CONFIG", "SET", "requirepass", "right")
        url = server.url.replace("redis://", "redis://:wrong@")
        (only,) = await reach(settings(redis_url=url))
        assert not only.ok
        assert "wrong" not in only.message.replace("WRONGPASS", "")


async def test_a_redis_that_does_not_reply_is_reported() -> None:
    with RedisServer() as server:
        server.pause()
        try:
            (only,) = await reach(settings(redis_url=server.url))
        finally:
            server.resume()
        assert "no answer" in only.message


async def test_a_cluster_is_reported(pipe: PipelinedRedis) -> None:
    assert (await found_of(pipe))["cluster"].message == "a single server"
    with RedisServer(cluster=True) as server:
        found = by_check(await reach(settings(redis_url=server.url, **SAFE)))
        assert found["cluster"].message == "a cluster of 1"


class StubbedReplies:
    """A Redis that gives another answer to one command."""

    info = PipelinedRedis.info

    def __init__(self, pipe: PipelinedRedis, command: str, answers: dict[str, str]) -> None:
        self._pipe = pipe
        self._command = command
        self._answers = answers
        self.call_script, self.call_many, self.script_command = (
            pipe.call_script,
            pipe.call_many,
            pipe.script_command,
        )
        self.is_clustered, self.target, self.key_name = (
            pipe.is_clustered,
            pipe.target,
            pipe.key_name,
        )
        self.keeps_order = pipe.keeps_order

    def nodes(self) -> list[StubbedReplies]:
        return [self]

    async def call(self, *command: Any) -> Any:
        reply = await self._pipe.call(*command)
        if command[0] != self._command:
            return reply
        text = reply.decode()
        for old, new in self._answers.items():
            assert old in text
            text = text.replace(old, new)
        return text.encode()


async def test_a_cluster_that_does_not_serve_all_slots_is_reported() -> None:
    with RedisServer(cluster=True) as server:
        async with PipelinedRedis(server.url) as pipe:
            answers = {"cluster_state:ok": "cluster_state:fail"}
            found = await found_of(StubbedReplies(pipe, "CLUSTER", answers))  # type: ignore[arg-type]
            assert not found["cluster"].ok


async def test_each_of_several_nodes_is_examined() -> None:
    with RedisCluster() as cluster:
        known = settings(redis_url=cluster.url, **SAFE)
        found = by_check(await reach(known))
        assert found["cluster"].message == "a cluster of 3"
        assert found["eviction"].ok
        other = cluster.nodes[2]
        other.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        found = by_check(await reach(known))
        assert found["eviction"].message.startswith(f"127.0.0.1:{other.port}: maxmemory-policy is")
        celery = known.model_copy(update={"transport": "celery"})
        found = by_check(await reach(celery))
        assert not found["cluster"].ok
        with pytest.raises(RedisError, match="a cluster of several"):
            await await_redis(celery, print)
        with pytest.raises(RedisError, match=f"127.0.0.1:{other.port}: .*allkeys-lru"):
            await await_redis(known, print)
        other.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await await_redis(known, print)


async def test_a_too_old_redis_or_a_failed_aof_write_is_reported(
    pipe: PipelinedRedis,
) -> None:
    answers = {"redis_version:": "redis_version:5.0.", "write_status:ok": "write_status:err"}
    found = await found_of(StubbedReplies(pipe, "INFO", answers))  # type: ignore[arg-type]
    assert found["redis"].fix == "upgrade Redis to 6.2 or newer"
    assert found["persistence"].message == "the last write to its log failed"


async def test_a_replica_is_reported() -> None:
    with RedisServer() as master, RedisServer() as replica:
        replica.ask("REPLICAOF", "127.0.0.1", str(master.port))
        found = by_check(await reach(settings(redis_url=replica.url, **SAFE)))["role"]
        assert not found.ok
        assert str(master.port) in found.fix


@pytest.mark.parametrize(("skew", "word"), [(5.0, "behind"), (-5.0, "ahead of")])
async def test_clocks_that_differ_are_reported(
    pipe: PipelinedRedis, skew: float, word: str
) -> None:
    found = by_check(await examine(pipe, settings(**SAFE), lambda: time.time() + skew))["clock"]
    assert not found.ok
    assert word in found.message


async def test_tasks_without_a_capable_worker_are_reported(pipe: PipelinedRedis) -> None:
    found = await found_of(pipe)
    assert (found["workers"].message, found["workers"].fix) == ("none is alive", "dovetail worker")
    assert found["backlog"].message == "no task waits"
    await WorkerRegistry(pipe).beat(WORKER)
    await pipe.call("XADD", "tasks:sleep", "*", "x", "1")
    assert (await found_of(pipe))["backlog"] == DoctorFinding(
        "backlog", True, "1 task waits or runs: sleep 1"
    )
    full = (await found_of(pipe, max_backlog=1))["backlog"]
    assert full.ok, "as many as may wait"
    await pipe.call("XADD", "tasks:sleep", "*", "x", "1")
    full = (await found_of(pipe, max_backlog=1))["backlog"]
    assert "above 1 (DOVETAIL_MAX_BACKLOG) no run is taken" in full.message
    await pipe.call("XTRIM", "tasks:sleep", "MAXLEN", 1)
    for _ in range(3):
        await pipe.call("XADD", "tasks:mine", "*", "x", "1")
    backlog = (await found_of(pipe))["backlog"]
    assert backlog.message == "4 tasks wait or run: mine 3, sleep 1; no live worker knows 'mine'"


async def test_a_missing_live_orchestrator_is_reported(pipe: PipelinedRedis) -> None:
    await pipe.call("ZADD", "wf:orchestrators", time.time() - 60, "dead")
    found = (await found_of(pipe))["orchestrators"]
    assert (found.message, found.fix) == ("none is alive: no run goes on", "dovetail orchestrator")
    await OrchestratorPeers(pipe, "me").beat()
    assert (await found_of(pipe))["orchestrators"].message == "1 alive"


async def test_unread_results_are_reported(pipe: PipelinedRedis) -> None:
    await pipe.call("XADD", "wf:stream:results", "*", "x", "1")
    assert (await found_of(pipe))["results"].ok, "an orchestrator may be at it"
    await pipe.call("DEL", "wf:stream:results")
    await pipe.call("XADD", "wf:stream:results", f"{int(time.time() - 60) * 1000}-1", "x", "1")
    assert (await found_of(pipe))["results"].fix == "dovetail orchestrator"


async def test_dead_letters_are_reported(pipe: PipelinedRedis) -> None:
    await pipe.call("LPUSH", "wf:dead", "{}")
    assert (await found_of(pipe))["dead letters"].message == "1 message was refused"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"heartbeat_interval": 10, "heartbeat_timeout": 15}, "DOVETAIL_HEARTBEAT_TIMEOUT"),
        ({"lease_seconds": 30}, "DOVETAIL_STALE_RESULT_TIMEOUT"),
        ({"stale_claim_interval": 31}, "DOVETAIL_STALE_CLAIM_INTERVAL"),
        ({"recovery_timeout": 5, **SAFE}, "DOVETAIL_RECOVERY_TIMEOUT"),
        ({"broker_url": "amqp://host"}, "DOVETAIL_BROKER_URL"),
    ],
)
def test_conflicting_settings_are_reported(given: dict[str, Any], names: str) -> None:
    (found,) = disagreements(settings(**given))
    assert not found.ok
    assert found.message.startswith(names)
    assert found.fix


def test_the_default_settings_do_not_conflict() -> None:
    (found,) = disagreements(settings())
    assert found.ok
