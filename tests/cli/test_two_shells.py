"""Two shells on one file: one drives a run, the other looks, cancels, retries or takes over."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time

from .conftest import SECONDS, SOON, Shell

STUCK = """
name: stuck
nodes:
  - {id: first, handler: counted}
  - {id: waits, handler: until, config: {file: go}, dependencies: [first]}
  - {id: last, handler: output, dependencies: [waits]}
"""
MINE = ("--handlers", "mine.py")


def started(shell: Shell, *more: str, **env: str) -> subprocess.Popen[bytes]:
    """A run that waits for the file `go`, in another shell."""
    shell.write("stuck.yaml", STUCK)
    process = shell.start("run", "stuck.yaml", *MINE, *more, **env)
    shell.wait_for_start("waits")
    return process


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert b"Traceback" not in out + err
    return process.returncode, out.decode(), err.decode()


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and return once it has heard that."""
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"handing back: ")


def newest(shell: Shell) -> dict[str, object]:
    (run,) = json.loads(shell("runs", "list", "--limit", "1", "--json").out)["items"]
    return dict(run)


def test_a_run_cancelled_by_another_process_ends_soon_with_exit_code_1(
    shell: Shell,
) -> None:
    process = started(shell, DOVETAIL_LEASE_SECONDS="60")  # not only when it renews that
    done = shell("runs", "cancel")
    cancelled = time.monotonic()
    code, out, err = ended(process)
    assert time.monotonic() - cancelled < SOON
    assert done.code == 0
    assert done.out.startswith("CANCELLED ")
    assert code == 1
    assert "– waits" in out
    assert re.search(r"^CANCELLED [0-9a-f]{6} in ", out, re.MULTILINE)
    assert err == ""


def test_watch_follows_the_run_of_another_process_to_its_end(shell: Shell) -> None:
    process = started(shell)
    watching = shell.start("runs", "watch")
    assert watching.stdout is not None
    while b"first" not in (line := watching.stdout.readline()):
        assert line, "the watched run never reported its first node"
    shell.write("go", "")
    driven, watched = ended(process), ended(watching)
    assert driven[0] == watched[0] == 0
    assert driven[1].splitlines()[-5:-1] == watched[1].splitlines()[-5:-1]
    assert "COMPLETED" in watched[1]


def test_ctrl_c_stops_the_watch_but_not_the_run(shell: Shell) -> None:
    process = started(shell)
    watching = shell.start("runs", "watch")
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    code, out, _ = ended(watching)
    assert code == 130
    assert "the run goes on without this view: dovetail runs watch " in out
    assert newest(shell)["status"] == "RUNNING"
    shell.write("go", "")
    assert ended(process)[0] == 0


def test_watch_reports_that_the_process_of_its_run_died(shell: Shell) -> None:
    process = started(shell)
    watching = shell.start("runs", "watch")
    assert watching.stdout is not None
    watching.stdout.readline()
    process.kill()
    process.communicate()
    code, out, _ = ended(watching)
    assert code == 1
    assert "interrupted: no process is running it; go on with:  dovetail runs resume " in out


def test_why_explains_a_run_that_another_process_drives(shell: Shell) -> None:
    process = started(shell)
    explained = json.loads(shell("runs", "why", "--json").out)
    assert [node["code"] for node in explained["nodes"]] == ["running", "waiting_for_parents"]
    assert "a process that is alive" in shell("runs", "show").out
    refused = shell("runs", "resume", str(newest(shell)["run_id"]), *MINE)
    assert refused.code == 1
    shell.write("go", "")
    assert ended(process)[0] == 0


def test_a_run_survives_kill_9_and_resume_does_not_rerun_completed_nodes(
    shell: Shell,
) -> None:
    process = started(shell)
    process.kill()
    process.communicate()
    shell.write("go", "")
    done = shell("runs", "resume", *MINE, "--json")
    assert done.code == 0, done.err
    (run,) = json.loads(done.out)["items"]
    assert run["status"] == "COMPLETED"
    assert shell.executions() == ["first 1.1", "waits 1.1", "waits 1.2"]
    assert shell("runs", "verify").code == 0


