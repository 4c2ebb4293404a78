"""What the tests of the document pipeline share: one model's endpoint, ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..servers.llm_stub import LlmStub


@pytest.fixture(scope="session")
def stub() -> Iterator[LlmStub]:
    with LlmStub() as found:
        yield found


@pytest.fixture
def llm(stub: LlmStub) -> LlmStub:
    """It answers well and at once, and has forgotten what other tests asked."""
    stub.behave(delay=0, faults=[])
    stub.forget()
    return stub
