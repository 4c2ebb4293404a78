"""Definitions over HTTP: registered, checked, versioned, named, forgotten."""

from __future__ import annotations

import pytest

from .conftest import Api, Server, flow, node, wait_for

YAML = """\
name: {name}
nodes:
  - id: a
    handler: {handler}
"""


def test_changed_content_creates_a_new_version_and_known_content_does_not(
    api: Api, name: str
) -> None:
    first = api("POST", "/workflows", json=flow(name))
    assert (first.status_code, first.json()) == (
        201,
        {"name": name, "version": 1, "created": True},
    )
    again = api("POST", "/workflows", json=flow(name))
    assert (again.status_code, again.json()) == (
        200,
        {"name": name, "version": 1, "created": False},
    )
    other = api("POST", "/workflows", json=flow(name, node("c")))
    assert (other.status_code, other.json()["version"]) == (201, 2)
    assert api.get(first.headers["location"].removeprefix("/api/v1"))["version"] == 1


@pytest.mark.parametrize("kind", ["application/yaml", "text/yaml; charset=utf-8"])
def test_yaml_and_json_give_the_same_definition(api: Api, name: str, kind: str) -> None:
    text = YAML.format(name=name, handler="input")
    made = api("POST", "/workflows", content=text, headers={"content-type": kind})
    assert made.status_code == 201
    as_json = api(
        "POST", "/workflows", json={"name": name, "nodes": [{"id": "a", "handler": "input"}]}
    )
    assert as_json.json() == {"name": name, "version": 1, "created": False}


def test_every_problem_of_a_definition_is_reported_with_its_place(api: Api, name: str) -> None:
    text = YAML.format(name=name, handler="inptu") + "    dependencies: [z]\n    colour: red\n"
    answer = api("POST", "/workflows", content=text, headers={"content-type": "application/yaml"})
    assert answer.status_code == 422
    assert answer.json()["type"].endswith(":invalid_definition")
    found = {(e["code"], e["path"], e["line"]) for e in answer.json()["errors"]}
    assert found == {
        ("unknown_handler", "nodes[0].handler", 4),
        ("missing_dependency", "nodes[0].dependencies[0]", 5),
        ("invalid_field", "nodes[0].colour", 6),
    }


def test_a_validation_returns_layers_or_errors(api: Api, name: str) -> None:
    fine = api.post("/workflows/validate", flow(name), status=200)
    assert fine == {"valid": True, "errors": [], "warnings": [], "layers": [["a"], ["b"]]}
    wrong = api.post("/workflows/validate", flow(name, node("a", "nobody")), status=200)
    assert not wrong["valid"]
    assert [e["code"] for e in wrong["errors"]] == ["unknown_handler"]
    assert api("GET", f"/workflows/{name}").status_code == 404


def test_a_config_that_its_handler_refuses_is_found_before_anything_is_stored(
    api: Api, name: str
) -> None:
    text = f"name: {name}\nnodes:\n  - id: a\n    handler: sleep\n    config: {{secnods: 1}}\n"
    headers = {"content-type": "application/yaml"}
    answer = api("POST", "/workflows/validate", content=text, headers=headers).json()
    found = [(one["code"], one["path"], one["line"], one["column"]) for one in answer["errors"]]
    assert ("invalid_config", "nodes[0].config.secnods", 5, 14) in found
    for path in ("/workflows", "/runs"):
        body = flow(name, node("a", "sleep", config={"secnods": 1}))
        refused = api("POST", path, json=body if path == "/workflows" else {"definition": body})
        assert refused.status_code == 422, refused.text
        assert refused.json()["type"].endswith(":invalid_definition")
        assert "invalid_config" in {one["code"] for one in refused.json()["errors"]}
    assert api("GET", f"/workflows/{name}").status_code == 404


def test_a_malformed_text_is_a_finding_of_the_validation(api: Api) -> None:
    headers = {"content-type": "application/json"}
    answer = api("POST", "/workflows/validate", content="{\n  oops", headers=headers)
    assert answer.status_code == 200
    assert not answer.json()["valid"]
    assert answer.json()["errors"][0]["line"] == 2


def test_a_workflow_may_be_called_validate(api: Api) -> None:
    api.register(flow("validate"))
    assert api.get("/workflows/validate")["name"] == "validate"
    assert api("DELETE", "/workflows/validate").status_code == 204


