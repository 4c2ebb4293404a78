"""What is shown of an output, and what stands in its place."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.outputs import LARGE_OUTPUT, is_shown, looks_like_a_reference, reference

values = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$output", "size", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(output=values, more=st.sampled_from([0, LARGE_OUTPUT]))
def test_an_output_that_looks_like_a_reference_is_sent_as_a_reference(
    output: Any, more: int
) -> None:
    size = len(orjson.dumps(output)) + more
    reported = output if is_shown(output, size) else reference(size, "/somewhere")
    if looks_like_a_reference(reported):
        assert reported == {"$output": {"size": size, "href": "/somewhere"}}
    else:
        assert reported == output


def test_an_output_of_64_kib_is_shown_and_a_byte_more_is_not() -> None:
    assert is_shown("x", 64 * 1024)
    assert not is_shown("x", 64 * 1024 + 1)
