"""What measurements come to: made by hand, so that each figure can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from dovetail.documents.metrics import Statistics, statistics_of


@dataclass(frozen=True)
class Row:
    finished_at: float
    seconds: float | None = 1.0
    status: str = "success"
    confidence: float | None = 0.9


def steady(count: int, every: float, begin: float = 1000.0) -> list[Row]:
    """One after the other, each of which takes all of its time."""
    return [Row(begin + every * (place + 1), seconds=every) for place in range(count)]


def test_the_rate_covers_the_time_from_the_first_start_to_the_last_end() -> None:
    found = statistics_of(steady(100, every=0.5))
    assert found.docs_per_hour == pytest.approx(7200)
    assert (found.busy_seconds, found.windows) == (pytest.approx(50), 1)
    assert (found.first_at, found.last_at) == (1000, 1050)
    assert found.met is True


def test_concurrent_documents_give_a_higher_hourly_rate() -> None:
    at_once = [Row(1003.0 + 3 * round_, seconds=3.0) for round_ in range(10) for _ in range(4)]
    found = statistics_of(at_once)
    assert found.docs_per_hour == pytest.approx(4800)
    assert found.met is False
    assert statistics_of(at_once, target=4700).met is True


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = [*steady(5, every=2), *steady(3, every=1, begin=5000)]
    assert statistics_of(reversed(rows)) == statistics_of(rows)


def test_an_idle_pause_does_not_lower_the_rate() -> None:
    evening, morning = steady(20, every=1), steady(20, every=1, begin=50_000)
    found = statistics_of([*evening, *morning])
    assert (found.busy_seconds, found.windows) == (pytest.approx(40), 2)
    assert found.docs_per_hour == pytest.approx(3600)
    near = statistics_of([*evening, *steady(20, every=1, begin=1080)])
    assert (near.busy_seconds, near.windows) == (pytest.approx(100), 1), "a minute is no pause"


def test_a_long_document_joins_all_overlapping_ones_into_one_window() -> None:
    found = statistics_of([Row(1001.0), Row(1200.0, seconds=195.0), Row(1010.0), Row(1202.0)])
    assert (found.busy_seconds, found.windows) == (pytest.approx(202), 1)


def test_a_given_window_counts_as_a_whole() -> None:
    rows = steady(100, every=1)
    found = statistics_of(rows, since=1050.5, until=1150.5)
    assert (found.documents, found.busy_seconds) == (50, 100)
    assert found.docs_per_hour == pytest.approx(1800)
    picked = statistics_of(rows, since=1050.5)
    assert picked.docs_per_hour == pytest.approx(3600), "with one end it only picks"


def test_median_and_95th_percentile_are_of_completed_documents() -> None:
    took = [float(seconds) for seconds in range(1, 101)]
    rows = [Row(1000.0 + seconds, seconds=seconds) for seconds in took]
    rows += [Row(1000.0, seconds=None, status="cached")] * 50
    rows += [Row(1000.0, seconds=900.0, status="failed", confidence=None)] * 50
    found = statistics_of(rows)
    assert (found.p50_seconds, found.p95_seconds) == (50, 95)
    assert (found.completed, found.cached, found.failed) == (100, 50, 50)
    assert (found.success_rate, found.cached_share) == (0.75, 0.25)


def test_a_failed_document_does_not_count_towards_the_hourly_rate() -> None:
    rows = steady(40, every=1)
    failed = [Row(row.finished_at, status="failed", confidence=None) for row in rows]
    assert statistics_of([*rows, *failed]).docs_per_hour == pytest.approx(3600)
    assert statistics_of(failed).docs_per_hour == 0
    assert statistics_of(failed).met is False


def test_confidence_is_the_mean_of_the_documents_with_a_confidence() -> None:
    rows = [Row(1.0, confidence=0.5), Row(2.0, confidence=1.0), Row(3.0, confidence=None)]
    assert statistics_of(rows).mean_confidence == 0.75


def test_statistics_of_no_documents_say_that_nothing_is_known() -> None:
    found = statistics_of([])
    assert found.documents == 0
    assert (found.docs_per_hour, found.met, found.success_rate, found.p95_seconds) == (None,) * 4
    assert found.sentences() == ["nothing has been measured here"]
    assert statistics_of([], since=1.0, until=2.0).docs_per_hour is None


def test_cached_documents_alone_give_a_rate_without_durations() -> None:
    found = statistics_of([Row(1000.0 + place / 10, None, "cached") for place in range(101)])
    assert found.docs_per_hour == pytest.approx(360 * 101)
    assert found.p50_seconds is None
    assert not any("half took" in line for line in found.sentences())


@pytest.mark.parametrize("rows", [steady(40, every=0.01), steady(29, every=100)])
def test_too_few_documents_or_too_short_a_time_give_no_rate_and_no_verdict(rows: list[Row]) -> None:
    reported = statistics_of(rows).as_data()
    assert (reported["docs_per_hour"], reported["met"]) == (None, None)
    assert (reported["success_rate"], reported["documents"]) == (1.0, len(rows))
    first, *_ = statistics_of(rows).sentences()
    assert first.endswith("that is too little to say what an hour would bring")
    assert first.startswith(f"{len(rows)} documents in ")
    assert " met" not in "".join(statistics_of(rows).sentences())


def test_documents_that_took_no_time_cause_no_division_by_zero() -> None:
    assert statistics_of([Row(1000.0, seconds=0.0)] * 50).docs_per_hour is None


@pytest.mark.parametrize("status", ["started", "extracted", "known"])
def test_a_document_of_an_unfinished_run_is_neither_a_success_nor_a_failure(status: str) -> None:
    found = statistics_of([*steady(40, every=1), Row(1e9, seconds=None, status=status)])
    assert (found.documents, found.completed, found.unfinished) == (40, 40, 1)
    assert (found.success_rate, found.busy_seconds) == (1.0, pytest.approx(40))
    assert any(line.startswith("1 document has not ended") for line in found.sentences())
    (only,) = statistics_of([Row(1e9, seconds=None, status=status)] * 2).sentences()
    assert only.startswith("2 documents have not ended")


def test_rows_of_earlier_versions_are_read() -> None:
    old, new = Row(1.0, status="completed"), Row(1.0, status="success")
    assert statistics_of([old] * 40) == statistics_of([new] * 40)
    assert statistics_of([old]).completed == 1


def test_the_data_form_is_json_with_times_in_the_format_of_the_contract() -> None:
    reported = json.loads(json.dumps(statistics_of(steady(10, every=1)).as_data()))
    assert reported["first_at"] == "1970-01-01T00:16:40Z"
    assert set(reported) == set(Statistics.__dataclass_fields__)


def sentences(rows: list[Row]) -> str:
    return "\n".join(statistics_of(rows).sentences())


def test_the_text_form_starts_with_the_verdict() -> None:
    rows = [*steady(9_999, every=0.36), Row(1001.0, status="failed", confidence=None)]
    first, *others = statistics_of(rows).sentences()
    assert first == (
        "10,000 documents an hour; the target of 5,000 is met (9,999 documents in 60 min of work)"
    )
    assert others == [
        "99.9 % succeeded: 1 of 10,000 documents failed",
        "half took at most 360 ms, 95 % at most 360 ms",
        "confidence 0.90 on average",
    ]


def test_the_text_form_says_how_reliable_a_rate_is() -> None:
    assert "not met" in sentences(steady(100, every=1))
    assert "too little to say" not in sentences(steady(100, every=1))
    assert "in 2 stretches" in sentences([*steady(40, 1), *steady(40, 1, begin=9000)])
    cached = [Row(1000.0 + place, None, "cached") for place in range(40)]
    assert "40 of them were known already" in sentences([*steady(40, every=1), *cached])
