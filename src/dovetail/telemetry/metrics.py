"""Counts as Prometheus reads them.

What was counted is in a `Tally`; what can only be asked (what waits, who lives) is asked when
somebody looks, and left out if there is no answer: a scrape must not fail because Redis is away.
What it must not know: where a count comes from, or who asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from dovetail.telemetry.tally import METRICS, SECONDS, Metric, Spread, Tally

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Facts:
    """What can be asked of the set-up around a process; None is not known at the moment."""

    queue_depth: Mapping[str, int] | None = None
    archive_lag_seconds: float | None = None
    workers_alive: int | None = None


@dataclass(frozen=True, eq=False)
class _Page(Collector):
    tally: Tally
    facts: Facts = field(default_factory=Facts)

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield self._family(metric)

    def _family(self, metric: Metric) -> Family:
        name, kind, labels, told = metric
        if kind == "counter":
            counter = CounterMetricFamily(name.removesuffix("_total"), told, labels=labels)
            for counted, many in sorted(self.tally.counts[name].items()):
                counter.add_metric(counted, many)
            return counter
        if kind == "histogram":
            histogram = HistogramMetricFamily(name, told, labels=labels)
            for observed, spread in sorted(self.tally.spreads[name].items()):
                histogram.add_metric(observed, _cumulated(spread), spread.sum)
            return histogram
        gauge = GaugeMetricFamily(name, told, labels=labels)
        for values, value in self._gauges(name):
            gauge.add_metric(values, value)
        return gauge

    def _gauges(self, name: str) -> list[tuple[list[str], float]]:
        facts = self.facts
        if name == "dovetail_queue_depth":
            return [
                ([handler], deep) for handler, deep in sorted((facts.queue_depth or {}).items())
            ]
        known = {
            "dovetail_archive_lag_seconds": facts.archive_lag_seconds,
            "dovetail_workers_alive": facts.workers_alive,
        }[name]
        return [] if known is None else [([], known)]


def _cumulated(spread: Spread) -> list[tuple[str, float]]:
    total = 0
    found = []
    for bound, count in zip((*map(str, SECONDS), "+Inf"), spread.counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def page(tally: Tally, facts: Facts) -> bytes:
    """The text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(tally, facts))
    return generate_latest(registry)
