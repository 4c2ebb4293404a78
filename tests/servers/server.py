"""One server of our own: a private port, a temporary folder, and faults at will.

    with RedisServer() as redis:
        redis.url
        redis.kill()     # as a crash would; the folder and the port stay
        redis.start()    # the same data at the same address

A server is started through `keeper.py`, which ends it whatever happens to this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from .binaries import Program

HOST = "127.0.0.1"
START_SECONDS = 60.0
"""A start takes tenths of a second; a recovery on a busy machine may take its time."""
END_SECONDS = 30.0
PORTS_TRIED = 20
PORT_TAKEN = ("in use", "eaddrinuse")
"""In the log of a server, Erlang's too."""


class ServerFailed(Exception):
    """It did not start or did not end; carries the end of its log."""


class Server:
    """What Redis, PostgreSQL and RabbitMQ have in common. Not for use by two threads at once."""

    name = "server"
    graceful = signal.SIGTERM
    farewell = signal.SIGKILL
    """What it gets from its keeper, when its data are no longer needed."""

    def __init__(self, program: Program, user: str | None = None) -> None:
        self.program = program
        self.port = 0
        self.pid: int | None = None
        self._user = user
        self._keeper: subprocess.Popen[bytes] | None = None
        self._reported = b""
        self.folder = Path(tempfile.mkdtemp(prefix=f"dovetail-{self.name}-", dir=_reachable(user)))
        if user is not None:
            entry = pwd.getpwnam(user)
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)

    # --- what a kind of server says of itself --------------------------------------------------

    def command(self) -> list[str]:
        """Its command line, in the foreground, on `self.port` and in `self.folder`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Before the very first start."""

    def answers(self) -> bool:
        """Whether it serves by now, it and not another one that has taken its port."""
        raise NotImplementedError

    def after_first_start(self) -> None:
        """What is set up once, in the running server."""

    # --- life and death ------------------------------------------------------------------------

    def start(self) -> None:
        """Returns once it serves; after `kill` or `stop` with the same data and port."""
        assert not self.runs, f"{self.name} runs already, as process {self.pid}"
        if self.port:
            self._start()
            return
        try:
            self.prepare()
            for tries_left in reversed(range(PORTS_TRIED)):
                self.port = free_port()
                try:
                    self._start()
                    break
                except ServerFailed as failure:
                    # Another program took the port between our look and its start.
                    if not tries_left or not any(sign in str(failure) for sign in PORT_TAKEN):
                        raise
            self.after_first_start()
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """kill -9, and returns when it is dead."""
        self._end_by(signal.SIGKILL)

    def stop(self) -> None:
        """As an administrator would; the data stays."""
        self._end_by(self.graceful)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: its connections stay open and nothing answers."""
        os.kill(self._running(), signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._running(), signal.SIGCONT)

    def close(self) -> None:
        """Ends it, however it is, and removes its folder."""
        keeper, self._keeper, self.pid = self._keeper, None, None
        if keeper is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError), keeper.stdin:
            keeper.stdin.write(b"end\n")
            keeper.stdin.flush()
        keeper.wait(END_SECONDS)
        keeper.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def runs(self) -> bool:
        return self.pid is not None and self._ended(0) is None

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- the keeper ----------------------------------------------------------------------------

    def _start(self) -> None:
        self._tell_keeper_to_start()
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if self._ended(0.01) is not None:
                raise ServerFailed(f"{self.name} ended while it started:\n{self._end_of_log()}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailed(
                    f"{self.name} did not answer in {START_SECONDS} s:\n{self._end_of_log()}"
                )

    def _tell_keeper_to_start(self) -> None:
        if self._keeper is None:
            self._keeper = self._new_keeper()
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(b"start " + json.dumps(self.command()).encode() + b"\n")
        self._keeper.stdin.flush()
        words = self._line(START_SECONDS)
        if words is None or words[0] != b"started":
            raise ServerFailed(f"{self.name}: its keeper said {words}, not that it started")
        self.pid = int(words[1])

    def _new_keeper(self) -> subprocess.Popen[bytes]:
        group = None if self._user is None else pwd.getpwnam(self._user).pw_gid
        order = {
            "parent": os.getpid(),
            "folder": str(self.folder),
            "log": str(self.folder / "log"),
            "environment": {"PATH": os.defpath, "LC_ALL": "C", **self.program.environment},
            "user": self._user,
            "group": group,
            "farewell": int(self.farewell),
        }
        keeper = Path(__file__).with_name("keeper.py")
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(keeper), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the tests, which then close their servers
        )

    def _line(self, seconds: float) -> list[bytes] | None:
        """What the keeper says next, in words; None if it says nothing for so long."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._reported:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._keeper.stdout], [], [], left)
            if not ready:
                return None
            more = os.read(self._keeper.stdout.fileno(), 1024)
            if not more:
                raise ServerFailed(f"the keeper of {self.name} has gone:\n{self._end_of_log()}")
            self._reported += more
        line, _, self._reported = self._reported.partition(b"\n")
        return line.split()

    def _ended(self, seconds: float) -> int | None:
        """How it ended, if it does within this time."""
        words = self._line(seconds)
        if words is None:
            return None
        assert words[0] == b"ended", words
        self.pid = None
        return int(words[1])

    def _running(self) -> int:
        if not self.runs:
            raise ServerFailed(f"{self.name} does not run:\n{self._end_of_log()}")
        assert self.pid is not None
        return self.pid

    def _end_by(self, number: signal.Signals) -> None:
        os.kill(self._running(), number)
        if self._ended(END_SECONDS) is None:
            raise ServerFailed(
                f"{self.name} lives {END_SECONDS} s after {number.name}:\n{self._end_of_log()}"
            )

    def _end_of_log(self) -> str:
        return "\n".join(self.log.splitlines()[-20:]) or "(its log is empty)"


def free_port() -> int:
    """A free port, below the ports that the system gives to outgoing connections:
    while a server is down, one of them may be given its port, or even be connected to itself."""
    for _ in range(1000):
        port = random.randrange(10_000, _first_outgoing_port())
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerFailed("no free port between 10000 and those of outgoing connections")


def _first_outgoing_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 32_768
    return first if first > 11_000 else 32_768


def _reachable(user: str | None) -> str:
    """A folder for temporary ones, and if it is for another user, one that the user can enter."""
    usual = tempfile.gettempdir()
    if user is None:
        return usual
    for folder in (usual, "/tmp", "/var/tmp"):
        path = Path(folder).resolve()
        if all(place.stat().st_mode & 0o001 for place in (path, *path.parents)):
            return folder
    raise ServerFailed(f"{user} can enter neither {usual} nor /tmp: set TMPDIR to a place it can")
