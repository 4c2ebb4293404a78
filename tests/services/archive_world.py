"""Runs in a real Redis beside a real PostgreSQL, moved by hand: only the test works here.

Time is the test's own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.items import PLACES
from dovetail.core.run import Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Claim, Complete, Dispatch, Stop, Submit, Transition
from dovetail.engine.distributed.archiver import Archiver, ArchiveWriter, Restorer
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.expansion import render_list
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.postgres.archive import PostgresArchive
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.postgres.records import PostgresRecords
from dovetail.stores.redis.archive import RedisArchiveQueue, RedisSnapshots
from dovetail.stores.redis.codec import keys_of, take_counts
from dovetail.stores.redis.items import split_record
from dovetail.stores.redis.limits import RedisLimits
from dovetail.stores.redis.packed import unpacked_event
from dovetail.stores.redis.store import RedisStore
from dovetail.stores.redis.timers import RedisTimerIndex

LEASE = 10.0
RECOVERY = 30.0
RETENTION = 100.0

DIAMOND: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"dependencies": ["a"]},
    "c": {"dependencies": ["a"]},
    "d": {"dependencies": ["b", "c"]},
}


def graph(nodes: dict[str, dict[str, Any]], **fields: Any) -> Graph:
    listed = [{"id": name, "handler": "work", **more} for name, more in nodes.items()]
    return build_graph(Workflow.model_validate({"name": "t", "nodes": listed, **fields}), {})


class Outbox:
    """A transport that only remembers what was offered."""

    def __init__(self) -> None:
        self.offered: list[Dispatch] = []

    async def publish(self, dispatches: Sequence[Dispatch]) -> Sequence[Transition]:
        self.offered += dispatches
        return ()

    async def stop(self, order: Stop) -> None:
        pass


class NoTraffic:
    """Nothing lies about: what was offered, the test has."""

    async def oldest_result(self) -> float | None:
        return None

    async def oldest_waiting(self, handler: str) -> float | None:
        return None

    async def lost(self) -> list[str]:
        return []

    async def announce(self, run_ids: Iterable[str]) -> None:
        pass


class World:
    def __init__(self, pipe: PipelinedRedis, pool: PostgresPool) -> None:
        self.now = time.time()
        self.pipe = pipe
        self.pool = pool
        self.store = RedisStore(pipe)
        self.outbox = Outbox()
        self.hints = RedisArchiveQueue(pipe, self.clock)
        self.snapshots = RedisSnapshots(pipe)
        self.archive = PostgresArchive(pool)
        self.records = PostgresRecords(pool)
        self.limits = RedisLimits(pipe)
        self.orchestrator = DistributedOrchestrator(
            self.store,
            self.outbox,
            RedisTimerIndex(pipe),
            NoTraffic(),
            self.clock,
            lease_seconds=LEASE,
            max_crashes=3,
            observer=self.hints,
        )
        self.restorer = Restorer(
            self.snapshots,
            self.hints,
            self.archive,
            self.orchestrator,
            self.clock,
            lease_seconds=LEASE,
            recovery_timeout=RECOVERY,
            limits=self.records.limits,
            shared_limits=self.limits,
        )
        self.archiver = self.another_archiver()

    def clock(self) -> float:
        return self.now

    def another_archiver(self) -> Archiver:
        self.writer = ArchiveWriter(self.snapshots, self.hints, self.archive, self.clock)
        return Archiver(
            self.writer,
            checkpoint_interval=10,
            retention_seconds=RETENTION,
            rest_seconds=0.0,
            restore=self.restorer.restore_lost,
        )

    # ── runs ─────────────────────────────────────────────────────────────────────────────

    async def accept(self, made_of: Graph, params: dict[str, Any] | None = None) -> Submit:
        submit = Submit(os.urandom(16).hex(), made_of, params or {})
        await self.records.accept(submit, self.now)
        return submit

    async def begin(self, made_of: Graph, params: dict[str, Any] | None = None) -> str:
        submit = await self.accept(made_of, params)
        await self.orchestrator.submit(submit)
        return submit.run_id

    async def load(self, run_id: str) -> RunState:
        return await self.store.load(run_id)

    async def start(self, run_id: str, *names: str) -> None:
        run = await self.load(run_id)
        self.now += 0.001
        until = self.now + LEASE
        starts = [(run_id, name, run.node(name).token) for name in names]
        await self.orchestrator.timers.lease([run_id], until)
        claims = [Claim(*start, "worker", until) for start in starts]
        await self.store.apply(claims, self.now)  # as workers do: no notice is given

    async def complete(self, run_id: str, *names: str) -> None:
        run = await self.load(run_id)
        self.now += 0.001
        await self.orchestrator.apply(
            [Complete(run_id, name, run.node(name).token, {"of": name}) for name in names]
        )

    async def do(self, run_id: str, *names: str) -> None:
        for name in names:
            await self.start(run_id, name)
            await self.complete(run_id, name)

    async def expand(self, run_id: str) -> None:
        """Render the lists that mapped nodes wait for, as a publisher does."""
        run = await self.load(run_id)
        lists = [
            render_list(run, index, node.token)[0]
            for index, node in enumerate(run.nodes)
            if node.phase is Phase.EXPANDING
        ]
        await self.orchestrator.apply(lists)

    async def finish(self, run_id: str) -> RunState:
        """Work on whatever is offered, and do every duty, until the run has ended."""
        for _ in range(50):
            run = await self.load(run_id)
            if run.finished:
                return run
            self.now += 1
            for duty in (
                self.orchestrator.wake_due,
                self.orchestrator.reap,
                self.orchestrator.sweep,
            ):
                await duty()
            await self.expand(run_id)
            offered, self.outbox.offered = self.outbox.offered, []
            names = {d.name for d in offered if d.run.id == run_id}
            run = await self.load(run_id)
            ready = [n for n in names if run.node(n).phase is Phase.PUBLISHED]
            await self.start(run_id, *ready)
            run = await self.load(run_id)
            await self.complete(
                run_id, *(n for n in ready if run.node(n).status is NodeStatus.RUNNING)
            )
        raise AssertionError(f"run {run_id} is stuck: {(await self.load(run_id)).snapshot()}")

    # ── what is kept ─────────────────────────────────────────────────────────────────────

    async def raw(self, run_id: str) -> dict[str, Any]:
        """Everything that Redis has of a run, and the archive keeps too."""
        meta, nodes, _, out, ends, events, _, maps, items, _ = keys_of(run_id)
        flat = await asyncio.gather(
            *(self.pipe.call("HGETALL", k) for k in (meta, nodes, out, ends, maps, items))
        )
        hashes = [dict(zip(found[::2], found[1::2], strict=True)) for found in flat]
        hashes[0] |= take_counts(hashes[1])
        for place, record in hashes.pop().items():
            head, output = split_record(record)
            hashes[1][place] = head
            if output is not None:
                hashes[2][place] = output
        own = hashes.pop()
        counts = {int(k): v.decode() for k, v in own.items() if int(k) < PLACES}
        hashes[1] |= {k: v for k, v in own.items() if int(k) >= PLACES}
        if counts:
            hashes[0][b"maps"] = orjson.dumps({str(k): v for k, v in counts.items()})
        log = await self.pipe.call("LRANGE", events, 0, -1)
        return {
            "meta": {k.decode(): v.decode() for k, v in hashes[0].items() if k != b"generation"},
            "nodes": {int(k): v.decode() for k, v in hashes[1].items()},
            "outputs": {int(k): v for k, v in hashes[2].items()},
            "ends": {int(k): v for k, v in hashes[3].items()},
            "events": [unpacked_event(text) for text in log],
        }

    async def archived(self, run_id: str) -> dict[str, Any]:
        found = await self.archive.read(run_id)
        assert found is not None
        return {name: getattr(found, name) for name in await self.raw(run_id)}

    async def assert_archived(self, run_id: str) -> None:
        raw, archived = await self.raw(run_id), await self.archived(run_id)
        for name, value in raw.items():
            assert archived[name] == value, name

    async def generation(self, run_id: str) -> int:
        return int(await self.pipe.call("HGET", keys_of(run_id)[0], "generation") or 1)


@asynccontextmanager
async def a_world(redis_url: str, postgres_url: str) -> AsyncIterator[World]:
    async with PipelinedRedis(redis_url) as pipe, PostgresPool(postgres_url) as pool:
        yield World(pipe, pool)


@asynccontextmanager
async def an_empty_world(redis_url: str, postgres_url: str) -> AsyncIterator[World]:
    """With an empty archive: a restore finds whatever others left unfinished."""
    async with a_world(redis_url, postgres_url) as made:
        forget = "DELETE FROM dovetail.runs"
        await made.pool.transact(lambda connection: connection.execute(forget))
        yield made


async def half_done(world: World) -> str:
    run_id = await world.begin(graph(DIAMOND))
    await world.do(run_id, "a", "b")
    return run_id


async def lose_everything(world: World) -> None:
    await world.pipe.call("FLUSHALL")
    world.outbox.offered.clear()
    world.now += RECOVERY + 1


Keys = list[tuple[bytes, bytes]]


async def everything(world: World) -> Keys:
    names = await world.pipe.call("KEYS", "*")
    return [(name, await world.pipe.call("DUMP", name)) for name in names]


async def come_back_with(world: World, keys: Keys) -> None:
    """As a Redis that is started again without the end of its log."""
    await world.pipe.call("FLUSHALL")
    await world.pipe.call_many([("RESTORE", name, 0, dumped) for name, dumped in keys])
