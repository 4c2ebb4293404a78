"""`dovetail worker`: runs the nodes whose handlers it knows, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from dovetail.cli.services import Service, redis_client, run_service
from dovetail.cli.text import counted
from dovetail.config import Settings, load_settings
from dovetail.core.errors import StoreError
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import Registry

log = logging.getLogger("dovetail.worker")

PAUSE_SECONDS = 1.0


def run_worker(concurrency: int | None, handlers: Sequence[str]) -> int:
    settings = load_settings(concurrency=concurrency)
    registry = load_registry(settings, handlers)
    return run_service("worker", working_on(settings, registry), settings)


def working_on(settings: Settings, registry: Registry) -> Service:
    with redis_client(settings, "dovetail worker"):
        from dovetail.distributed import working

    async def once(asked: asyncio.Event) -> None:
        async with working(settings, registry) as at_work:
            known = counted(len(registry.handlers()), "handler")
            at_once = counted(settings.concurrency, "node")
            log.info("started, pid %d: %s, %s at once", os.getpid(), known, at_once)
            stop: asyncio.Future[Any] = asyncio.ensure_future(asked.wait())
            await asyncio.wait({stop, at_work.crashed}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if at_work.crashed.done():
                at_work.crashed.result()
            if running := len(at_work.holding()):
                nodes, seconds = counted(running, "node"), f"{settings.drain_seconds:g} s"
                log.info("takes no more work; %s may finish within %s", nodes, seconds)

    async def service(asked: asyncio.Event) -> None:
        while not asked.is_set():
            try:
                await once(asked)
            except StoreError as error:
                if asked.is_set():
                    log.warning("%s; what ran here goes on elsewhere by its lease", error)
                    return
                # It was away for longer than any lease: what ran here goes on elsewhere.
                log.warning("%s; beginning anew", error)
                await asyncio.sleep(PAUSE_SECONDS)

    return service
