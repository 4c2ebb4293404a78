"""A document counts by how its run ends: rules over any order of steps, ends and deliveries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.documents.metrics import (
    ENDED_WELL,
    PROVISIONAL,
    Measurement,
    MeasuringRule,
    begun,
    measured,
    settled,
)

OF = ("d", "run")
BEGIN, NOTE, KNOW, FAIL, SUCCEED = "begin", "note", "know", "fail", "succeed"


def rule_of(move: str, now: float) -> MeasuringRule:
    match move:
        case "begin":
            return begun(*OF, now)
        case "note":
            return measured(*OF, 1.0, 0.9, now)
        case "know":
            return measured(*OF, None, 0.9, now)
    return settled(*OF, good=move == SUCCEED, ended_at=now)


def after(*moves: str) -> Measurement | None:
    row = None
    for now, move in enumerate(moves, 100):
        row = rule_of(move, float(now))(row)
    return row


MOVES = st.lists(st.sampled_from([BEGIN, NOTE, KNOW, FAIL, SUCCEED]), max_size=8)


@given(MOVES)
def test_no_single_step_makes_a_success_and_the_last_end_decides(moves: list[str]) -> None:
    row = after(*moves)
    ends = [move for move in moves if move in (FAIL, SUCCEED)]
    if row is None:
        assert moves == []
    elif row.status in ENDED_WELL:
        assert ends
        assert ends[-1] == SUCCEED
    elif row.status == "failed":
        assert moves[-1] == FAIL
    else:
        assert row.status in PROVISIONAL
        assert SUCCEED not in ends[-1:], "a step after a success was only delivered again"


@given(MOVES, st.sampled_from([FAIL, SUCCEED]))
def test_the_same_end_again_changes_nothing(moves: list[str], end: str) -> None:
    row = after(*moves, end)
    assert rule_of(end, 1e9)(row) is row


@given(MOVES)
def test_a_recorded_end_is_never_provisional(moves: list[str]) -> None:
    for end in (FAIL, SUCCEED):
        row = after(*moves, end)
        assert row is not None
        assert row.status not in PROVISIONAL


@pytest.mark.parametrize(
    ("moves", "status", "seconds"),
    [
        ((BEGIN, SUCCEED), "success", 1.0),
        ((BEGIN, NOTE, SUCCEED), "success", 1.0),
        ((KNOW, SUCCEED), "cached", None),
        ((BEGIN, KNOW, SUCCEED), "cached", None),
        ((BEGIN, FAIL), "failed", 1.0),
        ((BEGIN, NOTE, FAIL), "failed", 1.0),
        ((KNOW, FAIL, SUCCEED), "cached", None),
        ((BEGIN, NOTE, FAIL, SUCCEED), "success", 1.0),
        ((SUCCEED,), "cached", None),
        ((FAIL,), "failed", 0.0),
        ((BEGIN, NOTE, SUCCEED, BEGIN), "success", 1.0),
        ((BEGIN, FAIL, BEGIN), "started", None),
    ],
)
def test_every_status_of_a_document_is_counted_correctly(
    moves: tuple[str, ...], status: str, seconds: float | None
) -> None:
    row = after(*moves)
    assert row is not None
    assert (row.status, row.seconds) == (status, seconds)


def test_a_row_may_change_unless_it_is_a_success_or_of_an_earlier_version() -> None:
    row = after(BEGIN)
    assert row is not None
    assert row.may_change
    assert replace(row, status="failed").may_change
    assert not replace(row, status="success").may_change
    assert not replace(row, status="failed", key="run:extract:1").may_change
