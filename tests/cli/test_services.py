"""`dovetail orchestrator` and `dovetail worker` as processes: how they start, work and end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from dovetail.cli import services as cli_services
from dovetail.cli.services import fast_loop, running_service
from dovetail.config import Settings, load_settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.errors import StoreError
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus, RunStatus
from dovetail.core.transitions import Submit
from dovetail.handlers.builtin import builtin_registry
from dovetail.redis_client.pipelined import RedisError
from dovetail.stores.redis.workers import WorkerRegistry
from dovetail.wiring import distributed, health
from dovetail.wiring.distributed import ServiceParts, connected

from ..servers.redis_server import RedisServer
from ..servers.server import free_port
from .conftest import HANDLERS, SCRIPT, SECONDS, Shell, environment

T = TypeVar("T")

AT_ONCE_SECONDS = 15.0
"""One and a half, on a machine that has nothing else to do."""
LEASE_SECONDS = 60.0
"""Longer than any test: whatever goes on does so because it was handed back."""


class Services:
    """Real processes in one folder, on one Redis."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self._all: list[subprocess.Popen[bytes]] = []
        (folder / "mine.py").write_text(HANDLERS)

    def start(self, *args: str, until: str = "started", **env: str) -> subprocess.Popen[bytes]:
        env = {"DOVETAIL_REDIS_URL": self.url, "DOVETAIL_LEASE_SECONDS": f"{LEASE_SECONDS}", **env}
        log = self.folder / f"log-{len(self._all)}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [SCRIPT, *args],
                cwd=self.folder,
                env=environment(**env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        self._all.append(process)
        wait_for(lambda: until in log.read_text(), f"'{until}' of {args}")
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"log-{self._all.index(process)}").read_text()

    def end(self, *processes: subprocess.Popen[bytes], by: int = signal.SIGTERM) -> float:
        """How long it took; it was an orderly end."""
        before = time.monotonic()
        for process in processes:
            process.send_signal(by)
        for process in processes:
            assert process.wait(SECONDS) == 0, self.log(process)
            assert "Traceback" not in self.log(process)
        return time.monotonic() - before

    def executions(self) -> list[str]:
        path = self.folder / "executions"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()

    def ask(self, question: Callable[[ServiceParts], Awaitable[T]]) -> T:
        """Asked of the runs themselves, past every service."""

        async def answer() -> T:
            settings = Settings(redis_url=self.url, lease_seconds=LEASE_SECONDS)
            async with connected(settings) as parts, asyncio.timeout(SECONDS):
                return await question(parts)

        return asyncio.run(answer())

    def submit(self, run_id: str, *nodes: dict[str, Any]) -> None:
        workflow = Workflow.model_validate({"name": "f", "nodes": list(nodes)})
        submit = Submit(run_id, build_graph(workflow, {}), {})
        self.ask(lambda parts: parts.orchestrator.submit(submit))

    def ended(self, run_id: str) -> RunState:
        return self.ask(lambda parts: parts.store.wait(run_id))

    def workers(self) -> list[dict[str, Any]]:
        return self.ask(lambda parts: WorkerRegistry(parts.pipe).workers())


@pytest.fixture
def services(tmp_path: Path, redis_url: str) -> Iterator[Services]:
    found = Services(tmp_path, redis_url)
    yield found
    found.close()


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)


def waits_for(file: str) -> dict[str, Any]:
    return {"id": "a", "handler": "until", "config": {"file": file}}


