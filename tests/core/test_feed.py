"""Positions in the feed of all runs: what resumes, and what cannot."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Expired, InvalidParams
from dovetail.core.feed import FeedPosition, check_position

NAME = "0a1b2c3d"


def at(*number: int, feed: str = NAME) -> FeedPosition:
    return FeedPosition(feed, number)


@pytest.mark.parametrize("position", [at(0), at(17), at(1_700_000_000_000, 3)])
def test_a_position_is_its_text(position: FeedPosition) -> None:
    assert FeedPosition.parse(str(position)) == position


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "-1", NAME, f"{NAME}-", f"{NAME}-x", f"{NAME}-1-2-3", f"{NAME}-1 ", "é" * 8),
        *(f"{NAME}-{'9' * 19}", f"{NAME.upper()}-1", f"{NAME}-١", f"{NAME}--1", "x" * 10_000),
    ],
)
def test_what_is_no_id_is_refused_with_what_to_give(text: str) -> None:
    with pytest.raises(InvalidParams, match="use the `id` of an event") as refused:
        FeedPosition.parse(text)
    assert [(one.code, one.path) for one in refused.value.problems] == [("invalid_field", "after")]
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("after", [at(4), at(5), at(9)])
def test_a_position_resumes_from_the_last_dropped_event_to_the_newest(after: FeedPosition) -> None:
    check_position(after, at(4), at(9))


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (at(3), "not kept any more"),
        (at(10), "lost the events before it"),
        (at(5, feed="ffffffff"), "another store"),
        (at(5, 1), "another store"),
    ],
)
def test_a_position_that_may_miss_events_has_expired(after: FeedPosition, why: str) -> None:
    with pytest.raises(Expired, match=why):
        check_position(after, at(4), at(9))


def test_the_numbers_of_a_stream_compare_by_time_first() -> None:
    check_position(at(10, 0), at(9, 5), at(10, 2))
    with pytest.raises(Expired):
        check_position(at(9, 4), at(9, 5), at(10, 2))
