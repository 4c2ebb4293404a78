"""What templates give, what they read, and what they say when they cannot.

Plain calls: a template and a scope in, a value or an error out.
"""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.errors import MissingValue
from dovetail.core.templates import (
    NodeValue,
    Read,
    Template,
    TemplateRefused,
    parse_condition,
    parse_template,
)

FETCHED = {
    "json": {"user": {"name": "Ada", "tags": ["x", "y"]}},
    "status_code": 200,
    "text": "Hello World",
    "flag": True,
    "nothing": None,
    "ratio": 0.5,
    "numbers": [3, 1, 2],
    "rows": [{"n": 2, "w": "b"}, {"n": 1, "w": "A"}],
    "_id": "u1",
    "odd key": 1,
    "jinja": "{{ params.a }}",
}


class Values(dict[str, Any]):
    """A scope of fixed values."""

    def get(self, name: str) -> Any:  # type: ignore[override]
        return self[name]


SCOPE = Values(
    params={"a": 1, "b": "x", "empty": [], "key": "text", "at": 1},
    run={"id": "r1", "workflow": "flow"},
    fetch=NodeValue("fetch", "COMPLETED", FETCHED, None),
    rows=NodeValue("rows", "COMPLETED", [{"v": 1}, {"v": 2}, {"v": 3}], None),
    text=NodeValue("text", "COMPLETED", "plain", None),
    own=NodeValue("own", "COMPLETED", {"output": "o", "status": "s", "error": "e"}, None),
    void=NodeValue("void", "COMPLETED", None, None),
    skipped=NodeValue("skipped", "SKIPPED", None, None),
)


def parsed(text: str) -> Template:
    template = parse_template(text)
    assert template is not None
    return template


def value_of(expression: str) -> Any:
    return parsed("{{ " + expression + " }}").render(SCOPE)


def refusal(text: str) -> TemplateRefused:
    with pytest.raises(TemplateRefused) as caught:
        parse_template(text)
    return caught.value


# --- text and whole expressions --------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "plain", "{ {", "}}", "{a}", "100 %}", "#}"])
def test_text_without_an_opening_brace_is_no_template(text: str) -> None:
    assert parse_template(text) is None


@pytest.mark.parametrize("text", ["{{ rows }}", "{{rows}}", "{{ rows }}\n", "{{ rows }}\r\n"])
def test_one_whole_expression_gives_the_native_value(text: str) -> None:
    assert parsed(text).whole
    assert parsed(text).render(SCOPE) is SCOPE["rows"].output


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("a {{ params.a }} b", "a 1 b"),
        (" {{ params.a }}", " 1"),
        ("{{ params.a }}\n\n", "1\n\n"),
        ("{{ params.a }} \n", "1 \n"),
        ("{{ params.a }}{{ params.b }}", "1x"),
        ("one\r\ntwo {{ params.a }}\r\n", "one\r\ntwo 1\r\n"),
        ("[{{ fetch.nothing }}]", "[]"),
        ("[{{ none }}]", "[]"),
        ("[{{ fetch.flag }}]", "[True]"),
        ("[{{ fetch.ratio }}]", "[0.5]"),
        ("{{ fetch.json }}!", '{"user": {"name": "Ada", "tags": ["x", "y"]}}!'),
        ("{{ {'b': 'é', 'a': none} }}!", '{"a": null, "b": "é"}!'),
        ("}} {{ params.a }} }}", "}} 1 }}"),
        ("a  {{- params.a -}}  b", "a1b"),
        ("{{ params.a -}}  b {{ params.a }}", "1b 1"),
        ("a  {{+ params.a }}  b", "a  1  b"),
        ("{{ '{%' }} {{ '{{' }} {{ \"{#\" }}", "{% {{ {#"),
        ("{{ fetch.jinja }}!", "{{ params.a }}!"),
    ],
)
def test_any_other_template_gives_text_word_for_word(text: str, rendered: str) -> None:
    assert not parsed(text).whole
    assert parsed(text).render(SCOPE) == rendered


