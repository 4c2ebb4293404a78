"""`dovetail run` from the outside: what it prints, where, and what it exits with."""

from __future__ import annotations

import json
import re
import subprocess
from shlex import quote, split

import pytest

from .conftest import SCRIPT, Shell, environment

FAILING = """
name: failing
on_failure: continue
nodes:
  - {id: extract, handler: input}
  - {id: save_parquet, handler: broken, dependencies: [extract], retry: {base_delay_seconds: 0}}
  - {id: create_review, handler: output, dependencies: [save_parquet]}
"""

TYPED = """
name: typed
params:
  type: object
  required: [topic]
  additionalProperties: false
  properties:
    topic: {type: string}
    depth: {type: integer, default: 2}
    deep: {type: boolean}
    tags: {type: array, items: {type: string}}
nodes: [{id: start, handler: input}]
"""


def without_times(text: str) -> str:
    """Run ids, times and seconds are the only things that differ from run to run."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "WHEN", text)
    text = re.sub(r"\b[0-9a-f]{6}\b(?= |$)", "RUN", text)
    return re.sub(r"\b\d+\.\ds|\b\d+s\b", "0.0s", text)


def test_a_completed_run_ends_with_its_result_and_exit_code_0(shell: Shell) -> None:
    shell.write("flow.yaml", "name: flow\nnodes: [{id: start, handler: input}]\n")
    done = shell("run", "flow.yaml", "-p", "topic=otters")
    assert done.code == 0
    assert done.err == ""
    assert without_times(done.out).splitlines() == [
        "RUNNING RUN flow, 1 node",
        "✓ start  0.0s",
        "{",
        '  "start": {',
        '    "topic": "otters"',
        "  }",
        "}",
        "COMPLETED RUN in 0.0s",
    ]


ALLOWED = """
name: allowed
nodes:
  - {id: fetch, handler: fail, allow_failure: true, config: {message: "no answer"}}
  - {id: report, handler: output, dependencies: [fetch]}
"""


def test_an_allowed_failure_is_shown_and_the_exit_code_is_0(shell: Shell) -> None:
    shell.write("flow.yaml", ALLOWED)
    done = shell("run", "flow.yaml")
    assert done.code == 0
    lines = without_times(done.out).splitlines()
    assert [line for line in lines if line.startswith("✗ fetch")]
    assert lines[-2:] == ["COMPLETED RUN in 0.0s", "1 failure was allowed: fetch"]
    shown = shell("runs", "show")
    assert "COMPLETED" in shown.out
    assert "1 failure was allowed: fetch" in shown.out
    again = shell("runs", "retry", done.out.splitlines()[-2].split()[1])
    assert again.code == 1
    assert "COMPLETED with allowed failures (fetch): name the node" in again.err


def test_several_allowed_failures_are_named_in_one_line(shell: Shell) -> None:
    shell.write(
        "flow.yaml", ALLOWED.replace("handler: output", "handler: fail, allow_failure: true")
    )
    done = shell("run", "flow.yaml")
    assert done.code == 0
    assert done.out.endswith("2 failures were allowed: fetch, report\n")


def test_a_failed_run_ends_with_the_cause_and_the_next_command_and_exit_code_1(
    shell: Shell,
) -> None:
    shell.write("flow.yaml", FAILING)
    done = shell("run", "flow.yaml", "--handlers", "mine.py", "-p", "note=it's late")
    assert done.code == 1
    lines = without_times(done.out).splitlines()
    assert lines[-10:] == [
        "✗ save_parquet   0.0s  3 attempts",
        "– create_review  skipped: save_parquet failed",
        "FAILED RUN in 0.0s",
        "  save_parquet: PermissionError: out/ is not writable   (mine.py:15 in broken)",
        "  the end of its log, attempt 3:",
        "    WHEN INFO save_parquet[3] stdout: printed by a handler",
        "    WHEN INFO save_parquet[3] dovetail.handler: logged by a handler",
        "see more:  dovetail runs show RUN save_parquet",
        "           dovetail runs logs RUN --node save_parquet",
        "fix it, then:  dovetail runs retry RUN --handlers mine.py      reruns 2, reuses 1",
    ]
    assert "◌ save_parquet   retry 2 in 0.0s: PermissionError: out/ is not writable" in lines
    assert "\x1b" not in done.out + done.err
    assert done.err.splitlines() == ["save_parquet: logged by a handler"] * 3


def test_a_failed_template_prints_the_definition_as_a_possible_cause_and_the_retry_command(
    shell: Shell,
) -> None:
    shell.write(
        "flow.yaml",
        """
