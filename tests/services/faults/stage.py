"""A Redis, services in processes of their own, and every way to break them.

Whatever is broken here is noted with its time, so that a run that came to harm can be read beside
what happened meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dovetail.config import Settings, env_name
from dovetail.redis_client.pipelined import RedisError
from dovetail.stores.postgres.archive import PostgresArchive
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.wiring.distributed import ServiceParts, commanding, connected

from ...faults.process_forker import Child, ProcessForker
from ...servers.postgres_server import PostgresServer
from ...servers.redis_server import RedisServer
from ...servers.server import free_port
from .front import Front
from .proxy import Proxy
from .side_file import Execution, executions
from .workload import HANDLERS

JOBS = Path(__file__).with_name("jobs.py")
HANDLERS_FILE = Path(__file__).with_name("handlers.py")
RESULTS = "wf:stream:results"
TASKS = [f"tasks:{handler}" for handler in HANDLERS]
INDEXES = ("wf:active", "wf:leases", "wf:delayed", "wf:line", "wf:unarchived")
POISON = b'"reason":"poison: '
"""Of the dead letters those of nodes whose workers were killed too often, which is ours to do."""
COPIES = 10
MOST_LOST_BYTES = 50_000
MOST_READ, MOST_COPIED = 300, 15
RATES = """[rate_limits]
slow = {rate_per_second = 20, burst = 2}
slower = {rate_per_second = 8, burst = 1}
"""
DELETE_STREAM = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local after = '-'
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  for at = 1, #group, 2 do
    if group[at] == 'last-delivered-id' then after = '(' .. group[at + 1] end
  end
end
local unread = redis.call('XRANGE', KEYS[1], after, '+')
redis.call('DEL', KEYS[1])
return unread
"""
"""In one piece: what is read by anybody before it is deleted, is not lost."""
IMPATIENT: dict[str, Any] = {
    "lease_seconds": 1.0,
    "stale_result_timeout": 2.0,
    "stale_claim_interval": 1.0,
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 1.5,
    "concurrency": 8,
}
"""Settings under which recovering takes a second or two, so that much of it fits in a minute."""


