"""The Redis server itself: its clock, its append-only file after a restart, and whether it takes
writes.

Redis truncates an append-only file that ends within a transaction after the last whole command, and
not before its `MULTI` (7.0; Valkey fixes that with its pull request 4342). At the next start the
following commands are read as part of it: half of a transition is executed, long after. A file that
was rewritten since the start has no such end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import hiredis

from dovetail.engine.clock import StoreClock
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.stores.redis.codec import source

LOOK_SECONDS = 10.0


async def set_clock(redis: PipelinedRedis, clock: StoreClock) -> None:
    asked = time.monotonic()
    seconds, micros = await redis.call("TIME")
    clock.told(int(seconds) + int(micros) / 1e6, asked, time.monotonic())


async def follow_clock(redis: PipelinedRedis, clock: StoreClock) -> None:
    """For ever: clocks are set, also that of Redis, and machines sleep."""
    while True:
        with suppress(RedisError):
            await set_clock(redis, clock)
        await asyncio.sleep(LOOK_SECONDS)


log = logging.getLogger("dovetail.redis")


async def watch_restarts(redis: PipelinedRedis) -> AsyncIterator[bool]:
    """As `PipelinedRedis.after_breaks`, with the append-only file renewed first."""
    await renew_log(redis)
    async for is_another in redis.after_breaks():
        if is_another:
            await renew_log(redis)
        yield is_another


async def renew_log(redis: PipelinedRedis) -> None:
    """On every server that has a log and has not written it anew since its start."""
    for node in redis.nodes():
        facts = await node.info("persistence")
        if facts.get("aof_enabled") != "1" or facts.get("aof_last_rewrite_time_sec") != "-1":
            continue
        (answer,) = await node.send([("BGREWRITEAOF",)])
        if isinstance(answer, hiredis.ReplyError):  # it is at it, or we may not ask for that
            log.debug("Redis at %s does not rewrite its log: %s", node.where, answer)


KEY = "wf:writable"
_WHY = {
    "OOM": "its memory is full",
    "MISCONF": "it could not save its data to its disk",
    "READONLY": "it is a replica",
    "NOREPLICAS": "too few of its replicas are there",
    "LOADING": "it is starting",
    "MASTERDOWN": "it has lost its primary",
    "CLUSTERDOWN": "a part of its cluster is away",
    "NOPERM": "its user may not write",
}


async def check_writable(redis: PipelinedRedis) -> None:
    """Raises `RedisError`, with its reason, if Redis would refuse a write."""
    met = (await redis.call_script(source("writable"), [KEY], [])).decode()
    if met:
        error = RedisError(f"Redis takes no writes: {met}")
        error.reason = "Redis accepts no writes" + because(met)
        raise error


def because(refusal: str) -> str:
    """In a few words, without an address: it is public."""
    for word, why in _WHY.items():
        if word in refusal.split(" ", 1)[0].lstrip("-"):
            return f": {why}"
    return ""