name: flow
nodes:
  - {id: start, handler: input}
  - {id: end, handler: output, dependencies: [start], config: {text: "{{ start.nothing }}"}}
""",
    )
    done = shell("run", "flow.yaml")
    assert done.code == 1
    lines = without_times(done.out).splitlines()
    assert lines[-6].startswith("  end: missing_value: ")
    assert lines[-5:] == [
        "a wrong definition: correct the file and fork the run, as below; a retry uses the old one",
        "a wrong handler or service: correct it and retry the run, as below",
        "see more:  dovetail runs show RUN end",
        "fix flow.yaml, then:  dovetail runs fork RUN --definition flow.yaml",
        "fix it, then:  dovetail runs retry RUN      reruns 1, reuses 1",
    ]


@pytest.mark.parametrize(
    ("name", "place"),
    [("DOVETAIL_REDIS_URL", "redis://127.0.0.1:1/0"), ("DOVETAIL_SERVER", "http://127.0.0.1:1")],
)
def test_the_next_command_uses_the_file_even_if_redis_or_a_server_is_configured(
    shell: Shell, name: str, place: str
) -> None:
    shell.write("flow.yaml", FAILING)
    done = shell("run", "flow.yaml", "--handlers", "mine.py", **{name: place})
    hint = done.out.splitlines()[-1].removeprefix("fix it, then:  ").partition("      ")[0]
    assert hint.endswith(" --handlers mine.py --embedded")
    again = shell(*split(hint)[1:], **{name: place})
    assert again.code == 1
    assert "retried: 2 nodes to run" in again.out
    assert "--embedded" in again.out.splitlines()[-1]
    both = shell("runs", "list", "--embedded", "--server", "http://127.0.0.1:1")
    assert (both.code, both.out) == (2, "")
    assert "--embedded and --server" in both.err


def test_a_short_backoff_is_printed_exactly(shell: Shell) -> None:
    shell.write("flow.yaml", FAILING.replace("seconds: 0}", "seconds: 0.2, jitter: 0}"))
    done = shell("run", "flow.yaml", "--handlers", "mine.py")
    waits = re.findall(r"retry \d in (\S+):", done.out)
    assert waits == ["0.2s", "0.4s"]


def test_under_fail_fast_a_skipped_node_is_no_cause_of_the_failure(shell: Shell) -> None:
    shell.write("flow.yaml", FAILING.replace("continue", "fail_fast").replace("broken", "fail"))
    done = shell("run", "flow.yaml")
    assert done.code == 1
    lines = without_times(done.out).splitlines()
    assert "– create_review  not run: save_parquet failed" in lines
    assert [line for line in lines if line.startswith("  ")] == [
        "  save_parquet: RuntimeError: failed on purpose"
    ]


def test_many_nodes_with_the_same_end_are_counted_instead_of_listed(shell: Shell) -> None:
    after = [f"  - {{id: after_{n}, handler: output, dependencies: [bad]}}" for n in range(500)]
    shell.write(
        "flow.yaml", "\n".join(["name: f", "nodes:", "  - {id: bad, handler: fail}", *after])
    )
    done = shell("run", "flow.yaml")
    assert done.out.count("not run: bad failed") == 6
    assert "– and 495 more not run: bad failed" in done.out


def test_the_json_output_is_one_document_on_stdout(shell: Shell) -> None:
    shell.write("flow.yaml", FAILING)
    done = shell("run", "flow.yaml", "--handlers", "mine.py", "--json")
    assert done.code == 1
    run = json.loads(done.out)
    assert set(run) == {
        *("run_id", "workflow", "version", "status", "epoch", "params", "created_at"),
        *("started_at", "finished_at", "duration", "error", "result", "forked_from", "nodes"),
    }
    assert run["status"] == "FAILED"
    assert run["error"]["node"] == "save_parquet"
    assert [node["status"] for node in run["nodes"]] == ["COMPLETED", "FAILED", "SKIPPED"]
    assert "printed by a handler" in done.err  # even what a handler prints


def test_params_are_typed_by_the_schema_and_the_last_one_wins(shell: Shell) -> None:
    shell.write("flow.yaml", TYPED)
    shell.write("params.json", '{"topic": "from the file", "deep": false}')
    given = ("-p", "depth=3", "-p", "depth=4", "-p", "topic=007", "-p", 'tags=["a=b"]')
    done = shell("run", "flow.yaml", "--params", "params.json", *given, "--json")
    assert done.code == 0, done.err
    params = {"topic": "007", "deep": False, "depth": 4, "tags": ["a=b"]}
    assert json.loads(done.out)["params"] == params


def test_every_violation_of_the_params_schema_is_reported_with_exit_code_2(shell: Shell) -> None:
    shell.write("flow.yaml", TYPED)
    done = shell("run", "flow.yaml", "-p", "depth=deep", "-p", "topik=x")
    assert done.code == 2
    assert done.out == ""
    assert done.err.splitlines() == [
        "error: params.depth: must be a whole number, not 'deep'",
        "error: params.topik: 'topik' is not expected; did you mean 'topic'?",
        "error: params.topic: 'topic' is required",
        "params are given as  -p name=value  or  --params FILE",
    ]


def test_an_invalid_definition_is_reported_as_validate_does_with_exit_code_2(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes:\n  - {id: a, handler: inptu}\n")
    done = shell("run", "flow.yaml", "--json")
    assert done.code == 2
    assert done.out == ""
    assert "flow.yaml:3:22: unknown_handler there is no handler 'inptu'; did you" in done.err


def test_warnings_are_shown_before_the_run(shell: Shell) -> None:
    shell.write(
        "flow.yaml",
        "name: f\nnodes:\n"
        '  - {id: a, handler: input, condition: "{{ true }}"}\n'
        '  - {id: b, handler: output, dependencies: [a], config: {x: "{{ a.y }}"}}\n',
    )
    done = shell("run", "flow.yaml", "-p", "y=1")
    assert done.code == 0
    assert "flow.yaml:4:61: template_may_be_skipped 'a' has a condition" in done.err
    assert "(warning)" in done.err


@pytest.mark.parametrize(
    "text",
    [
        "name: f\nnodes: [{id: a, handler: input}]",
        '{"name": "f",\n\t"nodes": [{"id": "a", "handler": "input"}]}',
    ],
)
def test_a_definition_may_come_from_stdin_as_yaml_or_json(shell: Shell, text: str) -> None:
    done = shell("run", "-", "--json", stdin=text)
    assert done.code == 0, done.err
    assert json.loads(done.out)["workflow"] == "f"


def test_text_from_handlers_and_definitions_cannot_control_the_terminal(shell: Shell) -> None:
    nasty = r"\e[31mred\e[0m \e]0;title\a [bold]x[/bold] \u202e \r\x9b2J\nsecond line"
    shell.write(
        "flow.yaml",
        f"name: f\non_failure: continue\nnodes:\n"
        f'  - {{id: bad, handler: says, config: {{text: "{nasty}"}}}}\n',
    )
    done = shell("run", "flow.yaml", "--handlers", "mine.py")
    words = r"\x1b[31mred\x1b[0m \x1b]0;title\x07 [bold]x[/bold] \u202e \r\x9b2J"
    assert f"  bad: PermanentError: {words}   (mine.py:26 in says)\n    second line\n" in done.out
    shell.write(
        "fine.yaml", f'name: f\nnodes: [{{id: good, handler: gives, config: {{text: "{nasty}"}}}}]'
    )
    fine = shell("run", "fine.yaml", "--handlers", "mine.py")
    assert fine.code == 0
    for char in "\x1b\x07\x9b\u202e\r":
        assert char not in done.out + done.err + fine.out + fine.err
    shown = "{" + fine.out.partition("{")[2].rpartition("}")[0] + "}"
    assert json.loads(shown)["good"]["text"].startswith("\x1b[31mred")  # spelled, still JSON


def test_a_large_result_is_cut_with_a_hint(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: input}]")
    shell.write("params.json", json.dumps({"items": list(range(5000))}))
    done = shell("run", "flow.yaml", "--params", "params.json")
    assert done.code == 0
    assert len(done.out) < 2000
    assert "--json prints everything" in done.out


def test_a_closed_pipe_ends_the_run_quietly(shell: Shell) -> None:
    shell.write(
        "flow.yaml",
        "name: f\nnodes:\n  - {id: a, handler: sleep, config: {seconds: 0.2}}\n"
        "  - {id: b, handler: sleep, config: {seconds: 30}, dependencies: [a]}\n",
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f"{quote(SCRIPT)} run flow.yaml | head -1"],
        cwd=shell.directory,
        env=environment(),
        capture_output=True,
        timeout=15,
        check=False,
    )
    assert done.stdout.startswith(b"RUNNING")
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("into", "said"),
    [
        ("| true", ""),
        ("> /dev/full", "error: stdout cannot be written: No space left on device\n"),
        ("> /dev/full 2>&1", ""),
    ],
)
@pytest.mark.parametrize("command", ["run flow.yaml", "trigger f"])
def test_a_first_line_that_cannot_be_written_ends_the_run_like_any_other_line(
    shell: Shell, command: str, into: str, said: str
) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: sleep, config: {seconds: 30}}]")
    shell("workflows", "register", "flow.yaml")
    # The shell's own exit code is that of what reads; the one of dovetail goes to a file. The
    # reader is gone before the first line is written.
    line = f"(sleep 0.2; {quote(SCRIPT)} {command}; echo $? > code) {into}"
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=shell.directory,
        env=environment(),
        capture_output=True,
        timeout=15,
        check=False,
    )
    shell.wait_for(lambda: (shell.directory / "code").exists(), "it did not end")
    assert (shell.directory / "code").read_text() == "1\n"
    assert done.stderr.decode() == said
    (run,) = json.loads(shell("runs", "list", "--json").out)["items"]
    assert run["status"] == "CANCELLED"


def test_a_stream_without_unicode_gets_plain_symbols(shell: Shell) -> None:
    shell.write("flow.yaml", FAILING)
    done = shell("run", "flow.yaml", "--handlers", "mine.py", PYTHONIOENCODING="ascii")
    assert done.code == 1
    assert "x save_parquet   " in done.out
    assert "- create_review  skipped: save_parquet failed" in done.out


def test_a_handler_stuck_in_a_thread_does_not_delay_the_end(shell: Shell) -> None:
    shell.write(
        "stuck.py",
        "import asyncio, time\nfrom dovetail import handler\n"
        "@handler\ndef blocks(config, ctx):\n    time.sleep(60)\n"
        "@handler\nasync def pool(config, ctx):\n    await asyncio.to_thread(time.sleep, 60)\n",
    )
    shell.write(
        "flow.yaml",
        "name: f\non_failure: continue\ndefaults: {timeout_seconds: 0.2}\n"
        "nodes: [{id: a, handler: blocks}, {id: b, handler: pool}]",
    )
    done = shell("run", "flow.yaml", "--handlers", "stuck.py")  # must end within SECONDS
    assert done.code == 1
    assert "a: timeout: did not finish within 0.2 s" in done.out


def test_the_exit_hooks_of_a_handler_are_run(shell: Shell) -> None:
    shell.write(
        "tidy.py",
        "import asyncio, atexit, pathlib\nfrom dovetail import handler\n"
        "atexit.register(lambda: pathlib.Path('tidied').touch())\n"
        "@handler\nasync def work(config, ctx):\n    await asyncio.to_thread(int)\n",
    )
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: work}]")
    done = shell("run", "flow.yaml", "--handlers", "tidy.py")
    assert done.code == 0, done.err
    assert (shell.directory / "tidied").exists()


def test_logs_can_be_json_lines(shell: Shell) -> None:
    shell.write("flow.yaml", FAILING)
    done = shell("run", "flow.yaml", "--handlers", "mine.py", DOVETAIL_LOG_FORMAT="json")
    said = json.loads(done.err.splitlines()[0])
    assert (said["node_id"], said["attempt"]) == ("save_parquet", 1)
    assert said["message"] == "logged by a handler"


LENIENT = TYPED.replace("  additionalProperties: false\n", "")


def test_a_param_that_the_schema_does_not_name_is_a_warning_on_stderr(shell: Shell) -> None:
    shell.write("typed.yaml", LENIENT)
    warning = "warning: params.dept: 'dept' is not in the params schema; did you mean 'depth'?\n"
    done = shell("run", "typed.yaml", "-p", "topic=x", "-p", "dept=3")
    assert (done.code, done.err) == (0, warning)
    shell("workflows", "register", "typed.yaml")
    done = shell("trigger", "typed", "-p", "topic=x", "-p", "dept=3", "--json")
    assert (done.code, done.err) == (0, warning)
    assert json.loads(done.out)["params"] == {"topic": "x", "dept": "3", "depth": 2}


def test_a_batch_warns_of_each_line_with_params_that_the_schema_does_not_name(
    shell: Shell,
) -> None:
    shell.write("typed.yaml", LENIENT)
    line = json.dumps({"topic": "x", "dept": 1})
    shell.write("items.jsonl", "\n".join([line] * 22))
    done = shell("batch", "typed.yaml", "--items", "items.jsonl")
    reported = done.err.splitlines()
    assert (done.code, len(reported)) == (0, 21)
    assert reported[1].startswith(
        "warning: items.jsonl:2: params.dept: 'dept' is not in the params"
    )
    assert reported[-1] == "warning: items.jsonl: and 2 more warnings"
