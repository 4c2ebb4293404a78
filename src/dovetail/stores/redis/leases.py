"""Leases in Redis, renewed with the node's index alone.

It has a connection of its own and reads no definition, so a renewal is small whatever the run is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import orjson

from dovetail.core.transitions import Renew, Stop
from dovetail.engine.clock import Clock
from dovetail.engine.ports import Task
from dovetail.engine.supervisor import bisect_failures, describe_error
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.codec import Fields, new_nonce, source, time_text
from dovetail.stores.redis.store import RULES, RedisStore, keys_of

log = logging.getLogger("dovetail.worker")


class RedisLeases:
    def __init__(self, redis: PipelinedRedis, clock: Clock, lease_seconds: float) -> None:
        self._redis = redis
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._store = RedisStore(redis, events=False)
        """For a start whose message did not say where its node is in the definition."""

    async def renew(self, tasks: Sequence[Task]) -> list[Stop]:
        """Say that these still run; what must stop, because it is ours no longer."""
        kept = await bisect_failures(self._renewed, tasks, _left_unrenewed) if tasks else ()
        return [
            Stop(task.run_id, task.node_id, task.token)
            for task, is_kept in zip(tasks, kept, strict=True)
            if not is_kept
        ]

    async def _renewed(self, tasks: Sequence[Task]) -> Sequence[bool]:
        now = self._clock()
        until = now + self._lease_seconds
        kept = [False] * len(tasks)
        by_run: dict[str, list[int]] = {}
        for at, task in enumerate(tasks):
            if task.node_index is not None:
                by_run.setdefault(task.run_id, []).append(at)
        asked = [
            self._redis.script_command(
                source(*RULES),
                keys_of(run_id),
                [
                    orjson.dumps({"moves": [_request(tasks[at], now, until) for at in places]}),
                    b"",
                ],
            )
            for run_id, places in by_run.items()
        ]
        if asked:
            answers = await self._redis.call_many(asked)
            for places, (_, _, _, decisions) in zip(by_run.values(), answers, strict=True):
                for at, decision in zip(places, decisions, strict=True):
                    kept[at] = bool(decision[0])
        if placeless := [at for at, task in enumerate(tasks) if task.node_index is None]:
            moves = [
                Renew(tasks[at].run_id, tasks[at].node_id, tasks[at].token, until)
                for at in placeless
            ]
            made = await self._store.apply(moves, now)
            for at, moved in zip(placeless, made, strict=True):
                kept[at] = bool(moved.changed)
        return kept


def _request(task: Task, now: float, until: float) -> Fields:
    """As `renew.lua` takes it."""
    epoch, attempt, nonce = task.token
    return {
        "kind": "renew",
        "now": time_text(now),
        "nonce": str(new_nonce()),
        "i": task.node_index,
        "te": epoch,
        "ta": attempt,
        "n": str(nonce),
        "lease": time_text(until),
    }


async def _left_unrenewed(task: Task, problem: Exception) -> Sequence[bool]:
    log.error(
        "run %s, node %s: its lease ends: %s", task.run_id, task.node_id, describe_error(problem)
    )
    return [False]
