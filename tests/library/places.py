"""The three places a client can work on, each with the handlers of a test in this process.

A file, services on Redis, and a server over a real socket: what is behind them is what
`dovetail serve` and its services have behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dovetail import Dovetail
from dovetail.api.app import create_app
from dovetail.api.connection import Sending
from dovetail.api.operations import ThisProcess
from dovetail.api.server import listen, serve, url_of
from dovetail.api.service import ApiService
from dovetail.client import _registry
from dovetail.config import load_settings
from dovetail.wiring.distributed import orchestrate, working
from dovetail.wiring.embedded import embedded

PLACES = ("file", "redis", "http")
SECONDS = 20.0


@asynccontextmanager
async def on_a_file(
    folder: Path, handlers: Sequence[Any], settings: dict[str, Any]
) -> AsyncIterator[Dovetail]:
    async with Dovetail(folder / "runs.db", handlers=handlers, **settings) as dt:
        yield dt


@asynccontextmanager
async def over_redis(
    url: str, handlers: Sequence[Any], settings: dict[str, Any]
) -> AsyncIterator[Dovetail]:
    """With an orchestrator and a worker beside it."""
    reported = load_settings(redis_url=url, heartbeat_interval=0.2, **settings)
    async with (
        _ended_at_once(orchestrate(reported)),
        working(reported, _registry(reported, handlers)),
        Dovetail(url, **settings) as dt,
    ):
        # A worker is known once it has announced itself; before, its handlers are not.
        async with asyncio.timeout(SECONDS):
            while not await dt._commands.serving():  # type: ignore[misc]
                await asyncio.sleep(0.01)
        yield dt


@asynccontextmanager
async def _ended_at_once(duty: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Not asked to stop: an idle one takes two seconds to notice."""
    work = asyncio.ensure_future(duty)
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@asynccontextmanager
async def over_http(
    folder: Path, handlers: Sequence[Any], settings: dict[str, Any]
) -> AsyncIterator[Dovetail]:
    async with serving(folder, handlers, **settings) as url, Dovetail(url) as dt:
        yield dt


@asynccontextmanager
async def serving(
    folder: Path, handlers: Sequence[Any] = (), port: int = 0, **settings: Any
) -> AsyncIterator[str]:
    """A server with the embedded engine, in this event loop; gives its address."""
    reported = load_settings(db=folder / "served.db", **{"db_sync": "normal", **settings})
    listening = listen(["127.0.0.1"], port)
    registry = _registry(reported, handlers)
    async with embedded(reported, registry) as commands:
        fleet = ThisProcess(commands, [known.announcement() for known in registry.handlers()], 32)
        service = ApiService(commands, fleet, reported)
        answering = asyncio.ensure_future(
            serve(
                create_app(service, "test"),
                listening,
                service.closing,
                sending=Sending(reported.send_timeout),
            )
        )
        try:
            yield url_of(listening)
        finally:
            service.closing.set()
            await answering
            for one in listening:
                one.close()
