"""`dovetail documents process`: each file one document, done once, however often it is asked for.

What is read from a document is tested elsewhere, and so is what a kill -9 leaves; here it is that
the command finds, counts and tells them, and goes on where it was.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail import Context, Dovetail, RetryableError, handler
from dovetail.cli.text import bare
from dovetail.documents import PAGES, PIPELINE
from dovetail.documents.commands.process import DocumentCounts, pages_of, trouble_now, trouble_of
from dovetail.documents.metrics import begin
from dovetail.documents.reviews import open_reviews

from ..documents.making import LEFT, Mark, pdf
from ..servers.llm_stub import Fault, LlmStub
from .conftest import SCRIPT, SECONDS, Outcome, Shell, environment
from .test_live import watch

PROCESS = ("documents", "process", "in", "--out", "out")
INVOICE = """Invoice
Vendor: {vendor}
Date: 2026-03-04
Paper, white  2  10.00  20.00
Total: 20.00 EUR
"""
PAGED = pdf(
    [
        [Mark(LEFT, 800 - 20 * at, line) for at, line in enumerate(lines.splitlines())]
        for lines in (
            "Invoice\nVendor: Acme\nDate: 2026-03-04",
            "Second page of the invoice\nIt has only words.",
            "Third page\nTotal: 20.00 EUR",
        )
    ]
)
NO_LIMIT = "[rate_limits]\ngemini_api = {rate_per_second = 1000, burst = 1000}\n"


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what these tests read themselves; a command gets none of it."""
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_ROOTS", "/")


class DocumentsFolder:
    """A folder of documents, and what was made of it."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.out = shell.directory / "out"
        (shell.directory / "in").mkdir()

    def write(self, *names: str, text: str = INVOICE) -> None:
        for name in names:
            path = self.shell.directory / "in" / name
            path.write_text(text.format(vendor=path.stem.title()))

    def __call__(self, *more: str, **env: str) -> Outcome:
        return self.shell(*PROCESS, *more, **env)

    def data(self, *more: str, **env: str) -> dict[str, Any]:
        return dict(json.loads(self(*more, "--json", **env).out))

    def states(self, *more: str, **env: str) -> dict[str, str]:
        found = self.data(*more, **env)["documents"]
        return {Path(one["file_path"]).name: one["state"] for one in found}

    def runs(self) -> list[dict[str, Any]]:
        listed = self.shell("runs", "list", "--limit", "1000", "--json")
        return list(json.loads(listed.out)["items"])

    def files(self) -> dict[str, bytes]:
        """All that was written for good, without what databases have beside."""
        kept = sorted(path for path in self.out.rglob("*") if path.suffix in (".json", ".parquet"))
        return {str(path.relative_to(self.out)): path.read_bytes() for path in kept}


@pytest.fixture
def desk(shell: Shell) -> DocumentsFolder:
    return DocumentsFolder(shell)


@pytest.fixture
def llm(llm: LlmStub, desk: DocumentsFolder) -> LlmStub:
    """The model's endpoint, to be asked as often as one likes."""
    desk.shell.write("dovetail.toml", NO_LIMIT)
    return llm


def last(done: Outcome) -> str:
    """The verdict."""
    return next(line for line in done.out.splitlines() if re.match("[A-Z]{6,} [0-9]", line))


