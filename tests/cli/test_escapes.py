"""No command lets a name, an output, an error or a param steer the terminal that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.cli.output import json_bytes, json_text

from .conftest import Outcome, Shell

NASTY = "\x1b[31mESC \x9b2JCSI \x07BEL \rCR \x7fDEL \u202eBIDI \u2066ISOLATE \x1b]0;title\x07 \x08"
STEERING = "\x1b\x9b\x07\r\x00\x7f\x08\u202e\u2066\x9d\u200f"
HANDLERS = """
from dovetail import PermanentError, handler

@handler("gives")
async def gives(config, ctx):
    ctx.log.warning("logged %s", config["text"])
    ctx.progress(0.5, config["text"])
    return {"text": config["text"], config["text"]: 1}

@handler("says")
async def says(config, ctx):
    raise PermanentError(config["text"] + chr(0))
"""
Command = Callable[..., Outcome]


@pytest.fixture
def nasty(shell: Shell) -> Shell:
    """A folder with a definition, and a failed run of it."""
    shell.write("mine.py", HANDLERS)
    nodes = [
        {"id": "good", "handler": "gives", "config": {"text": NASTY}},
        {"id": "bad", "handler": "says", "config": {"text": "{{ params.text }}"}},
        {"id": "after", "handler": "gives", "dependencies": ["bad"], "config": {"text": NASTY}},
    ]
    flow = {
        "name": "nasty",
        "description": NASTY,
        "on_failure": "continue",
        "params": {"type": "object", "properties": {"text": {"description": NASTY}}},
        "nodes": nodes,
    }
    shell.write("flow.json", json.dumps(flow))
    wrong = {"name": NASTY, "nodes": [{"id": NASTY, "handler": NASTY, "dependencies": [NASTY]}]}
    shell.write("wrong.json", json.dumps(wrong))
    shell.write("params.json", json.dumps({"text": NASTY}))
    shell.write("items.jsonl", json.dumps({"text": NASTY}) + "\n")
    return shell


EVERY = [
    ["validate", "wrong.json"],
    ["validate", "wrong.json", "--json"],
    ["validate", "flow.json", "--handlers", "mine.py"],
    ["graph", "flow.json"],
    ["graph", "flow.json", "--format", "mermaid"],
    ["graph", "flow.json", "--format", "dot"],
    ["graph", "flow.json", "--format", "svg"],
    ["handlers", "--handlers", "mine.py"],
    ["doctor"],
    ["doctor", "--json"],
    ["workflows", "register", "flow.json", "--handlers", "mine.py"],
    ["workflows", "list"],
    ["workflows", "list", "--json"],
    ["workflows", "show", "nasty"],
    ["workflows", "show", "nasty", "--json"],
    ["trigger", "nasty", "--params", "params.json", "--handlers", "mine.py"],
    ["batch", "nasty", "items.jsonl", "--handlers", "mine.py"],
    ["batch", "nasty", "items.jsonl", "--handlers", "mine.py", "--json"],
    ["limits", "set", NASTY, "5"],
    ["limits", "list"],
    ["runs", "list"],
    ["runs", "list", "--json"],
    ["runs", "list", "--workflow", NASTY],
    ["runs", "show", "RUN"],
    ["runs", "show", "RUN", "--json"],
    ["runs", "show", NASTY],
    ["runs", "why", "RUN"],
    ["runs", "why", "RUN", "--json"],
    ["runs", "watch", "RUN"],
    ["runs", "results", "RUN"],
    ["runs", "results", "RUN", "--json"],
    ["runs", "events", "RUN"],
    ["runs", "events", "RUN", "--json"],
    ["runs", "events", "RUN", "--follow", "--json"],
    ["runs", "verify", "RUN"],
    ["runs", "retry", "RUN", "--handlers", "mine.py"],
    ["runs", "resume"],
    ["runs", "cancel", "RUN"],
    ["run", NASTY],
    ["documents", "stats"],
    ["documents", "reviews", "list"],
]


def test_no_command_prints_or_drops_terminal_control_characters(nasty: Shell) -> None:
    ran = nasty("run", "flow.json", "--params", "params.json", "--handlers", "mine.py")
    assert ran.code == 1, ran.err
    document = nasty(
        "run", "flow.json", "--params", "params.json", "--handlers", "mine.py", "--json"
    )
    run_id = json.loads(document.out)["run_id"]
    outcomes: list[tuple[Any, Outcome]] = [("run", ran), ("run --json", document)]
    for words in EVERY:
        given = [{"RUN": run_id}.get(word, word) for word in words]
        outcomes.append((words, nasty(*given)))
    for words, done in outcomes:
        reported = done.out + done.err
        assert not [char for char in STEERING if char in reported], (words, reported)
        assert "Traceback" not in reported, words
        assert "No such" not in reported, (words, reported)
    shown = {" ".join(words): done for words, done in outcomes[2:] if isinstance(words, list)}
    assert r"\x1b[31mESC \x9b2JCSI \x07BEL \rCR \x7fDEL \u202eBIDI" in ran.out + ran.err
    assert r"\x1b[31mESC" in shown["runs show RUN"].out
    assert json.loads(document.out)["params"] == {"text": NASTY}


def test_a_log_line_escapes_terminal_control_characters(nasty: Shell) -> None:
    for how in ("console", "json"):
        done = nasty(
            *("run", "flow.json", "--params", "params.json", "--handlers", "mine.py"),
            DOVETAIL_LOG_FORMAT=how,
        )
        assert "x1b[31mESC" in done.err
        assert not [char for char in STEERING if char in done.err + done.out]


@given(st.recursive(st.none() | st.text() | st.integers(-(2**53), 2**53), st.lists))
def test_json_output_keeps_its_value_and_has_no_control_characters(value: Any) -> None:
    try:
        orjson.dumps(value)
    except TypeError:  # a lone surrogate, which no value of ours has
        return
    for text in (json_bytes(value).decode(), json_text(value)):
        assert json.loads(text) == value
        assert all(char.isprintable() or char == "\n" for char in text)


def test_json_output_escapes_the_characters_that_json_does_not() -> None:
    assert json_text(["\x9b", "\x7f", "\u202e"]) == r'["\u009b","\u007f","\u202e"]'


def test_a_file_name_with_control_characters_is_printed_escaped(shell: Shell) -> None:
    path = Path("evil\x1b[31m\u202e.yaml")
    shell.write(str(path), "name: f\nnodes: []\n")
    done = shell("validate", str(path))
    assert r"evil\x1b[31m\u202e.yaml" in done.out + done.err
