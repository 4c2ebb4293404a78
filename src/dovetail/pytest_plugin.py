"""The pytest plugin. It imports the engine only when a test asks for the fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dovetail.testing.runner import Runner


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "dovetail_handlers",
        "FILE.py or package.module with handlers that dovetail_runner loads in every test",
        type="args",
        default=[],
    )


@pytest.fixture
def dovetail_runner(request: pytest.FixtureRequest) -> Runner:
    """Runs workflows in memory, with mocks and without waiting; replays recorded runs."""
    from dovetail.testing.runner import Runner

    return Runner(request.path.parent, handlers=request.config.getini("dovetail_handlers"))
