"""Files of documents: the same bytes for the same content, and never a part of one.

Processes are killed between any two system calls of a save; a full disk is one that says so.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet
import pytest

from dovetail import PermanentError, RetryableError
from dovetail.documents import files
from dovetail.documents.files import default_out, remove, write_atomically
from dovetail.documents.handlers import save_json, save_parquet

from .found import context, extracted


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def save_both(out: Path, found: dict[str, Any], **params: Any) -> list[dict[str, Any]]:
    config = {"extracted": found}
    return [
        save_parquet(config, context("save_parquet", out, **params)),
        save_json(config, context("save_json", out, **params)),
    ]


# --- what is in them ---------------------------------------------------------------------------


def test_the_parquet_file_has_every_field_with_its_exact_type(tmp_path: Path) -> None:
    saved = save_parquet({"extracted": extracted()}, context("save_parquet", tmp_path))
    table = pyarrow.parquet.ParquetFile(saved["path"]).read()
    (row,) = table.to_pylist()
    assert row["total"] == Decimal("1234.56")
    assert row["date"] == date(2026, 3, 4)
    assert row["vendor"] == "Nordlicht Möbel GmbH"
    assert row["document_type"] == "invoice"
    assert [item["amount"] for item in row["line_items"]] == [Decimal("399.96"), Decimal("834.6")]
    assert row["line_items"][1]["quantity"] is None
    assert dict(row["confidences"]) == {"type": 1.0, "vendor": 0.9, "total": 0.95}
    assert table.schema.field("total").type == pyarrow.decimal128(38, 9)


def test_a_very_small_unit_price_is_not_rounded_away(tmp_path: Path) -> None:
    item = {"description": "call", "quantity": 123456.0, "unit_price": 0.00001, "amount": 1.23}
    saved = save_parquet({"extracted": extracted(line_items=[item])}, context("s", tmp_path))
    (row,) = pyarrow.parquet.ParquetFile(saved["path"]).read().to_pylist()
    assert row["line_items"][0]["unit_price"] == Decimal("0.00001")


@pytest.mark.parametrize(
    ("total", "exact"),
    [
        (1e13, "10000000000000"),
        (-1e13, "-10000000000000"),
        (9999999999999.99, "9999999999999.99"),  # as written, not the fraction that is nearest
        (0.1 + 0.2, "0.3"),
        (5e-324, "0"),
    ],
)
def test_an_amount_is_the_exact_decimal_number_that_was_extracted(
    tmp_path: Path, total: float, exact: str
) -> None:
    saved = save_parquet({"extracted": extracted(total=total)}, context("s", tmp_path))
    (row,) = pyarrow.parquet.ParquetFile(saved["path"]).read().to_pylist()
    assert row["total"] == Decimal(exact)


def test_the_files_are_partitioned_by_the_date_and_type_of_the_document(tmp_path: Path) -> None:
    save_both(tmp_path, extracted())
    save_both(tmp_path, extracted(date=None, type="letter"), document_id="letter-1")
    assert sorted(tree(tmp_path)) == [
        "json/invoice-7.json",
        "json/letter-1.json",
        "parquet/day=2026-03-04/type=invoice/invoice-7.parquet",
        "parquet/day=unknown/type=letter/letter-1.parquet",
    ]


def test_a_reader_finds_the_partitions_as_columns(tmp_path: Path) -> None:
    save_both(tmp_path, extracted())
    save_both(tmp_path, extracted(date=None, type="letter"), document_id="letter-1")
    found = pyarrow.dataset.dataset(tmp_path / "parquet", partitioning="hive").to_table()
    rows = {row["document_id"]: (row["day"], row["type"]) for row in found.to_pylist()}
    assert rows == {"invoice-7": ("2026-03-04", "invoice"), "letter-1": ("unknown", "letter")}


def test_the_json_file_is_sorted_and_ends_with_a_newline(tmp_path: Path) -> None:
    saved = save_json({"extracted": extracted()}, context("save_json", tmp_path))
    text = Path(saved["path"]).read_text("utf-8")
    reported = json.loads(text)
    assert list(reported) == sorted(reported)
    assert text.endswith("}\n")
    assert "Möbel" in text


def test_a_step_returns_the_path_size_and_hash_of_its_file(tmp_path: Path) -> None:
    for saved in save_both(tmp_path, extracted()):
        content = Path(saved["path"]).read_bytes()
        assert saved["bytes"] == len(content)
        assert saved["sha256"] == hashlib.sha256(content).hexdigest()


def test_another_run_at_another_time_writes_the_same_bytes(tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    save_both(once, extracted())
    save_both(twice, extracted(run_id="run-2", started_at=1_800_000_000.0))
    assert tree(once) == tree(twice)
    assert b"run-1" not in b"".join(tree(once).values())


def test_id_and_path_are_those_of_the_run_not_of_the_first_extraction(tmp_path: Path) -> None:
    params = {"document_id": "copy", "file_path": "/inbox/copy.pdf"}
    parquet, as_json = save_both(tmp_path, extracted(), **params)
    reported = json.loads(Path(as_json["path"]).read_text())
    (row,) = pyarrow.parquet.ParquetFile(parquet["path"]).read().to_pylist()
    for name, value in params.items():
        assert reported[name] == value
        assert row[name] == value


def test_a_wrong_extension_gives_a_warning_only_for_its_own_path(tmp_path: Path) -> None:
    reported = []
    for name in ("right.pdf", "wrong.txt"):
        parquet, as_json = save_both(
            tmp_path, extracted(warnings=["faint"]), document_id=name, file_path=f"/inbox/{name}"
        )
        (row,) = pyarrow.parquet.ParquetFile(parquet["path"]).read().to_pylist()
        reported.append(json.loads(Path(as_json["path"]).read_text())["warnings"])
        assert row["warnings"] == reported[-1]
    assert reported[0] == ["faint"]
    assert reported[1][0] == "faint"
    assert ".txt" in reported[1][1]


@pytest.mark.parametrize("bad", ["", "../etc", "a/b", ".hidden", "a b", "x" * 129, "ä", 7, None])
def test_an_id_that_is_not_a_file_name_is_refused(tmp_path: Path, bad: object) -> None:
    with pytest.raises(PermanentError, match=r"document_id .* becomes the name of a file"):
        save_json({"extracted": extracted()}, context("save_json", tmp_path, document_id=bad))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bad",
    [{"file_path": ""}, {"file_path": None}, {"file_path": "/a\0b"}, {"out": "\0"}, {"out": 7}],
)
def test_an_invalid_path_is_refused(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(PermanentError, match="is no path"):
        save_json({"extracted": extracted()}, context("save_json", **{"out": tmp_path, **bad}))


def test_documents_stay_within_the_folders_of_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (allowed := tmp_path / "allowed").mkdir()
    (tmp_path / "allowed by its name").mkdir()
    (allowed / "way out").symlink_to(tmp_path)
    monkeypatch.setenv("DOVETAIL_DOCUMENTS_ROOTS", f"{tmp_path / 'nowhere'}, {allowed}")
    document, found = str(allowed / "a.txt"), {"extracted": extracted()}
    save_json(found, context("save_json", allowed / "out", file_path=document))
    for out, path in [
        (tmp_path, document),
        (allowed / ".." / "out", document),
        (tmp_path / "allowed by its name", document),
        (allowed / "way out" / "out", document),
        (allowed, str(tmp_path / "secret.txt")),
        (allowed, str(allowed / "way out" / "secret.txt")),
    ]:
        with pytest.raises(PermanentError, match="none of the folders") as refused:
            save_json(found, context("save_json", out, file_path=path))
        assert refused.value.type == "not_allowed"


def test_a_step_without_an_extraction_names_the_template_to_write(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match=r"\{\{ extract.output \}\}"):
        save_json({}, context("save_json", tmp_path))


def test_without_out_the_results_go_to_the_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(files.OUT_VARIABLE, raising=False)
    assert default_out() == tmp_path / "documents"
    monkeypatch.setenv(files.OUT_VARIABLE, "elsewhere")
    saved = save_json({"extracted": extracted()}, context("save_json", ""))
    assert saved["path"] == str(tmp_path / "elsewhere" / "json" / "invoice-7.json")


def test_without_the_library_the_package_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PermanentError, match=r"pip install 'dovetail\[documents\]'"):
        save_parquet({"extracted": extracted()}, context("save_parquet", tmp_path))


# --- how they are written ----------------------------------------------------------------------


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system calls that make a file safe, in the order in which they are made."""
    made: list[str] = []

    def reported(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            made.append(name)
            return real(*given, **more)

        return call

    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(os, name, reported(name, getattr(os, name)))
    return made


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls_of(monkeypatch)
    assert write_atomically(tmp_path / "a.json", b"new")
    assert made == ["write", "fsync", "replace", "fsync"]


def test_the_same_bytes_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "a.json", b"new")
    before = (tmp_path / "a.json").stat()
    made = calls_of(monkeypatch)
    assert not write_atomically(tmp_path / "a.json", b"new")
    assert made == ["fsync"]  # of the folder: the process that wrote it may have died before that
    after = (tmp_path / "a.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


SAVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from dovetail.documents.files import write_atomically

moment, name, count = sys.argv[2], sys.argv[3], int(sys.argv[4])
real = getattr(os, name)

def call(*given, **more):
    global count
    count -= 1
    if count == 0 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if count == 0 and moment == "amid":
        real(given[0], bytes(given[1])[:1000])
        os.kill(os.getpid(), signal.SIGKILL)
    done = real(*given, **more)
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return done

setattr(os, name, call)
write_atomically(Path(sys.argv[1]), b"new" * 1000)
"""


@pytest.mark.parametrize(
    ("moment", "call", "number", "there"),
    [
        ("before", "write", 1, b"old"),
        ("amid", "write", 1, b"old"),
        ("before", "fsync", 1, b"old"),
        ("before", "replace", 1, b"old"),
        ("after", "replace", 1, b"new" * 1000),
        ("before", "fsync", 2, b"new" * 1000),
    ],
)
def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, moment: str, call: str, number: int, there: bytes
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    command = [sys.executable, "-c", SAVE_AND_DIE, str(path), moment, call, str(number)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == there
    write_atomically(path, b"new" * 1000)  # the retry that the engine makes
    assert tree(tmp_path) == {"a.json": b"new" * 1000}


def test_the_part_file_of_a_killed_process_is_removed_even_if_nothing_is_written(
    tmp_path: Path,
) -> None:
    path, part = tmp_path / "a.json", tmp_path / ".a.json.part"
    write_atomically(path, b"old")
    part.write_bytes(b"half of what the document was for a mo")
    assert not write_atomically(path, b"old")
    assert tree(tmp_path) == {"a.json": b"old"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_reported_can_be_retried_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def full(*given: Any) -> int:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(RetryableError, match="the disk is full") as raised:
            write_atomically(path, b"new")
    assert raised.value.type == "disk_full"
    assert tree(tmp_path) == {"a.json": b"old"}
    assert write_atomically(path, b"new")


def test_a_partial_write_is_continued_until_all_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:7]))
    write_atomically(tmp_path / "a.json", b"0123456789" * 10)
    assert (tmp_path / "a.json").read_bytes() == b"0123456789" * 10


def test_an_unwritable_path_is_not_retried(tmp_path: Path) -> None:
    (tmp_path / "json").write_text("a file where the folder should be")
    with pytest.raises(
        PermanentError, match="DOVETAIL_DOCUMENTS_OUT names another folder"
    ) as raised:
        write_atomically(tmp_path / "json" / "a.json", b"new")
    assert raised.value.type == "not_writable"


def test_two_concurrent_writers_of_one_file_never_expose_a_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    contents = [bytes([letter]) * 100_000 for letter in b"ab"]
    path.write_bytes(contents[0])
    seen: set[bytes] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen.add(path.read_bytes())

    def write(content: bytes) -> None:
        for _ in range(25):
            write_atomically(path, content)

    reader = threading.Thread(target=look)
    writers = [threading.Thread(target=write, args=(contents[i % 2],)) for i in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    assert seen <= set(contents)
    assert list(tree(tmp_path)) == ["a.json"]


def test_a_writer_that_waited_does_not_touch_the_file_of_the_previous_writer(
    tmp_path: Path,
) -> None:
    path, part = tmp_path / "a.json", tmp_path / ".a.json.part"
    part.write_bytes(b"first")
    with part.open("rb") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threading.Thread(target=write_atomically, args=(path, b"second"))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        part.replace(path)  # the first one is done
        inode = path.stat().st_ino
    second.join()
    assert path.read_bytes() == b"second"
    assert path.stat().st_ino != inode
    assert list(tree(tmp_path)) == ["a.json"]


def test_a_file_is_removed_once(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"x")
    assert remove(path)
    assert not remove(path)
    assert not remove(tmp_path / "no" / "such" / "folder")
