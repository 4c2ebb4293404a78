"""The three streams of this process: what they can show, and what may be written to them.

Every line of the command line leaves through `say` or `complain`, and every document through
`document`. What it must not know: what is said.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TextIO

from dovetail.cli.text import Line, bare, coloured

WIDTH_OF_A_LOG = 120


def prepare() -> None:
    """Make the streams fit for any text, and there at all.

    A shell may close one (`>&-`): the next file that is opened would then take its place.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115  (a descriptor, for good)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A locale without the letter must cost that letter, not the run.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")


def is_terminal(stream: IO[str]) -> bool:
    """Whether colours and a view that moves are wanted there."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def knows_signs(stream: TextIO) -> bool:
    """Whether it can show ✓ and its kin."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


def width() -> int:
    if sys.stdout.isatty():
        return shutil.get_terminal_size((WIDTH_OF_A_LOG, 24)).columns
    return WIDTH_OF_A_LOG


def say(line: Line | str = "") -> None:
    """One line of what was asked for."""
    _write(sys.stdout, line)


def complain(line: Line | str) -> None:
    """One line of what is wrong."""
    sys.stdout.flush()  # so that the two streams stand in order where they are one
    _write(sys.stderr, line)


def _write(stream: TextIO, line: Line | str) -> None:
    if not isinstance(line, str):
        line = coloured(line) if is_terminal(stream) else bare(line)
    if not knows_signs(stream):
        line = line.translate(_PLAIN_SIGNS)
    stream.write(line + "\n")


_PLAIN_SIGNS = str.maketrans(
    {"✓": "+", "✗": "x", "–": "-", "●": "*", "○": "o", "◌": ".", "…": "...", "←": "<-", "→": "->"}
)


@contextmanager
def document() -> Iterator[Callable[[bytes], None]]:
    """Keep stdout for one document: whatever else prints there goes to stderr.

    By descriptor rather than by `sys.stdout`, so that it holds for what a handler's own
    subprocesses print, too.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)

    def write(content: bytes) -> None:
        with open(kept, "wb", closefd=False) as out:
            out.write(content)

    try:
        yield write
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def nobody_reads(stream: int = 1) -> None:
    """The reader of stdout is gone: let the rest go nowhere, without another complaint."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)
