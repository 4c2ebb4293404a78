"""The three streams of this process, and all that the command line writes to them.

Every line leaves through `say` or `complain`. With `--json`, `document` keeps stdout for one JSON
document.
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
"""Characters that are not printable but harmless: line breaks, and spaces of any width."""


def prepare_streams() -> None:
    """Make sure that the streams exist and can print any text.

    A shell may close one (`>&-`): the next opened file would then get its number.
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
    """Whether it can show a view that is repainted."""
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def shows_colours(stream: IO[str]) -> bool:
    """Whether colours are wanted, too. `NO_COLOR` turns off colours, not the view."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def knows_signs(stream: TextIO) -> bool:
    """Whether it can show ✓ and similar signs."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


def width() -> int:
    if sys.stdout.isatty():
        return shutil.get_terminal_size((WIDTH_OF_A_LOG, 24)).columns
    return WIDTH_OF_A_LOG


def room() -> int | None:
    """The columns for a table: those of the terminal, or None for a file."""
    return width() if sys.stdout.isatty() else None


def say(line: Line | str = "") -> None:
    """Print a line of the result to stdout."""
    _write(sys.stdout, line)


def complain(line: Line | str) -> None:
    """Print a line about a problem to stderr."""
    sys.stdout.flush()  # so that the two streams stand in order where they are one
    _write(sys.stderr, line)


def _write(stream: TextIO, line: Line | str) -> None:
    # The last step before a terminal: control characters are escaped here at the latest.
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
    """Keep stdout for one document: everything else that prints there goes to stderr.

    By descriptor, not by `sys.stdout`, so that it holds for subprocesses of handlers, too.
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
    """The reader of stdout is gone: discard the rest, without another error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)


Write = Callable[[bytes], None]


def json_bytes(value: Any) -> bytes:
    from orjson import OPT_INDENT_2

    return f"{json_text(value, OPT_INDENT_2)}\n".encode()


def json_text(value: Any, option: int = 0) -> str:
    """The value as JSON, with every control character as `\\uXXXX`."""
    from orjson import dumps

    return printable(dumps(value, option=option).decode())


def document_if(wanted: bool) -> AbstractContextManager[Write | None]:
    """Keep stdout for a document that is written at the end, if one is wanted."""
    return document() if wanted else nullcontext()


def print_json(value: Any) -> None:
    """Print the document at once."""
    with document() as write:
        write(json_bytes(value))
