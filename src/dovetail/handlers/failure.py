"""Describes an exception of a handler: its type, its message, and its line in the user's code.

The class of an exception may override anything, and reading it may raise anything, even
`SystemExit`. Such errors never leave this module.
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
"""The attribute of the base class: a subclass may hide it."""
MAX_MESSAGE_CHARS = 10_000
MAX_TYPE_CHARS = 200
UNREADABLE = "(its text could not be made)"


def describe(error: BaseException, redact: Callable[[str], str] = str) -> dict[str, Any]:
    """`type`, `message` and, if it was raised in the user's code, `where` (`file.py:31`).

    Texts are redacted before they are cut: the beginning of a cut secret would stay.
    """
    kind = redact(_attempted(partial(_kind, error)) or "Exception")
    message = _attempted(partial(_exact, error))
    message = UNREADABLE if message is None else redact(message)
    described = {
        "type": _storable(kind, MAX_TYPE_CHARS),
        "message": _storable(message, MAX_MESSAGE_CHARS) or kind,
    }
    where = _attempted(partial(_where, error))
    if where is not None:
        described["where"] = redact(where)
    return described


def is_a(error: BaseException, kinds: type | tuple[type, ...]) -> bool:
    """As `isinstance`, but by the type alone: `__class__` may be a property that raises."""
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
    """The text of an object as a plain `str`: a subclass may change when it is cut."""
    return "".join((str(value),))


def _storable(text: str, longest: int) -> str:
    """Cut, and without lone surrogates, which JSON cannot hold."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()


def _where(error: BaseException) -> str | None:
    """The deepest line outside Dovetail, Python and installed packages."""
    found = None
    for frame, line in traceback.walk_tb(_TRACEBACK.__get__(error)):
        name = frame.f_code.co_filename
        if not name.startswith(("<", _PACKAGE, *_FOREIGN)):
            found = (name, line)
    if found is None:
        return None
    path = Path(found[0])
    with suppress(ValueError, OSError):  # in another directory, or this one is gone
        path = path.relative_to(Path.cwd())
    return f"{path}:{found[1]}"
