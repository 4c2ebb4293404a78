"""What an API server has behind it: the engine in this process, or a set-up on Redis."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from functools import partial
from typing import NamedTuple

from dovetail import __version__
from dovetail.api.app import create_app
from dovetail.api.connection import Sending
from dovetail.api.operations import ThisProcess
from dovetail.api.server import serve, url_of
from dovetail.api.service import ApiService, Fleet
from dovetail.cli import output as streams
from dovetail.cli.interruptible import Stopping
from dovetail.cli.services import (
    Service,
    facts_of,
    facts_of_this_process,
    orchestrator_service,
    redis_imports,
    running_service,
    worker_service,
)
from dovetail.cli.text import counted
from dovetail.config import Settings
from dovetail.engine.commands import Commands
from dovetail.handlers.registry import Registry
from dovetail.telemetry.metrics import CONTENT_TYPE, ServiceFacts
from dovetail.telemetry.service import Telemetry
from dovetail.wiring.embedded import embedded

log = logging.getLogger("dovetail.serve")

TAKE_OVER_SECONDS = 2.0
"""Between two searches for runs that no process drives any more."""


class Backend(NamedTuple):
    commands: Commands
    fleet: Fleet
    duties: Sequence[asyncio.Future[None]]
    """When one of them ends, the server ends, with its error if it has one."""
    facts: Callable[[], Awaitable[ServiceFacts]]
    """The facts for `/metrics`."""


@asynccontextmanager
async def embedded_backend(
    settings: Settings, registry: Registry, telemetry: Telemetry
) -> AsyncIterator[Backend]:
    """The embedded engine. It also takes over runs of processes that died."""

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
            yield Backend(commands, fleet, duties, facts)
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.wait(duties)


async def _take_over(commands: Commands) -> None:
    """Take over the runs that no process drives, again and again."""
    while True:
        if taken := await commands.resume():
            log.info("took over %s that no process drove", counted(len(taken), "run"))
        await asyncio.sleep(TAKE_OVER_SECONDS)


def redis_backend(
    settings: Settings, registry: Registry, services: Sequence[str], telemetry: Telemetry
) -> AbstractAsyncContextManager[Backend]:
    """The commands over Redis, with these services in the same process."""
    with redis_imports(settings, "dovetail serve"):
        from dovetail.wiring.distributed import commanding
        from dovetail.wiring.health import watching

    @asynccontextmanager
    async def opened() -> AsyncIterator[Backend]:
        duties: list[asyncio.Future[None]] = []
        async with AsyncExitStack() as stack:
            commands = await stack.enter_async_context(
                commanding(settings, registry, telemetry, kind="api")
            )
            fleet = await stack.enter_async_context(watching(settings, _names(registry)))
            inside: list[Service] = []
            if "orchestrator" in services:
                inside.append(orchestrator_service(settings, telemetry))
            if "worker" in services:  # the last, so it ends first: its results are still applied
                inside.append(worker_service(settings, registry, telemetry))
            duties += [await stack.enter_async_context(running_service(one)) for one in inside]
            yield Backend(commands, fleet, duties, partial(facts_of, fleet))

    return opened()


def _names(registry: Registry) -> list[str]:
    return [known.name for known in registry.handlers()]


async def serve_until_stopped(
    opened: AbstractAsyncContextManager[Backend],
    settings: Settings,
    hosts: Sequence[str],
    listening: list[socket.socket],
    stopping: Stopping,
    telemetry: Telemetry,
) -> None:
    """Serve the HTTP API until a stop is requested or a duty of the backend ends."""
    async with opened as (commands, fleet, duties, facts):

        async def metrics() -> tuple[bytes, str]:
            return telemetry.page(await facts()), CONTENT_TYPE

        service = ApiService(commands, fleet, settings, hosts, metrics=metrics)
        app = telemetry.app(create_app(service, __version__, telemetry.answered))
        asked = asyncio.ensure_future(stopping.wait())
        most, sending = settings.max_connections, Sending(settings.send_timeout)
        serving = asyncio.ensure_future(serve(app, listening, service.closing, most, sending))
        streams.say(f"dovetail serves {url_of(listening)}")
        sys.stdout.flush()
        try:
            await asyncio.wait({serving, asked, *duties}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and settings.shutdown_delay:
                # Load balancers learn from /health/ready that they must send no more requests here;
                # requests that come meanwhile are answered.
                service.leaving.set()
                log.info("not ready; serves for %g s more", settings.shutdown_delay)
                await asyncio.wait(
                    {serving, *duties},
                    timeout=settings.shutdown_delay,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            service.closing.set()
            await serving
            asked.cancel()
        # A duty notices that the store is lost, and ends the server with its error.
        for duty in duties:
            if duty.done():
                duty.result()
