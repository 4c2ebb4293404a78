"""The three metrics of documents, and a handler's own: on every page, and summed over a pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from dovetail.documents import PIPELINE
from dovetail.documents.metrics import CONFIDENCE, SECONDS, record
from dovetail.documents.reviews import Measurement, open_reviews

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
        text = "" if name.startswith("bad") else f"RECEIPT\n{name} Ltd\n2026-03-01\nTotal 3.00 EUR"
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
        "completed": total("documents_processed_total", status="completed"),
        "failed": total("documents_processed_total", status="failed"),
        "durations": total("processing_duration_seconds_count"),
        "confidences": total("extraction_confidence_count"),
        "shouts": total("shouts_total", how="loud"),
    }


def test_an_embedded_server_tells_what_its_handlers_count(services: Services) -> None:
    write_files(PAGE, services.folder)
    api = services.serve(*HANDLERS, "--handlers", "orders.py")
    assert api.ended(api.run(node("n", "place_order", config={"shop": "north"})))
    assert process(services, api, "a", "b", "bad") == ["COMPLETED", "COMPLETED", "FAILED"]
    shout(api, 3)
    page = api.page()
    assert numbers(page) == {
        "completed": 2,
        "failed": 1,
        "durations": 2,
        "confidences": 2,
        "shouts": 3,
    }
    assert 0 < page("extraction_confidence_sum") <= 2
    assert page("processing_duration_seconds_bucket", le="+Inf") == 2
    kinds = {name: page.kinds[name] for name in ("documents_processed", "extraction_confidence")}
    assert kinds == {"documents_processed": "counter", "extraction_confidence": "histogram"}


def test_workers_of_a_set_up_on_redis_tell_it_on_their_ports(
    services: Services, redis_url: str
) -> None:
    services.env["DOVETAIL_REDIS_URL"] = redis_url
    api = services.serve(*HANDLERS, "--with", "orchestrator,worker")
    worker, port = services.watched("worker", *HANDLERS)
    services.wait(worker, "started")
    assert process(services, api, "a", "b") == ["COMPLETED"] * 2
    shout(api, 40)
    found = numbers(api.page(), page_of(port))
    assert (found["completed"], found["shouts"]) == (2, 40)
    for page in (api.page(), page_of(port)):
        assert page("shouts_total", how="loud") > 0, "each told its own"


def test_a_pool_is_summed_and_what_a_killed_process_counted_stays(
    services: Services, redis_url: str
) -> None:
    services.env |= {"DOVETAIL_REDIS_URL": redis_url, "DOVETAIL_TRANSPORT": "celery"}
    worker, port = services.watched("worker", "--concurrency", "2", *HANDLERS)
    api = services.serve("--with", "orchestrator", *HANDLERS)
    services.wait(worker, "started")
    wait_for(lambda: api.page()("dovetail_workers_alive") == 1, "the worker")
    assert process(services, api, "a", "b", "bad") == ["COMPLETED", "COMPLETED", "FAILED"]
    shout(api, 8)
    told = {"completed": 2, "failed": 1, "durations": 2, "confidences": 2, "shouts": 8}
    assert numbers(page_of(port)) == told
    assert numbers(api.page()) == dict.fromkeys(told, 0), "it runs none of them"
    pool = children_of(worker.pid)
    assert len(pool) == 2
    for pid in pool:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not set(pool) & set(children_of(worker.pid)), "their end")
    for _ in range(2):
        assert numbers(page_of(port)) == told
    assert process(services, api, "c") == ["COMPLETED"]
    shout(api, 2)
    assert numbers(page_of(port)) == {
        "completed": 3,
        "failed": 1,
        "durations": 3,
        "confidences": 3,
        "shouts": 10,
    }
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


# ── one measurement ──────────────────────────────────────────────────────────────────────────


def measured(key: str, status: str = "completed", **more: float | None) -> Measurement:
    fields = {"seconds": 0.2, "confidence": 0.81, "finished_at": 1000.0, **more}
    return Measurement(document_id="d", key=key, status=status, **fields)  # type: ignore[arg-type]


def told() -> list[float]:
    names = ("processing_duration_seconds_count", "extraction_confidence_count")
    statuses = ("completed", "cached", "failed")
    found = [
        REGISTRY.get_sample_value("documents_processed_total", {"status": one}) for one in statuses
    ]
    return [one or 0.0 for one in (*found, *map(REGISTRY.get_sample_value, names))]


def test_what_is_delivered_again_is_counted_once(tmp_path: Path) -> None:
    before = told()
    assert record(tmp_path, measured("run:record_metrics:1"))
    assert not record(tmp_path, measured("run:record_metrics:1", finished_at=2000.0))
    assert record(tmp_path, measured("run:record_metrics:2")), "another epoch is other work"
    assert [now - then for now, then in zip(told(), before, strict=True)] == [2, 0, 0, 2, 2]
    assert [one.finished_at for one in open_reviews(tmp_path).measurements()] == [1000, 1000]


def test_a_cached_document_took_no_time_and_a_failed_one_was_broken_off(tmp_path: Path) -> None:
    before = told()
    record(tmp_path, measured("one", "cached", seconds=0.0))
    record(tmp_path, measured("two", "failed", confidence=None))
    assert [now - then for now, then in zip(told(), before, strict=True)] == [0, 1, 1, 0, 1]


def test_threads_that_count_their_first_at_once_count_them_all(tmp_path: Path) -> None:
    before = told()
    threads = [
        threading.Thread(target=record, args=(tmp_path, measured(f"t{number}")))
        for number in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert told()[0] - before[0] == 8


def test_the_buckets_ascend_and_one_of_confidence_ends_where_approval_begins() -> None:
    for buckets in (SECONDS, CONFIDENCE):
        assert list(buckets) == sorted(set(buckets))
    assert 0.8 in CONFIDENCE
    assert CONFIDENCE[-1] == 1.0
