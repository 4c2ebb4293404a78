"""A file that cannot be used, or not now: said in one line, and nothing acknowledged is lost.

Whatever is wrong, `dovetail` exits with 1 and says what would help; once the cause is gone,
`runs resume` brings the run to its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import StoreError
from dovetail.stores.sqlite.file import SCHEMA_VERSION, SqliteFile

from ..engine.harness import engine
from .process_forker import ProcessForker
from .side_file import check_executions, starts, wait_for_start

FLOW = """
name: flow
nodes:
  - {id: a, handler: gives}
  - {id: b, handler: gives, dependencies: [a]}
"""
HANDLERS = """
import os
from dovetail import handler

@handler
async def gives(config, ctx):
    with open("ran", "a") as ran:
        ran.write(f"{ctx.run_id} {ctx.node_id} {ctx.epoch} {ctx.attempt}\\n")
    return "x" * config.get("size", 1)
"""
RUN = ["run", "flow.yaml", "--handlers", "mine.py"]
RESUME = ["runs", "resume", "--handlers", "mine.py"]
EVERY_COMMAND = [
    RUN,
    RESUME,
    ["runs", "list"],
    ["runs", "show"],
    ["runs", "verify", "--all"],
    ["workflows", "list"],
    ["limits", "list"],
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return furnish(tmp_path)


def furnish(folder: Path) -> Path:
    (folder / "flow.yaml").write_text(FLOW)
    (folder / "mine.py").write_text(HANDLERS)
    return folder


Dovetail = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dovetail(process_forker: ProcessForker) -> Dovetail:
    """`dovetail ARGS` in a folder: its exit code, what it said and what it complained of."""

    def call(folder: Path, *args: str) -> tuple[int, str, str]:
        child = process_forker.start("dovetail", folder=str(folder), args=list(args))
        code = child.wait()
        check_complaint(child.errors)
        return code, child.output, child.errors

    return call


def check_complaint(errors: str) -> None:
    assert "Traceback" not in errors
    assert "this is a bug" not in errors


def refused(done: tuple[int, str, str], *words: str) -> None:
    """It failed, and its last line has these words."""
    code, _, errors = done
    assert code == 1, done
    line = errors.splitlines()[-1]
    assert line.startswith("error: "), line
    for word in words:
        assert word in line


# ── a file that is none of ours ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("args", EVERY_COMMAND, ids=" ".join)
@pytest.mark.parametrize("content", ["garbage", "text"])
def test_a_file_that_is_no_database_is_reported_and_not_changed(
    place: Path, dovetail: Dovetail, content: str, args: list[str]
) -> None:
    path = place / "runs.db"
    path.write_bytes(random.Random(1).randbytes(20_000) if content == "garbage" else b"hi\n" * 999)
    before = path.read_bytes()
    done = dovetail(place, *args)
    refused(done, "runs.db is damaged or no database", "restore it from a copy")
    assert "nothing that was acknowledged is lost" not in done[2], "who knows?"
    assert path.read_bytes() == before


@pytest.mark.parametrize("args", EVERY_COMMAND, ids=" ".join)
def test_the_database_of_another_program_is_not_changed(
    place: Path, dovetail: Dovetail, args: list[str]
) -> None:
    path = place / "runs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE runs (whose TEXT)")
    connection.close()
    before = path.read_bytes()
    refused(dovetail(place, *args), "is a database of another program", "DOVETAIL_DB")
    assert path.read_bytes() == before
    assert sorted(one.name for one in place.glob("runs.db*")) == ["runs.db"]


def test_a_database_with_a_foreign_header_is_refused(place: Path, dovetail: Dovetail) -> None:
    make_runs(place)
    with sqlite3.connect(place / "runs.db") as connection:
        connection.execute("PRAGMA application_id = 252006674")
    connection.close()
    refused(dovetail(place, *RUN), "is a database of another program")


@pytest.mark.parametrize("args", EVERY_COMMAND, ids=" ".join)
def test_a_database_file_of_a_newer_version_is_not_changed(
    place: Path, dovetail: Dovetail, args: list[str]
) -> None:
    path = make_runs(place)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    before = path.read_bytes()
    refused(
        dovetail(place, *args),
        "was written by a newer Dovetail",
        f"schema {SCHEMA_VERSION + 1}",
        "upgrade Dovetail",
    )
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_new_database(place: Path, dovetail: Dovetail) -> None:
    (place / "runs.db").touch()
    assert dovetail(place, *RUN)[0] == 0


@pytest.mark.parametrize("moment", range(1, 8))
def test_a_file_that_another_process_creates_concurrently_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    file = SqliteFile(tmp_path / "runs.db")
    true_connect = sqlite3.connect
    statements = 0

    class Interrupted(sqlite3.Connection):
        def execute(self, *given: Any) -> sqlite3.Cursor:
            nonlocal statements
            statements += 1
            if statements == moment:
                monkeypatch.setattr(sqlite3, "connect", true_connect)
                file.connect().close()
            return super().execute(*given)

    monkeypatch.setattr(
        sqlite3, "connect", lambda *a, **k: true_connect(*a, factory=Interrupted, **k)
    )
    connection = file.connect()
    assert statements >= moment
    assert connection.execute("SELECT COUNT(*) FROM runs").fetchone() == (0,)
    connection.close()


# ── a file that is damaged ───────────────────────────────────────────────────────────────


def make_runs(place: Path) -> Path:
    """A file of a few hundred pages that were written long ago, as far as SQLite knows."""
    path = place / "runs.db"
    connection = SqliteFile(path, "normal").connect()
    connection.executemany(
        "INSERT INTO runs (run_id, workflow, definition, retries, params, created_at, status,"
        " epoch, finished_at) VALUES (?, 'old', 1, '{}', '{}', 1.0, 'COMPLETED', 1, 2.0)",
        [(f"{number:032x}",) for number in range(5000)],
    )
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path


def _middle(data: bytearray, page: int) -> bytearray:
    third = len(data) // page // 3 * page
    data[third : 2 * third] = random.Random(2).randbytes(third)
    return data


def _after_the_header(data: bytearray, page: int) -> bytearray:
    data[page : 3 * page] = random.Random(3).randbytes(2 * page)
    return data


def _half(data: bytearray, page: int) -> bytearray:
    return data[: len(data) // page // 2 * page]


def _zeros(data: bytearray, page: int) -> bytearray:
    data[page:] = bytes(len(data) - page)
    return data


@pytest.mark.parametrize("damage", [_middle, _after_the_header, _half, _zeros])
def test_a_damaged_file_is_reported_by_every_command_that_reads_the_damage(
    place: Path, dovetail: Dovetail, damage: Callable[[bytearray, int], bytearray]
) -> None:
    path = make_runs(place)
    path.write_bytes(damage(bytearray(path.read_bytes()), 4096))
    for args in (RUN, RESUME, ["runs", "list"], ["runs", "show"]):
        done = dovetail(place, *args)
        if done[0]:  # what a command does not read may be damaged
            refused(done, "runs.db is damaged or no database", "restore it from a copy")
    code, said, _ = dovetail(place, "doctor")
    assert code == 1
    assert "restore" in said


async def test_a_run_that_disappears_from_the_file_stops_the_engine_with_an_error(
    tmp_path: Path,
) -> None:
    entered, opened = asyncio.Event(), asyncio.Event()

    async def wait(config: Any, ctx: Any) -> None:
        entered.set()
        await opened.wait()

    async with engine(wait, db=tmp_path / "runs.db") as it:
        run_id = await it.trigger({"a": "wait"})
        waiting = asyncio.create_task(it.commands.wait(run_id))
        await entered.wait()
        with sqlite3.connect(tmp_path / "runs.db") as connection:
            # At the place where the engine will add to the log.
            connection.execute("INSERT INTO journal SELECT MAX(id) + 1, 99, '[]' FROM journal")
            connection.execute("DELETE FROM runs")
        connection.close()
        opened.set()
        with pytest.raises(StoreError, match="no longer"):
            await asyncio.wait_for(waiting, 5)


# ── a place that cannot be written ───────────────────────────────────────────────────────


def without_powers(folder: Path, *args: str, **env: str) -> tuple[int, str, str]:
    """`dovetail ARGS` by a user to whom permissions apply, even if root runs the tests."""
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", *args],
        cwd=folder,
        env={**os.environ, "DOVETAIL_DB": "kept/runs.db", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=_give_up_powers,
    )
    check_complaint(done.stderr)
    return done.returncode, done.stdout, done.stderr


def _give_up_powers() -> None:
    """Root's right to write everywhere, which is otherwise kept through the next exec."""
    drop_from_bounding_set, override, read_search = 24, 1, 2
    libc = ctypes.CDLL(None)
    for capability in (override, read_search):
        libc.prctl(drop_from_bounding_set, capability, 0, 0, 0)  # refused unless one has it