def test_versions_and_aliases_can_be_registered_and_read(api: Api, name: str) -> None:
    api.register(flow(name))
    api.register(flow(name, node("c")))
    items = api.get(f"/workflows/{name}/versions")["items"]
    assert sorted(item["version"] for item in items) == [1, 2]
    assert all(len(item["sha256"]) == 64 for item in items)
    put = api("PUT", f"/workflows/{name}/aliases/stable", json={"version": 1})
    assert put.status_code == 200
    found = api.get(f"/workflows/{name}?version=stable")
    assert found["version"] == 1
    assert found["aliases"] == {"stable": 1, "latest": 2}
    assert [n["id"] for n in found["definition"]["nodes"]] == ["a", "b"]
    assert api.get(f"/workflows/{name}")["version"] == 2
    assert api.get(f"/workflows/{name}?version=1")["version"] == 1
    assert api("GET", f"/workflows/{name}?version=9").status_code == 404
    assert api("GET", f"/workflows/{name}?version=nobody").status_code == 404


@pytest.mark.parametrize(
    ("alias", "body", "status"),
    [
        ("latest", {"version": 1}, 409),
        ("stable", {"version": 7}, 404),
        ("stable", {"version": 0}, 404),
        ("stable", {"version": -1}, 404),
        ("stable", {"version": "1"}, 422),
        ("stable", {"version": True}, 422),
        ("stable", {}, 422),
        ("latest", {"weights": {"1": 1}}, 409),
        ("stable", {"weights": {"1": 1, "7": 1}}, 404),
        ("stable", {"weights": {}}, 422),
        ("stable", {"weights": {"1": 0}}, 422),
        ("stable", {"weights": {"1": -1}}, 422),
        ("stable", {"weights": {"1": "90"}}, 422),
        ("stable", {"weights": {"stable": 1}}, 422),
        ("stable", {"weights": [1]}, 422),
        ("stable", {"weights": {"1": 1}, "version": 1}, 422),
        ("12", {"version": 1}, 422),
        ("a%20b", {"version": 1}, 422),
    ],
)
def test_an_invalid_alias_is_refused(
    api: Api, name: str, alias: str, body: dict[str, object], status: int
) -> None:
    api.register(flow(name))
    path = f"/workflows/{name}/aliases/{alias}"
    assert api("PUT", path, json=body).status_code == status
    if status == 422:  # also for a caller who has seen another state of the workflow
        stale = api("PUT", path, json=body, headers={"if-match": '"old"'})
        assert stale.status_code == 422


@pytest.mark.parametrize(
    ("alias", "rule"),
    [
        ("1", "digits alone are a version's number"),
        ("a" * 129, "it has 129 characters, and 128 are allowed"),
        ("a%20b", "use letters, digits, '.', '_' and '-'"),
        (".a", "a letter or digit first"),
    ],
)
def test_the_broken_alias_rule_is_named(api: Api, name: str, alias: str, rule: str) -> None:
    api.register(flow(name))
    answer = api("PUT", f"/workflows/{name}/aliases/{alias}", json={"version": 1})
    assert answer.status_code == 422
    assert rule in answer.json()["detail"]


