"""The states of a run and of a node, and the allowed changes between them.

`step` changes a node only along `ALLOWED`. A test walks every store against this table, and the
diagram in the docs is drawn from it.
"""

from __future__ import annotations

from enum import StrEnum


class NodeStatus(StrEnum):
    PENDING = "PENDING"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    CANCELLED = "CANCELLED"


class RunStatus(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Reason(StrEnum):
    """Why a node ended, if its handler did not decide it."""

    CONDITION_FALSE = "condition_false"
    DEPENDENCY_SKIPPED = "dependency_skipped"
    DEPENDENCY_FAILED = "dependency_failed"
    RUN_FAILED = "run_failed"
    RUN_CANCELLED = "run_cancelled"
    WORKER_LOST = "worker_lost"
    TOO_MANY_FAILURES = "too_many_failures"
    """Of an item: more items of its node failed than may."""


# Within one epoch; only a retry, which opens the next epoch, takes a node back to PENDING.
ALLOWED: dict[NodeStatus, frozenset[NodeStatus]] = {
    NodeStatus.PENDING: frozenset(
        {NodeStatus.QUEUED, NodeStatus.SKIPPED, NodeStatus.CANCELLED, NodeStatus.FAILED}
    ),
    # QUEUED again: published again. COMPLETED: answered from the node cache, attempt 0.
    NodeStatus.QUEUED: frozenset(
        {
            NodeStatus.QUEUED,
            NodeStatus.RUNNING,
            NodeStatus.COMPLETED,
            NodeStatus.CANCELLED,
            NodeStatus.FAILED,
        }
    ),
    # QUEUED: a retry after its backoff, or its worker was lost.
    NodeStatus.RUNNING: frozenset(
        {NodeStatus.COMPLETED, NodeStatus.FAILED, NodeStatus.CANCELLED, NodeStatus.QUEUED}
    ),
    NodeStatus.COMPLETED: frozenset(),
    NodeStatus.FAILED: frozenset(),
    NodeStatus.SKIPPED: frozenset(),
    NodeStatus.CANCELLED: frozenset(),
}

ALLOWED_RUN: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.PENDING: frozenset({RunStatus.RUNNING, RunStatus.CANCELLED}),
    RunStatus.RUNNING: frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED}),
    RunStatus.COMPLETED: frozenset(),
    RunStatus.FAILED: frozenset(),
    RunStatus.CANCELLED: frozenset(),
}

FINISHED: frozenset[NodeStatus] = frozenset(s for s, after in ALLOWED.items() if not after)
"""States a node never leaves within its epoch."""

FINAL: frozenset[RunStatus] = frozenset(s for s, after in ALLOWED_RUN.items() if not after)
"""States a run leaves only through a retry."""