@pytest.fixture
def kept(place: Path) -> Iterator[Path]:
    """A folder with a file in which a run was interrupted."""
    folder = place / "kept"
    folder.mkdir()
    yield folder
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def interrupted(kept: Path, process_forker: ProcessForker) -> str:
    """The id of a run of `short` whose first node was lost."""
    child = process_forker.start(
        "run", folder=str(kept), workflow="short", point="after handler of a"
    )
    assert child.wait() == 9
    return str(child.hear())


@pytest.mark.parametrize("what", ["file", "folder", "both"])
def test_a_read_only_file_or_folder_is_reported_and_the_run_continues_once_it_is_writable(
    kept: Path, process_forker: ProcessForker, what: str
) -> None:
    run_id = interrupted(kept, process_forker)
    checkpoint(kept / "runs.db")
    if what in ("file", "both"):
        (kept / "runs.db").chmod(0o444)
    if what in ("folder", "both"):
        kept.chmod(0o555)
    refused(without_powers(kept.parent, *RUN), "kept/runs.db cannot be", "nothing that was")
    refused(without_powers(kept.parent, *RESUME), "kept/runs.db cannot be")
    kept.chmod(0o755)
    (kept / "runs.db").chmod(0o644)
    end = process_forker.start("resume", folder=str(kept)).done()
    assert (end["run_id"], end["status"], end["differences"]) == (run_id, "COMPLETED", [])
    assert starts(kept, run_id) == [("a", 1, 1), ("a", 1, 2), ("b", 1, 1)]


