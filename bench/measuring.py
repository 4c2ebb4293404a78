"""Times things fairly on a machine that is not quiet.

Contestants run in rounds: each contestant runs once per round, in an order that rotates, so that a
slow minute hits all alike. Garbage is collected before each timed run, and the collector is on
while it lasts. A ratio is the median of the ratios within the rounds, and targets are held against
that. The ratio of the best times is shown beside it, but decides nothing: one quiet moment that
only one contestant met would move it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Times = list[float]


@dataclass(frozen=True)
class Summary:
    median: float
    best: float
    spread: float
    """The middle half of the times, as a share of the median."""


def timed(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cpu_taken(work: Callable[[], object]) -> Callable[[], float]:
    """Work that answers the CPU seconds it took in this process, those of its threads included."""

    def measured() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    return measured


def rounds(
    work: Mapping[str, T], *, count: int, warmup: int, timed: Callable[[T], float] = timed
) -> dict[str, Times]:
    """The times of all contestants, round by round; those of the warm-up rounds are thrown away.

    `timed` is for work that is done elsewhere, and its time taken there.
    """
    names = list(work)
    times: dict[str, Times] = {name: [] for name in names}
    for number in range(warmup + count):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds = timed(work[name])
            if number >= warmup:
                times[name].append(seconds)
    return times


def summary(times: Times) -> Summary:
    median = statistics.median(times)
    if len(times) < 2:
        return Summary(median, median, 0.0)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Summary(median, min(times), (high - low) / median)


def ratio(above: Times, below: Times) -> float:
    """How many times as long `above` takes, compared round by round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def best_ratio(above: Times, below: Times) -> float:
    """The same by the best time of each."""
    return min(above) / min(below)
