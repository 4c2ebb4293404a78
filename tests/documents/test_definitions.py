"""The two definitions of the document pipeline, run whole on the embedded engine.

The samples go through twice: what is known is not extracted again, and no byte changes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
import yaml

from dovetail import Dovetail, InvalidParams, RetryableError, Run, WorkflowDAG
from dovetail.cli import main
from dovetail.documents import PAGES, PIPELINE, ROUTED, extraction, metrics
from dovetail.documents.handlers import line_items
from dovetail.documents.reviews import close_reviews, open_reviews

from .found import context, extracted, statuses_by_runs

SAMPLES = sorted((Path(__file__).parents[2] / "examples" / "documents").glob("[a-z]*.*"))
NO_LIMIT = {"gemini_api": {"rate_per_second": 10_000, "burst": 1000}}
RULES = "rules-1"

INVOICE = """\
Harbour Tools Ltd
INVOICE
Invoice number: 2041
Date: {day}

Description            Qty   Unit price    Amount
Chisel                   2        10.00     20.00
Mallet                   1        15.50     15.50

Total due: EUR {total}
"""

PLACES = ("document_id", "file_path", "out")

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
async def dt(tmp_path: Path) -> AsyncIterator[Dovetail]:
    db = tmp_path / "runs.db"
    async with Dovetail(db, handlers="dovetail.documents", rate_limits=NO_LIMIT) as opened:
        yield opened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def params(path: Path, out: Path, document_id: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "document_id": document_id or path.name,
        "file_path": str(path),
        "out": str(out),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "extractor": RULES,
        **more,
    }


def invoice(folder: Path, name: str = "invoice.txt", *, day: str = "2026-03-04") -> Path:
    path = folder / name
    path.write_text(INVOICE.format(day=day, total="35.50"))
    return path


async def process(dt: Dovetail, paths: list[Path], out: Path) -> dict[str, Run]:
    made = await dt.batch(PIPELINE, [params(path, out) for path in paths])
    batch = await dt.wait_batch(made.batch_id, timeout=60)
    runs = [await dt.get_run(run.run_id) for run in batch.runs]
    return {run.params["document_id"]: run for run in runs}


def files_under(folder: Path) -> dict[str, str]:
    """Every file by its bytes; a database is compared by what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith("reviews.db")
    }


def statuses(run: Run) -> dict[str, str]:
    return {name: node.status for name, node in run.nodes.items()}


# --- the graphs --------------------------------------------------------------------------------


def layers(definition: Path) -> list[list[str]]:
    dag = WorkflowDAG()
    for node in yaml.safe_load(definition.read_text())["nodes"]:
        dag.add_step(node["id"], print, depends_on=node.get("dependencies"))
    return dag.get_execution_layers()


def test_the_layers_of_the_definition_are_those_of_the_pipeline() -> None:
    saving = ["save_parquet", "save_json", "record_metrics"]
    assert layers(PIPELINE) == [["extract"], saving, ["create_review"]]
    assert layers(ROUTED) == [
        ["extract"],
        [*saving, "line_items"],
        ["create_review"],
        ["auto_approve"],
    ]
    assert layers(PAGES) == [["split"], ["extract_page"], *layers(PIPELINE)]


def test_the_definitions_are_valid_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [str(path) for path in (PIPELINE, ROUTED, PAGES)]
    command = ["validate", "--handlers", "dovetail.documents", "--json", *files]
    monkeypatch.setattr(sys, "argv", ["dovetail", *command])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 0
    reported = json.loads(capfd.readouterr().out)
    assert [(one["valid"], one["warnings"]) for one in reported] == [(True, [])] * 3


