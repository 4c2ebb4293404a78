"""Measurements of documents: a row per run, three metrics for Prometheus, and the statistics.

A row is provisional while the run goes on: `started`, then `extracted` or `known` from
`documents.record_metrics` on. Only the end of the run makes it `success`, `cached` or `failed`,
because a later step may fail, be killed or time out. The key is the run id, so a step or run that
is delivered again finds its own row.

The metrics count ends of runs. A process that knows how its run ended settles the row, and counts
if the row has changed. In a service, `DocumentRunEnds` counts the ends that the engine reports, and
`dovetail documents stats` settles the rows. The metrics are on `/metrics` of this process or pool.

Documents per hour are computed over the working time: from the start of the first document to the
end of the last, without pauses in between.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dovetail import DovetailError, NotFound
from dovetail.documents.files import checked_id, default_out

STARTED, EXTRACTED, KNOWN = "started", "extracted", "known"
SUCCESS, FAILED, CACHED = "success", "failed", "cached"

PROVISIONAL = frozenset({STARTED, EXTRACTED, KNOWN})
COMPLETED = "completed"
"""What earlier versions wrote instead of `success`, before the end of the run."""
ENDED_WELL = frozenset({SUCCESS, CACHED, COMPLETED})


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one run of a document. Its `key` is the run id."""

    document_id: str
    key: str
    status: str
    seconds: float | None
    """None before the measurement, and for known content, which needs no extraction."""
    confidence: float | None
    finished_at: float
    """The time of the start, then of the measurement, then of the end of the run."""

    @property
    def may_change(self) -> bool:
        """Whether the run may end differently later. Keys of earlier versions have three parts and
        are no run ids: their rows stay as they are."""
        return self.status not in ENDED_WELL and ":" not in self.key


MeasuringRule = Callable[[Measurement | None], Measurement]


def begun(document_id: str, key: str, now: float) -> MeasuringRule:
    """An extraction starts. In a run that has succeeded, it is a repeated delivery."""

    def rule(before: Measurement | None) -> Measurement:
        if before is not None and before.status in ENDED_WELL:
            return before
        return Measurement(document_id, key, STARTED, None, None, now)

    return rule


def measured(
    document_id: str, key: str, seconds: float | None, confidence: float, now: float
) -> MeasuringRule:
    """An extraction is done; `seconds` is None if the content was known."""

    def rule(before: Measurement | None) -> Measurement:
        if before is not None and before.status in ENDED_WELL:
            return before
        status = KNOWN if seconds is None else EXTRACTED
        return Measurement(document_id, key, status, seconds, confidence, now)

    return rule


def settled(document_id: str, key: str, *, good: bool, ended_at: float) -> MeasuringRule:
    """The run has ended. The last end counts: a run that failed may be retried and succeed."""

    def rule(before: Measurement | None) -> Measurement:
        if before is None:
            # No handler of this package ran: the extraction came from the node cache, or the run
            # ended before it.
            status, seconds = (CACHED, None) if good else (FAILED, 0.0)
            return Measurement(document_id, key, status, seconds, None, ended_at)
        if not good:
            status = FAILED
        elif before.status in ENDED_WELL:
            return before
        else:
            known = before.status == KNOWN or (before.status == FAILED and before.seconds is None)
            status = CACHED if known else SUCCESS
        if status == before.status:
            return before
        if before.status == STARTED:
            seconds = max(0.0, ended_at - before.finished_at)
            return replace(before, status=status, seconds=seconds, finished_at=ended_at)
        return replace(before, status=status)

    return rule


# --- rows and metrics --------------------------------------------------------------------------

DURATION_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
# Finer above 0.8, where a document may be approved without a person.
CONFIDENCE_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)

HANDLERS = "documents."
"""The prefix of the handlers of this package."""
MEASURING, EXTRACTING = "documents.record_metrics", "documents.extract"

log = logging.getLogger("dovetail.documents")
_making = threading.Lock()


def begin(out: str | Path, document_id: str, run_id: str) -> None:
    """Before the extraction: a process that is killed in it leaves a row `started`."""
    from dovetail.documents.reviews import open_reviews

    connect_dag_signal()
    rule = begun(document_id, run_id, time.time())
    open_reviews(out).measure(document_id, run_id, rule)


def note(
    out: str | Path, document_id: str, run_id: str, seconds: float | None, confidence: float
) -> None:
    """After the extraction. `seconds` is None if the content was known."""
    from dovetail.documents.reviews import open_reviews

    connect_dag_signal()
    rule = measured(document_id, run_id, seconds, confidence, time.time())
    open_reviews(out).measure(document_id, run_id, rule)


