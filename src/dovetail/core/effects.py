"""What the rules in `step` are made of: what follows when a node completes, fails, is skipped or
waits.

Each function changes the run in place and writes into the given `Decision`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from orjson import dumps

from dovetail.core.dag import MapSpec, NodeSpec
from dovetail.core.errors import TemplateError
from dovetail.core.events import NO_START, TRACEBACK, Event, Token
from dovetail.core.items import MapState, item_name
from dovetail.core.retry import delay
from dovetail.core.run import NodeState, Phase, RunState, encoded_size
from dovetail.core.states import FINAL, NodeStatus, Reason, RunStatus
from dovetail.core.text import died_during
from dovetail.core.transitions import NOTHING, Decision, Dispatch, Fail, Stop, Wake

# Bound once: the rules below compare states a million times a minute.
PENDING, QUEUED, RUNNING = NodeStatus.PENDING, NodeStatus.QUEUED, NodeStatus.RUNNING
COMPLETED, FAILED = NodeStatus.COMPLETED, NodeStatus.FAILED
SKIPPED, CANCELLED = NodeStatus.SKIPPED, NodeStatus.CANCELLED
PUBLISHED, HELD = Phase.PUBLISHED, Phase.HELD
new_tuple = tuple.__new__  # a named tuple without its Python-level constructor: half the time


class Undecided(Exception):
    """Raised by a condition without a verdict yet: nodes that became ready with it stay pending."""


def complete_children(run: RunState, index: int, out: Decision, now: float, nonce: int) -> None:
    """The node is COMPLETED: count it off at its children and queue the children that are ready."""
    specs, nodes = run.graph.nodes, run.nodes
    queue: list[int] = []
    direct = True
    for child in specs[index].children:
        node = nodes[child]
        # Only a PENDING child waits: after a failure children are finished, after a retry some ran.
        if node.status is PENDING:
            node.fed = True
            node.waiting -= 1
            if not node.waiting:
                queue.append(child)
                if not specs[child].is_direct:
                    direct = False
    if not direct:
        resolve(run, queue, out, now, nonce)
        return
    for child in queue:
        queue_node(run, child, out, now, nonce)
    if run.held or not run.unfinished:
        fill_slots_and_finish(run, out, now)


def resolve(run: RunState, ready: list[int], out: Decision, now: float, nonce: int) -> None:
    """Queue, skip or fail nodes whose parents are all settled.

    A skipped node settles its children in turn. A list instead of recursion, because a branch may
    be ten thousand nodes long.
    """
    specs, nodes = run.graph.nodes, run.nodes
    queue: list[int] = []
    for index in ready:  # grows while we walk it
        spec, node = specs[index], nodes[index]
        if node.status is not PENDING:
            continue  # a failure earlier in this decision has ended it
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
            except Undecided:
                return  # nothing is queued before all are decided: `resolve` comes again
            except TemplateError as problem:
                error = {
                    "type": problem.type,
                    "message": f"node '{spec.id}': condition {problem}",
                }
                ready.extend(fail_node(run, index, error, out, now))
                continue
            reason = Reason.CONDITION_FALSE
        skip_node(run, index, reason, None, out, now)
        for child in spec.children:
            if nodes[child].status is PENDING:
                nodes[child].waiting -= 1
                if not nodes[child].waiting:
                    ready.append(child)
    queue.sort()
    for index in queue:
        if nodes[index].status is not PENDING:
            continue  # a condition above has failed the run
        if specs[index].for_each is None:
            queue_node(run, index, out, now, nonce)
        else:
            queue_map(run, index, out, now, nonce)
    fill_slots_and_finish(run, out, now)


def count_parents(run: RunState, pending: list[int]) -> None:
    """Set how many parents these PENDING nodes wait for, from the parents' states."""
    for index in pending:
        parents = run.graph.nodes[index].parents
        done = sum(is_done(run, parent) for parent in parents)
        skipped = sum(run.nodes[parent].status is SKIPPED for parent in parents)
        run.nodes[index].waiting = len(parents) - done - skipped
        run.nodes[index].fed = done > 0


