"""Floods of an API, measured from beside: what `./dev faults --api` does.

A process of its own floods a server on loopback, with a token that may only read, or with none.
Meanwhile another client triggers runs, asks whether the server is alive and registers definitions,
each on a new connection, and the times are compared with what is promised. Counts and times are
bounded.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.api.conftest import Server, flow, node, on  # noqa: E402
from tests.servers.redis_server import RedisServer  # noqa: E402

SECONDS = 6.0
"""For which each flood goes on while it is measured."""
RISE_SECONDS = 20.0
GIVE_UP_SECONDS = 60.0
AGAIN_SECONDS = 1.0
"""After which a client that was refused, or answered, comes back: as soon as it is asked to."""
SETTLE_SECONDS = 2.0
"""Until all that came together was answered, or stands. Others are measured meanwhile, too."""
IDLE, STREAMS, BODIES = 900, 1000, 150
BODY_BYTES = 900_000
LIMITS = {"trigger": 1.0, "alive": 0.1, "small body": 4.0, "large body": 4.0}
"""Seconds that each may take, in every flood and while it arrives; of a hundred one may be late."""
PAUSE = {"trigger": 0.1, "alive": 0.05, "small body": 0.25, "large body": 0.5}
TOKENS = "writer-token,reader-token:read"

Address = tuple[str, int]


def request(
    method: str, path: str, token: str | None = None, body: bytes = b"", close: bool = True
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    if path.endswith("/events"):
        lines.append("Accept: text/event-stream")
    if body:
        lines.append("Content-Type: application/json")
    if close:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def large(name: str, size: int = BODY_BYTES) -> bytes:
    """A definition of this size, which takes as long to check as a real one."""
    count = size // 118
    nodes = [
        node(f"n{place}", config={"value": "{{ params.a }} " + "x" * 8}) for place in range(count)
    ]
    return json.dumps({**flow(name, *nodes), "params": {"type": "object"}}).encode()


# ── the flood, in a process of its own ───────────────────────────────────────────────────


def flood(kind: str, address: Address, path: str, ready: multiprocessing.synchronize.Event) -> None:  # type: ignore[name-defined]
    asyncio.run(FLOODS[kind](address, path, ready.set))


async def idle(address: Address, path: str, ready: Callable[[], None]) -> None:
    await _held([b""] * IDLE, address, ready)


async def streams(address: Address, path: str, ready: Callable[[], None]) -> None:
    asked = request("GET", f"{path}/events", "reader-token", close=False)
    await _held([asked] * STREAMS, address, ready)


async def waits(address: Address, path: str, ready: Callable[[], None]) -> None:
    asked = request("GET", f"{path}?wait=600", "reader-token", close=False)
    await _held([asked] * STREAMS, address, ready)


async def bodies(address: Address, path: str, ready: Callable[[], None]) -> None:
    asked = request("POST", "/api/v1/workflows/validate", "reader-token", large("flood"))
    await _held([asked] * BODIES, address, ready)


async def _held(requests: list[bytes], address: Address, ready: Callable[[], None]) -> None:
    """Each of these on a connection of its own, again and again, whatever is answered."""

    async def one(data: bytes) -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(*address)
                try:
                    writer.write(data)
                    while await reader.read(65536):
                        pass
                finally:
                    writer.close()
            await asyncio.sleep(AGAIN_SECONDS)

    ready()
    tasks = [asyncio.create_task(one(data)) for data in requests]
    await asyncio.gather(*tasks)


FLOODS: dict[str, Callable[[Address, str, Callable[[], None]], Awaitable[None]]] = {
    "idle": idle,
    "streams": streams,
    "waits": waits,
    "bodies": bodies,
}
MEANS = {
    "idle": f"{IDLE} connections that ask for nothing, without a token",
    "streams": f"{STREAMS} event streams with a token that may only read",
    "waits": f"{STREAMS} times ?wait=600 with such a token",
    "bodies": f"{BODIES} large bodies to /validate, again and again, with such a token",
}


# ── what others notice of it ─────────────────────────────────────────────────────────────


async def asked(address: Address, data: bytes) -> tuple[int, float]:
    """The status of the answer, 0 if there was none, and how long it took from connecting on."""
    began = time.monotonic()
    status = 0
    with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        async with asyncio.timeout(GIVE_UP_SECONDS):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(data)
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split()[1])
                while await reader.read(65536):
                    pass
            finally:
                writer.close()
    return status, time.monotonic() - began


async def measured(address: Address, seconds: float) -> dict[str, list[tuple[int, float]]]:
    numbers = iter(range(1 << 30))
    middle = large("registered", 40_000)
    makes: dict[str, Callable[[], bytes]] = {
        "trigger": lambda: request("POST", "/api/v1/workflows/quick/runs", "writer-token", b"{}"),
        "alive": lambda: request("GET", "/health/live"),
        "small body": lambda: request(
            "POST", "/api/v1/workflows", "writer-token",
            json.dumps(flow(f"small-{next(numbers)}")).encode(),
        ),
        "large body": lambda: request(
            "POST", "/api/v1/workflows", "writer-token",
            middle.replace(b'"registered"', b'"large-%d"' % next(numbers)),
        ),
    }  # fmt: skip
    found: dict[str, list[tuple[int, float]]] = {what: [] for what in makes}
    end = time.monotonic() + seconds

    async def again(what: str) -> None:
        while time.monotonic() < end or not found[what]:
            found[what].append(await asked(address, makes[what]()))
            await asyncio.sleep(PAUSE[what])

    await asyncio.gather(*map(again, makes))
    return found


def reported(found: dict[str, list[tuple[int, float]]], say: Callable[[str], None]) -> bool:
    """Prints the figures; whether all of them are as promised."""
    fine = True
    for what, answers in found.items():
        times = sorted(seconds for _, seconds in answers)
        wrong = Counter(status for status, _ in answers if not 200 <= status < 300)
        late = times[min(len(times) - 1, int(0.99 * len(times)))]
        if len(times) >= 50:  # of fewer, none may be late
            late = min(late, times[-2])
        good = late <= LIMITS[what] and not wrong
        fine = fine and good
        refused = "".join(f"  {many} × {status or 'no answer'}" for status, many in wrong.items())
        say(
            f"    {what:10} {len(times):4} ×  p50 {times[len(times) // 2] * 1000:6.0f} ms  worst "
            f"{times[-1] * 1000:6.0f} ms  of {LIMITS[what] * 1000:g} ms{refused}"
            f"{'' if good else '  MISSED'}"
        )
    return fine


@contextmanager
def embedded(folder: Path) -> Iterator[Server]:
    server = Server(folder, DOVETAIL_TOKENS=TOKENS)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def redis(folder: Path) -> Iterator[Server]:
    with RedisServer() as store:
        server = Server(
            folder, "--with", "orchestrator,worker", **on(store.url, DOVETAIL_TOKENS=TOKENS)
        )
        try:
            yield server
        finally:
            server.close()


SETUPS = {"embedded": embedded, "redis": redis}


def run(say: Callable[[str], None], seconds: float = SECONDS) -> int:
    fine = True
    for name, setup in SETUPS.items():
        folder = tempfile.TemporaryDirectory(prefix="dovetail-floods-")
        with folder, setup(Path(folder.name)) as server:
            say(f"\n{name}")
            fine = _all(server, say, seconds) and fine
    say("\nall as promised" if fine else "\nsomething was MISSED")
    return 0 if fine else 1


def _all(server: Server, say: Callable[[str], None], seconds: float) -> bool:
    api = server.client(authorization="Bearer writer-token")
    api.register(flow("quick"))
    api.register(flow("endless", node("a", "until", config={"file": "never"})))
    path = "/api/v1/runs/" + api.post("/workflows/endless/runs")["run_id"]
    parts = urlsplit(server.url)
    address = (parts.hostname or "", parts.port or 0)
    say("  no other")
    fine = reported(asyncio.run(measured(address, seconds / 3)), say)
    start = multiprocessing.get_context("spawn")
    for kind in FLOODS:
        ready = start.Event()
        flooding = start.Process(target=flood, args=(kind, address, path, ready), daemon=True)
        flooding.start()
        try:
            if not ready.wait(RISE_SECONDS):
                say(f"  the flood of {kind} did not rise within {RISE_SECONDS:g} s")
                return False
            say(f"  {MEANS[kind]}, while they come")
            fine = reported(asyncio.run(measured(address, SETTLE_SECONDS)), say) and fine
            say(f"  {MEANS[kind]}")
            fine = reported(asyncio.run(measured(address, seconds)), say) and fine
        finally:
            flooding.kill()
            flooding.join()
        if server.process.poll() is not None:
            say(f"  the server died:\n{server.log.read_text()}")
            return False
    return fine
