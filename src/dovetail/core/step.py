"""The rules: a transition comes in, a decision goes out.

    step(run, transition, now, nonce) -> Decision

Only the transitions below change a run, and every store decides as `step` does. Time and chance
are arguments; nothing here sends, sleeps or reads a clock. A transition that is late or repeated
is refused: `step` returns `NOTHING` (or, for a stale result, a decision that is only an event) and
the run is unchanged. Refusing is normal, not an error.

The principles:

- **Fencing.** A node gets a `Token` when it is queued. Claim, renew, complete, fail, park and
  reap carry it. One comparison with the stored token replaces all flags and locks.
- **Fan-in.** `waiting` counts a node's unsettled parents. A parent settles once per epoch,
  because it can enter COMPLETED, SKIPPED or FAILED only once. So no parent is counted twice.
- **Order.** Nodes that become ready in one transition are queued in definition order, after all
  skips that follow from it.
- **Cost.** A completion costs O(children). Only a failure under `fail_fast`, a cancel and a
  retry visit the whole run, each once per epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify
from typing import Any

from dovetail.core.dag import descendants, layers
from dovetail.core.effects import (
    COMPLETED,
    HELD,
    PENDING,
    PUBLISHED,
    QUEUED,
    RUNNING,
    advance_map,
    back_off,
    cancel_item,
    cancel_node,
    complete_children,
    count_active,
    count_failures,
    count_parents,
    fail_node,
    fill_slots_and_finish,
    finish,
    is_allowed_failure,
    log,
    lose_item,
    lose_node,
    map_of,
    outstanding,
    overweight,
    publish,
    record_change,
    refuse,
    resolve,
    start,
    start_item,
    stop_orders,
    weigh,
    write,
)
from dovetail.core.errors import Conflict, NotFound
from dovetail.core.events import Event
from dovetail.core.item_rules import apply_to_item, expand
from dovetail.core.items import MapState, split_name
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import FINAL, FINISHED, NodeStatus, Reason, RunStatus
from dovetail.core.transitions import (
    NOTHING,
    TAKEN,
    Cancel,
    Claim,
    Complete,
    Decision,
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

MAX_NAMED = 10
"""The nodes that a refused retry names."""


def begin(submit: Submit, now: float, nonce: int) -> tuple[RunState, Decision]:
    """Make the run of an accepted trigger and queue its first nodes."""
    run = RunState(submit.run_id, submit.graph, submit.params, now, submit.version)
    run.logged = submit.logged
    run.max_bytes = submit.max_bytes
    run.forked_from = submit.forked_from
    out = Decision()
    log(run, out, now, "run.created", created_data(submit))
    run.status = RunStatus.RUNNING
    run.started_at = now
    log(run, out, now, "run.started")
    ready = list(submit.graph.roots)
    if submit.reused:
        reuse(run, submit.reused, out, now)
        ready = [
            i for i, node in enumerate(run.nodes) if node.status is PENDING and not node.waiting
        ]
    resolve(run, ready, out, now, nonce)
    return run, out


def first_events(submit: Submit, now: float) -> list[Event]:
    """The first two events of any run."""
    return [
        Event(1, now, "run.created", 1, None, None, created_data(submit)),
        Event(2, now, "run.started", 1),
    ]


def created_data(submit: Submit) -> dict[str, Any]:
    """The data of `run.created`."""
    data: dict[str, Any] = {"workflow": submit.graph.name, "version": submit.version}
    if submit.forked_from is not None:
        data["forked_from"] = submit.forked_from
    return data


def reuse(run: RunState, outputs: Mapping[str, Any], out: Decision, now: float) -> None:
    """Begin with these nodes as COMPLETED, with outputs of an earlier run. None was started.

    The outputs count towards the run's limit. A node whose output is beyond it is not reused, and
    no node below it is: they run.
    """
    specs, nodes = run.graph.nodes, run.nodes
    fitting = outputs.keys() if run.max_bytes is None else _fitting(run, outputs)
    for index, spec in enumerate(specs):
        if spec.id in fitting:
            nodes[index].output = output = outputs[spec.id]
            data = None
            if spec.for_each is not None and isinstance(output, list):
                data = {"items": len(output)}
                nodes[index].items = MapState.reused(len(output), output)
            finish(run, nodes[index], COMPLETED, now)
            record_change(run, index, out, now, "node.reused", data)
    count_parents(run, [i for i, node in enumerate(nodes) if node.status is PENDING])


def _fitting(run: RunState, outputs: Mapping[str, Any]) -> set[str]:
    """The nodes whose outputs the run may keep; parents come before their children."""
    specs, fitting = run.graph.nodes, set()
    runs: set[int] = set()
    for layer in layers([spec.parents for spec in specs]):
        for index in layer:
            spec = specs[index]
            is_below = not runs.isdisjoint(spec.parents)
            if spec.id not in outputs:
                if is_below:
                    runs.add(index)
            elif is_below or weigh(run, run.nodes[index], outputs[spec.id]):
                runs.add(index)
            else:
                fitting.add(spec.id)
    return fitting


def step(run: RunState, transition: Transition, now: float, nonce: int) -> Decision:
    """Change the run by one transition. `nonce` is new and unguessable at each call."""
    return RULES[type(transition)](run, transition, now, nonce)


# ── the rules, one function each ─────────────────────────────────────────────────────────


def claim(run: RunState, transition: Claim, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    if node.phase is not PUBLISHED or node.token != transition.token:
        return NOTHING  # started already, or a message from before its last attempt
    node.status = RUNNING  # as `start` would, without the call
    node.phase = None
    node.attempt = transition.token.attempt
    node.worker = transition.worker
    node.lease_until = transition.lease_until
    node.started_at = now
    if not run.logged:
        return TAKEN
    out = Decision()
    record_change(run, index, out, now, "node.started", {"worker": transition.worker})
    return out


def renew(run: RunState, transition: Renew, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    if node.status is not RUNNING or node.token != transition.token:
        return NOTHING  # lost or cancelled: the worker must stop its handler
    node.lease_until = transition.lease_until
    out = Decision()
    out.changed.append(index)
    return out


def complete(run: RunState, transition: Complete, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    if node.status is not RUNNING or node.token != transition.token:
        return refuse(run, index, transition.token, now)
    if run.max_bytes is not None and (error := weigh(run, node, transition.output)):
        return overweight(run, index, error, now, nonce)
    out = Decision()
    node.answered = transition.token
    node.output = transition.output
    node.error = None  # of an earlier attempt
    node.status = COMPLETED
    node.lease_until = None
    node.finished_at = now
    run.active -= 1
    run.unfinished -= 1
    out.changed.append(index)
    if run.logged:
        write(run, index, out, now, "node.completed")
    complete_children(run, index, out, now, nonce)
    return out


def recall(run: RunState, transition: Recall, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    if node.phase is not PUBLISHED or node.token != transition.token:
        return NOTHING
    if run.max_bytes is not None and (error := weigh(run, node, transition.output)):
        return overweight(run, index, error, now, nonce)
    out = Decision()
    node.output = transition.output
    node.error = None
    run.active -= 1
    finish(run, node, COMPLETED, now)
    record_change(run, index, out, now, "node.cached")
    complete_children(run, index, out, now, nonce)
    return out


def fail(run: RunState, transition: Fail, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    # Only a config that cannot be rendered fails before the start. If the store has lost a start,
    # the result of that start no longer counts, and the node starts again.
    stands = node.phase is PUBLISHED if transition.unrendered else node.status is RUNNING
    if node.token != transition.token or not stands:
        return NOTHING if transition.unrendered else refuse(run, index, transition.token, now)
    spec = run.graph.nodes[index]
    out = Decision()
    node.answered = transition.token
    run.active -= 1
    retry_number = node.attempt - node.crashes  # a lost worker does not use up a retry
    if (
        transition.permanent
        or retry_number > spec.max_retries
        or run.status is not RunStatus.RUNNING
    ):
        resolve(run, fail_node(run, index, transition.error, out, now), out, now, nonce)
    else:
        data = back_off(node, spec, transition, now, nonce)
        record_change(run, index, out, now, "node.retrying", data)
        out.wake = [(now + data["delay"], Wake(run.id, transition.node, node.token))]
        fill_slots_and_finish(run, out, now)
    return out


def reap(run: RunState, transition: Reap, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    if node.status is not RUNNING or node.token != transition.token:
        return NOTHING
    if node.lease_until is None or now < node.lease_until:
        return NOTHING  # renewed meanwhile
    out = Decision()
    lose_node(run, index, transition.max_crashes, out, now, nonce)
    fill_slots_and_finish(run, out, now)
    return out


def take_over(run: RunState, transition: TakeOver, now: float, nonce: int) -> Decision:
    if run.finished:
        return NOTHING
    out = Decision()
    for index, node in enumerate(run.nodes):
        if node.items is not None:
            take_over_items(run, index, transition, out, now, nonce)
        elif node.status is RUNNING:
            lose_node(run, index, transition.max_crashes, out, now, nonce)
        elif node.until is not None and transition.behind > 0:
            node.until -= transition.behind
            out.changed.append(index)
    fill_slots_and_finish(run, out, now)
    orders = outstanding(run)
    out.changed += orders.changed  # they have a new driver
    out.dispatch, out.wake = orders.dispatch, orders.wake
    return out


def take_over_items(
    run: RunState, index: int, transition: TakeOver, out: Decision, now: float, nonce: int
) -> None:
    """One after the other, as if each were reaped: the log does not say which it was."""
    _, items = map_of(run, index)
    for item, state in sorted(items.in_flight.items()):
        if state.status is RUNNING:
            lose_item(run, index, item, transition.max_crashes, out, now, nonce)
            advance_map(run, index, out, now, nonce)
        elif state.until is not None and transition.behind > 0:
            state.until -= transition.behind
            out.changed.append(index)


def park(run: RunState, transition: Park, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    if node.token != transition.token:
        return NOTHING
    if node.phase is PUBLISHED:
        run.active -= 1
    elif node.phase is not Phase.PARKED or node.until is None or transition.until >= node.until:
        return NOTHING  # a node that waits already may only come sooner
    out = Decision()
    node.phase = Phase.PARKED
    node.until = transition.until
    out.wake = [(transition.until, Wake(run.id, transition.node, transition.token))]
    data = {"until": transition.until, "resource_tag": run.graph.nodes[index].resource_tag}
    record_change(run, index, out, now, "node.parked", data)
    fill_slots_and_finish(run, out, now)
    return out


def wake(run: RunState, transition: Wake, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    if node.until is None or node.token != transition.token or now < node.until:
        return NOTHING  # it does not wait, or its time has not come
    out = Decision()
    out.changed.append(index)
    node.until = None
    publish(run, index, node, out)
    return out


def progress(run: RunState, transition: Progress, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(transition.node)
    if index is None:
        return apply_to_item(run, transition, now, nonce)
    node = run.nodes[index]
    if node.status is not RUNNING or node.token != transition.token:
        return NOTHING
    out = Decision()
    data = {"fraction": transition.fraction, "message": transition.message}
    record_change(run, index, out, now, "node.progress", data)
    return out


def cancel(run: RunState, transition: Cancel, now: float, nonce: int) -> Decision:
    if run.finished:
        return NOTHING
    out = Decision()
    out.stop = stop_orders(run, range(len(run.nodes)))
    for index, node in enumerate(run.nodes):
        if node.status not in FINISHED:
            if node.items is not None:
                for item in sorted(node.items.in_flight):
                    cancel_item(run, index, item, Reason.RUN_CANCELLED, out, now)
                node.items.ready.clear()
            cancel_node(run, index, Reason.RUN_CANCELLED, out, now)
    # Counted anew: a cancelled run ends, whatever its counts say.
    run.failed = count_failures(run)
    run.cancelled = sum(node.status is NodeStatus.CANCELLED for node in run.nodes)
    run.unfinished = run.active = 0
    run.held.clear()
    if run.status not in FINAL and not run.failed and not run.cancelled:
        run.status = RunStatus.CANCELLED
        log(run, out, now, "run.cancelled")
    fill_slots_and_finish(run, out, now)
    return out


def retry(run: RunState, transition: Retry, now: float, nonce: int) -> Decision:
    reset = retry_plan(run, transition.from_node)
    if isinstance(reset, str):
        return NOTHING
    nodes = run.nodes
    kept = [index for index in reset if keeps_items(run, index, reset, transition.from_node)]
    out = RetryDecision(reset, kept)
    run.epoch += 1
    run.status = RunStatus.RUNNING
    run.finished_at = None
    run.error = None
    log(
        run,
        out,
        now,
        "run.retried",
        {"from": transition.from_node} if transition.from_node else None,
    )
    out.stop = stop_orders(run, reset)
    out.changed += reset
    reset_nodes(run, reset, kept)
    # Counted anew from the states: the counts of a failed epoch do not matter.
    run.unfinished = sum(node.status not in FINISHED for node in nodes)
    run.failed = count_failures(run)
    run.cancelled = 0
    run.active = count_active(nodes)
    count_parents(run, reset)
    resolve(run, [index for index in reset if not nodes[index].waiting], out, now, nonce)
    for index, node in enumerate(nodes):
        if node.status is RUNNING and node.items is not None:
            advance_map(run, index, out, now, nonce)
    return out


def keeps_items(run: RunState, index: int, reset: list[int], from_node: str | None) -> bool:
    """Whether a retry that resets a mapped node keeps what its items have completed.

    It does if their list is the same as before: nothing above the node runs again. A node that was
    skipped is skipped again.
    """
    if run.nodes[index].items is None:
        return False
    above = {index, *descendants([spec.parents for spec in run.graph.nodes], index)}
    if from_node is not None and run.graph.index[from_node] in above:
        return False
    above.discard(index)
    return all(run.nodes[i].status is NodeStatus.SKIPPED for i in above.intersection(reset))


def reset_nodes(run: RunState, reset: Sequence[int], kept: Sequence[int]) -> None:
    """Open the run's new epoch for these nodes, and for mapped nodes whose items still run."""
    nodes = run.nodes
    for index in reset:
        old = nodes[index]
        nodes[index] = NodeState(run.epoch, 0)
        if index in kept and old.items is not None:
            nodes[index].items, nodes[index].size = old.items, old.size
            old.items.reopen()
        else:
            run.kept_bytes -= old.size
    for node in nodes:
        if node.status is RUNNING and node.items is not None:
            node.epoch = run.epoch
            node.token = node.token._replace(epoch=run.epoch)
            node.items.reopen()


