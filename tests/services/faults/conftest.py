"""One process forker for all fault tests, and a stage for each: a Redis that may be killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ...faults.process_forker import ProcessForker
from ...servers.redis_server import RedisServer
from .stage import JOBS, Stage

NewStage = Callable[..., Stage]


@pytest.fixture(scope="session")
def shared_forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessForker]:
    with ProcessForker(JOBS, tmp_path_factory.mktemp("reported")) as process_forker:
        yield process_forker


@pytest.fixture
def new_stage(shared_forker: ProcessForker, tmp_path: Path) -> Iterator[NewStage]:
    """A stage for a seed and settings; use it with `async with`."""
    # What Redis has answered must survive its kill -9, as the contract asks of Redis alone.
    with RedisServer(fsync="always") as redis:

        def new(seed: int, settings: dict[str, Any]) -> Stage:
            return Stage(tmp_path, redis, shared_forker, seed, settings)

        yield new
        shared_forker.clear()
