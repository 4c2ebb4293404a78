"""`dovetail runs` over a file with a history: what is listed, shown, explained and verified."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

import pytest

from dovetail.core.states import RunStatus

from .conftest import HANDLERS, Outcome, Shell

Command = Callable[..., Outcome]

GOOD = """
name: good
nodes:
  - {id: start, handler: input}
  - {id: end, handler: output, dependencies: [start]}
"""
BAD = """
name: bad
on_failure: continue
nodes:
  - {id: fine, handler: counted, config: {n: 1}}
  - {id: broken, handler: needs, config: {file: fixed}}
  - {id: after, handler: output, dependencies: [broken]}
"""
LEFT = """
name: left
max_concurrency: 1
nodes:
  - {id: first, handler: counted}
  - {id: stuck, handler: until, config: {file: go}, dependencies: [first]}
  - {id: last, handler: output, dependencies: [stuck]}
"""
RUN_FIELDS = {
    *("run_id", "workflow", "version", "status", "epoch", "params", "created_at"),
    *("started_at", "finished_at", "duration", "error", "result"),
}


@dataclass
class History:
    directory: Path
    good: str
    bad: str
    left: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> History:
    """One run that completed, one that failed, and one whose process was killed."""
    directory = tmp_path_factory.mktemp("history")
    shell = Shell(directory)
    shell.write("mine.py", HANDLERS)
    for name, text in (("good", GOOD), ("bad", BAD), ("left", LEFT)):
        shell.write(f"{name}.yaml", text)
    good = shell("run", "good.yaml", "-p", "topic=otters", "--json")
    bad = shell("run", "bad.yaml", "--handlers", "mine.py", "--json")
    left = shell.start("run", "left.yaml", "--handlers", "mine.py")
    shell.wait_for_start("stuck")
    left.send_signal(signal.SIGKILL)
    left.communicate()
    listed = json.loads(shell("runs", "list", "--json").out)["items"]
    return History(
        directory,
        json.loads(good.out)["run_id"],
        json.loads(bad.out)["run_id"],
        listed[0]["run_id"],
    )


@pytest.fixture
def history(made: History, shell: Shell, command: Command) -> History:
    """A copy of it for one test, which is in that directory."""
    copytree(made.directory, shell.directory, dirs_exist_ok=True)
    return made


def test_the_list_has_the_newest_run_first_and_names_the_failures(
    history: History, command: Command
) -> None:
    done = command("runs", "list")
    assert done.code == 0
    head, *rows, hint = done.out.splitlines()
    assert head.split() == ["RUN", "STATUS", "WORKFLOW", "CREATED", "TOOK"]
    assert [row.split()[:3] for row in rows] == [
        [history.left[:6], "RUNNING", "left"],
        [history.bad[:6], "FAILED", "bad"],
        [history.good[:6], "COMPLETED", "good"],
    ]
    assert rows[0].endswith("interrupted: no process is running it")
    assert rows[1].endswith("broken: PermanentError: there is no fixed")
    assert hint == "1 run is interrupted: dovetail runs resume"
    page = command("runs", "list", "--limit", "1").out.splitlines()
    assert page[-2] == "1 run of these is interrupted: dovetail runs resume"


def test_the_list_can_be_filtered_and_paged(history: History, command: Command) -> None:
    assert history.bad[:6] in command("runs", "list", "--status", "failed").out
    assert command("runs", "list", "--workflow", "good").out.count("\n") == 2
    assert command("runs", "list", "--workflow", "none").out == "no such run here\n"
    page = json.loads(command("runs", "list", "--limit", "2", "--json").out)
    assert [run["run_id"] for run in page["items"]] == [history.left, history.bad]
    assert all(set(run) == RUN_FIELDS for run in page["items"])
    rest = json.loads(
        command("runs", "list", "--limit", "2", "--cursor", page["next_cursor"], "--json").out
    )
    assert [run["run_id"] for run in rest["items"]] == [history.good]
    assert rest["next_cursor"] is None
    assert f"more:  --cursor {page['next_cursor']}" in command("runs", "list", "--limit", "2").out


def test_a_run_is_shown_with_its_nodes_and_its_result(history: History, command: Command) -> None:
    done = command("runs", "show", history.good[:8])
    lines = done.out.splitlines()
    assert lines[0] == f"COMPLETED {history.good[:6]} good"
    assert lines[1] == f"  id       {history.good}"
    assert lines[2].startswith("  created  ")
    assert '  params   {"topic": "otters"}' in lines
    assert [line[:7] for line in lines if line.startswith("✓")] == ["✓ start", "✓ end  "]
    assert json.loads("\n".join(lines[lines.index("{") :])) == {"start": {"topic": "otters"}}


def test_a_failed_run_is_shown_with_its_cause_and_the_next_command(
    history: History, command: Command
) -> None:
    lines = command("runs", "show", history.bad).out.splitlines()
    assert lines[0] == f"FAILED {history.bad[:6]} bad"
    assert "– after   skipped: broken failed" in lines
    assert lines[-3].startswith("  broken: PermanentError: there is no fixed")
    assert lines[-2] == f"see more:  dovetail runs show {history.bad[:6]} broken"
    retry = f"dovetail runs retry {history.bad[:6]} --handlers FILE.py"
    assert lines[-1] == f"fix it, then:  {retry}      reruns 2, reuses 1"


def test_without_a_run_id_the_newest_run_is_shown_and_named(
    history: History, command: Command
) -> None:
    done = command("runs", "show")
    assert done.err == f"the newest run: {history.left[:6]} left\n"
    lines = done.out.splitlines()
    assert lines[0] == f"RUNNING {history.left[:6]} left"
    assert any(line.startswith("● stuck") for line in lines)
    resume = f"dovetail runs resume {history.left[:6]} --handlers FILE.py"
    assert lines[-1] == f"interrupted: no process is running it; go on with:  {resume}"


def test_show_as_json_is_the_run_of_the_api(history: History, command: Command) -> None:
    run = json.loads(command("runs", "show", history.bad[:6], "--json").out)
    assert set(run) == {*RUN_FIELDS, "forked_from", "nodes"}
    assert run["run_id"] == history.bad
    assert [node["status"] for node in run["nodes"]] == ["COMPLETED", "FAILED", "SKIPPED"]


def test_why_explains_each_unfinished_node(history: History, command: Command) -> None:
    lines = command("runs", "why", history.left).out.splitlines()
    counted = "1 of 3 nodes completed, 1 running, 1 pending"
    assert lines[0] == f"RUNNING {history.left[:6]} left: {counted}"
    assert lines[1].split(maxsplit=2) == [
        "stuck",
        "RUNNING",
        "interrupted: it was running when its process ended; no process is running it",
    ]
    assert lines[2].split(maxsplit=2) == ["last", "PENDING", "waits for parent stuck"]
    assert "dovetail runs resume" in lines[3]
    explained = json.loads(command("runs", "why", history.left, "--json").out)
    assert set(explained) == {"run_id", "status", "nodes", "damage"}
    assert [node["code"] for node in explained["nodes"]] == ["no_worker", "waiting_for_parents"]


def test_why_of_a_finished_run_names_the_failure_or_says_that_nothing_waits(
    history: History, command: Command
) -> None:
    assert "  nothing waits: every node has finished" in command("runs", "why", history.good).out
    bad = command("runs", "why", history.bad).out
    title = f"FAILED {history.bad[:6]} bad: 1 of 3 nodes completed, 1 failed, 1 skipped"
    assert bad.splitlines()[0] == title
    assert "broken: PermanentError: there is no fixed" in bad
    assert "dovetail runs retry" in bad


def test_events_are_printed_one_per_line_or_as_the_list_of_the_api(
    history: History, command: Command
) -> None:
    events = json.loads(command("runs", "events", history.bad, "--json").out)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["type"] == "run.created"
    assert events[-1]["type"] == "run.failed"
    assert all({"seq", "time", "type", "epoch"} <= set(event) for event in events)
    lines = command("runs", "events", history.bad).out.splitlines()
    assert len(lines) == len(events)
    failed = next(line for line in lines if "node.failed" in line)
    assert "node.failed     broken #1  {" in failed
    later = json.loads(command("runs", "events", history.bad, "--after", "3", "--json").out)
    assert later == events[3:]


def test_followed_events_end_with_the_run_or_when_it_has_no_owner(
    history: History, command: Command, shell: Shell
) -> None:
    events = json.loads(command("runs", "events", history.bad, "--json").out)
    done = shell("runs", "events", history.bad, "--follow", "--after", "2", "--json")
    assert done.code == 0
    assert [json.loads(line) for line in done.out.splitlines()] == events[2:]
    left = shell("runs", "events", history.left, "--follow")
    assert left.code == 1
    assert "node.started" in left.out.splitlines()[-1]
    assert f"go on with:  dovetail runs resume {history.left[:6]}" in left.err


def test_results_prints_the_result_or_the_available_outputs(
    history: History, command: Command
) -> None:
    good = command("runs", "results", history.good)
    assert json.loads(good.out) == {"start": {"topic": "otters"}}
    bad = command("runs", "results", history.bad)
    assert json.loads(bad.out) == {"fine": {"n": 1}}
    assert bad.err == "FAILED: the outputs that are there\n"
    whole = json.loads(command("runs", "results", history.good, "--json").out)
    assert set(whole) == {"status", "result", "outputs"}
    assert set(whole["outputs"]) == {"start", "end"}


def test_results_of_a_running_run_are_only_given_as_partial(
    history: History, command: Command
) -> None:
    refused = command("runs", "results", history.left)
    assert refused.code == 1
    assert refused.out == ""
    assert history.left[:6] in refused.err
    assert json.loads(command("runs", "results", history.left, "--partial").out) == {"first": {}}


def test_verify_replays_a_run_or_all_of_them(history: History, command: Command) -> None:
    one = command("runs", "verify", history.bad)
    assert (one.code, one.out) == (0, "1 run obeys the rules\n")
    every = command("runs", "verify", "--all")
    assert (every.code, every.out) == (0, "3 runs obey the rules\n")
    listed = json.loads(command("runs", "verify", "--all", "--json").out)
    assert [run["divergences"] for run in listed["items"]] == [[], [], []]


def test_a_divergence_is_reported_with_exit_code_1(
    history: History, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def diverges(self: object, run_id: str) -> list[str]:
        return ["event 3 says node.failed, the rules say node.completed"]

    monkeypatch.setattr("dovetail.engine.commands.Commands.verify", diverges)
    done = command("runs", "verify", history.good)
    assert done.code == 1
    assert done.out.splitlines() == [
        f"{history.good[:6]}: diverges from the rules",
        "  event 3 says node.failed, the rules say node.completed",
    ]
    assert command("runs", "verify", history.good, "--json").code == 1


def test_a_dry_run_prints_the_plan_of_a_retry_and_changes_nothing(
    history: History, command: Command
) -> None:
    done = command("runs", "retry", history.bad, "--dry-run")
    assert done.out.splitlines() == [
        f"run {history.bad[:6]} would rerun 2: broken, after",
        f"run {history.bad[:6]} would reuse 1: fine",
    ]
    plan = json.loads(
        command("runs", "retry", "--dry-run", "--from", "fine", history.bad, "--json").out
    )
    assert plan == {"rerun": ["fine", "broken", "after"], "reuse": []}
    assert json.loads(command("runs", "show", history.bad, "--json").out)["epoch"] == 1


def test_retry_without_a_run_id_takes_the_newest_run_that_did_not_complete(
    history: History, command: Command
) -> None:
    done = command("runs", "retry", "--dry-run")
    assert done.err == f"the newest FAILED or CANCELLED run: {history.bad[:6]} bad\n"


def test_retry_without_a_run_to_retry_says_so(shell: Shell) -> None:
    shell.write("flow.yaml", "name: flow\nnodes: [{id: start, handler: input}]\n")
    assert shell("run", "flow.yaml").code == 0
    done = shell("runs", "retry")
    assert (done.code, done.err) == (1, "error: no run here is FAILED or CANCELLED\n")


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["retry", "GOOD"], 1, "is COMPLETED: name the node to rerun it from"),
        (["retry", "BAD", "--from", "nobody"], 1, "has no node 'nobody'"),
        (["retry", "BAD", "--detach"], 2, "--detach needs a server"),
        (["resume", "BAD"], 1, "FAILED"),
        (["resume", "LEFT"], 1, "until"),  # the handler that is not loaded here
        (["resume", "LEFT", "--detach"], 2, "--detach needs a server"),
        (["cancel", "GOOD"], 1, "is COMPLETED already: there is nothing to cancel"),
        (["show", "ffff"], 1, "ffff"),
        (["show", "zz"], 1, "zz"),
        (["watch", "nonsense"], 1, "nonsense"),
        (["list", "--cursor", "nonsense"], 2, "cursor"),
    ],
)
def test_an_impossible_command_is_refused_in_one_line(
    history: History, shell: Shell, args: list[str], code: int, said: str
) -> None:
    ids = {"GOOD": history.good, "BAD": history.bad, "LEFT": history.left}
    done = shell("runs", *(ids.get(word, word) for word in args))
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_an_ambiguous_prefix_is_refused_with_its_matches(
    history: History, command: Command, shell: Shell
) -> None:
    connection = sqlite3.connect(shell.directory / ".dovetail/dovetail.db")
    for run_id, like in ((history.good, "abcd1"), (history.bad, "abcd2")):
        changed = like + run_id[5:]
        connection.execute("UPDATE runs SET run_id = ? WHERE run_id = ?", (changed, run_id))
    connection.commit()
    connection.close()
    done = command("runs", "show", "abcd")
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert "abcd1" in done.err
    assert "abcd2" in done.err
    assert command("runs", "show", "abcd1").code == 0


def test_watching_a_finished_run_prints_its_end_immediately(history: History, shell: Shell) -> None:
    done = shell("runs", "watch", history.bad)
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0] == f"RUNNING {history.bad[:6]} bad, 3 nodes"
    assert f"FAILED {history.bad[:6]} in " in done.out
    assert lines[-1].startswith("fix it, then:  ")
    good = shell("runs", "watch", history.good, "--json")
    assert good.code == 0
    assert json.loads(good.out)["status"] == "COMPLETED"


def test_watching_a_run_without_an_owner_ends_with_a_hint(history: History, shell: Shell) -> None:
    done = shell("runs", "watch", history.left)
    assert done.code == 1
    resume = f"dovetail runs resume {history.left[:6]} --handlers FILE.py"
    assert (
        done.out.splitlines()[-1] == f"interrupted: no process is running it; go on with:  {resume}"
    )


def test_runs_can_be_listed_by_every_status(history: History, command: Command) -> None:
    for status in RunStatus:
        listed = command("runs", "list", "--status", status.value.lower(), "--json")
        assert listed.code == 0, listed.err
        assert {run["status"] for run in json.loads(listed.out)["items"]} <= {status.value}


def test_a_run_without_an_owner_can_be_cancelled(history: History, command: Command) -> None:
    done = command("runs", "cancel")
    assert done.err == f"the newest RUNNING run: {history.left[:6]} left\n"
    assert done.out.splitlines()[0] == f"CANCELLED {history.left[:6]} left"
    run = json.loads(command("runs", "show", history.left, "--json").out)
    assert (run["status"], run["nodes"][1]["reason"]) == ("CANCELLED", "run_cancelled")
    again = command("runs", "cancel")
    assert again.code == 1
    assert again.err == "error: no run here is RUNNING\n"


def test_resume_continues_where_the_killed_process_stopped(history: History, shell: Shell) -> None:
    shell.write("go", "")
    done = shell("runs", "resume", history.left[:6], "--handlers", "mine.py")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == (
        f"RUNNING {history.left[:6]} left, 3 nodes, 1 completed before"
    )
    reported = re.search(f"COMPLETED {history.left[:6]} in (.+)", done.out)
    took = re.search("  took +(.+)", shell("runs", "show", history.left).out)
    assert reported is not None
    assert took is not None
    assert reported[1] == took[1], "from when it was created, not from the resume"
    left = [line for line in shell.executions() if line.split()[0] in ("first", "stuck")]
    assert left == ["first 1.1", "stuck 1.1", "stuck 1.2"]


def test_resume_without_a_run_id_takes_over_all_runs_without_an_owner(
    history: History, shell: Shell
) -> None:
    shell.write("go", "")
    done = shell("runs", "resume", "--handlers", "mine.py")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "took over 1 run"
    assert lines[1].startswith(f"COMPLETED {history.left[:6]} left in ")
    again = shell("runs", "resume", "--handlers", "mine.py", "--json")
    assert (again.code, json.loads(again.out)) == (0, {"items": []})


def test_resume_says_which_runs_it_cannot_drive(history: History, shell: Shell) -> None:
    done = shell("runs", "resume")
    assert done.code == 1
    assert done.out == "resumed none of 1 interrupted run\n"
    assert done.err.startswith(f"{history.left[:6]}: ")
    assert "needs handlers that are not known here: 'counted', 'until';" in done.err


def test_retry_drives_the_run_in_this_process_to_its_end(history: History, shell: Shell) -> None:
    again = shell("runs", "retry", history.bad, "--handlers", "mine.py")
    assert again.code == 1
    assert "retried: 2 nodes to run" in again.out
    retry = f"dovetail runs retry {history.bad[:6]} --handlers mine.py"
    assert again.out.splitlines()[-1] == f"fix it, then:  {retry}      reruns 2, reuses 1"
    shell.write("fixed", "")
    done = shell("runs", "retry", "--handlers", "mine.py", "--json")
    assert done.code == 0, done.err
    run = json.loads(done.out)
    assert (run["run_id"], run["status"], run["epoch"]) == (history.bad, "COMPLETED", 3)
    assert shell.executions().count("fine 1.1") == 1
    verified = shell("runs", "verify", "--all")
    assert verified.code == 0, verified.out


@pytest.mark.parametrize(
    "args",
    [
        ["runs", "list"],
        ["runs", "list", "--json"],
        ["workflows", "list"],
        ["limits", "list"],
        ["runs", "verify", "--all"],
        ["doctor"],
    ],
)
def test_read_commands_create_no_file(command: Command, shell: Shell, args: list[str]) -> None:
    done = command(*args)
    assert done.code == 0, done.err
    assert not (shell.directory / ".dovetail").exists()


@pytest.mark.parametrize("verb", ["show", "why", "watch", "cancel", "results", "events", "verify"])
def test_without_any_run_each_command_says_how_to_create_one(shell: Shell, verb: str) -> None:
    done = shell("runs", verb)
    assert done.code == 1
    assert done.err.startswith("error: there is no run here")
    assert done.err.endswith("dovetail run FILE makes one\n")
    assert not (shell.directory / ".dovetail").exists()


def test_a_hint_repeats_the_handlers_that_it_needs(shell: Shell) -> None:
    shell.write("mine.py", HANDLERS)
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: says, config: {text: x}}]")
    shell("run", "flow.yaml", "--handlers", "mine.py")
    shown = shell("runs", "show").out
    assert re.search(r"dovetail runs retry [0-9a-f]{6} --handlers FILE\.py", shown)
    known = shell("runs", "show", DOVETAIL_HANDLERS="mine.py").out
    assert "dovetail runs retry" in known
    assert "FILE.py" not in known
    registered = shell("workflows", "register", "flow.yaml", "--handlers", "mine.py").out
    assert "dovetail trigger f --handlers mine.py" in registered
    shell.write("plain.yaml", "name: g\nnodes: [{id: a, handler: fail}]")
    shell("run", "plain.yaml")
    assert "--handlers" not in shell("runs", "show").out


def test_finished_runs_are_deleted_and_pruned_from_the_file(
    history: History, command: Command
) -> None:
    done = command("runs", "delete", history.left[:6], history.good[:6])
    assert done.code == 1
    assert done.out == f"deleted {history.good[:6]}\n"
    assert "is RUNNING: only a finished run can be deleted; cancel it" in done.err
    assert command("runs", "show", history.good).code == 1
    would = command("runs", "prune", "--older-than", "0", "--dry-run")
    assert (would.code, would.out) == (0, "would delete 1 run\n")
    assert command("runs", "prune", "--older-than", "30d").out == "deleted 0 runs\n"
    assert command("runs", "prune", "--older-than", "0").out == "deleted 1 run\n"
    (left,) = json.loads(command("runs", "list", "--json").out)["items"]
    assert left["run_id"] == history.left
    assert command("runs", "delete").code == 2


def test_a_search_lists_only_the_runs_it_finds(shell: Shell) -> None:
    shell.write("flow.yaml", "name: flow\nnodes: [{id: a, handler: input}]")
    for who in ("Ada", "Grace"):
        assert shell("run", "flow.yaml", "-p", f"who={who}").code == 0
    found = json.loads(shell("runs", "list", "--search", "ada", "--limit", "1", "--json").out)
    assert [run["params"] for run in found["items"]] == [{"who": "Ada"}]
    none = shell("runs", "list", "--created-before", "2020-01-01T00:00:00Z")
    assert (none.code, none.out) == (0, "no such run here\n")
    wrong = shell("runs", "list", "--created-after", "today")
    assert (wrong.code, "RFC 3339" in wrong.err) == (2, True)