def test_an_output_that_looks_like_a_template_is_never_rendered() -> None:
    assert value_of("fetch.jinja") == "{{ params.a }}"
    assert value_of("fetch.jinja ~ ''") == "{{ params.a }}"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("ab {{ params.a", "'{{' is never closed with '}}' (at character 4)"),
        ("{{ }}", "the expression is empty (at character 1)"),
        ("{{ 'a }}", "the quoted text never ends (at character 4)"),
        ("{{ a b }}", "expected token '}}', got 'b' (at character 6)"),
        ("{{ a ? b }}", "unexpected character '?' (at character 6)"),
        ("{{ a) }}", "unexpected ')' (at character 5)"),
        ("{{ (a] }}", "expected ')', got ']' (at character 6)"),
        ("x\n{{ a\n b }}", "expected token '}}', got 'b' (at line 3, character 2)"),
        ("{{ 007 }}", "a number may not begin with 0 (at character 4)"),
        ("{{ and }}", "unexpected 'and' (at character 4)"),
        ("{{ if.x }}", "unexpected 'if' (at character 4)"),
        ("{{ a. }}", "expected name or number"),
        ("{{ a = 1 }}", "expected token '}}', got '='"),
        ("{{ 'a\\x4' }}", "'\\x' is not complete"),
        ("{{ '\\N{NO SUCH NAME}' }}", "no character has the name"),
        ("{{ '\\ud800' }}", "half a character or none"),
        ("{{ '\\U00110000' }}", "half a character or none"),
        ("{{ a }} \ud800", "half a character"),
        ("{{ a\u20dd }}", "unexpected character"),
        ("{{ a.＿b }}", "unexpected character '＿'"),
        ("{{ a.² }}", "'²' is not a name"),
        ("{{ a is defined is none }}", "cannot chain"),
    ],
)
def test_a_syntax_error_names_the_problem_and_its_position(text: str, where: str) -> None:
    refused = refusal(text)
    assert refused.code == "template_syntax"
    assert where in refused.message
    assert str(refused) == refused.message


@pytest.mark.parametrize("opening", ["{%", "{#"])
def test_statements_and_comments_are_refused_with_a_hint_for_literal_characters(
    opening: str,
) -> None:
    refused = refusal(f"a {opening} b")
    assert refused.code == "template_forbidden"
    assert f"{{{{ '{opening}' }}}}" in refused.message
    assert "(at character 3)" in refused.message


def test_the_size_limit_of_a_template_counts_utf8_bytes() -> None:
    assert refusal("{{ a }}" + "x" * 16384).code == "too_large"
    assert refusal("{{ a }}" + "é" * 8200).code == "too_large"
    assert parse_template("{{ a }}" + "x" * (16384 - 7)) is not None
    assert parse_template("x" * 100_000) is None
    with pytest.raises(TemplateRefused, match="longer than 10 bytes"):
        parse_template("{{ params.a }}", max_size=10)


def test_the_same_short_template_is_parsed_once() -> None:
    assert parse_template("{{ fetch.text }}!") is parse_template("{{ fetch.text }}!")


