"""The planted bugs themselves: each applies to the code as it is, and names tests that exist.

That the tests notice them is what `tools/planted_bugs.py` finds out; this is the quick part,
so that the author of a moved line learns it from the tests beside it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import redis

ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "tools" / "planted_bugs").glob("*.patch"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bugs", ROOT / "tools" / "planted_bugs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_there_are_bugs_in_the_rules_and_around_them(tool: ModuleType) -> None:
    files = {hunk.file.split("/")[2] for path in PATCHES for hunk in tool.read(path).hunks}
    assert {"core", "engine", "stores"} <= files
    assert len(PATCHES) >= 12


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_every_bug_applies_and_names_its_tests(
    tool: ModuleType, tmp_path: Path, path: Path, request: pytest.FixtureRequest
) -> None:
    bug = tool.read(path)
    assert bug.what
    assert bug.hunks
    for test in bug.tests:
        assert (ROOT / test.split("::")[0]).is_file()
    tool.copy_files(bug, tmp_path)
    tool.apply(bug, tmp_path)
    for hunk in bug.hunks:
        planted = (tmp_path / hunk.file).read_text()
        assert planted != (ROOT / hunk.file).read_text()
        if hunk.file.endswith(".lua"):
            with redis.Redis.from_url(request.getfixturevalue("redis_url")) as server:
                server.script_load(planted)
        elif hunk.file.endswith(".py"):
            compile(planted, hunk.file, "exec")


def test_a_planted_bug_whose_lines_are_gone_is_reported(tool: ModuleType, tmp_path: Path) -> None:
    bug = tool.read(PATCHES[0])
    tool.copy_files(bug, tmp_path)
    file = tmp_path / bug.hunks[0].file
    file.write_text("# rewritten\n")
    with pytest.raises(tool.DoesNotApply, match="0 times"):
        tool.apply(bug, tmp_path)


def test_a_planted_bug_whose_lines_occur_twice_is_reported(
    tool: ModuleType, tmp_path: Path
) -> None:
    bug = tool.read(PATCHES[0])
    tool.copy_files(bug, tmp_path)
    file = tmp_path / bug.hunks[0].file
    file.write_text(2 * file.read_text())
    with pytest.raises(tool.DoesNotApply, match="2 times"):
        tool.apply(bug, tmp_path)


def test_a_refreshed_patch_plants_the_same_bug(tool: ModuleType, tmp_path: Path) -> None:
    for path in PATCHES:
        written = tmp_path / path.name
        tool.refresh(tool.read(path), written)
        assert tool.read(written).what == tool.read(path).what
        assert written.read_text().count("@@ ") >= 1
