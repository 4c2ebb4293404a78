"""A client that `openapi-python-client` makes of the server's document does what a client does.

The generator has an environment of its own, which `./dev test` makes: it wants another typer than
Dovetail. What it must not know: how the document is made.
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
told = events.sync(run_id, client=client)
assert all(isinstance(event, Event) for event in told)
assert [event.seq for event in told] == list(range(1, len(told) + 1))
assert told[-1].type_ == "run.failed", told
open(allowed, "w").close()
again = retry.sync(run_id, client=client, body=RetryRequest.from_dict({}))
assert isinstance(again, Run) and again.epoch == 2, again
assert ended().status is RunStatus.COMPLETED
later = events.sync(run_id, client=client, after=told[-1].seq)
assert later[-1].type_ == "run.completed", later
print("done")
"""


@pytest.mark.parametrize("server", ["embedded"], indirect=True, scope="session")
def test_a_generated_client_registers_triggers_waits_reads_events_and_retries(
    server: Server, api: Api, name: str, tmp_path: Path
) -> None:
    assert (GENERATOR / "pins").exists(), "the generator is not here: ./dev test installs it"
    (tmp_path / "openapi.json").write_bytes(api("GET", "//openapi.json").content)
    generate = [str(GENERATOR / "bin" / "openapi-python-client"), "generate", "--meta", "none"]
    generate += ["--path", "openapi.json", "--output-path", "dovetail_client"]
    made = subprocess.run(
        generate, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    # Bodies may be YAML, too, which the generator leaves out; else there is nothing that it cannot.
    warnings = [
        line for line in made.stdout.splitlines() if line.startswith(("Unsupported", "Unable"))
    ]
    assert set(warnings) <= {"Unsupported content type application/yaml"}, made.stdout
    allowed = tmp_path / "allowed"
    definition = flow(name, node("a", "needs", config={"file": str(allowed)}))
    used = subprocess.run(
        [GENERATOR / "bin" / "python", "-c", USE, server.url, json.dumps(definition), allowed],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert used.stdout == "done\n", used.stdout + used.stderr
