"""Spans for OpenTelemetry: one for each run, one for each start of a node, one for each request.

All spans of a run are in one trace: the trace of the request that triggered the run, or one whose
id is derived from the run's id. The id of a run's span is derived from the run and its epoch. So
every process can name it as a parent before it exists. It is made from the log when the run has
finished. Tracing is on where `OTEL_EXPORTER_OTLP_ENDPOINT` is set; OpenTelemetry's own variables
configure everything else.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dovetail.core.caching import Caching
from dovetail.core.dag import Graph
from dovetail.core.events import RUN_ENDS, Event
from dovetail.core.items import split_name
from dovetail.core.transitions import Stop
from dovetail.engine.listener import CallersOf, ClientCall
from dovetail.engine.ports import Call, Calls, OnLines, Report, Sender, Task
from dovetail.telemetry import NO_ROUTE, route_of

FLUSH_SECONDS = 2.0
"""For unsent spans when a service ends: a collector that is away must not hold it up."""
MAX_CACHED_CALLERS = 10_000
MAX_SPAN_EVENTS = 100
"""Events of a run that its span shows."""
SPAN_EVENTS = frozenset(
    {
        "node.cached",
        "node.reused",
        "node.parked",
        "node.retrying",
        "node.lost",
        "node.skipped",
        "node.cancelled",
    }
)
BEGINNINGS = frozenset({"run.created", "run.retried"})
ITEM = "dovetail.item"
"""Of a span or an event of an item: its number."""
UNTRACED = ("/health/", "/metrics")

_propagator = TraceContextTextMapPropagator()
_given: ContextVar[tuple[int, int] | None] = ContextVar("dovetail_given_ids", default=None)
"""The trace id and the span id of the next span, where they must not be random."""


class _Ids(RandomIdGenerator):
    def generate_trace_id(self) -> int:
        given = _given.get()
        return super().generate_trace_id() if given is None else given[0]

    def generate_span_id(self) -> int:
        given = _given.get()
        return super().generate_span_id() if given is None else given[1]


class Tracing:
    def __init__(self, service: str) -> None:
        self._service = service
        self._making = threading.Lock()
        self._made: tuple[TracerProvider, Tracer] | None = None

    def _sdk(self) -> tuple[TracerProvider, Tracer]:
        """Made with the first span: so a worker that forks has one in each of its processes."""
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> tuple[TracerProvider, Tracer]:
        own = version("dovetail")
        resource = Resource.create({"service.version": own, "process.pid": os.getpid()})
        if not OTELResourceDetector().detect().attributes.get(SERVICE_NAME):
            resource = resource.merge(Resource({SERVICE_NAME: f"dovetail-{self._service}"}))
        provider = TracerProvider(resource=resource, id_generator=_Ids(), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        # Spans that handlers make themselves are children of the node's span.
        trace.set_tracer_provider(provider)
        return provider, provider.get_tracer("dovetail", own)

    def close(self) -> None:
        """Send the spans that are left, for at most `FLUSH_SECONDS`."""
        if self._made is not None:
            ending = threading.Thread(target=self._made[0].shutdown, daemon=True)
            ending.start()
            ending.join(FLUSH_SECONDS)

    # ── trace and parent ─────────────────────────────────────────────────────────────────

    def caller(self) -> str | None:
        """The `traceparent` of the current span."""
        current = trace.get_current_span().get_span_context()
        return traceparent(current) if current.is_valid else None

    def of_run(self, run_id: str, epoch: int, caller: str | None) -> SpanContext:
        """The span of a run, which may not have been made yet."""
        above = read(caller)
        if above is None:
            trace_id = _number(run_id, 16)
            provider, _ = self._sdk()
            asked = provider.sampler.should_sample(None, trace_id, "run")
            flags = TraceFlags(int(asked.decision is Decision.RECORD_AND_SAMPLE))
        else:
            trace_id, flags = above.trace_id, above.trace_flags
        return SpanContext(trace_id, _number(f"{run_id}:{epoch}", 8), True, flags)

    # ── a run ────────────────────────────────────────────────────────────────────────────

    def record_run(
        self, run_id: str, graph: Graph, log: Sequence[Event], caller: str | None
    ) -> None:
        """Make the span of the last epoch that has ended."""
        epoch = _last_epoch(log)
        if epoch is None:
            return
        first, last, status, error = epoch
        mine = self.of_run(run_id, first.epoch, caller)
        above = read(caller)
        context = Context() if above is None else _below(above)
        token = _given.set((mine.trace_id, mine.span_id))
        try:
            span = self._sdk()[1].start_span(
                f"run {graph.name}",
                context=context,
                start_time=_nanoseconds(first.time),
                attributes={
                    "dovetail.run_id": run_id,
                    "dovetail.workflow": graph.name,
                    "dovetail.epoch": first.epoch,
                    "dovetail.status": status,
                    "dovetail.nodes": len(graph.nodes),
                },
            )
        finally:
            _given.reset(token)
        shown = [event for event in log[first.seq - 1 : last.seq] if event.type in SPAN_EVENTS]
        for event in shown[:MAX_SPAN_EVENTS]:
            attributes = _node_attributes(event.node or "")
            if event.attempt:
                attributes["dovetail.attempt"] = event.attempt
            span.add_event(event.type, attributes, _nanoseconds(event.time))
        if status != "COMPLETED":
            span.set_status(Status(StatusCode.ERROR, error or status))
        span.end(_nanoseconds(last.time))

    # ── a start of a node ────────────────────────────────────────────────────────────────

    @contextmanager
    def start(self, task: Task, above: SpanContext) -> Iterator[Span]:
        names = _node_attributes(task.node_id)
        with self._sdk()[1].start_as_current_span(
            f"node {names['dovetail.node_id']}",
            context=_below(above),
            attributes={
                "dovetail.run_id": task.run_id,
                **names,
                "dovetail.handler": task.handler,
                "dovetail.attempt": task.token.attempt,
                "dovetail.epoch": task.token.epoch,
            },
            # The message of an error may hold a secret; `_TracedCall` sets it redacted.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span

    # ── a call of a handler to another service ───────────────────────────────────────────

    @contextmanager
    def client_call(self, name: str, attributes: Mapping[str, Any]) -> Iterator[TracedClientCall]:
        """A child of the current span: that of the node, or of the call around it."""
        with self._sdk()[1].start_as_current_span(
            name,
            kind=SpanKind.CLIENT,
            attributes=dict(attributes),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            call = TracedClientCall(span)
            try:
                yield call
            except BaseException as error:  # also the end of a node's time
                if not call.has_failed:
                    call.failed(type(error).__name__)
                raise

    # ── a request ────────────────────────────────────────────────────────────────────────

    @contextmanager
    def request(
        self, method: str, headers: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> Iterator[Span]:
        """A child of the caller's span, if the caller sent one."""
        with self._sdk()[1].start_as_current_span(
            method,
            context=_propagator.extract(dict(headers), Context()),
            kind=SpanKind.SERVER,
            attributes=dict(attributes),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span


def _node_attributes(name: str) -> dict[str, Any]:
    """What names a node or an item. The items of a node share its id, and so the name of a span,
    which collectors group by."""
    node, item = split_name(name)
    return {"dovetail.node_id": node} if item is None else {"dovetail.node_id": node, ITEM: item}


class TracedClientCall(ClientCall):
    """A call with a span. What it sends along names the span as the parent."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.headers = {"traceparent": traceparent(span.get_span_context())}
        self.has_failed = False

    def answered(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, value)

    def failed(self, kind: str) -> None:
        self.has_failed = True
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR))


class TracedSender:
    """Sends tasks that carry the `traceparent` of their run's span."""

    def __init__(self, tracing: Tracing, sender: Sender, callers_of: CallersOf) -> None:
        self._tracing = tracing
        self._sender = sender
        self._callers_of = callers_of
        self._callers: dict[str, str | None] = {}

    async def send(self, tasks: Sequence[Task]) -> None:
        unknown = list({task.run_id: None for task in tasks if task.run_id not in self._callers})
        if unknown:
            if len(self._callers) > MAX_CACHED_CALLERS:
                self._callers.clear()
            found = await self._callers_of(unknown)
            self._callers.update(zip(unknown, found, strict=True))
        of_run, callers = self._tracing.of_run, self._callers
        traced = []
        for task in tasks:
            above = of_run(task.run_id, task.token.epoch, callers.get(task.run_id))
            traced.append(task._replace(trace=traceparent(above)))
        await self._sender.send(traced)

    async def stop(self, order: Stop) -> None:
        await self._sender.stop(order)


class TracedCalls:
    """Calls whose handlers run inside a span."""

    def __init__(
        self, tracing: Tracing, calls: Calls, caller_of: Callable[[str], str | None] | None
    ) -> None:
        self._tracing = tracing
        self._calls = calls
        self._caller_of = caller_of

    def open(self, task: Task, report: Report, on_lines: OnLines) -> Call:
        call = self._calls.open(task, report, on_lines)
        above = None
        if self._caller_of is None:
            above = read(task.trace)
            caller = None
        else:
            caller = self._caller_of(task.run_id)
        if above is None:
            above = self._tracing.of_run(task.run_id, task.token.epoch, caller)
        return _TracedCall(self._tracing, call, above)


class _TracedCall:
    __slots__ = ("_above", "_call", "_tracing", "is_async", "is_logged")

    def __init__(self, tracing: Tracing, call: Call, above: SpanContext) -> None:
        self._tracing = tracing
        self._call = call
        self._above = above
        self.is_async = call.is_async
        self.is_logged = call.is_logged

    def begin(self, task: Task) -> Any:
        if self.is_async:
            return self._wait(task)
        with self._tracing.start(task, self._above) as span:
            try:
                return self._call.begin(task)
            except BaseException as error:
                self._set_error(span, error)
                raise

    async def _wait(self, task: Task) -> Any:
        with self._tracing.start(task, self._above) as span:
            try:
                return await self._call.begin(task)
            except BaseException as error:
                self._set_error(span, error)
                raise

    def _set_error(self, span: Span, error: BaseException) -> None:
        described = self._call.describe(error)
        kind, message = str(described.get("type")), str(described.get("message"))
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            message = "stopped, or out of time"
        else:
            span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, message))
        span.add_event(
            "exception",
            {
                "exception.type": kind,
                "exception.message": message,
                "exception.stacktrace": str(described.get("traceback", "")),
            },
        )

    def cancel(self) -> None:
        self._call.cancel()

    def warn(self, message: str) -> None:
        self._call.warn(message)

    def end_log(self) -> None:
        self._call.end_log()

    def seal(self, task: Task, output: Any) -> Any:
        return self._call.seal(task, output)

    def caching(self, task: Task) -> Caching | None:
        return self._call.caching(task)

    def describe(self, error: BaseException) -> dict[str, Any]:
        return self._call.describe(error)


