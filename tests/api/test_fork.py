"""A fork over HTTP: planned, made once, made of an older run that stays as it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import Api, flow, node

WRONG = node("end", "output", "mid", config={"text": "{{ mid.nothing }}"})
RIGHT = node("end", "output", "mid", config={"text": "{{ mid.value }}"})
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "default": 1}}}


def broken(name: str) -> dict[str, Any]:
    return flow(name, node("start", "input"), node("mid", "output", "start"), WRONG, params=SCHEMA)


def mended(name: str) -> dict[str, Any]:
    return flow(name, node("start", "input"), node("mid", "output", "start"), RIGHT, params=SCHEMA)


@pytest.fixture
def failed(api: Api, name: str) -> dict[str, Any]:
    """A run of a definition whose last node is wrong."""
    made = api.post("/runs", {"definition": broken(name)})
    run = api.finished(made["run_id"])
    assert (run["status"], run["forked_from"]) == ("FAILED", None)
    return run


def statuses(run: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(one["id"], one["status"], one["attempt"]) for one in run["nodes"]]


def test_a_fork_on_a_mended_definition_runs_only_what_was_mended(
    api: Api, name: str, failed: dict[str, Any]
) -> None:
    path = f"/runs/{failed['run_id']}/fork"
    asked = {"definition": mended(name)}
    plan = api.post(path, {**asked, "dry_run": True}, status=200)
    assert plan == {"rerun": ["end"], "reuse": ["start", "mid"]}
    answer = api("POST", path, json=asked)
    assert answer.status_code == 202
    made = answer.json()
    assert set(made) == {"run_id", "status", "workflow", "version", "created_at"}
    assert answer.headers["location"] == f"/api/v1/runs/{made['run_id']}"
    run = api.finished(made["run_id"])
    assert (run["status"], run["forked_from"]) == ("COMPLETED", failed["run_id"])
    assert statuses(run) == [
        ("start", "COMPLETED", 0),
        ("mid", "COMPLETED", 0),
        ("end", "COMPLETED", 1),
    ]
    reused = run["nodes"][1]
    assert (reused["started_at"], reused["worker"]) == (None, None)
    assert reused["finished_at"] == run["created_at"]
    assert reused["output"] == failed["nodes"][1]["output"]
    assert run["result"] == {"end": {"text": "mid"}}
    events = api.get(f"/runs/{made['run_id']}/events")
    assert events[0]["forked_from"] == failed["run_id"]
    assert [(e["type"], e["attempt"]) for e in events[2:4]] == [("node.reused", 0)] * 2
    assert api.get(f"/runs/{made['run_id']}/verify")["divergences"] == []
    assert api.get(f"/runs/{failed['run_id']}") == failed, "the old run is untouched"
    assert "forked_from" not in api.get(f"/runs/{made['run_id']}?nodes=false")


def test_a_fork_without_a_body_has_the_same_definition_version_and_params(
    api: Api, name: str
) -> None:
    api.register(broken(name))
    old = api.finished(api.post(f"/workflows/{name}/runs", {"params": {"n": 7}})["run_id"])
    made = api.post(f"/runs/{old['run_id']}/fork")
    assert (made["workflow"], made["version"]) == (name, 1)
    run = api.finished(made["run_id"])
    assert (run["params"], run["status"]) == ({"n": 7}, "FAILED")
    assert [attempt for _, _, attempt in statuses(run)][:2] == [0, 0]


def test_a_fork_takes_another_version_of_the_same_workflow(api: Api, name: str) -> None:
    api.register(broken(name))
    old = api.finished(api.post(f"/workflows/{name}/runs")["run_id"])
    api.register(mended(name))
    path = f"/runs/{old['run_id']}/fork"
    made = api.post(path, {"version": "latest"})
    assert made["version"] == 2
    assert api.finished(made["run_id"])["status"] == "COMPLETED"
    assert api("POST", path, json={"version": 3}).status_code == 404
    answer = api("POST", path, json={"version": 2, "definition": mended(name)})
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == ["version"]


def test_params_replace_the_old_ones_and_nothing_is_reused_unless_from_says_so(
    api: Api, name: str, failed: dict[str, Any]
) -> None:
    path = f"/runs/{failed['run_id']}/fork"
    asked = {"definition": mended(name), "params": {"n": 2}, "dry_run": True}
    plan = api.post(path, asked, status=200)
    assert plan == {"rerun": ["start", "mid", "end"], "reuse": []}
    plan = api.post(path, {**asked, "from": "mid"}, status=200)
    assert plan == {"rerun": ["mid", "end"], "reuse": ["start"]}
    plan = api.post(path, {**asked, "params": {"n": 1}}, status=200)
    assert plan["reuse"] == ["start", "mid"], "these are the same params"
    made = api.post(path, {**asked, "from": "mid", "dry_run": False})
    assert api.finished(made["run_id"])["params"] == {"n": 2}
    answer = api("POST", path, json={"params": {"n": "x"}})
    assert answer.status_code == 422
    assert answer.json()["type"].endswith(":invalid_params")


def test_what_a_fork_cannot_be_made_of_is_refused(
    api: Api, name: str, failed: dict[str, Any]
) -> None:
    path = f"/runs/{failed['run_id']}/fork"
    assert api("POST", f"/runs/{'f' * 32}/fork").status_code == 404
    answer = api("POST", path, json={"from": "mdi"})
    assert answer.status_code == 404
    assert "did you mean 'mid'?" in answer.json()["detail"]
    wrong = flow(name, node("start", "nothing"))
    answer = api("POST", path, json={"definition": wrong})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["code"], error["path"]) == ("unknown_handler", "nodes[0].handler")
    for body in ({"form": "mid"}, {"from": 7}, {"definition": "x"}, {"dry_run": 1}):
        assert api("POST", path, json=body).status_code == 422, body
    for dry_run in (False, True):  # a preview refuses what the fork would refuse
        for key in ("", "k" * 256):
            headers = {"idempotency-key": key}
            answer = api("POST", path, json={"dry_run": dry_run}, headers=headers)
            assert answer.status_code == 422, (key, dry_run)


def test_one_key_makes_one_fork_and_belongs_to_the_run_that_is_forked(
    api: Api, name: str, failed: dict[str, Any]
) -> None:
    path = f"/runs/{failed['run_id']}/fork"
    headers = {"idempotency-key": f"k-{name}"}

    def ask(body: Any) -> tuple[int, Any]:
        answer = api("POST", path, json=body, headers=headers)
        return answer.status_code, answer.json()

    asked = {"definition": mended(name)}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, [asked] * 6))
    assert sorted(status for status, _ in answers) == [200] * 5 + [202]
    assert len({str(made) for _, made in answers}) == 1
    assert ask({**asked, "from": "mid"})[0] == 409
    assert ask({})[0] == 409
    again = api.finished(api.post("/runs", {"definition": broken(name)})["run_id"])
    other = api("POST", f"/runs/{again['run_id']}/fork", json=asked, headers=headers)
    assert other.status_code == 202
