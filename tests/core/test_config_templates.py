"""Configs with templates, and the strings with secrets that only a worker renders."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest

from dovetail.core.errors import MissingValue, TemplateError, TemplateForbidden, TooLarge
from dovetail.core.templates import Deferred, NodeValue, Rendered, compile_config, render_deferred


class Values(dict[str, Any]):
    """A scope of fixed values."""

    def get(self, name: str) -> Any:  # type: ignore[override]
        return self[name]


SCOPE = Values(
    params={"a": 1, "b": "x", "list": [1, 2]},
    run={"id": "r1", "workflow": "flow"},
    fetch=NodeValue("fetch", "COMPLETED", {"body": "text", "json": {"n": 1}}, None),
    skipped=NodeValue("skipped", "SKIPPED", None, None),
)


def rendered(config: dict[str, Any], **scope: Any) -> Any:
    return compile_config(config).render(Values(SCOPE | scope)).config


def test_a_config_without_templates_is_passed_unchanged() -> None:
    config = {"url": "https://example.com", "deep": [{"a": 1}], "n": None}
    template = compile_config(config)
    assert not template.templates
    assert template.templates == []
    assert template.reads == frozenset()
    assert template.render(Values()) == Rendered(config, ())


def test_templates_are_rendered_wherever_a_value_is_a_string() -> None:
    config = {
        "prompt": "Summarise: {{ fetch.body }}",
        "data": "{{ fetch.json }}",
        "messages": [{"role": "user", "content": "{{ params.b }}"}, "{{ params.a }}", 5],
        "none": "{{ skipped.x }}",
        "{{ params.a }}": "keys are left alone",
    }
    assert rendered(config) == {
        "prompt": "Summarise: text",
        "data": {"n": 1},
        "messages": [{"role": "user", "content": "x"}, 1, 5],
        "none": None,
        "{{ params.a }}": "keys are left alone",
    }


def test_templates_are_listed_in_the_order_they_are_written() -> None:
    template = compile_config(
        {"z": "{{ b.x }}", "a": ["{{ c }}", {"k": "{{ secrets.S }}"}], "m": "{{ params.a }}!"}
    )
    assert [path for path, _ in template.templates] == [("z",), ("a", 0), ("a", 1, "k"), ("m",)]
    assert template.reads == {"b", "c", "secrets", "params"}
    assert template.templates


def test_rendering_changes_neither_the_definition_nor_the_outputs_and_shares_the_rest() -> None:
    config = {"a": {"b": ["{{ params.a }}", {"c": 1}]}, "rest": {"d": 1}, "all": "{{ fetch }}"}
    before = copy.deepcopy(config)
    template = compile_config(config)
    first = template.render(SCOPE).config
    second = template.render(SCOPE).config
    assert config == before
    assert first == second
    assert first["a"] is not second["a"]
    assert first["a"]["b"] is not second["a"]["b"]
    assert first["rest"] is config["rest"]
    assert first["all"] is SCOPE["fetch"].output


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"prompt": "{{ fetch.missing }}"},
            "config.prompt: {{ fetch.missing }} has no 'missing'; 'fetch' returned: body, json",
        ),
        (
            {"m": [{"odd key": "x {{ params.b - 1 }}"}]},
            'config.m[0]["odd key"]: {{ params.b - 1 }}: - works on numbers',
        ),
    ],
)
def test_an_error_names_the_place_in_the_config(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        rendered(config)
    assert str(caught.value).startswith(message)


def test_the_first_template_that_fails_is_the_one_reported() -> None:
    with pytest.raises(MissingValue, match=r"^config\.a"):
        rendered({"a": "{{ params.x }}", "b": "{{ params.y }}"})


# --- sizes -----------------------------------------------------------------------------------


def json_length(value: Any) -> int:
    return len(orjson.dumps(value))


@pytest.mark.parametrize(
    "config",
    [
        {"a": "{{ params.big }}"},
        {"a": "{{ params.big }}", "b": "{{ params.big }}", "c": 1},
        {"a": ["{{ params.short }}"] * 40},
        {"a": "x {{ params.short }}", "b": "{{ params.n }}", "c": "{{ params.many }}"},
        {"a": "{{ params.quotes }}"},
        {"a": "y" * 300},
    ],
)
def test_a_config_may_be_exactly_as_large_as_its_limit(config: dict[str, Any]) -> None:
    scope = Values(
        params={
            "big": "é" * 400,
            "short": "é" * 20,
            "n": 1.25,
            "many": list(range(50)),
            "quotes": '"\n\x01' * 100,
        }
    )
    template = compile_config(config)
    whole = template.render(scope).config
    size = json_length(whole)
    assert template.render(scope, size).config == whole
    with pytest.raises(TooLarge, match=f"at most {size - 1:,} are allowed|more than"):
        template.render(scope, size - 1)


def test_one_megabyte_is_the_limit_unless_another_is_given() -> None:
    half = {"params": {"half": "a" * (1 << 19)}}
    assert rendered({"a": "{{ params.half }}"}, **half)
    with pytest.raises(TooLarge) as caught:
        rendered({"a": "{{ params.half }}", "b": "{{ params.half }}"}, **half)
    assert caught.value.type == "too_large"
    assert "config.b" in str(caught.value)


def test_all_templates_of_a_config_share_one_budget_of_work() -> None:
    config = {f"k{i}": "{{ params.text|title|length }}" for i in range(100)}
    with pytest.raises(TooLarge, match="takes too much work"):
        rendered(config, params={"text": "ab " * 30_000})
    assert rendered({"k0": config["k0"]}, params={"text": "ab " * 30_000}) == {"k0": 90_000}


# --- secrets ---------------------------------------------------------------------------------


def test_a_string_with_a_secret_is_deferred_with_only_the_values_that_it_reads() -> None:
    config = {
        "headers": {"Authorization": "Bearer {{ secrets.TOKEN }}", "X": "{{ params.a }}"},
        "sign": "{{ secrets.KEY }}{{ fetch.body }}{{ skipped.x }}{{ params.a }}{{ nowhere.x }}",
    }
    result = compile_config(config).render(SCOPE)
    assert result.config == config | {"headers": config["headers"] | {"X": 1}}
    assert result.deferred == (
        Deferred(("headers", "Authorization"), "Bearer {{ secrets.TOKEN }}", {}),
        Deferred(
            ("sign",),
            config["sign"],
            {
                "fetch": {
                    "id": "fetch",
                    "status": "COMPLETED",
                    "output": {"body": "text", "json": {"n": 1}},
                    "error": None,
                },
                "skipped": {"id": "skipped", "status": "SKIPPED", "output": None, "error": None},
                "params": {"a": 1, "b": "x", "list": [1, 2]},
            },
        ),
    )
    assert orjson.loads(orjson.dumps(result.deferred[1]))["scope"] == result.deferred[1].scope


def test_the_worker_renders_strings_with_secrets_and_does_not_change_its_task() -> None:
    config = {
        "headers": {"Authorization": "Bearer {{ secrets.TOKEN }}", "X": "{{ params.a }}"},
        "list": [["{{ secrets.KEY }}{{ fetch.json.n }}"], "{{ secrets.KEY }}"],
        "rest": {"a": 1},
    }
    result = compile_config(config).render(SCOPE)
    before = copy.deepcopy(result)
    final = render_deferred(result.config, result.deferred, {"TOKEN": "t0", "KEY": "k0"})
    assert final == {
        "headers": {"Authorization": "Bearer t0", "X": 1},
        "list": [["k01"], "k0"],
        "rest": {"a": 1},
    }
    assert result == before
    assert final["rest"] is result.config["rest"]


def test_without_deferred_strings_the_config_is_complete() -> None:
    config = {"a": 1}
    assert render_deferred(config, (), {"K": "v"}) is config


def test_a_deferred_string_survives_json() -> None:
    result = compile_config({"a": ["{{ secrets.K }}{{ fetch.body }}"]}).render(SCOPE)
    wire = orjson.loads(orjson.dumps([result.config, result.deferred]))
    deferred = [Deferred(**each) for each in wire[1]]
    assert render_deferred(wire[0], deferred, {"K": "k"}) == {"a": ["ktext"]}


def test_a_secret_that_contains_a_template_is_not_rendered() -> None:
    result = compile_config({"a": "{{ secrets.K }}"}).render(SCOPE)
    assert render_deferred(result.config, result.deferred, {"K": "{{ params.a }}"}) == {
        "a": "{{ params.a }}"
    }


def test_an_unset_secret_is_named_with_its_setting_and_no_other_is_named() -> None:
    result = compile_config({"a": {"b": "x {{ secrets.API_KEY }}"}}).render(SCOPE)
    with pytest.raises(MissingValue) as caught:
        render_deferred(result.config, result.deferred, {"OTHER": "hush"})
    assert "config.a.b: {{ secrets.API_KEY }} reads a secret that is not set" in str(caught.value)
    assert "DOVETAIL_SECRET_API_KEY" in str(caught.value)
    assert "OTHER" not in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "{{ secrets.K.x }}",
        "{{ secrets.K[9] }}",
        "{{ secrets.K + 1 }}",
        "{{ secrets.K - 1 }}",
        "{{ secrets.K < 1 }}",
        "{{ params[secrets.K] }}",
        "{{ {secrets.K: 1}.x }}",
        "{{ {secrets.K: {'a': 1}}[secrets.K].b }}",
        "{{ [secrets.K]|sum }}",
        "{{ params.list|join(attribute=secrets.K) }}",
        "{{ 1.5|round(method=secrets.K) }}",
        "{{ 'a'|replace('a', 'b', secrets.K) }}",
        "{{ [1]|tojson(secrets.K) }}",
    ],
)
def test_no_error_ever_shows_a_secret(text: str) -> None:
    result = compile_config({"a": text}).render(SCOPE)
    with pytest.raises(TemplateForbidden) as caught:
        render_deferred(result.config, result.deferred, {"K": "hush-hush"})
    assert "hush" not in str(caught.value)


def test_the_limit_holds_for_the_config_with_its_secrets() -> None:
    result = compile_config({"a": "{{ secrets.K }}", "b": "{{ secrets.K }}"}).render(SCOPE)
    secrets = {"K": "x" * 100}
    size = json_length(render_deferred(result.config, result.deferred, secrets))
    assert render_deferred(result.config, result.deferred, secrets, size)
    with pytest.raises(TooLarge, match=r"config\.b takes 2.. bytes"):
        render_deferred(result.config, result.deferred, secrets, size - 1)


def test_the_values_that_deferred_strings_read_are_bounded() -> None:
    big = NodeValue("fetch", "COMPLETED", {"x": "a" * 900}, None)
    config = {f"k{i}": "{{ secrets.K }}{{ fetch.x }}" for i in range(5)}
    template = compile_config(config)
    assert len(template.render(Values(fetch=big), 1500).deferred) == 5
    with pytest.raises(TooLarge, match=r"config\.k4: strings with secrets"):
        template.render(Values(fetch=big), 1100)


def test_a_deferred_string_may_not_contain_what_a_definition_may_not() -> None:
    with pytest.raises(TemplateError, match=r"config\.a: a call is not allowed"):
        render_deferred({"a": ""}, [Deferred(("a",), "{{ x() }}", {})], {})
    assert render_deferred({"a": ""}, [Deferred(("a",), "no template", {})], {}) == {
        "a": "no template"
    }
