"""What can be done to a server before there is a request: wrong bytes, none at all, too many."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dovetail.api import connection
from dovetail.api.admission import Admission, Budgets, Visit, limits_of
from dovetail.api.connection import Crowd
from dovetail.api.security import Guard, Tokens
from dovetail.api.server import Arrivals, listen, serve
from dovetail.config import Settings

from .conftest import SECONDS, Server

HOST = b"Host: localhost\r\n"
TOKEN = b"Authorization: Bearer full-token\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\n"
RUNS = b"GET /api/v1/runs HTTP/1.1\r\n"
VALIDATE = b"POST /api/v1/workflows/validate HTTP/1.1\r\n" + HOST + TOKEN
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
END = b"\r\n"

REFUSED: dict[str, tuple[bytes, int]] = {
    "no host": (LIVE + END, 400),
    "no host, old protocol": (b"GET /health/live HTTP/1.0\r\n\r\n", 403),
    "two hosts": (LIVE + HOST + b"Host: evil.example\r\n\r\n", 400),
    "the same host twice": (LIVE + HOST + HOST + END, 400),
    "a blank before the colon": (LIVE + b"Host : localhost\r\n\r\n", 400),
    "a host with NUL": (LIVE + b"Host: local\0host\r\n\r\n", 400),
    "a host with a tab": (LIVE + b"Host: local\thost\r\n\r\n", 403),
    "a host that goes on": (LIVE + b"Host: localhost\r\n .evil.example\r\n\r\n", 403),
    "a whole URL": (b"GET http://localhost/health/live HTTP/1.1\r\n" + HOST + END, 401),
    "a tunnel": (b"CONNECT evil.example:80 HTTP/1.1\r\n" + HOST + END, 401),
    "no place": (b"OPTIONS * HTTP/1.1\r\n" + HOST + END, 401),
    "a place outside": (b"GET /health/live/../../api/v1/runs HTTP/1.1\r\n" + HOST + END, 401),
    "an open place in another spelling": (b"GET //health/live HTTP/1.1\r\n" + HOST + END, 401),
    "an open place behind a semicolon": (
        b"GET /api/v1/runs;/health/live HTTP/1.1\r\n" + HOST + END, 401,
    ),
    "an open place as a fragment": (
        b"GET /api/v1/runs#/health/live HTTP/1.1\r\n" + HOST + END, 401,
    ),
    "a websocket": (
        b"GET /api/v1/runs HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHh4eHh4\r\n" + HOST + END, 401,
    ),
    "another method by header": (
        b"GET /api/v1/runs HTTP/1.1\r\nX-HTTP-Method-Override: DELETE\r\n" + HOST + END, 401,
    ),
    "another path by header": (
        b"GET /api/v1/runs HTTP/1.1\r\nX-Original-URL: /health/live\r\n" + HOST + END, 401,
    ),
    "another host by header": (
        LIVE + b"Host: evil.example\r\nX-Forwarded-Host: localhost\r\n"
        b"Forwarded: host=localhost\r\n\r\n", 403,
    ),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 403),
    "length and chunks": (
        VALIDATE + JSON + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n2\r\n{}\r\n0\r\n\r\n", 400,
    ),
    "two transfer encodings": (VALIDATE + CHUNKED + b"Transfer-Encoding: identity\r\n\r\n", 400),
    "chunks of something": (VALIDATE + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
    "chunks by a hidden name": (VALIDATE + b"Transfer-Encoding: \x0bchunked\r\n\r\n", 400),
    "a length below none": (VALIDATE + b"Content-Length: -1\r\n\r\n", 400),
    "a length with a sign": (VALIDATE + b"Content-Length: +2\r\n\r\n{}", 400),
    "a length in other digits": (VALIDATE + b"Content-Length: 0x2\r\n\r\n{}", 400),
    "two lengths": (VALIDATE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "two lengths in one": (VALIDATE + b"Content-Length: 2, 3\r\n\r\n{}", 400),
    "an endless length": (VALIDATE + JSON + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
    "a large length": (VALIDATE + JSON + b"Content-Length: 1048577\r\n\r\n", 413),
    "chunks that are none": (VALIDATE + JSON + CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
    "a chunk longer than it says": (VALIDATE + JSON + CHUNKED + b"\r\n1\r\n{}\r\n0\r\n\r\n", 400),
    "more chunks than allowed": (
        VALIDATE + JSON + CHUNKED + END + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 17, 413,
    ),
    "too many headers": (LIVE + HOST + b"a:\r\n" * 201 + END, 400),
    "a flood of headers": (LIVE + HOST + b"a:\r\n" * 50_000 + END, 400),
    "headers without an end": (LIVE + HOST + b"X: " + b"x" * 300_000, 400),
    "a place without an end": (b"GET /" + b"%41" * 100_000, 400),
}  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("raw"), DOVETAIL_TOKENS="full-token")
    yield server
    assert server.stop() == 0


def exchange(url: str, data: bytes, answers: int = 1) -> bytes:
    """What is answered to these very bytes: so many answers, or less if it is closed before."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=SECONDS) as client:
        found = b""
        with suppress(ConnectionError):  # closed with bytes of ours that were not read
            client.sendall(data)
        with suppress(ConnectionError):
            while not has(found, answers) and (piece := client.recv(65536)):
                found += piece
        return found


