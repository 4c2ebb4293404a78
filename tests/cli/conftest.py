"""Two ways to use the command line: as a user does, and in this process where that is enough.

`shell` is a process of its own; it is right for everything about streams, signals and exits. What
it starts is the installed script; what it calls and waits for is forked from a process that has
the script's imports done. `command` calls `main` here, which takes less time still.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from dovetail.cli import main

from .warm import WarmDovetail

SCRIPT = str(Path(sys.executable).with_name("dovetail"))
SECONDS = 30.0
SOON = 12.0
"""Two seconds and what a busy machine adds: far less than any handler here sleeps, or drains."""

HANDLERS = '''
import asyncio, time
from pathlib import Path
from dovetail import Context, PermanentError, RetryableError, handler

@handler
async def greet(config, ctx):
    """Greets."""
    return f"hello {config.get('name', 'you')}"

@handler("broken", max_retries=2)
def broken(config, ctx):
    print("printed by a handler")
    ctx.log.info("logged by %s", "a handler")
    raise PermissionError("out/ is not writable")

@handler
async def slow(config, ctx):
    for step in range(10):
        ctx.progress(step / 10, f"page {step} of 10")
        await asyncio.sleep(config.get("seconds", 1) / 10)
    return "slept"

@handler
async def says(config, ctx):
    raise PermanentError(config["text"])

@handler
async def gives(config, ctx):
    return config

def count(ctx):
    with open("executions", "a") as log:
        log.write(f"{ctx.node_id} {ctx.epoch}.{ctx.attempt}\\n")

@handler
async def counted(config, ctx):
    count(ctx)
    return config

@handler
async def until(config, ctx):
    """Waits for a file."""
    count(ctx)
    while not Path(config["file"]).exists():
        await asyncio.sleep(0.02)
    return "seen"

@handler
async def needs(config, ctx):
    """Fails until there is a file."""
    count(ctx)
    if not Path(config["file"]).exists():
        raise PermanentError(f"there is no {config['file']}")
    return "found"
'''


def crashed(reported: str) -> bool:
    """Whether a command ended with a traceback. That of a handler is shown indented."""
    return any(line.startswith("Traceback") for line in reported.splitlines())


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """Of a user who has configured nothing."""
    ours = ("DOVETAIL_", "NO_COLOR", "TERM", "COLUMNS", "LINES", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "TERM": "xterm-256color", **more}


@cache
def warm() -> WarmDovetail:
    """One for all tests, made when the first needs it; it ends with this process."""
    found = WarmDovetail(SCRIPT, environment())
    atexit.register(found.__exit__, None, None, None)
    return found.__enter__()


def cold(
    args: list[str], folder: Path, env: dict[str, str], stdin: bytes, seconds: float
) -> tuple[int, bytes, bytes]:
    """The installed script."""
    done = subprocess.run(
        [SCRIPT, *args],
        cwd=folder,
        env=env,
        input=stdin,
        capture_output=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


class Shell:
    """The `dovetail` script in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[bytes]] = []

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.directory / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def __call__(self, *args: str, stdin: str | bytes = b"", **env: str) -> Outcome:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        # What an interpreter reads when it starts, one that has started does not.
        call = cold if any(name.startswith("PYTHON") for name in env) else warm()
        code, *reported = call(list(args), self.directory, environment(**env), given, SECONDS)
        out, err = (text.decode(errors="replace") for text in reported)
        assert not crashed(out + err)
        return Outcome(code, out, err)

    def executions(self) -> list[str]:
        """Every start of a handler that counts, as `node epoch.attempt`."""
        path = self.directory / "executions"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"in vain: {what}"
            time.sleep(0.02)

    def wait_for_start(self, node: str) -> None:
        self.wait_for(
            lambda: any(line.startswith(f"{node} ") for line in self.executions()),
            f"{node} never started",
        )

    def start(self, *args: str, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [SCRIPT, *args],
            cwd=self.directory,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what a failed test has left."""
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "mine.py").write_text(HANDLERS)
    shell = Shell(tmp_path)
    yield shell
    shell.close()


@pytest.fixture
def command(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Call a command in this process; never `run`, which ends the process it is in."""
    monkeypatch.chdir(shell.directory)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)

    def call(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dovetail", *args])
        with pytest.raises(SystemExit) as leaving:
            main()
        reported = capfd.readouterr()
        assert not crashed(reported.out + reported.err)
        assert isinstance(leaving.value.code, int)
        return Outcome(leaving.value.code, reported.out, reported.err)

    return call
