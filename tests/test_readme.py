"""The README is true: its files run, its commands print what it shows, its Python works."""

from __future__ import annotations

from pathlib import Path

from .pages import ROOT, blocks, call, commands, comparable, services, write_files

README = ROOT / "README.md"


def test_the_commands_of_the_readme_print_the_shown_output(tmp_path: Path) -> None:
    write_files(README, tmp_path)
    for command, printed in commands(README):  # one after the other: what they keep, they keep
        done = call(command, tmp_path)
        assert comparable(done.stdout) == comparable(printed)
        assert done.returncode == 0


def test_the_services_of_the_readme_print_the_shown_output(tmp_path: Path, redis_url: str) -> None:
    write_files(README, tmp_path)
    with services(README, tmp_path, redis_url) as env:
        for command, printed in commands(README, "on redis"):
            done = call(command, tmp_path, **env)
            assert comparable(done.stdout) == comparable(printed)
            assert done.returncode == 0
        done = call("dovetail runs watch", tmp_path, **env)
        assert '"words": 3' in done.stdout


def test_every_file_of_the_readme_is_used_by_one_of_its_commands(tmp_path: Path) -> None:
    used = " ".join(command for command, _ in commands(README)).split()
    for name in write_files(README, tmp_path):
        assert name in used


def test_the_python_of_the_readme_runs() -> None:
    scripts = [block.text for block in blocks(README, "python") if not block.name]
    assert scripts
    for script in scripts:
        exec(compile(script, "README.md", "exec"), {"__name__": "readme"})


def test_the_definitions_of_the_readme_are_valid_without_a_warning(tmp_path: Path) -> None:
    flows = [name for name in write_files(README, tmp_path) if name.endswith(".yaml")]
    done = call(f"dovetail validate {' '.join(flows)} --handlers words.py", tmp_path)
    assert done.returncode == 0
    assert "warning" not in done.stdout


def test_the_example_of_the_readme_has_about_twenty_lines() -> None:
    example = next(block for block in blocks(README, "yaml") if block.name == "trip.yaml")
    assert len(example.text.splitlines()) <= 22
