"""Documents on a team's own Celery, with a real prefork worker on a real Redis."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery, _state
from celery.backends.base import DisabledBackend
from celery.exceptions import TimeLimitExceeded

from dovetail import Dovetail
from dovetail.celery import DagRefused, dag_registry, run_dag
from dovetail.documents import PIPELINE
from dovetail.documents.metrics import statistics_of
from dovetail.documents.reviews import open_reviews
from dovetail.documents.tasks import _send, batch_process_task, process_document_task

from ..cli.conftest import environment
from ..pages import ROOT, write_files
from ..servers.llm_stub import Fault, LlmStub
from ..servers.redis_server import RedisServer
from ..servers.server import free_port
from ..telemetry.services import page_of, wait_for

PATIENCE = 60.0
PAGE = ROOT / "docs" / "observability.md"
TEAMS_MODULE = """
import os
from celery import Celery
import team_metrics
app = Celery("team", broker=os.environ["TEAM_BROKER"], include=["dovetail.documents.tasks"])
app.conf.task_default_queue = "documents"
"""


@dataclass
class CeleryWorkers:
    """An app of theirs, and a worker with two processes at its queue."""

    redis_url: str
    metrics_port: int
    """The page that the team serves itself, as our page says."""

    def metric(self, name: str, **labels: str) -> float:
        return page_of(self.metrics_port)(name, **labels)

    def statuses(self) -> dict[str, float]:
        return {
            status: self.metric("documents_processed_total", status=status)
            for status in ("success", "cached", "failed")
        }


@pytest.fixture(scope="module")
def team(
    redis_server: RedisServer, llm_stub: LlmStub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CeleryWorkers]:
    redis_server.flush()
    folder = tmp_path_factory.mktemp("team")
    team = CeleryWorkers(redis_server.url, free_port())
    write_files(PAGE, folder)
    metrics = folder / "team_metrics.py"
    metrics.write_text(metrics.read_text().replace("9100", str(team.metrics_port)))
    (folder / "team_tasks.py").write_text(TEAMS_MODULE)
    values = folder / "values"
    values.mkdir()
    app = Celery("team", broker=team.redis_url)
    app.conf.task_default_queue = "documents"
    app.set_default()
    app.set_current()
    log = folder / "log"
    words = [
        "-A",
        "team_tasks",
        "worker",
        "-c",
        "2",
        "--without-gossip",
        "--without-mingle",
        "-l",
        "INFO",
    ]
    given = {"TEAM_BROKER": team.redis_url, "PROMETHEUS_MULTIPROC_DIR": str(values)}
    with log.open("wb") as out:
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", *words, "--loglevel", "INFO"],
            cwd=folder,
            env=environment(**given, **llm_stub.environment, DOVETAIL_DOCUMENTS_ROOTS="/"),
            stdout=out,
            stderr=out,
        )
    try:
        wait_for(lambda: b" ready." in log.read_bytes(), "the worker")
        yield team
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0, log.read_text()
    finally:
        worker.kill()
        worker.wait()
        gc.collect()  # a result says good-bye to its Redis when it goes, so it must go before that
        app.close()
        _state.set_default_app(None)
        _state._set_current_app(None)


def text_of(number: int) -> str:
    return (
        f"INVOICE\nVendor: Firm {number} Ltd\nDate: 2026-03-{number:02}\n"
        f"Bolts  2  {number}.00  {2 * number}.00\nTotal: {2 * number}.00 EUR\n"
    )


def documents_in(folder: Path) -> list[dict[str, str]]:
    """Seven that are different, one equal to another, one that is empty, one that is not there."""
    folder.mkdir()
    texts = {f"d{number}.txt": text_of(number) for number in range(1, 5)}
    texts |= {"d5.html": f"<html><body><pre>{text_of(5)}</pre></body></html>"}
    texts |= {"again.txt": texts["d3.txt"], "empty.txt": ""}
    for name, text in texts.items():
        (folder / name).write_text(text)
    samples = ("invoice.pdf", "rechnung.docx")
    for name in samples:
        shutil.copy(ROOT / "examples" / "documents" / name, folder)
    return [
        {"document_id": name.partition(".")[0], "file_path": str(folder / name)}
        for name in (*texts, *samples, "missing.txt")
    ]


def contents(out: Path) -> dict[str, str]:
    """Every file of a folder of results but the database, by where it is in it."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for place in ("json", "parquet")
        for path in sorted((out / place).rglob("*"))
        if path.is_file()
    }


