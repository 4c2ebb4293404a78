"""Redis' own log after a power cut: nothing of it comes back by halves, however often it starts."""

from __future__ import annotations

import asyncio
import os

import pytest

from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.doctor import renew_log, watch_restarts

from ..servers.redis_server import RedisServer

BOTH = "redis.call('SET', KEYS[1], 1) redis.call('SET', KEYS[2], 1)"


async def rewritten(pipe: PipelinedRedis) -> None:
    async with asyncio.timeout(10):
        while b"aof_last_rewrite_time_sec:-1" in await pipe.call("INFO", "persistence"):
            await asyncio.sleep(0.02)


def cut(server: RedisServer, word: bytes) -> None:
    """Redis dies, and of its log the disk has what comes before this word, where it is last."""
    server.kill()
    logs = server.folder.glob("appendonlydir/*.incr.aof")
    path = max(logs, key=lambda path: int(path.name.split(".")[2]))
    os.truncate(path, path.read_bytes().rindex(word))
    server.start()


async def test_half_of_a_transaction_is_not_replayed_when_redis_restarts_twice() -> None:
    with RedisServer(fsync="always") as server:
        async with PipelinedRedis(server.url) as pipe:
            breaks = watch_restarts(pipe)
            watching = asyncio.ensure_future(anext(breaks))
            await rewritten(pipe)
            await pipe.call_script(BOTH, ["first", "second"], [])
            await asyncio.to_thread(cut, server, b"second")
            assert await watching
            await rewritten(pipe)
            await pipe.call_script(BOTH, ["third", "fourth"], [])
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            names = ["first", "second", "third", "fourth"]
            assert await pipe.call("MGET", *names) == [None, None, b"1", b"1"]
            await breaks.aclose()


async def calls(pipe: PipelinedRedis) -> int:
    stats = (await pipe.call("INFO", "commandstats")).decode()
    _, _, reported = stats.partition("cmdstat_bgrewriteaof:calls=")
    return int(reported.partition(",")[0] or 0)


@pytest.mark.parametrize(("appendonly", "wanted"), [("yes", 1), ("no", 0)])
async def test_an_aof_is_rewritten_once_after_a_start(appendonly: str, wanted: int) -> None:
    with RedisServer(settings={"appendonly": appendonly}) as server:
        async with PipelinedRedis(server.url) as pipe:
            await renew_log(pipe)
            if wanted:
                await rewritten(pipe)
            await renew_log(pipe)
            assert await calls(pipe) == wanted


async def test_without_permission_to_rewrite_the_aof_the_service_continues() -> None:
    with RedisServer() as server:
        async with PipelinedRedis(server.url) as pipe:
            await pipe.call("ACL", "SETUSER", "default", "-bgrewriteaof")
            await renew_log(pipe)
            assert await pipe.call("PING") == b"PONG"