def test_a_run_beside_an_interrupted_one_of_its_workflow_says_how_to_go_on_with_that(
    shell: Shell,
) -> None:
    process = started(shell)
    interrupted = str(newest(shell)["run_id"])[:6]
    process.kill()
    process.communicate()
    shell.write("go", "")
    again = shell("run", "stuck.yaml", *MINE)
    assert again.code == 0
    said = f"run {interrupted} of this workflow was interrupted, and this is another one; "
    typed = f"dovetail runs resume {interrupted} --handlers mine.py"
    assert again.err == f"{said}go on with:  {typed}\n"
    assert shell(*typed.split()[1:]).code == 0
    assert shell("run", "stuck.yaml", *MINE).err == ""


def test_sigterm_hands_the_run_back_and_resume_continues_it(shell: Shell) -> None:
    process = started(shell, DOVETAIL_DRAIN_SECONDS="0.2")
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == 0
    assert err == "handing back: 1 running node may finish within 0.2 s\n"
    last = out.splitlines()[-1]
    found = re.fullmatch(
        r"handed back; go on with:  (dovetail runs resume [0-9a-f]{6} --handlers mine\.py)", last
    )
    assert found
    assert newest(shell)["status"] == "RUNNING"
    shell.write("go", "")
    done = shell(*found[1].split()[1:])
    assert done.code == 0, done.err
    assert shell.executions().count("first 1.1") == 1


def test_a_node_that_ends_within_the_drain_is_not_run_again(shell: Shell) -> None:
    process = started(shell)
    terminate(process)
    shell.write("go", "")
    code, out, _ = ended(process)
    assert code == 0
    assert "handed back" in out
    assert shell("runs", "resume", *MINE).code == 0
    assert shell.executions() == ["first 1.1", "waits 1.1"]


def test_a_run_that_ends_within_the_drain_is_reported_instead_of_handed_back(shell: Shell) -> None:
    shell.write(
        "stuck.yaml", STUCK.replace("  - {id: last, handler: output, dependencies: [waits]}\n", "")
    )
    process = shell.start("run", "stuck.yaml", *MINE)
    shell.wait_for_start("waits")
    terminate(process)
    shell.write("go", "")
    code, out, _ = ended(process)
    assert code == 0
    assert re.search(r"^COMPLETED [0-9a-f]{6} in ", out, re.MULTILINE)
    assert "handed back" not in out


def test_a_handed_back_run_is_a_json_document_too(shell: Shell) -> None:
    process = started(shell, "--json", DOVETAIL_DRAIN_SECONDS="0.1")
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == 0
    assert json.loads(out)["status"] == "RUNNING"
    assert "go on with:  dovetail runs resume " in err


def test_two_concurrent_runs_on_one_file_do_not_affect_each_other(shell: Shell) -> None:
    process = started(shell)
    shell.write("other.yaml", "name: other\nnodes: [{id: a, handler: counted}]")
    other = shell("run", "other.yaml", *MINE)
    assert other.code == 0, other.err
    nothing = shell("runs", "resume", *MINE)
    assert nothing.code == 0
    assert nothing.out.startswith("nothing to resume")
    shell.write("go", "")
    assert ended(process)[0] == 0
    assert shell.executions().count("waits 1.1") == 1


def test_a_retry_of_a_failing_run_goes_to_its_owner(shell: Shell) -> None:
    shell.write(
        "flow.yaml",
        "name: flow\nnodes:\n  - {id: waits, handler: until, config: {file: go}}\n"
        "  - {id: broken, handler: needs, config: {file: fixed}}\n",
    )
    process = shell.start("run", "flow.yaml", *MINE)
    shell.wait_for_start("waits")
    shell.wait_for(lambda: newest(shell)["status"] == "FAILED", "the run never failed")
    shell.write("fixed", "")
    retrying = shell.start("runs", "retry", *MINE)
    shell.wait_for(lambda: "broken 2.1" in shell.executions(), "broken was never run again")
    shell.write("go", "")
    driven, followed = ended(process), ended(retrying)
    assert (driven[0], followed[0]) == (0, 0)
    assert "COMPLETED" in driven[1]
    assert "COMPLETED" in followed[1]
    assert sorted(shell.executions()) == ["broken 1.1", "broken 2.1", "waits 1.1"]