def test_a_template_shows_its_text() -> None:
    assert repr(parsed("{{ a }}")) == "Template('{{ a }}')"


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("fetch.json.user.name", "Ada"),
        ("fetch['json']['user'].tags[1]", "y"),
        ("fetch.json.user.tags.0", "x"),
        ("fetch.json.user.tags[-1]", "y"),
        ("fetch['odd key']", 1),
        ("fetch['_id']", "u1"),
        ("fetch[params.key]", "Hello World"),
        ("rows[params.at].v", 2),
        ("rows[0]", {"v": 1}),
        ("rows.0.v", 1),
        ("text", "plain"),
        ("text[0]", "p"),
        ("text.output", "plain"),
        ("rows.output[2].v", 3),
        ("fetch.output.status_code", 200),
        ("fetch.status", "COMPLETED"),
        ("rows.status", "COMPLETED"),
        ("fetch.error", None),
        ("own.output", "o"),
        ("own.status", "s"),
        ("own.error", "e"),
        ("void", None),
        ("void.output", None),
        ("run.id ~ run.workflow", "r1flow"),
        ("(fetch if true else skipped).status", "COMPLETED"),
        ("(skipped if true else fetch).anything", None),
        ("(fetch.json.user if params.a else rows).name", "Ada"),
        ("{'a': {'b': 5}}.a.b", 5),
        ("([[1, 2], [3]]|last)[0]", 3),
    ],
)
def test_a_path_reads_keys_and_items_of_plain_values(expression: str, value: Any) -> None:
    assert value_of(expression) == value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("skipped", None),
        ("skipped.a.b[0].c", None),
        ("skipped['a']", None),
        ("skipped[params.b].c", None),
        ("skipped.output", None),
        ("skipped.error", None),
        ("skipped.status", "SKIPPED"),
        ("skipped|default('d')", "d"),
        ("skipped.a.b|default('d')", "d"),
        ("skipped.output|d('d')", "d"),
        ("skipped.status|default('d')", "SKIPPED"),
        ("skipped is none", True),
        ("skipped.a is none", True),
        ("skipped is defined", False),
        ("skipped.a is defined", False),
        ("skipped.a is undefined", True),
        ("skipped.status is defined", True),
        ("'[' ~ skipped.a ~ ']'", "[]"),
        ("[skipped.a]", [None]),
        ("skipped.a or 'other'", "other"),
    ],
)
def test_every_key_of_a_skipped_node_reads_as_none(expression: str, value: Any) -> None:
    assert value_of(expression) == value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("fetch.missing|default('d')", "d"),
        ("fetch.missing.deep[0].er|default('d')", "d"),
        ("fetch.missing[params.b]|default('d')", "d"),
        ("fetch.missing|default", ""),
        ("fetch.nothing|default('d')", None),
        ("fetch.nothing|default('d', true)", "d"),
        ("fetch.nothing|default('d', boolean=true)", "d"),
        ("fetch.text|default('d', true)", "Hello World"),
        ("fetch.missing|default(default_value=[1])", [1]),
        ("fetch.missing|default(rows.missing)|default('d')", "d"),
        ("fetch.text|default(rows.missing)", "Hello World"),
        ("fetch.missing is defined", False),
        ("fetch.missing.deeper is undefined", True),
        ("fetch.missing is not defined", True),
        ("fetch.text is defined", True),
        ("fetch is defined", True),
        ("unknown.x|default('d')", "d"),
        ("([]|first)|default('d')", "d"),
        ("('x' if false)|default('d')", "d"),
        ("'x' if false", None),
        ("fetch.missing if false else 1", 1),
    ],
)
def test_a_missing_value_can_have_a_default_or_be_tested(expression: str, value: Any) -> None:
    assert value_of(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "rows.body",
            "{{ rows.body }} has no 'body'; 'rows' returned a list of 3",
        ),
        ("text.body", "{{ text.body }} has no 'body'; 'text' returned text"),
        ("void.x", "{{ void.x }} has no 'x'; 'void' returned none"),
        ("rows[7]", "{{ rows[7] }} has no item 7; 'rows' returned a list of 3"),
        ("rows[-4]", "has no item -4"),
        (
            "params.zzz",
            "{{ params.zzz }} has no 'zzz'; params has: a, at, b, empty, key",
        ),
        ("run.x", "{{ run.x }} has no 'x'; run has: id, workflow"),
        (
            "fetch.json.user.age|upper",
            "{{ fetch.json.user.age|upper }} has no 'age'; 'fetch.json.user' has: name, tags",
        ),
        ("fetch.json.user.tags.x", "'fetch.json.user.tags' is a list of 2"),
        ("fetch.json.user.tags[5]", "has no item 5; 'fetch.json.user.tags' is a list of 2"),
        ("fetch['odd key'].x", "\"fetch['odd key']\" is a number".replace('"', "'")),
        ("fetch.flag.x", "'fetch.flag' is a boolean"),
        ("fetch.ratio.x", "'fetch.ratio' is a number"),
        ("params.empty.x", "'params.empty' is a list of 0"),
        ("fetch[params.b]", "has no such key in a mapping"),
        ("{'a': 1}.b", "has no 'b' in a mapping"),
        ("{}.b", "has no 'b' in an empty mapping"),
        ("(fetch if true else 1).zzz", "has no 'zzz' in a mapping"),
        ("unknown.x", "reads 'unknown', and nothing has that name here"),
        ("[]|first", "has nothing to take the first of"),
        ("''|last", "has nothing to take the last of"),
        ("[]|min", "has nothing to take the min of"),
        ("{}|max", "has nothing to take the max of"),
        ("fetch.rows|sum(attribute='zzz')", "an attribute that an item of the list does not have"),
        ("fetch.missing is none", "has no 'missing'"),
        ("fetch.missing or 1", "has no 'missing'"),
        ("fetch.missing|default(rows.missing)", "'rows' returned a list of 3"),
        ("not fetch.missing", "has no 'missing'"),
    ],
)
def test_a_missing_value_error_names_the_expression_and_the_existing_keys(
    expression: str, message: str
) -> None:
    with pytest.raises(MissingValue) as caught:
        value_of(expression)
    assert message in str(caught.value)
    assert str(caught.value).startswith("{{ " + expression + " }}")
    assert caught.value.type == "missing_value"


def test_of_many_keys_the_first_ten_are_listed() -> None:
    scope = Values(params={f"k{i:02}": i for i in range(12)} | {"a\nb" + "c" * 100: 1})
    with pytest.raises(MissingValue) as caught:
        parsed("{{ params.x }}").render(scope)
    message = str(caught.value)
    assert "\n" not in message
    assert "k00, k01" in message
    assert message.endswith("k08 and 3 more")


