"""A terminal small enough to read: what a live view leaves on the screen.

It knows the few sequences that the view uses and refuses all others, so that a new one is
noticed instead of being misread.
"""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Screen:
    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.scrolled: list[str] = []
        """What has left the screen at the top."""
        self.cursor_shown = True
        self.colours: set[str] = set()

    @property
    def text(self) -> list[str]:
        """The lines that have something on them."""
        return [line for line in ("".join(row).rstrip() for row in self.lines) if line]

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            found = _SEQUENCE.match(text, at)
            if found:
                self._obey(*found.groups())
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    def _put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.row += 1
            if self.row == self.rows:
                self.scrolled.append("".join(self.lines.pop(0)).rstrip())
                self.lines.append([" "] * self.columns)
                self.row -= 1
        else:
            assert char.isprintable(), f"a stray {char!r}"
            if self.column == self.columns:
                self._put("\r")
                self._put("\n")
            self.lines[self.row][self.column] = char
            self.column += 1

    def _obey(self, private: str, numbers: str, order: str) -> None:
        if private:
            assert numbers == "25", f"unknown mode {numbers}"
            self.cursor_shown = order == "h"
        elif order == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif order == "K":
            assert numbers == "2"
            self.lines[self.row] = [" "] * self.columns
        elif order == "m":
            self.colours.update(numbers.split(";"))
        else:
            raise AssertionError(f"unknown sequence {numbers}{order}")
