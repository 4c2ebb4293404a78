"""`dovetail open`, `dovetail run --web`, and the link on the screen of a failed run."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from dovetail.cli.page import announced_address, live_server

from ..api.conftest import SCRIPT, SECONDS, Server, environment, wait_for

FLOW = "name: broken\nnodes:\n  - {id: stop, handler: fail, config: {message: no}}\n"
GOOD = "name: fine\nnodes:\n  - {id: start, handler: input}\n"


def dovetail(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [SCRIPT, *args]
    return subprocess.run(
        command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=SECONDS
    )


def test_a_server_is_known_while_its_process_lives_and_not_after_a_kill(tmp_path: Path) -> None:
    db = tmp_path / "runs.db"
    assert live_server(db) is None
    with announced_address(db, "http://0.0.0.0:8700"):
        # The lock counts in the process that holds it, too: another open file asks.
        assert live_server(db) == "http://127.0.0.1:8700"
        with announced_address(db, "http://127.0.0.1:9"):
            assert live_server(db) == "http://127.0.0.1:8700"
    assert live_server(db) is None
    held = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom pathlib import Path\n"
            "from dovetail.cli.page import announced_address\n"
            f"with announced_address(Path({str(db)!r}), 'http://[::]:1'):\n"
            "    print('held', flush=True)\n    time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    assert live_server(db) == "http://[::1]:1"
    held.kill()
    held.wait()
    held.stdout.close()
    assert live_server(db) is None


@pytest.mark.parametrize("content", ["", "ftp://x", "http://x\x1b[31m", "\udcff"])
def test_a_file_with_something_else_in_it_names_no_server(tmp_path: Path, content: str) -> None:
    db = tmp_path / "runs.db"
    with announced_address(db, "http://127.0.0.1:1"):
        Path(f"{db}-server").write_bytes(content.encode("utf-8", "surrogateescape"))
        assert live_server(db) is None


def test_a_failed_run_names_its_link_only_while_a_server_runs(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    before = dovetail(tmp_path, "run", "flow.yaml")
    assert before.returncode == 1
    assert "on the page" not in before.stdout
    assert dovetail(tmp_path, "open").returncode == 1
    assert "dovetail serve" in dovetail(tmp_path, "open").stderr
    server = Server(tmp_path)
    try:
        failed = dovetail(tmp_path, "run", "flow.yaml")
        link = re.search(
            r"on the page:  (http://127\.0\.0\.1:\d+/#/runs/([0-9a-f]{32}))", failed.stdout
        )
        assert link is not None, failed.stdout
        assert link[1].startswith(server.url)
        opened = dovetail(tmp_path, "open", link[2][:6])
        assert opened.stdout.strip() == link[1]
        assert dovetail(tmp_path, "open").stdout.strip() == server.url
        assert dovetail(tmp_path, "open", "ffffff").returncode == 1
        there = dovetail(tmp_path, "open", link[2], "--server", server.url)
        assert there.stdout.strip() == link[1]
    finally:
        server.close()
    assert dovetail(tmp_path, "open").returncode == 1


def test_open_starts_the_browser_of_the_setting(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\nprintf %s "$1" > opened\n')
    browser.chmod(0o755)
    server = Server(tmp_path)
    try:
        assert dovetail(tmp_path, "open", BROWSER=f"{browser} %s").returncode == 0
        assert (tmp_path / "opened").read_text() == server.url
    finally:
        server.close()


def test_on_redis_the_server_must_be_named(tmp_path: Path) -> None:
    asked = dovetail(tmp_path, "open", DOVETAIL_REDIS_URL="redis://127.0.0.1:1")
    assert asked.returncode == 2
    assert "--server" in asked.stderr


def test_run_web_serves_the_page_in_a_terminal_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(GOOD)
    master, slave = pty.openpty()
    running = subprocess.Popen(
        [SCRIPT, "run", "--web", "flow.yaml"],
        cwd=tmp_path,
        env=environment(TERM="xterm", BROWSER="true"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    seen = b""

    def read(until: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + SECONDS
        while until not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(master, 4096)

    try:
        read(b"until Ctrl-C")
        link = re.search(rb"(http://127\.0\.0\.1:\d+)/#/runs/([0-9a-f]{32})", seen)
        assert link is not None, seen
        url, run_id = link[1].decode(), link[2].decode()
        got = httpx2.get(f"{url}/api/v1/runs/{run_id}", trust_env=False).json()
        assert got["status"] == "COMPLETED"
        assert '<div id="app">' in httpx2.get(url, trust_env=False).text
        assert live_server(tmp_path / ".dovetail" / "dovetail.db") == url
        running.send_signal(signal.SIGINT)
        assert running.wait(SECONDS) == 0
    finally:
        running.kill()
        running.wait()
        os.close(master)


def test_run_web_without_a_terminal_ends_with_the_run_and_keeps_json_clean(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    done = dovetail(tmp_path, "run", "--web", "--json", "flow.yaml")
    assert done.returncode == 1
    assert done.stdout.startswith("{")
    assert "/#/runs/" in done.stderr
    wait_for(lambda: live_server(tmp_path / ".dovetail" / "dovetail.db") is None, "it has ended")
