"""Runs are deleted, over HTTP, by the client and by the command line, on every store."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dovetail import Conflict, Dovetail, NotFound

from ..servers.postgres_server import PostgresServer
from ..servers.redis_server import RedisServer
from .conftest import SCRIPT, Api, Server, environment, flow, node, on, wait_for
from .test_runs import HOSTILE


def finished_run(api: Api, name: str, **options: Any) -> str:
    run_id: str = api.post(f"/workflows/{name}/runs", **options)["run_id"]
    api.finished(run_id)
    return run_id


def remove(api: Api, run_id: str) -> int:
    return api("DELETE", f"/runs/{run_id}").status_code


def listed(api: Api, name: str) -> set[str]:
    return {run["run_id"] for run in api.get(f"/runs?workflow={name}")["items"]}


def cli(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *args, "--server", server.url],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=server.folder,
        env=environment(),
        check=False,
    )


def test_a_deleted_run_is_gone_from_every_reply(api: Api, name: str) -> None:
    api.register(flow(name))
    run_id, other = finished_run(api, name), finished_run(api, name)
    answer = api("DELETE", f"/runs/{run_id}")
    assert (answer.status_code, answer.content) == (204, b"")
    for path in ("", "/events", "/results", "/result", "/explain", "/verify", "/nodes/a/output"):
        assert api("GET", f"/runs/{run_id}{path}").status_code == 404, path
    for change in ("retry", "cancel", "repair"):
        assert api("POST", f"/runs/{run_id}/{change}", json={}).status_code == 404, change
    assert api("GET", f"/run-ids/{run_id[:8]}").status_code == 404
    assert listed(api, name) == {other}
    assert remove(api, run_id) == 404, "the second time it is unknown"
    assert api.finished(other)["status"] == "COMPLETED"


def test_only_a_finished_run_is_deleted(api: Api, server: Server, name: str) -> None:
    api.register(flow(name, node("a", "until", config={"file": name})))
    run_id = api.post(f"/workflows/{name}/runs")["run_id"]
    wait_for((server.folder / f"{name}.started").exists, "its start")
    answer = api("DELETE", f"/runs/{run_id}")
    assert answer.status_code == 409
    assert "is RUNNING: only a finished run can be deleted; cancel it" in answer.json()["detail"]
    (server.folder / name).touch()
    assert api.finished(run_id)["status"] == "COMPLETED"
    assert remove(api, run_id) == 204


@pytest.mark.parametrize("run_id", ["0" * 32, *HOSTILE])
def test_an_unknown_run_is_not_found(api: Api, run_id: str) -> None:
    assert remove(api, run_id) in (400, 404, 414)


def test_the_idempotency_key_of_a_deleted_run_may_be_used_again(api: Api, name: str) -> None:
    api.register(flow(name))
    headers = {"Idempotency-Key": f"key of {name}"}
    first = finished_run(api, name, headers=headers)
    assert api.post(f"/workflows/{name}/runs", status=200, headers=headers)["run_id"] == first
    assert remove(api, first) == 204
    second = api.post(f"/workflows/{name}/runs", {"params": {"n": 1}}, headers=headers)["run_id"]
    assert second != first
    api.finished(second)


def test_a_batch_leaves_out_its_deleted_runs_and_goes_with_the_last(api: Api, name: str) -> None:
    api.register(flow(name))
    headers = {"Idempotency-Key": f"batch of {name}"}
    items = {"items": [{"n": n} for n in range(3)]}
    made = api.post(f"/workflows/{name}/batches", items, headers=headers)
    path = f"/batches/{made['batch_id']}"
    before = wait_for(lambda: (b := api.get(path))["finished_at"] and b, "the batch")
    runs = [run["run_id"] for run in before["runs"]]
    assert remove(api, runs[1]) == 204
    batch = api.get(path)
    assert (batch["count"], batch["counts"]) == (3, {"COMPLETED": 2})
    assert [(run["index"], run["run_id"]) for run in batch["runs"]] == [(0, runs[0]), (2, runs[2])]
    assert batch["finished_at"] == before["finished_at"], "it does not wait for a deleted run"
    assert {run["run_id"] for run in api.get(f"/runs?batch={made['batch_id']}")["items"]} == {
        runs[0],
        runs[2],
    }
    assert [remove(api, run_id) for run_id in (runs[0], runs[2])] == [204, 204]
    assert api("GET", path).status_code == 404
    again = api.post(f"/workflows/{name}/batches", {"items": [{"n": 9}]}, headers=headers)
    assert again["batch_id"] != made["batch_id"], "its key is free as well"


def test_a_workflow_without_runs_can_be_triggered_after_its_definition_was_deleted(
    api: Api, name: str
) -> None:
    run_id = api.post("/runs", {"definition": flow(name)})["run_id"]
    api.finished(run_id)
    assert remove(api, run_id) == 204
    again = api.post("/runs", {"definition": flow(name)})["run_id"]
    assert api.finished(again)["status"] == "COMPLETED"
    other = api.post("/runs", {"definition": flow(name, node("other"))})["run_id"]
    assert [n["id"] for n in api.finished(other)["nodes"]] == ["other"]


def test_of_a_deletion_and_a_retry_at_the_same_moment_one_wins(
    api: Api, server: Server, name: str
) -> None:
    nodes = (
        node("a", "needs", config={"file": f"{name}.fixed"}),
        node("b", "until", "a", config={"file": f"{name}.go"}),
    )
    api.register(flow(name, *nodes))
    runs = [finished_run(api, name) for _ in range(12)]
    (server.folder / f"{name}.fixed").touch()
    with ThreadPoolExecutor(2) as pool:
        for run_id in runs:
            retry = pool.submit(api, "POST", f"/runs/{run_id}/retry", json={})
            deletion = pool.submit(remove, api, run_id)
            replies = retry.result().status_code, deletion.result()
            assert replies in ((202, 409), (404, 204), (409, 204)), replies
            there = api("GET", f"/runs/{run_id}").status_code
            assert there == (200 if replies[0] == 202 else 404)
    (server.folder / f"{name}.go").touch()
    for run_id in listed(api, name):
        assert api.finished(run_id)["status"] == "COMPLETED", "a retried run goes on"


def test_a_deletion_is_logged_with_the_run_and_the_caller(
    api: Api, server: Server, name: str
) -> None:
    api.register(flow(name))
    run_id = finished_run(api, name)
    assert remove(api, run_id) == 204
    line = f"run {run_id} was deleted for 127.0.0.1"
    wait_for(lambda: line in server.log.read_text(), "the line in the log")


async def test_the_client_deletes_a_run(server: Server, name: str) -> None:
    async with Dovetail(server.url) as dt:
        run = await dt.run(flow(name))
        await dt.delete_run(run.run_id)
        with pytest.raises(NotFound):
            await dt.get_run(run.run_id)
        with pytest.raises(NotFound):
            await dt.delete_run(run.run_id)
        going_on = await dt.trigger(flow(name, node("a", "until", config={"file": name})))
        with pytest.raises(Conflict, match="only a finished run can be deleted"):
            await dt.delete_run(going_on.run_id)
        (server.folder / name).touch()
        await dt.wait(going_on.run_id)


def test_the_command_deletes_several_runs_and_names_the_others(
    api: Api, server: Server, name: str
) -> None:
    api.register(flow(name))
    first, second = finished_run(api, name), finished_run(api, name)
    done = cli(server, "runs", "delete", first[:12], second, "feedfeed", "--json")
    assert done.returncode == 1
    reply = json.loads(done.stdout)
    assert reply["deleted"] == [first, second]
    assert [(one["run"], one["type"]) for one in reply["refused"]] == [("feedfeed", "not_found")]
    assert listed(api, name) == set()
    third = finished_run(api, name)
    done = cli(server, "runs", "delete", third)
    assert (done.returncode, done.stdout) == (0, f"deleted {third[:6]}\n")


def test_prune_deletes_by_age_since_the_end_by_status_and_by_workflow(
    api: Api, server: Server, name: str
) -> None:
    api.register(flow(name))
    api.register(flow(f"{name}-bad", node("a", "needs", config={"file": "nowhere"})))
    good = {finished_run(api, name) for _ in range(3)}
    bad = finished_run(api, f"{name}-bad")
    slow = flow(f"{name}-slow", node("a", "until", config={"file": name}))
    going_on = api.post("/runs", {"definition": slow})["run_id"]

    def pruned(*args: str) -> int:
        done = cli(server, "runs", "prune", *args, "--json")
        assert done.returncode == 0, done.stderr
        count: int = json.loads(done.stdout)["runs"]
        return count

    assert pruned("--older-than", "1d", "--workflow", name) == 0
    assert pruned("--older-than", "0", "--workflow", name, "--dry-run") == 3
    assert listed(api, name) == good, "nothing is deleted by a dry run"
    assert pruned("--older-than", "0", "--workflow", name, "--status", "failed") == 0
    assert pruned("--older-than", "0s", "--workflow", name, "--status", "completed") == 3
    assert pruned("--older-than", "0", "--workflow", f"{name}-bad") == 1
    assert remove(api, bad) == 404
    assert pruned("--older-than", "0", "--workflow", f"{name}-slow") == 0
    (server.folder / name).touch()
    assert api.finished(going_on)["status"] == "COMPLETED"
    time.sleep(3.1)  # so that a slow start of the command does not make the last one old
    last = finished_run(api, f"{name}")
    assert pruned("--older-than", "3s", "--workflow", name) == 0
    assert pruned("--older-than", "3s", "--workflow", f"{name}-slow") == 1, "its end counts"
    assert listed(api, name) == {last}


@pytest.mark.parametrize("age", ["30", "-1d", "1w", "d", "nan", "1e3d", ""])
def test_an_age_without_meaning_is_refused(server: Server, age: str) -> None:
    done = cli(server, "runs", "prune", f"--older-than={age}")
    assert done.returncode == 2
    assert "is no age: give a number and one of s, m, h, d" in done.stderr


def test_a_deletion_is_503_while_postgresql_is_away_and_works_afterwards(tmp_path: Path) -> None:
    with RedisServer() as store, PostgresServer() as archive:
        env = on(store.url, DOVETAIL_DATABASE_URL=archive.new_database())
        server = Server(tmp_path, "--with", "orchestrator,worker", **env)
        try:
            api = server.client()
            run_id = api.post("/runs", {"definition": flow("kept")})["run_id"]
            api.finished(run_id)
            archive.stop()
            answer = api("DELETE", f"/runs/{run_id}")
            assert answer.status_code == 503
            assert api.get(f"/runs/{run_id}")["status"] == "COMPLETED", "it is as it was"
            archive.start()
            wait_for(lambda: remove(api, run_id) == 204, "its deletion")
            assert api("GET", f"/runs/{run_id}").status_code == 404
        finally:
            server.close()
