"""The file is deleted or replaced under a process that has it open: nothing is accepted any more.

SQLite would go on to write into a file without a name, and every answer would be lost with it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from dovetail import Dovetail, __version__
from dovetail.api.app import create_app
from dovetail.api.operations import ThisProcess
from dovetail.api.service import ApiService
from dovetail.core.errors import StoreError, StoreLost
from dovetail.engine.commands import Commands
from dovetail.handlers.context import Context
from dovetail.stores.sqlite.file import SqliteFile
from dovetail.wiring.embedded import embedded

from ..engine.harness import definition, registry_of
from .damaged_files import settings_of

SCRIPT = str(Path(sys.executable).with_name("dovetail"))
PATIENCE = 20.0
QUICK = definition({"a": "input"}, name="quick")


def replaced(path: Path) -> None:
    other = path.with_name("other.db")
    SqliteFile(other).create()
    other.replace(path)


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "moved": lambda path: path.rename(path.with_name("elsewhere.db")),
    "replaced": replaced,
    "its log deleted": lambda path: path.with_name(path.name + "-wal").unlink(),
    "its folder moved": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
}


def each(losses: dict[str, Callable[[Path], object]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("how", losses)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "runs.db"


@each(LOSSES)
async def test_no_run_is_accepted_once_the_file_is_gone(path: Path, how: str) -> None:
    async with embedded(settings_of(path), registry_of()) as commands:
        run = await commands.wait((await commands.trigger(QUICK)).run_id)
        assert run.finished
        LOSSES[how](path)
        with pytest.raises(StoreLost, match=r"while it was in use.*nothing is accepted"):
            await commands.trigger(QUICK)
        with pytest.raises(StoreLost):
            await asyncio.wait_for(commands.lost(), PATIENCE)
        for question in (commands.list_runs(), commands.receipt(run.id), commands.resume()):
            with pytest.raises(StoreLost):
                await question


async def test_what_waits_is_told_though_nothing_is_written(path: Path) -> None:
    gate = asyncio.Event()

    async def waits(config: dict[str, object], ctx: Context) -> None:
        await gate.wait()

    async with embedded(settings_of(path), registry_of(waits)) as commands:
        run_id = (await commands.trigger(definition({"a": "waits"}))).run_id
        waiting = asyncio.ensure_future(commands.wait(run_id))
        await asyncio.sleep(0)
        path.unlink()
        with pytest.raises(StoreLost, match="deleted or moved"):
            await asyncio.wait_for(waiting, PATIENCE)


async def test_the_server_is_not_ready_and_answers_503_that_says_why(path: Path) -> None:
    settings = settings_of(path)
    async with embedded(settings, registry_of()) as commands:
        service = ApiService(
            commands, ThisProcess(commands, [{"name": "input"}], 4, dict), settings, ["test"]
        )
        transport = httpx2.ASGITransport(app=create_app(service, __version__))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get("/health/ready")).status_code == 200
            path.unlink()
            answer = await client.post("/api/v1/runs", json={"definition": QUICK})
            assert answer.status_code == 503
            assert answer.json()["type"] == "urn:dovetail:problem:store_lost"
            assert "deleted or replaced" in answer.json()["detail"]
            assert str(path.parent) not in answer.text
            ready = await client.get("/health/ready")
            assert ready.status_code == 503
            assert "deleted or replaced" in ready.json()["detail"]
            assert (await client.get("/health/live")).status_code == 200


async def test_a_client_is_told_what_happened(path: Path) -> None:
    async with Dovetail(path) as dt:
        await dt.run(QUICK)
        path.unlink()
        with pytest.raises(StoreError, match="was deleted or moved while it was in use"):
            await dt.run(QUICK)


async def test_the_log_of_the_file_that_took_its_place_is_left_alone(path: Path) -> None:
    """The last connection that is closed deletes a log by its name: it is another file's now."""
    async with embedded(settings_of(path), registry_of()) as commands:
        await commands.trigger(QUICK)
        path.unlink()
        path.with_name(path.name + "-wal").rename(path.with_name("old-wal"))
        path.with_name(path.name + "-shm").rename(path.with_name("old-shm"))
        SqliteFile(path).create()
        theirs = sqlite3.connect(path, isolation_level=None)
        theirs.execute("INSERT INTO limits VALUES ('kept', 1.0, 1)")
        with pytest.raises(StoreLost):
            await asyncio.wait_for(commands.lost(), PATIENCE)
    assert path.with_name(path.name + "-wal").exists()
    copy = path.with_name("copy.db")
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{copy}{end}")
    with sqlite3.connect(copy) as read:
        assert read.execute("SELECT tag FROM limits").fetchall() == [("kept",)]
    theirs.close()


async def test_a_handler_that_changes_the_folder_of_the_process_loses_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)

    async def leaves(config: dict[str, object], ctx: Context) -> None:
        os.chdir("/")

    async with embedded(settings_of(Path("runs.db")), registry_of(leaves)) as commands:
        for _ in range(2):
            run_id = (await commands.trigger(definition({"a": "leaves"}))).run_id
            assert (await asyncio.wait_for(commands.wait(run_id), PATIENCE)).finished


async def test_looking_on_costs_no_file_and_two_processes_share_one(path: Path) -> None:
    """What others open, write and close is no loss."""
    async with embedded(settings_of(path), registry_of()) as one:
        for _ in range(3):
            async with embedded(settings_of(path), registry_of()) as other:
                await other.trigger(QUICK)
            await one.trigger(QUICK)
        assert isinstance(one, Commands)
        one.store.file.check()  # type: ignore[attr-defined]


# ── the commands ─────────────────────────────────────────────────────────────────────────

SLOW = "name: slow\nnodes:\n  - {id: a, handler: sleep, config: {seconds: 60}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.yaml").write_text(SLOW)
    return tmp_path


def started(folder: Path, *args: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
    return subprocess.Popen(
        [SCRIPT, *args],
        cwd=folder,
        env=env | {"DOVETAIL_DB": "runs.db", "DOVETAIL_DRAIN_SECONDS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("args", [["serve", "--port", "0"], ["run", "slow.yaml"]], ids=" ".join)
def test_a_command_ends_with_a_line_that_says_what_happened(folder: Path, args: list[str]) -> None:
    process = started(folder, *args)
    try:
        assert process.stdout
        process.stdout.readline()
        (folder / "runs.db").unlink()
        _, complaint = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert "error: runs.db was deleted or moved while it was in use" in complaint
        assert "Traceback" not in complaint
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
