"""The telemetry of one process: it listens to the stores, counts, traces, and gives the text of
`/metrics`.

A service that forks has a folder. Each child process writes its counts there, and the parent adds
them up. The counts of a child stay after the child has ended.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from dovetail.config import Settings, SettingsError
from dovetail.core.dag import Graph
from dovetail.core.events import Event
from dovetail.core.states import RunStatus
from dovetail.engine.listener import CallersOf, ClientCall, hear_client_calls
from dovetail.engine.ports import Calls, Sender
from dovetail.telemetry import route_of
from dovetail.telemetry.counters import Counters

if TYPE_CHECKING:
    from dovetail.telemetry.metrics import ServiceFacts
    from dovetail.telemetry.tracing import Tracing

WRITE_SECONDS = 0.2
"""How soon a child process writes its new counts into its file."""
ABORTED = "aborted"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
VALUES_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The library's own variable: the folder where `prometheus_client` keeps the values of a pool."""

App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]
"""An ASGI application."""


class RunEnds(Protocol):
    """An application that counts the ends of its own runs."""

    def outputs_wanted(self, handlers: Mapping[str, str]) -> Sequence[str] | None:
        """The nodes whose outputs `ended` needs, by the run's handlers by node id; None if the run
        does not belong to this application."""
        ...

    def ended(self, run_id: str, status: str, outputs: Mapping[str, Any]) -> None: ...


