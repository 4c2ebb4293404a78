"""What telemetry gets of a handler's calls to other services, without a collector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from dovetail.config import Settings
from dovetail.core.errors import PermanentError, RetryableError
from dovetail.engine.listener import ClientCall, hear_client_calls
from dovetail.handlers.context import Context
from dovetail.handlers.external import call_external_service
from dovetail.handlers.registry import BUILT_IN, describe
from dovetail.telemetry.service import Telemetry

from .conftest import LOOPBACK, response
from .test_llm import COMPLETION, answering, ask, at

DURATION = "gen_ai_client_operation_duration_seconds"
USAGE = "gen_ai_client_token_usage"


class Heard(ClientCall):
    def __init__(self) -> None:
        self.headers = {"traceparent": "00-1-2-01"}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.ends: list[Any] = []

    @contextmanager
    def __call__(self, name: str, attributes: Mapping[str, Any]) -> Iterator[ClientCall]:
        self.calls.append((name, dict(attributes)))
        yield self

    def answered(self, attributes: Mapping[str, Any]) -> None:
        self.ends.append(dict(attributes))

    def failed(self, kind: str) -> None:
        self.ends.append(kind)


@pytest.fixture
def heard() -> Iterator[Heard]:
    found = Heard()
    hear_client_calls(found)
    yield found
    hear_client_calls(None)


async def call(ctx: Context, **config: Any) -> Any:
    settings = Settings(allow_private_addresses=LOOPBACK)
    known = describe(call_external_service(settings), name="call", origin=BUILT_IN)
    return await known.fn(known.prepare(config), ctx)


async def test_a_request_is_reported_without_its_query_and_sends_the_headers_along(
    serve: Any, ctx: Context, heard: Heard
) -> None:
    server = await serve(response(200, "{}"))
    await call(ctx, url=server.url("/x?key=secret").replace("//", "//user:word@"))
    assert heard.calls == [
        (
            "GET",
            {
                "http.request.method": "GET",
                "url.full": server.url("/x"),
                "server.address": "127.0.0.1",
                "server.port": server.port,
            },
        )
    ]
    assert heard.ends == [{"http.response.status_code": 200}]
    assert server.requests[0].headers["traceparent"] == "00-1-2-01"


async def test_a_header_of_the_definition_is_left_as_it_is(
    serve: Any, ctx: Context, heard: Heard
) -> None:
    server = await serve(response(200, "{}"))
    await call(ctx, url=server.url(), headers={"Traceparent": "own"})
    assert server.requests[0].headers["traceparent"] == "own"


async def test_an_error_is_reported_with_its_type(serve: Any, ctx: Context, heard: Heard) -> None:
    server = await serve(response(503))
    with pytest.raises(RetryableError):
        await call(ctx, url=server.url())
    assert heard.ends == [{"http.response.status_code": 503}, "503"]
    with pytest.raises(RetryableError):
        await call(ctx, url="http://127.0.0.1:1/")
    assert heard.ends[-1] == "network_error"


async def test_another_origin_gets_no_traceparent(serve: Any, ctx: Context, heard: Heard) -> None:
    other = await serve(response(200, "{}"))
    server = await serve(response(302, headers={"location": other.url()}))
    await call(ctx, url=server.url())
    assert "traceparent" in server.requests[0].headers
    assert "traceparent" not in other.requests[0].headers


async def test_calls_of_a_model_are_counted_with_their_tokens_and_errors(
    serve: Any, ctx: Context
) -> None:
    telemetry = Telemetry()
    try:
        await ask(at(await serve(answering(COMPLETION))), ctx, prompt="hi")
        with pytest.raises(RetryableError):
            await ask(at(await serve(response(500))), ctx, prompt="hi")
        await ask(Settings(), ctx, prompt="one two three")
    finally:
        telemetry.close()
    counts = telemetry.counters.histograms
    model, mock = ("chat", "openai", "m"), ("chat", "mock", "mock")
    assert {labels: sum(one.counts) for labels, one in counts[DURATION].items()} == {
        (*model, ""): 1,
        (*model, "http_500"): 1,
        (*mock, ""): 1,
    }
    assert {labels: one.sum for labels, one in counts[USAGE].items()}.items() >= {
        (*model, "input"): 3,
        (*model, "output"): 2,
        (*mock, "input"): 3,
    }.items()


@pytest.mark.parametrize(
    ("url", "provider"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://generativelanguage.googleapis.com/v1beta/openai", "gcp.gemini"),
        ("https://team.openai.azure.com/openai", "azure.ai.openai"),
        ("https://api.mistral.ai/v1", "mistral_ai"),
        ("https://mymistral.ai/v1", "openai"),
        ("http://127.0.0.1:8000/v1", "openai"),
    ],
)
async def test_the_provider_is_known_by_the_host_of_the_endpoint(
    url: str, provider: str, ctx: Context, heard: Heard
) -> None:
    with pytest.raises(PermanentError, match="no model"):
        await ask(Settings(llm_base_url=url), ctx, prompt="hi")
    assert heard.calls[0][1]["gen_ai.provider.name"] == provider