def test_the_definition_of_pages_differs_only_in_how_it_extracts() -> None:
    plain, pages = (yaml.safe_load(path.read_text()) for path in (PIPELINE, PAGES))
    assert pages["nodes"][3:] == plain["nodes"][1:]
    assert pages["on_failure"] == plain["on_failure"]
    (extract,), (split, page, join) = plain["nodes"][:1], pages["nodes"][:3]
    for name in ("resource_tag", "max_retries", "timeout_seconds", "cache"):
        assert page[name] == extract[name]
    assert (split["id"], join["id"], page["for_each"]["max_failures"]) == ("split", "extract", 0)
    of_both = {**plain["params"]["properties"], "extractor": None}
    assert {**pages["params"]["properties"], "extractor": None} == of_both


def test_the_definitions_differ_only_in_the_two_conditions() -> None:
    plain, routed = (yaml.safe_load(path.read_text()) for path in (PIPELINE, ROUTED))
    more = [node for node in routed["nodes"] if node not in plain["nodes"]]
    assert {node["id"]: node["condition"] for node in more} == {
        "line_items": "{{ extract.type != 'receipt' }}",
        "auto_approve": "{{ extract.confidence >= 0.8 }}",
    }
    assert [node for node in routed["nodes"] if node not in more] == plain["nodes"]
    assert routed["params"] == plain["params"]
    assert plain["nodes"][0]["resource_tag"] == "gemini_api"


@pytest.mark.parametrize(
    "wrong",
    [
        {"document_id": "../../etc/passwd"},
        {"document_id": ".hidden"},
        {"document_id": "x" * 129},
        {"file_path": ""},
        {"sha256": "abc"},
        {"otu": "/tmp"},
    ],
)
async def test_invalid_params_of_a_document_are_refused_at_the_trigger(
    dt: Dovetail, tmp_path: Path, wrong: dict[str, str]
) -> None:
    with pytest.raises(InvalidParams):
        await dt.trigger(PIPELINE, {"document_id": "a", "file_path": "/a", **wrong})


# --- the samples, whole ------------------------------------------------------------------------


async def test_processing_the_samples_again_extracts_nothing_and_changes_no_byte(
    dt: Dovetail, out: Path
) -> None:
    first = await process(dt, SAMPLES, out)
    assert {run.status for run in first.values()} == {"COMPLETED"}
    before, reviews = files_under(out), open_reviews(out).list()
    assert len(reviews) == len(SAMPLES) == len(list(out.rglob("*.parquet")))

    second = await process(dt, SAMPLES, out)
    assert {run.status for run in second.values()} == {"COMPLETED"}
    assert {run.nodes["extract"].attempt for run in second.values()} == {0}  # from the node cache
    assert files_under(out) == before
    assert open_reviews(out).list() == reviews
    measured = await statuses_by_runs(out.parent / "runs.db", out)
    assert sorted(measured.values()) == ["cached"] * len(SAMPLES) + ["success"] * len(SAMPLES)


async def test_the_saved_fields_are_the_extracted_fields(dt: Dovetail, out: Path) -> None:
    runs = await process(dt, SAMPLES, out)
    rows = pyarrow.dataset.dataset(out / "parquet", partitioning="hive").to_table().to_pylist()
    by_id = {row["document_id"]: row for row in rows}
    for document_id, run in runs.items():
        found = {
            name: value
            for name, value in run.outputs["extract"].items()
            if name not in ("run_id", "started_at")
        }
        found |= {name: run.params[name] for name in ("document_id", "file_path")}
        assert json.loads((out / "json" / f"{document_id}.json").read_text()) == found
        row, review = by_id[document_id], open_reviews(out).get(document_id)
        assert review is not None
        assert row["type"] == row["document_type"] == found["type"] == review.fields["type"]
        assert row["day"] == (found["date"] or "unknown")
        assert (row["total"] is None) == (found["total"] is None)
        assert float(row["total"] or 0) == (found["total"] or 0)
        assert Path(review.json_path).is_file()
        assert Path(review.parquet_path).is_file()


