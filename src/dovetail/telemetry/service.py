"""What a service tells of itself, in one object: it listens to the stores and is asked by whoever
watches.

A service that forks has a folder in which each child writes down what it has counted; whoever is
asked adds it up, and what a child counted stays after its end. What it must not know: which service
it is part of, or how it is asked.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from dovetail.config import Settings, SettingsError
from dovetail.core.dag import Graph
from dovetail.core.events import Event
from dovetail.core.states import RunStatus
from dovetail.engine.listener import CallersOf
from dovetail.engine.ports import Calls, Sender
from dovetail.telemetry import route_of
from dovetail.telemetry.metrics import Counters

if TYPE_CHECKING:
    from dovetail.telemetry.metrics import ServiceFacts
    from dovetail.telemetry.tracing import Tracing

WRITE_SECONDS = 0.2
"""How soon a child writes down what it has counted."""
ABORTED = "aborted"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
VALUES_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Where `prometheus_client` keeps the values of a pool: its own variable."""


App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]
"""An application as ASGI has it."""


class RunEnds(Protocol):
    """An application that counts the ends of its own runs."""

    def outputs_wanted(self, handlers: Mapping[str, str]) -> Sequence[str] | None:
        """Of a run with these handlers by node id; None if it is not one of its own."""
        ...

    def ended(self, run_id: str, status: str, outputs: Mapping[str, Any]) -> None: ...


class Telemetry:
    """The `Listener` of a process. `run_ends` is told of the ends of runs that it wants."""

    def __init__(self, tracing: Tracing | None = None, run_ends: RunEnds | None = None) -> None:
        self.run_ends = run_ends
        self.tally = Counters()
        self.tracing = tracing
        self.whole_logs = tracing is not None
        self.depths: Callable[[], Mapping[str, int]] | None = None
        self._folder: Path | None = None
        self._adding_up = threading.Lock()
        self._own_file: Path | None = None
        self._writing: threading.Timer | None = None

    def watch_queue(self, depths: Callable[[], Mapping[str, int]]) -> None:
        self.depths = depths

    def close(self) -> None:
        if self.tracing is not None:
            self.tracing.close()
        if self._own_file is not None:
            self._write()
        elif self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            if os.environ.get(VALUES_FOLDER) == str(self._folder):
                del os.environ[VALUES_FOLDER]

    # ── told by the stores ───────────────────────────────────────────────────────────────

    def told(self, run_id: str, graph: Graph, events: Sequence[Event]) -> None:
        self.tally.told(graph, events)
        if self._own_file is not None:
            self._write_soon()

    def took(self, handler: str, seconds: float) -> None:
        self.tally.observe("dovetail_node_duration_seconds", (handler,), max(0.0, seconds))
        if self._own_file is not None:
            self._write_soon()

    def caller(self) -> str | None:
        return None if self.tracing is None else self.tracing.caller()

    def over(self, run_id: str, graph: Graph, log: Sequence[Event], caller: str | None) -> None:
        if self.tracing is not None:
            self.tracing.over(run_id, graph, log, caller)

    def outputs_wanted(self, graph: Graph) -> Sequence[str] | None:
        if self.run_ends is None:
            return None
        return self.run_ends.outputs_wanted({spec.id: spec.handler for spec in graph.nodes})

    def ended(
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

    # ── told by the API ──────────────────────────────────────────────────────────────────

    def answered(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        """A request is over."""
        route = route_of(scope)
        told = str(status) if status else ABORTED
        self.tally.count("dovetail_http_requests_total", (route, told))
        self.tally.observe("dovetail_http_request_duration_seconds", (route,), seconds)

    def app(self, app: App) -> App:
        """The application, with a span for each request, if anybody wants to know."""
        if self.tracing is None:
            return app
        from dovetail.telemetry.tracing import TracedApp

        return TracedApp(self.tracing, app)

    # ── asked ────────────────────────────────────────────────────────────────────────────

    def page(self, facts: ServiceFacts) -> bytes:
        """The text of `/metrics`: what Dovetail counted, and then what handlers did."""
        from dovetail.telemetry.metrics import handler_metrics, page

        with self._adding_up:  # two may ask at once, and nothing shall be taken over twice
            ours = page(self._whole(), facts)
        if self._folder is None:
            return ours + handler_metrics()
        values = Path(os.environ.get(VALUES_FOLDER, self._folder))
        return ours + handler_metrics(values, _is_alive if values == self._folder else None)

    def _whole(self) -> Counters:
        """With what children have counted, those that have ended included."""
        if self._folder is None:
            return self.tally
        whole = Counters()
        for path in sorted(self._folder.glob("*.json")):
            told = Counters.of_data(orjson.loads(path.read_bytes()))
            if _is_alive(int(path.name.partition("-")[0])):
                whole.merge(told)
            else:
                self.tally.merge(told)
                path.unlink()
        whole.merge(self.tally)
        return whole

    # ── a service that forks ─────────────────────────────────────────────────────────────

    def share(self) -> None:
        """Before handlers are loaded and children forked: what they count is counted here, too.

        The library of handlers' own metrics looks at its variable when it is loaded. An operator
        who has set it has a folder, which is used and left alone.
        """
        self._folder = Path(mkdtemp(prefix="dovetail-counts-"))
        os.environ.setdefault(VALUES_FOLDER, str(self._folder))

    def in_child(self) -> None:
        """First thing in a child: it begins at nothing, and writes down what it counts."""
        if self._folder is None:
            return
        self.tally = Counters()
        self._own_file = self._folder / f"{os.getpid()}-{os.urandom(4).hex()}.json"

    def leave_child(self, **_: object) -> None:
        """Last thing in a child, as Celery's signal of it calls it."""
        if self._own_file is not None:
            self.close()

    def _write_soon(self) -> None:
        if self._writing is None:  # a thread's: a child need not have an event loop
            self._writing = threading.Timer(WRITE_SECONDS, self._write)
            self._writing.daemon = True
            self._writing.start()

    def _write(self) -> None:
        self._writing = None
        assert self._own_file is not None  # noqa: S101
        # In one move: whoever adds up reads all of it, or what was there before.
        part = self._own_file.with_suffix(".part")
        try:
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(orjson.dumps(self.tally.as_data()))
            part.replace(self._own_file)
        except OSError:  # the parent is gone, and with it whoever would ask
            pass


def open_telemetry(
    settings: Settings, service: str, run_ends: RunEnds | None = None
) -> Telemetry | None:
    """None if nobody watches: no port for metrics, nowhere to send traces.

    Raises `SettingsError` where traces are wanted and cannot be made.
    """
    tracing = open_tracing(service)
    if tracing is None and settings.metrics_port is None:
        return None
    return Telemetry(tracing, run_ends)


def open_tracing(service: str) -> Tracing | None:
    """Where spans go to an endpoint of OpenTelemetry's own variables; else None."""
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
