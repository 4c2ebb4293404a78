"""The schema for editors accepts every example and finds mistakes in configs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from dovetail.config import load_settings
from dovetail.core.definition.editor_schema import EditorHandler, add_handlers
from dovetail.core.definition.model import definition_schema
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.config_schema import schema_of

ROOT = Path(__file__).resolve().parents[2]
TEXT_TOOLS = ROOT / "examples/handlers/text_tools.py"
FLOWS = sorted(
    [
        *(ROOT / "examples").glob("*.yaml"),
        *(ROOT / "src/dovetail/documents").glob("*.yaml"),
        ROOT / "src/dovetail/cli/starter.yaml",
    ]
)


class Leaf(BaseModel):
    """The smallest part."""

    size: int = Field(ge=0, description="how large it is")
    next: Leaf | None = None


class Mine(BaseModel):
    model_config = ConfigDict(extra="allow")

    leaf: Leaf
    pairs: list[tuple[int, str]] = []


def schema() -> dict[str, Any]:
    registry = builtin_registry(load_settings())
    registry.load(str(TEXT_TOOLS))
    registry.load("dovetail.documents")
    found = definition_schema()
    known = [
        EditorHandler(name, one.description, one.checkable_schema())
        for name, one in registry.items()
    ]
    add_handlers(found, [*known, EditorHandler("mine", "", schema_of(Mine))])
    return found


SCHEMA = schema()
EDITORS = [jsonschema_rs.Draft202012Validator(SCHEMA), jsonschema_rs.Draft7Validator(SCHEMA)]
"""The language servers read the keywords of draft-07."""


def accepts(definition: Any) -> bool:
    first, second = [editor.is_valid(definition) for editor in EDITORS]
    assert first == second
    return first


def flow(handler: str, config: Any = ...) -> dict[str, Any]:
    node = {"id": "a", "handler": handler, "config": config}
    if config is ...:
        del node["config"]
    return {"name": "w", "nodes": [node]}


def test_it_has_only_keywords_that_language_servers_read() -> None:
    text = json.dumps(SCHEMA)
    assert not any(f'"{word}"' in text for word in ("prefixItems", "$dynamicRef", "unevaluated"))
    assert jsonschema_rs.meta.is_valid(SCHEMA)
    assert jsonschema_rs.meta.is_valid(
        {**SCHEMA, "$schema": "http://json-schema.org/draft-07/schema"}
    )


@pytest.mark.parametrize("path", FLOWS, ids=lambda path: path.name)
def test_every_example_is_accepted(path: Path) -> None:
    assert accepts(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", FLOWS, ids=lambda path: path.name)
def test_a_mistake_in_the_config_of_an_example_is_found(path: Path) -> None:
    definition = yaml.safe_load(path.read_text())
    for index, node in enumerate(definition["nodes"]):
        wrong = copy.deepcopy(definition)
        wrong["nodes"][index]["config"] = {**(node.get("config") or {}), "no_such_field": 1}
        is_open = f"config.{node['handler']}" not in SCHEMA["$defs"]
        assert accepts(wrong) == is_open


WRONG = [
    ("call_external_service", {"url": "x", "methd": "GET"}),
    ("call_external_service", {"url": "x", "method": "FETCH"}),
    ("call_external_service", {"url": "x", "timeout_seconds": "soon"}),
    ("call_external_service", {"url": "x", "expect_status": [99]}),
    ("call_external_service", {"url": "x", "headers": {"A": [1]}}),
    ("call_external_service", {}),
    ("call_external_service", ...),
    ("llm_service", {"promt": "x"}),
    ("llm_generate", {"prompt": "x", "temperature": 3}),
    ("llm_service", {"prompt": "x", "response_format": "jsn"}),
    ("llm_service", {"messages": [{"content": "x"}]}),
    ("sleep", {"seconds": "long"}),
    ("sleep", {"seconds": 1, "second": 1}),
    ("fail", {"mesage": "x"}),
    ("mine", {"leaf": {"size": -1}}),
    ("mine", {"leaf": {"size": 1, "next": {"size": "large"}}}),
]
RIGHT = [
    ("call_external_service", {"url": "{{ params.url }}", "method": "get"}),
    ("call_external_service", {"url": "x", "timeout_seconds": "{{ params.t }}"}),
    ("call_external_service", {"url": "x", "expect_status": ["{{ params.code }}", 404]}),
    ("call_external_service", {"url": "x", "headers": "{{ params.headers }}", "body": None}),
    ("llm_service", {"prompt": {"any": 1}, "response_format": {"type": "{{ params.kind }}"}}),
    ("llm_service", {"messages": ["{{ params.first }}", {"role": "user", "x": 1}]}),
    ("sleep", {"seconds": "{{ params.seconds }}"}),
    ("fail", ...),
    ("fail", None),
    ("input", {"what": ["ever"]}),
    ("not_known_here", {"what": ["ever"]}),
    ("mine", {"leaf": {"size": "{{ params.n }}", "next": None}, "more": 1, "pairs": [[1, "a"]]}),
]


@pytest.mark.parametrize(("handler", "config"), WRONG)
def test_a_wrong_config_is_refused(handler: str, config: Any) -> None:
    assert not accepts(flow(handler, config))


@pytest.mark.parametrize(("handler", "config"), RIGHT)
def test_templates_and_other_handlers_are_accepted(handler: str, config: Any) -> None:
    assert accepts(flow(handler, config))


def test_fields_have_the_words_that_an_editor_shows() -> None:
    names = SCHEMA["$defs"]["Node"]["properties"]["handler"]["anyOf"]
    known = {one["const"]: one.get("description") for one in names if "const" in one}
    assert known["sleep"] == "Waits for some seconds and returns them."
    assert {"type": "string"} in names, "others may be known to workers"
    call = SCHEMA["$defs"]["config.call_external_service"]
    assert call["description"] == "The config of `call_external_service`."
    assert call["properties"]["timeout_seconds"]["default"] == 30.0
    assert call["properties"]["url"]["description"].startswith("http://, https://")
    methods = call["properties"]["method"]["anyOf"][0]["enum"]
    assert methods[0] == "GET"


def described(part: Any, place: str = "") -> Iterator[tuple[str, bool]]:
    """The fields of a schema, and whether an editor has words to show for each."""
    if isinstance(part, list):
        for one in part:
            yield from described(one, place)
    elif isinstance(part, dict):
        for name, field in part.get("properties", {}).items():
            yield f"{place}.{name}", "description" in field
        for word in ("properties", "$defs"):
            for name, one in part.get(word, {}).items():
                yield from described(one, f"{place}.{name}")
        for word in ("anyOf", "items", "additionalProperties"):
            yield from described(part.get(word), place)


def test_every_field_of_a_definition_and_of_a_config_of_ours_has_words() -> None:
    users = ("config.mine", "config.count_words")
    ours = {name: one for name, one in SCHEMA["$defs"].items() if not name.startswith(users)}
    found = dict(described({**SCHEMA, "$defs": ours}))
    assert found[".config.llm_service.messages.role"]
    assert [place for place, has_words in found.items() if not has_words] == []
