"""Reviews: one contract, in a file and in PostgreSQL.

What a person said is never overwritten, nothing that is repeated changes anything, and any number
of processes may write at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import Conflict, NotFound, PermanentError, RetryableError, StoreError
from dovetail.documents import reviews_postgres, reviews_sqlite
from dovetail.documents.handlers import auto_approve, create_review, save_json, save_parquet
from dovetail.documents.metrics import settled
from dovetail.documents.reviews import (
    MAX_OPEN,
    Review,
    ReviewError,
    Reviews,
    _store,
    close_reviews,
    open_reviews,
)

from .found import context, extracted, keep, measured, take_in


@pytest.fixture(scope="module")
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """PostgreSQL, let go of before it is dropped."""
    yield request.getfixturevalue("postgres_url")
    close_reviews()


@pytest.fixture(params=["sqlite", "postgres"])
def reviews(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reviews]:
    """Of an empty folder."""
    if request.param == "postgres":
        monkeypatch.setenv("DOVETAIL_DATABASE_URL", request.getfixturevalue("database"))
    else:
        monkeypatch.delenv("DOVETAIL_DATABASE_URL", raising=False)
    found = open_reviews(tmp_path / "out")
    yield found
    found.close()


@pytest.fixture
def in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reviews]:
    monkeypatch.delenv("DOVETAIL_DATABASE_URL", raising=False)
    found = open_reviews(tmp_path / "out")
    yield found
    found.close()


# --- what a server asks ------------------------------------------------------------------------


def test_reviews_are_counted_by_their_status_and_counting_creates_nothing(reviews: Reviews) -> None:
    assert reviews.counts() == {"pending": 0, "approved": 0}
    assert not reviews.out.exists()
    take_in(reviews)
    take_in(reviews, "invoice-8")
    reviews.approve("invoice-8", by="ada")
    assert reviews.counts() == {"pending": 1, "approved": 1}


def test_an_approval_with_corrections_is_one_change_and_refused_as_one(reviews: Reviews) -> None:
    before = take_in(reviews)
    with pytest.raises(ReviewError):
        reviews.approve("invoice-7", {"currency": "euro", "total": 1.0}, by="ada")
    assert reviews.get("invoice-7") == before
    after = reviews.approve("invoice-7", {"total": 1.5}, by="ada")
    assert (after.status, after.fields["total"], after.locked) == ("approved", 1.5, ("total",))
    assert (after.approved_by, after.corrected_by) == ("ada", "ada")


def test_a_decision_about_a_review_that_was_changed_since_it_was_seen_is_refused(
    reviews: Reviews,
) -> None:
    seen = take_in(reviews).as_dict()["updated_at"]
    reviews.correct("invoice-7", {"total": 2.0}, by="grace", seen=seen, now=time.time() + 5)
    with pytest.raises(Conflict, match="changed since"):
        reviews.approve("invoice-7", by="ada", seen=seen)
    with pytest.raises(Conflict, match="changed since"):
        reviews.correct("invoice-7", {"total": 3.0}, by="ada", seen=seen)
    now = reviews.get("invoice-7")
    assert now is not None
    assert (
        reviews.approve("invoice-7", by="ada", seen=now.as_dict()["updated_at"]).status
        == "approved"
    )


# --- taking in ---------------------------------------------------------------------------------


def test_a_document_has_one_review_with_the_extracted_fields(reviews: Reviews) -> None:
    made = take_in(reviews)
    assert reviews.get("invoice-7") == made
    assert reviews.list() == [made]
    assert made.fields == {
        "type": "invoice",
        "vendor": "Nordlicht Möbel GmbH",
        "date": "2026-03-04",
        "currency": "EUR",
        "total": 1234.56,
        "line_items": extracted()["line_items"],
    }
    assert (made.status, made.locked, made.confidence) == ("pending", (), 0.93)
    assert (made.sha256, made.extractor) == ("ab" * 32, "rules-1")
    assert (made.created_at, made.updated_at, made.corrected_at) == (1.0, 1.0, None)


def test_the_same_extraction_again_changes_nothing_not_even_a_time(reviews: Reviews) -> None:
    made = take_in(reviews, now=1.0)
    assert take_in(reviews, now=2.0) == made
    assert reviews.get("invoice-7") == made


def test_other_content_replaces_the_extracted_fields(reviews: Reviews) -> None:
    take_in(reviews, now=1.0)
    renewed = take_in(reviews, now=2.0, total=99.0, sha256="cd" * 32)
    assert renewed.fields["total"] == 99.0
    assert (renewed.created_at, renewed.updated_at) == (1.0, 2.0)
    assert reviews.list() == [renewed]


def test_values_are_returned_as_they_were_extracted(reviews: Reviews) -> None:
    odd = {
        "vendor": "Zoë's \x00 “Café” \U0001f370 \\u0000 'quoted'",
        "total": 0.1 + 0.2,
        "line_items": [
            {"description": "x" * 300, "quantity": 1e13, "unit_price": -1e-9, "amount": None}
        ],
    }
    take_in(reviews, **odd)
    found = reviews.get("invoice-7")
    assert found is not None
    assert {name: found.fields[name] for name in odd} == odd
    assert take_in(reviews, now=2.0, **odd) == found


def test_the_times_of_a_review_have_the_format_of_the_api(reviews: Reviews) -> None:
    reported = take_in(reviews, now=1_790_000_000.25).as_dict()
    assert reported["created_at"] == "2026-09-21T14:13:20.250Z"
    assert reported["corrected_at"] is None
    assert reported["locked"] == []


# --- what people do ----------------------------------------------------------------------------


def test_a_corrected_field_is_never_overwritten(reviews: Reviews) -> None:
    take_in(reviews)
    mended = reviews.correct("invoice-7", {"total": 1200.0, "vendor": "Nordlicht"}, by="ann", now=2)
    assert mended.locked == ("vendor", "total")
    assert (mended.corrected_by, mended.corrected_at, mended.updated_at) == ("ann", 2.0, 2.0)
    after = take_in(reviews, now=3.0, total=1.0, vendor="?", currency="USD", sha256="cd" * 32)
    assert (after.fields["total"], after.fields["vendor"]) == (1200.0, "Nordlicht")
    assert after.fields["currency"] == "USD"
    assert after.locked == ("vendor", "total")


def test_a_field_corrected_to_its_own_value_is_locked(reviews: Reviews) -> None:
    take_in(reviews)
    reviews.correct("invoice-7", {"total": 1234.56}, by="ann")
    assert take_in(reviews, now=3.0, total=1.0).fields["total"] == 1234.56


def test_the_same_correction_again_changes_nothing(reviews: Reviews) -> None:
    take_in(reviews)
    first = reviews.correct("invoice-7", {"total": 7}, by="ann", now=2.0)
    assert first.fields["total"] == 7.0
    assert reviews.correct("invoice-7", {"total": 7}, by="bob", now=3.0) == first


def test_every_problem_of_a_correction_is_reported_and_nothing_is_changed(reviews: Reviews) -> None:
    made = take_in(reviews)
    with pytest.raises(ReviewError) as raised:
        reviews.correct("invoice-7", {"totl": 1, "date": "soon", "currency": "euro"}, by="ann")
    assert "no field 'totl'; did you mean 'total'?" in str(raised.value)
    assert "date: must be a day as in 2026-03-31, not 'soon'" in str(raised.value)
    assert "currency:" in str(raised.value)
    with pytest.raises(ReviewError, match="nothing to correct; name a field: type, vendor"):
        reviews.correct("invoice-7", {}, by="ann")
    assert reviews.get("invoice-7") == made


def test_a_corrected_value_is_stored_in_the_type_of_the_field(reviews: Reviews) -> None:
    take_in(reviews)
    mended = reviews.correct("invoice-7", {"total": "12.50", "vendor": None}, by="ann")
    assert (mended.fields["total"], mended.fields["vendor"]) == (12.5, None)


def test_the_first_approval_counts(reviews: Reviews) -> None:
    take_in(reviews)
    done = reviews.approve("invoice-7", by="ann", now=2.0)
    assert (done.status, done.approved_by, done.updated_at) == ("approved", "ann", 2.0)
    assert reviews.approve("invoice-7", by="auto", now=3.0) == done
    assert take_in(reviews, now=4.0) == done


@pytest.mark.parametrize("changed", [{"total": 2.0}, {"sha256": "cd" * 32}])
def test_an_approved_review_is_pending_again_after_its_fields_changed(
    reviews: Reviews, changed: dict[str, Any]
) -> None:
    take_in(reviews)
    reviews.approve("invoice-7", by="ann")
    again = take_in(reviews, now=3.0, **changed)
    assert (again.status, again.approved_by) == ("pending", None)


def test_an_approval_survives_a_better_confidence_and_a_change_of_a_locked_field(
    reviews: Reviews,
) -> None:
    take_in(reviews)
    reviews.correct("invoice-7", {"total": 5}, by="ann")
    reviews.approve("invoice-7", by="ann")
    assert take_in(reviews, now=3.0, confidence=1.0, total=8.0).status == "approved"


def test_an_unknown_document_cannot_be_approved_or_corrected(reviews: Reviews) -> None:
    for decide in (
        lambda: reviews.approve("other", by="ann"),
        lambda: reviews.correct("other", {"total": 1}, by="ann"),
    ):
        with pytest.raises(NotFound, match="no review of 'other' in "):
            decide()
    assert not reviews.out.exists()


# --- lists -------------------------------------------------------------------------------------


def test_reviews_are_listed_by_id_status_and_prefix(reviews: Reviews) -> None:
    for name in ("b-2", "a-1", "b-10", "B-3", "c%_"):
        take_in(reviews, name)
    reviews.approve("b-2", by="ann")

    def ids(*given: Any, **more: Any) -> list[str]:
        return [review.document_id for review in reviews.list(*given, **more)]

    assert ids() == ["B-3", "a-1", "b-10", "b-2", "c%_"]
    assert ids("approved") == ["b-2"]
    assert ids("pending", prefix="b") == ["b-10"]
    assert ids(limit=2) == ["B-3", "a-1"]
    assert ids(limit=2, after="a-1") == ["b-10", "b-2"]
    assert ids(prefix="c%") == ["c%_"]
    assert ids(prefix="_") == []
    with pytest.raises(ReviewError, match="no status 'aproved'; there are: pending, approved"):
        reviews.list("aproved")


def test_reading_reviews_creates_nothing(reviews: Reviews) -> None:
    assert reviews.get("a") is None
    assert reviews.list() == []
    assert reviews.measurements() == []
    assert not reviews.out.exists()


def test_each_folder_has_its_own_reviews(reviews: Reviews, tmp_path: Path) -> None:
    take_in(reviews)
    other = open_reviews(tmp_path / "other")
    assert other.list() == []
    take_in(other, now=5.0)
    assert [one.created_at for one in (*reviews.list(), *other.list())] == [1.0, 5.0]
    other.close()


# --- measurements ------------------------------------------------------------------------------


def test_a_processing_is_measured_once_for_any_number_of_deliveries(reviews: Reviews) -> None:
    assert reviews.measured("invoice-7", "run-1") is None
    assert keep(reviews, measured())
    assert not keep(reviews, measured(seconds=9.0))
    assert reviews.measurements() == [measured()]
    assert reviews.measured("invoice-7", "run-1") == measured()
    assert keep(reviews, measured(document_id="other"))


def test_a_measurement_is_replaced_by_the_result_of_its_rule(reviews: Reviews) -> None:
    keep(reviews, measured(status="started", seconds=None, confidence=None))
    rule = settled("invoice-7", "run-1", good=False, ended_at=101.5)
    before, after = reviews.measure("invoice-7", "run-1", rule)
    assert before is not None
    assert (before.status, after.status, after.seconds) == ("started", "failed", 1.5)
    assert reviews.measurements() == [after]
    again, same = reviews.measure("invoice-7", "run-1", rule)
    assert again is same, "the same end again is no news"


def test_measurements_of_a_period_are_listed_in_order(reviews: Reviews) -> None:
    late = measured("k3", finished_at=300.0, status="failed", confidence=None)
    cached = measured("k2", finished_at=200.0, status="cached", seconds=None)
    for one in (late, measured("k1"), cached):
        keep(reviews, one)
    assert reviews.measurements() == [measured("k1"), cached, late]
    assert reviews.measurements(since=200.0, until=300.0) == [cached]


# --- the file that a document had before --------------------------------------------------------


def process(out: Path, **found: Any) -> None:
    config: dict[str, Any] = {"extracted": extracted(**found)}
    config["parquet"] = save_parquet(config, context("save_parquet", out))
    config["json"] = save_json(config, context("save_json", out))
    create_review(config, context("create_review", out))


def parquet_files(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out / "parquet")) for path in out.rglob("*.parquet"))


def test_a_document_whose_date_changed_leaves_no_file_under_the_old_date(
    reviews: Reviews,
) -> None:
    process(reviews.out)
    process(reviews.out, date="2026-04-01", sha256="cd" * 32)
    assert parquet_files(reviews.out) == ["day=2026-04-01/type=invoice/invoice-7.parquet"]
    (review,) = reviews.list()
    assert Path(review.parquet_path).is_file()
    assert Path(review.json_path).is_file()


def test_a_process_that_died_before_recording_the_file_still_finds_and_removes_it(
    reviews: Reviews, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(reviews.out)

    def die(*_: object) -> None:
        raise RuntimeError("dies")

    with monkeypatch.context() as patch:
        # After the old file went, before the review of the new one was written.
        patch.setattr("dovetail.documents.reviews._row_of", die)
        with pytest.raises(RuntimeError, match="dies"):
            process(reviews.out, date="2026-04-01")
    (review,) = reviews.list()
    assert "day=2026-03-04" in review.parquet_path
    process(reviews.out, date="2026-04-01")
    assert parquet_files(reviews.out) == ["day=2026-04-01/type=invoice/invoice-7.parquet"]
    (review,) = reviews.list()
    assert Path(review.parquet_path).is_file()


def test_a_copied_folder_does_not_touch_the_original(in_a_file: Reviews) -> None:
    process(in_a_file.out)
    in_a_file.close()
    copied = in_a_file.out.with_name("copy")
    shutil.copytree(in_a_file.out, copied)
    (review,) = open_reviews(copied).list()
    assert review.parquet_path.startswith(str(copied))
    process(copied, date="2026-04-01")
    assert parquet_files(in_a_file.out) == ["day=2026-03-04/type=invoice/invoice-7.parquet"]
    open_reviews(copied).close()


def test_the_handlers_return_the_state_of_the_review(reviews: Reviews) -> None:
    process(reviews.out)
    done = auto_approve({}, context("auto_approve", reviews.out))
    assert done == {"document_id": "invoice-7", "status": "approved", "approved_by": "auto"}


# --- many at once ------------------------------------------------------------------------------


def test_concurrent_threads_each_get_their_own_reply(reviews: Reviews) -> None:
    answers: dict[int, Any] = {}

    def work(number: int) -> None:
        try:
            if number % 3 == 0:
                answers[number] = reviews.approve("nobody", by="ann")
            else:
                answers[number] = take_in(reviews, f"d-{number}").document_id
        except NotFound:
            answers[number] = None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: None if n % 3 == 0 else f"d-{n}" for n in range(24)}
    assert len(reviews.list()) == 16


def test_two_rules_never_change_one_review_at_the_same_time(reviews: Reviews) -> None:
    take_in(reviews)
    url = os.environ.get("DOVETAIL_DATABASE_URL")
    # As another process would have it: with connections of its own.
    other = _store(reviews.out, url and f"{url}?application_name=other", "full")
    order: list[str] = []
    entered = threading.Event()

    def slow(before: Review | None) -> Review:
        assert before is not None
        entered.set()
        time.sleep(0.2)
        order.append("slow")
        return replace(before, confidence=0.25)

    def quick(before: Review | None) -> Review:
        assert before is not None
        order.append("quick")
        return replace(before, extractor="other")

    first = threading.Thread(target=reviews._store.change, args=("invoice-7", slow))
    first.start()
    entered.wait()
    after = other.change("invoice-7", quick)
    first.join()
    other.close()
    assert order == ["slow", "quick"]
    assert (after.confidence, after.extractor) == (0.25, "other")


MANY = """
import sys
from pathlib import Path
from found import keep, measured, take_in
from dovetail.documents.reviews import open_reviews

