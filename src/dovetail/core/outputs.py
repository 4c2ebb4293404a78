"""The size of outputs: references to outputs that are not loaded, and limits on reading them.

The outputs of a run may not fit into memory. A reader has a `ReadBudget`, and gets an
`OutputReference` for each output beyond it. A node may read at most `MAX_INPUT_BYTES` of its
parents' outputs. The limit is on what it reads, not on what it depends on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dovetail.core.errors import PermanentError, TooLarge

KIB = 1024
LARGE_OUTPUT = 64 * KIB
"""A larger output is left out of a run's detail unless the caller asks for it."""
REFERENCE = "$output"
"""The only key of the object that replaces an output that is left out."""


class ReadBudget(NamedTuple):
    """How many bytes of outputs a reader loads."""

    each: int
    """The largest single output."""
    together: int
    """All outputs."""


ONLY_SIZES = ReadBudget(-1, 0)
"""No output at all, not even an empty one."""


class OutputReference:
    """An output that is not loaded. No tuple or dataclass: orjson would encode it by mistake."""

    __slots__ = ("size", "where")

    def __init__(self, size: int, where: Any) -> None:
        self.size = size
        """Bytes of the output as JSON."""
        self.where = where
        """For the store that made the reference."""

    def __repr__(self) -> str:
        return f"OutputReference({self.size}, {self.where!r})"


def looks_like_a_reference(output: Any) -> bool:
    """Whether a caller could take this output for a reference."""
    return isinstance(output, dict) and REFERENCE in output


def is_shown(output: Any, size: int) -> bool:
    """Whether a run's detail shows this output of `size` bytes, and not a reference to it.

    An output that looks like a reference is never shown. So in a detail each object that looks
    like a reference is one.
    """
    return size <= LARGE_OUTPUT and not looks_like_a_reference(output)


def reference(size: int, href: str) -> dict[str, Any]:
    """The object that replaces an output that is left out."""
    return {REFERENCE: {"size": size, "href": href}}


MAX_INPUT_BYTES = 64 << 20
"""As JSON: all that one node reads of its parents' outputs."""
INLINE_BYTES = 64 << 10
"""Smaller inputs are sent with their task, or copied at once. Larger ones are read one by one, when
the handler asks for them."""
PART_BYTES = 4 << 20
"""Outputs are read in parts of this size; a larger output is a part of its own."""
SETTING = "DOVETAIL_MAX_INPUT_BYTES"


def parts(sizes: Mapping[str, int], max_bytes: int = PART_BYTES) -> Iterator[list[str]]:
    """The names in their order, in parts of at most `max_bytes`; a larger output is alone."""
    part: list[str] = []
    held = 0
    for name, size in sizes.items():
        if part and held + size > max_bytes:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    if part:
        yield part


def check_room(read: int, sizes: Mapping[str, int], limit: int) -> None:
    """Raises a `PermanentError` of type `too_large` if these exceed the limit together with the
    `read` bytes."""
    total = read + sum(sizes.values())
    if total <= limit:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    raise PermanentError(
        f"its handler reads outputs of its parents that take {total:,} bytes as JSON, the largest "
        f"is '{largest}' with {sizes[largest]:,}; a node may read at most {limit:,} ({SETTING}). "
        'Read fewer of them (ctx.inputs["name"] reads one), let them return less, or raise '
        f"{SETTING}",
        type="too_large",
    )


def check_rendering(sizes: Mapping[str, int], limit: int) -> None:
    """Raises `TooLarge` if a node's templates read more than `limit` bytes."""
    total = sum(sizes.values())
    if total <= limit:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    raise TooLarge(
        f"reads outputs that take {total:,} bytes as JSON, the largest is '{largest}' with "
        f"{sizes[largest]:,}; the templates of a node may read at most {limit:,} ({SETTING}). "
        f"Name fewer nodes in them, let these return less, or raise {SETTING}"
    )
