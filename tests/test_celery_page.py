"""The page "Dovetail on your Celery" is true: its services, its workers and its code at work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from dovetail.celery import task
from dovetail.config import Settings

from .pages import (
    BIN,
    ROOT,
    blocks,
    call,
    commands,
    comparable,
    environment,
    services,
    write_files,
)

PAGE = ROOT / "docs" / "celery.md"
TEXT = PAGE.read_text()


def exported() -> dict[str, str]:
    """What the page sets, but for where the servers are."""
    (block,) = [block for block in blocks(PAGE, "sh") if block.name == "settings"]
    words = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    found = dict(word.split("=", 1) for _, word in words)
    return {name: value for name, value in found.items() if not name.endswith("_URL")}


def test_the_services_behave_as_their_page_shows(tmp_path: Path, redis_url: str) -> None:
    write_files(PAGE, tmp_path)
    with services(PAGE, tmp_path, redis_url, **exported()) as env:
        for command, printed in commands(PAGE, "on redis"):
            done = call(command, tmp_path, **env)
            assert comparable(done.stdout) == comparable(printed), command


def test_the_python_code_of_the_page_runs_beside_its_worker(tmp_path: Path, redis_url: str) -> None:
    write_files(PAGE, tmp_path)
    (line,) = [block.text for block in blocks(PAGE, "sh") if block.name == "worker"]
    words = shlex.split(line)
    env = environment(BROKER_URL=redis_url)
    quiet = ["--loglevel", "ERROR"]
    with subprocess.Popen([BIN / words[0], *words[1:], *quiet], cwd=tmp_path, env=env) as worker:
        try:
            for block in blocks(PAGE, "python"):
                if not block.name:
                    subprocess.run(
                        [sys.executable, "-c", block.text],
                        cwd=tmp_path,
                        env=env,
                        check=True,
                        timeout=60,
                    )
        finally:
            worker.terminate()
    assert worker.returncode == 0


def test_the_settings_and_limits_of_the_page_are_the_real_ones() -> None:
    for name in set(re.findall(r"DOVETAIL_(\w+)", TEXT)):
        assert name.lower() in Settings.model_fields, name
    named = re.findall(r"`DOVETAIL_(\w+)`, ([\d,]+)\b", TEXT)
    assert named
    for name, value in named:
        assert Settings.model_fields[name.lower()].default == float(value), name
    assert f"{task.SOFT_SECONDS} s soft, {task.HARD_SECONDS} s hard" in TEXT
    assert f"`max_retries={task.MAX_RETRIES}`" in TEXT
    assert f"runs {Settings.model_fields['concurrency'].default} async handlers" in TEXT
