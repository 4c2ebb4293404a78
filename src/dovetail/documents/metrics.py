"""What is measured of each document: a row beside its review, and three metrics for Prometheus.

The row comes first and says whether this was measured before, so that a node which is delivered
again is not counted again. The metrics are ordinary ones of `prometheus_client`: whoever serves
`/metrics` of this process, or adds up a pool's, finds them there. What it must not know: what was
extracted, or who looks.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dovetail.documents.reviews import Measurement

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Finer above 0.8, from where on a document may be approved without anybody looking.
CONFIDENCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)

_making = threading.Lock()


def record(out: str | Path, measured: Measurement) -> bool:
    """Keep it, and count it unless it was kept before; whether it was new.

    In this order: who dies in between has counted one too few, which the rows make good.
    """
    from dovetail.documents.reviews import open_reviews

    is_new = open_reviews(out).measure(measured)
    if is_new:
        observe(measured)
    return is_new


def observe(measured: Measurement) -> None:
    with _making:  # a handler is a thread, and a metric must not be registered twice
        metrics = _metrics()
    metrics.processed.labels(measured.status).inc()
    if measured.status == "completed":  # else it took no time here, or was broken off
        metrics.duration.observe(measured.seconds)
    if measured.confidence is not None:
        metrics.confidence.observe(measured.confidence)


class _Metrics(NamedTuple):
    processed: Any
    duration: Any
    confidence: Any


@cache
def _metrics() -> _Metrics:
    """Made at the first document: to import a library that nobody needs yet takes its time."""
    from prometheus_client import Counter, Histogram

    return _Metrics(
        Counter("documents_processed_total", "Documents by how they ended", labelnames=("status",)),
        Histogram(
            "processing_duration_seconds",
            "From the beginning of a document's extraction to what is kept of it",
            buckets=SECONDS,
        ),
        Histogram(
            "extraction_confidence",
            "How sure the extraction is of a document as a whole, 0 to 1",
            buckets=CONFIDENCE,
        ),
    )