def is_done(run: RunState, index: int) -> bool:
    """Whether the node lets its children run: it completed, or its failure is allowed."""
    return run.nodes[index].status is COMPLETED or is_allowed_failure(run, index)


def is_allowed_failure(run: RunState, index: int) -> bool:
    """Whether the node failed by itself, and that does not fail its run.

    A node that `fail_fast` failed along with its parent did not fail by itself.
    """
    node = run.nodes[index]
    return (
        node.status is FAILED
        and run.graph.nodes[index].allow_failure
        and node.reason is not Reason.DEPENDENCY_FAILED
    )


def count_failures(run: RunState) -> int:
    """The failed nodes that fail the run."""
    return sum(
        node.status is FAILED and not is_allowed_failure(run, index)
        for index, node in enumerate(run.nodes)
    )


def queue_node(run: RunState, index: int, out: Decision, now: float, nonce: int) -> None:
    node = run.nodes[index]
    node.status = QUEUED
    node.token = new_tuple(Token, (node.epoch, node.attempt + 1, nonce))
    out.changed.append(index)
    if run.logged:
        write(run, index, out, now, "node.queued")
    if run.graph.max_concurrency is None:  # as `publish` would, without the call
        run.active += 1
        node.phase = PUBLISHED
        out.dispatch.append(new_tuple(Dispatch, (run, index, node.token, None)))
    else:
        publish(run, index, node, out)


def weigh(run: RunState, node: NodeState, output: Any) -> dict[str, Any] | None:
    """Add an output to the run's bytes; the error if the run would exceed its limit."""
    kept, limit = run.kept_bytes, run.max_bytes
    # As `encoded_size`, without the call: every node comes here.
    size = len(dumps(output)) if type(output) is dict else encoded_size(output)
    if limit is not None and kept + size > limit:
        # The same words as in effects.lua.
        message = (
            f"the run keeps {kept} bytes of outputs and this output has {size}: together more "
            f"than the {limit} bytes that a run may keep (DOVETAIL_MAX_RUN_BYTES)"
        )
        return {"type": "too_large", "message": message}
    run.kept_bytes = kept + size
    node.size = size
    return None


def overweight(
    run: RunState, index: int, error: dict[str, Any], now: float, nonce: int
) -> Decision:
    """The output exceeds the run's limit: the node fails without a retry."""
    out = Decision()
    node = run.nodes[index]
    node.answered = node.token
    run.active -= 1
    resolve(run, fail_node(run, index, error, out, now), out, now, nonce)
    return out


def start(node: NodeState, worker: str, lease_until: float, now: float) -> None:
    """A worker runs the node, or the item, from now on."""
    node.status, node.phase, node.until = RUNNING, None, None
    node.attempt = node.token.attempt
    node.worker, node.lease_until, node.started_at = worker, lease_until, now


def release_lease(node: NodeState) -> None:
    """No worker runs the node any more."""
    node.lease_until = None
    node.worker = None


def fence(node: NodeState, nonce: int) -> None:
    """Give the node the token of its next start; messages with the old token are stale now."""
    node.token = new_tuple(Token, (node.epoch, node.attempt + 1, nonce))


def publish(run: RunState, index: int, node: NodeState, out: Decision) -> None:
    """Hand a QUEUED node to the transport, or hold it while the run is at its limit.

    A slot that this decision freed goes to the first node in the definition: while others are held
    the node joins them, and `fill_slots_and_finish` chooses.
    """
    limit = run.graph.max_concurrency
    if limit is not None and (run.held or run.active >= limit):
        node.phase = HELD
        heappush(run.held, index)
        return
    run.active += 1
    node.phase = PUBLISHED
    out.dispatch.append(new_tuple(Dispatch, (run, index, node.token, None)))


