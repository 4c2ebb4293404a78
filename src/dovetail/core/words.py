"""Numbers in sentences.

It imports nothing: every command loads it.
"""

from __future__ import annotations


def died_during(crashes: int, attempt: int) -> str:
    """`its worker died during attempt 2`, the latest one; of several lost ones only their number,
    because attempts between them may have failed by themselves. The Lua says the same."""
    which = f"attempt {attempt}" if crashes == 1 else f"{crashes} attempts"
    return f"its worker died during {which}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 node`, `12 nodes`, `0 nodes`; with `plural`, `1 task waits`, `2 tasks wait`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