class Telemetry:
    """The `Listener` of a process. `run_ends` gets the ends of the runs that it wants."""

    def __init__(self, tracing: Tracing | None = None, run_ends: RunEnds | None = None) -> None:
        self.run_ends = run_ends
        self.counters = Counters()
        self.tracing = tracing
        self.whole_logs = tracing is not None
        self.depths: Callable[[], Mapping[str, int]] | None = None
        self._wanted: dict[int, Sequence[str] | None] = {}
        """`outputs_wanted` by the id of a graph, as long as the graph lives."""
        self._folder: Path | None = None
        self._adding_up = threading.Lock()
        self._own_file: Path | None = None
        self._writing: threading.Timer | None = None
        hear_client_calls(self.client_call)

    def watch_queue(self, depths: Callable[[], Mapping[str, int]]) -> None:
        self.depths = depths

    def close(self) -> None:
        hear_client_calls(None)
        if self.tracing is not None:
            self.tracing.close()
        if self._own_file is not None:
            self._write()
        elif self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            if os.environ.get(VALUES_FOLDER) == str(self._folder):
                del os.environ[VALUES_FOLDER]

    # ── hooks of the stores ──────────────────────────────────────────────────────────────

    def on_events(
        self, run_id: str, graph: Graph, events: Sequence[Event], version: int | None = None
    ) -> None:
        self.counters.add_events(graph, events, version)
        if self._own_file is not None:
            self._write_soon()

    def on_duration(self, handler: str, seconds: float) -> None:
        self.counters.observe("dovetail_node_duration_seconds", (handler,), max(0.0, seconds))
        if self._own_file is not None:
            self._write_soon()

    def on_notification(self, outcome: str, seconds: float) -> None:
        self.counters.count("dovetail_webhooks_total", (outcome,))
        if outcome == "delivered":
            self.counters.observe("dovetail_webhook_delay_seconds", (), max(0.0, seconds))

    def on_exported(self, outcome: str, many: int, seconds: float) -> None:
        self.counters.count("dovetail_exported_events_total", (outcome,), many)
        if outcome == "written":
            self.counters.observe("dovetail_export_delay_seconds", (), seconds)

    def caller(self) -> str | None:
        return None if self.tracing is None else self.tracing.caller()

    def on_run_finished(
        self, run_id: str, graph: Graph, log: Sequence[Event], caller: str | None
    ) -> None:
        if self.tracing is not None:
            self.tracing.record_run(run_id, graph, log, caller)

    def outputs_wanted(self, graph: Graph) -> Sequence[str] | None:
        if self.run_ends is None:
            return None
        key = id(graph)
        if key not in self._wanted:  # it looks at each node: once for all runs of a graph
            handlers = {spec.id: spec.handler for spec in graph.nodes}
            self._wanted[key] = self.run_ends.outputs_wanted(handlers)
            weakref.finalize(graph, self._wanted.pop, key, None)
        return self._wanted[key]

    def on_outcome(
        self, run_id: str, graph: Graph, status: RunStatus, outputs: Mapping[str, Any]
    ) -> None:
        if self.run_ends is not None:
            self.run_ends.ended(run_id, status.value, outputs)

    def sender(self, sender: Sender, callers_of: CallersOf) -> Sender:
        if self.tracing is None:
            return sender
        from dovetail.telemetry.tracing import TracedSender

        return TracedSender(self.tracing, sender, callers_of)

    def calls(self, calls: Calls, caller_of: Callable[[str], str | None] | None = None) -> Calls:
        if self.tracing is None:
            return calls
        from dovetail.telemetry.tracing import TracedCalls

        return TracedCalls(self.tracing, calls, caller_of)

    # ── calls of handlers ────────────────────────────────────────────────────────────────

    @contextmanager
    def client_call(self, name: str, attributes: Mapping[str, Any]) -> Iterator[ClientCall]:
        """With a span, where calls are traced; a call of generative AI is counted."""
        began = time.monotonic()
        traced = (
            nullcontext(ClientCall())
            if self.tracing is None
            else self.tracing.client_call(name, attributes)
        )
        with traced as span:
            if "gen_ai.operation.name" not in attributes:
                yield span
                return
            call = _CountedCall(span, self.counters, attributes)
            try:
                yield call
            except BaseException as error:
                call.kind = call.kind or type(error).__name__
                raise
            finally:
                call.end(time.monotonic() - began)
                if self._own_file is not None:
                    self._write_soon()

    # ── hooks of the API ─────────────────────────────────────────────────────────────────

    def answered(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        """A request was answered; its status is 0 if the caller went away before."""
        route = route_of(scope)
        labels = (route, str(status) if status else ABORTED)
        self.counters.count("dovetail_http_requests_total", labels)
        self.counters.observe("dovetail_http_request_duration_seconds", (route,), seconds)

    def app(self, app: App) -> App:
        """The application with a span for each request; the same one if nothing is traced."""
        if self.tracing is None:
            return app
        from dovetail.telemetry.tracing import TracedApp

        return TracedApp(self.tracing, app)

    # ── /metrics ─────────────────────────────────────────────────────────────────────────

    def page(self, facts: ServiceFacts) -> bytes:
        """The text of `/metrics`: Dovetail's own metrics, then those of handlers."""
        from dovetail.telemetry.metrics import handler_metrics, page

        with self._adding_up:  # two scrapes at once must not add the counts of an ended child twice
            ours = page(self._whole(), facts)
        if self._folder is None:
            return ours + handler_metrics()
        values = Path(os.environ.get(VALUES_FOLDER, self._folder))
        return ours + handler_metrics(values, _is_alive if values == self._folder else None)

    def _whole(self) -> Counters:
        """These counts and those of all child processes, ended ones included."""
        if self._folder is None:
            return self.counters
        whole = Counters()
        for path in sorted(self._folder.glob("*.json")):
            child = Counters.of_data(orjson.loads(path.read_bytes()))
            if _is_alive(int(path.name.partition("-")[0])):
                whole.merge(child)
            else:
                self.counters.merge(child)
                path.unlink()
        whole.merge(self.counters)
        return whole

    # ── a service that forks ─────────────────────────────────────────────────────────────

    def share(self) -> None:
        """Make the folder for the counts of child processes.

        Call it before handlers are loaded and children forked: `prometheus_client` reads its
        variable when it is imported. If the operator has set the variable, that folder is used
        and never deleted.
        """
        self._folder = Path(mkdtemp(prefix="dovetail-counts-"))
        os.environ.setdefault(VALUES_FOLDER, str(self._folder))

    def in_child(self) -> None:
        """Call it first in a child process: its counts begin at zero and go into its own file."""
        if self._folder is None:
            return
        self.counters = Counters()
        self._own_file = self._folder / f"{os.getpid()}-{os.urandom(4).hex()}.json"

    def leave_child(self, **_: object) -> None:
        """Call it last in a child process; its signature is that of Celery's signal."""
        if self._own_file is not None:
            self.close()

    def _write_soon(self) -> None:
        if self._writing is None:  # a thread, because a child need not have an event loop
            self._writing = threading.Timer(WRITE_SECONDS, self._write)
            self._writing.daemon = True
            self._writing.start()

    def _write(self) -> None:
        self._writing = None
        assert self._own_file is not None  # noqa: S101
        # Replaced in one step: the parent reads either the new file or the old one, never a half.
        part = self._own_file.with_suffix(".part")
        try:
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(orjson.dumps(self.counters.as_data()))
            part.replace(self._own_file)
        except OSError:  # the parent has deleted the folder: no scrape will ask for these counts
            pass


class _CountedCall(ClientCall):
    """A call of generative AI, for its two metrics."""

    def __init__(self, span: ClientCall, counters: Counters, attributes: Mapping[str, Any]) -> None:
        self._span = span
        self._counters = counters
        names = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
        self._labels = tuple(str(attributes.get(name, "")) for name in names)
        self.headers = span.headers
        self.kind = ""

    def answered(self, attributes: Mapping[str, Any]) -> None:
        self._span.answered(attributes)
        for token_type in ("input", "output"):
            tokens = attributes.get(f"gen_ai.usage.{token_type}_tokens")
            if tokens is not None:
                labels = (*self._labels, token_type)
                self._counters.observe("gen_ai_client_token_usage", labels, tokens)

    def failed(self, kind: str) -> None:
        self.kind = kind
        self._span.failed(kind)

    def end(self, seconds: float) -> None:
        labels = (*self._labels, self.kind)
        self._counters.observe("gen_ai_client_operation_duration_seconds", labels, seconds)


def open_telemetry(
    settings: Settings, service: str, run_ends: RunEnds | None = None
) -> Telemetry | None:
    """None if there is neither a port for metrics nor an endpoint for traces.

    Raises `SettingsError` if traces are wanted and cannot be made.
    """
    tracing = open_tracing(service)
    if tracing is None and settings.metrics_port is None:
        return None
    return Telemetry(tracing, run_ends)


def open_tracing(service: str) -> Tracing | None:
    """None if OpenTelemetry's own variables name no endpoint."""
    endpoint = next((name for name in ENDPOINTS if os.environ.get(name, "").strip()), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    protocol = os.environ.get(PROTOCOL, "").strip() or "http/protobuf"
    if protocol != "http/protobuf":
        raise SettingsError(f"{PROTOCOL} is {protocol}, but traces are sent as http/protobuf only")
    try:
        from dovetail.telemetry.tracing import Tracing
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{endpoint} is set, but OpenTelemetry is not installed ({error}): "
            "pip install 'dovetail[otel]', or unset it"
        ) from None
    return Tracing(service)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
