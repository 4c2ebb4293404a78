"""How much a node may read of its parents' outputs, and in which parts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import PermanentError, TooLarge
from dovetail.core.outputs import check_rendering, check_room, parts

SIZES = st.dictionaries(st.text(max_size=3), st.integers(1, 50), max_size=12)


@given(SIZES, st.integers(1, 60))
def test_parts_stay_within_their_limit_unless_one_output_alone_is_larger(
    sizes: dict[str, int], most: int
) -> None:
    found = list(parts(sizes, most))
    assert [name for part in found for name in part] == list(sizes)
    assert all(part for part in found)
    for part in found:
        assert len(part) == 1 or sum(sizes[name] for name in part) <= most
    for part, following in pairwise(found):  # none is smaller than it need be
        assert sum(sizes[name] for name in part) + sizes[following[0]] > most


@given(SIZES, st.integers(0, 50), st.integers(1, 200))
def test_exactly_the_inputs_above_the_limit_are_refused(
    sizes: dict[str, int], read: int, limit: int
) -> None:
    total = read + sum(sizes.values())
    if total <= limit or not sizes:
        if sizes:
            check_room(read, sizes, limit)
        return
    with pytest.raises(PermanentError) as refused:
        check_room(read, sizes, limit)
    assert refused.value.type == "too_large"
    for said in (f"{total:,} bytes", f"at most {limit:,}", "DOVETAIL_MAX_INPUT_BYTES"):
        assert said in str(refused.value)


def test_templates_that_read_too_much_are_refused_with_a_hint() -> None:
    check_rendering({"a": 50, "b": 50}, 100)
    with pytest.raises(TooLarge, match=r"take 101 bytes.*'b' with 51.*at most 100.*Name fewer"):
        check_rendering({"a": 50, "b": 51}, 100)
