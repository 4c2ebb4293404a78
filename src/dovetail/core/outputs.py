"""Outputs that are not at hand: how large each is, and where its bytes can be read.

A run may have more outputs than fit into memory. A reader that has room for some of them says so,
and gets an `Elsewhere` in the place of every other one. What it must not know: who keeps them, or
what is done with them.

How much of its parents' outputs a node may read, and in which parts they are read.

A run may hold hundreds of outputs of a megabyte each, and one node may depend on all of them. The
bound is on what a node reads, not on what it depends on: a handler that reads none costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dovetail.core.errors import PermanentError, TooLarge

KIB = 1024
LARGE_OUTPUT = 64 * KIB
"""An output of more bytes is left out of a run's detail unless the caller asks for it."""
REFERENCE = "$output"
"""The only key of what stands in the place of an output that is left out."""


class ReadBudget(NamedTuple):
    """How many bytes of outputs a reader takes at once."""

    each: int
    """The largest single output."""
    together: int
    """All of them."""


ONLY_SIZES = ReadBudget(-1, 0)
"""No output at all, not even an empty one."""


class OutputReference:
    """An output that is not at hand. No tuple and no dataclass: those could be sent by mistake."""

    __slots__ = ("size", "where")

    def __init__(self, size: int, where: Any) -> None:
        self.size = size
        """Bytes of the output as JSON."""
        self.where = where
        """For the store that made this."""

    def __repr__(self) -> str:
        return f"Elsewhere({self.size}, {self.where!r})"


def looks_like_a_reference(output: Any) -> bool:
    """Whether a caller could take this output for the note that stands in another one's place."""
    return isinstance(output, dict) and REFERENCE in output


def is_shown(output: Any, size: int) -> bool:
    """Whether a run's detail has this output itself, of so many bytes, and not a reference.

    An output that looks like a reference never has its own place: so whatever looks like one
    there, is one.
    """
    return size <= LARGE_OUTPUT and not looks_like_a_reference(output)


def reference(size: int, href: str) -> dict[str, Any]:
    """What stands in the place of an output that is left out."""
    return {REFERENCE: {"size": size, "href": href}}


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
