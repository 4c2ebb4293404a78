"""One run that cannot be dealt with stops nobody else.

What is done for many at once fails for all of them if one makes no sense: its record was damaged,
or a message tells what no store can keep. So the others are found and done, and that one is left
to whoever asked. What it must not know: what is done, or with what.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dovetail.core.errors import BrokenRun, NotFound, StoreError

T = TypeVar("T")
R = TypeVar("R")


async def isolated(
    work: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
    items: Sequence[T],
    blame: Callable[[T, Exception], Awaitable[Sequence[R]]],
) -> Sequence[R]:
    """What `work` answers for these, and `blame` for those with which it fails.

    It is done again with halves of them, so it must be harmless to do it twice. That a store or
    the machine cannot go on is nobody's fault: it is raised.
    """
    try:
        return await work(items)
    except BrokenRun as error:
        problem: Exception = error
    except (StoreError, NotFound, OSError, MemoryError):
        raise
    except Exception as error:
        problem = error
    if not items:
        raise problem
    if len(items) == 1:
        return await blame(items[0], problem)
    half = len(items) // 2
    first = await isolated(work, items[:half], blame)
    return [*first, *await isolated(work, items[half:], blame)]


def told(problem: Exception) -> str:
    """For a log: some say nothing but what they are."""
    return f"{type(problem).__name__}: {problem}"