def test_an_empty_mapping_is_described_as_empty() -> None:
    with pytest.raises(MissingValue, match="params is an empty mapping"):
        parsed("{{ params.x }}").render(Values(params={}))


def test_a_long_expression_is_shortened_in_messages() -> None:
    with pytest.raises(MissingValue) as caught:
        value_of("fetch.missing ~ \n'" + "x" * 200 + "'")
    assert "… }} has no 'missing'" in str(caught.value)
    assert "\n" not in str(caught.value)


# --- what a template reads -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("{{ a.x }} {{ b }}", [("a", False), ("b", False)]),
        ("{{ a.x }}{{ a.y }}", [("a", False)]),
        ("{{ a.x|default('') }}", [("a", True)]),
        ("{{ a.x|upper|d('') }}", [("a", True)]),
        ("{{ a.x|default(b.y) }}", [("a", True), ("b", False)]),
        ("{{ a is defined }}", [("a", True)]),
        ("{{ a.x is not none }}", [("a", True)]),
        ("{{ a.x is string }}", [("a", False)]),
        ("{{ a.status }}", [("a", True)]),
        ("{{ a['status'] == 'SKIPPED' }}", [("a", True)]),
        ("{{ a.x if a is defined else b.y }}", [("a", True), ("b", False)]),
        ("{{ a.status == 'COMPLETED' and a.x > 1 }}", [("a", True)]),
        ("{{ a.x > 1 and a is defined }}", [("a", False), ("a", True)]),
        ("{{ a is none or a.x }}", [("a", True)]),
        ("{{ a[b.k]|default('') }}", [("a", True), ("b", False)]),
        (
            "{{ {'k': a.x, b.y: [c, -d]} }}",
            [("a", False), ("b", False), ("c", False), ("d", False)],
        ),
        ("{{ loop.index }}{{ self }}", [("loop", False), ("self", False)]),
        ("{{ secrets.K ~ params.x }}", [("secrets", False), ("params", False)]),
        ("{{ 1 }}", []),
    ],
)
def test_a_template_lists_its_reads_and_marks_the_guarded_ones(
    text: str, reads: list[tuple[str, bool]]
) -> None:
    expected = {Read(name, guarded) for name, guarded in reads}
    assert set(parsed(text).reads) == expected


def test_only_a_template_that_reads_secrets_is_marked() -> None:
    assert parsed("Bearer {{ secrets.TOKEN }}").uses_secrets
    assert not parsed("{{ params.secrets }}").uses_secrets


# --- conditions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("{{ params.a == 1 }}", True),
        ("  {{ params.empty }}\n", False),
        ("{{ fetch.json }}", True),
        ("{{ skipped.a }}", False),
        ("{{ skipped.status == 'SKIPPED' }}", True),
        (True, True),
        (False, False),
    ],
)
def test_a_condition_is_decided_by_truthiness(text: str | bool, runs: bool) -> None:
    condition = parse_condition(text)
    assert condition(SCOPE) is runs
    assert condition.source == (str(text).lower() if isinstance(text, bool) else text)


def test_a_condition_lists_its_reads() -> None:
    assert parse_condition("{{ fetch.x > params.y }}").reads == (
        Read("fetch", False),
        Read("params", False),
    )
    assert parse_condition(True).reads == ()


@pytest.mark.parametrize("text", ["", "params.a", "{{ params.a }} and {{ params.b }}", "x{{ a }}"])
def test_a_condition_must_be_one_whole_expression(text: str) -> None:
    with pytest.raises(TemplateRefused, match="write the whole condition") as caught:
        parse_condition(text)
    assert caught.value.code == "template_syntax"


def test_a_bare_condition_is_refused_with_the_correct_form() -> None:
    with pytest.raises(TemplateRefused, match=r"\{\{ params\.a > 3 \}\}"):
        parse_condition("params.a > 3")


def test_a_condition_may_not_read_secrets() -> None:
    with pytest.raises(TemplateRefused, match="may not read secrets") as caught:
        parse_condition("{{ secrets.KEY == 'x' }}")
    assert caught.value.code == "template_forbidden"


def test_a_condition_that_reads_a_missing_value_raises() -> None:
    with pytest.raises(MissingValue, match="has no 'zzz'; 'fetch' returned: _id, flag"):
        parse_condition("{{ fetch.zzz }}")(SCOPE)
