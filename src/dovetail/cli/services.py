"""What orchestrator, worker and server have in common: a Redis to find, and an end by signal.

A service works until it is asked to stop; SIGTERM and Ctrl-C mean the same to it, and a second
one ends it at once. What it must not know: what a service does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

from dovetail.cli.failures import InvalidInput
from dovetail.cli.interrupts import Ask
from dovetail.cli.stage import Stopping, perform
from dovetail.cli.watched import watched
from dovetail.config import Settings, env_name
from dovetail.telemetry.logs import show_logs
from dovetail.telemetry.service import Telemetry

COLLECT_AFTER = 50_000
"""New objects until it is looked which of them are only held by each other."""
Service = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Works until the event is set, and then comes to an orderly end."""


@contextmanager
def redis_client(settings: Settings, service: str) -> Iterator[None]:
    """Around the imports of what works on Redis: everything that may be missing, in words."""
    if settings.redis_url is None:
        raise InvalidInput(
            f"{service} is a service of a set-up on Redis: set {env_name('redis_url')}, as in "
            "redis://localhost:6379/0; without Redis `dovetail serve` has every service inside"
        )
    try:
        if settings.transport == "celery":
            import_module("celery")  # whoever sends or takes tasks needs it, later than this
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("celery", "kombu", "billiard"):
            raise InvalidInput(
                f"{env_name('transport')} is celery, which is not installed ({error}): "
                "pip install 'dovetail[celery]'"
            ) from None
        if missing not in ("redis", "hiredis"):
            raise
        raise InvalidInput(
            f"the client for Redis is not installed ({error}): pip install 'dovetail[redis]'"
        ) from None


def run_service(
    name: str,
    service: Service,
    settings: Settings,
    telemetry: Telemetry | None,
    handlers: Collection[str] = (),
) -> int:
    """Until a signal ends it; to its exit code. `handlers` are what it is watched for."""
    show_logs(settings, names=True)
    log = logging.getLogger(f"dovetail.{name}")

    async def whole(stopping: Stopping) -> int:
        interrupt_means_terminate()
        leave_what_stays_to_itself()
        async with watched(settings, telemetry, lambda: stopping.asked is not None, handlers):
            if await unless_stopped(find_redis(settings, log), stopping):
                async with beside(service) as working:
                    await asyncio.wait(
                        {working, asyncio.ensure_future(stopping.wait())},
                        return_when=asyncio.FIRST_COMPLETED,
                    )
        log.info("stopped, pid %d", os.getpid())
        return 0

    def give_up(asked: Ask) -> None:
        """In another thread, because this one is stuck: what runs goes on elsewhere by lease."""
        os.write(2, f"dovetail.{name}: stopped without waiting for what still runs\n".encode())

    return perform(whole, give_up, settings.drain_seconds, fast_loop)


def leave_what_stays_to_itself() -> None:
    """Nearly all that a service makes is gone without the collector, which took a tenth of an
    orchestrator's time to find that out."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


@asynccontextmanager
async def beside(service: Service) -> AsyncIterator[asyncio.Task[None]]:
    """A service that works meanwhile; at the end it is asked to stop, and waited for."""
    asked = asyncio.Event()
    working = asyncio.create_task(_only_the_cause(service(asked)))
    try:
        yield working
    finally:
        asked.set()
        await working


async def _only_the_cause(work: Coroutine[Any, Any, None]) -> None:
    """Of loops that run side by side, the error of the one that failed first."""
    try:
        await work
    except BaseExceptionGroup as group:
        cause: BaseException = group
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        raise cause from None


async def find_redis(settings: Settings, log: logging.Logger) -> None:
    """Returns once Redis answers. Raises `RedisError` if it does not within a while."""
    from dovetail.fleet import await_redis

    await await_redis(settings, lambda why: log.warning("waiting for Redis: %s", why), log.warning)


async def unless_stopped(work: Coroutine[Any, Any, None], stopping: Stopping) -> bool:
    """Whether the work was done before anybody asked to stop; if not, it is cancelled."""
    doing = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({doing, asked}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        doing.cancel()
        asked.cancel()
        await asyncio.gather(doing, asked, return_exceptions=True)


def fast_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed (`dovetail[fast]`): a fifth less of the processor's time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def interrupt_means_terminate() -> None:
    """Ctrl-C ends a service as SIGTERM does: what runs is handed back, nothing is cancelled."""
    terminate = signal.getsignal(signal.SIGTERM)

    def received(number: int, frame: FrameType | None) -> None:
        if callable(terminate):
            terminate(signal.SIGTERM, frame)

    signal.signal(signal.SIGINT, received)
