"""`dovetail validate`: every problem with its place, to read and as JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable

import pytest

from dovetail.cli.files import excerpt
from dovetail.cli.text import bare, cells
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.workers import WorkerFacts, WorkerRegistry, schema_texts

from .conftest import Outcome, Shell

Command = Callable[..., Outcome]

WRONG = """\
name: flow
nodes:
  - id: fetch
    handler: inptu
  - id: save
    handler: output
    dependencies: [fecth]
    config: {x: "日本語", y: "{{ fetch. }}"}
"""

RIGHT = """\
name: flow
nodes:
  - {id: a, handler: input}
  - {id: b, handler: output, depends_on: [a]}
"""

WARNED = """\
name: flow
nodes:
  - {id: a, handler: input, condition: "{{ params.x }}"}
  - {id: b, handler: output, dependencies: [a], config: {x: "{{ a.y }}"}}
"""


def test_every_problem_has_its_place_its_line_and_a_caret(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", WRONG)
    done = command("validate", "flow.yaml")
    assert done.code == 2
    assert done.err == ""
    lines = [re.sub("(template_syntax) .*", r"\1 …", line) for line in done.out.splitlines()]
    assert lines == [
        "flow.yaml:4:14: unknown_handler there is no handler 'inptu'; did you mean 'input'?",
        "        handler: inptu",
        "                 ^",
        "flow.yaml:7:20: missing_dependency there is no node 'fecth'; did you mean 'fetch'?",
        "        dependencies: [fecth]",
        "                       ^",
        "flow.yaml:8:27: template_syntax …",
        '        config: {x: "日本語", y: "{{ fetch. }}"}',
        "                                 ^",  # three characters take six columns
        "flow.yaml: 3 errors",
        "handlers of your own are loaded with  --handlers FILE.py",
    ]


def test_a_valid_file_is_reported_as_valid(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", RIGHT)
    done = command("validate", "flow.yaml")
    assert (done.code, done.out) == (0, "flow.yaml: valid, 2 nodes in 2 layers\n")


def test_a_warning_is_marked_and_does_not_make_a_file_invalid(
    command: Command, shell: Shell
) -> None:
    shell.write("flow.yaml", WARNED)
    done = command("validate", "flow.yaml")
    assert done.code == 0
    assert done.out.startswith("flow.yaml:4:61: template_may_be_skipped ")
    assert done.out.splitlines()[0].endswith(" (warning)")
    assert done.out.endswith("flow.yaml: valid, 2 nodes in 2 layers, 1 warning\n")


def test_several_files_are_all_checked_and_one_invalid_file_fails_the_command(
    command: Command, shell: Shell
) -> None:
    shell.write("right.yaml", RIGHT)
    shell.write("wrong.yaml", WRONG)
    done = command("validate", "right.yaml", "nowhere.yaml", "wrong.yaml")
    assert done.code == 2
    assert "right.yaml: valid" in done.out
    assert "wrong.yaml: 3 errors" in done.out
    assert done.out.endswith("1 of 3 files valid\n")
    assert done.err == "error: there is no file nowhere.yaml\n"


def test_json_has_each_file_with_each_problem(command: Command, shell: Shell) -> None:
    shell.write("wrong.yaml", WRONG)
    shell.write("warned.yaml", WARNED)
    done = command("validate", "wrong.yaml", "warned.yaml", "nowhere.yaml", "--json")
    assert done.code == 2
    wrong, warned, nowhere = json.loads(done.out)
    assert wrong["file"] == "wrong.yaml"
    assert wrong["valid"] is False
    assert wrong["errors"][1] == {
        "code": "missing_dependency",
        "message": "there is no node 'fecth'; did you mean 'fetch'?",
        "path": "nodes[1].dependencies[0]",
        "line": 7,
        "column": 20,
    }
    assert (warned["valid"], warned["errors"]) == (True, [])
    assert [found["code"] for found in warned["warnings"]] == ["template_may_be_skipped"]
    assert (nowhere["valid"], nowhere["errors"][0]["code"]) == (False, "unreadable_file")


def test_handlers_can_be_loaded_for_the_check(shell: Shell) -> None:
    shell.write("flow.yaml", "name: f\nnodes: [{id: a, handler: greet}]")
    shell.write("loud.py", "print('loud')\n" + (shell.directory / "mine.py").read_text())
    done = shell("validate", "flow.yaml", "--handlers", "loud.py", "--json")
    assert done.code == 0
    assert json.loads(done.out)[0]["valid"] is True
    assert done.err == "loud\n"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"DOVETAIL_REDIS_URL": "redis://127.0.0.1:1/0"}, "Redis cannot be reached"),
        ({"DOVETAIL_SERVER": "http://127.0.0.1:1"}, "http://127.0.0.1:1 cannot be reached"),
    ],
)
def test_validate_works_without_a_source_of_worker_handlers(
    command: Command,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    place: dict[str, str],
    said: str,
) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    shell.write("known.yaml", "name: f\nnodes: [{id: a, handler: input}]")
    shell.write("unknown.yaml", "name: f\nnodes: [{id: a, handler: ghost}]")
    fine = command("validate", "known.yaml")
    assert (fine.code, fine.err) == (0, ""), "nothing is asked"
    done = command("validate", "unknown.yaml", "known.yaml", "unknown.yaml")
    assert done.code == 2
    assert done.out.count("unknown_handler there is no handler 'ghost'") == 2
    (hint,) = done.err.splitlines()
    assert hint.startswith("handlers that workers announced are not known here: ")
    assert said in hint


def test_a_thousand_problems_are_reported_quickly(command: Command, shell: Shell) -> None:
    nodes = [f"  - {{id: n{n}, handler: input, nope: 1}}" for n in range(5000)]
    shell.write("flow.yaml", "\n".join(["name: f", "nodes:", *nodes]))
    done = command("validate", "flow.yaml")
    assert done.code == 2
    assert done.out.count("unknown field 'nope'") == 1000
    assert "flow.yaml: too_large more than these 1,000 problems; the others are not" in done.out


# --- the excerpt -------------------------------------------------------------------------------


def shown(line: str, column: int, width: int = 60) -> tuple[str, int]:
    """The line as it is shown, and the column of the caret in it."""
    text, caret = (bare(found) for found in excerpt(line, column, width))
    assert caret.strip() == "^"
    return text, caret.index("^")


def test_the_caret_stands_under_its_character_after_tabs_and_wide_characters() -> None:
    text, caret = shown("\t日本: x", 6)
    assert text == "        日本: x"
    assert caret == cells("        日本: ")


def test_a_long_line_is_cut_around_the_caret() -> None:
    for column in (1, 30, 500, 999, 1000):
        line = "a" * (column - 1) + "X" + "b" * (1000 - column)
        text, caret = shown(line, column)
        assert text[caret] == "X"
        assert len(text) <= 60
        assert text.startswith("    …") == (column > 40)
        assert text.endswith("…") == (column < 990)


def test_terminal_control_characters_are_replaced_in_an_excerpt() -> None:
    text, caret = shown("a\x1b[31mb\u202ec", 7)
    assert text == "    a�[31mb�c"
    assert caret == 4 + 6


def test_an_empty_line_has_no_excerpt() -> None:
    assert list(excerpt("   ", 1, 60)) == []


def test_a_secret_for_a_worker_only_handler_is_checked_against_its_announcement(
    command: Command, shell: Shell, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    facts = WorkerFacts("w", "host", 7, 0.0, ["plain", "takes"], 0, 1, {}, {"takes": True})

    async def announce() -> None:
        async with PipelinedRedis(redis_url) as pipe:
            await WorkerRegistry(pipe).beat(facts)

    asyncio.run(announce())
    monkeypatch.setenv("DOVETAIL_REDIS_URL", redis_url)
    flow = "name: f\nnodes:\n- id: a\n  handler: {}\n  config: {{k: '{{{{ secrets.K }}}}'}}\n"
    shell.write("takes.yaml", flow.format("takes"))
    shell.write("plain.yaml", flow.format("plain"))
    assert command("validate", "takes.yaml").code == 0
    done = command("validate", "plain.yaml", "--json")
    assert done.code == 2
    ((problem,),) = [one["errors"] for one in json.loads(done.out)]
    assert (problem["code"], problem["line"]) == ("template_forbidden", 5)
    assert "the handler 'plain' takes no secrets" in problem["message"]


MISSPELT = """\
name: flow
nodes:
  - id: fetch
    handler: call_external_service
    config:
      url: "https://example.com/{{ params.topic }}"
      methd: POST
  - id: shorten
    handler: shorten
    config: {text: "{{ fetch.body }}", size: huge}
    dependencies: [fetch]
