"""One set-up of three services for all these tests: metrics on, traces on, logs as JSON."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..servers.redis_server import RedisServer
from .receiver import Receiver
from .services import Api, Page, Services, page_of


@dataclass
class Three:
    services: Services
    receiver: Receiver
    redis_url: str
    api: Api
    orchestrator: subprocess.Popen[bytes]
    orchestrator_port: int
    worker: subprocess.Popen[bytes]
    worker_port: int

    def pages(self) -> list[Page]:
        return [self.api.page(), page_of(self.orchestrator_port), page_of(self.worker_port)]

    def total(self, name: str, **labels: str) -> float:
        """Over all processes: each counts what it moved itself."""
        return sum(page(name, **labels) for page in self.pages())


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    with Receiver() as found:
        yield found


def tracing_to(receiver: Receiver) -> dict[str, str]:
    """Sent soon, so that a test need not wait."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}


@pytest.fixture(scope="session")
def three(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    with RedisServer() as redis:
        services = Services(
            tmp_path_factory.mktemp("three"),
            DOVETAIL_REDIS_URL=redis.url,
            DOVETAIL_LEASE_SECONDS="2",
            DOVETAIL_LOG_FORMAT="json",
            **tracing_to(receiver),
        )
        try:
            orchestrator, first = services.watched("orchestrator")
            worker, second = services.watched("worker", "--handlers", "mine.py")
            api = services.serve()
            for process in (orchestrator, worker):
                services.wait(process, "started")
            yield Three(services, receiver, redis.url, api, orchestrator, first, worker, second)
        finally:
            services.close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """Of a test's own, with nothing configured."""
    found = Services(tmp_path)
    yield found
    found.close()
