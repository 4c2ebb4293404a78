"""Runs over HTTP: triggered once, read, waited for, explained, retried, cancelled."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest

from .conftest import Api, Server, flow, node, wait_for

HOSTILE = [
    "9" * 5000, "-1", "0", "1e308", "nan", "%00", "%ff", "%ed%a0%80", "%F0%9F%92%A9", "%D9%A3",
    "a" * 8000, "9223372036854775808", "-9223372036854775809", "18446744073709551616", "%0d%0aX:y",
    "';--", "..%2f..", "+7", "1_000", "%C0%80",
]  # fmt: skip
PARAMS = {
    "type": "object",
    "required": ["topic"],
    "properties": {"topic": {"type": "string"}, "depth": {"type": "integer", "default": 2}},
    "additionalProperties": False,
}


def test_a_triggered_run_returns_its_result(api: Api, name: str) -> None:
    api.register(
        flow(
            name,
            node("start", "input", config={}),
            node("end", "output", "start", config={"about": "{{ start.topic }}"}),
            params=PARAMS,
        )
    )
    answer = api("POST", f"/workflows/{name}/runs", json={"params": {"topic": "tea"}})
    assert answer.status_code == 202
    made = answer.json()
    assert set(made) == {"run_id", "status", "workflow", "version", "created_at"}
    assert (made["workflow"], made["version"]) == (name, 1)
    assert answer.headers["location"] == f"/api/v1/runs/{made['run_id']}"
    run = api.finished(made["run_id"])
    assert run["status"] == "COMPLETED"
    assert run["params"] == {"topic": "tea", "depth": 2}
    assert run["result"] == {"about": "tea"}
    assert [(n["id"], n["status"], n["attempt"]) for n in run["nodes"]] == [
        ("start", "COMPLETED", 1),
        ("end", "COMPLETED", 1),
    ]
    assert api.get(f"/runs/{made['run_id']}/results") == {
        "status": "COMPLETED",
        "result": {"about": "tea"},
        "outputs": {"start": {"topic": "tea", "depth": 2}, "end": {"about": "tea"}},
    }
    assert "nodes" not in api.get(f"/runs/{made['run_id']}?nodes=false")


def test_a_trigger_needs_no_body(api: Api, name: str) -> None:
    api.register(flow(name))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    assert api.finished(run_id)["params"] == {}


def test_every_invalid_param_is_reported(api: Api, name: str) -> None:
    api.register(flow(name, params=PARAMS))
    answer = api("POST", f"/workflows/{name}/runs", json={"params": {"depth": "x", "colour": 1}})
    assert answer.status_code == 422
    assert answer.json()["type"].endswith(":invalid_params")
    assert {e["path"] for e in answer.json()["errors"]} == {
        "params.topic",
        "params.depth",
        "params.colour",
    }
    assert api.get(f"/runs?workflow={name}")["items"] == []


def test_a_version_can_be_chosen_by_number_or_alias(api: Api, name: str) -> None:
    api.register(flow(name))
    api.register(flow(name, node("c")))
    api("PUT", f"/workflows/{name}/aliases/old", json={"version": 1})
    for asked, got in ((1, 1), ("1", 1), ("old", 1), ("latest", 2), (None, 2)):
        made = api.post(f"/workflows/{name}/runs", {"params": {}, "version": asked})
        assert made["version"] == got
    assert api("POST", f"/workflows/{name}/runs", json={"version": 3}).status_code == 404
    assert api("POST", f"/workflows/{name}/runs", json={"version": 1.5}).status_code == 422


def test_a_definition_runs_without_being_registered(api: Api, name: str) -> None:
    made = api.post("/runs", {"definition": flow(name), "params": {"x": 1}})
    assert (made["workflow"], made["version"]) == (name, None)
    assert api.finished(made["run_id"])["status"] == "COMPLETED"
    assert api("GET", f"/workflows/{name}").status_code == 404


def test_problems_of_an_inline_definition_have_their_path_in_the_body(api: Api, name: str) -> None:
    body = """{"params": {},
        "definition": {
            "nodes": [{"id": "a", "handler": "x"}],
            "name": "NAME"}}""".replace("NAME", name)
    answer = api("POST", "/runs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["code"], error["path"], error["line"]) == (
        "unknown_handler",
        "nodes[0].handler",
        3,
    )


def test_one_key_creates_one_run_for_any_number_of_requests(api: Api, name: str) -> None:
    api.register(flow(name))

    def ask(_: int) -> tuple[int, Any]:
        headers = {"idempotency-key": "k"}
        answer = api("POST", f"/workflows/{name}/runs", json={"params": {"n": 1}}, headers=headers)
        return answer.status_code, answer.json()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(20)))
    assert sorted(status for status, _ in answers) == [200] * 19 + [202]
    assert all(body == answers[0][1] for _, body in answers)
    api.finished(answers[0][1]["run_id"])
    assert ask(0) == (200, answers[0][1])
    assert len(api.get(f"/runs?workflow={name}")["items"]) == 1


def test_one_key_with_another_body_is_a_conflict(api: Api, name: str) -> None:
    api.register(flow(name))
    headers = {"idempotency-key": "k"}
    api.post(f"/workflows/{name}/runs", {"params": {"n": 1}}, headers=headers)
    other = api("POST", f"/workflows/{name}/runs", json={"params": {"n": 2}}, headers=headers)
    assert other.status_code == 409
    ad_hoc = {"definition": flow(name), "params": {"n": 1}}
    first = api.post("/runs", ad_hoc, headers=headers)  # another call, so another scope
    assert api.post("/runs", ad_hoc, status=200, headers=headers) == first
    long = {"idempotency-key": "k" * 300}
    assert api("POST", f"/workflows/{name}/runs", headers=long).status_code == 422


def test_the_list_is_newest_first_and_filtered(api: Api, name: str) -> None:
    api.register(flow(name))
    failing = f"{name}-fails"
    api.register(flow(failing, node("a", "fail", config={"message": "no"})))
    made = [api.post(f"/workflows/{name}/runs")["run_id"] for _ in range(3)]
    failed = api.post(f"/workflows/{failing}/runs")["run_id"]
    for run_id in (*made, failed):
        api.finished(run_id)
    found, cursor = [], ""
    while cursor is not None:
        page = api.get(f"/runs?workflow={name}&limit=2{cursor and '&cursor='}{cursor}")
        found += [item["run_id"] for item in page["items"]]
        assert all("nodes" not in item for item in page["items"])
        cursor = page["next_cursor"]
    assert found == made[::-1]
    (item,) = api.get(f"/runs?workflow={failing}&status=FAILED")["items"]
    assert item["run_id"] == failed
    assert item["error"]["node"] == "a"
    assert api.get(f"/runs?workflow={failing}&status=COMPLETED")["items"] == []
    assert len(api.get("/runs?limit=100000")["items"]) >= 4


@pytest.mark.parametrize(
    "query",
    [
        "status=DONE",
        "limit=0",
        "limit=-1",
        "limit=x",
        "limit=" + "9" * 5000,
        "cursor=x",
        "cursor=-1",
        "cursor=%ff%00",
        "cursor=" + "9" * 300,
    ],
)
def test_an_invalid_query_parameter_is_reported(api: Api, query: str) -> None:
    answer = api("GET", f"/runs?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["path"] == query.split("=")[0]


def test_a_wait_ends_with_the_run_or_at_its_timeout(api: Api, server: Server, name: str) -> None:
    file = server.folder / name
    api.register(flow(name, node("a", "until", config={"file": str(file)})))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    before = time.monotonic()
    run = api.get(f"/runs/{run_id}?wait=0.3&nodes=false")
    assert 0.3 <= time.monotonic() - before < 20
    assert run["status"] == "RUNNING"
    answer = api("GET", f"/runs/{run_id}/results")
    assert answer.status_code == 409
    assert "RUNNING" in answer.json()["detail"]
    assert api.get(f"/runs/{run_id}/results?partial=true")["outputs"] == {}
    running = lambda: [w["running"] for w in api.get("/workers")["items"]] == [1]  # noqa: E731
    wait_for(running, "the worker said so, with its next heartbeat")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.finished, run_id)
        time.sleep(0.1)
        assert not waiting.done()
        file.touch()
        assert waiting.result(5)["status"] == "COMPLETED"
    for wrong in ("-1", "inf", "nan", "x"):
        assert api("GET", f"/runs/{run_id}?wait={wrong}").status_code == 422


def test_the_explain_endpoint_says_why_a_node_waits(api: Api, server: Server, name: str) -> None:
    file = server.folder / name
    waits = node("a", "until", config={"file": str(file)})
    api.register(flow(name, waits, node("b", "output", "a")))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    wait_for((server.folder / f"{name}.started").exists, "the node started")
    reported = api.get(f"/runs/{run_id}/explain")
    assert [(n["id"], n["code"]) for n in reported["nodes"]] == [
        ("a", "running"),
        ("b", "waiting_for_parents"),
    ]
    file.touch()
    api.finished(run_id)
    assert api.get(f"/runs/{run_id}/explain")["nodes"] == []


def test_every_kind_of_wait_is_explained_in_words_and_as_data(
    api: Api, server: Server, name: str
) -> None:
    file = str(server.folder / name)
    tag = f"tag-{name}"
    api("PUT", f"/rate-limits/{tag}", json={"rate_per_second": 0.01})
    later = {"max_retries": 3, "retry": {"base_delay_seconds": 60, "jitter": 0}}
    api.register(
        flow(
            name,
            node("tagged", config={}, resource_tag=tag),
            node("parked", config={}, resource_tag=tag),
            node("broken", "fail", config={"message": "not yet"}, **later),
            node("runs", "until", config={"file": file}),
            node("too", "until", config={"file": file}),
            node("held", "output", config={}),
            node("after", "output", "runs", "held"),
            max_concurrency=2,
        )
    )
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]

    def reported() -> dict[str, Any]:
        return {one["id"]: one for one in api.get(f"/runs/{run_id}/explain")["nodes"]}

    expected = {
        "parked": "rate_limited",
        "broken": "backing_off",
        "runs": "running",
        "too": "running",
        "held": "max_concurrency",
        "after": "waiting_for_parents",
    }
    wait_for(lambda: {k: v["code"] for k, v in reported().items()} == expected, "all wait")
    found = reported()
    assert found["parked"]["why"].startswith(f"rate limit '{tag}': starts in about ")
    assert found["parked"]["details"]["resource_tag"] == tag
    assert 0 < found["parked"]["details"]["seconds"] <= 100
    assert found["broken"]["why"].startswith("backing off, attempt 2 of 4 in ")
    assert found["broken"]["details"]["error"]["message"] == "not yet"
    assert found["held"]["why"] == "run at its max_concurrency 2"
    assert found["held"]["details"] == {"max_concurrency": 2, "active": 2}
    assert found["after"]["why"] == "waits for parents runs, held"
    assert found["after"]["details"] == {"parents": ["runs", "held"]}
    assert found["runs"]["details"]["attempt"] == 1
    api.post(f"/runs/{run_id}/cancel")


def test_a_node_without_a_free_slot_is_queued(api: Api, server: Server, name: str) -> None:
    file = str(server.folder / name)
    nodes = [node(f"n{i}", "until", config={"file": file}) for i in range(34)]
    run_id = api.post("/runs", {"definition": flow(name, *nodes)})["run_id"]

    def codes() -> list[str]:
        return sorted(one["code"] for one in api.get(f"/runs/{run_id}/explain")["nodes"])

    wait_for(lambda: codes() == ["queued"] * 2 + ["running"] * 32, "all slots are taken")
    api.post(f"/runs/{run_id}/cancel")
    (server.folder / name).touch()  # another test of this server may retry any run: it shall end


def test_a_retry_reruns_the_nodes_that_did_not_complete(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    api.register(
        flow(
            name,
            node("a"),
            node("b", "needs", "a", config={"file": str(file)}),
            node("c", "output", "b"),
        )
    )
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    assert api.finished(run_id)["status"] == "FAILED"
    file.touch()
    plan = api.post(f"/runs/{run_id}/retry", {"dry_run": True}, status=200)
    assert plan == {"rerun": ["b", "c"], "reuse": ["a"]}
    assert api.get(f"/runs/{run_id}")["epoch"] == 1
    answer = api("POST", f"/runs/{run_id}/retry")
    assert answer.status_code == 202
    assert answer.json()["epoch"] == 2
    run = api.finished(run_id)
    assert run["status"] == "COMPLETED"
    assert [n["epoch"] for n in run["nodes"]] == [1, 2, 2]
    answer = api("POST", f"/runs/{run_id}/retry", json={})
    assert answer.status_code == 409
    assert "COMPLETED" in answer.json()["detail"]
    plan = api.post(f"/runs/{run_id}/retry", {"from": "b", "dry_run": True}, status=200)
    assert plan == {"rerun": ["b", "c"], "reuse": ["a"]}
    assert api.post(f"/runs/{run_id}/retry", {"from": "b"})["epoch"] == 3
    assert api.finished(run_id)["status"] == "COMPLETED"
    assert api("POST", f"/runs/{run_id}/retry", json={"from": "nobody"}).status_code == 404
    assert api("POST", f"/runs/{run_id}/retry", json={"from": 7}).status_code == 422
    assert api("POST", f"/runs/{run_id}/retry", json={"form": "b"}).status_code == 422


def test_a_retry_of_a_run_that_completed_with_allowed_failures_needs_from(
    api: Api, name: str
) -> None:
    api.register(
        flow(
            name,
            node("a", "fail", allow_failure=True, config={}),
            node("b", "output", "a"),
            node("c"),
        )
    )
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    run = api.finished(run_id)
    assert (run["status"], run["error"]) == ("COMPLETED", None)
    assert [one["status"] for one in run["nodes"]] == ["FAILED", "COMPLETED", "COMPLETED"]
    for dry_run in (False, True):
        answer = api("POST", f"/runs/{run_id}/retry", json={"dry_run": dry_run})
        assert answer.status_code == 409
        assert "allowed failures (a): name the node" in answer.json()["detail"]
        assert "`from`" in answer.json()["detail"]
    plan = api.post(f"/runs/{run_id}/retry", {"from": "c", "dry_run": True}, status=200)
    assert plan == {"rerun": ["a", "c"], "reuse": ["b"]}
    assert api.post(f"/runs/{run_id}/retry", {"from": "a"})["epoch"] == 2
    assert api.finished(run_id)["status"] == "COMPLETED"


def test_a_cancel_ends_the_run_immediately_and_only_once(
    api: Api, server: Server, name: str
) -> None:
    waits = node("a", "until", config={"file": str(server.folder / name)})
    api.register(flow(name, waits, node("b", "output", "a")))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    wait_for((server.folder / f"{name}.started").exists, "the node started")
    run = api.post(f"/runs/{run_id}/cancel")
    assert run["status"] == "CANCELLED"
    assert [n["status"] for n in run["nodes"]] == ["CANCELLED", "CANCELLED"]
    assert api("POST", f"/runs/{run_id}/cancel", json={}).status_code == 409
    assert api("POST", f"/runs/{run_id}/cancel", json={"now": True}).status_code == 422


def test_a_page_continues_after_the_last_one_while_runs_are_added(api: Api, name: str) -> None:
    api.register(flow(name))
    made = [api.post(f"/workflows/{name}/runs")["run_id"] for _ in range(5)]
    first = api.get(f"/runs?workflow={name}&limit=2")
    api.post(f"/workflows/{name}/runs")
    second = api.get(f"/runs?workflow={name}&limit=2&cursor={first['next_cursor']}")
    api.post(f"/workflows/{name}/runs")
    third = api.get(f"/runs?workflow={name}&limit=2&cursor={second['next_cursor']}")
    listed = [run["run_id"] for page in (first, second, third) for run in page["items"]]
    assert listed == made[::-1]
    assert third["next_cursor"] is None


def test_no_list_query_makes_the_server_fail(api: Api, name: str) -> None:
    api.register(flow(name))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    batch = api.post(f"/workflows/{name}/batches", {"items": [{}]})["batch_id"]
    paths = [
        *(f"/runs?{key}=" for key in ("status", "workflow", "batch", "limit", "cursor")),
        *(f"/workflows?{key}=" for key in ("limit", "cursor")),
        *(f"/batches/{batch}?{key}=" for key in ("limit", "cursor")),
        f"/workflows/{name}?version=",
        f"/runs/{run_id}?nodes=",
        f"/runs/{run_id}/results?partial=true&partial=",
        "/run-ids/",
        *(f"/run-counts?{key}=" for key in ("workflow", "hours")),
    ]
    for path, value in product(paths, HOSTILE):
        assert api("GET", path + value).status_code in (200, 404, 409, 422), path


def test_runs_are_counted_by_status_and_hour(api: Api, name: str) -> None:
    api.register(flow(name))
    empty = api.get(f"/run-counts?workflow={name}&hours=3")
    assert empty["counts"] == dict.fromkeys(
        ("PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"), 0
    )
    assert [one["total"] for one in empty["hours"]] == [0, 0, 0]
    for _ in range(3):
        api.finished(api.post(f"/workflows/{name}/runs")["run_id"])
    counted = api.get(f"/run-counts?workflow={name}&hours=3")
    while counted["counts"]["COMPLETED"] < 3:  # a list may be behind by a moment
        counted = api.get(f"/run-counts?workflow={name}&hours=3")
    assert sum(counted["counts"].values()) == 3
    assert sum(one["total"] for one in counted["hours"]) == 3  # an hour may have ended meanwhile
    assert sum(one["failed"] for one in counted["hours"]) == 0
    assert all(one["time"].endswith(":00:00.000000Z") for one in counted["hours"])
    assert sum(api.get("/run-counts")["counts"].values()) >= 3
    assert len(api.get("/run-counts")["hours"]) == 24
    for wrong in ("0", "169", "x", "-1"):
        assert api("GET", f"/run-counts?hours={wrong}").status_code == 422


def test_a_run_that_goes_on_is_counted_as_running(api: Api, server: Server, name: str) -> None:
    file = server.folder / name
    waiting = {"id": "a", "handler": "until", "config": {"file": str(file)}}
    api.register({"name": name, "nodes": [waiting]})
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    wait_for(file.with_name(f"{name}.started").exists, "the node runs")
    assert api.get(f"/run-counts?workflow={name}")["counts"]["RUNNING"] == 1
    file.touch()
    api.finished(run_id)


def test_a_run_says_which_events_are_in_it(api: Api, name: str) -> None:
    api.register(flow(name))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    api.finished(run_id)
    answer = api("GET", f"/runs/{run_id}")
    last = api.get(f"/runs/{run_id}/events")[-1]["seq"]
    assert answer.headers["last-event-id"] == str(last)
    known = {"if-none-match": answer.headers["etag"]}
    assert api("GET", f"/runs/{run_id}", headers=known).headers["last-event-id"] == str(last)


def test_a_run_id_is_found_by_its_prefix(api: Api, name: str) -> None:
    api.register(flow(name))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    api.finished(run_id)
    assert api.get(f"/run-ids/{run_id[:12]}") == {"run_id": run_id}
    assert api.get(f"/run-ids/{run_id}") == {"run_id": run_id}
    for wrong in ("abc", "zzzzzz", f"{run_id}0"):
        assert api("GET", f"/run-ids/{wrong}").status_code == 404


def test_the_events_of_a_run_follow_the_rules(api: Api, name: str) -> None:
    api.register(flow(name))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    api.finished(run_id)
    assert api.get(f"/runs/{run_id}/verify") == {"run_id": run_id, "divergences": []}
    assert api("GET", "/runs/nobody/verify").status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "?wait=1"),
        ("GET", "?nodes=false"),
        ("GET", "/results"),
        ("GET", "/explain"),
        ("GET", "/events"),
        ("POST", "/retry"),
        ("POST", "/cancel"),
    ],
)
@pytest.mark.parametrize(
    # Two dots as they are would lead to the feed of all runs, which has no end.
    "run_id",
    ["nobody", "%00", "%ff%fe", "%F0%9F%8D%B5", "%2E%2E%2E", "a" * 3000],
)
def test_an_unknown_run_is_404(api: Api, method: str, path: str, run_id: str) -> None:
    answer = api(method, f"/runs/{run_id}{path}")
    assert answer.status_code == 404
    assert "dovetail.db" not in answer.text


def test_a_param_that_the_schema_does_not_name_gives_a_warning_in_the_reply(
    api: Api, name: str
) -> None:
    definition = flow(name, params={"type": "object", "properties": {"who": {"type": "string"}}})
    api.register(definition)
    warning = {
        "code": "unknown_param",
        "message": "'whom' is not in the params schema; did you mean 'who'?",
        "path": "params.whom",
    }
    key = {"Idempotency-Key": f"{name} 1"}
    body = {"params": {"whom": "Ada"}}
    answers = [
        api("POST", f"/workflows/{name}/runs", json=body, headers=key),
        api("POST", f"/workflows/{name}/runs", json=body, headers=key),
        api("POST", "/runs", json={"definition": definition, **body}),
    ]
    assert [answer.status_code for answer in answers] == [202, 200, 202]
    assert [answer.json()["warnings"] for answer in answers] == [[warning]] * 3
    assert answers[0].json() == answers[1].json()
    assert "warnings" not in api.post(f"/workflows/{name}/runs", {"params": {"who": "Ada"}})