def settle(
    out: str | Path,
    document_id: str,
    run_id: str,
    *,
    good: bool,
    ended_at: float | None = None,
    count: bool = True,
) -> Measurement:
    """The run has ended. A repeated end changes nothing and is not counted again.

    The row is written before the metric: a process that dies in between counts one too few, and
    the statistics, which use the rows, are right. `count` is False in a service, which counts.
    """
    from dovetail.documents.reviews import open_reviews

    at = time.time() if ended_at is None else ended_at
    rule = settled(document_id, run_id, good=good, ended_at=at)
    before, after = open_reviews(out).measure(document_id, run_id, rule)
    if count and after is not before:
        observe(after)
    return after


RUNS_ASKED_AT_ONCE = 32


async def settle_ended(
    get_run: Callable[..., Awaitable[Mapping[str, Any]]],
    out: str | Path,
    rows: Sequence[Measurement],
) -> None:
    """Ask `get_run` how the runs of these rows ended; a run that it does not know stays as it is.

    Failed runs are asked, too: a retry may have succeeded since.
    """

    async def settle_one(row: Measurement) -> None:
        try:
            run = await get_run(row.key, nodes=False)
        except NotFound:
            return
        if run["finished_at"] is None:
            return
        good = run["status"] == "COMPLETED"
        if row.status == FAILED and not good:
            return
        ended_at = datetime.fromisoformat(run["finished_at"]).timestamp()
        await asyncio.to_thread(
            settle, out, row.document_id, row.key, good=good, ended_at=ended_at, count=False
        )

    for first in range(0, len(rows), RUNS_ASKED_AT_ONCE):
        await asyncio.gather(*map(settle_one, rows[first : first + RUNS_ASKED_AT_ONCE]))


def run_ended(params: Mapping[str, Any], run_id: str, status: str, *, count: bool = True) -> None:
    """Settle the document of a run with these params. Bad params or a bad folder raise nothing:
    the run has reported them."""
    try:
        out = Path(params["out"]).absolute() if params.get("out") else default_out()
        good = status == "COMPLETED"
        settle(out, checked_id(params.get("document_id")), run_id, good=good, count=count)
    except (DovetailError, TypeError, ValueError) as error:
        log.warning("run %s ended %s, which could not be counted: %s", run_id, status, error)


def connect_dag_signal() -> None:
    """If this process uses Celery: count the documents of the DAGs that `run_dag` runs."""
    ended = getattr(sys.modules.get("dovetail.celery"), "dag_ended", None)
    if ended is not None:
        ended.connect(_dag_ended, weak=False, dispatch_uid=__name__)


def _dag_ended(
    *, run_id: str, handlers: Collection[str], params: Mapping[str, Any], status: str, **_: object
) -> None:
    if any(name.startswith(HANDLERS) for name in handlers):
        run_ended(params, run_id, status)


def observe(measured: Measurement) -> None:
    """Count one end of a run in the metrics."""
    with _making:  # handlers run in threads; a metric must be registered once
        metrics = _metrics()
    metrics.processed.labels(measured.status).inc()
    if measured.status == FAILED:
        return
    if measured.status == SUCCESS and measured.seconds is not None:
        metrics.duration.observe(measured.seconds)  # a cached document took no time
    if measured.confidence is not None:
        metrics.confidence.observe(measured.confidence)


class DocumentRunEnds:
    """Counts the documents of a service by the ends of its runs."""

    def outputs_wanted(self, handlers: Mapping[str, str]) -> Sequence[str] | None:
        """The nodes whose outputs `ended` needs, for a run with these handlers by node id; None if
        the run has no document."""
        if not any(handler.startswith(HANDLERS) for handler in handlers.values()):
            return None
        nodes = {handler: node for node, handler in handlers.items()}
        wanted = nodes.get(MEASURING) or nodes.get(EXTRACTING)
        return () if wanted is None else (wanted,)

    def ended(self, run_id: str, status: str, outputs: Mapping[str, Any]) -> None:
        """Count the run that has ended."""
        observe(_of_a_run(run_id, status, next(iter(outputs.values()), None)))


def _of_a_run(run_id: str, status: str, found: Any) -> Measurement:
    """`found` is the output of `documents.record_metrics`, or of `documents.extract`."""
    output = found if status == "COMPLETED" and isinstance(found, dict) else {}
    cached = output.get("status") == CACHED or output.get("run_id", run_id) != run_id
    ended = FAILED if status != "COMPLETED" else CACHED if cached else SUCCESS
    seconds, confidence = _number(output.get("seconds")), _number(output.get("confidence"))
    return Measurement("", run_id, ended, seconds, confidence, 0.0)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


