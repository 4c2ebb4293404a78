"""What is counted: every event once, whichever process made it, and in the contract's names."""

from __future__ import annotations

import platform
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from dovetail import __version__
from dovetail.telemetry.counters import METRICS

from .conftest import Three
from .services import Api, Page, Services, ask, node, page_of, wait_for

CONTRACT = {
    "dovetail_runs_total": {"workflow", "status"},
    "dovetail_nodes_total": {"handler", "status"},
    "dovetail_node_duration_seconds": {"handler"},
    "dovetail_queue_depth": {"handler"},
    "dovetail_retries_total": {"handler"},
    "dovetail_leases_reaped_total": set(),
    "dovetail_results_refused_total": {"reason"},
    "dovetail_rate_limit_wait_seconds": {"tag"},
    "dovetail_archive_lag_seconds": set(),
    "dovetail_workers_alive": set(),
    "dovetail_webhooks_total": {"outcome"},
    "dovetail_webhook_delay_seconds": set(),
    "dovetail_exported_events_total": {"outcome"},
    "dovetail_export_delay_seconds": set(),
    "dovetail_http_requests_total": {"route", "status"},
    "dovetail_http_request_duration_seconds": {"route"},
}
GEN_AI = {"gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"}
BEYOND = {
    "dovetail_runs_by_version_total": {"workflow", "version", "status"},
    "gen_ai_client_token_usage": {*GEN_AI, "gen_ai_token_type"},
    "gen_ai_client_operation_duration_seconds": {*GEN_AI, "error_type"},
    "dovetail_build_info": {"version", "python"},
}
"""Metrics that the contract does not name."""
STATUS = {
    "node.completed": "COMPLETED",
    "node.cached": "COMPLETED",
    "node.failed": "FAILED",
    "node.skipped": "SKIPPED",
    "node.cancelled": "CANCELLED",
}


def families(page: Page) -> set[str]:
    """Without those of the process."""
    found = {f"{name}_total" if kind == "counter" else name for name, kind in page.kinds.items()}
    process = {name for name in found if name.startswith("process_")}
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes"} <= process
    assert page("dovetail_build_info", version=__version__, python=platform.python_version()) == 1
    return found - process


def test_the_metrics_are_those_of_the_contract() -> None:
    assert {metric.name: set(metric.labels) for metric in METRICS} == {**CONTRACT, **BEYOND}


def some_of_everything(api: Api, name: str) -> list[str]:
    """Runs that end in every way, by every kind of event that is counted."""
    backoff = {"base_delay_seconds": 0.01, "max_delay_seconds": 0.02}
    cached = node("a", config={"x": name}, cache={"ttl_seconds": 60})
    first = api.run(cached, name=name)
    api.ended(first)
    return [
        first,
        api.run(cached, name=name),
        api.run(node("a"), node("b", "plain", "a"), node("c", "quick", "a", "b"), name=name),
        api.run(node("a", "flaky", config={"fails": 2}, retry=backoff), name=name),
        api.run(node("a", "broken"), node("b", "quick", "a"), node("c", "quick"), name=name),
        api.run(node("a"), node("b", "quick", "a", condition="{{ a.x is defined }}"), name=name),
        api.run(*(node(f"n{at}", resource_tag=f"tag-{name}") for at in range(3)), name=name),
        api.run(node("a", config={"x": "{{ params.missing }}"}), name=name),
    ]


def counted(runs: list[list[dict[str, Any]]], handlers: dict[str, dict[str, str]]) -> Counter[Any]:
    """What the logs of these runs say, in the words of the metrics."""
    found: Counter[Any] = Counter()
    for events in runs:
        nodes = handlers[events[0]["run_id"]]
        for event in events:
            if event["type"] in ("run.completed", "run.failed", "run.cancelled"):
                found["run", event["type"].removeprefix("run.").upper()] += 1
            elif event["type"] in STATUS:
                found["node", nodes[event["node"]], STATUS[event["type"]]] += 1
            elif event["type"] == "node.retrying":
                found["retry", nodes[event["node"]]] += 1
            elif event["type"] == "node.parked":
                found["parked",] += 1
    return found