def has(data: bytes, answers: int) -> bool:
    for _ in range(answers):
        head, end, rest = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not end or length is None or len(rest) < int(length[1]):
            return False
        data = rest[int(length[1]) :]
    return True


def first_answer(data: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body[: int(headers["content-length"])]


def in_time(server: Server, data: bytes, answers: int = 1) -> bytes:
    """The same, and it costs the server at most 100 ms; it also has other things to do, so one of
    three tries must show it."""
    for _ in range(3):
        before = seconds_of_processor(server)
        found = exchange(server.url, data, answers)
        if seconds_of_processor(server) - before <= 0.1:
            return found
    raise AssertionError("it took more than 100 ms, three times")


def seconds_of_processor(server: Server) -> float:
    used = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("case", REFUSED)
def test_a_malformed_request_gets_a_cheap_problem_reply(guarded: Server, case: str) -> None:
    data, expected = REFUSED[case]
    status, headers, body = first_answer(in_time(guarded, data))
    assert status == expected
    assert headers["content-type"] == "application/problem+json"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["cache-control"] == "no-store"
    problem = json.loads(body)
    assert problem["status"] == status
    assert problem["request_id"] == headers["x-request-id"]


def test_a_pipelined_request_is_checked_like_the_first(guarded: Server) -> None:
    first = LIVE + HOST + END
    for second in (LIVE + HOST + b"a:\r\n" * 50_000 + END, b"\0\r\n\r\n", LIVE + END):
        answers = in_time(guarded, first + second, 2)
        assert answers.count(b"HTTP/1.1 ") == 2
        assert b"HTTP/1.1 400 " in answers


def test_a_body_shorter_than_its_content_length_is_refused(guarded: Server) -> None:
    address = urlsplit(guarded.url)
    with socket.create_connection((address.hostname, address.port), timeout=SECONDS) as client:
        client.sendall(VALIDATE + JSON + b'Content-Length: 9\r\n\r\n{"a":1}')
        client.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 200" not in client.recv(65536)


def test_bytes_after_a_body_are_a_request_of_their_own(guarded: Server) -> None:
    """A caller that sends two in one must be allowed both."""
    body = b"Content-Length: 2\r\n\r\n{}"
    inner = b"GET /api/v1/runs HTTP/1.1\r\n" + HOST + END
    answers = exchange(guarded.url, VALIDATE + JSON + body + inner, 2)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 401 " in answers


def test_a_broken_rest_of_a_body_after_the_reply_logs_no_error(guarded: Server) -> None:
    data = VALIDATE + JSON + CHUNKED + END + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 17
    status, _, _ = first_answer(exchange(guarded.url, data + b"zz\r\n" * 99))
    assert status in (400, 413)  # whichever is noticed first
    assert guarded.log.read_text() == ""


# ── in this process, where its patience can be shortened ─────────────────────────────────


async def hello(scope: Any, receive: Any, send: Any) -> None:
    length = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def serving(
    connections: int = 100, app: Any = hello, tokens: Sequence[str] = ()
) -> AsyncIterator[int]:
    closing = asyncio.Event()
    listening = listen(["127.0.0.1"], 0)
    guard = Guard(app, hosts=[], tokens=Tokens(tokens))
    running = asyncio.create_task(serve(guard, listening, closing, connections))
    try:
        yield listening[0].getsockname()[1]
    finally:
        closing.set()
        await running


@asynccontextmanager
async def dialled(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def everything(reader: asyncio.StreamReader) -> bytes:
    """Until it is closed, in whatever way: who still sends then may lose what was answered."""
    found = b""
    with suppress(ConnectionError):
        while piece := await reader.read(65536):
            found += piece
    return found


async def test_a_connection_that_sends_no_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "STRANGER_SECONDS", 0.5)
    async with serving() as port, dialled(port) as silent, dialled(port) as slow:
        answers = [asyncio.create_task(everything(reader)) for reader, _ in (silent, slow)]
        deadline = time.monotonic() + SECONDS
        while not all(answer.done() for answer in answers):
            assert time.monotonic() < deadline
            with suppress(ConnectionError):
                slow[1].write(b"x")  # a byte now and then is not enough
            await asyncio.sleep(0.02)
        assert (await answers[0]).startswith(b"HTTP/1.1 408 ")
        assert (await answers[1]).startswith(b"HTTP/1.1 408 ") or await answers[1] == b""


async def test_a_connection_that_keeps_sending_requests_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "STRANGER_SECONDS", 2.0)
    async with serving() as port, dialled(port) as (reader, writer):
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            writer.write(LIVE + HOST + END)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.05)


