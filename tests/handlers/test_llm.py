"""`llm_service` against a stub endpoint over real HTTP, and its offline mock."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema_rs
import pytest

from dovetail.config import Settings
from dovetail.core.errors import PermanentError, RetryableError
from dovetail.handlers.context import Context
from dovetail.handlers.llm import llm_service, sample
from dovetail.handlers.registry import BUILT_IN, describe

from ..core.pace import seconds_of
from .conftest import response

COMPLETION = {
    "id": "c1",
    "model": "stub-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}}],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}


async def ask(settings: Settings, ctx: Context, **config: Any) -> Any:
    known = describe(llm_service(settings), name="llm_service", origin=BUILT_IN)
    return await known.fn(known.prepare(config), ctx)


def at(server: Any, **more: Any) -> Settings:
    given = {"llm_base_url": server.url("/v1/"), "llm_model": "m", "llm_api_key": "sk-hunter2"}
    return Settings(**{**given, **more})


def answering(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> bytes:
    return response(
        status, json.dumps(value), {"content-type": "application/json", **(headers or {})}
    )


class TestTheEndpoint:
    async def test_is_called_and_its_reply_returned(self, serve, ctx):
        server = await serve(answering(COMPLETION))
        got = await ask(at(server), ctx, prompt="Say hello")
        assert got == {
            "text": "Hello.",
            "model": "stub-1",
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }
        seen = server.requests[0]
        assert (seen.method, seen.target) == ("POST", "/v1/chat/completions")
        assert seen.headers["authorization"] == "Bearer sk-hunter2"
        assert seen.headers["idempotency-key"] == "r1:fetch:1"
        assert json.loads(seen.body) == {
            "model": "m",
            "messages": [{"role": "user", "content": "Say hello"}],
        }

    async def test_gets_every_option(self, serve, ctx):
        server = await serve(answering(COMPLETION))
        messages = [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
        ]
        schema = {"name": "x", "schema": {"type": "object"}, "strict": True}
        await ask(
            at(server), ctx, messages=messages, model="other", temperature=0.5, max_tokens=7,
            response_format={"type": "json_schema", "json_schema": schema},
        )  # fmt: skip
        assert json.loads(server.requests[0].body) == {
            "model": "other",
            "messages": messages,
            "temperature": 0.5,
            "max_tokens": 7,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }

    async def test_may_be_any_url_and_needs_no_key(self, serve, ctx):
        server = await serve(answering(COMPLETION))
        settings = at(server, llm_api_key=None, llm_base_url=server.url("/api?version=2"))
        await ask(settings, ctx, prompt="x", response_format="json_object")
        seen = server.requests[0]
        assert "authorization" not in seen.headers
        assert seen.target == "/api/chat/completions?version=2"
        assert json.loads(seen.body)["response_format"] == {"type": "json_object"}

    async def test_gets_no_settings_of_another_vendor(self, serve, ctx, monkeypatch):
        for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_CUSTOM_HEADERS"):
            monkeypatch.setenv(name, "X-Leak: leaked")
        server = await serve(answering(COMPLETION))
        await ask(at(server), ctx, prompt="x")
        assert "leaked" not in str(server.requests[0])

    async def test_gets_a_prompt_that_is_no_text_as_json(self, serve, ctx):
        server = await serve(answering(COMPLETION))
        await ask(at(server), ctx, prompt={"rows": [1, "ü"]})
        assert json.loads(server.requests[0].body)["messages"][0]["content"] == '{"rows":[1,"ü"]}'

    @pytest.mark.parametrize("status", [429, 500, 503])
    async def test_that_is_busy_is_called_again_later(self, serve, ctx, status):
        server = await serve(
            answering({"error": {"message": "busy"}}, status, {"Retry-After": "9"})
        )
        with pytest.raises(RetryableError, match="busy") as failed:
            await ask(at(server), ctx, prompt="x")
        assert failed.value.at_least == 9.0
        assert len(server.requests) == 1

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
    async def test_that_refuses_is_not_called_again(self, serve, ctx, status):
        server = await serve(answering({"error": {"message": "bad key sk-hunter2"}}, status))
        with pytest.raises(PermanentError, match=r"bad key \*\*\*") as failed:
            await ask(at(server), ctx, prompt="x")
        assert failed.value.type == f"http_{status}"

    async def test_that_is_unreachable_is_called_again_later(self, serve, ctx):
        server = await serve(answering(COMPLETION))
        server.port = 1
        with pytest.raises(RetryableError) as failed:
            await ask(at(server), ctx, prompt="x")
        assert failed.value.type == "network_error"

    async def test_that_redirects_does_not_get_the_prompt_at_another_address(self, serve, ctx):
        other = await serve(answering(COMPLETION))
        server = await serve(response(307, "", {"location": other.url()}))
        with pytest.raises(PermanentError, match="answered 307"):
            await ask(at(server), ctx, prompt="x")
        assert other.connections == 0

    @pytest.mark.parametrize(
        "answer",
        [
            response(200, "<html>Welcome</html>"),
            answering({}),
            answering([]),
            answering({"choices": []}),
            answering({"choices": [{"message": None}]}),
            answering({"choices": "abc"}),
            answering("text"),
        ],
    )
    async def test_that_is_invalid_is_reported(self, serve, ctx, answer):
        server = await serve(answer)
        with pytest.raises(PermanentError, match="is DOVETAIL_LLM_BASE_URL right") as failed:
            await ask(at(server), ctx, prompt="x")
        assert failed.value.type == "bad_answer"

    async def test_may_omit_optional_fields(self, serve, ctx):
        refusal = {"choices": [{"message": {"content": None, "refusal": "no"}}], "usage": None}
        server = await serve(answering(refusal))
        assert await ask(at(server), ctx, prompt="x") == {"text": "", "model": "m", "usage": {}}

    async def test_may_not_reply_without_end(self, serve, ctx):
        server = await serve(response(200, b" " * 2_000_000))
        with pytest.raises(PermanentError, match="larger than") as failed:
            await ask(at(server), ctx, prompt="x")
        assert failed.value.type == "too_large"

    @pytest.mark.parametrize("address", ["http://h:99999/", "http://[h/v1"])
    async def test_with_an_invalid_address_names_the_setting(self, ctx, address: str):
        settings = Settings(llm_base_url=address, llm_model="m")
        with pytest.raises(PermanentError, match="DOVETAIL_LLM_BASE_URL: the url is not valid"):
            await ask(settings, ctx, prompt="x")

    async def test_needs_a_model(self, serve, ctx):
        server = await serve(answering(COMPLETION))
        with pytest.raises(PermanentError, match="set DOVETAIL_LLM_MODEL"):
            await ask(at(server, llm_model=None), ctx, prompt="x")
        assert server.connections == 0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "give either prompt or messages"),
        ({"prompt": "a", "messages": [{"role": "user"}]}, "give either prompt or messages"),
        ({"messages": []}, "messages:"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        ({"prompt": "a", "temperature": 3}, "temperature:"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens:"),
        ({"prompt": "a", "promt": "b"}, "did you mean 'prompt'?"),
        ({"prompt": "a", "response_format": "xml"}, "response_format.type:"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "json_schema goes with"),
        (
            {"prompt": "a", "response_format": {"type": "text", "json_schema": {}}},
            "json_schema goes with",
        ),
    ],
)
async def test_an_invalid_config_is_refused_permanently(ctx, config, said):
    with pytest.raises(PermanentError) as refused:
        await ask(Settings(), ctx, **config)
    assert refused.value.type == "invalid_config"
    assert said in str(refused.value)


class TestTheMock:
    async def test_gives_the_same_reply_to_the_same_prompt(self, ctx):
        words = " ".join(f"word{n}" for n in range(42))
        first = await ask(Settings(), ctx, prompt=words)
        again = await ask(Settings(), Context(run_id="r9", node_id="x"), prompt=words)
        assert first == again
        assert first["mock"] is True
        assert first["model"] == "mock"
        assert first["text"].startswith("[mock] Summary of 42 words: word0 word1")
        assert first["text"].endswith("word11…")
        assert first["usage"] == {
            "prompt_tokens": 42, "completion_tokens": 17, "total_tokens": 59,
        }  # fmt: skip
        assert (await ask(Settings(), ctx, prompt="other"))["text"] != first["text"]

    async def test_reads_a_conversation(self, ctx):
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "one two"}, {"type": "image"}]},
        ]
        got = await ask(Settings(llm_model="m1"), ctx, messages=messages, model="m2")
        assert got["text"] == "[mock] Summary of 2 words: one two"
        assert got["usage"]["prompt_tokens"] == 4
        assert got["model"] == "m2"

    async def test_obeys_max_tokens(self, ctx):
        got = await ask(Settings(), ctx, prompt="a b c", max_tokens=2)
        assert (got["text"], got["usage"]["completion_tokens"]) == ("[mock] Summary", 2)

    async def test_replies_in_json_on_request(self, ctx):
        got = await ask(Settings(), ctx, prompt="a b", response_format={"type": "json_object"})
        assert json.loads(got["text"]) == {"mock": True, "words": 2, "text": "a b"}
        got = await ask(Settings(), ctx, prompt="a b", response_format="text")
        assert got["text"].startswith("[mock]")

    async def test_replies_with_json_that_fits_the_schema(self, ctx):
        schema = {
            "type": "object",
            "properties": {"title": {"type": "string"}, "tags": {"type": "array"}},
            "required": ["title"],
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        got = await ask(Settings(), ctx, prompt="a", response_format=wanted)
        assert json.loads(got["text"]) == {"title": "mock", "tags": [None]}

    async def test_takes_its_time(self, ctx):
        slow = Settings.model_validate({"mock_latency": "0.05"})
        started = time.monotonic()
        await ask(slow, ctx, prompt="x")
        assert time.monotonic() - started >= 0.045


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name"],
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    "schema",
    [
        {}, True, TREE, {"type": "null"}, {"type": "boolean"}, {"const": 5}, {"enum": ["a", "b"]},
        {"type": "string", "minLength": 9}, {"type": "string", "maxLength": 2},
        {"type": "string", "format": "date-time"}, {"type": "string", "format": "uuid"},
        {"type": "integer", "minimum": 3}, {"type": "integer", "maximum": -3.5},
        {"type": "integer", "exclusiveMinimum": 7}, {"type": "integer", "exclusiveMaximum": -7},
        {"type": "integer", "minimum": 10, "multipleOf": 4}, {"type": "number", "minimum": 0.5},
        {"type": "number", "maximum": -0.5}, {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "maximum": -1, "multipleOf": 0.5}, {"type": ["null", "integer"]},
        {"type": ["null"]}, {"type": "array", "items": {"type": "integer"}, "minItems": 3},
        {"type": "array", "maxItems": 0}, {"items": {"type": "boolean"}},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        {"properties": {"a": {"type": "number"}}}, {"type": "object", "required": ["b"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "object", "oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}]},
        {"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]},
                   {"properties": {"b": {"const": 2}}, "required": ["b"]}]},
        {"$defs": {"x": {"type": "integer"}}, "allOf": [{"$ref": "#/$defs/x"}, {"minimum": 4}]},
        {"type": "string", "default": "given"},
        {"$defs": {"a/b": {"allOf": [{"type": "integer"}]}}, "$ref": "#/$defs/a~1b/allOf/0"},
    ],
)  # fmt: skip
def test_a_sample_fits_its_schema(schema):
    value = sample(schema)
    jsonschema_rs.validate(schema, value)
    assert sample(schema) == value


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (False, "invalid_config"),
        ({"$ref": "https://example.com/schema"}, "invalid_config"),
        ({"$ref": "#/nowhere"}, "invalid_config"),
        ({"enum": []}, "invalid_config"),
        ({"type": "array", "minItems": "x"}, "invalid_config"),
        ({"type": "integer", "multipleOf": 0, "minimum": 1}, "invalid_config"),
        ({"$ref": "#"}, "too_large"),
        ({"type": "array", "minItems": 10**9}, "too_large"),
        ({"type": "string", "minLength": 10**9}, "too_large"),
        (
            {
                "$defs": {
                    f"l{n}": {
                        "type": "object",
                        "required": ["a", "b"],
                        "properties": {key: {"$ref": f"#/$defs/l{n + 1}"} for key in "ab"},
                    }
                    for n in range(30)
                },
                "$ref": "#/$defs/l0",
            },
            "too_large",
        ),
    ],
)
def test_a_hostile_schema_is_refused_quickly(schema, kind):
    def attack() -> None:
        with pytest.raises(PermanentError) as refused:
            sample(schema)
        assert refused.value.type == kind

    assert seconds_of(attack, enough=0.5) <= 0.5
