"""The page of metrics as Prometheus reads it, and the port that serves it.

`ServiceFacts` (queue depth, archive lag, workers) are read at a scrape and left out if they are not
known: a scrape must not fail because Redis is away.

`handler_metrics` adds what handlers have registered with `prometheus_client` themselves. A service
that forks a pool gives the library a folder before handlers are loaded. Each process of the pool
keeps its values there, and the page has their sum, ended processes included.

`MetricsPort` is `/metrics`, `/health/live` and `/health/ready` of a service without an API. A
thread serves them: the service may be a pool of processes without an event loop, and the page must
come while a loop is busy. Without tokens the port listens on the loopback address only. With tokens
a caller needs one, as in the API.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
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

from dovetail.config import env_name
from dovetail.core.errors import DovetailError
from dovetail.telemetry.counters import METRICS, Counters, Histogram, Metric

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
        name, kind, labels, text, _ = metric
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
        if name == "dovetail_build_info":
            return [([version("dovetail"), platform.python_version()], 1.0)]
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
    bounds = (*map(str, histogram.bounds), "+Inf")
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def page(counters: Counters, facts: ServiceFacts) -> bytes:
    """The text of `/metrics`, with the library's metrics of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsPage(counters, facts))
    registry.register(PROCESS_COLLECTOR)
    return generate_latest(registry)


# ── the port ─────────────────────────────────────────────────────────────────────────────

MAX_CONNECTIONS = 16
REQUEST_TIMEOUT_SECONDS = 5.0
"""A client that takes longer to send its request is disconnected."""
PLAIN = "text/plain; charset=utf-8"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1"})


class MetricsPortError(DovetailError):
    type = "cannot_listen"


class MetricsPort:
    """A context manager: it serves until its end."""

    def __init__(
        self,
        port: int,
        page: Callable[[], tuple[bytes, str]],
        *,
        live: Callable[[], bool],
        ready: Callable[[], bool],
        allowed: Callable[[bytes], bool] | None,
    ) -> None:
        """`page` gives a text and its content type. `allowed` says whether a token is valid; None
        if no token is needed."""
        self._port = port
        self.page = page
        self.live = live
        self.ready = ready
        self.allowed = allowed

    def __enter__(self) -> MetricsPort:
        try:
            self._server = _MetricsServer(self, self._port)
        except OSError as error:
            raise MetricsPortError(
                f"port {self._port} ({env_name('metrics_port')}): {error.strerror}; "
                "each service on a machine needs a port of its own"
            ) from None
        # A child process that outlives this one must not keep the port from the next service.
        listening = weakref.ref(self._server.socket)
        os.register_at_fork(after_in_child=lambda: _close(listening()))
        thread = threading.Thread(
            target=self._server.serve_forever, name="dovetail-metrics", daemon=True
        )
        thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _close(listening: socket.socket | None) -> None:
    if listening is not None:
        listening.close()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, about: MetricsPort, port: int) -> None:
        self.about = about
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        everywhere = about.allowed is not None
        if everywhere and socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        host = "" if everywhere else "127.0.0.1"
        super().__init__((host, port), _MetricsRequest)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "", self.socket.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics was broken off", exc_info=True)


class _MetricsRequest(BaseHTTPRequestHandler):
    server: _MetricsServer
    timeout = REQUEST_TIMEOUT_SECONDS
    server_version = "dovetail"
    sys_version = ""

    def do_GET(self) -> None:
        path, about = self.path.partition("?")[0], self.server.about
        if path == "/health/live":
            self._answer_health(about.live(), b"ok\n", b"the service does not answer\n")
        elif path == "/health/ready":
            self._answer_health(
                about.ready(), b"ok\n", b"Redis does not answer, or the service is ending\n"
            )
        elif path != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"there are /metrics, /health/live, /health/ready\n")
        elif self._is_allowed():
            text, kind = about.page()
            self._answer(HTTPStatus.OK, text, kind)

    def _is_allowed(self) -> bool:
        """Whether the caller may see the metrics; if not, the refusal was sent."""
        allowed = self.server.about.allowed
        if allowed is None:
            # DNS rebinding: a website may let its own name resolve to this machine.
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name.lower() in LOOPBACK_NAMES:
                return True
            self._answer(HTTPStatus.FORBIDDEN, b"this service is not called that\n")
            return False
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and allowed(token.strip().encode("latin-1", "replace")):
            return True
        self._answer(
            HTTPStatus.UNAUTHORIZED,
            b"a token is needed: Authorization: Bearer <token>\n",
            challenge='Bearer realm="dovetail"',
        )
        return False

    def _answer_health(self, well: bool, yes: bytes, no: bytes) -> None:
        self._answer(*((HTTPStatus.OK, yes) if well else (HTTPStatus.SERVICE_UNAVAILABLE, no)))

    def _answer(
        self, status: HTTPStatus, text: bytes, kind: str = PLAIN, *, challenge: str | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if challenge is not None:
            self.send_header("WWW-Authenticate", challenge)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: scrapes come every few seconds."""
