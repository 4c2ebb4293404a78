"""A prune reads runs page by page and deletes the finished ones that are old enough."""

from __future__ import annotations

from math import inf
from typing import Any

from dovetail.engine.ports import RunQuery
from dovetail.engine.prune import PAGE_SIZE, prune
from dovetail.engine.views import timestamp


class Runs:
    """An engine that has only runs: (id, created at, finished at)."""

    def __init__(self, *runs: tuple[str, float, float | None]) -> None:
        self.there = {run_id: (created, finished) for run_id, created, finished in runs}
        self.asked: list[RunQuery] = []
        self.reclaimed = 0

    async def list_runs(self, query: RunQuery) -> dict[str, Any]:
        self.asked.append(query)
        first = int(query.cursor or 0)
        names = sorted(self.there)  # what the page before had is deleted
        page = names[: query.limit]
        items = [
            {
                "run_id": run_id,
                "created_at": timestamp(self.there[run_id][0]),
                "finished_at": timestamp(self.there[run_id][1]),
            }
            for run_id in page
        ]
        more = str(first + len(page)) if len(names) > len(page) else None
        return {"items": items, "next_cursor": more}

    async def delete_runs(self, run_ids: list[str], *, ended_before: float = inf) -> list[str]:
        for run_id in run_ids:
            del self.there[run_id]
        return list(run_ids)

    async def reclaim_space(self) -> None:
        self.reclaimed += 1


async def pruned(runs: Runs, **given: Any) -> int:
    return await prune(runs, **given)  # type: ignore[arg-type]


async def test_the_age_of_a_run_counts_from_its_end() -> None:
    runs = Runs(("ended", 1.0, 10.0), ("ended later", 1.0, 11.0), ("goes on", 1.0, None))
    assert await pruned(runs, ended_before=10.0) == 1
    assert set(runs.there) == {"ended later", "goes on"}
    assert await pruned(runs) == 1
    assert set(runs.there) == {"goes on"}


async def test_a_dry_run_counts_and_deletes_nothing() -> None:
    runs = Runs(("ended", 1.0, 10.0), ("goes on", 1.0, None))
    assert await pruned(runs, dry_run=True) == 1
    assert (len(runs.there), runs.reclaimed) == (2, 0)


async def test_runs_are_read_in_pages_without_results_and_space_is_reclaimed_once() -> None:
    runs = Runs(*((f"{number:05}", 1.0, 2.0) for number in range(PAGE_SIZE + 10)))
    assert await pruned(runs, status="FAILED", workflow="w") == PAGE_SIZE + 10
    assert runs.reclaimed == 1
    assert [(one.status, one.workflow, one.max_result_bytes) for one in runs.asked] == [
        ("FAILED", "w", 0)
    ] * 2
