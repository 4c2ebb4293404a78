"""Definitions that attack their reader: bombs, floods, and schemas that never end.

Every body comes to this: read as text, then checked. It must cost at most 100 ms of the processor,
whatever is in it, be it as small as the API reads in the loop that serves all callers or a whole
megabyte. Only what comes close to the largest workflow there may be takes as long as that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest

from dovetail.api.request_body import LARGE_BYTES
from dovetail.core.definition.params_schema import MAX_SCHEMA_BYTES, _compiled
from dovetail.core.definition.source import read_text
from dovetail.core.definition.validation import check
from dovetail.core.errors import InvalidDefinition, Problem

from .pace import seconds_of

Format = Literal["yaml", "json"]
MIB = 1 << 20
MOST_SECONDS = 0.1
NOISE = 3  # what a busy machine may add to work that takes so long


def filled(piece: str, before: str = "", behind: str = "") -> Callable[[int], str]:
    return lambda size: before + piece * ((size - len(before + behind)) // len(piece)) + behind


def numbered(piece: str, before: str = "", behind: str = "") -> Callable[[int], str]:
    """A piece with its number in it, as often as it fits."""

    def text(size: int) -> str:
        count = (size - len(before + behind)) // (len(piece) + 5)
        head, tail = piece.split("#")
        return before + "".join([f"{head}{at:05}{tail}" for at in range(count)]) + behind

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


def fitted(make: Callable[[int], Any], each: int) -> Callable[[int], str]:
    """What `make` gives for a number, as JSON, the number so that it has about so many bytes."""

    def text(size: int) -> str:
        count = size // each
        found = json.dumps(make(count), separators=(",", ":"))
        while len(found) > size:
            count = count * size // len(found) - 1
            found = json.dumps(make(count), separators=(",", ":"))
        return found

    return text


def of_nodes(
    make: Callable[[int], dict[str, Any]], each: int, most: int = 10_000
) -> Callable[[int], str]:
    """A definition of nodes that have about so many bytes each, and no more than may be."""
    return fitted(
        lambda count: {"name": "x", "nodes": [make(at) for at in range(min(count, most))]}, each
    )


def of_config(make: Callable[[int], str], each: int) -> Callable[[int], str]:
    def config(count: int) -> dict[str, Any]:
        texts = {f"k{at}": make(at) for at in range(count)}
        return {"name": "x", "nodes": [node(0, config=texts)]}

    return fitted(config, each)


def node(at: int, **more: Any) -> dict[str, Any]:
    return {"id": f"n{at}", "handler": "output", **more}


DEFINITIONS: dict[str, Callable[[int], str]] = {
    "nodes": of_nodes(node, 33, MIB),
    "one id": of_nodes(lambda at: node(0), 33),
    "a circle": of_nodes(lambda at: node(at, dependencies=[f"n{at - 1 if at else 900}"]), 60),
    "itself": of_nodes(lambda at: node(at, dependencies=[f"n{at}"]), 60),
    "a handler for each": of_nodes(lambda at: {"id": f"n{at}", "handler": f"outptu{at}"}, 40),
    "a parent for each": of_nodes(lambda at: node(at, dependencies=[f"m{at}"]), 60),
    "every parent": lambda size: of_nodes(
        lambda at: node(at, dependencies=[f"n{to}" for to in range(at)]), int(size**0.5 * 3)
    )(size),
    "parents that are no text": fitted(
        lambda count: {"name": "x", "nodes": [node(0, dependencies=[0] * min(count, 100_000))]}, 2
    ),
    "one parent": filled(
        '"a",', '{"name":"x","nodes":[{"id":"b","handler":"output","dependencies":[', '"a"]}]}'
    ),
    "fields": numbered('"z#":1,', '{"name":"x","nodes":[],', '"y":1}'),
    "fields of a node": numbered('"z#":1,', '{"name":"x","nodes":[{', '"id":"a"}]}'),
    "fields of every node": of_nodes(lambda at: node(at, **{f"z{n}": 1 for n in range(9)}), 90),
    "fields of a part": numbered(
        '"z#":1,', '{"name":"x","nodes":[{"id":"a","handler":"output","retry":{', '"y":1}}]}'
    ),
    "a name behind many fields": numbered('"z#":1,', '{"nodes":[],', '"name":1}'),
    "empty nodes": of_nodes(lambda at: {}, 4, MIB),
    "no nodes": filled("null,", '{"name":"x","nodes":[', "1]}"),
    "a long name": filled("x", '{"name":"', '","nodes":[]}'),
    "templates that are one bomb each": of_config(lambda at: "{{ 'a' * 10**9 }}", 32),
    "templates that read no node": of_config(lambda at: "{{ b.c }}", 24),
    "templates without an end": of_config(lambda at: "{{ " * 5000, 15_000),
    "dense templates": of_config(lambda at: "{{ params.a }}" * 1100, 15_400),
    "a template that is too long": lambda size: json.dumps(
        {"name": "x", "nodes": [node(0, config={"k": "{{ a }}" * (max(size, 20_000) // 7 - 20)})]}
    ),
    "conditions": of_nodes(lambda at: node(at, condition="{{ 1 +"), 60),
    "a condition for each": of_nodes(
        lambda at: node(at, condition=f"{{{{ n{at}.x > {at} and params.y != 'z{at}' }}}}"), 90
    ),
    "a shape for each": of_nodes(
        lambda at: node(at, condition="{{ " + " - ".join(f"{at:b}") + " > params.x }}"), 105
    ),
    "long templates that are wrong alike": of_config(
        lambda at: "{{ a" + " + a" * 400 + f" ** {at} }}}}", 1630
    ),
    "conditions with something beside": of_nodes(
        lambda at: node(at, condition=f"{{{{ params.x > {at} }}}} {at}"), 75
    ),
    "many reads of many parents": fitted(
        lambda count: {
            "name": "x",
            "nodes": [
                *(node(at) for at in range(count)),
                node(
                    count,
                    dependencies=[f"n{at}" for at in range(count)],
                    config={
                        f"k{since}": "".join(
                            f"{{{{ n{(7 * at) % count}.x }}}}" for at in range(since, since + 400)
                        )
                        for since in range(0, 8 * count, 400)
                    }
                    | {"wrong": "{{ m.x }}"},
                ),
            ],
        },
        160,
    ),
    "a schema that is too large": fitted(
        lambda count: {
            "name": "x",
            "nodes": [node(0)],
            "params": {"anyOf": [{"type": "string", "default": 1}] * count},
        },
        30,
    ),
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
    "needed names": lambda size: {"required": [f"p{at}" for at in range(size // 10)]},
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
        "anyOf": [{"properties": {f"p{at}": True}} for at in range(size // 32)],
        "default": {"x": 1},
    },
    "patterns of letters": lambda size: {
        "properties": {f"p{at}": {"pattern": f"\\p{{L}}{{50}}{at}"} for at in range(200)}
    },
    "billion laughs without a reference": lambda size: {
        "default": {},
        "$defs": {
            f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at - 1}"}] * 9} if at else {}
            for at in range(40)
        },
    },
    "a default for each of many parts": lambda size: {
        "$defs": {
            "big": {"properties": {f"p{at}": {"default": 1} for at in range(size // 50)}},
            **{f"d{at}": {"default": {}, "$ref": "#/$defs/big"} for at in range(size // 110)},
        }
    },
    "defaults for each of many items": lambda size: {
        "items": {"properties": {f"p{at}": {"default": 1} for at in range(size // 55)}},
        "default": [{}] * (size // 9),
    },
    "a large default in many places": lambda size: {
        "$defs": {
            "big": {"properties": {"x": {"default": [0] * (size // 6), "items": {}}}},
            **{f"d{at}": {"default": {}, "$ref": "#/$defs/big"} for at in range(size // 110)},
        }
    },
    "what is left over of a large default": lambda size: {
        "unevaluatedProperties": False,
        "allOf": [{"anyOf": [{"properties": {f"p{at}": {}}}]} for at in range(size // 70)],
        "default": {f"p{at}": 1 for at in range(size // 35)},
    },
    "a small divisor": lambda size: {"multipleOf": 1e-300, "default": 1e300},
}  # fmt: skip


def in_params(make: Callable[[int], Any]) -> Callable[[int], str]:
    def text(size: int) -> str:
        params = {"type": "object", **make(size - 200)}
        return json.dumps(
            {"name": "x", "nodes": [node(0)], "params": params}, separators=(",", ":")
        )

    return text


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
    "definition: a shape for each",
    "schema: alternatives",
    "schema: needed names",
    "schema: a default for each of many parts",
}

# As large as the largest workflow may be, which takes longer than others: see `WORKFLOWS`.
AT_THE_LIMITS = {
    "yaml: keys",
    "yaml: lines of dashes",
    "yaml: items in lines",
    "definition: a name behind many fields",
    "definition: a condition for each",
    "definition: conditions with something beside",
    "definition: many reads of many parents",
}


def problems(text: str | bytes, form: Format) -> tuple[Problem, ...]:
    """As for a body: what was wrong with the text, or else with what it says."""
    try:
        return check(read_text(text, format=form), {"output", "input"}).errors
    except InvalidDefinition as error:
        return tuple(error.problems)


def test_there_are_enough_hostile_texts() -> None:
    assert len(HOSTILE) >= 100
    assert len({make(LARGE_BYTES) for _, make in HOSTILE.values()}) >= len(HOSTILE) - 10


def found_in_time(text: str | bytes, form: Format, most: float) -> tuple[Problem, ...]:
    found: tuple[Problem, ...] = ()

    def check_it() -> None:
        nonlocal found
        _compiled.cache_clear()  # of schemas
        found = problems(text, form)

    assert seconds_of(check_it, most) <= most
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_refused_in_time(name: str) -> None:
    form, make = HOSTILE[name]
    text = make(LARGE_BYTES)
    assert len(text) <= LARGE_BYTES * 1.3
    found = found_in_time(text, form, MOST_SECONDS)
    assert found or name in HARMLESS
    assert len(found) <= 1001
    assert all(problem.message.isprintable() for problem in found)
    assert all(len(problem.message) < 1000 for problem in found)


def largest(name: str) -> int:
    """A text may have a MiB; a schema that has more than this is not even looked at."""
    return MAX_SCHEMA_BYTES if name.startswith("schema") else MIB


@pytest.mark.parametrize("name", HOSTILE)
def test_the_largest_hostile_text_is_refused_in_time(name: str) -> None:
    form, make = HOSTILE[name]
    text = make(largest(name))
    assert len(text) <= largest(name)
    found = found_in_time(text, form, NOISE * MOST_SECONDS * (3 if name in AT_THE_LIMITS else 1))
    assert found or name in HARMLESS
    assert len(found) <= 1001


def chain(at: int, **more: Any) -> dict[str, Any]:
    return node(at, dependencies=[f"n{at - 1}"] if at else [], **more)


def reading(at: int) -> dict[str, Any]:
    return chain(at, config={"a": f"Of {{{{ n{at - 1}.x }}}}"} if at else {})


def crowded(at: int) -> dict[str, Any]:
    if at < 10:
        return {**node(at), "id": "abcdefghij"[at]}
    return node(at, depends_on=list("abcdefghij"))


def limits(make: Callable[[int], dict[str, Any]]) -> str:
    nodes = [make(at) for at in range(10_000)]
    return json.dumps({"name": "x", "nodes": nodes}, separators=(",", ":"))


def indented(text: str) -> str:
    """The nodes of a JSON text as YAML in blocks."""
    lines = ["name: x", "nodes:"]
    for raw in json.loads(text)["nodes"]:
        first, *others = (f"{key}: {json.dumps(value)}" for key, value in raw.items())
        lines += [f"- {first}", *(f"  {other}" for other in others)]
    return "\n".join(lines)


# What a workflow may be, and the milliseconds that it took on two quiet cores of the year 2026.
WORKFLOWS: dict[str, tuple[Format, Callable[[], str], int]] = {
    "ten parents for each": ("json", lambda: limits(crowded), 100),
    "a template for each": ("json", lambda: limits(reading), 140),
    "a condition for each": (
        "json", lambda: limits(lambda at: node(at, condition=f"{{{{ params.x > {at} }}}}")), 150,
    ),
    "a template for each, in YAML": ("yaml", lambda: indented(limits(reading)), 250),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_largest_workflows_are_valid_and_take_little_longer(name: str) -> None:
    form, make, milliseconds = WORKFLOWS[name]
    text = make()
    assert len(text) <= MIB
    assert found_in_time(text, form, 2 * NOISE * milliseconds / 1000) == ()


def test_a_text_of_ten_megabytes_is_refused_without_being_parsed() -> None:
    for text in ("[" * 10 * MIB, b"\xff" * 10 * MIB):
        assert [problem.code for problem in problems(text, "json")] == ["too_large"]
        assert seconds_of(lambda text=text: problems(text, "json"), 0.05) <= 0.05


def _tell() -> None:
    """On a quiet machine: python -m tests.core.test_hostile_texts."""
    texts = [(name, form, make(largest(name))) for name, (form, make) in HOSTILE.items()]
    texts += [(name, form, text()) for name, (form, text, _) in WORKFLOWS.items()]
    took = {name: seconds_of(partial(problems, text, form), 0) for name, form, text in texts}
    for name in sorted(took, key=lambda name: -took[name]):
        print(f"{1000 * took[name]:6.0f} ms  {name}")


if __name__ == "__main__":
    _tell()
