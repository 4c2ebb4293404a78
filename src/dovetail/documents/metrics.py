"""Measurements: a row for each processing of a document, and three metrics for Prometheus.

A row is provisional while the run goes on: `started`, and from `documents.record_metrics` on
`extracted` or `known`. Only the end of the run makes it `success`, `cached` or `failed`, because a
later step may fail, be killed or run out of time. The key is the run's id, so a step or a run that
is delivered again finds its own row. The rules are pure: time is an argument.

The metrics count ends of runs. A process that knows how its run ended settles the row, and counts
the end if the row changed. In a service `DocumentRunEnds` counts the ends that the engine reports,
and rows are settled when the statistics are read. The metrics are ordinary ones of
`prometheus_client`, on the page `/metrics` of this process or of its pool.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dovetail import DovetailError
from dovetail.documents.files import checked_id, default_out

STARTED, EXTRACTED, KNOWN = "started", "extracted", "known"
SUCCESS, FAILED, CACHED = "success", "failed", "cached"

PROVISIONAL = frozenset({STARTED, EXTRACTED, KNOWN})
COMPLETED = "completed"
"""What earlier versions wrote for `success`, before the run had ended."""
ENDED_WELL = frozenset({SUCCESS, CACHED, COMPLETED})


@dataclass(frozen=True, slots=True)
class Measurement:
    """One processing of a document. Its `key` is the id of the run."""

    document_id: str
    key: str
    status: str
    seconds: float | None
    """None while nothing is measured, and for content that was known: it took no extraction."""
    confidence: float | None
    finished_at: float
    """When it was measured, or its run ended; while it is `started`, when that was."""

    @property
    def may_change(self) -> bool:
        """Whether the run may have ended otherwise since. Earlier versions had keys of three
        parts, which are no ids of runs: their rows stay as they are."""
        return self.status not in ENDED_WELL and ":" not in self.key


MeasuringRule = Callable[[Measurement | None], Measurement]


def begun(document_id: str, key: str, now: float) -> MeasuringRule:
    """An extraction begins. In a run that has succeeded it is only delivered again."""

    def rule(before: Measurement | None) -> Measurement:
        if before is not None and before.status in ENDED_WELL:
            return before
        return Measurement(document_id, key, STARTED, None, None, now)

    return rule


def measured(
    document_id: str, key: str, seconds: float | None, confidence: float, now: float
) -> MeasuringRule:
    """An extraction is done; `seconds` are None where the content was known."""

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
            # No step of this package began: the extraction came from the node cache, or the run
            # ended before it could start.
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


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Finer above 0.8, from where on a document may be approved without a person.
CONFIDENCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)

HANDLERS = "documents."
"""What the names of this package's handlers begin with."""
MEASURING, EXTRACTING = "documents.record_metrics", "documents.extract"

log = logging.getLogger("dovetail.documents")
_making = threading.Lock()


def begin(out: str | Path, document_id: str, run_id: str) -> None:
    """Before the extraction: a process that is killed during it leaves the row `started`."""
    from dovetail.documents.reviews import open_reviews

    hear_of_dags()
    rule = begun(document_id, run_id, time.time())
    open_reviews(out).measure(document_id, run_id, rule)


def note(
    out: str | Path, document_id: str, run_id: str, seconds: float | None, confidence: float
) -> None:
    """After the extraction. `seconds` are None where the content was known."""
    from dovetail.documents.reviews import open_reviews

    hear_of_dags()
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
    """The run has ended; the same end again changes nothing and is not counted again.

    The row is written first: a process that dies in between has counted one too few, and the
    statistics are made of rows. `count` is False where a service counts the ends of its runs.
    """
    from dovetail.documents.reviews import open_reviews

    at = time.time() if ended_at is None else ended_at
    rule = settled(document_id, run_id, good=good, ended_at=at)
    before, after = open_reviews(out).measure(document_id, run_id, rule)
    if count and after is not before:
        observe(after)
    return after


def run_ended(params: Mapping[str, Any], run_id: str, status: str, *, count: bool = True) -> None:
    """Settle the document that a run with these params is about; never raises for what is wrong
    with the params or the folder, because the run has said so already."""
    try:
        out = Path(params["out"]).absolute() if params.get("out") else default_out()
        good = status == "COMPLETED"
        settle(out, checked_id(params.get("document_id")), run_id, good=good, count=count)
    except (DovetailError, TypeError, ValueError) as error:
        log.warning("run %s ended %s, which could not be counted: %s", run_id, status, error)


def hear_of_dags() -> None:
    """Where `run_dag` runs definitions in this process: count their documents by their ends."""
    ended = getattr(sys.modules.get("dovetail.celery"), "dag_ended", None)
    if ended is not None:
        ended.connect(_dag_ended, weak=False, dispatch_uid=__name__)


def _dag_ended(
    *, run_id: str, handlers: Collection[str], params: Mapping[str, Any], status: str, **_: object
) -> None:
    if any(name.startswith(HANDLERS) for name in handlers):
        run_ended(params, run_id, status)


def observe(measured: Measurement) -> None:
    """Count one end of a run."""
    with _making:  # a handler is a thread, and a metric must not be registered twice
        metrics = _metrics()
    metrics.processed.labels(measured.status).inc()
    if measured.status == FAILED:
        return
    if measured.status == SUCCESS and measured.seconds is not None:
        metrics.duration.observe(measured.seconds)  # a cached one took no time here
    if measured.confidence is not None:
        metrics.confidence.observe(measured.confidence)


class DocumentRunEnds:
    """Counts documents where a service drives their runs, whichever process ran the steps."""

    def outputs_wanted(self, handlers: Mapping[str, str]) -> Sequence[str] | None:
        """The nodes whose outputs `ended` needs, of a run with these handlers by node id; None if
        the run is about no document."""
        if not any(handler.startswith(HANDLERS) for handler in handlers.values()):
            return None
        nodes = {handler: node for node, handler in handlers.items()}
        wanted = nodes.get(MEASURING) or nodes.get(EXTRACTING)
        return () if wanted is None else (wanted,)

    def ended(self, run_id: str, status: str, outputs: Mapping[str, Any]) -> None:
        """A run of them has ended so."""
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
    """Made at the first document, because importing the library takes time."""
    from prometheus_client import Counter, Histogram

    return _Metrics(
        Counter("documents_processed_total", "Ends of documents' runs", labelnames=("status",)),
        Histogram(
            "processing_duration_seconds",
            "Of documents that succeeded, from the extraction's beginning until it was recorded",
            buckets=SECONDS,
        ),
        Histogram(
            "extraction_confidence",
            "How sure the extraction is of a document as a whole, 0 to 1",
            buckets=CONFIDENCE,
        ),
    )
