"""Metrics that handlers make themselves with `prometheus_client`: on the page, and summed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dovetail.telemetry.metrics import ServiceFacts, _warn_of, handler_metrics
from dovetail.telemetry.service import VALUES_FOLDER, Telemetry

from .services import Page

# A process of a pool: it counts, says so, and lives until its input ends.
POOLED = """
import sys
from prometheus_client import Counter, Gauge, Histogram
orders = Counter("orders_total", "Orders", ["shop"])
sizes = Histogram("order_size", "Sizes", buckets=(1, 10))
open_now = Gauge("orders_open", "Open", multiprocess_mode="livesum")
for size in sys.argv[1:]:
    orders.labels("north").inc()
    sizes.observe(float(size))
open_now.set(len(sys.argv) - 1)
print("counted", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mine() -> Iterator[list[Collector]]:
    """What a test registers, which goes with it."""
    found: list[Collector] = []
    yield found
    for one in found:
        REGISTRY.unregister(one)


def page() -> Page:
    return Page(Telemetry().page(ServiceFacts()).decode())


def test_metrics_registered_by_a_handler_are_exported_beside_ours(mine: list[Collector]) -> None:
    counter = Counter("orders_total", "Orders", ["shop"])
    spread = Histogram("order_size", "Sizes", buckets=(1, 10))
    mine += [counter, spread]
    counter.labels("north").inc(3)
    spread.observe(7)
    reported = page()
    assert reported("orders_total", shop="north") == 3
    assert (reported("order_size_bucket", le="1.0"), reported("order_size_bucket", le="10.0")) == (
        0,
        1,
    )
    assert "dovetail_leases_reaped_total" in reported.text


def test_the_librarys_metrics_of_a_process_are_on_the_page_once() -> None:
    assert "process_cpu_seconds_total" in {
        sample.name for family in REGISTRY.collect() for sample in family.samples
    }
    reported = page().text
    assert reported.count("# HELP process_cpu_seconds_total ") == 1
    assert "python_" not in reported


@pytest.mark.parametrize(
    "name", ["dovetail_runs_total", "dovetail_runs", "dovetail_node_duration_seconds_count"]
)
def test_a_metric_with_a_name_of_ours_is_left_out_and_logged(
    name: str, mine: list[Collector], caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of.cache_clear()
    gauge = Gauge(name, "a forged one")
    mine.append(gauge)
    gauge.set(99)
    for _ in range(2):
        assert "forged" not in page().text
    assert caplog.text.count(f"{name} of a handler is left out") == 1


class Broken(Collector):
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        raise RuntimeError("it cannot be read")


def test_a_failing_collector_costs_only_its_own_lines(
    mine: list[Collector], caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    mine.append(broken)
    REGISTRY.register(broken)
    assert "dovetail_leases_reaped_total" in page().text
    assert "it cannot be read" in caplog.text


# ── a pool of processes ──────────────────────────────────────────────────────────────────────


class Pooled:
    """Processes that count, in the folder of a pool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self, *sizes: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", POOLED, *map(str, sizes)],
            env={**os.environ, VALUES_FOLDER: str(self.folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"counted\n"
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def pooled(tmp_path: Path) -> Iterator[Pooled]:
    found = Pooled(tmp_path)
    yield found
    found.close()


def is_alive(pid: int) -> bool:
    time.sleep(0.005)  # so that concurrent scrapes would disturb each other
    return Path(f"/proc/{pid}/stat").exists()


def numbers(reported: Page) -> tuple[float, float, float, float]:
    return (
        reported("orders_total", shop="north"),
        reported("order_size_bucket", le="10.0"),
        reported("order_size_sum"),
        reported("orders_open"),
    )


def test_a_pool_is_summed_while_its_processes_live_and_after_they_end(pooled: Pooled) -> None:
    first, second = pooled.add(1, 2), pooled.add(3, 40, 5)

    def reported() -> Page:
        return Page(handler_metrics(pooled.folder, is_alive).decode())

    assert numbers(reported()) == (5, 4, 51, 5)
    first.kill()
    first.wait()
    assert numbers(reported()) == (5, 4, 51, 3), "a live gauge goes with its process, counts do not"
    second.communicate()  # it ends in order
    pooled.add(6)
    found: list[tuple[float, ...]] = []
    askers = [threading.Thread(target=lambda: found.append(numbers(reported()))) for _ in range(8)]
    for one in askers:
        one.start()
    for one in askers:
        one.join()
    assert found == [(6, 5, 57, 1)] * 8
    kinds = sorted(path.name.partition("_")[0] for path in pooled.folder.glob("*.db"))
    assert kinds == ["counter", "counter", "gauge", "histogram", "histogram"], "none is left behind"


def test_a_folder_of_the_operator_is_read_but_not_changed(
    pooled: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled.add(1, 2).communicate()
    files = {path: path.read_bytes() for path in pooled.folder.iterdir()}
    monkeypatch.setenv(VALUES_FOLDER, str(pooled.folder))
    telemetry = Telemetry()
    telemetry.share()
    reported = Page(telemetry.page(ServiceFacts()).decode())
    telemetry.close()
    assert reported("orders_total", shop="north") == 2
    assert os.environ[VALUES_FOLDER] == str(pooled.folder)
    assert {path: path.read_bytes() for path in pooled.folder.iterdir()} == files


def test_the_folder_of_a_pool_is_created_before_and_deleted_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VALUES_FOLDER, raising=False)
    telemetry = Telemetry()
    telemetry.share()
    folder = Path(os.environ[VALUES_FOLDER])
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o077 == 0, "private"
    telemetry.close()
    assert not folder.exists()
    assert VALUES_FOLDER not in os.environ
