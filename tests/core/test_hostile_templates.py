"""Templates that attack: escapes from the sandbox, bombs, and text that is no template at all.

Each is refused when it is parsed, or fails when it is rendered, within 100 ms and a few MB; and
none leaves a trace. A definition comes from anyone, and one orchestrator renders for everyone.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dovetail.core import templates
from dovetail.core.errors import TemplateError
from dovetail.core.templates import NodeValue, TemplateRefused, parse_condition, parse_template

from .pace import seconds_of

MB = 1 << 20
MOST_SECONDS = 0.1

TOUCH = "open('canary', 'w')"
OS = "os.system('touch canary')"
POPEN = "os.popen('touch canary').read()"

# Ways to Python's objects, from published payloads: attributes, items, filters, globals.
ESCAPES = [
    "''.__class__",
    "''.__class__.__mro__[1].__subclasses__()",
    "''.__class__.__base__.__subclasses__()[40]('canary', 'w')",
    "().__class__.__bases__[0].__subclasses__()",
    "[].__class__.__init__.__globals__['__builtins__']",
    "{}.__class__.__base__",
    "(1).__class__",
    "1.0.__class__",
    "none.__class__",
    "true.__class__.__name__",
    "params.__class__",
    "params.__init__.__globals__",
    "params.__getitem__('a')",
    "params['__class__']",
    'params["__class__"]["__mro__"]',
    "params[\"__cla\" 'ss__']",
    "params['__cla' ~ 'ss__']",
    "params['__cla' + 'ss__']",
    "params['\\x5f\\x5fclass\\x5f\\x5f']",
    "params['\\u005f\\u005fclass__']",
    "params['\\137\\137class__']",
    "params['\\N{LOW LINE}\\N{LOW LINE}class__']",
    "params[['__', 'class__']|join]",
    "params['__CLASS__'|lower]",
    "params['__ssalc__'|reverse]",
    "params['xxclassxx'|replace('x', '_')]",
    "params[('__' ~ 'class' ~ '__')|trim]",
    "params.＿＿class＿＿",
    "params.﹍class",
    "params.︳class",
    "params['＿＿class＿＿']",
    "params.ｃlass",
    "node.__class__",
    "node._asdict",
    "node._asdict()",
    "node._fields",
    "node.__reduce__",
    "node.output.__class__",
    "node.id.__class__",
    "node['_asdict']",
    "run.__class__",
    "text.upper()",
    "text.format(1)",
    "'{0.__class__}'.format(text)",
    "text.encode('utf8')",
    "'%s' % params",
    "'%(a)s' % params",
    "text|attr('__class__')",
    "text|attr('__cla' ~ 'ss__')",
    "[text]|map('upper')|list",
    "[text]|map(attribute='__class__')|list",
    "[text]|map(attribute='upper')",
    "[text]|map(attribute='a.__class__')",
    "[node]|map(attribute='_asdict')",
    "[text]|map('attr', '__class__')",
    "[text]|map('map', attribute='__class__')",
    "[params]|selectattr('__class__')",
    "[params]|rejectattr('__class__.__mro__')",
    "[params]|selectattr('a', '__class__')",
    "[params]|select('callable')",
    "[params]|reject('sameas', params)",
    "[params]|select('filter')",
    "[params]|select('test')",
    "['upper']|select('filter')",
    "[params]|select('d' 'efine')",
    "[params]|select(params.b)",
    "[params]|reject(lambda: 1)",
    "[params]|select('eq', secrets)",
    "[params]|select('in', secrets)",
    "[params]|groupby('__class__')",
    "[params]|sort(attribute='__class__')",
    "[params]|sort(attribute='__class__.__mro__')",
    "[params]|max(attribute='__class__')",
    "[params]|min(attribute='__init__')",
    "[params]|sum(attribute='__len__')",
    "[params]|join(attribute='__class__')",
    "[params]|unique(attribute='__class__')",
    "{'a': 1}|xmlattr",
    "params|pprint",
    "[1]|random",
    "'%s'|format(params)",
    "'%999999999d'|format(1)",
    "params|items()|attr('x')",
    "params.items()",
    "secrets|items",
    "params|dictsort",
    "params|urlencode",
    "'<b>'|safe",
    "'<b>'|escape",
    "'<b>'|e",
    "'<b>'|forceescape",
    "'<b>'|striptags",
    "'http://a'|urlize",
    "'a b'|wordcount",
    "1|filesizeformat",
    "[1]|batch(2)",
    "[1]|slice(2)",
    "text|tojson|safe",
    "cycler.__init__.__globals__." + OS,
    "joiner.__init__.__globals__." + OS,
    "namespace.__init__.__globals__." + OS,
    "lipsum.__globals__['os'].popen('touch canary').read()",
    "lipsum(n=10000)",
    "lipsum.__globals__",
    "cycler('a', 'b')",
    "joiner()",
    "namespace(a=1)",
    "range(999999999)",
    "range(10)|list",
    "dict(a=1)",
    "self",
    "self.__init__",
    "self._TemplateReference__context",
    "self.__dict__",
    "loop.index",
    "super()",
    "caller()",
    "varargs",
    "kwargs",
    "context",
    "context.eval_ctx",
    "environment",
    "config.items()",
    "request.application.__globals__",
    "get_flashed_messages.__globals__",
    "url_for.__globals__",
    "g.pop.__globals__",
    "_",
    "_('x')",
    "gettext('x')",
    "__import__('os')." + POPEN,
    "__builtins__",
    "eval('1')",
    "exec('1')",
    TOUCH,
    OS,
    "secrets",
    "secrets|list",
    "secrets|join(',')",
    "secrets|length",
    "secrets is mapping",
    "secrets[params.a]",
    "secrets[('A' ~ 'B')]",
    "(secrets)",
    "[secrets]",
    "(secrets if true else 1).KEY",
    "text is callable",
    "text is filter",
    "'upper' is filter",
    "text is sameas(text)",
    "text is escaped",
    "text is in(secrets)",
    "text is eq(secrets)",
    "text is eq",
    "text is ==(text)",
    "text is eq.__class__",
    "params.a is odd",
    "params.a is divisibleby(0)",
    "lambda: 1",
    "[x for x in params]",
    "params.a if params.a else (lambda: 1)()",
    "a := 1",
    "`id`",
    "params.a!r",
    "print('x')",
    "import os",
    "text[::-1]",
    "text[0:999999]",
    "text[:]",
    "text[...]",
    "params.a()()",
    "params.a.b.c()",
    "(text|upper)()",
    "(text is defined)()",
    "@a",
    "$a",
    "a?.b",
    "a->b",
    "a::b",
    "\\x61",
    "'\\ud83d\\ude00'",
    "\x00",
    "'a' \x00 'b'",
]

# More work or more memory than their length lets expect.
BOMBS = [
    "'a' * 10**9",
    "'a' * 999999999",
    "[0] * 999999999",
    "10**10**10",
    "2 ** 9999999",
    "9" * 5000,
    "9" * 16000,
    "-" + "9" * 400,
    "0x" + "f" * 16000,
    "0b" + "1" * 16000,
    "1_" * 5000 + "1",
    "1e999",
    "-1e999",
    "1e308 + 1e308",
    "9.9e307 + 9.9e307",
    "1" * 400 + ".0",
    "18446744073709551615 + 18446744073709551615",
    "-9223372036854775808 - 1",
    "[" + ",".join(["18446744073709551615"] * 3) + "]|sum",
    "'%999999999d' % 1",
    "('%' ~ '999999999d') % 1",
    "text % 1",
    "'a'|center(10**9)",
    "'a'|center(999999999)",
    "'a'|ljust(999999999)",
    "'a'|indent(999999999)",
    "'a'|wordwrap(1)",
    "'a'|truncate(999999999)",
    "1.5|round(999999999)",
    "1.5|round(-999999999)",
    "15|round(-999999999)",
    "1.5|round(18446744073709551615)",
    "[1]|tojson(indent=999999999)",
    "[1]|tojson(indent=-1)",
    "'9'|int(base=999999999)|string|center(9)",
    "big ~ big",
    "big + big",
    "big ~ 'x' ~ big ~ big ~ big",
    "big|upper ~ big|lower",
    "big|replace('a', 'aaaaaaaaaaaaaaaa')",
    "big|replace('', 'x')",
    "big|replace('', big)",
    "big|replace('a', big)",
    "'aaa'|replace('a', big)",
    "'a'|replace('', big)|replace('', big)",
    "('a'" + "|replace('a', 'aaaaaaaaaa')" * 20 + ")",
    "('a'" + "|replace('', 'bbbbbbbbbb')" * 20 + ")",
    "[big, big]|join",
    "['', '', '']|join(big)",
    "numbers|join(big)",
    "big|list",
    "big|join(',')",
    "big|sort",
    "big|unique|join(big)",
    "big|reverse ~ big",
    "big|list|tojson",
    "[big, big]",
    "{'a': big, 'b': big}",
    "[[big], [big]]",
    "[big]|list + [big]|list",
    "[big, big]|length",
    "[[big]|tojson, big]|tojson",
    "big|tojson|tojson|tojson",
    "numbers" + " + numbers" * 20,
    "words|tojson(indent=8)",
    "numbers|tojson(indent=8) ~ numbers|tojson(indent=8) ~ big",
    "deep|tojson(indent=8) ~ deep|tojson(indent=8) ~ big",
    "numbers|join(attribute='" + "0." * 8000 + "')",
    "numbers|sort(attribute='" + "a," * 7000 + "')",
    "words|join(attribute='" + "0." * 31 + "0')",
    "big|trim('" + "a" * 15000 + "') + 1",
    "big|int + 'x'",
    "big|float + 'x'",
    "words|map(attribute='a', default=big)",
    "words|map(attribute='a', default=big)|length",
    "words|map(attribute='a', default=numbers)",
    "words|map(attribute='" + "0." * 8000 + "')",
    "words|map(attribute='" + "0." * 31 + "0')",
    "big|map(attribute=0)",
    "big|select",
    "big|reject('eq', 'b')",
    "words|select('in', words)",
    "words|reject('in', big)",
    "numbers|select('in', numbers)",
    "words|select('eq', big)" + "|select('eq', big)" * 200,
    "numbers" + "|select" * 90,
    "words|selectattr('" + "0." * 31 + "0')",
    "[numbers, numbers]|select('eq', numbers)|tojson ~ big",
    "(" * 8000,
    "(" * 7000 + "1" + ")" * 7000,
    "[" * 7000 + "]" * 7000,
    "{" * 8000,
    "{'a':" * 2500 + "1" + "}" * 2500,
    "((((((((((" * 500,
    "not " * 4000 + "a",
    "-" * 16000 + "1",
    "+-" * 7000 + "1",
    "1" + "+1" * 7000,
    "1" + "-1" * 7000,
    "'a'" + "~'a'" * 4000,
    "a" + " and a" * 2500,
    "a" + " or a" * 3000,
    "1" + "<1" * 7000,
    "a" + "|d" * 7000,
    "text" + "|upper" * 2000,
    "text" + "|default('x')" * 1100,
    "a" + ".b" * 8000,
    "a" + "[0]" * 5000,
    "a" + "['b']" * 3000,
    "a" + "[a" * 5000,
    "a[" * 4000 + "]" * 4000,
    "a" + "(a" * 5000,
    "a" + "()" * 8000,
    "1 if " * 3000 + "1",
    "a if b else " * 1300 + "c",
    "a" + " is defined" * 1400,
    "a" + ",a" * 8000,
    "'" + "\\x41" * 3900 + "'|replace('A', '" + "b" * 300 + "')|replace('b', big)",
    "'\\",
    "'" + "\\" * 16001,
    '"' * 16001,
    "'" * 16001,
    " " * 16000,
    "\n" * 16000,
]

# Whole texts, not only expressions.
TEXTS = [
    "{% for x in range(999999999) %}a{% endfor %}",
    "{% set x = 1 %}",
    "{% include 'canary' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import system %}",
    "{% extends 'canary' %}",
    "{% macro x() %}{{ x() }}{% endmacro %}{{ x() }}",
    "{% call x() %}{% endcall %}",
    "{% filter upper %}a{% endfilter %}",
    "{% raw %}{{ a }}{% endraw %}",
    "{% block a %}{% endblock %}",
    "{% autoescape false %}{% endautoescape %}",
    "{% with a = 1 %}{% endwith %}",
    "{% if 1 %}a{% endif %}",
    "{%- if 1 -%}a{%- endif -%}",
    "{%+ if 1 %}a{% endif %}",
    "{% do params.clear() %}",
    "{% trans %}a{% endtrans %}",
    "{% debug %}",
    "{% break %}",
    "{%",
    "{%}",
    "{{ text }}{% x",
    "{# comment #}",
    "{#",
    "{#- {{ text }} -#}",
    "a {# {{ text }}",
    "{{ text #} }}",
    "{{ text %}",
    "{{ text {% if %} }}",
    "{{ {# text #} }}",
    "{{",
    "{{{",
    "{{{{{{",
    "{{ {{ text }} }}",
    "{{{{ text }}}}",
    "{{ text }",
    "{{ text } }",
    "{{ 'text }}",
    "{{ text }} {{",
    "{{}}",
    "{{ }}",
    "{{-}}",
    "{{--}}",
    "{{+}}",
    "{{ ; }}",
    "{{ text; text }}",
    "{{ = }}",
    "{{ text = 1 }}",
    "{{ . }}",
    "{{ | }}",
    "{{ text| }}",
    "{{ text|upper| }}",
    "{{ text is }}",
    "{{ text is not }}",
    "{{ text if }}",
    "{{ text if else }}",
    "{{ if text }}",
    "{{ for x in text }}",
    "{{ text in }}",
    "{{ , }}",
    "{{ [1, }}",
    "{{ {'a' } }}",
    "{{ {1: 2} }}",
    "{{ {none: 2} }}",
    "{{ text.1e5 }}",
    "{{ text..a }}",
    "{{ text.'a' }}",
    "{{ 1.2.3 }}",
    "{{ 0777 }}",
    "{{ '\\x' }}",
    "{{ '\\u12' }}",
    "{{ '\\N{' }}",
    "{{ '\\N{NOPE}' }}",
    "{{ '\\U99999999' }}",
    "{{ '\\udfff' }}",
    "{{ text }} \udfff",
    "\ufeff{{ te\u200bxt }}",
    "{{ text }}" + "x" * 100_000,
    "{{ a }}" * 2400,
    "{{ a" * 4000,
    "{{ '" * 4000,
    "{{" * 8000,
    "{{ big }}{{ big }}",
    "{{ big }}" + "x" * 200,
    "{{ big }} " * 1000,
    "{{ numbers }}" * 400,
    "{{ text ~ '" + "x" * 16_000 + "' }}" + "y" * 1000,
]


def _hostile_scope() -> dict[str, Any]:
    deep: Any = 1
    for _ in range(90):
        deep = [deep]
    return {
        "params": {"a": 1, "b": "x"},
        "run": {"id": "r", "workflow": "w"},
        "secrets": {"KEY": "hush"},
        "node": NodeValue("node", "COMPLETED", {"a": 1}, None),
        "text": NodeValue("text", "COMPLETED", "some text", None),
        "big": NodeValue("big", "COMPLETED", "a" * (MB - 100), None),
        "numbers": NodeValue("numbers", "COMPLETED", list(range(20_000)), None),
        "words": NodeValue("words", "COMPLETED", ["w"] * 100_000, None),
        "deep": NodeValue("deep", "COMPLETED", deep, None),
    }


class Hostile:
    """The scope of every attack: plain values, among them large and deep ones."""

    values = _hostile_scope()

    def get(self, name: str) -> Any:
        return self.values[name]


def attack(text: str) -> Exception | None:
    """How the template was stopped. Not through the cache: each pays its own price."""
    templates._parse_cached.cache_clear()
    try:
        template = parse_template(text)
        assert template is not None
        template.render(Hostile())
    except (TemplateRefused, TemplateError) as stopped:
        return stopped
    return None


HOSTILE = [*("{{ " + expression + " }}" for expression in ESCAPES + BOMBS), *TEXTS]


def test_there_are_at_least_three_hundred_different_attacks() -> None:
    assert len(set(HOSTILE)) == len(HOSTILE) >= 300


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:50]))
def test_an_attack_is_stopped_in_time_and_has_no_effect(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stopped = attack(text)
    assert stopped is not None
    assert seconds_of(lambda: attack(text), MOST_SECONDS) <= MOST_SECONDS
    assert list(tmp_path.iterdir()) == []
    assert "hush" not in str(stopped)
    assert len(str(stopped)) < 600


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:50]))
def test_no_attack_passes_as_a_condition(text: str) -> None:
    try:
        condition = parse_condition(text)
        condition(Hostile())
    except (TemplateRefused, TemplateError):
        return
    assert text.startswith("{{ big")  # all that was wrong with it is the size of its result


def test_no_attack_on_memory_takes_more_than_a_few_megabytes() -> None:
    texts = ["{{ " + bomb + " }}" for bomb in BOMBS] + TEXTS
    tracemalloc.start()
    try:
        for text in texts:
            tracemalloc.clear_traces()
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            attack(text)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 16 * MB, text[:80]
    finally:
        tracemalloc.stop()


def test_a_rendering_ends_soon_even_if_it_reads_a_megabyte_often() -> None:
    numbers = list(range(150_000))
    scope = Hostile()
    scope.values = {
        "n": numbers,
        "d": [{"k": i % 7} for i in numbers[:100_000]],
        "w": [str(i) for i in numbers[:100_000]],
        "u": "ß" * (MB // 2),
        "s": "ab " * (MB // 3),
        "m": {str(i): {} for i in numbers[:50_000]},
    }
    heavy = [
        "n|sort", "n|sum", "n|max", "n|join", "n|tojson", "n|unique", "n|list", "n|reverse",
        "d|sort(attribute='k')", "d|unique", "d|tojson(2)", "d|join", "w|join", "w|sort",
        "u|upper", "u|title", "u|list", "s|title", "s|replace('a', 'b')", "s|trim", "s|int",
        "d|map(attribute='k')", "d|map(attribute='x', default=1)", "d|select", "w|select('in', s)",
        "d|selectattr('k', 'gt', 3)", "d|reject('eq', {'k': 1})", "n|reject('lt', 9)", "m|items",
        "d|selectattr('x', 'defined')", "n|select('in', [])", "m|select('ne', 'k')", "s|select",
    ]  # fmt: skip
    for expression in heavy:
        template = parse_template("{{ [" + f"({expression})|length," * 100 + "] }}")
        assert template is not None

        def render(template: Any = template) -> None:
            with pytest.raises(TemplateError):
                template.render(scope)

        assert seconds_of(render, 0.5) <= 0.5, expression
