"""A secret may only be named, and only in the config of a handler that takes secrets.

Whatever else an expression does with one is refused, when the definition is checked and again in
the worker; so what is left can show a secret only as it is, which redaction knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail.config import Settings
from dovetail.core.definition.source import read_text
from dovetail.core.definition.validation import check
from dovetail.core.errors import TemplateError, TemplateForbidden
from dovetail.core.redaction import Redactor, SecretFields
from dovetail.core.templates import (
    Deferred,
    TemplateRefused,
    compile_config,
    parse_template,
    render_deferred,
    secrets_read,
)
from dovetail.core.templates.filters import FILTERS
from dovetail.handlers.builtin import builtin_registry

from .test_config_templates import SCOPE
from .test_template_fuzz import ANY_FILTER, SIGNS, combined

KEY = "s3cr3t-Value-0815"


FIELDS: dict[str, SecretFields | None] = {
    "input": False,
    "output": (),
    "anywhere": True,
    "some": ("headers", "body"),
    "unsaid": None,
}


class Known:
    """Handlers, some of which take secrets."""

    def __contains__(self, name: object) -> bool:
        return name in FIELDS

    def __iter__(self) -> Iterator[str]:
        return iter(FIELDS)

    def secret_fields(self, name: str) -> SecretFields | None:
        return FIELDS[name]


def found(config: dict[str, Any], handler: str = "anywhere") -> list[tuple[str, str]]:
    node = {"id": "a", "handler": handler, "config": config}
    checked = check({"name": "w", "nodes": [node]}, Known())
    return [(one.code, one.message) for one in checked.errors]


PLAIN = [
    "{{ secrets.KEY }}",
    "{{secrets.KEY}}",
    "{{ secrets.KEY }}\n",
    "{{ secrets . KEY }}",
    "{{- secrets.KEY -}} x",
    "Bearer {{ secrets.KEY }}",
    "{{ params.user }}:{{ secrets.KEY }}",
    "{{ secrets.KEY }}{{ secrets.OTHER }}",
    "{{ params.a[0]['b'] }} {{ '{{' }} {{ 1 }} {{ none }} {{ secrets.KEY }}",
    "ü {{ secrets.KEY }}",
]

FORBIDDEN = [
    "{{ secrets }}",
    "{{ secrets.KEY.x }}",
    "{{ secrets.KEY[0] }}",
    "{{ secrets['KEY'] }}",
    '{{ secrets["KEY"] }}',
    "{{ secrets['K' 'EY'] }}",
    "{{ secrets[params.x] }}",
    "{{ (secrets.KEY) }}",
    "{{ (secrets).KEY }}",
    "{{ secrets | tojson }}",
    "{{ secrets.KEY ~ 'x' }}",
    "{{ secrets.KEY + 'x' }}",
    "{{ 'x' ~ secrets.KEY }}",
    "{{ -secrets.KEY }}",
    "{{ [secrets.KEY] }}",
    "{{ secrets.KEY, 1 }}",
    "{{ {'a': secrets.KEY} }}",
    "{{ {secrets.KEY: 1} }}",
    "{{ {'a': secrets.KEY}.a }}",
    "{{ params[secrets.KEY] }}",
    "{{ secrets.KEY == 'x' }}",
    "{{ 'x' in secrets.KEY }}",
    "{{ secrets.KEY in params.x }}",
    "{{ secrets.KEY and 1 }}",
    "{{ 1 or secrets.KEY }}",
    "{{ not secrets.KEY }}",
    "{{ secrets.KEY is defined }}",
    "{{ 1 if secrets.KEY else 2 }}",
    "{{ secrets.KEY if params.x else 2 }}",
    "{{ 1 if params.x else secrets.KEY }}",
    "{{ params.x | default(secrets.KEY) }}",
    "{{ params.x | replace('a', secrets.KEY) }}",
    "{{ params.x | join(secrets.KEY) }}",
    "x {{ secrets.KEY | upper }}",
    "{{ secrets.KEY }} {{ params.x | upper }}",
    "{{ params.x ~ 'a' }} {{ secrets.KEY }}",
    "{{ 1 if params.x else 2 }} {{ secrets.KEY }}",
    *(f"{{{{ secrets.KEY | {name} }}}}" for name in (*FILTERS, "default('')", "d")),
]


@pytest.mark.parametrize("text", PLAIN)
def test_a_secret_may_be_named_alone_or_inside_a_text(text: str) -> None:
    assert found({"a": text}) == []
    assert found({"a": [{"b": text}]}) == []


@pytest.mark.parametrize("text", FORBIDDEN)
def test_any_other_use_of_a_secret_is_forbidden(text: str) -> None:
    ((code, message),) = found({"a": text})
    assert code == "template_forbidden"
    assert "character" in message
    with pytest.raises(TemplateForbidden):
        render_deferred({"a": text}, [Deferred(("a",), text, {"params": {}})], {"KEY": KEY})


def test_a_forbidden_secret_is_reported_with_path_line_and_column() -> None:
    text = (
        "name: w\n"
        "nodes:\n"
        "  - id: a\n"
        "    handler: anywhere\n"
        "    config:\n"
        "      headers:\n"
        "        X: 'Bearer {{ secrets.KEY | reverse }}'\n"
        "  - {id: b, handler: input, config: {k: '{{ secrets.KEY }}'}}\n"
    )
    forbidden, misplaced = check(read_text(text, format="yaml"), Known()).errors
    assert forbidden.as_dict() == {
        "code": "template_forbidden",
        "path": "nodes[0].config.headers.X",
        "line": 7,
        "column": 12,
        "message": "a secret may stand only as its plain name, alone or inside a text: "
        "{{ secrets.NAME }} or 'Bearer {{ secrets.NAME }}'; no filter, operator, condition, item "
        "or attribute (at character 11)",
    }
    assert (misplaced.path, misplaced.line, misplaced.column) == ("nodes[1].config.k", 8, 41)
    assert "the handler 'input' takes no secrets" in misplaced.message


@pytest.mark.parametrize(
    ("handler", "field", "reason"),
    [
        ("anywhere", "url", None),
        ("some", "headers", None),
        ("some", "body", None),
        ("some", "url", "'some' takes secrets in body, headers of its config, not in 'url'"),
        ("input", "headers", "the handler 'input' takes no secrets"),
        ("output", "headers", "the handler 'output' takes no secrets"),
        ("unsaid", "headers", "it is not known whether the handler 'unsaid' takes secrets"),
    ],
)
def test_a_secret_is_allowed_only_where_the_handler_accepts_one(
    handler: str, field: str, reason: str | None
) -> None:
    text = "{{ secrets.KEY }}"
    for config, path in (({field: text}, (field,)), ({field: [{"x": text}]}, (field, 0, "x"))):
        errors = found(config, handler)
        fields = FIELDS[handler]
        deferred = [Deferred(path, text, {})]
        if reason is None:
            assert errors == []
            assert render_deferred(
                config, deferred, {"KEY": KEY}, handler=handler, fields=fields
            ) != (config)
        else:
            ((code, message),) = errors
            assert code == "template_forbidden"
            assert message.startswith(reason)
            with pytest.raises(TemplateForbidden, match=r"^config\.") as refused:
                render_deferred(config, deferred, {"KEY": KEY}, handler=handler, fields=fields)
            assert reason in str(refused.value)


def test_of_the_built_in_handlers_only_one_accepts_secrets_and_not_in_its_url() -> None:
    registry = builtin_registry(Settings())
    assert registry.taking_secrets() == {
        "call_external_service": ["body", "headers", "json", "params"]
    }
    for field in ("url", "method", "timeout_seconds", "expect_status"):
        node = {
            "id": "a",
            "handler": "call_external_service",
            "config": {"url": "https://x.example", field: "{{ secrets.KEY }}"},
        }
        (problem,) = check({"name": "w", "nodes": [node]}, registry).errors
        assert (problem.code, problem.path) == ("template_forbidden", f"nodes[0].config.{field}")


def test_handlers_known_only_by_name_get_no_secrets() -> None:
    node = {"id": "a", "handler": "h", "config": {"k": "{{ secrets.KEY }}"}}
    (problem,) = check({"name": "w", "nodes": [node]}, {"h"}).errors
    assert problem.code == "template_forbidden"
    assert "does not say so" in problem.message


def test_an_unknown_handler_is_one_problem_and_without_a_registry_there_is_none() -> None:
    node = {"id": "a", "handler": "nope", "config": {"k": "{{ secrets.KEY }}"}}
    assert [one.code for one in check({"name": "w", "nodes": [node]}, Known()).errors] == [
        "unknown_handler"
    ]
    assert check({"name": "w", "nodes": [node]}, None).valid


def test_the_names_of_the_secrets_in_a_config_are_known() -> None:
    config = {
        "a": "{{ secrets.ONE }}",
        "b": ["x {{ secrets.TWO }} {{ secrets.ONE }}"],
        "c": "{{ 1 }}",
    }
    assert secrets_read(compile_config(config).render(SCOPE).deferred) == {"ONE", "TWO"}


# --- whatever is written ---------------------------------------------------------------------

LEAVES = st.sampled_from(
    ["secrets.KEY", "secrets['KEY']", "secrets.KEY.x", "secrets", "secrets.OTHER", "params.b",
     "params.list", "1", "'x'", "fetch.body", "none"]
)  # fmt: skip
EXPRESSIONS = st.recursive(
    LEAVES, lambda inner: combined(inner, ANY_FILTER, [*SIGNS, "~"]), max_leaves=6
)
TEXTS = st.lists(
    EXPRESSIONS.map(lambda one: f"{{{{ {one} }}}}") | st.sampled_from(["Bearer ", "x", "\n"]),
    min_size=1,
    max_size=3,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
@example("{{ secrets.KEY }}")
@example("{{ secrets.KEY | reverse }}")
def test_every_accepted_template_yields_the_secret_unchanged(text: str) -> None:
    """And redaction takes it out; what names a secret otherwise does not pass, nor is it
    rendered by a worker that gets it all the same."""
    valid = not found({"a": text})
    try:
        template = parse_template(text)
    except TemplateRefused:
        assert not valid
        return
    if template is None or not template.uses_secrets:
        return
    assert valid == (template.refusal is None)
    scope = {
        "params": {"b": "x", "list": [1, 2]},
        "fetch": {"id": "fetch", "status": "COMPLETED", "output": {"body": "t"}, "error": None},
    }
    deferred = [Deferred(("a",), text, scope)]
    secrets = {"KEY": KEY, "OTHER": "another-" + KEY[::-1]}
    if not valid:
        with pytest.raises(TemplateForbidden):
            render_deferred({"a": text}, deferred, secrets)
        return
    rendered = render_deferred({"a": text}, deferred, secrets)["a"]
    values = [secrets[name] for name in secrets_read(deferred)]
    assert all(value in rendered for value in values)
    left = Redactor(secrets).redact({"a": rendered})["a"]
    assert "***" in left
    assert not any(value in left for value in values)


@settings(max_examples=100, deadline=None)
@given(st.lists(EXPRESSIONS, min_size=1, max_size=4))
def test_a_condition_never_reads_a_secret(expressions: list[str]) -> None:
    condition = f"{{{{ {' and '.join(f'({one})' for one in expressions)} }}}}"
    node = {"id": "a", "handler": "anywhere", "condition": condition}
    checked = check({"name": "w", "nodes": [node]}, Known())
    if "secrets" in condition:
        assert not checked.valid


def test_ten_thousand_different_texts_with_a_secret_are_checked() -> None:
    """Not one of them is parsed, so that the limit of what is parsed is not used up."""
    listed = [
        {
            "id": f"n{at}",
            "handler": "anywhere",
            "config": {"a": f"{{{{ params.p{at} }}}}: {{{{ secrets.KEY{at} }}}}"},
        }
        for at in range(10_000)
    ]
    assert check({"name": "w", "nodes": listed}, Known()).errors == ()


def test_a_definition_older_than_the_secret_rule_can_still_be_read() -> None:
    """Its run ends with an error of the node, not of the engine."""
    rendered = compile_config({"a": "{{ secrets.KEY | reverse }}"}).render(SCOPE)
    with pytest.raises(TemplateError, match=r"config\.a: a secret may stand only"):
        render_deferred(rendered.config, rendered.deferred, {"KEY": KEY})
