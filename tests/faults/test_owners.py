"""Who drives a run: a process that is silent too long is replaced, and does no harm afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dovetail.stores.sqlite.file import is_gone, started_at, this_machine

from .process_forker import Child, ProcessForker
from .side_file import check_executions, starts, stopped, wait_for, wait_for_start

LEASE = 0.5
AT_ONCE = 8.0
"""How soon an order must reach the owner of the run, on a machine that others need too."""
LONG_LEASE = 60.0
"""An owner that looks only when it renews this is too late."""


def driving(
    process_forker: ProcessForker, folder: str, workflow: str = "long", **given: Any
) -> Child:
    """A process that drives a run whose node `waits` has started."""
    child = process_forker.start("run", folder=folder, workflow=workflow, **given)
    wait_for_start(folder, child.hear(), ("waits", 1, 1))
    return child


def silence(child: Child) -> None:
    """Stop it for longer than its lease."""
    child.signal(signal.SIGSTOP)
    time.sleep(LEASE + 0.2)


def go(folder: str) -> None:
    (Path(folder) / "go").touch()


def test_a_silent_owner_is_replaced_its_handlers_are_stopped_and_both_processes_agree(
    process_forker: ProcessForker, folder: str
) -> None:
    first = driving(process_forker, folder, lease_seconds=LEASE)
    run_id = first.hear()
    silence(first)
    second = process_forker.start("resume", folder=folder)
    assert second.hear() == [run_id]
    wait_for_start(folder, run_id, ("waits", 1, 2))
    first.signal(signal.SIGCONT)
    wait_for(lambda: stopped(folder, run_id) == [("waits", 1, 1)], "it was not stopped", AT_ONCE)
    go(folder)
    ends = [child.done() for child in (first, second)]
    assert ends[0]["status"] == ends[1]["status"] == "COMPLETED"
    assert ends[0]["outputs"] == ends[1]["outputs"]
    assert ends[0]["outputs"]["waits"]["attempt"] == 2
    assert ends[0]["differences"] == ends[1]["differences"] == []
    assert ends[0]["events"] == ends[1]["events"]
    executed = starts(folder, run_id)
    assert executed == [("first", 1, 1), ("waits", 1, 1), ("waits", 1, 2)]
    check_executions(executed, ends[0]["events"])


def test_the_late_result_of_a_silent_owner_changes_nothing(
    process_forker: ProcessForker, folder: str
) -> None:
    first = driving(process_forker, folder, lease_seconds=LEASE)
    run_id = first.hear()
    silence(first)
    second = process_forker.start("resume", folder=folder)
    wait_for_start(folder, run_id, ("waits", 1, 2))
    second.signal(signal.SIGSTOP)  # within its lease, so the run stays its own
    go(folder)
    first.signal(signal.SIGCONT)
    time.sleep(0.5)  # enough for a result, had it counted
    seen = process_forker.start("look", folder=folder, run_id=run_id).done()
    assert (seen["status"], seen["nodes"]["waits"][0]) == ("RUNNING", "RUNNING")
    second.signal(signal.SIGCONT)
    ends = [child.done() for child in (first, second)]
    for end in ends:
        assert (end["status"], end["differences"]) == ("COMPLETED", [])
        assert end["outputs"]["waits"]["attempt"] == 2
    assert starts(folder, run_id) == [("first", 1, 1), ("waits", 1, 1), ("waits", 1, 2)]


def test_a_run_that_changes_its_owner_many_times_ends_once(
    process_forker: ProcessForker, folder: str
) -> None:
    child = driving(process_forker, folder, lease_seconds=LEASE, max_crashes=100)
    run_id = child.hear()
    children = [child]
    for attempt in range(2, 6):
        silence(children[-1])
        children.append(
            process_forker.start("resume", folder=folder, lease_seconds=LEASE, max_crashes=100)
        )
        wait_for_start(folder, run_id, ("waits", 1, attempt))
    for silent in children:
        silent.signal(signal.SIGCONT)
    old = [("waits", 1, attempt) for attempt in range(1, 5)]
    wait_for(lambda: sorted(stopped(folder, run_id)) == old, "not all of them stopped")
    go(folder)
    ends = [child.done() for child in children]
    assert {end["status"] for end in ends} == {"COMPLETED"}
    assert {end["outputs"]["waits"]["attempt"] for end in ends} == {5}
    assert all(end["differences"] == [] for end in ends)
    check_executions(starts(folder, run_id), ends[0]["events"])


def test_the_run_of_a_live_process_is_not_taken_over(
    process_forker: ProcessForker, folder: str
) -> None:
    first = driving(
        process_forker, folder, lease_seconds=3 * LEASE
    )  # a busy machine holds it up, too
    time.sleep(5 * LEASE)  # it renews
    assert process_forker.start("resume", folder=folder).done() == []
    refused = process_forker.start("resume", folder=folder, run_id=first.hear())
    assert refused.wait() == 1
    assert "is driven by another process, which is alive" in refused.errors
    go(folder)
    assert first.done()["status"] == "COMPLETED"
    assert starts(folder, first.hear()) == [("first", 1, 1), ("waits", 1, 1)]


def test_a_cancel_reaches_the_owner_immediately(process_forker: ProcessForker, folder: str) -> None:
    first = driving(process_forker, folder, lease_seconds=LONG_LEASE)
    run_id = first.hear()
    said = process_forker.start("order", folder=folder, command="cancel", run_id=run_id).done()
    given = time.monotonic()
    end = first.hear(2)
    assert time.monotonic() - given < AT_ONCE
    assert said == end["status"] == "CANCELLED"
    # the waiting caller and the stopped handler are notified in no order
    wait_for(lambda: stopped(folder, run_id) == [("waits", 1, 1)], "it was not stopped", AT_ONCE)
    assert first.wait() == 0


def test_a_retry_reaches_the_owner_immediately(process_forker: ProcessForker, folder: str) -> None:
    first = driving(process_forker, folder, workflow="half", lease_seconds=LONG_LEASE)
    run_id = first.hear()
    wait_for(
        lambda: (
            process_forker.start("look", folder=folder, run_id=run_id).done()["status"] == "FAILED"
        ),
        "it never failed",
    )
    (Path(folder) / "fixed").touch()
    assert process_forker.start("order", folder=folder, command="retry", run_id=run_id).done()
    wait_for(lambda: ("broken", 2, 1) in starts(folder, run_id), "it never came", AT_ONCE)
    go(folder)
    end = first.done()
    assert (end["status"], end["differences"]) == ("COMPLETED", [])
    assert sorted(starts(folder, run_id)) == [("broken", 1, 1), ("broken", 2, 1), ("waits", 1, 1)]


# ── is it gone? ──────────────────────────────────────────────────────────────────────────

LATER = time.monotonic() + 3600.0
PID = os.getpid()


def test_this_process_counts_as_alive() -> None:
    assert started_at(PID)
    assert not is_gone(this_machine(), PID, started_at(PID), LATER)


def test_an_ended_process_counts_as_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = started_at(child.pid)
    assert not is_gone(this_machine(), child.pid, started, LATER)
    child.communicate(b"\n")
    assert is_gone(this_machine(), child.pid, started, LATER)


def test_a_zombie_process_counts_as_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    started = started_at(child.pid)
    child.kill()
    try:
        wait_for(lambda: is_gone(this_machine(), child.pid, started, LATER), "alive as a zombie", 5)
    finally:
        child.wait()


def test_a_later_process_with_the_same_pid_is_another_process() -> None:
    before = str(int(started_at(PID)) - 1)
    assert is_gone(this_machine(), PID, before, LATER)


def test_an_owner_silent_for_longer_than_its_lease_is_gone() -> None:
    assert is_gone(this_machine(), PID, started_at(PID), time.monotonic() - 0.001)


def test_for_a_process_of_another_container_only_the_lease_counts() -> None:
    boot = this_machine().split(" ")[0]
    assert not is_gone(f"{boot} pid:[1]", PID, "1", LATER)
    assert is_gone(f"{boot} pid:[1]", PID, "1", time.monotonic() - 0.001)


def test_an_owner_from_before_a_reboot_is_gone() -> None:
    _, room = this_machine().split(" ")
    assert is_gone(f"another-boot {room}", PID, started_at(PID), LATER)


def test_without_a_known_start_time_only_the_lease_counts() -> None:
    assert not is_gone(this_machine(), 1 << 30, "", LATER)
    assert is_gone(this_machine(), 1 << 30, "", time.monotonic() - 0.001)
