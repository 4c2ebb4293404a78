"""A process dies between two external effects; another goes on with nothing but the file.

Each test is one named point (`effects`). Whatever the point, the end is that of a run that nothing
disturbed; every execution is an attempt in the log; the log obeys the rules; and what was
answered is there.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from .process_forker import Child, ProcessForker
from .side_file import check_executions, starts, stopped, wait_for_start

# ── a run, from a file that is not there to its end ──────────────────────────────────────

BEFORE_A_RUN = [
    # the file is made
    "before PRAGMA journal_mode",
    "after PRAGMA journal_mode",
    "before BEGIN 1",
    "after BEGIN 1",
    "after schema 1",
    "after schema 9",
    "before PRAGMA application_id",
    "before PRAGMA user_version",
    "before COMMIT of schema",
    "after COMMIT of schema",
    # this process is made known
    "before BEGIN 2",
    "before add_owner",
    "after add_owner",
    "before COMMIT of add_owner",
    "after COMMIT of add_owner",
]
IN_A_RUN = [
    # the trigger
    "before BEGIN 3",
    "after BEGIN 3",
    "after add_definition",
    "before add_run",
    "after add_run",
    "after add_entries of submit",
    "after add_key",
    "before COMMIT of submit",
    "after COMMIT of submit",
    # the first claims, together with a node that is parked
    "before add_entries of claim left",
    "after add_entries of claim left",
    "before COMMIT of claim left",
    "after COMMIT of claim left",
    "before COMMIT of park parked",
    "after COMMIT of park parked",
    # handlers
    "before handler of left",
    "after handler of left",
    "before handler of join",
    "after handler of join",
    "before handler of once",
    "after handler of once",
    "before handler 2 of flaky",
    "after handler of costly",
    # results, together with the claims that follow from them
    "before add_entries of complete right",
    "after add_entries of complete right",
    "before COMMIT of claim join",
    "after COMMIT of claim join",
    "before COMMIT of complete once",
    "after COMMIT of complete once",
    # the cache
    "before keep_output",
    "after keep_output",
    "before COMMIT of keep_output",
    "after COMMIT of keep_output",
    "before COMMIT of recall cached",
    "after COMMIT of recall cached",
    # a retry after its backoff, a parked node after its wait
    "before COMMIT of fail flaky",
    "after COMMIT of fail flaky",
    "before add_entries of wake",
    "before COMMIT of wake",
    "after COMMIT of wake",
    "before COMMIT of claim parked",
    "after COMMIT of claim parked",
    # the end
    "before add_entries of end",
    "before project_run",
    "after project_run",
    "before COMMIT of end",
    "after COMMIT of end",
    # this process leaves
    "before drop_owner",
    "after drop_owner",
    "before drop_notifications_of",
    "before COMMIT of drop_owner",
    "after COMMIT of drop_owner",
]


@pytest.fixture(scope="module")
def undisturbed(
    shared_forker: ProcessForker, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("undisturbed"))
    end: dict[str, Any] = shared_forker.start("run", folder=folder, workflow="everything").done()
    assert end["status"] == "COMPLETED"
    assert end["differences"] == []
    check_executions(starts(folder, end["run_id"]), end["events"])
    return end


def check_end(
    folder: str, found: dict[str, Any], ended: dict[str, Any], last: dict[str, Any]
) -> None:
    """The run as a second process found it, brought it to its end, and after a retry of that."""
    # No worker may start `once` again, so a crash that could have hit its start fails it.
    hit = found["nodes"]["once"][0] == "RUNNING"
    assert ended["status"] == ("FAILED" if hit else "COMPLETED")
    assert ended["nodes"]["once"] == (["FAILED", "worker_lost"] if hit else ["COMPLETED", None])
    for run in (found, ended, last):
        assert run["differences"] == []
    executed = starts(folder, last["run_id"])
    check_executions(executed, last["events"])
    of_once = [epoch for node, epoch, _ in executed if node == "once"]
    assert len(of_once) == len(set(of_once)), "it started twice in one epoch"
    assert last["runs"] == 1
    assert last["owner"] == "none"


def crash(process_forker: ProcessForker, job: str, **given: Any) -> Child:
    child = process_forker.start(job, **given)
    assert child.wait() == 9, f"it never came to this point: {child.errors}"
    return child


def crash_and_finish(
    process_forker: ProcessForker,
    folder: str,
    point: str | int,
    commits: str,
    undisturbed: dict[str, Any],
) -> None:
    given = {"folder": folder, "workflow": "everything", "commits": commits}
    first = crash(process_forker, "run", point=point, **given)
    second = process_forker.start("finish", **given)
    second.done()
    found, ended, last = second.reported()
    if answered := first.reported():
        assert found["run_id"] == answered[0], "the answered run is gone"
    check_end(folder, found, ended, last)
    assert last["status"] == undisturbed["status"]
    assert last["outputs"] == undisturbed["outputs"]


@pytest.mark.parametrize("point", BEFORE_A_RUN)
def test_a_run_starts_after_a_crash_before_its_creation(
    process_forker: ProcessForker, folder: str, point: str, undisturbed: dict[str, Any]
) -> None:
    crash_and_finish(process_forker, folder, point, "thread", undisturbed)


@pytest.mark.parametrize("commits", ["thread", "loop"])
@pytest.mark.parametrize("point", IN_A_RUN)
def test_a_run_has_the_same_end_after_a_crash(
    process_forker: ProcessForker,
    folder: str,
    point: str,
    commits: str,
    undisturbed: dict[str, Any],
) -> None:
    crash_and_finish(process_forker, folder, point, commits, undisturbed)


def test_a_run_has_the_same_end_after_a_crash_at_any_side_effect(
    process_forker: ProcessForker, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """The points without a name; DOVETAIL_CRASHES=all takes every one of them."""
    count = process_forker.start("count", folder=str(tmp_path), workflow="everything").done()
    assert count > 2 * len(IN_A_RUN + BEFORE_A_RUN), (
        "points without a name are what this test is for"
    )
    places = range(1, int(count * 0.9))  # a little fewer: no two runs have the same number
    some = places if os.environ.get("DOVETAIL_CRASHES") == "all" else random.sample(places, 8)
    for place in some:
        folder = tmp_path / str(place)
        folder.mkdir()
        try:
            commits = ("thread", "loop")[place % 2]
            crash_and_finish(process_forker, str(folder), place, commits, undisturbed)
        except AssertionError as error:
            raise AssertionError(f"crashed at side {place} of {count}: {error}") from error


# ── taking over ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "point",
    [
        "before own_run",
        "after own_run",
        "before COMMIT of own_run",
        "after COMMIT of own_run",
        "before add_entries of take_over",
        "after add_entries of take_over",
        "before COMMIT of take_over",
        "after COMMIT of take_over",
        "before handler of join",
        "after handler of join",
    ],
)
def test_a_run_has_the_same_end_after_its_new_owner_crashed_too(
    process_forker: ProcessForker, folder: str, point: str, undisturbed: dict[str, Any]
) -> None:
    crash(
        process_forker, "run", folder=folder, workflow="everything", point="after handler of join"
    )
    crash(process_forker, "resume", folder=folder, point=point, commits="loop")
    finishing = process_forker.start("finish", folder=folder, workflow="everything")
    finishing.done()
    found, ended, last = finishing.reported()
    check_end(folder, found, ended, last)
    assert last["outputs"] == undisturbed["outputs"]


def test_a_node_that_crashes_its_process_each_time_fails(
    process_forker: ProcessForker, folder: str
) -> None:
    crash(process_forker, "run", folder=folder, workflow="short", point="after handler of a")
    for _ in range(2):
        crash(process_forker, "resume", folder=folder, point="after handler of a")
    last = process_forker.start("resume", folder=folder)
    last.done()
    reported, end = last.reported()
    assert reported == [end["run_id"]], (
        "the process that resumes it reports it, though it ends at once"
    )
    assert end["status"] == "FAILED"
    assert end["nodes"]["a"] == ["FAILED", "worker_lost"]
    assert starts(folder, end["run_id"]) == [("a", 1, 1), ("a", 1, 2), ("a", 1, 3)]
    assert end["differences"] == []


# ── handing back, and staying ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("commits", ["thread", "loop"])
@pytest.mark.parametrize(
    "point",
    [
        "before add_entries of take_over",
        "after add_entries of take_over",
        "before disown_run",
        "after disown_run",
        "before COMMIT of disown_run",
        "after COMMIT of disown_run",
        "before drop_owner",
        "before COMMIT of drop_owner",
        "after COMMIT of drop_owner",
    ],
)
def test_a_run_continues_after_a_crash_during_its_hand_back(
    process_forker: ProcessForker, folder: str, point: str, commits: str
) -> None:
    given = {"folder": folder, "workflow": "long", "node": "waits", "commits": commits}
    crash(process_forker, "leave", point=point, **given)
    check_long(process_forker, folder)


@pytest.mark.parametrize(
    "point",
    [
        "before renew_owner",
        "after renew_owner",
        "before COMMIT of renew_owner",
        "after COMMIT of renew_owner",
    ],
)
def test_a_run_continues_after_a_crash_during_a_lease_renewal(
    process_forker: ProcessForker, folder: str, point: str
) -> None:
    crash(process_forker, "run", folder=folder, workflow="long", point=point, lease_seconds=0.3)
    check_long(process_forker, folder)


def check_long(process_forker: ProcessForker, folder: str) -> None:
    """The run `long`, whose second node was interrupted once, comes to its end."""
    (Path(folder) / "go").touch()
    end = process_forker.start("resume", folder=folder).done()
    assert end["status"] == "COMPLETED"
    assert end["differences"] == []
    executed = starts(folder, end["run_id"])
    assert executed == [("first", 1, 1), ("waits", 1, 1), ("waits", 1, 2)]
    check_executions(executed, end["events"])


# ── an order from another process ────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "point",
    [
        "before BEGIN",
        "before add_entries of cancel",
        "after add_entries of cancel",
        "after project_run",
        "after notify_owner",
        "before COMMIT of notify_owner",
        "after COMMIT of notify_owner",
    ],
)
def test_a_cancel_whose_process_crashes_is_complete_or_has_no_effect(
    process_forker: ProcessForker, folder: str, point: str
) -> None:
    driving = process_forker.start("run", folder=folder, workflow="long")
    run_id = driving.hear()
    wait_for_start(folder, run_id, ("waits", 1, 1))
    crash(process_forker, "order", folder=folder, command="cancel", run_id=run_id, point=point)
    committed = point.startswith("after COMMIT")
    if not committed:
        (Path(folder) / "go").touch()
    end = driving.done()
    assert end["status"] == ("CANCELLED" if committed else "COMPLETED")
    assert end["differences"] == []
    assert stopped(folder, run_id) == ([("waits", 1, 1)] if committed else [])


@pytest.mark.parametrize(
    "point",
    [
        "before drop_notification",
        "after drop_notification",
        "before COMMIT of drop_notification",
        "after COMMIT of drop_notification",
    ],
)
def test_a_cancel_holds_if_the_owner_crashes_during_it(
    process_forker: ProcessForker, folder: str, point: str
) -> None:
    driving = process_forker.start("run", folder=folder, workflow="long", point=point)
    run_id = driving.hear()
    wait_for_start(folder, run_id, ("waits", 1, 1))
    said = process_forker.start("order", folder=folder, command="cancel", run_id=run_id).done()
    assert said == "CANCELLED"
    assert driving.wait() == 9
    assert process_forker.start("resume", folder=folder).done() == [], "it has ended"
    (Path(folder) / "go").touch()
    finishing = process_forker.start("finish", folder=folder, workflow="long")
    finishing.done()
    found, _, last = finishing.reported()
    assert found["status"] == "CANCELLED"
    assert (last["status"], last["differences"]) == ("COMPLETED", [])
    check_executions(starts(folder, run_id), last["events"])


# ── batches ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("job", ["batch", "stream"])
@pytest.mark.parametrize(
    "point",
    [
        "after add_key",
        "after add_batch",
        "before COMMIT of add_batch",
        "after COMMIT of add_batch",
        "before add_run 4",
        "after add_run 4",
        "after add_entries 4 of submit",
        "before COMMIT of add_run",
        "after COMMIT of add_run",
        "before handler 3 of a",
        "after handler 3 of b",
        "before COMMIT of end",
        "after COMMIT of end",
    ],
)
def test_a_batch_repeated_after_a_crash_has_every_run_once(
    process_forker: ProcessForker, folder: str, job: str, point: str
) -> None:
    first = crash(process_forker, job, folder=folder, workflow="short", count=6, point=point)
    second = process_forker.start(job, folder=folder, workflow="short", count=6)
    second.done()
    batch_id, batch, *runs = second.reported()
    if answered := first.reported():
        assert batch_id == answered[0], "the answered batch is gone"
    assert batch["counts"] == {"COMPLETED": 6}
    assert [run["index"] for run in batch["runs"]] == list(range(6))
    assert {run["runs"] for run in runs} == {6}
    for run in runs:
        assert run["differences"] == []
        check_executions(starts(folder, run["run_id"]), run["events"])
