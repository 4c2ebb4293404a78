"""Spans: one trace for a whole run, whatever triggered it and wherever its nodes ran."""

from __future__ import annotations

import os
import subprocess
import sys

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
    assert trigger.attributes["http.response.status_code"] == 202


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
