"""`dovetail documents reviews` and `stats`: what was found, before people, and how fast it went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.documents.reviews import Measurement, Reviews, open_reviews

from .conftest import Outcome, Shell

Command = Callable[..., Outcome]
REVIEWS = ("documents", "reviews")
IN = ("--out", "out")


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what these tests read themselves; a command gets none of it."""
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_ROOTS", "/")


class Kept:
    """The reviews of a folder, with documents put there by hand."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"

    @property
    def reviews(self) -> Reviews:
        return open_reviews(self.out)

    def add(self, name: str, **fields: Any) -> None:
        found = {
            "type": "invoice",
            "vendor": "Acme",
            "date": "2026-03-04",
            "currency": "EUR",
            "total": 1234.5,
            "line_items": [],
            "confidence": 0.93,
            "extractor": "rules-1",
            "sha256": "0" * 64,
            "confidences": {"vendor": 0.75},
            **fields,
        }
        path = self.out / "json" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
        self.reviews.upsert(
            name,
            file_path=f"/in/{name}.pdf",
            extracted=found,
            json_path=path,
            parquet_path=self.out / "parquet" / f"{name}.parquet",
        )


@pytest.fixture
def kept(shell: Shell) -> Kept:
    return Kept(shell.directory)


def row(done: Outcome, start: str) -> list[str]:
    return next(line for line in done.out.splitlines() if line.strip().startswith(start)).split()


def test_the_list_shows_the_extracted_fields_and_their_confidence(
    kept: Kept, command: Command
) -> None:
    kept.add("acme-1")
    kept.add("birch-2", type="letter", vendor=None, total=None, currency=None, confidence=0.4)
    kept.reviews.approve("acme-1", by="ann")
    listed = command(*REVIEWS, "list", *IN)
    assert listed.code == 0
    assert row(listed, "acme-1") == [
        *("acme-1", "invoice", "Acme", "2026-03-04", "1,234.50", "EUR", "0.93", "approved"),
    ]
    assert row(listed, "birch-2") == [
        *("birch-2", "letter", "–", "2026-03-04", "–", "0.40", "pending"),
    ]
    pending = command(*REVIEWS, "list", "--status", "pending", *IN).out
    assert "birch-2" in pending
    assert "acme-1" not in pending


def test_a_long_review_list_has_pages(kept: Kept, command: Command) -> None:
    for number in range(5):
        kept.add(f"doc-{number}")
    first = command(*REVIEWS, "list", "--limit", "3", *IN).out.splitlines()
    assert len(first) == 5
    assert first[-1] == "more:  --after doc-2"
    rest = command(*REVIEWS, "list", "--limit", "3", "--after", "doc-2", *IN).out.splitlines()
    assert len(rest) == 3
    page = json.loads(command(*REVIEWS, "list", "--limit", "3", "--json", *IN).out)
    assert [item["document_id"] for item in page["items"]] == ["doc-0", "doc-1", "doc-2"]
    assert page["next_cursor"] == "doc-2"


def test_an_empty_folder_prints_how_to_fill_it_and_is_not_created(
    kept: Kept, command: Command
) -> None:
    listed = command(*REVIEWS, "list", *IN)
    assert listed.code == 0
    assert "dovetail documents process PATH --out out" in listed.out
    assert json.loads(command(*REVIEWS, "list", "--json", *IN).out)["items"] == []
    assert not kept.out.exists()


def test_a_review_is_shown_with_its_items_files_and_next_commands(
    kept: Kept, command: Command
) -> None:
    items = [
        {"description": "Paper", "quantity": 2, "unit_price": 10.0, "amount": 20.0},
        {"description": "Delivery", "quantity": None, "unit_price": None, "amount": 4.5},
    ]
    kept.add("acme-1", line_items=items)
    shown = command(*REVIEWS, "show", "acme-1", *IN)
    assert shown.out.splitlines()[0] == "acme-1  pending"
    assert row(shown, "vendor") == ["vendor", "Acme", "0.75"]
    assert row(shown, "total") == ["total", "1,234.50", "–"]
    assert row(shown, "line_items")[1] == "2"
    assert row(shown, "Paper") == ["Paper", "2", "×", "10.00", "20.00"]
    assert row(shown, "Delivery") == ["Delivery", "4.50"]
    assert row(shown, "file") == ["file", "/in/acme-1.pdf"]
    assert shown.out.splitlines()[-1].endswith(
        "dovetail documents reviews approve acme-1 --out out"
    )
    reported = json.loads(command(*REVIEWS, "show", "acme-1", "--json", *IN).out)
    assert (reported["document_id"], reported["fields"]["line_items"]) == ("acme-1", items)


def test_a_unique_id_prefix_finds_the_review(kept: Kept, command: Command) -> None:
    kept.add("acme-1a")
    kept.add("acme-1b")
    kept.add("birch")
    kept.add("birch-2")
    assert command(*REVIEWS, "show", "acme-1a", *IN).code == 0
    assert command(*REVIEWS, "show", "birch", *IN).out.startswith("birch  ")
    assert command(*REVIEWS, "show", "birch-", *IN).out.startswith("birch-2  ")
    several = command(*REVIEWS, "show", "acme", *IN)
    assert (several.code, several.out) == (1, "")
    assert "'acme' may be acme-1a, acme-1b; write more of it" in several.err
    unknown = command(*REVIEWS, "show", "brich-2", *IN)
    assert unknown.code == 1
    assert "did you mean birch-2?" in unknown.err


def test_a_correction_is_stored_with_its_author(kept: Kept, command: Command) -> None:
    kept.add("acme-1")
    done = command(
        *REVIEWS, "correct", "acme", "total=99.5", "vendor=Acme & Sons", "date=", "--by", "ann", *IN
    )
    assert done.code == 0, done.err
    assert "99.50  " in done.out
    assert done.out.count("corrected by ann") == 3
    review = kept.reviews.get("acme-1")
    assert review is not None
    assert (review.fields["total"], review.fields["vendor"], review.fields["date"]) == (
        *(99.5, "Acme & Sons", None),
    )
    assert set(review.locked) == {"total", "vendor", "date"}
    kept.add("acme-1", total=1.0, currency="USD")
    review = kept.reviews.get("acme-1")
    assert review is not None
    assert (review.fields["total"], review.fields["currency"]) == (99.5, "USD")


def test_line_items_are_corrected_as_json(kept: Kept, command: Command) -> None:
    kept.add("acme-1")
    given = 'line_items=[{"description": "Tea", "amount": 3}]'
    reported = json.loads(command(*REVIEWS, "correct", "acme", given, "--json", *IN).out)
    assert reported["fields"]["line_items"] == [
        {"description": "Tea", "quantity": None, "unit_price": None, "amount": 3.0}
    ]
    emptied = json.loads(command(*REVIEWS, "correct", "acme", "line_items=", "--json", *IN).out)
    assert emptied["fields"]["line_items"] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("totl=3", "no field 'totl'; did you mean 'total'?"),
        ("total=many", "total: "),
        ("date=yesterday", "date: must be a day as in 2026-03-31"),
        ("type=bill", "type: "),
        ("currency=euro", "currency: "),
        ("line_items=tea", "line_items: write JSON, as in line_items="),
        ("total", "'total': write FIELD=VALUE, as in total=12.50"),
        ("confidence=1", "no field 'confidence'"),
    ],
)
def test_an_invalid_correction_changes_nothing(
    kept: Kept, command: Command, change: str, said: str
) -> None:
    kept.add("acme-1")
    before = kept.reviews.get("acme-1")
    done = command(*REVIEWS, "correct", "acme", "vendor=New", change, *IN)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert kept.reviews.get("acme-1") == before


def test_an_approval_is_stored_and_the_first_approval_counts(kept: Kept, command: Command) -> None:
    kept.add("acme-1")
    assert "acme-1  approved by ann" in command(*REVIEWS, "approve", "a", "--by", "ann", *IN).out
    reported = json.loads(command(*REVIEWS, "approve", "acme", "--by", "bob", "--json", *IN).out)
    assert (reported["status"], reported["approved_by"]) == ("approved", "ann")


# ── stats ────────────────────────────────────────────────────────────────────────────────


def measure(kept: Kept, seconds: float, count: int = 100) -> None:
    """Documents that took two seconds each, one ended every so many seconds."""
    for number in range(count):
        status = "failed" if number == 7 else "completed"
        row = Measurement(
            document_id=f"doc-{number}",
            key=f"{number}:extract:1",  # as earlier versions wrote them
            status=status,
            seconds=2.0,
            confidence=None if status == "failed" else 0.9,
            finished_at=1_000_000.0 + number * seconds,
        )
        kept.reviews.measure(row.document_id, row.key, lambda _, row=row: row)  # type: ignore[misc]


def test_the_figures_say_whether_the_target_is_met(kept: Kept, command: Command) -> None:
    measure(kept, 0.5)
    verdict, *more = command("documents", "stats", *IN).out.splitlines()
    assert "documents an hour; the target of 5,000 is met" in verdict
    assert any("99 % succeeded" in line for line in more)
    assert any("95 % at most 2.0 s" in line for line in more)
    assert any("confidence 0.90" in line for line in more)
    beyond = command("documents", "stats", "--target", "1e6", *IN)
    assert beyond.code == 0
    assert "the target of 1,000,000 is not met" in beyond.out


def test_the_figures_are_printed_as_json(kept: Kept, command: Command) -> None:
    measure(kept, 1.0)
    reported = json.loads(command("documents", "stats", "--json", *IN).out)
    assert reported["out"] == str(kept.out)
    assert (reported["documents"], reported["failed"], reported["met"]) == (100, 1, False)
    assert reported["docs_per_hour"] == pytest.approx(3600 * 99 / 101)
    assert reported["p95_seconds"] == 2.0


def test_a_check_fails_if_a_figure_misses_its_limit(kept: Kept, command: Command) -> None:
    nothing = command("documents", "stats", "--check", *IN)
    assert (nothing.code, "nothing has been measured here" in nothing.out) == (1, True)
    measure(kept, 0.5)
    fine = command("documents", "stats", "--check", *IN)
    assert fine.code == 0
    assert fine.out.splitlines()[-3:] == [
        "documents an hour: 6,920, at least 5,000 wanted: met",
        "95 % took at most: 2.0 s, at most 60.0 s wanted: met",
        "succeeded: 99 %, at least 95 % wanted: met",
    ]
    for option, value, missed in (
        ("--target", "1e6", "docs_per_hour"),
        ("--p95", "1.5", "p95_seconds"),
        ("--success", "99.5", "success_rate"),
    ):
        said = command("documents", "stats", "--check", option, value, "--json", *IN)
        assert said.code == 1
        checks = json.loads(said.out)["checks"]
        assert [one["name"] for one in checks if not one["ok"]] == [missed]


def test_figures_without_a_measurement_say_that_it_is_missing(kept: Kept, command: Command) -> None:
    said = command("documents", "stats", *IN)
    assert said.code == 0
    assert "nothing has been measured here" in said.out
    assert "dovetail documents process PATH --out out" in said.out
