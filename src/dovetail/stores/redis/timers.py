"""The timer index of all runs: parked and backing-off nodes, ends of leases, last activity of runs.

An index, not the truth: the sweep rebuilds it from the runs. Its keys are outside every run's slot,
so they are written beside a run's script, not within it. The rules refuse an entry too many; the
sweep finds a missing one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from dovetail.core.events import Token, text_of
from dovetail.core.transitions import Wake
from dovetail.engine.ports import ParkedNode
from dovetail.engine.supervisor import bisect_failures, describe_error
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis, scanned
from dovetail.stores.redis.codec import pairs, source

log = logging.getLogger("dovetail.orchestrator")

DELAYED, LEASES, ACTIVE, PARKED = "wf:delayed", "wf:leases", "wf:active", "wf:line"


class RedisTimerIndex:
    def __init__(self, redis: PipelinedRedis) -> None:
        self._redis = redis

    # ── timers ───────────────────────────────────────────────────────────────────────────

    async def delay(self, wakes: Iterable[tuple[float, Wake]]) -> None:
        await self._add(DELAYED, [(at, _name(wake)) for at, wake in wakes])

    async def due(self, now: float, limit: int) -> list[tuple[float, Wake]]:
        found = await self._before(DELAYED, now, limit)
        return [(float(at), _wake(name.decode())) for name, at in found]

    async def next_due(self) -> float | None:
        """When the next is due that waits by now."""
        found = await self._redis.call("ZRANGE", DELAYED, 0, 0, "WITHSCORES")
        return float(found[1]) if found else None

    async def woken(self, due: Iterable[tuple[float, Wake]]) -> None:
        # A node that was woken, and parked again by the worker that got it, has the same name.
        if done := [part for at, wake in due for part in (_name(wake), repr(at))]:
            await self._redis.call_script(source("remove_unchanged"), [DELAYED], done)

    # ── parked nodes ────────────────────────────────────────────────────────────────────

    async def add_parked(self, waits: Iterable[ParkedNode]) -> None:
        """Enqueued: in order with other commands of this connection, without waiting."""
        entries = [part for wait in waits for part in (repr(float(wait.at)), _wait_name(wait))]
        if entries:
            self._redis.enqueue([("ZADD", PARKED, *entries)])

    async def parked(self, now: float, soon: float) -> list[ParkedNode]:
        last = await self._redis.call("ZRANGE", PARKED, -1, -1, "WITHSCORES")
        if not last:
            return []
        if float(last[1]) <= now + soon:
            await self._redis.call("ZREMRANGEBYSCORE", PARKED, "-inf", repr(float(now)))
            return []
        reply = await self._redis.call("ZRANGE", PARKED, 0, -1, "WITHSCORES")
        return [_wait(name, at) for name, at in pairs(reply)]

    async def remove_parked(self, waits: Iterable[ParkedNode]) -> None:
        if names := [_wait_name(wait) for wait in waits]:
            await self._redis.call("ZREM", PARKED, *names)

    # ── where a lease ends ───────────────────────────────────────────────────────────────

    async def lease(self, run_ids: Iterable[str], until: float) -> None:
        """Enqueued: in order with other commands of this connection, without waiting."""
        at = repr(float(until))
        entries = [part for run_id in run_ids for part in (at, run_id)]
        if entries:
            self._redis.enqueue([("ZADD", LEASES, "LT", *entries)])

    async def expired(self, now: float, limit: int) -> list[str]:
        """Beside a write that changes nothing: while Redis refuses that, it refuses renewals too,
        and the caller must wait as it would for a Redis that is away."""
        _, found = await self._redis.call_many(
            [("ZADD", LEASES, "XX", 0, ""), _until(LEASES, now, limit)]
        )
        return [name.decode() for name, _ in pairs(found)]

    async def put_off(self, run_ids: Iterable[str], mark: float) -> None:
        await self._add(LEASES, [(mark, run_id) for run_id in run_ids], "XX")

    async def released(self, run_ids: Iterable[str], mark: float) -> None:
        score = repr(float(mark))
        if entries := [part for run_id in run_ids for part in (run_id, score)]:
            await self._redis.call_script(source("remove_unchanged"), [LEASES], entries)

    # ── which run moved last ─────────────────────────────────────────────────────────────

    async def moved(self, run_ids: Iterable[str], now: float, *, is_new: bool = False) -> None:
        how = "NX" if is_new else "GT"
        await self._add(ACTIVE, [(now, run_id) for run_id in run_ids], how)

    async def idle(self, since: float, limit: int) -> list[tuple[str, float]]:
        """Runs that have not moved since then, longest first, and when they last did."""
        found = await self._before(ACTIVE, since, limit)
        return [(name.decode(), float(at)) for name, at in found]

    async def ended(self, run_ids: Iterable[str], since: float) -> None:
        """These need no look any more, but for one that has moved since then: it was retried.

        One that is retried and claimed before the second command arrives is not on the list of
        leases; the sweep puts it there.
        """
        names = list(run_ids)
        if names:
            given = [repr(float(since)), *names]
            gone = await self._redis.call_script(source("timers_end"), [ACTIVE], given)
            if gone:
                self._redis.enqueue([("ZREM", LEASES, *gone)])

    async def over(self, run_ids: Iterable[str]) -> set[str]:
        """Which of these runs have ended, or are gone."""
        asked = list(run_ids)
        replies = await self._redis.call_many(
            [("HGET", f"wf:{{{run_id}}}:meta", "finished_at") for run_id in asked]
        )
        return {run_id for run_id, at in zip(asked, replies, strict=True) if at != b""}

    async def age(self) -> float:
        """Of the server that was started last. Redis counts in whole seconds."""
        replies = [await node.info("server") for node in self._redis.nodes()]
        return max(0.0, min(float(facts["uptime_in_seconds"]) for facts in replies) - 1)

    async def remember_all(self, now: float) -> None:
        """Make every run active that has not ended, whatever was lost."""
        async for keys in scanned(self._redis, "wf:{*}:meta"):
            if keys:
                unfinished = await bisect_failures(self._unfinished, keys, _not_to_be_known)
                await self.moved(unfinished, now, is_new=True)

    async def _unfinished(self, keys: Sequence[str]) -> Sequence[str]:
        asked: list[Command] = [("HMGET", key, "status", "finished_at") for key in keys]
        replies = zip(keys, await self._redis.call_many(asked), strict=True)
        return [
            key.removeprefix("wf:{").removesuffix("}:meta")
            for key, (status, ended) in replies
            if status is not None and not ended
        ]

    # ── sorted sets ──────────────────────────────────────────────────────────────────────

    async def _add(self, key: str, entries: Sequence[tuple[float, str]], *how: str) -> None:
        if entries:
            flat = [part for at, name in entries for part in (repr(float(at)), name)]
            await self._redis.call("ZADD", key, *how, *flat)

    async def _before(self, key: str, at: float, limit: int) -> Iterator[tuple[bytes, bytes]]:
        return pairs(await self._redis.call(*_until(key, at, limit)))


async def _not_to_be_known(key: str, problem: Exception) -> Sequence[str]:
    log.error("the run of %s cannot be read: %s", key, describe_error(problem))
    return ()


def _until(key: str, at: float, limit: int) -> tuple[Argument, ...]:
    """What asks for what is there until then, earliest first, and when each is."""
    return ("ZRANGEBYSCORE", key, "-inf", repr(float(at)), "WITHSCORES", "LIMIT", 0, limit)


def _name(wake: Wake) -> str:
    run_id, node, token = wake
    return f"{run_id} {node} {text_of(token)}"


def _wake(name: str) -> Wake:
    run_id, node, token = name.rsplit(" ", 2)
    return Wake(run_id, node, Token.parse(token))


def _wait_name(wait: ParkedNode) -> str:
    return f"{_name(wait.wake)} {wait.tag}"


def _wait(name: bytes, at: bytes) -> ParkedNode:
    run_id, node, token, tag = name.decode().split(" ", 3)  # a tag may have spaces
    return ParkedNode(float(at), tag, Wake(run_id, node, Token.parse(token)))
