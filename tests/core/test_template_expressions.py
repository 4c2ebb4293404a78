"""What expressions calculate, what filters do, and what is refused by name or by size."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.errors import MissingValue, TemplateError, TooLarge
from dovetail.core.templates import NodeValue, Template, TemplateRefused, parse_template


class Values(dict[str, Any]):
    """A scope of fixed values."""

    def get(self, name: str) -> Any:  # type: ignore[override]
        return self[name]


FETCHED = {
    "json": {"user": "Ada"},
    "text": "Hello World",
    "rows": [{"n": 2, "w": "b"}, {"n": 1, "w": "A"}],
}

SCOPE = Values(
    params={"a": 1, "b": "x", "empty": []},
    fetch=NodeValue("fetch", "COMPLETED", FETCHED, None),
    rows=NodeValue("rows", "COMPLETED", [1, 2, 3], None),
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


# --- calculating -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 - 4", -1),
        ("7 / 2", 3.5),
        ("7 // 2", 3),
        ("7 % 4", 3),
        ("-params.a", -1),
        ("+params.a", 1),
        ("1.5e2 + 0x10 + 0b11 + 0o7 + 1_000", 1176.0),
        ("'a' + 'b'", "ab"),
        ("[1] + [2]", [1, 2]),
        ("'a' ~ 1 ~ none ~ true ~ [1]", "a1True[1]"),
        ("1 < 2 < 3", True),
        ("1 < 3 < 2", False),
        ("1 == 1.0", True),
        ("'a' != 'b'", True),
        ("[1, 'a'] == [1, 'a']", True),
        ("'b' >= 'a' and 2 <= 2 and 3 > 2", True),
        ("[1, 2] < [1, 3]", True),
        ("1 in [1, 2]", True),
        ("'ell' in 'hello'", True),
        ("'user' in fetch.json", True),
        ("1 in fetch.json", False),
        ("'z' not in 'abc'", True),
        ("params.a and params.b", "x"),
        ("params.empty or 'y'", "y"),
        ("not params.empty", True),
        ("'y' if params.a > 0 else 'n'", "y"),
        ("'y' if params.a > 1 else 'n'", "n"),
        ("(1, 'b')", [1, "b"]),
        ("1, 2", [1, 2]),
        ("()", []),
        ("[1, [2, {'a': params.b}]]", [1, [2, {"a": "x"}]]),
        ("{'a': 1, 'a': 2}", {"a": 2}),
        ("'\\x41\\u00e9\\U0001F600\\101\\n\\t\\\\\\'\\d\\\n'", "Aé😀A\n\t\\'\\d"),
        ("'\\N{LATIN SMALL LETTER A}'", "a"),
        ("'a' 'b'", "ab"),
        ("true and True and not false and none is none", True),
        ("18446744073709551615", 2**64 - 1),
        ("-9223372036854775808", -(2**63)),
    ],
)
def test_expressions_calculate_as_jinja_does(expression: str, value: Any) -> None:
    assert value_of(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("1.0 % 0", "division by zero"),
        ("1 + 'a'", "cannot add a number and text; use ~"),
        ("[1] + 'a'", "cannot add a list of 1 and text"),
        ("none + 1", "cannot add none and a number"),
        ("fetch.text - 1", "- works on numbers, not on text and a number"),
        ("fetch.text % 2", "% works on numbers"),
        ("-fetch.text", "a sign - works on numbers, not on text"),
        ("+[]", "a sign + works on numbers, not on a list of 0"),
        ("1 < 'a'", "cannot compare a number < text"),
        ("{} < {}", "cannot compare an empty mapping < an empty mapping"),
        ("[1] < ['a']", "cannot compare a list of 1 < a list of 1"),
        ("1 in 'abc'", "text can contain text, not a number"),
        ("1 in 5", "`in` looks into a list, a mapping or text, not into a number"),
        ("{1: 2}", "the keys of a mapping are text, not a number"),
        ("rows[1.5]", "a key is text or a whole number, not a number"),
        ("rows[1, 2]", "a key is text or a whole number, not a list of 2"),
        ("18446744073709551615 + 1", "does not fit in 64 bits"),
        ("-9223372036854775809", "does not fit in 64 bits"),
        ("1e308 + 1e308", "not a finite number"),
        ("5|length", "a number has no length"),
        ("none|sort", "needs a list, a mapping or text, not none"),
        ("5|first", "first needs a list, a mapping or text"),
        ("[1, 'a']|sort", "sort cannot compare items of unlike kinds"),
        ("[1, 'a']|min", "min cannot compare items of unlike kinds"),
        ("['a']|sum", "sum works on numbers, not on text"),
        ("[1]|sum(start='a')", "sum works on numbers, not on text"),
        ("'a'|abs", "abs works on numbers"),
        ("'a'|round", "round works on numbers"),
        ("1.5|round(99)", "round takes a precision from -18 to 18"),
        ("1.5|round('a')", "round takes a precision"),
        ("1.5|round(0, 'up')", "round takes the method 'common', 'ceil' or 'floor'"),
        ("1e308|round(18, 'ceil')", "not a finite number"),
        ("'a'|replace('a', 'b', 'c')", "replace takes the count as a number"),
        ("'a'|trim(1)", "trim takes the characters as text"),
        ("[1]|tojson(indent=9)", "tojson takes an indent from 0 to 8"),
        ("[1]|tojson('  ')", "tojson takes an indent"),
        ("[1]|sum(attribute=true)", "attribute is a name such as 'a.b'"),
        ("[1]|sum(attribute='" + "a." * 40 + "')", "attribute has more than 32 steps"),
        ("('9' ~ '9' ~ '" + "9" * 30 + "')|int", "does not fit in 64 bits"),
        ("'1e999'|float", "the number is too large"),
        ("'1e999'|int", "the number is too large"),
        ("5|map(attribute='a')", "needs a list, a mapping or text, not a number"),
        ("5|select", "needs a list, a mapping or text, not a number"),
        ("[1]|map(attribute=[])", "attribute is a name such as 'a.b', not a list of 0"),
        ("[1]|selectattr(true)", "attribute is a name such as 'a.b', not a boolean"),
        ("[1]|map(attribute='" + "a." * 40 + "')", "attribute has more than 32 steps"),
        ("[1, 'a']|select('gt', 0)", "cannot compare text > a number"),
        ("[1]|select('in', 5)", "`in` looks into a list, a mapping or text, not into a number"),
        ("[1, 2]|items", "items needs a mapping, not a list of 2"),
        ("none|items", "items needs a mapping, not none"),
        ("'a' is gt 1", "cannot compare text > a number"),
        ("1 is in 'abc'", "text can contain text, not a number"),
    ],
)
def test_an_impossible_operation_says_why_and_never_shows_a_value(
    expression: str, message: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        value_of(expression)
    assert message in str(caught.value)
    assert str(caught.value).startswith("{{ ")
    assert "Hello" not in str(caught.value)
    assert caught.value.type == "template_error"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("'aBc'|lower ~ 'aBc'|upper", "abcABC"),
        ("'the quick-brown (fox)'|title", "The Quick-Brown (Fox)"),
        ("'hello WORLD'|capitalize", "Hello world"),
        ("5|upper", "5"),
        ("none|upper", ""),
        ("'  a '|trim", "a"),
        ("'xxaxx'|trim('x')", "a"),
        ("'aaa'|replace('a', 'b')", "bbb"),
        ("'aaa'|replace('a', 'b', 2)", "bba"),
        ("'aaa'|replace('a', 'b', count=-1)", "bbb"),
        ("'ab'|replace('', '-')", "-a-b-"),
        ("'a1'|replace(1, 2)", "a2"),
        ("['a', 1, none]|join('-')", "a-1-"),
        ("[]|join('-')", ""),
        ("fetch.rows|join(',', attribute='w')", "b,A"),
        ("[1, 2]|join", "12"),
        ("[[1, 2], [3]]|join(d=';')", "[1, 2];[3]"),
        ("[[1, 2], [3, 4]]|join(attribute=0)", "13"),
        ("'abc'|length + [1]|count + {'a': 1}|length", 5),
        ("[1, 2]|first", 1),
        ("[1, 2]|last", 2),
        ("'abc'|first ~ 'abc'|last", "ac"),
        ("{'a': 1, 'b': 2}|last", "b"),
        ("'42'|int + '42.9'|int + 'x'|int + '2a'|int(base=16)", 42 + 42 + 0 + 42),
        ("'x'|int(7) + none|int(8)", 15),
        ("'inf'|int(5)", 5),
        ("'1.5'|float + 'x'|float + 1|float", 2.5),
        ("'nan'|float(1.0)", 1.0),
        ("[]|float('d')", "d"),
        ("5|string ~ true|string", "5True"),
        ("[1]|string", "[1]"),
        ("42.55|round", 43.0),
        ("42.55|round(1, 'floor')", 42.5),
        ("42.11|round(method='ceil')", 43.0),
        ("1234|round(-2)", 1200),
        ("-5|abs", 5),
        ("(-5)|abs", 5),
        ("[3, 1, 2]|sort", [1, 2, 3]),
        ("[3, 1, 2]|sort(reverse=true)", [3, 2, 1]),
        ("['b', 'A', 'c']|sort", ["A", "b", "c"]),
        ("['b', 'A', 'c']|sort(case_sensitive=true)", ["A", "b", "c"]),
        ("['b', 'A', 'a']|sort(false, true)", ["A", "a", "b"]),
        ("fetch.rows|sort(attribute='w')|first", {"n": 1, "w": "A"}),
        ("[{'a': 1, 'b': 2}, {'a': 1, 'b': 1}]|sort(attribute='a,b')|first", {"a": 1, "b": 1}),
        ("{'b': 1, 'a': 2}|sort", ["a", "b"]),
        ("'cab'|sort", ["a", "b", "c"]),
        ("['a', 'A', 'b', 1, 1.0, true]|unique", ["a", "b", 1]),
        ("['a', 'A']|unique(true)", ["a", "A"]),
        ("[[1], [1], {'a': 1}]|unique", [[1], {"a": 1}]),
        ("fetch.rows|unique(attribute='n')|length", 2),
        ("'abc'|reverse", "cba"),
        ("[1, 2]|reverse", [2, 1]),
        ("'ab'|list", ["a", "b"]),
        ("{'a': 1}|list", ["a"]),
        ("[1, 2.5]|sum", 3.5),
        ("fetch.rows|sum(attribute='n')", 3),
        ("[1]|sum(start=10)", 11),
        ("[3, 1, 2]|min", 1),
        ("['b', 'A']|min", "A"),
        ("['b', 'A']|max(case_sensitive=true)", "b"),
        ("fetch.rows|max(attribute='n')", {"n": 2, "w": "b"}),
        ("{'b': [1, 'ü<&>'], 'a': none}|tojson", '{"a": null, "b": [1, "ü<&>"]}'),
        ("'x'|tojson", '"x"'),
        ("[1]|tojson(indent=2)", "[\n  1\n]"),
        ("1 is number and true is boolean and 'a' is string", True),
        ("{} is mapping and [] is sequence and 'a' is sequence and {} is sequence", True),
        ("5 is sequence or 'a' is number or 1 is boolean or [] is mapping", False),
        ("none is none and 5 is not none", True),
        ("true is true and false is false and 1 is not true and none is not false", True),
        ("1 is eq 1 and 1 is equalto(1.0) and 1 is ne 2 and 'a' is not eq('b')", True),
        ("2 is gt 1 and 2 is ge 2 and 1 is lt 2 and 2 is le(2)", True),
        ("params.a is in [1] and 'x' is in 'xy' and 'user' is in fetch.json", True),
        ("3 is in [1] or 2 is lt 1 or 'z' is not in 'xyz'", False),
        ("1 is eq 1 or nothing.x", True),
        ("fetch.rows|map(attribute='n')", [2, 1]),
        ("[{'a': {'b': [5, 6]}}]|map(attribute='a.b.1')", [6]),
        ("[[1, 2], [3, 4]]|map(attribute=0)", [1, 3]),
        ("[[1, 2], [3, 4]]|map(attribute=-1)", [2, 4]),
        ("[{'a': 1}, {}, none]|map(attribute='a', default=0)", [1, 0, 0]),
        ("[{'a': 1}, none]|map(attribute='a', default=none)", [1, None]),
        ("[{'a': none}]|map(attribute='a', default=1)", [None]),
        ("none|map(attribute='a') + []|map(attribute='a') + ''|select", []),
        ("[0, 1, '', 'a', none, [], [0]]|select", [1, "a", [0]]),
        ("[0, 1, '', 'a', none, [], [0]]|reject", [0, "", None, []]),
        ("[1, 'a', 2.5]|select('number')|reject('gt', 2)", [1]),
        ("[1, 2, 3, 4]|select('ge', params.a + 1)|reject('in', [3])", [2, 4]),
        ("['a', 'b', 'ab']|select('in', 'abc')", ["a", "b", "ab"]),
        ("[[1], [2], {'a': 1}]|select('eq', [1])", [[1]]),
        ("[true, 1, false]|select('true')", [True]),
        ("[none, 1]|select('defined')", [None, 1]),
        ("[none, 1]|reject('none')", [1]),
        ("fetch.rows|selectattr('n', 'gt', 1)", [{"n": 2, "w": "b"}]),
        ("fetch.rows|rejectattr('n', 'gt', 1)|map(attribute='w')", ["A"]),
        ("[{'a': {'b': 1}}, {'a': {'b': 0}}]|selectattr('a.b')", [{"a": {"b": 1}}]),
        ("[{'a': 1}, {}, none]|selectattr('a', 'defined')", [{"a": 1}]),
        ("[{'a': 1}, {}, none]|selectattr('a', 'undefined')", [{}, None]),
        ("[{'a': none}, {'a': 1}]|rejectattr('a', 'none')", [{"a": 1}]),
        ("'abc'|select('ne', 'b')", ["a", "c"]),
        ("{'a': 1, 'b': 2}|select('eq', 'b')", ["b"]),
        ("{'b': 1, 'a': [2]}|items", [["b", 1], ["a", [2]]]),
        ("{}|items", []),
        ("{'b': 1, 'a': 0}|items|selectattr(1)|map(attribute=0)|join", "b"),
    ],
)
def test_filters_and_tests_behave_as_in_jinja(expression: str, value: Any) -> None:
    found = value_of(expression)
    assert found == value
    assert type(found) is type(value)


# --- what is allowed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a()", "a call is not allowed"),
        ("2 * 3", "`*` is not allowed"),
        ("2 ** 3", "`**` is not allowed"),
        ("a[1:2]", "a slice is not allowed"),
        ("a._b", "underscored name '_b' is not allowed; a key is read in brackets: ['_b']"),
        ("a.__class__", "underscored name '__class__'"),
        ("_a", "underscored name '_a'"),
        ("a['__class__']", "underscored key '__class__'"),
        ("(a ~ b)['__class__']", "underscored key '__class__'"),
        ("'%d' % 1", "`%` on text is not allowed"),
        ("('a' ~ 'b') % 1", "`%` on text is not allowed"),
        ("a|uper", "there is no filter 'uper'; did you mean 'upper'?"),
        ("a|map('upper')", "an argument of 'map' without its name is not allowed; write map(att"),
        ("a|map", "'map' without 'attribute' is not allowed; it takes (attribute, default)"),
        ("a|map(attribute='a', x=1)", "the argument 'x' of 'map' is not allowed"),
        ("a|map(*b)", "such an argument of 'map'"),
        ("a|select('uper')", "there is no test 'uper'"),
        ("a|select('definde')", "there is no test 'definde'; did you mean 'defined'?"),
        ("a|select('__class__')", "there is no test '__class__'"),
        ("a|select(b)", "a test of 'select' that is not a name in quotes is not allowed"),
        ("a|select('g' ~ 't', 1)", "a test of 'select' that is not a name in quotes"),
        ("a|select(1)", "a test of 'select' that is not a name in quotes"),
        ("a|select('gt')", "the test 'gt' without a value is not allowed; write gt(5)"),
        ("a|select('gt', 1, 2)", "such an argument of the test 'gt' is not allowed"),
        ("a|select('none', 1)", "such an argument of the test 'none' is not allowed"),
        ("a|select(*b)", "such an argument of 'select'"),
        ("a|reject(**b)", "such an argument of 'reject'"),
        ("a|select(test='gt')", "the argument 'test' of 'select' is not allowed"),
        ("a|selectattr", "'selectattr' without 'attribute' is not allowed"),
        ("a|rejectattr(attribute='a')", "the argument 'attribute' of 'rejectattr' is not allowed"),
        ("a|items(1)", "such an argument of 'items'"),
        ("a is gt", "the test 'gt' without a value is not allowed"),
        ("a is eq(1, 2)", "such an argument of the test 'eq' is not allowed; it takes one value"),
        ("a is eq(b=1)", "such an argument of the test 'eq'"),
        ("a is in(*b)", "such an argument of the test 'in'"),
        ("a is definde", "there is no test 'definde'; did you mean 'defined'?"),
        ("a is none(1)", "an argument of the test 'none' is not allowed"),
        ("a is divisibleby 2", "there is no test 'divisibleby'"),
        ("a|replace('b')", "'replace' without 'new' is not allowed; it takes (old, new, count)"),
        ("a|trim(1, 2)", "such an argument of 'trim' is not allowed"),
        ("a|join(*b)", "such an argument of 'join'"),
        ("a|join(**b)", "such an argument of 'join'"),
        ("a|join(x=1)", "the argument 'x' of 'join' is not allowed; it takes (d, attribute)"),
        ("a|join('', d='')", "the argument 'd' of 'join'"),
        ("secrets", "`secrets` as a whole"),
        ("secrets|tojson", "`secrets` as a whole"),
        ("secrets[params.x]", "`secrets` as a whole, or with a calculated name"),
        ("secrets[0]", "`secrets` as a whole"),
        ("9" * 20, "the number does not fit in 64 bits"),
        ("9" * 5000, "the number does not fit in 64 bits"),
        ("0x" + "f" * 17, "the number does not fit in 64 bits"),
        ("1e999", "the number is too large"),
        ("(" * 30 + "a" + ")" * 30, "nested too deeply"),
        ("not " * 200 + "a", "nested too deeply"),
        ("- " * 200 + "1", "nested too deeply"),
        ("1" + " + 1" * 200, "nested too deeply"),
        ("a" + "|d" * 200, "nested too deeply"),
    ],
)
def test_a_disallowed_construct_is_refused_by_name(expression: str, message: str) -> None:
    refused = refusal("{{ " + expression + " }}")
    assert refused.code == "template_forbidden"
    assert message in refused.message
    assert "(at character " in refused.message


def test_a_template_with_too_many_tokens_is_too_large() -> None:
    assert refusal("{{ " + "a ~ " * 1500 + "a }}").code == "too_large"
    assert refusal("{{ a.b.c }}" * 450).code == "too_large"


def test_a_path_may_have_any_number_of_steps() -> None:
    value: Any = "end"
    for _ in range(90):
        value = {"k": value}
    scope = Values(params=value)
    assert parsed("{{ params" + ".k" * 90 + " }}").render(scope) == "end"
    assert parsed("{{ (params)" + ".k" * 90 + "|upper }}").render(scope) == "END"


def test_a_caller_close_to_pythons_recursion_limit_gets_a_refusal_too() -> None:
    def descend() -> str:
        try:
            return descend()
        except RecursionError:
            with pytest.raises(TemplateRefused) as caught:
                parse_template("{{ " + "(" * 24 + "1" + ")" * 24 + "~ 'x' }}")
            return caught.value.message

    # Where the stack has just ended the frames that are left do not suffice for 24 brackets.
    assert "nested too deeply" in descend()


def test_a_caller_close_to_pythons_recursion_limit_gets_an_error_of_the_template_too() -> None:
    deep = parsed("{{ " + "+".join("1" * 99) + " }}")

    def descend() -> str:
        try:
            return descend()
        except RecursionError:
            with pytest.raises(TemplateError) as caught:
                deep.render(SCOPE)
            return str(caught.value)

    assert deep.render(SCOPE) == 99
    assert "nested too deeply" in descend()


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "[{'a': 1}, none]|map(attribute='a')",
            "names an attribute that an item of the list does not have: item 1 is none; "
            "map(attribute=…, default=…) gives it a value",
        ),
        (
            "[{'a': 1}, {'b': 1}]|selectattr('a')",
            "names an attribute that an item of the list does not have: item 1 is a mapping; "
            "the test 'defined' chooses the items that have it",
        ),
        ("[{'a': 1}, {}]|rejectattr('a', 'gt', 5)", "item 1 is an empty mapping"),
        ("['x']|sum(attribute='a')", "does not have: item 0 is text"),
    ],
)
def test_a_missing_attribute_says_which_item_lacks_it(expression: str, message: str) -> None:
    with pytest.raises(MissingValue) as caught:
        value_of(expression)
    assert message in str(caught.value)


def test_the_names_that_the_arguments_of_a_test_read_are_known() -> None:
    for text in ("{{ a|select('eq', b.x) }}", "{{ a is eq b.x }}", "{{ a|map(attribute=b.x) }}"):
        assert {read.name for read in parsed(text).reads} == {"a", "b"}
    assert parsed("{{ a|selectattr('b', 'defined') }}").reads[0].guarded is False


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "params.big ~ params.big",
        "params.big + params.big",
        "[params.big, params.big]",
        "{'a': params.big, 'b': params.big}",
        "params.big|replace('a', 'aa')",
        "params.big|replace('', params.big)",
        "[params.big, '']|join(params.big)",
        "params.many|join(params.big)",
        "params.big|list",
        "params.many + params.many",
        "params.many|tojson(indent=8)",
        "params.big ~ params.many",
        "params.big|select",
        "params.big|map(attribute=0)",
        "[{}, {}]|map(attribute='a', default=params.big)",
        "[{}, {}]|map(attribute='a', default=params.many)|length",
        "{'a': params.big, 'b': [params.big]}|items",
    ],
)
def test_a_value_that_would_exceed_the_limit_is_too_large(expression: str) -> None:
    scope = Values(params={"big": "a" * 900, "many": list(range(200))})
    with pytest.raises(TooLarge) as caught:
        parsed("{{ " + expression + " }}").render(scope, 1000)
    assert caught.value.type == "too_large"


def test_text_and_native_results_obey_the_limit() -> None:
    scope = Values(params={"big": "a" * 900, "many": list(range(300))})
    assert parsed("{{ params.big }}").render(scope, 900) == "a" * 900
    assert parsed("{{ params.a }}").render(Values(params={"a": 5}), 1) == 5
    for text in ("{{ params.big }}", "{{ params.many }}", "{{ params.big }}!", "x{{ params.big }}"):
        with pytest.raises(TooLarge):
            parsed(text).render(scope, 899)


def test_work_is_bounded_even_if_the_result_is_small() -> None:
    scope = Values(params={"big": "ab" * 40_000})
    heavy = "{{ [" + ",".join(["params.big|title|length"] * 100) + "] }}"
    with pytest.raises(TooLarge, match="takes too much work"):
        parsed(heavy).render(scope, 100_000)


@pytest.mark.parametrize(
    "picking",
    ["params.big|map(attribute='i')", "params.big|selectattr('pad')|map(attribute='i')|list"],
)
def test_what_is_picked_from_a_long_list_costs_its_own_size(picking: str) -> None:
    """The output of a mapped node may have far more bytes than a config."""
    pad = "x" * (1 << 20)
    scope = Values(params={"big": [{"i": n, "pad": pad} for n in range(60)]})
    assert parsed(f"{{{{ {picking} }}}}").render(scope, 1 << 20) == list(range(60))
    with pytest.raises(TooLarge):
        parsed("{{ params.big|map(attribute='pad') }}").render(scope, 1 << 20)


def test_the_longest_output_of_a_mapped_node_is_chosen_from_picked_from_and_added_up() -> None:
    """Without the places of items that failed."""
    outputs = [{"n": n, "of": "text"} if n % 20 else None for n in range(100_000)]
    scope = Values(params={"each": outputs})
    added = parsed("{{ params.each | select | map(attribute='n') | sum }}").render(scope, 1 << 20)
    assert added == sum(n for n in range(100_000) if n % 20)


def test_a_value_that_is_not_json_is_an_error_of_the_template() -> None:
    scope = Values(params={"x": [2**70], "y": object()})
    with pytest.raises(TemplateError, match="not JSON"):
        parsed("{{ params.x|string }}").render(scope)
    with pytest.raises(TemplateError, match="not a JSON value has no length"):
        parsed("{{ params.y|length }}").render(scope)


def test_a_too_deeply_nested_value_is_an_error_of_the_template() -> None:
    left: Any = []
    right: Any = []
    for _ in range(200_000):
        left, right = [left], [right]
    with pytest.raises(TemplateError, match="nested too deeply"):
        parsed("{{ params.a.x == params.b.x }}").render(
            Values(params={"a": {"x": [left, 1]}, "b": {"x": [right, 2]}})
        )