async def test_the_oldest_idle_connection_is_closed_for_a_new_one() -> None:
    async with serving(2) as port, dialled(port) as oldest, dialled(port) as second:
        second[1].write(LIVE + HOST + END)
        await second[0].readuntil(b"hello")
        async with dialled(port) as (reader, writer):
            status, headers, _ = first_answer(await everything(oldest[0]))
            assert (status, headers["retry-after"]) == (429, "1")
            writer.write(LIVE + HOST + END)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
            second[1].write(LIVE + HOST + END)
            assert (await second[0].readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")


async def test_an_authenticated_connection_is_kept_before_an_unauthenticated_one() -> None:
    async with serving(2) as port, dialled(port) as known, dialled(port) as stranger:
        known[1].write(RUNS + HOST + END)
        await known[0].readuntil(b"hello")
        async with dialled(port) as (reader, writer):
            assert (await everything(stranger[0])).startswith(b"HTTP/1.1 429 ")
            writer.write(LIVE + HOST + END)
            await reader.readuntil(b"hello")
            known[1].write(RUNS + HOST + END)
            assert (await known[0].readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")


async def test_while_every_connection_is_busy_a_new_one_may_only_request_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEALTH_CONNECTIONS", 1)
    busy, release = asyncio.Semaphore(0), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/api/v1/runs":
            busy.release()
            await release.wait()
        await hello(scope, receive, send)

    limits = limits_of(Settings(), 100)
    async with serving(2, Admission(slow, Budgets(limits))) as port, AsyncExitStack() as stack:
        asking = [await stack.enter_async_context(dialled(port)) for _ in range(2)]
        for _, writer in asking:
            writer.write(RUNS + HOST + END)
            await busy.acquire()
        reader, writer = await stack.enter_async_context(dialled(port))
        writer.write(LIVE + HOST + END)
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        writer.write(RUNS + HOST + END)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        # One more asks for nothing yet, and goes for the next that wants to know.
        async with dialled(port) as (late, asks):
            asks.write(LIVE + HOST + END)
            assert (await late.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        release.set()
        for reader, _ in asking:
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")


async def test_an_authenticated_connection_may_idle_longer_than_an_unauthenticated_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "STRANGER_SECONDS", 0.1)
    async with serving() as port, dialled(port) as known, dialled(port) as stranger:
        known[1].write(RUNS + HOST + END)
        stranger[1].write(LIVE + HOST + END)
        for reader, _ in (known, stranger):
            await reader.readuntil(b"hello")
        assert await everything(stranger[0]) == b""  # answered before: it expects nothing
        known[1].write(RUNS + HOST + END)
        assert (await known[0].readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_continues_after_its_reply_holds_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "STRANGER_SECONDS", 0.2)
    async with serving(tokens=["t"]) as port, dialled(port) as (reader, writer):
        writer.write(VALIDATE + JSON + b"Content-Length: 999\r\n\r\n")
        gone = asyncio.create_task(everything(reader))
        deadline = time.monotonic() + SECONDS
        while not gone.done():
            assert time.monotonic() < deadline
            with suppress(ConnectionError):
                writer.write(b" ")
            await asyncio.sleep(0.02)
        assert (await gone).startswith(b"HTTP/1.1 401 ") or await gone == b""


def test_an_address_with_many_connections_loses_one_of_its_own() -> None:
    class One:
        def __init__(self, address: str, known: bool = False) -> None:
            self.address = address
            self.visit = Visit()
            self.visit.known = known

    def crowd_of(*members: Any) -> Any:
        crowd: Any = Crowd(8)
        for one in members:
            crowd.add(one)
        return crowd

    oldest, known = One("a"), One("a", known=True)
    many = [One("b") for _ in range(3)]
    crowd = crowd_of(known, oldest, *many)
    assert crowd.to_close("c") is oldest
    assert crowd.to_close("b") is many[0]
    crowd = crowd_of(known, oldest, *many[:2])
    assert crowd.to_close("b") is oldest
    assert crowd_of(known).to_close("b") is known
    assert crowd_of().to_close("b") is None
    crowd.remove(oldest)
    crowd.remove(oldest)
    assert crowd.to_close("c") is many[0]


def test_some_file_descriptors_are_reserved_for_the_store() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        assert connection.most_connections() <= 1024 - 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ── many connections at once ─────────────────────────────────────────────────────────────


async def test_health_is_read_before_the_requests_that_arrived_in_front_of_it() -> None:
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        await hello(scope, receive, send)

    many = 6 * connection.READS_EACH_TURN
    async with serving(2 * many, app) as port, AsyncExitStack() as opened:
        dial = [opened.enter_async_context(dialled(port)) for _ in range(many + 1)]
        clients = await asyncio.gather(*dial)
        for _, writer in clients[:-1]:
            writer.write(RUNS + HOST + END)
        clients[-1][1].write(LIVE + HOST + END)
        for reader, _ in clients:
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
    assert len(begun) == many + 1
    assert begun.index("/health/live") <= connection.READS_EACH_TURN


async def test_large_bodies_that_arrive_together_are_read_whole_and_in_order() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(zlib.crc32(body)).encode() + b"!"})

    many = 2 * connection.READS_EACH_TURN
    body = b"".join(b"%06d" % number for number in range(50_000))
    asked = VALIDATE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    expected = str(zlib.crc32(body)).encode() + b"!"

    async def ask(port: int) -> bytes:
        async with dialled(port) as (reader, writer):
            found = b""
            for _ in range(2):  # the connection is of use afterwards
                writer.write(asked)
                found = await reader.readuntil(b"!")
            return found

    async with serving(2 * many, app) as port:
        for found in await asyncio.gather(*[ask(port) for _ in range(many)]):
            assert expected in found


async def test_a_connection_that_is_closed_before_its_request_is_read_does_no_harm() -> None:
    many = 3 * connection.READS_EACH_TURN
    async with serving(2 * many) as port:
        async with AsyncExitStack() as opened:
            dial = [opened.enter_async_context(dialled(port)) for _ in range(many)]
            for _, writer in await asyncio.gather(*dial):
                writer.write(RUNS + HOST + END)
                writer.transport.abort()
        async with dialled(port) as (reader, writer):
            writer.write(RUNS + HOST + END)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")


async def test_waiting_connections_are_accepted_when_the_loop_has_accepted_one() -> None:
    made: list[asyncio.Protocol] = []

    def protocol(**given: Any) -> Any:
        assert given == {"of": "uvicorn"}
        made.append(asyncio.Protocol())
        return made[-1]

    (listening,) = listen(["127.0.0.1"], 0)
    with listening:
        clients = [socket.create_connection(listening.getsockname()) for _ in range(20)]
        Arrivals([listening], protocol).connected(of="uvicorn")
        async with asyncio.timeout(SECONDS):
            while len(made) < 1 + len(clients):
                await asyncio.sleep(0)
        for client in clients:
            client.close()
