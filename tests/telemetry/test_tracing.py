"""Spans: one trace for a whole run, whatever triggered it and wherever its nodes ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dovetail.config import SettingsError
from dovetail.telemetry.service import open_tracing

from ..log_text import without_attempts
from .conftest import Three, tracing_to
from .receiver import Received, Receiver
from .services import SCRIPT, SECONDS, SECRET, Services, node, wait_for

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRIGGER = "POST /api/v1/runs"


def traceparent(trace_id: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CALLER}-{flags}"}


def by_name(spans: list[Received]) -> dict[str, Received]:
    found = {span.name: span for span in spans}
    assert len(found) == len(spans), "a span was sent twice"
    return found


def test_a_run_is_one_trace_across_three_processes_under_the_span_of_its_caller(
    three: Three,
) -> None:
    receiver, api = three.receiver, three.api
    run_id = api.run(
        node("a"),
        node("b", "plain", "a"),
        node("c", "spans", "b"),
        name="traced",
        headers=traceparent(TRACE),
    )
    api.ended(run_id)
    receiver.wait(lambda: len(receiver.trace(TRACE)) == 6, "six spans")
    spans = by_name(receiver.trace(TRACE))
    trigger, run = spans[TRIGGER], spans["run traced"]
    assert trigger.parent_id == CALLER
    assert run.parent_id == trigger.span_id
    nodes = [spans["node a"], spans["node b"], spans["node c"]]
    assert {span.parent_id for span in nodes} == {run.span_id}
    # What a handler makes itself is below its node.
    assert spans["of the handler"].parent_id == spans["node c"].span_id
    assert trigger.service == "dovetail-api"
    assert (run.service, run.pid) == ("dovetail-orchestrator", three.orchestrator.pid)
    assert {(span.service, span.pid) for span in nodes} == {("dovetail-worker", three.worker.pid)}
    assert len({trigger.pid, run.pid, nodes[0].pid}) == 3
    assert run.attributes["dovetail.status"] == "COMPLETED"
    assert not run.failed
    assert all(run.start <= span.start <= span.end <= run.end for span in nodes)
    expected = {
        "http.request.method": "POST",
        "http.response.status_code": 202,
        "http.route": "/api/v1/runs",
        "url.path": "/api/v1/runs",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "server.address": "127.0.0.1",
        "client.address": "127.0.0.1",
    }
    assert expected.items() <= trigger.attributes.items()
    assert trigger.attributes["user_agent.original"].startswith("python-httpx")


def test_each_start_of_a_node_is_a_span_with_its_error(three: Three) -> None:
    receiver, api = three.receiver, three.api
    backoff = {"base_delay_seconds": 0.01, "max_delay_seconds": 0.02}
    run_id = api.run(
        node("a", "flaky", config={"fails": 1}, retry=backoff),
        node("b", "broken", "a"),
        node("c", "quick", "b"),
        name="wrong",
    )
    api.ended(run_id)
    spans = receiver.wait(
        lambda: len(found := receiver.of_run(run_id)) == 4 and found, "three starts and a run"
    )
    (run,) = [span for span in spans if span.name == "run wrong"]
    first, second = sorted(
        (span for span in spans if span.name == "node a"),
        key=lambda span: span.attributes["dovetail.attempt"],
    )
    assert (first.failed, second.failed) == (True, False)
    assert first.says == "not yet"
    assert run.failed
    assert "node.retrying" in run.events
    (broken,) = [span for span in spans if span.name == "node b"]
    assert broken.says == "cannot: ***"
    (exception,) = broken.exceptions
    assert exception["exception.type"] == broken.attributes["error.type"]
    assert exception["exception.message"] == "cannot: ***"
    assert exception["exception.stacktrace"].startswith("Traceback (most recent call last):\n")
    assert exception["exception.stacktrace"].endswith("cannot: ***")
    assert (len(first.exceptions), second.exceptions) == (1, [])
    assert SECRET not in str(receiver.spans)
    assert {span.trace_id for span in spans} == {run.trace_id}


def test_the_items_of_a_node_share_the_name_of_its_spans_and_have_their_number(
    three: Three,
) -> None:
    receiver, api = three.receiver, three.api
    backoff = {"base_delay_seconds": 0.01, "max_delay_seconds": 0.02}
    config = {"fails": "{{ item }}"}
    run_id = api.run(
        node("each", "flaky", config=config, retry=backoff, for_each=[0, 1]), name="mapped"
    )
    api.ended(run_id)
    spans = receiver.wait(
        lambda: len(found := receiver.of_run(run_id)) == 4 and found, "three starts and a run"
    )
    (run,) = [span for span in spans if span.name == "run mapped"]
    starts = [span.attributes for span in spans if span.name == "node each"]
    found = [
        (one["dovetail.node_id"], one["dovetail.item"], one["dovetail.attempt"]) for one in starts
    ]
    assert sorted(found) == [("each", 0, 1), ("each", 1, 1), ("each", 1, 2)]
    assert "dovetail.item" not in run.attributes


def test_a_retry_is_its_own_span_in_the_same_trace(three: Three) -> None:
    receiver, api = three.receiver, three.api
    trace_id = "1" * 32
    run_id = api.run(node("a", "broken"), name="again", headers=traceparent(trace_id))
    api.ended(run_id)
    runs = receiver.wait(lambda: [s for s in receiver.of_run(run_id) if s.name == "run again"], "")
    assert api.http.post(f"/api/v1/runs/{run_id}/retry").status_code == 202
    wait_for(lambda: api.ended(run_id)["epoch"] == 2, "the second epoch")
    receiver.wait(lambda: len(receiver.of_run(run_id)) == 4, "two runs and two nodes")
    runs = [span for span in receiver.of_run(run_id) if span.name == "run again"]
    assert {span.attributes["dovetail.epoch"] for span in runs} == {1, 2}
    assert {span.trace_id for span in receiver.of_run(run_id)} == {trace_id}
    parents = {span.parent_id for span in receiver.of_run(run_id) if span.name == "node a"}
    assert parents == {span.span_id for span in runs}


def test_a_run_without_a_caller_has_its_own_trace_and_an_unsampled_caller_none(
    three: Three,
) -> None:
    receiver, api = three.receiver, three.api
    unsampled = api.run(node("a"), name="quiet", headers=traceparent("2" * 32, "00"))
    strange = api.run(node("a"), name="strange", headers={"traceparent": "00-zz-zz-01"})
    api.ended(unsampled)
    api.ended(strange)
    # A trigger without a trace, past the API.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DOVETAIL_", "OTEL_"))}
    (three.services.folder / "flow.yaml").write_text(
        "name: asked\nnodes: [{id: a, handler: quick}, {id: b, handler: quick}]"
    )
    for words in (("workflows", "register", "flow.yaml"), ("trigger", "asked")):
        subprocess.run(
            [SCRIPT, *words],
            cwd=three.services.folder,
            env={**env, "DOVETAIL_REDIS_URL": three.redis_url},
            check=True,
            capture_output=True,
            timeout=SECONDS,
        )
    spans = receiver.wait(
        lambda: (
            len(found := [s for s in receiver.spans if s.name == "run asked"]) == 1
            and len(all_ := receiver.trace(found[0].trace_id)) == 3
            and all_
        ),
        "the run of the command line",
    )
    (run,) = [span for span in spans if span.name == "run asked"]
    assert run.parent_id == ""
    assert {span.parent_id for span in spans if span is not run} == {run.span_id}
    receiver.wait(lambda: len(receiver.of_run(strange)) == 2, "the run of a strange caller")
    assert receiver.trace("2" * 32) == []


def test_an_embedded_server_creates_the_same_spans(services: Services, receiver: Receiver) -> None:
    trace_id = "3" * 32
    api = services.serve(**tracing_to(receiver))
    run_id = api.run(node("a"), node("b", "spans", "a"), headers=traceparent(trace_id))
    api.ended(run_id)
    receiver.wait(lambda: len(receiver.trace(trace_id)) == 5, "five spans")
    spans = by_name(receiver.trace(trace_id))
    assert spans["run f"].parent_id == spans[TRIGGER].span_id
    assert {spans["node a"].parent_id, spans["node b"].parent_id} == {spans["run f"].span_id}
    assert spans["of the handler"].parent_id == spans["node b"].span_id


class Partner:
    """Another service, which keeps the headers of its requests and answers as a model does."""

    def __enter__(self) -> Partner:
        self.headers: list[dict[str, str]] = []
        self.let_go = threading.Event()
        """Until it is set, a request for `/slow` gets no reply."""
        partner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                partner.headers.append({k.lower(): v for k, v in self.headers.items()})
                self.rfile.read(int(self.headers.get("content-length", "0")))
                if self.path.startswith("/slow"):
                    partner.let_go.wait(SECONDS)
                    return
                answer = json.dumps(ANSWER).encode()
                self.send_response(404 if self.path == "/none" else 200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()


ANSWER = {
    "model": "model-1-2026",
    "choices": [{"message": {"content": "hello"}}],
    "usage": {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23},
}
CALLS = "gen_ai_client_operation_duration_seconds_count"
MODEL_LABELS = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "openai",
    "gen_ai_request_model": "model-1",
}


def test_calls_to_other_services_are_client_spans_with_their_attributes(
    services: Services, receiver: Receiver
) -> None:
    trace_id = "7c" * 16
    with Partner() as partner:
        api = services.serve(
            DOVETAIL_ALLOW_PRIVATE_ADDRESSES="127.0.0.1/32",
            DOVETAIL_LLM_BASE_URL=f"{partner.url}/v1",
            DOVETAIL_LLM_MODEL="model-1",
            **tracing_to(receiver),
        )
        there = {"url": f"{partner.url}/there?key=hidden", "method": "POST"}
        away = {"url": f"{partner.url}/none", "method": "POST", "expect_status": [404]}
        run_id = api.run(
            node("call", "call_external_service", config=there),
            node("gone", "call_external_service", "call", config=away),
            node("ask", "llm_service", "gone", config={"prompt": "hi", "temperature": 0.5}),
            headers=traceparent(trace_id),
        )
        assert api.ended(run_id)["status"] == "COMPLETED"
        receiver.wait(lambda: len(receiver.trace(trace_id)) == 9, "nine spans")
        page = api.page()
    spans = receiver.trace(trace_id)
    nodes = {span.name: span for span in spans if span.name.startswith("node ")}
    calls = sorted((span for span in spans if span.name == "POST"), key=lambda span: span.start)
    first, second, third = calls
    assert first.parent_id == nodes["node call"].span_id
    assert first.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.full": f"{partner.url}/there",
        "server.address": "127.0.0.1",
        "server.port": partner.port,
    }
    assert second.failed
    assert second.attributes["error.type"] == "404"
    (asked,) = [span for span in spans if span.name == "chat model-1"]
    assert asked.parent_id == nodes["node ask"].span_id
    assert third.parent_id == asked.span_id
    assert asked.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "model-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.output.type": "text",
        "gen_ai.response.model": "model-1-2026",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 3,
        "server.address": "127.0.0.1",
        "server.port": partner.port,
    }
    sent = [headers["traceparent"] for headers in partner.headers]
    assert sent == [f"00-{trace_id}-{span.span_id}-01" for span in calls]
    usage = "gen_ai_client_token_usage"
    assert page(f"{usage}_sum", gen_ai_token_type="input", **MODEL_LABELS) == 20
    assert page(f"{usage}_sum", gen_ai_token_type="output", **MODEL_LABELS) == 3
    assert page(f"{usage}_bucket", gen_ai_token_type="output", le="4.0", **MODEL_LABELS) == 1
    assert page(CALLS, error_type="", **MODEL_LABELS) == 1


def test_calls_that_a_cancel_ends_are_spans_with_an_error(
    services: Services, receiver: Receiver
) -> None:
    trace_id = "7d" * 16
    with Partner() as partner:
        api = services.serve(
            DOVETAIL_ALLOW_PRIVATE_ADDRESSES="127.0.0.1/32",
            DOVETAIL_LLM_BASE_URL=f"{partner.url}/slow",
            DOVETAIL_LLM_MODEL="model-1",
            **tracing_to(receiver),
        )
        asks = node("ask", "llm_service", config={"prompt": "hi"})
        run_id = api.run(asks, headers=traceparent(trace_id))
        wait_for(lambda: partner.headers, "the request")
        api.http.post(f"/api/v1/runs/{run_id}/cancel")
        assert api.ended(run_id)["status"] == "CANCELLED"
        receiver.wait(lambda: len(receiver.trace(trace_id)) == 5, "five spans")
        page = api.page()
    spans = by_name(receiver.trace(trace_id))
    for name in ("POST", "chat model-1"):
        assert spans[name].failed
        assert spans[name].attributes["error.type"] == "CancelledError"
    assert page(CALLS, error_type="CancelledError", **MODEL_LABELS) == 1


def test_a_trace_setting_that_cannot_work_stops_the_start_with_a_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_tracing("worker") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SettingsError, match="is grpc, but traces are sent as http/protobuf only"):
        open_tracing("worker")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "dovetail.telemetry.tracing", None)
    with pytest.raises(SettingsError, match=r"pip install 'dovetail\[otel\]'"):
        open_tracing("worker")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("worker") is None


def test_an_unreachable_collector_delays_neither_a_run_nor_the_end(services: Services) -> None:
    api = services.serve(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    api.ended(api.run(node("a")))
    services.end(services.processes[0])
    assert "Traceback" not in without_attempts(services.logs())
