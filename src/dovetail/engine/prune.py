"""Deletes finished runs by age, status and workflow, some at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from dovetail.engine.api import EngineApi
from dovetail.engine.ports import RunQuery
from dovetail.engine.views import seconds

PAGE_SIZE = 500
"""Runs that are read, and deleted, at a time."""


async def prune(
    engine: EngineApi,
    *,
    ended_before: float = inf,
    status: str | None = None,
    workflow: str | None = None,
    dry_run: bool = False,
) -> int:
    """Delete the finished runs that ended at that time or before; returns how many these are.

    Their age counts from their end. A run that is retried meanwhile stays. Other processes go on.
    """
    found = 0
    cursor = None
    while True:
        # Results are not read: they may be large.
        page = await engine.list_runs(
            RunQuery(status, workflow, None, PAGE_SIZE, cursor, max_result_bytes=0)
        )
        due = _due(page["items"], ended_before)
        found += len(due if dry_run else await engine.delete_runs(due, ended_before=ended_before))
        cursor = page["next_cursor"]
        if cursor is None:
            break
    if found and not dry_run:
        await engine.reclaim_space()
    return found


def _due(runs: Sequence[dict[str, Any]], ended_before: float) -> list[str]:
    return [
        run["run_id"]
        for run in runs
        if run["finished_at"] is not None and seconds(run["finished_at"]) <= ended_before
    ]
