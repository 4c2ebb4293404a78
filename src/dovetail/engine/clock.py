"""Wall time that never jumps: where it started, plus what a steady counter says.

A run's times are stored, so they are wall times; but a timer must not fire an hour late
because the clock was set back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

Clock = Callable[[], float]
NEAR_SECONDS = 0.25
"""So far apart two clocks count as the same: to ask takes time, and small steps are no gain."""
log = logging.getLogger("dovetail.clock")


def steady_clock() -> Clock:
    offset = time.time() - time.monotonic()
    monotonic = time.monotonic
    return lambda: offset + monotonic()


class StoreClock:
    """The same, but of the store that many machines share: a lease that one of them takes ends
    for all at the same moment, whatever their own clocks say or are set to."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()

    def follow(self, there: float, asked: float, answered: float) -> None:
        """The store's clock was at `there` between two moments of `time.monotonic`: follow it."""
        least, most = there - answered, there - asked
        if least - NEAR_SECONDS <= self._offset <= most + NEAR_SECONDS:
            return
        offset = (least + most) / 2
        ahead = self._offset - offset
        log.warning(
            "the clock here was %.1f s %s the store's, which counts",
            *(abs(ahead), "ahead of" if ahead > 0 else "behind"),
        )
        self._offset = offset
