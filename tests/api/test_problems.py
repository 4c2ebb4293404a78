"""Whatever is sent, the answer is a problem with a reason, and never an error of the server's."""

from __future__ import annotations

import json
import socket
import string
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import Api, Server, flow

# What is refused before anybody is asked for a run is refused alike over every store.
ONE_SETUP = pytest.mark.parametrize("server", ["embedded"], indirect=True, scope="session")

JSON = {"content-type": "application/json"}
YAML = {"content-type": "application/yaml"}
CALLS = [
    "/workflows",
    "/workflows/{name}/runs",
    "/workflows/{name}/batches",
    "/runs",
    "/runs/{run}/retry",
    "/runs/{run}/cancel",
    "/batches/nobody/retry",
]
HOSTILE = {
    "nothing": b"",
    "half": b'{"name": "x", ',
    "not UTF-8": b'{"name": "\xff"}',
    "UTF-16": '{"name": "x"}'.encode("utf-16"),
    "a null byte": b'{"name": "a\x00b"}',
    "an escaped null byte": b'{"name": "a\\u0000b"}',
    "a lone surrogate": b'{"name": "\\ud800"}',
    "a surrogate as a key": b'{"\\udfff": 1}',
    "NaN": b'{"params": {"x": NaN}}',
    "infinity": b'{"params": {"x": -Infinity}}',
    "a number that becomes infinite": b'{"params": {"x": 1e999}}',
    "a huge integer": b'{"params": {"x": ' + b"9" * 5000 + b"}}",
    "an integer of 65 bits": b'{"params": {"x": 36893488147419103232}}',
    "depth": b'{"params": ' + b"[" * 100_000,
    "closed depth": b'{"params": {"x": ' + b"[" * 5000 + b"]" * 5000 + b"}}",
    "a key twice": b'{"params": {}, "params": {}}',
    "a list": b"[]",
    "a text": b'"x"',
    "null": b"null",
    "a number": b"7",
    "unknown fields": b'{"definition_": {}, "__class__": 1}',
    "wrong types": b'{"params": 7, "items": "x", "definition": [], "from": [], "nodes": {}}',
    "quotes": b'"' * 100_000,
}


@pytest.fixture(scope="module")
def names(server: Server) -> dict[str, str]:
    api = server.client()
    api.register(flow("hostile"))
    run_id = api.post("/workflows/hostile/runs")["run_id"]
    api.finished(run_id)
    return {"name": "hostile", "run": run_id}


@ONE_SETUP
@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_is_refused_with_a_reason(
    api: Api, names: dict[str, str], path: str, body: bytes
) -> None:
    answer = api("POST", path.format(**names), content=body, headers=JSON)
    if body:  # none at all is fine for most calls
        assert answer.status_code == 422
        assert answer.json()["errors"]


@ONE_SETUP
def test_of_many_unknown_fields_the_first_hundred_are_reported(api: Api) -> None:
    body = {"definition": flow("x"), **{f"z{at}": 1 for at in range(5000)}}
    errors = api("POST", "/runs", json=body).json()["errors"]
    assert len(errors) == 101
    assert errors[0]["message"].startswith("unknown field 'z0'")
    assert (errors[-1]["code"], errors[-1]["message"]) == (
        "too_large",
        "and 4,900 more unknown fields",
    )


def test_a_malformed_body_is_reported_with_its_path_and_line(api: Api) -> None:
    answer = api("POST", "/runs", content=b'{"params": {},\n  "x": NaN}', headers=JSON)
    error = answer.json()["errors"][0]
    assert (error["path"], error["line"]) == ("x", 2)


@ONE_SETUP
@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\nb: *a",
        "!!python/object/apply:os.system [id]",
        "a: [" * 500,
        "- " * 50_000,
        "name: .nan",
        "a: 1\na: 2",
        "\t- x",
        "%YAML 9",
        "--- 1\n--- 2",
    ],
)
def test_hostile_yaml_is_refused_with_a_reason(api: Api, text: str) -> None:
    answer = api("POST", "/workflows", content=text, headers=YAML)
    assert answer.status_code == 422
    assert answer.json()["errors"]


@ONE_SETUP
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": ""},
        {"content-type": ";;;="},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
