"""One process forker for all tests here, and for each test a folder in which its processes meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .process_forker import ProcessForker


@pytest.fixture(scope="session")
def shared_forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessForker]:
    jobs = Path(__file__).with_name("jobs.py")
    with ProcessForker(jobs, tmp_path_factory.mktemp("reported")) as process_forker:
        yield process_forker


@pytest.fixture
def process_forker(shared_forker: ProcessForker) -> Iterator[ProcessForker]:
    yield shared_forker
    shared_forker.clear()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)
