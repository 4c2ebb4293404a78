"""Numbers in sentences.

It imports nothing: every command loads it.
"""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 node`, `12 nodes`, `0 nodes`; with `plural`, `1 task waits`, `2 tasks wait`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
