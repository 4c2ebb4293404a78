"""`dovetail worker`: runs the nodes whose handlers it knows, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

from dovetail.cli.failures import InvalidInput
from dovetail.cli.services import (
    Service,
    counted_together,
    find_redis,
    redis_client,
    run_service,
    watched_pool,
)
from dovetail.cli.text import counted
from dovetail.config import Settings, env_name, load_settings
from dovetail.core.errors import StoreError
from dovetail.documents.metrics import DocumentRunEnds
from dovetail.engine.listener import Listener
from dovetail.handlers.builtin import load_registry
from dovetail.handlers.registry import Registry
from dovetail.telemetry.logs import show_logs
from dovetail.telemetry.service import Telemetry, open_telemetry

log = logging.getLogger("dovetail.worker")

PAUSE_SECONDS = 1.0


def run_worker(concurrency: int | None, handlers: Sequence[str]) -> int:
    settings = load_settings(concurrency=concurrency)
    telemetry = open_telemetry(settings, "worker", DocumentRunEnds())
    if settings.transport == "celery":
        with counted_together(telemetry):
            return _run_celery(settings, load_registry(settings, handlers), telemetry)
    registry = load_registry(settings, handlers)
    service = working_on(settings, registry, telemetry)
    return run_service("worker", service, settings, telemetry, list(registry))


def _run_celery(settings: Settings, registry: Registry, telemetry: Telemetry | None) -> int:
    """A worker of Celery's own kind: it hears signals and ends as those do."""
    with redis_client(settings, "dovetail worker"):
        from celery.signals import worker_process_shutdown  # type: ignore[import-untyped]

        from dovetail.wiring.celery import run_worker as run_celery_worker
    show_logs(settings, names=True)
    asyncio.run(find_redis(settings, log))
    with watched_pool(settings, telemetry, list(registry)):
        if telemetry is None:
            return run_celery_worker(settings, registry)
        worker_process_shutdown.connect(telemetry.leave_child, weak=False)
        return run_celery_worker(settings, registry, telemetry, telemetry.in_child)


def working_on(settings: Settings, registry: Registry, listener: Listener | None = None) -> Service:
    if settings.transport == "celery":
        raise InvalidInput(
            f"{env_name('transport')} is celery, whose worker is a pool of processes and cannot be "
            "part of another service: start `dovetail worker` beside it"
        )
    with redis_client(settings, "dovetail worker"):
        from dovetail.wiring.distributed import working

    async def once(asked: asyncio.Event) -> None:
        async with working(settings, registry, listener) as at_work:
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
