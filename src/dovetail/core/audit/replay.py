"""Rebuilds a run from its journal: the same facts in the same order, nothing decided anew.

A durable store writes one `JournalEntry` per decision and nothing else; the state of a run follows
from them. So taking over a run, showing a finished run and the audit trail read the same record.
Replay does not judge: a rule that changes must not change the past. `journal_check.verify` says
whether a journal obeys the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dovetail.core.effects import (
    COMPLETED,
    FAILED,
    HELD,
    PENDING,
    PUBLISHED,
    QUEUED,
    RUNNING,
    SKIPPED,
    count_active,
    count_failures,
    count_parents,
    open_map,
    recount_held,
    startable,
)
from dovetail.core.events import RUN_ENDS, Event, Token
from dovetail.core.items import MapState
from dovetail.core.run import NodeState, Phase, RunState, encoded_size
from dovetail.core.states import FINISHED, NodeStatus, Reason, RunStatus
from dovetail.core.step import reset_nodes
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Dispatch,
    Expand,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    RetryDecision,
    Submit,
    TakeOver,
    Transition,
    Wake,
)

MAX_COUNT = 1 << 31
"""The limit of an epoch, an attempt or a count of crashes; the rules never reach it."""


class UnreadableJournal(ValueError):
    """A journal that cannot be read: damaged, or written by a newer version."""


class JournalEntry(NamedTuple):
    """One decision as a store keeps it."""

    seq: int
    """Of its first event; also the nonce of each token that the decision made."""
    time: float
    kind: str
    """The transition, by the name in `KINDS`."""
    extra: Any
    """What the transition carried and no event has: an output, a lease."""
    dispatch: Sequence[Any]
    """The outbox: the nodes that were published with this decision by index, items by the index of
    their node and their number."""
    events: Sequence[Event]


KINDS: dict[type, str] = {
    Submit: "submit",
    Claim: "claim",
    Renew: "renew",
    Complete: "complete",
    Fail: "fail",
    Reap: "reap",
    TakeOver: "take_over",
    Cancel: "cancel",
    Retry: "retry",
    Park: "park",
    Wake: "wake",
    Progress: "progress",
    Recall: "recall",
    Expand: "expand",
}


def _lease(until: float) -> float | None:
    return None if until == math.inf else until  # which JSON does not know


def _kept(output: Any, decision: Decision) -> Any:
    """An accepted output; of one that was too large for its run, only the size."""
    if not decision.changed:
        return None
    return encoded_size(output) if is_too_large(decision.events) else output


def is_taken(decision: Decision) -> bool:
    """Whether the reported output is now the node's."""
    return bool(decision.changed) and not is_too_large(decision.events)


def is_too_large(events: Sequence[Event]) -> bool:
    """Whether the node failed because its output was too large, by the decision's events."""
    return bool(events) and events[0].type == "node.failed"


def _begun(submit: Submit, decision: Decision) -> Any:
    """The limit on the outputs of a run; of a fork also its origin and the reused outputs."""
    if submit.forked_from is None:
        return submit.max_bytes
    given = submit.reused or {}
    reused = [event.node for event in decision.events if event.type == "node.reused"]
    return {
        "max_bytes": submit.max_bytes,
        "forked_from": submit.forked_from,
        "outputs": {node: given[node] for node in reused if node is not None},
    }


def submit_of(submit: Submit, extra: Any) -> Submit:
    """The submit with what the journal has of it. Raises `UnreadableJournal`."""
    if not isinstance(extra, dict):  # None in a journal that an earlier version began
        return submit._replace(max_bytes=None if extra is None else _count(extra))
    most, origin, outputs = extra["max_bytes"], extra["forked_from"], extra["outputs"]
    if type(origin) is not str or type(outputs) is not dict:
        raise UnreadableJournal("the beginning of a fork has another form")
    return submit._replace(
        max_bytes=None if most is None else _count(most), forked_from=origin, reused=outputs
    )


