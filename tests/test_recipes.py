"""The code of the page "Recipes" runs inside the frameworks that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT, blocks, call, commands, environment, write_files

PAGE = ROOT / "docs" / "recipes.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(PAGE, tmp_path)
    return tmp_path


def run_python(folder: Path, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FASTAPI = """
import time
from fastapi.testclient import TestClient
from fastapi_app import app

for name in ("Ada", "Bob"):  # twice: the file is opened again
    with TestClient(app) as client:
        started = client.post("/greetings", params={"who": name})
        assert started.status_code == 202, started.text
        where = f"/greetings/{started.json()['run_id']}"
        while (shown := client.get(where).json())["status"] not in ("COMPLETED", "FAILED"):
            time.sleep(0.01)
        assert shown == {"status": "COMPLETED", "result": {"text": f"Hello {name}"}}, shown
        assert client.get("/greetings/unknown").status_code == 404
print("done")
"""

DJANGO = """
import django_app
from django.core.management import call_command
from django.test import Client
from django.contrib.auth.models import User

call_command("migrate", verbosity=0)
User.objects.create(username="ada")
client = Client()
assert client.get("/count").json() == {"status": "COMPLETED", "result": {"users": {"users": 1}}}
User.objects.create(username="bob")
assert client.get("/count").json()["result"] == {"users": {"users": 2}}
assert client.get("/greet/Ada").json() == {"text": "Hello Ada"}
print("done")
"""


@pytest.mark.parametrize("script", [FASTAPI, DJANGO], ids=["fastapi", "django"])
def test_a_framework_runs_workflows_inside_itself(folder: Path, script: str) -> None:
    assert run_python(folder, script) == "done\n"


def test_an_agent_of_pydantic_ai_is_a_handler(folder: Path) -> None:
    ((command, _),) = commands(PAGE)
    done = call(command, folder)
    assert done.returncode == 0, done.stdout
    run = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert set(run["result"]) == {"spam", "reason"}
    assert run["nodes"][0]["output"]["is_spam"] is False


def test_the_page_names_every_file_once() -> None:
    names = [block.name for language in ("python", "yaml") for block in blocks(PAGE, language)]
    assert len(names) == len(set(names)) == 6
