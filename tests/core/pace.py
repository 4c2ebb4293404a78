"""The processor's time that something takes, in seconds of an idle machine.

Even that time grows on a shared machine, whose cores share caches and clocks. A fixed piece of
work, measured beside what is tested, says by how much; so a limit can be tight without failing
for what the neighbours do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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


def seconds_of(work: Callable[[], Any], enough: float) -> float:
    """The best of some tries, as many as it takes to be below `enough`."""
    best = float("inf")
    for _ in range(TRIES):
        took = _measured(work)
        if took > enough:
            took /= max(1.0, _measured(_work) / QUIET) * SLOWED
        best = min(best, took)
        if best <= enough:
            break
    return best
