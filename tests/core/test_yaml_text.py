"""Data as YAML text: it reads well, and reading it gives the same data back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.definition.source import read_text
from dovetail.core.definition.yaml_text import yaml_text


def read(text: str) -> Any:
    return read_text(text.encode(), format="yaml").data


def test_a_definition_is_written_as_a_person_would() -> None:
    definition = {
        "name": "greet",
        "params": {"type": "object", "required": ["who"], "properties": {}},
        "nodes": [
            {"id": "start", "handler": "input", "dependencies": []},
            {
                "id": "end",
                "handler": "call",
                "dependencies": ["start"],
                "config": {"text": "Hello {{ start.who }}", "body": "one\n\n  two\n", "n": 1.5},
            },
        ],
    }
    expected = """\
name: greet
params:
  type: object
  required: [who]
  properties: {}
nodes:
  - id: start
    handler: input
    dependencies: []
  - id: end
    handler: call
    dependencies: [start]
    config:
      text: "Hello {{ start.who }}"
      body: |
        one

          two
      n: 1.5
"""
    assert yaml_text(definition) == expected
    assert read(expected) == definition


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1e5",
            "-1E3",
            "0777",
            "on",
            "No",
            "~",
            "null",
            "",
            "1_000",
            "2024-01-01",
            "<<",
            "=",
            "-",
        ),
        *("a: b", "a #b", "#a", " a", "a ", "'a'", '"', "\\", "@a", "`a", "%a", "&a", "*a", "!a"),
        *("\x01", "\x7f", "\x85", "\u2028", "\ufeff", "\u202e", "\U0001f600", "é", "\t", "a\rb"),
        *("a\n", "a\n\n", "\na", " a\nb", "a\n \nb", "a\n  b", "a\tb\nc", "\n", "a\n---\nb\n...\n"),
        *("{{ a }}", "[a", "{a", "a, b", "?", "? a", "|", ">", "k" * 2000, "a\nb" * 2000),
    ],
)
def test_a_text_stays_the_text_it_is(text: str) -> None:
    for ascii_only in (False, True):
        for value in ({"key": text}, {"keys": [text, 1]}, [[text]], {text: 1}, [{text: [{}]}]):
            written = yaml_text(value, ascii_only=ascii_only)
            assert read(written) == value, written
            assert written.isascii() or not ascii_only


_TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(_TEXT, _VALUES, max_size=4))
def test_whatever_is_written_is_read_as_it_was(value: dict[str, Any]) -> None:
    for ascii_only in (False, True):
        assert read(yaml_text(value, ascii_only=ascii_only)) == value
