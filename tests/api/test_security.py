"""Who may ask: names, origins and tokens; and that no server listens to the world by accident."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dovetail.api.admission import Admission, Budgets, limits_of
from dovetail.api.middleware import RequestContext
from dovetail.api.security import Guard, Tokens, check_binding, host_and_port, host_names
from dovetail.config import NamedToken, Settings, SettingsError
from dovetail.telemetry.logs import show_logs

from .conftest import Api, Server, flow, node, wait_for

TOKENS = "full-token,reading:read"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    env = {
        "DOVETAIL_TOKENS": TOKENS,
        "DOVETAIL_ALLOWED_HOSTS": "dovetail.example,Other.Example:9,bücher.example",
    }
    server = Server(folder, **env)
    yield server
    assert server.stop() == 0


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def every_call(api: Api) -> list[tuple[str, str]]:
    return [
        (method.upper(), "/" + path.replace("{", "").replace("}", ""))
        for path, calls in api.server.document["paths"].items()
        for method in calls
    ]


def test_every_endpoint_but_two_needs_a_token(guarded: Server) -> None:
    with_token = guarded.client(**bearer("full-token"))
    calls = every_call(with_token)
    assert len(calls) > 25
    plain = guarded.client()
    for method, path in [*calls, ("GET", "//nothing"), ("GET", "//metrics"), ("BREW", "//docs")]:
        if path in ("//health/live", "//health/ready"):
            assert plain(method, path).status_code == 200
            continue
        answer = plain(method, path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Bearer")
    for path in ("//health/live/", "//x/health/live", "//HEALTH/live", "//api/v1/health/live"):
        assert plain("GET", path).status_code == 401


@pytest.mark.parametrize(
    "given",
    ["Bearer wrong", "Bearer", "", "Basic full-token", "full-token", "Bearer reading:read",
     "Bearer full-token:read", "Bearer full-token,reading:read", "Bearer full-toke",
     "Bearer \xff", "Bearer full-token x"],
)  # fmt: skip
def test_a_wrong_token_is_401(guarded: Server, given: str) -> None:
    headers = [(b"authorization", given.encode("latin-1"))]
    answer = guarded.client()("GET", "/runs", headers=headers)
    assert answer.status_code == 401


def test_a_token_can_be_read_only(guarded: Server, name: str) -> None:
    full, reading = (guarded.client(**bearer(token)) for token in ("full-token", "reading"))
    full.register(flow(name))
    run_id = full.post(f"/workflows/{name}/runs")["run_id"]
    assert reading.get(f"/runs/{run_id}?wait=10")["status"] == "COMPLETED"
    reading.post("/workflows/validate", flow(name), status=200)
    assert reading.http.get(f"/api/v1/runs/{run_id}/events").status_code == 200
    writes = [call for call in every_call(full) if call[0] != "GET"]
    for method, path in writes:
        if path != "//api/v1/workflows/validate":
            assert reading(method, path).status_code == 403, path


def test_two_authorization_headers_are_refused(guarded: Server) -> None:
    headers = [("authorization", "Bearer full-token"), ("authorization", "Bearer full-token")]
    assert guarded.client()("GET", "/runs", headers=headers).status_code == 401


def test_a_token_can_ask_what_it_may_do(guarded: Server, api: Api) -> None:
    for token, scope in (("full-token", "full"), ("reading", "read")):
        known = guarded.client(**bearer(token)).get("/me")
        assert known == {"name": sha256(token.encode()).hexdigest()[:8], "scope": scope}
    assert guarded.client()("GET", "/me").status_code == 401
    assert api.get("/me") == {"name": "anonymous", "scope": "full"}  # a server without tokens


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("localhost:1", 200), ("LOCALHOST", 200), ("localhost.", 200),
        ("[::1]:8700", 200), ("127.9.9.9", 200),
        ("dovetail.example", 200), ("DOVETAIL.example:443", 200), ("other.example", 200),
        ("evil.example", 403), ("dovetail.example.evil", 403), ("localhost.evil", 403),
        ("evil@localhost", 403), ("localhost/x", 403), ("0.0.0.0", 403), ("10.0.0.1", 403),
        ("", 403), ("[::1", 403), ("localhost:x", 403), ("x:99999999", 403),
        ("localhost:", 200), ("localhost:65535", 200), ("DoveTail.Example.:8700", 200),
        ("[0:0:0:0:0:0:0:1]", 200), ("[::1]", 200), ("bücher.example".encode("idna").decode(), 200),
        ("::1", 403), ("[::1]x", 403), ("[::1]]", 403), ("[localhost]", 403), ("[::1%25lo]", 403),
        ("[::ffff:10.0.0.1]", 403), ("[fe80::1]", 403), ("[::]", 403), ("[::1]:", 200),
        ("localhost..", 403),
        (".localhost", 403), ("evil.localhost", 403), ("localhost:99999", 403),
        ("localhost:8700:80", 403), ("localhost:+80", 403), ("localhost: 80", 403),
        ("local\thost", 403), ("localhost evil", 403), ("localhost,evil", 403), ("localhost#", 403),
        ("localhost?", 403), ("localhost\\evil", 403), ("http://localhost", 403), ("*", 403),
        ("dovetail.example@evil", 403), ("dovetail.example%00.evil", 403), ("dovetail", 403),
        ("xdovetail.example", 403), ("sub.dovetail.example", 403), ("0177.0.0.1", 403),
        ("2130706433", 403), ("0x7f.1", 403), ("127.1", 403), ("b\xfccher.example", 403),
    ],
)  # fmt: skip
def test_only_requests_for_allowed_host_names_are_served(
    guarded: Server, host: str, status: int
) -> None:
    headers = [(b"host", host.encode("latin-1"))]
    answer = guarded.client(**bearer("full-token"))("GET", "/runs", headers=headers)
    assert answer.status_code == status
    assert guarded.client()("GET", "//health/live", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "localhost:8700", 200),
        ("http://localhost:8700", "localhost:8700", 200),
        ("http://localhost", "localhost:80", 200),
        ("https://dovetail.example", "dovetail.example", 200),
        ("http://localhost:3000", "localhost:8700", 403),
        ("http://127.0.0.1:8700", "localhost:8700", 403),
        ("https://evil.example", "localhost:8700", 403),
        ("null", "localhost:8700", 403),
        ("", "localhost:8700", 403),
        ("file://", "localhost:8700", 403),
        ("http://localhost:8700@evil.example", "localhost:8700", 403),
        ("HTTP://LOCALHOST:8700", "localhost:8700", 200),
        ("http://[::1]:8700", "[::1]:8700", 200),
        ("http://localhost:8700.evil.example", "localhost:8700", 403),
        ("http://localhost:8700/", "localhost:8700", 403),
        ("http://localhost:87000", "localhost:8700", 403),
        ("http://localhost:870", "localhost:8700", 403),
        ("http://localhos", "localhost", 403),
        ("http://localhost.evil.example", "localhost", 403),
        ("http://evil.localhost:8700", "localhost:8700", 403),
        ("http://dovetail.example.evil", "dovetail.example", 403),
        ("http://xdovetail.example", "dovetail.example", 403),
        ("http://dovetail.example:443", "dovetail.example", 403),
        ("https://dovetail.example:80", "dovetail.example", 403),
        ("ftp://localhost:8700", "localhost:8700", 403),
        ("localhost:8700", "localhost:8700", 403),
        ("//localhost:8700", "localhost:8700", 403),
        ("chrome-extension://abc", "localhost:8700", 403),
        ("http://localhost:8700, http://evil.example", "localhost:8700", 403),
        ("http://localhost:8700 http://evil.example", "localhost:8700", 403),
        ("http://", "localhost:8700", 403),
    ],
)
def test_a_page_of_another_site_cannot_write(
    guarded: Server, origin: str | None, host: str, status: int
) -> None:
    headers = {"host": host, **bearer("full-token")}
    if origin is not None:
        headers["origin"] = origin
    api = guarded.client()
    path = "/workflows/validate"
    answer = api("POST", path, json=flow("x"), headers=headers)
    assert answer.status_code == status
    assert api("GET", "/runs", headers=headers).status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_with_two_origin_headers_both_must_be_allowed(guarded: Server) -> None:
    headers = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://evil")]
    api = guarded.client(**bearer("full-token"))
    answer = api("POST", "/workflows/validate", json=flow("x"), headers=headers)
    assert answer.status_code == 403


def test_no_reply_allows_another_site_to_read_it(guarded: Server) -> None:
    asking = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    api = guarded.client(**bearer("full-token"))
    for method, path in (("OPTIONS", "/runs"), ("GET", "/runs"), ("OPTIONS", "/workflows")):
        answer = api(method, path, headers=asking)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_every_reply_has_the_security_headers(guarded: Server, name: str) -> None:
    full, anonymous = guarded.client(**bearer("full-token")), guarded.client()
    full.register(flow(name))
    run_id = full.post(f"/workflows/{name}/runs")["run_id"]
    full.finished(run_id)
    answers = [
        full("GET", f"/runs/{run_id}"),
        full("GET", f"/runs/{run_id}/results"),
        full.http.get(f"/api/v1/runs/{run_id}/events", headers={"accept": "text/event-stream"}),
        full("GET", f"/runs/{run_id}/events", headers={"accept": "application/json"}),
        full("GET", "//openapi.json"),
        full("GET", "//docs"),
        full("GET", "/runs/nobody"),
        full("PUT", "/runs"),
        full("POST", "/workflows", content=b"{}", headers={"content-type": "text/plain"}),
        full("POST", "/workflows", json={}),
        full("GET", "/runs?limit=x"),
        anonymous("GET", "/runs"),
        anonymous("GET", "//health/live"),
        anonymous("GET", "/runs", headers={"host": "evil"}),
    ]
    assert {answer.status_code for answer in answers} >= {200, 401, 403, 404, 405, 415, 422}
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "no-store" in answer.headers["cache-control"]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "server" not in answer.headers


def test_the_page_loads_nothing_from_other_sites_and_runs_no_script(guarded: Server) -> None:
    answer = guarded.client(**bearer("full-token"))("GET", "//docs")
    assert "http" not in answer.text.replace("HTTP", "")  # no page of anybody else
    assert "<script" not in answer.text
    styles = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digests = [b64encode(sha256(style.encode()).digest()).decode() for style in styles]
    policy = answer.headers["content-security-policy"]
    assert re.findall(r"'sha256-([^']*)'", policy) == digests
    assert " style=" not in answer.text  # which no hash would allow


def test_a_browser_opens_the_page_of_the_api_without_a_token_and_a_program_does_not(
    guarded: Server,
) -> None:
    plain = guarded.client()
    html = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    answer = plain("GET", "//docs", headers=html)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'; connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert len(re.findall("<script", answer.text)) == 1
    assert re.search(
        r'<script type="module" src="/assets/[0-9a-f]{16}/docs.js"></script>', answer.text
    )
    for path in ("//openapi.json", "/runs", "//metrics", "//docs/", "//docs/x"):
        assert plain("GET", path, headers=html).status_code in (401, 404), path
    assert plain("GET", "/runs", headers=html).status_code == 401
    assert plain("POST", "//docs", headers=html).status_code == 401
    assert plain("GET", "//docs", headers={"accept": "*/*"}).status_code == 401


# ── without a server ─────────────────────────────────────────────────────────────────────


def test_beyond_loopback_a_token_is_needed() -> None:
    check_binding(["127.0.0.1", "::1"], ())
    check_binding(["0.0.0.0"], ("t",))
    for addresses in (["0.0.0.0"], ["::"], ["127.0.0.1", "10.0.0.1"], ["fe80::1%eth0"]):
        with pytest.raises(SettingsError, match="DOVETAIL_TOKENS"):
            check_binding(addresses, ())


@pytest.mark.parametrize(
    "wrong", ["http://a.example", "a.example/x", "*", "*.example", "a b", "u@a", "a:x", "[::1", "."]
)
def test_an_impossible_host_name_stops_the_start(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"DOVETAIL_ALLOWED_HOSTS: .* is no host name"):
        host_names(["a.example", wrong])


def test_host_names_are_normalized_as_clients_send_them() -> None:
    given = ["A.Example.", "bücher.example", "10.0.0.5:8700", "2001:DB8::1", "[::1]:80"]
    sent = {"a.example", "xn--bcher-kva.example", "10.0.0.5", "2001:db8::1", "::1"}
    assert host_names(given) == sent


def test_tokens_are_stored_only_as_digests() -> None:
    kept = repr(vars(Tokens(("very-secret-token", "other-token:read"))))
    assert "very-secret" not in kept
    assert "other" not in kept


def test_an_empty_token_stops_the_start() -> None:
    for wrong in ((":read",), ("", "x")):
        with pytest.raises(SettingsError, match="empty"):
            Tokens(wrong)


def test_a_token_that_is_listed_twice_has_its_larger_scope() -> None:
    for given in (("t:read", "t"), ("t", "t:read")):
        assert Tokens(given).access(b"t") == "full"
    assert Tokens(("t:read",)).access(b"t") == "read"
    assert Tokens(("t:read",)).access(b"t:read") == "none"


def test_a_token_is_named_as_the_settings_name_it_else_by_its_digest() -> None:
    named = {"ci": NamedToken("of-ci", "full", None), "page": NamedToken("of-page", "read", None)}
    tokens = Tokens(("plain", "of-page"), named)
    assert tokens.name(tokens.holder(b"of-ci")[1]) == "ci"
    assert tokens.name(tokens.holder(b"plain")[1]) == "a116c9ed"
    assert tokens.access(b"of-page") == "full"
    assert Tokens((), named).access(b"of-page") == "read"
    assert not Tokens((), {})


def test_a_history_names_the_token_of_the_request(tmp_path: Path) -> None:
    (tmp_path / "ci_token").write_text("token-of-ci\n")
    (tmp_path / "dovetail.toml").write_text("[tokens.ci]\ntoken_file = 'ci_token'\n")
    server = Server(tmp_path, DOVETAIL_TOKENS="plain,reader:read")
    for token in ("token-of-ci", "plain"):
        api = server.client(**bearer(token))
        assert api("POST", "/workflows", json=flow("f", description=token)).status_code == 201
    found = server.client(**bearer("reader")).get("/workflows/f/history")
    assert [one["actor"] for one in found["items"]] == ["a116c9ed", "ci"]
    assert server.stop() == 0


def test_all_tokens_are_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, asked: bytes) -> bool:
        compared.append(known)
        return known == asked

    tokens = Tokens(("a", "b", "c"))
    monkeypatch.setattr("dovetail.api.security.hmac.compare_digest", compare)
    assert tokens.access(b"a") == "full"
    assert len(compared) == 3


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.example:1", ("a.example", "1")),
        ("[::1]:8700", ("::1", "8700")),
        ("A.Example.", ("a.example", "80")),
        ("a:b", ("", "80")),
        ("a/b", ("", "80")),
        ("a" * 300, ("", "80")),
        ("a:00080", ("a", "80")),
        ("[::FFFF]:1", ("::ffff", "1")),
        ("u@a", ("", "80")),
    ],
)
def test_a_host_header_is_split_into_name_and_port(text: str, found: tuple[str, str]) -> None:
    assert host_and_port(text, "80") == found


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("10.0.0.5:8700", 200),
        ("[2001:DB8:0:0::1]:8700", 200),
        ("a.example", 200),
        ("0.0.0.0:8700", 403),
        ("[::]:8700", 403),
        ("10.0.0.6", 403),
    ],
)
async def test_the_listening_address_is_an_allowed_host_unless_it_is_a_wildcard(
    host: str, status: int
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listens_on = ["0.0.0.0", "::", "", "10.0.0.5", "2001:db8::1", "A.example"]
    guard = Guard(app, hosts=listens_on, tokens=Tokens(()))
    assert (await asked(guard, host=host)).status_code == status


async def asked(app: Any, path: str = "/x", host: str = "localhost") -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, headers={"host": host})


async def test_a_server_above_its_limit_replies_with_retry_after() -> None:
    release = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    budgets = Budgets(limits_of(Settings(max_reads=2, caller_share=1.0), 100))
    app = RequestContext(Admission(slow, budgets), closing=asyncio.Event())
    held = [asyncio.create_task(asked(app)) for _ in range(2)]
    await asyncio.sleep(0.05)
    refused = await asked(app)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["content-type"] == "application/problem+json"
    health = asyncio.create_task(asked(app, "/health/live"))
    release.set()
    assert [(await one).status_code for one in (*held, health)] == [200, 200, 200]
    assert (await asked(app)).status_code == 200


def test_an_embedded_server_also_applies_back_pressure(
    start: Callable[..., Server], name: str
) -> None:
    server = start(DOVETAIL_MAX_BACKLOG="3", DOVETAIL_CONCURRENCY="1")
    api = server.client()
    api.register(flow(name, node("a", "until", config={"file": "go"})))
    runs = []

    def refused() -> Any:
        answer = api("POST", f"/workflows/{name}/runs")
        if answer.status_code == 202:
            runs.append(answer.json()["run_id"])
        return answer if answer.status_code == 429 else None

    problem = wait_for(refused, "what waits piles up behind the one that runs")
    assert int(problem.headers["retry-after"]) > 0
    assert "DOVETAIL_MAX_BACKLOG is 3" in problem.json()["detail"]
    assert len(runs) > 3
    (server.folder / "go").touch()
    for run_id in runs:
        assert api.finished(run_id)["status"] == "COMPLETED"
    wait_for(lambda: refused() is None, "there is room again")
    assert server.stop() == 0


async def test_lifespan_messages_pass_the_guard() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    guard: Callable[..., Any] = Guard(app, hosts=[], tokens=Tokens(["t"]))
    await RequestContext(guard, closing=asyncio.Event())({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


async def test_an_unchecked_connection_type_does_not_pass_the_guard() -> None:
    seen: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    guard = RequestContext(Guard(app, hosts=[], tokens=Tokens([])), closing=asyncio.Event())
    scope = {"type": "websocket", "path": "/api/v1/runs", "headers": [(b"host", b"localhost")]}
    await guard(scope, None, send)  # type: ignore[arg-type]
    assert seen == []
    assert sent == [{"type": "websocket.close", "code": 1008}]


# ── logs ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def shown_logs() -> Iterator[Callable[[str], None]]:
    """Logs as a service writes them, and as they were afterwards."""
    loggers = [logging.getLogger(name) for name in (None, "dovetail", "uvicorn")]
    before = [(one, list(one.handlers), one.level) for one in loggers]
    yield lambda form: show_logs(
        Settings(log_format="json" if form == "json" else "console", tokens=("full-token",)),
        names=True,
    )
    logging.captureWarnings(False)
    for one, handlers, level in before:
        one.handlers[:] = handlers
        one.setLevel(level)


FORGED = [
    "/x\nERROR dovetail.api: forged",
    '/x\r\n{"level":"error","message":"forged"}',
    "/x\u2028ERROR forged",
    "/\x1b[2J\x1b[1;1Hforged",
    "/\x9b2Jforged\x07",
    "/full-token/forged",
    "/\u202eforged",
]


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("path", FORGED, ids=ascii)
async def test_a_request_cannot_forge_a_log_line(
    shown_logs: Callable[[str], None], capsys: pytest.CaptureFixture[str], form: str, path: str
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError(f"cannot do {scope['path']}")

    shown_logs(form)
    app = RequestContext(broken, closing=asyncio.Event())
    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    await app(scope, None, None)  # type: ignore[arg-type]
    written = capsys.readouterr().err
    lines = written.rstrip("\n").split("\n")
    assert all(line.isprintable() for line in lines)
    assert "full-token" not in written
    if form == "json":
        (line,) = lines
        assert json.loads(line)["level"] == "error"
        assert json.loads(line)["request_id"]
    else:
        assert [line for line in lines if not line.startswith("  | ")] == [lines[0]]
        assert re.match(r"\S+Z dovetail\.api: error: GET /", lines[0])
