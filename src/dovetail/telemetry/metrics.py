"""What a process has counted: made from events, read by whoever exports it.

Plain dictionaries, because every node of every run comes through here; the vendor's library sees
them only when somebody asks. A row of `METRICS` is a metric of the contract, a row of `EVENTS`
says what an event adds to it. What it must not know: how a metric is written down, or who asks.

The metrics that handlers make themselves: what they have registered with `prometheus_client`.

A process that runs handlers tells what is in its default registry. One that forks a pool gives the
library a folder before handlers are loaded, in which each process of the pool keeps its values; the
sum over them is told, with those that have ended. What it must not know: what is measured.

Counts as Prometheus reads them.

What was counted is in a `Tally`; what can only be asked (what waits, who lives) is asked when
somebody looks, and left out if there is no answer: a scrape must not fail because Redis is away.
What it must not know: where a count comes from, or who asks.
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

MOST_LABELS = 1000
"""Sets of label values that one metric has: names come from definitions, and anybody may send a
thousand of them. What comes later is counted under `OTHER`."""
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
    Metric("dovetail_workers_alive", "gauge", (), "Workers that are heard of"),
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
    """How often what was observed was at most each of `SECONDS`, or above; and its sum."""

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
    def __init__(self) -> None:
        self.counts: dict[str, dict[Labels, int]] = {
            metric.name: {} for metric in METRICS if metric.kind == "counter"
        }
        self.spreads: dict[str, dict[Labels, Histogram]] = {
            metric.name: {} for metric in METRICS if metric.kind == "histogram"
        }
        # One without labels is there from the first moment on.
        self.counts["dovetail_leases_reaped_total"][()] = 0

    def told(self, graph: Graph, events: Sequence[Event]) -> None:
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
        if labels not in counts and len(counts) >= MOST_LABELS:
            labels = (OTHER,) * len(labels)
        counts[labels] = counts.get(labels, 0) + many

    def observe(self, name: str, labels: Labels, value: float) -> None:
        self._spread(name, labels).add(value)

    def _spread(self, name: str, labels: Labels) -> Histogram:
        spreads = self.spreads[name]
        if labels not in spreads and len(spreads) >= MOST_LABELS:
            labels = (OTHER,) * len(labels)
        return spreads.setdefault(labels, Histogram())

    # ── several processes ────────────────────────────────────────────────────────────────

    def merge(self, other: Counters) -> None:
        for name, counts in other.counts.items():
            for labels, many in counts.items():
                self.count(name, labels, many)
        for name, spreads in other.spreads.items():
            for labels, spread in spreads.items():
                self._spread(name, labels).merge(spread)

    def as_data(self) -> dict[str, Any]:
        """For `of_data` in another process; plain JSON."""
        return {
            "counts": {name: list(counts.items()) for name, counts in self.counts.items()},
            "spreads": {
                name: [(labels, spread.counts, spread.sum) for labels, spread in spreads.items()]
                for name, spreads in self.spreads.items()
            },
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Counters:
        made = cls()
        for name, counts in data["counts"].items():
            made.counts[name] = {tuple(labels): many for labels, many in counts}
        for name, spreads in data["spreads"].items():
            made.spreads[name] = {
                tuple(labels): Histogram(counts, total) for labels, counts, total in spreads
            }
        return made


ENDED = "ended"
"""In a file's name in place of a pid: the sum over processes that have ended."""
PARTS = ("_bucket", "_sum", "_count")
# Of the library's mode for several processes nothing is typed.
_Values: Any = MmapedDict
_Pool: Any = MultiProcessCollector

log = logging.getLogger("dovetail.metrics")


def handler_metrics(
    folder: Path | None = None, is_alive: Callable[[int], bool] | None = None
) -> bytes:
    """Lines for the page. `folder` is where a pool keeps its values; whoever made it says by
    `is_alive` which processes are left, and what others counted is taken together.

    Without what the library tells of every process, and without what has the name of a metric of
    ours: to Prometheus a name that comes twice is a broken page.
    """
    try:
        with _reading:  # two may ask at once, and what is moved must not be read twice
            if folder is not None and is_alive is not None:
                _take_over(folder, is_alive)
            return generate_latest(_HandlerMetrics(folder))
    except Exception:  # it is their code that is asked: what fails there must not cost our metrics
        log.exception("the metrics of handlers are left out of the page")
        return b""


class _HandlerMetrics(Collector):
    def __init__(self, folder: Path | None) -> None:
        self._source = REGISTRY if folder is None else _Pool(None, str(folder))

    def collect(self) -> Iterator[Family]:
        for family in self._source.collect():
            names = {family.name, *(sample.name for sample in family.samples)}
            if names & _names_of_ours():
                _warn_of(family.name)
            elif family.name not in _names_of_every_process():
                yield family


@cache
def _names_of_ours() -> frozenset[str]:
    found = set()
    for name, kind, *_ in METRICS:
        found |= {name, name.removesuffix("_total")}
        if kind == "histogram":
            found |= {name + part for part in PARTS}
    return frozenset(found)


@cache
def _names_of_every_process() -> frozenset[str]:
    standard = (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR)
    return frozenset(family.name for one in standard for family in one.collect())


@cache
def _warn_of(name: str) -> None:
    log.warning("%s of a handler is left out: Dovetail has a metric of that name", name)


# ── a pool of processes ──────────────────────────────────────────────────────────────────

_reading = threading.Lock()


def _take_over(folder: Path, is_alive: Callable[[int], bool]) -> None:
    """Add what processes that have ended counted to one file: a pool may have thousands of them.

    A gauge that is to live as long as its process goes; of others the last value stays.
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
    """What can be asked of the set-up around a process; None is not known at the moment."""

    queue_depth: Mapping[str, int] | None = None
    archive_lag_seconds: float | None = None
    workers_alive: int | None = None


@dataclass(frozen=True, eq=False)
class _MetricsPage(Collector):
    tally: Counters
    facts: ServiceFacts = field(default_factory=ServiceFacts)

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


def _cumulated(spread: Histogram) -> list[tuple[str, float]]:
    total = 0
    found = []
    for bound, count in zip((*map(str, SECONDS), "+Inf"), spread.counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def page(tally: Counters, facts: ServiceFacts) -> bytes:
    """The text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsPage(tally, facts))
    return generate_latest(registry)
