"""What is written for people, on a terminal or in a log, with nothing in it that acts.

Names, outputs and errors come from definitions and handlers. This one function keeps a terminal
from obeying them. It imports nothing: every command loads it.

Numbers in sentences.

It imports nothing: every command loads it.
"""

from __future__ import annotations


def visible(text: str, kept: str = "") -> str:
    """Everything that is not printable spelled out: line breaks, escapes, marks that turn text.

    `\\x1b` for an escape character: it is neither obeyed by a terminal nor hidden from a reader.
    The characters of `kept` stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode()
        for char in text
    )


def died_during(crashes: int, attempt: int) -> str:
    """`its worker died during attempt 2`, the latest one; of several lost ones only their number,
    because attempts between them may have failed by themselves. The Lua says the same."""
    which = f"attempt {attempt}" if crashes == 1 else f"{crashes} attempts"
    return f"its worker died during {which}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 node`, `12 nodes`, `0 nodes`; with `plural`, `1 task waits`, `2 tasks wait`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
