"""Reading YAML and JSON: the data, the positions, and everything that is refused."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dovetail.core.definition.source import LineIndex, Source, line_of, read_text
from dovetail.core.errors import InvalidDefinition, Problem

from .pace import at_most

Format = Literal["yaml", "json"]
MIB = 1 << 20
# Measuring coverage makes everything some times slower.


def refused(text: str | bytes, kind: Format = "yaml", **limits: int) -> list[Problem]:
    with pytest.raises(InvalidDefinition) as error:
        read_text(text, format=kind, **limits)
    return list(error.value.problems)


def only(text: str | bytes, kind: Format = "yaml", **limits: int) -> Problem:
    (problem,) = refused(text, kind, **limits)
    return problem


def place(problem: Problem) -> tuple[str, int | None, int | None]:
    return problem.path, problem.line, problem.column


# Data


def test_yaml_and_json_give_the_same_data() -> None:
    text = 'name: x\nnodes:\n  - {id: a, n: [1, -2.5, true, null, "é😀"]}\n'
    data = {"name": "x", "nodes": [{"id": "a", "n": [1, -2.5, True, None, "é😀"]}]}
    assert read_text(text, format="yaml", name="f.yaml").data == data
    assert read_text(json.dumps(data), format="json").data == data
    assert read_text(json.dumps(data, ensure_ascii=False).encode(), format="yaml").data == data


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_byte_order_mark_is_ignored(kind: Format) -> None:
    source = read_text(b"\xef\xbb\xbf" + b'{"a": 1}', format=kind)
    assert source.data == {"a": 1}
    assert source.position(("a",), key=True) == (1, 2)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12", 12),
        ("+3", 3),
        ("-0", 0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("1e3", 1000.0),
        ("18446744073709551615", 18446744073709551615),
        ("+18446744073709551615", 18446744073709551615),
        ("-9223372036854775808", -9223372036854775808),
        # Everything below means text to some reader, so it is text.
        *[
            (text, text)
            for text in ("on", "off", "yes", "No", "y", "0777", "0x1f", "0o17", "1_000", "1:30")
        ],
        *[(text, text) for text in ("2026-11-15", "nan", "inf", "-.", "+", ".", "1.2.3", "tRue")],
        ("'12'", "12"),
        ('"true"', "true"),
        ("|\n  12\n", "12\n"),
    ],
)
def test_a_yaml_scalar_is_typed_only_if_it_cannot_mean_text(scalar: str, value: Any) -> None:
    found = read_text(f"a: {scalar}", format="yaml").data["a"]
    assert (found, type(found)) == (value, type(value))


def test_yaml_keys_are_always_text() -> None:
    text = "1: a\ntrue: b\nnull: c\n2026-01-01: d\n'<<': e\n"
    assert list(read_text(text, format="yaml").data) == ["1", "true", "null", "2026-01-01", "<<"]


@pytest.mark.parametrize("text", ["", "# only a comment", "\n\n", "---\n...\n"])
def test_an_empty_yaml_text_is_null(text: str) -> None:
    source = read_text(text, format="yaml")
    assert source.data is None
    assert source.position(("name",)) == (1, 1) or text.startswith("---")


@pytest.mark.parametrize("text", ["%YAML 1.2\n---\na: 1\n", "--- \na: 1\n...\n# end\n"])
def test_document_markers_of_a_single_document_are_allowed(text: str) -> None:
    assert read_text(text, format="yaml").data == {"a": 1}


# Positions

YAML = """\
name: x
nodes:
  - id: a
    config: {headers: {Authorization: "t", "a b": 1}}
  - id: b
    dependencies:
      - a
      - c
    text: |
      long
