"""Bad input of every kind: one clear line, exit code 2, never a traceback."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from shlex import quote

import pytest

from .conftest import SCRIPT, Outcome, Shell, environment

Command = Callable[..., Outcome]
FLOW = "name: f\nnodes: [{id: a, handler: input}]"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "flow.yaml:1:1: invalid_field a definition is a mapping"),
        (bytes(range(256)), "flow.yaml:3:115: invalid_field the text is not UTF-8"),
        (b"name: caf\xe9\n", "flow.yaml:1:10: invalid_field the text is not UTF-8"),
        (b"name: a\nnodes:\n\t- x\n", "flow.yaml:3:1: invalid_field a tab cannot be used here"),
        (b"a" * 10_000_000, "flow.yaml:1:1: too_large the file has more than 1,048,576 bytes"),
        (b"- just\n- a list\n", "flow.yaml:1:1: invalid_field a definition is a mapping"),
        (b"name: a\nnodes: *x\n", "flow.yaml:2:8: invalid_field"),
        (b"[" * 5000, "flow.yaml:1:33: too_large"),
    ],
    ids=["empty", "binary", "latin", "tabs", "10 MB", "list", "alias", "deep"],
)
def test_a_file_without_a_definition_is_reported_with_its_place(
    command: Command, shell: Shell, content: bytes, said: str
) -> None:
    shell.write("flow.yaml", content)
    for name in ("validate", "graph"):
        done = command(name, "flow.yaml")
        assert done.code == 2
        assert said in done.out + done.err
        assert len(done.out + done.err) < 2000


def test_a_missing_file_is_reported_with_a_similar_name(command: Command, shell: Shell) -> None:
    shell.write("flow.yml", "")
    done = command("graph", "flow.yaml")
    assert done.code == 2
    assert done.err == "error: there is no file flow.yaml; did you mean flow.yml?\n"


def test_a_directory_instead_of_a_file_is_reported(command: Command, shell: Shell) -> None:
    (shell.directory / "flows").mkdir()
    done = command("graph", "flows")
    assert (done.code, done.err) == (2, "error: flows is a directory; name a file in it\n")


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "mine.py/flow.yaml"])
def test_an_impossible_path_is_reported(command: Command, path: str) -> None:
    done = command("graph", path)
    assert done.code == 2
    assert "cannot be read" in done.err


def test_a_tag_that_is_no_text_is_refused(command: Command) -> None:
    done = command("limits", "set", "\udcff", "1")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: tag: contains a lone surrogate, which is no valid text\n"


def test_a_file_that_fails_while_it_is_read_is_reported(command: Command) -> None:
    done = command("graph", "/proc/self/mem")
    assert done.code == 2
    assert done.err == "error: /proc/self/mem cannot be read: Input/output error\n"


def test_an_endless_device_is_read_only_up_to_the_limit(command: Command) -> None:
    began = time.process_time()
    assert command("graph", "/dev/zero").code == 2
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:", "handlers bad.py:1: SyntaxError: invalid syntax"),
        ("x = 1\nraise RuntimeError('boom')", "handlers bad.py:2: RuntimeError: boom"),
        ("import nowhere_to_be_found", "handlers bad.py:1: ModuleNotFoundError"),
        ("x = 1", "handlers bad.py: no handler in it"),
        ("raise SystemExit(0)", "handlers bad.py:1: SystemExit: 0"),
    ],
)
def test_a_handlers_file_that_does_not_load_is_reported_in_one_line(
    command: Command, shell: Shell, text: str, said: str
) -> None:
    shell.write("bad.py", text)
    done = command("handlers", "--handlers", "bad.py")
    assert done.code == 2
    assert done.err.startswith(f"error: {said}")
    assert done.err.count("\n") == 1


def test_an_invalid_setting_is_reported_by_its_name(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_CONCURRENCY", "many")
    done = command("handlers")
    assert done.code == 2
    assert done.err.startswith("error: DOVETAIL_CONCURRENCY = 'many': must be")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["validate", "--jsno", "x"], "No such option: --jsno"),
        (["validate"], "Missing argument 'FILE"),
        (["graph", "x", "--format", "png"], "'png' is not one of 'text', 'mermaid', 'dot', 'svg'"),
    ],
)
def test_a_wrong_command_line_gets_a_hint_with_a_valid_one(
    command: Command, args: list[str], said: str
) -> None:
    done = command(*args)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-p", "topic"], "error: -p topic: write it as name=value"),
        (["-p", "=x"], "error: -p =x: write it as name=value"),
        (["--params", "list.yaml"], "error: list.yaml: params must be an object"),
        (["--params", "nowhere.yaml"], "error: there is no file nowhere.yaml"),
        (["--params", "wrong.json"], "wrong.json:1:2: invalid_field"),
    ],
)
def test_unreadable_params_are_reported(
    command: Command, shell: Shell, args: list[str], said: str
) -> None:
    shell.write("flow.yaml", FLOW)
    shell.write("list.yaml", "[1, 2]")
    shell.write("wrong.json", "{nope}")
    done = command("run", "flow.yaml", *args)  # it stops before it runs anything
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith(said)


def test_json_on_stdin_may_begin_with_a_byte_order_mark(shell: Shell) -> None:
    # Of a character in two halves YAML would say that it is none.
    nodes = b'"nodes": [{"id": "a", "handler": "input"}]'
    text = b'\xef\xbb\xbf{"name": "f", "description": "\\ud83d\\ude00", ' + nodes + b"}"
    done = subprocess.run(
        [SCRIPT, "validate", "-"],
        cwd=shell.directory,
        env=environment(),
        input=text,
        capture_output=True,
        timeout=15,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"<stdin>: valid" in done.stdout


def test_stdin_can_be_read_only_once(command: Command) -> None:
    assert command("run", "-", "--params", "-").code == 2
    assert command("validate", "-", "-").code == 2


def test_an_unexpected_error_is_one_line_with_a_hint_for_debugging(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("a \x1b[31mbug")

    monkeypatch.setattr("dovetail.core.definition.model.definition_schema", broken)
    done = command("schema")
    assert done.code == 1
    assert done.err.splitlines() == [
        r"error: unexpected RuntimeError: a \x1b[31mbug",
        "this is a bug in dovetail; DOVETAIL_DEBUG=1 shows where it happened",
    ]


@pytest.mark.parametrize("empty", ["", "env -i "])
def test_a_full_disk_is_reported_as_no_space_left(shell: Shell, empty: str) -> None:
    shell.write("flow.yaml", FLOW)
    done = sh(shell, f"{empty}{quote(SCRIPT)} graph flow.yaml > /dev/full")
    assert done.returncode == 1
    assert done.stderr == b"error: No space left on device\n"


def test_a_closed_stdout_is_no_failure(shell: Shell) -> None:
    shell.write("flow.yaml", FLOW)
    done = sh(shell, f"{quote(SCRIPT)} run flow.yaml >&-")
    assert (done.returncode, done.stderr) == (0, b"")


def sh(shell: Shell, line: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=shell.directory,
        env=environment(),
        stderr=subprocess.PIPE,
        check=False,
    )
