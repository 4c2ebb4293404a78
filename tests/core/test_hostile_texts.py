"""Definitions that attack whoever reads them: bombs, floods, and schemas that never end.

Every body comes to this: read as text, then checked. What is as small as the API reads in the
loop that serves everybody must cost at most 100 ms of the processor, whatever is in it; so must a
whole megabyte that is refused for what it is rather than for all that is wrong in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest

from dovetail.api.bodies import LARGE_BYTES
from dovetail.core.definition.source import read_text
from dovetail.core.definition.validation import check
from dovetail.core.errors import InvalidDefinition, Problem

from .pace import seconds_of

Format = Literal["yaml", "json"]
MIB = 1 << 20
MOST_SECONDS = 0.1


def filled(piece: str, before: str = "", behind: str = "") -> Callable[[int], str]:
    return lambda size: before + piece * ((size - len(before + behind)) // len(piece)) + behind


def numbered(piece: str, before: str = "", behind: str = "") -> Callable[[int], str]:
    """A piece with its number in it, as often as it fits."""

    def text(size: int) -> str:
        count = (size - len(before + behind)) // (len(piece) + 5)
        return before + "".join(piece.replace("#", f"{at:05}") for at in range(count)) + behind

    return text


def always(text: str) -> Callable[[int], str]:
    return lambda size: text


LAUGHS = "a0: &a0 x\n" + "".join(
    f"a{at}: &a{at} [{','.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 40)
)

YAML: dict[str, Callable[[int], str]] = {
    "billion laughs": always(LAUGHS),
    "one long anchor, many aliases": filled("*a,", "a: &a " + "x" * 9000 + "\nb: [", "]"),
    "merge keys": numbered("b#: {<<: *a}\n", "a: &a {x: 1}\n"),
    "an alias of itself": always("a: &a [*a]"),
    "anchors": numbered("- &a# x\n"),
    "one anchor": filled("- &a x\n"),
    "objects": filled("- !!python/object/apply:os.system [id]\n"),
    "new objects": always("!!python/object/new:subprocess.Popen [[id]]"),
    "modules": always("a: !!python/module:os"),
    "own tags": numbered("- !a# x\n"),
    "tag directives": numbered("%TAG !a#! x\n", "", "--- 1"),
    "sets": filled("- !!set {a, b}\n"),
    "binary": filled("A", "a: !!binary "),
    "documents": filled("--- a\n"),
    "line ends": filled("\n", "a: [\n"),
    "line ends of Unicode": lambda size: "\u2028" * (size // 3),
    "carriage returns": filled("\r", "a: ["),
    "comments": filled("#\n"),
    "one comment": filled("#"),
    "indents": lambda size: "\n".join(" " * at + "a:" for at in range(min(1400, int(size**0.5)))),
    "a block that is indented far": always("a: |9\n         x"),
    "open quotes": filled("''", "'"),
    "open double quotes": filled('\\"', '"'),
    "escapes": filled("\\x41", 'a: "', '"'),
    "folded lines": filled("  b\n", "a: >\n"),
    "plain lines": filled("b\n   ", "a: "),
    "a long key": filled("k", "? ", "\n: v"),
    "keys": numbered("k#: 1\n"),
    "one key": filled("a: 1\n"),
    "colons": filled(":"),
    "colons and blanks": filled(": "),
    "dashes": filled("- "),
    "lines of dashes": filled("- - - - - - -\n"),
    "question marks": filled("? "),
    "brackets": filled("["),
    "braces": filled("{"),
    "mappings": filled("{a: "),
    "both": filled("[{a: "),
    "commas": filled(",", "["),
    "stars": filled("*a "),
    "ampersands": filled("&a "),
    "exclamation marks": filled("! "),
    "per cent": filled("%\n"),
    "items in lines": filled("a,\n", "[", "]"),
    "NUL": filled("\0"),
    "tabs": filled("\t"),
    "byte order marks": lambda size: "\ufeff" * (size // 3),
    "control characters": filled("a: \x01\x02"),
    "no numbers": always("name: .nan\nnodes: [.inf, -.inf, .NaN]"),
    "a long number": filled("9", "a: "),
    "a long hexadecimal number": filled("f", "a: 0x"),
    "a long number of base 60": filled("1:", "a: ", "1"),
    "a large exponent": filled("9", "a: 1e"),
    "times": filled("- 2026-11-16T06:00:00.000000000Z\n"),
    "too deep": filled("  " * 40 + "- a\n"),
}

JSON: dict[str, Callable[[int], str | bytes]] = {
    "brackets": filled("["),
    "brackets that close": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "objects": filled('{"a":'),
    "both": filled('[{"a":'),
    "texts": filled('"",', "[", '""]'),
    "numbers": filled("1,", "[", "1]"),
    "a long number": filled("9", "[", "]"),
    "many long numbers": filled("9" * 400 + ",", "[", "1]"),
    "zeros": filled("0", "[", "]"),
    "digits": filled("1", "[0.", "]"),
    "a large exponent": filled("9", "[1e", "]"),
    "signs": filled("-", "["),
    "no numbers": filled("NaN,", "[", "1]"),
    "infinities": always("[NaN,Infinity,-Infinity]"),
    "escapes": filled("\\u0041", '["', '"]'),
    "pairs": filled("\\ud83d\\ude00", '["', '"]'),
    "half pairs": filled("\\ud800", '["', '"]'),
    "open quotes": filled('\\"', '["'),
    "a refusal before open quotes": filled('\\"', f'[{"9" * 5000},"'),
    "one key": filled('"a":1,', "{", '"b":1}'),
    "keys": numbered('"k#":1,', "{", '"b":1}'),
    "a long key": filled("k", '{"', '":1}'),
    "blanks": filled(" "),
    "blanks before the end": filled(" ", "1", "x"),
    "line ends": filled("\n", "["),
    "a comment": filled("*", "/*", "*/"),
    "words": filled("true,", "[", "true]"),
    "words in one": filled("true"),
    "NUL": always('["\0"]'),
    "an escaped NUL": always('["\\u0000"]'),
    "prototypes": always('{"__proto__": {"a": 1}, "constructor": {"prototype": {}}}'),
    "UTF-16": lambda size: "[1]".encode("utf-16"),
    "Latin-1": lambda size: b'["\xff\xfe"]',
    "an overlong form": lambda size: b'["\xc0\xae"]',
    "half a character": lambda size: b'["\xe2\x82',
}


def of_nodes(make: Callable[[int], dict[str, Any]], each: int) -> Callable[[int], str]:
    """A definition of nodes that have about so many bytes each."""
    return lambda size: json.dumps({"name": "x", "nodes": [make(at) for at in range(size // each)]})


def of_config(make: Callable[[int], str], each: int) -> Callable[[int], str]:
    def text(size: int) -> str:
        config = {f"k{at}": make(at) for at in range(size // each)}
        return json.dumps({"name": "x", "nodes": [node(0, config=config)]})

    return text


def node(at: int, **more: Any) -> dict[str, Any]:
    return {"id": f"n{at}", "handler": "output", **more}


DEFINITIONS: dict[str, Callable[[int], str]] = {
    "nodes": of_nodes(node, 33),
    "one id": of_nodes(lambda at: node(0), 33),
    "a circle": of_nodes(lambda at: node(at, dependencies=[f"n{at - 1 if at else 900}"]), 60),
    "itself": of_nodes(lambda at: node(at, dependencies=[f"n{at}"]), 60),
    "a handler for each": of_nodes(lambda at: {"id": f"n{at}", "handler": f"outptu{at}"}, 40),
    "a parent for each": of_nodes(lambda at: node(at, dependencies=[f"m{at}"]), 60),
    "every parent": lambda size: of_nodes(
        lambda at: node(at, dependencies=[f"n{to}" for to in range(at)]), int(size**0.5 * 3)
    )(size),
    "one parent": filled(
        '"a",', '{"name":"x","nodes":[{"id":"b","handler":"output","dependencies":[', '"a"]}]}'
    ),
    "fields": numbered('"z#":1,', '{"name":"x","nodes":[],', '"y":1}'),
    "fields of a node": numbered('"z#":1,', '{"name":"x","nodes":[{', '"id":"a"}]}'),
    "empty nodes": of_nodes(lambda at: {}, 4),
    "no nodes": filled("null,", '{"name":"x","nodes":[', "1]}"),
    "a long name": filled("x", '{"name":"', '","nodes":[]}'),
    "templates that are one bomb each": of_config(lambda at: "{{ 'a' * 10**9 }}", 32),
    "templates that read nobody": of_config(lambda at: "{{ b.c }}", 24),
    "templates without an end": of_config(lambda at: "{{ " * 5000, 15_000),
    "dense templates": of_config(lambda at: "{{ params.a }}" * 1100, 15_400),
    "a template that is too long": lambda size: of_config(lambda at: "{{ a }}" * 2400, size)(size),
    "conditions": of_nodes(lambda at: node(at, condition="{{ 1 +"), 60),
    "retries": of_nodes(lambda at: node(at, max_retries=10**18, retry={"jitter": -1}), 90),
}  # fmt: skip

SCHEMAS: dict[str, Callable[[int], Any]] = {
    "a pattern that backtracks": lambda size: {"pattern": "(a)\\1"},
    "a pattern that looks ahead": lambda size: {"pattern": "(?=a)b"},
    "a pattern that repeats": lambda size: {"pattern": "((a{1000}){1000}){1000}"},
    "a pattern that repeats little": lambda size: {"pattern": "(.{0,255}){0,255}"},
    "a pattern of letters": lambda size: {"pattern": "(\\p{L}{1000}){1000}"},
    "patterns": lambda size: {
        "patternProperties": {f"(x{at}+)+$": {} for at in range(size // 20)}
    },
    "a reference to the network": lambda size: {"$ref": "http://127.0.0.1:1/x"},
    "a reference to a file": lambda size: {"$ref": "file:///etc/passwd"},
    "a reference beside an id": lambda size: {"$id": "http://evil.example/", "$ref": "other"},
    "a reference by a moving anchor": lambda size: {"$dynamicRef": "#x"},
    "a reference to itself": lambda size: {"$ref": "#"},
    "a circle": lambda size: {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a",
    },
    "billion laughs": lambda size: {
        "$defs": {
            f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at - 1}"}] * 9} if at else {}
            for at in range(40)
        },
        "$ref": "#/$defs/a39",
    },
    "another language": lambda size: {"$schema": "http://evil.example/schema"},
    "alternatives": lambda size: {"anyOf": [{"type": "string"}] * (size // 20)},
    "values": lambda size: {"enum": list(range(size // 7)), "default": "x"},
    "needed names": lambda size: {"required": [f"p{at}" for at in range(size // 9)]},
    "wrong defaults": lambda size: {
        "properties": {f"p{at}": {"default": "x", "type": "integer"} for at in range(size // 45)}
    },
    "a default to compare with itself": lambda size: {
        "uniqueItems": True, "default": [[at] for at in range(size // 9)],
    },
    "a default to search": lambda size: {
        "contains": {"const": 1}, "default": [0] * (size // 4), "minContains": 1,
    },
    "what is left over": lambda size: {
        "unevaluatedProperties": False,
        "anyOf": [{"properties": {f"p{at}": True}} for at in range(size // 30)],
        "default": {"x": 1},
    },
    "a small divisor": lambda size: {"multipleOf": 1e-300, "default": 1e300},
}  # fmt: skip


def in_params(make: Callable[[int], Any]) -> Callable[[int], str]:
    return lambda size: json.dumps(
        {"name": "x", "nodes": [node(0)], "params": {"type": "object", **make(size - 200)}}
    )


KINDS: tuple[tuple[str, Format, dict[str, Any]], ...] = (
    ("yaml", "yaml", YAML),
    ("json", "json", JSON),
    ("definition", "json", DEFINITIONS),
    ("schema", "json", {name: in_params(make) for name, make in SCHEMAS.items()}),
)
HOSTILE: dict[str, tuple[Format, Callable[[int], str | bytes]]] = {
    f"{kind}: {name}": (form, make) for kind, form, rows in KINDS for name, make in rows.items()
}


# They are only large: this much of them is allowed.
HARMLESS = {
    "definition: nodes",
    "definition: every parent",
    "schema: alternatives",
    "schema: needed names",
}


def problems(text: str | bytes, form: Format) -> tuple[Problem, ...]:
    """As for a body: what was wrong with the text, or else with what it says."""
    try:
        return check(read_text(text, format=form), {"output", "input"}).errors
    except InvalidDefinition as error:
        return tuple(error.problems)


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 100
    assert len({make(LARGE_BYTES) for _, make in HOSTILE.values()}) >= len(HOSTILE) - 10


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_refused_in_time(name: str) -> None:
    form, make = HOSTILE[name]
    text = make(LARGE_BYTES)
    assert len(text) <= LARGE_BYTES * 1.3
    found = problems(text, form)
    assert found or name in HARMLESS
    assert len(found) <= 1001
    assert all(problem.message.isprintable() for problem in found)
    assert all(len(problem.message) < 1000 for problem in found)
    assert seconds_of(lambda: problems(text, form), MOST_SECONDS) <= MOST_SECONDS


# Refused for what it is: a megabyte must not cost more than the beginning that shows it.
FLOODS = [
    name
    for name in HOSTILE
    if name.startswith(("yaml: billion", "yaml: one long", "yaml: an alias", "yaml: objects"))
    or name.partition(": ")[2]
    in {
        "anchors", "one anchor", "merge keys", "own tags", "tag directives", "sets", "binary",
        "documents", "open quotes", "open double quotes", "one comment", "a long key", "one key",
        "colons", "dashes", "question marks", "brackets", "braces", "mappings", "both", "commas",
        "stars", "ampersands", "exclamation marks", "NUL", "tabs", "byte order marks",
        "control characters", "a long number", "a long hexadecimal number", "digits", "zeros",
        "a large exponent", "brackets that close", "objects", "texts", "no numbers", "half pairs",
        "a refusal before open quotes", "signs", "blanks", "a comment", "words in one", "too deep",
        "no nodes", "empty nodes", "one parent", "nodes", "templates without an end", "a long name",
    }
]  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
def test_a_megabyte_is_refused_as_soon_as_it_is_clear(name: str) -> None:
    form, make = HOSTILE[name]
    text = make(MIB)
    assert problems(text, form)
    assert seconds_of(lambda: problems(text, form), MOST_SECONDS) <= MOST_SECONDS


def test_ten_megabytes_are_not_even_looked_at() -> None:
    for text in ("[" * 10 * MIB, b"\xff" * 10 * MIB):
        assert [problem.code for problem in problems(text, "json")] == ["too_large"]
        assert seconds_of(lambda text=text: problems(text, "json"), 0.05) <= 0.05
