"""The services orchestrator and worker, the API server, and what they share.

A service runs until it is asked to stop. SIGTERM and Ctrl-C mean the same to it; a second signal
ends it at once. Metrics and health are served on a port, and spans are sent off at the end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.cli import output as streams
from dovetail.cli.interruptible import (
    Stopping,
    StopRequest,
    finished_before_stop,
    run_interruptible,
)
from dovetail.cli.output import InvalidInput
from dovetail.cli.text import counted
from dovetail.cli.unblocked import unblocked, write_last_words
from dovetail.config import Settings, env_name
from dovetail.core.errors import DovetailError, StoreError
from dovetail.engine.listener import Listener
from dovetail.handlers.registry import Registry
from dovetail.telemetry.logs import show_logs
from dovetail.telemetry.service import Telemetry

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from dovetail.api.service import ApiService, Fleet
    from dovetail.engine.commands import Commands
    from dovetail.telemetry.metrics import ServiceFacts
    from dovetail.wiring.health import ServicesHealth


LIVE_SECONDS = 5.0
"""An event loop that runs no task for so long is stuck."""


@asynccontextmanager
async def observed(
    settings: Settings,
    telemetry: Telemetry | None,
    is_stopping: Callable[[], bool],
    handlers: Collection[str] = (),
) -> AsyncIterator[None]:
    """Serve `DOVETAIL_METRICS_PORT` around a service, if it is set. Raises `CannotListen`."""
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
    """Add up the metrics of a worker's pool processes, with the metrics of handlers. Enter it
    before the handlers are loaded."""
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
    """`observed` for a worker with a pool of processes. Enter it before the fork. It is alive as
    long as it answers, because Celery replaces dead pool processes."""
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
    from dovetail.telemetry.metrics import CONTENT_TYPE, MetricsPort

    tokens = Tokens(settings.tokens, settings.named_tokens)

    def asked() -> ServiceFacts:
        """In the thread of the request, over a connection of its own: the loop may be busy."""
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
    """The facts that Redis has; None for a fact that it does not give."""
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
    """The embedded engine: its own queue, one worker, no archive."""
    from dovetail.telemetry.metrics import ServiceFacts

    waiting = {} if telemetry.depths is None else telemetry.depths()
    return ServiceFacts(dict.fromkeys(handlers, 0) | dict(waiting), 0.0, 1)


COLLECT_AFTER = 50_000
"""New objects between two collections of garbage."""
Service = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Works until the event is set, then ends in order."""


@contextmanager
def redis_imports(settings: Settings, service: str) -> Iterator[None]:
    """Around imports that need Redis: a missing setting or package is an `InvalidInput`."""
    if settings.redis_url is None:
        raise InvalidInput(
            f"{service} is a service of a set-up on Redis: set {env_name('redis_url')}, as in "
            "redis://localhost:6379/0; without Redis `dovetail serve` has every service inside"
        )
    try:
        if settings.transport == "celery":
            import_module("celery")  # senders and workers need it later
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
    """Run a service until a signal ends it; returns the exit code."""
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
        """In another thread, because this one is stuck: other workers run on by lease."""
        write_last_words(f"dovetail.{name}: stopped without waiting for what still runs\n")

    with unblocked():
        return run_interruptible(whole, give_up, settings.drain_seconds, fast_loop)


