"""Checking many templates at once says of each what parsing it alone would have said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail.core.templates import Read, Template, TemplateRefused, parse_condition, parse_template
from dovetail.core.templates.template_index import TemplateIndex

from .test_template_fuzz import EXPRESSIONS, WORDS


def alone(text: str, is_condition: bool) -> Any:
    try:
        parsed = parse_condition(text) if is_condition else parse_template(text)
    except TemplateRefused as refused:
        return refused.code, refused.message, refused.offset
    if isinstance(parsed, Template) and (refused_use := parsed.refusal) is not None:
        return refused_use.code, refused_use.message, refused_use.offset
    return parsed.reads if parsed else ()


def surveyed(survey: TemplateIndex, text: str, is_condition: bool) -> Any:
    if text not in survey:
        survey.add(text)
    try:
        return survey.reads(text, is_condition=is_condition)
    except TemplateRefused as refused:
        return refused.code, refused.message, refused.offset


def agrees(text: str) -> None:
    survey = TemplateIndex()
    for is_condition in (False, True):
        assert surveyed(survey, text, is_condition) == alone(text, is_condition), text


@pytest.mark.parametrize(
    "text",
    [
        "", "plain", "{", "}}", "{ {{ a }} }", "{{{ a }}}", "{{ a }}{", "{{ a }} }}", "{{}}",
        "{{ a }}", " {{ a.b }}\n", "{{ a.status }}", "{{ a['status'] }}", "{{ a['sta' 'tus'] }}",
        "{{ a . status }}", "{{ a.\nstatus }}", "{{ params.a }}", "{{ params }}", "{{ run.id }}",
        "{{ secrets.A }}", "{{ secrets.A.b }}", "{{ secrets.A|d }}", "{{ secrets['A'] }}",
        "{{ (secrets.A) }}", "{{ secrets . A }}", "{{ secrets.A }}{{ a.b.c }}{{ 'x' }}{{ 1 }}",
        "{{ secrets.A }}{{ a|d }}", "{{ a|d }}{{ secrets.A }}", "{{- secrets.A -}} {{ a.b }}",
        "{{ secrets.A.b }} {{ a }}", "{{ secrets.A }} {{ a + 1 }} {{ secrets.B|d }}",
        "{{ 'secrets.A'|d }} {{ a.secrets|d }}", "{{ secrets }}", "{{ secrets[a] }}",
        "{{ secrets['A'] ~ a.b }}",
        "{{ secrets[0] }}", "{{ true }}", "{{ a.true }}", "{{ true.a }}", "{{ none }} {{ a }}",
        "{{ _a }}", "{{ a._b }}", "{{ a['_b'] }}", "{{ a['__b'] }}", "{{ a['' '__b'] }}",
        "{{ a['x' '__b'] }}", "{{ a[\"__b\"] }}", "{{ a.b.__c__ }}", "{{ é.b }}", "{{ a.b² }}",
        "{{ aé > 1 }}", "{{ a == 'é' }}", "{{ a == '²' }}", "{{ a == '\\x41' }}", "{{ a == '{' }}",
        "{{ a | foo }}", "{{ a | lower }}", "{{ lower | lower }}", "{{ a is foo }}",
        "{{ string is string }}", "{{ a is not none }}", "{{ a | default(b) }}",
        "{{ a | default(default_value=b) }}", "{{ a | default(other=b) }}",
        "{{ a.x if a is defined else b.x }}", "{{ b.x if a is defined else a.x }}",
        "{{ a.x or b.x if b is none else a.y }}", "{{ a | join(attribute='x') }}",
        "{{ {'a': b.c} }}", "{{ {'a': b.c}}}", "{{{'a': b}.a }}", "{{ {'a': {'b': c}} }}",
        "{{ {% }} }}", "{{ {'__a': b} }}", "{% if a %}", "{# a #}", "{{ a }}{% if a %}",
        "{{- a -}} {{+ b }}", "{{ a - }}", "{{ 007 }}", "{{ 18446744073709551616 }}",
        "{{ 999999999999999999 }}", "{{ 1e999 }}", "{{ 1.5 + a.1 + a.2.b }}", "{{ 0x1f }}",
        "{{ a[17] }}", "{{ a[0][1].b }}", "{{ a[b][c] }}", "{{ a[-1] }}", "{{ a.b(c) }}",
        "{{ a * 2 }}", "{{ 'a' % b }}", "{{ a % 'b' }}", "{{ ('a' ~ b) % c }}", "{{ a, b }}",
        "{{ [a, b, c, a] }}", "{{ (a }}", "{{ a) }}", "{{ 'a }}", "{{ v0.k + v1 }}",
        "{{ v1.k + v0 }}", "{{" + "not " * 101 + "a }}", "{{ a" + ".not" * 101 + " }}",
        "{{ " + "(" * 25 + "a" + ")" * 25 + " }}", "{{ a" + " + a" * 999 + " }}",
        "{{ a" + " + a" * 1000 + " }}", "{{a}}" * 1999, "{{a}}" * 2001, "{{a.b}}" * 667,
        "{{ a }}" + "é" * 8190, "{{ a }}" + "é" * 8180, "{{ a }}" + "x" * 16_384, "{{ a }}\ud800",
        "{{ a|map(attribute='x.y') }}", "{{ a|map('upper') }}", "{{ a|map(attribute=b.c) }}",
        "{{ a|select('gt', b.x) }}", "{{ a|select('gx', b.x) }}", "{{ a|select('s') }}",
        "{{ a|selectattr('eq', 'eq', eq) }}", "{{ a|selectattr('gt', 'x', 1) }}", "{{ a|items }}",
        "{{ a is eq b.status }}", "{{ gt is gt gt.x }}", "{{ a is in [b, 'in'] }}", "{{ a is eq }}",
        "{{ items|items|map(attribute='items') }}", "{{ a|select('eq', secrets.A) }}",
        "{{ a\rb }}", "{{ a\x0b }}", "{{ a\u00a0+ b }}", "{{ a == 'x\ny' }}",
    ],
)  # fmt: skip
def test_the_index_finds_the_same_reads_as_a_single_parse(text: str) -> None:
    agrees(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=30), st.sampled_from(["", " "]))
def test_the_index_reads_or_refuses_any_words_like_a_single_parse(
    words: list[str], between: str
) -> None:
    agrees("{{ " + between.join(words) + " }}")


@settings(max_examples=150, deadline=None)
@given(st.lists(EXPRESSIONS, min_size=1, max_size=3))
@example(["(params.a if a is defined else b).k"])
def test_the_index_reads_or_refuses_any_expression_like_a_single_parse(
    expressions: list[str],
) -> None:
    agrees(" and ".join(f"{{{{ {each} }}}}" for each in expressions))
    agrees(f"{{{{ {expressions[0]} }}}}")


def test_templates_that_differ_only_in_names_numbers_and_texts_are_parsed_once() -> None:
    survey = TemplateIndex()
    for at in range(1, 500):
        survey.add(f"{{{{ n{at}.x{at} > {at} and m['k{at}'] != 'v{at}' or n{at} is none }}}}")
    assert survey.parsed_words == survey.words // 499
    assert survey.parsed_words < 40
    text = "{{ n17.x17 > 17 and m['k17'] != 'v17' or n17 is none }}"
    assert survey.reads(text) == (Read("n17", False), Read("m", False), Read("n17", True))


def test_a_plain_path_is_not_parsed_at_all() -> None:
    survey = TemplateIndex()
    for at in range(100):
        survey.add(f"Of {{{{ n{at}.x }}}} and {{{{ params.p{at} }}}}.")
    assert (len(survey), survey.words, survey.parsed_words) == (100, 200, 0)


def test_a_refused_template_counts_each_time() -> None:
    survey = TemplateIndex()
    for at in range(10):
        survey.add(f"{{{{ n{at} ** 2 }}}}")
    before = survey.parsed_words
    for at in range(10):
        with pytest.raises(TemplateRefused, match=r"\*\*"):
            survey.reads(f"{{{{ n{at} ** 2 }}}}")
    assert survey.parsed_words == 11 * before


def test_a_too_long_text_is_not_analysed() -> None:
    survey = TemplateIndex(max_size=20)
    survey.add("{{ a + 1 }}" * 2)
    assert survey.words == 0
    with pytest.raises(TemplateRefused, match="longer than 20 bytes"):
        survey.reads("{{ a + 1 }}" * 2)
