"""The guide says what the code does: its commands, its template table, its reference tables.

And the table of guards in the architecture names functions and tests that exist.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.definition.model import Node, Workflow
from dovetail.core.templates import NodeValue, parse_template
from dovetail.core.templates.compiler import TEST_NAMES
from dovetail.core.templates.filters import FILTERS
from dovetail.handlers.context import Context

from .pages import ROOT, blocks, call, commands, comparable, services, write_files

GUIDE = ROOT / "docs" / "guide.md"
SERVICES = ROOT / "docs" / "services.md"
TEXT = GUIDE.read_text()
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CODES = """empty_graph duplicate_id missing_dependency self_dependency cycle unreachable
    unknown_handler invalid_config template_syntax template_forbidden template_unknown_node
    template_not_upstream invalid_field too_large template_unknown_key
    template_may_be_skipped""".split()  # noqa: SIM905


def rows(title: str, text: str = TEXT) -> list[list[str]]:
    """The cells of the first table whose head begins with this title, without the head."""
    table = re.search(rf"^\| {title} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, f"the page has no table '{title}'"
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table[1].splitlines()]
    return [[cell.strip().replace(r"\|", "|") for cell in row] for row in cells]


def code(cell: str) -> str:
    """What stands in the backticks of a cell."""
    return re.findall(r"`([^`]+)`", cell)[0]


class Scope:
    """Of the guide's block, plus a node that was skipped."""

    def __init__(self) -> None:
        (self._values,) = [json.loads(b.text) for b in blocks(GUIDE, "json") if b.name == "scope"]

    def get(self, name: str) -> Any:
        if name == "review":
            return NodeValue(name, "SKIPPED", None, None)
        if name == "params":
            return self._values[name]
        return NodeValue(name, "COMPLETED", self._values[name], None)


EXAMPLES = [
    (code(row[-2]), code(row[-1])) for title in ("template", "filter") for row in rows(title)
]


@pytest.mark.parametrize(("template", "value"), EXAMPLES)
def test_a_template_gives_the_value_of_the_guide(template: str, value: str) -> None:
    parsed = parse_template(template)
    assert parsed is not None
    found, expected = parsed.render(Scope()), json.loads(value)
    assert (type(found), found) == (type(expected), expected)


