"""Describes an exception of a handler: its type, its message, its line in the user's code, and its
traceback with all its causes.

The class of an exception may override anything, and reading it may raise anything, even
`SystemExit`, or never end. Such errors never leave this module.
"""

from __future__ import annotations

import asyncio
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.core.errors import DovetailError
from dovetail.core.text import cut_middle

_PACKAGE = str(Path(__file__).parents[1])
_ASYNCIO = str(Path(asyncio.__file__).parent)
_FOREIGN = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# The attributes of the base classes: a subclass may hide them.
_TRACEBACK = vars(BaseException)["__traceback__"]
_CAUSE = vars(BaseException)["__cause__"]
_CONTEXT = vars(BaseException)["__context__"]
_SUPPRESSED = vars(BaseException)["__suppress_context__"]
_FIELDS = vars(BaseException)["__dict__"]
_MEMBERS = vars(BaseExceptionGroup)["exceptions"]
_READ = frozenset(
    {
        *("__cause__", "__context__", "__suppress_context__", "__traceback__"),
        *("__notes__", "__class__", "__getattribute__", "__getattr__", "exceptions"),
    }
)
"""What Python's own printer reads of an exception."""
_HEAP_TYPE = 1 << 9
"""The flag of a class that Python code has made."""
MAX_MESSAGE_CHARS = 10_000
MAX_TYPE_CHARS = 200
MAX_WHERE_CHARS = 1000
MAX_EXCEPTIONS = 100
"""Of one chain, with the members of groups: Python's own printer reads as many as there are."""
MAX_FRAMES = 2000
"""Of all their stacks: the same holds for them."""
MAX_SHOWN_CAUSES = 10
MAX_SHOWN_FRAMES = 50
"""At each end of a stack, where a chain is too large for Python's own printer."""
MAX_NOTES = 100
UNREADABLE = "(its text could not be made)"


def describe(error: BaseException, redact: Callable[[str], str] = str) -> dict[str, Any]:
    """`type`, `message`, `traceback` and, if it was raised in the user's code, `where`
    (`file.py:31 in fetch`).

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
        described["where"] = _storable(redact(where), MAX_WHERE_CHARS)
    text = _attempted(partial(_printed, error)) or _attempted(partial(_plain, error))
    if text is not None:
        described["traceback"] = cut_middle(_storable(redact(text.rstrip())))
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


def _storable(text: str, longest: int | None = None) -> str:
    """Cut, and without lone surrogates, which JSON cannot hold."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()


def _where(error: BaseException) -> str | None:
    """The deepest line outside Dovetail, Python and installed packages."""
    found = None
    for frame, line in traceback.walk_tb(_TRACEBACK.__get__(error)):
        name = frame.f_code.co_filename
        if not name.startswith(("<", _PACKAGE, *_FOREIGN)):
            found = (name, line, frame.f_code.co_name)
    if found is None:
        return None
    path = Path(found[0])
    with suppress(ValueError, OSError):  # in another directory, or this one is gone
        path = path.relative_to(Path.cwd())
    return f"{path}:{found[1]} in {found[2]}"


# ── tracebacks ───────────────────────────────────────────────────────────────────────────


def _printed(error: BaseException) -> str | None:
    """The chain as Python prints it; None if Python's own printer cannot be trusted with it."""
    if not _is_ordinary(error):
        return None
    printed = traceback.TracebackException(
        type(error), error, _TRACEBACK.__get__(error), compact=True
    )
    todo = [printed]
    while todo:
        one = todo.pop()
        if one.stack:
            del one.stack[: _leading([frame.filename for frame in one.stack])]
        todo += [each for each in (one.__cause__, one.__context__) if each is not None]
        todo += one.exceptions or ()
    return "".join(printed.format())


def _leading(files: list[str]) -> int:
    """How many frames at the top are Dovetail's own, with the event loop between them, which a
    process of Celery's pool has. The innermost frame always stays."""
    found = 0
    for at, name in enumerate(files[:-1], 1):
        if name.startswith(_PACKAGE):
            found = at
        elif not name.startswith(_ASYNCIO):
            break
    return found


def _is_ordinary(error: BaseException) -> bool:
    """Whether the chain is small, and no class in it overrides what the printer reads.

    Such a class could return another cause each time it is asked.
    """
    todo, seen, frames = [error], set[int](), 0
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        notes = _FIELDS.__get__(one).get("__notes__")
        if len(seen) > MAX_EXCEPTIONS or _overrides(type(one)):
            return False
        if notes is not None and (type(notes) is not list or len(notes) > MAX_NOTES):
            return False
        for _ in traceback.walk_tb(_TRACEBACK.__get__(one)):
            frames += 1
            if frames > MAX_FRAMES:
                return False
        above = (_CAUSE.__get__(one), _CONTEXT.__get__(one))
        todo += [each for each in above if each is not None]
        if is_a(one, BaseExceptionGroup):
            todo += _MEMBERS.__get__(one)
    return True


def _overrides(kind: type) -> bool:
    for each in type.__getattribute__(kind, "__mro__"):
        is_own = type.__getattribute__(each, "__flags__") & _HEAP_TYPE
        if is_own and not _READ.isdisjoint(type.__getattribute__(each, "__dict__")):
            return True
    return False


def _plain(error: BaseException) -> str:
    """The last exceptions of the chain, read by the attributes of the base classes alone."""
    parts: list[str] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if len(seen) == MAX_SHOWN_CAUSES:
            parts.append("… earlier exceptions left out …\n")
            break
        seen.add(id(one))
        parts.append("".join(_plain_lines(one)))
        cause = _CAUSE.__get__(one)
        if cause is not None:
            one, link = cause, "The above exception was the direct cause of the following exception"
        elif _SUPPRESSED.__get__(one):
            break
        else:
            one = _CONTEXT.__get__(one)
            link = "During handling of the above exception, another exception occurred"
        if one is not None and id(one) not in seen:
            parts.append(f"\n{link}:\n\n")
    return "".join(reversed(parts))


def _plain_lines(error: BaseException) -> Iterator[str]:
    top: TracebackType | None = _TRACEBACK.__get__(error)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(top)]
    if files and top is not None:
        yield "Traceback (most recent call last):\n"
        count = len(files) - _leading(files)
        for _ in range(len(files) - count):
            assert top is not None  # noqa: S101
            top = top.tb_next
        shown = min(count, MAX_SHOWN_FRAMES)
        yield from traceback.extract_tb(top, limit=shown).format()
        if count > 2 * shown:
            yield f"  … {count - 2 * shown:,} frames left out …\n"
        if count > shown:
            yield from traceback.extract_tb(top, limit=-min(count - shown, shown)).format()
    kind = _attempted(partial(_kind, error)) or "Exception"
    message = _attempted(partial(_exact, error))
    yield f"{kind}: {UNREADABLE if message is None else message}\n"
    notes = _FIELDS.__get__(error).get("__notes__")
    if type(notes) is list:
        yield from (f"{note}\n" for note in notes[:MAX_NOTES] if type(note) is str)
    if is_a(error, BaseExceptionGroup):
        for at, member in enumerate(_MEMBERS.__get__(error)[:MAX_SHOWN_CAUSES], 1):
            kind = _attempted(partial(_kind, member)) or "Exception"
            yield f"  {at}. {kind}: {_attempted(partial(_exact, member)) or UNREADABLE}\n"