def test_the_list_of_workflows_has_pages(api: Api, name: str) -> None:
    names = [api.register(flow(f"{name}-{i}")) for i in range(3)]
    seen, cursor = [], ""
    while cursor is not None:
        page = api.get(f"/workflows?limit=1{cursor and '&cursor='}{cursor}")
        assert len(page["items"]) <= 1
        seen += [item["name"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert [one for one in seen if one in names] == names
    assert len(seen) == len(set(seen))


def test_deleting_is_refused_while_a_run_is_unfinished_and_version_numbers_continue(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    api.register(flow(name, node("a", "until", config={"file": str(file)})))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    wait_for((server.folder / f"{name}.started").exists, "the node started")
    assert api("DELETE", f"/workflows/{name}").status_code == 409
    file.touch()
    api.finished(run_id)
    assert api("DELETE", f"/workflows/{name}").status_code == 204
    assert api("GET", f"/workflows/{name}").status_code == 404
    assert api("DELETE", f"/workflows/{name}").status_code == 404
    assert api("POST", f"/workflows/{name}/runs").status_code == 404
    assert api.get(f"/runs/{run_id}")["status"] == "COMPLETED"
    assert api("POST", "/workflows", json=flow(name)).json()["version"] == 2


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-0.0"])
def test_a_weight_that_is_no_number_is_refused(api: Api, name: str, number: str) -> None:
    api.register(flow(name))
    body = f'{{"weights": {{"1": {number}}}}}'
    headers = {"content-type": "application/json"}
    answer = api("PUT", f"/workflows/{name}/aliases/prod", content=body, headers=headers)
    assert answer.status_code in (400, 422)


def test_an_alias_with_weights_divides_runs_between_versions(api: Api, name: str) -> None:
    api.register(flow(name))
    api.register(flow(name, node("c")))
    weights = {"1": 60, "2": 40.5}
    put = api("PUT", f"/workflows/{name}/aliases/prod", json={"weights": {"2": 40.5, "1": 60.0}})
    assert (put.status_code, put.json()) == (
        200,
        {"name": name, "alias": "prod", "weights": weights},
    )
    assert api.get(f"/workflows/{name}")["aliases"] == {"prod": weights, "latest": 2}
    assert api.get(f"/workflows/{name}?version=prod")["version"] == 1
    batch = api.post(f"/workflows/{name}/batches", {"items": [{}] * 60, "version": "prod"})
    runs = api.get(f"/runs?batch={batch['batch_id']}&limit=100")["items"]
    assert {run["version"] for run in runs} == {1, 2}
    headers = {"Idempotency-Key": f"{name}-7"}
    body = {"version": "prod"}
    first = api("POST", f"/workflows/{name}/runs", json=body, headers=headers).json()
    other = 3 - first["version"]
    api("PUT", f"/workflows/{name}/aliases/prod", json={"weights": {str(other): 1}})
    again = api("POST", f"/workflows/{name}/runs", json=body, headers=headers)
    assert (again.status_code, again.json()["run_id"]) == (200, first["run_id"])
    assert api.post(f"/workflows/{name}/runs", body)["version"] == other


def test_a_version_that_nothing_uses_can_be_deleted(api: Api, name: str) -> None:
    api.register(flow(name))
    api.register(flow(name, node("c")))
    api("PUT", f"/workflows/{name}/aliases/prod", json={"version": 1})
    path = f"/workflows/{name}/versions/1"
    refused = api("DELETE", path)
    assert refused.status_code == 409
    assert "has the alias 'prod'" in refused.json()["detail"]
    assert api("DELETE", f"/workflows/{name}/versions/2").status_code == 409
    assert api("DELETE", f"/workflows/{name}/versions/9").status_code == 404
    assert api("DELETE", f"/workflows/{name}/versions/none").status_code == 404
    api("DELETE", f"/workflows/{name}/aliases/prod")
    run = api.finished(api.post(f"/workflows/{name}/runs", {"version": 1})["run_id"])
    assert api("DELETE", path, headers={"If-Match": '"another"'}).status_code == 412
    tag = api("GET", f"/workflows/{name}").headers["etag"]
    answer = api("DELETE", path, headers={"If-Match": tag})
    assert (answer.status_code, answer.content) == (204, b"")
    assert api("DELETE", path).status_code == 404
    assert api("POST", f"/workflows/{name}/runs", json={"version": 1}).status_code == 404
    assert api.get(f"/runs/{run['run_id']}")["version"] == 1


def test_the_history_of_a_workflow_says_what_was_done_to_it(api: Api, name: str) -> None:
    api.register(flow(name))
    api("PUT", f"/workflows/{name}/aliases/prod", json={"weights": {"1": 1}})
    api("DELETE", f"/workflows/{name}")
    page = api.get(f"/workflows/{name}/history?limit=2")
    assert [one["action"] for one in page["items"]] == ["delete", "alias"]
    last = api.get(f"/workflows/{name}/history?cursor={page['next_cursor']}")
    assert [one["action"] for one in last["items"]] == ["register"]
    assert last["next_cursor"] is None
    assert set(last["items"][0]) == {"time", "actor", "action", "details"}
    assert api("GET", f"/workflows/{name}-none/history").status_code == 404
    assert api("GET", f"/workflows/{name}/history?cursor=x").status_code == 422


def test_the_history_of_a_limit_says_how_it_was_changed(api: Api, name: str) -> None:
    api("PUT", f"/rate-limits/{name}/x", json={"rate_per_second": 5})
    (one,) = api.get(f"/rate-limit-history/{name}/x")["items"]
    assert (one["action"], one["details"]) == (
        "limit",
        {"rate_per_second": 5.0, "burst": 1, "from": None},
    )
    assert api.get(f"/rate-limit-history/{name}-none")["items"] == []


def test_an_alias_can_be_deleted(api: Api, name: str) -> None:
    api.register(flow(name))
    api("PUT", f"/workflows/{name}/aliases/prod", json={"version": 1})
    tag = api("GET", f"/workflows/{name}").headers["etag"]
    path = f"/workflows/{name}/aliases/prod"
    assert api("DELETE", path, headers={"If-Match": '"another"'}).status_code == 412
    answer = api("DELETE", path, headers={"If-Match": tag})
    assert (answer.status_code, answer.content) == (204, b"")
    assert api.get(f"/workflows/{name}")["aliases"] == {"latest": 1}
    assert api("POST", f"/workflows/{name}/runs", json={"version": "prod"}).status_code == 404
    gone = api("DELETE", path)
    assert (gone.status_code, gone.json()["detail"]) == (
        404,
        f"workflow '{name}' has no alias 'prod'; aliases: latest",
    )
    assert api("DELETE", f"/workflows/{name}/aliases/latest").status_code == 409
    assert api("DELETE", f"/workflows/{name}-none/aliases/prod").status_code == 404