async def test_a_process_without_any_cache_writes_the_same_bytes(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    await process(dt, SAMPLES, out)
    before = files_under(out)
    close_reviews()
    shutil.rmtree(out)
    async with Dovetail(
        tmp_path / "other.db", handlers="dovetail.documents", rate_limits=NO_LIMIT
    ) as other:
        await process(other, SAMPLES, out)
    after = files_under(out)
    kept = {name for name in before if not name.startswith(".cache")}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


# --- content, not paths ------------------------------------------------------------------------


async def test_a_duplicate_is_not_extracted_but_has_its_own_files_and_review(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    path = invoice(tmp_path)
    copy = tmp_path / "copy.txt"
    shutil.copy(path, copy)
    await process(dt, [path], out)
    (run,) = (await process(dt, [copy], out)).values()
    assert run.nodes["extract"].attempt == 0
    assert str(path) not in str(run.outputs), "of the document that was first"
    assert run.outputs["record_metrics"]["status"] == "cached"
    reported = json.loads((out / "json" / "copy.txt.json").read_text())
    assert (reported["document_id"], reported["file_path"]) == ("copy.txt", str(copy))
    assert [one.file_path for one in open_reviews(out).list()] == [str(copy), str(path)]


async def test_the_same_path_with_other_content_is_extracted_again(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    path = invoice(tmp_path)
    (first,) = (await process(dt, [path], out)).values()
    open_reviews(out).approve(path.name, by="ann")
    invoice(tmp_path, day="2026-05-06")
    (second,) = (await process(dt, [path], out)).values()
    assert second.nodes["extract"].attempt == 1
    assert first.outputs["extract"]["date"] == "2026-03-04"
    (review,) = open_reviews(out).list()
    assert (review.fields["date"], review.status) == ("2026-05-06", "pending")
    (parquet,) = out.rglob("*.parquet")
    assert str(parquet) == review.parquet_path


@pytest.mark.parametrize("unknown", ["sha256", "extractor"])
async def test_without_a_known_content_and_extractor_no_other_run_is_reused(
    dt: Dovetail, tmp_path: Path, out: Path, unknown: str
) -> None:
    path = invoice(tmp_path)
    given = params(path, out, **{unknown: ""})
    await dt.run(PIPELINE, given)
    given["sha256"] = ""
    invoice(tmp_path, day="2026-05-06")
    run = await dt.run(PIPELINE, given)
    assert run.outputs["extract"]["date"] == "2026-05-06"


async def test_a_file_that_changed_after_its_submission_fails_and_is_not_cached(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    path = invoice(tmp_path)
    submitted = params(path, out)
    invoice(tmp_path, day="2026-05-06")
    run = await dt.run(PIPELINE, submitted)
    assert run.status == "FAILED"
    assert run.nodes["extract"].error["type"] == "changed"
    assert "submit it again" in run.nodes["extract"].error["message"]
    invoice(tmp_path)
    run = await dt.run(PIPELINE, submitted)
    assert run.outputs["extract"]["date"] == "2026-03-04"


async def test_a_worker_with_another_extractor_than_requested_reports_it(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    run = await dt.run(PIPELINE, params(invoice(tmp_path), out, extractor="model:large"))
    assert run.nodes["extract"].error["type"] == "other_extractor"
    assert (
        "extracts with rules-1, but model:large was asked for"
        in (run.nodes["extract"].error["message"])
    )


async def test_a_document_without_out_goes_to_the_folder_of_the_environment(
    dt: Dovetail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_OUT", str(tmp_path / "elsewhere"))
    path = invoice(tmp_path)
    run = await dt.run(PIPELINE, {"document_id": "a", "file_path": str(path)})
    assert run.status == "COMPLETED"
    assert (tmp_path / "elsewhere" / "json" / "a.json").is_file()


# --- what fails --------------------------------------------------------------------------------


async def test_a_bad_document_fails_alone_and_is_counted_as_failed_once(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    runs = await process(dt, [empty, invoice(tmp_path)], out)
    assert runs["invoice.txt"].status == "COMPLETED"
    assert runs["empty.txt"].nodes["extract"].error["type"] == "empty_file"
    assert statuses(runs["empty.txt"]) == {
        "extract": "FAILED",
        "save_parquet": "SKIPPED",
        "save_json": "SKIPPED",
        "record_metrics": "SKIPPED",
        "create_review": "SKIPPED",
    }
    measured = await statuses_by_runs(tmp_path / "runs.db", out)
    assert measured == {
        ("invoice.txt", runs["invoice.txt"].run_id): "success",
        ("empty.txt", runs["empty.txt"].run_id): "failed",
    }
    assert [one.document_id for one in open_reviews(out).list()] == ["invoice.txt"]


async def test_a_retried_document_counts_as_failed_only_after_its_last_attempt(
    dt: Dovetail, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    async def busy(*_: object, idempotency_key: str, **__: object) -> dict[str, Any]:
        (row,) = open_reviews(out).measurements()
        tries.append((idempotency_key.rpartition(":")[2], row.status))
        raise RetryableError("not now", after=0.0)

    monkeypatch.setattr(extraction, "extract", busy)
    run = await dt.run(PIPELINE, params(invoice(tmp_path), out))
    assert run.status == "FAILED"
    assert tries == [(number, "started") for number in "1234"]
    await statuses_by_runs(tmp_path / "runs.db", out)
    (measured,) = open_reviews(out).measurements()
    assert (measured.status, measured.confidence) == ("failed", None)
    assert measured.seconds is not None
    assert measured.seconds > 0


async def test_the_error_of_a_document_is_reported_even_if_it_cannot_be_counted(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    out.write_text("no folder: neither files nor reviews can be kept here")
    run = await dt.run(PIPELINE, params(empty, out))
    assert run.nodes["extract"].error["type"] == "empty_file"


async def test_no_definition_can_store_content_under_the_hash_of_another(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    path = invoice(tmp_path)
    another = yaml.safe_load(PIPELINE.read_text())
    another["nodes"][0]["config"]["sha256"] = "ab" * 32
    run = await dt.run(another, params(path, out))
    assert run.nodes["extract"].error["type"] == "changed"


async def test_a_run_that_is_retried_after_the_document_was_fixed_counts_by_its_last_end(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    path = tmp_path / "late.txt"
    path.write_bytes(b"")
    run = await dt.run(PIPELINE, params(path, out, sha256=""))
    assert run.status == "FAILED"
    row, db = (path.name, run.run_id), tmp_path / "runs.db"
    assert await statuses_by_runs(db, out) == {row: "failed"}
    invoice(tmp_path, "late.txt")
    await dt.retry(run.run_id)
    assert (await dt.wait(run.run_id, timeout=30)).status == "COMPLETED"
    assert await statuses_by_runs(db, out) == {row: "success"}


async def test_a_document_that_cannot_be_saved_is_failed_until_a_retry_saves_it(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    out.mkdir()
    (out / "parquet").write_text("no folder: Parquet files cannot be written here")
    path = invoice(tmp_path)
    run = await dt.run(PIPELINE, params(path, out))
    assert statuses(run)["save_parquet"] == "FAILED"
    assert statuses(run)["record_metrics"] == "COMPLETED"
    row, db = (path.name, run.run_id), tmp_path / "runs.db"
    assert await statuses_by_runs(db, out) == {row: "failed"}
    (out / "parquet").unlink()
    await dt.retry(run.run_id)
    again = await dt.wait(run.run_id, timeout=30)
    assert (again.status, again.nodes["record_metrics"].attempt) == ("COMPLETED", 1), "not again"
    assert await statuses_by_runs(db, out) == {row: "success"}


async def test_a_custom_definition_counts_by_the_end_of_its_run(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    mine = {
        "name": "mine",
        "nodes": [
            {"id": "read", "handler": "documents.extract"},
            {"id": "say", "handler": "fail", "dependencies": ["read"], "max_retries": 0},
        ],
    }
    given = {name: params(invoice(tmp_path), out)[name] for name in PLACES}
    run = await dt.run(mine, given)
    assert statuses(run) == {"read": "COMPLETED", "say": "FAILED"}
    assert await statuses_by_runs(tmp_path / "runs.db", out) == {
        ("invoice.txt", run.run_id): "failed"
    }


async def test_a_cancelled_document_is_no_success_and_a_running_one_is_not_counted(
    dt: Dovetail, tmp_path: Path, out: Path
) -> None:
    mine = {
        "name": "mine",
        "nodes": [
            {"id": "read", "handler": "documents.extract"},
            {"id": "wait", "handler": "sleep", "dependencies": ["read"], "config": {"seconds": 60}},
        ],
    }
    given = {name: params(invoice(tmp_path), out)[name] for name in PLACES}
    run_id = (await dt.trigger(mine, given)).run_id
    async for event in dt.events(run_id):
        if (event.type, event.node) == ("node.started", "wait"):
            break
    row, db = ("invoice.txt", run_id), tmp_path / "runs.db"
    assert await statuses_by_runs(db, out) == {row: "started"}
    assert metrics.statistics_of(open_reviews(out).measurements()).unfinished == 1
    await dt.cancel(run_id)
    await dt.wait(run_id, timeout=30)
    assert await statuses_by_runs(db, out) == {row: "failed"}


# --- the two conditions ------------------------------------------------------------------------


async def test_the_routed_definition_skips_the_steps_that_do_not_apply(
    dt: Dovetail, out: Path
) -> None:
    made = await dt.batch(ROUTED, [params(path, out) for path in SAMPLES])
    batch = await dt.wait_batch(made.batch_id, timeout=60)
    seen = set()
    for one in batch.runs:
        run = await dt.get_run(one.run_id)
        assert run.status == "COMPLETED"
        found, review = run.outputs["extract"], open_reviews(out).get(run.params["document_id"])
        is_receipt, is_sure = found["type"] == "receipt", found["confidence"] >= 0.8
        assert run.nodes["line_items"].status == ("SKIPPED" if is_receipt else "COMPLETED")
        assert run.nodes["auto_approve"].status == ("COMPLETED" if is_sure else "SKIPPED")
        assert review is not None
        assert (review.status, review.approved_by) == (
            ("approved", "auto") if is_sure else ("pending", None)
        )
        seen |= {("receipt", is_receipt), ("sure", is_sure)}
    assert len(seen) == 4  # the samples have both of each


def test_line_items_are_added_up_and_compared_with_the_total(tmp_path: Path) -> None:
    reported = line_items({"extracted": extracted()}, context("line_items", tmp_path))
    assert (reported["count"], reported["sum"], reported["difference"]) == (2, 1234.56, 0.0)
    bare = extracted(line_items=[], total=None)
    reported = line_items({"extracted": bare}, context("line_items", tmp_path))
    assert (reported["count"], reported["sum"], reported["difference"]) == (0, 0.0, None)


# --- PostgreSQL --------------------------------------------------------------------------------


async def test_with_a_database_the_reviews_are_in_it_and_the_files_are_the_same(
    dt: Dovetail, out: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await process(dt, SAMPLES, out)
    files, in_a_file = files_under(out), open_reviews(out).list()
    monkeypatch.setenv("DOVETAIL_DATABASE_URL", postgres_url)
    assert open_reviews(out).list() == []
    await process(dt, SAMPLES, out)
    in_postgres = open_reviews(out).list()
    assert [(one.document_id, one.fields, one.parquet_path) for one in in_postgres] == [
        (one.document_id, one.fields, one.parquet_path) for one in in_a_file
    ]
    await process(dt, SAMPLES, out)
    assert open_reviews(out).list() == in_postgres
    assert files_under(out) == files