def fill_slots_and_finish(run: RunState, out: Decision, now: float) -> None:
    """End a decision: held nodes take free slots, and the last node ends the run."""
    if run.held:
        limit = run.graph.max_concurrency
        while run.held and limit is not None and run.active < limit:
            index = heappop(run.held)
            out.changed.append(index)
            node = run.nodes[index]
            if node.items is not None:
                publish_held_items(run, index, out)
                continue
            run.active += 1
            node.phase = PUBLISHED
            out.dispatch.append(new_tuple(Dispatch, (run, index, node.token, None)))
    if not run.unfinished and run.finished_at is None:
        end_run(run, out, now)


def end_run(run: RunState, out: Decision, now: float) -> None:
    run.finished_at = now
    out.ended = True
    if run.status in FINAL:
        return  # `fail_fast` set it before; the run only waited for its running nodes
    if run.failed:
        run.status = RunStatus.FAILED
        run.error = first_error(run)
        log(run, out, now, "run.failed", {"error": run.error})
    elif run.cancelled:
        run.status = RunStatus.CANCELLED
        log(run, out, now, "run.cancelled")
    else:
        run.status = RunStatus.COMPLETED
        log(run, out, now, "run.completed")


def first_error(run: RunState) -> dict[str, Any] | None:
    """The error of the first failed node in the definition, so that timing does not matter.

    The error of an allowed failure is not the run's.
    """
    for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
        if node.status is not FAILED or is_allowed_failure(run, spec.index):
            continue
        if node.error is not None:
            return {**node.error, "node": spec.id}
    return None


def failure_data(error: dict[str, Any]) -> dict[str, Any]:
    """The data of the event of a failed attempt: its error, and the traceback beside it.

    Only the event keeps the traceback. The errors of nodes and runs are read often, and stay small.
    """
    if TRACEBACK not in error:
        return {"error": error}
    small = {name: value for name, value in error.items() if name != TRACEBACK}
    return {"error": small, TRACEBACK: error[TRACEBACK]}


def back_off(
    node: NodeState, spec: NodeSpec, failed: Fail, now: float, nonce: int
) -> dict[str, Any]:
    """The node, or the item, waits for its next attempt. Returns the data of its event."""
    retry_number = node.attempt - node.crashes
    data = failure_data(failed.error)
    node.error = data["error"]
    wait = delay(
        spec.retry, retry_number, failed.chance, after=failed.after, at_least=failed.at_least
    )
    release_lease(node)
    fence(node, nonce)
    node.status, node.phase, node.until = QUEUED, Phase.BACKING_OFF, now + wait
    return data | {"delay": wait, "retry": retry_number}


def fail_node(
    run: RunState, index: int, error: dict[str, Any], out: Decision, now: float
) -> list[int]:
    """End a node as FAILED, with its descendants and, under `fail_fast`, the whole run.

    An allowed failure ends only the node; the children that are ready by it are returned.
    """
    graph, nodes = run.graph, run.nodes
    node, node_id = nodes[index], graph.nodes[index].id
    is_allowed = graph.nodes[index].allow_failure
    data = failure_data(error)
    node.error = error = data["error"]
    finish(run, node, FAILED, now)
    run.failed += not is_allowed
    if node.reason is not None:
        data["reason"] = node.reason
    record_change(run, index, out, now, "node.failed", data)
    if run.status is not RunStatus.RUNNING:
        return []  # the run had failed before; this node only had to finish
    if is_allowed:
        return feed_children(run, index)
    below = pending_below(run, index)
    if not graph.fail_fast:
        for child in below:
            skip_node(run, child, Reason.DEPENDENCY_FAILED, node_id, out, now)
        return []
    run.status = RunStatus.FAILED
    run.error = {**error, "node": node_id}
    why = {"reason": Reason.DEPENDENCY_FAILED, "cause": node_id}
    for child in below:
        nodes[child].reason, nodes[child].cause = Reason.DEPENDENCY_FAILED, node_id
        finish(run, nodes[child], FAILED, now)
        run.failed += 1
        record_change(run, child, out, now, "node.failed", why)
    for other, bystander in enumerate(nodes):
        if bystander.items is not None:
            if bystander.finished_at is None:
                cancel_waiting_items(run, other, Reason.RUN_FAILED, out, now)
                if not bystander.items.in_flight:  # else it ends with its running items
                    cancel_node(run, other, Reason.RUN_FAILED, out, now)
            continue
        if bystander.phase is PUBLISHED:
            run.active -= 1
        if bystander.status is PENDING or bystander.status is QUEUED:
            cancel_node(run, other, Reason.RUN_FAILED, out, now)
    run.held.clear()
    log(run, out, now, "run.failed", {"error": run.error})
    return []


