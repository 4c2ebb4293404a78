"""The same stage with Celery between orchestrators and workers, and the ways to break that.

Tasks have a broker of their own, apart from the Redis that keeps the runs: it can be killed alone.
A worker is a process with a pool of others, and either may die.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import redis

from dovetail.transports.celery.application import QUEUE, TASK, make_app

from ...faults.process_forker import ProcessForker
from ...servers.redis_server import RedisServer
from .side_file import Execution, executions
from .stage import (
    COPIES,
    IMPATIENT,
    MOST_COPIED,
    POISON,
    Fault,
    Service,
    Stage,
    of_a_server,
)

JOBS = Path(__file__).with_name("celery_jobs.py")
UNACKED = "unacked"  # kombu's name for what a worker has got and not acknowledged
PICKLED = "application/x-python-serialize"
MOST_REVOKED = 3
BUSY_SECONDS = 5.0
"""So long a fault waits for a worker to be at work."""
IMPATIENT_POOL: dict[str, Any] = {**IMPATIENT, "concurrency": 3}
"""Every one of these is a process."""


class CeleryStage(Stage):
    def __init__(
        self,
        folder: Path,
        redis: RedisServer,
        broker: RedisServer,
        process_forker: ProcessForker,
        seed: int,
        settings: dict[str, Any],
    ) -> None:
        given = {**settings, "transport": "celery", "broker_url": broker.url}
        super().__init__(folder, redis, process_forker, seed, given)
        self.broker = broker
        self.canary = folder / "canary"
        """A process that reads a pickle leaves it behind."""
        self._doubled: deque[bytes] = deque(maxlen=3 * MOST_COPIED)

    async def __aenter__(self) -> CeleryStage:
        await super().__aenter__()
        self._queue = redis_client(self.broker.url)
        self._app = make_app(self.settings)
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        self._app.close()
        self._queue.close()

    # ── services ─────────────────────────────────────────────────────────────────────────

    def pool(self, service: Service) -> list[int]:
        """The processes of a worker that run handlers."""
        found = ""
        with suppress(FileNotFoundError):
            for thread in Path(f"/proc/{service.pid}/task").iterdir():
                found += thread.joinpath("children").read_text()
        return [int(pid) for pid in found.split()]

    def sleep(self, service: Service) -> None:
        super().sleep(service)  # first: it would start others in the place of who is gone
        for pid in self.pool(service):
            _signal(pid, signal.SIGSTOP)

    def wake(self, service: Service) -> None:
        for pid in self.pool(service):
            _signal(pid, signal.SIGCONT)
        super().wake(service)

    def _end(self, service: Service) -> None:
        _signal(service.pid, signal.SIGSTOP)
        pool = self.pool(service)
        super()._end(service)
        for pid in pool:
            _signal(pid, signal.SIGKILL)

    # ── faults ───────────────────────────────────────────────────────────────────────────

    async def kill_one_of_a_pool(self) -> None:
        """One in the midst of its work. Not of a worker that has just started: Celery gives up if
        it loses a process before it serves."""
        give_up = time.time() + BUSY_SECONDS
        while time.time() < give_up:
            awake = [one for one in self.all("worker") if not one.asleep]
            pools = {pid: one.pid for one in awake for pid in self.pool(one)}
            if busy := [one.pid for one in self._at_work() if one.pid in pools]:
                pid = self.chance.choice(busy)
                self.note(f"{pid}, of the pool of {pools[pid]}, is killed")
                self.counts["pool process killed"] += 1
                self.deaths.append((time.time(), f"/{pid}/"))
                _signal(pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.02)

    def _at_work(self) -> list[Execution]:
        last = executions(self.side)[-20:]
        return [one for one in last if one.time < time.time() < one.time + one.seconds - 0.1]

    async def revoke(self) -> None:
        """Whatever runs, or waits, by Celery's own command: its process is ended."""
        if self.breaks_a_server.locked():
            return
        held = _messages(orjson.loads(one)[0] for one in await self._ask("hvals", UNACKED))
        waiting = _messages(map(orjson.loads, await self._ask("lrange", QUEUE, 0, -1)))
        begun = {(one.run_id, one.start[0]) for one in self._at_work()}
        running = [one for one in held if (one["run_id"], one["node_id"]) in begun]
        some = self.chance.sample(running, min(len(running), MOST_REVOKED)) + waiting[:1]
        if some:
            self.note(f"revoked: {', '.join(one['id'] for one in some)}")
            self.counts["tasks revoked"] += len(some)
            await asyncio.to_thread(
                self._app.control.revoke, [one["id"] for one in some], terminate=True
            )

    async def double_messages(self) -> None:
        """Every message that waits ten more times, and once more a moment later."""
        async with self._asleep("worker"):  # so that there is something to double
            await asyncio.sleep(self.chance.uniform(0.05, 0.3))
            distinct = list(dict.fromkeys(await self._ask("lrange", QUEUE, 0, -1)))[:MOST_COPIED]
            if distinct:
                await self._ask("lpush", QUEUE, *distinct * COPIES)
            self.counts["tasks doubled"] += COPIES * len(distinct)
            self.note(f"{len(distinct)} messages {COPIES} times more")
        self._doubled.extend(distinct)
        await asyncio.sleep(self.chance.uniform(0.2, 1.0))
        if distinct:
            await self._ask("lpush", QUEUE, *distinct)

    async def bring_up_old(self) -> None:
        """What was doubled before, once more: too late."""
        some = self.chance.sample(list(self._doubled), min(len(self._doubled), MOST_COPIED))
        if some:
            self.note(f"{len(some)} old messages again")
            self.counts["old messages again"] += len(some)
            await self._ask("lpush", QUEUE, *some)

    async def put_a_pickle(self) -> None:
        """A process that reads it opens a file; none may."""
        self.note("a pickle is put on the queue")
        self.counts["pickles"] += 1
        await self._ask("lpush", QUEUE, pickled_message(self.canary))

    @of_a_server
    async def restart_broker(self) -> None:
        await self._restart_broker(forgets=False)

    @of_a_server
    async def empty_broker(self) -> None:
        await self._restart_broker(forgets=True)

    async def _restart_broker(self, *, forgets: bool) -> None:
        """Killed, and started again: with what it had confirmed, or with nothing."""
        what = "killed and has lost everything" if forgets else "killed"
        async with self._asleep("worker"):  # so that there is something to lose
            await asyncio.sleep(self.chance.uniform(0.05, 0.3))
            unread = await self._ask("lrange", QUEUE, 0, -1) if forgets else []
            died = time.time()
            await asyncio.to_thread(self.broker.kill)
        for one in _messages(map(orjson.loads, unread)):
            self.lost_tasks.append((died, one["run_id"], one["node_id"], one["token"]))
        if forgets:
            shutil.rmtree(self.broker.folder / "appendonlydir")
        await asyncio.to_thread(self.broker.start)
        served = time.time()
        self.counts[f"broker {what}"] += 1
        self.note(f"the broker was {what}; it serves again after {served - died:.3f} s")
        self.broker_deaths.append((died, served, served))

    async def _ask(self, command: str, *words: Any) -> Any:
        """Of the broker; nothing while it is away."""
        try:
            return await asyncio.to_thread(getattr(self._queue, command), *words)
        except redis.RedisError:
            return []

    # ── afterwards ───────────────────────────────────────────────────────────────────────

    async def left_over(self) -> list[str]:
        found = [one for one in await super().left_over() if "dead letters" not in one]
        kept = await self.parts.pipe.call(*DEAD_LETTERS)
        letters = [orjson.loads(one) for one in kept if POISON not in one]
        strange = [one for one in letters if PICKLED not in one["reason"]]
        if strange:
            found.append(f"{len(strange)} dead letters, such as {strange[0]}")
        if number := await self._ask("llen", QUEUE):
            found.append(f"{number} messages wait at the broker")
        if self.canary.exists():
            found.append("a process has read a pickle")
        return found


