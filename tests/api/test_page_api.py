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
    asked = [waiting[2], "unknown", done, *waiting]  # one of them twice
    items = api.post("/runs/cancel", {"run_ids": asked}, status=200)["items"]
    assert [item["run_id"] for item in items] == asked
    assert [item["ok"] for item in items] == [True, False, False, True, True, True]
    assert [item["status"] for item in items[2:]] == ["COMPLETED", *["CANCELLED"] * 3]
    assert items[5] == items[0]
    assert items[1]["status"] is None
    assert items[1]["error"] == {"type": "not_found", "message": "no run 'unknown'"}
    single = api("POST", f"/runs/{done}/cancel").json()
    assert items[2]["error"] == {"type": "conflict", "message": single["detail"]}
    assert all(item["error"] is None for item in items if item["ok"])

    (tmp_path / "go").touch()
    asked = [done, *waiting, *waiting]
    items = api.post("/runs/retry", {"run_ids": asked}, status=200)["items"]
    assert [item["run_id"] for item in items] == asked
    assert [item["ok"] for item in items] == [False, *[True] * 6]
    assert items[0]["error"]["type"] == "conflict"
    for run_id in waiting:
        wait_for(lambda one=run_id: api.finished(one)["status"] == "COMPLETED", "it completed")
        assert api.get(f"/runs/{run_id}")["epoch"] == 2


def test_the_definition_of_a_run_is_given_out_as_yaml_that_runs_the_same(
    api: Api, name: str
) -> None:
    definition = flow(name, node("a", config={"text": "1e5", "n": 2**63 - 1}))
    run_id = api.post("/runs", {"definition": definition})["run_id"]
    reply = api("GET", f"/runs/{run_id}/definition", headers={"accept": "application/yaml"})
    assert reply.headers["content-type"] == "application/yaml; charset=utf-8"
    assert reply.text.startswith(f"name: {name}\n")
    body = "definition:\n" + "".join(f"  {line}\n" for line in reply.text.splitlines())
    kind = {"content-type": "application/yaml"}
    again = api("POST", "/runs", content=body, headers=kind).json()["run_id"]
    first, second = (api.get(f"/runs/{one}/definition")["definition"] for one in (run_id, again))
    assert first == second
    missing = api("GET", "/runs/unknown/definition", headers={"accept": "application/yaml"})
    assert missing.status_code == 404


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
    params = [
        {"who": f"Ada-{name}"},
        {"deep": [{"n": 4711.25, "whole": 47110000.0}], "on": True},
        {},
    ]
    ids = [api.post(f"/workflows/{name}/runs", {"params": one})["run_id"] for one in params]
    mine = f"workflow={name}"
    assert search(api, f"q={name[2:].upper()}") == ids[::-1], "a part of the name"
    assert search(api, f"q=ADA-{name}") == [ids[0]], "a string"
    for number in ("4711.25", "4711.250", "47110000", "47110000.0", "4.711E7"):
        assert search(api, f"{mine}&q={number}") == [ids[1]], "a number"
    assert search(api, f"{mine}&q=3e99999999999") == []
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
    offset = at.replace("Z", "+00:00")  # a `+` in a query means a space
    assert search(api, f"workflow={name}&created_before={offset}") == [ids[0]]
    assert search(api, f"workflow={name}&created_after=2026-01-01T00:00:00%2B01:00") == ids[::-1]
    for wrong in ("yesterday", "2026-11-18", "2026-11-18T08:00:00", "2026-13-18T08:00:00Z"):
        refused = api("GET", f"/runs?created_after={wrong}")
        assert refused.status_code == 422, refused.text
        assert refused.json()["errors"][0]["path"] == "created_after"


def test_a_list_of_workflows_has_the_last_runs_of_each_if_it_is_asked_for_them(
    api: Api, name: str
) -> None:
    api.register(flow(name, node("a")))
    api.register(flow(f"{name}-idle", node("a")))
    made = []
    for _ in range(3):
        made.append(api.post(f"/workflows/{name}/runs")["run_id"])
        api.finished(made[-1])
    api.register(flow(name, node("a", "fail", config={})))
    made.append(api.post(f"/workflows/{name}/runs")["run_id"])
    api.finished(made[-1])

    def listed(query: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        cursor = ""
        while cursor is not None:
            page = api.get(f"/workflows?limit=100{query}{cursor and '&cursor='}{cursor}")
            assert len(page["items"]) <= 100
            found |= {one["name"]: one for one in page["items"]}
            cursor = page["next_cursor"]
        return found

    def runs() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = listed("&runs=2")[name]["runs"]
        return found

    wait_for(lambda: runs()[0]["status"] == "FAILED", "the list has its end")
    assert [run["run_id"] for run in runs()] == [made[3], made[2]]
    assert [run["version"] for run in runs()] == [2, 1]
    assert [run["status"] for run in runs()] == ["FAILED", "COMPLETED"]
    assert listed("&runs=2")[f"{name}-idle"]["runs"] == []
    assert "runs" not in listed("")[name]
    assert "runs" not in listed("&runs=0")[name]
    for wrong in ("21", "-1", "many"):
        assert api("GET", f"/workflows?runs={wrong}").status_code == 422
    assert api.get("/workflows?limit=1&runs=1")["next_cursor"] is not None


def test_a_definition_is_laid_out_while_it_is_checked(api: Api, name: str) -> None:
    definition = flow(name, node("a"), node("b", "output", "a"))
    found = api.post("/workflows/validate?graph=true", definition, status=200)
    assert [one["id"] for one in found["graph"]["nodes"]] == ["a", "b"]
    assert [(one["from"], one["to"]) for one in found["graph"]["edges"]] == [("a", "b")]
    assert "graph" not in api.post("/workflows/validate", definition, status=200)
    wrong = flow(name, node("b", "output", "a"))
    found = api.post("/workflows/validate?graph=true", wrong, status=200)
    assert not found["valid"]
    assert found["graph"] is None
    assert api("GET", f"/workflows/{name}").status_code == 404


def test_the_schema_for_editors_has_the_configs_of_the_handlers(api: Api) -> None:
    found = api.get("/schema")
    branches = found["$defs"]["Node"]["properties"]["handler"]["anyOf"]
    names = {one.get("const") for one in branches}
    assert {"sleep", "until", None} <= names
    assert "seconds" in found["$defs"]["config.sleep"]["properties"]
    tag = api("GET", "/schema").headers["etag"]
    assert api("GET", "/schema", headers={"if-none-match": tag}).status_code == 304


def test_a_definition_is_given_out_as_yaml_that_registers_as_the_same_content(
    api: Api, name: str
) -> None:
    big = 2**63 - 1
    definition = flow(name, node("a", config={"text": "1e5", "lines": "one\ntwo\n", "n": big}))
    api.register(definition)
    reply = api("GET", f"/workflows/{name}", headers={"accept": "application/yaml"})
    assert reply.headers["content-type"] == "application/yaml; charset=utf-8"
    assert f"name: {name}\n" in reply.text
    assert 'text: "1e5"' in reply.text
    kind = {"content-type": "application/yaml"}
    again = api("POST", "/workflows", content=reply.content, headers=kind)
    assert again.status_code == 200
    assert again.json() == {"name": name, "version": 1, "created": False}
    known = {"accept": "application/yaml", "if-none-match": reply.headers["etag"]}
    assert api("GET", f"/workflows/{name}", headers=known).status_code == 304
    assert api("GET", f"/workflows/{name}").json()["version"] == 1