def test_a_repeated_trigger_takes_over_when_the_owner_dies(shell: Shell) -> None:
    shell.write("one.yaml", "name: one\nnodes: [{id: waits, handler: until, config: {file: go}}]")
    assert shell("workflows", "register", "one.yaml", *MINE).code == 0
    keyed = ("trigger", "one", "--idempotency-key", "k", *MINE)
    first = shell.start(*keyed)
    shell.wait_for_start("waits")
    second = shell.start(*keyed)
    assert second.stdout is not None
    second.stdout.readline()
    first.kill()
    first.communicate()
    shell.wait_for(lambda: "waits 1.2" in shell.executions(), "no process took over")
    shell.write("go", "")
    code, out, err = ended(second)
    assert code == 0
    assert "was made with this key before" in err
    assert "COMPLETED" in out


def test_a_retry_without_the_handlers_it_needs_is_refused_before_it_reopens_the_run(
    shell: Shell,
) -> None:
    shell.write("flow.yaml", "name: flow\nnodes: [{id: a, handler: needs, config: {file: no}}]")
    assert shell("run", "flow.yaml", *MINE).code == 1
    refused = shell("runs", "retry")
    assert refused.code == 1
    assert "needs handlers that are not known here: 'needs'; load them with" in refused.err
    assert newest(shell)["epoch"] == 1


def left_behind(shell: Shell, *files: str) -> None:
    """One run for each file that it waits for, whose processes were all killed."""
    processes = []
    for number, file in enumerate(files):
        shell.write(
            f"{number}.yaml",
            f"name: run{number}\nnodes:\n"
            f"  - {{id: waits{number}, handler: until, config: {{file: {file}}}}}\n"
            f"  - {{id: broken, handler: needs, config: {{file: go}},"
            f" dependencies: [waits{number}]}}\n",
        )
        processes.append(shell.start("run", f"{number}.yaml", *MINE))
    for number in range(len(files)):
        shell.wait_for_start(f"waits{number}")
    for process in processes:
        process.kill()
        process.communicate()


def test_resume_of_several_runs_reports_each_end_and_fails_if_one_failed(shell: Shell) -> None:
    left_behind(shell, "first", "first", "never")
    shell.write("first", "")
    process = shell.start("runs", "resume", *MINE)
    shell.wait_for(lambda: shell.executions().count("broken 1.1") == 2, "two never went on")
    shell.write("go", "")
    shell.write("never", "")
    done = ended(process)
    assert done[0] == 1
    first, *ends = done[1].splitlines()
    assert first == "took over 3 runs"
    assert sorted(re.sub(r" [0-9a-f]{6} | in \S+", " ", line) for line in ends) == [
        "COMPLETED run2 ",
        "FAILED run0   broken: PermanentError: there is no go",
        "FAILED run1   broken: PermanentError: there is no go",
    ]


def test_ctrl_c_cancels_all_resumed_runs(shell: Shell) -> None:
    left_behind(shell, "never", "never")
    process = shell.start("runs", "resume", *MINE)
    for number in (0, 1):
        shell.wait_for(
            lambda number=number: f"waits{number} 1.2" in shell.executions(), "never resumed"
        )
    process.send_signal(signal.SIGINT)
    code, out, _ = ended(process)
    assert code == 130
    assert out.count("CANCELLED ") == 2
    assert newest(shell)["status"] == "CANCELLED"


def test_sigterm_hands_all_resumed_runs_back(shell: Shell) -> None:
    left_behind(shell, "never", "never")
    process = shell.start("runs", "resume", *MINE, DOVETAIL_DRAIN_SECONDS="0.1")
    for number in (0, 1):
        shell.wait_for(
            lambda number=number: f"waits{number} 1.2" in shell.executions(), "never resumed"
        )
    process.send_signal(signal.SIGTERM)
    code, out, _ = ended(process)
    assert code == 0
    resume = "dovetail runs resume --handlers mine.py"
    assert out.splitlines()[-1] == f"handed back; go on with:  {resume}"
    shell.write("never", "")
    shell.write("go", "")
    assert shell(*resume.split()[1:]).code == 0
