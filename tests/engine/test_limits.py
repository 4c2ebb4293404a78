"""Token buckets: the arithmetic of rates, with time as an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engine.limits import LATENESS, LocalLimits, TokenBucket


def test_the_default_limit_is_ten_per_second_with_a_burst_of_one() -> None:
    bucket = TokenBucket()
    assert (bucket.rate, bucket.burst) == (10.0, 1)


def test_tokens_are_one_interval_apart() -> None:
    bucket = TokenBucket(10, 1)
    assert [bucket.book(5.0) for _ in range(4)] == pytest.approx([5.0, 5.1, 5.2, 5.3])


def test_a_burst_is_granted_immediately_and_then_the_rate() -> None:
    bucket = TokenBucket(2, 3)
    assert [bucket.book(0.0) for _ in range(6)] == pytest.approx([0, 0, 0, 0.5, 1.0, 1.5])


def test_an_idle_bucket_fills_up_to_its_burst_only() -> None:
    bucket = TokenBucket(1, 2)
    for _ in range(2):
        bucket.book(0.0)
    assert [bucket.book(100.0) for _ in range(3)] == pytest.approx([100, 100, 101])


def test_a_slowed_bucket_grants_no_token_before_its_time() -> None:
    bucket = TokenBucket(10, 3)
    bucket.book(0.0)
    bucket.slow(5.0)
    assert not bucket.start(4.999)
    booked = [bucket.book(0.1) for _ in range(3)]
    assert booked[0] >= 5.0
    assert booked[2] < 5.3


def test_slowing_to_a_past_time_takes_no_token() -> None:
    bucket = TokenBucket(10, 1)
    bucket.slow(3.0)
    assert bucket.book(10.0) == 10.0


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_of_zero_or_less_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate_per_second must be above 0"):
        TokenBucket(rate, 1)


@pytest.mark.parametrize("burst", [0, -3])
def test_a_burst_below_one_is_refused(burst: int) -> None:
    with pytest.raises(ValueError, match="burst must be at least 1"):
        TokenBucket(1, burst)


@given(
    st.floats(0.01, 1000),
    st.integers(1, 20),
    st.lists(st.floats(0, 5), min_size=1, max_size=60),
)
def test_no_window_ever_has_more_than_the_burst_and_the_rate_allow(
    rate: float, burst: int, waits: list[float]
) -> None:
    bucket = TokenBucket(rate, burst)
    now, given_at = 0.0, []
    for wait in waits:
        now += wait
        at = bucket.book(now)
        assert at >= now
        given_at.append(at)
    assert given_at == sorted(given_at)
    for first in range(len(given_at)):
        for last in range(first, len(given_at)):
            allowed = burst + rate * (given_at[last] - given_at[first])
            assert last - first + 1 <= allowed * (1 + 1e-9) + 1e-6


def test_starting_needs_no_reservation_and_obeys_the_rate() -> None:
    bucket = TokenBucket(1, 2)
    assert [bucket.start(now) for now in (0.0, 0.0, 0.0, 0.5, 1.0, 1.0)] == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]


def test_late_reservations_do_not_start_together() -> None:
    bucket = TokenBucket(10, 1)
    booked = [bucket.book(0.0) for _ in range(5)]
    assert booked == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert [bucket.start(9.0) for _ in booked] == [True, False, False, False, False]
    assert [bucket.book(9.0) for _ in range(3)] == pytest.approx([9.1, 9.2, 9.3])


def test_a_slightly_late_start_does_not_delay_the_next() -> None:
    bucket = TokenBucket(10, 1)
    for start in range(100):
        late = (0.03, 0.0, 0.049)[start % 3]
        assert bucket.start(start / 10 + late)


def test_a_returned_reservation_makes_the_next_earlier() -> None:
    bucket = TokenBucket(1, 1)
    assert bucket.start(0.0)
    for _ in range(100):
        bucket.book(0.0)
    bucket.unbook(99)
    assert bucket.book(0.0) < 3
    assert not bucket.start(0.5), "only bookings were given back"


def test_every_waiting_node_can_get_a_new_time() -> None:
    bucket = TokenBucket(2, 2)
    assert [bucket.start(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(100):
        bucket.book(0.0)
    assert bucket.rebook(3, 0.1) == pytest.approx([0.5, 1.0, 1.5])
    assert bucket.book(0.1) == pytest.approx(2.0)
    assert bucket.rebook(0, 0.1) == []
    assert bucket.book(0.1) == pytest.approx(0.5)


def test_setting_a_limit_counts_earlier_starts_as_tokens_not_as_time() -> None:
    bucket = TokenBucket(0.05, 2)
    assert [bucket.start(0.0) for _ in range(3)] == [True, True, False]
    bucket.set(10, 2, 0.0)
    assert not bucket.start(0.0), "two tokens of two are owed"
    assert bucket.start(0.1)
    bucket.set(10, 5, 0.1)
    assert [bucket.start(0.1) for _ in range(3)] == [True, True, True]


def test_after_a_limit_is_lowered_no_node_waits_longer_than_for_one_token() -> None:
    bucket = TokenBucket(100, 50)
    while bucket.start(0.0):
        pass
    bucket.set(0.5, 1, 0.0)
    assert not bucket.start(1.9)
    assert bucket.start(2.0)
    assert not bucket.start(3.9)


def test_setting_a_limit_ends_the_pause_that_a_service_asked_for() -> None:
    bucket = TokenBucket(10, 1)
    bucket.slow(3600.0)
    bucket.set(10, 1, 0.0)
    assert bucket.start(0.1)
    assert bucket.rebook(1, 0.1) == pytest.approx([0.2])


@given(
    st.floats(0.01, 1000),
    st.integers(1, 20),
    st.lists(st.floats(0, 5), min_size=1, max_size=60),
)
def test_no_window_ever_has_more_starts_than_burst_rate_and_lateness_allow(
    rate: float, burst: int, waits: list[float]
) -> None:
    bucket = TokenBucket(rate, burst)
    now, started = 0.0, []
    for wait in waits:
        now += wait
        if bucket.start(now):
            started.append(now)
    for first in range(len(started)):
        for last in range(first, len(started)):
            allowed = burst + rate * (started[last] - started[first] + LATENESS)
            assert last - first + 1 <= allowed * (1 + 1e-9) + 1e-6


async def test_tags_have_their_own_buckets_and_unknown_tags_the_default() -> None:
    limits = LocalLimits({"slow": TokenBucket(1, 1)})
    assert [await limits.book("slow", 0.0) for _ in range(2)] == [0.0, 1.0]
    assert [await limits.book("new", 0.0) for _ in range(2)] == pytest.approx([0.0, 0.1])
    assert [await limits.start("slow", 0.0) for _ in range(2)] == [True, False]
    assert await limits.start("new", 0.0)


async def test_slowing_a_tag_stops_only_its_starts() -> None:
    limits = LocalLimits()
    await limits.slow("a", 9.0)
    assert not await limits.start("a", 8.999)
    assert await limits.book("a", 8.9) >= 9.0
    assert await limits.start("a", 9.0)
    assert await limits.start("b", 0.0)


async def test_reservations_can_be_returned_by_tag() -> None:
    limits = LocalLimits()
    for _ in range(11):
        await limits.book("a", 0.0)
    await limits.unbook("a", 10)
    assert await limits.book("a", 0.0) == pytest.approx(0.1)