def the_logs_say(api: Api, run_ids: list[str]) -> Counter[Any]:
    logs, handlers = [], {}
    for run_id in run_ids:
        run = api.ended(run_id)
        handlers[run_id] = {one["id"]: one["handler"] for one in run["nodes"]}
        logs.append([{**event, "run_id": run_id} for event in api.events(run_id)])
    return counted(logs, handlers)


def the_pages_say(before: list[Page], after: list[Page], name: str) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for then, now in zip(before, after, strict=True):
        for (metric, labels), value in now.samples.items():
            grown = int(value - then.samples.get((metric, labels), 0))
            reported = dict(labels)
            if metric == "dovetail_runs_total" and reported["workflow"] == name:
                found["run", reported["status"]] += grown
            elif metric == "dovetail_nodes_total":
                found["node", reported["handler"], reported["status"]] += grown
            elif metric == "dovetail_retries_total":
                found["retry", reported["handler"]] += grown
            elif metric == "dovetail_rate_limit_wait_seconds_count":
                found["parked",] += grown
    return +found


def durations(pages: list[Page]) -> tuple[int, float]:
    """How many nodes, and how many seconds together."""
    name = "dovetail_node_duration_seconds"
    many = sum(sum(page.all(f"{name}_count").values()) for page in pages)
    return int(many), sum(sum(page.all(f"{name}_sum").values()) for page in pages)


def the_runs_say(api: Api, run_ids: list[str]) -> tuple[int, float]:
    """The same of the nodes that were started, as the API shows them."""
    found = [
        one["duration"]
        for run_id in run_ids
        for one in api.ended(run_id)["nodes"]
        if one["attempt"] > 0 and one["status"] in ("COMPLETED", "FAILED")
    ]
    return len(found), sum(found)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Services, Api]]:
    services = Services(tmp_path_factory.mktemp("embedded"), DOVETAIL_CONCURRENCY="1")
    yield services, services.serve()
    services.close()


def test_the_counters_of_an_embedded_server_equal_its_event_logs(
    embedded: tuple[Services, Api],
) -> None:
    _, api = embedded
    before = [api.page()]
    assert families(before[0]) == {*CONTRACT, *BEYOND}
    run_ids = some_of_everything(api, "embedded")
    said = the_logs_say(api, run_ids)
    assert said["node", "quick", "SKIPPED"]
    assert said["retry", "flaky"] == 2
    assert said["parked",]
    assert the_pages_say(before, [api.page()], "embedded") == said
    page = api.page()
    many, seconds = the_runs_say(api, run_ids)
    assert durations([page]) == (many, pytest.approx(seconds, abs=0.001))
    assert page("dovetail_workers_alive") == 1
    assert page("dovetail_queue_depth", handler="quick") == 0
    assert page("dovetail_http_requests_total", route="/api/v1/runs", status="202") == 8
    assert page("dovetail_http_requests_total", route="/api/v1/runs/{run_id}", status="200") >= 8
    assert page("dovetail_http_request_duration_seconds_count", route="/api/v1/runs") == 8


def test_the_queue_depth_of_an_embedded_server_is_its_queue(embedded: tuple[Services, Api]) -> None:
    services, api = embedded
    run_id = api.run(node("a", "hold", config={"file": "go"}), *(node(f"n{i}") for i in range(5)))
    wait_for(lambda: services.is_held("go"), "the first to run")
    assert api.page()("dovetail_queue_depth", handler="quick") == 5
    services.touch("go")
    api.ended(run_id)
    assert api.page()("dovetail_queue_depth", handler="quick") == 0


def test_an_unknown_path_is_not_a_label(embedded: tuple[Services, Api]) -> None:
    _, api = embedded
    for path in ("/nothing", "/api/v1/else", "/api/v1/runs/none/else"):
        assert api.http.get(path).status_code == 404
    page = api.page()
    assert page("dovetail_http_requests_total", route="(none)", status="404") == 3
    assert "else" not in page.text


