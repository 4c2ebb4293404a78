"""The rules: what happened comes in, what follows from it goes out.

    step(run, transition, now, nonce) -> Decision

Everything that moves a run is one of the transitions below, and every store gives the same
answer to it as `step` does. Time and chance are arguments; nothing here sends, sleeps or
looks at a clock. A transition that is late, repeated or lost is refused: `step` then returns
`NOTHING` (or, for a stale result, a decision that is only an event) and the run is untouched.
Refusing is normal, not an error.

How the pieces hold together:

- **Fencing.** A node gets a `Token` when it is queued. Claim, renew, complete, fail, park and
  reap carry it; one comparison with the stored one replaces every flag and lock.
- **Fan-in.** `waiting` counts a node's unsettled parents. A parent settles once per epoch,
  because it can enter COMPLETED or SKIPPED only once, so the count cannot be spent twice.
- **Order.** Nodes that become ready in one transition are queued in definition order, after
  every skip that follows from it has been worked out.
- **Cost.** A completion costs O(children). Only a failure under `fail_fast`, a cancel and a
  retry look at the whole run, each once per epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.core.effects import (
    COMPLETED,
    FAILED,
    PENDING,
    PUBLISHED,
    QUEUED,
    RUNNING,
    SKIPPED,
    cancel_node,
    complete_children,
    fail_node,
    fence,
    fill_slots_and_finish,
    finish,
    log,
    lose_node,
    outstanding,
    overweight,
    publish,
    record_change,
    refuse,
    release_lease,
    resolve,
    stops,
    weigh,
    write,
)
from dovetail.core.errors import Conflict, NotFound
from dovetail.core.retry import delay
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import FINAL, FINISHED, NodeStatus, Reason, RunStatus
from dovetail.core.transitions import (
    NOTHING,
    TAKEN,
    Cancel,
    Claim,
    Complete,
    Decision,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    Submit,
    TakeOver,
    Transition,
    Wake,
)


def begin(submit: Submit, now: float, nonce: int) -> tuple[RunState, Decision]:
    """Make the run of an accepted trigger and queue its first nodes."""
    run = RunState(submit.run_id, submit.graph, submit.params, now, submit.version)
    run.logged = submit.logged
    run.max_bytes = submit.max_bytes
    out = Decision()
    log(run, out, now, "run.created", {"workflow": submit.graph.name, "version": submit.version})
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


def reuse(run: RunState, outputs: Mapping[str, Any], out: Decision, now: float) -> None:
    """Begin with these nodes as COMPLETED: an earlier run has their outputs. None was started."""
    graph, nodes = run.graph, run.nodes
    for index, spec in enumerate(graph.nodes):
        if spec.id in outputs:
            nodes[index].output = outputs[spec.id]
            finish(run, nodes[index], COMPLETED, now)
            record_change(run, index, out, now, "node.reused")
    count_parents(run, [i for i, node in enumerate(nodes) if node.status is PENDING])


def step(run: RunState, transition: Transition, now: float, nonce: int) -> Decision:
    """Move the run by one transition. `nonce` is fresh and unguessable at every call."""
    return RULES[type(transition)](run, transition, now, nonce)


# ── the rules, one function each ─────────────────────────────────────────────────────────


def claim(run: RunState, move: Claim, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.phase is not PUBLISHED or node.token != move.token:
        return NOTHING  # started already, or a message from before its last attempt
    node.status = RUNNING
    node.phase = None
    node.attempt = move.token.attempt
    node.worker = move.worker
    node.lease_until = move.lease_until
    node.started_at = now
    if not run.logged:
        return TAKEN
    out = Decision()
    record_change(run, index, out, now, "node.started", {"worker": move.worker})
    return out


def renew(run: RunState, move: Renew, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.status is not RUNNING or node.token != move.token:
        return NOTHING  # lost or cancelled: the worker must stop its handler
    node.lease_until = move.lease_until
    out = Decision()
    out.changed.append(index)
    return out


def complete(run: RunState, move: Complete, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.status is not RUNNING or node.token != move.token:
        return refuse(run, index, move.token, now)
    if run.max_bytes is not None and (error := weigh(run, node, move.output)):
        return overweight(run, index, error, now)
    out = Decision()
    node.answered = move.token
    node.output = move.output
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


def recall(run: RunState, move: Recall, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.phase is not PUBLISHED or node.token != move.token:
        return NOTHING
    if run.max_bytes is not None and (error := weigh(run, node, move.output)):
        return overweight(run, index, error, now)
    out = Decision()
    node.output = move.output
    node.error = None
    run.active -= 1
    finish(run, node, COMPLETED, now)
    record_change(run, index, out, now, "node.cached")
    complete_children(run, index, out, now, nonce)
    return out


def fail(run: RunState, move: Fail, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    # A config that cannot be rendered fails before the start, and nothing else does: if the store
    # has lost a start, what became of it counts no more, and the node starts again.
    stands = node.phase is PUBLISHED if move.unrendered else node.status is RUNNING
    if node.token != move.token or not stands:
        return NOTHING if move.unrendered else refuse(run, index, move.token, now)
    spec = run.graph.nodes[index]
    out = Decision()
    node.answered = move.token
    run.active -= 1
    retry_number = node.attempt - node.crashes  # a lost worker does not use up a retry
    if move.permanent or retry_number > spec.max_retries or run.status is not RunStatus.RUNNING:
        fail_node(run, index, move.error, out, now)
    else:
        wait = delay(
            spec.retry, retry_number, move.chance, after=move.after, at_least=move.at_least
        )
        node.error = move.error
        told = {"error": move.error, "delay": wait, "retry": retry_number}
        record_change(run, index, out, now, "node.retrying", told)
        release_lease(node)
        fence(node, nonce)
        node.status = QUEUED
        node.phase = Phase.BACKING_OFF
        node.until = now + wait
        out.wake = [(node.until, Wake(run.id, move.node, node.token))]
    fill_slots_and_finish(run, out, now)
    return out


def reap(run: RunState, move: Reap, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.status is not RUNNING or node.token != move.token:
        return NOTHING
    if node.lease_until is None or now < node.lease_until:
        return NOTHING  # renewed meanwhile
    out = Decision()
    lose_node(run, index, move.max_crashes, out, now, nonce)
    fill_slots_and_finish(run, out, now)
    return out


def take_over(run: RunState, move: TakeOver, now: float, nonce: int) -> Decision:
    if run.finished:
        return NOTHING
    out = Decision()
    for index, node in enumerate(run.nodes):
        if node.status is RUNNING:
            lose_node(run, index, move.max_crashes, out, now, nonce)
        elif node.until is not None and move.behind > 0:
            node.until -= move.behind
            out.changed.append(index)
    fill_slots_and_finish(run, out, now)
    orders = outstanding(run)
    out.changed += orders.changed  # who has to see to it is another
    out.dispatch, out.wake = orders.dispatch, orders.wake
    return out


def park(run: RunState, move: Park, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.token != move.token:
        return NOTHING
    if node.phase is PUBLISHED:
        run.active -= 1
    elif node.phase is not Phase.PARKED or node.until is None or move.until >= node.until:
        return NOTHING  # one that waits already may only come sooner
    out = Decision()
    node.phase = Phase.PARKED
    node.until = move.until
    out.wake = [(move.until, Wake(run.id, move.node, move.token))]
    told = {"until": move.until, "resource_tag": run.graph.nodes[index].resource_tag}
    record_change(run, index, out, now, "node.parked", told)
    fill_slots_and_finish(run, out, now)
    return out


def wake(run: RunState, move: Wake, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.until is None or node.token != move.token or now < node.until:
        return NOTHING  # it does not wait, or not yet long enough
    out = Decision()
    out.changed.append(index)
    node.until = None
    publish(run, index, node, out)
    return out


def progress(run: RunState, move: Progress, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.status is not RUNNING or node.token != move.token:
        return NOTHING
    out = Decision()
    told = {"fraction": move.fraction, "message": move.message}
    record_change(run, index, out, now, "node.progress", told)
    return out


def cancel(run: RunState, move: Cancel, now: float, nonce: int) -> Decision:
    if run.finished:
        return NOTHING
    out = Decision()
    out.stop = stops(run, range(len(run.nodes)))
    for index, node in enumerate(run.nodes):
        if node.status not in FINISHED:
            cancel_node(run, index, Reason.RUN_CANCELLED, out, now)
    # Counted anew: a run that somebody cancels ends, whatever its counts say.
    statuses = [node.status for node in run.nodes]
    run.failed, run.cancelled = statuses.count(FAILED), statuses.count(NodeStatus.CANCELLED)
    run.unfinished = run.active = 0
    run.held.clear()
    if run.status not in FINAL and not run.failed and not run.cancelled:
        run.status = RunStatus.CANCELLED
        log(run, out, now, "run.cancelled")
    fill_slots_and_finish(run, out, now)
    return out


def retry(run: RunState, move: Retry, now: float, nonce: int) -> Decision:
    reset = retry_plan(run, move.from_node)
    if isinstance(reset, str):
        return NOTHING
    out = Decision()
    run.epoch += 1
    run.status = RunStatus.RUNNING
    run.finished_at = None
    run.error = None
    log(run, out, now, "run.retried", {"from": move.from_node} if move.from_node else None)
    out.stop = stops(run, reset)
    out.changed += reset
    nodes = run.nodes
    for index in reset:
        run.kept_bytes -= nodes[index].size
        nodes[index] = NodeState(run.epoch, 0)
    # Everything is counted anew from the states, never from what a failed epoch left behind.
    run.unfinished = sum(node.status not in FINISHED for node in nodes)
    run.failed = sum(node.status is FAILED for node in nodes)
    run.cancelled = 0
    run.active = sum(node.status is RUNNING for node in nodes)
    count_parents(run, reset)
    resolve(run, [index for index in reset if not nodes[index].waiting], out, now, nonce)
    return out


def count_parents(run: RunState, pending: list[int]) -> None:
    """Of nodes that are PENDING: how many parents they wait for, from the parents' states."""
    for index in pending:
        parents = [run.nodes[parent].status for parent in run.graph.nodes[index].parents]
        run.nodes[index].waiting = sum(status not in (COMPLETED, SKIPPED) for status in parents)
        run.nodes[index].fed = COMPLETED in parents


def retry_plan(run: RunState, from_node: str | None = None) -> list[int] | str:
    """The nodes that a retry would reset, in definition order, or why it is refused."""
    if from_node is not None and from_node not in run.graph.index:
        return f"run {run.id} has no node '{from_node}'"
    if run.status not in FINAL:
        return f"run {run.id} is {run.status}: only a run that has ended can be retried"
    if run.status is RunStatus.COMPLETED and from_node is None:
        return f"run {run.id} is COMPLETED: name the node to rerun it from"
    reset = {i for i, node in enumerate(run.nodes) if node.status not in (COMPLETED, RUNNING)}
    if from_node is not None:
        start = run.graph.index[from_node]
        reset.update((start, *run.graph.descendants(start)))
    return sorted(reset)


def explain_refusal(run: RunState, move: Cancel | Retry) -> Conflict | NotFound:
    """Why a command got `NOTHING`, as the error to show."""
    if isinstance(move, Cancel):
        return Conflict(f"run {run.id} is {run.status} already: there is nothing to cancel")
    why = str(retry_plan(run, move.from_node))
    unknown = move.from_node is not None and move.from_node not in run.graph.index
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
}