_EXTRAS: dict[type, Callable[[Any, Decision], Any]] = {
    Claim: lambda transition, decision: _lease(transition.lease_until),
    Renew: lambda transition, decision: [
        _journal_name(transition, decision),
        _lease(transition.lease_until),
    ],
    Submit: _begun,
    Complete: lambda transition, decision: _kept(transition.output, decision),
    Recall: lambda transition, decision: _kept(transition.output, decision),
    Wake: lambda transition, decision: _journal_name(transition, decision),
    Reap: lambda transition, decision: transition.max_crashes,
    TakeOver: lambda transition, decision: [transition.max_crashes, transition.behind],
    Retry: lambda transition, decision: _reset(decision),
}


def _journal_name(transition: Renew | Wake, decision: Decision) -> int | str:
    """How the journal names a node, by its index, or an item, by its name, where no event does."""
    return transition.node if transition.node.endswith("]") else decision.changed[0]


def _reset(decision: Decision) -> Any:
    """What a retry reset, and of which of these nodes it kept completed items."""
    assert isinstance(decision, RetryDecision)  # noqa: S101 - the rule makes no other
    return [decision.reset, decision.kept] if decision.kept else decision.reset


def published(dispatch: Iterable[Dispatch]) -> list[Any]:
    """The outbox of an entry."""
    return [index if item is None else [index, item] for _, index, _, item in dispatch]


def extra_of(transition: Submit | Transition, decision: Decision) -> Any:
    make = _EXTRAS.get(type(transition))
    return None if make is None else make(transition, decision)


def replay(run: RunState, entries: Iterable[JournalEntry]) -> None:
    """Apply journal entries to a new run, or to one that was replayed up to them."""
    for entry in entries:
        if entry.seq != run.seq + 1:
            raise UnreadableJournal(
                f"event {run.seq + 1} is missing: the log goes on with {entry.seq}"
            )
        try:
            _replay(run, entry)
        except UnreadableJournal:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as problem:
            what = f"{type(problem).__name__}: {problem}"
            raise UnreadableJournal(
                f"event {entry.seq}: '{entry.kind}' makes no sense ({what})"
            ) from None
    recount(run)


def _replay(run: RunState, entry: JournalEntry) -> None:
    """Raises `UnreadableJournal`, or any other error that a wrong field causes."""
    if entry.kind not in _KIND_NAMES:
        raise UnreadableJournal(
            f"event {entry.seq}: '{entry.kind}' is no transition that is known here"
        )
    _before(run, entry)
    for event in entry.events:
        run.seq = event.seq
        if event.node is None:
            _run_fact(run, event, entry)
        elif event.type != "result.refused":
            fact = _NODE_FACTS.get(event.type)
            if fact is None:
                raise UnreadableJournal(f"event {event.seq}: '{event.type}' is no event known here")
            index = run.graph.index.get(event.node)
            if index is None:
                _item_fact(run, fact, event, entry)
                continue
            node = run.nodes[index]
            if run.graph.nodes[index].for_each is not None:
                fact = _MAP_FACTS.get(event.type, fact)
            fact(node, event, entry)
            is_whole = node.items is None or event.type == "node.reused"
            if run.max_bytes is not None and event.type in _OUTPUTS and is_whole:
                node.size = encoded_size(node.output)
            run.unfinished -= event.type in _ENDS
    for index in entry.dispatch:
        node = _at(run, index)
        if type(index) is int and run.graph.nodes[index].for_each is not None:
            node.phase = Phase.EXPANDING
        else:
            node.phase = PUBLISHED
    if not run.unfinished and run.finished_at is None:
        run.finished_at = entry.time


def _at(run: RunState, index: Any) -> NodeState:
    """The node at `index`, or the item that is named or has this pair of numbers. A negative index
    is refused, not counted from the end."""
    if type(index) is str or type(index) is list:
        found = run.find_item(index) if type(index) is str else index
        items = None if found is None else _at(run, found[0]).items
        if found is None or items is None or type(found[1]) is not int:
            raise UnreadableJournal(f"there is no item {index!r}")
        return items.in_flight[found[1]]
    if type(index) is not int or not 0 <= index < len(run.nodes):
        raise UnreadableJournal(f"there is no node with index {index!r}")
    return run.nodes[index]


