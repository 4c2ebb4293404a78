"""The attempts of a node, from the events of its run.

Every start has an event, and so has every end, with one exception: a retry `from` a node above
stops a node that runs, and resets it. So the graph is asked which nodes a retry reset.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from dovetail.core.dag import Graph
from dovetail.core.events import TRACEBACK, Event
from dovetail.core.items import split_name


class AttemptStatus(StrEnum):
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    LOST = "LOST"
    """Its worker was lost."""
    CANCELLED = "CANCELLED"


class Attempt(NamedTuple):
    """One start of a node."""

    epoch: int
    attempt: int
    status: AttemptStatus
    worker: str | None
    started_at: float
    finished_at: float | None = None
    error: dict[str, Any] | None = None
    """Of a failure: `type`, `message`, `where` and `traceback`; the last two may be None."""

    @property
    def duration(self) -> float | None:
        """In seconds. A clock may have been set back meanwhile."""
        return None if self.finished_at is None else max(0.0, self.finished_at - self.started_at)


_ENDS = {
    "node.completed": AttemptStatus.COMPLETED,
    "node.retrying": AttemptStatus.FAILED,
    "node.failed": AttemptStatus.FAILED,
    "node.lost": AttemptStatus.LOST,
    "node.cancelled": AttemptStatus.CANCELLED,
}


class AttemptEvents:
    """Picks the events that `attempts_of` needs out of the log of a run, which may be long."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.picked: list[Event] = []
        self._failed_item: tuple[int, Event] | None = None
        """Of a mapped node: the failed item with the lowest number, and how it failed."""

    def add(self, event: Event) -> None:
        if event.node is None:
            if event.type == "run.retried":
                self._failed_item = None
                self.picked.append(event)
        elif event.node == self._node:
            if event.type == "node.started" or event.type in _ENDS:
                self.picked.append(self._with_traceback(event))
        elif event.type == "node.failed":
            node, item = split_name(event.node)
            first = self._failed_item
            if node == self._node and item is not None and (first is None or item < first[0]):
                self._failed_item = item, event

    def _with_traceback(self, event: Event) -> Event:
        """The error of a mapped node is that of its first failed item, without the traceback."""
        if event.type != "node.failed" or self._failed_item is None:
            return event
        of_item = (self._failed_item[1].data or {}).get(TRACEBACK)
        return event._replace(data={**(event.data or {}), TRACEBACK: of_item})


def attempts_of(events: Iterable[Event], graph: Graph, node: str) -> list[Attempt]:
    """All attempts of a node in all epochs, in the order of their starts."""
    needed = AttemptEvents(node)
    for event in events:
        needed.add(event)
    found: list[Attempt] = []
    for event in needed.picked:
        if event.type == "node.started":
            worker = (event.data or {}).get("worker")
            running = AttemptStatus.RUNNING
            found.append(Attempt(event.epoch, event.attempt or 0, running, worker, event.time))
        elif found and found[-1].status is AttemptStatus.RUNNING:
            # Only an attempt that runs can end: a node may fail before its start, too.
            if event.type in _ENDS:
                found[-1] = _ended(found[-1], _ENDS[event.type], event)
            elif _resets(event, graph, node):
                found[-1] = _ended(found[-1], AttemptStatus.CANCELLED, event)
    return found


def _ended(attempt: Attempt, status: AttemptStatus, event: Event) -> Attempt:
    error = None
    if status is AttemptStatus.FAILED:
        error = _error(event.data or {})
    return attempt._replace(status=status, finished_at=event.time, error=error)


def _error(data: dict[str, Any]) -> dict[str, Any]:
    error = data.get("error") or {}
    return {
        "type": error.get("type"),
        "message": error.get("message"),
        "where": error.get("where"),
        "traceback": data.get(TRACEBACK),
    }


def _resets(event: Event, graph: Graph, node: str) -> bool:
    """Whether this retry reset the node although it was running. Without `from` it is adopted."""
    start = graph.index.get((event.data or {}).get("from", ""))
    place = graph.index[node]
    return start is not None and (start == place or place in graph.descendants(start))
