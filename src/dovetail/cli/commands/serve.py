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
from dovetail.api.security import Tokens, check_binding
from dovetail.api.server import addresses_of, listen, serve, url_of
from dovetail.api.service import Service
from dovetail.cli import streams
from dovetail.cli.behind import Behind, on_redis, this_process
from dovetail.cli.failures import InvalidInput
from dovetail.cli.interrupts import Ask
from dovetail.cli.logs import show_logs
from dovetail.cli.services import (
    fast_loop,
    find_redis,
    interrupt_means_terminate,
    unless_stopped,
)
from dovetail.cli.stage import Stopping, perform
from dovetail.config import Settings, load_settings
from dovetail.handlers.builtin import load_registry

log = logging.getLogger("dovetail.serve")

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
    Tokens(settings.tokens)  # before anything is opened: one that is wrong must not cost a start
    registry = load_registry(settings, handlers)
    behind: AbstractAsyncContextManager[Behind]
    if settings.redis_url is None:
        behind = this_process(settings, registry)
    else:
        behind = on_redis(settings, registry, services)
    show_logs(settings.log_format)
    _show_server_logs()
    listening = listen(addresses, port)

    async def work(stopping: Stopping) -> int:
        interrupt_means_terminate()
        if settings.redis_url is None or await unless_stopped(find_redis(settings, log), stopping):
            await _serve(behind, settings, [host, *addresses], listening, stopping)
        return 0

    try:
        return perform(work, _give_up, settings.drain_seconds, fast_loop)
    finally:
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
) -> None:
    async with behind as (commands, fleet, duties):
        service = Service(commands, fleet, settings, hosts)
        app = create_app(service, __version__)
        asked = asyncio.ensure_future(stopping.wait())
        serving = asyncio.ensure_future(serve(app, listening, service.closing))
        streams.say(f"dovetail serves {url_of(listening)}")
        sys.stdout.flush()
        try:
            await asyncio.wait({serving, asked, *duties}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            service.closing.set()
            await serving
            asked.cancel()
        # A lost store is found out by the duty that uses it: it ends the server, loudly.
        for duty in duties:
            if duty.done():
                duty.result()


def _show_server_logs() -> None:
    """What uvicorn has to say goes where our own log goes, if it is an error."""
    logger = logging.getLogger("uvicorn")
    logger.handlers = logging.getLogger("dovetail").handlers
    logger.setLevel(logging.ERROR)
    logger.propagate = False


def _give_up(asked: Ask) -> None:
    """In another thread, because this one is stuck: what runs goes on elsewhere by its lease."""
    os.write(2, b"stopped without waiting for what still runs; its runs go on elsewhere\n")
