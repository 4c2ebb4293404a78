"""Where spans arrive: a real HTTP server that reads OTLP as a collector does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SECONDS = 30.0


@dataclass(frozen=True)
class Received:
    service: str
    pid: int
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    failed: bool
    says: str
    attributes: dict[str, Any]
    events: list[str]
    exceptions: list[dict[str, Any]]
    """The attributes of its `exception` events."""


class Receiver:
    def __enter__(self) -> Receiver:
        self.spans: list[Received] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._asked())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def trace(self, trace_id: str) -> list[Received]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def of_run(self, run_id: str) -> list[Received]:
        return [s for s in list(self.spans) if s.attributes.get("dovetail.run_id") == run_id]

    def wait(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (answer := found()):
            assert time.monotonic() < deadline, f"{what}; there are {self.spans}"
            time.sleep(0.02)
        return answer

    def _asked(self) -> type[BaseHTTPRequestHandler]:
        spans = self.spans

        class Asked(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                spans.extend(_read(request))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        return Asked


def _read(request: ExportTraceServiceRequest) -> list[Received]:
    return [
        Received(
            service=_values(whole.resource.attributes)["service.name"],
            pid=_values(whole.resource.attributes)["process.pid"],
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            failed=span.status.code == 2,
            says=span.status.message,
            attributes=_values(span.attributes),
            events=[event.name for event in span.events],
            exceptions=[_values(e.attributes) for e in span.events if e.name == "exception"],
        )
        for whole in request.resource_spans
        for scope in whole.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
