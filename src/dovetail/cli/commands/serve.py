"""`dovetail serve`: the HTTP API, with the engine in this process, until a signal ends it.

It also looks after the file: runs whose process died go on here. What it must not know: what
the API answers, or how a run moves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

from dovetail import __version__
from dovetail.api.app import create_app
from dovetail.api.fleet import ThisProcess
from dovetail.api.security import Tokens, check_binding
from dovetail.api.server import addresses_of, listen, serve, url_of
from dovetail.api.service import Service
from dovetail.cli import streams
from dovetail.cli.failures import InvalidInput
from dovetail.cli.interrupts import Ask
from dovetail.cli.logs import show_logs
from dovetail.cli.stage import Stopping, perform
from dovetail.cli.text import counted
from dovetail.config import Settings, env_name, load_settings
from dovetail.engine.commands import Commands
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import Registry
from dovetail.wiring import embedded

log = logging.getLogger("dovetail.serve")

SERVICES = ("orchestrator", "worker")
TAKE_OVER_SECONDS = 2.0
"""How often it looks for runs that nobody drives any more."""


def serve_api(host: str, port: int, handlers: Sequence[str], beside: str | None) -> int:
    settings = load_settings()
    _check_services(beside)
    if settings.redis_url is not None:
        raise InvalidInput(
            f"{env_name('redis_url')} is set, but this version serves only the embedded engine; "
            f"unset it to serve the runs in {settings.db}"
        )
    if beside is not None:
        raise InvalidInput(
            "--with is for set-ups on Redis, where orchestrator and worker are services of their "
            "own; without Redis both are in this process already, so leave it out"
        )
    addresses = addresses_of(host)
    check_binding(addresses, settings.tokens)
    Tokens(settings.tokens)  # before anything is opened: one that is wrong must not cost a start
    registry = load_registry(settings, handlers)
    show_logs(settings.log_format)
    _show_server_logs()
    listening = listen(addresses, port)

    async def work(stopping: Stopping) -> int:
        _interrupt_means_terminate()
        await _serve(settings, registry, [host, *addresses], listening, stopping)
        return 0

    try:
        return perform(work, _give_up, settings.drain_seconds)
    finally:
        for one in listening:
            one.close()


def _check_services(beside: str | None) -> None:
    for name in (beside or "").split(",") if beside is not None else ():
        if name.strip() not in SERVICES:
            raise InvalidInput(f"--with: no service '{name}'; known: {', '.join(SERVICES)}")


async def _serve(
    settings: Settings,
    registry: Registry,
    hosts: Sequence[str],
    listening: list[socket.socket],
    stopping: Stopping,
) -> None:
    async with embedded(settings, registry) as commands:
        names = [known.name for known in registry.handlers()]
        fleet = ThisProcess(commands, names, settings.concurrency)
        service = Service(commands, fleet, settings, hosts)
        app = create_app(service, __version__)
        duties = [
            asyncio.ensure_future(_take_over(commands)),
            asyncio.ensure_future(stopping.wait()),
        ]
        serving = asyncio.ensure_future(serve(app, listening, service.closing))
        streams.say(f"dovetail serves {url_of(listening)}")
        sys.stdout.flush()
        try:
            await asyncio.wait({serving, *duties}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            service.closing.set()
            await serving
            for duty in duties:
                duty.cancel()
            # A lost store is found out by the duty that uses it: it ends the server, loudly.
            for outcome in await asyncio.gather(*duties, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome


async def _take_over(commands: Commands) -> None:
    """Go on with the runs that nobody drives, now and for ever after."""
    while True:
        if taken := await commands.resume():
            log.info("took over %s that nobody drove", counted(len(taken), "run"))
        await asyncio.sleep(TAKE_OVER_SECONDS)


def _interrupt_means_terminate() -> None:
    """Ctrl-C ends a server as SIGTERM does: its runs are handed back, none is cancelled."""
    terminate = signal.getsignal(signal.SIGTERM)

    def received(number: int, frame: FrameType | None) -> None:
        if callable(terminate):
            terminate(signal.SIGTERM, frame)

    signal.signal(signal.SIGINT, received)


def _show_server_logs() -> None:
    """What uvicorn has to say goes where our own log goes, if it is an error."""
    logger = logging.getLogger("uvicorn")
    logger.handlers = logging.getLogger("dovetail").handlers
    logger.setLevel(logging.ERROR)
    logger.propagate = False


def _give_up(asked: Ask) -> None:
    """In another thread, because this one is stuck: what runs goes on elsewhere by its lease."""
    os.write(2, b"stopped without waiting for what still runs; its runs go on elsewhere\n")
