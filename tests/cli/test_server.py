"""The commands on a server: `--server`, `DOVETAIL_SERVER`, and what wins over what.

One `dovetail serve` with the embedded engine and one on Redis, each for all tests of this file;
each test has workflows of its own. What a command does is tested elsewhere, on the file: here it is
that the same comes out.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from typer.main import get_group

from dovetail.cli.app import app

from ..log_text import without_attempts
from ..servers.redis_server import RedisServer
from ..servers.server import free_port
from .conftest import HANDLERS, SCRIPT, SECONDS, Outcome, Shell, environment

Command = Callable[..., Outcome]
TOKEN = "hunter2-all"


class Served:
    """`dovetail serve` in a folder of its own."""

    def __init__(self, folder: Path, *options: str, **env: str) -> None:
        self.folder = folder
        (folder / "mine.py").write_text(HANDLERS)
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [SCRIPT, "serve", "--port", "0", "--handlers", "mine.py", *options],
                cwd=folder,
                env=environment(**env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self.process.stdout is not None
        read = self.process.stdout.readline
        threading.Thread(target=lambda: lines.put(read()), daemon=True).start()
        said = lines.get(timeout=SECONDS)
        assert said.startswith("dovetail serves http"), (folder / "log").read_text()
        self.url = said.split()[-1]

    def get(self, path: str, **headers: str) -> Any:
        answer = httpx2.get(f"{self.url}/api/v1{path}", headers=headers, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_for(self, run_id: str, status: str) -> None:
        give_up = time.monotonic() + SECONDS
        while self.get(f"/runs/{run_id}?nodes=false")["status"] != status:
            assert time.monotonic() < give_up, f"in vain: {status}"
            time.sleep(0.02)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module", params=["embedded", "redis"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    options: list[str] = []
    env = {"DOVETAIL_DRAIN_SECONDS": "0"}
    with ExitStack() as stack:
        if request.param == "redis":
            env["DOVETAIL_REDIS_URL"] = stack.enter_context(RedisServer()).url
            options = ["--with", "orchestrator,worker"]
        served = Served(tmp_path_factory.mktemp("served"), *options, **env)
        yield served
        served.close()
    assert "Traceback" not in without_attempts((served.folder / "log").read_text())


@pytest.fixture
def on(command: Command, server: Served) -> Command:
    """A command on the server, in this process."""
    return lambda *words: command(*words, "--server", server.url)


@pytest.fixture
def name() -> str:
    return f"w-{uuid4().hex[:8]}"


def write(shell: Shell, name: str, *nodes: dict[str, Any], **more: Any) -> str:
    shell.write(f"{name}.json", json.dumps({"name": name, "nodes": list(nodes), **more}))
    return f"{name}.json"


def node(id_: str, handler: str, *above: str, **config: Any) -> dict[str, Any]:
    return {"id": id_, "handler": handler, "dependencies": list(above), "config": config}


def test_validate_gets_unknown_handlers_from_the_server(
    on: Command, shell: Shell, name: str
) -> None:
    here = "from dovetail import handler\n@handler\ndef only_here(config, ctx): return 1\n"
    shell.write("here.py", here)
    file = write(shell, name, node("a", "greet"), node("b", "only_here"), node("c", "nobodys"))
    done = on("validate", file, "--handlers", "here.py")
    assert (done.code, done.err) == (2, "")
    assert "'nobodys'" in done.out
    assert "1 error" in done.out


def test_handlers_of_a_server_are_listed_with_retries_version_secrets_and_workers(
    on: Command, server: Served
) -> None:
    (worker,) = server.get("/workers")["items"]
    listed = {one["name"]: one for one in json.loads(on("handlers", "--json").out)}
    assert "url" in listed["call_external_service"].pop("config_schema")["properties"]
    assert listed["call_external_service"] == {
        "name": "call_external_service",
        "max_retries": 3,
        "secrets": ["body", "headers", "json", "params"],
        "version": 1,
        "workers": [worker["worker_id"]],
    }
    assert listed["greet"]["secrets"] is False
    shown = on("handlers").out.splitlines()
    assert any(line.split()[:3] == ["call_external_service", "3", "1"] for line in shown)
    assert "    secrets: in body, headers, json, params" in shown
    assert "    config: seconds*" in shown


# ── what is read and kept ────────────────────────────────────────────────────────────────


def test_workflows_are_registered_listed_shown_aliased_and_deleted(
    on: Command, shell: Shell, server: Served, name: str
) -> None:
    file = write(shell, name, node("a", "greet", name="{{ params.who }}"))
    made = on("workflows", "register", file)
    assert (made.code, made.err) == (0, "")
    assert made.out.splitlines() == [
        f"{name} version 1, registered",
        f"run it with:  dovetail trigger {name} --server {server.url}",
    ]
    again = on("workflows", "register", file, "--json")
    assert json.loads(again.out) == {"name": name, "version": 1, "created": False}
    alias = on("workflows", "alias", name, "prod", "1", "--json")
    assert json.loads(alias.out) == {"name": name, "alias": "prod", "version": 1}
    shown = json.loads(on("workflows", "show", name, "--version", "prod", "--json").out)
    assert shown == server.get(f"/workflows/{name}?version=prod")
    assert name in on("workflows", "list", "--limit", "1000").out
    assert on("workflows", "delete", name).out == f"{name} deleted; its runs stay\n"
    gone = on("workflows", "show", name)
    assert (gone.code, gone.out) == (1, "")
    assert name in gone.err
    assert not (shell.directory / ".dovetail").exists()


def test_the_server_validates_a_definition_with_lines_and_columns(
    on: Command, shell: Shell, name: str
) -> None:
    shell.write("typo.yaml", f"name: {name}\nnodes:\n  - id: a\n    handler: greett\n")
    done = on("workflows", "register", "typo.yaml")
    assert done.code == 2
    first, line, caret, *_ = done.err.splitlines()
    assert first.startswith("typo.yaml:4:14: unknown_handler")
    assert "did you mean 'greet'?" in first, "a handler that only the server has"
    assert (line.strip(), caret.strip()) == ("handler: greett", "^")
    file = write(shell, name, node("a", "greet"))
    assert on("workflows", "register", file).code == 0, "mine.py is loaded there, and not here"


def test_a_run_is_triggered_found_by_its_prefix_and_shown(
    on: Command, shell: Shell, server: Served, name: str
) -> None:
    schema = {"type": "object", "properties": {"times": {"type": "integer"}}}
    on("workflows", "register", write(shell, name, node("a", "input"), params=schema))
    made = json.loads(on("trigger", name, "-p", "times=3", "--json").out)
    assert list(made) == ["run_id", "status", "workflow", "version", "created_at"]
    run_id = made["run_id"]
    server.wait_for(run_id, "COMPLETED")
    assert json.loads(on("runs", "show", run_id[:8], "--json").out) == server.get(f"/runs/{run_id}")
    text = on("runs", "show", run_id[:8]).out
    assert f"COMPLETED {run_id[:6]} {name} version 1" in text
    assert '"times": 3' in text
    results = json.loads(on("runs", "results", run_id[:8], "--json").out)
    assert results == server.get(f"/runs/{run_id}/results")
    listed = json.loads(on("runs", "list", "--workflow", name, "--json").out)
    assert listed == server.get(f"/runs?workflow={name}")
    events = json.loads(on("runs", "events", run_id, "--json").out)
    assert events == server.get(f"/runs/{run_id}/events", accept="application/json")
    verified = json.loads(on("runs", "verify", run_id, "--json").out)
    assert verified == {"items": [{"run_id": run_id, "divergences": []}]}
    why = json.loads(on("runs", "why", run_id, "--json").out)
    assert why == server.get(f"/runs/{run_id}/explain")


def test_invalid_params_unknown_runs_and_resume_fail_as_on_the_file(
    on: Command, shell: Shell, server: Served, name: str
) -> None:
    schema = {"type": "object", "properties": {"times": {"type": "integer"}}}
    on("workflows", "register", write(shell, name, node("a", "input"), params=schema))
    wrong = on("trigger", name, "-p", "times=often")
    assert wrong.code == 2
    assert wrong.err.startswith("error: params.times: ")
    unknown = on("runs", "show", "0" * 32)
    assert (unknown.code, unknown.out) == (1, "")
    assert on("runs", "show", "ab").code == 1
    resumed = on("runs", "resume")
    assert resumed.code == 1
    assert f"{server.url} goes on with its runs itself" in resumed.err


def test_rate_limits_are_set_and_listed(on: Command, server: Served) -> None:
    done = on("limits", "set", "gemini", "5", "2", "--json")
    assert json.loads(done.out) == {"tag": "gemini", "rate_per_second": 5.0, "burst": 2}
    assert json.loads(on("limits", "list", "--json").out) == server.get("/rate-limits")
    assert on("limits", "set", "gemini", "0").code == 2


# ── what goes on ─────────────────────────────────────────────────────────────────────────


def triggered(on: Command, shell: Shell, name: str, *nodes: dict[str, Any]) -> str:
    assert on("workflows", "register", write(shell, name, *nodes)).code == 0
    return str(json.loads(on("trigger", name, "--json").out)["run_id"])


def lines_of(process: subprocess.Popen[bytes], until: str) -> list[str]:
    assert process.stdout is not None
    reported: list[str] = []
    for line in process.stdout:
        reported.append(line.decode())
        if until in reported[-1]:
            break
    return reported


def test_a_run_is_watched_live_to_its_end(
    on: Command, shell: Shell, server: Served, name: str
) -> None:
    run_id = triggered(on, shell, name, node("a", "input"), node("b", "until", "a", file=name))
    watching = shell.start("runs", "watch", run_id[:8], DOVETAIL_SERVER=server.url)
    assert f"RUNNING {run_id[:6]} {name}, 2 nodes" in lines_of(watching, "✓ a")[0]
    following = shell.start("runs", "events", run_id, "--follow", "--json", "--server", server.url)
    lines_of(following, "node.started")
    shown = on("runs", "show", run_id)
    assert f"the server at {server.url}" in shown.out
    (server.folder / name).touch()
    reported = lines_of(watching, "COMPLETED")
    assert reported[-1].startswith(f"COMPLETED {run_id[:6]} in ")
    assert watching.wait(SECONDS) == 0
    last = json.loads(lines_of(following, "run.completed")[-1])
    assert last == server.get(f"/runs/{run_id}/events", accept="application/json")[-1]
    assert following.wait(SECONDS) == 0


def test_ctrl_c_ends_the_view_but_not_the_run(
    on: Command, shell: Shell, server: Served, name: str
) -> None:
    run_id = triggered(on, shell, name, node("a", "until", file=name))
    watching = shell.start("runs", "watch", run_id, "--server", server.url)
    lines_of(watching, "RUNNING")
    watching.send_signal(signal.SIGINT)
    out, _ = watching.communicate(timeout=SECONDS)
    assert watching.returncode == 130
    again = f"dovetail runs watch {run_id[:6]} --server {server.url}"
    assert f"the run goes on without this view: {again}" in out.decode()
    assert server.get(f"/runs/{run_id}")["status"] == "RUNNING"
    cancelled = on("runs", "cancel", run_id)
    assert cancelled.out.splitlines()[0] == f"CANCELLED {run_id[:6]} {name}"
    assert json.loads(on("runs", "show", run_id, "--json").out)["status"] == "CANCELLED"


def test_a_retry_waits_for_the_run_unless_detached(
    on: Command, shell: Shell, server: Served, name: str
) -> None:
    run_id = triggered(on, shell, name, node("a", "input"), node("b", "needs", "a", file=name))
    server.wait_for(run_id, "FAILED")
    plan = json.loads(on("runs", "retry", run_id, "--dry-run", "--json").out)
    assert plan == {"rerun": ["b"], "reuse": ["a"]}
    failed = shell("runs", "retry", run_id, "--server", server.url)
    assert failed.code == 1
    assert "FAILED" in failed.out
    assert f"dovetail runs retry {run_id[:6]} --server {server.url}" in failed.out
    assert "✓ a" not in failed.out, "what completed before is no news"
    (server.folder / name).touch()
    detached = on("runs", "retry", run_id, "--detach")
    assert detached.code == 0
    assert f"dovetail runs watch {run_id[:6]} --server {server.url}" in detached.out
    server.wait_for(run_id, "COMPLETED")
    rerun = shell("runs", "retry", run_id, "--from", "b", "--json", DOVETAIL_SERVER=server.url)
    assert rerun.code == 0
    assert json.loads(rerun.out) == server.get(f"/runs/{run_id}")
    assert on("runs", "retry", run_id, "--detach").code == 1, "it completed"


def test_a_fork_on_a_server_is_followed_unless_detached(
    on: Command, shell: Shell, server: Served, name: str
) -> None:
    run_id = triggered(on, shell, name, node("a", "input"), node("b", "needs", "a", file=name))
    server.wait_for(run_id, "FAILED")
    file = write(shell, name, node("a", "input"), node("b", "output", "a"))
    words = ("runs", "fork", run_id, "--definition", file)
    plan = json.loads(on(*words, "--dry-run", "--json").out)
    assert plan == {"rerun": ["b"], "reuse": ["a"]}
    done = shell(*words, "--json", DOVETAIL_SERVER=server.url)
    assert done.code == 0, done.err
    run = json.loads(done.out)
    assert run == server.get(f"/runs/{run['run_id']}")
    assert run["forked_from"] == run_id
    detached = on(*words, "--detach")
    assert detached.code == 0
    assert f"of {name} is accepted" in detached.out
    assert "dovetail runs watch" in detached.out


def test_a_run_of_a_server_is_recorded_and_replayed(
    on: Command, command: Command, shell: Shell, server: Served, name: str
) -> None:
    file = write(shell, name, node("a", "greet", name="{{ params.who }}"), node("z", "output", "a"))
    assert on("workflows", "register", file).code == 0
    run = json.loads(on("trigger", name, "-p", "who=Ada", "--json").out)
    done = on("runs", "record", run["run_id"], "-o", "recorded.json")
    assert done.code == 0, done
    assert json.loads((shell.directory / "recorded.json").read_text())["version"] == 1
    assert command("test", "recorded.json").code == 0


def test_a_batch_is_sent_followed_and_retried(shell: Shell, server: Served, name: str) -> None:
    file = write(shell, name, node("a", "needs", file=f"{name}-{{{{ params.n }}}}"))
    (server.folder / f"{name}-1").touch()
    shell.write("items.jsonl", '{"n": 1}\n\n{"n": 2}\n')
    words = ("batch", file, "--items", "items.jsonl", f"--server={server.url}")
    first = shell(*words, "--token=hunter9")
    assert first.code == 1, first.err
    begin, ending, failure, hint = first.out.splitlines()
    assert begin.endswith(f"{name}, 2 runs")
    assert "1 completed, 1 failed" in ending
    assert "items.jsonl:3" in failure
    assert "a: PermanentError: there is no" in failure
    assert "--retry-failed" in hint
    assert "hunter9" not in first.out
    (server.folder / f"{name}-2").touch()
    again = shell(*words, "--retry-failed", "--json")
    assert again.code == 0, again.err
    batch = json.loads(again.out)
    assert (batch["count"], batch["counts"]) == (2, {"COMPLETED": 2})
    assert [(run.pop("result"), run.pop("error")) for run in batch["runs"]] == [
        ({"a": "found"}, None)
    ] * 2
    assert batch == server.get(f"/batches/{batch['batch_id']}?limit=1000")
    assert len(server.get(f"/runs?workflow={name}")["items"]) == 2
    shell.write("many.jsonl", (json.dumps({"n": 1, "text": "x" * 600_000}) + "\n") * 2)
    large = shell("batch", file, "--items", "many.jsonl", "--server", server.url)
    assert large.code == 2
    assert "too much for one batch of a server" in large.err


# ── where ────────────────────────────────────────────────────────────────────────────────


def test_a_flag_overrides_the_environment_and_a_server_overrides_redis(
    command: Command, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("DOVETAIL_REDIS_URL", f"redis://{nowhere}")
    monkeypatch.setenv("DOVETAIL_SERVER", server.url)
    assert command("limits", "list").code == 0
    monkeypatch.setenv("DOVETAIL_SERVER", f"http://{nowhere}")
    assert command("limits", "list", "--server", server.url).code == 0
    monkeypatch.delenv("DOVETAIL_REDIS_URL")
    away = command("limits", "list")
    assert (away.code, away.out) == (1, "")
    assert f"the server at http://{nowhere} cannot be reached" in away.err
    monkeypatch.delenv("DOVETAIL_SERVER")
    assert command("limits", "list").code == 0, "and the flag of another command is forgotten"


def test_a_malformed_server_address_is_invalid_input(command: Command) -> None:
    for url in ("host:8700", "ftp://host", "http://", "http://me:hunter2@host", "http://h/?a=b"):
        done = command("runs", "list", "--server", url)
        assert (done.code, done.out) == (2, ""), url
        assert "hunter2" not in done.err
        assert "http://host:8700" in done.err or "token" in done.err or "http://" in done.err


def test_run_executes_locally_even_if_a_server_is_configured(
    shell: Shell, server: Served, name: str
) -> None:
    file = write(shell, name, node("a", "input"))
    assert shell("run", file, DOVETAIL_SERVER=server.url).code == 0
    assert server.get(f"/runs?workflow={name}")["items"] == []
    assert (shell.directory / ".dovetail" / "dovetail.db").exists()


def test_a_missing_token_is_reported_and_doctor_reports_it_too(
    command: Command, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path_factory.mktemp("tokens"), DOVETAIL_TOKENS=TOKEN)
    try:
        denied = command("runs", "list", "--server", served.url)
        assert (denied.code, denied.out) == (1, "")
        assert "give it with token=…, --token or DOVETAIL_TOKEN" in denied.err
        ill = command("doctor", "--server", served.url, "--json")
        assert ill.code == 1
        assert {one["check"]: one["ok"] for one in json.loads(ill.out)} == {
            "settings": True,
            "server": False,
        }
        assert command("runs", "list", "--server", served.url, "--token", TOKEN).code == 0
        monkeypatch.setenv("DOVETAIL_TOKEN", TOKEN)
        assert command("runs", "list", "--server", served.url).code == 0
        well = command("doctor", "--server", served.url)
        assert well.code == 0, well.out
        assert f"{served.url} answers" in well.out
    finally:
        served.close()


def test_doctor_reports_an_unreachable_server(command: Command) -> None:
    done = command("doctor", "--server", f"http://127.0.0.1:{free_port()}")
    assert done.code == 1
    assert "start it there:  dovetail serve" in done.out


@pytest.mark.parametrize("group", ["runs", "workflows", "limits", "dead-letters", None])
def test_every_runs_command_accepts_a_server(group: str | None) -> None:
    known: Any = get_group(app).commands
    commands = known if group is None else known[group].commands
    on_target = {
        name
        for name in commands
        if {"server", "token"} <= {option.name for option in commands[name].params}
    }
    if group is None:
        found = {
            "trigger",
            "batch",
            "validate",
            "doctor",
            "handlers",
            "schema",
            "open",
            "mcp",
            "queues",
        }
        assert on_target == found
    else:
        assert on_target == set(commands)
