"""`dovetail batch`: one run per line, each made once, however often the command is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections import Counter

import pytest

from dovetail.cli.run_pool import BatchCounts, PlainProgress

from .conftest import SECONDS, SOON, Outcome, Shell

FLOW = """
name: flow
params: {type: object, required: [n], properties: {n: {type: integer}}}
nodes:
  - {id: a, handler: numbered, config: {n: "{{ params.n }}"}}
  - {id: b, handler: output, dependencies: [a]}
"""
HANDLERS = """
import asyncio
from pathlib import Path
from dovetail import PermanentError, handler

@handler
async def numbered(config, ctx):
    n = config["n"]
    with open("numbers", "a") as log:
        log.write(f"{n} {ctx.run_id} {ctx.epoch}.{ctx.attempt}\\n")
    if n < 1000 and n % 100 == 13 and not Path("fixed").exists():
        raise PermanentError(f"{n} is unlucky")
    if n >= 1000:
        while not Path("go").exists():
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.01)
    return n
"""
BATCH = ("batch", "flow.yaml", "--items", "items.jsonl", "--handlers", "numbers.py")


@pytest.fixture
def desk(shell: Shell) -> Shell:
    shell.write("flow.yaml", FLOW)
    shell.write("numbers.py", HANDLERS)
    return shell


def write_items(shell: Shell, *numbers: int) -> None:
    shell.write("items.jsonl", "".join(f'{{"n": {n}}}\n' for n in numbers))


def numbers(shell: Shell) -> list[list[str]]:
    """Every execution: number, run, epoch and attempt."""
    path = shell.directory / "numbers"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def batch_of(shell: Shell) -> dict[str, int]:
    done = shell(*BATCH, "--json")
    return dict(json.loads(done.out)["counts"])


def listed(shell: Shell) -> list[dict[str, object]]:
    return list(json.loads(shell("runs", "list", "--limit", "1000", "--json").out)["items"])


def ended(process: subprocess.Popen[bytes]) -> Outcome:
    out, err = process.communicate(timeout=SECONDS)
    assert b"Traceback" not in out + err
    return Outcome(process.returncode, out.decode(), err.decode())


def test_each_line_is_one_run_and_all_completed_gives_exit_code_0(desk: Shell) -> None:
    write_items(desk, *range(1, 13))
    done = desk(*BATCH)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert re.fullmatch(r"RUNNING batch [0-9a-f]{6} flow, 12 runs", lines[0])
    assert re.fullmatch(r"COMPLETED batch [0-9a-f]{6} in \d+\.\ds: 12 completed", lines[-1])
    assert sorted(int(n) for n, _, _ in numbers(desk)) == list(range(1, 13))


def test_failures_are_reported_with_their_lines_and_the_next_command(desk: Shell) -> None:
    write_items(desk, 1, 13, 2, 113)
    done = desk(*BATCH)
    assert done.code == 1
    *_, status, first, second, hint = done.out.splitlines()
    assert status.endswith(": 2 completed, 2 failed")
    assert re.fullmatch(r"  items\.jsonl:2  [0-9a-f]{6}  a: PermanentError: 13 is unlucky", first)
    assert second.startswith("  items.jsonl:4  ")
    again = f"dovetail {' '.join(BATCH)} --retry-failed"
    assert hint == f"fix it, then:  {again}      reruns 2, reuses 2"


def test_failures_beyond_the_first_are_counted(desk: Shell) -> None:
    write_items(desk, *(13 + 100 * n for n in range(9)), *([13] * 6))
    lines = desk(*BATCH).out.splitlines()
    assert len([line for line in lines if line.startswith("  items.jsonl:")]) == 10
    more = next(line for line in lines if line.startswith("  and 5 more:  "))
    listing = desk(*more.partition("dovetail ")[2].split())
    assert listing.out.count("FAILED") == 15


def test_repeating_the_batch_command_creates_nothing_twice(desk: Shell) -> None:
    write_items(desk, 1, 13, 2)
    first = desk(*BATCH)
    again = desk(*BATCH)
    assert first.code == again.code == 1
    assert len(listed(desk)) == len(numbers(desk)) == 3
    assert again.out.splitlines()[0].endswith("flow, 3 runs, 3 had ended before")
    assert first.out.splitlines()[-2:] == again.out.splitlines()[-2:]  # the failure and the hint


def test_failed_runs_are_retried_on_request(desk: Shell) -> None:
    write_items(desk, 1, 13, 2)
    desk(*BATCH)
    desk.write("fixed", "")
    assert desk(*BATCH).code == 1  # they stay failed
    done = desk(*BATCH, "--retry-failed")
    assert done.code == 0, done.out
    assert len(listed(desk)) == 3
    assert [line[2] for line in numbers(desk) if line[0] == "13"] == ["1.1", "2.1"]
    assert [line[2] for line in numbers(desk) if line[0] == "1"] == ["1.1"]


def test_other_items_give_another_batch_and_an_explicit_key_is_kept(desk: Shell) -> None:
    write_items(desk, 1)
    one = json.loads(desk(*BATCH, "--json").out)
    write_items(desk, 2)
    two = json.loads(desk(*BATCH, "--json").out)
    assert one["batch_id"] != two["batch_id"]
    keyed = json.loads(desk(*BATCH, "--key", "mine", "--json").out)
    again = json.loads(desk(*BATCH, "--key", "mine", "--json").out)
    assert keyed["batch_id"] == again["batch_id"] != two["batch_id"]
    write_items(desk, 2, 3)
    other = desk(*BATCH, "--key", "mine")
    assert other.code == 1
    assert "mine" in other.err


def test_the_json_output_is_the_batch_of_the_api(desk: Shell) -> None:
    write_items(desk, 1, 13)
    done = desk(*BATCH, "--json")
    assert done.code == 1
    batch = json.loads(done.out)
    assert set(batch) == {
        *("batch_id", "workflow", "count", "counts", "created_at", "finished_at"),
        *("runs", "next_cursor"),
    }
    assert batch["counts"] == {"COMPLETED": 1, "FAILED": 1}
    assert [run["index"] for run in batch["runs"]] == [0, 1]


def test_one_bad_line_creates_no_runs(desk: Shell) -> None:
    desk.write("items.jsonl", '{"n": 1}\n\n{"n": "x"}\n[1]\n{"n": 2\n')
    done = desk(*BATCH)
    assert done.code == 2
    assert done.out == ""
    reported = done.err.splitlines()
    assert reported[0] == "items.jsonl:3: params.n: must be a whole number, not 'x'"
    assert reported[1].startswith("items.jsonl:4: an item is an object")
    assert reported[2].startswith("items.jsonl:5: not valid JSON: ")
    assert reported[3] == "items.jsonl: 3 lines of 4 cannot be run; nothing was made"
    assert not (desk.directory / ".dovetail").exists()


@pytest.mark.parametrize(
    ("items", "said"),
    [("-", "not from stdin"), ("none.jsonl", "there is no file"), ("empty.jsonl", "has no items")],
)
def test_invalid_items_are_refused(desk: Shell, items: str, said: str) -> None:
    desk.write("empty.jsonl", "\n\n")
    done = desk("batch", "flow.yaml", "--items", items, "--handlers", "numbers.py")
    assert done.code == 2
    assert said in done.err


def test_an_invalid_definition_of_a_batch_is_refused(desk: Shell) -> None:
    write_items(desk, 1)
    done = desk("batch", "flow.yaml", "--items", "items.jsonl")
    assert done.code == 2
    assert "unknown_handler" in done.err


def test_a_killed_batch_continues_where_it_stopped(desk: Shell) -> None:
    """Some have ended, some run, most are not made yet; all end once."""
    write_items(desk, *range(1, 61), *range(1000, 1060), *range(200, 213))
    process = desk.start(*BATCH, DOVETAIL_CONCURRENCY="8")
    # Eight slots, all taken by waiting runs: nothing moves any more.
    desk.wait_for(
        lambda: sum(int(n) >= 1000 for n, _, _ in numbers(desk)) == 8, "eight never ran at once"
    )
    process.kill()
    process.communicate()
    before = numbers(desk)
    desk.write("go", "")
    done = desk(*BATCH, DOVETAIL_CONCURRENCY="8")
    assert done.code == 1, done.err
    counts = batch_of(desk)
    assert counts == {"COMPLETED": 132, "FAILED": 1}
    after = numbers(desk)
    assert len({run for _, run, _ in after}) == len(listed(desk)) == 133
    # What ran a second time is what was running at the kill, with its next attempt.
    starts = Counter(run for _, run, _ in after)
    again = {run for run, times in starts.items() if times > 1}
    assert again <= {run for n, run, _ in before if int(n) >= 1000}
    assert {attempt for _, run, attempt in after if run in again} == {"1.1", "1.2"}
    assert desk("runs", "verify", "--all").code == 0


def test_sigterm_hands_the_batch_back(desk: Shell) -> None:
    write_items(desk, 1, 2, 1000, 1001)
    process = desk.start(*BATCH, DOVETAIL_DRAIN_SECONDS="0.2")
    desk.wait_for(lambda: len(numbers(desk)) == 4, "four never ran")
    desk.wait_for(
        lambda: [run["status"] for run in listed(desk)].count("COMPLETED") == 2, "two never ended"
    )
    process.send_signal(signal.SIGTERM)
    done = ended(process)
    assert done.code == 0
    status, hint = done.out.splitlines()[-2:]
    assert re.fullmatch(r"RUNNING batch [0-9a-f]{6} in \d+\.\ds: 2 completed, 2 left", status)
    assert hint == f"handed back; go on with:  dovetail {' '.join(BATCH)}"
    desk.write("go", "")
    assert desk(*BATCH).code == 0
    assert len(listed(desk)) == 4


def test_ctrl_c_cancels_the_runs_in_flight_and_creates_no_more(desk: Shell) -> None:
    write_items(desk, *range(1000, 1100))
    process = desk.start(*BATCH, DOVETAIL_CONCURRENCY="2")
    desk.wait_for(lambda: len(numbers(desk)) == 2, "two never ran")
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.code == 130
    found = re.search(r"^CANCELLED batch \S+ in \S+: 8 cancelled, 92 left$", done.out, re.MULTILINE)
    assert found
    assert done.out.splitlines()[-1].endswith("--retry-failed")
    assert {run["status"] for run in listed(desk)} == {"CANCELLED"}
    assert len(listed(desk)) == 8
    desk.write("go", "")
    assert desk(*BATCH, "--retry-failed").code == 0
    assert len(listed(desk)) == 100


def test_ctrl_c_cancels_even_if_a_handler_blocks_the_loop(desk: Shell) -> None:
    desk.write("numbers.py", HANDLERS.replace("await asyncio.sleep(0.02)", "time.sleep(60)"))
    desk.write("numbers.py", "import time\n" + (desk.directory / "numbers.py").read_text())
    write_items(desk, 1000, 1001)
    process = desk.start(*BATCH)
    desk.wait_for(lambda: numbers(desk), "nothing ever ran")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert time.monotonic() - began < SOON
    assert done.code == 130
    assert done.err.startswith("CANCELLED, without waiting for what still runs; go on with:  ")
    assert {run["status"] for run in listed(desk)} == {"CANCELLED"}


def test_a_failed_run_with_unfinished_nodes_is_also_taken_over(desk: Shell) -> None:
    desk.write(
        "flow.yaml",
        FLOW.replace("[a]}", "[a]}\n  - {id: slow, handler: numbered, config: {n: 1000}}"),
    )
    write_items(desk, 13)
    process = desk.start(*BATCH)
    desk.wait_for(lambda: [run["status"] for run in listed(desk)] == ["FAILED"], "it never failed")
    process.kill()
    process.communicate()
    desk.write("go", "")
    assert desk(*BATCH).code == 1
    (run,) = listed(desk)
    assert (run["status"], run["finished_at"] is not None) == ("FAILED", True)


def test_a_batch_handed_back_as_json_prints_the_next_command_on_stderr(desk: Shell) -> None:
    write_items(desk, 1000)
    process = desk.start(*BATCH, "--json", DOVETAIL_DRAIN_SECONDS="0.1")
    desk.wait_for(lambda: numbers(desk), "nothing ever ran")
    process.send_signal(signal.SIGTERM)
    done = ended(process)
    assert done.code == 0
    assert json.loads(done.out)["counts"] == {"RUNNING": 1}
    assert done.err.startswith("handed back; go on with:  dovetail batch ")


def test_two_processes_share_one_batch(desk: Shell) -> None:
    write_items(desk, *range(1, 12), *range(1000, 1004), *range(20, 80))
    one = desk.start(*BATCH)
    desk.wait_for(lambda: len(numbers(desk)) > 14, "it never got going")
    two = desk.start(*BATCH)
    assert two.stdout is not None
    two.stdout.readline()
    desk.write("go", "")
    outcomes = ended(one), ended(two)
    assert [done.code for done in outcomes] == [0, 0]
    assert len(listed(desk)) == len(numbers(desk)) == 75


def test_ctrl_c_does_not_cancel_the_runs_of_another_process(desk: Shell) -> None:
    write_items(desk, *range(1000, 1004))
    one = desk.start(*BATCH)
    desk.wait_for(lambda: len(numbers(desk)) == 4, "four never ran")
    two = desk.start(*BATCH)
    assert two.stdout is not None
    two.stdout.readline()
    time.sleep(0.3)
    two.send_signal(signal.SIGINT)
    assert ended(two).code == 130
    desk.write("go", "")
    assert ended(one).code == 0
    assert len(numbers(desk)) == 4


def test_a_surviving_process_takes_over_the_runs_of_a_killed_one(desk: Shell) -> None:
    write_items(desk, *range(1000, 1004))
    one = desk.start(*BATCH)
    desk.wait_for(lambda: len(numbers(desk)) == 4, "four never ran")
    two = desk.start(*BATCH)
    assert two.stdout is not None
    two.stdout.readline()
    one.kill()
    one.communicate()
    desk.wait_for(lambda: len(numbers(desk)) == 8, "no process took over")
    desk.write("go", "")
    assert ended(two).code == 0
    assert {attempt for _, _, attempt in numbers(desk)} == {"1.1", "1.2"}


def test_plain_progress_prints_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tally = BatchCounts(10)
    progress = PlainProgress(tally)
    progress.begin()
    now[0] = 5.0
    tally.add("COMPLETED")
    progress.refresh()
    progress.refresh()
    assert capsys.readouterr().out.splitlines() == ["1 of 10 done", "1 of 10 done, 5.0s passed"]


def test_batches_are_listed_and_are_shown_by_id_prefix(shell: Shell) -> None:
    assert shell("batches", "list").out.startswith("no batch here yet")
    shell.write("flow.yaml", "name: flow\nnodes: [{id: start, handler: input}]\n")
    shell.write("items.jsonl", '{"n": 1}\n{"n": 2}\n')
    reported = json.loads(shell("batch", "flow.yaml", "--items", "items.jsonl", "--json").out)
    assert [(run["index"], run["result"], run["error"]) for run in reported["runs"]] == [
        (0, {"start": {"n": 1}}, None),
        (1, {"start": {"n": 2}}, None),
    ]
    short = reported["batch_id"][:6]
    listed = shell("batches", "list").out.splitlines()
    assert listed[1].split()[:3] == [short, "COMPLETED", "flow"]
    assert listed[1].endswith("2: 2 completed")
    page = json.loads(shell("batches", "list", "--json").out)
    assert [batch["batch_id"] for batch in page["items"]] == [reported["batch_id"]]
    for beginning in ([short], []):
        shown = shell("batches", "show", *beginning).out.splitlines()
        assert shown[0] == f"COMPLETED batch {short} of flow, 2 runs"
        assert shown[3].split() == ["0", reported["runs"][0]["run_id"][:6], "COMPLETED"]
    found = json.loads(shell("batches", "show", short, "--json").out)
    assert found["batch_id"] == reported["batch_id"]
    assert len(json.loads(shell("runs", "list", "--batch", short, "--json").out)["items"]) == 2
    refused = shell("batches", "show", "nobody")
    assert (refused.code, "no batch 'nobody'" in refused.err) == (1, True)


def test_the_cli_deletes_an_alias(shell: Shell) -> None:
    shell.write("flow.yaml", "name: flow\nnodes: [{id: start, handler: input}]\n")
    shell("workflows", "register", "flow.yaml")
    shell("workflows", "alias", "flow", "prod", "1")
    assert shell("workflows", "alias", "flow", "prod", "--delete").out == "flow prod deleted\n"
    again = shell("workflows", "alias", "flow", "prod", "--delete", "--json")
    assert (again.code, "has no alias 'prod'" in again.err) == (1, True)
    assert shell("workflows", "alias", "flow", "latest", "--delete").code == 1
    for wrong in ([], ["1", "--delete"]):
        done = shell("workflows", "alias", "flow", "prod", *wrong)
        assert (done.code, "give a version, or --delete" in done.err) == (2, True)
