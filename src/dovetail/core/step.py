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

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from dovetail.core.errors import Conflict, NotFound, TemplateError
from dovetail.core.events import Event, Token
from dovetail.core.retry import delay
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import FINAL, FINISHED, NodeStatus, Reason, RunStatus
from dovetail.core.transitions import (
    NOTHING,
    Cancel,
    Claim,
    Complete,
    Decision,
    Dispatch,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    Stop,
    Submit,
    Transition,
    Wake,
)

# Bound once: the rules below compare states a million times a minute.
PENDING, QUEUED, RUNNING = NodeStatus.PENDING, NodeStatus.QUEUED, NodeStatus.RUNNING
COMPLETED, FAILED = NodeStatus.COMPLETED, NodeStatus.FAILED
SKIPPED, CANCELLED = NodeStatus.SKIPPED, NodeStatus.CANCELLED
PUBLISHED, HELD = Phase.PUBLISHED, Phase.HELD
new_tuple = tuple.__new__  # a named tuple without its Python-level constructor: half the time


def begin(submit: Submit, now: float, nonce: int) -> tuple[RunState, Decision]:
    """Make the run of an accepted trigger and queue its first nodes."""
    run = RunState(submit.run_id, submit.graph, submit.params, now, submit.version)
    run.logged = submit.logged
    out = Decision()
    _log(run, out, now, "run.created", {"workflow": submit.graph.name, "version": submit.version})
    run.status = RunStatus.RUNNING
    run.started_at = now
    _log(run, out, now, "run.started")
    _resolve(run, list(submit.graph.roots), out, now, nonce)
    return run, out


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
    out = Decision()
    node.status = RUNNING
    node.phase = None
    node.attempt = move.token.attempt
    node.worker = move.worker
    node.lease_until = move.lease_until
    node.started_at = now
    out.changed.append(index)
    if run.logged:
        _event(run, index, out, now, "node.started", {"worker": move.worker})
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
        return _refuse(run, index, move.token, now)
    out = Decision()
    node.answered = move.token
    node.output = move.output
    node.status = COMPLETED
    node.lease_until = None
    node.finished_at = now
    run.active -= 1
    run.unfinished -= 1
    out.changed.append(index)
    if run.logged:
        _event(run, index, out, now, "node.completed")
    _settle(run, index, out, now, nonce)
    return out


