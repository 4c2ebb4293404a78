"""`llm_service`: a prompt to any OpenAI-compatible endpoint, or to the offline mock.

One call of the chat completions API is one POST, so it goes through our own HTTP exchange and
not through a vendor's SDK: bounded like every other answer, without that package's own retries,
its 1.5 s of import, and the organisation, project and header variables that it would send along
to whatever endpoint is configured. The endpoint comes from the operator and not from the
definition: the address guard lets it be anywhere. It must not know how nodes are retried.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_network
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dovetail.config import Settings, load_settings
from dovetail.core.errors import PermanentError
from dovetail.core.redaction import Redactor
from dovetail.handlers.addresses import AddressGuard, Resolver, system_resolver
from dovetail.handlers.answers import Answer, check_complete, check_status
from dovetail.handlers.context import Context
from dovetail.handlers.external import http_client
from dovetail.handlers.llm_mock import mock_answer
from dovetail.handlers.mocking import take_time
from dovetail.handlers.registry import BUILT_IN, HandlerFunction, describe

# The node's own timeout ends a call earlier; this only bounds one that has none.
LONGEST_CALL = 3600.0

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
    """One message of a conversation; fields we do not know are passed on."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str = Field(min_length=1, description="system, user, assistant, …")
    content: str | list[dict[str, Any]] | None = None


class ResponseFormat(BaseModel):
    """What kind of text to answer with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


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
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1)
    response_format: Annotated[ResponseFormat | None, BeforeValidator(_as_format)] = Field(
        default=None, description="text, json_object, or json_schema with its schema"
    )

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
    """What `llm_service` does, for a handler of one's own that asks on the way.

    `config` is the node's, the settings are those of this process. Errors are those of the
    handler too: raise them on, and the engine tries again, or does not, as it would for it.
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
        client.Request(
            "POST",
            _endpoint(settings.llm_base_url, client.parse_url),
            _headers(settings.llm_api_key, idempotency_key),
            orjson.dumps(_question(config, model)),
        ),
        guard,
        timeout_seconds=LONGEST_CALL,
        max_bytes=settings.max_output_bytes,
        stop_at=_REDIRECTS,  # a prompt and a key go where the operator said, nowhere else
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


def _result(answer: Answer, model: str) -> dict[str, Any]:
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