def checkpoint(path: Path) -> None:
    """Everything into the file itself, and nothing beside it."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def test_a_folder_that_cannot_be_created_is_an_error(kept: Path) -> None:
    kept.chmod(0o555)
    done = without_powers(kept.parent, *RUN, DOVETAIL_DB="kept/deeper/runs.db")
    refused(done, "cannot make the folder kept/deeper", "DOVETAIL_DB")


def test_a_missing_folder_is_created(place: Path, dovetail: Dovetail) -> None:
    done = without_powers(place, *RUN, DOVETAIL_DB="not/yet/there/runs.db")
    assert done[0] == 0
    assert (place / "not" / "yet" / "there" / "runs.db").is_file()


@pytest.mark.parametrize("args", EVERY_COMMAND, ids=" ".join)
def test_a_folder_in_place_of_the_file_is_reported(
    place: Path, dovetail: Dovetail, args: list[str]
) -> None:
    (place / "runs.db").mkdir()
    refused(dovetail(place, *args), "runs.db cannot be opened")


def test_a_file_in_place_of_the_folder_is_reported(place: Path, dovetail: Dovetail) -> None:
    (place / "kept").touch()
    refused(without_powers(place, *RUN), "cannot make the folder kept", "DOVETAIL_DB")


# ── a disk that is full ──────────────────────────────────────────────────────────────────

BIG = """
name: big
nodes:
""" + "".join(
    f"  - {{id: n{i}, handler: gives, config: {{size: 60000}}"
    + (f", dependencies: [n{i - 1}]}}\n" if i else "}\n")
    for i in range(20)
)
KIB = 1024


class SmallDisk:
    """A folder that holds a megabyte, until it is given more.

    Where nothing can be mounted, no file in it may grow beyond a size, which is much the same.
    """

    def __init__(self, folder: Path, *, mounted: bool) -> None:
        self.folder = folder
        self._mounted = mounted
        self._most_bytes = resource.RLIM_INFINITY if mounted else 700 * KIB

    def limit(self) -> None:
        """In each process that shall have it."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._most_bytes, self._most_bytes))

    def fill(self) -> None:
        if not self._mounted:
            self._most_bytes = 8 * KIB
            return
        with (self.folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(KIB))

    def make_room(self) -> None:
        if self._mounted:
            (self.folder / "filler").unlink(missing_ok=True)
            subprocess.run(["mount", "-o", "remount,size=64m", str(self.folder)], check=True)
        self._most_bytes = resource.RLIM_INFINITY


