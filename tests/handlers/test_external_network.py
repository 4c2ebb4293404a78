"""`call_external_service` among strangers: time, size, redirects, forbidden addresses, TLS.

Real connections go to loopback only; other addresses are refused before anybody connects.
"""

from __future__ import annotations

import asyncio
import gzip
import ssl
import time
from pathlib import Path

import pytest

from dovetail.config import Settings
from dovetail.core.errors import PermanentError, RetryableError

from .calling import call
from .conftest import response

CERTIFICATE = Path(__file__).with_name("tls.example.pem")


class TestTime:
    async def test_of_the_whole_exchange_is_bounded_even_for_slow_bytes(self, serve, local, ctx):
        async def drip(seen, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)

        server = await serve(drip)
        started = time.monotonic()
        with pytest.raises(RetryableError, match=r"within 0\.3 s") as failed:
            await call(local, ctx, url=server.url(), timeout_seconds=0.3)
        assert failed.value.type == "timeout"
        assert time.monotonic() - started < 20

    async def test_to_resolve_counts_towards_the_timeout(self, local, ctx):
        async def slow(host: str, port: int) -> list[str]:
            await asyncio.sleep(30)
            return []

        with pytest.raises(RetryableError, match="within"):
            await call(local, ctx, resolver=slow, url="http://h/", timeout_seconds=0.1)

    async def test_to_connect_has_its_own_limit(self, serve, local, ctx, monkeypatch):
        from dovetail.handlers import http

        monkeypatch.setattr(http, "CONNECT_SECONDS", 1e-9)
        server = await serve(response())
        with pytest.raises(RetryableError, match="could not connect in time") as failed:
            await call(local, ctx, url=server.url())
        assert failed.value.type == "timeout"

    async def test_ends_when_the_node_is_cancelled(self, serve, local, ctx):
        reached = asyncio.Event()

        async def never(seen, writer):
            reached.set()
            await asyncio.sleep(30)

        server = await serve(never)
        task = asyncio.create_task(call(local, ctx, url=server.url()))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestSize:
    async def test_above_the_limit_is_refused_permanently_and_not_read(self, serve, local, ctx):
        sent = 0

        async def endless(seen, writer):
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x" * 65536)
                sent += 65536
                await writer.drain()

        server = await serve(endless)
        with pytest.raises(PermanentError, match="larger than 1048576 bytes") as refused:
            await call(local, ctx, url=server.url())
        assert refused.value.type == "too_large"
        assert sent < 20 * 1024 * 1024

    async def test_of_a_compressed_bomb_is_its_decompressed_size(self, serve, local, ctx):
        bomb = gzip.compress(gzip.compress(b"\0" * 200_000_000, 9), 9)
        assert len(bomb) < 10_000
        server = await serve(response(200, bomb, {"content-encoding": "gzip, gzip"}))
        started = time.monotonic()
        with pytest.raises(PermanentError) as refused:
            await call(local, ctx, url=server.url())
        assert refused.value.type == "too_large"
        assert time.monotonic() - started < 20

    async def test_of_text_and_json_together_must_fit_an_output(self, serve, local, ctx):
        server = await serve(response(200, '["' + "x" * 600_000 + '"]'))
        with pytest.raises(PermanentError, match="as text and as json") as refused:
            await call(local, ctx, url=server.url())
        assert refused.value.type == "too_large"

    async def test_just_below_the_limit_is_fine(self, serve, local, ctx):
        server = await serve(response(200, "x" * 1_000_000))
        assert len((await call(local, ctx, url=server.url()))["body"]) == 1_000_000


