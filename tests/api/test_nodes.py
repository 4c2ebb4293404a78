"""One node over HTTP: its config, its inputs and its attempts."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Api, Server, flow, node

NODE = {
    *("id", "handler", "status", "attempt", "epoch", "dependencies", "reason", "cause", "error"),
    *("started_at", "finished_at", "duration", "worker", "output", "items"),
}
DETAIL = {"template", "config", "config_error", "inputs", "why", "attempts"}
ATTEMPT = {
    *("epoch", "attempt", "status", "worker", "started_at", "finished_at", "duration", "error")
}


def run_of(api: Api, name: str, *nodes: dict[str, Any], **params: Any) -> str:
    api.register(flow(name, *nodes))
    run_id = api.post(f"/workflows/{name}/runs", {"params": params})["run_id"]
    api.finished(run_id)
    return str(run_id)


def test_a_node_has_its_fields_of_the_run_and_what_led_to_them(api: Api, name: str) -> None:
    b = node("b", "output", "a", config={"got": "{{ a.who }}", "n": 1})
    run_id = run_of(api, name, node("a", "input", config={}), b, who="Ada")
    detail = api.get(f"/runs/{run_id}/nodes/b")
    assert detail.keys() == NODE | DETAIL
    listed = next(one for one in api.get(f"/runs/{run_id}")["nodes"] if one["id"] == "b")
    assert {field: detail[field] for field in NODE} == listed
    assert detail["template"] == {"got": "{{ a.who }}", "n": 1}
    assert detail["config"] == {"got": "Ada", "n": 1}
    assert (detail["config_error"], detail["why"]) == (None, None)
    assert detail["inputs"] == {"a": {"who": "Ada"}}
    (attempt,) = detail["attempts"]
    assert attempt.keys() == ATTEMPT
    assert (attempt["epoch"], attempt["attempt"], attempt["status"]) == (1, 1, "COMPLETED")
    assert attempt["started_at"] == detail["started_at"]
    assert attempt["finished_at"] == detail["finished_at"]
    assert attempt["worker"] == detail["worker"] is not None
    assert attempt["error"] is None


def test_every_attempt_of_every_epoch_is_listed_with_its_traceback(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    run_id = run_of(api, name, node("a", "needs", config={"file": str(file)}))
    file.touch()
    api.post(f"/runs/{run_id}/retry")
    api.finished(run_id)
    first, second = api.get(f"/runs/{run_id}/nodes/a")["attempts"]
    assert (first["epoch"], first["status"]) == (1, "FAILED")
    assert (second["epoch"], second["status"]) == (2, "COMPLETED")
    error = first["error"]
    assert error.keys() == {"type", "message", "where", "traceback"}
    assert error["message"] == f"there is no {file}"
    assert error["where"].startswith("mine.py:")
    assert error["where"].endswith(" in needs")
    assert error["traceback"].startswith("Traceback (most recent call last):\n")
    assert "PermanentError" in error["traceback"].splitlines()[-1]


def test_large_inputs_and_outputs_are_references(api: Api, name: str) -> None:
    large = node("a", "filled", config={"bytes": 100_000})
    run_id = run_of(api, name, large, node("b", "output", "a", config={"n": 1}))
    href = f"/api/v1/runs/{run_id}/nodes/a/output"
    reference = {"$output": {"size": 100_000, "href": href}}
    assert api.get(f"/runs/{run_id}/nodes/b")["inputs"] == {"a": reference}
    assert api.get(f"/runs/{run_id}/nodes/a")["output"] == reference


def test_a_node_that_waits_says_why(api: Api, server: Server, name: str) -> None:
    file = server.folder / name
    api.register(
        flow(name, node("a", "until", config={"file": str(file)}), node("b", "output", "a"))
    )
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    detail = api.get(f"/runs/{run_id}/nodes/b")
    file.touch()
    assert (detail["status"], detail["config"], detail["attempts"]) == ("PENDING", None, [])
    assert detail["why"]["code"] == "waiting_for_parents"
    assert detail["why"]["why"] == "waits for parent a"
    api.finished(run_id)


def test_a_node_that_is_known_already_is_not_sent_again(api: Api, name: str) -> None:
    run_id = run_of(api, name)
    first = api("GET", f"/runs/{run_id}/nodes/a")
    known = {"if-none-match": first.headers["etag"]}
    assert api("GET", f"/runs/{run_id}/nodes/a", headers=known).status_code == 304
    assert api("GET", f"/runs/{run_id}/nodes/b", headers=known).status_code == 200


def test_an_unknown_run_or_node_is_not_found(api: Api, name: str) -> None:
    run_id = run_of(api, name, node("fetch"))
    answer = api("GET", f"/runs/{run_id}/nodes/fetsh")
    assert answer.status_code == 404
    assert "did you mean 'fetch'?" in answer.json()["detail"]
    assert api("GET", "/runs/0000/nodes/fetch").status_code == 404
    assert api("GET", f"/runs/{run_id}/nodes/a%00b").status_code == 404


# ── the items of a mapped node ───────────────────────────────────────────────────────────


def mapped(items: object, **config: object) -> dict[str, object]:
    return node("each", "input", for_each=items, config=config)


ONLY_EMBEDDED = pytest.mark.parametrize("server", ["embedded"], indirect=True)


@ONLY_EMBEDDED
def test_the_items_of_a_node_are_listed_in_pages(api: Api, name: str) -> None:
    last = node("end", "output", "each", config={"all": "{{ each | map(attribute='x') }}"})
    run_id = run_of(api, name, mapped(["a", "b", "c"], x="{{ item }}{{ index }}"), last)
    run = api.get(f"/runs/{run_id}")
    assert run["result"] == {"all": ["a0", "b1", "c2"]}
    each, end = run["nodes"]
    counts = {"pending": 0, "running": 0, "completed": 3, "failed": 0, "cancelled": 0}
    assert each["items"] == {"total": 3, **counts}
    assert end["items"] is None
    page = api.get(f"/runs/{run_id}/nodes/each/items?limit=2")
    assert page["counts"] == each["items"]
    detail = api.get(f"/runs/{run_id}/nodes/each")
    assert (detail["template"], detail["config"]) == ({"x": "{{ item }}{{ index }}"}, None)
    assert "rendered for each item" in detail["config_error"]
    first = page["items"][0]
    assert first.keys() == {
        *("index", "status", "attempt", "worker", "started_at", "finished_at"),
        *("reason", "error", "output"),
    }
    assert (first["index"], first["status"], first["output"]["x"]) == (0, "COMPLETED", "a0")
    rest = api.get(f"/runs/{run_id}/nodes/each/items?cursor={page['next_cursor']}")
    assert [item["index"] for item in rest["items"]] == [2]
    assert rest["next_cursor"] is None
    assert api.get(f"/runs/{run_id}/nodes/each/items?status=FAILED")["items"] == []
    assert api.get(f"/runs/{run_id}/nodes/each[1]/output")["x"] == "b1"
    events = [event for event in api.get(f"/runs/{run_id}/events") if "item" in event]
    assert {(event["node"], event["item"]) for event in events} == {("each", i) for i in range(3)}


@ONLY_EMBEDDED
def test_items_that_are_not_there_are_404_and_wrong_queries_422(api: Api, name: str) -> None:
    run_id = run_of(api, name, mapped([1, 2], x="{{ item }}"), node("b", "input"))
    for path in ("nodes/b/items", "nodes/x/items", "nodes/each[2]/output", "nodes/each[0]/items"):
        assert api("GET", f"/runs/{run_id}/{path}").status_code == 404, path
    for path in ("nodes/each[1]", "nodes/each[1]/items", "logs?node=each[1]"):
        said = api("GET", f"/runs/{run_id}/{path}").json()["detail"]
        assert f"/runs/{run_id}/nodes/each/items" in said, path
        assert "`node=each` and `item=1`" in said
    for path in ("nodes/each[2]", "nodes/each[2]/output"):
        said = api("GET", f"/runs/{run_id}/{path}").json()["detail"]
        assert said.endswith("no item 2 of node 'each': it has 2 items, counted from 0"), path
    said = api("GET", f"/runs/{run_id}/nodes/b[0]").json()["detail"]
    assert "node 'b' has no for_each" in said
    for query in ("status=BAD", "cursor=x", "limit=0", "cursor=-1"):
        answer = api("GET", f"/runs/{run_id}/nodes/each/items?{query}")
        assert answer.status_code == 422, query
        (problem,) = answer.json()["errors"]
        assert problem["path"] == query.partition("=")[0]
    assert len(api.get(f"/runs/{run_id}/nodes/each/items?status=")["items"]) == 2
