"""Where two values differ first, and how that is said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.recording import ABSENT, Difference, first_difference

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        (1, 1, None),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}, None),
        (1, 1.0, ((), 1, 1.0)),
        (True, 1, ((), True, 1)),
        (None, {}, ((), None, {})),
        ([1, 2], [1, 3], ((1,), 2, 3)),
        ([1], [1, 2], ((), [1], [1, 2])),
        ({"a": 1}, {"b": 1}, (("a",), 1, ABSENT)),
        ({}, {"b": 1}, (("b",), ABSENT, 1)),
        ({"a": {"b": [0, "x"]}}, {"a": {"b": [0, "y"]}}, (("a", "b", 1), "x", "y")),
    ],
)
def test_the_first_difference_has_its_path(expected: Any, got: Any, found: Any) -> None:
    assert first_difference(expected, got) == found


@given(JSON, JSON)
def test_two_values_differ_if_and_only_if_their_json_does(one: Any, other: Any) -> None:
    def marked(value: Any) -> Any:
        """With its types, which Python's comparison does not see."""
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [marked(inner) for inner in value]
        return type(value).__name__, value

    assert (first_difference(one, other) is None) == (marked(one) == marked(other))
    assert first_difference(one, one) is None


def test_a_difference_is_one_short_line() -> None:
    said = str(Difference("end", "output.x", "a\nb" * 400, ABSENT))
    assert said.startswith("node 'end': output.x: expected \"a\\nba")
    assert said.endswith("…, got nothing")
    assert len(said) < 600
    assert Difference(None, "status", "FAILED", ABSENT).as_dict() == {
        "node": None,
        "field": "status",
        "expected": "FAILED",
        "got": None,
    }
