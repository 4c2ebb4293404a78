"""A secret that is bound to hosts is sent nowhere else, whatever a definition or redirect says."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail import handler
from dovetail.config import Settings
from dovetail.core.errors import PermanentError
from dovetail.core.events import Token
from dovetail.core.templates import compile_config
from dovetail.engine.ports import Task
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.calls import RegistryCalls
from dovetail.handlers.registry import marked

from .conftest import LOOPBACK, response

KEY = "s3cr3t-Value-0815"
PLACES: list[dict[str, Any]] = [
    {"headers": {"X-Key": "{{ secrets.KEY }}"}},
    {"headers": {"Idempotency-Key": "{{ secrets.KEY }}"}},
    {"params": {"k": ["a", "{{ secrets.KEY }}"]}},
    {"json": {"a": [{"b": "Bearer {{ secrets.KEY }}"}]}, "method": "POST"},
    {"body": "x {{ secrets.KEY }}", "method": "POST"},
]


def settings(*hosts: str) -> Settings:
    return Settings(
        allow_private_addresses=LOOPBACK,
        secrets={"KEY": KEY, "FREE": "another-Value-4711"},
        secret_hosts={"KEY": hosts} if hosts else {},
    )


async def send(known: Settings, handler: str = "call_external_service", **config: Any) -> Any:
    """As a worker does it, from the definition's config to the stored output."""
    registry = builtin_registry(known)
    calls = RegistryCalls(registry, secrets=known.secrets, sensitive=known.sensitive())
    rendered = compile_config(config).render({})  # type: ignore[arg-type]
    token = Token(1, 1, 1)
    task = Task("r", "n", token, handler, rendered.config, {}, {}, 1.0, None, rendered.deferred)
    call = calls.open(task, lambda *_: None)
    return call.seal(task, await call.begin(task))


@pytest.mark.parametrize("config", PLACES)
class TestABoundSecret:
    async def test_is_sent_to_its_hosts(self, serve, config) -> None:
        server = await serve(response())
        for hosts in (("127.0.0.1",), ("x.example", "127.0.0.1"), ("*",), ()):
            answer = await send(settings(*hosts), url=server.url(), **config)
            assert answer["status_code"] == 200
        assert len(server.requests) == 4
        assert all(KEY in str(one) for one in server.requests)

    async def test_is_not_sent_elsewhere(self, serve, config) -> None:
        server = await serve(response())
        with pytest.raises(PermanentError) as refused:
            await send(settings("api.example.com", "*.example.org"), url=server.url(), **config)
        assert refused.value.type == "secret_host"
        assert str(refused.value) == (
            "secret 'KEY' may not be sent to 127.0.0.1: DOVETAIL_SECRET_KEY_HOSTS allows "
            "api.example.com, *.example.org; nothing was sent there"
        )
        assert server.connections == 0

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_is_not_redirected_elsewhere(self, serve, config, status) -> None:
        other = await serve(response())
        to = other.url(host="127.0.0.1").replace("127.0.0.1", "localhost")
        first = await serve(response(status, "", {"location": to}))
        with pytest.raises(PermanentError) as refused:
            await send(settings("127.0.0.1"), url=first.url(), **config)
        assert refused.value.type == "secret_host"
        assert "may not be sent to localhost" in str(refused.value)
        assert (len(first.requests), other.connections) == (1, 0)

    async def test_may_be_redirected_within_its_hosts(self, serve, config) -> None:
        other = await serve(response())
        first = await serve(response(307, "", {"location": other.url()}))
        await send(settings("127.0.0.1"), url=first.url(), **config)
        assert len(other.requests) == 1

    async def test_is_not_sent_when_the_handler_is_mocked(self, config) -> None:
        answer = await send(settings("api.example.com"), url="mock://anything", **config)
        assert KEY not in str(answer)
        assert "***" in str(answer)


