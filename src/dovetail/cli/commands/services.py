"""`dovetail serve`, `orchestrator` and `worker`, which run until a signal, and `migrate`."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli import output as streams
from dovetail.cli.options import Handlers, declarations, on_target
from dovetail.cli.output import InvalidInput

if TYPE_CHECKING:
    from dovetail.cli.interruptible import Stopping, StopRequest
    from dovetail.cli.services import Backend
    from dovetail.config import Settings
    from dovetail.handlers.registry import Registry
    from dovetail.telemetry.service import Telemetry

SWITCH_SECONDS = 0.0002
"""A thread that reads a large body yields so often. A reply takes the event loop ten system calls,
and after each of them it waits that long."""
SERVICES = ("orchestrator", "worker")
AllowWrites = Annotated[
    bool,
    typer.Option(
        "--allow-writes",
        help="Agents may also run workflows, and retry, fork and cancel runs.",
    ),
]

app = declarations()


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(metavar="H", help="Where to listen; beyond loopback only with a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0 takes any that is free.")
    ] = 8700,
    handlers: Handlers = None,
    with_services: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="S,S",
            help="On Redis: run orchestrator and worker in this process, too.",
        ),
    ] = None,
    mcp: Annotated[
        bool, typer.Option("--mcp", help="Serve tools for agents at /mcp, too; see `mcp`.")
    ] = False,
    allow_writes: AllowWrites = False,
) -> int:
    """Serve the HTTP API, and go on with interrupted runs.

    SIGTERM and Ctrl-C hand back what does not finish in time. Exit code: 0, or 1 if it could not
    listen or lost its store.
    """
    from dovetail.api.security import Tokens, check_binding, host_names
    from dovetail.api.server import addresses_of, listen
    from dovetail.cli.interruptible import finished_before_stop, run_interruptible
    from dovetail.cli.services import (
        embedded_backend,
        fast_loop,
        find_redis,
        mcp_imports,
        redis_backend,
        relax_gc,
        serve_until_stopped,
        treat_interrupt_as_terminate,
    )
    from dovetail.cli.unblocked import unblocked, write_last_words
    from dovetail.config import load_settings
    from dovetail.documents.metrics import DocumentRunEnds
    from dovetail.handlers.builtin import load_registry
    from dovetail.telemetry.logs import show_logs
    from dovetail.telemetry.service import Telemetry, open_tracing

    settings = load_settings()
    services = _service_names(with_services)
    if services and settings.redis_url is None:
        raise InvalidInput(
            "--with is for set-ups on Redis, where orchestrator and worker are services of their "
            "own; without Redis both are in this process already, so leave it out"
        )
    if allow_writes and not mcp:
        raise InvalidInput("--allow-writes is about the tools of --mcp: give both")
    if mcp:
        with mcp_imports():
            import_module("dovetail.mcp.server")
    addresses = addresses_of(host)
    check_binding(addresses, [*settings.tokens, *settings.named_tokens])
    # Before anything is opened: a wrong setting must not cost a start.
    Tokens(settings.tokens, settings.named_tokens)
    host_names(settings.allowed_hosts)
    registry = load_registry(settings, handlers or ())
    telemetry = Telemetry(open_tracing("api"), DocumentRunEnds())
    backend: AbstractAsyncContextManager[Backend]
    if settings.redis_url is None:
        backend = embedded_backend(settings, registry, telemetry)
    else:
        backend = redis_backend(settings, registry, services, telemetry)
    show_logs(settings, names=True)
    sockets = listen(addresses, port)
    log = logging.getLogger("dovetail.serve")

    async def work(stopping: Stopping) -> int:
        sys.setswitchinterval(SWITCH_SECONDS)
        treat_interrupt_as_terminate()
        relax_gc()
        redis = settings.redis_url is not None
        if not redis or await finished_before_stop(find_redis(settings, log), stopping):
            hosts = [host, *addresses]
            await serve_until_stopped(
                *(backend, settings, hosts, sockets, stopping, telemetry),
                mcp_writes=allow_writes if mcp else None,
            )
        return 0

    def give_up(request: StopRequest) -> None:
        """In another thread, because this one is stuck: other processes run on by lease."""
        write_last_words("stopped without waiting for what still runs; its runs go on elsewhere\n")

    try:
        patience = settings.drain_seconds + settings.shutdown_delay
        with unblocked():
            return run_interruptible(work, give_up, patience, fast_loop)
    finally:
        telemetry.close()
        for one in sockets:
            one.close()


def _service_names(given: str | None) -> list[str]:
    if given is None:
        return []
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name not in SERVICES:
            raise InvalidInput(f"--with: no service '{name}'; known: {', '.join(SERVICES)}")
    return names


@app.command("mcp")
@on_target
def serve_mcp(allow_writes: AllowWrites = False, handlers: Handlers = None) -> int:
    """Serve tools for an agent over stdio, by the Model Context Protocol.

    Without --allow-writes it only reads. With it, on the embedded file, runs that the agent starts
    are driven by this process, with --handlers. Ends when stdin does; SIGTERM and Ctrl-C end it
    within seconds, and hand back what runs.
    """
    import asyncio

    from dovetail import __version__
    from dovetail.cli.interruptible import run_interruptible
    from dovetail.cli.services import mcp_imports, treat_interrupt_as_terminate
    from dovetail.cli.target import open_engine, open_reader, target_settings
    from dovetail.cli.unblocked import unblocked
    from dovetail.handlers.builtin import load_registry
    from dovetail.telemetry.logs import show_logs

    with mcp_imports():
        from dovetail.mcp.server import serve_stdio
    from dovetail.mcp.tools import AgentTools

    settings = target_settings()
    show_logs(settings, names=True)

    async def serve_tools(stopping: Stopping) -> int:
        treat_interrupt_as_terminate()
        registry = load_registry(settings, handlers or ())
        if allow_writes:
            opened = open_engine(settings, registry)
        else:  # makes the file: runs that are made there later are to be seen
            opened = open_reader(settings, registry, create=True)
        async with opened as engine:
            tools = AgentTools(engine)
            serving = asyncio.create_task(
                serve_stdio(tools, __version__, allow_writes=allow_writes)
            )
            asked = asyncio.create_task(stopping.wait())
            await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            os._exit(0)  # a thread that reads stdin is left, for which Python would wait
        serving.result()
        return 0

    def give_up(request: StopRequest) -> None:
        """Other processes go on with its runs."""

    with unblocked("stderr"):
        return run_interruptible(serve_tools, give_up, 0.0)


@app.command()
def orchestrator() -> int:
    """Apply results and send out what follows: a service of a set-up on Redis.

    Start as many as you like. SIGTERM and Ctrl-C end it. Exit code: 0, or 1 if Redis is not there.
    """
    from dovetail.cli.services import orchestrator_service, run_service
    from dovetail.config import load_settings
    from dovetail.documents.metrics import DocumentRunEnds
    from dovetail.telemetry.service import open_telemetry

    settings = load_settings()
    telemetry = open_telemetry(settings, "orchestrator", DocumentRunEnds())
    service = orchestrator_service(settings, telemetry)
    return run_service("orchestrator", service, settings, telemetry)


@app.command()
def worker(
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Nodes that it runs at once; default: 32."),
    ] = None,
    handlers: Handlers = None,
) -> int:
    """Run the nodes whose handlers it knows: a service of a set-up on Redis.

    Start as many as you like. SIGTERM and Ctrl-C: it takes no more work, what runs may finish
    within DOVETAIL_DRAIN_SECONDS, the rest is handed back. Exit code: 0, or 1 if Redis is not
    there.
    """
    from dovetail.cli.services import run_service, shared_metrics, worker_service
    from dovetail.config import load_settings
    from dovetail.documents.metrics import DocumentRunEnds
    from dovetail.handlers.builtin import load_registry
    from dovetail.telemetry.service import open_telemetry

    settings = load_settings(concurrency=concurrency)
    telemetry = open_telemetry(settings, "worker", DocumentRunEnds())
    if settings.transport == "celery":
        with shared_metrics(telemetry):
            return _run_celery(settings, load_registry(settings, handlers or ()), telemetry)
    registry = load_registry(settings, handlers or ())
    service = worker_service(settings, registry, telemetry)
    return run_service("worker", service, settings, telemetry, list(registry))


def _run_celery(settings: Settings, registry: Registry, telemetry: Telemetry | None) -> int:
    """A worker of Celery, which handles signals and ends as Celery's own workers do."""
    import asyncio

    from dovetail.cli.services import find_redis, observed_pool, redis_imports
    from dovetail.cli.unblocked import unblocked
    from dovetail.telemetry.logs import show_logs

    with redis_imports(settings, "dovetail worker"):
        from celery.signals import worker_process_shutdown  # type: ignore[import-untyped]

        from dovetail.wiring.celery import run_worker
    show_logs(settings, names=True)
    asyncio.run(find_redis(settings, logging.getLogger("dovetail.worker")))
    with unblocked(), observed_pool(settings, telemetry, list(registry)):
        if telemetry is None:
            return run_worker(settings, registry)
        worker_process_shutdown.connect(telemetry.leave_child, weak=False)
        return run_worker(settings, registry, telemetry, telemetry.in_child)


@app.command()
def migrate() -> None:
    """Bring the tables of PostgreSQL up to date, before services of this version start.

    Services do so themselves; this is for a job of its own. Exit code: 0, 1 if PostgreSQL is not
    there, 2 if DOVETAIL_DATABASE_URL is not set.
    """
    import asyncio

    from dovetail.config import env_name, load_settings
    from dovetail.wiring.embedded import migrate_database

    settings = load_settings()
    if settings.database_url is None:
        raise InvalidInput(f"{env_name('database_url')} is not set: there is nothing to migrate")
    asyncio.run(migrate_database(settings.database_url))
    streams.say("PostgreSQL has the tables of this version")
