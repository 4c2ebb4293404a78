"""Services go on working and end in time while nothing reads their stdout and stderr."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail import Dovetail
from dovetail.cli import unblocked
from dovetail.cli.unblocked import UnblockedFile

from ..servers.server import free_port
from .conftest import SCRIPT, SECONDS, environment
from .test_services import Services, wait_for

END_SECONDS = 15.0
"""Two, on a machine that has nothing else to do."""


@contextmanager
def unread(kind: str) -> Iterator[int]:
    """The writing end of a pipe: its reader is `gone`, or it is `full` and never read."""
    reader, writer = os.pipe()
    if kind == "full":
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writer, b"x" * 4096)
    else:
        os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)
        if kind == "full":
            os.close(reader)


class Unread:
    """Services that write to such a pipe."""

    def __init__(self, folder: Path, pipe: int) -> None:
        self.folder = folder
        self.pipe = pipe
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [SCRIPT, *words],
            cwd=self.folder,
            env=environment(DOVETAIL_DRAIN_SECONDS="1", **env),
            stdin=subprocess.DEVNULL,
            stdout=self.pipe,
            stderr=self.pipe,
        )
        self._all.append(process)
        return process

    def end(self) -> list[int]:
        for process in self._all:
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + END_SECONDS
        return [process.wait(max(0.0, until - time.monotonic())) for process in self._all]

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture(params=["gone", "full"])
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Unread]:
    with unread(request.param) as pipe:
        services = Unread(tmp_path, pipe)
        yield services
        services.close()


def test_services_whose_output_is_not_read_run_workflows_and_end_by_sigterm(
    started: Unread, redis_url: str
) -> None:
    services = Services(started.folder, redis_url)
    started.start("orchestrator", DOVETAIL_REDIS_URL=redis_url)
    started.start("worker", "--handlers", "mine.py", DOVETAIL_REDIS_URL=redis_url)
    # Its attempts are logged, and it prints.
    services.submit("r", {"id": "a", "handler": "broken", "config": {}})
    assert services.ended("r").status == "FAILED"
    assert started.end() == [0, 0]


async def test_a_server_whose_output_is_not_read_runs_workflows_and_ends_by_sigterm(
    started: Unread,
) -> None:
    port = free_port()
    server = started.start("serve", "--port", str(port))
    wait_for(lambda: server.poll() is not None or _listens(port), "it serves")
    async with Dovetail(f"http://127.0.0.1:{port}") as dt:
        nodes = [{"id": "a", "handler": "fail"}]
        run = await dt.run({"name": "f", "nodes": nodes}, timeout=SECONDS)
    assert run.status == "FAILED"
    assert started.end() == [0]


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_what_a_slow_reader_does_not_take_at_once_is_written_later() -> None:
    reader, writer = os.pipe()
    lines = b"".join(b"line %d\n" % number for number in range(30_000))
    file = UnblockedFile(writer)
    began = time.monotonic()
    for at in range(0, len(lines), 1000):
        file.write(lines[at : at + 1000])
    assert time.monotonic() - began < SECONDS / 10
    found = b""
    while len(found) < len(lines):
        found += os.read(reader, 1 << 16)
    assert found == lines
    file.wait(SECONDS)
    file.write(b"and more\n")
    assert os.read(reader, 100) == b"and more\n"
    os.close(reader)
    os.close(writer)


def test_lines_beyond_the_bound_are_lost_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unblocked, "MAX_HELD_BYTES", 1000)
    with unread("full") as writer:
        reader = os.open(f"/proc/self/fd/{writer}", os.O_RDONLY)
        file = UnblockedFile(writer)
        for _ in range(150):
            file.write(b"a line: x\n")
        with caplog.at_level(logging.WARNING):
            assert os.read(reader, 4096) == b"x" * 4096
            file.wait(SECONDS)
            wait_for(lambda: caplog.messages, "the loss is logged")
        assert os.read(reader, 4096) == b"a line: x\n" * 100
        os.close(reader)
    assert caplog.messages == ["50 lines of stderr are lost: it was not read"]
