"""A real HTTP server on loopback whose answers a test writes byte by byte."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.handlers.context import Context

LOOPBACK = (ip_network("127.0.0.1/32"),)


@dataclass
class Seen:
    """One request as the server read it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Script = Callable[[Seen, asyncio.StreamWriter], Awaitable[bytes | None]]


@dataclass
class Server:
    port: int = 0
    requests: list[Seen] = field(default_factory=list)
    connections: int = 0
    scheme: str = "http"

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"


def response(
    status: int = 200, body: bytes | str = b"", headers: dict[str, str] | None = None
) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Server]]]:
    """`await serve(script)` starts a server; the script returns raw bytes or writes itself."""
    running: list[asyncio.Server] = []
    tasks: set[asyncio.Task[Any]] = set()

    async def start(
        script: Script | bytes, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> Server:
        server = Server(scheme="https" if tls else "http")

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            server.connections += 1
            try:
                seen = await _read(reader)
                server.requests.append(seen)
                answer = script if isinstance(script, bytes) else await script(seen, writer)
                if answer is not None:
                    writer.write(answer)
                await writer.drain()
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                tasks.discard(task)
                writer.close()

        listening = await asyncio.start_server(accept, host, 0, ssl=tls)
        running.append(listening)
        server.port = listening.sockets[0].getsockname()[1]
        return server

    yield start
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for listening in running:
        listening.close()
        await listening.wait_closed()


async def _read(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {}
    for line in head[1:]:
        if line:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, target, headers, body)


@pytest.fixture
def local() -> Settings:
    """Settings that allow this machine and nothing else that is not public."""
    return Settings(allow_private_addresses=LOOPBACK)


@pytest.fixture
def ctx() -> Context:
    return Context(run_id="r1", node_id="fetch")
