"""A process that stands between a test and its server, so that none is left over.

It starts the server on an order, reports its end, and at the end, also if the process that
wanted it was killed with -9, ends the server and removes its folder. It runs apart, by an
interpreter without site-packages: it does not depend on what the server serves.

    in:   start ["its", "command"] | end     (nothing more to read counts as `end`)
    out:  started PID | ended CODE
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

LOOK_SECONDS = 1.0
"""How often it looks whether its parent lives. A pipe alone would not do: any process that the
parent forked may hold its other end open."""
FAREWELL_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36  # of Linux' <sys/prctl.h>


def start(order: dict[str, Any], command: list[str]) -> subprocess.Popen[bytes]:
    # As root, the server becomes another user here and not earlier: that user may be unable to
    # reach this file or this interpreter.
    change = {"user": order["user"], "group": order["group"], "extra_groups": []}
    with Path(order["log"]).open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=order["folder"],
            env=order["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            **(change if order["user"] is not None else {}),
        )


def end(server: subprocess.Popen[bytes], farewell: int) -> None:
    server.send_signal(farewell)
    server.send_signal(signal.SIGCONT)  # one that was stopped would not hear the farewell
    try:
        server.wait(FAREWELL_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def adopt_orphans() -> None:
    """A killed PostgreSQL leaves children. They become ours, because not every machine has a
    process 1 that buries them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(server: subprocess.Popen[bytes] | None) -> None:
    with contextlib.suppress(ChildProcessError):
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while dead := os.waitid(os.P_ALL, 0, look):
            if server is not None and dead.si_pid == server.pid:
                server.poll()
            else:
                os.waitpid(dead.si_pid, 0)


def await_orphans() -> None:
    deadline = time.monotonic() + FAREWELL_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)


def keep(order: dict[str, Any]) -> None:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    asked_to_end = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked_to_end
        asked_to_end |= number == signal.SIGTERM

    signal.signal(signal.SIGCHLD, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    adopt_orphans()
    server: subprocess.Popen[bytes] | None = None
    try:
        while not asked_to_end and os.getppid() == order["parent"]:
            ready, _, _ = select.select([sys.stdin.fileno(), woken], [], [], LOOK_SECONDS)
            if woken in ready:
                os.read(woken, 1024)
            bury_orphans(server)
            if server is not None and server.poll() is not None:
                print("ended", server.returncode, flush=True)
                server = None
            if sys.stdin.fileno() in ready:
                # The other side waits for an answer before it says more: this is one whole line.
                word, _, command = os.read(sys.stdin.fileno(), select.PIPE_BUF).partition(b" ")
                if word != b"start":
                    break
                server = start(order, json.loads(command))
                print("started", server.pid, flush=True)
    finally:
        if server is not None:
            end(server, order["farewell"])
        await_orphans()
        shutil.rmtree(order["folder"], ignore_errors=True)


if __name__ == "__main__":
    keep(json.loads(sys.argv[1]))