def feed_children(run: RunState, index: int) -> list[int]:
    """The failure of the node is allowed: count it off at its children as if it had completed.
    Returns the children that are ready."""
    ready = []
    for child in run.graph.nodes[index].children:
        node = run.nodes[child]
        if node.status is PENDING:
            node.waiting -= 1
            node.fed = True
            if not node.waiting:
                ready.append(child)
    return ready


def lose_node(
    run: RunState, index: int, max_crashes: int, out: Decision, now: float, nonce: int
) -> None:
    """The worker of a RUNNING node is lost: queue the node again, unless that is not allowed."""
    node = run.nodes[index]
    run.active -= 1
    node.crashes += 1
    record_change(
        run, index, out, now, "node.lost", {"worker": node.worker, "crashes": node.crashes}
    )
    if run.graph.nodes[index].at_most_once or node.crashes >= max_crashes:
        message = died_during(node.crashes, node.attempt)
        error = {"type": Reason.WORKER_LOST.value, "message": message}
        node.reason = Reason.WORKER_LOST
        if ready := fail_node(run, index, error, out, now):
            resolve(run, ready, out, now, nonce)
    elif run.status is not RunStatus.RUNNING:
        cancel_node(run, index, Reason.RUN_FAILED, out, now)  # nothing starts in a failed run
    else:
        release_lease(node)
        queue_node(run, index, out, now, nonce)


def pending_below(run: RunState, index: int) -> list[int]:
    """The PENDING descendants, in definition order.

    Below a finished node all nodes are finished: so the walk stops there, and all failures of a
    run together visit each edge once.
    """
    found: set[int] = set()
    todo = [index]
    while todo:
        for child in run.graph.nodes[todo.pop()].children:
            if child not in found and run.nodes[child].status is PENDING:
                found.add(child)
                todo.append(child)
    return sorted(found)


def skip_node(
    run: RunState, index: int, reason: Reason, cause: str | None, out: Decision, now: float
) -> None:
    node = run.nodes[index]
    node.reason, node.cause = reason, cause
    finish(run, node, SKIPPED, now)
    why: dict[str, Any] = {"reason": reason}
    if cause is not None:
        why["cause"] = cause
    record_change(run, index, out, now, "node.skipped", why)


def cancel_node(run: RunState, index: int, reason: Reason, out: Decision, now: float) -> None:
    node = run.nodes[index]
    node.reason = reason
    finish(run, node, CANCELLED, now)
    run.cancelled += 1
    record_change(run, index, out, now, "node.cancelled", {"reason": reason})


# ── mapped nodes and their items ─────────────────────────────────────────────────────────


def queue_map(run: RunState, index: int, out: Decision, now: float, nonce: int) -> None:
    """A mapped node is ready: have its list rendered. That takes no slot of the run."""
    node = run.nodes[index]
    node.status = QUEUED
    node.phase = Phase.EXPANDING
    fence(node, nonce)
    record_change(run, index, out, now, "node.queued")
    out.dispatch.append(Dispatch(run, index, node.token))


def open_map(node: NodeState, total: int) -> None:
    """The list is known. Items that a retry kept stay, unless the list has another length now."""
    if node.items is None or node.items.total != total:
        node.items, node.size = MapState(total), 0
    node.phase = None
    node.token = Token(node.epoch, 1, NO_START)