def _number(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise UnreadableJournal(f"{value!r} is no time")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise UnreadableJournal(f"{value!r} is no count")
    return value


def _error(value: Any) -> dict[str, Any] | None:
    if value is not None and type(value) is not dict:
        raise UnreadableJournal(f"{value!r} is no error")
    return value


def recount(run: RunState) -> None:
    """Derive the run's counts from the states of its nodes."""
    nodes = run.nodes
    count_parents(run, [index for index, node in enumerate(nodes) if node.status is PENDING])
    run.unfinished = sum(node.status not in FINISHED for node in nodes)
    run.failed = count_failures(run)
    run.cancelled = sum(node.status is NodeStatus.CANCELLED for node in nodes)
    run.active = count_active(nodes)
    recount_held(run)
    run.kept_bytes = sum(node.size for node in nodes)


def _before(run: RunState, entry: JournalEntry) -> None:
    """Apply what an entry changes without an event."""
    if entry.kind == "submit":
        given = submit_of(Submit(run.id, run.graph, run.params), entry.extra)
        run.max_bytes, run.forked_from = given.max_bytes, given.forked_from
    elif entry.kind == "wake":
        node = _at(run, entry.extra)
        node.phase, node.until = HELD, None
    elif entry.kind == "renew":
        index, lease = entry.extra
        _at(run, index).lease_until = math.inf if lease is None else _number(lease)
    elif entry.kind == "take_over" and _number(entry.extra[1]) > 0:
        for one in startable(run.nodes):
            if one.until is not None:
                one.until -= entry.extra[1]


# ── what happened to the run ─────────────────────────────────────────────────────────────


def _run_fact(run: RunState, event: Event, entry: JournalEntry) -> None:
    data = event.data or {}
    if event.type == "run.created":
        run.created_at = event.time
    elif event.type == "run.started":
        run.status, run.started_at = RunStatus.RUNNING, event.time
    elif event.type == "run.retried":
        run.epoch, run.status = event.epoch, RunStatus.RUNNING
        run.error = run.finished_at = None
        extra = entry.extra
        reset, kept = extra if extra and type(extra[0]) is list else (extra, [])
        run.unfinished += sum(_at(run, index).status in FINISHED for index in reset)
        reset_nodes(run, reset, kept)
    elif event.type in RUN_ENDS:
        run.status = RUN_ENDS[event.type]
        run.error = _error(data.get("error"))
    else:
        raise UnreadableJournal(f"event {event.seq}: '{event.type}' is no event known here")


# ── what happened to a node ──────────────────────────────────────────────────────────────


def _queued(node: NodeState, event: Event, entry: JournalEntry) -> None:
    node.status, node.phase, node.until = QUEUED, HELD, None
    node.lease_until = node.worker = None
    node.token = Token(event.epoch, node.attempt + 1, entry.seq)


def _started(node: NodeState, event: Event, entry: JournalEntry) -> None:
    node.status, node.phase = RUNNING, None
    node.attempt = event.attempt or 0
    worker = (event.data or {}).get("worker")
    node.worker = None if worker is None else str(worker)
    node.lease_until = math.inf if entry.extra is None else _number(entry.extra)
    node.started_at = event.time


def _item_fact(
    run: RunState,
    fact: Callable[[NodeState, Event, JournalEntry], None],
    event: Event,
    entry: JournalEntry,
) -> None:
    """An item: the same facts as of a node, until it ends and becomes a record."""
    found = run.find_item(event.node or "")
    if found is None:
        raise UnreadableJournal(f"event {event.seq}: there is no item {event.node!r}")
    node, item = run.nodes[found[0]], found[1]
    items = node.items
    assert items is not None  # noqa: S101 - else it has no such item
    if event.type == "node.queued" and item not in items.in_flight:
        items.begin(item, NodeState(event.epoch, 0))
    state = items.in_flight[item]
    fact(state, event, entry)
    if event.type not in _ENDS:
        return
    items.end(item, state)
    if run.max_bytes is not None and event.type in _OUTPUTS:
        node.size += encoded_size(state.output)


def _map_queued(node: NodeState, event: Event, entry: JournalEntry) -> None:
    """The node was ready, or its list is known."""
    total = (event.data or {}).get("items")
    if total is None:
        _queued(node, event, entry)
        node.phase = Phase.EXPANDING
    else:
        open_map(node, _count(total))


def _map_started(node: NodeState, event: Event, entry: JournalEntry) -> None:
    node.status, node.attempt, node.started_at = RUNNING, event.attempt or 0, event.time


def _map_completed(node: NodeState, event: Event, entry: JournalEntry) -> None:
    if node.items is None:
        raise UnreadableJournal(f"event {event.seq}: a mapped node has completed without its list")
    node.output, node.error = node.items.outputs, None
    _ended(node, COMPLETED, event)


def _parked(node: NodeState, event: Event, entry: JournalEntry) -> None:
    node.phase, node.until = Phase.PARKED, _number((event.data or {})["until"])


def _retrying(node: NodeState, event: Event, entry: JournalEntry) -> None:
    data = event.data or {}
    node.answered = node.token
    node.error = _error(data["error"])
    node.status, node.phase = QUEUED, Phase.BACKING_OFF
    node.until = event.time + _number(data["delay"])
    node.lease_until = node.worker = None
    node.token = Token(event.epoch, node.attempt + 1, entry.seq)


def _lost(node: NodeState, event: Event, entry: JournalEntry) -> None:
    node.crashes = _count((event.data or {})["crashes"])


def _unchanged(node: NodeState, event: Event, entry: JournalEntry) -> None:
    pass


def _completed(node: NodeState, event: Event, entry: JournalEntry) -> None:
    if event.type == "node.completed":
        node.answered = node.token
    node.output, node.error = entry.extra, None
    _ended(node, COMPLETED, event)


def _reused(node: NodeState, event: Event, entry: JournalEntry) -> None:
    if entry.kind != "submit":
        raise UnreadableJournal(f"event {event.seq}: a node is reused after its run has begun")
    node.output = entry.extra["outputs"][event.node]
    if event.data and "items" in event.data:
        node.items = MapState.reused(_count(event.data["items"]), node.output)
    _ended(node, COMPLETED, event)


def _failed(node: NodeState, event: Event, entry: JournalEntry) -> None:
    data = event.data or {}
    if entry.kind in ("fail", "complete", "recall") and event is entry.events[0]:
        node.answered = node.token
    node.error = _error(data.get("error", node.error))
    _ended(node, FAILED, event)


def _skipped(node: NodeState, event: Event, entry: JournalEntry) -> None:
    _ended(node, SKIPPED, event)


def _cancelled(node: NodeState, event: Event, entry: JournalEntry) -> None:
    _ended(node, NodeStatus.CANCELLED, event)


def _ended(node: NodeState, status: NodeStatus, event: Event) -> None:
    data = event.data or {}
    node.status, node.finished_at = status, event.time
    node.phase = node.until = node.lease_until = None
    node.reason = Reason(data["reason"]) if "reason" in data else None
    node.cause = data.get("cause")


_NODE_FACTS: dict[str, Callable[[NodeState, Event, JournalEntry], None]] = {
    "node.queued": _queued,
    "node.started": _started,
    "node.progress": _unchanged,
    "node.parked": _parked,
    "node.retrying": _retrying,
    "node.lost": _lost,
    "node.cached": _completed,
    "node.reused": _reused,
    "node.completed": _completed,
    "node.failed": _failed,
    "node.skipped": _skipped,
    "node.cancelled": _cancelled,
}
_MAP_FACTS: dict[str, Callable[[NodeState, Event, JournalEntry], None]] = {
    "node.queued": _map_queued,
    "node.started": _map_started,
    "node.completed": _map_completed,
}
"""What is different of a mapped node itself."""
_OUTPUTS = frozenset({"node.cached", "node.reused", "node.completed"})
_KIND_NAMES = frozenset(KINDS.values())
_ENDS = _OUTPUTS | {"node.failed", "node.skipped", "node.cancelled"}
