"""A damaged file: what cannot be read is named and left as it is, and everything else goes on.

Every command and every call of the API is tried on each of a family of damaged files. Whatever is
wrong with one, no message speaks of a bug, and none has a traceback.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.main import get_command

from dovetail import __version__
from dovetail.api.app import create_app
from dovetail.api.operations import ThisProcess
from dovetail.api.service import ApiService
from dovetail.cli.app import app
from dovetail.cli.output import exit_code_of
from dovetail.core.errors import BrokenRun, StoreError
from dovetail.core.states import RunStatus
from dovetail.engine.commands import Commands
from dovetail.engine.ports import RunQuery
from dovetail.wiring.embedded import embedded

from ..engine.harness import registry_of
from .damaged_files import (
    DAMAGES,
    PATIENT,
    Damage,
    File,
    damaged,
    furnished,
    settings_of,
    waits,
)

OF_RUNS = [damage for damage in DAMAGES if damage.of == "run"]
UNREAD = [damage for damage in OF_RUNS if not damage.is_read]
PATIENCE = 15.0
DOVETAIL = get_command(app)  # once: to put it together takes longer than most commands


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> File:
    return asyncio.run(furnished(tmp_path_factory.mktemp("base") / "runs.db"))


@pytest.fixture(autouse=True)
def waiting_nodes() -> Iterator[None]:
    PATIENT["held"] = False
    yield
    PATIENT["held"] = True


def each(damages: list[Damage]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("damage", damages, ids=lambda damage: damage.name)


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Call:
    """`dovetail ARGS` in this process: its exit code, what it said, what it complained of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOVETAIL_DB", str(tmp_path / "runs.db"))
    monkeypatch.setenv("DOVETAIL_DB_SYNC", "normal")

    def run(*args: str) -> tuple[int, str, str]:
        code = exit_code_of(lambda: DOVETAIL.main(list(args), "dovetail"))
        said = capfd.readouterr()
        for reported in said:
            assert "Traceback" not in reported, (args, reported)
            assert "bug in dovetail" not in reported, (args, reported)
        assert code in (0, 1, 2), (args, code, said)
        return code, said.out, said.err

    return run


def asking(file: File) -> list[list[str]]:
    """Every command that asks for something and then ends."""
    of_a_run = ["show", "why", "events", "results", "verify", "repair", "cancel"]
    commands = [["runs", name, file.victim] for name in of_a_run]
    commands += [["runs", name, file.ended] for name in ("show", "verify")]
    commands += [["runs", name, file.victim, "--json"] for name in ("show", "why")]
    return [
        ["runs", "list"],
        ["runs", "list", "--json"],
        ["runs", "list", "--status", "RUNNING"],
        ["runs", "list", "--batch", file.batch],
        ["runs", "retry", file.victim, "--dry-run"],
        ["runs", "repair", file.victim, "--dry-run"],
        ["runs", "verify", "--all", "--json"],
        ["doctor"],
        ["workflows", "list"],
        ["workflows", "show", "quick"],
        ["workflows", "show", "quick", "--version", "live"],
        ["workflows", "delete", "quick"],
        ["limits", "list"],
        ["limits", "set", "api", "7"],
        *commands,
    ]


@each(DAMAGES)
def test_no_command_crashes_on_a_damaged_file(
    base: File, damage: Damage, tmp_path: Path, call: Call
) -> None:
    file = damaged(base, damage, tmp_path)
    for args in asking(file):
        code, _, complaint = call(*args)
        if damage.of == "file" and damage.all_fails:
            assert code == 1, args
            assert complaint.startswith("error: ") or args[0] == "doctor", complaint


@asynccontextmanager
async def serving(file: File) -> AsyncIterator[httpx2.AsyncClient]:
    """The API over the engine in this process, without a socket."""
    settings = settings_of(file.path)
    async with embedded(settings, registry_of(waits)) as commands:
        fleet = ThisProcess(commands, [{"name": "input"}, {"name": "waits"}], 4, dict)
        service = ApiService(commands, fleet, settings, ["test"])
        transport = httpx2.ASGITransport(app=create_app(service, __version__))
        base_url = "http://127.0.0.1/api/v1"
        headers = {"accept": "application/json"}  # an event stream would stay
        async with httpx2.AsyncClient(
            transport=transport, base_url=base_url, headers=headers
        ) as client:
            yield client


