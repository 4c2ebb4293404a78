"""Token buckets that all workers share, on the clock of Redis.

The rules are those of `engine/limits.py`, as scripts. The clocks of two processes need not agree:
times travel as a distance from now. A script that was executed twice, because its reply was lost,
has taken one token too many, never one too few.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from dovetail.engine.clock import Clock, steady_clock
from dovetail.engine.limits import LATENESS, TokenBucket
from dovetail.engine.ports import Author
from dovetail.redis_client.pipelined import Argument, PipelinedRedis
from dovetail.stores.records import history_page, list_position
from dovetail.stores.redis.codec import source

TAGS = "wf:limits"
"""The tags that were set, in order."""


class RedisLimits:
    def __init__(
        self,
        redis: PipelinedRedis,
        configured: Mapping[str, TokenBucket] | None = None,
        *,
        clock: Clock | None = None,
        shared_clock: Callable[[], float] | None = None,
    ) -> None:
        """`shared_clock` stands in for Redis' own, for tests that move time by hand."""
        self._redis = redis
        self._configured = dict(configured or {})
        self._clock = clock or steady_clock()
        self._shared_clock = shared_clock

    async def book(self, tag: str, now: float) -> float:
        at, there = map(float, await self._run("book", tag))
        return at + (now - there) if at > there else now

    async def start(self, tag: str, now: float) -> bool:
        return bool(await self._run("start", tag))

    async def unbook(self, tag: str, count: int) -> None:
        await self._run("unbook", tag, count)

    async def slow(self, tag: str, until: float) -> None:
        await self._run("slow", tag, repr(until - self._clock()))

    async def look(self, tag: str, now: float) -> TokenBucket:
        """A copy of the bucket, on the caller's clock: bookings in it have no effect elsewhere."""
        rate, burst, booked, started, there = await self._run("look", tag)
        bucket = TokenBucket(float(rate), int(burst))
        ahead = now - float(there)
        bucket.booked = float(booked or -math.inf) + ahead
        bucket.started = float(started or -math.inf) + ahead
        return bucket

    async def pull_back(self, tag: str, until: float, now: float) -> None:
        """Bookings after that time are given back: their nodes will not start."""
        await self._run("pull_back", tag, repr(until - now))

    async def _run(self, operation: str, tag: str, *operands: Argument) -> Any:
        usual = self._configured.get(tag) or TokenBucket()
        now = "" if self._shared_clock is None else repr(self._shared_clock())
        given: list[Argument] = [repr(float(usual.rate)), usual.burst, now, repr(LATENESS)]
        script = source("limits_bucket", f"limits_{operation}")
        return await self._redis.call_script(script, [_bucket(tag)], [*given, *operands])

    # ── what is set ──────────────────────────────────────────────────────────────────────

    async def set(
        self, tag: str, rate_per_second: float, burst: int, by: Author | None = None
    ) -> None:
        """For all processes, from now on, whatever their settings say. Raises `ValueError`.

        `by` is None where another store keeps the history.
        """
        checked = TokenBucket(rate_per_second, burst)
        await self._redis.call("ZADD", TAGS, 0, tag)  # first: what is set must be seen
        rate, change = float(checked.rate), ""
        if by is not None:
            details = open_json({"rate_per_second": rate, "burst": checked.burst})
            change = f'{{{encode_author(by)},"action":"limit","details":{details}"from":'
        await self._run("set", tag, repr(rate), checked.burst, change)

    async def history(self, tag: str, limit: int, cursor: str | None) -> dict[str, Any]:
        """The changes of a limit, newest first."""
        last = await self._redis.call("HGET", _bucket(tag), "changes")
        before = list_position(cursor, int(last or 0) + 1)
        numbers = range(min(before, int(last or 0) + 1) - 1, 0, -1)[: limit + 1]
        if not numbers:
            return history_page([], limit)
        names = [f"change:{number}" for number in numbers]
        kept = await self._redis.call("HMGET", _bucket(tag), *names)
        return history_page([change_row(*one) for one in zip(numbers, kept, strict=True)], limit)

    async def all(self) -> dict[str, tuple[float, int]]:
        """Rate and burst of every tag that was set."""
        tags = [tag.decode() for tag in await self._redis.call("ZRANGE", TAGS, 0, -1)]
        kept = await asyncio.gather(
            *(self._redis.call("HMGET", _bucket(tag), "rate", "burst") for tag in tags)
        )
        return {
            tag: (float(rate), int(burst))
            for tag, (rate, burst) in zip(tags, kept, strict=True)
            if rate is not None
        }


# ── histories, of limits and of workflows ────────────────────────────────────────────────


def encode_author(by: Author) -> str:
    """The fields `time` and `actor` as JSON, as scripts take them."""
    return orjson.dumps(by._asdict()).decode()[1:-1]


def open_json(fields: Mapping[str, Any]) -> str:
    """An object as JSON to which a script adds another field and the end."""
    return orjson.dumps(fields).decode()[:-1] + ","


def change_row(number: int, kept: bytes | None) -> tuple[Any, ...]:
    """A row of `history_page`, from what a script has written."""
    try:
        found = orjson.loads(kept or b"")
        details = orjson.dumps(found["details"])
        return number, found["time"], found["actor"], found["action"], details
    except (KeyError, TypeError, ValueError):  # damaged
        return number, None, "", "", b"{}"


def _bucket(tag: str) -> str:
    return f"wf:limit:{tag}"
