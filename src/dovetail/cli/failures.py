"""How a command fails: one line on stderr for people, one exit code for scripts.

A traceback is shown only with DOVETAIL_DEBUG.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from dovetail.cli import output as streams
from dovetail.cli.text import plain
from dovetail.core.errors import DovetailError

FAILED, INVALID, INTERRUPTED = 1, 2, 130

# Errors of these types mean invalid input; all others mean that the work failed.
_INVALID_TYPES = frozenset(
    {
        *("handler_error", "invalid_definition", "invalid_input", "invalid_params"),
        *("invalid_review", "invalid_settings"),
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
        streams.discard_output()
        return FAILED
    except OSError as error:  # a full disk, most of all
        if os.environ.get("DOVETAIL_DEBUG"):
            raise
        streams.discard_output()
        what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        try_print_error(what or str(error))
        return FAILED
    except DovetailError as error:
        return report_error(error)
    except Exception as error:
        if os.environ.get("DOVETAIL_DEBUG"):
            raise
        print_error(f"unexpected {type(error).__name__}: {error}")
        streams.complain("this is a bug in dovetail; DOVETAIL_DEBUG=1 shows where it happened")
        return FAILED
    return code


def report_error(error: DovetailError) -> int:
    """Print it in one line; returns the exit code."""
    print_error(str(error))
    return INVALID if error.type in _INVALID_TYPES else FAILED


def try_print_error(message: str) -> None:
    """Print an error if stderr can be written: it may be the same full disk as stdout."""
    try:
        print_error(message)
        sys.stderr.flush()
    except OSError:
        streams.discard_output(2)


def print_error(message: str) -> None:
    streams.complain([("error: ", "bold bad"), (plain(message), "")])
