"""What a run that was put back from its archive may still do.

An archive is a little behind the store that it copies. What the store decided since is lost with
it, and most of that is simply done again. A node with `delivery: at_most_once` must not be: it may
have started. So the publisher brings the archive up to date before it sends such a node
(`engine/distributed/publisher.py`). This leaves two cases in a run that is put back:

- PENDING in the archive: it was never published, and starts in its turn;
- QUEUED in the archive, whatever it waited for: it may have started. It counts as started, by a
  worker that is not known. If that worker is alive, it holds the token and its result counts. If it
  says nothing until the lease ends, the node is lost, and so FAILED as `worker_lost`.

To be wrong about it costs a node that had not started: an explicit retry starts it.
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
"""What the log says of a start that may have been."""


def counts_as_started(status: NodeStatus, at_most_once: bool) -> bool:
    """Whether a node that is restored with this status may be running, or may have run."""
    return at_most_once and status is QUEUED


def restore(run: RunState, lease_until: float, now: float) -> Decision:
    """The run is put back from its archive: what may have started counts as started.

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
