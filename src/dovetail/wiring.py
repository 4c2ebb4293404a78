"""Puts the parts together: the only place that names concrete stores and transports."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

from dovetail.config import Settings
from dovetail.core.definition.validation import Limits
from dovetail.core.run import RunState
from dovetail.core.templates import MAX_CONFIG_SIZE
from dovetail.engine.clock import Clock, steady_clock
from dovetail.engine.commands import Commands
from dovetail.engine.intake import Intake
from dovetail.engine.limits import LocalLimits, TokenBucket
from dovetail.engine.orchestrator import Orchestrator
from dovetail.engine.ports import Calls
from dovetail.engine.ports import Limits as RateLimits
from dovetail.engine.worker import Worker
from dovetail.handlers.calls import RegistryCalls
from dovetail.handlers.registry import Registry
from dovetail.stores.memory import MemoryStore
from dovetail.transports.local import LocalTransport


class LocalEngine:
    """Orchestrator and worker in this process, state in its memory."""

    def __init__(
        self,
        calls: Calls,
        *,
        concurrency: int,
        limits: RateLimits | None = None,
        isolate: bool = True,
        max_config_size: int = MAX_CONFIG_SIZE,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or steady_clock()
        transport = LocalTransport()
        self._crashed: BaseException | None = None
        self.store = MemoryStore()
        self.orchestrator = Orchestrator(self.store, transport, clock, self._crash)
        desk = Intake(
            transport,
            self.store,
            self.orchestrator,
            limits or LocalLimits(),
            clock,
            worker_id=f"{_host()}-{os.getpid()}",
            isolate=isolate,
            max_config_size=max_config_size,
        )
        self.worker = Worker(desk, calls, clock, self._crash, concurrency=concurrency)
        transport.on_stop = self.worker.stop

    async def __aenter__(self) -> LocalEngine:
        self.worker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.orchestrator.close()
        await self.worker.close()
        self.store.close()

    async def wait(self, run_id: str) -> RunState:
        """The run once it has finished. If a part of the engine died, that is raised instead."""
        if self._crashed is not None:
            raise self._crashed
        return await self.store.wait(run_id)

    def _crash(self, error: BaseException) -> None:
        """A bug or a lost store must end the engine loudly, never leave it half alive."""
        if self._crashed is None:
            self._crashed = error
            self.store.abort(error)


@asynccontextmanager
async def embedded(settings: Settings, registry: Registry) -> AsyncIterator[Commands]:
    """The engine inside this process, running, as the commands that drive it."""
    calls = RegistryCalls(
        registry,
        secrets=settings.secrets,
        sensitive=settings.sensitive(),
        max_config_bytes=settings.max_config_bytes,
        max_output_bytes=settings.max_output_bytes,
    )
    limits = LocalLimits(
        {
            tag: TokenBucket(limit.rate_per_second, limit.burst)
            for tag, limit in settings.rate_limits.items()
        }
    )
    async with LocalEngine(
        calls,
        concurrency=settings.concurrency,
        limits=limits,
        max_config_size=settings.max_config_bytes,
    ) as engine:
        yield Commands(
            store=engine.store,
            orchestrator=engine.orchestrator,
            wait=engine.wait,
            known_handlers=registry,
            default_retries=registry.default_retries(),
            limits=definition_limits(settings),
        )


@cache
def _host() -> str:
    return socket.gethostname()


def definition_limits(settings: Settings) -> Limits:
    return Limits(
        max_nodes=settings.max_nodes,
        max_edges=settings.max_edges,
        max_body_bytes=settings.max_body_bytes,
        max_depth=settings.max_nesting,
        max_template_bytes=settings.max_template_bytes,
    )