"""
SHORTEN = """\
from typing import Literal

from pydantic import BaseModel

from dovetail import handler


class Config(BaseModel):
    text: str
    size: Literal["small", "large"] = "small"


@handler("shorten")
def shorten(config: Config, ctx):
    return config.text[:10]
"""


def test_a_wrong_config_has_its_place_its_line_and_a_caret(command: Command, shell: Shell) -> None:
    shell.write("flow.yaml", MISSPELT)
    shell.write("shorten_tools.py", SHORTEN)
    done = command("validate", "flow.yaml", "--handlers", "shorten_tools.py")
    assert done.code == 2
    assert done.out.splitlines() == [
        "flow.yaml:7:7: invalid_config unknown field 'methd'; did you mean 'method'?",
        "          methd: POST",
        "          ^",
        "flow.yaml:10:46: invalid_config must be 'small' or 'large', not 'huge'",
        '        config: {text: "{{ fetch.body }}", size: huge}',
        "                                                 ^",
        "flow.yaml: 2 errors",
    ]


def test_the_config_of_a_worker_only_handler_is_checked_against_its_announcement(
    command: Command, shell: Shell, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    size = {"enum": ["small", "large"]}
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "size": size}}
    digests, texts = schema_texts({"shorten": schema})

    async def announce() -> None:
        async with PipelinedRedis(redis_url) as pipe:
            facts = WorkerFacts("w", "host", 7, 0.0, ["shorten"], 0, 1, schemas=digests)
            await WorkerRegistry(pipe, schemas=texts).beat(facts)

    asyncio.run(announce())
    monkeypatch.setenv("DOVETAIL_REDIS_URL", redis_url)
    shell.write("flow.yaml", MISSPELT)
    (found,) = json.loads(command("validate", "flow.yaml", "--json").out)
    assert [(one["code"], one["line"], one["column"]) for one in found["errors"]] == [
        ("invalid_config", 7, 7),
        ("invalid_config", 10, 46),
    ]
    refused = command("workflows", "register", "flow.yaml")
    assert refused.code == 2
    assert "did you mean 'method'?" in refused.err
    assert "'small' or 'large'" in refused.err
    written = json.loads(command("schema").out)
    assert written["$defs"]["config.shorten"]["properties"]["text"] == {"type": "string"}
