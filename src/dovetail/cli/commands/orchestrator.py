"""`dovetail orchestrator`: applies results and sends out what follows, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

from dovetail.cli.services import Service, redis_client, run_service
from dovetail.config import Settings, load_settings
from dovetail.documents.metrics import DocumentRunEnds
from dovetail.engine.listener import Listener
from dovetail.telemetry.service import open_telemetry

log = logging.getLogger("dovetail.orchestrator")

LAST_RESULTS_SECONDS = 3.0
"""For the results it is at when it is asked to stop."""


def run_orchestrator() -> int:
    settings = load_settings()
    telemetry = open_telemetry(settings, "orchestrator", DocumentRunEnds())
    return run_service("orchestrator", orchestrating(settings, telemetry), settings, telemetry)


def orchestrating(settings: Settings, listener: Listener | None = None) -> Service:
    with redis_client(settings, "dovetail orchestrator"):
        from dovetail.wiring.distributed import orchestrate

    async def service(asked: asyncio.Event) -> None:
        archive = "none" if settings.database_url is None else "PostgreSQL"
        log.info("started, pid %d, archive: %s", os.getpid(), archive)
        working = asyncio.ensure_future(orchestrate(settings, asked, listener))
        stop: asyncio.Future[Any] = asyncio.ensure_future(asked.wait())
        await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not working.done():
            await asyncio.wait([working], timeout=LAST_RESULTS_SECONDS)
            working.cancel()  # its Redis is away; it holds nothing that a peer would not take over
        with suppress(asyncio.CancelledError):
            await working

    return service
