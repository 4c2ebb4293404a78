"""An `Idempotency-Key` is for a request: the answer stays, whatever becomes of the workflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Api, flow, node

KEY = {"idempotency-key": "k"}
STRICT = {"type": "object", "required": ["n"]}

Change = Callable[[Api, str], object]


def _changed(api: Api, name: str) -> None:
    api.register(flow(name, description="changed"))


def _stricter(api: Api, name: str) -> None:
    api.register(flow(name, params=STRICT))


def _deleted(api: Api, name: str) -> None:
    assert api("DELETE", f"/workflows/{name}").status_code == 204


def _deleted_and_registered_again(api: Api, name: str) -> None:
    _deleted(api, name)
    api.register(flow(name))


CHANGES = [_changed, _stricter, _deleted, _deleted_and_registered_again]


def finished(api: Api, name: str) -> None:
    for run in api.get(f"/runs?workflow={name}")["items"]:
        api.finished(run["run_id"])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("call", "body", "other"),
    [
        ("runs", {"params": {}}, {"params": {"x": 1}}),
        ("batches", {"items": [{}, {}]}, {"items": [{}]}),
    ],
)
def test_a_repeated_key_returns_the_first_reply_after_the_workflow_changed(
    api: Api, name: str, change: Change, call: str, body: Any, other: Any
) -> None:
    api.register(flow(name))
    path = f"/workflows/{name}/{call}"
    first = api.post(path, body, headers=KEY)
    finished(api, name)
    change(api, name)
    assert api.post(path, body, status=200, headers=KEY) == first
    assert api("POST", path, json=other, headers=KEY).status_code == 409
    assert len(api.get(f"/runs?workflow={name}")["items"]) == first.get("count", 1)


@pytest.mark.parametrize("call", ["runs", "batches"])
def test_a_repeated_key_matches_after_the_alias_moved(api: Api, name: str, call: str) -> None:
    api.register(flow(name))
    api("PUT", f"/workflows/{name}/aliases/prod", json={"version": 1})
    path, body = f"/workflows/{name}/{call}", {"version": "prod"}
    body |= {"params": {}} if call == "runs" else {"items": [{}]}
    first = api.post(path, body, headers=KEY)
    api.register(flow(name, description="changed"))
    api("PUT", f"/workflows/{name}/aliases/prod", json={"version": 2})
    assert api.post(path, body, status=200, headers=KEY) == first
    asked_otherwise = {**body, "version": 1}
    assert api("POST", path, json=asked_otherwise, headers=KEY).status_code == 409


def test_a_key_with_a_different_unregistered_definition_is_a_different_request(
    api: Api, name: str
) -> None:
    key = {"idempotency-key": name}
    body = {"definition": flow(name, node("a", config={"x": 1})), "params": {}}
    first = api.post("/runs", body, headers=key)
    reordered = {"params": {}, "definition": dict(reversed(body["definition"].items()))}
    assert api.post("/runs", reordered, status=200, headers=key) == first
    changed = {**body, "definition": {**body["definition"], "description": "changed"}}
    assert api("POST", "/runs", json=changed, headers=key).status_code == 409
    stranger = flow(name, node("a", "nobody-has-it"))
    assert api("POST", "/runs", json={"definition": stranger}, headers=key).status_code == 409
    nonsense = {"definition": {"name": name}, "params": {}}
    assert api("POST", "/runs", json=nonsense, headers=key).status_code == 422


def test_a_refused_request_does_not_use_up_its_key(api: Api, name: str) -> None:
    path = f"/workflows/{name}/runs"
    assert api("POST", path, json={"params": {}}, headers=KEY).status_code == 404
    api.register(flow(name, params=STRICT))
    assert api("POST", path, json={"params": {}}, headers=KEY).status_code == 422
    api.post(path, {"params": {"n": 1}}, headers=KEY)


@pytest.mark.parametrize("hostile", ["%00", "%ff", "%ed%a0%80", "a" * 4000, "x%20of%20y"])
def test_an_impossible_workflow_name_is_404(api: Api, hostile: str) -> None:
    path = f"/workflows/{hostile}/runs"
    assert api("POST", path, json={"params": {}}, headers=KEY).status_code == 404
