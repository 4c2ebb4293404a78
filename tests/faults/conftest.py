"""A nursery for all tests here, and for each test a folder in which its processes meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .nursery import Nursery


@pytest.fixture(scope="session")
def shared_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    jobs = Path(__file__).with_name("jobs.py")
    with Nursery(jobs, tmp_path_factory.mktemp("told")) as nursery:
        yield nursery


@pytest.fixture
def nursery(shared_nursery: Nursery) -> Iterator[Nursery]:
    yield shared_nursery
    shared_nursery.clear()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)
