"""The metrics of a process: counted from events, and written as Prometheus reads them.

A row of `METRICS` is a metric of the contract. A row of `EVENTS` says what an event adds to one.
`Counters` are plain dictionaries, because every node of every run is counted; `prometheus_client`
sees them only at a scrape. `ServiceFacts` (queue depth, archive lag, workers) are read at a scrape
and left out if they are not known: a scrape must not fail because Redis is away.

`handler_metrics` adds what handlers have registered with `prometheus_client` themselves. A service
that forks a pool gives the library a folder before handlers are loaded. Each process of the pool
keeps its values there, and the page has their sum, ended processes included.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

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

from dovetail.core.dag import Graph
from dovetail.core.events import Event

MAX_LABEL_SETS = 1000
"""Of one metric. Labels are names from definitions, and a caller may send any number of those.
Later names are counted under `OTHER`."""
OTHER = "(other)"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metric(NamedTuple):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric("dovetail_runs_total", "counter", ("workflow", "status"), "Runs that ended"),
    Metric("dovetail_nodes_total", "counter", ("handler", "status"), "Nodes that ended"),
    Metric(
        "dovetail_node_duration_seconds",
        "histogram",
        ("handler",),
        "From the last start of a node to its end, COMPLETED or FAILED",
    ),
    Metric("dovetail_queue_depth", "gauge", ("handler",), "Nodes that wait for a worker"),
    Metric("dovetail_retries_total", "counter", ("handler",), "Failed starts that are tried again"),
    Metric("dovetail_leases_reaped_total", "counter", (), "Starts whose worker was lost"),
    Metric("dovetail_results_refused_total", "counter", ("reason",), "Results that came too late"),
    Metric(
        "dovetail_rate_limit_wait_seconds",
        "histogram",
        ("tag",),
        "How long nodes were parked by their rate limit",
    ),
    Metric("dovetail_archive_lag_seconds", "gauge", (), "How far the archive is behind"),
    Metric("dovetail_workers_alive", "gauge", (), "Workers that send heartbeats"),
    Metric("dovetail_http_requests_total", "counter", ("route", "status"), "Requests answered"),
    Metric(
        "dovetail_http_request_duration_seconds",
        "histogram",
        ("route",),
        "From a request to the end of its answer",
    ),
)

Labels = tuple[str, ...]
Added = tuple[str, Labels, float | None]
"""A metric, its labels and, for a histogram, what was observed."""


def _run(status: str) -> Callable[[Event, Graph], Added]:
    return lambda event, graph: ("dovetail_runs_total", (graph.name, status), None)


def _node(status: str) -> Callable[[Event, Graph], Added]:
    return lambda event, graph: ("dovetail_nodes_total", (_handler(event, graph), status), None)


def _retried(event: Event, graph: Graph) -> Added:
    return "dovetail_retries_total", (_handler(event, graph),), None


def _lost(event: Event, graph: Graph) -> Added:
    return "dovetail_leases_reaped_total", (), None


def _refused(event: Event, graph: Graph) -> Added:
    return "dovetail_results_refused_total", (str((event.data or {}).get("reason", "")),), None


def _parked(event: Event, graph: Graph) -> Added:
    data = event.data or {}
    wait = max(0.0, float(data.get("until", event.time)) - event.time)
    return "dovetail_rate_limit_wait_seconds", (str(data.get("resource_tag", "")),), wait


def _handler(event: Event, graph: Graph) -> str:
    return graph.nodes[graph.index[event.node or ""]].handler


EVENTS: dict[str, Callable[[Event, Graph], Added]] = {
    "run.completed": _run("COMPLETED"),
    "run.failed": _run("FAILED"),
    "run.cancelled": _run("CANCELLED"),
    "node.completed": _node("COMPLETED"),
    "node.cached": _node("COMPLETED"),
    "node.failed": _node("FAILED"),
    "node.skipped": _node("SKIPPED"),
    "node.cancelled": _node("CANCELLED"),
    "node.retrying": _retried,
    "node.lost": _lost,
    "node.parked": _parked,
    "result.refused": _refused,
}


class Histogram:
    """Counts of observed values by the buckets of `SECONDS` and one above, and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, counts: Sequence[int] | None = None, total: float = 0.0) -> None:
        self.counts = [0] * (len(SECONDS) + 1) if counts is None else list(counts)
        self.sum = total

    def add(self, value: float) -> None:
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value

    def merge(self, other: Histogram) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


class Counters:
    """The counts and histograms of one process, by metric and labels."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[Labels, int]] = {
            metric.name: {} for metric in METRICS if metric.kind == "counter"
        }
        self.histograms: dict[str, dict[Labels, Histogram]] = {
            metric.name: {} for metric in METRICS if metric.kind == "histogram"
        }
        # A metric without labels is on the page from the start.
        self.counts["dovetail_leases_reaped_total"][()] = 0

    def add_events(self, graph: Graph, events: Sequence[Event]) -> None:
        for event in events:
            rule = EVENTS.get(event.type)
            if rule is not None:
                name, labels, value = rule(event, graph)
                if value is None:
                    self.count(name, labels)
                else:
                    self.observe(name, labels, value)

    def count(self, name: str, labels: Labels, many: int = 1) -> None:
        counts = self.counts[name]
        if labels not in counts and len(counts) >= MAX_LABEL_SETS:
            labels = (OTHER,) * len(labels)
        counts[labels] = counts.get(labels, 0) + many

    def observe(self, name: str, labels: Labels, value: float) -> None:
        self._histogram(name, labels).add(value)

    def _histogram(self, name: str, labels: Labels) -> Histogram:
        histograms = self.histograms[name]
        if labels not in histograms and len(histograms) >= MAX_LABEL_SETS:
            labels = (OTHER,) * len(labels)
        return histograms.setdefault(labels, Histogram())

    # ── several processes ────────────────────────────────────────────────────────────────

    def merge(self, other: Counters) -> None:
        for name, counts in other.counts.items():
            for labels, many in counts.items():
                self.count(name, labels, many)
        for name, histograms in other.histograms.items():
            for labels, histogram in histograms.items():
                self._histogram(name, labels).merge(histogram)

    def as_data(self) -> dict[str, Any]:
        """JSON for `of_data` in another process."""
        return {
            "counts": {name: list(counts.items()) for name, counts in self.counts.items()},
            "histograms": {
                name: [
                    (labels, histogram.counts, histogram.sum)
                    for labels, histogram in histograms.items()
                ]
                for name, histograms in self.histograms.items()
            },
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Counters:
        made = cls()
        for name, counts in data["counts"].items():
            made.counts[name] = {tuple(labels): many for labels, many in counts}
        for name, histograms in data["histograms"].items():
            made.histograms[name] = {
                tuple(labels): Histogram(counts, total) for labels, counts, total in histograms
            }
        return made


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
