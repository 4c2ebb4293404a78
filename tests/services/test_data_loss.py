"""A Redis that evicts keys is no place for runs: services say so at their start, and later."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import Dovetail, StoreError
from dovetail.config import Settings
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.stores.redis.doctor import judge_eviction, watch_eviction
from dovetail.wiring.distributed import commanding
from dovetail.wiring.health import await_redis

from ..celery_crew import environment
from ..servers.redis_server import RedisServer

SCRIPT = str(Path(sys.executable).parent / "dovetail")
CELERY = ("-m", "celery", "-A", "dovetail.transports.celery", "worker", "--loglevel", "warning")
EVICTING = [
    *("allkeys-lru", "allkeys-lfu", "allkeys-random"),
    *("volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"),
]


@pytest.fixture(scope="module")
def evicting() -> Iterator[RedisServer]:
    with RedisServer(settings={"maxmemory-policy": "allkeys-lru"}) as server:
        yield server


def named_by(message: str, policy: str) -> bool:
    words = (policy, "CONFIG SET maxmemory-policy noeviction", "DOVETAIL_ACCEPT_DATA_LOSS=1")
    return all(word in message for word in words)


@given(
    policies=st.dictionaries(
        st.sampled_from(["a:1", "b:2", "c:3"]),
        st.sampled_from([None, "noeviction", *EVICTING]),
        min_size=1,
    ),
    accept=st.booleans(),
)
def test_a_redis_that_evicts_refuses_the_start_unless_loss_is_accepted(
    policies: dict[str, str | None], accept: bool
) -> None:
    evicting = [policy for policy in policies.values() if policy in EVICTING]
    refused, warnings = judge_eviction(policies, accept)
    assert (refused is not None) == (bool(evicting) and not accept)
    if refused is not None:
        assert named_by(refused, str(evicting[0]))
    unknown = list(policies.values()).count(None)
    assert len(warnings) == unknown + (len(evicting) if accept else 0)


@pytest.mark.parametrize("policy", EVICTING)
async def test_no_service_starts_on_a_redis_that_evicts(evicting: RedisServer, policy: str) -> None:
    evicting.ask("CONFIG", "SET", "maxmemory-policy", policy)
    for more in ({}, {"database_url": "postgresql://127.0.0.1:1/none"}):
        with pytest.raises(RedisError) as refused:
            await await_redis(Settings(redis_url=evicting.url, **more), print)
        assert named_by(str(refused.value), policy)
    warned: list[str] = []
    accepting = Settings(redis_url=evicting.url, accept_data_loss=True)
    await await_redis(accepting, print, warned.append)
    assert policy in warned[0]


async def test_if_config_is_forbidden_the_eviction_policy_is_read_from_info() -> None:
    with RedisServer(settings={"maxmemory-policy": "allkeys-lru"}) as server:
        server.ask("ACL", "SETUSER", "default", "-config")
        with pytest.raises(RedisError, match="allkeys-lru"):
            await await_redis(Settings(redis_url=server.url), print)
        server.ask("ACL", "SETUSER", "default", "-info")
        warned: list[str] = []
        await await_redis(Settings(redis_url=server.url), print, warned.append)
        assert "maxmemory-policy cannot be read" in warned[0]


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"appendonly": "no"}, "CONFIG SET appendonly yes"),
        ({"appendfsync": "everysec"}, "CONFIG SET appendfsync always"),
        ({"appendfsync": "always"}, None),
    ],
)
async def test_a_redis_that_may_lose_data_gives_a_warning_at_each_start_without_postgresql(
    conf: dict[str, str], words: str | None
) -> None:
    with RedisServer(settings=conf) as server:
        for _ in range(2):
            warned: list[str] = []
            await await_redis(Settings(redis_url=server.url), print, warned.append)
            assert bool(warned) == (words is not None)
            assert words is None or words in warned[0]
        kept: list[str] = []
        archived = Settings(redis_url=server.url, database_url="postgresql://127.0.0.1:1/none")
        await await_redis(archived, print, kept.append)
        assert kept == []


async def test_the_client_is_refused_on_a_redis_that_evicts(evicting: RedisServer) -> None:
    evicting.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError) as refused:
        async with Dovetail(evicting.url):
            pass
    assert named_by(str(refused.value), "allkeys-lru")
    async with commanding(Settings(redis_url=evicting.url, accept_data_loss=True)):
        pass


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ((SCRIPT, "serve", "--port", "0"), {}),
        ((SCRIPT, "orchestrator"), {}),
        ((SCRIPT, "worker"), {}),
        ((SCRIPT, "worker"), {"DOVETAIL_TRANSPORT": "celery"}),
        ((sys.executable, *CELERY), {"DOVETAIL_TRANSPORT": "celery"}),
    ],
    ids=["serve", "orchestrator", "worker", "celery's worker", "celery itself"],
)
def test_a_refused_process_exits_with_1_and_the_fix(
    evicting: RedisServer, tmp_path: Path, words: tuple[str, ...], more: dict[str, str]
) -> None:
    evicting.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment(DOVETAIL_REDIS_URL=evicting.url, **more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert named_by(done.stderr, "allkeys-lru")
    assert "Traceback" not in done.stderr


async def test_a_policy_that_changes_at_runtime_gives_one_warning() -> None:
    with RedisServer() as server:
        warned: list[Any] = []
        async with PipelinedRedis(server.url) as pipe:
            watching = asyncio.create_task(watch_eviction(pipe, warned.append, 0.01))
            try:
                async with asyncio.timeout(20):
                    before = pipe.roundtrips
                    while pipe.roundtrips < before + 3:
                        await asyncio.sleep(0.01)
                    assert warned == []
                    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
                    while not warned:
                        await asyncio.sleep(0.01)
                    seen = pipe.roundtrips
                    while pipe.roundtrips < seen + 3:
                        await asyncio.sleep(0.01)
                    assert len(warned) == 1
                    assert "allkeys-lfu" in warned[0]
                    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
                    while len(warned) < 2:
                        await asyncio.sleep(0.01)
            finally:
                watching.cancel()
