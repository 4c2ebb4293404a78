"""Real processes in a few milliseconds each: one that has imported everything forks the others.

A test that kills a process eighty times cannot wait half a second for each to import Dovetail.
As a module it is what a test uses; as a script, `process_forker.py JOBS.py`, it is the process that
forks. A job is a function of the file JOBS.py, called with what the test gives; what it prints
is what the test reads.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

PATIENCE = 40
"""Seconds after which a job hangs: it is then ended by its own alarm."""


class Child:
    """A process that does a job."""

    def __init__(self, forker: ProcessForker, pid: int, reported: Path) -> None:
        self._forker = forker
        self._reported = reported
        self._code: int | None = None
        self.pid = pid

    def wait(self) -> int:
        """Its exit code; -9 if it was killed."""
        if self._code is None:
            self._code = int(self._forker.ask({"wait": self.pid}))
        return self._code

    def signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    @property
    def output(self) -> str:
        return self._reported.read_text()

    @property
    def errors(self) -> str:
        return self._reported.with_suffix(".err").read_text()

    def reported(self) -> list[Any]:
        """Everything that it has printed so far."""
        return [json.loads(line) for line in self._reported.read_text().splitlines(keepends=True)]

    def hear(self, count: int = 1) -> Any:
        """Wait until it has printed so many lines; the last of them."""
        give_up = time.monotonic() + PATIENCE
        while self._reported.read_bytes().count(b"\n") < count:
            assert time.monotonic() < give_up, f"in vain: {self.errors or 'it says nothing'}"
            time.sleep(0.002)
        return self.reported()[count - 1]

    def done(self) -> Any:
        """The last thing that it tells, once it has ended well."""
        code = self.wait()
        assert code == 0, f"exit code {code}: {self.errors}"
        return self.reported()[-1]


class ProcessForker:
    """Use `with`; every process that it started has ended when it is left."""

    def __init__(self, jobs: Path, folder: Path) -> None:
        self._jobs = jobs
        self._folder = folder
        self._children: list[Child] = []
        self._numbers = count(1)

    def __enter__(self) -> ProcessForker:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._jobs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._process.communicate(timeout=PATIENCE)

    def clear(self) -> None:
        """End whatever still runs."""
        for child in self._children:
            with suppress(ProcessLookupError):
                child.kill()
        self._children.clear()

    def start(self, job: str, **given: Any) -> Child:
        reported = self._folder / f"{next(self._numbers)}.out"
        pid = self.ask({"start": job, "given": given, "reported": str(reported)})
        child = Child(self, pid, reported)
        self._children.append(child)
        return child

    def ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


# ── in the process that forks ────────────────────────────────────────────────────────────


def tell(what: Any) -> None:
    """From a job to its test; in one piece, so that a killed job leaves no half of it."""
    os.write(1, json.dumps(what, default=str).encode() + b"\n")


def serve(jobs: ModuleType) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            tell(os.waitstatus_to_exitcode(status))
            continue
        reported = Path(order["reported"])
        reported.touch()
        reported.with_suffix(".err").touch()
        pid = os.fork()
        if not pid:
            _do(getattr(jobs, order["start"]), order["given"], reported)
        tell(pid)


def _do(job: Callable[..., Any], given: dict[str, Any], reported: Path) -> None:
    """In the new process, which never returns from here."""
    code = 1
    try:
        signal.alarm(PATIENCE)
        for stream, path in ((1, reported), (2, reported.with_suffix(".err"))):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        work = job(**given)
        if inspect.iscoroutine(work):
            asyncio.run(work)
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _loaded(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("jobs", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve(_loaded(Path(sys.argv[1])))
