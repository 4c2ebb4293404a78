"""Batches over HTTP: all runs or none, counted, paged, retried; and rate limits and workers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from .conftest import Api, Server, flow, node, wait_for

PARAMS = {"type": "object", "properties": {"n": {"type": "integer"}}}


def finished(api: Api, batch_id: str) -> dict[str, Any]:
    def look() -> Any:
        batch = api.get(f"/batches/{batch_id}")
        return batch if batch["finished_at"] else None

    found: dict[str, Any] = wait_for(look, "the batch finished")
    return found


def test_a_batch_is_one_run_per_item(api: Api, name: str) -> None:
    api.register(flow(name, params=PARAMS))
    answer = api("POST", f"/workflows/{name}/batches", json={"items": [{"n": i} for i in range(5)]})
    assert answer.status_code == 202
    made = answer.json()
    assert made["count"] == 5
    assert answer.headers["location"] == f"/api/v1/batches/{made['batch_id']}"
    batch = finished(api, made["batch_id"])
    assert (batch["workflow"], batch["counts"]) == (name, {"COMPLETED": 5})
    assert [run["index"] for run in batch["runs"]] == list(range(5))
    params = [api.get(f"/runs/{run['run_id']}")["params"] for run in batch["runs"]]
    assert params == [{"n": i} for i in range(5)]
    assert len(api.get(f"/runs?batch={made['batch_id']}")["items"]) == 5


def test_items_with_params_that_the_schema_does_not_name_give_warnings(api: Api, name: str) -> None:
    api.register(flow(name, params=PARAMS))
    body = {"items": [{"n": 1}, {"n": 2, "nn": 3}]}
    made = api.post(f"/workflows/{name}/batches", body)
    message = "'nn' is not in the params schema; did you mean 'n'?"
    assert made["warnings"] == [
        {"code": "unknown_param", "message": message, "path": "items[1].nn"}
    ]
    ad_hoc = api.post("/batches", {"definition": flow(name, params=PARAMS), **body})
    assert ad_hoc["warnings"] == made["warnings"]
    assert "warnings" not in api.post(f"/workflows/{name}/batches", {"items": [{"n": 1}]})


def test_batches_are_listed_newest_first_without_runs_and_in_pages(api: Api, name: str) -> None:
    api.register(flow(name))
    made = [api.post(f"/workflows/{name}/batches", {"items": [{}] * n})["batch_id"] for n in (1, 2)]
    whole = {batch_id: finished(api, batch_id) for batch_id in made}
    page = api.get("/batches?limit=1")
    assert page["items"] == [without_runs(whole[made[1]])]
    page = api.get(f"/batches?limit=1&cursor={page['next_cursor']}")
    assert page["items"] == [without_runs(whole[made[0]])]
    assert api.get("/batches")["items"][:2] == [without_runs(whole[made[at]]) for at in (1, 0)]
    assert api("GET", "/batches?cursor=x").status_code == 422


def without_runs(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: batch[key] for key in batch if key not in ("runs", "next_cursor")}


def test_a_batch_is_found_by_the_prefix_of_its_id(api: Api, name: str) -> None:
    api.register(flow(name))
    batch_id = api.post(f"/workflows/{name}/batches", {"items": [{}]})["batch_id"]
    assert api.get(f"/batch-ids/{batch_id[:12]}") == {"batch_id": batch_id}
    assert api.get(f"/batch-ids/{batch_id}") == {"batch_id": batch_id}
    for beginning in (batch_id[:3], "nobody", f"{batch_id}0"):
        assert api("GET", f"/batch-ids/{beginning}").status_code == 404


def test_the_runs_of_a_batch_are_listed_in_pages(api: Api, name: str) -> None:
    api.register(flow(name))
    made = api.post(f"/workflows/{name}/batches", {"items": [{}] * 5})
    seen, cursor = [], ""
    while cursor is not None:
        page = api.get(f"/batches/{made['batch_id']}?limit=2{cursor and '&cursor='}{cursor}")
        seen += [run["index"] for run in page["runs"]]
        cursor = page["next_cursor"]
    assert seen == list(range(5))
    assert api("GET", f"/batches/{made['batch_id']}?cursor=x").status_code == 422


@pytest.mark.parametrize(
    ("items", "path"),
    [
        ([{"n": 1}, {"n": "x"}], "items[1].n"),
        ([{"n": 1}, 7], "items[1]"),
        ([{"n": 1}, None], "items[1]"),
        ([], "items"),
        ({"n": 1}, "items"),
        (None, "items"),
        ([{}] * 10_001, "items"),
    ],
)
def test_one_bad_item_creates_no_runs(api: Api, name: str, items: Any, path: str) -> None:
    api.register(flow(name, params=PARAMS))
    answer = api("POST", f"/workflows/{name}/batches", json={"items": items})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["path"] == path
    assert api.get(f"/runs?workflow={name}")["items"] == []


def test_one_idempotency_key_creates_one_batch(api: Api, name: str) -> None:
    api.register(flow(name))
    headers = {"idempotency-key": "k"}
    path, items = f"/workflows/{name}/batches", {"items": [{}, {"n": 1}]}
    first = api.post(path, items, headers=headers)
    assert api.post(path, items, status=200, headers=headers) == first
    other = api("POST", path, json={"items": [{}]}, headers=headers)
    assert other.status_code == 409
    assert len(api.get(f"/runs?workflow={name}")["items"]) == 2


def test_a_retry_reaches_the_runs_that_failed(api: Api, server: Server, name: str) -> None:
    file = server.folder / name
    api.register(
        flow(
            name,
            node("a", "needs", condition="{{ params.n > 0 }}", config={"file": str(file)}),
        )
    )
    made = api.post(f"/workflows/{name}/batches", {"items": [{"n": 0}, {"n": 1}]})
    assert finished(api, made["batch_id"])["counts"] == {"COMPLETED": 1, "FAILED": 1}
    file.touch()
    answer = api("POST", f"/batches/{made['batch_id']}/retry")
    assert answer.status_code == 202
    assert finished(api, made["batch_id"])["counts"] == {"COMPLETED": 2}


def test_a_batch_can_use_an_unregistered_definition(api: Api, name: str) -> None:
    body = {"definition": flow(name), "items": [{"n": 1}, {"n": 2}]}
    key = {"idempotency-key": name}
    made = api.post("/batches", body, headers=key)
    assert made["count"] == 2
    assert api.post("/batches", body, status=200, headers=key) == made
    batch = finished(api, made["batch_id"])
    assert (batch["workflow"], batch["counts"]) == (name, {"COMPLETED": 2})
    assert api("GET", f"/workflows/{name}").status_code == 404
    for wrong, path in (
        ({"items": [{}]}, "definition"),
        ({"definition": flow(name)}, "items"),
        ({"definition": {**flow(name), "nodes": []}, "items": [{}]}, "nodes"),
        ({"definition": flow(name), "items": [None]}, "items[0]"),
    ):
        answer = api("POST", "/batches", json=wrong)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["path"] == path


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/retry")])
def test_an_unknown_batch_is_404(api: Api, method: str, path: str) -> None:
    assert api(method, f"/batches/nobody{path}").status_code == 404
    assert api("GET", "/runs?batch=nobody").status_code == 404


def test_a_rate_limit_is_read_and_set(api: Api, name: str) -> None:
    assert api.get(f"/rate-limits/{name}") == {"tag": name, "rate_per_second": 10.0, "burst": 1}
    put = api("PUT", f"/rate-limits/{name}", json={"rate_per_second": 2.5, "burst": 3})
    assert put.status_code == 200
    limit = {"tag": name, "rate_per_second": 2.5, "burst": 3}
    assert put.json() == limit
    assert api.get(f"/rate-limits/{name}") == limit
    assert limit in api.get("/rate-limits")["items"]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"rate_per_second": 0, "burst": 1}, "rate_per_second"),
        ({"rate_per_second": -1, "burst": 1}, "rate_per_second"),
        ({"rate_per_second": "1", "burst": 1}, "rate_per_second"),
        ({"rate_per_second": True, "burst": 1}, "rate_per_second"),
        ({"rate_per_second": 1e-320, "burst": 1}, "rate_per_second"),
        ({"burst": 1}, "rate_per_second"),
        ({"rate_per_second": 1, "burst": 0}, "burst"),
        ({"rate_per_second": 1, "burst": 1.5}, "burst"),
        ({"rate_per_second": 1, "burst": 2**64 - 1}, "burst"),
    ],
)
def test_an_invalid_rate_limit_is_422(api: Api, name: str, body: Any, path: str) -> None:
    answer = api("PUT", f"/rate-limits/{name}", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["path"] == path


def test_a_tag_may_have_slashes(api: Api, name: str) -> None:
    set_ = api("PUT", f"/rate-limits/{name}%2Fb%2F", json={"rate_per_second": 3})
    assert (set_.status_code, set_.json()["tag"]) == (200, f"{name}/b/")
    for path in (f"{name}%2Fb%2F", f"{name}/b/"):
        assert api.get(f"/rate-limits/{path}")["rate_per_second"] == 3
    assert api("POST", f"/rate-limits/{name}/b/").headers["allow"] == "GET, HEAD, PUT"
    assert api("GET", "/rate-limits/").status_code == 404


def test_an_embedded_server_is_its_own_worker(api: Api, server: Server) -> None:
    (worker,) = api.get("/workers")["items"]
    assert worker["pid"] == server.process.pid != os.getpid()
    assert worker["alive"]
    assert {"input", "output", "until"} <= set(worker["handlers"])
    details = {one["name"]: one for one in worker["handler_details"]}
    assert list(details) == worker["handlers"]
    schema = details["call_external_service"].pop("config_schema")
    assert schema["required"] == ["url"]
    assert details["input"]["config_schema"] is None
    assert details["call_external_service"] == {
        "name": "call_external_service",
        "max_retries": 3,
        "secrets": ["body", "headers", "json", "params"],
        "version": 1,
    }
    assert api.get("/dead-letters") == {"items": []}
    assert api.get("//health/workers") == {"alive": 1, "dead": 0}


def test_queues_show_what_waits_what_is_parked_and_what_runs(api: Api, name: str) -> None:
    tag = f"tag-{name}"
    assert api("PUT", f"/rate-limits/{tag}", json={"rate_per_second": 0.001}).status_code == 200
    limited = [{"id": n, "handler": "input", "resource_tag": tag} for n in ("one", "two", "three")]
    waits = {"id": "wait", "handler": "until", "config": {"file": f"{name}.go"}}
    definition = {"name": name, "nodes": [*limited, waits]}
    run_id = api.post("/runs", {"definition": definition})["run_id"]

    wanted = run_id, "wait"

    def seen() -> tuple[dict[str, Any], dict[str, Any]] | None:
        found = api.get("/queues")
        running = [one for one in found["running"] if (one["run_id"], one["node"]) == wanted]
        parked = [one for one in found["parked"] if one["tag"] == tag]
        whole = running and parked and parked[0]["nodes"] == 2
        return (running[0], parked[0]) if whole else None

    running, parked = wait_for(seen, "one node runs, two are parked")
    assert (running["workflow"], running["node"], running["handler"]) == (name, "wait", "until")
    assert (running["attempt"], parked["rate_per_second"], parked["burst"]) == (1, 0.001, 1)
    queue = {one["handler"]: one for one in api.get("/queues")["items"]}
    assert queue["until"]["waiting"] == 0
    assert queue["until"]["workers"] == 1
    api.post(f"/runs/{run_id}/cancel")


def test_queues_look_at_every_run_that_goes_on(api: Api, name: str) -> None:
    tag = f"tag-{name}"
    assert api("PUT", f"/rate-limits/{tag}", json={"rate_per_second": 0.001}).status_code == 200
    api.register({"name": name, "nodes": [{"id": "a", "handler": "input", "resource_tag": tag}]})
    batch = api.post(f"/workflows/{name}/batches", {"items": [{}] * 80})["batch_id"]

    def seen() -> dict[str, Any] | None:
        found: dict[str, Any] = api.get("/queues")
        parked = {one["tag"]: one["nodes"] for one in found["parked"]}
        return found if parked.get(tag) == 79 else None

    found = wait_for(seen, "one node has run, and all others are parked")
    assert found["complete"]
    assert found["looked_at"] >= 79
    runs = api.get(f"/batches/{batch}?limit=100")["runs"]
    api.post("/runs/cancel", {"run_ids": [one["run_id"] for one in runs]}, status=200)
