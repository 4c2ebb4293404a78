"""The feed over HTTP: the run events of all runs, of every process, each once, resumable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dovetail import Dovetail

from ..servers.redis_server import RedisServer
from .conftest import Api, Server, flow, node, on, wait_for
from .test_events import AS_JSON
from .test_security import bearer

Start = Callable[..., Server]
FIRST = ["run.created", "run.started"]
RUNS = 1000


def frames(answer: httpx2.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    number = ""
    for line in answer.iter_lines():
        if line.startswith("id: "):
            number = line[4:]
        elif line.startswith("data: "):
            yield number, json.loads(line[6:])


def opened(api: Api, path: str = "/events", **headers: str) -> Any:
    return api.http.stream("GET", f"/api/v1{path}", headers=headers)


def position(api: Api) -> str:
    """The id of now."""
    with opened(api) as answer:
        assert answer.status_code == 200, answer.read()
        return str(answer.headers["last-event-id"])


def until(api: Api, after: str, is_last: Callable[[dict[str, Any]], bool]) -> list[Any]:
    """The events after an id, with their ids, to the one that is the last."""
    found = []
    with opened(api, f"/events?after={after}") as answer:
        assert answer.status_code == 200, answer.read()
        for frame in frames(answer):
            found.append(frame)
            if is_last(frame[1]):
                return found
    raise AssertionError(f"the feed ended: {found}")


def ends(run_id: str, kind: str = "run.completed") -> Callable[[dict[str, Any]], bool]:
    return lambda event: (event["run_id"], event["type"]) == (run_id, kind)


def trigger(api: Api, name: str) -> str:
    return str(api.post(f"/workflows/{name}/runs")["run_id"])


def test_the_feed_has_the_run_events_of_a_run_from_now_on(api: Api, name: str) -> None:
    api.register(flow(name))
    api.finished(trigger(api, name))
    with opened(api) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        run_id = trigger(api, name)
        found: list[dict[str, Any]] = []
        for _, event in frames(answer):
            if event["run_id"] == run_id:
                found.append(event)
            if ends(run_id)(event):
                break
    own = api.get(f"/runs/{run_id}/events", headers=AS_JSON)
    own = [event for event in own if event["type"].startswith("run.")]
    assert found == [{**event, "run_id": run_id, "workflow": name} for event in own]
    assert [event["type"] for event in found] == [*FIRST, "run.completed"]
    api.validate({"$ref": "#/components/schemas/FeedItem"}, found[0])


def test_it_resumes_after_an_id_by_the_query_or_by_the_header(api: Api, name: str) -> None:
    api.register(flow(name))
    before = position(api)
    run_id = trigger(api, name)
    found = until(api, before, ends(run_id))
    assert found == until(api, before, ends(run_id)), "the same each time"
    for at, (number, _) in enumerate(found[:-1]):
        assert until(api, number, ends(run_id)) == found[at + 1 :]
        with opened(api, f"/events?after={before}", **{"last-event-id": number}) as answer:
            assert answer.headers["last-event-id"] == number
            assert next(frames(answer)) == found[at + 1]
    with opened(api, f"/events?after={before}", **{"last-event-id": ""}) as answer:
        assert answer.headers["last-event-id"] == before, "empty is none"
    with opened(api, "/events?after=") as answer:
        assert answer.status_code == 200


def test_failures_cancels_and_retries_are_in_it(api: Api, server: Server, name: str) -> None:
    file = server.folder / name
    api.register(flow(name, node("a", "needs", config={"file": str(file)})))
    before = position(api)
    run_id = trigger(api, name)
    assert api.finished(run_id)["status"] == "FAILED"
    file.touch()
    api.post(f"/runs/{run_id}/retry")
    api.finished(run_id)
    found = [e for _, e in until(api, before, ends(run_id)) if e["run_id"] == run_id]
    assert [e["type"] for e in found] == [*FIRST, "run.failed", "run.retried", "run.completed"]
    assert found[2]["error"]["node"] == "a"
    go = server.folder / f"{name}-go"
    api.register(flow(f"{name}-2", node("a", "until", config={"file": str(go)})))
    waiting = trigger(api, f"{name}-2")
    wait_for(Path(f"{go}.started").exists, "the node started")
    api.post(f"/runs/{waiting}/cancel")
    last = until(api, before, ends(waiting, "run.cancelled"))[-1][1]
    assert last["workflow"] == f"{name}-2"


def test_a_thousand_runs_are_in_it_none_missing_and_none_twice(
    api: Api, server: Server, name: str
) -> None:
    """The client drops the connection again and again, with events on the way."""
    api.register(flow(name, node("a")))
    last = position(api)
    batch = api.post(f"/workflows/{name}/batches", {"items": [{}] * RUNS})["batch_id"]
    seen: dict[str, list[str]] = {}
    drops, ended = 0, 0
    while ended < RUNS:
        with opened(api, **{"last-event-id": last}) as answer:
            assert answer.status_code == 200, answer.read()
            for at, (number, event) in enumerate(frames(answer)):
                last = number
                if event["workflow"] == name:
                    seen.setdefault(event["run_id"], []).append(event["type"])
                    ended += event["type"] == "run.completed"
                if at >= 130 + drops or ended == RUNS:
                    drops += 1
                    break
    assert drops > 10
    assert len(seen) == RUNS
    assert all(types == [*FIRST, "run.completed"] for types in seen.values())
    done = lambda: api.get(f"/batches/{batch}?limit=1")["counts"] == {"COMPLETED": RUNS}  # noqa: E731
    wait_for(done, "the lists have them, too")


@pytest.mark.parametrize("wrong", ["7", "x", "0a1b2c3d", "0a1b2c3d-1-2-3", "-1", "0a1b2c3d-1e3"])
def test_what_is_no_id_is_422(api: Api, wrong: str) -> None:
    for path, headers, field in (
        (f"/events?after={wrong}", {}, "after"),
        ("/events", {"last-event-id": wrong}, "Last-Event-ID"),
    ):
        answer = api("GET", path, headers=headers)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["path"] == field
        assert "use the `id` of an event" in answer.json()["detail"]


def test_an_id_of_another_store_is_410_with_what_to_do(api: Api) -> None:
    name, _, numbers = position(api).partition("-")
    other = f"{'0' * 8 if name != '0' * 8 else '1' * 8}-{numbers}"
    beyond = "-".join([name, *["999999999999999"] * (numbers.count("-") + 1)])
    for wrong in (other, beyond):
        answer = api("GET", f"/events?after={wrong}")
        assert answer.status_code == 410
        assert answer.json()["type"] == "urn:dovetail:problem:expired"
        assert "follow the feed without an id" in answer.json()["detail"]


# ── the embedded file ────────────────────────────────────────────────────────────────────


def test_runs_of_another_process_on_the_file_are_in_it_at_once(start: Start, name: str) -> None:
    server = start()
    api = server.client()
    before = position(api)

    async def run() -> str:
        async with Dovetail(server.folder / ".dovetail" / "dovetail.db") as dt:
            return (await dt.run(flow(name), timeout=20)).run_id

    with opened(api) as answer:
        run_id = asyncio.run(run())
        events = (event for _, event in frames(answer))
        found = [next(events)["type"] for _ in range(3)]
    assert found == [*FIRST, "run.completed"]
    assert [e["type"] for _, e in until(api, before, ends(run_id))] == found


def test_it_resumes_after_the_server_was_killed(start: Start, name: str) -> None:
    server = start()
    api = server.client()
    api.register(flow(name))
    before = position(api)
    first = trigger(api, name)
    found = until(api, before, ends(first))
    middle = found[1][0]
    server.process.kill()
    server.process.wait()
    again = start().client()
    second = trigger(again, name)
    assert until(again, middle, ends(second))[:1] == found[2:]
    ids = [number for number, _ in until(again, before, ends(second))]
    assert len(ids) == len(set(ids)) == 6


def test_a_token_that_may_read_is_enough_and_one_is_needed(start: Start) -> None:
    server = start(DOVETAIL_TOKENS="full-token,reading:read")
    with opened(server.client(**bearer("reading"))) as answer:
        assert answer.status_code == 200
    with opened(server.client()) as answer:
        assert answer.status_code == 401


def test_it_counts_as_a_request_that_waits(start: Start) -> None:
    api = start(DOVETAIL_MAX_WAITING_READS="2", DOVETAIL_CALLER_SHARE="1").client()
    with opened(api), opened(api):
        answer = api("GET", "/events")
        assert answer.status_code == 429
        assert api.get("/runs")["items"] == []


# ── services ─────────────────────────────────────────────────────────────────────────────


def test_two_servers_have_the_same_feed_and_it_survives_the_kill_of_both(
    start: Start, name: str
) -> None:
    with RedisServer() as redis:
        env = on(redis.url)
        servers = [start("--with", "orchestrator,worker", **env), start(**env)]
        apis = [server.client() for server in servers]
        before = position(apis[0])
        apis[0].register(flow(name))
        wait_for(lambda: apis[1].get("/workers")["items"], "a worker was heard of")
        run_ids = [trigger(api, name) for api in apis]
        for run_id in run_ids:
            apis[0].finished(run_id)
        both = [sorted(map(str, read_all(api, before, run_ids))) for api in apis]
        assert both[0] == both[1]
        assert len(both[0]) == 6
        for server in servers:
            server.process.kill()
            server.process.wait()
        again = start("--with", "orchestrator,worker", **env).client()
        assert sorted(map(str, read_all(again, before, run_ids))) == both[0]


def read_all(api: Api, after: str, run_ids: list[str]) -> list[Any]:
    left = set(run_ids)

    def is_last(event: dict[str, Any]) -> bool:
        if event["type"] == "run.completed":
            left.discard(event["run_id"])
        return not left

    return until(api, after, is_last)
