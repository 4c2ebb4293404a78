"""How far the documents are: counts, speed, and an estimate that knows the rate limit.

What it must not know: how a document becomes a run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from dovetail.cli.tally import WORTH_AN_ESTIMATE, Tally, speed_words
from dovetail.cli.text import Line, bare, clip, countdown, listed, plain

COMPLETED, CACHED, FAILED, CANCELLED = "completed", "cached", "failed", "cancelled"
_TOLD = (FAILED, CANCELLED, CACHED)
RECENT = 200
"""So many tell the speed."""
_NAMED = 3
"""Files at work that are named; the others are counted."""
_LONGEST_NAME = 40


class DocumentTally(Tally):
    def __init__(self, total: int, at_work: Mapping[str, object]) -> None:
        """`at_work` has the paths of files that are processed now, the one that has waited
        longest first; it changes meanwhile."""
        super().__init__(total)
        self.counts = Counter(dict.fromkeys((COMPLETED, CACHED, FAILED, CANCELLED), 0))
        self.calls_left = total
        """Of those that are left, how many will ask the model: at most that, before each of them
        was looked at."""
        self.calls_per_second: float | None = None
        """The rate limit, where there is something to limit."""
        self.trouble = ""
        """What keeps the one that has waited longest."""
        self._at_work = at_work
        self._ends: deque[float] = deque(maxlen=RECENT)
        """When the last of them ended that were not done before."""

    def add(self, status: str, *, before: bool = False) -> None:
        super().add(status, before=before)
        if not before:
            self._ends.append(self.passed)

    def line(self) -> Line:
        done = self.done
        told = [f"{done:,} of {self.total:,} done"]
        told += [f"{self.counts[state]:,} {state}" for state in _TOLD if self.counts[state]]
        speed = self._speed()
        if speed is not None and done < self.total:
            told += [f"{speed_words(speed)} ({speed * 3600:,.0f}/h)", self._estimate(speed)]
        return [(", ".join(told), "")]

    def picture(self) -> Sequence[Line]:
        lines = [*super().picture()]
        if names := self._names():
            lines.append([(f"  {listed(names, _NAMED)}", "dim")])
        if names and self.trouble:
            lines.append([(f"  {self.trouble}", "wait")])
        return lines

    def standstill(self) -> Line:
        told = bare(super().standstill())
        if names := self._names():
            told += f", at {listed(names, 1)}"
        return [(f"{told}; {self.trouble}" if names and self.trouble else told, "")]

    def _names(self) -> list[str]:
        # Another thread takes files away while this one paints: a list of them is made at once.
        return [clip(plain(Path(path).name), _LONGEST_NAME) for path in [*self._at_work]]

    def summary(self) -> str:
        order = (COMPLETED, CACHED, FAILED, CANCELLED)
        told = [f"{self.counts[state]:,} {state}" for state in order if self.counts[state]]
        return ", ".join(told) or "none done"

    def _speed(self) -> float | None:
        """Of the last ones: what was fast an hour ago says little about the rest."""
        ends = self._ends
        if len(ends) < WORTH_AN_ESTIMATE:
            return None
        return (len(ends) - 1) / max(self.passed - ends[0], 0.001)

    def _estimate(self, speed: float) -> str:
        seconds = (self.total - self.done) / speed
        if self.calls_per_second is not None:
            allowed = self.calls_left / self.calls_per_second
            if allowed > seconds:
                return f"about {countdown(allowed)} left: {self.calls_per_second:g}/s are allowed"
        return f"about {countdown(seconds)} left"
