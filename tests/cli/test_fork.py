"""`dovetail runs fork`: a run whose definition was wrong goes on as a new one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .conftest import HANDLERS, Shell

FLOW = """
name: flow
params: {type: object, properties: {n: {type: integer, default: 1}}}
nodes:
  - {id: fetch, handler: counted, config: {text: hello}}
  - {id: end, handler: output, dependencies: [fetch], config: {text: "{{ fetch.TEXT }}"}}
"""
USING = ("--handlers", "own.py")


@pytest.fixture
def failed(shell: Shell) -> str:
    """The id of a run whose last node is wrong."""
    shell.write("own.py", HANDLERS)
    shell.write("flow.yaml", FLOW.replace("TEXT", "txt"))
    done = shell("run", "flow.yaml", *USING, "--json")
    assert done.code == 1
    shell.write("flow.yaml", FLOW.replace("TEXT", "text"))
    return str(json.loads(done.out)["run_id"])


def executions(folder: Path) -> list[str]:
    return (folder / "executions").read_text().split("\n")[:-1]


def test_a_fork_runs_only_what_was_mended(shell: Shell, failed: str) -> None:
    plan = shell("runs", "fork", failed, "--definition", "flow.yaml", "--dry-run", *USING)
    assert plan.out.splitlines() == [
        f"a fork of {failed[:6]} would rerun 1: end",
        f"a fork of {failed[:6]} would reuse 1: fetch",
    ]
    done = shell("runs", "fork", "--definition", "flow.yaml", *USING)
    assert done.code == 0, done.err
    assert f"the newest FAILED or CANCELLED run: {failed[:6]} flow" in done.err
    assert re.search(r"✓ fetch +reused\n✓ end ", done.out)
    assert executions(shell.directory) == ["fetch 1.1"], "once, in the old run"
    shown = shell("runs", "show")
    assert f"forked from  {failed}" in shown.out
    assert re.search(r"✓ fetch +reused\n", shown.out)
    assert shell("runs", "verify").code == 0
    old = json.loads(shell("runs", "show", failed, "--json").out)
    assert (old["status"], old["forked_from"]) == ("FAILED", None)


def test_a_fork_with_other_params_begins_where_from_says(shell: Shell, failed: str) -> None:
    words = ("runs", "fork", failed, "--definition", "flow.yaml", "-p", "n=2", *USING, "--json")
    plan = json.loads(shell(*words, "--dry-run").out)
    assert plan == {"rerun": ["fetch", "end"], "reuse": []}
    done = shell(*words, "--from", "end")
    run = json.loads(done.out)
    assert (done.code, run["params"], run["forked_from"]) == (0, {"n": 2}, failed)
    assert [node["attempt"] for node in run["nodes"]] == [0, 1]


def test_params_without_a_known_schema_have_the_types_of_the_old_ones(
    shell: Shell, failed: str
) -> None:
    done = shell("runs", "fork", failed, "-p", "n=3", "--from", "end", *USING, "--json")
    assert json.loads(done.out)["params"] == {"n": 3}


def test_a_fork_of_a_registered_workflow_takes_another_version(shell: Shell) -> None:
    shell.write("own.py", HANDLERS)
    for name, text in (("wrong.yaml", "txt"), ("right.yaml", "text")):
        shell.write(name, FLOW.replace("TEXT", text))
    shell("workflows", "register", "wrong.yaml", *USING)
    assert shell("trigger", "flow", *USING).code == 1
    shell("workflows", "register", "right.yaml", *USING)
    done = shell("runs", "fork", "--version", "2", "-p", "n=1", *USING, "--json")
    run = json.loads(done.out)
    assert (done.code, run["version"], run["nodes"][0]["attempt"]) == (0, 2, 0)


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["--from", "edn"], 1, "did you mean 'end'?"),
        (["--definition", "flow.yaml", "--version", "1"], 2, "leave one of them out"),
        (["--definition", "flow.yaml", "-p", "n=x"], 2, "params.n: "),
        (["--definition", "bad.yaml"], 2, "unknown_handler"),
        (["--detach"], 2, "--detach needs a server"),
        (["--version", "7"], 1, "no workflow 'flow'"),
    ],
)
def test_a_fork_that_cannot_be_made_says_why(
    shell: Shell, failed: str, words: list[str], code: int, error: str
) -> None:
    shell.write("bad.yaml", FLOW.replace("counted", "ghost"))
    done = shell("runs", "fork", failed, *words, *USING)
    assert done.code == code
    assert error in done.out + done.err
    assert json.loads(shell("runs", "list", "--json").out)["items"][1:] == []


def test_a_fork_without_the_handlers_of_the_old_run_is_refused(shell: Shell, failed: str) -> None:
    done = shell("runs", "fork", failed)
    assert done.code == 1
    assert "needs handlers that are not known here: 'counted'" in done.err
