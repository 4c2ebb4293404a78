"""`dovetail serve`: the HTTP API, with what is behind it, until a signal ends it.

What it must not know: what the API answers, what is behind it, or how a run moves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from dovetail import __version__
from dovetail.api.app import create_app
from dovetail.api.connection import Sending
from dovetail.api.security import Tokens, check_binding, host_names
from dovetail.api.server import addresses_of, listen, serve, url_of
from dovetail.api.service import ApiService
from dovetail.cli import output as streams
from dovetail.cli.backend import Behind, on_redis, this_process
from dovetail.cli.failures import InvalidInput
from dovetail.cli.interruptible import Ask, Stopping, perform
from dovetail.cli.services import (
    fast_loop,
    find_redis,
    interrupt_means_terminate,
    leave_what_stays_to_itself,
    unless_stopped,
)
from dovetail.config import Settings, load_settings
from dovetail.documents.metrics import DocumentRunEnds
from dovetail.handlers.builtin import load_registry
from dovetail.telemetry.logs import show_logs
from dovetail.telemetry.metrics import CONTENT_TYPE
from dovetail.telemetry.service import Telemetry, open_tracing

log = logging.getLogger("dovetail.serve")

SWITCH_SECONDS = 0.0002
"""A thread that reads a large body gives way so often. An answer takes the loop ten calls of the
system, and after each of them it waits that long."""
SERVICES = ("orchestrator", "worker")


def serve_api(host: str, port: int, handlers: Sequence[str], beside: str | None) -> int:
    settings = load_settings()
    services = _services(beside)
    if services and settings.redis_url is None:
        raise InvalidInput(
            "--with is for set-ups on Redis, where orchestrator and worker are services of their "
            "own; without Redis both are in this process already, so leave it out"
        )
    addresses = addresses_of(host)
    check_binding(addresses, settings.tokens)
    # Before anything is opened: what is wrong must not cost a start.
    Tokens(settings.tokens)
    host_names(settings.allowed_hosts)
    registry = load_registry(settings, handlers)
    telemetry = Telemetry(open_tracing("api"), DocumentRunEnds())
    behind: AbstractAsyncContextManager[Behind]
    if settings.redis_url is None:
        behind = this_process(settings, registry, telemetry)
    else:
        behind = on_redis(settings, registry, services, telemetry)
    show_logs(settings, names=True)
    listening = listen(addresses, port)

    async def work(stopping: Stopping) -> int:
        sys.setswitchinterval(SWITCH_SECONDS)
        interrupt_means_terminate()
        leave_what_stays_to_itself()
        if settings.redis_url is None or await unless_stopped(find_redis(settings, log), stopping):
            await _serve(behind, settings, [host, *addresses], listening, stopping, telemetry)
        return 0

    try:
        patience = settings.drain_seconds + settings.shutdown_delay
        return perform(work, _give_up, patience, fast_loop)
    finally:
        telemetry.close()
        for one in listening:
            one.close()


def _services(beside: str | None) -> list[str]:
    if beside is None:
        return []
    names = [name.strip() for name in beside.split(",")]
    for name in names:
        if name not in SERVICES:
            raise InvalidInput(f"--with: no service '{name}'; known: {', '.join(SERVICES)}")
    return names


async def _serve(
    behind: AbstractAsyncContextManager[Behind],
    settings: Settings,
    hosts: Sequence[str],
    listening: list[socket.socket],
    stopping: Stopping,
    telemetry: Telemetry,
) -> None:
    async with behind as (commands, fleet, duties, facts):

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
                # Load balancers learn from /health/ready that no more requests are to come here;
                # those that come until they know are answered.
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
        # A lost store is found out by the duty that uses it: it ends the server, loudly.
        for duty in duties:
            if duty.done():
                duty.result()


def _give_up(asked: Ask) -> None:
    """In another thread, because this one is stuck: what runs goes on elsewhere by its lease."""
    os.write(2, b"stopped without waiting for what still runs; its runs go on elsewhere\n")
