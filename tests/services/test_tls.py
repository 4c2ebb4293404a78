"""TLS to Redis, with a private authority: which client is let in, and what an error says.

The same cases for every way to connect: the pipelined connection, the blocking one of a Celery
process, Celery's own through kombu, and `dovetail doctor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlencode

import pytest
import redis.exceptions
from kombu.exceptions import OperationalError

from dovetail.celery import task as dag_task
from dovetail.celery.task import _made_backend
from dovetail.config import Settings
from dovetail.redis_client.pipelined import PipelinedRedis, RedisError
from dovetail.redis_client.sync import SyncRedis, done
from dovetail.redis_client.url import read, to_celery
from dovetail.transports.celery.application import make_app
from dovetail.wiring.embedded import broker_findings, redis_findings

from ..servers.certificates import Authority, Pair
from ..servers.redis_server import RedisServer
from ..servers.server import HOST, free_port

DAY = timedelta(days=1)


@dataclass
class TlsServer:
    server: RedisServer
    port: int
    authority: Authority
    other: Authority
    valid: Pair
    expired: Pair
    client: Pair
    foreign_client: Pair

    def serve(self, pair: Pair, *, asks_clients: bool = False) -> None:
        self.server.ask("CONFIG", "SET", "tls-auth-clients", "yes" if asks_clients else "no")
        self.server.ask(
            *("CONFIG", "SET", "tls-cert-file", str(pair.certificate)),
            *("tls-key-file", str(pair.key)),
        )

    def url(self, options: dict[str, str], host: str = HOST) -> str:
        return f"rediss://{host}:{self.port}/0?{urlencode(options)}".rstrip("?")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = Authority(folder, "authority"), Authority(folder, "other")
    valid = authority.pair("valid", [HOST])
    port = free_port()
    settings = {
        "tls-port": str(port),
        "tls-ca-cert-file": str(authority.certificate),
        "tls-cert-file": str(valid.certificate),
        "tls-key-file": str(valid.key),
        "tls-auth-clients": "no",
    }
    with RedisServer(settings=settings) as server:
        yield TlsServer(
            *(server, port, authority, other, valid),
            authority.pair("expired", [HOST], begins=-2 * DAY, ends=-DAY),
            authority.pair("client"),
            other.pair("foreign"),
        )


@dataclass(frozen=True)
class Case:
    """How a server is set, what the URL says of it, and what comes of it."""

    options: Callable[[TlsServer], dict[str, str]]
    refused: str = ""
    expired: bool = False
    asks_clients: bool = False
    host: str = HOST


def trusting(**more: str) -> Callable[[TlsServer], dict[str, str]]:
    return lambda stage: {"ssl_ca_certs": str(stage.authority.certificate), **more}


def showing(pair: Callable[[TlsServer], Pair]) -> Callable[[TlsServer], dict[str, str]]:
    return lambda stage: {
        "ssl_ca_certs": str(stage.authority.certificate),
        "ssl_certfile": str(pair(stage).certificate),
        "ssl_keyfile": str(pair(stage).key),
    }


CASES = {
    "right": Case(trusting()),
    "the authority of another": Case(
        lambda stage: {"ssl_ca_certs": str(stage.other.certificate)},
        "not trusted: self-signed certificate in certificate chain",
    ),
    "no authority": Case(lambda _: {}, "not trusted: self-signed certificate in certificate chain"),
    "another host": Case(trusting(), "not trusted: Hostname mismatch", host="localhost"),
    "another host, not looked at": Case(trusting(ssl_check_hostname="false"), host="localhost"),
    "expired": Case(trusting(), "not trusted: certificate has expired", expired=True),
    "expired, not looked at": Case(lambda _: {"ssl_cert_reqs": "none"}, expired=True),
    "asks for a certificate": Case(trusting(), "ssl_certfile and ssl_keyfile", asks_clients=True),
    "gets a certificate": Case(showing(lambda stage: stage.client), asks_clients=True),
    "gets one of another authority": Case(
        showing(lambda stage: stage.foreign_client),
        "ssl_certfile and ssl_keyfile",
        asks_clients=True,
    ),
}


async def pipelined(url: str) -> None:
    async with PipelinedRedis(url, patience=0.0) as pipe:
        assert await pipe.call("PING") == b"PONG"


async def blocking(url: str) -> None:
    with ExitStack() as stack:
        pipe = SyncRedis(url, patience=0.0)
        stack.callback(pipe.close)
        assert done(pipe.call("PING")) == b"PONG"


async def by_celery(url: str) -> None:
    def ping() -> None:
        with make_app(Settings(redis_url=url, transport="celery")).connection_for_write() as made:
            made.ensure_connection(max_retries=1, interval_start=0.0)
            assert made.channel().client.ping()

    await explained_by_redis_py(ping)


async def results_of_celery(url: str) -> None:
    """Where `run_dag` of an app without a backend keeps its result."""
    app = make_app(Settings(redis_url=url, transport="celery"))
    backend = _made_backend(app, to_celery(read(url)))

    def ping() -> None:
        assert backend.client.ping()
        backend.client.close()

    await explained_by_redis_py(ping)


async def explained_by_redis_py(ping: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(ping)
    except (redis.exceptions.ConnectionError, OperationalError, OSError) as error:
        text = str(error)
        known = {
            "CERTIFICATE_VERIFY_FAILED": f"not trusted: {text.partition('verify failed: ')[2]}",
            "ALERT_": "ssl_certfile and ssl_keyfile",
            "EOF OCCURRED": "ssl_certfile and ssl_keyfile",
            "RESET": "ssl_certfile and ssl_keyfile",
            "BROKEN PIPE": "ssl_certfile and ssl_keyfile",
        }
        found = next((reported for sign, reported in known.items() if sign in text.upper()), text)
        raise RedisError(found) from None


async def doctor(url: str) -> None:
    settings = Settings(redis_url=url, transport="celery")
    found = [*await redis_findings(settings), *await broker_findings(settings)]
    reached = [one for one in found if one.check in ("redis", "broker")]
    assert len(reached) == 2
    messages = [one.message for one in reached if not one.ok]
    if messages:
        assert len(messages) == 2, "both see the same"
        raise RedisError(messages[0])


WAYS = {
    "pipelined": pipelined,
    "blocking": blocking,
    "Celery": by_celery,
    "results of Celery": results_of_celery,
    "doctor": doctor,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_a_connection_needs_mutual_trust(
    stage: TlsServer, case: Case, way: Callable[[str], Awaitable[None]]
) -> None:
    stage.serve(stage.expired if case.expired else stage.valid, asks_clients=case.asks_clients)
    url = stage.url(case.options(stage), case.host)
    if not case.refused:
        await way(url)
        return
    with pytest.raises(RedisError, match=case.refused):
        await way(url)


async def test_renewed_certificates_are_used_at_the_next_connection(
    stage: TlsServer, tmp_path: Path
) -> None:
    stage.serve(stage.valid, asks_clients=True)
    certificate, key = tmp_path / "client.crt", tmp_path / "client.key"
    certificate.write_bytes(stage.client.certificate.read_bytes())
    key.write_bytes(stage.client.key.read_bytes())
    authority = str(stage.authority.certificate)
    mine = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    async with PipelinedRedis(stage.url({"ssl_ca_certs": authority, **mine})) as pipe:
        renewed = stage.authority.pair("renewed")
        certificate.write_bytes(renewed.certificate.read_bytes())
        key.write_bytes(renewed.key.read_bytes())
        pipe._break()
        assert await pipe.call("PING") == b"PONG"


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
async def test_a_missing_certificate_file_is_named(stage: TlsServer, option: str) -> None:
    with pytest.raises(RedisError, match=f"no file /none.pem, which {option} names"):
        await pipelined(stage.url({option: "/none.pem"}))
    with pytest.raises(RedisError, match=f"no file /none.pem, which {option} names"):
        await blocking(stage.url({option: "/none.pem"}))


async def test_a_key_that_does_not_match_its_certificate_is_reported(stage: TlsServer) -> None:
    wrong = {"ssl_certfile": str(stage.client.certificate), "ssl_keyfile": str(stage.valid.key)}
    with pytest.raises(RedisError, match=r"ssl_certfile, ssl_keyfile: .* cannot be used"):
        await pipelined(stage.url(wrong))


async def test_a_cluster_node_is_verified_by_its_own_name(stage: TlsServer) -> None:
    stage.serve(stage.valid)
    url = stage.url({"ssl_ca_certs": str(stage.authority.certificate)}, host="localhost")
    async with PipelinedRedis(url, node=(HOST, stage.port)) as node:
        assert await node.call("PING") == b"PONG"
    with pytest.raises(RedisError, match="Hostname mismatch"):
        await PipelinedRedis(url, node=("localhost", stage.port)).__aenter__()


def test_redis_is_verified_with_the_broker_settings_of_the_app() -> None:
    import ssl
    from types import SimpleNamespace

    conf = SimpleNamespace(
        broker_read_url=None,
        broker_url="rediss://:pw@h:1/2",
        broker_use_ssl={"ssl_cert_reqs": ssl.CERT_NONE, "ssl_ca_certs": "/ca.pem"},
    )
    found = dag_task.redis_of(SimpleNamespace(conf=conf))
    assert found is not None
    target = read(found)
    assert (target.password, target.db) == ("pw", 2)
    assert target.tls is not None
    assert (target.tls.requirement, target.tls.ca_certs) == ("none", "/ca.pem")