@pytest.fixture
def small_disk() -> Iterator[SmallDisk]:
    with tempfile.TemporaryDirectory() as name:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", name]
        mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            disk = SmallDisk(Path(name), mounted=mounted)
            furnish(disk.folder).joinpath("flow.yaml").write_text(BIG)
            yield disk
        finally:
            if mounted:
                subprocess.run(["umount", name], check=True)


def on(disk: SmallDisk, *args: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-B", "-m", "dovetail", *args],
        cwd=disk.folder,
        env={**os.environ, "DOVETAIL_DB": "runs.db"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=disk.limit,
    )
    check_complaint(done.stderr)
    return done.returncode, done.stdout, done.stderr


def test_a_full_disk_stops_the_run_and_with_more_space_it_continues(
    small_disk: SmallDisk,
) -> None:
    code, said, complaint = on(small_disk, *RUN)
    assert code == 1
    assert "full" in complaint, complaint
    assert "COMPLETED" not in said
    ran_before = (small_disk.folder / "ran").read_text().splitlines()
    assert 0 < len(ran_before) < 20, "it should fill up on the way"
    small_disk.make_room()
    (listed,) = json.loads(on(small_disk, "runs", "list", "--json")[1])["items"]
    code, said, complaint = on(small_disk, *RESUME)
    assert (code, complaint) == (0, "")
    run_id = listed["run_id"]
    events = json.loads(on(small_disk, "runs", "events", run_id, "--json")[1])
    assert events[-1]["type"] == "run.completed"
    executed = starts(small_disk.folder, run_id)
    check_executions(executed, events)
    assert len(executed) <= 22, "what was kept did not run again"
    assert on(small_disk, "runs", "verify", run_id)[0] == 0


def test_a_disk_that_is_full_before_the_run_is_reported_and_no_run_is_created(
    small_disk: SmallDisk,
) -> None:
    small_disk.folder.joinpath("flow.yaml").write_text(FLOW)
    assert on(small_disk, *RUN)[0] == 0
    small_disk.fill()
    code, _, complaint = on(small_disk, *RUN)
    assert code == 1
    assert "full" in complaint, complaint
    small_disk.make_room()
    assert len(json.loads(on(small_disk, "runs", "list", "--json")[1])["items"]) == 1
    assert on(small_disk, *RUN)[0] == 0


@pytest.mark.parametrize("commits", ["thread", "loop"])
def test_a_full_disk_at_any_commit_is_reported_to_the_waiting_caller(
    process_forker: ProcessForker, folder: str, commits: str
) -> None:
    given = {"folder": folder, "workflow": "big", "commits": commits}
    first = process_forker.start("run", most_bytes=400 * KIB, **given)
    run_id = first.hear()
    assert first.wait() == 1
    assert "StoreError" in first.errors
    assert "full" in first.errors
    executed = starts(folder, run_id)
    assert 1 < len(executed) < 12, "it should fill up on the way"
    end = process_forker.start("finish", **given).done()
    assert (end["run_id"], end["status"], end["differences"]) == (run_id, "COMPLETED", [])
    check_executions(starts(folder, run_id), end["events"])
    assert len(starts(folder, run_id)) <= 12 + 1, "what was kept did not run again"


# ── a file that another program writes to ──────────────────────────────────────────────────


@pytest.mark.parametrize("commits", ["thread", "loop"])
def test_a_writer_waits_for_a_locked_file(
    process_forker: ProcessForker, folder: str, commits: str
) -> None:
    given = {"folder": folder, "workflow": "long", "commits": commits}
    driving = process_forker.start("run", **given)
    run_id = driving.hear()
    wait_for_start(folder, run_id, ("waits", 1, 1))
    holding = process_forker.start("hold", folder=folder, seconds=1.5)
    holding.hear()
    began = time.monotonic()
    (Path(folder) / "go").touch()
    following = process_forker.start("run", **given)  # the same key: it follows, once it is let in
    assert driving.done()["status"] == following.done()["status"] == "COMPLETED"
    assert time.monotonic() - began > 1.0
    assert starts(folder, run_id) == [("first", 1, 1), ("waits", 1, 1)]


def test_a_reader_does_not_wait_for_a_locked_file(
    process_forker: ProcessForker, folder: str, place: Path, dovetail: Dovetail
) -> None:
    run_id = process_forker.start("run", folder=folder, workflow="short").done()["run_id"]
    holding = process_forker.start("hold", folder=folder, seconds=10)
    holding.hear()
    for args in (["list"], ["show"], ["why"], ["events"], ["results"], ["verify"], ["watch"]):
        code, said, _ = dovetail(place, "runs", *args)
        assert code == 0
        assert said
    assert (
        process_forker.start("look", folder=folder, run_id=run_id).done()["status"] == "COMPLETED"
    )
    holding.signal(signal.SIGTERM)
    assert holding.wait() == -signal.SIGTERM, "it still held the file"


@pytest.mark.parametrize("commits", ["thread", "loop"])
def test_a_file_that_stays_locked_ends_the_engine_and_the_run_continues_later(
    process_forker: ProcessForker, folder: str, commits: str
) -> None:
    given = {"folder": folder, "workflow": "long", "commits": commits}
    driving = process_forker.start("run", busy_seconds=0.3, **given)
    run_id = driving.hear()
    wait_for_start(folder, run_id, ("waits", 1, 1))
    holding = process_forker.start("hold", folder=folder, seconds=30)
    holding.hear()
    (Path(folder) / "go").touch()
    assert driving.wait() == 1
    assert "was locked by another process for more than 0.3 s" in driving.errors
    holding.kill()
    end = process_forker.start("resume", folder=folder).done()
    assert (end["run_id"], end["status"], end["differences"]) == (run_id, "COMPLETED", [])
    check_executions(starts(folder, run_id), end["events"])


# ── a clock that jumps ───────────────────────────────────────────────────────────────────

HOUR = 3600.0


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["back", "forward"])
@pytest.mark.parametrize("point", ["after COMMIT of fail flaky", "after COMMIT of park parked"])
def test_a_waiting_node_does_not_wait_longer_after_the_clock_was_set(
    process_forker: ProcessForker, folder: str, point: str, ahead: float
) -> None:
    first = process_forker.start(
        "run", folder=folder, workflow="everything", point=point, clock_ahead=ahead
    )
    assert first.wait() == 9
    began = time.monotonic()
    finishing = process_forker.start("finish", folder=folder, workflow="everything")
    end = finishing.done()
    assert time.monotonic() - began < 60
    assert (end["status"], end["differences"]) == ("COMPLETED", [])
    check_executions(starts(folder, end["run_id"]), end["events"])


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_no_live_process_counts_as_dead_after_the_clock_was_set(
    process_forker: ProcessForker, folder: str, ahead: float
) -> None:
    driving = process_forker.start("run", folder=folder, workflow="long", lease_seconds=2)
    run_id = driving.hear()
    wait_for_start(folder, run_id, ("waits", 1, 1))
    assert process_forker.start("resume", folder=folder, clock_ahead=ahead).done() == []
    (Path(folder) / "go").touch()
    assert driving.done()["status"] == "COMPLETED"
    assert starts(folder, run_id) == [("first", 1, 1), ("waits", 1, 1)]


def test_the_doctor_reports_a_clock_that_was_set_back(
    process_forker: ProcessForker, folder: str, place: Path, dovetail: Dovetail
) -> None:
    process_forker.start("run", folder=folder, workflow="short", clock_ahead=HOUR).done()
    code, said, _ = dovetail(place, "doctor")
    assert code == 1
    assert "in the future" in said