def recall(run: RunState, move: Recall, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.phase is not PUBLISHED or node.token != move.token:
        return NOTHING
    out = Decision()
    node.output = move.output
    run.active -= 1
    _finish(run, node, COMPLETED, now)
    _note(run, index, out, now, "node.cached")
    _settle(run, index, out, now, nonce)
    return out


def fail(run: RunState, move: Fail, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    # A config that cannot be rendered fails before the start; nothing else may.
    unstarted = node.phase is PUBLISHED and move.permanent
    if node.token != move.token or not (node.status is RUNNING or unstarted):
        return _refuse(run, index, move.token, now)
    spec = run.graph.nodes[index]
    out = Decision()
    node.answered = move.token
    run.active -= 1
    retry_number = node.attempt - node.crashes  # a lost worker does not use up a retry
    if move.permanent or retry_number > spec.max_retries or run.status is not RunStatus.RUNNING:
        _fail(run, index, move.error, out, now)
    else:
        wait = delay(
            spec.retry, retry_number, move.chance, after=move.after, at_least=move.at_least
        )
        node.error = move.error
        told = {"error": move.error, "delay": wait, "retry": retry_number}
        _note(run, index, out, now, "node.retrying", told)
        _lay_down(node)
        _fence(node, nonce)
        node.status = QUEUED
        node.phase = Phase.BACKING_OFF
        node.until = now + wait
        out.wake = [(node.until, Wake(run.id, move.node, node.token))]
    _close(run, out, now)
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
    run.active -= 1
    node.crashes += 1
    _note(run, index, out, now, "node.lost", {"worker": node.worker, "crashes": node.crashes})
    if run.status is not RunStatus.RUNNING:
        _cancel_node(run, index, Reason.RUN_FAILED, out, now)  # nothing starts in a failed run
    elif run.graph.nodes[index].at_most_once or node.crashes >= move.max_crashes:
        starts = f"{node.crashes} start{'s' if node.crashes > 1 else ''}"
        error = {"type": "worker_lost", "message": f"its worker was lost at {starts}"}
        node.reason = Reason.WORKER_LOST
        _fail(run, index, error, out, now)
    else:
        _lay_down(node)
        _queue(run, index, out, now, nonce)
    _close(run, out, now)
    return out


def park(run: RunState, move: Park, now: float, nonce: int) -> Decision:
    index = run.graph.index.get(move.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.phase is not PUBLISHED or node.token != move.token:
        return NOTHING
    out = Decision()
    run.active -= 1
    node.phase = Phase.PARKED
    node.until = move.until
    out.wake = [(move.until, Wake(run.id, move.node, move.token))]
    told = {"until": move.until, "resource_tag": run.graph.nodes[index].resource_tag}
    _note(run, index, out, now, "node.parked", told)
    _close(run, out, now)
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
    _publish(run, index, node, out)
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
    _note(run, index, out, now, "node.progress", told)
    return out


def cancel(run: RunState, move: Cancel, now: float, nonce: int) -> Decision:
    if run.finished:
        return NOTHING
    out = Decision()
    out.stop = _stops(run, range(len(run.nodes)))
    for index, node in enumerate(run.nodes):
        if node.status not in FINISHED:
            _cancel_node(run, index, Reason.RUN_CANCELLED, out, now)
    run.active = 0
    run.held.clear()
    _close(run, out, now)
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
    _log(run, out, now, "run.retried", {"from": move.from_node} if move.from_node else None)
    out.stop = _stops(run, reset)
    out.changed += reset
    nodes = run.nodes
    for index in reset:
        nodes[index] = NodeState(run.epoch, 0)
    # Everything is counted anew from the states, never from what a failed epoch left behind.
    run.unfinished = sum(node.status not in FINISHED for node in nodes)
    run.failed = sum(node.status is FAILED for node in nodes)
    run.active = sum(node.status is RUNNING for node in nodes)
    for index in reset:
        parents = [nodes[parent].status for parent in run.graph.nodes[index].parents]
        nodes[index].waiting = sum(status not in (COMPLETED, SKIPPED) for status in parents)
        nodes[index].fed = COMPLETED in parents
    _resolve(run, [index for index in reset if not nodes[index].waiting], out, now, nonce)
    return out


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
    Cancel: cancel,
    Retry: retry,
    Park: park,
    Wake: wake,
    Progress: progress,
    Recall: recall,
}


# ── what the rules are made of ───────────────────────────────────────────────────────────


def _settle(run: RunState, index: int, out: Decision, now: float, nonce: int) -> None:
    """The node is COMPLETED: count it off at its children and queue those that are ready."""
    specs, nodes = run.graph.nodes, run.nodes
    queue: list[int] = []
    conditional: list[int] = []
    for child in specs[index].children:
        node = nodes[child]
        # Only a PENDING child waits: in a failed run they are finished, in a retried one some ran.
        if node.status is PENDING:
            node.fed = True
            node.waiting -= 1
            if not node.waiting:
                (queue if specs[child].condition is None else conditional).append(child)
    if conditional:
        _resolve(run, sorted(queue + conditional), out, now, nonce)
        return
    for child in queue:
        _queue(run, child, out, now, nonce)
    if run.held or not run.unfinished:
        _close(run, out, now)


def _resolve(run: RunState, ready: list[int], out: Decision, now: float, nonce: int) -> None:
    """Decide what becomes of nodes whose parents are all settled: queued, skipped or failed.

    A skipped node settles its own children, so this runs down a branch; with a list, not by
    recursion, because a branch may be ten thousand nodes long.
    """
    specs, nodes = run.graph.nodes, run.nodes
    queue: list[int] = []
    for index in ready:  # grows while we walk it
        spec, node = specs[index], nodes[index]
        if node.status is not PENDING:
            continue  # a failure earlier in this very decision has ended it
        if spec.parents and not node.fed:
            reason = Reason.DEPENDENCY_SKIPPED
        elif spec.condition is None:
            queue.append(index)
            continue
        else:
            try:
                if spec.condition(run):
                    queue.append(index)
                    continue
            except TemplateError as problem:
                message = f"node '{spec.id}': condition {problem}"
                _fail(run, index, {"type": problem.type, "message": message}, out, now)
                continue
            reason = Reason.CONDITION_FALSE
        _skip_node(run, index, reason, None, out, now)
        for child in spec.children:
            if nodes[child].status is PENDING:
                nodes[child].waiting -= 1
                if not nodes[child].waiting:
                    ready.append(child)
    queue.sort()
    for index in queue:
        if nodes[index].status is PENDING:  # a condition above may have failed the run
            _queue(run, index, out, now, nonce)
    _close(run, out, now)


def _queue(run: RunState, index: int, out: Decision, now: float, nonce: int) -> None:
    node = run.nodes[index]
    node.status = QUEUED
    _fence(node, nonce)
    out.changed.append(index)
    if run.logged:
        _event(run, index, out, now, "node.queued")
    _publish(run, index, node, out)


def _lay_down(node: NodeState) -> None:
    """The node runs no more: nobody holds it."""
    node.lease_until = None
    node.worker = None


def _fence(node: NodeState, nonce: int) -> None:
    """A token for the node's next start; whatever carries the old one is stale from now on."""
    node.token = new_tuple(Token, (node.epoch, node.attempt + 1, nonce))


def _publish(run: RunState, index: int, node: NodeState, out: Decision) -> None:
    """Hand a QUEUED node to the transport, or hold it while the run is at its limit."""
    limit = run.graph.max_concurrency
    if limit is not None and run.active >= limit:
        node.phase = HELD
        heappush(run.held, index)
        return
    run.active += 1
    node.phase = PUBLISHED
    out.dispatch.append(new_tuple(Dispatch, (run, index, node.token)))


def _close(run: RunState, out: Decision, now: float) -> None:
    """What every decision ends with: freed places are taken, and the last node ends the run."""
    if run.held:
        limit = run.graph.max_concurrency
        while run.held and limit is not None and run.active < limit:
            index = heappop(run.held)
            out.changed.append(index)
            _publish(run, index, run.nodes[index], out)
    if not run.unfinished and run.finished_at is None:
        _end(run, out, now)


def _end(run: RunState, out: Decision, now: float) -> None:
    run.finished_at = now
    out.ended = True
    if run.status in FINAL:
        return  # `fail_fast` said so at once; it only waited for its running nodes
    if run.failed:
        run.status = RunStatus.FAILED
        run.error = _first_error(run)
        _log(run, out, now, "run.failed", {"error": run.error})
    elif any(node.status is CANCELLED for node in run.nodes):
        run.status = RunStatus.CANCELLED
        _log(run, out, now, "run.cancelled")
    else:
        run.status = RunStatus.COMPLETED
        _log(run, out, now, "run.completed")


def _first_error(run: RunState) -> dict[str, Any] | None:
    """Of the first failed node in the definition, so that it does not depend on timing."""
    for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
        if node.status is FAILED and node.error is not None:
            return {**node.error, "node": spec.id}
    return None


def _fail(run: RunState, index: int, error: dict[str, Any], out: Decision, now: float) -> None:
    """A node failed for good: what that does to the rest of the run."""
    graph, nodes = run.graph, run.nodes
    node, node_id = nodes[index], graph.nodes[index].id
    node.error = error
    _finish(run, node, FAILED, now)
    run.failed += 1
    told: dict[str, Any] = {"error": error}
    if node.reason is not None:
        told["reason"] = node.reason
    _note(run, index, out, now, "node.failed", told)
    if run.status is not RunStatus.RUNNING:
        return  # the run had failed before; this node was only allowed to finish
    below = _pending_below(run, index)
    if not graph.fail_fast:
        for child in below:
            _skip_node(run, child, Reason.DEPENDENCY_FAILED, node_id, out, now)
        return
    run.status = RunStatus.FAILED
    run.error = {**error, "node": node_id}
    why = {"reason": Reason.DEPENDENCY_FAILED, "cause": node_id}
    for child in below:
        nodes[child].reason, nodes[child].cause = Reason.DEPENDENCY_FAILED, node_id
        _finish(run, nodes[child], FAILED, now)
        run.failed += 1
        _note(run, child, out, now, "node.failed", why)
    for other, bystander in enumerate(nodes):
        if bystander.phase is PUBLISHED:
            run.active -= 1
        if bystander.status is PENDING or bystander.status is QUEUED:
            _cancel_node(run, other, Reason.RUN_FAILED, out, now)
    run.held.clear()
    _log(run, out, now, "run.failed", {"error": run.error})


def _pending_below(run: RunState, index: int) -> list[int]:
    """The descendants that still wait, in definition order.

    Behind a node that is done with, everything is: so the walk stops there, and all failures
    of a run together walk each edge once.
    """
    found: set[int] = set()
    todo = [index]
    while todo:
        for child in run.graph.nodes[todo.pop()].children:
            if child not in found and run.nodes[child].status is PENDING:
                found.add(child)
                todo.append(child)
    return sorted(found)


def _skip_node(
    run: RunState, index: int, reason: Reason, cause: str | None, out: Decision, now: float
) -> None:
    node = run.nodes[index]
    node.reason, node.cause = reason, cause
    _finish(run, node, SKIPPED, now)
    why: dict[str, Any] = {"reason": reason}
    if cause is not None:
        why["cause"] = cause
    _note(run, index, out, now, "node.skipped", why)


def _cancel_node(run: RunState, index: int, reason: Reason, out: Decision, now: float) -> None:
    node = run.nodes[index]
    node.reason = reason
    _finish(run, node, CANCELLED, now)
    _note(run, index, out, now, "node.cancelled", {"reason": reason})


def _stops(run: RunState, indices: Iterable[int]) -> list[Stop]:
    """The orders that end what of these nodes is running."""
    return [
        Stop(run.id, run.graph.nodes[i].id, run.nodes[i].token)
        for i in indices
        if run.nodes[i].status is RUNNING
    ]


def _finish(run: RunState, node: NodeState, status: NodeStatus, now: float) -> None:
    node.status = status
    node.phase = None
    node.until = None
    node.lease_until = None
    node.finished_at = now
    run.unfinished -= 1


def _refuse(run: RunState, index: int, token: Token, now: float) -> Decision:
    """A result nobody waits for. The log keeps it; nothing follows from it."""
    node = run.nodes[index]
    if node.answered == token:
        return NOTHING  # the same result again: it was taken the first time
    if not run.logged:
        return NOTHING
    out = Decision()
    run.seq += 1
    why = {"reason": "stale" if node.token != token else f"node is {node.status}"}
    name = run.graph.nodes[index].id
    out.events.append(Event(run.seq, now, "result.refused", token.epoch, name, token.attempt, why))
    return out


def _note(
    run: RunState,
    index: int,
    out: Decision,
    now: float,
    kind: str,
    data: dict[str, Any] | None = None,
) -> None:
    """A node moved: say so, and write its event with the transition that it reports."""
    out.changed.append(index)
    if run.logged:
        _event(run, index, out, now, kind, data)


def _event(
    run: RunState,
    index: int,
    out: Decision,
    now: float,
    kind: str,
    data: dict[str, Any] | None = None,
) -> None:
    node = run.nodes[index]
    run.seq = seq = run.seq + 1
    fields = (seq, now, kind, node.epoch, run.graph.nodes[index].id, node.attempt, data)
    out.events.append(new_tuple(Event, fields))


def _log(
    run: RunState, out: Decision, now: float, kind: str, data: dict[str, Any] | None = None
) -> None:
    if run.logged:
        run.seq += 1
        out.events.append(Event(run.seq, now, kind, run.epoch, None, None, data))
