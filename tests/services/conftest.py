"""What the tests of services share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from dovetail.config import Settings
from dovetail.wiring.distributed import connected

from ..servers.postgres_server import Databases
from ..servers.redis_server import RedisServer
from .archive_world import World, an_empty_world
from .interrupted_run import LONGEST_LEASE, InterruptedRun
from .service_processes import ServiceProcesses, at_work


@pytest.fixture
async def world(redis_url: str, postgres_url: str) -> AsyncIterator[World]:
    async with an_empty_world(redis_url, postgres_url) as made:
        yield made


@pytest.fixture
async def stage(redis_url: str) -> AsyncIterator[InterruptedRun]:
    async with connected(Settings(redis_url=redis_url, lease_seconds=LONGEST_LEASE)) as parts:
        yield InterruptedRun(parts)


@pytest.fixture(scope="session")
def service_processes(
    request: pytest.FixtureRequest,
    postgres_server: Databases,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServiceProcesses]:
    """An orchestrator and a worker; with PostgreSQL, if that is the parameter."""
    with RedisServer() as redis:  # its own: others flush the one that all tests share
        database_url = None
        if getattr(request, "param", "redis") != "redis":
            database_url = postgres_server.new_database()
        with at_work(
            tmp_path_factory.mktemp("service_processes"), redis.url, database_url
        ) as found:
            yield found
        if database_url is not None:
            postgres_server.drop_database(database_url)