# ── starting ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("service", ["orchestrator", "worker"])
def test_a_service_without_redis_names_the_missing_setting(
    command: Callable[..., Any], service: str
) -> None:
    done = command(service)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: dovetail {service} is a service of a set-up on Redis: ")
    assert "DOVETAIL_REDIS_URL" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        (["orchestrator"], {"DOVETAIL_TRANSPORT": "kafka"}, 2, "DOVETAIL_TRANSPORT"),
        (["worker", "--handlers", "nobody.py"], {}, 2, "nobody.py"),
        (["worker", "--concurrency", "0"], {}, 2, "--concurrency"),
        (["worker"], {"DOVETAIL_LEASE_SECONDS": "soon"}, 2, "DOVETAIL_LEASE_SECONDS"),
    ],
)
def test_a_service_that_cannot_start_says_why(
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    env: dict[str, str],
    code: int,
    said: str,
) -> None:
    for name, value in {"DOVETAIL_REDIS_URL": "redis://localhost", **env}.items():
        monkeypatch.setenv(name, value)
    done = command(*words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


def test_a_wrong_password_fails_without_waiting(shell: Shell, redis_url: str) -> None:
    wrong = redis_url.replace("redis://", "redis://:secret@")
    done = shell("worker", DOVETAIL_REDIS_URL=wrong)
    assert done.code == 1
    assert "refused AUTH" in done.err
    assert "waiting" not in done.err
    assert "secret" not in done.err


def test_without_the_redis_client_the_service_names_the_missing_package(shell: Shell) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'hiredis'\", name='hiredis')"
    (shell.directory / "hiredis.py").write_text(missing)
    env = {"DOVETAIL_REDIS_URL": "redis://localhost", "PYTHONPATH": str(shell.directory)}
    done = shell("orchestrator", **env)
    assert (done.code, done.out) == (2, "")
    assert "pip install 'dovetail[redis]'" in done.err


def test_a_service_may_start_before_redis(services: Services) -> None:
    with RedisServer() as late:
        late.kill()
        services.url = late.url
        worker = services.start("worker", until="waiting for Redis")
        late.start()
        wait_for(lambda: "started" in services.log(worker), "it found its Redis")
        services.end(worker)


def test_a_service_that_waits_for_redis_can_be_stopped(services: Services) -> None:
    services.url = f"redis://127.0.0.1:{free_port()}/0"
    orchestrator = services.start("orchestrator", until="waiting for Redis")
    services.end(orchestrator)
    assert "started" not in services.log(orchestrator)


async def test_a_redis_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "START_SECONDS", 0.2)
    monkeypatch.setattr(health, "RETRY_SECONDS", 0.05)
    port = free_port()
    nowhere = load_settings(environ={}, redis_url=f"redis://me:geheim@127.0.0.1:{port}/0")
    reported: list[str] = []
    with pytest.raises(RedisError, match="start it, or correct DOVETAIL_REDIS_URL") as failed:
        await health.await_redis(nowhere, reported.append)
    assert len(reported) == 1
    for words in (*reported, str(failed.value)):
        assert f", at 127.0.0.1:{port}" in words
        assert "geheim" not in words


def test_uvloop_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("uvloop", "asyncio"):
        loop = fast_loop()
        assert type(loop).__module__.startswith(module)
        loop.close()
        monkeypatch.setitem(sys.modules, "uvloop", None)


