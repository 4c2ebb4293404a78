"""`call_external_service` against real servers on loopback, and its offline mock."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config import Settings
from dovetail.core.errors import PermanentError, RetryableError
from dovetail.handlers import external
from dovetail.handlers.builtin import builtin_registry
from dovetail.handlers.external import ExternalConfig
from dovetail.handlers.http import parse_url
from dovetail.handlers.http_rules import HttpResponse, decoded, retry_after

from .calling import call
from .conftest import response


class TestAReply:
    async def test_has_status_headers_body_and_json(self, serve, local, ctx):
        server = await serve(
            response(200, '{"a": [1, 2]}', {"Content-Type": "application/json", "X-Two": "b"})
        )
        got = await call(local, ctx, url=server.url("/x"))
        assert set(got) == {"status_code", "headers", "body", "json"}
        assert got["status_code"] == 200
        assert got["headers"]["x-two"] == "b"
        assert got["body"] == '{"a": [1, 2]}'
        assert got["json"] == {"a": [1, 2]}

    async def test_that_is_not_json_has_json_none(self, serve, local, ctx):
        server = await serve(response(200, "hello", {"content-type": "text/plain"}))
        got = await call(local, ctx, url=server.url())
        assert (got["body"], got["json"]) == ("hello", None)

    async def test_is_parsed_as_json_whatever_its_content_type(self, serve, local, ctx):
        server = await serve(response(200, b"\xef\xbb\xbf[1]"))
        assert (await call(local, ctx, url=server.url()))["json"] == [1]

    async def test_with_json_that_cannot_be_stored_has_json_none(self, serve, local, ctx):
        server = await serve(response(200, '{"a": NaN}'))
        assert (await call(local, ctx, url=server.url()))["json"] is None

    async def test_that_is_binary_is_returned_as_base64_and_marked(self, serve, local, ctx):
        data = bytes(range(256))
        server = await serve(response(200, data, {"content-type": "image/png"}))
        got = await call(local, ctx, url=server.url())
        assert base64.b64decode(got["body"]) == data
        assert (got["encoding"], got["json"]) == ("base64", None)

    async def test_with_repeated_headers_joins_them(self, serve, local, ctx):
        raw = b"HTTP/1.1 200 OK\r\nx-a: 1\r\nX-A: 2\r\ncontent-length: 0\r\n\r\n"
        server = await serve(raw)
        assert (await call(local, ctx, url=server.url()))["headers"]["x-a"] == "1, 2"

    async def test_to_head_has_no_body(self, serve, local, ctx):
        raw = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n"
        server = await serve(raw)
        got = await call(local, ctx, url=server.url(), method="head")
        assert (got["body"], server.requests[0].method) == ("", "HEAD")

    async def test_in_chunks_is_joined(self, serve, local, ctx):
        raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
        server = await serve(raw)
        assert (await call(local, ctx, url=server.url()))["body"] == "abc"

    async def test_that_is_compressed_is_decompressed(self, serve, local, ctx):
        server = await serve(response(200, gzip.compress(b"hi"), {"content-encoding": "gzip"}))
        assert (await call(local, ctx, url=server.url()))["body"] == "hi"


class TestARequest:
    async def test_carries_the_idempotency_key_of_the_node(self, serve, local, ctx):
        server = await serve(response())
        await call(local, ctx, url=server.url())
        assert server.requests[0].headers["idempotency-key"] == "r1:fetch:1"

    async def test_carries_the_users_own_idempotency_key_instead(self, serve, local, ctx):
        server = await serve(response())
        await call(local, ctx, url=server.url(), headers={"idempotency-KEY": "mine"})
        assert server.requests[0].headers["idempotency-key"] == "mine"

    async def test_has_its_params_in_the_query(self, serve, local, ctx):
        server = await serve(response())
        params = {"a": "x y", "n": 3, "on": True, "many": [1, 2], "none": None}
        await call(local, ctx, url=server.url("/p?k=v"), params=params)
        assert server.requests[0].target == "/p?k=v&a=x+y&n=3&on=true&many=1&many=2"

    async def test_has_a_blank_in_the_url_encoded(self, serve, local, ctx):
        server = await serve(response())
        await call(local, ctx, url=server.url("/hello world/ü"))
        assert server.requests[0].target == "/hello%20world/%C3%BC"

    async def test_sends_json(self, serve, local, ctx):
        server = await serve(response())
        await call(local, ctx, url=server.url(), method="POST", json={"ü": [None]})
        seen = server.requests[0]
        assert seen.body.decode() == '{"ü":[null]}'
        assert seen.headers["content-type"] == "application/json"

    async def test_sends_json_null_on_request(self, serve, local, ctx):
        server = await serve(response())
        await call(local, ctx, url=server.url(), method="POST", json=None)
        assert server.requests[0].body == b"null"

    async def test_sends_a_body_unchanged(self, serve, local, ctx):
        server = await serve(response())
        headers = {"Content-Type": "text/csv", "X-N": 1, "X-B": False, "X-U": "ü"}
        await call(local, ctx, url=server.url(), method="PUT", body="a;ü", headers=headers)
        seen = server.requests[0]
        assert seen.body == "a;ü".encode()
        assert seen.headers["content-type"] == "text/csv"
        assert (seen.headers["x-n"], seen.headers["x-b"]) == ("1", "false")
        assert seen.headers["x-u"].encode("latin-1").decode() == "ü"

    async def test_without_a_body_sends_no_body(self, serve, local, ctx):
        server = await serve(response())
        await call(local, ctx, url=server.url(), method="POST")
        await call(local, ctx, url=server.url(), body="x")
        assert server.requests[0].headers["content-length"] == "0"
        assert server.requests[1].headers["content-type"] == "text/plain; charset=utf-8"

    async def test_turns_user_and_password_of_the_url_into_an_authorization_header(
        self, serve, local, ctx
    ):
        server = await serve(response())
        url = server.url("/").replace("127", "me:p%40ss@127", 1)
        await call(local, ctx, url=url)
        seen = server.requests[0]
        assert seen.headers["authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
        assert seen.headers["host"] == f"127.0.0.1:{server.port}"

    async def test_prefers_the_authorization_of_the_user_to_that_of_the_url(
        self, serve, local, ctx
    ):
        server = await serve(response())
        url = server.url("/").replace("127", "me:x@127", 1)
        await call(local, ctx, url=url, headers={"Authorization": "Bearer t"})
        assert server.requests[0].headers["authorization"] == "Bearer t"

    async def test_ignores_proxy_variables(self, serve, local, ctx, monkeypatch):
        proxy = await serve(response(200, "proxied"))
        server = await serve(response(200, "direct"))
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url())
        assert (await call(local, ctx, url=server.url()))["body"] == "direct"
        assert proxy.connections == 0

    async def test_carries_no_cookie_of_an_earlier_reply(self, serve, local, ctx):
        server = await serve(response(200, "", {"set-cookie": "a=b"}))
        await call(local, ctx, url=server.url())
        await call(local, ctx, url=server.url())
        assert "cookie" not in server.requests[1].headers

    async def test_leaves_no_connection_open(self, serve, local, ctx):
        server = await serve(response())
        await asyncio.gather(*(call(local, ctx, url=server.url()) for _ in range(20)))
        assert server.connections == 20
        assert server.requests[0].headers["connection"] == "close"


class TestAConfig:
    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({}, "url: Field required"),
            ({"url": "http://h/", "metod": "GET"}, "did you mean 'method'?"),
            ({"url": "http://h/", "zzz": 1}, "it knows: url, method"),
            ({"url": "http://h/", "method": "BREW"}, "method:"),
            ({"url": "http://h/", "method": 3}, "method:"),
            ({"url": "http://h/", "json": {}, "body": ""}, "json or body, not both"),
            ({"url": "http://h/", "headers": {"a b": "c"}}, "'a b' is no header name"),
            ({"url": "http://h/", "headers": {"a\r\nb": "c"}}, "is no header name"),
            ({"url": "http://h/", "headers": {"a": None}}, "headers.a: must be text, a number"),
            ({"url": "http://h/", "headers": {"Host": "x"}}, "'Host' is set by Dovetail"),
            ({"url": "http://h/", "headers": {"Content-Length": 1}}, "set by Dovetail"),
            ({"url": "http://h/", "headers": {"Transfer-Encoding": "x"}}, "set by Dovetail"),
            ({"url": "http://h/", "params": {"a": {"b": 1}}}, "params.a: must be text"),
            ({"url": "http://h/", "params": {"a": [[1]]}}, "params.a: must be text"),
            ({"url": "http://h/\r\nX: y"}, "url: contains line breaks"),
            ({"url": "http://h/\tx"}, "url: contains line breaks"),
            ({"url": "http://h/", "timeout_seconds": 0}, "timeout_seconds:"),
            ({"url": "http://h/", "timeout_seconds": float("nan")}, "timeout_seconds:"),
            ({"url": "http://h/", "expect_status": []}, "expect_status:"),
            ({"url": "http://h/", "expect_status": [99]}, "expect_status.0:"),
        ],
    )
    async def test_that_is_invalid_is_refused_permanently(self, local, ctx, config, said):
        with pytest.raises(PermanentError) as refused:
            await call(local, ctx, **config)
        assert refused.value.type == "invalid_config"
        assert said in str(refused.value)

    async def test_with_a_line_break_in_a_header_does_not_repeat_its_value(self, local, ctx):
        headers = {"Authorization": "Bearer hunter2\r\nX: y"}
        with pytest.raises(PermanentError, match="control characters") as refused:
            await call(local, ctx, url="http://h/", headers=headers)
        assert "hunter2" not in str(refused.value)

    @pytest.mark.parametrize(
        "url",
        [
            "ftp://example.com/", "file:///etc/passwd", "gopher://127.0.0.1:70/", "/relative",
            "example.com", "http://", "http:///path", "https://:80/", "http://h:0/",
            "http://h:99999/", "http://h:abc/", "http://h:-1/", "http://[::1", "http://[::1%25lo]/",
            "http://a..b/", "http://a b/", "http://a%2fb/", "http://" + "a" * 64 + ".com/",
            "http://" + "a." * 130 + "com/", "http://a\u2100b.com/", "http://a\\b/", "",
            "http://1.2.3.4.5:x@h:y/",
        ],
    )  # fmt: skip
    async def test_with_an_invalid_url_is_refused_permanently(self, local, ctx, url):
        async def no_resolver(host: str, port: int) -> list[str]:
            raise AssertionError(f"{host} was resolved")

        with pytest.raises(PermanentError) as refused:
            await call(local, ctx, resolver=no_resolver, url=url)
        assert refused.value.type == "invalid_url"

    async def test_with_params_that_make_the_url_too_long_is_refused_permanently(self, local, ctx):
        with pytest.raises(PermanentError, match="cannot be parsed"):
            await call(local, ctx, url="http://127.0.0.1/", params={"a": "x" * 70_000})

    @given(
        st.text(st.sampled_from("aA1.:/?#@[]%\\ \0\ud800ü①。℀-_x"), max_size=20),
        st.sampled_from(["", "http://", "https://u:p@", "HTTP:", "http://[", "//"]),
    )
    def test_with_any_url_is_read_or_refused(self, text, before):
        with contextlib.suppress(PermanentError):
            url = parse_url(before + text)
            assert url.scheme in ("http", "https")
            assert url.host

    def test_has_a_readable_schema(self):
        schema = ExternalConfig.model_json_schema()
        assert list(schema["properties"]) == [
            "url", "method", "headers", "params", "json", "body", "timeout_seconds",
            "expect_status",
        ]  # fmt: skip
        assert schema["required"] == ["url"]


class TestAFailure:
    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 599])
    async def test_of_the_service_is_retryable(self, serve, local, ctx, status):
        server = await serve(response(status, "busy"))
        with pytest.raises(RetryableError, match=f"answered {status}") as failed:
            await call(local, ctx, url=server.url())
        assert failed.value.type == f"http_{status}"
        assert failed.value.after is None

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 410, 418, 422, 304, 300])
    async def test_of_the_request_is_permanent(self, serve, local, ctx, status):
        server = await serve(response(status, "" if status == 304 else "no\n such  thing"))
        with pytest.raises(PermanentError, match=f"answered {status}") as failed:
            await call(local, ctx, url=server.url())
        assert failed.value.type == f"http_{status}"
        assert status == 304 or "no such thing" in str(failed.value)

    async def test_carries_the_retry_after(self, serve, local, ctx):
        server = await serve(response(503, "", {"Retry-After": "7"}))
        with pytest.raises(RetryableError) as failed:
            await call(local, ctx, url=server.url())
        assert failed.value.at_least == 7.0

    async def test_with_a_huge_body_is_still_reported_by_its_status(self, serve, local, ctx):
        server = await serve(response(503, b"x" * 2_000_000))
        with pytest.raises(RetryableError) as failed:
            await call(local, ctx, url=server.url())
        assert len(str(failed.value)) < 500

    async def test_with_a_binary_body_does_not_show_it(self, serve, local, ctx):
        server = await serve(response(404, b"\xff\xfe\x00"))
        with pytest.raises(PermanentError, match=r"Not Found$"):
            await call(local, ctx, url=server.url())

    async def test_never_shows_the_query_or_the_password(self, serve, local, ctx):
        server = await serve(response(404))
        url = server.url("/a?key=hunter2#frag").replace("127", "u:hunter2@127", 1)
        with pytest.raises(PermanentError) as failed:
            await call(local, ctx, url=url)
        assert "hunter2" not in str(failed.value)
        assert f"GET http://127.0.0.1:{server.port}/a answered 404 Not Found" in str(failed.value)

    async def test_to_connect_is_a_network_error(self, local, ctx):
        with pytest.raises(RetryableError) as failed:
            await call(local, ctx, url="http://127.0.0.1:1/")
        assert failed.value.type == "network_error"

    async def test_to_resolve_is_a_network_error(self, local, ctx):
        async def nowhere(host: str, port: int) -> list[str]:
            raise OSError(-2, "Name or service not known")

        with pytest.raises(RetryableError, match=r"cannot resolve .gone\.example.") as failed:
            await call(local, ctx, resolver=nowhere, url="http://gone.example/")
        assert failed.value.type == "network_error"

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"nonsense\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
        ],
    )
    async def test_of_the_protocol_is_a_network_error(self, serve, local, ctx, raw):
        server = await serve(raw)
        with pytest.raises(RetryableError) as failed:
            await call(local, ctx, url=server.url())
        assert failed.value.type == "network_error"

    async def test_to_speak_tls_is_a_network_error(self, serve, local, ctx):
        async def plain(reader, writer):
            writer.write(response(400))
            writer.close()

        listening = await asyncio.start_server(plain, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(RetryableError) as failed:
            await call(local, ctx, url=f"https://127.0.0.1:{port}/")
        assert failed.value.type == "network_error"
        listening.close()
        await listening.wait_closed()

    async def test_of_the_first_address_falls_back_to_the_second(self, serve, local, ctx):
        server = await serve(response(200, "here"))

        async def both(host: str, port: int) -> list[str]:
            return ["127.0.0.2", "::ffff:127.0.0.1"]

        both_allowed = local.model_copy(
            update={"allow_private_addresses": Settings.model_validate(
                {"allow_private_addresses": "127.0.0.0/30"}).allow_private_addresses}
        )  # fmt: skip
        got = await call(both_allowed, ctx, resolver=both, url=server.url(host="two.example"))
        assert got["body"] == "here"
        assert server.requests[0].headers["host"] == f"two.example:{server.port}"


class TestExpectStatus:
    async def test_makes_a_listed_failure_a_success(self, serve, local, ctx):
        server = await serve(response(404, "none"))
        got = await call(local, ctx, url=server.url(), expect_status=[200, 404])
        assert got["status_code"] == 404

    async def test_makes_an_unlisted_success_a_failure(self, serve, local, ctx):
        server = await serve(response(200))
        with pytest.raises(PermanentError, match="answered 200 OK, expected 201 or 202"):
            await call(local, ctx, url=server.url(), expect_status=[201, 202])

    async def test_leaves_a_busy_service_retryable(self, serve, local, ctx):
        server = await serve(response(503))
        with pytest.raises(RetryableError):
            await call(local, ctx, url=server.url(), expect_status=[200])

    async def test_makes_a_listed_redirect_a_reply(self, serve, local, ctx):
        server = await serve(response(302, "", {"location": "/elsewhere"}))
        got = await call(local, ctx, url=server.url(), expect_status=[302])
        assert (got["status_code"], got["headers"]["location"]) == (302, "/elsewhere")


class TestTheMock:
    async def test_echoes_the_request(self, ctx):
        config = {
            "url": "mock://weather/berlin?x=1", "method": "post", "params": {"a": 1},
            "headers": {"X-A": "b"}, "json": {"q": [1]},
        }  # fmt: skip
        got = await call(Settings(), ctx, **config)
        assert got["status_code"] == 200
        assert got["json"] == {
            "mock": True,
            "url": "mock://weather/berlin?x=1",
            "method": "POST",
            "params": {"a": 1},
            "headers": {"X-A": "b", "Idempotency-Key": "r1:fetch:1"},
            "json": {"q": [1]},
            "body": None,
        }
        assert got["headers"]["content-type"] == "application/json"
        assert '"mock":true' in got["body"]

    async def test_returns_the_expected_status(self, ctx):
        got = await call(Settings(), ctx, url="MOCK://x", expect_status=[201])
        assert got["status_code"] == 201

    async def test_needs_no_http_package(self, ctx, monkeypatch):
        monkeypatch.setattr(external, "_http", None)
        monkeypatch.setitem(sys.modules, "httpx2", None)
        monkeypatch.delitem(sys.modules, "dovetail.handlers.http", raising=False)
        assert (await call(Settings(), ctx, url="mock://x"))["json"]["mock"] is True
        with pytest.raises(PermanentError, match=r"pip install 'dovetail\[http\]'") as refused:
            await call(Settings(), ctx, url="http://example.com/")
        assert refused.value.type == "missing_package"

    async def test_takes_its_time(self, ctx):
        slow = Settings.model_validate({"mock_latency": "0.05-0.06"})
        started = time.monotonic()
        await call(slow, ctx, url="mock://x")
        assert time.monotonic() - started >= 0.045


class TestRetryAfter:
    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            ("0", 0.0), ("5", 5.0), (" 5 ", 5.0), ("1.5", 1.5), ("3601", 3600.0),
            ("999999999999999999", 3600.0), ("-1", None), ("soon", None), ("", None), ("١٢", None),
            ("1e3", None), ("nan", None), ("9" * 400, None), ("Wed, 99 Foo 2026 00:00 GMT", None),
            ("Thu, 01 Jan 1970 00:17:40 GMT", 60.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
            ("Thu, 01 Jan 1970 00:17:40 -0000", 60.0), ("Fri, 01 Jan 2100 00:00:00 GMT", 3600.0),
        ],
    )  # fmt: skip
    def test_is_seconds_or_a_date_and_at_most_an_hour(self, value, seconds):
        assert retry_after({"retry-after": value}, now=1000.0) == seconds

    def test_uses_the_clock_of_the_service(self):
        headers = {
            "retry-after": "Thu, 01 Jan 1970 00:00:30 GMT", "date": "Thu, 01 Jan 1970 00:00:10 GMT"
        }  # fmt: skip
        assert retry_after(headers, now=1e9) == 20.0

    def test_is_none_without_the_header(self):
        assert retry_after({}, now=0.0) is None


@pytest.mark.parametrize(
    ("kind", "content", "text", "is_text"),
    [
        ("text/plain; charset=latin-1", b"\xfc", "ü", True),
        ("text/plain; charset=utf-16-le", "ü".encode("utf-16-le"), "ü", True),
        ('text/html; charset="ISO-8859-1"', b"\xfc", "ü", True),
        ("text/plain", b"\xfc", "\ufffd", True),
        ("text/plain; charset=punycode", b"a-b", "a-b", True),
        ("text/plain; charset=zlib_codec", b"a", "a", True),
        ("text/plain; charset=cp99999", b"a\xff", "a\ufffd", True),
        ("application/vnd.api+json", b"\xff", "\ufffd", True),
        ("application/octet-stream", b"plain", "plain", True),
        ("application/octet-stream", b"a\0b", "YQBi", False),
        ("image/png", b"\xff", "/w==", False),
        ("", "ü".encode(), "ü", True),
    ],
)
def test_a_body_is_text_unless_text_would_damage_it(kind, content, text, is_text):
    assert decoded(HttpResponse(200, {"content-type": kind}, content, "")) == (text, is_text)


async def test_the_registry_has_it_with_three_retries():
    known = builtin_registry(Settings()).get("call_external_service")
    assert (known.max_retries, known.is_async, known.origin) == (3, True, "built in")
    assert known.description.startswith("Sends an HTTP request")