class TestRedirects:
    @pytest.mark.parametrize(
        ("status", "method", "then"),
        [
            (301, "POST", "GET"), (302, "POST", "GET"), (303, "POST", "GET"), (303, "PUT", "GET"),
            (302, "HEAD", "HEAD"), (307, "POST", "POST"), (308, "PUT", "PUT"), (301, "GET", "GET"),
        ],
    )  # fmt: skip
    async def test_are_followed(self, serve, local, ctx, status, method, then):
        async def script(seen, writer):
            if seen.target == "/new?x=1":
                return response(200)
            return response(status, "", {"location": "new?x=1#part"})

        server = await serve(script)
        body = {"json": {"a": 1}} if method in ("POST", "PUT") else {}
        await call(local, ctx, url=server.url("/old"), method=method, **body)
        seen = server.requests[1]
        assert (seen.method, seen.target) == (then, "/new?x=1")
        assert (seen.body == b'{"a":1}') == (then == method and bool(body))
        assert ("content-type" in seen.headers) == (then == method and bool(body))

    async def test_keep_credentials_only_at_the_same_origin(self, serve, local, ctx):
        other = await serve(response(200, "other"))

        async def script(seen, writer):
            where = "/here" if seen.target == "/a" else other.url("/there")
            return response(307, "", {"location": where})

        server = await serve(script)
        headers = {
            "Authorization": "Bearer hunter2", "Cookie": "c=hunter2", "X-Api-Key": "hunter2",
            "Accept": "text/x", "Content-Type": "text/y",
        }  # fmt: skip
        got = await call(local, ctx, url=server.url("/a"), method="POST", body="b", headers=headers)
        assert got["body"] == "other"
        same, foreign = server.requests[1], other.requests[0]
        assert same.headers["authorization"] == "Bearer hunter2"
        assert "hunter2" not in str(foreign)
        assert (foreign.headers["accept"], foreign.headers["content-type"]) == ("text/x", "text/y")
        assert foreign.headers["idempotency-key"] == "r1:fetch:1"
        assert foreign.body == b"b"

    async def test_do_not_add_a_password_of_their_own(self, serve, local, ctx):
        other = await serve(response())
        location = other.url("/").replace("127", "a:b@127", 1)
        server = await serve(response(302, "", {"location": location}))
        await call(local, ctx, url=server.url())
        assert "authorization" not in other.requests[0].headers

    def test_to_https_of_the_same_host_keep_credentials_but_not_back_to_http(self):
        import httpx2

        from dovetail.handlers.http import OutgoingRequest, _redirected

        headers = {"authorization": "x"}
        plain = OutgoingRequest("GET", httpx2.URL("http://a.example/"), headers)
        assert _redirected(plain, 301, "https://a.example/b").headers == headers
        assert _redirected(plain, 301, "https://a.example:444/b").headers == {}
        assert _redirected(plain, 301, "https://b.example/b").headers == {}
        safe = OutgoingRequest("GET", httpx2.URL("https://a.example/"), headers)
        assert _redirected(safe, 301, "http://a.example/b").headers == {}

    async def test_end_after_five(self, serve, local, ctx):
        server = await serve(response(302, "", {"location": "/again"}))
        with pytest.raises(PermanentError, match="more than 5 redirects") as refused:
            await call(local, ctx, url=server.url())
        assert refused.value.type == "too_many_redirects"
        assert len(server.requests) == 6

    @pytest.mark.parametrize(
        "location",
        ["file:///etc/passwd", "mock://x", "ftp://h/", "http://h:99999/", "http://[::1"],
    )
    async def test_to_a_target_that_is_no_web_address_are_refused(
        self, serve, local, ctx, location
    ):
        server = await serve(response(302, "", {"location": location}))
        with pytest.raises(PermanentError) as refused:
            await call(local, ctx, url=server.url())
        assert refused.value.type == "invalid_url"

    async def test_without_a_location_are_a_failure(self, serve, local, ctx):
        server = await serve(response(302))
        with pytest.raises(PermanentError, match="answered 302"):
            await call(local, ctx, url=server.url())


