"""A run's events: in order, without gaps, live, resumable, and with an end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from .conftest import Api, Server, flow, node, wait_for

AS_JSON = {"accept": "application/json"}


def frames(answer: httpx2.Response) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each event of a stream, with its id."""
    number = 0
    for line in answer.iter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            yield number, json.loads(line[6:])


def stream(api: Api, path: str, **headers: str) -> Any:
    accept = {"accept": "text/event-stream"}
    return api.http.stream("GET", f"/api/v1{path}", headers={**accept, **headers})


def made_run(api: Api, name: str) -> str:
    api.register(flow(name))
    run_id = str(api.post(f"/workflows/{name}/runs")["run_id"])
    api.finished(run_id)
    return run_id


def test_a_stream_has_every_event_and_ends_after_the_last(api: Api, name: str) -> None:
    run_id = made_run(api, name)
    with stream(api, f"/runs/{run_id}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        reported = list(frames(answer))
    events = [event for _, event in reported]
    assert [number for number, _ in reported] == [event["seq"] for event in events]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["type"] == "run.created"
    assert events[-1]["type"] == "run.completed"
    assert all(("attempt" in event) == event["type"].startswith("node.") for event in events)
    assert api.get(f"/runs/{run_id}/events", headers=AS_JSON) == events
    assert api.get(f"/runs/{run_id}/events?after=2", headers=AS_JSON) == events[2:]
    with stream(api, f"/runs/{run_id}/events?after=3") as answer:
        assert [event for _, event in frames(answer)] == events[3:]


def test_a_stream_is_live_and_resumes_after_the_last_event_that_was_read(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    api.register(flow(name, node("a", "until", config={"file": str(file)})))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    wait_for((server.folder / f"{name}.started").exists, "the node started")
    with stream(api, f"/runs/{run_id}/events") as answer:
        last = next(n for n, event in frames(answer) if event["type"] == "node.started")
    with stream(api, f"/runs/{run_id}/events?after=0", **{"last-event-id": str(last)}) as answer:
        file.touch()
        types = [event["type"] for _, event in frames(answer)]
    assert types == ["node.completed", "run.completed"]


def test_a_client_that_drops_the_stream_again_and_again_sees_each_event_once_in_order(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    chain = [node("n0", "until", config={"file": str(file)})]
    chain += [node(f"n{i}", "output", f"n{i - 1}") for i in range(1, 15)]
    api.register(flow(name, *chain, *(node(f"m{i}", "output", "n0") for i in range(15))))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    seen: list[dict[str, Any]] = []
    dropped = 0
    while True:
        headers = {"last-event-id": str(seen[-1]["seq"])} if seen else {}
        with stream(api, f"/runs/{run_id}/events", **headers) as answer:
            assert answer.status_code == 200
            for number, event in frames(answer):
                assert number == event["seq"]
                seen.append(event)
                file.touch()  # from here on the run goes on without a listener
                if len(seen) % 7 == 0:
                    dropped += 1
                    break  # with events on the way that are never read
            else:
                break
    assert dropped >= 10
    assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
    assert seen == api.get(f"/runs/{run_id}/events", headers=AS_JSON)
    assert seen[-1]["type"] == "run.completed"


def test_a_browser_that_reconnects_after_the_last_event_gets_204(api: Api, name: str) -> None:
    run_id = made_run(api, name)
    last = len(api.get(f"/runs/{run_id}/events", headers=AS_JSON))
    headers = {"last-event-id": str(last), "accept": "text/event-stream"}
    assert api("GET", f"/runs/{run_id}/events", headers=headers).status_code == 204
    headers = {"accept": "text/event-stream"}
    for after in (last, last + 1):
        path = f"/runs/{run_id}/events?after={after}"
        assert api("GET", path, headers=headers).status_code == 204
    with stream(api, f"/runs/{run_id}/events", **{"last-event-id": str(last - 1)}) as answer:
        assert [number for number, _ in frames(answer)] == [last]


def test_a_stream_of_a_failed_run_waits_for_its_running_nodes(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    api.register(
        flow(
            name,
            node("a", "until", config={"file": str(file)}),
            node("b", "fail", config={"message": "x"}),
        )
    )
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    with stream(api, f"/runs/{run_id}/events") as answer:
        types = []
        for _, event in frames(answer):
            types.append(event["type"])
            if event["type"] == "run.failed":
                assert api.get(f"/runs/{run_id}")["finished_at"] is None
                file.touch()
    assert types[-1] == "node.completed"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("", "application/json"),
        ("text/*", "application/json"),
        ("text/event-stream;q=0", "application/json"),
        ("application/json, text/event-stream;q=0.5", "application/json"),
        ("text/event-stream, */*;q=0.1", "text/event-stream"),
        ("Text/Event-Stream, application/json", "text/event-stream"),
        ("text/event-stream", "text/event-stream"),
        ("application/json", "application/json"),
        ("text/html, application/json;q=0.9", "application/json"),
        ("application/json;q=0.5, text/event-stream", "text/event-stream"),
        ("text/event-stream;q=x", "application/json"),
    ],
)
def test_the_client_chooses_between_a_stream_and_a_list(
    api: Api, name: str, accept: str, kind: str
) -> None:
    run_id = made_run(api, name)
    answer = api.http.get(f"/api/v1/runs/{run_id}/events", headers={"accept": accept})
    assert answer.headers["content-type"].split(";")[0] == kind


def test_without_an_accept_header_events_are_a_list(api: Api, name: str) -> None:
    run_id = made_run(api, name)
    del api.http.headers["accept"]
    assert api.get(f"/runs/{run_id}/events")[-1]["type"] == "run.completed"


@pytest.mark.parametrize("after", ["-1", "x", "9" * 30, "1.5", str(2**63)])
def test_an_invalid_event_number_is_422(api: Api, name: str, after: str) -> None:
    run_id = made_run(api, name)
    assert api("GET", f"/runs/{run_id}/events?after={after}").status_code == 422
    headers = {"last-event-id": after}
    assert api("GET", f"/runs/{run_id}/events", headers=headers).status_code == 422


def test_after_the_last_event_the_list_is_empty(api: Api, name: str) -> None:
    run_id = made_run(api, name)
    assert api.get(f"/runs/{run_id}/events?after={2**53}", headers=AS_JSON) == []
