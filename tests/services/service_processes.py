"""An orchestrator and a worker as processes of their own, for all tests of a file.

What a test looks at has a name of its own, so that one Redis serves them all.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from ..cli.conftest import environment

SECONDS = 30.0
SCRIPT = str(Path(sys.executable).with_name("dovetail"))
HANDLERS = '''
import asyncio
from pathlib import Path
from dovetail import PermanentError, handler

FOLDER = Path(__file__).parent

@handler("greet", max_retries=2)
async def greet(config, ctx):
    return f"hello {config.get('name', 'you')}"

@handler
async def until(config, ctx):
    """Waits for a file."""
    with (FOLDER / "executions").open("a") as log:
        log.write(f"{ctx.run_id} {ctx.node_id} {ctx.epoch}.{ctx.attempt}\\n")
    while not (FOLDER / config["file"]).exists():
        await asyncio.sleep(0.02)
    return "seen"

@handler
async def needs(config, ctx):
    """Fails until there is a file."""
    if not (FOLDER / config["file"]).exists():
        raise PermanentError(f"there is no {config['file']}")
    return "found"
'''


@dataclass
class ServiceProcesses:
    """The services that work on these stores."""

    folder: Path
    redis_url: str
    database_url: str | None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "mine.py").write_text(HANDLERS)

    @property
    def env(self) -> dict[str, str]:
        found = {"DOVETAIL_REDIS_URL": self.redis_url}
        if self.database_url is not None:
            found["DOVETAIL_DATABASE_URL"] = self.database_url
        return found

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [SCRIPT, *words], cwd=self.folder, env=environment(**self.env), stdin=subprocess.DEVNULL
        )
        self.started.append(process)
        return process

    def wait_for_worker(self) -> None:
        """Until it has said what it can do."""
        give_up = time.monotonic() + SECONDS
        with redis.Redis.from_url(self.redis_url) as connection:
            while not connection.hlen("wf:workers"):
                assert time.monotonic() < give_up, "no worker came"
                time.sleep(0.02)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def executions(self, run_id: str) -> list[str]:
        path = self.folder / "executions"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(f"{run_id} ") for line in lines if line.startswith(run_id)]


@contextmanager
def at_work(folder: Path, redis_url: str, database_url: str | None) -> Iterator[ServiceProcesses]:
    services = ServiceProcesses(folder, redis_url, database_url)
    services.start("orchestrator")
    services.start("worker", "--handlers", "mine.py")
    try:
        services.wait_for_worker()
        yield services
    finally:
        for process in services.started:
            process.kill()
            process.wait()
