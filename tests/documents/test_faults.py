"""Whatever dies or misbehaves: no document lost, none twice, no half of a file, no call too many.

Real processes are killed with -9 while a batch is under way: one of two workers over Redis, and
the whole of an embedded `dovetail documents process`, which is then started again. The model's
endpoint is our own, and says itself what it was asked. How much survives a power cut is not asked
here, nor what a document contains.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import redis
import yaml

from dovetail import Dovetail
from dovetail.documents import PIPELINE
from dovetail.documents.reviews import close_reviews, open_reviews

from ..cli.conftest import environment
from ..servers.llm_stub import Call, Fault, LlmStub
from .found import statuses_by_runs

SCRIPT = str(Path(sys.executable).with_name("dovetail"))
SECONDS = 60.0
LEASE = {"DOVETAIL_LEASE_SECONDS": "1", "DOVETAIL_STALE_CLAIM_INTERVAL": "1"}
"""So that what a dead process ran is taken over soon."""
HUNG_UP = 0
NO_LIMIT = "[rate_limits]\ngemini_api = {rate_per_second = 1000, burst = 1000}\n"


class DocumentProcesses:
    """A folder with documents, one for what is found, and the processes of this test."""

    def __init__(self, folder: Path, llm: LlmStub) -> None:
        self.folder = folder
        self.llm = llm
        self.incoming = folder / "in"
        self.out = folder / "out"
        self.incoming.mkdir()
        (folder / "dovetail.toml").write_text(NO_LIMIT)
        self._started: list[subprocess.Popen[bytes]] = []

    def document(self, name: str, vendor: str = "") -> Path:
        path = self.incoming / f"{name}.txt"
        path.write_text(
            f"Invoice\nVendor: {vendor or name}\nDate: 2026-03-04\n"
            "Paper, white  2  10.00  20.00\nTotal: 20.00 EUR\n"
        )
        return path

    def documents(self, count: int) -> list[Path]:
        return [self.document(f"number-{number:03}") for number in range(count)]

    def start(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"log-{len(self._started)}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [SCRIPT, *words],
                cwd=self.folder,
                env=environment(**self.llm.environment, **LEASE, **env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        self._started.append(process)
        return process

    def process(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        places = (str(self.incoming), "--out", str(self.out))
        return self.start("documents", "process", *places, *words, **env)

    def end(self, process: subprocess.Popen[bytes], code: int = 0) -> None:
        assert process.wait(SECONDS) == code, self.logs()

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    # --- what is there -----------------------------------------------------------------------

    def saved(self) -> list[Path]:
        """The JSON files that are there by now."""
        return sorted((self.out / "json").glob("[!.]*.json"))

    def whole(self) -> set[Path]:
        """Every file that others may read, each of them whole: at any time, after any crash."""
        reviews = open_reviews(self.out).list()  # first: a live process goes on writing
        texts, kept = self.saved(), list((self.out / ".cache").rglob("*.json"))
        tables = list((self.out / "parquet").rglob("[!.]*.parquet"))
        for path in texts:
            text = path.read_text()
            assert text.endswith("}\n"), path
            assert json.loads(text)["document_id"] == path.stem
        for path in tables:
            (row,) = pyarrow.parquet.read_table(path).to_pylist()
            assert row["document_id"] == path.stem
        for path in kept:
            assert isinstance(json.loads(path.read_text()), dict)
        for review in reviews:
            assert Path(review.json_path) in texts
            assert Path(review.parquet_path) in tables
        return {*texts, *tables, *kept}

    def check(self, documents: int) -> None:
        """So many documents, each in every place and once, and nothing is left lying about."""
        whole = self.whole()
        ids = Counter(path.stem for path in self.saved())
        assert len(ids) == documents
        assert Counter(p.stem for p in whole if p.suffix == ".parquet") == ids
        reviews = open_reviews(self.out).list()
        assert Counter(review.document_id for review in reviews) == ids
        others = set(files(self.out)) - whole
        assert {path.name for path in others if not path.name.startswith("reviews.db")} == set()

    def tree(self) -> dict[str, str]:
        """What there is, byte by byte; of the database its rows, which are what counts there."""
        found = {
            str(path.relative_to(self.out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files(self.out)
            if not path.name.startswith("reviews.db")
        }
        found["reviews"] = repr(open_reviews(self.out).list())
        return found


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def desk(tmp_path: Path, llm: LlmStub) -> Iterator[DocumentProcesses]:
    found = DocumentProcesses(tmp_path, llm)
    yield found
    found.close()
    close_reviews()


def wait_for(condition: Callable[[], Any], what: Callable[[], str]) -> None:
    give_up = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up, what()
        time.sleep(0.005)


def kill(process: subprocess.Popen[bytes], llm: LlmStub) -> int:
    """As a crash would; how many calls it may have cost: the calls under way, or whose
    answer had come a moment before and may not have been kept."""
    assert process.poll() is None, "it has ended by itself"
    a_moment_before = time.monotonic() - 0.2
    process.send_signal(signal.SIGKILL)
    process.wait()
    return sum(call.ended is None or call.ended > a_moment_before for call in llm.calls())


def answered(calls: list[Call]) -> int:
    return sum(call.status == 200 for call in calls)


# --- a process dies ----------------------------------------------------------------------------


def test_a_worker_killed_during_a_batch_costs_only_its_own_calls(
    desk: DocumentProcesses, redis_url: str
) -> None:
    documents = 30
    desk.documents(documents)
    # Long enough that calls are under way when the worker is killed, on a busy machine too.
    desk.llm.behave(delay=1.5)
    there = {"DOVETAIL_REDIS_URL": redis_url}
    desk.start("orchestrator", **there)
    worker = ("worker", "--concurrency", "6", "--handlers", "dovetail.documents")
    first, second = desk.start(*worker, **there), desk.start(*worker, **there)
    limits = desk.start("limits", "set", "gemini_api", "1000", "1000", **there)
    desk.end(limits)
    with redis.Redis.from_url(redis_url) as connection:
        wait_for(lambda: connection.hlen("wf:workers") == 2, desk.logs)
    client = desk.process(**there)
    wait_for(lambda: answered(desk.llm.calls()) >= 6, desk.logs)
    wait_for(lambda: desk.llm.at_once() >= 7, desk.logs)  # so some are of each
    under_way = kill(first, desk.llm)
    desk.whole()
    desk.end(client)

    assert second.poll() is None, desk.logs()
    desk.check(documents)
    calls = desk.llm.calls()
    assert any(call.status == HUNG_UP for call in calls)
    assert len(calls) <= documents + under_way


def test_an_embedded_process_killed_repeatedly_continues_where_it_stopped(
    desk: DocumentProcesses,
) -> None:
    documents = 40
    desk.documents(documents)
    desk.llm.behave(delay=0.4)
    eight = ("--concurrency", "8")

    process = desk.process(*eight)  # with calls under way
    wait_for(lambda: desk.llm.at_once() >= 6, desk.logs)
    under_way = kill(process, desk.llm)
    desk.whole()

    process = desk.process(*eight)  # in the midst of saving what was found
    wait_for(lambda: len(desk.saved()) >= 6, desk.logs)
    under_way += kill(process, desk.llm)
    assert len(desk.saved()) < documents
    desk.whole()

    desk.end(desk.process(*eight))

    desk.check(documents)
    calls = desk.llm.calls()
    assert any(call.status == HUNG_UP for call in calls)
    assert len(calls) <= documents + under_way


# --- the same again ----------------------------------------------------------------------------


def test_processing_the_same_folder_again_makes_no_call_and_changes_no_byte(
    desk: DocumentProcesses,
) -> None:
    desk.documents(6)
    desk.end(desk.process())
    desk.check(6)
    assert len(desk.llm.calls()) == 6
    before = desk.tree()
    desk.llm.forget()

    desk.end(desk.process())
    assert desk.llm.calls() == []
    assert desk.tree() == before

    # With nothing left but what is known of each content, every byte is written again.
    shutil.rmtree(desk.folder / ".dovetail")
    for path in desk.out.iterdir():
        if path.name != ".cache":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    desk.end(desk.process())
    assert desk.llm.calls() == []
    desk.check(6)
    assert {**desk.tree(), "reviews": ""} == {**before, "reviews": ""}


# --- the endpoint misbehaves -------------------------------------------------------------------

FAULTS = {
    "busy": Fault("busy", times=1, after=1),
    "stumbling": Fault("broken", times=2),
    "dropping": Fault("drops", times=1),
    "broken": Fault("broken"),
    "babbling": Fault("garbage"),
    "violating": Fault("violating"),
    "hanging": Fault("hangs"),
}
ENDS = {
    "broken": ("http_500", "500"),
    "babbling": ("bad_answer", "not JSON"),
    "violating": ("bad_answer", "type"),
    "hanging": ("timeout", "the model did not answer within 1 s"),
}
"""The errors of documents that do not get over it: their type, and what the message names."""
TRIES = 4
"""The first one, and the three retries of the pipeline."""


def impatient() -> dict[str, Any]:
    """The pipeline as it is, but for how long it waits before it tries again."""
    definition: dict[str, Any] = yaml.safe_load(PIPELINE.read_text())
    extract = definition["nodes"][0]
    extract["retry"] = {"base_delay_seconds": 0.05, "jitter": 0}
    return definition


async def test_each_fault_of_the_endpoint_affects_only_its_document_with_a_clear_status(
    desk: DocumentProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = {"DOVETAIL_DOCUMENTS_MODEL_SECONDS": "1"}
    for name, value in {**desk.llm.environment, **patience}.items():
        monkeypatch.setenv(name, value)
    desk.llm.behave(
        faults=[replace(fault, where=f"Vendor: {name}\n") for name, fault in FAULTS.items()]
    )
    for name in FAULTS:
        desk.document(name)
    good = [path.stem for path in desk.documents(5)]
    items = [
        {"document_id": path.stem, "file_path": str(path), "out": str(desk.out)}
        for path in sorted(desk.incoming.iterdir())
    ]
    limits = {"gemini_api": {"rate_per_second": 1000, "burst": 1000}}
    async with Dovetail(
        desk.folder / "runs.db", handlers="dovetail.documents", rate_limits=limits
    ) as dt:
        await dt.register(impatient())
        batch = await dt.batch("document_processing", items)
        async with asyncio.timeout(SECONDS):
            await dt.wait_batch(batch.batch_id)
        listed = await dt.list_runs(batch=batch.batch_id, limit=100)
        runs = [await dt.get_run(run.run_id) for run in listed.items]
    ended = {run.params["document_id"]: run for run in runs}

    assert ended.keys() == {*FAULTS, *good}
    assert {name for name, run in ended.items() if run.status != "COMPLETED"} == ENDS.keys()
    for name, (kind, says) in ENDS.items():
        run = ended[name]
        error = run.nodes["extract"].error
        assert error is not None
        assert run.status == "FAILED"
        assert error["type"] == kind
        assert says in error["message"]
        assert run.nodes["extract"].attempt == TRIES
        others = {node.status for node in run.nodes.values() if node.id != "extract"}
        assert others == {"SKIPPED"}
    assert all(ended[name].nodes["extract"].attempt > 1 for name in FAULTS)
    desk.check(len(ended) - len(ENDS))
    reported = await statuses_by_runs(desk.folder / "runs.db", desk.out)
    assert reported == {
        (name, run.run_id): "failed" if name in ENDS else "success" for name, run in ended.items()
    }
    faulty = [call for call in desk.llm.calls() if call.fault == "garbage"]
    assert len(faulty) == len({call.idempotency_key for call in faulty}) == TRIES
