"""`dovetail workflows`, `limits` and `trigger`: what is kept under a name, and runs of it."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable

import pytest
import yaml

from .conftest import Outcome, Shell

Command = Callable[..., Outcome]

FLOW = """
name: flow
params:
  type: object
  properties: {depth: {type: integer, default: 2}, "yes": {type: string, default: "no"}}
nodes:
  - {id: start, handler: input}
"""


def test_the_same_content_keeps_its_version_and_other_content_gets_the_next(
    command: Command, shell: Shell
) -> None:
    shell.write("flow.yaml", FLOW)
    done = command("workflows", "register", "flow.yaml")
    assert done.code == 0
    assert done.out.splitlines() == [
        "flow version 1, registered",
        "run it with:  dovetail trigger flow",
    ]
    assert command("workflows", "register", "flow.yaml").out == "flow version 1, unchanged\n"
    shell.write("flow.yaml", FLOW.replace("default: 2", "default: 3"))
    again = json.loads(command("workflows", "register", "flow.yaml", "--json").out)
    assert again == {"name": "flow", "version": 2, "created": True}


def test_an_invalid_definition_is_reported_as_validate_does(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes:\n  - {id: a, handler: inptu}\n")
    done = command("workflows", "register", "flow.yaml")
    assert done.code == 2
    assert "flow.yaml:3:22: unknown_handler there is no handler 'inptu'; did you" in done.err
    assert not (shell.directory / ".dovetail").exists()


def test_workflows_are_listed_shown_aliased_and_deleted(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    command("workflows", "register", "flow.yaml")
    aliased = command("workflows", "alias", "flow", "prod", "1")
    assert (aliased.code, aliased.out) == (0, "flow prod = 1\n")
    head, row = command("workflows", "list").out.splitlines()
    assert head.split() == ["NAME", "LATEST", "UPDATED", "ALIASES"]
    assert row.startswith("flow  1       ")
    assert "prod = 1" in row
    (item,) = json.loads(command("workflows", "list", "--json").out)["items"]
    assert set(item) == {"name", "latest_version", "aliases", "created_at", "updated_at"}
    shown = command("workflows", "show", "flow", "--version", "prod")
    assert shown.out.startswith("# flow version 1, registered ")
    assert yaml.safe_load(shown.out)["params"]["properties"]["depth"]["default"] == 2
    found = json.loads(command("workflows", "show", "flow", "--json").out)
    assert set(found) == {"name", "version", "definition", "aliases", "created_at"}
    assert command("workflows", "delete", "flow").out == "flow deleted; its runs stay\n"
    gone = command("workflows", "show", "flow")
    assert gone.code == 1
    assert "flow" in gone.err
    assert command("workflows", "list").out.startswith("no workflow is registered here")


def test_an_alias_takes_weights_and_the_history_says_so(command: Command, shell: Shell) -> None:
    for text in (FLOW, FLOW.replace("default: 2", "default: 3")):
        shell.write("flow.yaml", text)
        command("workflows", "register", "flow.yaml")
    aliased = command("workflows", "alias", "flow", "prod", "1=90", "2=10")
    assert (aliased.code, aliased.out) == (0, "flow prod = 1=90 2=10\n")
    assert "prod = 1=90 2=10" in command("workflows", "list").out
    (item,) = json.loads(command("workflows", "list", "--json").out)["items"]
    assert item["aliases"] == {"latest": 2, "prod": {"1": 90, "2": 10}}
    run = json.loads(shell("trigger", "flow", "--version", "prod", "--json").out)
    assert run["version"] in (1, 2)
    assert command("workflows", "unalias", "flow", "prod").out == "flow prod deleted\n"
    deleted = command("workflows", "delete", "flow", "--version", "1")
    assert (deleted.code, deleted.out) == (0, "flow version 1 deleted; its runs stay\n")
    command("workflows", "delete", "flow")
    history = command("workflows", "history", "flow")
    head, *rows = history.out.splitlines()
    assert head.split() == ["TIME", "ACTOR", "ACTION", "DETAILS"]
    assert [row.split()[2] for row in rows] == [*["delete"] * 3, "alias", *["register"] * 2]
    assert {row.split()[1] for row in rows} == {getpass.getuser()}
    page = json.loads(command("workflows", "history", "flow", "--limit", "1", "--json").out)
    assert page["items"][0]["details"] == {"versions": [2], "aliases": {"latest": 2}}
    assert page["next_cursor"] in command("workflows", "history", "flow", "--limit", "1").out


@pytest.mark.parametrize(
    "words", [("1=0",), ("1=-1",), ("1=nan",), ("1=x",), ("1", "2"), ("1=1", "1=2"), ("x=1",), ()]
)
def test_wrong_weights_are_invalid(command: Command, shell: Shell, words: tuple[str, ...]) -> None:
    shell.write("flow.yaml", FLOW)
    command("workflows", "register", "flow.yaml")
    done = command("workflows", "alias", "flow", "prod", "--", *words)
    assert done.code == 2
    assert "Traceback" not in done.err


def test_the_history_of_a_limit_is_listed(command: Command) -> None:
    command("limits", "set", "api", "5")
    command("limits", "set", "api", "7", "2")
    _, newest, oldest = command("limits", "history", "api").out.splitlines()
    assert '"rate_per_second": 7.0, "burst": 2' in newest
    assert '"from": null' in oldest


def test_the_output_of_show_registers_as_the_same_version(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    command("workflows", "register", "flow.yaml")
    shell.write("copy.yaml", command("workflows", "show", "flow").out)
    assert command("workflows", "register", "copy.yaml").out == "flow version 1, unchanged\n"


@pytest.mark.parametrize(
    "args",
    [
        ("show", "nobody"),
        ("delete", "nobody"),
        ("alias", "nobody", "prod", "1"),
        ("alias", "flow", "prod", "7"),
        ("alias", "flow", "latest", "1"),
        ("alias", "flow", "prod", "1=90", "7=10"),
        ("alias", "flow", "latest", "1=1"),
        ("unalias", "flow", "prod"),
        ("delete", "flow", "--version", "1"),
        ("delete", "flow", "--version", "7"),
        ("history", "nobody"),
        ("show", "flow", "--version", "7"),
        ("show", "flow", "--version", "nobody"),
    ],
)
def test_an_unknown_workflow_version_or_alias_is_reported_in_one_line(
    command: Command, shell: Shell, args: tuple[str, ...]
) -> None:
    shell.write("flow.yaml", FLOW)
    command("workflows", "register", "flow.yaml")
    done = command("workflows", *args)
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_a_registered_workflow_is_triggered_with_params_typed_by_its_schema(
    shell: Shell, command: Command
) -> None:
    shell.write("flow.yaml", FLOW)
    command("workflows", "register", "flow.yaml")
    shell.write("flow.yaml", FLOW.replace("default: 2", "default: 3"))
    command("workflows", "register", "flow.yaml")
    command("workflows", "alias", "flow", "old", "1")
    done = shell("trigger", "flow", "-p", "depth=5", "--json")
    assert done.code == 0, done.err
    run = json.loads(done.out)
    assert (run["version"], run["params"]["depth"]) == (2, 5)
    for version in ("old", "1"):
        old = json.loads(shell("trigger", "flow", "--version", version, "--json").out)
        assert (old["version"], old["params"]["depth"]) == (1, 2)
    human = shell("trigger", "flow")
    assert human.out.splitlines()[-1].startswith("COMPLETED ")


def test_an_impossible_trigger_is_reported(shell: Shell, command: Command) -> None:
    unknown = shell("trigger", "nobody")
    assert unknown.code == 1
    assert "nobody" in unknown.err
    shell.write("flow.yaml", FLOW)
    assert "`dovetail run flow.yaml` runs it" in shell("trigger", "flow.yaml").err
    command("workflows", "register", "flow.yaml")
    wrong = shell("trigger", "flow", "-p", "depth=deep")
    assert wrong.code == 2
    assert "error: params.depth: must be a whole number, not 'deep'" in wrong.err


def test_the_same_idempotency_key_gives_the_same_run(shell: Shell, command: Command) -> None:
    shell.write("flow.yaml", FLOW)
    command("workflows", "register", "flow.yaml")
    first = shell("trigger", "flow", "--idempotency-key", "k", "--json")
    again = shell("trigger", "flow", "--idempotency-key", "k", "--json")
    assert json.loads(first.out)["run_id"] == json.loads(again.out)["run_id"]
    assert "was made with this key before" in again.err
    other = shell("trigger", "flow", "--idempotency-key", "k", "-p", "depth=9")
    assert other.code == 1
    assert other.err.startswith("error: ")


def test_a_key_gives_the_same_run_after_the_workflow_was_deleted(
    shell: Shell, command: Command
) -> None:
    shell.write("flow.yaml", FLOW)
    command("workflows", "register", "flow.yaml")
    first = shell("trigger", "flow", "--idempotency-key", "k", "--json")
    command("workflows", "delete", "flow")
    again = shell("trigger", "flow", "--idempotency-key", "k", "--json")
    assert (again.code, json.loads(again.out)) == (0, json.loads(first.out))
    other = shell("trigger", "flow", "--idempotency-key", "other")
    assert (other.code, "no workflow 'flow'" in other.err) == (1, True)


def test_the_difference_of_two_versions_is_printed(shell: Shell, command: Command) -> None:
    old = "name: flow\nnodes: [{id: a, handler: output}, {id: b, handler: output}]"
    new = (
        "name: flow\non_failure: continue\n"
        "nodes: [{id: a, handler: input}, {id: c, handler: output}]"
    )
    for text in (old, new):
        shell.write("flow.yaml", text)
        command("workflows", "register", "flow.yaml")
    assert command("workflows", "diff", "flow", "1", "2").out.splitlines() == [
        'on_failure: "fail_fast" → "continue"',
        "- b",
        "+ c",
        "~ a",
        '    handler: "output" → "input"',
    ]
    assert command("workflows", "diff", "flow", "2").out == "no difference\n"
    assert json.loads(command("workflows", "diff", "flow", "2", "1", "--json").out)["added"] == [
        "b"
    ]
    assert command("workflows", "diff", "flow", "1", "7").code == 1


def test_a_workflow_with_an_unfinished_run_is_not_deleted(shell: Shell, command: Command) -> None:
    shell.write("flow.yaml", "name: flow\nnodes: [{id: a, handler: until, config: {file: go}}]")
    command("workflows", "register", "flow.yaml", "--handlers", "mine.py")
    process = shell.start("trigger", "flow", "--handlers", "mine.py")
    shell.wait_for_start("a")
    refused = command("workflows", "delete", "flow")
    assert refused.code == 1
    shell.write("go", "")
    process.communicate(timeout=20)
    assert command("workflows", "delete", "flow", "--json").code == 0


def test_limits_are_set_and_listed(command: Command) -> None:
    assert command("limits", "list").out.startswith("none set: ")
    assert command("limits", "set", "api", "2.5").out == "api: 2.5 per second, burst 1\n"
    wrong = command("limits", "set", "api", "0")
    assert wrong.code == 2
    assert wrong.err == "error: rate_per_second: must be from 1e-09 to 1e+09, not 0\n"
    set_ = json.loads(command("limits", "set", "search", "10", "3", "--json").out)
    assert set_ == {"tag": "search", "rate_per_second": 10.0, "burst": 3}
    assert command("limits", "list").out.splitlines() == [
        "TAG     PER SECOND  BURST",
        "api     2.5         1",
        "search  10          3",
    ]
    listed = json.loads(command("limits", "list", "--json").out)
    assert [limit["tag"] for limit in listed["items"]] == ["api", "search"]


@pytest.mark.parametrize("numbers", [("0", "1"), ("1", "0"), ("nan", "1"), ("inf", "1"), ("x",)])
def test_an_invalid_limit_is_refused(command: Command, numbers: tuple[str, ...]) -> None:
    done = command("limits", "set", "--", "api", *numbers)
    assert done.code in (1, 2)
    assert command("limits", "list").out.startswith("none set: ")


def test_a_run_obeys_a_limit_that_the_cli_set(shell: Shell, command: Command) -> None:
    shell.write(
        "flow.yaml",
        "name: f\nnodes:\n"
        + "\n".join(f"  - {{id: n{n}, handler: counted, resource_tag: slow}}" for n in range(3)),
    )
    command("limits", "set", "slow", "2")
    done = shell("run", "flow.yaml", "--handlers", "mine.py", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["duration"] > 0.8


@pytest.mark.parametrize(
    "words",
    [
        ("workflows", "show", "x"),
        ("trigger", "x"),
        ("runs", "show", "abcdef12"),
        ("batches", "show", "abcdef12"),
    ],
)
def test_what_is_not_in_a_file_that_is_not_there_is_reported_with_the_name_of_that_file(
    command: Command, words: tuple[str, ...]
) -> None:
    done = command(*words)
    assert done.code == 1
    assert done.err.endswith(" in .dovetail/dovetail.db\n")