class TestTheAddressGuard:
    @pytest.mark.parametrize(
        "host",
        [
            "127.0.0.1", "localhost", "LOCALHOST.", "127.1", "2130706433", "0x7f.1", "0177.0.0.1",
            "0x7f000001", "①②⑦.⓪.⓪.①", "127。0。0。1", "[::1]", "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]", "0.0.0.0", "0", "[::]", "127.0.0.1.",
            "user@127.0.0.1", "example.com@127.0.0.1", "127.0.0.1%2e",
        ],
    )  # fmt: skip
    async def test_refuses_this_machine_in_every_spelling(self, serve, ctx, host):
        server = await serve(response())
        with pytest.raises(PermanentError) as refused:
            await call(Settings(), ctx, url=f"http://{host}:{server.port}/")
        assert refused.value.type in ("forbidden_address", "invalid_url")
        if "%" not in host:
            assert refused.value.type == "forbidden_address"
            assert "DOVETAIL_ALLOW_PRIVATE_ADDRESSES" in str(refused.value)
        assert server.connections == 0

    async def test_refuses_a_redirect_to_a_forbidden_address(self, serve, local, ctx):
        location = "http://169.254.169.254/latest/meta-data/"
        server = await serve(response(302, "", {"location": location}))
        with pytest.raises(PermanentError, match=r"169\.254\.169\.254") as refused:
            await call(local, ctx, url=server.url())
        assert refused.value.type == "forbidden_address"

    async def test_refuses_a_redirect_to_a_name_that_resolves_to_one(self, serve, local, ctx):
        canary = await serve(response(), host="127.0.0.2")
        server = await serve(
            response(302, "", {"location": canary.url("/", host="rebound.example")})
        )

        async def resolve(host: str, port: int) -> list[str]:
            return ["127.0.0.2"] if host == "rebound.example" else ["127.0.0.1"]

        with pytest.raises(PermanentError) as refused:
            await call(local, ctx, resolver=resolve, url=server.url())
        assert refused.value.type == "forbidden_address"
        assert canary.connections == 0

    async def test_resists_a_resolver_that_changes_its_reply(self, serve, local, ctx):
        canary = await serve(response(200, "canary"), host="127.0.0.2")
        asked = 0

        async def rebind(host: str, port: int) -> list[str]:
            nonlocal asked
            asked += 1
            return ["127.0.0.1"] if asked == 1 else ["127.0.0.2"]

        # Nothing listens on that port of 127.0.0.1, so a second look-up would find the canary.
        with pytest.raises(RetryableError):
            await call(local, ctx, resolver=rebind, url=canary.url("/", host="rebind.example"))
        assert (asked, canary.connections) == (1, 0)
        with pytest.raises(PermanentError):
            await call(local, ctx, resolver=rebind, url=canary.url("/", host="rebind.example"))
        assert (asked, canary.connections) == (2, 0)

    async def test_allows_a_permitted_address(self, serve, local, ctx):
        server = await serve(response(200, "ok"))

        async def resolve(host: str, port: int) -> list[str]:
            return ["127.0.0.2", "127.0.0.1"]

        got = await call(local, ctx, resolver=resolve, url=server.url(host="both.example"))
        assert got["body"] == "ok"


class TestTls:
    async def test_sends_the_host_name_even_if_it_connects_to_an_address(
        self, serve, local, ctx, monkeypatch
    ):
        from dovetail.handlers import http

        asked_for: list[str | None] = []
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        theirs.load_cert_chain(CERTIFICATE)
        theirs.sni_callback = lambda sock, name, context: asked_for.append(name)
        server = await serve(response(200, "safe"), tls=theirs)

        async def resolve(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        url = server.url(host="tls.example")
        with pytest.raises(RetryableError, match="CERTIFICATE_VERIFY_FAILED"):
            await call(local, ctx, resolver=resolve, url=url)
        ours = ssl.create_default_context(cafile=CERTIFICATE)
        monkeypatch.setattr(http, "_tls", lambda: ours)
        assert (await call(local, ctx, resolver=resolve, url=url))["body"] == "safe"
        assert asked_for[-1] == "tls.example"
        assert server.requests[0].headers["host"] == f"tls.example:{server.port}"
        with pytest.raises(RetryableError, match="Hostname mismatch"):
            await call(local, ctx, resolver=resolve, url=server.url(host="other.example"))
