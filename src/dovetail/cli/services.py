"""How a service is watched: its metrics and its health on a port, its spans sent off at the end.

What it must not know: what the service does, or what is counted.

What orchestrator, worker and server have in common: a Redis to find, and an end by signal.

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
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

from dovetail.cli.failures import InvalidInput
from dovetail.cli.interruptible import Stopping, StopRequest, run_interruptible
from dovetail.config import Settings, env_name
from dovetail.core.errors import StoreError
from dovetail.telemetry.logs import show_logs
from dovetail.telemetry.service import Telemetry

if TYPE_CHECKING:
    from dovetail.telemetry.metrics import ServiceFacts
    from dovetail.wiring.health import ServicesHealth


LIVE_SECONDS = 5.0
"""An event loop that does not come round for so long is stuck."""


@asynccontextmanager
async def observed(
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
def shared_metrics(telemetry: Telemetry | None) -> Iterator[None]:
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


def observed_pool(
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

    def asked() -> ServiceFacts:
        """In the thread of whoever asks, over a connection of its own: the loop may be busy."""
        return asyncio.run(_asked(settings, handlers))

    return MetricsPort(
        settings.metrics_port,
        lambda: (telemetry.page(asked()), CONTENT_TYPE),
        live=live,
        ready=lambda: not is_stopping() and asked().queue_depth is not None,
        allowed=(lambda token: tokens.access(token) != "none") if tokens else None,
    )


async def _asked(settings: Settings, handlers: Collection[str]) -> ServiceFacts:
    from dovetail.wiring.health import watching

    async with watching(settings, handlers) as fleet:
        return await facts_of(fleet)


async def facts_of(fleet: ServicesHealth) -> ServiceFacts:
    """What Redis knows; without what it does not answer."""
    from dovetail.telemetry.metrics import ServiceFacts

    depths, lag, workers = await asyncio.gather(
        fleet.depths(), fleet.archive_lag(), fleet.workers(), return_exceptions=True
    )
    for answer in (depths, lag, workers):
        if isinstance(answer, BaseException) and not isinstance(answer, StoreError):
            raise answer
    return ServiceFacts(
        queue_depth=None if isinstance(depths, BaseException) else depths,
        archive_lag_seconds=None if isinstance(lag, BaseException) else lag,
        workers_alive=None
        if isinstance(workers, BaseException)
        else sum(worker["alive"] for worker in workers),
    )


def facts_of_this_process(telemetry: Telemetry, handlers: Collection[str]) -> ServiceFacts:
    """What waits in its own memory. It is its own worker, and has no archive to be behind with."""
    from dovetail.telemetry.metrics import ServiceFacts

    waiting = {} if telemetry.depths is None else telemetry.depths()
    return ServiceFacts(dict.fromkeys(handlers, 0) | dict(waiting), 0.0, 1)


COLLECT_AFTER = 50_000
"""New objects until it is looked which of them are only held by each other."""
Service = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Works until the event is set, and then comes to an orderly end."""


@contextmanager
def redis_imports(settings: Settings, service: str) -> Iterator[None]:
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
        treat_interrupt_as_terminate()
        relax_gc()
        async with observed(settings, telemetry, lambda: stopping.asked is not None, handlers):
            if await finished_before_stop(find_redis(settings, log), stopping):
                async with running_service(service) as working:
                    await asyncio.wait(
                        {working, asyncio.ensure_future(stopping.wait())},
                        return_when=asyncio.FIRST_COMPLETED,
                    )
        log.info("stopped, pid %d", os.getpid())
        return 0

    def give_up(asked: StopRequest) -> None:
        """In another thread, because this one is stuck: what runs goes on elsewhere by lease."""
        os.write(2, f"dovetail.{name}: stopped without waiting for what still runs\n".encode())

    return run_interruptible(whole, give_up, settings.drain_seconds, fast_loop)


def relax_gc() -> None:
    """Nearly all that a service makes is gone without the collector, which took a tenth of an
    orchestrator's time to find that out."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


@asynccontextmanager
async def running_service(service: Service) -> AsyncIterator[asyncio.Task[None]]:
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
    from dovetail.wiring.health import await_redis

    await await_redis(settings, lambda why: log.warning("waiting for Redis: %s", why), log.warning)


async def finished_before_stop(work: Coroutine[Any, Any, None], stopping: Stopping) -> bool:
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


def treat_interrupt_as_terminate() -> None:
    """Ctrl-C ends a service as SIGTERM does: what runs is handed back, nothing is cancelled."""
    terminate = signal.getsignal(signal.SIGTERM)

    def received(number: int, frame: FrameType | None) -> None:
        if callable(terminate):
            terminate(signal.SIGTERM, frame)

    signal.signal(signal.SIGINT, received)
