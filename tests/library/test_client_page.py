"""Versions compared, graphs, searches and many runs at once through the client, in every place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail import Dovetail, InvalidParams, NotFound
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.transports.messages import dead_letter_commands

from .places import PLACES, on_a_file, over_http, over_redis


def flow(*names: str) -> dict[str, Any]:
    return {"name": "w", "nodes": [{"id": name, "handler": "input"} for name in names]}


async def check(dt: Dovetail) -> None:
    await dt.register(flow("a"))
    await dt.register(flow("a", "b"))
    assert (await dt.diff_workflow("w", 1, "latest")).added == ["b"]
    assert (await dt.diff_workflow("w", 2, 1)).removed == ["b"]
    assert [node["id"] for node in (await dt.workflow_graph("w", 1)).nodes] == ["a"]
    run = await dt.run("w", {"who": "Ada"})
    assert await dt.run_graph(run.run_id) == await dt.workflow_graph("w")
    outcomes = await dt.retry_runs([run.run_id, "unknown", run.run_id])
    assert [one.run_id for one in outcomes] == [run.run_id, "unknown", run.run_id]
    kinds = [one.error and one.error["type"] for one in outcomes]
    assert kinds == ["conflict", "not_found", "conflict"]
    assert await dt.cancel_runs([]) == []
    found = await dt.list_runs(q="ada", created_after="2026-01-01T00:00:00+00:00")
    assert [one.run_id for one in found] == [run.run_id]
    assert len(await dt.list_runs(q="Grace")) == 0
    counted = await dt.run_counts(workflow="w", hours=2)
    assert counted.counts["COMPLETED"] == 1
    assert [one["total"] for one in counted.hours][-1] <= 1
    looked = await dt.queues()
    assert (looked.running, looked.parked, looked.complete) == ([], [], True)
    assert await dt.dead_letters() == []
    for change in (dt.requeue_dead_letter, dt.drop_dead_letter):
        with pytest.raises(NotFound, match="there is no dead letter 'x'"):
            await change("x")
    with pytest.raises(InvalidParams):
        await dt.run_counts(hours=1000)
    with pytest.raises(NotFound):
        await dt.diff_workflow("w", 1, 7)
    with pytest.raises(InvalidParams):
        await dt.list_runs(created_before="today")
    with pytest.raises(InvalidParams):
        await dt.cancel_runs(["x"] * 1001)


@pytest.mark.parametrize("place", PLACES)
async def test_the_client_does_the_same_in_every_place(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if place == "redis":
        async with over_redis(request.getfixturevalue("redis_url"), [], {}) as dt:
            await check(dt)
    else:
        async with (on_a_file if place == "file" else over_http)(tmp_path, [], {}) as dt:
            await check(dt)


async def test_the_run_of_a_dead_letter_is_retried(redis_url: str) -> None:
    async with over_redis(redis_url, [], {}) as dt, PipelinedRedis(redis_url) as pipe:
        run = await dt.run({"name": "f", "nodes": [{"id": "a", "handler": "fail"}]})
        fields = {"run_id": run.run_id}
        await pipe.call_many(dead_letter_commands("tasks:fail", "1-1", "poison", fields, str))
        (letter,) = await dt.dead_letters()
        assert (letter.stream, letter.reason, letter.fields) == ("tasks:fail", "poison", fields)
        assert (await dt.requeue_dead_letter(letter.letter_id)).run_id == run.run_id
        assert (await dt.wait(run.run_id)).epoch == 2
        assert await dt.dead_letters() == []
