"""Counters: their bounds, the sum over several processes, and access to the metrics port."""

from __future__ import annotations

import multiprocessing
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import NODE_EVENTS, RUN_EVENTS, Event
from dovetail.telemetry.counters import EVENTS, MAX_LABEL_SETS, METRICS, OTHER, SECONDS, Counters
from dovetail.telemetry.metrics import MAX_CONNECTIONS, MetricsPort, MetricsPortError, ServiceFacts
from dovetail.telemetry.service import Telemetry

from ..servers.server import free_port
from .services import SECONDS as LONGEST
from .services import Page, ask, wait_for


def graph(name: str = "f") -> Graph:
    node = {"id": "a", "handler": "h", "resource_tag": "t"}
    return build_graph(Workflow.model_validate({"name": name, "nodes": [node]}), {})


def parked(seconds: float) -> Event:
    data = {"until": 100 + seconds, "resource_tag": "t"}
    return Event(1, 100.0, "node.parked", 1, "a", 1, data)


COMPLETED = Event(2, 100.0, "node.completed", 1, "a", 1)


def test_every_counted_event_is_an_event_of_the_log() -> None:
    assert set(EVENTS) <= {*RUN_EVENTS, *NODE_EVENTS}


def test_the_page_explains_every_metric_with_its_labels() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    page = page.partition("### Metrics of your handlers")[0]
    rows = re.findall(r"^\| `((?:dovetail|gen_ai)_\w+)` \| ([^|]*)\| (\w+):", page, re.MULTILINE)
    said = [(name, re.findall(r"`(\w+)`", labels), kind) for name, labels, kind in rows]
    assert said == [(one.name, list(one.labels), one.kind) for one in METRICS]


def test_runs_of_registered_versions_are_also_counted_by_version() -> None:
    counters = Counters()
    ended = [Event(1, 1.0, "run.completed", 1)]
    for version in (None, 3, 4, 4):
        counters.add_events(graph(), ended, version)
    assert counters.counts["dovetail_runs_total"] == {("f", "COMPLETED"): 4}
    assert counters.counts["dovetail_runs_by_version_total"] == {
        ("f", "3", "COMPLETED"): 1,
        ("f", "4", "COMPLETED"): 2,
    }


def test_label_sets_from_callers_are_bounded() -> None:
    counters = Counters()
    for number in range(MAX_LABEL_SETS + 50):
        counters.add_events(graph(f"w{number}"), [Event(1, 1.0, "run.completed", 1)])
    counts = counters.counts["dovetail_runs_total"]
    assert len(counts) == MAX_LABEL_SETS + 1
    assert counts[OTHER, OTHER] == 50


def test_a_histogram_counts_every_value_in_the_first_bucket_that_holds_it() -> None:
    telemetry = Telemetry()
    for seconds in (0.001, 0.005, 0.006, 4000.0):
        telemetry.on_duration("h", seconds)
    page = Page(telemetry.page(ServiceFacts()).decode())
    name = "dovetail_node_duration_seconds_bucket"
    assert page(name, handler="h", le=str(SECONDS[0])) == 2
    assert page(name, handler="h", le=str(SECONDS[1])) == 3
    assert page(name, handler="h", le=str(SECONDS[-1])) == 3
    assert page(name, handler="h", le="+Inf") == 4


def test_unknown_facts_are_left_out() -> None:
    page = Page(Telemetry().page(ServiceFacts(archive_lag_seconds=1.5)).decode())
    assert page("dovetail_archive_lag_seconds") == 1.5
    assert not page.all("dovetail_workers_alive")
    assert not page.all("dovetail_queue_depth")


def test_label_values_of_all_kinds_can_be_parsed_again() -> None:
    telemetry = Telemetry()
    for name in ('qu"ote', "back\\slash", "new\nline", "ünï"):
        telemetry.counters.count("dovetail_results_refused_total", (name,))
        assert Page(telemetry.page(ServiceFacts()).decode())(
            "dovetail_results_refused_total", reason=name
        )


# ── a service that forks ─────────────────────────────────────────────────────────────────────


def _in_child(telemetry: Telemetry, many: int, go: Callable[[], object]) -> None:
    telemetry.in_child()
    for _ in range(many):
        telemetry.on_events("r", graph(), [parked(0.5), COMPLETED])
    go()
    telemetry.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_counters_of_children_are_summed_while_they_live_and_after_they_end() -> None:
    fork = multiprocessing.get_context("fork")
    telemetry = Telemetry()
    telemetry.on_events("r", graph(), [COMPLETED])
    telemetry.share()
    gates = [fork.Event() for _ in range(3)]
    children = [
        fork.Process(target=_in_child, args=(telemetry, many, gate.wait))
        for many, gate in zip((1, 2, 3), gates, strict=True)
    ]
    try:
        for child in children:
            child.start()
        _eventually(telemetry, 7)
        assert _counted(telemetry) == (7, 6)
        gates[0].set()
        children[0].join()
        children[1].kill()  # the counts that it had written are not lost
        children[1].join()
        for _ in range(3):
            assert _counted(telemetry) == (7, 6), "counted again at each question, or forgotten"
        gates[2].set()
        children[2].join()
        assert _counted(telemetry) == (7, 6)
    finally:
        for child in children:
            child.kill()
            child.join()
        telemetry.close()