def test_three_services_count_each_event_once_in_total(three: Three) -> None:
    before = three.pages()
    assert all(families(page) == {*CONTRACT, *BEYOND} for page in before)
    run_ids = some_of_everything(three.api, "three")
    said = the_logs_say(three.api, run_ids)
    assert said["node", "quick", "SKIPPED"]
    assert said["retry", "flaky"] == 2
    assert said["parked",]
    # The process that moved a run counts it a moment after the run has moved.
    wait_for(
        lambda: sum(the_pages_say(before, three.pages(), "three").values()) >= said.total(), ""
    )
    assert the_pages_say(before, three.pages(), "three") == said
    many, seconds = the_runs_say(three.api, run_ids)
    first, already = durations(before)
    wait_for(lambda: durations(three.pages())[0] - first >= many, "how long they took")
    last, now = durations(three.pages())
    assert last - first == many
    assert now - already == pytest.approx(seconds, abs=0.001)


def test_a_cancel_is_counted_by_the_api_server_that_applied_it(three: Three) -> None:
    run_id = three.api.run(node("a", "hold", config={"file": "never"}), name="cancelled")
    wait_for(lambda: three.services.is_held("never"), "it to run")
    assert three.api.http.post(f"/api/v1/runs/{run_id}/cancel").status_code == 202
    page = three.api.page()
    assert page("dovetail_runs_total", workflow="cancelled", status="CANCELLED") == 1
    assert three.total("dovetail_runs_total", workflow="cancelled", status="CANCELLED") == 1


def test_a_lost_worker_a_late_result_and_the_backlog_are_counted(three: Three) -> None:
    services, api = three.services, three.api
    only = "from dovetail import handler\n" + (
        "@handler\nasync def lone(config, ctx):\n    await __import__('asyncio').sleep(60)\n"
    )
    (services.folder / "lone.py").write_text(only)
    reaped = three.total("dovetail_leases_reaped_total")
    mortal = services.start("worker", "--handlers", "lone.py", until="started")
    wait_for(lambda: api.page()("dovetail_workers_alive") == 2, "the second worker")
    run_id = api.run(node("a", "lone", timeout_seconds=100), name="lost")
    wait_for(lambda: _status(api, run_id) == "RUNNING", "it to run")
    mortal.send_signal(signal.SIGKILL)
    wait_for(lambda: three.total("dovetail_leases_reaped_total") > reaped, "the reaper")
    # It waits again, for a handler that no worker serves any more.
    wait_for(
        lambda: all(page("dovetail_queue_depth", handler="lone") for page in three.pages()),
        "the queue",
    )
    api.http.post(f"/api/v1/runs/{run_id}/cancel")

    late = api.run(node("a", "hold", config={"file": "late", "clings": True}), name="late")
    wait_for(lambda: services.is_held("late"), "it to run")
    api.http.post(f"/api/v1/runs/{late}/cancel")
    services.touch("late")
    refused = wait_for(
        lambda: page_of(three.orchestrator_port).all("dovetail_results_refused_total"),
        "the late result",
    )
    assert frozenset({("reason", "stale")}) in refused


def _status(api: Api, run_id: str) -> str:
    return str(api.http.get(f"/api/v1/runs/{run_id}").json()["nodes"][0]["status"])


def test_the_archive_lag_is_the_age_of_the_longest_waiting_run(three: Three) -> None:
    assert all(page("dovetail_archive_lag_seconds") == 0 for page in three.pages())
    with redis.Redis.from_url(three.redis_url) as connection:
        connection.zadd("wf:unarchived", {"a-run": time.time() - 60})
        assert all(60 <= page("dovetail_archive_lag_seconds") < 120 for page in three.pages())
        connection.delete("wf:unarchived")


def test_a_service_reports_on_its_port_whether_it_is_live_and_ready(three: Three) -> None:
    for port in (three.orchestrator_port, three.worker_port):
        assert ask(port, "/health/live").status_code == 200
        assert ask(port, "/health/ready").status_code == 200
        assert ask(port, "/else").status_code == 404