out, me = Path(sys.argv[1]), int(sys.argv[2])
reviews = open_reviews(out)
field, value = [("vendor", "Ann"), ("date", "2020-01-01"), ("currency", "XAU")][me]
new = 0
for turn in range(12):
    take_in(reviews, "same", total=float(me * 100 + turn), date=f"2026-0{me + 1}-01")
    if turn == 3:
        reviews.correct("same", {field: value}, by=str(me))
    new += keep(reviews, measured(f"k{turn}"))
print(new)
"""


def test_concurrent_processes_lose_no_write(reviews: Reviews) -> None:
    take_in(reviews, "same")
    command = [sys.executable, "-c", MANY, str(reviews.out)]
    crowd = [
        subprocess.Popen(
            [*command, str(me)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        for me in range(3)
    ]
    counted = [int(one.communicate()[0]) for one in crowd]
    (review,) = reviews.list()
    assert review.locked == ("vendor", "date", "currency")
    assert [review.fields[name] for name in review.locked] == ["Ann", "2020-01-01", "XAU"]
    assert review.fields["total"] in (11.0, 111.0, 211.0)
    assert sum(counted) == 12
    assert len(reviews.measurements()) == 12


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # what Celery does, too
def test_a_forked_process_has_its_own_connections(reviews: Reviews) -> None:
    take_in(reviews)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # who waits for a thread that is not there waits for ever
        mine = open_reviews(reviews.out)
        with suppress(BaseException):
            take_in(mine, "from-the-child")
            os._exit(int(mine is reviews))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    take_in(reviews, "from-the-parent")
    assert [one.document_id for one in reviews.list()] == [
        "from-the-child",
        "from-the-parent",
        "invoice-7",
    ]


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_deleted_folder_is_created_again(in_a_file: Reviews) -> None:
    take_in(in_a_file)
    shutil.rmtree(in_a_file.out)
    assert in_a_file.list() == []
    take_in(in_a_file, "second")
    assert [one.document_id for one in in_a_file.list()] == ["second"]
    assert (in_a_file.out / "reviews.db").is_file()


def test_a_closed_review_store_is_opened_again(reviews: Reviews) -> None:
    take_in(reviews)
    close_reviews()
    assert len(reviews.list()) == 1


def open_files() -> list[str]:
    """Those of this process, by name; some are gone before they are looked at."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(entry.readlink()))
    return found