def retry_plan(run: RunState, from_node: str | None = None) -> list[int] | str:
    """The nodes that a retry resets, in definition order, or why it is refused."""
    if from_node is not None and from_node not in run.graph.index:
        return f"run {run.id} has no node '{from_node}'"
    if run.status not in FINAL:
        return f"run {run.id} is {run.status}: only a run that has ended can be retried"
    if run.status is RunStatus.COMPLETED and from_node is None:
        return _completed(run)
    reset = {i for i, node in enumerate(run.nodes) if node.status not in (COMPLETED, RUNNING)}
    if from_node is not None:
        start = run.graph.index[from_node]
        reset.update((start, *run.graph.descendants(start)))
    return sorted(reset)


def _completed(run: RunState) -> str:
    """Why a retry of a completed run is refused if it names no node."""
    specs = run.graph.nodes
    allowed = [spec.id for spec in specs if is_allowed_failure(run, spec.index)]
    if not allowed:
        return f"run {run.id} is COMPLETED: name the node to rerun it from"
    names = ", ".join([*allowed[:MAX_NAMED], *["…"] * (len(allowed) > MAX_NAMED)])
    return (
        f"run {run.id} is COMPLETED with allowed failures ({names}): "
        "name the node to rerun it from with `from`"
    )


def explain_refusal(run: RunState, transition: Cancel | Retry) -> Conflict | NotFound:
    """The error for a command that got `NOTHING`."""
    if isinstance(transition, Cancel):
        return Conflict(f"run {run.id} is {run.status} already: there is nothing to cancel")
    why = str(retry_plan(run, transition.from_node))
    unknown = transition.from_node is not None and transition.from_node not in run.graph.index
    owner = run.graph.index.get(split_name(transition.from_node or "")[0])
    if unknown and owner is not None and run.graph.nodes[owner].for_each is not None:
        why += (
            ": it is an item. A retry without `from` runs each item that did not complete; "
            "`from` its node runs all of them"
        )
    return NotFound(why) if unknown else Conflict(why)