def _counted(telemetry: Telemetry) -> tuple[float, float]:
    page = Page(telemetry.page(ServiceFacts()).decode())
    nodes = page("dovetail_nodes_total", handler="h", status="COMPLETED")
    return nodes, page("dovetail_rate_limit_wait_seconds_count", tag="t")


def _eventually(telemetry: Telemetry, nodes: int) -> None:
    waiting = threading.Event()
    for _ in range(1500):
        if _counted(telemetry)[0] == nodes:
            return
        waiting.wait(0.02)
    raise AssertionError(f"{_counted(telemetry)} instead of {nodes}")


# ── the port ─────────────────────────────────────────────────────────────────────────────────


@contextmanager
def port(**more: Callable[..., bool]) -> Iterator[int]:
    number = free_port()
    given = {"live": lambda: True, "ready": lambda: True, "allowed": None, **more}
    with MetricsPort(number, lambda: (b"counted 1\n", "text/plain"), **given):  # type: ignore[arg-type]
        yield number


def test_without_tokens_only_this_machine_may_read_metrics_and_no_other_site() -> None:
    with port() as number:
        assert ask(number, "/metrics").text == "counted 1\n"
        assert ask(number, "/metrics", host=f"localhost:{number}").status_code == 200
        assert ask(number, "/metrics", host=f"evil.example:{number}").status_code == 403
        with pytest.raises(httpx2.ConnectError), httpx2.Client(trust_env=False) as http:
            http.get(f"http://127.0.0.2:{number}/metrics")


def test_with_tokens_metrics_need_a_token_and_health_does_not() -> None:
    with port(allowed=lambda token: token == b"good") as number:
        refused = ask(number, "/metrics")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == 'Bearer realm="dovetail"'
        assert ask(number, "/metrics", authorization="Bearer bad").status_code == 401
        assert ask(number, "/metrics", authorization="Basic good").status_code == 401
        assert ask(number, "/metrics", authorization="Bearer good").status_code == 200
        assert ask(number, "/health/live").status_code == 200
        with httpx2.Client(trust_env=False) as http:  # and it is there for others
            headers = {"authorization": "Bearer good", "host": "10.1.2.3"}
            answer = http.get(f"http://127.0.0.2:{number}/metrics", headers=headers)
        assert answer.status_code == 200


def test_a_stuck_or_ending_service_reports_it() -> None:
    with port(live=lambda: False, ready=lambda: False) as number:
        assert ask(number, "/health/live").status_code == 503
        assert ask(number, "/health/ready").status_code == 503


def test_a_metrics_port_in_use_is_a_clear_error() -> None:
    with port() as number, pytest.raises(MetricsPortError, match="DOVETAIL_METRICS_PORT"):
        MetricsPort(
            number, lambda: (b"", ""), live=lambda: True, ready=lambda: True, allowed=None
        ).__enter__()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_outlives_its_parent_does_not_keep_the_port() -> None:
    fork = multiprocessing.get_context("fork")
    gate = fork.Event()
    with port() as number:
        child = fork.Process(target=gate.wait)
        child.start()
        assert ask(number, "/health/live").status_code == 200
    try:
        with socket.create_server(("127.0.0.1", number)):
            assert child.is_alive()
    finally:
        gate.set()
        child.join()


def test_clients_that_send_nothing_are_limited_in_number_and_time() -> None:
    with port() as number:
        silent = [socket.create_connection(("127.0.0.1", number)) for _ in range(MAX_CONNECTIONS)]
        try:
            with socket.create_connection(("127.0.0.1", number)) as one_too_many:
                one_too_many.settimeout(LONGEST)
                assert one_too_many.recv(1) == b""
        finally:
            for one in silent:
                one.close()
        wait_for(lambda: _answers(number), "a free place")


def _answers(number: int) -> bool:
    try:
        return ask(number, "/health/live").status_code == 200
    except httpx2.TransportError:
        return False


def test_without_shared_counters_a_child_counts_for_itself() -> None:
    telemetry = Telemetry()
    telemetry.in_child()
    telemetry.on_events("r", graph(), [COMPLETED])
    assert _counted(telemetry)[0] == 1
