"""How a service is watched: its metrics and its health on a port, its spans sent off at the end.

What it must not know: what the service does, or what is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from dovetail.config import Settings
from dovetail.core.errors import StoreError
from dovetail.telemetry.service import Telemetry

if TYPE_CHECKING:
    from dovetail.fleet import RemoteFleet
    from dovetail.telemetry.metrics import Facts

LIVE_SECONDS = 5.0
"""An event loop that does not come round for so long is stuck."""


@asynccontextmanager
async def watched(
    settings: Settings,
    telemetry: Telemetry | None,
    is_stopping: Callable[[], bool],
    handlers: Collection[str] = (),
) -> AsyncIterator[None]:
    """A service that answers on `DOVETAIL_METRICS_PORT`, if there is one. Raises `CannotListen`."""
    if telemetry is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def live() -> bool:
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(LIVE_SECONDS)
        except (TookTooLong, RuntimeError):
            return False
        return True

    try:
        with _port(settings, telemetry, live, is_stopping, handlers):
            yield
    finally:
        await asyncio.to_thread(telemetry.close)


@contextmanager
def counted_together(telemetry: Telemetry | None) -> Iterator[None]:
    """Around a worker that forks, entered before its handlers are loaded: what its processes count
    is added up, their handlers' own metrics, too."""
    if telemetry is None:
        yield
        return
    telemetry.share()
    try:
        yield
    finally:
        telemetry.close()


def watched_pool(
    settings: Settings, telemetry: Telemetry | None, handlers: Collection[str] = ()
) -> AbstractContextManager[object]:
    """`watched` for a worker that forks: entered before it does. Its pool is kept alive by others,
    so that it answers at all is what there is to say of its life."""
    if telemetry is None:
        return nullcontext()
    return _port(settings, telemetry, lambda: True, lambda: False, handlers)


def _port(
    settings: Settings,
    telemetry: Telemetry,
    live: Callable[[], bool],
    is_stopping: Callable[[], bool],
    handlers: Collection[str],
) -> AbstractContextManager[object]:
    if settings.metrics_port is None:
        return nullcontext()
    from dovetail.api.security import Tokens
    from dovetail.telemetry.metrics import CONTENT_TYPE
    from dovetail.telemetry.port import MetricsPort

    tokens = Tokens(settings.tokens)

    def asked() -> Facts:
        """In the thread of whoever asks, over a connection of its own: the loop may be busy."""
        return asyncio.run(_asked(settings, handlers))

    return MetricsPort(
        settings.metrics_port,
        lambda: (telemetry.page(asked()), CONTENT_TYPE),
        live=live,
        ready=lambda: not is_stopping() and asked().queue_depth is not None,
        allowed=(lambda token: tokens.access(token) != "none") if tokens else None,
    )


async def _asked(settings: Settings, handlers: Collection[str]) -> Facts:
    from dovetail.fleet import watching

    async with watching(settings, handlers) as fleet:
        return await facts_of(fleet)


async def facts_of(fleet: RemoteFleet) -> Facts:
    """What Redis knows; without what it does not answer."""
    from dovetail.telemetry.metrics import Facts

    depths, lag, workers = await asyncio.gather(
        fleet.depths(), fleet.archive_lag(), fleet.workers(), return_exceptions=True
    )
    for answer in (depths, lag, workers):
        if isinstance(answer, BaseException) and not isinstance(answer, StoreError):
            raise answer
    return Facts(
        queue_depth=None if isinstance(depths, BaseException) else depths,
        archive_lag_seconds=None if isinstance(lag, BaseException) else lag,
        workers_alive=None
        if isinstance(workers, BaseException)
        else sum(worker["alive"] for worker in workers),
    )


def facts_of_this_process(telemetry: Telemetry, handlers: Collection[str]) -> Facts:
    """What waits in its own memory. It is its own worker, and has no archive to be behind with."""
    from dovetail.telemetry.metrics import Facts

    waiting = {} if telemetry.depths is None else telemetry.depths()
    return Facts(dict.fromkeys(handlers, 0) | dict(waiting), 0.0, 1)
