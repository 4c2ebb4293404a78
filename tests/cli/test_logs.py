"""`dovetail runs logs`, `runs show RUN NODE`, and the end of a run that failed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.core.node_logs import LogChunk, LogLine

from ..log_writer import chunk, write_to_file, write_to_redis
from ..servers.redis_server import RedisServer
from .conftest import SECONDS, Outcome, Shell
from .test_server import Served

Command = Callable[..., Outcome]

BAD = """
name: bad
nodes:
  - {id: start, handler: input}
  - {id: fetch, handler: needs, config: {file: "{{ start.file }}"}, dependencies: [start]}
"""
WAITS = """
name: waits
nodes:
  - {id: a, handler: until, config: {file: go}}
"""
WHEN = "1970-01-01T00:16:40.500000Z"


@pytest.fixture
def failed(shell: Shell) -> str:
    """A run of the file here that has failed."""
    shell.write("bad.yaml", BAD)
    done = shell("run", "bad.yaml", "--handlers", "mine.py", "-p", "file=fixed", "--json")
    assert done.code == 1
    return str(json.loads(done.out)["run_id"])


def write(shell: Shell, *chunks: LogChunk) -> None:
    write_to_file(shell.directory / ".dovetail" / "dovetail.db", chunks)


def lines(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.err
    return outcome.out.splitlines()


# ── runs logs ────────────────────────────────────────────────────────────────────────────


def test_logs_of_the_newest_run_are_printed_as_lines(
    shell: Shell, command: Command, failed: str
) -> None:
    write(shell, chunk(failed, 0, "one", node="fetch"))
    write(shell, chunk(failed, 0, "two", node="fetch", attempt=2, level="ERROR", item=3))
    done = command("runs", "logs")
    assert lines(done) == [
        f"{WHEN} INFO fetch[1] mine: one",
        f"{WHEN} ERROR fetch[2]#3 mine: two",
    ]
    assert done.err == f"the newest run: {failed[:6]} bad\n"
    assert command("runs", "logs", failed[:6]).out == done.out


def test_logs_are_filtered(shell: Shell, command: Command, failed: str) -> None:
    write(
        shell,
        chunk(failed, 0, "one", "Two", node="fetch"),
        chunk(failed, 0, "again", node="fetch", attempt=2, level="WARNING"),
        chunk(failed, 0, "later", node="fetch", epoch=2),
        chunk(failed, 0, "begin", node="start"),
    )

    def found(*options: str) -> list[str]:
        return [one.split(": ", 1)[1] for one in lines(command("runs", "logs", failed, *options))]

    assert found("--node", "start") == ["begin"]
    assert found("--node", "fetch", "--attempt", "2") == ["again"]
    assert found("--epoch", "2") == ["later"]
    assert found("--level", "warning") == ["again"]
    assert found("-q", "two") == found("--search", "TWO") == ["Two"]
    assert found("--tail", "2") == ["later", "begin"]
    assert found("--tail", "0") == []
    assert found("--node", "fetch", "--tail", "100") == ["one", "Two", "again", "later"]


def test_a_log_is_one_json_document_as_the_api_has_it(
    shell: Shell, command: Command, failed: str
) -> None:
    line = LogLine(1000.5, "INFO", "mine", "bell \x07", {"n": 1})
    write(shell, LogChunk(failed, "fetch", 1, 1, 0, [line]))
    done = command("runs", "logs", failed, "--json")
    assert "\x07" not in done.out
    assert json.loads(done.out) == {
        "items": [
            {
                "seq": 1,
                "time": WHEN,
                "node": "fetch",
                "epoch": 1,
                "attempt": 1,
                "item": None,
                "level": "INFO",
                "logger": "mine",
                "message": "bell \x07",
                "fields": {"n": 1},
            }
        ],
        "next_cursor": None,
    }


def test_control_characters_are_escaped_and_further_lines_indented(
    shell: Shell, command: Command, failed: str
) -> None:
    text = f"red \x1b[31m\r\n{WHEN} ERROR fetch[9] mine: forged\n\n\tend\u202e\n"
    write(shell, chunk(failed, 0, text, node="fetch"))
    done = command("runs", "logs", failed)
    assert lines(done) == [
        rf"{WHEN} INFO fetch[1] mine: red \x1b[31m",
        f"    {WHEN} ERROR fetch[9] mine: forged",
        "",
        r"        end\u202e",
    ]


def test_a_log_without_lines_says_so_on_stderr(command: Command, failed: str) -> None:
    done = command("runs", "logs", failed)
    assert (done.code, done.out, done.err) == (0, "", "nothing was logged\n")
    done = command("runs", "logs", failed, "--level", "error")
    assert (done.code, done.out, done.err) == (0, "", "no line fits\n")


def test_what_is_not_there_is_an_error_with_a_hint(command: Command, failed: str) -> None:
    done = command("runs", "logs", failed, "--node", "fetsh")
    assert (done.code, done.out) == (1, "")
    assert "did you mean 'fetch'?" in done.err
    done = command("runs", "logs", failed, "--level", "warn")
    assert done.code == 2
    assert "did you mean WARNING?" in done.err
    assert command("runs", "logs", "0000").code == 1


def test_a_followed_log_ends_with_the_run_that_another_process_drives(shell: Shell) -> None:
    shell.write("waits.yaml", WAITS)
    driving = shell.start("run", "waits.yaml", "--handlers", "mine.py")
    shell.wait_for_start("a")
    (run,) = json.loads(shell("runs", "list", "--json").out)["items"]
    write(shell, chunk(run["run_id"], 0, "before"))
    following = shell.start("runs", "logs", "--follow", "--json")
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["message"] == "before"
    write(shell, chunk(run["run_id"], 1, "during"))
    assert json.loads(following.stdout.readline())["message"] == "during"
    assert following.poll() is None
    write(shell, chunk(run["run_id"], 2, "last"))
    shell.write("go", "")
    rest, _ = following.communicate(timeout=SECONDS)
    assert [json.loads(line)["message"] for line in rest.splitlines()] == ["last"]
    assert following.returncode == 0
    driving.communicate(timeout=SECONDS)


def test_a_followed_log_goes_on_after_its_tail(shell: Shell, failed: str) -> None:
    write(shell, chunk(failed, 0, "one", "two", "three", node="fetch"))

    def found(count: str) -> list[str]:
        done = shell("runs", "logs", failed, "--follow", "--tail", count)
        return [line.split(": ", 1)[1] for line in lines(done)]

    assert found("2") == ["two", "three"]
    assert found("0") == []


def test_ctrl_c_ends_a_followed_log_and_not_the_run(shell: Shell) -> None:
    shell.write("waits.yaml", WAITS)
    driving = shell.start("run", "waits.yaml", "--handlers", "mine.py")
    shell.wait_for_start("a")
    (run,) = json.loads(shell("runs", "list", "--json").out)["items"]
    write(shell, chunk(run["run_id"], 0, "before"))
    following = shell.start("runs", "logs", "--follow")
    assert following.stdout is not None
    following.stdout.readline()
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=SECONDS)
    assert following.returncode == 130
    assert driving.poll() is None
    shell.write("go", "")
    driving.communicate(timeout=SECONDS)
    assert driving.returncode == 0


# ── on a server, and over Redis ──────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=["embedded", "redis"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, str]]:
    folder = tmp_path_factory.mktemp("served")
    if request.param == "embedded":
        server = Served(folder)
        yield server, ""
        server.process.kill()
        server.process.communicate()
        return
    with RedisServer() as redis:
        env = {"DOVETAIL_REDIS_URL": redis.url, "DOVETAIL_HEARTBEAT_INTERVAL": "0.2"}
        server = Served(folder, "--with", "orchestrator,worker", **env)
        yield server, redis.url
        server.process.kill()
        server.process.communicate()


def test_logs_and_nodes_of_a_server_and_of_redis_are_those_of_a_file(
    shell: Shell, served: tuple[Served, str], tmp_path: Path
) -> None:
    server, redis_url = served
    shell.write("bad.yaml", BAD)
    on = ("--server", server.url)
    assert shell("workflows", "register", "bad.yaml", *on).code == 0
    made = shell("trigger", "bad", "-p", "file=fixed", "--json", *on)
    run_id = json.loads(made.out)["run_id"]
    shell("runs", "watch", run_id, *on)
    written = [chunk(run_id, 0, "one", node="fetch"), chunk(run_id, 1, "two", node="fetch")]
    if redis_url:
        write_to_redis(redis_url, written)
    else:
        write_to_file(server.folder / ".dovetail" / "dovetail.db", written)
    expected = [f"{WHEN} INFO fetch[1] mine: one", f"{WHEN} INFO fetch[1] mine: two"]
    places = [(on, {})] + ([((), {"DOVETAIL_REDIS_URL": redis_url})] if redis_url else [])
    for options, env in places:
        assert lines(shell("runs", "logs", run_id, *options, **env)) == expected
        assert lines(shell("runs", "logs", run_id, "--follow", *options, **env)) == expected
        node = shell("runs", "show", run_id, "fetch", *options, **env).out
        assert expected[1] in node
        assert "there is no fixed" in node
        run = shell("runs", "show", run_id, *options, **env).out
        assert expected[1] in run
        assert f"dovetail runs logs {run_id[:6]} --node fetch" in run


# ── a node ───────────────────────────────────────────────────────────────────────────────


def test_a_node_is_shown_with_config_inputs_attempts_traceback_and_the_end_of_its_log(
    shell: Shell, command: Command, failed: str
) -> None:
    write(shell, chunk(failed, 0, *(f"line {n}" for n in range(30)), node="fetch"))
    write(shell, chunk(failed, 0, "of another", node="start"))
    done = command("runs", "show", failed, "fetch")
    found = lines(done)
    assert found[0] == f"FAILED fetch of run {failed[:6]}"
    assert '    "file": "fixed"' in found
    assert any(line.startswith("input start") for line in found)
    (attempt,) = [line for line in found if line.startswith("  1.1  FAILED")]
    assert "PermanentError: there is no fixed" in attempt
    assert any(line.startswith("  at mine.py:") and " in needs" in line for line in found)
    assert "  Traceback (most recent call last):" in found
    assert f"dovetail runs logs {failed[:6]} --node fetch" in done.out
    logged = [line for line in found if "mine: " in line]
    assert logged == [f"  {line}" for line in lines(command("runs", "logs", failed))[10:30]]
    assert "of another" not in done.out


def test_a_node_is_one_json_document_as_the_api_has_it(command: Command, failed: str) -> None:
    detail = json.loads(command("runs", "show", failed, "fetch", "--json").out)
    assert (detail["id"], detail["config"]) == ("fetch", {"file": "fixed"})
    assert [attempt["status"] for attempt in detail["attempts"]] == ["FAILED"]
    done = command("runs", "show", failed, "fetsh")
    assert done.code == 1
    assert "did you mean 'fetch'?" in done.err


def test_a_hostile_traceback_and_worker_cannot_move_the_cursor(
    shell: Shell, command: Command
) -> None:
    shell.write(
        "says.yaml", 'name: says\nnodes: [{id: a, handler: says, config: {text: "\\e[2J"}}]'
    )
    done = shell("run", "says.yaml", "--handlers", "mine.py", "--json")
    run_id = json.loads(done.out)["run_id"]
    write(shell, chunk(run_id, 0, "clear \x1b[2J"))
    for words in (
        ("runs", "show", run_id, "a"),
        ("runs", "show", run_id),
        ("runs", "logs", run_id),
    ):
        shown = command(*words)
        assert "\x1b" not in shown.out
        assert r"clear \x1b[2J" in shown.out


# ── the end of a run that failed ─────────────────────────────────────────────────────────


def test_a_failed_run_is_shown_with_the_end_of_its_log_the_place_and_the_next_commands(
    shell: Shell, command: Command, failed: str
) -> None:
    write(shell, chunk(failed, 0, *(f"line {n}" for n in range(30)), node="fetch"))
    write(shell, chunk(failed, 0, "of another", node="start"))
    found = lines(command("runs", "show", failed))
    at = next(n for n, line in enumerate(found) if line.startswith("  fetch: PermanentError"))
    short = failed[:6]
    assert "(mine.py:" in found[at]
    assert found[at + 1] == "  the end of its log, attempt 1:"
    logged = found[at + 2 : at + 12]
    assert [line.split(": ")[1] for line in logged] == [f"line {n}" for n in range(20, 30)]
    assert found[at + 12] == f"see more:  dovetail runs show {short} fetch"
    assert found[at + 13] == f"           dovetail runs logs {short} --node fetch"
    assert found[at + 14].startswith(f"fix it, then:  dovetail runs retry {short}")
    assert len(found) == at + 15


def test_a_failed_run_without_lines_names_no_log(shell: Shell) -> None:
    shell.write("bad.yaml", BAD)
    done = shell("run", "bad.yaml", "--handlers", "mine.py", "-p", "file=fixed")
    found = done.out.splitlines()
    assert found[-2].startswith("see more:  dovetail runs show ")
    assert found[-2].endswith(" fetch")
    assert found[-1].startswith("fix it, then:  dovetail runs retry ")
    assert "runs logs" not in done.out
