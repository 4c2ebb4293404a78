"""What an API server knows of the services around it: workers, waiting tasks, dead letters.

It has a connection of its own, so that a health check does not queue behind the work, and little
patience.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dovetail.config import Settings, env_name
from dovetail.core.errors import StoreError
from dovetail.engine.clock import Clock, steady_clock
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError, RedisUnreachable
from dovetail.redis_client.url import read
from dovetail.stores.redis.archive import RedisArchiveQueue
from dovetail.stores.redis.doctor import WRITABLE_KEY, refuse_eviction, warn_of_lost_writes
from dovetail.stores.redis.workers import OtherTransport, ServiceRegistry, WorkerRegistry, conflict
from dovetail.transports.celery.counts import waiting

T = TypeVar("T")

log = logging.getLogger("dovetail.redis")

ANSWER_SECONDS = 3.0
"""Redis answers within a millisecond, or it is being restarted, or it is away."""
SEEN_SECONDS = 0.2
"""A check holds so long: every request needs one."""
AWAY_SECONDS = 1.0
"""After a failed check, Redis is not tried again for so long."""
BACKLOG_SECONDS = 1.0
"""So old may a count of what waits be: it is asked for with every trigger."""
START_SECONDS = 15.0
"""Services are often started together with their Redis, and may be there first."""
RETRY_SECONDS = 0.5


class ServicesHealth:
    """Workers on any number of machines, as Redis knows them."""

    def __init__(
        self,
        pipe: PipelinedRedis,
        handlers: Iterable[str],
        clock: Clock,
        *,
        heartbeat_timeout: float = 15.0,
    ) -> None:
        """`handlers` are known here; what workers announce comes on top."""
        self._pipe = pipe
        self._handlers = frozenset(handlers)
        self._clock = clock
        self._fleet = WorkerRegistry(pipe, heartbeat_timeout=heartbeat_timeout)
        self._ping = _Together(self._pinged)
        self._seen_at = float("-inf")
        self._away_until = float("-inf")
        self._count = _Together(self._counted)
        self._counted_at = float("-inf")
        self._backlog = 0

    async def workers(self, *, with_schemas: bool = False) -> list[dict[str, Any]]:
        return await _in_time(self._fleet.workers(with_schemas=with_schemas))

    async def check(self) -> None:
        """Raises `StoreError` unless Redis answers."""
        if self._clock() - self._seen_at > SEEN_SECONDS:
            await self._ping()

    async def _pinged(self) -> None:
        if self._clock() < self._away_until:
            raise RedisUnreachable("Redis did not answer a moment ago")
        try:
            # A PING is refused while Redis cannot save, though reads are answered then.
            await _in_time(self._pipe.call("EXISTS", WRITABLE_KEY))
        except StoreError:
            self._away_until = self._clock() + AWAY_SECONDS
            raise
        self._seen_at = self._clock()

    async def backlog(self) -> int:
        """How many tasks wait for a worker, as of a moment ago."""
        if self._clock() - self._counted_at > BACKLOG_SECONDS:
            await self._count()
        return self._backlog

    async def depths(self) -> dict[str, int]:
        """How many tasks of each handler wait for a worker."""
        names = sorted(self._handlers | await _in_time(self._fleet.handlers()))
        in_streams = await _in_time(self._fleet.waiting(names))
        at_broker = await _in_time(waiting(self._pipe))
        return {name: count + at_broker.get(name, 0) for name, count in in_streams.items()}

    async def waiting(self, running: Mapping[str, int]) -> dict[str, int]:
        """The same without nodes that run: their messages stay in the stream until they end."""
        depths = await self.depths()
        return {name: max(0, count - running.get(name, 0)) for name, count in depths.items()}

    async def archive_lag(self) -> float:
        """For how many seconds the archive has been behind; 0 if there is none."""
        return await _in_time(RedisArchiveQueue(self._pipe, self._clock).lag())

    async def _counted(self) -> None:
        self._backlog = sum((await self.depths()).values())
        self._counted_at = self._clock()


class _Together:
    """One call for all callers that come at once."""

    def __init__(self, question: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._question = question
        self._asked: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._question())
            self._asked.add_done_callback(self._answered)
        await asyncio.shield(self._asked)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._asked = None
        if not task.cancelled():
            task.exception()  # raised to callers that wait, if any


@asynccontextmanager
async def watching(settings: Settings, handlers: Iterable[str]) -> AsyncIterator[ServicesHealth]:
    """The services on the Redis of the settings."""
    async with PipelinedRedis(redis_of(settings)) as pipe:
        yield ServicesHealth(
            pipe, handlers, steady_clock(), heartbeat_timeout=settings.heartbeat_timeout
        )


async def await_redis(
    settings: Settings,
    on_wait: Callable[[str], None],
    warn: Callable[[str], None] = log.warning,
) -> None:
    """Return once Redis answers and keeps what it is given; `on_wait` gets the reason for
    a wait, `warn` what may be lost there.

    Raises `RedisError` if it does not come, and at once if it is there and refuses us, or if it
    would throw runs away.
    """
    began = asyncio.get_running_loop().time()
    reported = False
    while True:
        try:
            async with PipelinedRedis(redis_of(settings)) as pipe:
                await _in_time(pipe.call("PING"))
                if settings.transport == "celery" and not pipe.keeps_order:
                    raise RedisError(
                        "Celery's workers reach one server only, and this is a cluster of several: "
                        f"set {env_name('transport')}=streams, or use another Redis"
                    )
                await _in_time(refuse_eviction(pipe, settings, warn))
                alive = await _in_time(ServiceRegistry(pipe).alive())
                if (refused := conflict(settings.transport, alive)) is not None:
                    raise OtherTransport(refused)
                await _in_time(warn_of_lost_writes(pipe, settings, warn))
            return
        except RedisUnreachable as error:
            waited = asyncio.get_running_loop().time() - began
            why = f"{error}, at {read(redis_of(settings)).shown()}"
            if waited >= START_SECONDS:
                raise RedisError(
                    f"{why}; waited for {waited:.0f} s: start it, or correct "
                    f"{env_name('redis_url')}"
                ) from None
            if not reported:
                on_wait(why)
                reported = True
        await asyncio.sleep(RETRY_SECONDS)


def redis_of(settings: Settings) -> str:
    if settings.redis_url is None:
        raise StoreError(f"{env_name('redis_url')} is not set")
    return settings.redis_url


async def _in_time(asked: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asked
    except TimeoutError:
        raise RedisUnreachable(f"Redis did not answer within {ANSWER_SECONDS:g} s") from None


async def announced_handlers(settings: Settings) -> list[dict[str, Any]]:
    """What the workers on the Redis of the settings have announced, by the handlers' names."""
    async with PipelinedRedis(redis_of(settings)) as pipe:
        fleet = WorkerRegistry(pipe, heartbeat_timeout=settings.heartbeat_timeout)
        return await fleet.catalogue()
