"""The skill for agents is true, and `llms.txt` lists the pages that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from .pages import ROOT, call, commands, comparable, environment, write_files

DOCS = ROOT / "docs"
SKILL = DOCS / "skill" / "SKILL.md"
ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\) \| (.+) \|$", re.MULTILINE)


def test_llms_txt_lists_every_page_as_the_index_does() -> None:
    index = ROW.findall((DOCS / "README.md").read_text().split("## Decisions")[0])
    text = (DOCS / "llms.txt").read_text()
    assert re.match(r"# Dovetail\n\n> .+\n", text)
    assert re.findall(r"^- \[([^\]]+)\]\(([^)]+)\): (.+)$", text, re.MULTILINE) == index
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (DOCS / link).exists(), link


def test_the_skill_names_itself_and_its_code_works(tmp_path: Path) -> None:
    _, head, body = SKILL.read_text().split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["name"] == "dovetail"
    assert len(about["description"]) < 1024
    write_files(SKILL, tmp_path)
    for command, printed in commands(SKILL):
        assert comparable(call(command, tmp_path).stdout) == comparable(printed), command
    done = call("dovetail run page.dovetail.yaml -p topic=x --handlers handlers.py", tmp_path)
    assert done.returncode == 0, done.stdout
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "1 passed" in tested.stdout, tested.stdout
    for usage in re.findall(r"`dovetail ([a-z]+(?: [a-z]+)?)", body):
        words = usage.split()
        known = call(f"dovetail {words[0]} --help", tmp_path).stdout
        assert "Usage:" in known
        assert len(words) == 1 or words[0] != "runs" or re.search(rf"^  {words[1]} ", known, re.M)