def requests(file: File) -> Iterator[tuple[str, str, Any]]:
    for run in (file.victim, file.ended):
        for end in ("", "?nodes=false", "/results", "/explain", "/verify", "/events"):
            yield "GET", f"/runs/{run}{end}", None
        yield "POST", f"/runs/{run}/repair", {"dry_run": True}
        yield "POST", f"/runs/{run}/retry", {"dry_run": True}
    yield "GET", f"/run-ids/{file.victim[:8]}", None
    for path in ("/runs", "/runs?status=RUNNING", f"/runs?batch={file.batch}", "/rate-limits"):
        yield "GET", path, None
    for path in ("/workflows", "/workflows/quick", "/workflows/quick/versions"):
        yield "GET", path, None
    yield "GET", "/workflows/quick?version=live", None
    yield "GET", f"/batches/{file.batch}", None
    yield "POST", "/workflows/quick/runs", {"params": {}}
    yield "POST", f"/batches/{file.batch}/retry", {}
    yield "POST", f"/runs/{file.victim}/cancel", {}
    yield "POST", f"/runs/{file.victim}/retry", {}
    yield "DELETE", "/workflows/quick", None


@each([damage for damage in DAMAGES if damage.of != "file"])
async def test_no_api_request_is_a_500_on_a_damaged_file(
    base: File, damage: Damage, tmp_path: Path
) -> None:
    file = damaged(base, damage, tmp_path)
    async with serving(file) as client:
        for method, path, body in requests(file):
            answer = await client.request(method, path, json=body)
            reported = (damage.name, method, path, answer.text[:500])
            assert answer.status_code < 500, reported
            if answer.status_code >= 400:
                assert answer.headers["content-type"] == "application/problem+json", reported
        keyed = await client.post(
            "/workflows/quick/runs", json={"params": {"x": 1}}, headers={"Idempotency-Key": "k"}
        )
        assert keyed.status_code < 500


