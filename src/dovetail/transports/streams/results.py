"""Orchestrators that are alive, so that the others can go on with what a dead one had read.

Each holds a lease of a few seconds, on the clock of Redis. Whoever finds one that has lapsed takes
over the results it had read and not settled. To be wrong about it costs nothing: what two take in,
the rules refuse the second time. What it must not know: what a result is.

An orchestrator takes results in: new ones, and those that somebody had read and died over.

A message is settled once what it tells is applied. What it must not know: what follows from a
result.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from dovetail.engine.ports import Result
from dovetail.engine.supervisor import BackgroundTask, bisect_failures, describe_error
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.redis_client.scripts import load_script
from dovetail.transports.streams.messages import RESULTS
from dovetail.transports.streams.sender import StreamMessage, StreamReader

ORCHESTRATORS_ALIVE = "wf:orchestrators"
LEASE_SECONDS = 4.0
BEAT_SECONDS = 0.5


class OrchestratorPeers:
    def __init__(self, pipe: PipelinedRedis, me: str) -> None:
        self._pipe = pipe
        self._me = me

    async def beat(self) -> list[str]:
        """Renew the own lease; returns whose has lapsed."""
        lapsed = await self._pipe.call_script(
            load_script(__package__, "orchestrators_beat"),
            [ORCHESTRATORS_ALIVE],
            [self._me, repr(LEASE_SECONDS)],
        )
        return [name.decode() for name in lapsed]

    async def forget(self, name: str) -> None:
        """It is gone, and nothing of it is left to do."""
        await self._pipe.call("ZREM", ORCHESTRATORS_ALIVE, name)

    async def leave(self) -> None:
        await self.forget(self._me)


MOST_MESSAGES = 128
"""With results that are read at once: each may tell dozens."""
FEW, MANY = 16, 128
GATHER_SECONDS = 0.002
SINGLES_SECONDS = 0.02
"""Celery's processes tell their results one by one, each as dear as many together."""
CROWD, CROWD_SECONDS = 32, 0.1
"""While so many messages wait, no worker waits for what follows from a result."""
UNDER_WAY_SECONDS = 1.0
"""So long after it was read, a result that is not settled may still be under way."""

log = logging.getLogger("dovetail.wiring.distributed")


class ApplyResults(Protocol):
    async def __call__(self, results: Sequence[Result], *, again: bool = False) -> bool:
        """Whether anything followed from these but that they are noted. `again`: somebody had
        them before, and may have died over them."""
        ...


class ResultConsumer:
    def __init__(
        self,
        reader: StreamReader,
        take_in: ApplyResults,
        waiting: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`waiting` says how many tasks wait, where results come as singles."""
        self._reader = reader
        self._take_in = take_in
        self._waiting = waiting
        self.unapplied = asyncio.Event()
        """Set it if one of these could not go on: what it had read may not be applied."""

    async def take(self, stopping: asyncio.Event | None) -> None:
        """New ones, until it is told to stop, between two batches of them."""
        crowd, seen_at = 0, 0.0
        async with BackgroundTask() as beside:
            while stopping is None or not stopping.is_set():
                messages = await self._reader.read([RESULTS], MOST_MESSAGES)
                await beside.done()
                if len(messages) >= MANY:  # while Redis is busy with these, the next are read
                    beside.begin(self._take_many(messages))
                    continue
                followed = False
                if messages:
                    followed = await self._taken_in(messages)
                    self._reader.settle_soon(messages)
                if len(messages) >= FEW and not followed:
                    await asyncio.sleep(GATHER_SECONDS)  # more will come: many cost less than few
                elif self._waiting is not None and messages:
                    if followed and time.monotonic() - seen_at > CROWD_SECONDS:
                        crowd, seen_at = await self._waiting(), time.monotonic()
                    if not followed or crowd >= CROWD:
                        await asyncio.sleep(SINGLES_SECONDS)
            await beside.done()

    async def _take_many(self, messages: Sequence[StreamMessage]) -> None:
        await self._taken_in(messages)
        self._reader.settle_soon(messages)

    async def _taken_in(self, messages: Sequence[StreamMessage], *, again: bool = False) -> bool:
        """As `TakeIn` says. One that cannot be applied is a dead letter: nobody ever could, and
        whether a worker is missed is not asked while a result lies there."""

        async def take_in(some: Sequence[StreamMessage]) -> Sequence[bool]:
            nonlocal again
            had_before, again = again, True
            return [await self._take_in([one.content for one in some], again=had_before)]

        return any(await bisect_failures(take_in, messages, self._bury))

    async def _bury(self, message: StreamMessage, problem: Exception) -> Sequence[bool]:
        log.error(
            "a result of run %s is a dead letter: %s",
            message.content.run_id,
            describe_error(problem),
        )
        await self._reader.bury(message, problem)
        return ()

    # ── and those that were read before ──────────────────────────────────────────────────

    async def take_from_the_dead(self, peers: OrchestratorPeers) -> None:
        """Results that an orchestrator has read whose lease then lapsed."""
        while True:
            for name in await peers.beat():
                while messages := await self._reader.claim_from(RESULTS, name, MOST_MESSAGES):
                    await self._take_again(messages)
                await self._reader.dismiss(RESULTS, name)
                await peers.forget(name)
            await asyncio.sleep(BEAT_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311

    async def take_stale(self, idle: float, pause: float) -> None:
        """The same of whoever is not known: results that were read so long ago, and not settled."""
        while True:
            while messages := await self._reader.claim_stale([RESULTS], idle, MOST_MESSAGES):
                await self._take_again(messages)
            await asyncio.sleep(pause)

    async def take_up_again(self) -> None:
        """The same of our own: results that we have read and then were not able to apply. Not
        those that were read just now, which may be under way."""
        reader, idle = self._reader, UNDER_WAY_SECONDS
        while True:
            await self.unapplied.wait()
            self.unapplied.clear()  # first: what cannot be applied from now on is for next time
            await asyncio.sleep(idle)
            while messages := await reader.claim_from(
                RESULTS, reader.consumer, MOST_MESSAGES, idle_seconds=idle
            ):
                await self._take_again(messages)

    async def _take_again(self, messages: Sequence[StreamMessage]) -> None:
        await self._taken_in(messages, again=True)
        await self._reader.settle(messages)
