"""Real Celery workers with a pool of real processes, for whatever test needs some.

Their handlers note down what they do, and what Celery gives them and they answer, in lists of the
Redis that keeps the runs: so a test can tell what was delivered from what was run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import redis

from .cli.conftest import environment

SECONDS = 60.0
SCRIPT = str(Path(sys.executable).with_name("dovetail"))
CELERY = str(Path(sys.executable).with_name("celery"))
HANDLERS = Path(__file__).with_name("celery_handlers.py")
DELIVERED, EXECUTED, ANSWERED = "test:delivered", "test:executed", "test:answered"


class CeleryWorker:
    """One worker with its pool."""

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        *options: str,
        name: str = "one",
        known: str = "wf:workers",
        command: Sequence[str] = (SCRIPT, "worker"),
        **env: str,
    ) -> None:
        self._redis_url = redis_url
        self._workers = known
        self.name = name
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        given = {
            "DOVETAIL_REDIS_URL": redis_url,
            "DOVETAIL_TRANSPORT": "celery",
            "DOVETAIL_HANDLERS": str(HANDLERS),
            "DOVETAIL_CONCURRENCY": "2",
            "CREW_NAME": name,
            "CREW_REDIS_URL": redis_url,
            **env,
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *options],
                cwd=folder,
                env=environment(**given),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def wait_until_ready(self) -> None:
        """It has said that it is alive, which it does once it takes messages."""
        with redis.Redis.from_url(self._redis_url) as connection:
            wait_for(lambda: self._is_known(connection), self.reported)

    def _is_known(self, connection: Any) -> bool:
        assert self.process.poll() is None, self.reported()
        known = [orjson.loads(one) for one in connection.hvals(self._workers)]
        return any(one["pid"] == self.process.pid and "left" not in one for one in known)

    def reported(self) -> str:
        return self.log.read_text(errors="replace")

    def terminate(self, seconds: float = SECONDS) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """With its pool: each process of it dies with its parent."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)

    def pool(self) -> list[int]:
        """The processes that run handlers."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]


@contextmanager
def celery_worker(
    folder: Path, redis_url: str, *options: str, **how: Any
) -> Iterator[CeleryWorker]:
    """One that takes messages; it is ended in any case."""
    worker = CeleryWorker(folder, redis_url, *options, **how)
    try:
        worker.wait_until_ready()
        yield worker
    finally:
        worker.kill()


def wait_for(true: Any, otherwise: Any = lambda: "", seconds: float = SECONDS) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"waited for {seconds:g} s in vain. {otherwise()}"
        time.sleep(0.01)
