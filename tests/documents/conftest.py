"""What the tests of the document pipeline share: a place of their own, without settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.documents import reading
from dovetail.documents.reviews import close_reviews


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where documents may be is tested in test_confinement.py; elsewhere it is no matter."""
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_ROOTS", "/")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("DATABASE_URL", "LLM_BASE_URL", "LLM_MODEL", "DOCUMENTS_OUT", "REDIS_URL"):
        monkeypatch.delenv(f"DOVETAIL_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    close_reviews()


@pytest.fixture
def own_readers() -> Iterator[None]:
    """Reading processes of this test alone, which may be ended and made to fail."""
    kept = reading._readers
    reading._start_anew()
    yield
    reading._end_readers()
    reading._readers = kept
