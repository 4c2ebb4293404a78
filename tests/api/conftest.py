"""A real server and a client for it. Every answer is held against the OpenAPI document.

The suite asks a server, not an engine: a set-up is one line in `SETUPS`, and every test with
`api` then runs on it, too.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import jsonschema_rs
import pytest
from starlette.routing import compile_path

from ..log_text import without_attempts
from ..servers.postgres_server import PostgresServer
from ..servers.redis_server import RedisServer

SCRIPT = str(Path(sys.executable).with_name("dovetail"))
SECONDS = 30.0

HANDLERS = '''
import asyncio, time
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from uuid import UUID
from dovetail import PermanentError, handler

@handler
async def until(config, ctx):
    """Waits for a file."""
    Path(f"{config['file']}.started").touch()
    while not Path(config["file"]).exists():
        await asyncio.sleep(0.02)
    return "seen"

@handler
async def talks(config, ctx):
    """Prints, waits for a file, logs and fails."""
    print("begun, attempt", ctx.attempt)
    await until(config, ctx)
    ctx.log.warning("there it is", extra={"file": 1})
    raise PermanentError("said enough")

@handler
async def needs(config, ctx):
    """Fails until there is a file."""
    if not Path(config["file"]).exists():
        raise PermanentError(f"there is no {config['file']}")
    return "found"

@handler
def filled(config, ctx):
    """An output of so many bytes."""
    return "x" * (config["bytes"] - 2)

@dataclass
class Rich:
    at: datetime
    sizes: set
    id: UUID = UUID(int=1)

@handler
def rich(config, ctx):
    """More than JSON has."""
    found = Rich(datetime(2026, 1, 2, tzinfo=timezone.utc), {2, 1})
    return {"found": found, "price": Decimal("1.50")}

@handler
def clings(config, ctx):
    """Does not hear that it should stop."""
    Path("clings.started").touch()
    time.sleep(config["seconds"])
'''


def environment(**more: str) -> dict[str, str]:
    """Of a user who has configured nothing."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")} | more


