"""The statistics of documents, from their measurements: how many an hour, how long, how well.

Pure: rows in, figures out. The rate is over the time of work: from the beginning of the first
document to the end of the last, without pauses in which there was nothing to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from dovetail.documents.metrics import CACHED, COMPLETED, FAILED, PROVISIONAL, SUCCESS

TARGET = 5000.0
"""Documents an hour."""
PAUSE_SECONDS = 60.0
"""Nothing began or ended for so long: nothing was there to do."""
FEW_DOCUMENTS = 30
SHORT_SECONDS = 10.0
"""Below either, what an hour would bring is not said."""


class Measured(Protocol):
    """A row, as `Reviews.measurements` gives it."""

    @property
    def status(self) -> str: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def confidence(self) -> float | None: ...
    @property
    def finished_at(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Statistics:
    """None is what cannot be known of these documents."""

    documents: int
    """Those whose runs have ended."""
    completed: int
    failed: int
    cached: int
    unfinished: int
    """Those whose runs are not known to have ended: they go on, or their process was killed."""
    docs_per_hour: float | None
    """Completed and cached ones, over `busy_seconds`; None if these are too few to say so."""
    target: float
    met: bool | None
    busy_seconds: float
    windows: int
    """How many stretches of work that was, with pauses of more than a minute between them; one if
    a window was given, which counts as a whole."""
    first_at: float | None
    """When the first of them began, or the window that was given; seconds since 1970."""
    last_at: float | None
    p50_seconds: float | None
    """Of completed ones: a cached one took no time, a failed one was broken off."""
    p95_seconds: float | None
    success_rate: float | None
    mean_confidence: float | None
    cached_share: float | None

    def as_data(self) -> dict[str, Any]:
        """For JSON; times as RFC 3339."""
        times = {"first_at": _time(self.first_at), "last_at": _time(self.last_at)}
        return {**asdict(self), **times}

    def sentences(self) -> list[str]:
        """For people, the answer first."""
        if not self.documents:
            return self._waiting() or ["nothing has been measured here"]
        return [self._speed(), *self._known(), self._ends(), *self._waiting(), *self._qualities()]

    def _speed(self) -> str:
        stretches = "" if self.windows == 1 else f", in {self.windows} stretches"
        work = (
            f"{_counted(self.completed + self.cached)} in {_lasting(self.busy_seconds)} "
            f"of work{stretches}"
        )
        if self.docs_per_hour is None:
            return f"{work}: that is too little to say what an hour would bring"
        verdict = "met" if self.met else "not met"
        return (
            f"{self.docs_per_hour:,.0f} documents an hour; the target of {self.target:,.0f} is "
            f"{verdict} ({work})"
        )

    def _known(self) -> list[str]:
        if not self.cached:
            return []
        return [f"{self.cached:,} of them were known already, and took no extraction"]

    def _waiting(self) -> list[str]:
        if not self.unfinished:
            return []
        verb = "has" if self.unfinished == 1 else "have"
        return [
            f"{_counted(self.unfinished)} {verb} not ended: still running, or killed and not "
            "resumed, or run where this command cannot ask"
        ]

    def _ends(self) -> str:
        rate = 100 * (self.success_rate or 0.0)
        shown = math.floor(rate * 10) / 10  # one that failed among thousands is not 100 %
        return f"{shown:g} % succeeded: {self.failed:,} of {_counted(self.documents)} failed"

    def _qualities(self) -> list[str]:
        found = []
        if self.p50_seconds is not None and self.p95_seconds is not None:
            found.append(
                f"half took at most {_lasting(self.p50_seconds)}, "
                f"95 % at most {_lasting(self.p95_seconds)}"
            )
        if self.mean_confidence is not None:
            found.append(f"confidence {self.mean_confidence:.2f} on average")
        return found


def of(
    measured: Iterable[Measured],
    *,
    target: float = TARGET,
    since: float | None = None,
    until: float | None = None,
) -> Statistics:
    """Of documents that ended from `since` to `until`, if they are given, by how their runs ended;
    one that was processed more than once counts as often, because each time was work."""
    found = [
        row
        for row in measured
        if (since is None or since <= row.finished_at)
        and (until is None or row.finished_at <= until)
    ]
    rows = [row for row in found if row.status not in PROVISIONAL]
    cached = sum(row.status == CACHED for row in rows)
    failed = sum(row.status == FAILED for row in rows)
    completed = len(rows) - cached - failed
    good = completed + cached
    stretches = _given(rows, since, until) or _stretches(rows)
    busy = sum(end - begin for begin, end in stretches)
    enough = len(rows) >= FEW_DOCUMENTS and busy >= SHORT_SECONDS
    rate = 3600 * good / busy if enough else None
    seconds = sorted(
        row.seconds
        for row in rows
        if row.status in (SUCCESS, COMPLETED) and row.seconds is not None
    )
    confidences = [
        row.confidence for row in rows if row.confidence is not None and row.status != FAILED
    ]
    return Statistics(
        documents=len(rows),
        completed=completed,
        failed=failed,
        cached=cached,
        unfinished=len(found) - len(rows),
        docs_per_hour=rate,
        target=target,
        met=None if rate is None else rate >= target,
        busy_seconds=busy,
        windows=len(stretches),
        first_at=stretches[0][0] if stretches else None,
        last_at=stretches[-1][1] if stretches else None,
        p50_seconds=_percentile(seconds, 0.50),
        p95_seconds=_percentile(seconds, 0.95),
        success_rate=good / len(rows) if rows else None,
        mean_confidence=math.fsum(confidences) / len(confidences) if confidences else None,
        cached_share=cached / len(rows) if rows else None,
    )


def _given(
    rows: Sequence[Measured], since: float | None, until: float | None
) -> list[tuple[float, float]]:
    """A window with both ends counts as a whole."""
    return [(since, until)] if rows and since is not None and until is not None else []


def _stretches(rows: Iterable[Measured]) -> list[tuple[float, float]]:
    """When it worked: beginnings and ends, apart by more than a pause."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(
        (row.finished_at - (row.seconds or 0.0), row.finished_at) for row in rows
    ):
        if found and begin - found[-1][1] <= PAUSE_SECONDS:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The least value that this share does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _counted(documents: int) -> str:
    return "1 document" if documents == 1 else f"{documents:,} documents"


def _lasting(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min"