@each(OF_RUNS)
async def test_other_runs_continue_beside_a_damaged_run(
    base: File, damage: Damage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = damaged(base, damage, tmp_path)
    before = journal_of(file)
    async with embedded(settings_of(file.path), registry_of(waits)) as commands:
        taken = await commands.resume()
        assert file.other in taken
        assert (await ended(commands, file.other)).status is RunStatus.COMPLETED
        made = (await commands.trigger("quick", {})).run_id
        assert (await ended(commands, made)).status is RunStatus.COMPLETED
        listed = {
            run["run_id"]: run for run in (await commands.list_runs(RunQuery(limit=100)))["items"]
        }
        assert {file.victim, file.other, file.ended, made} <= listed.keys()
        if not damage.is_read:
            assert file.victim not in taken
            assert caplog.text.count(f"run {file.victim}") == 1, "named once"
            with pytest.raises(BrokenRun, match=f"run {file.victim} .* cannot be read"):
                await asyncio.wait_for(commands.wait(file.victim), PATIENCE)
            assert await commands.verify(file.victim)
            assert journal_of(file) == before, "left as it is"


async def ended(commands: Commands, run_id: str) -> Any:
    return await asyncio.wait_for(commands.wait(run_id), PATIENCE)


def journal_of(file: File) -> list[Any]:
    """Everything that the file has of the victim."""
    with sqlite3.connect(file.path) as connection:
        connection.text_factory = bytes
        (row,) = connection.execute("SELECT * FROM runs WHERE run_id = ?", (file.victim,))
        pieces = connection.execute(
            "SELECT * FROM journal WHERE id / ? = ? ORDER BY id", (1 << 24, row[0])
        ).fetchall()
    connection.close()
    return [row, *pieces]


@each(UNREAD[::3])
def test_an_unreadable_run_is_named_and_can_be_cancelled(
    base: File, damage: Damage, tmp_path: Path, call: Call
) -> None:
    file = damaged(base, damage, tmp_path)
    log = journal_of(file)[1:]
    code, said, _ = call("doctor")
    assert code == 1
    assert f"run {file.victim}" in said
    code, said, _ = call("runs", "verify", "--all")
    assert code == 1
    assert f"{file.victim[:6]}: " in said
    assert "5 runs obey the rules" in said, "it went on with all others"
    code, said, _ = call("runs", "list")
    assert code == 0
    assert "damaged: it cannot be read" in said
    for verb in ("show", "why", "results", "repair"):
        code, _, complaint = call("runs", verb, file.victim)
        assert code == 1
        assert f"run {file.victim} in {file.path} cannot be read" in complaint
        assert "dovetail runs cancel" in complaint
    code, _, complaint = call("runs", "events", file.victim)  # as far as there are any to be shown
    assert code == 0 or "cannot be read" in complaint
    code, said, _ = call("runs", "cancel", file.victim)
    assert code == 0
    assert said.startswith("CANCELLED")
    (shown,) = [
        run
        for run in json.loads(call("runs", "list", "--json")[1])["items"]
        if run["run_id"] == file.victim
    ]
    assert (shown["status"], shown["error"]["type"]) == ("CANCELLED", "run_damaged")
    assert journal_of(file)[1:] == log
    code, _, complaint = call("runs", "cancel", file.victim)
    assert code == 1
    assert "has ended already" in complaint


@each([damage for damage in OF_RUNS if damage.is_read])
def test_the_listed_fields_of_a_run_are_repaired_from_its_log(
    base: File, damage: Damage, tmp_path: Path, call: Call
) -> None:
    file = damaged(base, damage, tmp_path)
    code, said, _ = call("runs", "repair", file.victim, "--dry-run")
    assert code == 0
    if damage.name in ("a huge time", "a workflow's name that is no text"):
        assert "nothing to repair" in said
        return
    assert "would be" in said
    assert call("runs", "verify", file.victim)[0] == 1
    assert call("doctor")[0] == 1
    code, said, _ = call("runs", "repair", file.victim)
    assert code == 0
    assert said.startswith("repaired")
    assert call("runs", "verify", file.victim)[0] == 0
    code, said, _ = call("runs", "repair", file.victim)
    assert (code, "nothing to repair" in said) == (0, True)
    (shown,) = [
        run
        for run in json.loads(call("runs", "list", "--json")[1])["items"]
        if run["run_id"] == file.victim
    ]
    assert (shown["status"], shown["epoch"], shown["error"]) == ("RUNNING", 1, None)


async def test_a_run_that_is_damaged_while_it_runs_does_not_stop_other_runs(
    base: File, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = base._replace(path=tmp_path / "runs.db")
    file.path.write_bytes(base.path.read_bytes())
    PATIENT["held"] = True
    async with embedded(settings_of(file.path), registry_of(waits)) as commands:
        assert {*await commands.resume()} == {file.victim, file.other}
        waiting = asyncio.ensure_future(commands.wait(file.victim))
        await asyncio.sleep(0)
        connection = sqlite3.connect(file.path, isolation_level=None)
        sql = "UPDATE journal SET entries = x'00' WHERE id = (SELECT number FROM runs "
        connection.execute(sql + "WHERE run_id = ?) << 24", (file.victim,))
        connection.execute("INSERT INTO nudges SELECT owner, number FROM runs WHERE owner NOTNULL")
        connection.close()
        with pytest.raises(BrokenRun, match="cannot be read"):
            await asyncio.wait_for(waiting, PATIENCE)
        made = (await commands.trigger("quick", {})).run_id
        assert (await ended(commands, made)).status is RunStatus.COMPLETED
    assert f"set aside: run {file.victim}" in caplog.text


async def test_a_file_that_cannot_be_opened_is_a_store_error(base: File, tmp_path: Path) -> None:
    for damage in DAMAGES:
        if damage.of == "file" and damage.name in ("a folder", "a text", "a newer schema"):
            place = tmp_path / damage.name
            place.mkdir()
            file = damaged(base, damage, place)
            with pytest.raises(StoreError):
                async with embedded(settings_of(file.path), registry_of(waits)):
                    pass
