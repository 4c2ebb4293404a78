"""What holds for many calls: what a client has seen, compression, ids of requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from .conftest import Api, Server, flow, node, wait_for

# ── HEAD ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path", ["//health/live", "//metrics", "/workflows", "/runs?limit=1", "/runs/nobody", "//docs"]
)
def test_a_head_request_returns_the_headers_of_the_get(api: Api, path: str) -> None:
    reported = {"content-type", "etag", "allow", "content-security-policy", "vary"}
    whole, head = (api(method, path) for method in ("GET", "HEAD"))
    assert head.status_code == whole.status_code
    assert {k: v for k, v in head.headers.items() if k in reported} == {
        k: v for k, v in whole.headers.items() if k in reported
    }
    assert head.headers["content-length"]


def test_a_head_request_with_the_current_etag_is_304(api: Api, name: str) -> None:
    api.register(flow(name))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    api.get(f"/runs/{run_id}?wait=20")
    tag = tag_of(api, f"/runs/{run_id}")
    assert api("HEAD", f"/runs/{run_id}").headers["etag"] == tag
    known = {"if-none-match": tag}
    assert api("HEAD", f"/runs/{run_id}", headers=known).status_code == 304


def test_a_head_request_for_a_stream_does_not_wait_for_the_run(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    api.register(flow(name, node("a", "until", config={"file": str(file)})))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    accept = {"accept": "text/event-stream"}
    head = api("HEAD", f"/runs/{run_id}/events", timeout=10, headers=accept)
    assert head.status_code == 200
    assert head.headers["content-type"].startswith("text/event-stream")
    assert api("HEAD", f"/runs/{run_id}").status_code == 200  # the connection is of use
    file.touch()


# ── ETag, If-Match, If-None-Match ────────────────────────────────────────────────────────


def tag_of(api: Api, path: str) -> str:
    tag = api("GET", path).headers["etag"]
    assert tag.startswith('"')
    return str(tag)


def test_a_run_with_the_current_etag_is_304_until_it_changes(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    api.register(flow(name, node("a", "until", config={"file": str(file)})))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    wait_for((server.folder / f"{name}.started").exists, "the node started")
    running = tag_of(api, f"/runs/{run_id}")
    for known in (running, f"W/{running}", f'"other", {running}', "*"):
        answer = api("GET", f"/runs/{run_id}", headers={"if-none-match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == running
    for other in ('"other"', running.strip('"'), "", ",,,", '"', "W/"):
        answer = api("GET", f"/runs/{run_id}", headers={"if-none-match": other})
        assert answer.status_code == 200
    assert tag_of(api, f"/runs/{run_id}?nodes=false") != running
    waiting = {"if-none-match": running}
    assert api("GET", f"/runs/{run_id}?wait=0.1", headers=waiting).status_code == 304
    file.touch()
    answer = api("GET", f"/runs/{run_id}?wait=20", headers=waiting)
    assert (answer.status_code, answer.json()["status"]) == (200, "COMPLETED")
    assert tag_of(api, f"/runs/{run_id}") == answer.headers["etag"]


def test_if_match_protects_a_definition_from_a_lost_update(api: Api, name: str) -> None:
    def register(text: str, **headers: str) -> int:
        body = flow(name, description=text)
        return int(api("POST", "/workflows", json=body, headers=headers).status_code)

    path = f"/workflows/{name}"
    assert register("1", **{"if-match": "*"}) == 412  # there is nothing yet
    assert register("1", **{"if-none-match": "*"}) == 201
    assert register("2", **{"if-none-match": "*"}) == 412
    first = tag_of(api, path)
    assert register("2", **{"if-match": '"other"'}) == 412
    assert register("2", **{"if-match": f"W/{first}"}) == 412  # only much the same
    assert register("2", **{"if-match": first}) == 201
    assert register("3", **{"if-match": first}) == 412
    # What is already as it was asked for is no conflict, in either order.
    assert register("2", **{"if-none-match": "*"}) == 200
    assert register("2", **{"if-match": first}) == 200
    refused = api("POST", "/workflows", json=flow(name), headers={"if-none-match": "*"})
    assert "is there already, as If-None-Match names it" in refused.json()["detail"]
    assert api.get(path)["version"] == 2
    assert tag_of(api, f"{path}?version=1") != tag_of(api, path)
    assert api("GET", path, headers={"if-none-match": tag_of(api, path)}).status_code == 304
    stale, fresh = first, tag_of(api, path)

    def alias(seen: str) -> int:
        headers = {"if-match": seen}
        answer = api("PUT", f"{path}/aliases/stable", json={"version": 1}, headers=headers)
        return int(answer.status_code)

    assert alias(stale) == 412
    assert alias(fresh) == 200
    assert api("DELETE", path, headers={"if-match": fresh}).status_code == 412  # an alias is new
    assert api("DELETE", path, headers={"if-match": tag_of(api, path)}).status_code == 204
    assert api("DELETE", path, headers={"if-match": "*"}).status_code == 404
    assert api("PUT", f"{path}/aliases/x", json={"version": 1}).status_code == 404


def test_of_concurrent_updates_with_the_same_etag_exactly_one_succeeds(api: Api, name: str) -> None:
    api.register(flow(name))
    headers = {"if-match": tag_of(api, f"/workflows/{name}")}

    def change(number: int) -> int:
        body = flow(name, description=f"by {number}")
        return int(api("POST", "/workflows", json=body, headers=headers).status_code)

    with ThreadPoolExecutor(8) as pool:
        codes = sorted(pool.map(change, range(16)))
    assert codes == [201] + [412] * 15
    assert api.get(f"/workflows/{name}")["version"] == 2


def test_an_invalid_definition_is_reported_before_a_stale_etag(api: Api, name: str) -> None:
    answer = api("POST", "/workflows", json={"name": name}, headers={"if-match": '"x"'})
    assert answer.status_code == 422


# ── compression ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def large(api: Api, name: str) -> str:
    """A run with an answer of some size."""
    api.register(flow(name, *(node(f"n{i}") for i in range(20))))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    api.finished(run_id)
    return str(run_id)


@pytest.mark.parametrize(
    ("accept", "compressed"),
    [
        ("gzip", True),
        ("br;q=1, GZIP ; q=0.5", True),
        ("*", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("*;q=0", False),
        ("", False),
        ("gzipx, ;;;,=", False),
    ],
)
def test_a_large_reply_is_compressed_if_the_client_accepts_gzip(
    api: Api, large: str, accept: str, compressed: bool
) -> None:
    plain = api("GET", f"/runs/{large}", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    answer = api("GET", f"/runs/{large}", headers={"accept-encoding": accept})
    assert (answer.headers.get("content-encoding") == "gzip") == compressed
    assert answer.json() == plain.json()
    if compressed:
        assert int(answer.headers["content-length"]) < len(plain.content) / 2
        assert "accept-encoding" in answer.headers["vary"].lower()
        # Other bytes, so another tag; but either says what is known.
        assert answer.headers["etag"] != plain.headers["etag"]
        for tag in (answer.headers["etag"], plain.headers["etag"]):
            known = {"if-none-match": tag, "accept-encoding": "gzip"}
            assert api("GET", f"/runs/{large}", headers=known).status_code == 304


def test_small_replies_and_streams_are_not_compressed(api: Api, large: str) -> None:
    headers = {"accept-encoding": "gzip"}
    assert "content-encoding" not in api("GET", "//health/live", headers=headers).headers
    headers["accept"] = "text/event-stream"
    answer = api.http.get(f"/api/v1/runs/{large}/events", headers=headers)
    assert len(answer.content) > 2000
    assert "content-encoding" not in answer.headers


# ── many at once ─────────────────────────────────────────────────────────────────────────


def test_fifty_triggers_with_one_key_create_one_run(server: Server, api: Api, name: str) -> None:
    api.register(flow(name))
    address = urlsplit(server.url)

    def ask(_: int) -> tuple[int, Any]:
        # A connection for each, so that all are there at once.
        with httpx2.Client(base_url=f"http://{address.netloc}", trust_env=False) as client:
            answer = client.post(
                f"/api/v1/workflows/{name}/runs",
                json={"params": {"n": 1}},
                headers={"idempotency-key": "fifty"},
                timeout=30,
            )
        return answer.status_code, answer.json()

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, range(50)))
    assert sorted(code for code, _ in answers) == [200] * 49 + [202]
    assert len({str(reported) for _, reported in answers}) == 1
    assert len(api.get(f"/runs?workflow={name}")["items"]) == 1
