"""Text for people: cleaned, measured, clipped and, on a terminal, coloured.

Names, messages and outputs come from definitions and handlers. `plain` or `printable` escapes their
control characters before a terminal sees them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from datetime import datetime
from math import ceil

from dovetail.core.text import JOINERS, visible
from dovetail.core.text import counted as counted

Piece = tuple[str, str]
"""A text and its style, one of `STYLES`. Each view decides whether to colour it."""
Line = Sequence[Piece]

STYLES = {
    "": "",
    "good": "32",
    "bad": "31",
    "busy": "36",
    "wait": "33",
    "dim": "2",
    "bold": "1",
    "bold good": "1;32",
    "bold bad": "1;31",
    "bold wait": "1;33",
}


def plain(text: object) -> str:
    """One line in which control characters are escaped, as `\\x1b`."""
    words = str(text)
    if words.isprintable():
        return words
    words = "".join(map(_spaced, words.replace("\r\n", "\n")))
    return " ".join(visible(words, JOINERS).split())


def plain_lines(text: object) -> list[str]:
    """The same for a text of several lines. Indents are kept; empty lines are dropped."""
    found = []
    for line in str(text).replace("\r\n", "\n").split("\n"):  # other line breaks are escaped
        words = plain(line)
        if words:
            indent = len(line) - len(line.lstrip(" "))
            found.append(" " * indent + words.lstrip())
    return found


def printable(text: str) -> str:
    """A JSON text, still JSON, with unprintable characters as `\\uXXXX`."""
    return _UNUSUAL.sub(_spelled_out, text)


_UNUSUAL = re.compile(r"[^\n\x20-\x7e]+")  # most of a large text is passed over at once


def _spelled_out(found: re.Match[str]) -> str:
    words = found[0]
    if words.isprintable():
        return words
    return "".join(char if char.isprintable() else _spelled(char) for char in words)


def _spaced(char: str) -> str:
    """Breaks of lines and spaces of any width are spaces in a line."""
    return " " if char in "\n\t" or unicodedata.category(char) == "Zs" else char


def _spelled(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def cells(text: str) -> int:
    """How many columns a printable text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, width: int) -> str:
    """At most `width` columns of it, with an ellipsis for the rest."""
    if cells(text) <= width:
        return text
    kept, used = [], 1
    for char in text:
        used += _cells_of(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept) + "…"


def pad(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def listed(names: Sequence[str], most: int) -> str:
    """`a, b, c and 7 more`."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"


def duration(seconds: float) -> str:
    """`0.3s`, `14s`, `2m 05s`, `1h 02m`."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02}m"


def countdown(seconds: float) -> str:
    """What is left of a wait, in whole seconds: tenths would only flicker."""
    return duration(seconds) if seconds >= 9.95 else f"{max(0, ceil(seconds))}s"


def ago(seconds: float) -> str:
    """`just now`, `12 s ago`, `3 min ago`, `2 h ago`, `5 days ago`."""
    if seconds < 1:
        return "just now"  # also a future time, after a clock was set back
    for size, unit, until in _AGES:
        if seconds < until:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{counted(int(seconds // 86400), 'day')} ago"


_AGES = ((1, "s", 90), (60, "min", 90 * 60), (3600, "h", 48 * 3600))


def seconds(timestamp: str) -> float:
    """An RFC 3339 time as seconds since 1970."""
    return datetime.fromisoformat(timestamp).timestamp()


def age(timestamp: str, now: float) -> str:
    """How long ago an RFC 3339 time was."""
    return ago(now - seconds(timestamp))


def table(rows: Sequence[Line], width: int | None = None) -> Iterator[Line]:
    """Rows with their pieces as columns, each as wide as its widest; the last one is not padded.

    With a `width` it fits into that many columns of a terminal: the widest cells are cut.
    """
    columns = zip(*([text for text, _ in row] for row in rows), strict=True)
    widths = [max(map(cells, column)) for column in columns]
    if width is not None:
        # No gap is needed behind the last column that is not empty.
        apart = max((place for place, most in enumerate(widths) if most), default=0)
        widths = fitting(widths, width - len(_BETWEEN) * apart)
    for row in rows:
        cut = [(clip(text, most), style) for (text, style), most in zip(row, widths, strict=True)]
        *padded, last = zip(cut, widths, strict=True)
        yield [*((pad(text, most) + _BETWEEN, style) for (text, style), most in padded), last[0]]


_BETWEEN = "  "
_NARROWEST = 6
"""The least width of a cell that is cut."""


def fitting(widths: Sequence[int], room: int) -> list[int]:
    """The widths of columns within `room` cells in total: the widest are cut first.

    If even the narrowest columns do not fit, the result is wider than `room`.
    """
    most = max(widths, default=0)
    while most > _NARROWEST and sum(min(width, most) for width in widths) > room:
        most -= 1
    found = [min(width, most) for width in widths]
    left = room - sum(found)
    for place, width in enumerate(widths):  # what is left over by equal shares
        if left > 0 and found[place] < width:
            found[place] += 1
            left -= 1
    return found


def bare(line: Line) -> str:
    """The line without its colours."""
    return "".join(text for text, _ in line).rstrip()


def coloured(line: Line) -> str:
    """The line with its colours as terminals want them."""
    return "".join(
        f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and text else text for text, style in line
    ).rstrip()
