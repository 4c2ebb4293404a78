"""Work in a process of its own, driven from here call by call, so that rounds still interleave.

Some contestants can be launched only once in a process, some keep threads that would disturb the
others, and memory can only be measured of a whole process. Requests and answers are lines of JSON
over pipes; the time of a call is taken in that process, so the pipes do not count.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from measuring import timed

PATIENCE = 180.0
"""Seconds after which a call counts as hanging; the slowest honest one takes a fifth of it."""
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """What a process of its own makes available: facts, and functions to call."""

    facts: dict[str, Any]
    calls: Mapping[str, Callable[[], Any]]


Opener = Callable[..., AbstractContextManager[Job]]


class Failed(Exception):
    """The work did not come to its end; the message is the last thing that was said of it."""


class Missing(Exception):
    """A package that the work needs is not installed."""


class Answer(NamedTuple):
    seconds: float
    value: Any


class SeparateProcess:
    """`opener` is "module:function" of this folder, called there with these arguments.

    `python` is that of another environment, for work whose packages do not fit into ours.
    """

    def __init__(self, opener: str, *, python: str = sys.executable, **arguments: Any) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / "apart.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        try:
            self._ask([opener, arguments])
            self.facts: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str) -> Answer:
        """Raises `Failed`, after which it is of no more use."""
        self._ask(name)
        return Answer(**self._answer())

    def close(self) -> None:
        """It ends by itself once no more calls come; a hanging one is killed."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

    def __enter__(self) -> SeparateProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        if not ready:
            self._process.kill()
            raise Failed(f"not done after {PATIENCE:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"its process ended with {self._process.wait()}")
        kind, value = json.loads(line)
        if kind == "missing":
            raise Missing(value)
        if kind == "failed":
            raise Failed(value)
        found: dict[str, Any] = value
        return found


def serve() -> None:
    """The other side. What the work prints must not come between the answers."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(kind: str, value: Any) -> None:
        answers.write(json.dumps([kind, value]) + "\n")
        answers.flush()

    try:
        opener, arguments = json.loads(sys.stdin.readline())
        module, function = opener.split(":")
        open_: Opener = getattr(import_module(module), function)
        with open_(**arguments) as job:
            answer("done", job.facts)
            for line in sys.stdin:
                answer("done", _timed(job.calls[json.loads(line)]))
    except ModuleNotFoundError as error:
        answer("missing", error.name)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        answer("failed", f"{what} ({Path(where.filename).name}:{where.lineno})")
        os._exit(1)  # threads of the work may hang too: we do not wait for them


def _timed(work: Callable[[], Any]) -> dict[str, Any]:
    values: list[Any] = []
    seconds = timed(lambda: values.append(work()))
    return {"seconds": seconds, "value": values[0]}


if __name__ == "__main__":
    serve()