def map_of(run: RunState, index: int) -> tuple[MapSpec, MapState]:
    """The definition and the items of a mapped node whose list is known."""
    spec, items = run.graph.nodes[index].for_each, run.nodes[index].items
    assert spec is not None  # noqa: S101 - only such nodes have items
    assert items is not None  # noqa: S101
    return spec, items


def why_stopped(run: RunState, index: int) -> Reason | None:
    """Why no further item of the mapped node may start; None while items may."""
    spec, items = map_of(run, index)
    if items.failed > spec.tolerated(items.total):
        return Reason.TOO_MANY_FAILURES
    return Reason.RUN_FAILED if run.status is not RunStatus.RUNNING else None


def advance_map(run: RunState, index: int, out: Decision, now: float, nonce: int) -> None:
    """End a decision about items: begin the next ones, or end their node.

    The join fires once, because an item leaves `in_flight` once, and the node ends with the last
    one.
    """
    spec, items = map_of(run, index)
    stopped = why_stopped(run, index)
    if stopped is not None:
        cancel_waiting_items(run, index, stopped, out, now)
    else:
        epoch = run.nodes[index].epoch
        while len(items.in_flight) < spec.window and (item := items.next_waiting()) is not None:
            state = NodeState(epoch, 0)
            items.begin(item, state)
            queue_item(run, index, item, state, out, now, nonce)
    if items.in_flight:
        fill_slots_and_finish(run, out, now)
    else:
        end_map(run, index, stopped, out, now, nonce)


def queue_item(
    run: RunState, index: int, item: int, state: NodeState, out: Decision, now: float, nonce: int
) -> None:
    state.status = QUEUED
    fence(state, nonce)
    record_item(run, index, item, state, out, now, "node.queued")
    publish_item(run, index, item, state, out)


def start_item(
    run: RunState,
    index: int,
    item: int,
    state: NodeState,
    lease_until: float,
    out: Decision,
    now: float,
    data: dict[str, Any],
) -> None:
    """A worker starts the item, and with the first item its node starts. `data` is the data of the
    event: it names the worker."""
    start(state, data["worker"], lease_until, now)
    map_of(run, index)[1].running += 1
    record_item(run, index, item, state, out, now, "node.started", data)
    node = run.nodes[index]
    if node.status is QUEUED:
        node.status, node.attempt, node.started_at = RUNNING, 1, now
        record_change(run, index, out, now, "node.started", {"worker": None})


def publish_item(run: RunState, index: int, item: int, state: NodeState, out: Decision) -> None:
    """As `publish`, for an item. If the item is held, so is its node."""
    limit, node = run.graph.max_concurrency, run.nodes[index]
    if limit is None or not (run.held or run.active >= limit):
        run.active += 1
        state.phase = PUBLISHED
        out.dispatch.append(new_tuple(Dispatch, (run, index, state.token, item)))
        return
    state.phase = HELD
    heappush(map_of(run, index)[1].ready, item)
    if node.phase is not HELD:
        node.phase = HELD
        heappush(run.held, index)


def publish_held_items(run: RunState, index: int, out: Decision) -> None:
    """It is the turn of a held mapped node: its first items take the free slots of the run."""
    limit, node = run.graph.max_concurrency, run.nodes[index]
    node.phase = None
    _, items = map_of(run, index)
    while items.ready:
        if limit is not None and run.active >= limit:
            node.phase = HELD
            heappush(run.held, index)
            return
        item = heappop(items.ready)
        state = items.in_flight[item]
        run.active += 1
        state.phase = PUBLISHED
        out.dispatch.append(Dispatch(run, index, state.token, item))


def recount_held(run: RunState) -> None:
    """Derive `held`, and the counts of items, from the states of nodes and items."""
    for node in run.nodes:
        if node.items is not None:
            node.items.recount()
            if node.phase in (None, HELD):
                node.phase = HELD if node.items.ready else None
    run.held = [index for index, node in enumerate(run.nodes) if node.phase is HELD]


