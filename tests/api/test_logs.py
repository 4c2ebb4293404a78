"""The log of a run over HTTP: pages, filters, lines of text, a stream that ends with the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from dovetail.core.node_logs import LogChunk, LogLine

from ..log_writer import chunk, write_to_file, write_to_redis
from .conftest import Api, Server, flow, node, wait_for
from .test_events import frames

SOON = 10.0
"""A second and what a busy machine adds."""
FIELDS = [
    *("seq", "time", "node", "epoch", "attempt", "item", "level", "logger", "message", "fields")
]


def write(server: Server, *chunks: LogChunk) -> None:
    if server.redis_url:
        write_to_redis(server.redis_url, chunks)
    else:
        write_to_file(server.folder / ".dovetail" / "dovetail.db", chunks)


def stream(api: Api, path: str, **headers: str) -> Any:
    accept = {"accept": "text/event-stream"}
    return api.http.stream("GET", f"/api/v1{path}", headers={**accept, **headers})


def lines_of(api: Api, path: str) -> list[str]:
    answer = api("GET", path, headers={"accept": "text/plain"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    return answer.text.splitlines()


def messages(page: dict[str, Any]) -> list[str]:
    return [item["message"] for item in page["items"]]


@pytest.fixture
def finished(api: Api, name: str) -> str:
    api.register(flow(name))
    run_id = str(api.post(f"/workflows/{name}/runs")["run_id"])
    api.finished(run_id)
    return run_id


@pytest.fixture
def waiting(api: Api, server: Server, name: str) -> Iterator[str]:
    """A run that goes on until the test ends it, by `end`, or is over."""
    file = server.folder / name
    api.register(flow(name, node("a", "until", config={"file": str(file)}), node("b")))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    wait_for((server.folder / f"{name}.started").exists, "the node started")
    yield str(run_id)
    file.touch()


def end(server: Server, name: str) -> None:
    (server.folder / name).touch()


# ── pages ────────────────────────────────────────────────────────────────────────────────


def test_a_run_without_lines_has_an_empty_log(api: Api, finished: str) -> None:
    assert api.get(f"/runs/{finished}/logs") == {"items": [], "next_cursor": None}
    assert lines_of(api, f"/runs/{finished}/logs") == []


def test_a_line_has_the_fields_of_the_contract(api: Api, server: Server, finished: str) -> None:
    line = LogLine(1700000000.25, "WARNING", "shop", "half \x1b[31m done", {"n": [1, None]})
    write(server, LogChunk(finished, "a", 2, 3, 0, [line], item=7))
    page = api.get(f"/runs/{finished}/logs")
    assert page == {
        "items": [
            {
                "seq": 1,
                "time": "2023-11-14T22:13:20.250000Z",
                "node": "a",
                "epoch": 2,
                "attempt": 3,
                "item": 7,
                "level": "WARNING",
                "logger": "shop",
                "message": "half \x1b[31m done",
                "fields": {"n": [1, None]},
            }
        ],
        "next_cursor": None,
    }
    assert list(page["items"][0]) == FIELDS


def test_pages_have_every_line_once_and_the_last_has_no_cursor(
    api: Api, server: Server, finished: str
) -> None:
    for number in range(5):
        write(server, chunk(finished, number, *(f"{number}.{n}" for n in range(3))))
    found: list[dict[str, Any]] = []
    after, pages = "0", 0
    while after is not None:
        page = api.get(f"/runs/{finished}/logs?limit=4&after={after}")
        found += page["items"]
        after, pages = page["next_cursor"], pages + 1
    assert pages == 4
    assert [item["seq"] for item in found] == list(range(1, 16))
    assert [item["message"] for item in found] == [f"{i}.{n}" for i in range(5) for n in range(3)]
    whole = api.get(f"/runs/{finished}/logs?limit=15")
    assert whole == {"items": found, "next_cursor": None}
    assert len(api.get(f"/runs/{finished}/logs?limit=100000")["items"]) == 15


def test_a_page_has_200_lines_unless_said_and_at_most_1000(
    api: Api, server: Server, finished: str
) -> None:
    write(server, chunk(finished, 0, *map(str, range(1200))))
    page = api.get(f"/runs/{finished}/logs")
    assert (len(page["items"]), page["next_cursor"]) == (200, "200")
    page = api.get(f"/runs/{finished}/logs?limit=5000")
    assert (len(page["items"]), page["next_cursor"]) == (1000, "1000")


def test_a_log_is_filtered_by_node_epoch_attempt_and_item(
    api: Api, server: Server, finished: str
) -> None:
    write(
        server,
        chunk(finished, 0, "first"),
        chunk(finished, 0, "again", attempt=2),
        chunk(finished, 0, "retried", epoch=2),
        chunk(finished, 0, "of b", node="b"),
        chunk(finished, 0, "item 0", item=0),
    )

    def found(query: str) -> list[str]:
        return messages(api.get(f"/runs/{finished}/logs?{query}"))

    assert found("node=a") == ["first", "again", "retried", "item 0"]
    assert found("node=b") == ["of b"]
    assert found("attempt=2") == ["again"]
    assert found("node=a&epoch=2") == ["retried"]
    assert found("item=0") == ["item 0"]
    assert found("node=a&epoch=1&attempt=1") == ["first", "item 0"]
    assert found("node=b&attempt=7") == []
    assert found("node=") == ["first", "again", "retried", "of b", "item 0"]


def test_a_level_means_this_one_and_more_severe_ones_in_any_case(
    api: Api, server: Server, finished: str
) -> None:
    for number, level in enumerate(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")):
        write(server, chunk(finished, number, level.lower(), level=level))

    def found(level: str) -> list[str]:
        return messages(api.get(f"/runs/{finished}/logs?level={level}"))

    assert found("DEBUG") == ["debug", "info", "warning", "error", "critical"]
    assert found("warning") == found("Warning") == ["warning", "error", "critical"]
    assert found("CRITICAL") == ["critical"]


def test_a_search_finds_words_in_any_case(api: Api, server: Server, finished: str) -> None:
    write(server, chunk(finished, 0, "Ready", "not yet", "READY again"))
    page = api.get(f"/runs/{finished}/logs?q=ready")
    assert messages(page) == ["Ready", "READY again"]
    assert messages(api.get(f"/runs/{finished}/logs?q=ready&limit=1")) == ["Ready"]


def test_a_poller_passes_the_last_number_that_it_has_seen(
    api: Api, server: Server, waiting: str
) -> None:
    write(server, chunk(waiting, 0, "one", "two"))
    page = api.get(f"/runs/{waiting}/logs")
    assert (messages(page), page["next_cursor"]) == (["one", "two"], None)
    last = page["items"][-1]["seq"]
    assert api.get(f"/runs/{waiting}/logs?after={last}") == {"items": [], "next_cursor": None}
    write(server, chunk(waiting, 1, "three"))
    assert messages(api.get(f"/runs/{waiting}/logs?after={last}")) == ["three"]


def test_missing_lines_are_said_where_they_are_missing(
    api: Api, server: Server, finished: str
) -> None:
    write(server, chunk(finished, 0, "begin"))
    write(server, chunk(finished, 1, "end", missing_lines=12, missing_bytes=4_000))
    items = api.get(f"/runs/{finished}/logs")["items"]
    assert [item["seq"] for item in items] == [1, 1, 2]
    note = "… 12 lines (4.0 kB) are missing here: see DOVETAIL_NODE_LOG_BYTES"
    assert [item["message"] for item in items] == ["begin", note, "end"]
    assert messages(api.get(f"/runs/{finished}/logs?after=1")) == [note, "end"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("level=LOUD", "level"),
        ("epoch=0", "epoch"),
        ("epoch=x", "epoch"),
        ("attempt=-1", "attempt"),
        ("attempt=1.5", "attempt"),
        ("item=-1", "item"),
        ("after=-1", "after"),
        ("after=x", "after"),
        ("limit=0", "limit"),
        ("limit=x", "limit"),
    ],
)
@pytest.mark.parametrize("accept", ["application/json", "text/plain", "text/event-stream"])
def test_what_is_no_number_or_level_is_refused(
    api: Api, finished: str, query: str, field: str, accept: str
) -> None:
    answer = api("GET", f"/runs/{finished}/logs?{query}", headers={"accept": accept})
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["path"].endswith(field)


@pytest.mark.parametrize("accept", ["application/json", "text/plain", "text/event-stream"])
def test_an_unknown_run_or_node_is_not_found(api: Api, finished: str, accept: str) -> None:
    headers = {"accept": accept}
    assert api("GET", "/runs/0000/logs", headers=headers).status_code == 404
    api.register(flow(f"{finished}-x", node("fetch")))
    run_id = api.post(f"/workflows/{finished}-x/runs")["run_id"]
    answer = api("GET", f"/runs/{run_id}/logs?node=fetsh", headers=headers)
    assert answer.status_code == 404
    assert "did you mean 'fetch'?" in answer.json()["detail"]
    assert api("GET", f"/runs/{run_id}/logs?node=a%00b", headers=headers).status_code == 404
    assert api("GET", "/runs/a%00b/logs", headers=headers).status_code == 404


def test_a_log_can_be_read_as_soon_as_its_run_is_accepted(api: Api, name: str) -> None:
    api.register(flow(name))
    for _ in range(20):
        run_id = api.post(f"/workflows/{name}/runs")["run_id"]
        assert api.get(f"/runs/{run_id}/logs?node=a")["items"] == []


# ── text ─────────────────────────────────────────────────────────────────────────────────


def test_text_is_a_line_for_each_with_its_control_characters_escaped(
    api: Api, server: Server, finished: str
) -> None:
    odd = LogLine(
        1700000000.25, "ERROR", "a\nb", "red \x1b[31m\nnext\tüber\xa0\u202e", {"k": "\x07"}
    )
    write(server, LogChunk(finished, "a", 1, 2, 0, [odd]))
    write(server, chunk(finished, 0, "plain", item=4))
    when = "2023-11-14T22:13:20.250000Z"
    assert lines_of(api, f"/runs/{finished}/logs") == [
        rf"{when} ERROR a[2] a\nb: red \x1b[31m\nnext\tüber"
        "\xa0"
        r'\u202e {"k": "\u0007"}',
        "1970-01-01T00:16:40.500000Z INFO a[1]#4 mine: plain",
    ]


def test_text_has_all_lines_unless_a_limit_is_given(
    api: Api, server: Server, finished: str
) -> None:
    write(server, *(chunk(finished, n, *map(str, range(400))) for n in range(4)))
    assert len(lines_of(api, f"/runs/{finished}/logs")) == 1600
    assert len(lines_of(api, f"/runs/{finished}/logs?limit=1300")) == 1300
    assert len(lines_of(api, f"/runs/{finished}/logs?limit=3")) == 3
    assert len(lines_of(api, f"/runs/{finished}/logs?after=1590")) == 10


# ── a stream ─────────────────────────────────────────────────────────────────────────────


def test_a_stream_of_a_finished_run_has_every_line_and_ends(
    api: Api, server: Server, finished: str
) -> None:
    write(server, *(chunk(finished, n, *map(str, range(300))) for n in range(3)))
    with stream(api, f"/runs/{finished}/logs") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = list(frames(answer))
    assert [number for number, _ in found] == list(range(1, 901))
    assert [number for number, _ in found] == [line["seq"] for _, line in found]
    assert [line for _, line in found] == api.get(f"/runs/{finished}/logs?limit=1000")["items"]
    with stream(api, f"/runs/{finished}/logs?after=898&level=info") as answer:
        assert [number for number, _ in frames(answer)] == [899, 900]


def test_a_stream_brings_new_lines_soon_and_ends_with_the_run(
    api: Api, server: Server, waiting: str, name: str
) -> None:
    write(server, chunk(waiting, 0, "before"))
    with stream(api, f"/runs/{waiting}/logs?node=a") as answer:
        found = frames(answer)
        assert next(found)[1]["message"] == "before"
        began = time.monotonic()
        write(server, chunk(waiting, 1, "during"), chunk(waiting, 0, "of b", node="b"))
        assert next(found)[1]["message"] == "during"
        assert time.monotonic() - began < SOON
        write(server, chunk(waiting, 2, "last"))
        end(server, name)
        assert [line["message"] for _, line in found] == ["last"]


def test_a_stream_resumes_after_the_last_line_that_was_read(
    api: Api, server: Server, waiting: str, name: str
) -> None:
    write(server, chunk(waiting, 0, "1", "2", "3"))
    with stream(api, f"/runs/{waiting}/logs") as answer:
        assert [next(frames(answer))[0]] == [1]
    headers = {"last-event-id": "1"}
    with stream(api, f"/runs/{waiting}/logs?after=0", **headers) as answer:
        end(server, name)
        assert [number for number, _ in frames(answer)] == [2, 3]


def test_a_browser_that_reconnects_after_the_last_line_gets_204(
    api: Api, server: Server, finished: str
) -> None:
    def again(last: int, query: str = "") -> httpx2.Response:
        headers = {"last-event-id": str(last), "accept": "text/event-stream"}
        return api("GET", f"/runs/{finished}/logs{query}", headers=headers)

    assert again(0).status_code == 204
    write(server, chunk(finished, 0, "one", "two"))
    assert again(2).status_code == 204
    assert again(1).status_code == 200
    assert again(1, "?level=error").status_code == 204
    write(server, chunk(finished, 1, "three", missing_lines=1, missing_bytes=9))
    assert again(3).status_code == 204
    # What is missing was said under the number 2; nothing else is as severe.
    assert again(2, "?level=error").status_code == 204
    assert again(2).status_code == 200


def test_a_stream_of_a_run_that_goes_on_does_not_end_early(
    api: Api, server: Server, waiting: str, name: str
) -> None:
    headers = {"last-event-id": "0"}
    with stream(api, f"/runs/{waiting}/logs", **headers) as answer:
        assert answer.status_code == 200
        timer = threading.Timer(1.5, lambda: write(server, chunk(waiting, 0, "late")))
        timer.start()
        assert next(frames(answer))[1]["message"] == "late"
        timer.join()
        end(server, name)


def test_what_a_handler_prints_is_in_the_stream_while_it_runs(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    api.register(flow(name, node("a", "talks", config={"file": str(file)})))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    with stream(api, f"/runs/{run_id}/logs") as answer:
        found = frames(answer)
        first = next(found)[1]
        assert (first["level"], first["logger"]) == ("INFO", "stdout")
        assert first["message"] == "begun, attempt 1"
        file.touch()
        (last,) = [line for _, line in found]
    assert (last["level"], last["message"], last["fields"]) == (
        *("WARNING", "there it is"),
        {"file": 1},
    )
    assert api.get(f"/runs/{run_id}/logs")["items"] == [first, last]
    assert api.get(f"/runs/{run_id}/nodes/a")["attempts"][0]["error"]["message"] == "said enough"
    assert [line.split(" ", 2)[2] for line in lines_of(api, f"/runs/{run_id}/logs")] == [
        "a[1] stdout: begun, attempt 1",
        'a[1] dovetail.handler: there it is {"file": 1}',
    ]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("text/html, */*;q=0.8", "application/json"),
        ("text/plain", "text/plain; charset=utf-8"),
        ("text/plain;q=0.5, application/json", "application/json"),
        ("text/plain, application/json;q=0.9", "text/plain; charset=utf-8"),
        ("text/plain, text/event-stream", "text/event-stream"),
        ("text/plain;q=0", "application/json"),
    ],
)
def test_the_client_chooses_between_json_text_and_a_stream(
    api: Api, finished: str, accept: str, kind: str
) -> None:
    with api.http.stream("GET", f"/api/v1/runs/{finished}/logs", headers={"accept": accept}) as got:
        assert got.headers["content-type"].startswith(kind)


def test_a_token_that_may_only_read_reads_logs(start: Any, name: str) -> None:
    server = start(DOVETAIL_TOKENS="all-of-it-0123456789,read-only-0123456789:read")
    writer = server.client(authorization="Bearer all-of-it-0123456789")
    reader = server.client(authorization="Bearer read-only-0123456789")
    writer.register(flow(name))
    run_id = writer.post(f"/workflows/{name}/runs")["run_id"]
    writer.finished(run_id)
    assert reader.get(f"/runs/{run_id}/logs")["items"] == []
    assert reader.get(f"/runs/{run_id}/nodes/a")["status"] == "COMPLETED"
    assert server.client()("GET", f"/runs/{run_id}/logs").status_code == 401
    assert server.client()("GET", f"/runs/{run_id}/nodes/a").status_code == 401
