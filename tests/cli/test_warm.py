"""That a command called in a warm process is the one that the installed script would be."""

from __future__ import annotations

import re

import pytest

from .conftest import SECONDS, Shell, cold, environment, warm

FLOW = "name: f\nnodes:\n  - {id: a, handler: input, config: {text: 'ö → {{ params.x }}'}}\n"
CALLS = {
    "a definition that is valid": (["validate", "-"], FLOW),
    "one that is not": (["validate", "-"], FLOW.replace("input", "inputt")),
    "a run": (["run", "-", "-p", "x=1", "--json"], FLOW),
    "no such command": (["runn"], ""),
    "help": (["run", "--help"], ""),
    "a file that is not there": (["graph", "nowhere.yaml"], ""),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_warm_process_gives_the_output_and_exit_code_of_the_script(
    shell: Shell, case: str
) -> None:
    words, given = CALLS[case]
    env = environment(COLUMNS="90")
    code, *reported = cold(words, shell.directory, env, given.encode(), SECONDS)
    warm_code, *warm_texts = warm()(words, shell.directory, env, given.encode(), SECONDS)
    assert warm_code == code
    assert [same(text) for text in warm_texts] == [same(text) for text in reported]


def same(text: bytes) -> str:
    """Without what differs from run to run: ids and times."""
    return re.sub(r"[0-9a-f]{32}|[0-9]+", "#", text.decode())


def test_a_command_that_outlasts_its_timeout_is_killed(shell: Shell) -> None:
    shell.write("f.yaml", "name: f\nnodes: [{id: a, handler: until, config: {file: go}}]")
    words = ["run", "f.yaml", "--handlers", "mine.py"]
    with pytest.raises(TimeoutError):
        warm()(words, shell.directory, environment(), b"", 3.0)
    shell.wait_for_start("a")
    shell.write("go", "")
    done = shell("runs", "resume", "--handlers", "mine.py")
    assert done.out.startswith("took over 1 run"), done.err