def test_the_number_of_open_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DOVETAIL_DATABASE_URL", raising=False)
    folders = [tmp_path / str(number) for number in range(MAX_OPEN + 4)]
    for folder in folders:
        take_in(open_reviews(folder))
    databases = {str(folder / "reviews.db") for folder in folders}
    assert len(databases & set(open_files())) == MAX_OPEN
    assert all(len(open_reviews(folder).list()) == 1 for folder in folders)
    close_reviews()


def test_a_file_that_is_no_database_is_reported_and_not_changed(in_a_file: Reviews) -> None:
    in_a_file.out.mkdir()
    (in_a_file.out / "reviews.db").write_bytes(b"something else" * 1000)
    with pytest.raises(StoreError, match=r"reviews.db is damaged or no database .* start anew"):
        in_a_file.list()


def test_a_file_of_a_newer_version_is_not_changed(in_a_file: Reviews) -> None:
    in_a_file.out.mkdir()
    with sqlite3.connect(in_a_file.out / "reviews.db") as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(StoreError, match="was written by a newer Dovetail"):
        take_in(in_a_file)


def test_a_full_disk_is_reported_and_can_be_retried(in_a_file: Reviews) -> None:
    take_in(in_a_file)
    connection = in_a_file._store._opened()  # type: ignore[attr-defined]
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(RetryableError, match="the disk is full") as raised:
        take_in(in_a_file, "large", line_items=extracted()["line_items"] * 1000)
    assert raised.value.type == "disk_full"
    connection.execute("PRAGMA max_page_count = 1000000")
    take_in(in_a_file, "now")


