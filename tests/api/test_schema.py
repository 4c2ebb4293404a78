"""A short run of the cases; `./dev cases` runs thousands of them, over every set-up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..log_text import without_attempts
from .conftest import Server
from .schema_cases import run_cases

SEED = 20261116


@pytest.mark.parametrize("server", ["embedded"], indirect=True, scope="session")
def test_the_server_behaves_as_its_openapi_document_says(server: Server, tmp_path: Path) -> None:
    outcome = run_cases(
        server.url, tmp_path, seed=SEED, examples=3, phases="examples,fuzzing", seconds=240
    )
    assert outcome.passed, outcome.reported
    assert outcome.cases >= 80
    assert "Traceback" not in without_attempts(server.log.read_text())
