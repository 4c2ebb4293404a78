"""The page of metrics as Prometheus reads it.

`ServiceFacts` (queue depth, archive lag, workers) are read at a scrape and left out if they are not
known: a scrape must not fail because Redis is away.

`handler_metrics` adds what handlers have registered with `prometheus_client` themselves. A service
that forks a pool gives the library a folder before handlers are loaded. Each process of the pool
keeps its values there, and the page has their sum, ended processes included.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, REGISTRY
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from dovetail.telemetry.counters import METRICS, SECONDS, Counters, Histogram, Metric

ENDED = "ended"
"""In the name of a file instead of a pid: the sum over processes that have ended."""
PARTS = ("_bucket", "_sum", "_count")
# The library's multiprocess mode has no types.
_Values: Any = MmapedDict
_Pool: Any = MultiProcessCollector

log = logging.getLogger("dovetail.metrics")


def handler_metrics(
    folder: Path | None = None, is_alive: Callable[[int], bool] | None = None
) -> bytes:
    """Lines for the page, without the library's own metrics of a process and without names that
    Dovetail has: Prometheus rejects a page that has a name twice.

    `folder` is where a pool keeps its values. `is_alive` is given by the owner of that folder: the
    files of processes that have ended are then merged into one.
    """
    try:
        with _reading:  # two scrapes at once must not merge the same file twice
            if folder is not None and is_alive is not None:
                _merge_ended(folder, is_alive)
            return generate_latest(_HandlerMetrics(folder))
    except Exception:  # an error in a handler's collector must not cost Dovetail's own metrics
        log.exception("the metrics of handlers are left out of the page")
        return b""


class _HandlerMetrics(Collector):
    def __init__(self, folder: Path | None) -> None:
        self._source = REGISTRY if folder is None else _Pool(None, str(folder))

    def collect(self) -> Iterator[Family]:
        for family in self._source.collect():
            names = {family.name, *(sample.name for sample in family.samples)}
            if names & _own_names():
                _warn_of(family.name)
            elif family.name not in _process_metric_names():
                yield family


@cache
def _own_names() -> frozenset[str]:
    found = set()
    for name, kind, *_ in METRICS:
        found |= {name, name.removesuffix("_total")}
        if kind == "histogram":
            found |= {name + part for part in PARTS}
    return frozenset(found)


@cache
def _process_metric_names() -> frozenset[str]:
    standard = (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR)
    return frozenset(family.name for one in standard for family in one.collect())


@cache
def _warn_of(name: str) -> None:
    log.warning("%s of a handler is left out: Dovetail has a metric of that name", name)


# ── a pool of processes ──────────────────────────────────────────────────────────────────

_reading = threading.Lock()


def _merge_ended(folder: Path, is_alive: Callable[[int], bool]) -> None:
    """Merge the files of ended processes into one: a pool may have thousands of processes.

    The `live` gauges of an ended process are deleted; its other gauges stay as they are.
    """
    for path in sorted(folder.glob("*.db")):
        kind, _, pid = path.stem.rpartition("_")
        if pid == ENDED or is_alive(int(pid)):
            continue
        if kind.startswith("gauge_live"):
            path.unlink()
        elif not kind.startswith("gauge"):
            _add(path, folder / f"{kind}_{ENDED}.db")
            path.unlink()


def _add(path: Path, whole: Path) -> None:
    kept = _Values(str(whole))
    try:
        for key, value, *_ in _Values.read_all_values_from_file(path):
            before, _ = kept.read_value(key)
            kept.write_value(key, before + value, 0.0)
    finally:
        kept.close()


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """What is read at a scrape; None is not known at the moment."""

    queue_depth: Mapping[str, int] | None = None
    archive_lag_seconds: float | None = None
    workers_alive: int | None = None


@dataclass(frozen=True, eq=False)
class _MetricsPage(Collector):
    counters: Counters
    facts: ServiceFacts = field(default_factory=ServiceFacts)

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield self._family(metric)

    def _family(self, metric: Metric) -> Family:
        name, kind, labels, text = metric
        if kind == "counter":
            counter = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
            for counted, many in sorted(self.counters.counts[name].items()):
                counter.add_metric(counted, many)
            return counter
        if kind == "histogram":
            family = HistogramMetricFamily(name, text, labels=labels)
            for observed, histogram in sorted(self.counters.histograms[name].items()):
                family.add_metric(observed, _cumulated(histogram), histogram.sum)
            return family
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for values, value in self._gauges(name):
            gauge.add_metric(values, value)
        return gauge

    def _gauges(self, name: str) -> list[tuple[list[str], float]]:
        facts = self.facts
        if name == "dovetail_queue_depth":
            return [
                ([handler], depth) for handler, depth in sorted((facts.queue_depth or {}).items())
            ]
        known = {
            "dovetail_archive_lag_seconds": facts.archive_lag_seconds,
            "dovetail_workers_alive": facts.workers_alive,
        }[name]
        return [] if known is None else [([], known)]


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    total = 0
    found = []
    for bound, count in zip((*map(str, SECONDS), "+Inf"), histogram.counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def page(counters: Counters, facts: ServiceFacts) -> bytes:
    """The text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsPage(counters, facts))
    return generate_latest(registry)
