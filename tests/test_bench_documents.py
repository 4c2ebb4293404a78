"""The bench of the document pipeline works: real services, few documents, a quick model.

How fast they are is not asked here, but whether the report is true.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dovetail.documents import reading

from .servers.llm_stub import Call

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what these tests read themselves."""
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_ROOTS", "/")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scripts of bench/ as modules."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    yield import_module("documents")
    for path in (ROOT / "bench").glob("*.py"):
        sys.modules.pop(path.stem, None)


def quiet(_: str) -> None:
    pass


def test_the_documents_of_the_bench_are_of_four_kinds_and_contain_their_lines(
    bench: Any, tmp_path: Path
) -> None:
    made = bench.make(tmp_path / "in", 8)
    read = [reading.read(path) for path in made]
    assert [found.kind for found in read] == ["txt", "html", "pdf", "docx"] * 2
    assert len({path.read_bytes() for path in made}) == len(made)
    texts = import_module("document_files")
    for number, found in enumerate(read):
        reported = " ".join(found.text.split())
        for line in texts.lines(number):
            assert " ".join(line.split()) in reported


def test_the_pace_is_measured_over_whole_rounds_between_ramp_up_and_tail(bench: Any) -> None:
    # Four slots in step, 3 s a round; the first round took 2 s longer, one begins alone.
    starts = [3.0 * turn + 0.1 * slot for turn in range(10) for slot in range(4)] + [30.5]
    starts[:4] = [-2.0, -1.9, -1.8, -1.7]
    found = bench.pace(-3.0, starts, ended=34.0, slots=4)
    assert found["steady_per_second"] == pytest.approx(36 / 27.5)
    assert found["steady_documents"] % 4 == 0
    assert found["ramp_up_seconds"] == pytest.approx(6.0)
    assert found["tail_seconds"] == pytest.approx(3.5)
    assert found["all_per_second"] == pytest.approx(41 / 37)


def test_overlapping_calls_are_counted(bench: Any) -> None:
    calls = [Call(a, b, 200, "", "", "") for a, b in ((0.0, 3.0), (1.0, 4.0), (3.5, 6.5))]
    assert bench.overlapping(calls) == 2


def test_a_missed_target_is_reported(bench: Any) -> None:
    run = import_module("run")
    crew = {
        "an_hour": 4_699.0,
        "calls": 12,
        "documents": 10,
        "most_starts_within": {"1": 13, "10": 102},
        "most_calls_within": {"1": 13, "10": 104},
    }
    reported = bench.verdicts({"1 × 4": crew, "embedded": {"per_second": 99.0}}, run.verdict)
    assert [run.shown(each) for each in reported if not each["reached"]] == [
        "✗ documents, 1 × 4, a model of 3 s: documents an hour: 4699.00 (at least 4,700)",
        "✗ documents, 1 × 4: calls of the model: 12.00 (exactly 10)",
        "✗ documents, 1 × 4: most starts in any 1 s, all workers together: 13.00 (at most 12)",
        "✗ documents, 1 × 4: most calls in any 10 s, all workers together: 104.00 (at most 103)",
        "✗ documents, embedded, no model, no limit: documents a second: 99.00 (at least 100)",
    ]


def test_the_page_lists_the_targets_that_are_checked(bench: Any) -> None:
    page = (ROOT / "docs" / "speed.md").read_text().partition("## Documents")[2]
    one, two, many = bench.CREWS
    assert f"| {one.least_an_hour:,} documents an hour |" in page
    assert f"| {two.least_an_hour:,} an hour |" in page
    share = many.least_an_hour / (bench.LIMIT * bench.HOUR)
    assert f"| {share:.0%} of the 36,000 an hour" in page.replace(" %", "%")
    assert f"| {bench.LEAST_A_SECOND:g} documents a second |" in page
    assert [crew.name for crew in bench.CREWS] == ["1 × 4", "2 × 4", "2 × 16"]


def test_services_and_the_embedded_engine_process_documents_and_report_the_cost(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MODEL_SECONDS", 0.2)
    monkeypatch.setattr(bench, "QUICK_SECONDS", 1.0)
    monkeypatch.setattr(bench, "FEW_DOCUMENTS", 40)
    monkeypatch.setattr(bench, "CREWS", [bench.WorkerSetup(2, 2, least_an_hour=1)])
    found = bench.measure(tmp_path, quiet, quick=True)
    crew, embedded = found["2 × 2"], found["embedded"]
    assert crew["calls"] == crew["documents"] == 14
    assert crew["most_calls_at_once"] <= 4
    assert crew["failed_calls"] == 0
    assert crew["cpu_seconds_per_document"].keys() == {"redis", "orchestrator", "worker", "model"}
    assert embedded["documents"] == 40
    steps = ["extract", "save_parquet", "save_json", "record_metrics", "create_review"]
    for row in (crew, embedded):
        assert list(row["node_seconds"]) == steps
    assert crew["steady_per_second"] > 0
    assert embedded["per_second"] > 0
    assert embedded["command"]["per_second"] > 0
    assert list(embedded["parts"]) == steps
    assert all(seconds > 0 for seconds in embedded["parts"].values())
    lines = bench.table(found).splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == [
        "documents, 2 × 2 over Redis",
        "documents, embedded",
    ]
