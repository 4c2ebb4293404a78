"""Outputs that are not at hand: how large each is, and where its bytes can be read.

A run may have more outputs than fit into memory. A reader that has room for some of them says so,
and gets an `Elsewhere` in the place of every other one. What it must not know: who keeps them, or
what is done with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

KIB = 1024
LARGE_OUTPUT = 64 * KIB
"""An output of more bytes is left out of a run's detail unless the caller asks for it."""
REFERENCE = "$output"
"""The only key of what stands in the place of an output that is left out."""


class Room(NamedTuple):
    """How many bytes of outputs a reader takes at once."""

    each: int
    """The largest single output."""
    together: int
    """All of them."""


ONLY_SIZES = Room(-1, 0)
"""No output at all, not even an empty one."""


class Elsewhere:
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
