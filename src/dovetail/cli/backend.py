"""What a server has behind it: the engine in this process, or the services of a set-up on Redis.

Either way it is commands, a fleet, and duties that go on for as long as it serves. What it must
not know: HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from functools import partial
from typing import NamedTuple

from dovetail.api.operations import ThisProcess
from dovetail.api.service import Fleet
from dovetail.cli.commands.orchestrator import orchestrating
from dovetail.cli.commands.worker import working_on
from dovetail.cli.services import Service, beside, facts_of, facts_of_this_process, redis_client
from dovetail.cli.text import counted
from dovetail.config import Settings
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import Registry
from dovetail.telemetry.metrics import ServiceFacts
from dovetail.telemetry.service import Telemetry
from dovetail.wiring.embedded import embedded

log = logging.getLogger("dovetail.serve")

TAKE_OVER_SECONDS = 2.0
"""How often it looks for runs that nobody drives any more."""


class Behind(NamedTuple):
    commands: Commands
    fleet: Fleet
    duties: Sequence[asyncio.Future[None]]
    """One that ends, ends the server: with its error, if it has one."""
    facts: Callable[[], Awaitable[ServiceFacts]]
    """What whoever watches may ask of it."""


@asynccontextmanager
async def this_process(
    settings: Settings, registry: Registry, telemetry: Telemetry
) -> AsyncIterator[Behind]:
    """The embedded engine; it also goes on with the runs of processes that died."""

    async def facts() -> ServiceFacts:
        return facts_of_this_process(telemetry, list(registry))

    async with embedded(settings, registry, telemetry) as commands:
        handlers = [known.announcement() for known in registry.handlers()]
        fleet = ThisProcess(commands, handlers, settings.concurrency, telemetry.depths or dict)
        duties = [
            asyncio.ensure_future(_take_over(commands)),
            asyncio.ensure_future(commands.lost()),
        ]
        try:
            yield Behind(commands, fleet, duties, facts)
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.wait(duties)


async def _take_over(commands: Commands) -> None:
    """Go on with the runs that nobody drives, now and for ever after."""
    while True:
        if taken := await commands.resume():
            log.info("took over %s that nobody drove", counted(len(taken), "run"))
        await asyncio.sleep(TAKE_OVER_SECONDS)


def on_redis(
    settings: Settings, registry: Registry, services: Sequence[str], telemetry: Telemetry
) -> AbstractAsyncContextManager[Behind]:
    """The commands over Redis, with these services in this process, too."""
    with redis_client(settings, "dovetail serve"):
        from dovetail.wiring.distributed import commanding
        from dovetail.wiring.health import watching

    @asynccontextmanager
    async def opened() -> AsyncIterator[Behind]:
        duties: list[asyncio.Future[None]] = []
        async with AsyncExitStack() as stack:
            commands = await stack.enter_async_context(
                commanding(settings, registry, telemetry, kind="api")
            )
            fleet = await stack.enter_async_context(watching(settings, _names(registry)))
            inside: list[Service] = []
            if "orchestrator" in services:
                inside.append(orchestrating(settings, telemetry))
            if "worker" in services:  # the last, so it ends first: its results are still applied
                inside.append(working_on(settings, registry, telemetry))
            duties += [await stack.enter_async_context(beside(one)) for one in inside]
            yield Behind(commands, fleet, duties, partial(facts_of, fleet))

    return opened()


def _names(registry: Registry) -> list[str]:
    return [known.name for known in registry.handlers()]
