"""The processor's time that something takes, in seconds of an idle machine.

Even that time grows on a shared machine, whose cores share caches and clocks. A fixed piece of
work, measured beside what is tested, says by how much; so a limit can be tight without failing
for what the neighbours do.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

QUIET = 0.002
"""What `_work` takes on two idle cores of the year 2026."""
TRIES = 5
SLOWED = 10 if sys.gettrace() else 1  # what a measurement of coverage costs


def _work() -> int:
    words = [f"n{at % 977}" for at in range(8000)]
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + len(word)
    return sum(sorted(counts.values())) + len("".join(words).split("n1"))


def _measured(work: Callable[[], Any]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _slowness() -> float:
    return max(1.0, _measured(_work) / QUIET) * SLOWED


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What happens herein takes no longer. For what cannot be tried again; the limit has room.

    The garbage of all the tests before is nothing of it: collecting it takes half a second.
    """
    gc.disable()
    try:
        started = time.thread_time()
        yield
        took = time.thread_time() - started
    finally:
        gc.enable()
    if took > seconds:
        took /= _slowness()
    assert took <= seconds, f"took {took:.2f} s of an idle processor, at most {seconds:g} s allowed"


def seconds_of(work: Callable[[], Any], enough: float) -> float:
    """The best of some tries, as many as it takes to be below `enough`."""
    best = float("inf")
    for _ in range(TRIES):
        took = _measured(work)
        if took > enough:
            took /= _slowness()
        best = min(best, took)
        if best <= enough:
            break
    return best
