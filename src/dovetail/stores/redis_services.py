"""Which services are alive on a Redis, and what carries their tasks.

All of them must have the same transport: a node that is sent to Celery's broker is never seen by a
worker that reads streams. So each says which one it has, and a service with another one is refused
while they live. What it must not know: how any transport works.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from dovetail.config import env_name
from dovetail.core.errors import StoreError
from dovetail.engine.duties import kept_up
from dovetail.pipe import Argument, Pipe, RedisError
from dovetail.stores.redis_lists import source

SERVICES = "wf:services"
SEPARATOR = "|"
FAREWELL_SECONDS = 1.0

log = logging.getLogger("dovetail.redis")


class Service(NamedTuple):
    transport: str
    kind: str
    """`api`, `orchestrator` or `worker`."""
    service_id: str


class OtherTransport(RedisError):
    """Services with another transport are alive on this Redis."""


class Services:
    def __init__(self, pipe: Pipe, *, heartbeat_timeout: float = 15.0) -> None:
        self._pipe = pipe
        self._timeout = heartbeat_timeout

    async def alive(self) -> list[Service]:
        """Writes nothing: a replica, or a Redis that is full, can be asked, too."""
        seconds, micros = await self._pipe.call("TIME")
        now = int(seconds) + int(micros) / 1e6
        return _read(await self._pipe.call("ZRANGEBYSCORE", SERVICES, f"({now:.3f}", "+inf"))

    async def join(self, me: Service) -> None:
        """Raises `OtherTransport` if live services have another one."""
        refused = conflict(me.transport, await self._asked(SEPARATOR.join(me), beside=False))
        if refused is not None:
            raise OtherTransport(refused)

    async def beat(self, me: Service) -> str | None:
        """It is alive; says what is wrong if others came with another transport."""
        return conflict(me.transport, await self._asked(SEPARATOR.join(me), beside=True))

    async def leave(self, me: Service) -> None:
        await self._pipe.call("ZREM", SERVICES, SEPARATOR.join(me))

    async def _asked(self, member: str, *, beside: bool) -> list[Service]:
        given: list[Argument] = [member, repr(self._timeout), int(beside)]
        told = await self._pipe.script(source("services_join"), [SERVICES], given)
        return _read(told)


def _read(members: Iterable[bytes]) -> list[Service]:
    parts = [text.decode().split(SEPARATOR, 2) for text in members]
    return [Service(*part) for part in parts if len(part) == len(Service._fields)]


@asynccontextmanager
async def announced(
    pipe: Pipe, me: Service, *, heartbeat_timeout: float, pause: float
) -> AsyncIterator[None]:
    """A service that others can see while it works. Raises `OtherTransport`."""
    services = Services(pipe, heartbeat_timeout=heartbeat_timeout)
    await services.join(me)

    async def beat() -> None:
        told: str | None = None
        while True:
            await asyncio.sleep(pause)
            wrong = await services.beat(me)
            if wrong is not None and wrong != told:
                log.warning("%s", wrong)
            told = wrong

    beating = asyncio.create_task(kept_up("announcing", beat))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        with suppress(StoreError, TimeoutError):  # silence says the same, a little later
            async with asyncio.timeout(FAREWELL_SECONDS):
                await services.leave(me)


def conflict(transport: str, alive: Iterable[Service]) -> str | None:
    """Why one with this transport cannot work beside these services, as a sentence."""
    others = [one for one in alive if one.transport != transport]
    if not others:
        return None
    theirs, name = others[0].transport, env_name("transport")
    return (
        f"services on this Redis have the transport {theirs} ({_named(others)}), and this one has "
        f"{transport}: their tasks would never meet. Set {name}={theirs}, or stop them first"
    )


def mixture(alive: Sequence[Service]) -> str | None:
    """That live services have different transports, as a sentence."""
    transports = sorted({one.transport for one in alive})
    if len(transports) < 2:
        return None
    told = [
        f"{transport} ({_named([one for one in alive if one.transport == transport])})"
        for transport in transports
    ]
    return f"services with different transports are alive on this Redis: {' and '.join(told)}"


def _named(services: Iterable[Service]) -> str:
    """`1 orchestrator, 2 workers`."""
    kinds = Counter(one.kind for one in services)
    return ", ".join(
        f"{count} {kind if kind == 'api' or count == 1 else kind + 's'}"
        for kind, count in sorted(kinds.items())
    )
