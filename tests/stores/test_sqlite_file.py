"""The embedded file: who may read it, and how it is made."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.stores.sqlite.file import SqliteFile, readable_by_others


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {path.name: f"{path.stat().st_mode & 0o777:o}" for path in folder.rglob("*")}


def test_the_file_and_its_side_files_are_private_to_their_owner(tmp_path: Path, umask: int) -> None:
    file = SqliteFile(tmp_path / "deep" / ".dovetail" / "dovetail.db")
    file.create()
    connection = file.connect()
    connection.execute("UPDATE owners SET pid = pid")  # which makes what is beside it
    assert modes(tmp_path) == {
        "deep": "700",
        ".dovetail": "700",
        "dovetail.db": "600",
        "dovetail.db-wal": "600",
        "dovetail.db-shm": "600",
    }
    assert readable_by_others(file.path) == []
    connection.close()


def test_a_file_that_is_shared_with_others_keeps_its_mode_and_is_noticed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = SqliteFile(tmp_path / "dovetail.db")
    file.create()
    file.path.chmod(0o660)
    connection = file.connect()
    connection.execute("UPDATE owners SET pid = pid")
    assert set(modes(tmp_path).values()) == {"660"}, "what is beside it follows"
    assert readable_by_others(file.path)[0] == file.path
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    connection.close()


def test_opening_the_file_again_drops_no_lock_of_another_connection(tmp_path: Path) -> None:
    file = SqliteFile(tmp_path / "dovetail.db")
    file.create()
    first = file.connect()
    first.execute("BEGIN IMMEDIATE")
    second = file.connect(wait=False)
    refusals: list[Exception] = []

    def write() -> None:
        try:
            second.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            refusals.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert len(refusals) == 1
    first.execute("ROLLBACK")
    first.close()
    second.close()