async def test_an_unbound_secret_goes_where_the_definition_says(serve) -> None:
    server = await serve(response())
    known = settings("api.example.com")
    await send(known, url=server.url(), headers={"X": "{{ secrets.FREE }}"})
    with pytest.raises(PermanentError):
        await send(
            known, url=server.url(), headers={"X": "{{ secrets.FREE }}", "Y": "{{ secrets.KEY }}"}
        )
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("url", "hosts", "allowed"),
    [
        ("http://api.example.com./", "api.example.com", True),
        ("http://API.Example.COM:8080/", "api.example.com", True),
        ("http://api.example.com.evil.example/", "api.example.com", False),
        ("http://api.example.com@evil.example/", "api.example.com", False),
        ("http://evil.example/api.example.com", "api.example.com", False),
        ("http://xapi.example.com/", "api.example.com", False),
        ("http://a.example.org/", "*.example.org", True),
        ("http://a.b.example.org/", "*.example.org", True),
        ("http://example.org/", "*.example.org", False),
        ("http://xexample.org/", "*.example.org", False),
        ("http://bücher.example/", "xn--bcher-kva.example", True),
        ("http://①②⑦.0.0.1/", "127.0.0.1", True),
        ("http://2130706433/", "127.0.0.1", True),
        ("http://[::ffff:7f00:1]/", "127.0.0.1", False),
        ("http://[2001:db8:0:0::1]/", "2001:DB8::1", True),
        ("http://[2001:db8::2]/", "[2001:db8::1]", False),
    ],
)
async def test_a_host_is_compared_in_its_canonical_form(
    url: str, hosts: str, allowed: bool
) -> None:
    known = Settings(secrets={"KEY": KEY}, secret_hosts={"KEY": hosts})
    with pytest.raises(Exception) as failed:
        await send(known, url=url, headers={"X": "{{ secrets.KEY }}"}, timeout_seconds=0.5)
    is_refused = getattr(failed.value, "type", "") == "secret_host"
    assert is_refused is not allowed


@pytest.mark.parametrize("field", ["url", "method", "timeout_seconds", "expect_status"])
async def test_a_worker_renders_no_secret_into_another_field(serve, field: str) -> None:
    server = await serve(response())
    config = {"url": server.url(), field: "{{ secrets.KEY }}"}
    with pytest.raises(PermanentError) as refused:
        await send(settings(), **config)
    assert refused.value.type == "template_forbidden"
    assert f"config.{field}" in str(refused.value)
    assert server.connections == 0


@pytest.mark.parametrize("name", ["input", "output", "llm_service", "sleep", "fail"])
async def test_a_worker_renders_no_secret_for_a_handler_that_takes_none(name: str) -> None:
    with pytest.raises(PermanentError, match=f"the handler '{name}' takes no secrets") as refused:
        await send(settings(), name, prompt="{{ secrets.KEY }}")
    assert refused.value.type == "template_forbidden"


def test_only_a_handler_that_declares_secrets_sees_them() -> None:
    @handler("takes", secrets=True)
    @handler("fields", secrets=("k",))
    @handler("plain")
    def look(config: Any, ctx: Any) -> Any:
        return dict(ctx.secrets), ctx.secret_names

    known = settings()
    registry = builtin_registry(known)
    for one in marked(look, "here"):
        registry.add(one)
    calls = RegistryCalls(registry, secrets=known.secrets)
    rendered = compile_config({"k": "{{ secrets.KEY }}"}).render({})  # type: ignore[arg-type]

    def seen(name: str, *, with_secret: bool) -> Any:
        config = rendered.config if with_secret else {}
        deferred = rendered.deferred if with_secret else ()
        task = Task("r", "n", Token(1, 1, 1), name, config, {}, {}, 1.0, None, deferred)
        return calls.open(task, lambda *_: None).begin(task)

    for name in ("takes", "fields"):
        assert seen(name, with_secret=True) == (dict(known.secrets), {"KEY"})
        assert seen(name, with_secret=False) == (dict(known.secrets), frozenset())
    assert seen("plain", with_secret=False) == ({}, frozenset())
