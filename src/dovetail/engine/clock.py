"""Wall time that never jumps: where it started, plus what a steady counter says.

A run's times are stored, so they are wall times; but a timer must not fire an hour late
because somebody set the clock back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def steady_clock() -> Clock:
    offset = time.time() - time.monotonic()
    monotonic = time.monotonic
    return lambda: offset + monotonic()
