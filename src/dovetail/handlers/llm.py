"""`llm_service`: a prompt to any OpenAI-compatible endpoint, or to the offline mock.

A call of the chat completions API is one POST, through our own HTTP exchange: bounded like all
answers, without an SDK's retries, its 1.5 s of import, and the environment variables that it would
send along. The operator sets the endpoint, not the definition, so it may have any address.

The answer of the mock depends on the prompt alone: it says how long the prompt is and quotes its
beginning. If JSON is wanted, the answer is JSON that fits the schema. Schemas come from
definitions and are untrusted: depth and size are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ipaddress import ip_network
from math import ceil, floor
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from dovetail.config import Settings, load_settings
from dovetail.core.errors import PermanentError, RetryableError
from dovetail.core.redaction import Redactor
from dovetail.engine.listener import client_call
from dovetail.handlers.context import Context
from dovetail.handlers.external import http_client, take_time
from dovetail.handlers.http_rules import (
    AddressGuard,
    HttpResponse,
    Resolver,
    check_complete,
    check_status,
    system_resolver,
)
from dovetail.handlers.registry import BUILT_IN, HandlerFunction, describe

SHOWN_WORDS = 12
# Below this level only required parts are made, so that recursive schemas end.
GENEROUS_LEVELS = 4
MAX_LEVELS = 32
MAX_VALUES = 1000
MAX_TEXT = 10_000

_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "mock@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def mock_answer(
    messages: list[dict[str, Any]],
    *,
    model: str,
    wants_json: bool = False,
    json_schema: dict[str, Any] | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """The result of `llm_service` without an endpoint; a token is a word here."""
    asked = [word for message in messages for word in _texts(message.get("content"))]
    words = " ".join(_texts(messages[-1].get("content"))).split()
    beginning = " ".join(words[:SHOWN_WORDS]) + ("…" if len(words) > SHOWN_WORDS else "")
    if json_schema is not None:
        text = orjson.dumps(sample(json_schema.get("schema", {}))).decode()
    elif wants_json:
        text = orjson.dumps({"mock": True, "words": len(words), "text": beginning}).decode()
    else:
        text = f"[mock] Summary of {len(words)} words: {beginning}"
        if max_tokens is not None:
            text = " ".join(text.split(" ")[:max_tokens])
    prompt_tokens = sum(len(part.split()) for part in asked)
    completion_tokens = len(text.split())
    return {
        "text": text,
        "model": model,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "mock": True,
    }


def _texts(content: Any) -> Iterator[str]:
    """The text in a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part.get("text"), str):
                yield part["text"]


def sample(schema: Any) -> Any:
    """A small value that fits a JSON Schema; `pattern`, `not` and `if` are not considered."""
    try:
        return _Sampler(schema).value(schema, 0)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        raise PermanentError(
            "response_format: the mock cannot read this JSON Schema", type="invalid_config"
        ) from None


class _Sampler:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_VALUES

    def value(self, schema: Any, level: int) -> Any:
        self._left -= 1
        if self._left < 0 or level > MAX_LEVELS:
            raise PermanentError(
                "response_format: the schema is too deep or too large for the mock",
                type="too_large",
            )
        if schema is True:
            return None
        for word in ("const", "default"):
            if word in schema:
                return schema[word]
        if "enum" in schema:
            return schema["enum"][0]
        if "$ref" in schema:
            return self.value(self._target(schema["$ref"]), level + 1)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                rest = {name: part for name, part in schema.items() if name != word}
                return self.value(_merged([rest, schema[word][0]]), level + 1)
        if "allOf" in schema:
            rest = {name: part for name, part in schema.items() if name != "allOf"}
            parts = [self._target(p["$ref"]) if "$ref" in p else p for p in schema["allOf"]]
            return self.value(_merged([rest, *parts]), level + 1)
        return self._typed(schema, level)

    def _typed(self, schema: dict[str, Any], level: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, level)
        if kind == "array" or (kind is None and "items" in schema):
            return self._array(schema, level)
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        if kind == "boolean":
            return False
        if kind == "null":
            return None
        return _text(schema)

    def _object(self, schema: dict[str, Any], level: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        names = list(properties) if level < GENEROUS_LEVELS else []
        names += [name for name in required if name not in names]
        return {name: self.value(properties.get(name, True), level + 1) for name in names}

    def _array(self, schema: dict[str, Any], level: int) -> list[Any]:
        first = list(schema.get("prefixItems", []))
        count = max(schema.get("minItems", 0), 1 if level < GENEROUS_LEVELS else 0)
        count = min(max(count, len(first)), schema.get("maxItems", MAX_VALUES + 1))
        items = schema.get("items", True)
        return [
            self.value(first[at] if at < len(first) else items, level + 1) for at in range(count)
        ]

    def _target(self, reference: str) -> Any:
        """The part of the schema that a reference points to; remote references are not allowed."""
        if not reference.startswith("#"):
            raise ValueError(reference)
        found = self._root
        for step in reference[1:].strip("/").split("/") if reference != "#" else []:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]
        return found


