"""The three streams of this process: what they can show, and what may be written to them.

Every line of the command line leaves through `say` or `complain`, and every document through
`document`. What it must not know: what is said.

What `--json` prints: one document on stdout, and nothing else there.

What it must not know: what the document says.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Any, TextIO

from dovetail.cli.text import JOINERS, Line, bare, coloured, printable
from dovetail.core.text import visible

WIDTH_OF_A_LOG = 120
KEPT = "\n\t\u00a0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))) + JOINERS
"""Characters that are not printable and steer nothing: breaks of lines, and spaces of any width."""


def prepare_streams() -> None:
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
    """Whether it can show a view that moves."""
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def shows_colours(stream: IO[str]) -> bool:
    """Whether colours are wanted there, too. `NO_COLOR` takes them, and not the view."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def knows_signs(stream: TextIO) -> bool:
    """Whether it can show ✓ and its kin."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


def width() -> int:
    if sys.stdout.isatty():
        return shutil.get_terminal_size((WIDTH_OF_A_LOG, 24)).columns
    return WIDTH_OF_A_LOG


def room() -> int | None:
    """The columns that a table may take: those of the terminal, and any number in a file."""
    return width() if sys.stdout.isatty() else None


def say(line: Line | str = "") -> None:
    """One line of what was asked for."""
    _write(sys.stdout, line)


def complain(line: Line | str) -> None:
    """One line of what is wrong."""
    sys.stdout.flush()  # so that the two streams stand in order where they are one
    _write(sys.stderr, line)


def _write(stream: TextIO, line: Line | str) -> None:
    # The last edge before a terminal: whatever was not cleaned before is spelled out here.
    if isinstance(line, str):
        line = visible(line, KEPT)
    else:
        pieces = [(visible(text, KEPT), style) for text, style in line]
        line = coloured(pieces) if shows_colours(stream) else bare(pieces)
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


def discard_output(stream: int = 1) -> None:
    """The reader of stdout is gone: let the rest go nowhere, without another complaint."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)


Write = Callable[[bytes], None]


def json_bytes(value: Any) -> bytes:
    from orjson import OPT_INDENT_2

    return f"{json_text(value, OPT_INDENT_2)}\n".encode()


def json_text(value: Any, option: int = 0) -> str:
    """The same value, with every character that could steer a terminal as `\\uXXXX`."""
    from orjson import dumps

    return printable(dumps(value, option=option).decode())


def document_if(wanted: bool) -> AbstractContextManager[Write | None]:
    """Keep stdout for a document that comes at the end, if one is wanted."""
    return document() if wanted else nullcontext()


def print_json(value: Any) -> None:
    """The document at once, where nobody else prints."""
    with document() as write:
        write(json_bytes(value))
