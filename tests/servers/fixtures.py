"""The servers of the tests, as fixtures; tests/conftest.py hands them to every test.

One Redis, one PostgreSQL and one RabbitMQ serve the whole session, each from the first test on that
asks for it. A test that kills its server, or wants it set otherwise, takes one of its own:
`with RedisServer(fsync="always") as redis`. TEST_REDIS_URL, TEST_DATABASE_URL and TEST_RABBITMQ_URL
name running servers to use instead; those must be empty, and stay alive. A server that cannot be
had is an error of every test that needs it, never a skip.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .binaries import NoServer
from .llm_stub import LlmStub
from .postgres_server import Databases, PostgresServer
from .rabbitmq_server import RabbitServer
from .redis_server import RedisServer

if TYPE_CHECKING:
    import redis


QUEUE = "dovetail"


class GivenRedis:
    """A Redis that runs elsewhere, at TEST_REDIS_URL. It can be used, and not be killed."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self._connection() as connection:
            if connection.dbsize():
                raise NoServer(
                    "the Redis at TEST_REDIS_URL holds keys, which the tests would flush: "
                    "name an empty one, or unset it for one of our own"
                )

    def flush(self) -> None:
        with self._connection() as connection:
            connection.flushdb()

    def _connection(self) -> redis.Redis:
        import redis  # here: most test runs need no Redis and would pay for it

        return redis.Redis.from_url(self.url)


class GivenRabbit:
    """A RabbitMQ that runs elsewhere, at TEST_RABBITMQ_URL: a virtual host of it is ours.

    Its queues cannot be listed from here, so it is taken for empty but for the one we use.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def new_host(self) -> str:
        from kombu import Connection  # here: most test runs need no RabbitMQ and would pay for it

        with Connection(self.url) as connection:
            connection.default_channel.queue_delete(QUEUE)
        return self.url

    def drop_host(self, url: str) -> None:
        """It is not ours to drop."""


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer | GivenRedis]:
    """Parametrized indirectly, the arguments of a RedisServer: {"cluster": True}."""
    wanted = getattr(request, "param", {})
    given = os.environ.get("TEST_REDIS_URL")
    if given and not wanted:
        server = GivenRedis(given)
        yield server
        server.flush()
        return
    with RedisServer(**wanted) as own:
        yield own


@pytest.fixture
def redis_url(redis_server: RedisServer | GivenRedis) -> str:
    """A Redis that has forgotten what other tests did."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture(params=["single", "cluster"], scope="module")
def single_or_cluster(request: pytest.FixtureRequest) -> Iterator[RedisServer | GivenRedis]:
    """A Redis, and then a cluster of one node; the test that uses it flushes it."""
    if request.param == "single":
        yield request.getfixturevalue("redis_server")
        return
    with RedisServer(cluster=True) as own:
        yield own


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Databases]:
    given = os.environ.get("TEST_DATABASE_URL")
    if given:
        yield Databases(given)
        return
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def postgres_url(postgres_server: Databases) -> Iterator[str]:
    """An empty database for the tests of one file."""
    url = postgres_server.new_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitServer | GivenRabbit]:
    given = os.environ.get("TEST_RABBITMQ_URL")
    if given:
        yield GivenRabbit(given)
        return
    with RabbitServer() as server:
        yield server


@pytest.fixture
def rabbitmq_url(rabbitmq_server: RabbitServer | GivenRabbit) -> Iterator[str]:
    """A virtual host without queues."""
    url = rabbitmq_server.new_host()
    yield url
    rabbitmq_server.drop_host(url)


@pytest.fixture(scope="session")
def llm_stub() -> Iterator[LlmStub]:
    with LlmStub() as stub:
        yield stub


@pytest.fixture
def llm(llm_stub: LlmStub) -> LlmStub:
    """A model's endpoint that answers well and at once, and has forgotten what others asked."""
    llm_stub.behave(delay=0, faults=[])
    llm_stub.forget()
    return llm_stub