def _merged(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """One schema for several that all apply."""
    merged: dict[str, Any] = {}
    for schema in schemas:
        for name, part in schema.items():
            if name == "properties":
                merged[name] = {**merged.get(name, {}), **part}
            elif name == "required":
                merged[name] = [*merged.get(name, []), *part]
            else:
                merged[name] = part
    return merged


def _number(schema: dict[str, Any], *, whole: bool) -> int | float:
    """The number nearest to zero that fits; an exclusive bound is moved by one step."""
    step = schema.get("multipleOf", 1)
    low = schema.get("minimum")
    high = schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"]
        low = floor(low / step) * step + step
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"]
        high = ceil(high / step) * step - step
    if low is not None and low > 0:
        found = low if not whole and "multipleOf" not in schema else ceil(low / step) * step
    elif high is not None and high < 0:
        found = high if not whole and "multipleOf" not in schema else floor(high / step) * step
    else:
        found = 0
    return int(found) if whole else found


def _text(schema: dict[str, Any]) -> str:
    text = _FORMATS.get(schema.get("format", ""), "mock")
    shortest = schema.get("minLength", 0)
    if shortest > MAX_TEXT:
        raise PermanentError(
            "response_format: the schema wants more text than the mock makes", type="too_large"
        )
    return text.ljust(shortest, ".")[: max(shortest, schema.get("maxLength", MAX_TEXT))]


# The timeout of the node usually ends a call earlier.
MAX_CALL_SECONDS = 3600.0

_ANYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
_REDIRECTS = range(300, 400)
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


def _as_text(value: object) -> object:
    """`prompt: "{{ fetch.json }}"` gives the value itself; a model reads text."""
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value).decode()


