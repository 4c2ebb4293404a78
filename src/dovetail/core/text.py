"""Text for people, on a terminal or in a log. It imports nothing: every command loads it."""

from __future__ import annotations

JOINERS = "\u200c\u200d"
"""Characters of scripts and emoji; a name without them is another name."""
HARMLESS = "\u00a0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))) + JOINERS
"""Characters that are not printable but do no harm in a line: spaces of any width, joiners."""


def visible(text: str, kept: str = "") -> str:
    """Escape everything that is not printable: line breaks, control characters, marks that change
    the direction of text. Names and errors come from definitions and handlers, and a terminal must
    not obey them. The characters of `kept` stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode()
        for char in text
    )


def died_during(crashes: int, attempt: int) -> str:
    """`its worker died during attempt 2`; of several crashes only the number, because attempts
    between them may have failed for other reasons. The Lua says the same."""
    which = f"attempt {attempt}" if crashes == 1 else f"{crashes} attempts"
    return f"its worker died during {which}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 node`, `12 nodes`, `0 nodes`; with `plural`, `1 task waits`, `2 tasks wait`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


MAX_TRACEBACK_BYTES = 32 << 10


def cut_middle(text: str, max_bytes: int = MAX_TRACEBACK_BYTES) -> str:
    """A text of at most `max_bytes` in UTF-8. A longer one loses whole lines of its middle, and a
    line there says how many bytes that were."""
    if len(text) <= max_bytes // 4:
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return text
    note = "\n  … {:,} bytes left out …\n"
    half = (max_bytes - len(note.format(len(data)).encode())) // 2
    head, tail = data[:half], data[-half:]
    # At a line break, unless a line is so long that most of the text would be lost.
    if (end := head.rfind(b"\n")) > half // 2:
        head = head[:end]
    if 0 <= (start := tail.find(b"\n")) < half // 2:
        tail = tail[start + 1 :]
    first, last = head.decode(errors="ignore"), tail.decode(errors="ignore")
    lost = len(data) - len(first.encode()) - len(last.encode())
    return f"{first}{note.format(lost)}{last}"
