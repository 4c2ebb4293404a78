"""The plugin in a project of its own: pytest as a user calls it, in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..pages import ROOT, call, commands, comparable, environment, write_files

PAGE = ROOT / "docs" / "testing.md"


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_files(PAGE, tmp_path)
    return tmp_path


def test_the_page_about_testing_is_true(project: Path) -> None:
    for command, printed in commands(PAGE):
        assert comparable(call(command, project).stdout) == comparable(printed), command
    done = run_pytest(project)
    assert "7 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("options", [("-n", "2"), ("-p", "no:asyncio", "-p", "no:xdist")])
def test_its_tests_pass_with_xdist_and_without_other_plugins(
    project: Path, options: tuple[str, ...]
) -> None:
    (project / "test_recorded.py").unlink()  # it needs the recording
    done = run_pytest(project, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


ASYNC = """
import asyncio
import pytest
from dovetail import handler

FLOW = {
    "name": "f",
    "defaults": {"resource_tag": "api"},
    "nodes": [
        {"id": "a", "handler": "thing", "max_retries": 3},
        {"id": "b", "handler": "mine", "dependencies": ["a"]},
    ],
}

@pytest.mark.asyncio
async def test_in_a_loop(dovetail_runner):
    mine = asyncio.get_running_loop()
    run = dovetail_runner.run(FLOW, mock={"thing": 1}, fail={"a": [OSError] * 3})
    assert run.status == "COMPLETED"
    assert asyncio.get_running_loop() is mine
    await asyncio.sleep(0.001)

def test_without_one(dovetail_runner):
    run = dovetail_runner.run(FLOW, mock={"thing": 1}, fail={"a": [OSError] * 3})
    assert run.node("a").attempt == 4

def test_that_fails(dovetail_runner):
    assert dovetail_runner.run(FLOW, mock={"thing": ValueError("no price")}).status == "COMPLETED"
"""


def test_sync_and_async_tests_take_milliseconds_and_show_why_they_fail(tmp_path: Path) -> None:
    (tmp_path / "test_async.py").write_text(ASYNC)
    (tmp_path / "mine.py").write_text(
        "from dovetail import handler\n@handler('mine')\ndef mine(config, ctx):\n    return 2\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\ndovetail_handlers = mine.py\n")
    report = tmp_path / "report.xml"
    done = run_pytest(tmp_path, f"--junitxml={report}", "-o", "junit_duration_report=call")
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "no price" in done.stdout, "the error of the run is shown"
    times = dict(re.findall(r'name="(test_\w+)" time="([\d.]+)"', report.read_text()))
    # 50 ms on a machine that has nothing else to do; what it takes there is 3 to 10 ms.
    assert all(float(seconds) < 0.25 for seconds in times.values()), times


def test_a_project_that_does_not_use_it_does_not_load_the_engine(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys, json\ndef test_other():\n"
        "    print(json.dumps([n for n in sys.modules if n.startswith('dovetail')]))\n"
    )
    done = run_pytest(tmp_path, "-q", "-s", "-p", "no:asyncio", "-p", "no:xdist")
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "dovetail" in line]
    loaded = json.loads(line[line.index("[") : line.index("]") + 1])
    assert sorted(loaded) == ["dovetail", "dovetail.pytest_plugin"]