RULES: dict[type, Callable[[RunState, Any, float, int], Decision]] = {
    Claim: claim,
    Renew: renew,
    Complete: complete,
    Fail: fail,
    Reap: reap,
    TakeOver: take_over,
    Cancel: cancel,
    Retry: retry,
    Park: park,
    Wake: wake,
    Progress: progress,
    Recall: recall,
    Expand: expand,
}


UNKNOWN_WORKER = "unknown"
STARTED = {"worker": UNKNOWN_WORKER, "restored": True}
"""The data of the event for a start that may have happened."""


def counts_as_started(status: NodeStatus, at_most_once: bool) -> bool:
    """Whether a node that is restored with this status may have started."""
    return at_most_once and status is QUEUED


def restore(run: RunState, lease_until: float, now: float) -> Decision:
    """Restore a run from the archive: nodes that may have started are RUNNING.

    An archive is a little behind its store, and the store's last decisions are lost with it. Most
    of them are simply made again, but an `at_most_once` node must not start again. So the publisher
    brings the archive up to date before it sends such a node. This leaves two cases:

    - PENDING in the archive: the node was never published, and starts in its turn;
    - QUEUED in the archive, published or waiting: it may have started, and counts as started by an
      unknown worker. If that worker is alive, it has the token and its result counts. If no result
      comes until the lease ends, the node is FAILED with reason `worker_lost`; an explicit retry
      starts it.

    More nodes may run than `max_concurrency` allows: a held one may have been published since.
    """
    out = Decision()
    for index, (spec, node) in enumerate(zip(run.graph.nodes, run.nodes, strict=True)):
        if node.items is not None:
            if spec.at_most_once:
                _restore_items(run, index, lease_until, out, now)
            continue
        if spec.for_each is not None or not counts_as_started(node.status, spec.at_most_once):
            continue  # to render a list again starts nothing
        if node.phase is HELD:
            run.held.remove(index)
        if node.phase is not PUBLISHED:
            run.active += 1
        start(node, UNKNOWN_WORKER, lease_until, now)
        record_change(run, index, out, now, "node.started", dict(STARTED))
    heapify(run.held)
    return out


def _restore_items(
    run: RunState, index: int, lease_until: float, out: Decision, now: float
) -> None:
    """As for a node: the items that are in flight and do not run may have started."""
    node, (_, items) = run.nodes[index], map_of(run, index)
    for item, state in sorted(items.in_flight.items()):
        if state.status is not QUEUED:
            continue
        if state.phase is not PUBLISHED:
            run.active += 1
        start_item(run, index, item, state, lease_until, out, now, dict(STARTED))
    items.ready.clear()
    if node.phase is HELD:
        node.phase = None
        run.held.remove(index)


def is_restored_start(event: Event) -> bool:
    return event.type == "node.started" and bool((event.data or {}).get("restored"))