def test_a_failing_write_does_not_fail_the_others_of_its_transaction(
    in_a_file: Reviews,
) -> None:
    take_in(in_a_file)
    store: Any = in_a_file._store
    good, bad = [
        reviews_sqlite._Request(lambda c, s=sql: c.execute(s).rowcount)
        for sql in ("UPDATE document_reviews SET confidence = 1", "UPDATE nothing SET at = all")
    ]
    store._commit([good, bad])
    assert (good.answer, good.error) == (1, None)
    assert isinstance(bad.error, StoreError)
    review = in_a_file.get("invoice-7")
    assert review is not None
    assert review.confidence == 1.0


def test_a_folder_that_cannot_be_created_is_an_error(in_a_file: Reviews) -> None:
    in_a_file.out.write_text("a file")
    with pytest.raises(PermanentError, match="cannot be written"):
        take_in(in_a_file)


def test_an_unreachable_database_is_reported_without_its_password_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_DATABASE_URL", "postgresql://ann:hushhush@127.0.0.1:1/db")
    with pytest.raises(RetryableError, match=r"127.0.0.1:1/db cannot be used") as raised:
        take_in(open_reviews(tmp_path))
    assert raised.value.type == "database_down"
    assert "hushhush" not in str(raised.value)
    close_reviews()


def test_a_database_without_its_library_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_DATABASE_URL", "postgresql://127.0.0.1:1/db")
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(StoreError, match=r"pip install 'dovetail\[postgres\]'"):
        open_reviews(tmp_path).list()
    close_reviews()


def test_an_unreadable_url_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_DATABASE_URL", "postgresql://ann:hushhush@host:port/db")
    with pytest.raises(StoreError, match="write it as in postgresql://user:password") as raised:
        open_reviews(tmp_path).list()
    assert "hushhush" not in str(raised.value)
    close_reviews()


def test_a_broken_connection_is_opened_again(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_DATABASE_URL", database)
    found = open_reviews(tmp_path)
    take_in(found)

    async def end_all(connection: Any) -> None:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    other = reviews_postgres.Database(database)
    other.use(end_all)
    other.close()
    take_in(found, "second")
    assert len(found.list()) == 2