class TracedApp:
    """An ASGI application with a span around each request, health checks and scrapes excepted."""

    def __init__(self, tracing: Tracing, app: Callable[..., Any]) -> None:
        self._tracing = tracing
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith(UNTRACED):
            await self._app(scope, receive, send)
            return
        status = 0

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        attributes = _request_attributes(scope)
        method = attributes["http.request.method"]
        name = "HTTP" if method == OTHER_METHOD else method
        with self._tracing.request(name, _headers(scope), attributes) as span:
            try:
                await self._app(scope, receive, sending)
            finally:
                if (route := route_of(scope)) != NO_ROUTE:
                    span.update_name(f"{name} {route}")
                    span.set_attribute("http.route", route)
                if status:
                    span.set_attribute("http.response.status_code", status)
                if status == 0 or status >= 500:
                    span.set_attribute("error.type", str(status) if status else "aborted")
                    span.set_status(Status(StatusCode.ERROR))


KNOWN_METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)
OTHER_METHOD = "_OTHER"


def _request_attributes(scope: Any) -> dict[str, Any]:
    """Of OpenTelemetry's conventions for HTTP servers, without the query: it may be anything."""
    method = scope["method"]
    found: dict[str, Any] = {
        "http.request.method": method if method in KNOWN_METHODS else OTHER_METHOD,
        "url.path": scope["path"],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    if method not in KNOWN_METHODS:
        found["http.request.method_original"] = method
    if server := scope.get("server"):
        found["server.address"] = server[0]
        if server[1] is not None:
            found["server.port"] = server[1]
    if client := scope.get("client"):
        found["client.address"] = client[0]
    for name, value in scope["headers"]:
        if name == b"user-agent":
            found["user_agent.original"] = value.decode("latin-1")
    return found


def read(text: str | None) -> SpanContext | None:
    """Parse a `traceparent`; None if it is not valid."""
    if text is None:
        return None
    context = _propagator.extract({"traceparent": text}, Context())
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def traceparent(of: SpanContext) -> str:
    return f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags:02x}"


def _below(above: SpanContext) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(above), Context())


def _number(text: str, size: int) -> int:
    """The same for the same text in every process; never 0, which is not a valid id."""
    return int.from_bytes(sha256(text.encode()).digest()[:size], "big") or 1


def _headers(scope: Any) -> dict[str, str]:
    """The trace headers; a header that is sent twice counts as not sent."""
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        if name in (b"traceparent", b"tracestate"):
            found.setdefault(name.decode(), []).append(value.decode("latin-1"))
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _nanoseconds(time: float) -> int:
    return int(time * 1e9)


def _last_epoch(log: Sequence[Event]) -> tuple[Event, Event, str, str | None] | None:
    """Of the last epoch that has ended: its first and its last event, its status, its error.

    A retry may have begun another epoch since.
    """
    found = None
    first: Event | None = None
    for event in log:
        if event.type in BEGINNINGS:
            first = event
        elif event.type == "result.refused" or first is None:
            continue
        elif event.type in RUN_ENDS:
            error = ((event.data or {}).get("error") or {}).get("message")
            found = (first, event, RUN_ENDS[event.type].value, error)
        elif found is not None and found[0] is first:
            # A node that was running when the run failed has finished since.
            found = (first, event, *found[2:])
    return found