@pytest.mark.parametrize("path", ["/workflows", "/runs", "/workflows/validate"])
def test_a_body_that_is_neither_json_nor_yaml_is_415(
    api: Api, path: str, headers: dict[str, str]
) -> None:
    answer = api("POST", path, content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["detail"] or "compressed" in answer.json()["detail"]


def test_a_json_media_type_suffix_is_accepted(api: Api, name: str) -> None:
    headers = {"content-type": 'application/vnd.x+json; charset="UTF-8"'}
    answer = api("POST", "/workflows", content=json.dumps(flow(name)), headers=headers)
    assert answer.status_code == 201


def test_a_too_large_body_is_413(api: Api) -> None:
    for path in ("/workflows", "/workflows/validate", "/runs"):
        answer = api("POST", path, content=b" " * (1 << 20) + b"{}", headers=JSON)
        assert answer.status_code == 413

    def endless() -> Any:
        for _ in range(64):
            yield b" " * 65536

    assert api("POST", "/workflows", content=endless(), headers=JSON).status_code == 413
    assert api.get("//health/live") == {"status": "ok"}  # the connection is still good


def test_a_too_large_announced_length_is_refused_before_the_body_is_sent(server: Server) -> None:
    answer = raw(
        server,
        "POST /api/v1/workflows HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n",
    )
    assert answer.startswith("HTTP/1.1 413 ")


def test_other_requests_are_served_while_a_large_definition_is_checked(api: Api, name: str) -> None:
    nodes = [{"id": f"n{i}", "handler": "output"} for i in range(10_000)]
    definition = {"name": name, "nodes": nodes}
    assert len(json.dumps(definition)) > 64 * 1024
    assert api("POST", "/workflows", json=definition).status_code == 201
    nodes.append({"id": "n", "handler": "output"})
    answer = api("POST", "/workflows", json=definition)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["code"] == "too_large"


@ONE_SETUP
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/workflows", "GET, HEAD, POST"),
        ("PATCH", "/workflows/x", "DELETE, GET, HEAD"),
        ("GET", "/workflows/x/runs", "POST"),
        ("DELETE", "/runs", "GET, HEAD, POST"),
        ("POST", "/runs/x", "DELETE, GET, HEAD"),
        ("GET", "/runs/x/cancel", "POST"),
        ("HEAD", "/runs/x/cancel", "POST"),
        ("POST", "/rate-limits/x", "GET, HEAD, PUT"),
        ("OPTIONS", "/runs", "GET, HEAD, POST"),
        ("BREW", "/workers", "GET, HEAD"),
        ("POST", "//health/live", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_405_with_the_allowed_methods(
    api: Api, method: str, path: str, allowed: str
) -> None:
    answer = api(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize(
    "path",
    ["//index.html", "//nothing", "//api/v1", "/", "/runs/", "/workflows/a%2fb", "/run",
     "//api/v2/runs", "//docs/", "//health", "/%zz", "/runs/x/y", "//%2e%2e/etc/passwd"],
)  # fmt: skip
def test_an_unknown_resource_is_404(api: Api, path: str) -> None:
    answer = api("GET", path)
    assert answer.status_code == 404


@pytest.mark.parametrize(
    "text", ["%", "%2", "%zz", "%ff", "%c0%ae", "%ed%a0%80", "%00", "%0a", "a%20b", "%25"]
)
def test_a_badly_encoded_name_is_not_found(api: Api, text: str) -> None:
    for path in (f"/workflows/{text}", f"/runs/{text}", f"/batches/{text}"):
        answer = api("GET", path)
        assert answer.status_code == 404
    assert api("GET", f"/runs?workflow={text}&cursor=").json()["items"] == []
    assert api("GET", f"/rate-limits/{text}").status_code == 200


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["params", "items", "definition", "version", "from", "dry_run",
                                 "name", "nodes", "id", "handler", "config", "rate_per_second",
                                 "burst", "x"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    path=st.sampled_from(["POST /workflows", "POST /runs", "POST /workflows/hostile/runs",
                          "POST /workflows/hostile/batches", "POST /workflows/validate",
                          "PUT /rate-limits/x", "PUT /workflows/hostile/aliases/x"]),
)  # fmt: skip
def test_no_body_makes_the_server_fail(
    api: Api, names: dict[str, str], body: Any, path: str
) -> None:
    method, _, where = path.partition(" ")
    answer = api(method, where, content=json.dumps(body), headers=JSON)
    assert answer.status_code < 500


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    query=st.dictionaries(
        st.sampled_from(["status", "workflow", "batch", "limit", "cursor", "nodes", "wait",
                         "after", "partial", "version"]),
        st.text(string.printable, max_size=6) | st.integers().map(str) | st.text(max_size=4),
        max_size=3,
    ),
    path=st.sampled_from(["/runs", "/workflows", "/workflows/hostile", "/runs/{run}/results"]),
)  # fmt: skip
def test_no_query_string_makes_the_server_fail(
    api: Api, names: dict[str, str], query: dict[str, str], path: str
) -> None:
    assert api("GET", path.format(**names), params=query).status_code < 500


def test_a_valid_request_id_of_the_caller_is_kept_and_an_invalid_one_is_replaced(api: Api) -> None:
    answer = api("GET", "/nothing", headers={"x-request-id": "trace-1.a_B"})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "trace-1.a_B"
    for strange in ("a b", "x" * 200, "<script>"):
        answer = api("GET", "/nothing", headers={"x-request-id": strange})
        assert answer.headers["x-request-id"] != strange


def test_a_malformed_request_does_no_harm(server: Server, api: Api) -> None:
    for text in (
        "\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "\x16\x03\x01\x02",
        "x" * 99999,
    ):
        assert raw(server, text)[:10] in ("HTTP/1.1 4", "")
    raw(server, "GET /api/v1/runs HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade, close\r\n\r\n")  # fmt: skip
    assert api.get("//health/live") == {"status": "ok"}


def raw(server: Server, text: str) -> str:
    """What the server answers to these very bytes, before it closes or falls silent."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=1) as connection:
        connection.sendall(text.encode("latin-1"))
        try:
            return connection.recv(65536).decode("latin-1")
        except (ConnectionError, TimeoutError):
            return ""