def relax_gc() -> None:
    """Collect garbage rarely: reference counts free nearly everything, and the collector took a
    tenth of an orchestrator's time."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


@asynccontextmanager
async def running_service(service: Service) -> AsyncIterator[asyncio.Task[None]]:
    """Run a service in the background; at the end ask it to stop, and wait for it."""
    asked = asyncio.Event()
    working = asyncio.create_task(_only_the_cause(service(asked)))
    try:
        yield working
    finally:
        asked.set()
        await working


async def _only_the_cause(work: Coroutine[Any, Any, None]) -> None:
    """Raise the first error of a group, without the group."""
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


def fast_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed (`dovetail[fast]`): a fifth less of the processor's time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def treat_interrupt_as_terminate() -> None:
    """Ctrl-C ends a service as SIGTERM does: nodes are handed back, no run is cancelled."""
    terminate = signal.getsignal(signal.SIGTERM)

    def received(number: int, frame: FrameType | None) -> None:
        if callable(terminate):
            terminate(signal.SIGTERM, frame)

    signal.signal(signal.SIGINT, received)


orchestrator_log = logging.getLogger("dovetail.orchestrator")
worker_log = logging.getLogger("dovetail.worker")

LAST_RESULTS_SECONDS = 3.0
"""After a stop request, for the results that an orchestrator is applying."""
RESTART_SECONDS = 1.0


def orchestrator_service(settings: Settings, listener: Listener | None = None) -> Service:
    with redis_imports(settings, "dovetail orchestrator"):
        from dovetail.wiring.distributed import orchestrate

    async def service(stop: asyncio.Event) -> None:
        archive = "none" if settings.database_url is None else "PostgreSQL"
        orchestrator_log.info("started, pid %d, archive: %s", os.getpid(), archive)
        working = asyncio.ensure_future(orchestrate(settings, stop, listener))
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not working.done():
            await asyncio.wait([working], timeout=LAST_RESULTS_SECONDS)
            working.cancel()  # Redis does not answer; a peer takes over all that this one holds
        with suppress(asyncio.CancelledError):
            await working

    return service


def worker_service(
    settings: Settings, registry: Registry, listener: Listener | None = None
) -> Service:
    if settings.transport == "celery":
        raise InvalidInput(
            f"{env_name('transport')} is celery, whose worker is a pool of processes and cannot be "
            "part of another service: start `dovetail worker` beside it"
        )
    with redis_imports(settings, "dovetail worker"):
        from dovetail.wiring.distributed import working

    async def once(stop: asyncio.Event) -> None:
        async with working(settings, registry, listener) as at_work:
            known = counted(len(registry.handlers()), "handler")
            at_once = counted(settings.concurrency, "node")
            worker_log.info("started, pid %d: %s, %s at once", os.getpid(), known, at_once)
            stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
            await asyncio.wait({stopping, at_work.crashed}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if at_work.crashed.done():
                at_work.crashed.result()
            if running := len(at_work.holding()):
                nodes, seconds = counted(running, "node"), f"{settings.drain_seconds:g} s"
                worker_log.info("takes no more work; %s may finish within %s", nodes, seconds)

    async def service(stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await once(stop)
            except StoreError as error:
                if stop.is_set():
                    worker_log.warning("%s; what ran here goes on elsewhere by its lease", error)
                    return
                # Redis was away for longer than a lease: other workers run what ran here.
                worker_log.warning("%s; beginning anew", error)
                await asyncio.sleep(RESTART_SECONDS)

    return service


# --- the API server: over the engine in this process, or over Redis ------------------------------

serve_log = logging.getLogger("dovetail.serve")

TAKE_OVER_SECONDS = 2.0
"""Between two searches for runs that no process drives any more."""


class Backend(NamedTuple):
    commands: Commands
    fleet: Fleet
    duties: Sequence[asyncio.Future[None]]
    """When one of them ends, the server ends, with its error if it has one."""
    facts: Callable[[], Awaitable[ServiceFacts]]
    """The facts for `/metrics`."""


@asynccontextmanager
async def embedded_backend(
    settings: Settings, registry: Registry, telemetry: Telemetry
) -> AsyncIterator[Backend]:
    """The embedded engine. It also takes over runs of processes that died."""

    from dovetail.api.operations import ThisProcess
    from dovetail.wiring.embedded import embedded

    async def facts() -> ServiceFacts:
        return facts_of_this_process(telemetry, list(registry))

    async with embedded(settings, registry, telemetry) as commands:
        handlers = [known.announcement() for known in registry.handlers()]
        fleet = ThisProcess(commands, handlers, settings.concurrency, telemetry.depths or dict)
        duties = [
            asyncio.ensure_future(_take_over(commands)),
            asyncio.ensure_future(commands.lost()),
        ]
        try:
            yield Backend(commands, fleet, duties, facts)
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.wait(duties)


async def _take_over(commands: Commands) -> None:
    """Take over the runs that no process drives, again and again."""
    while True:
        if taken := await commands.resume():
            serve_log.info("took over %s that no process drove", counted(len(taken), "run"))
        await asyncio.sleep(TAKE_OVER_SECONDS)


def redis_backend(
    settings: Settings, registry: Registry, services: Sequence[str], telemetry: Telemetry
) -> AbstractAsyncContextManager[Backend]:
    """The commands over Redis, with these services in the same process."""
    with redis_imports(settings, "dovetail serve"):
        from dovetail.wiring.distributed import commanding
        from dovetail.wiring.health import watching

    @asynccontextmanager
    async def opened() -> AsyncIterator[Backend]:
        duties: list[asyncio.Future[None]] = []
        async with AsyncExitStack() as stack:
            commands = await stack.enter_async_context(
                commanding(settings, registry, telemetry, kind="api")
            )
            fleet = await stack.enter_async_context(watching(settings, _names(registry)))
            inside: list[Service] = []
            if "orchestrator" in services:
                inside.append(orchestrator_service(settings, telemetry))
            if "worker" in services:  # the last, so it ends first: its results are still applied
                inside.append(worker_service(settings, registry, telemetry))
            duties += [await stack.enter_async_context(running_service(one)) for one in inside]
            yield Backend(commands, fleet, duties, partial(facts_of, fleet))

    return opened()


def _names(registry: Registry) -> list[str]:
    return [known.name for known in registry.handlers()]


@contextmanager
def mcp_imports() -> Iterator[None]:
    """Around imports that need the SDK: a missing package is an `InvalidInput`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise InvalidInput(
            f"the SDK of MCP is not installed ({error}): pip install 'dovetail[mcp]'"
        ) from None