def test_process_prints_the_extracted_fields_and_the_output_paths(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    desk.write("acme.txt", "birch.txt")
    desk.write("notes.md", "photo.png")
    done = desk(**llm.environment, PATH="/nowhere")
    assert done.code == 0, done.err
    first, images, left_out, head, acme, birch, verdict, written, show, correct, pending = (
        done.out.splitlines()
    )
    assert first == "RUNNING document_processing, 2 documents into out, by model:stub"
    assert images == "1 image left out: reading them needs tesseract, which is not here"
    assert left_out == "1 file of other kinds left out; one that is named itself is taken"
    assert head.split() == ["DOCUMENT", "TYPE", "VENDOR", "DATE", "TOTAL", "CONFIDENCE", "STATE"]
    assert re.fullmatch(
        r"acme\.txt +invoice  Acme +2026-03-04  20\.00 EUR  [01]\.\d\d +pending", acme
    )
    assert birch.startswith("birch.txt")
    assert re.fullmatch(r"COMPLETED 2 documents in \S+: 2 completed", verdict)
    assert written == "written to:  out/json, out/parquet"
    assert "dovetail documents reviews show acme --out out" in show
    assert "reviews correct acme total=12.50 --out out" in correct
    assert "reviews list --status pending --out out" in pending
    for proposal in (show, correct, pending):
        typed = re.sub(r"^next:|  .*?$", "", proposal.strip().removeprefix("next:").strip())
        assert desk.shell(*typed.split()[1:]).code == 0, typed


def test_a_warning_is_printed_by_process_and_with_the_review(desk: DocumentsFolder) -> None:
    desk.write("acme.txt", "birch.html")
    done = desk()
    assert done.code == 0, done.err
    warning = "its name ends in .html, its content is txt; it was read as txt"
    assert [line for line in done.out.splitlines() if "!" in line] == [f"! birch.html  {warning}"]
    shown = desk.shell("documents", "reviews", "show", "birch", "--out", "out").out.splitlines()
    assert f"  ! {warning}" in shown
    assert "  ! " not in desk.shell("documents", "reviews", "show", "acme", "--out", "out").out


def test_repeating_the_command_runs_nothing_and_changes_no_byte(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    desk.write("acme.txt", "birch.txt")
    assert desk(**llm.environment).code == 0
    before, runs, asked = desk.files(), desk.runs(), len(llm.calls())
    done = desk(**llm.environment)
    assert done.code == 0
    assert last(done).endswith("2 cached")
    assert "pending, cached" in done.out
    assert (desk.files(), desk.runs(), len(llm.calls())) == (before, runs, asked)
    assert asked == 2


def test_the_same_content_under_two_names_is_extracted_once(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    desk.write("acme.txt", "copy.txt", text=INVOICE.replace("{vendor}", "Acme"))
    llm.behave(delay=0.2, faults=[])
    states = desk.states(**llm.environment)
    assert sorted(states.values()) == ["cached", "completed"]
    assert len(llm.calls()) == 1
    assert len(desk.files()) >= 4


def test_changed_content_is_extracted_again_as_the_same_document(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    desk.write("acme.txt", "birch.txt")
    (first, _) = desk.data(**llm.environment)["documents"]
    desk.write("acme.txt", text=INVOICE.replace("20.00 EUR", "75.50 EUR"))
    again, other = desk.data(**llm.environment)["documents"]
    assert (again["state"], other["state"]) == ("completed", "cached")
    assert (first["total"], again["total"]) == (20, 75.5)
    assert first["document_id"] == again["document_id"]
    assert len(desk.files()) == len({name.partition("/")[2] for name in desk.files()})


def test_deleted_results_are_written_again_without_an_llm_call(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    desk.write("acme.txt")
    desk(**llm.environment)
    before = desk.files()
    for path in [*desk.out.rglob("*.json"), *desk.out.rglob("reviews.db*")]:
        path.unlink()
    assert desk.states(**llm.environment) == {"acme.txt": "cached"}
    assert {n: b for n, b in before.items() if ".cache" not in n}.items() <= desk.files().items()
    assert len(llm.calls()) == 1


def test_a_failed_document_fails_alone_and_is_retried_by_the_same_command(
    desk: DocumentsFolder,
) -> None:
    desk.write("acme.txt")
    desk.write("empty.txt", text="")
    done = desk()
    assert done.code == 1
    assert re.search(r"^✗ empty\.txt  empty_file: .+$", done.out, re.MULTILINE)
    assert last(done).startswith("FAILED 2 documents")
    assert last(done).endswith("1 completed, 1 failed")
    again = "fix it, then:  dovetail documents process in --out out      tries 1 again"
    assert again in done.out
    assert desk.states() == {"acme.txt": "cached", "empty.txt": "failed"}
    assert len(desk.runs()) == 2, "it is the same run, retried"
    desk.write("empty.txt")
    assert desk.states() == {"acme.txt": "cached", "empty.txt": "completed"}


def test_a_failed_llm_call_is_repeated_by_the_same_command(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    """And what was extracted before a disk was full is not extracted again."""
    desk.write("acme.txt", "birch.txt")
    desk.out.mkdir()
    (desk.out / "json").write_text("in the way")
    done = desk(**llm.environment)
    assert done.code == 1
    assert "not_writable: " in done.out
    (desk.out / "json").unlink()
    assert desk(**llm.environment).code == 0
    assert len(llm.calls()) == 2


def test_an_undecodable_file_name_fails_alone(desk: DocumentsFolder) -> None:
    desk.write("acme.txt")
    bad = os.fsencode(desk.shell.directory / "in") + b"/caf\xe9.txt"
    Path(os.fsdecode(bad)).write_text("Invoice")
    acme, cafe = desk.data()["documents"]
    assert (acme["state"], cafe["state"]) == ("completed", "failed")
    assert cafe["error"]["type"] == "bad_name"
    assert cafe["file_path"].endswith("caf\\xe9.txt")
    assert r"✗ caf\udce9.txt  bad_name: the path is not UTF-8; rename it" in desk().out


def test_the_json_output_is_one_document_with_every_file(desk: DocumentsFolder) -> None:
    desk.write("acme.txt")
    desk.write("empty.txt", text="")
    done = desk("--json")
    assert (done.code, done.err) == (1, "")
    reported = json.loads(done.out)
    assert reported["workflow"] == "document_processing"
    assert reported["out"] == str(desk.out)
    assert reported["counts"] == {"completed": 1, "cached": 0, "failed": 1, "cancelled": 0}
    assert (reported["count"], reported["left"]) == (2, 0)
    acme, empty = reported["documents"]
    assert (acme["state"], acme["review"], acme["error"]) == ("completed", "pending", None)
    assert Path(acme["json_path"]).is_file()
    assert Path(acme["parquet_path"]).is_file()
    assert (empty["state"], empty["error"]["type"]) == ("failed", "empty_file")
    assert empty["json_path"] is None
    assert desk.shell("runs", "show", acme["run_id"]).code == 0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nope", "nope: there is no such file or folder"),
        ("in/*.pdf", "nothing matches in/*.pdf"),
        ("in", "no document in in, only 1 of other kinds"),
    ],
)
def test_nothing_to_process_is_reported_before_anything_is_created(
    desk: DocumentsFolder, path: str, said: str
) -> None:
    desk.write("notes.md")
    done = desk.shell("documents", "process", path, "--out", "out")
    assert done.code == 2
    assert said in done.err
    assert not desk.out.exists()
    assert not (desk.shell.directory / ".dovetail").exists()


@pytest.mark.parametrize("out", ["acme.txt", "acme.txt/below/it"])
def test_a_file_in_place_of_the_folder_of_results_is_reported_before_any_document(
    desk: DocumentsFolder, out: str
) -> None:
    desk.write("acme.txt")
    file = desk.shell.directory / "in" / "acme.txt"
    place = file.parent / out
    done = desk.shell("documents", "process", str(file), "--out", str(place))
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: {place}: {file} is a file; --out or DOVETAIL_DOCUMENTS_OUT names a folder\n"
    )
    assert not (desk.shell.directory / ".dovetail").exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DOVETAIL_LLM_BASE_URL", "http://127.0.0.1:1/v1", "DOVETAIL_LLM_MODEL"),
        ("DOVETAIL_DOCUMENTS_MAX_BYTES", "much", "DOVETAIL_DOCUMENTS_MAX_BYTES"),
    ],
)
def test_an_invalid_setting_is_reported_before_anything_is_created(
    desk: DocumentsFolder, name: str, value: str, said: str
) -> None:
    desk.write("acme.txt")
    done = desk(**{name: value})
    assert done.code == 2
    assert said in done.err
    assert not desk.out.exists()


def test_many_documents_are_listed_up_to_one_screen(desk: DocumentsFolder) -> None:
    desk.write(*(f"good-{n:02}.txt" for n in range(27)), text="Invoice {vendor}\n")
    desk.write(*(f"bad-{n:02}.txt" for n in range(22)), text="")
    lines = desk("--concurrency", "2").out.splitlines()
    assert len([line for line in lines if line.startswith("good-")]) == 25
    assert len([line for line in lines if line.startswith("✗ bad-")]) == 20
    assert "and 2 more:  dovetail documents reviews list --out out" in lines
    (more,) = [line for line in lines if line.startswith("and 2 more failed:  ")]
    listed = desk.shell(*more.partition("dovetail ")[2].split())
    assert listed.out.count("FAILED") == 20, "a page of them"
    reported = [desk.shell("runs", "events", run["run_id"]).out for run in desk.runs()[:2]]
    assert "node.parked" not in "".join(reported), "rules make no call, so they wait for no limit"


def test_without_out_the_results_go_to_the_folder_of_the_setting(desk: DocumentsFolder) -> None:
    desk.write("acme.txt")
    done = desk.shell("documents", "process", "in/acme.txt", DOVETAIL_DOCUMENTS_OUT="there")
    assert done.code == 0
    assert (desk.shell.directory / "there" / "reviews.db").exists()
    assert "written to:  there/json, there/parquet" in done.out
    assert "reviews show acme  " in done.out


def test_routed_documents_pass_the_conditions_even_if_they_were_processed_before(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    desk.write("acme.txt")
    desk.write("unsure.txt", text="Letter\n")
    assert desk(**llm.environment).code == 0
    reviews = open_reviews(desk.out)
    assert {review.status for review in reviews.list()} == {"pending"}
    assert desk("--routed", **llm.environment).code == 0
    kept = {review.document_id.partition("-")[0]: review for review in reviews.list()}
    assert {name: review.confidence >= 0.8 for name, review in kept.items()} == {
        "acme": True,
        "unsure": False,
    }
    assert (kept["acme"].status, kept["acme"].approved_by) == ("approved", "auto")
    assert kept["unsure"].status == "pending"
    runs = desk.runs()
    assert last(desk("--routed", **llm.environment)).endswith("2 cached")
    assert (desk.runs(), len(llm.calls())) == (runs, 2)


def test_by_pages_the_model_is_called_once_for_each_page(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    (desk.shell.directory / "in" / "acme.pdf").write_bytes(PAGED)
    assert desk(**llm.environment).code == 0
    done = desk("--pages", **llm.environment)
    assert done.code == 0, done.out
    assert done.out.startswith("RUNNING document_pages, 1 document into out, by model:stub:pages\n")
    assert last(done).endswith("1 completed")
    assert len(llm.calls()) == 4
    (review,) = open_reviews(desk.out).list()
    assert (review.fields["vendor"], review.fields["total"]) == ("Acme", 20.0)
    assert last(desk("--pages", **llm.environment)).endswith("1 cached")
    assert len(desk.runs()) == 2
    assert last(desk(**llm.environment)).endswith("1 cached")
    assert (len(desk.runs()), len(llm.calls())) == (3, 4), "a run of what is known, without a call"
    assert [review.extractor for review in open_reviews(desk.out).list()] == ["model:stub"]
    both = desk("--pages", "--routed")
    assert both.code == 2
    assert "--routed and --pages are two workflows: choose one of them" in both.err


def test_on_redis_workers_extract_the_pages_of_a_document(
    desk: DocumentsFolder, redis_url: str
) -> None:
    env = {"DOVETAIL_REDIS_URL": redis_url}
    (desk.shell.directory / "in" / "acme.pdf").write_bytes(PAGED)
    desk.write("birch.txt")
    serving(desk, "orchestrator", until="started", **env)
    serving(desk, "worker", "--handlers", "dovetail.documents", until="started", **env)
    found = {Path(one["file_path"]).name: one for one in desk.data("--pages", **env)["documents"]}
    assert {name: one["state"] for name, one in found.items()} == {
        "acme.pdf": "completed",
        "birch.txt": "completed",
    }
    assert (found["acme.pdf"]["vendor"], found["acme.pdf"]["total"]) == ("Acme", 20.0)
    run = json.loads(desk.shell("runs", "show", found["acme.pdf"]["run_id"], "--json", **env).out)
    (mapped,) = [node for node in run["nodes"] if node["id"] == "extract_page"]
    assert mapped["items"]["completed"] == 3
    assert set(desk.states("--pages", **env).values()) == {"cached"}
    assert set(desk.states(**env).values()) == {"completed"}, "whole, which is another result"


def test_pages_that_two_models_extracted_are_extracted_again_by_the_same_command(
    desk: DocumentsFolder, llm: LlmStub, redis_url: str
) -> None:
    env = {"DOVETAIL_REDIS_URL": redis_url, "DOVETAIL_DRAIN_SECONDS": "0.1"}
    work = ("worker", "--handlers", "dovetail.documents")
    (desk.shell.directory / "in" / "acme.pdf").write_bytes(PAGED)
    serving(desk, "orchestrator", until="started", **env)
    first, _ = serving(desk, *work, until="started", **env, **llm.environment)
    llm.behave(faults=[Fault("hangs", where="Second page")])
    begun = desk.shell.start(*PROCESS, "--pages", **env)
    desk.shell.wait_for(lambda: len(llm.calls()) == 3, "a page was never asked about")
    desk.shell.wait_for(lambda: llm.at_once() == 1, "the other pages never ended")
    first.terminate()  # which hands the page back
    first.wait(SECONDS)
    llm.behave(faults=[])
    serving(desk, *work, until="started", **env, **llm.environment | {"DOVETAIL_LLM_MODEL": "b"})
    refused = ended(begun)
    assert (refused.code, last(refused)[-8:]) == (1, "1 failed")
    assert "extracted by model:b:pages and model:stub:pages" in refused.out
    again = desk("--pages", **env)
    assert (again.code, last(again)[-11:]) == (0, "1 completed"), again.out
    assert [review.extractor for review in open_reviews(desk.out).list()] == ["model:b:pages"]


# ── stopped, and started again ───────────────────────────────────────────────────────────


def started(desk: DocumentsFolder, llm: LlmStub, *more: str, **env: str) -> subprocess.Popen[bytes]:
    """With two documents asked about, and no answer yet."""
    desk.write(*(f"doc-{n}.txt" for n in range(4)))
    llm.behave(faults=[Fault("hangs", where="Doc-2"), Fault("hangs", where="Doc-3")])
    process = desk.shell.start(*PROCESS, *more, **llm.environment, **env)
    desk.shell.wait_for(lambda: llm.at_once() == 2, "two never hung")
    done = "COMPLETED"
    desk.shell.wait_for(
        lambda: [run["status"] for run in desk.runs()].count(done) == 2, "two never ended"
    )
    return process


def ended(process: subprocess.Popen[bytes]) -> Outcome:
    out, err = process.communicate(timeout=SECONDS)
    assert b"Traceback" not in out + err
    return Outcome(process.returncode, out.decode(), err.decode())


def test_ctrl_c_cancels_the_running_documents_and_the_same_command_continues(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    process = started(desk, llm)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.code == 130
    assert last(done).startswith("CANCELLED 4 documents")
    assert last(done).endswith("2 completed, 2 cancelled")
    assert done.out.splitlines()[-1] == "go on with:  dovetail documents process in --out out"
    llm.behave(faults=[])
    again = desk(**llm.environment)
    assert (again.code, last(again)[-21:]) == (0, "2 completed, 2 cached")
    assert len(desk.runs()) == 4


def test_sigterm_hands_the_documents_back_and_the_same_command_continues(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    process = started(desk, llm, "--json", DOVETAIL_DRAIN_SECONDS="0.2")
    process.send_signal(signal.SIGTERM)
    done = ended(process)
    assert done.code == 0
    reported = json.loads(done.out)
    assert (reported["counts"]["completed"], reported["left"]) == (2, 2)
    assert done.err == "handed back; go on with:  dovetail documents process in --out out --json\n"
    llm.behave(faults=[])
    assert sorted(desk.states(**llm.environment).values()) == [
        *("cached", "cached", "completed", "completed"),
    ]
    assert len(desk.runs()) == 4


def test_the_documents_of_a_killed_process_are_taken_over(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    process = started(desk, llm, DOVETAIL_LEASE_SECONDS="1")
    process.kill()
    process.communicate()
    llm.behave(faults=[])
    done = desk(**llm.environment, DOVETAIL_LEASE_SECONDS="1")
    assert (done.code, last(done)[-21:]) == (0, "2 completed, 2 cached")
    assert len(desk.runs()) == 4
    assert desk.shell("runs", "verify", "--all").code == 0


def test_two_processes_share_one_folder(desk: DocumentsFolder, llm: LlmStub) -> None:
    desk.write(*(f"doc-{n}.txt" for n in range(8)))
    llm.behave(delay=0.5, faults=[])
    both = [desk.shell.start(*PROCESS, "--json", **llm.environment) for _ in range(2)]
    reported = [json.loads(ended(process).out) for process in both]
    for one in reported:
        assert one["counts"]["completed"] + one["counts"]["cached"] == 8
    assert len(llm.calls()) == len(desk.runs()) == len(open_reviews(desk.out).list()) == 8


# ── elsewhere ────────────────────────────────────────────────────────────────────────────


def serving(
    desk: DocumentsFolder, *args: str, until: str, **env: str
) -> tuple[subprocess.Popen[bytes], str]:
    """A service at work in the folder of the desk, and the line in which it said so."""
    log = desk.shell.directory / f"{args[0]}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [SCRIPT, *args],
            cwd=desk.shell.directory,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    desk.shell._started.append(process)
    process.stdout = process.stderr = None
    desk.shell.wait_for(lambda: until in log.read_text(), f"{args[0]} never said '{until}'")
    return process, next(line for line in log.read_text().splitlines() if until in line)


def test_on_redis_workers_process_documents_and_a_missing_worker_is_reported(
    desk: DocumentsFolder, redis_url: str
) -> None:
    env = {"DOVETAIL_REDIS_URL": redis_url}
    desk.write("acme.txt", "birch.txt", text="Invoice {vendor}\n")
    desk.write("empty.txt", text="")
    serving(desk, "orchestrator", until="started", **env)
    process = desk.shell.start(*PROCESS, **env)
    assert process.stderr is not None
    hint = process.stderr.readline().decode()
    assert "no worker that is alive has documents.extract" in hint
    assert "dovetail worker --handlers dovetail.documents" in hint
    desk.shell.wait_for(
        lambda: len(json.loads(desk.shell("runs", "list", "--json", **env).out)["items"]) == 3,
        "three runs were never made",
    )
    process.send_signal(signal.SIGINT)
    left = ended(process)
    assert left.code == 130
    assert "what was made goes on without this view; the rest with:  dovetail" in left.out
    assert last(left).endswith("none done, 3 left")
    serving(desk, "worker", "--handlers", "dovetail.documents", until="started", **env)
    done = desk(**env)
    assert done.code == 1
    assert re.search(r"(2 completed|1 completed, 1 cached|2 cached), 1 failed$", last(done))
    assert len(json.loads(desk.shell("runs", "list", "--json", **env).out)["items"]) == 3
    assert len(open_reviews(desk.out).list()) == 2


def test_with_postgresql_reviews_are_stored(desk: DocumentsFolder, postgres_url: str) -> None:
    env = {"DOVETAIL_DATABASE_URL": postgres_url}
    desk.write("acme.txt")
    assert desk.states(**env) == {"acme.txt": "completed"}
    assert desk.states(**env) == {"acme.txt": "cached"}
    assert not (desk.out / "reviews.db").exists()
    listed = desk.shell("documents", "reviews", "list", "--out", "out", **env)
    assert "acme-" in listed.out
    reported = desk.shell("documents", "stats", "--out", "out", "--json", **env)
    assert json.loads(reported.out)["completed"] == 1


def test_a_server_gives_the_same_results(desk: DocumentsFolder) -> None:
    desk.write("acme.txt", "birch.txt", text="Invoice {vendor}\n")
    served = ("serve", "--port", "0")
    process, said = serving(desk, *served, until="serves http")
    refused = desk("--server", said.split()[-1])
    assert refused.code == 2
    assert "its workers need --handlers dovetail.documents" in refused.err
    process.terminate()
    process.wait(SECONDS)
    more = ("--handlers", "dovetail.documents")
    _, said = serving(desk, *served, *more, until="serves http")
    server = ("--server", said.split()[-1])
    assert set(desk.states(*server, "--concurrency", "1").values()) == {"completed"}
    assert set(desk.states(*server).values()) == {"cached"}


# ── what is shown meanwhile ──────────────────────────────────────────────────────────────


def test_on_a_terminal_a_progress_bar_shows_the_current_files(
    desk: DocumentsFolder, llm: LlmStub
) -> None:
    desk.shell.write("dovetail.toml", "[rate_limits]\ngemini_api = {rate_per_second = 10}\n")
    desk.write(*(f"doc-{n:02}.txt" for n in range(30)))
    done = watch(desk.shell, *PROCESS, columns=120, rows=40, type_at="s left", **llm.environment)
    assert done.code == 130
    assert done.saw(r"^━{30}  \d+ of 30 done, [\d.]+/s \([\d,]+/h\), about \d+s left")
    assert done.saw(r"^  doc-\d\d\.txt, doc-\d\d\.txt, doc-\d\d\.txt and \d+ more$")
    assert not any("more" in line for line in done.screen.text if line.startswith("  doc-"))
    (bar,) = [line for line in done.screen.text if line.startswith("━")]
    assert re.match(r"━{30}  30 of 30 done, \d+ cancelled", bar)
    assert re.search(r"^CANCELLED 30 documents in .*", "\n".join(done.screen.text), re.MULTILINE)


def test_the_estimate_is_no_faster_than_the_rate_limit_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tally = DocumentCounts(1000, {})
    for _ in range(101):
        now[0] += 0.01
        tally.calls_left -= 1
        tally.add("completed")
    assert bare(tally.line()) == "101 of 1,000 done, 100/s (360,000/h), about 9s left"
    tally.calls_per_second = 10
    assert bare(tally.line()).endswith("100/s (360,000/h), about 1m 30s left: 10/s are allowed")
    tally.calls_left = 50  # the others are known
    assert bare(tally.line()).endswith("about 9s left")
    for _ in range(100):
        tally.add("cached", before=True)
    tally.add("failed")
    assert bare(tally.line()).startswith("202 of 1,000 done, 1 failed, 100 cached, ")
    assert tally.summary() == "101 completed, 100 cached, 1 failed"


def test_the_speed_is_that_of_the_latest_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tally = DocumentCounts(1000, {})
    for seconds in [10.0] * 100 + [0.1] * 300:
        now[0] += seconds
        tally.add("completed")
    assert ", 10/s (36,000/h), about 1m 00s left" in bare(tally.line())
    now[0] += 100
    assert ", 1.7/s (" in bare(tally.line()), "a standstill slows it down"


def test_the_progress_view_has_a_bar_and_the_current_files() -> None:
    at_work = {f"/in/doc-{n}.pdf": None for n in range(5)}
    tally = DocumentCounts(10, at_work)
    tally.add("completed")
    bar, files = map(bare, tally.picture())
    assert bar == "━" * 30 + "  1 of 10 done"
    assert files == "  doc-0.pdf, doc-1.pdf, doc-2.pdf and 2 more"
    tally.trouble = "extract is tried again: busy"
    assert bare(tally.picture()[2]) == "  extract is tried again: busy"
    at_work.clear()
    assert len(tally.picture()) == 1


def test_the_log_says_why_the_longest_waiting_document_waits() -> None:
    tally = DocumentCounts(10, {"/in/a.pdf": None, "/in/b.pdf": None})
    assert bare(tally.standstill()).endswith(" passed, at a.pdf and 1 more")
    nodes = [
        {"id": "extract", "status": "QUEUED", "error": {"type": "busy", "message": "429"}},
        {"id": "save_json", "status": "PENDING", "error": None},
    ]
    tally.trouble = trouble_of(nodes)
    assert bare(tally.standstill()).endswith("1 more; extract is tried again: busy: 429")
    assert trouble_of([{**nodes[0], "status": "FAILED"}, nodes[1]]) == ""


async def test_the_log_says_why_a_page_of_the_longest_waiting_document_waits(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(PAGED)
    failing = {**yaml.safe_load(PAGES.read_text()), "name": "failing"}
    (pages,) = (node for node in failing["nodes"] if node["id"] == "extract_page")
    pages["handler"] = "busy"
    pages.pop("resource_tag")

    @handler("busy", max_retries=3)
    async def busy(config: dict[str, Any], ctx: Context) -> None:
        if config["page"] == 2:
            raise RetryableError("429", type="busy", after=600)

    handlers = ["dovetail.documents", busy]
    async with Dovetail(tmp_path / "runs.db", handlers=handlers) as dt:
        run = await dt.trigger(failing, {"document_id": "a", "file_path": str(path)})
        async for event in dt.events(run.run_id):
            if event.type == "node.retrying":
                break
        commands = dt._commands
        found = await commands.get_run(run.run_id)
        assert await trouble_now(commands, found) == "page 2 is tried again: busy: 429"
        await dt.cancel(run.run_id)
        assert await trouble_now(commands, await commands.get_run(run.run_id)) == ""


def test_the_log_says_how_many_pages_of_the_longest_waiting_document_are_done() -> None:
    at_work = {"/in/a.pdf": None, "/in/b.pdf": None}
    tally = DocumentCounts(10, at_work)
    mapped = {"id": "extract_page", "items": {"total": 3000, "completed": 1200, "failed": 1}}
    tally.pages = ("/in/a.pdf", pages_of({"nodes": [{"id": "split", "items": None}, mapped]}))
    assert bare(tally.standstill()).endswith(" at a.pdf (1,201 of 3,000 pages) and 1 more")
    del at_work["/in/a.pdf"]
    assert bare(tally.standstill()).endswith(" at b.pdf"), "the count is that of another document"
    assert pages_of({"nodes": [{**mapped, "items": None}]}) == ""
    assert pages_of({"nodes": [{"id": "extract", "items": None}]}) == ""


def test_a_path_named_on_the_command_line_may_be_anywhere(
    desk: DocumentsFolder, tmp_path: Path
) -> None:
    """And nothing else: not what a link in a named folder leads to."""
    desk.write("a.txt")
    there = tmp_path / "elsewhere"
    (there / "in").mkdir(parents=True)
    (there / "in" / "b.txt").write_text(INVOICE.format(vendor="B"))
    (there / "c.txt").write_text(INVOICE.format(vendor="C"))
    (there / "secret.txt").write_text(INVOICE.format(vendor="Secret"))
    (there / "in" / "link.txt").symlink_to(there / "secret.txt")
    (there / "in" / "round.txt").symlink_to("round.txt")
    (work := tmp_path / "work").mkdir()
    words = ("documents", "process", str(there / "in"), str(there / "c.txt"))
    run = subprocess.run(
        [SCRIPT, *words, "--out", str(tmp_path / "results"), "--json"],
        cwd=work,
        env=environment(),
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.returncode == 1
    found = {Path(one["file_path"]).name: one for one in json.loads(run.stdout)["documents"]}
    states = {name: one["state"] for name, one in found.items()}
    assert states == {"b.txt": "completed", "c.txt": "completed", "secret.txt": "failed"}
    error = found["secret.txt"]["error"]
    assert error["type"] == "not_allowed"
    assert str(there / "secret.txt") in error["message"]
    assert "DOVETAIL_DOCUMENTS_ROOTS" in error["message"]
    kept = [*(tmp_path / "results").rglob("*"), *(work / ".dovetail").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in kept if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in kept if path.is_dir()} == {0o700}


def test_a_command_line_path_does_not_widen_the_configured_roots(desk: DocumentsFolder) -> None:
    desk.write("a.txt")
    done = desk(DOVETAIL_DOCUMENTS_ROOTS=str(desk.shell.directory / "in"))
    assert done.code != 0
    assert "DOVETAIL_DOCUMENTS_ROOTS" in done.out + done.err
    assert not desk.out.exists()
    assert desk(DOVETAIL_DOCUMENTS_ROOTS=str(desk.shell.directory)).code == 0


# ── what is counted ──────────────────────────────────────────────────────────────────────


def figures(desk: DocumentsFolder) -> dict[str, Any]:
    return dict(json.loads(desk.shell("documents", "stats", "--out", "out", "--json").out))


def ends(desk: DocumentsFolder) -> tuple[int, ...]:
    found = figures(desk)
    return tuple(found[name] for name in ("completed", "failed", "cached", "unfinished"))


def test_a_document_that_cannot_be_saved_counts_as_failed_until_it_is_saved(
    desk: DocumentsFolder,
) -> None:
    desk.write("a.txt", "b.txt")
    desk.out.mkdir()
    (desk.out / "parquet").write_text("no folder")
    assert desk().code == 1
    assert ends(desk) == (0, 2, 0, 0)
    assert figures(desk)["success_rate"] == 0.0
    (desk.out / "parquet").unlink()
    assert desk().code == 0
    assert ends(desk) == (2, 0, 0, 0), "the same runs, retried: their last ends count"


def test_a_run_of_a_definition_is_counted_when_the_figures_are_read(desk: DocumentsFolder) -> None:
    desk.write("a.txt")
    params = [
        "--param=document_id=a",
        f"--param=file_path={desk.shell.directory / 'in' / 'a.txt'}",
        f"--param=out={desk.out}",
    ]
    handlers = ("--handlers", "dovetail.documents")
    assert desk.shell("run", str(PIPELINE), *handlers, *params).code == 0
    rows = open_reviews(desk.out).measurements()
    assert [one.status for one in rows] == ["extracted"], "the run may fail yet"
    assert ends(desk) == (1, 0, 0, 0)
    assert [one.status for one in open_reviews(desk.out).measurements()] == ["success"]


def test_a_run_that_is_unknown_here_stays_unfinished_and_is_no_success(
    desk: DocumentsFolder,
) -> None:
    begin(desk.out, "a", "0123456789abcdef")
    assert ends(desk) == (0, 0, 0, 1)
    assert figures(desk)["success_rate"] is None
    said = desk.shell("documents", "stats", "--out", "out")
    assert "1 document has not ended" in said.out


def test_an_unreachable_server_is_named_and_the_figures_are_still_printed(
    desk: DocumentsFolder,
) -> None:
    begin(desk.out, "a", "0123456789abcdef")
    there = {"DOVETAIL_SERVER": "http://127.0.0.1:1"}
    said = desk.shell("documents", "stats", "--out", "out", "--json", **there)
    assert said.code == 0
    assert json.loads(said.out)["unfinished"] == 1
    assert "how these runs ended cannot be asked" in said.err