DEAD_LETTERS = ("LRANGE", "wf:dead", 0, -1)
CELERY_FAULTS: dict[str, tuple[int, Fault]] = {
    "a worker dies": (6, lambda stage: stage.die_and_come_back("worker")),
    "a process of a pool dies": (6, lambda stage: _celery(stage).kill_one_of_a_pool()),
    "an orchestrator dies": (2, lambda stage: stage.die_and_come_back("orchestrator")),
    "a worker sleeps": (2, lambda stage: stage.nap("worker")),
    "tasks are revoked": (4, lambda stage: _celery(stage).revoke()),
    "tasks come ten times": (3, lambda stage: _celery(stage).double_messages()),
    "old messages come again": (2, lambda stage: _celery(stage).bring_up_old()),
    "a pickle comes": (2, lambda stage: _celery(stage).put_a_pickle()),
    "the broker dies": (2, lambda stage: _celery(stage).restart_broker()),
    "the broker loses everything": (2, lambda stage: _celery(stage).empty_broker()),
    "Redis dies": (1, lambda stage: stage.kill_redis()),
}
"""What happens, and how often beside the rest."""


def _celery(stage: Stage) -> CeleryStage:
    assert isinstance(stage, CeleryStage)
    return stage


def redis_client(url: str) -> Any:
    return redis.Redis.from_url(url, socket_timeout=2.0)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _messages(envelopes: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """What each message of ours says, and its id."""
    found = []
    for envelope in envelopes:
        if envelope["content-type"] != PICKLED:
            body = envelope["body"]
            if envelope["properties"]["body_encoding"] == "base64":
                body = base64.b64decode(body)
            _, reported, _ = orjson.loads(body)
            found.append({"id": envelope["headers"]["id"], **reported})
    return found


class _Opens:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


def pickled_message(canary: Path) -> bytes:
    """As a Celery that trusts every sender sends one."""
    name = f"pickle-{time.time_ns()}"
    return orjson.dumps(
        {
            "body": base64.b64encode(pickle.dumps(_Opens(canary))).decode(),
            "content-encoding": "binary",
            "content-type": PICKLED,
            "headers": {
                "lang": "py",
                "task": TASK,
                "id": name,
                "root_id": name,
                "parent_id": None,
                "group": None,
                "eta": None,
                "expires": None,
                "retries": 0,
                "timelimit": [None, None],
            },
            "properties": {
                "correlation_id": name,
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": QUEUE},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": name,
            },
        }
    )