def _as_format(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


class Message(BaseModel):
    """One message of a conversation; unknown fields are sent too."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str = Field(min_length=1, description="system, user, assistant, …")
    content: str | list[dict[str, Any]] | None = Field(
        default=None, description="a text, or a list of parts, such as text and images"
    )


FormatType = Literal["text", "json_object", "json_schema"]


class ResponseFormat(BaseModel):
    """What kind of text to answer with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: FormatType
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


_FORMAT_TYPES: dict[str, Any] = {
    "enum": [*get_args(FormatType)],
    "description": "the kind of text to answer with",
}
# A text is the type alone.
_FORMAT: dict[str, Any] = {
    "anyOf": [
        _FORMAT_TYPES,
        {
            "type": "object",
            "properties": {
                "type": _FORMAT_TYPES,
                "json_schema": {
                    "type": ["object", "null"],
                    "description": "with type json_schema: an object with name and schema",
                },
            },
            "required": ["type"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}


class LlmConfig(BaseModel):
    """The config of `llm_service`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        default=None, description="one user message; what is not text is sent as JSON"
    )
    messages: list[Message] | None = Field(
        default=None, min_length=1, description="a whole conversation, instead of prompt"
    )
    model: str | None = Field(default=None, description="instead of DOVETAIL_LLM_MODEL")
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="0: always the likeliest words; higher: more variety",
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="how long the answer may be, in tokens"
    )
    response_format: Annotated[
        ResponseFormat | None, BeforeValidator(_as_format), WithJsonSchema(_FORMAT)
    ] = Field(default=None, description="text, json_object, or json_schema with its schema")

    @model_validator(mode="after")
    def _one_question(self) -> LlmConfig:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def conversation(self) -> list[dict[str, Any]]:
        if self.messages is None:
            return [{"role": "user", "content": self.prompt}]
        return [message.model_dump(exclude_unset=True) for message in self.messages]


def llm_service(settings: Settings, resolver: Resolver = system_resolver) -> HandlerFunction:
    """The handler, bound to the settings of this process."""
    guard = AddressGuard(_ANYWHERE, resolver)

    async def ask(config: LlmConfig, ctx: Context) -> dict[str, Any]:
        """Asks a language model and returns text, model and usage."""
        return await _ask(settings, guard, config, ctx.idempotency_key, ctx.redact)

    return ask


async def ask_llm(config: dict[str, Any], *, idempotency_key: str) -> dict[str, Any]:
    """Call `llm_service` from a handler of your own.

    `config` is that of a node with `llm_service`; the settings are those of this process. It raises
    the errors of `llm_service`: let them pass, and the engine retries as it would for that handler.
    """
    settings = load_settings()
    known = describe(llm_service(settings), name="llm_service", origin=BUILT_IN)
    redact = Redactor(settings.sensitive()).redact_shown
    guard = AddressGuard(_ANYWHERE)
    return await _ask(settings, guard, known.prepare(config), idempotency_key, redact)


async def _ask(
    settings: Settings,
    guard: AddressGuard,
    config: LlmConfig,
    idempotency_key: str,
    redact: Callable[[str], str],
) -> dict[str, Any]:
    """Inside a call that carries OpenTelemetry's attributes of generative AI."""
    model = config.model or settings.llm_model or ("mock" if settings.llm_base_url is None else "")
    with client_call(f"chat {model}".strip(), _asked(settings, config, model)) as call:
        try:
            answer = await _answer(settings, guard, config, idempotency_key, redact)
        except (PermanentError, RetryableError) as error:
            call.failed(error.type)
            raise
        usage = answer["usage"]
        call.answered(
            {
                "gen_ai.response.model": answer["model"],
                "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
                "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
            }
        )
        return answer


# By the end of the host's name; any other endpoint speaks the protocol of OpenAI.
_PROVIDERS = {
    "anthropic.com": "anthropic",
    "azure.com": "azure.ai.openai",
    "cohere.ai": "cohere",
    "cohere.com": "cohere",
    "deepseek.com": "deepseek",
    "googleapis.com": "gcp.gemini",
    "groq.com": "groq",
    "mistral.ai": "mistral_ai",
    "perplexity.ai": "perplexity",
    "x.ai": "x_ai",
}


def _asked(settings: Settings, config: LlmConfig, model: str) -> dict[str, Any]:
    base = settings.llm_base_url
    wanted = config.response_format
    server = {} if base is None else _server_of(base)
    host = server.get("server.address", "")
    found = (name for end, name in _PROVIDERS.items() if f".{host}".endswith(f".{end}"))
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mock" if base is None else next(found, "openai"),
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": config.temperature,
        "gen_ai.request.max_tokens": config.max_tokens,
        "gen_ai.output.type": "json" if wanted and wanted.type != "text" else "text",
        **server,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _server_of(base: str) -> dict[str, Any]:
    try:
        parts = urlsplit(base)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # `_endpoint` says what is wrong with it
        return {}
    return {"server.address": parts.hostname or "", "server.port": port}


async def _answer(
    settings: Settings,
    guard: AddressGuard,
    config: LlmConfig,
    idempotency_key: str,
    redact: Callable[[str], str],
) -> dict[str, Any]:
    model = config.model or settings.llm_model
    if settings.llm_base_url is None:
        await take_time(settings.mock_latency)
        wanted = config.response_format
        return mock_answer(
            config.conversation(),
            model=model or "mock",
            wants_json=wanted is not None and wanted.type != "text",
            json_schema=wanted.json_schema if wanted else None,
            max_tokens=config.max_tokens,
        )
    if model is None:
        raise PermanentError(
            "llm_service: no model; set DOVETAIL_LLM_MODEL or the node's config.model",
            type="invalid_config",
        )
    client = await http_client("llm")
    answer = await client.exchange(
        client.OutgoingRequest(
            "POST",
            _endpoint(settings.llm_base_url, client.parse_url),
            _headers(settings.llm_api_key, idempotency_key),
            orjson.dumps(_question(config, model)),
        ),
        guard,
        timeout_seconds=MAX_CALL_SECONDS,
        max_bytes=settings.max_output_bytes,
        stop_at=_REDIRECTS,  # prompt and key go only to the operator's endpoint
    )
    without_key = Redactor({"key": settings.llm_api_key or ""}).redact_shown
    check_status(answer, redact=lambda text: without_key(redact(text)))
    check_complete(answer, settings.max_output_bytes)
    return _result(answer, model)


def _endpoint(base: str, parse_url: Callable[[str], Any]) -> Any:
    try:
        url = parse_url(base)
    except PermanentError as error:
        raise PermanentError(f"DOVETAIL_LLM_BASE_URL: {error}", type=error.type) from None
    return url.copy_with(path=url.path.rstrip("/") + "/chat/completions")


def _headers(key: str | None, idempotency_key: str) -> dict[str, str]:
    headers = {
        "content-type": "application/json",
        "accept": "application/json",
        "idempotency-key": idempotency_key,
    }
    if key:
        headers["authorization"] = f"Bearer {key}"
    return headers


def _question(config: LlmConfig, model: str) -> dict[str, Any]:
    question: dict[str, Any] = {"model": model, "messages": config.conversation()}
    if config.temperature is not None:
        question["temperature"] = config.temperature
    if config.max_tokens is not None:
        question["max_tokens"] = config.max_tokens
    if config.response_format is not None:
        question["response_format"] = config.response_format.model_dump(exclude_none=True)
    return question


def _result(answer: HttpResponse, model: str) -> dict[str, Any]:
    try:
        found = orjson.loads(answer.content)
        text = found["choices"][0]["message"].get("content")
        usage = found.get("usage")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        raise PermanentError(
            f"{answer.where}: the answer is no chat completion; is DOVETAIL_LLM_BASE_URL right? "
            "It usually ends in /v1",
            type="bad_answer",
        ) from None
    counts = usage if isinstance(usage, dict) else {}
    return {
        # None for a refusal or a tool call: there is no text then.
        "text": text if isinstance(text, str) else "",
        "model": found["model"] if isinstance(found.get("model"), str) else model,
        "usage": {name: counts[name] for name in _COUNTS if isinstance(counts.get(name), int)},
    }
