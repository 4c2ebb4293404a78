"""A value that is too large is cut until it fits, and says what is missing."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.shortening import shortened

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(), inner, max_size=30),
    max_leaves=60,
)


@given(JSON, st.integers(100, 2000))
def test_it_fits_and_what_fits_is_not_touched(value: Any, most: int) -> None:
    found, was_cut = shortened(value, most)
    assert len(orjson.dumps(found)) <= most
    assert was_cut == (len(orjson.dumps(value)) > most)
    assert was_cut or found is value


def _many(count: int) -> dict[str, str]:
    return {str(number): "z" * 90 for number in range(count)}


@pytest.mark.parametrize(
    ("value", "most", "found"),
    [
        ("x" * 30_000, 25_000, "x" * 20_000 + "… (10,000 characters more)"),
        (["y" * 90] * 300, 20_000, ["y" * 90] * 200 + ["… (100 more)"]),
        (_many(201), 19_750, _many(200) | {"…": "1 more"}),
    ],
)
def test_what_was_cut_says_how_much_is_missing(value: Any, most: int, found: Any) -> None:
    assert shortened(value, most) == (found, True)