def end_item(
    run: RunState,
    index: int,
    item: int,
    state: NodeState,
    status: NodeStatus,
    out: Decision,
    now: float,
    kind: str,
    data: dict[str, Any] | None = None,
) -> None:
    """The item has ended: only a compact record of it stays. The caller goes on with
    `advance_map`."""
    _, items = map_of(run, index)
    if state.status is RUNNING:
        items.running -= 1
    if state.status is RUNNING or state.phase is PUBLISHED:
        run.active -= 1
    state.status, state.finished_at = status, now
    items.end(item, state)
    record_item(run, index, item, state, out, now, kind, data)


def fail_item(
    run: RunState,
    index: int,
    item: int,
    state: NodeState,
    error: dict[str, Any],
    out: Decision,
    now: float,
) -> None:
    data = failure_data(error)
    state.error = data["error"]
    if state.reason is not None:
        data["reason"] = state.reason
    end_item(run, index, item, state, FAILED, out, now, "node.failed", data)


def lose_item(
    run: RunState, index: int, item: int, max_crashes: int, out: Decision, now: float, nonce: int
) -> None:
    """As `lose_node`, for an item. The caller goes on with `advance_map`."""
    _, items = map_of(run, index)
    state = items.in_flight[item]
    state.crashes += 1
    lost = {"worker": state.worker, "crashes": state.crashes}
    record_item(run, index, item, state, out, now, "node.lost", lost)
    if run.graph.nodes[index].at_most_once or state.crashes >= max_crashes:
        message = died_during(state.crashes, state.attempt)
        state.reason = Reason.WORKER_LOST
        error = {"type": Reason.WORKER_LOST.value, "message": message}
        fail_item(run, index, item, state, error, out, now)
    elif stopped := why_stopped(run, index):
        cancel_item(run, index, item, stopped, out, now)
    else:
        run.active -= 1
        items.running -= 1
        release_lease(state)
        queue_item(run, index, item, state, out, now, nonce)


def cancel_item(
    run: RunState, index: int, item: int, reason: Reason, out: Decision, now: float
) -> None:
    state = map_of(run, index)[1].in_flight[item]
    state.reason = reason
    why = {"reason": reason}
    end_item(run, index, item, state, CANCELLED, out, now, "node.cancelled", why)


def cancel_waiting_items(
    run: RunState, index: int, reason: Reason, out: Decision, now: float
) -> None:
    """Cancel the items that are in flight and do not run.

    Items that were never begun need no event: they end with their node.
    """
    node = run.nodes[index]
    _, items = map_of(run, index)
    for item in sorted(items.in_flight):
        if items.in_flight[item].status is not RUNNING:
            cancel_item(run, index, item, reason, out, now)
    items.ready.clear()
    if node.phase is HELD:
        node.phase = None
        run.held.remove(index)
        heapify(run.held)


def end_map(
    run: RunState, index: int, stopped: Reason | None, out: Decision, now: float, nonce: int
) -> None:
    """No item is in flight and none may be begun: the node ends, once."""
    node = run.nodes[index]
    _, items = map_of(run, index)
    if stopped is Reason.TOO_MANY_FAILURES:
        resolve(run, fail_node(run, index, map_error(run, index), out, now), out, now, nonce)
    elif items.completed + items.failed == items.total:
        node.output = items.outputs
        finish(run, node, COMPLETED, now)
        record_change(run, index, out, now, "node.completed")
        complete_children(run, index, out, now, nonce)
    else:
        cancel_node(run, index, Reason.RUN_FAILED, out, now)
        fill_slots_and_finish(run, out, now)


def map_error(run: RunState, index: int) -> dict[str, Any]:
    """The error of the first failed item, with a message that says how many failed."""
    spec, items = map_of(run, index)
    item = items.first_failed()
    own = items.ended[item].error or {}
    failed = f"{items.failed} of {items.total} items failed, {spec.tolerated(items.total)} may"
    return {**own, "message": f"item {item}: {own.get('message', '')} ({failed})"}


