"""What this process has counted, made of events.

Plain dictionaries, because every node of every run is counted. A row of `METRICS` is a metric of
the contract. A row of `EVENTS` says what an event adds to one. This module must not import
prometheus_client: a worker with a pool sets the folder of its values before that library loads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dovetail.core.dag import Graph
from dovetail.core.events import RUN_ENDS, Event

MAX_LABEL_SETS = 1000
"""Of one metric. Labels are names from definitions, and a caller may send any number of those.
Later names are counted under `OTHER`."""
OTHER = "(other)"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


# As OpenTelemetry's conventions for generative AI advise.
TOKENS = tuple(float(4**power) for power in range(14))
OPERATION_SECONDS = tuple(0.01 * 2**power for power in range(14))
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class Metric(NamedTuple):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = SECONDS
    """Of the buckets of a histogram."""


METRICS = (
    Metric("dovetail_runs_total", "counter", ("workflow", "status"), "Runs that ended"),
    Metric(
        "dovetail_runs_by_version_total",
        "counter",
        ("workflow", "version", "status"),
        "Runs of registered versions that ended",
    ),
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
    Metric(
        "dovetail_webhooks_total",
        "counter",
        ("outcome",),
        "Attempts to notify a webhook, delivered or failed, and notifications given up (dead)",
    ),
    Metric(
        "dovetail_webhook_delay_seconds",
        "histogram",
        (),
        "From the end of a run to the delivery of its notification",
    ),
    Metric(
        "dovetail_exported_events_total",
        "counter",
        ("outcome",),
        "Events that were written to the sink, and that could not be written (failed)",
    ),
    Metric(
        "dovetail_export_delay_seconds",
        "histogram",
        (),
        "How old the first event of each write to the sink was",
    ),
    Metric("dovetail_http_requests_total", "counter", ("route", "status"), "Requests answered"),
    Metric(
        "dovetail_http_request_duration_seconds",
        "histogram",
        ("route",),
        "From a request to the end of its answer",
    ),
    Metric(
        "gen_ai_client_token_usage",
        "histogram",
        (*_GEN_AI, "gen_ai_token_type"),
        "Tokens of a call of llm_service",
        TOKENS,
    ),
    Metric(
        "gen_ai_client_operation_duration_seconds",
        "histogram",
        (*_GEN_AI, "error_type"),
        "How long a call of llm_service took",
        OPERATION_SECONDS,
    ),
    Metric("dovetail_build_info", "gauge", ("version", "python"), "1; what runs here"),
)
BOUNDS = {metric.name: metric.bounds for metric in METRICS}

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
    """Counts of observed values by buckets and one above them, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(
        self,
        counts: Sequence[int] | None = None,
        total: float = 0.0,
        bounds: Sequence[float] = SECONDS,
    ) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1) if counts is None else list(counts)
        self.sum = total

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
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

    def add_events(self, graph: Graph, events: Sequence[Event], version: int | None = None) -> None:
        """`version` is the run's, if its definition is registered."""
        for event in events:
            if version is not None and event.type in RUN_ENDS:
                ended = (graph.name, str(version), RUN_ENDS[event.type].value)
                self.count("dovetail_runs_by_version_total", ended)
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
        if labels not in histograms:
            histograms[labels] = Histogram(bounds=BOUNDS[name])
        return histograms[labels]

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
                tuple(labels): Histogram(counts, total, BOUNDS[name])
                for labels, counts, total in histograms
            }
        return made
