"""Clients that ask and do not read: they are dropped, and other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from dovetail import handler
from dovetail.api.connection import Sending
from dovetail.api.server import listen, serve
from dovetail.client import Dovetail

from ..library.places import serving

SECONDS = 20.0
LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
SMALL = 4096


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """`/<bytes>` in one piece, `/stream` for ever."""
    kind = b"text/event-stream" if scope["path"] == "/stream" else b"text/plain"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if scope["path"] == "/stream":
        await receive()  # the request
        left = asyncio.ensure_future(receive())
        while not left.done():
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await asyncio.sleep(0)
        return
    size = 2 if scope["path"].startswith("/health") else int(scope["path"][1:])
    await send({"type": "http.response.body", "body": b"x" * size})


@asynccontextmanager
async def served(sending: Sending) -> AsyncIterator[int]:
    """The port. What the system keeps of a connection is little, so that little is enough."""
    listening = listen(["127.0.0.1"], 0)
    listening[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    closing = asyncio.Event()
    work = asyncio.ensure_future(serve(app, listening, closing, sending=sending))
    try:
        async with asyncio.timeout(SECONDS):
            yield listening[0].getsockname()[1]
    finally:
        closing.set()
        await work
        listening[0].close()


async def asked(port: int, path: str) -> socket.socket:
    """A connection that has asked, and reads only when the test does it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    made.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(made, ("127.0.0.1", port))
    await loop.sock_sendall(made, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return made


async def answered(port: int) -> float:
    """How long a small answer takes."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(LIVE)
    assert b" 200 " in await reader.readline()
    writer.close()
    return time.monotonic() - began


async def until_dropped(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    def reported() -> list[str]:
        return [one.getMessage() for one in caplog.records if "was dropped" in one.getMessage()]

    while len(reported()) < count:
        await asyncio.sleep(0.02)
    return reported()


async def is_cut(made: socket.socket) -> bool:
    """Whether it ends, once all that had been sent is read."""
    loop = asyncio.get_running_loop()
    with suppress(ConnectionResetError):
        while await loop.sock_recv(made, 1 << 20):
            pass
    return True


@pytest.mark.parametrize("path", ["/stream", "/3000000", "/90000"])
async def test_a_client_that_does_not_read_is_dropped_and_other_clients_are_served(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dovetail.api")
    sending = Sending(timeout=0.3)
    async with served(sending) as port:
        deaf = [await asked(port, path) for _ in range(8)]
        assert await answered(port) < 1
        reported = await until_dropped(caplog, 8)
        assert sending.unsent == 0
        for one in reported:
            assert one.startswith(f"the client at 127.0.0.1 was dropped after {path}: ")
            assert "it read nothing for 0.3 s" in one
        for made in deaf:
            assert await is_cut(made)
            made.close()


async def test_a_client_that_reads_slowly_is_not_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dovetail.api")
    size = 400_000
    async with served(Sending(timeout=0.4)) as port:
        slow = await asked(port, f"/{size}")
        loop = asyncio.get_running_loop()
        read, began = 0, time.monotonic()
        while time.monotonic() - began < 1.2:
            read += len(await loop.sock_recv(slow, 20_000))
            await asyncio.sleep(0.1)
        assert read < size
        while read < size:
            got = await loop.sock_recv(slow, 1 << 20)
            assert got
            read += len(got)
        slow.close()
    assert not [one for one in caplog.records if "was dropped" in one.getMessage()]


async def test_unsent_bytes_of_all_clients_are_bounded_and_the_longest_waiting_client_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "dovetail.api")
    sending = Sending(timeout=60, most_unsent=3_000_000)
    async with served(sending) as port:
        deaf = []
        for nth in range(6):
            deaf.append(await asked(port, f"/100000{nth}"))
            while sending.unsent < 900_000 * min(nth + 1, 2):
                await asyncio.sleep(0.01)
            assert sending.unsent <= 3_000_000
        reported = await until_dropped(caplog, 3)
        assert [f"/100000{nth}" in one for nth, one in enumerate(reported)] == [True] * len(
            reported
        )
        assert "wait for clients that do not read" in reported[0]
        assert await answered(port) < 1
        for made in deaf:
            made.close()


@handler
def filled(config: dict[str, Any], ctx: Any) -> str:
    return "x" * int(config["bytes"])


async def test_clients_that_do_not_read_large_replies_stay_within_the_unsent_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dovetail.api")
    nodes = [
        {"id": f"n{nth}", "handler": "filled", "config": {"bytes": 900_000}} for nth in range(8)
    ]
    async with (
        serving(tmp_path, [filled], send_timeout=1.0) as url,
        Dovetail(url) as dt,
        asyncio.timeout(SECONDS),
    ):
        run = await dt.run({"name": "wide", "nodes": nodes})
        port = int(url.rpartition(":")[2])
        path = f"/api/v1/runs/{run.run_id}?outputs=full"
        deaf = [await asked(port, path) for _ in range(8)]
        slowest = 0.0  # seconds; the machine may have much else to do
        while len([one for one in caplog.records if "was dropped" in one.getMessage()]) < 8:
            slowest = max(slowest, await answered(port))
            await asyncio.sleep(0.02)
        assert slowest < SECONDS / 4
        assert (await dt.get_run(run.run_id)).outputs == run.outputs
        for made in deaf:
            made.close()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
