"""What is kept of an exception: its type, what it says, and where in the user's code it rose.

An exception is an object of the user's, and its class may override anything: to look at it may
raise whatever there is, `SystemExit` included. Nothing of that leaves here.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.core.errors import DovetailError

_PACKAGE = str(Path(__file__).parents[1])
_FOREIGN = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_TRACEBACK = vars(BaseException)["__traceback__"]
"""The attribute itself: a subclass may have hidden it."""
LONGEST_MESSAGE = 10_000
LONGEST_TYPE = 200
UNREADABLE = "(its text could not be made)"


def describe(error: BaseException, redact: Callable[[str], str] = str) -> dict[str, Any]:
    """`type`, `message` and, if it rose in the user's code, `where` (`file.py:31`).

    Texts are redacted before they are cut: of a cut secret the beginning would stay.
    """
    kind = redact(_attempted(partial(_kind, error)) or "Exception")
    message = _attempted(partial(_exact, error))
    message = UNREADABLE if message is None else redact(message)
    described = {
        "type": _storable(kind, LONGEST_TYPE),
        "message": _storable(message, LONGEST_MESSAGE) or kind,
    }
    where = _attempted(partial(_where, error))
    if where is not None:
        described["where"] = redact(where)
    return described


def is_a(error: BaseException, kinds: type | tuple[type, ...]) -> bool:
    """As `isinstance`, without asking the object: its `__class__` may be a property that raises."""
    return issubclass(type(error), kinds)


def _attempted(look: Callable[[], str | None]) -> str | None:
    try:
        return look()
    except BaseException:
        return None


def _kind(error: BaseException) -> str:
    if is_a(error, DovetailError):
        return _exact(error.type)  # type: ignore[attr-defined]
    return _exact(type.__getattribute__(type(error), "__name__"))


def _exact(value: object) -> str:
    """The text of an object, as a plain `str`: a subclass could change its mind when it is cut."""
    return "".join((str(value),))


def _storable(text: str, longest: int) -> str:
    """Cut, and without the lone surrogates that no JSON can hold."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()


def _where(error: BaseException) -> str | None:
    """The deepest line that is neither ours, nor Python's, nor a library's."""
    found = None
    for frame, line in traceback.walk_tb(_TRACEBACK.__get__(error)):
        name = frame.f_code.co_filename
        if not name.startswith(("<", _PACKAGE, *_FOREIGN)):
            found = (name, line)
    if found is None:
        return None
    path = Path(found[0])
    with suppress(ValueError, OSError):  # elsewhere, or the working directory is gone
        path = path.relative_to(Path.cwd())
    return f"{path}:{found[1]}"
