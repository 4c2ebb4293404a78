"""A server on Redis, with workers elsewhere or inside: what it says of them, and when one is away.

That it answers as an embedded one does is shown by every other file here, over the same set-up.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..servers.postgres_server import PostgresServer
from ..servers.redis_server import RedisServer
from ..servers.server import free_port
from .conftest import SCRIPT, SECONDS, Server, environment, flow, node, on, wait_for
from .test_events import frames
from .test_serve import waiting_run

Start = Callable[..., Server]
EVERY = ("--with", "orchestrator,worker")
AT_ONCE_SECONDS = 15.0
"""A second and a half, on a machine that has nothing else to do."""


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("services")


@pytest.fixture(scope="module")
def alone(redis: RedisServer, folder: Path) -> Iterator[Server]:
    """A server, and no other service until a test asks for `others`."""
    server = Server(folder, **on(redis.url, DOVETAIL_MAX_BACKLOG="3"))
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def others(redis: RedisServer, folder: Path, alone: Server) -> Iterator[Any]:
    """An orchestrator, and a worker that knows a handler of which the server has not heard."""
    (folder / "theirs.py").write_text(
        "from dovetail import handler\n@handler\nasync def theirs(config, ctx): return 1\n"
    )
    started = []
    for words in (["orchestrator"], ["worker", "--handlers", "mine.py", "--handlers", "theirs.py"]):
        env = environment(**on(redis.url))
        log = folder / words[0]
        with log.open("wb") as stream:
            process = subprocess.Popen([SCRIPT, *words], cwd=folder, env=env, stderr=stream)
        started.append(process)
        wait_for(lambda log=log: "started" in log.read_text(), f"{words} started")
    yield started[-1]
    for process in started:
        process.kill()
        process.wait()


def alive(server: Server) -> int:
    counts = server.client()("GET", "//health/workers")
    assert counts.status_code == (200 if counts.json()["alive"] else 503)
    return int(counts.json()["alive"])


# ── services on their own ────────────────────────────────────────────────────────────────


def theirs(name: str) -> dict[str, Any]:
    return flow(name, node("a", "theirs"))


def refusal(server: Server, name: str) -> Any:
    """The answer to one more run, if it is that too much waits."""
    answer = server.client()("POST", f"/workflows/{name}/runs")
    return answer if answer.status_code == 429 else None


def test_no_trigger_is_accepted_while_too_many_nodes_wait(alone: Server, name: str) -> None:
    api = alone.client()
    assert alive(alone) == 0
    assert api.get("/workers")["items"] == []
    assert api.get("//health/ready") == {"status": "ok"}, "it can be given work all the same"
    assert api("POST", "/workflows", json=theirs(f"{name}-theirs")).status_code == 422
    api.register(flow(name))
    refused = wait_for(lambda: refusal(alone, name), "no worker runs, so what waits piles up")
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["type"] == "urn:dovetail:problem:overloaded"
    assert "DOVETAIL_MAX_BACKLOG is 3" in refused.json()["detail"]
    batch = {"items": [{}]}
    assert api("POST", f"/workflows/{name}/batches", json=batch).status_code == 429
    assert api("POST", "/runs", json={"definition": flow(name)}).status_code == 429
    assert len(api.get(f"/runs?workflow={name}")["items"]) > 3, "a caller that reads is served"


def test_a_run_passes_through_all_three_services(
    alone: Server, others: subprocess.Popen[bytes], name: str
) -> None:
    api = alone.client()
    wait_for(lambda: alive(alone) == 1, "the worker was heard of")
    (reported,) = api.get("/workers")["items"]
    assert reported["pid"] == others.pid
    api.register(flow(name))
    wait_for(lambda: not refusal(alone, name), "what waited was worked off")
    run_id = waiting_run(alone, f"{name}-waits")
    accept = {"accept": "text/event-stream"}
    with api.http.stream("GET", f"/api/v1/runs/{run_id}/events", headers=accept) as answer:
        events = frames(answer)
        types = [next(events)[1]["type"] for _ in range(4)]
        assert types[-1] == "node.started"
        (alone.folder / "go").touch()
        types += [event["type"] for _, event in events]
    assert types[-1] == "run.completed"
    run = api.finished(run_id)
    assert {n["worker"] for n in run["nodes"]} == {reported["worker_id"]}


def test_a_handler_is_known_because_a_worker_announced_it(
    alone: Server, others: subprocess.Popen[bytes], name: str
) -> None:
    api = alone.client()
    accepted = lambda: api("POST", "/workflows", json=theirs(name)).status_code == 201  # noqa: E731
    wait_for(accepted, "it was heard of")
    others.send_signal(signal.SIGTERM)
    assert others.wait(SECONDS) == 0
    assert alive(alone) == 0
    assert api("POST", "/workflows", json=theirs(name)).status_code == 200, "known for a day"


# ── every service in one process ─────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def all_in_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, RedisServer]]:
    with RedisServer() as store:
        server = Server(tmp_path_factory.mktemp("all"), *EVERY, **on(store.url))
        yield server, store
        before = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - before < AT_ONCE_SECONDS


def test_an_unreadable_message_becomes_a_dead_letter(
    all_in_one: tuple[Server, RedisServer],
) -> None:
    server, store = all_in_one
    api = server.client()
    store.ask("XADD", "tasks:output", "*", "run_id", "x", "config", "no JSON")
    store.ask("XADD", "wf:stream:results", "*", "hello", "there")
    wait_for(lambda: len(api.get("/dead-letters")["items"]) == 2, "both were refused")
    letters = {letter["stream"]: letter for letter in api.get("/dead-letters")["items"]}
    assert "it has no node_id" in letters["tasks:output"]["reason"]
    assert letters["wf:stream:results"]["fields"] == {"hello": "there"}
    assert api.finished(api.post("/runs", {"definition": flow("after")})["run_id"])


# ── Redis is away ────────────────────────────────────────────────────────────────────────


def test_every_request_is_503_while_redis_is_down_and_works_again_afterwards(
    all_in_one: tuple[Server, RedisServer], name: str
) -> None:
    server, redis = all_in_one
    api = server.client()
    run_id = waiting_run(server, name)
    redis.kill()
    try:
        before = time.monotonic()
        for method, path in (
            ("POST", f"/workflows/{name}/runs"),
            ("GET", f"/runs/{run_id}?wait=60"),
            ("GET", "/workers"),
            ("GET", "//health/ready"),
        ):
            answer = api(method, path)
            assert answer.status_code == 503, path
            assert answer.json()["type"] == "urn:dovetail:problem:store_error"
            assert int(answer.headers["retry-after"]) > 0
        assert time.monotonic() - before < 4 * 10
        assert api.get("//health/live") == {"status": "ok"}
        counted = api("GET", "//metrics")
        assert counted.status_code == 200
        assert "dovetail_runs_total{" in counted.text
        assert "dovetail_queue_depth{" not in counted.text, "no service can be asked"
    finally:
        redis.start()
    (server.folder / "go").touch()
    wait_for(lambda: api("GET", "//health/ready").status_code == 200, "Redis is back")
    run = api.finished(run_id)
    assert run["status"] == "COMPLETED"
    assert api.finished(api.post(f"/workflows/{name}/runs")["run_id"])["status"] == "COMPLETED"


def test_a_hanging_redis_is_503_within_seconds(all_in_one: tuple[Server, RedisServer]) -> None:
    server, redis = all_in_one
    api = server.client()
    api.get("/runs")
    redis.pause()
    try:
        before = time.monotonic()
        wait_for(lambda: api("GET", "//health/ready").status_code == 503, "it hangs")
        assert time.monotonic() - before < 25
    finally:
        redis.resume()
    wait_for(lambda: api("GET", "//health/ready").status_code == 200, "it goes on")


# ── PostgreSQL is away ───────────────────────────────────────────────────────────────────


def test_while_postgresql_is_down_runs_continue_and_new_runs_are_refused(
    start: Start, redis_url: str, name: str
) -> None:
    with PostgresServer() as archive:
        env = on(redis_url, DOVETAIL_DATABASE_URL=archive.new_database())
        server = start(*EVERY, **env)
        api = server.client()
        run_id = waiting_run(server, name)
        archive.stop()
        answer = api("POST", f"/workflows/{name}/runs")
        assert answer.status_code == 503
        assert answer.json()["type"] == "urn:dovetail:problem:archive_down"
        assert int(answer.headers["retry-after"]) > 0
        assert "PostgreSQL" not in answer.text, "where it is, is no business of a client"
        assert api("GET", "//health/ready").status_code == 503
        (server.folder / "go").touch()
        run = api.get(f"/runs/{run_id}?wait={SECONDS}")
        assert run["status"] == "COMPLETED"
        archive.start()
        wait_for(lambda: api("GET", "//health/ready").status_code == 200, "it is back")
        assert api.finished(api.post(f"/workflows/{name}/runs")["run_id"])
        assert server.stop() == 0


# ── starting and ending ──────────────────────────────────────────────────────────────────


def test_a_server_that_waits_for_redis_can_be_stopped(tmp_path: Path) -> None:
    env = environment(DOVETAIL_REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")
    command = [SCRIPT, "serve", "--port", "0"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
    reported = tmp_path / "log"
    wait_for(lambda: "waiting for Redis" in reported.read_text(), "it waits")
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0
    assert "serves" not in reported.read_text()


def test_a_stopping_server_hands_its_running_nodes_to_another_server(
    start: Start, redis_url: str, name: str
) -> None:
    """To another server: its lease would be a minute."""
    env = on(redis_url, DOVETAIL_DRAIN_SECONDS="0.2", DOVETAIL_LEASE_SECONDS="60")
    first = start(*EVERY, **env)
    run_id = waiting_run(first, name)
    second = start(*EVERY, **env)
    before = time.monotonic()
    assert first.stop() == 0
    (first.folder / "go").touch()
    run = second.client().finished(run_id)
    assert time.monotonic() - before < 40
    assert [n["attempt"] for n in run["nodes"]] == [2, 1]
