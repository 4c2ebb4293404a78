"""The calls that the page needs, on every set-up."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Api, flow, node, wait_for


def test_two_versions_are_compared_by_their_numbers_or_aliases(api: Api, name: str) -> None:
    api.register(flow(name, node("a"), node("b", "output", "a")))
    api.register(flow(name, node("a", config={"value": 2}), node("c"), on_failure="continue"))
    api("PUT", f"/workflows/{name}/aliases/old", json={"version": 1})
    expected = {
        "added": ["c"],
        "removed": ["b"],
        "changed": [
            {"id": "a", "fields": {"config": {"from": {"value": "a"}, "to": {"value": 2}}}}
        ],
        "workflow": {"on_failure": {"from": "fail_fast", "to": "continue"}},
    }
    assert api.get(f"/workflows/{name}/diff?from=1&to=2") == expected
    assert api.get(f"/workflows/{name}/diff?from=old") == expected
    assert api.get(f"/workflows/{name}/diff?from=2&to=latest")["changed"] == []
    assert api("GET", f"/workflows/{name}/diff?from=1&to=7").status_code == 404
    assert api("GET", f"/workflows/{name}-not/diff?from=1&to=1").status_code == 404


def test_a_graph_is_laid_out_for_a_version_and_for_a_run(api: Api, name: str) -> None:
    api.register(flow(name, node("a"), node("b", "output", "a"), node("c", "output", "a", "b")))
    found = api.get(f"/workflows/{name}/versions/1/graph")
    assert [(one["id"], one["layer"]) for one in found["nodes"]] == [("a", 0), ("b", 1), ("c", 2)]
    assert [(e["from"], e["to"]) for e in found["edges"]] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert all(one["x"] < found["width"] and one["y"] < found["height"] for one in found["nodes"])
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    assert api.get(f"/runs/{run_id}/graph") == found
    assert api.get(f"/workflows/{name}/versions/latest/graph") == found
    assert api("GET", f"/workflows/{name}/versions/9/graph").status_code == 404
    assert api("GET", "/runs/unknown/graph").status_code == 404


def test_many_runs_are_cancelled_and_retried_with_the_outcome_of_each(
    api: Api, name: str, tmp_path: Any
) -> None:
    api.register(flow(name, node("a", "until", config={"file": str(tmp_path / "go")})))
    api.register(flow(f"{name}-done", node("a")))
    waiting = [api.post(f"/workflows/{name}/runs")["run_id"] for _ in range(3)]
    done = api.post(f"/workflows/{name}-done/runs")["run_id"]
    api.finished(done)
    asked = [waiting[2], "unknown", done, *waiting]
    items = api.post("/runs/cancel", {"run_ids": asked}, status=200)["items"]
    assert [item["run_id"] for item in items] == [waiting[2], "unknown", done, *waiting[:2]]
    assert [item["ok"] for item in items] == [True, False, False, True, True]
    assert [item["status"] for item in items[2:]] == ["COMPLETED", "CANCELLED", "CANCELLED"]
    assert items[1]["status"] is None
    assert items[1]["error"] == {"type": "not_found", "message": "no run 'unknown'"}
    single = api("POST", f"/runs/{done}/cancel").json()
    assert items[2]["error"] == {"type": "conflict", "message": single["detail"]}
    assert all(item["error"] is None for item in items if item["ok"])

    (tmp_path / "go").touch()
    items = api.post("/runs/retry", {"run_ids": [done, *waiting]}, status=200)["items"]
    assert [item["ok"] for item in items] == [False, True, True, True]
    assert items[0]["error"]["type"] == "conflict"
    for run_id in waiting:
        wait_for(lambda one=run_id: api.finished(one)["status"] == "COMPLETED", "it completed")


@pytest.mark.parametrize("call", ["retry", "cancel"])
def test_more_runs_than_a_thousand_and_what_is_no_id_are_refused(api: Api, call: str) -> None:
    assert api.post(f"/runs/{call}", {"run_ids": []}, status=200) == {"items": []}
    many = api.post(f"/runs/{call}", {"run_ids": ["x"] * 1001}, status=422)
    assert many["errors"][0]["path"] == "run_ids"
    for body in ({}, {"run_ids": "x"}, {"run_ids": [1]}, {"run_ids": None}):
        assert api("POST", f"/runs/{call}", json=body).status_code == 422


def search(api: Api, words: str) -> list[str]:
    """The ids that all pages together have."""
    found: list[str] = []
    cursor = ""
    while cursor is not None:
        page = api.get(f"/runs?{words}" + (f"&cursor={cursor}" if cursor else ""))
        found += [run["run_id"] for run in page["items"]]
        cursor = page["next_cursor"]
    return found


def test_runs_are_found_by_id_name_and_values_of_params(api: Api, name: str) -> None:
    api.register(flow(name))
    params = [{"who": f"Ada-{name}"}, {"deep": [{"n": 4711.25}], "on": True}, {}]
    ids = [api.post(f"/workflows/{name}/runs", {"params": one})["run_id"] for one in params]
    mine = f"workflow={name}"
    assert search(api, f"q={name[2:].upper()}") == ids[::-1], "a part of the name"
    assert search(api, f"q=ADA-{name}") == [ids[0]], "a string"
    assert search(api, f"{mine}&q=4711.25") == [ids[1]], "a number"
    assert search(api, f"q={ids[2][:12].upper()}") == [ids[2]], "the beginning of an id"
    assert search(api, f"{mine}&q=true") == []
    assert search(api, f"{mine}&q={name}&limit=1") == ids[::-1], "page by page"
    assert search(api, f"{mine}&q={name}&status=FAILED") == []


def test_runs_are_found_by_the_time_of_their_creation(api: Api, name: str) -> None:
    api.register(flow(name))
    ids = [api.post(f"/workflows/{name}/runs")["run_id"] for _ in range(3)]
    at = api.get(f"/runs/{ids[1]}")["created_at"]
    assert search(api, f"workflow={name}&created_after={at}") == [ids[2]]
    assert search(api, f"workflow={name}&created_before={at}") == [ids[0]]
    assert search(api, f"workflow={name}&created_after=2026-01-01T00:00:00%2B01:00") == ids[::-1]
    for wrong in ("yesterday", "2026-11-18", "2026-11-18T08:00:00", "2026-13-18T08:00:00Z"):
        refused = api("GET", f"/runs?created_after={wrong}")
        assert refused.status_code == 422, refused.text
        assert refused.json()["errors"][0]["path"] == "created_after"