"""
JSON = """{
  "name": "x",
  "nodes": [
    {"id": "a", "é😀": [1, {"b": "\\u00e9"}]},
    {"id": "b"}
  ]
}"""


@pytest.mark.parametrize(
    ("path", "key", "position"),
    [
        ((), False, (1, 1)),
        (("name",), False, (1, 7)),
        (("name",), True, (1, 1)),
        (("nodes",), False, (3, 3)),
        (("nodes", 0), False, (3, 5)),
        (("nodes", 0, "id"), False, (3, 9)),
        (("nodes", 0, "config", "headers", "Authorization"), False, (4, 39)),
        (("nodes", 0, "config", "headers", "a b"), True, (4, 44)),
        (("nodes", 1, "dependencies", 1), False, (8, 9)),
        (("nodes", 1, "dependencies", 1), True, (8, 9)),
        (("nodes", 1, "text"), False, (9, 11)),
        # Of what is not there, the nearest parent that is.
        (("nodes", 1, "handler"), False, (5, 5)),
        (("nodes", 1, "handler"), True, (5, 5)),
        (("nodes", 7, "id"), False, (3, 3)),
        (("nodes", -1), False, (3, 3)),
        (("nodes", "a"), False, (3, 3)),
        (("name", "deeper"), False, (1, 7)),
    ],
)
def test_every_value_of_a_yaml_text_has_its_position(
    path: tuple[str | int, ...], key: bool, position: tuple[int, int]
) -> None:
    assert read_text(YAML, format="yaml").position(path, key=key) == position


@pytest.mark.parametrize(
    ("path", "key", "position"),
    [
        ((), False, (1, 1)),
        (("name",), False, (2, 11)),
        (("name",), True, (2, 3)),
        (("nodes", 0, "é😀", 1, "b"), False, (4, 33)),
        (("nodes", 0, "é😀", 1, "b"), True, (4, 28)),
        (("nodes", 1, "id"), False, (5, 12)),
        (("nodes", 1, "handler"), False, (5, 5)),
    ],
)
def test_every_value_of_a_json_text_has_its_position(
    path: tuple[str | int, ...], key: bool, position: tuple[int, int]
) -> None:
    source = read_text(JSON, format="json")
    assert source.position(path, key=key) == position
    assert source.position(path, key=key) == position  # the second time from memory


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_counted_for_every_kind_of_line_ending(end: str) -> None:
    text = YAML.replace("\n", end)
    source = read_text(text, format="yaml")
    line, column = source.position(("nodes", 1, "dependencies", 1)) or (0, 0)
    assert (line, column) == (8, 9)
    assert line_of(text, line) == "      - c"
    assert line_of("\ufeff" + text, 1) == "name: x"
    assert line_of(text, 0) == line_of(text, 99) == ""


@given(
    st.lists(st.sampled_from(["a", "é", "\n", "\r", "\r\n", "\x85", "\u2028"]), min_size=1),
    st.integers(1, 2000),
    st.floats(0, 1),
)
@example(["a"], 5000, 1.0)
@example(["\r\n"], 2048, 0.5)
def test_a_position_is_found_in_a_text_of_any_lines(
    pieces: list[str], times: int, where: float
) -> None:
    text = "".join(pieces) * times
    offset = round(where * len(text))
    ends = [found.end() for found in re.finditer("\r\n|[\n\r\x85\u2028]", text)]
    before = [end for end in ends if end <= offset]
    assert LineIndex(text).place(offset) == (len(before) + 1, offset - max(before, default=0) + 1)


def test_data_without_a_text_has_no_positions() -> None:
    assert Source({"a": 1}).position(("a",)) is None


# Refused in YAML


@pytest.mark.parametrize(
    ("text", "word", "where"),
    [
        ("a: 1\nb: &x 2", "anchors", ("b", 2, 4)),
        ("a: *x", "aliases", ("a", 1, 4)),
        ("- *x", "aliases", ("[0]", 1, 3)),
        ("*x : 1", "aliases", ("", 1, 1)),
        ("a: &x {b: 1}", "anchors", ("a", 1, 4)),
        ("a: &x [1]", "anchors", ("a", 1, 4)),
        ("a: !!python/object:os.system x", "leave out '!!python/object:os.system'", ("a", 1, 4)),
        ("a: !!str 1", "leave out '!!str'", ("a", 1, 4)),
        ("a: ! x", "leave out '!'", ("a", 1, 4)),
        ("a: !x {}", "leave out '!x'", ("a", 1, 4)),
        ("a: {<<: {b: 1}}", "merge keys", ("a", 1, 5)),
        ("a: 1\nb:\n  c: 1\n  c: 2", "key 'c' appears twice", ("b.c", 4, 3)),
        ("a: 1\n---\nb: 2", "one YAML document", ("", 2, 1)),
        ("a: 1\n...\nb: 2", "one YAML document", ("", 3, 1)),
        ("[a] b", "one YAML document", ("", 1, 5)),
        ("%TAG ! x\n--- 1", "%TAG", ("", 1, 1)),
        ("a:\n\tb: 1", "indent YAML with spaces", ("a", 2, 1)),
        ("a:\n  - b\n\t- c", "indent YAML with spaces", ("a[0]", 3, 1)),
        ("a: .nan", ".nan is not a number", ("a", 1, 4)),
        ("a: -.inf", "-.inf is not a number", ("a", 1, 4)),
        ("a: [1, 1e999]", "1e999 is too large for a number", ("a[1]", 1, 8)),
        ("a: 18446744073709551616", "does not fit into 64 bits", ("a", 1, 4)),
        (f"a: {'9' * 5000}", "does not fit into 64 bits", ("a", 1, 4)),
        ('a: "\\0"', "NUL", ("a", 1, 4)),
        ('"\\0": 1', "NUL", ('["\\x00"]', 1, 1)),
        ("a: b\x07", "U+0007", ("", 1, 5)),
        ("a: b\x7f\ufeff", "U+007F", ("", 1, 5)),
        ("a: \ud800", "U+D800", ("", 1, 4)),
        ('a: "\\ud800"', "invalid Unicode", ("a", 1, 7)),
        ("a: {{ b.c }}", 'must be in quotes: "{{', ("a", 1, 4)),
        ("? [a]\n: b", "a key must be text", ("", 1, 3)),
        ("a: @b", "cannot start with '@'; put it in quotes", ("a", 1, 4)),
        ("a: b: c", "put a value that contains ': ' in quotes", ("", 1, 5)),
        ("a:\n  'x", "a quote is opened here and never closed", ("a", 2, 3)),
        ("- a\nb: c", "expected '-' indicator (while parsing a block collection", ("[1]", 2, 1)),
        ("a: [\n}", "not valid YAML: did not find expected node content", ("a[0]", 2, 1)),
    ],
)
def test_a_value_that_is_not_plain_data_is_refused_at_its_position(
    text: str, word: str, where: tuple[str, int, int]
) -> None:
    problem = only(text)
    assert problem.code == "invalid_field"
    assert word in problem.message
    assert place(problem) == where


def test_all_values_that_are_not_plain_data_are_reported_at_once() -> None:
    problems = refused("a: &x 1\na: .nan\nb: [*x, !!str c]\nc: [")
    assert [place(problem) for problem in problems] == [
        ("a", 1, 4),
        ("a", 2, 1),
        ("a", 2, 4),
        ("b[0]", 3, 5),
        ("b[1]", 3, 9),
        ("c[0]", 4, 5),
    ]


def test_at_most_a_hundred_problems_of_a_text_are_reported() -> None:
    assert len(refused("a: 1\n" * 5000)) == 100


# Refused in JSON


@pytest.mark.parametrize(
    ("text", "word", "where"),
    [
        ("", "expecting value", ("", 1, 1)),
        ("{'a': 1}", "double quotes", ("", 1, 2)),
        ('{"a": 1,\n}', "not valid JSON", ("", 2, 1)),
        ('[1] "x"', "extra data", ("", 1, 5)),
        ('["\n"]', "invalid control character", ("", 1, 3)),
        ('{"a": 1,\n "a": 2}', "key 'a' appears twice", ("a", 2, 2)),
        ('{"b": {"\\u0061": 1, "a": 2}}', "key 'a' appears twice", ("b.a", 1, 21)),
        ('{"a": [NaN]}', "NaN is not a JSON number", ("a[0]", 1, 8)),
        ("[-Infinity]", "-Infinity is not a JSON number", ("[0]", 1, 2)),
        ("[1,\n1e999]", "1e999 is not a JSON number", ("[1]", 2, 1)),
        ("18446744073709551616", "does not fit into 64 bits", ("", 1, 1)),
        ("-9223372036854775809", "does not fit into 64 bits", ("", 1, 1)),
        (f"[{'9' * 5000}]", "does not fit into 64 bits", ("[0]", 1, 2)),
        ('["\\ud800"]', "lone surrogate", ("[0]", 1, 2)),
        ('{"\\udfff": 1}', "lone surrogate", ('["\\udfff"]', 1, 2)),
        ('["\\u0000"]', "NUL", ("[0]", 1, 2)),
        ('["\\\\u0000", "\\u0000"]', "NUL", ("[1]", 1, 13)),
        ("[1]\x00", "U+0000", ("", 1, 4)),
    ],
)
def test_json_is_read_strictly(text: str, word: str, where: tuple[str, int, int]) -> None:
    problem = only(text, "json")
    assert problem.code == "invalid_field"
    assert word in problem.message
    assert place(problem) == where


@pytest.mark.parametrize(
    "rest",
    ["]]]]", ", {3: 4}", ', {"a": 1}: 2', '"', '"\\x"', " nonsense", '{"a": {[}', "{[1]: 2}"],
)
def test_garbage_after_the_first_problem_does_not_hide_it(rest: str) -> None:
    assert "twice" in refused(f'[{{"a": 1, "a": 2}}, 1{rest}', "json")[0].message
    assert "64 bits" in refused(f"[{'9' * 5000}, {rest}", "json")[0].message


def test_an_escaped_backslash_before_u0000_is_harmless() -> None:
    assert read_text('["\\\\u0000"]', format="json").data == ["\\u0000"]


def test_json_may_contain_characters_that_only_yaml_forbids() -> None:
    assert read_text('["\x7f\x9b\ufeff\uffff"]', format="json").data == ["\x7f\x9b\ufeff\uffff"]


def test_a_surrogate_pair_is_one_character() -> None:
    assert read_text('["\\ud83d\\ude00"]', format="json").data == ["😀"]


def test_a_nearly_exhausted_stack_is_not_reported_as_a_problem_of_the_text() -> None:
    def down(depth: int) -> None:
        if depth:
            return down(depth - 1)
        read_text("[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]", format="json")
        return None

    def deeper_and_deeper() -> None:
        for depth in range(10_000):
            down(depth)

    with pytest.raises(RecursionError):
        deeper_and_deeper()


# Size, depth, encoding


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_bytes_must_be_utf_8(kind: Format) -> None:
    problem = only('{"a": 1,\n"é": "'.encode() + b'\xff"}', kind)
    assert (problem.message, place(problem)) == ("the text is not UTF-8", ("", 2, 7))


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_text_has_a_limit_of_bytes(kind: Format) -> None:
    text = '"' + "é" * 9 + '"'
    assert read_text(text, format=kind, max_bytes=20).data == "é" * 9
    for given_text in (text, text.encode()):
        problem = only(given_text, kind, max_bytes=19)
        assert problem.code == "too_large"
        assert "20 bytes; at most 19" in problem.message


@pytest.mark.parametrize("kind", ["yaml", "json"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_nesting_has_a_limit_of_levels(kind: Format, opening: str, closing: str) -> None:
    read_text(opening * 32 + "1" + closing * 32, format=kind)
    problem = only(opening * 33 + "1" + closing * 33, kind)
    assert (problem.code, problem.line, problem.column) == ("too_large", 1, 32 * len(opening) + 1)
    assert "deeper than 32 levels" in problem.message


OPENINGS = ("[", "{", "- ", "? ", '{"a": ', "[{", "{ {")
HOSTILE: dict[str, tuple[Format, Callable[[], str]]] = {
    "10 MB": ("yaml", lambda: "a" * 10 * MIB),
    "tag directives": (
        "yaml",
        lambda: "".join(f"%TAG !a{i}! x\n" for i in range(50_000)) + "--- 1",
    ),
    "unclosed quotes": ("json", lambda: '["' + '\\"' * 500_000),
    "unclosed quotes after a refusal": ("json", lambda: f'[{"9" * 5000},"' + '\\"' * 500_000),
    "one key": ("json", lambda: "{" + '"a":1,' * 170_000 + '"b":1}'),
    "newlines at the end": ("yaml", lambda: "a: [\n" + "\n" * 1_000_000),
    "newlines after the end": ("yaml", lambda: "[a]" + "\n" * 1_000_000 + "b"),
    "documents": ("yaml", lambda: "--- a\n" * 170_000),
    "indents": ("yaml", lambda: "\n".join(" " * i + "a:" for i in range(1400))),
    "billion laughs": ("yaml", lambda: "a: &a [x]\nb: &b [*a,*a]\nc: &c [*b,*b]"),
    **{f"yaml {o!r}": ("yaml", lambda o=o: o * (MIB // len(o))) for o in OPENINGS},
    **{f"json {o!r}": ("json", lambda o=o: o * (MIB // len(o))) for o in OPENINGS},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_refused_with_little_memory(name: str) -> None:
    kind, make = HOSTILE[name]
    text = make()
    tracemalloc.start()
    refused(text, kind)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * MIB


def test_json_with_too_many_values_is_refused_before_it_is_parsed() -> None:
    text = "[" + "0," * 200_000 + "0]"
    with at_most(0.5):  # 0.02 s on an idle machine
        problem = only(text, "json")
    assert (problem.code, "200,000 values" in problem.message) == ("too_large", True)
    words = json.dumps({"text": ", [ {" * 100_000})  # of which none is a value
    assert read_text(words, format="json").data["text"].startswith(", [ {")


@pytest.mark.parametrize("text", ["- - - - - - -\n" * 70_000, "[" * 31 + "a: b," * 200_000])
def test_a_text_with_too_much_structure_is_refused(text: str) -> None:
    problem = only(text)
    assert problem.code == "too_large"
    assert "200,000 values" in problem.message


# Anything


@given(
    st.text(
        st.sampled_from("ab01.-+eE:{}[],&*!|>#%@`\"'\\\n\t ~<?\x85\u2028é😀\ud800\0"), max_size=40
    )
)
def test_any_text_is_read_or_refused_with_valid_positions(text: str) -> None:
    for kind in ("yaml", "json"):
        try:
            source = read_text(text, format=kind)
        except InvalidDefinition as refusal:
            for problem in refusal.problems:
                assert problem.code in ("invalid_field", "too_large")
                assert problem.line is not None
                assert problem.column is not None
                assert 1 <= problem.column <= len(line_of(text, problem.line)) + 1
        else:
            assert source.position(()) is not None


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    for kind in ("yaml", "json"):
        with contextlib.suppress(InvalidDefinition):
            read_text(raw, format=kind)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from("abé "), max_size=4), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(plain, st.sampled_from([None, 1]))
def test_json_round_trips_and_every_value_has_its_position(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    source = read_text(text, format="json")
    assert source.data == value
    todo: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while todo:
        path, item = todo.pop()
        line, column = source.position(path) or (0, 0)
        assert line_of(text, line)[column - 1 :].startswith(json.dumps(item, indent=indent)[:1])
        if isinstance(item, list):
            todo += [((*path, at), below) for at, below in enumerate(item)]
        elif isinstance(item, dict):
            todo += [((*path, key), below) for key, below in item.items()]


class Dumper(yaml.CSafeDumper):
    """Quotes every text: YAML 1.1, which PyYAML writes, takes fewer of them for numbers (0E0)."""


Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def places(node: yaml.Node, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any, Any]]:
    """Path, place of its key if it has one, and place, as PyYAML's own composer tells them."""
    match node:
        case yaml.MappingNode():
            for key, value in node.value:
                yield (*path, key.value), key.start_mark, value.start_mark
                yield from places(value, (*path, key.value))
        case yaml.SequenceNode():
            for at, value in enumerate(node.value):
                yield (*path, at), value.start_mark, value.start_mark
                yield from places(value, (*path, at))


@given(plain, st.booleans())
@example([[], {}, {"a": []}, [[1]], 2], True)
def test_every_value_of_a_yaml_text_is_where_pyyaml_finds_it(value: Any, flow: bool) -> None:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=flow)  # ASCII, and \n alone
    source = read_text(text, format="yaml")
    root = yaml.compose(text, Loader=yaml.CSafeLoader)
    assert root is not None
    assert source.position(()) == (root.start_mark.line + 1, root.start_mark.column + 1)
    for path, key, mark in places(root):
        assert source.position(path) == (mark.line + 1, mark.column + 1)
        assert source.position(path, key=True) == (key.line + 1, key.column + 1)
        assert source.position((*path, "nobody"), key=True) == (mark.line + 1, mark.column + 1)


@pytest.mark.parametrize("text", ["a: 1", "a: ["])
def test_the_garbage_collector_runs_again_after_a_text_was_read(text: str) -> None:
    with contextlib.suppress(InvalidDefinition):
        read_text(text, format="yaml")
    assert gc.isenabled()


@given(plain)
@example("0E0")
def test_yaml_round_trips(value: Any) -> None:
    text = yaml.dump(value, Dumper=Dumper, allow_unicode=True)
    assert read_text(text, format="yaml").data == value
