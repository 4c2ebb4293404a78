"""The three streams of this process, all that the command line writes to them, and its exit codes.

Every line leaves through `say` or `complain`. With `--json`, `document` keeps stdout for one JSON
document. A command fails with one line on stderr for people and one exit code for scripts; a
traceback is shown only with DOVETAIL_DEBUG.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Any, TextIO, TypeVar

from dovetail.cli.text import Line, bare, coloured, plain, printable, table
from dovetail.core.errors import DovetailError
from dovetail.core.text import HARMLESS, visible

T = TypeVar("T")

WIDTH_OF_A_LOG = 120
KEPT = "\n\t" + HARMLESS
"""Characters that are not printable but harmless on a screen."""


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
    """The columns for a table: as many as the terminal has, or None for a file."""
    return width() if sys.stdout.isatty() else None


def say(line: Line | str = "") -> None:
    """Print a line of the result to stdout."""
    _write(sys.stdout, line)


def complain(line: Line | str) -> None:
    """Print a line about a problem to stderr."""
    sys.stdout.flush()  # so that the two streams stand in order where they are one
    _write(sys.stderr, line)


def warn(words: str) -> None:
    complain([("warning: ", "bold wait"), (words, "")])


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


def print_lines(lines: Iterable[Line | str]) -> None:
    for line in lines:
        say(line)


def print_answer(answer: dict[str, Any] | list[Line]) -> None:
    """Print what a command made: a JSON document, or lines."""
    if isinstance(answer, dict):
        print_json(answer)
    else:
        print_lines(answer)


def print_reply(
    reply: T, lines: Callable[[T], Iterable[Line | str]], *, as_json: bool = False
) -> None:
    """Print a reply as one JSON document, or as `lines` says it for people."""
    if as_json:
        print_json(reply)
    else:
        print_lines(lines(reply))


def print_page(
    page: Mapping[str, Any],
    head: Sequence[str],
    row: Callable[[dict[str, Any]], Line],
    *,
    empty: str,
    as_json: bool,
) -> None:
    """Print a page of a list as a table, with the option for the next page; `empty` without items.

    With `as_json` it is printed as it is.
    """

    def lines(page: Mapping[str, Any]) -> Iterator[Line | str]:
        if page["items"]:
            yield from headed(head, map(row, page["items"]))
            yield from next_page(page)
        else:
            yield empty

    print_reply(page, lines, as_json=as_json)


def print_history(page: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a page of changes, with who made them."""
    import json

    def row(change: dict[str, Any]) -> Line:
        details = json.dumps(change["details"], ensure_ascii=False)
        return [
            (change["time"] or "", ""),
            (plain(change["actor"]), "bold"),
            (plain(change["action"]), ""),
            (plain(details), "dim"),
        ]

    head = ("TIME", "ACTOR", "ACTION", "DETAILS")
    print_page(page, head, row, empty="nothing was changed", as_json=as_json)


def headed(head: Sequence[str], rows: Iterable[Line]) -> Iterator[Line]:
    """A table with the names of its columns, as wide as the terminal."""
    return table([[(name, "dim") for name in head], *rows], room())


def next_page(page: Mapping[str, Any]) -> Iterator[Line]:
    if page.get("next_cursor"):
        yield [(f"more:  --cursor {page['next_cursor']}", "dim")]


# --- how a command fails -----------------------------------------------------------------------

FAILED, INVALID, INTERRUPTED = 1, 2, 130

# Errors of these types mean invalid input; all others mean that the work failed.
_INVALID_TYPES = frozenset(
    {
        *("handler_error", "invalid_definition", "invalid_input", "invalid_params"),
        *("invalid_recording", "invalid_review", "invalid_settings"),
    }
)


class InvalidInput(DovetailError):
    """A file, a param or an option that cannot be used."""

    type = "invalid_input"


def exit_code_of(command: Callable[[], object]) -> int:
    """Run a command; an exception becomes an exit code and a line on stderr."""
    code = 0
    try:
        try:
            command()
        except SystemExit as leaving:
            given = leaving.code
            code = given if isinstance(given, int) else int(given is not None)
        sys.stdout.flush()  # here, where a reader that is gone can still be handled
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return FAILED
    except OSError as error:  # a full disk, most of all
        if os.environ.get("DOVETAIL_DEBUG"):
            raise
        discard_output()
        what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        try_print_error(what or str(error))
        return FAILED
    except DovetailError as error:
        return report_error(error)
    except Exception as error:
        if os.environ.get("DOVETAIL_DEBUG"):
            raise
        print_error(f"unexpected {type(error).__name__}: {error}")
        complain("this is a bug in dovetail; DOVETAIL_DEBUG=1 shows where it happened")
        return FAILED
    return code


def report_error(error: DovetailError) -> int:
    """Print it in one line; returns the exit code."""
    print_error(str(error))
    if getattr(error, "reason", None) == "Redis cannot be reached":
        complain([("start it, or correct DOVETAIL_REDIS_URL", "dim")])
    return INVALID if error.type in _INVALID_TYPES else FAILED


def try_print_error(message: str) -> None:
    """Print an error if stderr can be written: it may be the same full disk as stdout."""
    try:
        print_error(message)
        sys.stderr.flush()
    except OSError:
        discard_output(2)


def print_error(message: str) -> None:
    complain([("error: ", "bold bad"), (plain(message), "")])
