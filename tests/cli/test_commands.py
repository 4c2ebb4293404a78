"""The small commands: `new`, `schema`, `handlers`, `--version`, `--help`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import jsonschema_rs
import pytest
import yaml

from dovetail import __version__

from .conftest import Outcome, Shell, environment

Command = Callable[..., Outcome]


def test_the_starter_validates_and_runs_offline_without_changes(
    command: Command, shell: Shell
) -> None:
    done = command("new", "research")
    assert done.code == 0
    assert done.out.splitlines() == [
        "wrote research.dovetail.yaml and, for editors, dovetail.schema.json; now try",
        "  dovetail validate research.dovetail.yaml",
        "  dovetail run research.dovetail.yaml -p topic=otters",
    ]
    valid = "research.dovetail.yaml: valid, 5 nodes in 4 layers\n"
    assert command("validate", "research.dovetail.yaml").out == valid
    ran = shell("run", "research.dovetail.yaml", "-p", "topic=otters", "--json")
    assert ran.code == 0, ran.err
    run = json.loads(ran.out)
    assert run["workflow"] == "research"
    assert run["result"]["topic"] == "otters"
    assert isinstance(run["result"]["words"], int)
    shallow = json.loads(shell("run", "research.dovetail.yaml", "-p", "depth=1", "--json").out)
    assert shallow["status"] == "COMPLETED"
    assert [n["status"] for n in shallow["nodes"] if n["id"] == "background"] == ["SKIPPED"]


@pytest.mark.parametrize("name", ["flow", "flow.yaml", "flow.yml", "flow.dovetail.yaml"])
def test_an_existing_file_is_never_overwritten(command: Command, shell: Shell, name: str) -> None:
    file = name if "." in name else f"{name}.dovetail.yaml"
    path = shell.write(file, "mine")
    done = command("new", name)
    assert done.code == 2
    assert done.err == f"error: {file} is there already; choose another name\n"
    assert path.read_text() == "mine"
    assert not (shell.directory / "dovetail.schema.json").exists()


def test_a_new_file_names_the_schema_beside_it_which_is_kept(
    command: Command, shell: Shell
) -> None:
    assert command("new", "flow.dovetail.yaml").code == 0
    text = (shell.directory / "flow.dovetail.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=./dovetail.schema.json\n")
    assert yaml.safe_load(text)["name"] == "flow"
    schema = shell.directory / "dovetail.schema.json"
    assert schema.read_text() == command("schema").out
    schema.write_text("mine")
    assert command("new", "other.yaml").out.startswith("wrote other.yaml; now try")
    assert schema.read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "a/b", "", ".yaml", "-x", "a b", "é", "x" * 129]
)
def test_a_name_that_no_workflow_can_have_is_refused(
    command: Command, shell: Shell, name: str
) -> None:
    before = sorted(shell.directory.iterdir())
    done = command("new", "--", name)
    assert done.code == 2
    assert "cannot be a workflow's name" in done.err
    assert sorted(shell.directory.iterdir()) == before


@pytest.mark.parametrize("name", ["1.5", "true", "null", "0x1f", "a.b-c_d"])
def test_a_workflow_name_stays_text_whatever_it_looks_like(
    command: Command, shell: Shell, name: str
) -> None:
    assert command("new", name).code == 0
    assert yaml.safe_load((shell.directory / f"{name}.dovetail.yaml").read_text())["name"] == name


def test_the_schema_accepts_the_starter_and_refuses_a_typo(command: Command, shell: Shell) -> None:
    schema = json.loads(command("schema").out)
    command("new", "demo")
    starter = yaml.safe_load((shell.directory / "demo.dovetail.yaml").read_text())
    validator = jsonschema_rs.validator_for(schema)
    validator.validate(starter)
    assert not validator.is_valid({**starter, "nodez": []})


def test_handlers_lists_each_with_its_origin_retries_and_config(
    command: Command, shell: Shell
) -> None:
    done = command("handlers", "--handlers", "mine.py")
    assert done.code == 0
    lines = done.out.splitlines()
    assert "call_external_service          built in    3 retries" in lines
    assert "llm_service (or llm_generate)  built in    3 retries" in lines
    assert "    secrets: in body, headers, json, params" in lines
    assert sum("secrets: " in line for line in lines) == 1
    assert "    config: seconds*" in lines
    at = lines.index("broken                         mine.py:11  2 retries")
    assert lines[at + 1] == "    config: any"
    assert "    Greets." in lines


def test_handlers_as_json_has_the_config_schemas(command: Command) -> None:
    listed = {found["name"]: found for found in json.loads(command("handlers", "--json").out)}
    assert listed["llm_service"]["aliases"] == ["llm_generate"]
    assert listed["llm_service"]["max_retries"] == 3
    assert "seconds" in listed["sleep"]["config_schema"]["properties"]
    assert listed["input"]["config_schema"] is None
    assert listed["call_external_service"]["secrets"] == ["body", "headers", "json", "params"]
    assert listed["input"]["secrets"] is False
    assert all(found["origin"] == "built in" for found in listed.values())


def test_the_version_option_prints_the_version_of_the_package(command: Command) -> None:
    assert command("--version").out == f"dovetail {__version__}\n"


def test_help_names_every_command(command: Command) -> None:
    done = command("--help")
    assert done.code == 0
    names = "run trigger batch batches validate graph new schema handlers doctor runs"
    names += " workflows limits queues dead-letters"
    for name in names.split():
        assert f"\n  {name} " in done.out


@pytest.mark.parametrize(
    ("group", "names"),
    [
        (
            "runs",
            "list show why logs watch retry fork resume cancel repair results events verify "
            "record delete prune",
        ),
        ("batches", "list show"),
        ("workflows", "register list show diff delete alias unalias history"),
        ("limits", "list set history"),
        ("dead-letters", "list requeue drop"),
    ],
)
def test_help_of_a_group_names_every_command_of_it_in_full_sentences(
    command: Command, group: str, names: str
) -> None:
    lines = command(group, "--help").out.splitlines()
    listed = lines[lines.index("Commands:") + 1 :]
    assert [line.split()[0] for line in listed] == names.split()
    assert not [line for line in listed if line.endswith("...")]
    for name in names.split():
        assert command(group, name, "--help").code == 0


@pytest.mark.parametrize("words", ["runs", "runs retry", "workflows show", "batch", "dead-letters"])
def test_help_of_a_command_imports_only_what_help_needs(words: str) -> None:
    # Not pydantic: Typer itself takes it to read arguments.
    script = (
        f"import sys; sys.argv = ['dovetail', *{words.split()!r}, '--help']\n"
        "from dovetail.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'rich', 'yaml', 'orjson', 'jinja2', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_cli_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "--version"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.stdout == f"dovetail {__version__}\n"
