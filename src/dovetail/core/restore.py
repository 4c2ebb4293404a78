"""The rule for a run that is restored from the archive.

An archive is a little behind its store. If the store is lost, its last decisions are lost too, and
most of them are simply made again. A node with `delivery: at_most_once` must not start again. So
the publisher brings the archive up to date before it sends such a node
(`engine/distributed/publisher.py`). This leaves two cases in a restored run:

- PENDING in the archive: the node was never published, and starts in its turn;
- QUEUED in the archive, published or waiting: the node may have started. It counts as started by
  an unknown worker. If that worker is alive, it has the token and its result counts. If no result
  comes until the lease ends, the node is FAILED with reason `worker_lost`.

If the node had not started, an explicit retry starts it.
"""

from __future__ import annotations

from heapq import heapify

from dovetail.core.effects import HELD, PUBLISHED, QUEUED, RUNNING, record_change
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Decision

UNKNOWN_WORKER = "unknown"
STARTED = {"worker": UNKNOWN_WORKER, "restored": True}
"""The data of the event for a start that may have happened."""


def counts_as_started(status: NodeStatus, at_most_once: bool) -> bool:
    """Whether a node that is restored with this status may have started."""
    return at_most_once and status is QUEUED


def restore(run: RunState, lease_until: float, now: float) -> Decision:
    """Mark the nodes that may have started as RUNNING.

    More nodes may run than `max_concurrency` allows: a held one may have been published since.
    """
    out = Decision()
    for index, (spec, node) in enumerate(zip(run.graph.nodes, run.nodes, strict=True)):
        if not counts_as_started(node.status, spec.at_most_once):
            continue
        if node.phase is HELD:
            run.held.remove(index)
        if node.phase is not PUBLISHED:
            run.active += 1
        node.status, node.phase, node.until = RUNNING, None, None
        node.attempt = node.token.attempt
        node.worker, node.lease_until, node.started_at = UNKNOWN_WORKER, lease_until, now
        record_change(run, index, out, now, "node.started", dict(STARTED))
    heapify(run.held)
    return out


def is_restored_start(event: Event) -> bool:
    return event.type == "node.started" and bool((event.data or {}).get("restored"))
