"""What is kept of an exception: its type, what it says, and where in the user's code it rose."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.core.errors import DovetailError

_PACKAGE = str(Path(__file__).parents[1])
_FOREIGN = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
LONGEST_MESSAGE = 10_000
LONGEST_TYPE = 200


def describe(error: BaseException, redact: Callable[[str], str] = str) -> dict[str, Any]:
    """`type`, `message` and, if it rose in the user's code, `where` (`file.py:31`).

    Texts are redacted before they are cut: of a cut secret the beginning would stay.
    """
    kind = error.type if isinstance(error, DovetailError) else type(error).__name__
    kind = _storable(redact(str(kind)), LONGEST_TYPE)
    try:
        message = redact(str(error))
    except Exception:
        message = "(its text could not be made)"
    described = {"type": kind, "message": _storable(message, LONGEST_MESSAGE) or kind}
    where = _where(error)
    if where is not None:
        described["where"] = redact(where)
    return described


def _storable(text: str, longest: int) -> str:
    """Cut, and without the lone surrogates that no JSON can hold."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()


def _where(error: BaseException) -> str | None:
    """The deepest line that is neither ours, nor Python's, nor a library's."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not name.startswith(("<", _PACKAGE, *_FOREIGN)):
            found = (name, line)
    if found is None:
        return None
    path = Path(found[0])
    with suppress(ValueError, OSError):  # elsewhere, or the working directory is gone
        path = path.relative_to(Path.cwd())
    return f"{path}:{found[1]}"
