"""Runs that cannot be read, or whose state disagrees with their own log: in words, and as data.

Such a run is named and left as it is, and everything else goes on. Its state can be rebuilt from
its log (`repair`), and it can be ended in any case (`cancel`). What it must not know: where a run
is kept.
"""

from __future__ import annotations

from typing import Any

from dovetail.core.dag import Graph
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus

KIND = "run_damaged"
"""The `type` of the error that a damaged run ends with."""
LONGEST_WHY = 500


def unread_run(
    run_id: str,
    workflow: str,
    version: int | None,
    created_at: float,
    status: RunStatus,
    finished_at: float,
    why: str,
) -> RunState:
    """A run that was ended unread: what lists know of it, without any node."""
    graph = Graph(workflow, (), {}, True, None, (), (), None)
    run = RunState(run_id, graph, {}, created_at, version)
    run.status, run.finished_at = status, finished_at
    run.error = damage_error(why)
    return run


def damage_error(why: str) -> dict[str, Any]:
    return {"type": KIND, "message": why[:LONGEST_WHY]}
