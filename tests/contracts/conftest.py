"""The stores and transports under contract, as fixtures: each test runs over every one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dovetail.engine.ports import Store

from .stores import STORES, Peers


@pytest.fixture(params=STORES)
async def peers(request: pytest.FixtureRequest) -> AsyncIterator[Peers]:
    """Several handles on one store, as several processes would hold them."""
    async with STORES[request.param](4) as handles:
        yield handles


@pytest.fixture
def store(peers: Peers) -> Store:
    return peers[0]
