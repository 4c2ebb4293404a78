"""One content is extracted once: by any worker, however many ask, and whichever process dies."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dovetail import PermanentError, RetryableError
from dovetail.documents import extraction
from dovetail.documents.extraction import cached, content_hash, extract, extractor_name

from ..servers.llm_stub import Fault, LlmStub
from .making import LEFT, Mark, pdf, sparse

RECORD = {**dict.fromkeys(extraction._KEPT, 1), "sha256": "ab" * 32}
TEXT = "Vendor: Blue Kettle Ltd\nInvoice 7\n2026-03-31\nTea  2  3.00  6.00\nTotal: EUR 6.00\n"


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOVETAIL_LLM_BASE_URL", "DOVETAIL_LLM_MODEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def endpoint(llm: LlmStub, monkeypatch: pytest.MonkeyPatch) -> LlmStub:
    for name, value in llm.environment.items():
        monkeypatch.setenv(name, value)
    return llm


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "invoice.txt"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


async def run(path: Path, out: Path, run_id: str = "r1", **more: Any) -> dict[str, Any]:
    return await extract(path, out, idempotency_key=f"{run_id}:extract:1:1", **more)


def kept(out: Path) -> list[str]:
    return sorted(path.name for path in (out / ".cache").rglob("*") if path.is_file())


class TestWithoutAnEndpoint:
    async def test_the_rules_extract(self, document, out):
        found = await run(document, out)
        assert found == {
            "sha256": content_hash(document),
            "kind": "txt",
            "pages": 1,
            "characters": len(TEXT) - 1,
            "warnings": [],
            "extractor": "rules-1",
            "type": "invoice",
            "vendor": "Blue Kettle Ltd",
            "date": "2026-03-31",
            "currency": "EUR",
            "total": 6.0,
            "line_items": [
                {"description": "Tea", "quantity": 2.0, "unit_price": 3.0, "amount": 6.0}
            ],
            "confidence": found["confidence"],
            "confidences": found["confidences"],
            "run_id": "r1",
            "started_at": found["started_at"],
        }
        assert found["confidence"] > 0.8
        assert abs(found["started_at"] - time.time()) < 60

    async def test_an_extraction_is_stored_with_its_extractor(self, document, out):
        first = await run(document, out, "r1")
        copy = document.with_name("copy.txt")
        copy.write_bytes(document.read_bytes())
        assert await run(copy, out, "r2") == first
        assert cached(content_hash(document), out) == first
        assert kept(out) == [f"{first['sha256']}-rules-1.json"]

    async def test_other_content_at_the_same_path_is_extracted_again(self, document, out):
        first = await run(document, out, "r1")
        document.write_text(TEXT.replace("6.00", "8.00"))
        second = await run(document, out, "r2")
        assert (second["total"], second["run_id"]) == (8.0, "r2")
        assert second["sha256"] != first["sha256"]
        assert len(kept(out)) == 2

    @pytest.mark.parametrize("damage", [b"", b"\0" * 400, b'{"total": 1}', b"[1]"])
    async def test_an_extraction_damaged_by_a_power_cut_is_extracted_again(
        self, damage, document, out
    ):
        first = await run(document, out)
        (place,) = (out / ".cache").rglob("*.json")
        place.write_bytes(damage)
        assert cached(first["sha256"], out) is None
        second = await run(document, out, "r2")
        assert second["total"] == 6.0
        assert cached(first["sha256"], out) == second

    async def test_the_same_bytes_are_found_only_under_their_own_hash(self, document, out):
        first = await run(document, out)
        (place,) = (out / ".cache").rglob("*.json")
        other = "ab" + first["sha256"][2:]
        place.parent.with_name("ab").mkdir(exist_ok=True)
        place.rename(place.parent.with_name("ab") / place.name.replace(first["sha256"], other))
        assert cached(other, out) is None

    async def test_many_concurrent_callers_all_get_the_extraction(self, document, out):
        found = await asyncio.gather(*(run(document, out, f"r{i}") for i in range(30)))
        assert {each["total"] for each in found} == {6.0}
        assert kept(out) == [f"{found[0]['sha256']}-rules-1.json"]


class TestADocumentThatCannotBeExtracted:
    async def failed(self, path: Path, out: Path, **more: Any) -> PermanentError:
        with pytest.raises(PermanentError) as failed:
            await run(path, out, **more)
        assert not (out / ".cache").exists() or kept(out) == []
        return failed.value

    async def test_has_changed_after_its_submission(self, document, out):
        submitted = content_hash(document)
        document.write_text("something else")
        error = await self.failed(document, out, sha256=submitted)
        assert error.type == "changed"
        assert "submit it again" in str(error)

    @pytest.mark.parametrize("uses_model", [False, True])
    @pytest.mark.parametrize(
        ("content", "type_"),
        [
            (b"", "empty_file"),
            (b"   \n", "empty_file"),
            (pdf([[Mark(LEFT, 700, "x")]], password="secret"), "encrypted"),
            (pdf([[Mark(LEFT, 700, "x")]])[:200], "corrupt"),
            (b"\x7fELF\0\0\0", "corrupt"),
        ],
    )
    async def test_has_a_clear_error_type_and_costs_no_call(
        self, content, type_, uses_model, tmp_path, out, llm, monkeypatch
    ):
        if uses_model:
            for name, value in llm.environment.items():
                monkeypatch.setenv(name, value)
        path = tmp_path / "bad.pdf"
        path.write_bytes(content)
        error = await self.failed(path, out)
        assert error.type == type_
        assert "bad.pdf" in str(error)
        assert llm.calls() == []

    async def test_is_too_large_or_missing(self, tmp_path, out):
        large = sparse(tmp_path / "large.pdf", 200_000_000)
        assert (await self.failed(large, out)).type == "too_large"
        assert (await self.failed(tmp_path / "gone.pdf", out)).type == "not_found"

    async def test_finds_no_disk_space_and_is_retried(self, document, out, monkeypatch):
        def full(*args: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(RetryableError, match="No space left") as failed:
                await run(document, out)
        assert failed.value.type == "disk_full"
        assert kept(out) == []
        assert (await run(document, out))["total"] == 6.0

    async def test_may_not_write_to_its_out_folder(self, document, out):
        out.write_text("a file, no folder")
        with pytest.raises(PermanentError) as failed:
            await run(document, out)
        assert failed.value.type == "not_writable"


class TestWithAnEndpoint:
    def test_the_stored_extraction_is_keyed_by_its_extractor(self, monkeypatch, tmp_path):
        assert extractor_name() == "rules-1"
        monkeypatch.setenv("DOVETAIL_LLM_BASE_URL", "http://127.0.0.1:1/v1")
        with pytest.raises(PermanentError, match="set DOVETAIL_LLM_MODEL too") as failed:
            extractor_name()
        assert failed.value.type == "invalid_config"
        monkeypatch.setenv("DOVETAIL_LLM_MODEL", "tiny/one")
        assert extractor_name() == "model:tiny/one"
        names = {extraction._Entry(tmp_path, "ab" * 32, f"model:tiny{s}one")._path for s in "/:_"}
        assert len(names) == 3

    async def test_the_model_is_called_once_for_each_content(self, document, out, endpoint):
        first = await run(document, out, "r1")
        assert (first["extractor"], first["total"]) == ("model:stub", 6.0)
        assert await run(document, out, "r2") == first
        document.write_text(TEXT.replace("6.00", "8.00"))
        assert (await run(document, out, "r3"))["total"] == 8.0
        assert [call.idempotency_key for call in endpoint.calls()] == [
            "r1:extract:1:1",
            "r3:extract:1:1",
        ]

    async def test_twenty_concurrent_duplicates_make_one_call(self, document, out, endpoint):
        endpoint.behave(delay=0.3)
        found = await asyncio.gather(*(run(document, out, f"r{i}") for i in range(20)))
        assert len(endpoint.calls()) == 1
        assert len({each["run_id"] for each in found}) == 1
        assert kept(out) == [path.name for path in (out / ".cache").rglob("*.json")]

    async def test_more_contents_are_in_flight_than_there_are_threads(
        self, tmp_path, out, endpoint
    ):
        endpoint.behave(faults=[Fault("hangs")])
        paths = [tmp_path / f"{number}.txt" for number in range(40)]
        for number, path in enumerate(paths):
            path.write_text(f"{TEXT}{number}")
        asked = [asyncio.create_task(run(path, out)) for path in paths]
        until = time.monotonic() + 30
        while endpoint.at_once() < len(paths) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert endpoint.at_once() == len(paths)
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert kept(out) == []

    async def test_concurrent_processes_make_one_call(self, document, out, endpoint):
        endpoint.behave(delay=0.5)
        found = await asyncio.gather(*(_elsewhere(document, out, f"r{i}") for i in range(3)))
        assert len(endpoint.calls()) == 1
        assert len({each["run_id"] for each in found}) == 1

    async def test_a_process_that_dies_during_the_call_leaves_the_content_to_the_next(
        self, document, out, endpoint
    ):
        endpoint.behave(faults=[Fault("hangs", times=1)])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _SCRIPT, str(document), str(out), "r1",
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        while not endpoint.calls():
            await asyncio.sleep(0.02)
        waiting = asyncio.create_task(run(document, out, "r2"))
        await asyncio.sleep(0.2)
        assert len(endpoint.calls()) == 1, "the second waits for the first"
        process.kill()
        await process.wait()
        assert (await asyncio.wait_for(waiting, 30))["run_id"] == "r2"
        assert len(endpoint.calls()) == 2
        assert kept(out) == [path.name for path in (out / ".cache").rglob("*.json")]

    @pytest.mark.parametrize("what", ["garbage", "violating", "busy", "broken", "drops"])
    async def test_an_invalid_reply_is_not_stored_and_the_next_attempt_calls_again(
        self, what, document, out, endpoint
    ):
        endpoint.behave(faults=[Fault(what, times=1)])
        with pytest.raises(RetryableError):
            await run(document, out)
        assert kept(out) == []
        assert (await run(document, out))["total"] == 6.0

    async def test_a_hanging_endpoint_times_out(self, document, out, endpoint, monkeypatch):
        monkeypatch.setenv("DOVETAIL_DOCUMENTS_MODEL_SECONDS", "0.2")
        endpoint.behave(faults=[Fault("hangs")])
        with pytest.raises(RetryableError, match=r"did not answer within 0\.2 s") as failed:
            await run(document, out)
        assert failed.value.type == "timeout"
        assert kept(out) == []

    async def test_a_cancelled_extraction_leaves_no_file(self, document, out, endpoint):
        endpoint.behave(faults=[Fault("hangs", times=1)])
        asked = asyncio.create_task(run(document, out))
        while not endpoint.calls():
            await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert kept(out) == []
        assert (await run(document, out))["total"] == 6.0

    async def test_rules_and_model_do_not_share_results(self, document, out, endpoint, monkeypatch):
        by_model = await run(document, out)
        monkeypatch.delenv("DOVETAIL_LLM_BASE_URL")
        by_rules = await run(document, out)
        assert (by_model["extractor"], by_rules["extractor"]) == ("model:stub", "rules-1")
        assert len(kept(out)) == 2


class TestExtractionEntry:
    """The moments that two processes meet in once in a million times."""

    @pytest.fixture
    def places(self, out: Path) -> list[extraction._Entry]:
        return [extraction._Entry(out, "ab" * 32, "rules-1") for _ in range(3)]

    def test_a_finished_writer_does_not_remove_the_draft_of_the_next(self, places):
        first, second, third = places
        assert first.take()
        first.keep(RECORD)
        assert second.take(), "a process that had looked before it was kept"
        first.leave()
        assert not third.take(), "it is still the second's"
        second.leave()
        assert third.take()
        third.leave()

    def test_a_draft_that_is_stored_while_it_is_opened_is_not_used(self, places, out, monkeypatch):
        first, second, _ = places
        assert first.take()
        lock = extraction.fcntl.flock

        def kept_meanwhile(file: int, how: int) -> None:
            first.keep(RECORD)
            first.leave()
            lock(file, how)

        with monkeypatch.context() as patch:
            patch.setattr(extraction.fcntl, "flock", kept_meanwhile)
            assert not second.take(), "it would write over what was kept"
        assert second.load() == RECORD
        assert len(kept(out)) == 1

    def test_a_draft_that_is_removed_while_it_is_opened_is_not_used(self, places, monkeypatch):
        first, second, third = places
        assert first.take()
        lock = extraction.fcntl.flock

        def dropped_meanwhile(file: int, how: int) -> None:
            first.leave()
            lock(file, how)

        with monkeypatch.context() as patch:
            patch.setattr(extraction.fcntl, "flock", dropped_meanwhile)
            assert not second.take(), "the third would take a new one beside it"
        assert third.take()
        third.leave()


_SCRIPT = """
import asyncio, json, sys
from dovetail.documents.extraction import extract
path, out, run_id = sys.argv[1:]
print(json.dumps(asyncio.run(extract(path, out, idempotency_key=f"{run_id}:extract:1:1"))))
"""


async def _elsewhere(path: Path, out: Path, run_id: str) -> dict[str, Any]:
    """In a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SCRIPT, str(path), str(out), run_id, stdout=subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(said)
    return found