def record_item(
    run: RunState,
    index: int,
    item: int,
    state: NodeState,
    out: Decision,
    now: float,
    kind: str,
    data: dict[str, Any] | None = None,
) -> None:
    """As `record_change`, for an item."""
    out.changed.append(index)
    if run.logged:
        run.seq = seq = run.seq + 1
        name = item_name(run.graph.nodes[index].id, item)
        fields = (seq, now, kind, state.epoch, name, state.attempt, data)
        out.events.append(new_tuple(Event, fields))


def stop_orders(run: RunState, indices: Iterable[int]) -> list[Stop]:
    """Stop orders for these nodes and for their items, as far as they are RUNNING."""
    found = []
    for index in indices:
        node, name = run.nodes[index], run.graph.nodes[index].id
        if node.items is not None:
            found += [
                Stop(run.id, item_name(name, item), state.token)
                for item, state in sorted(node.items.in_flight.items())
                if state.status is RUNNING
            ]
        elif node.status is RUNNING:
            found.append(Stop(run.id, name, node.token))
    return found


def startable(nodes: Iterable[NodeState]) -> Iterator[NodeState]:
    """The nodes that a worker may start, and of mapped nodes the items in flight instead."""
    for node in nodes:
        if node.items is None:
            yield node
        else:
            yield from node.items.in_flight.values()


def count_active(nodes: Iterable[NodeState]) -> int:
    """The nodes and items that are published or RUNNING."""
    return sum(one.status is RUNNING or one.phase is PUBLISHED for one in startable(nodes))


def finish(run: RunState, node: NodeState, status: NodeStatus, now: float) -> None:
    node.status = status
    node.phase = None
    node.until = None
    node.lease_until = None
    node.finished_at = now
    run.unfinished -= 1


def refuse(run: RunState, index: int, token: Token, now: float) -> Decision:
    """Refuse a result: the log gets an event, and nothing follows from it."""
    node = run.nodes[index]
    if node.answered == token:
        return NOTHING  # a repetition: the result was applied before
    if not run.logged:
        return NOTHING
    out = Decision()
    run.seq += 1
    why = {"reason": "stale" if node.token != token else f"node is {node.status}"}
    name = run.graph.nodes[index].id
    out.events.append(Event(run.seq, now, "result.refused", token.epoch, name, token.attempt, why))
    return out


def record_change(
    run: RunState,
    index: int,
    out: Decision,
    now: float,
    kind: str,
    data: dict[str, Any] | None = None,
) -> None:
    """List the node as changed, and write its event."""
    out.changed.append(index)
    if run.logged:
        write(run, index, out, now, kind, data)


def write(
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


def log(
    run: RunState, out: Decision, now: float, kind: str, data: dict[str, Any] | None = None
) -> None:
    if run.logged:
        run.seq += 1
        out.events.append(Event(run.seq, now, kind, run.epoch, None, None, data))


def outstanding(run: RunState) -> Decision:
    """All orders that follow from the run's state; `changed` lists their nodes."""
    orders = Decision()
    waiting = []
    for index, node in enumerate(run.nodes):
        name = run.graph.nodes[index].id
        if node.phase is PUBLISHED or node.phase is Phase.EXPANDING:
            orders.dispatch.append(Dispatch(run, index, node.token))
        elif node.until is not None:
            waiting.append((node.until, Wake(run.id, name, node.token)))
        elif node.items is not None and node.items.in_flight:
            for item, state in sorted(node.items.in_flight.items()):
                if state.phase is PUBLISHED:
                    orders.dispatch.append(Dispatch(run, index, state.token, item))
                elif state.until is not None:
                    wake = Wake(run.id, item_name(name, item), state.token)
                    waiting.append((state.until, wake))
        else:
            continue
        orders.changed.append(index)
    orders.wake = waiting
    return orders