def test_the_guide_has_every_filter_and_test() -> None:
    listed = {name for row in rows("filter") for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == {*FILTERS, "default", "d"}
    assert set(names_of_tests()) == set(TEST_NAMES)


def names_of_tests() -> list[str]:
    found = re.search(r"^Tests, after `is` or `is not`: `([\w ]+)`", TEXT, re.MULTILINE)
    assert found
    return found[1].split()


def test_the_guide_has_every_field() -> None:
    tables = re.findall(r"^\| field \| default \| \|\n\|[-| ]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    node_fields, workflow_fields = [re.findall(r"^\| `(\w+)`", t, re.MULTILINE) for t in tables]
    assert set(node_fields) == set(Node.model_fields)
    assert set(workflow_fields) == set(Workflow.model_fields)


def test_the_guide_has_every_code_of_the_validation() -> None:
    assert [code(row[0]) for row in rows("code")] == CODES


def test_the_missing_value_error_of_the_guide_is_the_real_one(tmp_path: Path) -> None:
    flow = tmp_path / "missing.json"
    flow.write_text(
        json.dumps(
            {
                "name": "missing",
                "nodes": [
                    {"id": "fetch", "handler": "output", "config": {"json": 1, "status_code": 2}},
                    {
                        "id": "report",
                        "handler": "output",
                        "dependencies": ["fetch"],
                        "config": {"text": "{{ fetch.body }}"},
                    },
                ],
            }
        )
    )
    run = json.loads(call(f"dovetail run {flow.name} --json", tmp_path).stdout)
    assert run["error"]["type"] == "missing_value"
    assert f"`{run['error']['message']}`" in TEXT


def test_the_commands_of_the_guide_print_the_shown_output(tmp_path: Path) -> None:
    write_files(GUIDE, tmp_path)
    assert commands(GUIDE)
    for command, printed in commands(GUIDE):
        assert comparable(call(command, tmp_path).stdout) == comparable(printed), command


def test_the_commands_of_the_services_page_print_the_shown_output(
    tmp_path: Path, redis_url: str
) -> None:
    write_files(SERVICES, tmp_path)
    with services(SERVICES, tmp_path, redis_url) as env:
        for command, printed in commands(SERVICES, "on redis"):
            done = call(command, tmp_path, **env)
            assert comparable(done.stdout) == comparable(printed), command


def test_the_settings_of_the_services_page_are_the_defaults() -> None:
    named = re.findall(r"`DOVETAIL_(\w+)`,? \(?([\d,]+)\b", SERVICES.read_text())
    assert len(named) >= 4
    for name, value in named:
        assert Settings.model_fields[name.lower()].default == float(value.replace(",", "")), name


def test_the_files_of_the_guide_run(tmp_path: Path) -> None:
    for name in write_files(GUIDE, tmp_path):
        if name == "typo.yaml":
            continue  # shows what a validation says
        done = call(f"dovetail run {name} --json", tmp_path)
        assert done.returncode == 0, done.stdout


def test_the_python_of_the_guide_runs() -> None:
    for block in blocks(GUIDE, "python"):
        exec(compile(block.text, "guide.md", "exec"), {"__name__": "guide"})


def test_the_commands_and_options_of_the_guide_exist(tmp_path: Path) -> None:
    listed = call("dovetail --help", tmp_path).stdout
    for row in rows("command"):
        usage = code(row[0])
        name = usage.split()[1]
        assert re.search(rf"^  {name} ", listed, re.MULTILINE)
        explained = call(f"dovetail {name} --help", tmp_path).stdout
        for option in re.findall(r"--?[a-z]+", usage):
            assert option in explained, f"{name} {option}"
    commands_listed = re.findall(r"^  ([\w-]+)  ", listed.split("Commands:")[1], re.MULTILINE)
    assert {code(row[0]).split()[1] for row in rows("command")} == set(commands_listed)


def test_the_table_of_the_context_lists_everything_that_a_handler_gets() -> None:
    page = (ROOT / "docs" / "handlers.md").read_text()
    listed = {name for row in rows("of `ctx`", page) for name in re.findall(r"`(\w+)[`(]", row[0])}
    given = {name for name in dir(Context) if not name.startswith("_")}
    assert listed == given - {"cancel"}, "which is for the worker"


def test_the_guards_of_the_architecture_name_existing_functions_and_tests() -> None:
    guards = rows("guard", ARCHITECTURE.read_text())
    assert len(guards) > 20
    for what, function, test in guards:
        for folder, cell in ((ROOT / "src" / "dovetail", function), (ROOT, test)):
            path, _, name = code(cell).partition(": ")
            source = (folder / path).read_text()
            found = re.search(rf"^ *(async def|def|class) {name}\b|^{name}\b", source, re.MULTILINE)
            assert found, f"{what}: no {name} in {path}"


def test_the_files_that_the_architecture_names_exist() -> None:
    text = ARCHITECTURE.read_text()
    named = set(re.findall(r"`((?:core|engine|handlers)/[\w/]+\.py)`", text))
    assert len(named) > 7
    for path in named:
        assert (ROOT / "src" / "dovetail" / path).is_file(), path


def test_every_decision_is_in_the_index_and_has_its_three_parts() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in sorted((ROOT / "docs" / "decisions").iterdir()):
        title = page.read_text().splitlines()[0].removeprefix("# ")
        assert f"| [{page.name[:4]}](decisions/{page.name}) | {title} |" in index
        for part in ("**Question.**", "**Choice.**", "**Price.**"):
            assert page.read_text().count(part) == 1, f"{page.name}: {part}"