class _Metrics(NamedTuple):
    processed: Any
    duration: Any
    confidence: Any


@cache
def _metrics() -> _Metrics:
    """Created at the first document: importing `prometheus_client` is slow."""
    from prometheus_client import Counter, Histogram

    return _Metrics(
        Counter("documents_processed_total", "Ends of documents' runs", labelnames=("status",)),
        Histogram(
            "processing_duration_seconds",
            "Of documents that succeeded, from the extraction's beginning until it was recorded",
            buckets=DURATION_BUCKETS,
        ),
        Histogram(
            "extraction_confidence",
            "How sure the extraction is of a document as a whole, 0 to 1",
            buckets=CONFIDENCE_BUCKETS,
        ),
    )


# --- statistics --------------------------------------------------------------------------------

TARGET = 5000.0
"""Documents an hour."""
PAUSE_SECONDS = 60.0
"""A time without starts and ends that is longer is a pause, not work."""
MIN_DOCUMENTS = 30
MIN_SECONDS = 10.0
"""With less than either, `docs_per_hour` is None."""


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
    """The figures of a set of documents. None means: cannot be known."""

    documents: int
    """Documents whose runs have ended."""
    completed: int
    failed: int
    cached: int
    unfinished: int
    """Documents without a known end: still running, or their process was killed."""
    docs_per_hour: float | None
    """Completed and cached documents over `busy_seconds`; None for too few documents."""
    target: float
    met: bool | None
    busy_seconds: float
    windows: int
    """How many stretches of work, with pauses of more than a minute between them; 1 for a given
    window, which counts as a whole."""
    first_at: float | None
    """Start of the first document or of the given window; seconds since 1970."""
    last_at: float | None
    p50_seconds: float | None
    """Of completed documents only: cached and failed ones have no full duration."""
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
        verb = "was" if self.cached == 1 else "were"
        return [f"{self.cached:,} of them {verb} known already, and took no extraction"]

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
        shown = math.floor(rate * 10) / 10  # rounded down: one failure among thousands is not 100 %
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


MAX_P95_SECONDS = 60.0
MIN_SUCCESS = 0.95


class ServiceLevel(NamedTuple):
    """One figure against its limit. `ok` is None if the figure cannot be known."""

    name: str
    value: float | None
    limit: float
    ok: bool | None
    sentence: str


def service_levels(
    found: Statistics,
    *,
    max_p95_seconds: float = MAX_P95_SECONDS,
    min_success: float = MIN_SUCCESS,
) -> list[ServiceLevel]:
    """Whether the speed, the slowest twentieth and the share of successes are as they should be.

    A figure that cannot be known, of too few documents, is no violation.
    """
    rate, p95, share = found.docs_per_hour, found.p95_seconds, found.success_rate
    at_least, at_most = f"at least {found.target:,.0f}", f"at most {_lasting(max_p95_seconds)}"
    percent = f"at least {100 * min_success:g} %"
    shown_rate = "unknown" if rate is None else f"{rate:,.0f}"
    shown_share = "unknown" if share is None else f"{math.floor(1000 * share) / 10:g} %"
    return [
        ServiceLevel(
            "docs_per_hour",
            rate,
            found.target,
            None if rate is None else rate >= found.target,
            f"documents an hour: {shown_rate}, {at_least} wanted",
        ),
        ServiceLevel(
            "p95_seconds",
            p95,
            max_p95_seconds,
            None if p95 is None else p95 <= max_p95_seconds,
            f"95 % took at most: {'unknown' if p95 is None else _lasting(p95)}, {at_most} wanted",
        ),
        ServiceLevel(
            "success_rate",
            share,
            min_success,
            None if share is None else share >= min_success,
            f"succeeded: {shown_share}, {percent} wanted",
        ),
    ]


def statistics_of(
    measured: Iterable[Measured],
    *,
    target: float = TARGET,
    since: float | None = None,
    until: float | None = None,
) -> Statistics:
    """The statistics of the documents that ended from `since` to `until`, if given. A document
    that was processed several times counts each time."""
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
    enough = len(rows) >= MIN_DOCUMENTS and busy >= MIN_SECONDS
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
    """The stretches of work as (start, end), separated by pauses."""
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
    """The smallest value that this share of values does not exceed."""
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
