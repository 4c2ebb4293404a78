"""The load of the API's bench, as a process of its own: clients that keep their connections open.

    python bench/api_load.py '{"url": …, "path": …, "clients": 32, "seconds": 3}'

Each client sends its next request when the last one is answered. One more, if asked for, sends a
GET every few milliseconds and notes how long each took. Prints one JSON document. It speaks just
enough HTTP to be much cheaper than what it measures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import uvloop

GAP_SECONDS = 0.005
"""Between two of the GETs that are timed."""


class Client:
    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)

    async def open(self) -> None:
        self._read, self._write = await asyncio.open_connection(
            self._place.hostname, self._place.port
        )

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._write.write(head.encode() + b"\r\n" + body)
        answered = await self._read.readuntil(b"\r\n\r\n")
        lines = answered.lower().split(b"\r\n")
        (length,) = (int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        return int(lines[0].split()[1]), await self._read.readexactly(length)


async def trigger(client: Client, path: str, until: float, made: list[bytes]) -> int:
    count = 0
    while time.perf_counter() < until:
        status, body = await client.ask("POST", path, b'{"params":{"n":%d}}' % count)
        if status != 202:
            raise RuntimeError(f"{status}: {body[:300]!r}")
        made.append(body)
        count += 1
    return count


async def look(client: Client, path: str, until: float) -> list[float]:
    times = []
    while time.perf_counter() < until:
        began = time.perf_counter()
        status, body = await client.ask("GET", path)
        if status != 200:
            raise RuntimeError(f"{status}: {body[:300]!r}")
        times.append(time.perf_counter() - began)
        await asyncio.sleep(GAP_SECONDS)
    return times


async def load(asked: dict[str, Any]) -> dict[str, Any]:
    clients = [Client(asked["url"]) for _ in range(asked["clients"] + 1)]
    await asyncio.gather(*(client.open() for client in clients))
    began = time.perf_counter()
    until = began + asked["seconds"]
    made: list[bytes] = []
    work: list[Any] = [trigger(c, asked["path"], until, made) for c in clients[1:]]
    if asked.get("look"):
        work.append(look(clients[0], asked["look"], until))
    found = await asyncio.gather(*work)
    seconds = time.perf_counter() - began
    counts = [one for one in found if isinstance(one, int)]
    return {
        "rate": sum(counts) / seconds,
        "count": sum(counts),
        "looks": next((one for one in found if isinstance(one, list)), []),
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(load(json.loads(sys.argv[1])))))
