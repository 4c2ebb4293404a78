"""Documents page by page: split, extracted with `for_each`, joined; and PDFs that are hostile."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dovetail import Dovetail, PermanentError, RetryableError, Run
from dovetail.documents import PAGES, PIPELINE, extraction, reading
from dovetail.documents.fields import MAX_LINE_ITEMS, Fields, LineItem
from dovetail.documents.handlers import extract_page, split
from dovetail.documents.pages import DISPUTED, Page, join, merge
from dovetail.documents.reviews import open_reviews
from dovetail.documents.tasks import batch_process_task

from .found import context, extracted, statuses_by_runs
from .making import DRAWING, LEFT, RIGHT, Mark, nested_forms, paragraph, pdf, row, tesseract

NO_LIMIT = {"gemini_api": {"rate_per_second": 10_000, "burst": 1000}}
HEAD = [(LEFT, "Description"), (350, "Qty"), (440, "Unit price"), (RIGHT, "Amount")]


def invoice_pages() -> list[list[Mark]]:
    """An invoice whose head, table and total are on three pages."""
    first = [
        Mark(LEFT, 800, "Harbour Tools Ltd", 14, bold=True),
        Mark(LEFT, 770, "INVOICE"),
        Mark(LEFT, 750, "Invoice number: 2041"),
        Mark(LEFT, 735, "Date: 2026-03-04"),
        *row(700, HEAD, bold=True),
    ]
    second = [Mark(LEFT, 800, "Invoice number: 2041, page 2"), *row(770, HEAD, bold=True)]
    for number, letter in enumerate("ABCDE"):
        chisel = [(LEFT, f"Chisel {letter}"), (350, "2"), (440, "10.00"), (RIGHT, "20.00")]
        mallet = [(LEFT, f"Mallet {letter}"), (350, "1"), (440, "15.50"), (RIGHT, "15.50")]
        first += row(680 - 20 * number, chisel)
        second += row(750 - 20 * number, mallet)
    third = [
        Mark(LEFT, 800, "Invoice number: 2041, page 3"),
        *row(770, [(LEFT, "Total due"), (RIGHT, "EUR 177.50")], bold=True),
    ]
    return [first, second, third]


def with_a_damaged_page(pages: list[list[Mark]]) -> bytes:
    """Its second page leads to no object; the number keeps its width, so all offsets stay right."""
    whole = pdf(pages)
    assert b"/Kids [5 0 R 7 0 R" in whole
    return whole.replace(b"/Kids [5 0 R 7 0 R", b"/Kids [5 0 R 0 0 R")


def plain(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("type", "vendor", "date", "currency", "total")}


# --- the rule of the join ----------------------------------------------------------------------


def page(number: int, *, items: int = 0, sure: float = 0.9, **found: Any) -> Page:
    kind = found.pop("type", "other")
    rows = [LineItem(description=f"{number}.{one}", amount=1.0) for one in range(items)]
    confidences = {**dict.fromkeys(found, sure), "type": sure, "line_items": 0.5 if items else 0.0}
    fields = {"type": kind, **found, "line_items": rows, "confidence": 0.5}
    return Page(number, Fields.model_validate({**fields, "confidences": confidences}))


def test_the_first_page_has_the_head_and_the_last_page_the_total() -> None:
    pages = [
        page(1, type="invoice", vendor="Harbour", date="2026-03-04", total=20.0, items=2),
        page(2, type="receipt", sure=0.8, vendor="Description", total=15.5, items=1),
        page(3, vendor="Net", sure=0.85, total=3.0, currency="EUR"),
    ]
    merged, warnings = merge(pages)
    assert plain(merged.model_dump()) == {
        "type": "invoice",
        "vendor": "Harbour",
        "date": "2026-03-04",
        "currency": "EUR",
        "total": 3.0,
    }
    assert [item.description for item in merged.line_items] == ["1.0", "1.1", "2.0"]
    assert merged.confidences.line_items == DISPUTED, "the first page is as sure of another total"
    assert warnings == [
        "its pages contradict each other in total: page 1 has 20.0 and page 3 has 3.0"
    ]


def test_another_page_decides_if_it_is_clearly_surer() -> None:
    pages = [page(1, vendor="Smudge", sure=0.4), page(2, vendor="Harbour Ltd", sure=0.92)]
    merged, warnings = merge(pages)
    assert (merged.vendor, merged.confidences.vendor, warnings) == ("Harbour Ltd", 0.92, [])


def test_pages_that_contradict_each_other_are_not_sure_and_are_named() -> None:
    pages = [page(1, type="invoice", vendor="A Ltd"), page(2, type="invoice", vendor="B Ltd")]
    merged, warnings = merge(pages)
    assert (merged.vendor, merged.confidences.vendor) == ("A Ltd", DISPUTED)
    assert warnings == [
        "its pages contradict each other in vendor: page 1 has A Ltd and page 2 has B Ltd"
    ]
    assert merge([pages[0], pages[0]])[1] == []


def test_line_items_that_add_up_are_as_sure_as_the_total() -> None:
    pages = [page(1, type="invoice", items=2), page(2, items=1), page(3, total=3.0)]
    merged, _ = merge(pages)
    assert merged.confidences.line_items == 0.9
    assert merge([*pages[:2], page(3, total=4.0)])[0].confidences.line_items == 0.5


def test_a_price_in_the_annex_of_a_contract_is_not_its_total() -> None:
    merged, _ = merge(
        [page(1, type="contract"), page(2, type="invoice", sure=0.7, total=5.0, items=1)]
    )
    assert (merged.type, merged.total, merged.line_items) == ("contract", None, [])


def test_the_total_of_an_invoice_behind_a_letter_is_kept() -> None:
    merged, warnings = merge([page(1, type="letter"), page(2, type="invoice", total=5.0, items=1)])
    assert (merged.type, merged.confidences.type) == ("letter", DISPUTED)
    assert (merged.total, len(merged.line_items), len(warnings)) == (5.0, 1, 1)


def test_more_line_items_than_a_document_may_have_are_cut_with_a_warning() -> None:
    half = MAX_LINE_ITEMS // 2 + 1
    merged, warnings = merge([page(1, items=half), page(2, items=half)])
    assert len(merged.line_items) == MAX_LINE_ITEMS
    assert warnings == [f"only the first {MAX_LINE_ITEMS} of {2 * half} line items are kept"]


def record(**changes: Any) -> dict[str, Any]:
    found = extracted(**changes)
    return {name: found[name] for name in extraction._KEPT}


def test_a_single_page_is_the_document() -> None:
    whole = record(warnings=["a warning"])
    assert join([whole], "run-1") == {
        **whole,
        "confidences": {
            **Fields.model_validate(
                {name: whole[name] for name in Fields.model_fields}
            ).confidences.model_dump()
        },
    }


def test_pages_of_other_runs_make_known_content_only_if_all_are() -> None:
    known = record(run_id="run-0", started_at=1.0)
    assert join([known, known], "run-1")["run_id"] == "run-0"
    mine = record(run_id="run-1", started_at=5.0)
    found = join([known, mine, record(run_id="run-1", started_at=4.0)], "run-1")
    assert (found["run_id"], found["started_at"]) == ("run-1", 4.0)


def test_failed_pages_are_left_out_with_a_warning_where_a_definition_allows_them() -> None:
    found = join([record(), None, None], "run-1")
    assert found["warnings"] == ["2 of 3 pages are left out (2, 3): its extraction failed"]
    with pytest.raises(PermanentError, match="its extraction failed"):
        join([None], "run-1")


@pytest.mark.parametrize("given", [None, {}, [1], [{"type": "invoice"}], [{"left_out": 1}], "x"])
def test_a_join_of_something_else_says_what_its_parent_must_be(given: Any) -> None:
    with pytest.raises(PermanentError, match=r"its one parent must be .* has for_each") as raised:
        join(given, "run-1")
    assert raised.value.type == "invalid_config"


def test_pages_of_two_extractors_are_not_joined() -> None:
    with pytest.raises(PermanentError, match="extracted by model:a:pages and rules-1:pages"):
        join([record(extractor="rules-1:pages"), record(extractor="model:a:pages")], "run-1")


# --- PDFs that are split -----------------------------------------------------------------------


def split_file(path: Path, out: Path, **config: Any) -> dict[str, Any]:
    found: dict[str, Any] = split(config, context("split", out, file_path=str(path)))
    return found


@pytest.mark.usefixtures("here")
class TestSplit:
    def test_gives_the_numbers_of_the_pages(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pdf"
        path.write_bytes(pdf(invoice_pages(), compressed=True))
        found = split_file(path, tmp_path / "out")
        assert (found["pages"], found["count"], found["kind"]) == ([1, 2, 3], 3, "pdf")
        assert found["sha256"] == extraction.content_hash(path)

    def test_of_another_kind_gives_one_page(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("Invoice\n\f\nsecond page of a text")
        assert split_file(path, tmp_path / "out")["pages"] == [1]

    @pytest.mark.parametrize(
        ("data", "type_", "says"),
        [
            (b"", "empty_file", "the file is empty"),
            (pdf([[]], password="hunter2"), "encrypted", "asks for a password; save it without"),
            (pdf([[Mark(LEFT, 700, "x")]])[:90], "corrupt", "begins like a PDF and is none"),
            (pdf([]), "corrupt", "begins like a PDF and is none"),
            (pdf([[]] * 10_000), "too_large", "10,000 pages, at most 300 are extracted one by"),
        ],
        ids=["empty", "encrypted", "truncated", "0 pages", "10,000 pages"],
    )
    def test_refuses_what_cannot_be_split(
        self, data: bytes, type_: str, says: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "a.pdf"
        path.write_bytes(data)
        with pytest.raises(PermanentError, match=f"^a.pdf: .*{says}") as raised:
            split_file(path, tmp_path / "out")
        assert raised.value.type == type_

    @pytest.mark.parametrize(
        ("true", "lie", "pages"),
        [
            (b"/Count 1 ", b"/Count -9 ", 1),
            (b"/Count 1 ", b"/Count 99999999 ", 1),
            (b"/Kids [5 0 R]", b"/Kids [2 0 R]", 1),
            (b"/Count 1 ", b"/Count 250 ", 250),
        ],
    )
    def test_of_a_pdf_that_lies_about_its_pages_is_bounded(
        self, true: bytes, lie: bytes, pages: int, tmp_path: Path
    ) -> None:
        path = tmp_path / "a.pdf"
        path.write_bytes(pdf([[]]).replace(true, lie))
        assert split_file(path, tmp_path / "out")["count"] == pages

    def test_of_too_many_bytes_or_pages_names_the_setting(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.pdf"
        path.write_bytes(pdf([[]] * 3))
        monkeypatch.setenv("DOVETAIL_DOCUMENTS_MAX_PAGES", "2")
        with pytest.raises(
            PermanentError, match=r"3 pages, at most 2 .*DOCUMENTS_MAX_PAGES raises"
        ):
            split_file(path, tmp_path / "out")
        monkeypatch.setenv("DOVETAIL_DOCUMENTS_MAX_BYTES", "99")
        with pytest.raises(PermanentError, match="at most 99 are read; DOVETAIL_DOCUMENTS_MAX_BY"):
            split_file(path, tmp_path / "out")
        for wrong in ("0", "-1", "many", "10001", "³"):
            monkeypatch.setenv("DOVETAIL_DOCUMENTS_MAX_PAGES", wrong)
            with pytest.raises(PermanentError, match="must be a number of pages from 1 to 10000"):
                reading.max_pages()

    def test_of_a_changed_document_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pdf"
        path.write_bytes(pdf([[]]))
        with pytest.raises(PermanentError, match="submit it again") as raised:
            split_file(path, tmp_path / "out", sha256="ab" * 32)
        assert raised.value.type == "changed"

    @pytest.mark.parametrize("number", [None, 0, -1, "1", True, 1.5])
    async def test_a_page_without_a_number_says_what_to_write(
        self, number: Any, tmp_path: Path
    ) -> None:
        with pytest.raises(PermanentError, match=r'as in \{page: "\{\{ item \}\}"\}') as raised:
            await extract_page({"page": number}, context("extract_page", tmp_path))
        assert raised.value.type == "invalid_config"


# --- whole runs --------------------------------------------------------------------------------


@pytest.fixture
async def dt(here: None, tmp_path: Path) -> AsyncIterator[Dovetail]:
    db = tmp_path / "runs.db"
    async with Dovetail(db, handlers="dovetail.documents", rate_limits=NO_LIMIT) as opened:
        yield opened


async def process(
    dt: Dovetail, data: bytes, folder: Path, definition: Any = PAGES, **more: Any
) -> Run:
    path = folder / "a.pdf"
    path.write_bytes(data)
    given = {"document_id": "a", "file_path": str(path), "out": str(folder / "out"), **more}
    return await dt.run(definition, given, timeout=60)


async def test_a_pdf_of_three_pages_gives_the_fields_of_the_pipeline(
    dt: Dovetail, tmp_path: Path
) -> None:
    data = pdf(invoice_pages())
    whole = await process(dt, data, tmp_path, PIPELINE)
    run = await process(dt, data, tmp_path)
    assert (run.status, run.error) == ("COMPLETED", None)
    assert run.nodes["extract_page"].items["completed"] == 3
    found, expected = run.outputs["extract"], whole.outputs["extract"]
    assert plain(found) == plain(expected)
    assert found["line_items"] == expected["line_items"]
    assert (found["pages"], found["kind"], found["warnings"]) == (3, "pdf", [])
    assert found["extractor"] == "rules-1:pages"
    assert found["confidence"] > 0.9
    saved = json.loads((tmp_path / "out" / "json" / "a.json").read_text())
    assert plain(saved) == plain(found)
    (review,) = open_reviews(tmp_path / "out").list()
    assert (review.confidence, review.extractor) == (found["confidence"], "rules-1:pages")
    assert await statuses_by_runs(tmp_path / "runs.db", tmp_path / "out") == {
        ("a", whole.run_id): "success",
        ("a", run.run_id): "success",
    }


async def test_known_pages_are_not_extracted_again(
    dt: Dovetail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, known = pdf(invoice_pages()), {"extractor": "rules-1:pages"}
    first = await process(dt, data, tmp_path, **known)
    monkeypatch.setattr(reading, "parse", None)  # any further reading would fail
    again = await process(dt, data, tmp_path, document_id="b", **known)
    assert again.status == "COMPLETED"
    assert again.outputs["record_metrics"]["status"] == "cached"
    assert plain(again.outputs["extract"]) == plain(first.outputs["extract"])
    events = [event.type async for event in dt.events(again.run_id) if event.node == "extract_page"]
    assert events.count("node.cached") == 3


async def test_a_damaged_page_is_left_out_with_a_warning_and_a_blank_one_without(
    dt: Dovetail, tmp_path: Path
) -> None:
    pages = invoice_pages()
    run = await process(dt, with_a_damaged_page([*pages, []]), tmp_path)
    assert run.status == "COMPLETED"
    found = run.outputs["extract"]
    assert (found["total"], found["pages"], len(found["line_items"])) == (177.5, 4, 5)
    assert found["warnings"] == ["1 of 4 pages is left out (2): a.pdf, page 2: the page is damaged"]


async def test_a_document_without_a_readable_page_fails_with_the_reason(
    dt: Dovetail, tmp_path: Path
) -> None:
    run = await process(dt, with_a_damaged_page([[], []]), tmp_path)
    error = run.nodes["extract"].error
    assert (run.status, error["type"]) == ("FAILED", "corrupt")
    assert error["message"] == (
        "none of its 2 pages gives any text: a.pdf, page 2: the page is damaged"
    )
    run = await process(dt, pdf([[], []]), tmp_path)
    assert run.nodes["extract"].error == {
        "type": "empty_file",
        "message": "none of its 2 pages gives any text: a.pdf, page 1: there is no text in it",
    }


@pytest.mark.usefixtures("own_readers")
@pytest.mark.parametrize("works_badly", [False, True], ids=["no tesseract", "one that fails"])
async def test_a_page_of_pictures_fails_without_ocr_and_a_retry_reads_it_with_ocr(
    works_badly: bool, dt: Dovetail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pdf([*invoice_pages(), DRAWING])
    with monkeypatch.context() as before:
        before.setenv("PATH", "/nowhere")
        if works_badly:
            tesseract(tmp_path, before, "echo no traineddata >&2; exit 1")
        run = await process(dt, data, tmp_path, extractor="rules-1:pages")
    error = run.nodes["extract_page"].error
    assert (run.status, error["type"]) == ("FAILED", "no_ocr")
    assert "item 3: a.pdf, page 4: " in error["message"]
    reading._end_readers()  # they have the PATH of before
    reading._start_anew()
    tesseract(tmp_path, monkeypatch, 'cat > /dev/null; printf "Vendor: B\\nTotal due: EUR 200.00"')
    await dt.retry(run.run_id)
    again = await dt.wait(run.run_id, timeout=30)
    assert (again.status, again.outputs["extract"]["total"]) == ("COMPLETED", 200.0)
    started = [e.type async for e in dt.events(run.run_id) if e.node == "extract_page"]
    assert started.count("node.cached") == 0


async def test_a_page_that_never_ends_fails_the_document_and_is_named(
    dt: Dovetail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READING_SECONDS", 0.5)
    run = await process(dt, nested_forms(depth=20, each=10), tmp_path)
    assert run.status == "FAILED"
    error = run.nodes["extract_page"].error
    assert error["type"] == "too_large"
    assert "a.pdf, page 1: it could not be read within 0.5 s" in error["message"]
    assert run.nodes["extract"].reason == "dependency_failed"


async def test_a_retry_extracts_only_the_pages_that_failed(
    dt: Dovetail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked, broken = extraction.extract, [], {2}

    async def flaky(*args: Any, page: int, **more: Any) -> dict[str, Any]:
        asked.append(page)
        if page in broken:
            raise PermanentError("the model is gone", type="bad_answer")
        return await real(*args, page=page, **more)

    monkeypatch.setattr(extraction, "extract", flaky)
    run = await process(dt, pdf(invoice_pages()), tmp_path)
    assert (run.status, sorted(asked)) == ("FAILED", [1, 2, 3])
    assert run.nodes["extract_page"].error["type"] == "bad_answer"
    broken.clear()
    asked.clear()
    await dt.retry(run.run_id)
    again = await dt.wait(run.run_id, timeout=30)
    assert (again.status, asked) == ("COMPLETED", [2])
    assert again.outputs["extract"]["total"] == 177.5


async def test_a_page_that_is_tried_again_has_a_key_of_its_own(
    dt: Dovetail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, keys = extraction.extract, []

    async def busy(*args: Any, idempotency_key: str, **more: Any) -> dict[str, Any]:
        keys.append(idempotency_key.partition(":")[2])
        if keys == ["extract_page[0]:1:1"]:
            raise RetryableError("not now", after=0.0)
        return await real(*args, idempotency_key=idempotency_key, **more)

    monkeypatch.setattr(extraction, "extract", busy)
    run = await process(dt, pdf([paragraph(700, "Letter")]), tmp_path)
    assert run.status == "COMPLETED"
    assert keys == ["extract_page[0]:1:1", "extract_page[0]:1:2"]


async def test_a_file_that_changes_between_its_pages_fails(
    dt: Dovetail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = extraction.extract

    async def meanwhile(path: str, *args: Any, **more: Any) -> dict[str, Any]:
        Path(path).write_bytes(pdf([[Mark(LEFT, 700, "another")]]))
        return await real(path, *args, **more)

    monkeypatch.setattr(extraction, "extract", meanwhile)
    run = await process(dt, pdf(invoice_pages()), tmp_path)
    assert run.nodes["extract_page"].error["type"] == "changed"


def test_a_celery_batch_extracts_by_pages_if_asked(here: None, tmp_path: Path) -> None:
    path, out = tmp_path / "a.pdf", tmp_path / "out"
    path.write_bytes(pdf(invoice_pages()))
    reported = batch_process_task([("a", str(path))], str(out), pages=True)
    assert reported["completed"] == 1
    (review,) = open_reviews(out).list()
    assert (review.extractor, review.fields["total"]) == ("rules-1:pages", 177.5)
