"""How long a node waits before it is tried again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.retry import DEFAULT_RETRY, MAX_RETRY_AFTER_SECONDS, RetryPolicy, delay

PLAIN = RetryPolicy(base_delay_seconds=10, max_delay_seconds=300, jitter=0.5)

# As far as a definition can go: ten years, a thousand retries, ten times the delay as jitter.
LONGEST = 315_360_000.0
policies = st.builds(
    RetryPolicy,
    base_delay_seconds=st.floats(0, LONGEST),
    max_delay_seconds=st.floats(0, LONGEST),
    jitter=st.floats(0, 10),
)


def test_the_defaults_are_the_contracts() -> None:
    assert RetryPolicy(10, 300, 0.5) == DEFAULT_RETRY


@pytest.mark.parametrize(
    ("n", "chance", "expected"),
    [
        (1, 0.0, 10),
        (1, 0.5, 12.5),
        (2, 0.0, 20),
        (2, 0.5, 25),
        (3, 0.0, 40),
        (5, 0.0, 160),
        (5, 0.9, 232),
        (6, 0.0, 300),  # 320, and at most 300
        (1000, 0.99, 300),
    ],
)
def test_the_delay_doubles_with_a_share_of_chance_up_to_its_limit(
    n: int, chance: float, expected: float
) -> None:
    assert delay(PLAIN, n, chance) == pytest.approx(expected)


def test_a_retry_after_wins_only_if_it_is_longer() -> None:
    assert delay(PLAIN, 1, 0.0, at_least=3) == 10
    assert delay(PLAIN, 1, 0.0, at_least=30) == 30


def test_a_retry_after_wins_over_the_longest_delay_up_to_one_hour() -> None:
    assert delay(PLAIN, 1, 0.0, at_least=600) == 600
    assert delay(PLAIN, 1, 0.0, at_least=86_400) == MAX_RETRY_AFTER_SECONDS == 3600


def test_the_handlers_own_delay_replaces_the_formula() -> None:
    assert delay(PLAIN, 4, 0.9, after=0.25) == 0.25
    assert delay(PLAIN, 1, 0.9, after=5000) == 5000
    assert delay(PLAIN, 1, 0.9, after=1, at_least=60) == 1


def test_a_delay_is_never_negative() -> None:
    assert delay(PLAIN, 1, 0.0, after=-5) == 0
    assert delay(PLAIN, 1, 0.0, at_least=-5) == 10


@given(policies, st.integers(1, 1001), st.floats(0, 1, exclude_max=True))
def test_every_delay_is_finite_and_within_its_policy(
    policy: RetryPolicy, n: int, chance: float
) -> None:
    wait = delay(policy, n, chance)
    assert math.isfinite(wait)
    assert 0 <= wait <= policy.max_delay_seconds


@given(policies, st.integers(1, 1000), st.floats(0, 1, exclude_max=True))
def test_a_later_retry_never_waits_less(policy: RetryPolicy, n: int, chance: float) -> None:
    assert delay(policy, n + 1, chance) >= delay(policy, n, chance)