def _mcp_route(
    service: ApiService, *, allow_writes: bool
) -> AbstractAsyncContextManager[BaseRoute]:
    """The tools for agents, behind the guard and the limits of the API."""
    from dovetail import __version__
    from dovetail.api.admission import waits
    from dovetail.api.problems import Refusal, public_error
    from dovetail.api.service import Overloaded
    from dovetail.mcp.server import http_route, make_server
    from dovetail.mcp.tools import AgentTools, sentence

    def may_write(ctx: Any) -> bool:
        return allow_writes and getattr(ctx.request.state, "may_write", True)

    def public(ctx: Any, error: DovetailError) -> str:
        found = {"type": error.type, "message": sentence(error)}
        return str(public_error(ctx.request, found)["message"])

    def on_wait(ctx: Any) -> None:
        try:
            waits(ctx.request)
        except Refusal as refusal:
            raise Overloaded(str(refusal)) from None

    tools = AgentTools(service.commands, service.admit)
    server = make_server(tools, __version__, may_write, public, on_wait)
    return http_route(server, service.settings.max_body_bytes)


async def serve_until_stopped(
    opened: AbstractAsyncContextManager[Backend],
    settings: Settings,
    hosts: Sequence[str],
    listening: list[socket.socket],
    stopping: Stopping,
    telemetry: Telemetry,
    mcp_writes: bool | None = None,
) -> None:
    """Serve the HTTP API until a stop is requested or a duty of the backend ends.

    `mcp_writes`: whether tools of `/mcp` may write; None for no such tools.
    """
    from dovetail import __version__
    from dovetail.api.app import create_app
    from dovetail.api.connection import Sending
    from dovetail.api.server import serve, url_of
    from dovetail.api.service import ApiService
    from dovetail.cli.page import announced_address
    from dovetail.documents.api import router as documents_router
    from dovetail.telemetry.metrics import CONTENT_TYPE

    async with AsyncExitStack() as stack:
        commands, fleet, duties, facts = await stack.enter_async_context(opened)

        async def metrics() -> tuple[bytes, str]:
            return telemetry.page(await facts()), CONTENT_TYPE

        service = ApiService(commands, fleet, settings, hosts, metrics=metrics)
        calls, more = [documents_router], []
        if mcp_writes is not None:
            route = _mcp_route(service, allow_writes=mcp_writes)
            more.append(await stack.enter_async_context(route))
        app = telemetry.app(create_app(service, __version__, telemetry.answered, calls, more))
        asked = asyncio.ensure_future(stopping.wait())
        most, sending = settings.max_connections, Sending(settings.send_timeout)
        serving = asyncio.ensure_future(serve(app, listening, service.closing, most, sending))
        url = url_of(listening)
        announced = nullcontext() if settings.redis_url else announced_address(settings.db, url)
        try:
            with announced:
                streams.say(f"dovetail serves {url}")
                sys.stdout.flush()
                await asyncio.wait({serving, asked, *duties}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and settings.shutdown_delay:
                # Load balancers learn from /health/ready that they must send no more requests here;
                # requests that come meanwhile are answered.
                service.leaving.set()
                serve_log.info("not ready; serves for %g s more", settings.shutdown_delay)
                await asyncio.wait(
                    {serving, *duties},
                    timeout=settings.shutdown_delay,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            service.closing.set()
            await serving
            asked.cancel()
        # A duty notices that the store is lost, and ends the server with its error.
        for duty in duties:
            if duty.done():
                duty.result()
