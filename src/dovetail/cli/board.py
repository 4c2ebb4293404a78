"""A run as its events tell it: one row per node, kept up to date at a cost of O(1) per event.

Every view of a run that goes on reads a board, whatever store the events come from. What it
must not know: the rules (it believes the events) and how a row looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.core.events import Event
from dovetail.core.states import FINISHED, NodeStatus, Reason, RunStatus


class Row:
    """One node, as far as the events have told of it."""

    __slots__ = (
        "attempt",
        "cached",
        "cause",
        "fraction",
        "id",
        "message",
        "reason",
        "retry",
        "started",
        "status",
        "stopped",
        "tag",
        "until",
    )

    def __init__(self, node_id: str) -> None:
        self.id = node_id
        self.status = NodeStatus.PENDING
        self.attempt = 0
        self.started: float | None = None
        self.stopped: float | None = None
        """When it finished, by itself or not."""
        self.cached = False
        self.reason: str | None = None
        self.cause: str | None = None
        self.fraction: float | None = None
        self.message = ""
        self.until: float | None = None
        """It waits until then: for its rate limit, if `tag` is set, or for its next attempt."""
        self.tag: str | None = None
        self.retry = 0

    @property
    def failed(self) -> bool:
        """It failed itself, rather than because of another node."""
        return self.status is NodeStatus.FAILED and self.reason != Reason.DEPENDENCY_FAILED


class Board:
    def __init__(self, node_ids: Sequence[str]) -> None:
        self.rows = [Row(node_id) for node_id in node_ids]
        self._by_id = {row.id: row for row in self.rows}
        self.status = RunStatus.PENDING
        self.counts: Counter[NodeStatus] = Counter({NodeStatus.PENDING: len(self.rows)})
        # In the order in which they got there; dictionaries, because sets have no order.
        self.running: dict[str, Row] = {}
        self.failed: dict[str, Row] = {}
        self.delayed: dict[str, Row] = {}

    @property
    def finished(self) -> int:
        return sum(self.counts[status] for status in FINISHED)

    def apply(self, event: Event) -> Row | None:
        """Take an event in; returns the row of its node if that changed."""
        if event.node is None:
            self.status = _RUN_STATUS.get(event.type, self.status)
            return None
        row = self._by_id[event.node]
        change = _CHANGES.get(event.type)
        if change is None:
            return None
        before = row.status
        row.attempt = event.attempt or 0
        change(row, event.time, event.data or {})
        if row.status is not before:
            self.counts[before] -= 1
            self.counts[row.status] += 1
        _keep(self.running, row, row.status is NodeStatus.RUNNING)
        _keep(self.failed, row, row.failed)
        _keep(self.delayed, row, row.until is not None)
        return row


def _keep(group: dict[str, Row], row: Row, belongs: bool) -> None:
    if belongs:
        group[row.id] = row
    else:
        group.pop(row.id, None)


def _queued(row: Row, at: float, data: dict[str, Any]) -> None:
    row.status = NodeStatus.QUEUED
    row.until = None


def _started(row: Row, at: float, data: dict[str, Any]) -> None:
    row.status = NodeStatus.RUNNING
    row.started, row.stopped = at, None
    row.until = row.tag = row.fraction = None
    row.message = ""


def _progressed(row: Row, at: float, data: dict[str, Any]) -> None:
    row.fraction, row.message = data["fraction"], data["message"]


def _parked(row: Row, at: float, data: dict[str, Any]) -> None:
    row.status = NodeStatus.QUEUED
    row.until, row.tag = data["until"], data["resource_tag"]


def _retrying(row: Row, at: float, data: dict[str, Any]) -> None:
    row.status = NodeStatus.QUEUED
    row.until, row.tag, row.retry = at + data["delay"], None, data["retry"]
    row.message = f"{data['error'].get('type')}: {data['error'].get('message')}"


def _cached(row: Row, at: float, data: dict[str, Any]) -> None:
    row.cached = True
    _ended(row, NodeStatus.COMPLETED, at, data)


def _ended(row: Row, status: NodeStatus, at: float, data: dict[str, Any]) -> None:
    row.status, row.stopped = status, at
    row.reason, row.cause = data.get("reason"), data.get("cause")
    row.until = None


def _ends_as(status: NodeStatus) -> Callable[[Row, float, dict[str, Any]], None]:
    return lambda row, at, data: _ended(row, status, at, data)


_CHANGES: dict[str, Callable[[Row, float, dict[str, Any]], None]] = {
    "node.queued": _queued,
    "node.started": _started,
    "node.progress": _progressed,
    "node.parked": _parked,
    "node.retrying": _retrying,
    "node.lost": _queued,
    "node.cached": _cached,
    "node.completed": _ends_as(NodeStatus.COMPLETED),
    "node.failed": _ends_as(NodeStatus.FAILED),
    "node.skipped": _ends_as(NodeStatus.SKIPPED),
    "node.cancelled": _ends_as(NodeStatus.CANCELLED),
}

_RUN_STATUS = {
    "run.started": RunStatus.RUNNING,
    "run.completed": RunStatus.COMPLETED,
    "run.failed": RunStatus.FAILED,
    "run.cancelled": RunStatus.CANCELLED,
}