@dataclass(eq=False, slots=True)
class Service:
    """A process, until the test ends it."""

    kind: str
    child: Child = field(repr=False)
    asleep: bool = False

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def runs(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"


@dataclass(slots=True)
class Recovery:
    """How long it took until what a fault held up went on, in seconds."""

    redis: list[float] = field(default_factory=list)
    orchestrators: list[float] = field(default_factory=list)
    workers: list[float] = field(default_factory=list)
    tasks: list[float] = field(default_factory=list)
    broker: list[float] = field(default_factory=list)


Fault = Callable[["Stage"], Awaitable[None]]


def of_a_server(fault: Fault) -> Fault:
    """A fault of Redis or PostgreSQL: there is one at a time, for who is dead cannot die."""

    async def done(stage: Stage) -> None:
        if not stage.breaks_a_server.locked():
            async with stage.breaks_a_server:
                await fault(stage)

    return done


class Stage:
    """Use `async with`; services are started by `start`."""

    def __init__(
        self,
        folder: Path,
        redis: RedisServer,
        process_forker: ProcessForker,
        seed: int,
        settings: dict[str, Any],
        postgres: PostgresServer | None = None,
    ) -> None:
        """`postgres` is there to be killed; an archive that stays is `database_url` in settings."""
        self.redis = redis
        self.postgres = postgres
        self.seed = seed
        self.chance = random.Random(seed)
        self.side = folder / "executions"
        self.port = free_port()
        self.front = Front(self.port)
        self._folder = folder
        self.counts: Counter[str] = Counter()
        self.recovery = Recovery()
        self.complaints: list[str] = []
        """What services did that no service may do."""
        self.notes: list[str] = []
        self.deaths: list[tuple[float, str]] = []
        """Of workers: when, and what is in the name of each that died then, followed by a /."""
        self.lost_tasks: list[tuple[float, str, str, str]] = []
        """When a message was deleted that was not read, and its run, node and token."""
        self.redis_deaths: list[tuple[float, float, float]] = []
        """When it died, when it served again, and when nothing read before was left."""
        self.broker_deaths: list[tuple[float, float, float]] = []
        """The same of a broker, if tasks have one of their own."""
        self.forgot_until = 0.0
        self.postgres_well_since = 0.0
        """Who asked for it in vain comes back a moment later."""
        """Redis was emptied: what workers did up to this time may have left no trace."""
        self._process_forker = process_forker
        self._settings = settings
        self._services: list[Service] = []
        self._old: deque[tuple[str, tuple[bytes, ...]]] = deque(maxlen=3 * MOST_COPIED)
        self.breaks_a_server = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        proxy = Proxy(self.redis.port, random.Random(f"{self.seed} answers"))
        self.proxy = await self._stack.enter_async_context(proxy)
        self._folder.joinpath("dovetail.toml").write_text(RATES)
        self.settings = Settings.model_validate({**self._settings, "redis_url": self.redis.url})
        self.parts: ServiceParts = await self._stack.enter_async_context(connected(self.settings))
        self.commands = await self._stack.enter_async_context(commanding(self.settings))
        self.archive: PostgresArchive | None = None
        if self.settings.database_url is not None:
            pool = await self._stack.enter_async_context(PostgresPool(self.settings.database_url))
            self.archive = PostgresArchive(pool)
        self._watch = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        for service in list(self._services):
            self._end(service)
        await self._stack.aclose()

    def note(self, what: str) -> None:
        self.notes.append(f"{time.time():.3f} {what}")

    # ── services ─────────────────────────────────────────────────────────────────────────

    def start(self, kind: str) -> Service:
        """`dovetail orchestrator`, `worker` or `serve`, as anybody would."""
        settings = {**self._settings, "redis_url": self.proxy.url}
        env = {env_name(name): str(value) for name, value in settings.items()}
        args = [kind]
        if kind != "orchestrator":
            args += ["--handlers", str(HANDLERS_FILE)]
        if kind == "serve":
            args += ["--port", str(self.port)]
        env |= {"SIDE_FILE": str(self.side), "DOVETAIL_DEBUG": "1"}
        child = self._process_forker.start("dovetail", folder=str(self._folder), args=args, env=env)
        service = Service(kind, child)
        self._services.append(service)
        self.note(f"{kind} {service.pid} starts")
        return service

    async def ready(self) -> None:
        """Until the API answers and every worker has said that it is there."""
        await self.workers_are_there()
        await self.front.list_runs()

    async def workers_are_there(self) -> None:
        fleet = WorkerRegistry(self.parts.pipe)
        while len(await fleet.workers()) < len(self.all("worker")):
            await asyncio.sleep(0.05)

    def all(self, kind: str) -> list[Service]:
        return [one for one in self._services if one.kind == kind]

    def some(self, kind: str) -> Service | None:
        """Any of them, if there is one at this moment."""
        return self.chance.choice(self.all(kind) or [None])

    def kill(self, service: Service) -> None:
        self.note(f"{service.kind} {service.pid} is killed")
        if service.kind == "worker":
            self.deaths.append((time.time(), f"-{service.pid}-"))
        self.counts[f"{service.kind} killed"] += 1
        self._end(service)

    def sleep(self, service: Service) -> None:
        self.note(f"{service.kind} {service.pid} falls asleep")
        service.asleep = True
        os.kill(service.pid, signal.SIGSTOP)

    def wake(self, service: Service) -> None:
        if service in self._services:
            self.note(f"{service.kind} {service.pid} wakes up")
            service.asleep = False
            os.kill(service.pid, signal.SIGCONT)

    def _end(self, service: Service) -> None:
        self._services.remove(service)
        service.child.kill()

    async def _supervise(self) -> None:
        """No service ends by itself; one that does is reported, and replaced."""
        while True:
            await asyncio.sleep(0.2)
            for service in [one for one in self._services if not one.runs]:
                self._services.remove(service)
                code = service.child.wait()
                last = service.child.errors.strip()[-3000:]
                self.complain(f"{service.kind} {service.pid} ended by itself ({code}):\n{last}")
                self.start(service.kind)

    def complain(self, what: str) -> None:
        self.note(what)
        self.complaints.append(what)

    # ── faults ───────────────────────────────────────────────────────────────────────────

    async def die_and_come_back(self, kind: str) -> None:
        service = self.some(kind)
        if service is not None:
            self.kill(service)
            await asyncio.sleep(self.chance.choice((0, 0, 0.3)))
            self.start(kind)

    async def die_over_results(self) -> None:
        """An orchestrator that has read results and does nothing about them any more."""
        service = self.some("orchestrator")
        if service is None or service.asleep:
            return
        consumer = f"-{service.pid}-"
        self.sleep(service)
        silent = time.time()
        while not await self.pending(consumer) and time.time() < silent + 1.0:
            await asyncio.sleep(0.01)
        if service not in self._services:
            return
        self.kill(service)
        self.start("orchestrator")
        if await self.pending(consumer):
            await self._until_taken(consumer, silent)

    async def _until_taken(self, consumer: str, since: float) -> None:
        """How long results stay with an orchestrator that is dead."""
        while await self.pending(consumer):
            await asyncio.sleep(0.02)
            if time.time() - since > 60:
                self.complain(f"results stay with the dead orchestrator {consumer}")
                return
        self.recovery.orchestrators.append(time.time() - since)
        self.note(f"what orchestrator {consumer} held was taken")

    async def pending(self, consumer: str) -> int:
        """Results that were read by this one and are not settled."""
        known = await self._facts("CONSUMERS", RESULTS, "orchestrators")
        return sum(one[b"pending"] for one in known if consumer in one[b"name"].decode())

    async def _facts(self, *about: str) -> list[dict[bytes, Any]]:
        """XINFO, of a stream that may not be there."""
        try:
            found = await self.parts.pipe.call("XINFO", *about)
        except RedisError:
            return []
        return [dict(zip(one[::2], one[1::2], strict=True)) for one in found]

    async def nap(self, kind: str) -> None:
        """Asleep for longer than its lease; it goes on as if nothing had happened."""
        service = self.some(kind)
        if service is None or service.asleep:
            return
        self.counts[f"{kind} stopped"] += 1
        self.sleep(service)
        await asyncio.sleep(self.settings.lease_seconds * self.chance.uniform(1.2, 2.5))
        self.wake(service)

    async def oversleep(self) -> None:
        """A worker in the middle of its work sleeps until another one does it again."""
        begun = await self._just_begun()
        if not begun:
            return
        (service,) = [one for one in self.all("worker") if one.pid == begun[0].pid]
        self.sleep(service)
        again = {one.next for one in begun}
        give_up = time.time() + 4 * self.settings.lease_seconds
        while time.time() < give_up:
            if again & {(one.run_id, one.start) for one in executions(self.side)}:
                self.counts["worker overslept"] += 1
                break
            await asyncio.sleep(0.02)
        self.wake(service)

    async def _just_begun(self) -> list[Execution]:
        """What a worker began a moment ago, and is busy with, while another is awake too."""
        give_up = time.time() + 2.0
        while time.time() < give_up:
            awake = [one.pid for one in self.all("worker") if not one.asleep]
            last = [one for one in executions(self.side)[-20:] if one.seconds > 0.5]
            for pid in awake if len(awake) > 1 else ():
                mine = [one for one in last if one.pid == pid and time.time() - one.time < 0.1]
                if mine:
                    return mine
            await asyncio.sleep(0.01)
        return []

    async def double(self, streams: list[str], readers: str) -> None:
        """Every message of these streams ten more times, and once more a moment later."""
        pipe = self.parts.pipe
        late: list[tuple[str, tuple[bytes, ...]]] = []
        async with self._asleep(readers):  # so that there is something to double
            await asyncio.sleep(self.chance.uniform(0.05, 0.3))
            for stream in streams:
                found = await pipe.call("XRANGE", stream, "-", "+", "COUNT", MOST_READ)
                # Of copies no copies are made: that would only be a flood.
                distinct = list({tuple(fields): None for _, fields in found})[:MOST_COPIED]
                for fields in distinct * COPIES:
                    await pipe.call("XADD", stream, "*", *fields)
                late += [(stream, fields) for fields in distinct]
                what = "results" if stream == RESULTS else "tasks"
                self.counts[f"{what} doubled"] += COPIES * len(distinct)
                self.note(f"{len(distinct)} messages of {stream} {COPIES} times more")
        self._old.extend(late)
        await asyncio.sleep(self.chance.uniform(0.2, 1.0))
        for stream, fields in late:
            await pipe.call("XADD", stream, "*", *fields)

    async def bring_up_old(self) -> None:
        """What was doubled before, once more: too late, and ahead of what is new."""
        async with self._asleep("worker"):
            some = self.chance.sample(list(self._old), min(len(self._old), MOST_COPIED))
            self.note(f"{len(some)} old messages again")
            for stream, fields in some:
                await self.parts.pipe.call("XADD", stream, "*", *fields)
                self.counts["old messages again"] += 1
            await asyncio.sleep(self.chance.uniform(0.1, 0.5))

    @asynccontextmanager
    async def _asleep(self, kind: str) -> AsyncIterator[None]:
        """None of them reads anything meanwhile."""
        awake = [one for one in self.all(kind) if not one.asleep]
        for service in awake:
            self.sleep(service)
        try:
            yield
        finally:
            for service in awake:
                self.wake(service)

    async def delete_tasks(self) -> None:
        async with self._asleep("worker"):  # so that there is something to lose
            await asyncio.sleep(self.chance.uniform(0.05, 0.3))
            for stream in TASKS:
                unread = await self.parts.pipe.call("EVAL", DELETE_STREAM, 1, stream)
                now = time.time()
                for _, fields in unread:
                    given = dict(zip(fields[::2], fields[1::2], strict=True))
                    names = [given[name].decode() for name in (b"run_id", b"node_id", b"token")]
                    self.lost_tasks.append((now, names[0], names[1], names[2]))
                self.counts["task streams deleted"] += 1
                self.note(f"{stream} is deleted with {len(unread)} messages that were not read")

    @of_a_server
    async def kill_redis(self) -> None:
        self.note("Redis is killed")
        self.counts["Redis killed"] += 1
        died = time.time()
        await asyncio.to_thread(self.redis.kill)
        await asyncio.to_thread(self.redis.start)
        self.note(f"Redis serves again after {time.time() - died:.3f} s")
        await self.parts.pipe.call("PING")
        served = time.time()
        await self._until_settled(served)
        self.redis_deaths.append((died, served, time.time()))

    async def _until_settled(self, served: float) -> None:
        """Until no result waits whose reader may not even know that it has read it."""
        pipe, last = self.parts.pipe, f"{int(served * 1000)}-0"
        while time.time() < served + 60:
            try:
                held = await pipe.call("XPENDING", RESULTS, "orchestrators", "-", last, 1)
            except RedisError:
                return  # there is no such stream
            if not held:
                return
            await asyncio.sleep(0.02)
        self.complain("results that were read before Redis died stay where they are")

    @of_a_server
    async def pause_redis(self) -> None:
        self.note("Redis is stopped")
        self.counts["Redis stopped"] += 1
        self.redis.pause()
        await asyncio.sleep(self.chance.uniform(0.2, 1.5))
        self.redis.resume()
        self.note("Redis goes on")

    async def lose_answers(self) -> None:
        self.note("answers are lost")
        before = self.proxy.lost
        self.proxy.loses = 0.05
        await asyncio.sleep(self.chance.uniform(0.5, 2.0))
        self.proxy.loses = 0.0
        self.counts["answers lost"] += self.proxy.lost - before
        self.note(f"{self.proxy.lost - before} answers were lost")

    async def forget_scripts(self) -> None:
        self.note("Redis forgets its scripts")
        self.counts["scripts forgotten"] += 1
        await self.parts.pipe.call("SCRIPT", "FLUSH")

    async def fall_silent(self) -> None:
        self.note("a connection falls silent")
        self.counts["connections silent"] += 1
        self.proxy.fall_silent()

    @of_a_server
    async def empty_redis(self) -> None:
        """Nothing is left in Redis; an orchestrator that starts puts back what is unfinished."""
        self.note("Redis is emptied")
        self.counts["Redis emptied"] += 1
        self.redis.flush()
        self.forgot_until = time.time() + 2 * self.settings.lease_seconds
        await asyncio.sleep(self.settings.recovery_timeout)
        await self.die_and_come_back("orchestrator")

    @of_a_server
    async def lose_the_end_of_the_log(self) -> None:
        """Redis dies, and its newest writes are gone: the disk never had them."""
        await asyncio.to_thread(self.redis.kill)
        logs = self.redis.folder.glob("appendonlydir/*.incr.aof")  # two, while one is rewritten
        path = max(logs, key=lambda path: int(path.name.split(".")[2]))
        lost = self.chance.randrange(min(path.stat().st_size // 2, MOST_LOST_BYTES) + 1)
        os.truncate(path, path.stat().st_size - lost)
        await asyncio.to_thread(self.redis.start)
        self.note(f"Redis was killed and has lost the last {lost} bytes of its log")
        self.counts["Redis lost its tail"] += 1
        self.forgot_until = time.time() + 2 * self.settings.lease_seconds

    @of_a_server
    async def kill_postgres(self) -> None:
        assert self.postgres is not None
        self.postgres_well_since = float("inf")
        self.note("PostgreSQL is killed")
        self.counts["PostgreSQL killed"] += 1
        await asyncio.to_thread(self.postgres.kill)
        await asyncio.sleep(self.chance.uniform(0.0, 2.0))
        await asyncio.to_thread(self.postgres.start)
        self.note("PostgreSQL serves again")
        self.postgres_well_since = time.time() + 3.0

    @of_a_server
    async def pause_postgres(self) -> None:
        assert self.postgres is not None
        self.postgres_well_since = float("inf")
        self.note("PostgreSQL is stopped")
        self.counts["PostgreSQL stopped"] += 1
        self.postgres.pause()
        await asyncio.sleep(self.chance.uniform(0.5, 3.0))
        self.postgres.resume()
        self.note("PostgreSQL goes on")
        self.postgres_well_since = time.time() + 3.0

    # ── afterwards ───────────────────────────────────────────────────────────────────────

    async def left_over(self) -> list[str]:
        """What is still in an index, a stream or a pending list."""
        pipe = self.parts.pipe
        found = []
        for index in INDEXES:
            if number := await pipe.call("ZCARD", index):
                some = await pipe.call("ZRANGE", index, 0, 2)
                found.append(f"{index} has {number} entries, such as {some}")
        for stream in (RESULTS, *TASKS):
            if number := await pipe.call("XLEN", stream):
                found.append(f"{stream} has {number} messages")
            pending = sum(group[b"pending"] for group in await self._facts("GROUPS", stream))
            if pending:
                found.append(f"{stream} has {pending} messages pending")
        letters = [one for one in await pipe.call("LRANGE", "wf:dead", 0, -1) if POISON not in one]
        if letters:
            found.append(f"{len(letters)} dead letters, such as {letters[0][:300]!r}")
        return found
