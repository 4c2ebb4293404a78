"""Private servers, the services of a contestant as processes of their own, and what each has used.

The kernel reports CPU time in nanoseconds, and Redis reports its own; commands and reads are Redis'
own counts. So nothing is added to what is measured.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NANO = 1e-9
FAREWELL_SECONDS = 15.0
PR_SET_PDEATHSIG = 1  # of Linux' <sys/prctl.h>
LIBC = ctypes.CDLL(None)

Commands = Sequence[Sequence[str]]
Pids = dict[str, list[int]]
"""Process ids by what they do."""


# --- servers -----------------------------------------------------------------------------------


@contextmanager
def private_redis() -> Iterator[Any]:
    """As the tests start it: AOF everysec. The file is not rewritten meanwhile, which would hit
    the process that happens to run."""
    settings = {"auto-aof-rewrite-percentage": "0"}
    with server_module("redis_server").RedisServer(settings=settings) as server:
        yield server


@contextmanager
def private_postgres() -> Iterator[Any]:
    """One that survives a power cut, as an archive has to."""
    with server_module("postgres_server").PostgresServer(durable=True) as server:
        yield server


def server_module(module: str) -> Any:
    """One of tests/servers: the servers that a bench needs are those of the tests."""
    root = str(HERE.parent)
    if root not in sys.path:
        sys.path.append(root)
    return import_module(f"tests.servers.{module}")


# --- services ----------------------------------------------------------------------------------


@contextmanager
def services(*, environment: Mapping[str, str] = {}, **kinds: Commands) -> Iterator[Pids]:
    """Python processes of their own, as `services(worker=[["-m", "thing"], …])`. They see the
    modules of this folder, and do not outlive us, however we end."""
    started: dict[str, list[subprocess.Popen[bytes]]] = {}
    try:
        for kind, commands in kinds.items():
            started[kind] = [_process(words, environment) for words in commands]
        yield {kind: [process.pid for process in those] for kind, those in started.items()}
    finally:
        everyone = [process for those in started.values() for process in those]
        for process in everyone:
            process.terminate()
        for process in everyone:
            _ended(process)


def _process(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": _modules()} | environment,
        cwd=HERE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # with --json ours is one document
        preexec_fn=_end_with_parent,
    )


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(FAREWELL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _modules() -> str:
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(HERE), *([given] if given else [])])


def _end_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# --- what was used -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Used:
    """Totals since each began; subtract an earlier one."""

    cpu: dict[str, float]
    """Seconds, by what the processes do."""
    commands: dict[str, int] = field(default_factory=dict)
    """Calls of each command of Redis, those from scripts included."""
    reads: int = 0
    """How often Redis read from a socket: roundtrips, but a large request is read in pieces."""
    received: int = 0
    """Bytes that Redis read."""

    def beside(self, kind: str, seconds: float) -> Used:
        """The same with one more process, that has reported its own CPU time."""
        return replace(self, cpu=self.cpu | {kind: seconds})

    def __sub__(self, before: Used) -> Used:
        return Used(
            {name: value - before.cpu[name] for name, value in self.cpu.items()},
            {
                name: value - before.commands.get(name, 0)
                for name, value in self.commands.items()
                if value != before.commands.get(name, 0)
            },
            self.reads - before.reads,
            self.received - before.received,
        )


def used(redis: Any, pids: Pids) -> Used:
    info = dict(
        line.split(":", 1)
        for section in ("cpu", "stats", "commandstats")
        for line in redis.ask("INFO", section).splitlines()
        if ":" in line
    )
    cpu = {"redis": float(info["used_cpu_user"]) + float(info["used_cpu_sys"])}
    for kind, those in pids.items():
        cpu[kind] = sum(map(cpu_seconds, those))
    commands = {
        name.removeprefix("cmdstat_"): int(value.split("calls=")[1].split(",")[0])
        for name, value in info.items()
        if name.startswith("cmdstat_") and name != "cmdstat_info"
    }
    reads, received = int(info["total_reads_processed"]), int(info["total_net_input_bytes"])
    return Used(cpu, commands, reads, received)


def cpu_seconds(pid: int) -> float:
    """Of a process with all its threads and children. The files of /proc that count in ticks of
    10 ms are too coarse here."""
    nanoseconds, children = 0, ""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
            children += (thread / "children").read_text()
    return nanoseconds * NANO + sum(map(cpu_seconds, map(int, children.split())))
