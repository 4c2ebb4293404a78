"""Keeps the repository true to what it says of itself: pins, commands, versions, links.

It reads the checkout as files, without git, so that it also holds in an unpacked archive.
"""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import dovetail

ROOT = Path(__file__).resolve().parent.parent
SETS = ["boot", "client", "maps", "run", "test", "bench"]
COMMANDS = ["run", "test", "bench", "cases", "faults", "lint", "lock", "clean"]


@cache
def kept_files() -> list[Path]:
    """Every file that belongs to the repository: all but what .gitignore names."""
    lines = (ROOT / ".gitignore").read_text().splitlines()
    ignored = [line.strip("/") for line in lines if line and not line.startswith("#")]
    found = []
    for folder, folders, files in os.walk(ROOT):
        here = Path(folder)
        folders[:] = [
            name
            for name in folders
            if name != ".git" and not any((here / name).match(pattern) for pattern in ignored)
        ]
        paths = [here / name for name in files]
        found += [p for p in paths if not any(p.match(pattern) for pattern in ignored)]
    return sorted(found)


def text_of(path: Path) -> str | None:
    """None for what is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def project() -> dict[str, object]:
    content: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name: str) -> dict[str, str]:
    """Package and version of each pin; every one is checked to have a hash."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found = {}
    for entry in re.sub(r"\\\n", " ", text).splitlines():
        if entry.startswith(("#", "    #")) or not entry.strip():
            continue
        match = re.match(r"([\w.-]+)==(\S+)", entry)
        assert match, f"requirements/{name}.txt: {entry[:60]!r} is not pinned with =="
        assert "--hash=sha256:" in entry, f"requirements/{name}.txt: {match[1]} has no hash"
        found[canonical(match[1])] = match[2]
    assert found
    return found


# --- pins --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_every_requirement_is_pinned_by_hash(name: str) -> None:
    assert pins(name)


@pytest.mark.parametrize("name", SETS)
def test_requirements_name_no_index(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    for sign in ("://", "--index", "--extra-index", "--find-links", "--trusted-host", " @ "):
        assert sign not in text


@pytest.mark.parametrize("name", SETS)
def test_requirements_say_how_much_will_be_downloaded(name: str) -> None:
    first = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()[0]
    assert re.fullmatch(r"# download: \d+ MB, packages: \d+", first), "run ./dev lock"


@pytest.mark.parametrize("name", ["test", "bench"])
def test_every_requirement_set_contains_the_pins_of_run(name: str) -> None:
    """./dev counts on it: one environment grows from set to set, and takes nothing away."""
    assert pins("run").items() <= pins(name).items()


def test_every_declared_dependency_is_pinned() -> None:
    declared = list(project()["dependencies"])  # type: ignore[call-overload]
    for extra in project()["optional-dependencies"].values():  # type: ignore[attr-defined]
        declared += extra
    names = {canonical(re.split(r"[\[<>=!~; ]", entry)[0]) for entry in declared}
    assert names - {"dovetail"} <= pins("run").keys(), "run ./dev lock"


@pytest.mark.parametrize(
    ("folder", "name"), [("src", "run"), ("examples", "run"), ("tests", "test"), ("bench", "bench")]
)
def test_every_imported_package_is_pinned(folder: str, name: str) -> None:
    """So that nothing works only because something else happens to be installed."""
    distributions = packages_distributions()
    own = {p.stem for p in (ROOT / folder).rglob("*")} | {"dovetail"}
    missing = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            for module in modules:
                top = module.split(".")[0]
                if top in sys.stdlib_module_names or top in own:
                    continue
                givers = {canonical(giver) for giver in distributions.get(top, [top])}
                if not givers & pins(name).keys():
                    missing.add(f"{name_of(path)}: {top}")
    missing.discard("src/dovetail/pytest_plugin.py: pytest")  # which loads it
    missing -= {f"bench/maps.py: {peer}" for peer in pins("maps")}  # an environment of their own
    assert not missing, f"add them to the project or requirements/{name}.in, then ./dev lock"


# --- commands ----------------------------------------------------------------------------------


def test_dev_without_arguments_lists_its_commands() -> None:
    done = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=True)
    assert re.findall(r"^  (\w+)", done.stdout, re.MULTILINE) == COMMANDS
    assert not done.stderr


def test_an_unknown_command_lists_the_known_ones_and_fails() -> None:
    done = subprocess.run([ROOT / "dev", "tset"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not done.stdout
    assert "no command 'tset'" in done.stderr
    assert "usage: ./dev" in done.stderr


@pytest.mark.parametrize("script", ["dev", ".ci/run", "tools/bare_machine.sh"])
def test_a_script_is_executable_and_plain_sh(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & stat.S_IXUSR
    assert path.read_text().startswith("#!/bin/sh\n")
    subprocess.run(["sh", "-n", path], check=True)


def test_continuous_integration_runs_the_command_of_a_developer() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "set -eu",
        'cd "$(dirname "$0")/.."',
        "exec ./dev test",
    ]


def test_every_dev_command_that_a_page_names_exists() -> None:
    wrong = []
    for path in kept_files():
        if path.suffix == ".md":
            named = re.findall(r"\./dev ([a-z]+)", text_of(path) or "")
            wrong += [f"{name_of(path)}: ./dev {word}" for word in named if word not in COMMANDS]
    assert not wrong


# --- versions and words ------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere() -> None:
    version = project()["version"]
    assert dovetail.__version__ == version
    sections = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [section for section in sections if section != "Unreleased"]
    assert released[0] == version


def test_the_licence_exists_and_is_the_declared_one() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert project()["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "The Dovetail authors" in text


def test_no_file_contains_a_path_of_a_machine() -> None:
    homes = r"/(?:home|Users)/(?!user\b)\w+|/root/\w"
    places = re.compile("|".join([homes, *map(re.escape, own_places())]))
    wrong = []
    for path in kept_files():
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            found = places.search(line)
            if found:
                wrong.append(f"{name_of(path)}:{number}: {found[0]}")
    assert not wrong


def own_places() -> list[str]:
    """This checkout and this interpreter; a place as short as /app would be found everywhere."""
    return [str(p) for p in (ROOT, Path(sys.base_prefix)) if len(p.parts) > 2]


def test_every_link_between_pages_resolves() -> None:
    broken = []
    for path in kept_files():
        if path.suffix != ".md":
            continue
        text = re.sub(r"```.*?```", "", text_of(path) or "", flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            page, _, anchor = target.partition("#")
            goal = (path.parent / page).resolve() if page else path
            if not goal.exists():
                broken.append(f"{name_of(path)}: {target}")
            elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
                broken.append(f"{name_of(path)}: {target}: no such heading")
    assert not broken


def anchors(page: Path) -> set[str]:
    """The names that a forge gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}
