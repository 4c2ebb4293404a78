"""How far a batch is: counts, speed, and a line that shows them while it goes on.

On a terminal one line is painted in place by a thread of its own, as the view of a run is;
elsewhere a line is printed every few seconds. What it must not know: how an item becomes a run.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from dovetail.cli import streams
from dovetail.cli.text import Line, countdown, duration
from dovetail.core.states import FINAL, RunStatus

LINE_SECONDS = 5.0
WORTH_AN_ESTIMATE = 5
"""So many runs must have ended before their speed says anything."""


class Tally:
    def __init__(self, total: int) -> None:
        self.total = total
        # Every key from the start: another thread sums them up while it paints.
        self.counts: Counter[str] = Counter({status.value: 0 for status in FINAL})
        self.before = 0
        """Of them, those that had ended before this process began."""
        self._began = time.monotonic()

    def add(self, status: str, *, before: bool = False) -> None:
        self.counts[status] += 1
        self.before += before

    @property
    def done(self) -> int:
        return self.counts.total()

    @property
    def passed(self) -> float:
        return time.monotonic() - self._began

    def line(self) -> Line:
        done = self.done
        here = done - self.before
        told = [f"{done:,} of {self.total:,} done"]
        told += [f"{self.counts[s]:,} {s.lower()}" for s in _WORSE if self.counts[s]]
        if here >= WORTH_AN_ESTIMATE and done < self.total:
            speed = here / max(self.passed, 0.001)
            told += [speed_words(speed), f"about {countdown((self.total - done) / speed)} left"]
        return [(", ".join(told), "")]

    def picture(self) -> Sequence[Line]:
        """The line with a bar before it, and what else is worth a look while it goes on."""
        full = round(_BAR * self.done / self.total)
        return [[("━" * full, "good"), ("━" * (_BAR - full), "dim"), ("  ", ""), *self.line()]]

    def standstill(self) -> Line:
        """Said where nothing has ended since the last line."""
        return [(f"{self.done:,} of {self.total:,} done, {duration(self.passed)} passed", "")]

    def summary(self) -> str:
        told = [f"{n:,} {status.lower()}" for status, n in sorted(self.counts.items()) if n]
        return ", ".join(told) or "none done"


_BAR = 30
_WORSE = (RunStatus.FAILED.value, RunStatus.CANCELLED.value)


def speed_words(per_second: float) -> str:
    if per_second >= 10:
        return f"{per_second:,.0f}/s"
    return f"{per_second:.1f}/s" if per_second >= 0.1 else f"{per_second * 60:.1f}/min"


class Progress(Protocol):
    refresh_seconds: float

    def begin(self) -> None: ...
    def refresh(self) -> None: ...
    def end(self) -> None: ...


class PlainProgress:
    refresh_seconds = LINE_SECONDS

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._told = 0

    def begin(self) -> None:
        """Nothing yet."""

    def refresh(self) -> None:
        if self._tally.done != self._told:
            self._told = self._tally.done
            streams.say(self._tally.line())
        else:
            streams.say(self._tally.standstill())
        sys.stdout.flush()

    def end(self) -> None:
        """Nothing was left open."""


def progress_of(tally: Tally) -> Progress:
    if not streams.is_terminal(sys.stdout) or not streams.knows_signs(sys.stdout):
        return PlainProgress(tally)
    from dovetail.cli.live import LiveLines

    return LiveLines(tally.picture)
