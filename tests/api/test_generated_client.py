"""Clients that generators make of the server's OpenAPI document do what a client does.

`openapi-python-client` and OpenAPI Generator have an environment of their own, which `./dev test`
makes: the first wants another typer than Dovetail, the second brings its own Java.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from .conftest import Api, Server, flow, node

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = Path(os.environ.get("TEST_CLIENT_GENERATOR", ROOT / ".cache" / "client"))

USE = """
import json, sys, time
from dovetail_client import Client
from dovetail_client.api.runs import events, get_run, retry, trigger
from dovetail_client.api.workflows import register
from dovetail_client.models import (
    DovetailWorkflow, Event, RetryRequest, Run, RunStatus, TriggerRequest
)

url, definition, allowed = sys.argv[1:]
client = Client(base_url=url)
made = register.sync(client=client, body=DovetailWorkflow.from_dict(json.loads(definition)))
assert made.created is True, made
body = TriggerRequest.from_dict({"params": {"who": "Ada"}})
key = {"idempotency_key": "generated"}
run_id = trigger.sync(made.name, client=client, body=body, **key).run_id
assert trigger.sync(made.name, client=client, body=body, **key).run_id == run_id

def ended():
    run = get_run.sync(run_id, client=client, wait=20.0)
    assert isinstance(run, Run), run
    return run

run = ended()
assert run.status is RunStatus.FAILED, run
reported = events.sync(run_id, client=client)
assert all(isinstance(event, Event) for event in reported)
assert [event.seq for event in reported] == list(range(1, len(reported) + 1))
assert reported[-1].type_ == "run.failed", reported
open(allowed, "w").close()
again = retry.sync(run_id, client=client, body=RetryRequest.from_dict({}))
assert isinstance(again, Run) and again.epoch == 2, again
assert ended().status is RunStatus.COMPLETED
later = events.sync(run_id, client=client, after=reported[-1].seq)
assert later[-1].type_ == "run.completed", later
print("done")
"""


USE_OPENAPI_GENERATOR = """
import json, sys
from dovetail_client import ApiClient, Configuration, RunsApi, WorkflowsApi
from dovetail_client.models import Definition, Event, RetryRequest, Run, TriggerRequest

url, definition, allowed = sys.argv[1:]
with ApiClient(Configuration(host=url)) as client:
    workflows, runs = WorkflowsApi(client), RunsApi(client)
    made = workflows.register(Definition.from_dict(json.loads(definition)))
    assert made.created is True, made
    body = TriggerRequest(params={"who": "Ada"})
    run_id = runs.trigger(made.name, "generated", body).run_id
    assert runs.trigger(made.name, "generated", body).run_id == run_id
    run = runs.get_run(run_id, wait=20.0)
    assert isinstance(run, Run) and run.status == "FAILED", run
    log = runs.events(run_id)
    assert all(isinstance(event, Event) for event in log)
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    assert log[-1].type == "run.failed", log
    open(allowed, "w").close()
    again = runs.retry(run_id, retry_request=RetryRequest())
    assert again.epoch == 2, again
    assert runs.get_run(run_id, wait=20.0).status == "COMPLETED"
    later = runs.events(run_id, after=log[-1].seq)
    assert later[-1].type == "run.completed", later
print("done")
"""


def use(script: str, server: Server, name: str, folder: Path) -> None:
    """Register, trigger twice with one key, wait, read events, retry: the client in `folder`."""
    allowed = folder / "allowed"
    definition = flow(name, node("a", "needs", config={"file": str(allowed)}))
    used = subprocess.run(
        [GENERATOR / "bin" / "python", "-c", script, server.url, json.dumps(definition), allowed],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert used.stdout == "done\n", used.stdout + used.stderr


def generate(api: Api, folder: Path, *command: str) -> str:
    """What a generator prints while it makes `dovetail_client` of the server's document."""
    assert (GENERATOR / "pins").exists(), "the generators are not here: ./dev test installs them"
    (folder / "openapi.json").write_bytes(api("GET", "//openapi.json").content)
    made = subprocess.run(
        [str(GENERATOR / "bin" / command[0]), "generate", *command[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout + made.stderr


@pytest.mark.parametrize("server", ["embedded"], indirect=True, scope="session")
def test_a_client_of_openapi_python_client_does_the_whole_life_of_a_run(
    server: Server, api: Api, name: str, tmp_path: Path
) -> None:
    options = ["--meta", "none", "--path", "openapi.json", "--output-path", "dovetail_client"]
    printed = generate(api, tmp_path, "openapi-python-client", *options)
    # Bodies may be YAML, too, which the generator leaves out; else there is nothing that it cannot.
    warnings = {w for w in printed.splitlines() if w.startswith(("Unsupported", "Unable"))}
    assert warnings <= {"Unsupported content type application/yaml"}, printed
    use(USE, server, name, tmp_path)


@pytest.mark.parametrize("server", ["embedded"], indirect=True, scope="session")
def test_a_client_of_openapi_generator_does_the_whole_life_of_a_run(
    server: Server, api: Api, name: str, tmp_path: Path
) -> None:
    options = ["-g", "python", "-i", "openapi.json", "-o", ".", "--package-name", "dovetail_client"]
    printed = generate(api, tmp_path, "openapi-generator-cli", *options)
    errors = [line for line in printed.splitlines() if " ERROR " in line]
    assert not errors, "\n".join(errors)
    use(USE_OPENAPI_GENERATOR, server, name, tmp_path)
