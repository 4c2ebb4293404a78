"""A search examines a bounded number of runs for each page, and leaves none out."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail import Dovetail
from dovetail.engine import commands

FLOW = {"name": "w", "nodes": [{"id": "a", "handler": "input"}]}


async def pages(dt: Dovetail, **query: Any) -> list[list[str]]:
    found, cursor = [], None
    while True:
        page = await dt.list_runs(**query, cursor=cursor)
        found.append([run.run_id for run in page])
        cursor = page.next_cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
async def test_every_run_is_found_once_though_a_page_examines_few(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(commands, "MAX_SEARCHED_RUNS", 4)
    async with Dovetail(tmp_path / "runs.db") as dt:
        await dt.register(FLOW)
        batch = await dt.batch("w", [{"kind": "odd" if n % 3 else "Even"} for n in range(20)])
        await dt.wait_batch(batch.batch_id)
        wanted = [run.run_id for run in batch.runs if run.index % 3 == 0][::-1]
        found = await pages(dt, q="even", limit=limit)
    assert [run_id for page in found for run_id in page] == wanted
    assert all(len(page) <= limit for page in found)
    assert limit < 50 or len(found) == 1, "one page of the store has all"


async def test_a_search_after_a_time_ends_where_runs_are_too_old(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.engine.run_search.ORDER_SLACK_SECONDS", 0.0)
    async with Dovetail(tmp_path / "runs.db") as dt:
        runs = [await dt.run(FLOW) for _ in range(6)]
        page = await dt.list_runs(created_after=runs[-2].created_at, limit=3)
    assert [run.run_id for run in page] == [runs[-1].run_id]
    assert page.next_cursor is None