async def test_of_concurrent_loops_the_first_error_is_reported() -> None:
    async def fails() -> None:
        raise StoreError("gone")

    async def service(asked: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            await asked.wait()

    with pytest.raises(StoreError, match="gone"):
        async with running_service(service) as working:
            await asyncio.wait([working])


async def test_a_worker_that_lost_redis_for_long_starts_afresh(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = asyncio.Event()
    begun: list[int] = []

    @asynccontextmanager
    async def working(*_: Any) -> AsyncIterator[Any]:
        begun.append(1)
        crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if len(begun) == 1:
            crashed.set_exception(StoreError("Redis did not come back"))
        else:
            asked.set()
        yield SimpleNamespace(crashed=crashed, holding=list)

    monkeypatch.setattr(distributed, "working", working)
    monkeypatch.setattr(cli_services, "RESTART_SECONDS", 0.01)
    settings = load_settings(environ={}, redis_url="redis://somewhere")
    await cli_services.worker_service(settings, builtin_registry(settings))(asked)
    assert len(begun) == 2
    assert "Redis did not come back; beginning anew" in caplog.text


# ── working ──────────────────────────────────────────────────────────────────────────────


def test_one_process_of_each_service_runs_a_workflow(services: Services) -> None:
    worker = services.start("worker", "--concurrency", "3", "--handlers", "mine.py")
    orchestrator = services.start("orchestrator", DOVETAIL_LOG_FORMAT="json")
    services.submit(
        "r",
        {"id": "a", "handler": "greet", "config": {"name": "Ada"}},
        {"id": "b", "handler": "output", "dependencies": ["a"], "config": {"t": "{{ a.output }}"}},
    )
    run = services.ended("r")
    assert run.status is RunStatus.COMPLETED
    assert run.node("b").output == {"t": "hello Ada"}
    (alive,) = services.workers()
    assert (alive["pid"], alive["concurrency"], alive["alive"]) == (worker.pid, 3, True)
    assert {"greet", "output"} <= set(alive["handlers"])
    assert run.node("a").worker == alive["worker_id"]
    assert services.end(worker, by=signal.SIGTERM) < AT_ONCE_SECONDS
    assert services.end(orchestrator, by=signal.SIGINT) < AT_ONCE_SECONDS
    assert services.workers() == [], "it has left, no process need look for it"
    warned, *said = services.log(worker).splitlines()
    assert "appendfsync always" in warned, "there is no PostgreSQL"
    assert [line.partition(",")[0].partition(" ")[2] for line in said] == [
        "dovetail.worker: started",
        "dovetail.worker: stopped",
    ]
    lines = [json.loads(line) for line in services.log(orchestrator).splitlines()[1:]]
    assert [line["logger"] for line in lines] == ["dovetail.orchestrator"] * 2
    assert str(orchestrator.pid) in lines[0]["message"]


# ── ending ───────────────────────────────────────────────────────────────────────────────


def test_running_nodes_may_finish_before_a_worker_ends(services: Services) -> None:
    services.start("orchestrator")
    worker = services.start("worker", "--handlers", "mine.py")
    services.submit("r", waits_for("go"), {"id": "b", "handler": "output", "dependencies": ["a"]})
    wait_for(services.executions, "the node started")
    worker.send_signal(signal.SIGTERM)
    wait_for(lambda: "1 node may finish within 30 s" in services.log(worker), "it drains")
    assert worker.poll() is None
    (services.folder / "go").touch()
    assert worker.wait(SECONDS) == 0
    run = services.ask(lambda parts: parts.store.load("r"))
    assert run.node("b").status is not NodeStatus.RUNNING  # it takes no more work
    services.start("worker", "--handlers", "mine.py")
    assert services.ended("r").node("a").attempt == 1
    assert services.executions() == ["a 1.1"]


def test_a_node_that_outlasts_the_drain_is_handed_back_immediately(services: Services) -> None:
    """The lease is a minute; the next worker has it within seconds all the same."""
    services.start("orchestrator")
    worker = services.start("worker", "--handlers", "mine.py", DOVETAIL_DRAIN_SECONDS="0.2")
    services.submit("r", waits_for("go"))
    wait_for(services.executions, "the node started")
    assert services.end(worker) < AT_ONCE_SECONDS
    handed_back = time.monotonic()
    (services.folder / "go").touch()
    services.start("worker", "--handlers", "mine.py")
    run = services.ended("r")
    assert (run.status, run.node("a").attempt) == (RunStatus.COMPLETED, 2)
    assert time.monotonic() - handed_back < LEASE_SECONDS / 2
    assert services.executions() == ["a 1.1", "a 1.2"]


def test_a_second_signal_ends_a_worker_immediately(services: Services) -> None:
    services.start("orchestrator")
    worker = services.start("worker", "--handlers", "mine.py")
    services.submit("r", waits_for("never"))
    wait_for(services.executions, "the node started")
    worker.send_signal(signal.SIGINT)
    wait_for(lambda: "may finish" in services.log(worker), "it drains")
    assert services.end(worker, by=signal.SIGINT) < AT_ONCE_SECONDS
    assert "without waiting" in services.log(worker)


def test_a_service_survives_a_restart_of_redis_and_ends_without_redis(
    services: Services,
) -> None:
    with RedisServer() as redis:
        services.url = redis.url
        worker = services.start("worker", "--handlers", "mine.py")
        orchestrator = services.start("orchestrator")
        services.submit(
            "r", waits_for("go"), {"id": "b", "handler": "output", "dependencies": ["a"]}
        )
        wait_for(services.executions, "the node started")
        redis.kill()
        redis.start()
        (services.folder / "go").touch()
        run = services.ended("r")
        assert (run.status, run.node("a").attempt) == (RunStatus.COMPLETED, 1)
        redis.kill()
        took = services.end(worker, orchestrator)
        assert took < 2 * AT_ONCE_SECONDS, "no process waits for one that is away"
