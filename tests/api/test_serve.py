"""`dovetail serve` as a process: how it starts, what it takes over, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from dovetail.api.server import CannotListen, addresses_of, listen, url_of

from ..log_text import without_attempts
from ..servers.redis_server import RedisServer
from .conftest import SCRIPT, SECONDS, Server, environment, flow, node, on, wait_for
from .test_events import frames

Start = Callable[..., Server]
AT_ONCE_SECONDS = 12.0
"""On a busy machine; far less than a server drains, or a client here waits, if nothing is said."""


def refused(folder: Path, *args: str, **env: str) -> tuple[int, str]:
    """The exit code and the words of a server that does not start."""
    done = subprocess.run(
        [SCRIPT, "serve", *args],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (folder / ".dovetail").exists()
    return done.returncode, done.stderr


def waiting_run(server: Server, name: str = "waits") -> str:
    """A run whose first node runs until there is a file `go`."""
    api = server.client()
    api.register(flow(name, node("a", "until", config={"file": "go"}), node("b", "output", "a")))
    run_id = str(api.post(f"/workflows/{name}/runs")["run_id"])
    wait_for((server.folder / "go.started").exists, "the node started")
    return run_id


# ── starting ─────────────────────────────────────────────────────────────────────────────


def test_one_line_names_the_address_of_the_server(start: Start) -> None:
    server = start()
    assert server.said == f"dovetail serves {server.url}\n"
    assert urlsplit(server.url).hostname == "127.0.0.1"
    assert server.client().get("//health/live") == {"status": "ok"}
    assert server.client().get("//health/ready") == {"status": "ok"}


def test_localhost_is_every_loopback_address(start: Start) -> None:
    server = start("--host", "localhost")
    port = urlsplit(server.url).port
    for address in addresses_of("localhost"):
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError:
            assert ":" in address, "a machine may be without IPv6, not without IPv4"


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, words = refused(tmp_path, "--port", port)
    assert code == 1
    assert words == f"error: port {port} of 127.0.0.1 is in use; choose another with --port\n"


@pytest.mark.parametrize(
    ("args", "env", "code", "words"),
    [
        (["--host", "0.0.0.0"], {}, 2, "DOVETAIL_TOKENS"),
        (["--host", "::"], {}, 2, "without a token"),
        (["--host", "no.such.invalid"], {}, 1, "no such address"),
        (["--with", "worker"], {}, 2, "Redis"),
        (["--with", "orchestrator,butler"], {}, 2, "no service 'butler'"),
        (["--with", ""], {}, 2, "no service ''"),
        (["--with", "butler"], {"DOVETAIL_REDIS_URL": "redis://h"}, 2, "no service 'butler'"),
        ([], {"DOVETAIL_TOKENS": ":read"}, 2, "a token is empty"),
        (["--handlers", "nobody.py"], {}, 2, "nobody.py"),
    ],
)
def test_an_impossible_start_is_reported_in_one_line(
    tmp_path: Path, args: list[str], env: dict[str, str], code: int, words: str
) -> None:
    found = refused(tmp_path, "--port", "0", *args, **env)
    assert found[0] == code
    assert words in found[1]


def test_with_a_token_the_server_listens_on_all_addresses(start: Start) -> None:
    server = start("--host", "0.0.0.0", DOVETAIL_TOKENS="t")
    port = urlsplit(server.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"GET /api/v1/runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_an_unavailable_address_is_reported() -> None:
    with pytest.raises(CannotListen, match="no address of this machine"):
        listen(["192.0.2.1"], 0)
    bound = listen(["127.0.0.1"], 0)
    try:
        assert url_of(bound) == f"http://127.0.0.1:{bound[0].getsockname()[1]}"
        with pytest.raises(CannotListen, match="in use"):
            listen(["127.0.0.1"], bound[0].getsockname()[1])
    finally:
        for one in bound:
            one.close()


def test_replies_are_not_delayed(start: Start) -> None:
    api = start().client()
    api.get("//health/live")
    spent = []
    for _ in range(30):  # the best of some: a busy machine says nothing about the program
        before = time.perf_counter()
        api.get("//health/live")
        spent.append(time.perf_counter() - before)
    assert min(spent) < 0.02  # Nagle's algorithm alone would take twice that


# ── what others have left ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("at_start", [True, False], ids=["at its start", "later"])
def test_the_runs_of_a_killed_server_continue_in_another_server(
    start: Start, at_start: bool
) -> None:
    env = {"DOVETAIL_LEASE_SECONDS": "1"}
    first = start(**env)
    second = None if at_start else start(**env)
    run_id = waiting_run(first)
    first.process.kill()
    first.process.wait()
    (first.folder / "go").touch()
    second = second or start(**env)
    run = second.client().finished(run_id)
    assert run["status"] == "COMPLETED"
    assert [n["attempt"] for n in run["nodes"]] == [2, 1]
    assert "took over 1 run" in second.log.read_text()


def test_a_command_of_another_process_reaches_the_server(start: Start) -> None:
    server = start()
    run_id = waiting_run(server)
    subprocess.run(
        [SCRIPT, "runs", "cancel", run_id], cwd=server.folder, env=environment(), check=True
    )
    assert server.client().finished(run_id)["status"] == "CANCELLED"


# ── ending ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_immediately(start: Start, number: int) -> None:
    server = start()
    server.client().get("//health/live")  # leaves an open connection behind
    before = time.monotonic()
    assert server.stop(number) == 0
    assert time.monotonic() - before < AT_ONCE_SECONDS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_nodes_finish_within_the_drain_and_the_rest_is_handed_back(
    start: Start, number: int
) -> None:
    server = start(DOVETAIL_DRAIN_SECONDS="10")
    run_id = waiting_run(server)
    server.process.send_signal(number)
    time.sleep(0.3)
    assert server.process.poll() is None
    (server.folder / "go").touch()
    assert server.process.wait(SECONDS) == 0
    again = start()
    run = again.client().finished(run_id)
    assert run["status"] == "COMPLETED"
    assert [n["attempt"] for n in run["nodes"]] == [1, 1]  # nothing was lost, nothing ran twice


def test_a_stopping_server_is_not_ready_and_serves_until_its_delay_is_over(
    start: Start,
) -> None:
    server = start(DOVETAIL_SHUTDOWN_DELAY="2", DOVETAIL_DRAIN_SECONDS="0.2")
    client = server.client()
    client.register(flow("late"))
    before = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx2.get(f"{server.url}/health/ready").status_code == 503, "it is ready")
    answer = httpx2.get(f"{server.url}/health/ready").json()
    assert answer["reasons"] == ["the server is stopping"]
    assert httpx2.get(f"{server.url}/health/live").status_code == 200
    made = httpx2.post(f"{server.url}/api/v1/workflows/late/runs", json={})
    assert made.status_code == 202, "a new connection, which a balancer made meanwhile"
    assert server.process.wait(SECONDS) == 0
    assert time.monotonic() - before >= 2


def test_nodes_that_outlast_the_drain_are_handed_back(start: Start) -> None:
    server = start(DOVETAIL_DRAIN_SECONDS="0.2")
    run_id = waiting_run(server)
    before = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - before < AT_ONCE_SECONDS
    (server.folder / "go").touch()
    run = start().client().finished(run_id)
    assert run["status"] == "COMPLETED"
    assert run["nodes"][0]["attempt"] == 2


def test_a_handler_that_ignores_cancellation_does_not_block_the_stop(start: Start) -> None:
    server = start(DOVETAIL_DRAIN_SECONDS="0")
    api = server.client()
    api.register(flow("clings", node("a", "clings", config={"seconds": 60})))
    api.post("/workflows/clings/runs")
    wait_for((server.folder / "clings.started").exists, "the node started")
    before = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - before < AT_ONCE_SECONDS


def test_streams_and_waits_end_cleanly_with_the_server(start: Start) -> None:
    server = start(DOVETAIL_DRAIN_SECONDS="0.2")
    run_id = waiting_run(server)
    api = server.client()

    def follow() -> list[str]:
        accept = {"accept": "text/event-stream"}
        with api.http.stream("GET", f"/api/v1/runs/{run_id}/events", headers=accept) as answer:
            return [event["type"] for _, event in frames(answer)]  # raises if it breaks off

    def wait() -> Any:
        return api.get(f"/runs/{run_id}?wait=60")["status"]

    with ThreadPoolExecutor(2) as pool:
        streamed, waited = pool.submit(follow), pool.submit(wait)
        time.sleep(0.5)
        before = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert waited.result(SECONDS) == "RUNNING"
        assert streamed.result(SECONDS)[-1] == "node.started"
        assert time.monotonic() - before < AT_ONCE_SECONDS
    assert server.stop() == 0


@pytest.mark.parametrize("kind", ["embedded", "redis"])
def test_no_acknowledged_run_is_lost_when_the_server_is_stopped_under_load(
    start: Start, kind: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        args, env = [], {"DOVETAIL_DRAIN_SECONDS": "5"}
        if kind == "redis":
            env |= on(stack.enter_context(RedisServer()).url)
            args = ["--with", "orchestrator,worker"]
        server = start(*args, **env)
        server.client().register(flow("busy"))
        acknowledged: list[str] = []
        others: set[int] = set()

        def trigger(_: int) -> None:
            with httpx2.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as client:
                while True:
                    try:
                        answer = client.post("/api/v1/workflows/busy/runs", json={})
                    except httpx2.TransportError:
                        return  # the server is gone, and has promised nothing
                    if answer.status_code != 202:
                        others.add(answer.status_code)
                        return
                    acknowledged.append(answer.json()["run_id"])

        with ThreadPoolExecutor(16) as pool:
            working = [pool.submit(trigger, number) for number in range(16)]
            wait_for(lambda: len(acknowledged) > 100, "there is some load")
            before = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(SECONDS) == 0
            assert time.monotonic() - before < 5 + 5  # the drain time, and what a server needs
            for one in working:
                one.result(SECONDS)
        assert others <= {503}
        assert len(acknowledged) == len(set(acknowledged))
        again = start(*args, **env).client()
        for run_id in acknowledged:
            assert again.finished(run_id)["status"] == "COMPLETED"


def test_a_silent_client_does_not_block_the_stop_of_the_server(
    start: Start,
) -> None:
    server = start(DOVETAIL_DRAIN_SECONDS="0.2")
    run_id = waiting_run(server)
    address = urlsplit(server.url)
    where = (address.hostname, address.port)
    with socket.create_connection(where) as silent, socket.create_connection(where) as deaf:
        silent.sendall(
            b"POST /api/v1/workflows HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        )
        deaf.sendall(
            f"GET /api/v1/runs/{run_id}/events HTTP/1.1\r\nHost: localhost\r\n"
            "Accept: text/event-stream\r\n\r\n".encode()
        )
        time.sleep(0.3)
        before = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - before < AT_ONCE_SECONDS


def test_a_second_signal_stops_the_server_immediately(start: Start) -> None:
    server = start(DOVETAIL_DRAIN_SECONDS="60")
    waiting_run(server)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    before = time.monotonic()
    assert server.stop(signal.SIGINT) == 0
    assert time.monotonic() - before < AT_ONCE_SECONDS


def test_the_stop_does_not_wait_for_a_client_that_left(start: Start) -> None:
    server = start()
    run_id = waiting_run(server)
    address = urlsplit(server.url)
    for path in ("?wait=600", "/events"):
        with socket.create_connection((address.hostname, address.port)) as leaving:
            request = f"GET /api/v1/runs/{run_id}{path} HTTP/1.1\r\nHost: localhost\r\n"
            leaving.sendall(f"{request}Accept: text/event-stream\r\n\r\n".encode())
            time.sleep(0.2)
    with socket.create_connection((address.hostname, address.port)) as leaving:
        leaving.sendall(
            b"POST /api/v1/runs HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        )
        time.sleep(0.2)
    (server.folder / "go").touch()
    assert server.client().finished(run_id)["status"] == "COMPLETED"
    assert server.stop() == 0
    assert server.log.read_text() == ""


def test_a_damaged_store_ends_the_server_with_one_error_line(start: Start) -> None:
    server = start()
    waiting_run(server)
    for file in (server.folder / ".dovetail").glob("*.db*"):
        if not file.name.endswith("-shm"):  # that one is memory of the process
            with file.open("r+b") as damaged:
                damaged.write(os.urandom(file.stat().st_size))
    (server.folder / "go").touch()
    assert server.process.wait(SECONDS) == 1
    assert "error:" in server.log.read_text()
    assert "Traceback" not in without_attempts(server.log.read_text())