class Server:
    """`dovetail serve` as a process, in a folder of its own."""

    redis_url = ""
    """Of one that has a Redis of its own."""

    def __init__(self, folder: Path, *args: str, **env: str) -> None:
        self.folder = folder
        (folder / "mine.py").write_text(HANDLERS)
        command = [SCRIPT, "serve", "--port", "0", "--handlers", "mine.py", *args]
        self.log = folder / f"log-{uuid4().hex[:6]}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(**env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.validators: dict[str, Any] = {}
        self._clients: dict[tuple[tuple[str, str], ...], Api] = {}
        self._token = env.get("DOVETAIL_TOKENS", "").split(",")[0]
        self.said = self._first_line()
        assert self.said.startswith("dovetail serves http://"), self.said + self.log.read_text()
        self.url = self.said.split()[-1]

    def _first_line(self) -> str:
        """A reader in a thread: a server that says nothing must not hang the test."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self.process.stdout is not None
        read = self.process.stdout.readline
        threading.Thread(target=lambda: lines.put(read()), daemon=True).start()
        return lines.get(timeout=SECONDS)

    def client(self, **headers: str) -> Api:
        """One for each set of headers; closed with the server."""
        key = tuple(headers.items())
        if key not in self._clients:
            self._clients[key] = Api(self, headers)
        return self._clients[key]

    @cached_property
    def document(self) -> dict[str, Any]:
        api = self.client(authorization=f"Bearer {self._token}") if self._token else self.client()
        answer = api.http.get("/openapi.json")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(SECONDS)
        finally:
            self.close()
        assert "Traceback" not in without_attempts(self.log.read_text()), self.log.read_text()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for client in self._clients.values():
            client.http.close()


class Api:
    """Calls below `/api/v1`, or below `/` for a path that begins with `//`."""

    def __init__(self, server: Server, headers: dict[str, str]) -> None:
        self.server = server
        self.http = httpx2.Client(
            base_url=server.url, headers=headers, timeout=SECONDS, trust_env=False
        )

    def __call__(self, method: str, path: str, **options: Any) -> httpx2.Response:
        path = path[1:] if path.startswith("//") else f"/api/v1{path}"
        answer = self.http.request(method, path, **options)
        self.check(answer)
        return answer

    def get(self, path: str, **options: Any) -> Any:
        answer = self("GET", path, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, status: int = 202, **options: Any) -> Any:
        if body is not None:
            options["json"] = body
        answer = self("POST", path, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    def check(self, answer: httpx2.Response) -> None:
        """It is what the document says; an error is a problem, and never one of ours."""
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        assert answer.headers["x-request-id"]
        kind = answer.headers.get("content-type", "")
        request = answer.request
        if request.method == "HEAD":
            assert answer.content == b""
            return
        schema = self._schema(request.method, request.url.path, answer.status_code, kind)
        if answer.status_code >= 400 and kind != "application/json":
            self._check_problem(answer)
        elif schema is not None:
            self.validate(schema, answer.json())

    def _check_problem(self, answer: httpx2.Response) -> None:
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == answer.status_code
        assert problem["type"].startswith("urn:dovetail:problem:")
        assert problem["request_id"] == answer.headers["x-request-id"]
        self.validate({"$ref": "#/components/schemas/ProblemDetails"}, problem)
        if answer.status_code in (429, 503):
            assert int(answer.headers["retry-after"]) > 0

    def _schema(self, method: str, path: str, status: int, kind: str) -> Any:
        if "json" not in kind:
            return None
        for template, calls in self.server.document["paths"].items():
            if method.lower() in calls and compile_path(template)[0].match(path):
                responses = calls[method.lower()]["responses"]
                assert str(status) in responses or status == 405, (method, template, status)
                reported = responses[str(status)]
                if "$ref" in reported:
                    return None  # a problem, which is held against its own schema
                return reported["content"][kind]["schema"]
        return None

    def validate(self, schema: Any, value: Any) -> None:
        known = self.server.validators
        key = json.dumps(schema)
        if key not in known:
            whole = {**schema, "components": self.server.document["components"]}
            known[key] = jsonschema_rs.validator_for(whole)
        known[key].validate(value)

    # ── what most tests need ─────────────────────────────────────────────────────────────

    def register(self, definition: dict[str, Any]) -> str:
        answer = self("POST", "/workflows", json=definition)
        assert answer.status_code in (200, 201), answer.text
        return str(definition["name"])

    def finished(self, run_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self.get(f"/runs/{run_id}?wait={SECONDS}")
        assert run["finished_at"] is not None, run["status"]
        return run


@contextmanager
def embedded(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    assert server.stop() == 0


def on(redis_url: str, **more: str) -> dict[str, str]:
    """Settings of a set-up on Redis whose workers are heard of soon."""
    return {"DOVETAIL_REDIS_URL": redis_url, "DOVETAIL_HEARTBEAT_INTERVAL": "0.2", **more}


@contextmanager
def on_redis(folder: Path) -> Iterator[Server]:
    """Every service in one process, over a Redis that no other test flushes."""
    with RedisServer() as store:
        server = Server(folder, "--with", "orchestrator,worker", **on(store.url))
        server.redis_url = store.url
        yield server
        assert server.stop() == 0


@contextmanager
def with_archive(folder: Path) -> Iterator[Server]:
    """The same with a PostgreSQL beside it."""
    with RedisServer() as store, PostgresServer() as archive:
        env = on(store.url, DOVETAIL_DATABASE_URL=archive.new_database())
        server = Server(folder, "--with", "orchestrator,worker", **env)
        server.redis_url = store.url
        yield server
        assert server.stop() == 0


SETUPS: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "embedded": embedded,
    "redis": on_redis,
    "archive": with_archive,
}


@pytest.fixture(scope="session", params=SETUPS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with SETUPS[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.client()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Servers of a test's own, all in one folder."""
    started: list[Server] = []

    def begin(*args: str, **env: str) -> Server:
        started.append(Server(tmp_path, *args, **env))
        return started[-1]

    yield begin
    for one in started:
        one.close()


@pytest.fixture
def name() -> str:
    """A workflow that no other test has."""
    return f"w-{uuid4().hex[:12]}"


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)
    return found


def node(id_: str, handler: str = "output", *dependencies: str, **more: Any) -> dict[str, Any]:
    config = more.pop("config", {"value": id_})
    return {
        "id": id_,
        "handler": handler,
        "dependencies": list(dependencies),
        "config": config,
        **more,
    }


def flow(name: str, *nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "nodes": list(nodes) or [node("a"), node("b", "output", "a")], **more}
