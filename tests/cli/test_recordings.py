"""`dovetail runs record` and `dovetail test`, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from .conftest import Outcome, Shell

Command = Callable[..., Outcome]

FLOW = """
name: noted
nodes:
  - {id: start, handler: input}
  - {id: greeting, handler: greet, dependencies: [start], config: {name: "{{ start.who }}"}}
  - {id: end, handler: output, dependencies: [greeting], config: {said: "{{ greeting }}"}}
"""
SECRET = "correct-horse-battery"


@pytest.fixture
def recorded(shell: Shell, command: Command) -> Shell:
    shell.write("flow.yaml", FLOW)
    assert shell("run", "flow.yaml", "-p", "who=Ada", "--handlers", "mine.py").code == 0
    assert command("runs", "record", "-o", "recorded.json").code == 0
    return shell


def test_a_run_is_recorded_and_replayed(recorded: Shell, command: Command) -> None:
    data = json.loads((recorded.directory / "recorded.json").read_text())
    assert data["nodes"]["greeting"]["output"] == "hello Ada"
    assert data["params"] == {"who": "Ada"}
    done = command("test", "recorded.json")
    assert (done.code, done.out) == (0, "recorded.json: the same, 3 nodes\n")
    done = command("test", "recorded.json", "--definition", "flow.yaml", "--json")
    assert json.loads(done.out) == [
        {"file": "recorded.json", "ok": True, "difference": None, "error": None, "nodes": 3}
    ]


def test_without_a_file_the_recording_goes_to_stdout(recorded: Shell, command: Command) -> None:
    done = command("runs", "record")
    assert json.loads(done.out)["workflow"] == "noted"


def test_a_difference_exits_with_1_and_names_it(recorded: Shell, command: Command) -> None:
    path = recorded.directory / "recorded.json"
    path.write_text(path.read_text().replace('"hello Ada"', '"hello Bob"', 1))
    recorded.write("other.json", path.read_text().replace('"hello Bob"', '"hello Ada"'))
    done = command("test", "recorded.json", "other.json")
    assert done.code == 1
    assert done.err == (
        'recorded.json: node \'end\': config.said: expected "hello Ada", got "hello Bob"\n'
    )
    assert done.out == "other.json: the same, 3 nodes\n1 of 2 recordings the same\n"
    (found,) = json.loads(command("test", "recorded.json", "--json").out)
    assert found["difference"]["expected"] == "hello Ada"
    recorded.write("flow.yaml", FLOW.replace("start.who", "start.who | upper"))
    done = command("test", "other.json", "--definition", "flow.yaml")
    assert (done.code, 'got "ADA"' in done.err) == (1, True)


def test_what_cannot_be_read_exits_with_2(recorded: Shell, command: Command) -> None:
    recorded.write("wrong.json", "{}")
    recorded.write("broken.yaml", "name: [")
    for words, why in (
        (["wrong.json"], "no recording"),
        (["none.json"], "there is no file none.json"),
        (["recorded.json", "--definition", "none.yaml"], "there is no file none.yaml"),
        (["recorded.json", "--definition", "broken.yaml"], "broken.yaml"),
        (["recorded.json", "--definition", "recorded.txt"], "is no definition"),
    ):
        done = command("test", *words)
        assert (done.code, why in done.err) == (2, True), done
    assert command("runs", "record", "-o", "no/such/folder.json").code == 2


def test_secrets_of_this_shell_are_redacted(shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    env = {"DOVETAIL_SECRET_KEY": SECRET}
    assert (
        shell("run", "flow.yaml", "-p", f"who=x{SECRET}", "--handlers", "mine.py", **env).code == 0
    )
    assert shell("runs", "record", "-o", "recorded.json", **env).code == 0
    text = (shell.directory / "recorded.json").read_text()
    assert SECRET not in text
    assert "hello x***" in text
    assert shell("test", "recorded.json").code == 0


def test_a_run_that_goes_on_is_not_recorded(shell: Shell, command: Command) -> None:
    shell.write(
        "waits.yaml",
        "name: waits\nnodes: [{id: w, handler: until, config: {file: go}}]\n",
    )
    going = shell.start("run", "waits.yaml", "--handlers", "mine.py")
    shell.wait_for_start("w")
    done = command("runs", "record", "-o", "x.json")
    assert done.code == 1
    assert "is RUNNING: only a finished run can be recorded" in done.err
    shell.write("go", "")
    assert going.wait(30) == 0


def test_a_run_of_every_kind_of_end_is_replayed(shell: Shell, command: Command) -> None:
    flow = """
name: ends
on_failure: {policy}
nodes:
  - {{id: may, handler: says, allow_failure: true, config: {{text: no luck}}}}
  - {{id: told, handler: output, dependencies: [may], config: {{a: "{{{{ may.error.message }}}}"}}}}
  - {{id: never, handler: greet, condition: "{{{{ false }}}}"}}
  - {{id: broken, handler: says, dependencies: [told], config: {{text: bad}}}}
  - {{id: after, handler: greet, dependencies: [broken]}}
  - {{id: beside, handler: slow, config: {{seconds: 0.2}}}}
  - {{id: later, handler: greet, dependencies: [beside]}}
"""
    for policy in ("fail_fast", "continue"):
        shell.write("ends.yaml", flow.format(policy=policy))
        assert shell("run", "ends.yaml", "--handlers", "mine.py").code == 1
        assert command("runs", "record", "-o", f"{policy}.json").code == 0
    done = command("test", "fail_fast.json", "continue.json")
    assert (done.code, done.err) == (0, "")