def rows(out: Path) -> list[dict[str, Any]]:
    """The reviews, without when and below which folder."""
    found = []
    for review in open_reviews(out).list():
        reported = review.as_dict()
        paths = {
            name: Path(reported[name]).relative_to(out) for name in ("json_path", "parquet_path")
        }
        found.append({**reported, **paths, "created_at": None, "updated_at": None})
    return found


async def test_a_celery_batch_gives_the_results_of_the_embedded_engine(
    team: CeleryWorkers, llm: LlmStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = documents_in(tmp_path / "in")
    out = tmp_path / "out"
    before = team.statuses()

    # Two at once for two processes: if a batch held one while it waits, no process would work.
    other = batch_process_task.delay([(f"x{number}", "nowhere") for number in range(3)], str(out))
    reported = batch_process_task.delay(documents, str(out)).get(timeout=PATIENCE)
    assert other.get(timeout=PATIENCE)["failed"] == 3

    assert [one["document_id"] for one in reported["results"]] == [
        one["document_id"] for one in documents
    ]
    failed = {
        one["document_id"]: one["error"]["type"]
        for one in reported["results"]
        if one["status"] == "failed"
    }
    assert failed == {"empty": "empty_file", "missing": "not_found"}
    counts = {
        name: reported[name] for name in ("documents", "completed", "cached", "failed", "lost")
    }
    assert counts == {"documents": 10, "completed": 7, "cached": 1, "failed": 2, "lost": 0}
    assert reported["docs_per_hour"] == pytest.approx(8 * 3600 / reported["duration"])
    assert 0 < reported["results"][0]["confidence"] <= 1
    assert len(llm.calls()) == 7, "one for each content"
    with redis.Redis.from_url(team.redis_url) as connection:
        assert connection.keys("*gemini_api*"), "the rate is that of all workers"

    after = team.statuses()
    assert {name: after[name] - before[name] for name in after} == {
        "success": 7,
        "cached": 1,
        "failed": 5,
    }, "the sum over the processes of the pool"

    for name, value in llm.environment.items():
        monkeypatch.setenv(name, value)
    embedded = tmp_path / "embedded"
    async with Dovetail(tmp_path / "d.db", handlers="dovetail.documents") as dt:
        items = [{**one, "out": str(embedded)} for one in documents]
        batch = await dt.batch(PIPELINE, items)
        assert (await dt.wait_batch(batch.batch_id)).counts == {"COMPLETED": 8, "FAILED": 2}
    assert contents(out) == contents(embedded)
    assert len(contents(out)) == 16
    assert rows(out) == rows(embedded)
    assert len(rows(out)) == 8

    llm.forget()
    files, reviews = contents(out), open_reviews(out).list()
    reported = batch_process_task.delay(documents, str(out)).get(timeout=PATIENCE)
    assert (reported["completed"], reported["cached"], reported["failed"]) == (0, 8, 2)
    assert llm.calls() == []
    assert (contents(out), open_reviews(out).list()) == (files, reviews)


def test_a_document_is_a_task_with_its_own_result(team: CeleryWorkers, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(text_of(7))
    out, task_id = tmp_path / "out", uuid4().hex
    before = team.metric("processing_duration_seconds_count")
    for _ in range(2):  # as a broker does that has lost sight of a worker
        sent = process_document_task.apply_async(
            ("one", str(tmp_path / "one.txt"), str(out)), task_id=task_id
        )
        reported = sent.get(timeout=PATIENCE)
        assert (reported["document_id"], reported["status"]) == ("one", "COMPLETED")
        assert set(reported["steps"]) == {
            *("extract", "save_parquet", "save_json", "record_metrics", "create_review")
        }
        sent.forget()
    measured = open_reviews(out).measurements()
    assert [(one.document_id, one.status) for one in measured] == [("one", "success")]
    assert team.metric("processing_duration_seconds_count") == before + 1


def test_a_killed_document_does_not_keep_its_batch_from_ending(
    team: CeleryWorkers, llm: LlmStub, tmp_path: Path
) -> None:
    documents = documents_in(tmp_path / "in")[:2]
    llm.behave(faults=[Fault("hangs", where="Firm 1 ")])
    sent = batch_process_task.delay(documents, str(tmp_path / "out"))
    wait_for(lambda: any(call.fault == "hangs" for call in llm.calls()), "it to hang")
    process_document_task.app.control.revoke(f"{sent.id}-0", terminate=True, signal="SIGKILL")
    reported = sent.get(timeout=PATIENCE)
    assert [one["status"] for one in reported["results"]] == ["failed", "completed"]
    assert reported["results"][0]["error"]["type"] == "revoked"
    rows = {one.document_id: one.status for one in open_reviews(tmp_path / "out").measurements()}
    assert rows == {"d1": "failed", "d2": "success"}


def test_a_document_killed_alone_is_a_failed_document(
    team: CeleryWorkers, llm: LlmStub, tmp_path: Path
) -> None:
    (document, *_) = documents_in(tmp_path / "in")
    llm.behave(faults=[Fault("hangs")])
    sent = process_document_task.delay(*document.values(), str(tmp_path / "out"))
    wait_for(lambda: llm.calls(), "it to hang")
    assert [one.status for one in open_reviews(tmp_path / "out").measurements()] == ["started"]
    process_document_task.app.control.revoke(sent.id, terminate=True, signal="SIGKILL")
    wait_for(lambda: open_reviews(tmp_path / "out").measurements()[0].status == "failed", "its end")


@pytest.mark.usefixtures("llm")
def test_a_document_that_cannot_be_saved_is_a_failed_document(
    team: CeleryWorkers, tmp_path: Path
) -> None:
    (document, *_) = documents_in(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    (out / "parquet").write_text("no folder")
    before = team.statuses()
    sent = process_document_task.delay(*document.values(), str(out))
    reported = sent.get(timeout=PATIENCE)
    assert (reported["status"], reported["steps"]["record_metrics"]["status"]) == (
        "FAILED",
        "COMPLETED",
    )
    assert [one.status for one in open_reviews(out).measurements()] == ["failed"]
    assert team.statuses() == {**before, "failed": before["failed"] + 1}


@pytest.fixture
def handlers_of_documents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dag_registry, "_handlers", [])
    monkeypatch.delenv("DOVETAIL_LLM_BASE_URL", raising=False)
    dag_registry.register_handlers("dovetail.documents")
    yield
    dag_registry.known_handlers.cache_clear()
    dag_registry.compiled.cache_clear()


@pytest.mark.usefixtures("handlers_of_documents")
def test_a_definition_that_run_dag_runs_counts_its_document_by_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("RECEIPT\nFirm Ltd\n2026-03-01\nTotal 3.00 EUR")
    given = {"document_id": "a", "file_path": str(tmp_path / "a.txt")}
    for name, status in (("fine", "success"), ("unsaved", "failed")):
        out = tmp_path / name
        out.mkdir()
        if status == "failed":
            (out / "parquet").write_text("no folder")
        context = {**given, "out": str(out)}
        reported = run_dag.apply((PIPELINE.read_text(), context)).get()
        assert reported["status"] == ("COMPLETED" if status == "success" else "FAILED")
        assert [one.status for one in open_reviews(out).measurements()] == [status]


def test_a_document_that_takes_too_long_is_a_failed_document(
    team: CeleryWorkers, llm: LlmStub, tmp_path: Path
) -> None:
    (document, *_) = documents_in(tmp_path / "in")
    llm.behave(faults=[Fault("hangs")])
    sent = process_document_task.apply_async(
        (*document.values(), str(tmp_path / "out")), soft_time_limit=1, time_limit=30
    )
    reported = sent.get(timeout=PATIENCE)
    assert (reported["status"], reported["error"]["type"]) == ("FAILED", "timeout")
    (measured,) = open_reviews(tmp_path / "out").measurements()
    assert (measured.document_id, measured.status) == ("d1", "failed")


def test_one_that_the_hard_time_limit_kills_alone_is_a_failed_document(
    team: CeleryWorkers, llm: LlmStub, tmp_path: Path
) -> None:
    (document, *_) = documents_in(tmp_path / "in")
    out = tmp_path / "out"
    llm.behave(faults=[Fault("hangs")])
    sent = process_document_task.apply_async(
        (*document.values(), str(out)), soft_time_limit=4, time_limit=5
    )
    wait_for(lambda: llm.calls(), "it to hang")
    os.kill(sent.info["pid"], signal.SIGSTOP)  # so that the soft limit does not end it first
    assert isinstance(sent.get(timeout=PATIENCE, propagate=False), TimeLimitExceeded)
    wait_for(lambda: open_reviews(out).measurements()[0].status == "failed", "its end")
    counted = statistics_of(open_reviews(out).measurements())
    assert (counted.documents, counted.failed, counted.unfinished) == (1, 1, 0)


def test_the_limits_of_a_document_task_are_those_of_every_dag_task() -> None:
    found = process_document_task
    assert (found.soft_time_limit, found.time_limit, found.max_retries) == (270, 300, 3)
    assert found.acks_late
    assert found.name == "dovetail.documents.process_document_task"
    assert batch_process_task.name == "dovetail.documents.batch_process_task"


def test_a_batch_called_as_a_function_is_processed_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DOVETAIL_LLM_BASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    documents = documents_in(tmp_path / "in")
    wanted = [documents[0], documents[-1]]
    reported = batch_process_task(wanted, str(tmp_path / "out"))
    assert (reported["completed"], reported["failed"]) == (1, 1)
    assert (tmp_path / "out" / "json" / "d1.json").exists()
    nothing = batch_process_task([])
    assert (nothing["documents"], nothing["results"], nothing["docs_per_hour"]) == (0, [], 0.0)


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ("one.txt", "documents is a list"),
        (["one.txt"], r"documents\[0\]: a document is"),
        ([{"document_id": "a"}], r"documents\[0\]: a document is"),
        ([{"id": "a", "path": "b"}], r"documents\[0\].*document_id"),
        ([("a", "a.txt"), ("../b", "b.txt")], r"documents\[1\].*'\.\./b'"),
        ([("a", None)], r"documents\[0\]: no file_path"),
        ([("a", "a.txt"), ("a", "b.txt")], r"documents\[1\] has the id 'a' of documents\[0\]"),
    ],
)
def test_an_invalid_list_of_documents_is_refused_before_anything_is_sent(
    documents: Any, says: str
) -> None:
    with pytest.raises(DagRefused, match=says):
        batch_process_task(documents)


def test_a_batch_without_a_result_backend_names_the_settings_that_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Celery("nowhere", broker="memory://") as app:
        monkeypatch.setattr(process_document_task, "_backend", DisabledBackend(app))
        with pytest.raises(DagRefused, match="result_backend, or set DOVETAIL_REDIS_URL"):
            _send(batch_process_task, [], [], None)


def test_importing_documents_needs_no_celery() -> None:
    code = "import sys, dovetail.documents; sys.exit('celery' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
