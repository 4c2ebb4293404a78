"""Removes dead consumers and dead messages from the streams.

A worker that was killed stays a consumer of every stream that it read, and each one makes Redis
slower. Where no worker serves a handler, nothing refuses the messages of runs that have ended. A
consumer that is removed by mistake is one again with its next read, and a message that is removed
by mistake is sent again: any number of processes may do this at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import hiredis

from dovetail.redis_client.pipelined import PipelinedRedis, every_key, load_script
from dovetail.transports.messages import TASKS, read_tasks
from dovetail.transports.streams.sender import MARK, WORKERS

MAX_DISMISSED = 500
"""Of one stream in one go, as are these."""
MAX_LOOKED_AT, READ_TOGETHER = 1000, 50
"""Messages; each may be as large as a config."""

Workers = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
Over = Callable[[Iterable[str]], Awaitable[Collection[str]]]


class StreamGarbage:
    def __init__(
        self, pipe: PipelinedRedis, workers: Workers, over: Over, *, idle_seconds: float
    ) -> None:
        """`workers` lists the workers, in the fields of the API; `over` says which of these runs
        have ended, or are gone. A consumer that was idle for less is left alone."""
        self._pipe = pipe
        self._workers = workers
        self._over = over
        self._idle_milliseconds = idle_seconds * 1000
        self._looked_up_to: dict[str, bytes] = {}
        """Of streams that are longer than one look."""

    async def clear(self) -> None:
        alive = [worker for worker in await self._workers() if worker["alive"]]
        names = {worker["worker_id"] for worker in alive}
        served = {TASKS + handler for worker in alive for handler in worker["handlers"]}
        for stream in await every_key(self._pipe, f"{TASKS}*", kind="stream"):
            await self._dismiss_idle(stream, names)
            if stream not in served:  # else a worker comes to them, and they are refused
                await self._drop_of_ended(stream)

    # ── consumers ────────────────────────────────────────────────────────────────────────

    async def _dismiss_idle(self, stream: str, alive: Collection[str]) -> None:
        """By name as well: Redis 7.0 takes one for idle that reads all the time and finds nothing.

        What they hold is looked at again with the dismissal, as one."""
        (told,) = await self._pipe.send([("XINFO", "CONSUMERS", stream, WORKERS)])
        if isinstance(told, hiredis.ReplyError):
            return  # it has no reader yet, or it is gone
        consumers = [dict(zip(one[::2], one[1::2], strict=True)) for one in told]
        idle = [
            name
            for one in consumers
            if not one[b"pending"] and one[b"idle"] >= self._idle_milliseconds
            if (name := one[b"name"].decode()) != MARK and name not in alive
        ]
        await self._pipe.call_many(
            [
                self._pipe.script_command(
                    load_script(__package__, "dismiss"), [stream], [WORKERS, name]
                )
                for name in idle[:MAX_DISMISSED]
            ]
        )

    # ── messages ─────────────────────────────────────────────────────────────────────────

    async def _drop_of_ended(self, stream: str) -> None:
        """From where we were last time, and from the beginning once there is nothing behind it."""
        after = self._looked_up_to.pop(stream, b"0-0")
        for _ in range(MAX_LOOKED_AT // READ_TOGETHER):
            reading = ("XRANGE", stream, b"(" + after, "+", "COUNT", READ_TOGETHER)
            entries = await self._pipe.call(*reading)
            await self._drop(stream, {number: _runs_of(fields) for number, fields in entries})
            if len(entries) < READ_TOGETHER:
                return
            after = entries[-1][0]
        self._looked_up_to[stream] = after

    async def _drop(self, stream: str, told_of: Mapping[bytes, Collection[str]]) -> None:
        over = set(await self._over({run for runs in told_of.values() for run in runs}))
        useless = [number for number, runs in told_of.items() if runs and over.issuperset(runs)]
        if useless:
            # Acknowledged first: a message that is deleted while pending stays pending for ever.
            await self._pipe.call_many(
                [("XACK", stream, WORKERS, *useless), ("XDEL", stream, *useless)]
            )


def _runs_of(fields: Any) -> set[str]:
    """Those that a message tells of; none of what is no message of ours, which is left to whoever
    reads it."""
    try:
        return {task.run_id for task in read_tasks(fields)}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return set()
