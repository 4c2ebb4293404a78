"""How much of its parents' outputs a node may read, and in which parts they are read.

A run may hold hundreds of outputs of a megabyte each, and one node may depend on all of them. The
bound is on what a node reads, not on what it depends on: a handler that reads none costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dovetail.core.errors import PermanentError, TooLarge

MAX_INPUT_BYTES = 64 << 20
"""As JSON, of one node: all that it reads of its parents' outputs."""
INLINE_BYTES = 64 << 10
"""Inputs up to here travel with their task, or are copied at once. Larger ones are read one by one,
when a handler asks for them."""
PART_BYTES = 4 << 20
"""Of outputs that are read at once, unless a single one is larger."""
SETTING = "DOVETAIL_MAX_INPUT_BYTES"


def parts(sizes: Mapping[str, int], most: int = PART_BYTES) -> Iterator[list[str]]:
    """The names, in their order, in parts of at most `most` bytes; a larger one is alone."""
    part: list[str] = []
    held = 0
    for name, size in sizes.items():
        if part and held + size > most:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    if part:
        yield part


def check_room(read: int, sizes: Mapping[str, int], limit: int) -> None:
    """Raises a `PermanentError` of type `too_large` if these do not fit beside what is read."""
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
    """Raises `TooLarge` if a node's templates read more than that."""
    total = sum(sizes.values())
    if total <= limit:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    raise TooLarge(
        f"reads outputs that take {total:,} bytes as JSON, the largest is '{largest}' with "
        f"{sizes[largest]:,}; the templates of a node may read at most {limit:,} ({SETTING}). "
        f"Name fewer nodes in them, let these return less, or raise {SETTING}"
    )
