"""The document pipeline as a DAG: the same steps, the same files, the same outputs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from dovetail import Dovetail, PermanentError, RetryableError, WorkflowDAG, WorkflowExecutor
from dovetail.documents import PAGES, PIPELINE, ROUTED, build_document_processing_dag, extraction
from dovetail.documents.reviews import close_reviews, open_reviews

SAMPLES = sorted((Path(__file__).parents[2] / "examples" / "documents").glob("[a-z]*.*"))
SAVING = ["save_parquet", "save_json", "record_metrics"]
NO_LIMIT = {"gemini_api": {"rate_per_second": 10_000, "burst": 1000}}


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def letter(tmp_path: Path) -> Path:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Ms Finch,\n\nthank you for the books.\n\nYours sincerely\nA. Bramble\n")
    return path


def without_the_run(outputs: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in outputs["extract"].items() if key != "started_at"}
    measured = {**outputs["record_metrics"], "seconds": None}
    return {
        **{name: output for name, output in outputs.items() if name != "extract_page"},
        "extract": {**found, "run_id": None},
        "record_metrics": measured,
    }


def tag_of(dag: WorkflowDAG) -> str | None:
    return dag._steps[0].resource_tag


def test_the_layers_of_the_dag_are_those_of_the_design(letter: Path) -> None:
    dag = build_document_processing_dag("a", letter)
    dag.validate()
    assert dag.get_execution_layers() == [["extract"], SAVING, ["create_review"]]
    assert dag.get_ready_nodes(completed={"extract"}) == SAVING
    routed = build_document_processing_dag("a", letter, routed=True)
    assert routed.get_execution_layers() == [
        ["extract"],
        [*SAVING, "line_items"],
        ["create_review"],
        ["auto_approve"],
    ]


@pytest.mark.parametrize(
    ("definition", "how"),
    [(PIPELINE, {}), (ROUTED, {"routed": True}), (PAGES, {"pages": True})],
    ids=["pipeline", "routed", "pages"],
)
async def test_a_dag_and_the_engine_give_the_same_outputs_and_the_same_bytes(
    tmp_path: Path, definition: Path, how: dict[str, bool]
) -> None:
    out, aside = tmp_path / "out", tmp_path / "aside"
    by_engine = {}
    async with Dovetail(
        tmp_path / "runs.db", handlers="dovetail.documents", rate_limits=NO_LIMIT
    ) as dt:
        for path in SAMPLES:
            given = {"document_id": path.stem, "file_path": str(path), "out": str(out)}
            run = await dt.run(definition, given)
            by_engine[path] = run.outputs
            assert run.status == "COMPLETED"
    reviews = [(one.document_id, one.fields, one.status) for one in open_reviews(out).list()]
    close_reviews()
    out.rename(aside)
    for path in SAMPLES:
        dag = build_document_processing_dag(path.stem, path, out=out, **how)
        result = await WorkflowExecutor().execute(dag, context={"doc_id": path.stem})
        assert result.status == "COMPLETED"
        assert without_the_run(result.outputs) == without_the_run(by_engine[path])
    assert saved(out) == saved(aside)
    assert [(one.document_id, one.fields, one.status) for one in open_reviews(out).list()] == (
        reviews
    )


def saved(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("json", "parquet")
        for path in (out / folder).rglob("*")
        if path.is_file()
    }


async def test_without_out_the_dag_writes_to_the_default_folder(
    letter: Path, tmp_path: Path
) -> None:
    result = await WorkflowExecutor().execute(build_document_processing_dag("a", "letter.txt"))
    assert result.status == "COMPLETED"
    assert result.outputs["extract"]["file_path"] == str(letter)
    assert result.outputs["save_json"]["path"] == str(tmp_path / "documents" / "json" / "a.json")


def test_the_dag_runs_in_a_script_without_an_event_loop(letter: Path) -> None:
    assert (
        WorkflowExecutor().execute_sync(build_document_processing_dag("a", letter)).completed == 5
    )


def test_an_id_that_is_not_a_file_name_is_refused_immediately(letter: Path) -> None:
    with pytest.raises(
        PermanentError, match=r"document_id '\.\./x': it becomes the name of a file"
    ):
        build_document_processing_dag("../x", letter)


async def test_a_missing_document_fails_and_its_later_steps_do_not_run(
    tmp_path: Path,
) -> None:
    dag = build_document_processing_dag("a", tmp_path / "gone.pdf", out=tmp_path / "out")
    result = await WorkflowExecutor().execute(dag)
    assert (result.failed, result.skipped) == (1, 4)
    assert str(result.steps["extract"].error).startswith("not_found: ")
    assert result.steps["create_review"].error == "Dependency failed"
    (measured,) = open_reviews(tmp_path / "out").measurements()
    assert (measured.document_id, measured.status) == ("a", "failed")


async def test_each_attempt_of_a_step_has_its_number(
    letter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []

    async def busy(*_: object, idempotency_key: str, **__: object) -> dict[str, Any]:
        keys.append(idempotency_key)
        raise RetryableError("not now", after=0.0)

    monkeypatch.setattr(extraction, "extract", busy)
    dag = build_document_processing_dag("a", letter, run_id="task-1")
    result = await WorkflowExecutor().execute(dag)
    assert result.failed == 1
    assert keys == [f"task-1:extract:1:{number}" for number in (1, 2, 3, 4)]
    assert len(open_reviews("documents").measurements()) == 1


async def test_the_same_document_started_again_is_counted_once(letter: Path) -> None:
    for _ in range(2):
        dag = build_document_processing_dag("a", letter, run_id="task-1")
        await WorkflowExecutor().execute(dag)
        (measured,) = open_reviews("documents").measurements()
        assert (measured.key, measured.status) == ("task-1", "success")
    await WorkflowExecutor().execute(build_document_processing_dag("a", letter))
    assert len(open_reviews("documents").measurements()) == 2
    assert len(open_reviews("documents").list()) == 1


def test_only_documents_that_will_call_a_model_wait_for_the_rate_limit(
    letter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tag_of(build_document_processing_dag("a", letter)) is None  # by rules
    monkeypatch.setenv("DOVETAIL_LLM_BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("DOVETAIL_LLM_MODEL", "m")
    assert tag_of(build_document_processing_dag("a", letter)) == "gemini_api"
    assert tag_of(build_document_processing_dag("a", tmp_path / "gone.pdf")) == "gemini_api"
    monkeypatch.setattr(extraction, "cached", lambda *_: {"known": True})
    assert tag_of(build_document_processing_dag("a", letter)) is None
