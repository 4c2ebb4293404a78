"""The three metrics of documents, and a handler's own: on every page, and summed over a pool."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from dovetail.config import load_settings
from dovetail.documents import PIPELINE
from dovetail.documents.commands.process import settle_by_runs
from dovetail.documents.metrics import (
    CONFIDENCE_BUCKETS,
    DURATION_BUCKETS,
    DocumentRunEnds,
    begin,
    note,
    settle,
)
from dovetail.documents.reviews import open_reviews

from ..pages import ROOT, write_files
from ..servers.redis_server import RedisServer
from ..telemetry.services import Api, Page, Services, node, page_of, wait_for

PAGE = ROOT / "docs" / "observability.md"
OWN_HANDLERS = """
import time
from prometheus_client import Counter
from dovetail import handler

shouts = Counter("shouts_total", "What was shouted", ["how"])

@handler
def shout(config, ctx):
    shouts.labels(config["how"]).inc()
    time.sleep(0.05)
    return "heard"
"""
HANDLERS = ("--handlers", "own.py", "--handlers", "dovetail.documents")


@pytest.fixture
def redis_url() -> Iterator[str]:
    with RedisServer() as redis:
        yield redis.url


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    found = Services(tmp_path)
    (tmp_path / "own.py").write_text(OWN_HANDLERS)
    yield found
    found.close()


def process(services: Services, api: Api, *names: str) -> list[str]:
    """A run for each document: one that is called `bad…` is empty, all others are different."""
    definition = PIPELINE.read_bytes()
    answer = api.http.post(
        "/api/v1/workflows", content=definition, headers={"content-type": "application/yaml"}
    )
    assert answer.status_code in (200, 201), answer.text
    for name in names:
        day = "2026-03-02" if name == "unsaved" else "2026-03-01"
        text = "" if name.startswith("bad") else f"RECEIPT\n{name} Ltd\n{day}\nTotal 3.00 EUR"
        (services.folder / f"{name}.txt").write_text(text)
    items = [
        {
            "document_id": name,
            "file_path": str(services.folder / f"{name}.txt"),
            "out": str(services.folder / "out"),
        }
        for name in names
    ]
    found = []
    for params in items:
        answer = api.http.post(
            "/api/v1/workflows/document_processing/runs", json={"params": params}
        )
        assert answer.status_code == 202, answer.text
        found.append(api.ended(answer.json()["run_id"])["status"])
    return found


def shout(api: Api, count: int) -> None:
    run_id = api.run(*(node(f"n{at}", "shout", config={"how": "loud"}) for at in range(count)))
    assert api.ended(run_id)["status"] == "COMPLETED"


def numbers(*pages: Page) -> dict[str, float]:
    def total(name: str, **labels: str) -> float:
        return sum(page(name, **labels) for page in pages)

    return {
        "success": total("documents_processed_total", status="success"),
        "failed": total("documents_processed_total", status="failed"),
        "durations": total("processing_duration_seconds_count"),
        "confidences": total("extraction_confidence_count"),
        "shouts": total("shouts_total", how="loud"),
    }


def test_an_embedded_server_exports_the_metrics_of_its_handlers(services: Services) -> None:
    write_files(PAGE, services.folder)
    api = services.serve(*HANDLERS, "--handlers", "orders.py")
    assert api.ended(api.run(node("n", "place_order", config={"shop": "north"})))
    assert process(services, api, "a", "b", "bad") == ["COMPLETED", "COMPLETED", "FAILED"]
    shout(api, 3)
    page = api.page()
    assert numbers(page) == {
        "success": 2,
        "failed": 1,
        "durations": 2,
        "confidences": 2,
        "shouts": 3,
    }
    assert 0 < page("extraction_confidence_sum") <= 2
    assert page("processing_duration_seconds_bucket", le="+Inf") == 2
    kinds = {name: page.kinds[name] for name in ("documents_processed", "extraction_confidence")}
    assert kinds == {"documents_processed": "counter", "extraction_confidence": "histogram"}


def test_workers_on_redis_export_handler_metrics_on_their_ports(
    services: Services, redis_url: str
) -> None:
    services.env["DOVETAIL_REDIS_URL"] = redis_url
    api = services.serve(*HANDLERS, "--with", "orchestrator,worker")
    worker, port = services.watched("worker", *HANDLERS)
    services.wait(worker, "started")
    assert process(services, api, "a", "b") == ["COMPLETED"] * 2
    shout(api, 40)
    wait_for(lambda: numbers(api.page(), page_of(port))["success"] == 2, "both ends")
    assert numbers(api.page(), page_of(port))["shouts"] == 40
    for page in (api.page(), page_of(port)):
        assert page("shouts_total", how="loud") > 0, "each reported its own"
    out = services.folder / "out"
    (out / "parquet" / "day=2026-03-02").write_text("no folder")
    assert process(services, api, "unsaved") == ["FAILED"]
    wait_for(lambda: numbers(api.page(), page_of(port))["failed"] == 1, "its end")
    rows = open_reviews(out).measurements()
    assert [one.status for one in rows] == ["extracted"] * 3, "workers do not know how runs end"
    asyncio.run(settle_by_runs(load_settings(redis_url=redis_url), out, rows))
    statuses_now = {one.document_id: one.status for one in open_reviews(out).measurements()}
    assert statuses_now == {"a": "success", "b": "success", "unsaved": "failed"}


def test_a_pool_is_summed_and_the_counts_of_a_killed_process_stay(
    services: Services, redis_url: str
) -> None:
    services.env |= {"DOVETAIL_REDIS_URL": redis_url, "DOVETAIL_TRANSPORT": "celery"}
    worker, port = services.watched("worker", "--concurrency", "2", *HANDLERS)
    api = services.serve("--with", "orchestrator", *HANDLERS)
    services.wait(worker, "started")
    wait_for(lambda: api.page()("dovetail_workers_alive") == 1, "the worker")
    assert process(services, api, "a", "b", "bad") == ["COMPLETED", "COMPLETED", "FAILED"]
    shout(api, 8)
    # Ends of runs are counted by the orchestrator, which ends them; steps by the pool.
    ends = {"success": 2, "failed": 1, "durations": 2, "confidences": 2, "shouts": 0}
    steps = {**dict.fromkeys(ends, 0), "shouts": 8}
    wait_for(lambda: numbers(api.page()) == ends, "the ends of all three")
    assert numbers(page_of(port)) == steps
    pool = children_of(worker.pid)
    assert len(pool) == 2
    for pid in pool:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not set(pool) & set(children_of(worker.pid)), "their end")
    for _ in range(2):
        assert numbers(page_of(port)) == steps
    (services.folder / "out" / "parquet" / "day=2026-03-02").write_text("no folder")
    assert process(services, api, "c", "unsaved") == ["COMPLETED", "FAILED"]
    shout(api, 2)
    assert numbers(page_of(port))["shouts"] == 10
    ends |= {"success": 3, "failed": 2, "durations": 3, "confidences": 3}
    wait_for(lambda: numbers(api.page()) == ends, "what cannot be saved is no success")
    values = folder_of(worker.pid)
    assert values.is_dir()
    services.end(worker)
    assert not values.exists()


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def folder_of(pid: int) -> Path:
    """Where the pool of this worker keeps its values: one of its processes has it open."""
    for child in children_of(pid):
        for line in Path(f"/proc/{child}/maps").read_text().splitlines():
            if line.endswith(".db") and "dovetail-counts-" in line:
                return Path(line.split()[-1]).parent
    raise AssertionError("no process of the pool has counted anything")


# ── one document ──────────────────────────────────────────────────────────────────────────


def reported() -> list[float]:
    names = ("processing_duration_seconds_count", "extraction_confidence_count")
    statuses = ("success", "cached", "failed")
    found = [
        REGISTRY.get_sample_value("documents_processed_total", {"status": one}) for one in statuses
    ]
    return [one or 0.0 for one in (*found, *map(REGISTRY.get_sample_value, names))]


def since(before: list[float]) -> list[float]:
    return [now - then for now, then in zip(reported(), before, strict=True)]


def test_a_document_is_counted_once_when_its_run_ends(tmp_path: Path) -> None:
    before = reported()
    begin(tmp_path, "d", "run")
    note(tmp_path, "d", "run", 0.2, 0.81)
    assert since(before) == [0, 0, 0, 0, 0], "how it ends is not known yet"
    for _ in range(2):
        assert settle(tmp_path, "d", "run", good=True).status == "success"
        begin(tmp_path, "d", "run")  # as a broker does that has lost sight of a worker
        note(tmp_path, "d", "run", 9.0, 0.81)
    assert since(before) == [1, 0, 0, 1, 1]
    assert [one.seconds for one in open_reviews(tmp_path).measurements()] == [0.2]


def test_a_successful_retry_is_another_end_and_the_row_has_the_last_one(tmp_path: Path) -> None:
    before = reported()
    note(tmp_path, "d", "run", 0.2, 0.81)
    settle(tmp_path, "d", "run", good=False)
    assert since(before) == [0, 0, 1, 0, 0]
    settle(tmp_path, "d", "run", good=True)
    assert since(before) == [1, 0, 1, 1, 1]
    assert [one.status for one in open_reviews(tmp_path).measurements()] == ["success"]


def test_a_cached_document_took_no_time_and_a_failed_one_has_no_duration(tmp_path: Path) -> None:
    before = reported()
    note(tmp_path, "one", "run-1", None, 0.81)
    assert settle(tmp_path, "one", "run-1", good=True).status == "cached"
    begin(tmp_path, "two", "run-2")
    assert settle(tmp_path, "two", "run-2", good=False).status == "failed"
    assert since(before) == [0, 1, 1, 0, 1]


def test_threads_that_create_the_first_counter_at_once_lose_no_count(tmp_path: Path) -> None:
    before = reported()
    threads = [
        threading.Thread(target=settle, args=(tmp_path, "d", f"t{number}"), kwargs={"good": False})
        for number in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert since(before) == [0, 0, 8, 0, 0]


@pytest.mark.parametrize(
    ("status", "output", "counted"),
    [
        ("COMPLETED", {"status": "success", "seconds": 0.5, "confidence": 0.9}, [1, 0, 0, 1, 1]),
        ("COMPLETED", {"status": "cached", "seconds": None, "confidence": 1}, [0, 1, 0, 0, 1]),
        ("COMPLETED", {"run_id": "run", "confidence": 0.9}, [1, 0, 0, 0, 1]),
        ("COMPLETED", {"run_id": "other", "confidence": 0.9}, [0, 1, 0, 0, 1]),
        ("COMPLETED", None, [1, 0, 0, 0, 0]),
        ("FAILED", {"status": "success", "seconds": 0.5, "confidence": 0.9}, [0, 0, 1, 0, 0]),
        ("CANCELLED", None, [0, 0, 1, 0, 0]),
    ],
)
def test_a_service_counts_the_end_of_a_run_by_its_status(
    status: str, output: dict[str, Any] | None, counted: list[int]
) -> None:
    before = reported()
    DocumentRunEnds().ended("run", status, {"m": output})
    assert since(before) == counted


def test_only_runs_with_handlers_of_documents_are_counted() -> None:
    ends = DocumentRunEnds()
    assert ends.outputs_wanted({"a": "http", "b": "mydocuments.extract"}) is None
    assert ends.outputs_wanted({"a": "http", "b": "documents.save_json"}) == ()
    assert ends.outputs_wanted({"a": "documents.extract"}) == ("a",)
    both = {"a": "documents.extract", "m": "documents.record_metrics"}
    assert ends.outputs_wanted(both) == ("m",)


def test_the_buckets_ascend_and_one_confidence_bucket_ends_at_the_approval_threshold() -> None:
    for buckets in (DURATION_BUCKETS, CONFIDENCE_BUCKETS):
        assert list(buckets) == sorted(set(buckets))
    assert 0.8 in CONFIDENCE_BUCKETS
    assert CONFIDENCE_BUCKETS[-1] == 1.0
