"""The commands of `dovetail` with DOVETAIL_REDIS_URL set: services drive the runs, a shell asks."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..cli.conftest import Outcome, Shell, command, shell
from ..servers.server import free_port
from .service_processes import ServiceProcesses

__all__ = ["command", "shell"]

FLOW = """
name: {name}
params:
  type: object
  properties: {{n: {{type: integer, default: 1}}}}
nodes:
  - {{id: a, handler: input}}
  - {{id: b, handler: {handler}, dependencies: [a], config: {{file: {name}}}}}
"""

pytestmark = pytest.mark.parametrize("service_processes", ["redis"], indirect=True)


class Asking:
    """`dovetail` in a folder of its own, with the settings of the services.

    A short question is asked in this process; what follows a run gets one of its own.
    """

    def __init__(self, shell: Shell, command: Callable[..., Outcome], env: dict[str, str]) -> None:
        self.shell = shell
        self._command = command
        self._env = env

    def __call__(self, *words: str, code: int = 0) -> Outcome:
        return self._checked(self._command(*words), code)

    def dispatch_effects(self, *words: str, code: int = 0) -> Outcome:
        return self._checked(self.shell(*words, **self._env), code)

    def _checked(self, done: Outcome, code: int) -> Outcome:
        assert done.code == code, done
        assert not (self.shell.directory / ".dovetail").exists(), "nothing of it is embedded"
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json").out)

    def write(self, name: str, handler: str) -> str:
        return str(self.shell.write(f"{name}.yaml", FLOW.format(name=name, handler=handler)))


@pytest.fixture
def asking(
    service_processes: ServiceProcesses,
    shell: Shell,
    command: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> Asking:
    for name, value in service_processes.env.items():
        monkeypatch.setenv(name, value)
    return Asking(shell, command, service_processes.env)


def test_validate_knows_the_handlers_that_workers_announced(asking: Asking) -> None:
    good, bad = asking.write("announced", "greet"), asking.write("stranger", "gret")
    asking("validate", good)
    done = asking("validate", good, bad, code=2)
    assert "did you mean 'greet'?" in done.out
    assert "1 of 2 files valid" in done.out
    assert done.err == ""
    assert asking.json("validate", good)[0]["valid"] is True


def test_handlers_lists_the_handlers_that_workers_announced(asking: Asking) -> None:
    found = {one["name"]: one for one in asking.json("handlers")}
    known = {"name", "max_retries", "secrets", "version", "config_schema", "workers"}
    assert set(found["greet"]) == known
    assert found["greet"]["config_schema"] is None
    assert found["sleep"]["config_schema"]["required"] == ["seconds"]
    assert (found["greet"]["version"], found["greet"]["secrets"]) == (1, False)
    assert "headers" in found["call_external_service"]["secrets"]
    assert found["greet"]["workers"]
    lines = asking("handlers").out.splitlines()
    assert lines[0].split() == ["HANDLER", "RETRIES", "VERSION", "WORKERS"]
    (greet,) = [line.split() for line in lines if line.startswith("greet ")]
    assert greet[1:3] == [str(found["greet"]["max_retries"]), "1"]
    assert greet[3] == ", ".join(found["greet"]["workers"])
    assert "    config: seconds*" in lines
    here = {one["name"] for one in asking.json("handlers", "--embedded")}
    assert "greet" not in here, "of this machine"


def test_a_workflow_is_registered_and_triggered_and_its_run_is_shown(
    asking: Asking, service_processes: ServiceProcesses
) -> None:
    path = asking.write("inquired", "needs")
    assert "version 1, registered" in asking("workflows", "register", path).out
    assert "inquired" in [w["name"] for w in asking.json("workflows", "list")["items"]]
    said = asking("trigger", "inquired", "-p", "n=3").out
    short = said.split()[1]
    assert said.splitlines()[1] == f"follow it with:  dovetail runs watch {short}"
    watched = asking.dispatch_effects("runs", "watch", short, code=1)
    assert "there is no inquired" in watched.out
    assert f"dovetail runs retry {short}" in watched.out
    shown = asking.json("runs", "show", short)
    assert (shown["status"], shown["params"]) == ("FAILED", {"n": 3})
    assert asking.json("runs", "list", "--status", "FAILED")["items"][0]["error"]["node"] == "b"
    assert asking.json("runs", "events", short)[-1]["type"] == "run.failed"
    assert asking.json("runs", "verify", short)["items"][0]["divergences"] == []
    assert asking.json("runs", "retry", short, "--dry-run") == {"rerun": ["b"], "reuse": ["a"]}
    service_processes.touch("inquired")
    again = json.loads(asking.dispatch_effects("runs", "retry", short, "--json").out)
    assert (again["status"], again["epoch"]) == ("COMPLETED", 2)
    assert asking.json("runs", "results", short)["outputs"]["b"] == "found"


def test_a_trigger_does_not_wait_and_has_the_shape_of_the_api(
    asking: Asking, service_processes: ServiceProcesses
) -> None:
    asking("workflows", "register", asking.write("waits", "until"))
    made = asking.json("trigger", "waits", "--idempotency-key", "k")
    assert list(made) == ["run_id", "status", "workflow", "version", "created_at"]
    assert (made["status"], made["workflow"], made["version"]) == ("PENDING", "waits", 1)
    again = asking("trigger", "waits", "--idempotency-key", "k", "--json")
    assert json.loads(again.out)["run_id"] == made["run_id"]
    assert "was made with this key before" in again.err
    assert "RUNNING" in asking("runs", "why", made["run_id"]).out
    refused = asking("runs", "resume", made["run_id"], code=1)
    assert "dovetail orchestrator" in refused.err
    cancelled = asking.json("runs", "cancel", made["run_id"])
    assert cancelled["status"] == "CANCELLED"
    service_processes.touch("waits")
    detached = asking("runs", "retry", made["run_id"], "--detach").out
    assert "follow it with:  dovetail runs watch" in detached
    assert "COMPLETED" in asking.dispatch_effects("runs", "watch", made["run_id"]).out


def test_ctrl_c_ends_a_watch_but_not_the_run(
    asking: Asking, service_processes: ServiceProcesses
) -> None:
    asking("workflows", "register", asking.write("looked", "until"))
    run_id = asking.json("trigger", "looked")["run_id"]
    looking = asking.shell.start("runs", "watch", run_id, **service_processes.env)
    assert looking.stdout is not None
    looking.stdout.readline()
    looking.send_signal(signal.SIGINT)
    out, _ = looking.communicate(timeout=20)
    assert looking.returncode == 130
    assert b"the run goes on without this view" in out
    shown = asking("runs", "show", run_id).out
    assert "RUNNING" in shown
    assert "driven by  orchestrators" in shown
    service_processes.touch("looked")


def test_the_services_run_a_batch_and_the_same_command_continues_it(
    asking: Asking, service_processes: ServiceProcesses
) -> None:
    words = ["batch", asking.write("lines", "needs"), "--items", "items.jsonl"]
    asking.shell.write("items.jsonl", "".join(f'{{"n": {n}}}\n' for n in range(20)))
    assert "20 failed" in asking.dispatch_effects(*words, code=1).out
    service_processes.touch("lines")
    again = asking.dispatch_effects(*words, "--retry-failed", "--json")
    assert json.loads(again.out)["counts"] == {"COMPLETED": 20}


def test_ctrl_c_ends_a_batch_command_but_none_of_its_runs(
    asking: Asking, service_processes: ServiceProcesses
) -> None:
    words = ["batch", asking.write("held", "until"), "--items", "items.jsonl"]
    asking.shell.write("items.jsonl", '{"n": 1}\n' * 3)
    running = asking.shell.start(*words, **service_processes.env)
    assert running.stdout is not None
    assert running.stdout.readline().startswith(b"RUNNING batch")
    asking.shell.wait_for(lambda: len(asking.json("runs", "list", *HELD)["items"]) == 3, "3 runs")
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=20)
    assert running.returncode == 130
    assert b"what was made goes on without this view; make the rest with:" in out
    assert len(asking.json("runs", "list", *HELD, "--status", "RUNNING")["items"]) == 3
    service_processes.touch("held")
    assert json.loads(asking.dispatch_effects(*words, "--json").out)["counts"] == {"COMPLETED": 3}


HELD = ("--workflow", "held")


def test_the_read_commands_work_before_the_first_run(
    asking: Asking, redis_url: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("DOVETAIL_REDIS_URL", redis_url)
    assert asking("runs", "list").out == "no run here yet\n"
    assert "dovetail trigger NAME makes one" in asking("runs", "show", code=1).err
    assert asking.json("workflows", "list") == {"items": [], "next_cursor": None}


def test_limits_apply_to_all_workers(asking: Asking) -> None:
    asking("limits", "set", "cli_tag", "2.5", "3")
    limit = {"tag": "cli_tag", "rate_per_second": 2.5, "burst": 3}
    assert limit in asking.json("limits", "list")["items"]


def test_an_unreachable_redis_is_reported_with_the_setting_to_correct(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_REDIS_URL", f"redis://:hunter2@127.0.0.1:{free_port()}/0")
    done = asking("runs", "list", code=1)
    assert done.err.startswith("error: Redis cannot be reached: ")
    assert done.err.endswith("\nstart it, or correct DOVETAIL_REDIS_URL\n")
    assert "hunter2" not in done.err


def test_run_is_embedded_even_if_redis_is_configured(
    service_processes: ServiceProcesses, tmp_path: Path
) -> None:
    shell = Shell(tmp_path)
    flow = FLOW.format(name="here", handler="output")
    shell.write("here.yaml", flow.replace(", config: {file: here}", ""))
    done = shell("run", "here.yaml", "--json", **service_processes.env)
    assert json.loads(done.out)["status"] == "COMPLETED"
    assert (tmp_path / ".dovetail").exists()


def test_runs_are_deleted_and_pruned_directly_on_redis(asking: Asking) -> None:
    flow = asking.write("pruned", "greet")
    asking("workflows", "register", flow)
    runs = [asking.json("trigger", "pruned")["run_id"] for _ in range(3)]
    for run_id in runs:
        asking.dispatch_effects("runs", "watch", run_id)
    assert asking.json("runs", "delete", runs[0][:10]) == {"deleted": runs[:1], "refused": []}
    asking("runs", "delete", runs[0], code=1)
    done = asking.json("runs", "prune", "--older-than", "0", "--workflow", "pruned")
    assert done == {"runs": 2, "dry_run": False}
    assert asking.json("runs", "list", "--workflow", "pruned")["items"] == []


def test_a_run_on_redis_is_recorded_and_replayed(asking: Asking) -> None:
    file = asking.write("recorded", "greet")
    asking("workflows", "register", file)
    asking.dispatch_effects("trigger", "recorded", "-p", "n=3")
    asking("runs", "record", "-o", "recorded.json")
    kept = json.loads((asking.shell.directory / "recorded.json").read_text())
    assert (kept["params"], kept["nodes"]["b"]["output"]) == ({"n": 3}, "hello you")
    asking("test", "recorded.json")
