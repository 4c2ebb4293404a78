"""Answers that would be large: what is left out of them, where it is, and how the whole is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail import Dovetail
from dovetail.api import events
from dovetail.core.outputs import LARGE_OUTPUT
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores import records as listing
from dovetail.stores.redis.archive import UNARCHIVED

from ..library.places import serving
from .conftest import Api, Server, flow, node, wait_for

LARGE = LARGE_OUTPUT + 1


def finished_run(api: Api, definition: dict[str, Any]) -> str:
    run_id = str(api.post("/runs", {"definition": definition})["run_id"])
    api.get(f"/runs/{run_id}?nodes=false&wait=30")
    return run_id


def filled(id_: str, size: int, *dependencies: str) -> dict[str, Any]:
    return node(id_, "filled", *dependencies, config={"bytes": size})


def note(run_id: str, name: str, size: int) -> dict[str, Any]:
    href = f"/api/v1/runs/{run_id}/nodes/{name}/output"
    return {"$output": {"size": size, "href": href}}


def followed(api: Api, reported: dict[str, Any]) -> Any:
    return api.get(reported["$output"]["href"].removeprefix("/api/v1"))


def outputs_of(run: dict[str, Any]) -> dict[str, Any]:
    return {one["id"]: one["output"] for one in run["nodes"]}


# ── what is left out ─────────────────────────────────────────────────────────────────────


def test_an_output_above_64_kib_is_a_reference_that_leads_to_it(api: Api, name: str) -> None:
    most, more = "x" * (LARGE_OUTPUT - 2), "x" * (LARGE - 2)
    nodes = filled("most", LARGE_OUTPUT), filled("more", LARGE), node("small")
    run_id = finished_run(api, flow(name, *nodes, node("last", "fail", "more", config={})))
    run = api.get(f"/runs/{run_id}")
    reported = note(run_id, "more", LARGE)
    shown = {"most": most, "more": reported, "small": {"value": "small"}}
    assert outputs_of(run) == {**shown, "last": None}
    assert followed(api, reported) == more
    whole = {**shown, "more": more}
    assert outputs_of(api.get(f"/runs/{run_id}?outputs=full")) == {**whole, "last": None}
    assert api.get(f"/runs/{run_id}/results")["outputs"] == shown
    assert api.get(f"/runs/{run_id}/results?outputs=full")["outputs"] == whole
    retried = api.post(f"/runs/{run_id}/retry", {})
    assert outputs_of(retried)["more"] == reported
    api.get(f"/runs/{run_id}?nodes=false&wait=30")
    again = api("POST", f"/runs/{run_id}/retry?outputs=full", json={})
    assert outputs_of(again.json())["more"] == more
    assert again.headers["location"] == f"/api/v1/runs/{run_id}"
    assert api("GET", f"/runs/{run_id}?outputs=some").status_code == 422


def test_an_output_that_is_richer_than_json_is_read_as_json(api: Api, name: str) -> None:
    text = node("b", "output", "a", config={"at": "{{ a.found.at }}", "all": "{{ a.output }}"})
    run_id = finished_run(api, flow(name, node("a", "rich", config={}), text))
    found = {
        "at": "2026-01-02T00:00:00Z",
        "sizes": [1, 2],
        "id": "00000000-0000-0000-0000-000000000001",
    }
    output = {"found": found, "price": "1.50"}
    assert outputs_of(api.get(f"/runs/{run_id}")) == {
        "a": output,
        "b": {"at": found["at"], "all": output},
    }


def test_each_large_output_of_a_result_is_replaced_by_a_reference(api: Api, name: str) -> None:
    run_id = finished_run(api, flow(name, filled("a", LARGE), node("b", "input")))
    shown = {"a": note(run_id, "a", LARGE), "b": {"value": "b"}}
    whole = {"a": "x" * (LARGE - 2), "b": {"value": "b"}}
    for path in (f"/runs/{run_id}", f"/runs/{run_id}?nodes=false", f"/runs/{run_id}/results"):
        mark = "&" if "?" in path else "?"
        assert api.get(path)["result"] == shown
        assert api.get(f"{path}{mark}outputs=full")["result"] == whole
    assert api.get(f"/runs/{run_id}/result") == whole
    (item,) = api.get(f"/runs?workflow={name}")["items"]
    assert item["result"]["$output"]["size"] == len(orjson.dumps(whole))
    assert followed(api, item["result"]) == whole


def test_a_result_that_is_one_large_output_is_replaced_by_a_reference(api: Api, name: str) -> None:
    text = "x" * LARGE
    end = node("end", "output", "a", config={"text": text})
    run_id = finished_run(api, flow(name, node("a", "input", config={}), end))
    size = len(orjson.dumps({"text": text}))
    for path in ("", "?nodes=false", "/results"):
        assert api.get(f"/runs/{run_id}{path}")["result"] == note(run_id, "end", size)
    assert api.get(f"/runs/{run_id}?outputs=full")["result"] == {"text": text}
    assert api.get(f"/runs/{run_id}/result") == {"text": text}


def test_a_result_of_items_is_replaced_by_a_reference(api: Api, name: str) -> None:
    items = [{**filled("each", 40_000), "for_each": [1, 2]}, filled("small", 9)]
    run_id = finished_run(api, flow(name, *items))
    shown = {"each": note(run_id, "each", 80_003), "small": "x" * 7}
    for path in (f"/runs/{run_id}", f"/runs/{run_id}?nodes=false", f"/runs/{run_id}/results"):
        assert api.get(path)["result"] == shown
    forked = api.post(f"/runs/{run_id}/fork", {})["run_id"]
    shown = {"each": note(forked, "each", 80_003), "small": "x" * 7}
    assert api.finished(forked)["result"] == api.get(f"/runs/{forked}?nodes=false")["result"]
    assert api.get(f"/runs/{forked}?nodes=false")["result"] == shown


def test_a_list_of_runs_says_how_large_a_result_is(api: Api, name: str) -> None:
    items = [{**filled("each", 40_000), "for_each": [1, 2]}, filled("small", 9)]
    failed = [filled("more", LARGE), node("bad", "fail", config={})]
    for nodes in ([items[0]], items, [*items, filled("more", LARGE)], failed):
        run_id = finished_run(api, flow(name, *nodes, on_failure="continue"))
        whole = api.http.get(f"/api/v1/runs/{run_id}/result").content
        href = f"/api/v1/runs/{run_id}/result"
        listed = api.get(f"/runs?workflow={name}&limit=1")["items"][0]
        assert listed["result"] == {"$output": {"size": len(whole), "href": href}}


@pytest.mark.parametrize(
    "output", [{"$output": {"size": 3, "href": "/api/v1/elsewhere"}}, {"$output": 1, "b": 2}]
)
def test_an_output_that_looks_like_a_reference_is_itself_sent_as_a_reference(
    api: Api, name: str, output: dict[str, Any]
) -> None:
    small, nested = {"output": 1, "$outputs": 2}, {"list": [output], "key": output}
    configs = {"odd": output, "small": small, "nested": nested}
    nodes = [node(id_, "input", config=config) for id_, config in configs.items()]
    run_id = finished_run(api, flow(name, *nodes))
    reported = note(run_id, "odd", len(orjson.dumps(output)))
    run = api.get(f"/runs/{run_id}")
    assert outputs_of(run) == run["result"] == {**configs, "odd": reported}
    assert followed(api, reported) == output
    assert outputs_of(api.get(f"/runs/{run_id}?outputs=full")) == configs
    single = finished_run(api, flow(f"{name}-2", node("end", config=output)))
    reported = note(single, "end", len(orjson.dumps(output)))
    assert api.get(f"/runs/{single}?nodes=false")["result"] == reported
    (item,) = api.get(f"/runs?workflow={name}-2")["items"]
    assert followed(api, item["result"]) == output


def test_the_output_endpoint_returns_the_output_once_the_node_has_one(
    api: Api, server: Server, name: str
) -> None:
    file = server.folder / name
    nodes = node("a", "until", config={"file": str(file)}), node("b", "output", "a")
    broken, after = node("c", "fail", config={"message": "no"}), node("d", "output", "c")
    definition = flow(name, *nodes, broken, after, on_failure="continue")
    run_id = str(api.post("/runs", {"definition": definition})["run_id"])

    def asked(name: str) -> tuple[int, str]:
        answer = api("GET", f"/runs/{run_id}/nodes/{name}/output")
        return answer.status_code, answer.json().get("detail") if answer.status_code > 200 else ""

    wait_for((server.folder / f"{name}.started").exists, "the node started")
    assert asked("a") == (409, f"node 'a' of run {run_id} is RUNNING: it has no output yet")
    assert asked("b")[0] == 409
    file.touch()
    api.finished(run_id)
    assert asked("b") == (200, "")
    assert asked("c") == (404, f"node 'c' of run {run_id} is FAILED: it has no output")
    assert asked("d")[0] == 404
    assert asked("bb") == (404, f"run {run_id} has no node 'bb'; did you mean 'b'?")
    assert api("GET", "/runs/nobody/nodes/a/output").status_code == 404
    head = api("HEAD", f"/runs/{run_id}/nodes/a/output")
    known = {"if-none-match": head.headers["etag"]}
    assert api("GET", f"/runs/{run_id}/nodes/a/output", headers=known).status_code == 304


# ── what is sent in parts ────────────────────────────────────────────────────────────────


def test_the_detail_of_sixty_large_outputs_is_small_and_full_outputs_are_streamed(
    api: Api, request: pytest.FixtureRequest, name: str
) -> None:
    # Fewer where each takes its way through more processes.
    count = 60 if "embedded" in request.node.callspec.id else 12
    names = [f"n{nth}" for nth in range(count)]
    size = 900_000
    run_id = finished_run(api, flow(name, *(filled(one, size) for one in names)))
    plain = {"accept-encoding": "identity"}
    detail = api("GET", f"/runs/{run_id}", headers=plain)
    assert len(detail.content) < count * 700
    assert detail.json()["result"] == {one: note(run_id, one, size) for one in names}
    # Without the document's schema, which would take longer than all the rest.
    path = f"/api/v1/runs/{run_id}?outputs=full"
    answer = api.http.get(path, headers=plain)
    assert answer.headers["transfer-encoding"] == "chunked"
    assert 2 * count * size < len(answer.content) < count * (2 * size + 700)
    whole = dict.fromkeys(names, "x" * (size - 2))
    run = answer.json()
    assert outputs_of(run) == run["result"] == whole
    tag = answer.headers["etag"]
    assert api("HEAD", f"/runs/{run_id}?outputs=full", headers=plain).headers["etag"] == tag
    packed = {"accept-encoding": "gzip", "if-none-match": '"other"'}
    small = api.http.get(path, headers=packed)
    assert (small.headers["content-encoding"], small.content) == ("gzip", answer.content)
    assert small.headers["etag"] == f'{tag[:-1]}-gzip"'
    known = {"if-none-match": small.headers["etag"]}
    assert api("GET", f"/runs/{run_id}?outputs=full", headers=known).status_code == 304
    assert api.get(f"/runs/{run_id}/nodes/n7/output") == whole["n7"]


def test_many_small_outputs_are_streamed_too(api: Api, name: str) -> None:
    names = [f"n{nth}" for nth in range(40)]
    odd = {"$output": "y" * 100}
    nodes = [*(filled(one, 60_000) for one in names), node("odd", "input", config=odd)]
    run_id = finished_run(api, flow(name, *nodes))
    run = api.get(f"/runs/{run_id}")
    reported = note(run_id, "odd", len(orjson.dumps(odd)))
    assert outputs_of(run) == {**dict.fromkeys(names, "x" * 59998), "odd": reported}
    assert run["result"] == outputs_of(run)
    assert outputs_of(api.get(f"/runs/{run_id}?outputs=full"))["odd"] == odd


@pytest.mark.parametrize("server", ["archive"], indirect=True, scope="session")
def test_the_reply_for_a_run_that_only_the_archive_has_is_unchanged(
    api: Api, server: Server, name: str
) -> None:
    nodes = [*(filled(f"n{nth}", 60_000) for nth in range(30)), filled("large", 900_000)]
    run_id = finished_run(api, flow(name, *nodes))
    paths = ["", "?nodes=false", "?outputs=full", "/results", "/results?outputs=full"]
    paths += ["/nodes/n1/output", "/nodes/large/output", "/result", "/events"]
    accept = {"accept": "application/json"}
    before = [api("GET", f"/runs/{run_id}{path}", headers=accept).content for path in paths]

    async def forgotten() -> bool:
        """In Redis, once PostgreSQL has all of it."""
        async with PipelinedRedis(server.redis_url) as pipe:
            if await pipe.call("ZSCORE", UNARCHIVED, run_id) is not None:
                return False
            await pipe.call("DEL", *await pipe.call("KEYS", f"wf:{{{run_id}}}:*"))
            return True

    wait_for(lambda: asyncio.run(forgotten()), "the run was archived")
    after = [api("GET", f"/runs/{run_id}{path}", headers=accept).content for path in paths]
    assert after == before
    (item,) = api.get(f"/runs?workflow={name}")["items"]
    assert followed(api, item["result"])["large"] == "x" * 899_998


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Any]:
    async with serving(folder) as url, Dovetail(url) as dt:
        yield dt


async def test_a_long_list_of_events_is_sent_a_page_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [node(f"n{nth}") for nth in range(20)]
    async with served(tmp_path) as dt:
        run = await dt.run(flow("wide", *nodes))
        whole = await dt._commands.events(run.run_id)
        assert [event["seq"] for event in whole] == list(range(1, len(whole) + 1))
        for page in (1, 7, len(whole), len(whole) + 1):
            monkeypatch.setattr(events, "PAGE", page)
            assert await dt._commands.events(run.run_id) == whole
            assert await dt._commands.events(run.run_id, after=5) == whole[5:]
            assert await dt._commands.events(run.run_id, after=len(whole)) == []


def test_every_setup_returns_the_events_of_a_run_in_pages(api: Api, name: str) -> None:
    nodes = [node(f"n{nth}") for nth in range(340)]
    run_id = finished_run(api, flow(name, *nodes))
    found = api.get(f"/runs/{run_id}/events", headers={"accept": "application/json"})
    assert len(found) > events.PAGE
    assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
    assert found[-1]["type"] == "run.completed"


@pytest.mark.parametrize("more", ["", "&status=COMPLETED"])
def test_a_page_of_large_runs_ends_early_and_the_next_page_continues(
    api: Api, name: str, more: str
) -> None:
    api.register(flow(name, node("a")))
    text = "x" * (listing.PAGE_BYTES // 5)
    for nth in range(7):
        body = {"params": {"nth": nth, "text": text}}
        run_id = api.post(f"/workflows/{name}/runs", body)["run_id"]
        api.get(f"/runs/{run_id}?nodes=false&wait=30")
    found, sizes, cursor = [], [], ""
    while True:
        page = api.get(f"/runs?workflow={name}&limit=6{more}{cursor}")
        found += [run["params"]["nth"] for run in page["items"]]
        sizes.append(len(page["items"]))
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert found == [6, 5, 4, 3, 2, 1, 0]
    assert max(sizes) in (5, 6)
    assert sizes[0] == max(sizes) < 7
