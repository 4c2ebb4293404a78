"""The rules for the items of mapped nodes: what `step` does when a transition names an item.

An item is started, fenced, retried and lost like a node. What differs: its state is in its node's
`MapState`; when it has ended, the next items begin or the node ends (`effects.advance_map`); and
only its node has children. The rule of the node itself is `expand`: it makes the items.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dovetail.core.effects import (
    COMPLETED,
    PUBLISHED,
    RUNNING,
    advance_map,
    back_off,
    end_item,
    fail_item,
    fail_node,
    lose_item,
    map_of,
    open_map,
    publish_item,
    record_change,
    record_item,
    resolve,
    start_item,
    weigh,
    why_stopped,
)
from dovetail.core.events import Event, Token
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import (
    NOTHING,
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
    Wake,
)


class FoundItem(NamedTuple):
    """The item that a transition names."""

    node_index: int
    item: int
    state: NodeState
    """Of an item that is not in flight, a copy that says how it ended."""
    is_in_flight: bool


def is_running(found: FoundItem, token: Token) -> bool:
    return found.state.status is RUNNING and found.state.token == token


def is_published(found: FoundItem, token: Token) -> bool:
    return found.state.phase is PUBLISHED and found.state.token == token


# ── the rules, one function each ─────────────────────────────────────────────────────────


def expand(run: RunState, transition: Expand, now: float, nonce: int) -> Decision:
    """The list of a mapped node was rendered, or the rendering failed."""
    index = run.graph.index.get(transition.node)
    if index is None:
        return NOTHING
    node = run.nodes[index]
    if node.phase is not Phase.EXPANDING or node.token != transition.token:
        return NOTHING  # expanded already, or cancelled
    out = Decision()
    if transition.error is not None:
        resolve(run, fail_node(run, index, transition.error, out, now), out, now, nonce)
        return out
    size = node.size
    open_map(node, transition.total)
    run.kept_bytes += node.size - size
    record_change(run, index, out, now, "node.queued", {"items": transition.total})
    advance_map(run, index, out, now, nonce)
    return out


def claim(run: RunState, found: FoundItem, transition: Claim, now: float, nonce: int) -> Decision:
    if not is_published(found, transition.token):
        return NOTHING
    index, item, state, _ = found
    out = Decision()
    data = {"worker": transition.worker}
    start_item(run, index, item, state, transition.lease_until, out, now, data)
    return out


def renew(run: RunState, found: FoundItem, transition: Renew, now: float, nonce: int) -> Decision:
    if not is_running(found, transition.token):
        return NOTHING
    found.state.lease_until = transition.lease_until
    out = Decision()
    out.changed.append(found.node_index)
    return out


def complete(
    run: RunState, found: FoundItem, transition: Complete, now: float, nonce: int
) -> Decision:
    if not is_running(found, transition.token):
        return refuse(run, transition.node, found, transition.token, now)
    return _accept_output(run, found, transition.output, "node.completed", now, nonce)


def recall(run: RunState, found: FoundItem, transition: Recall, now: float, nonce: int) -> Decision:
    if not is_published(found, transition.token):
        return NOTHING
    return _accept_output(run, found, transition.output, "node.cached", now, nonce)


def _accept_output(
    run: RunState, found: FoundItem, output: Any, kind: str, now: float, nonce: int
) -> Decision:
    """End an item that has an output: as COMPLETED or, if the run would exceed its limit of bytes,
    as FAILED without a retry."""
    index, item, state, _ = found
    out = Decision()
    if run.max_bytes is not None and (error := weigh(run, state, output)):
        fail_item(run, index, item, state, error, out, now)
    else:
        run.nodes[index].size += state.size
        state.output, state.error = output, None
        end_item(run, index, item, state, COMPLETED, out, now, kind)
    advance_map(run, index, out, now, nonce)
    return out


def fail(run: RunState, found: FoundItem, transition: Fail, now: float, nonce: int) -> Decision:
    if transition.unrendered and not is_published(found, transition.token):
        return NOTHING
    if not transition.unrendered and not is_running(found, transition.token):
        return refuse(run, transition.node, found, transition.token, now)
    index, item, state, _ = found
    spec, out = run.graph.nodes[index], Decision()
    retry_number = state.attempt - state.crashes
    if transition.permanent or retry_number > spec.max_retries or why_stopped(run, index):
        fail_item(run, index, item, state, transition.error, out, now)
    else:
        data = back_off(state, spec, transition, now, nonce)
        record_item(run, index, item, state, out, now, "node.retrying", data)
        run.active -= 1
        map_of(run, index)[1].running -= 1
        state.answered = transition.token
        out.wake = [(now + data["delay"], Wake(run.id, transition.node, state.token))]
    advance_map(run, index, out, now, nonce)
    return out


def reap(run: RunState, found: FoundItem, transition: Reap, now: float, nonce: int) -> Decision:
    if not is_running(found, transition.token):
        return NOTHING
    if found.state.lease_until is None or now < found.state.lease_until:
        return NOTHING
    out = Decision()
    lose_item(run, found.node_index, found.item, transition.max_crashes, out, now, nonce)
    advance_map(run, found.node_index, out, now, nonce)
    return out


def park(run: RunState, found: FoundItem, transition: Park, now: float, nonce: int) -> Decision:
    if found.state.token != transition.token:
        return NOTHING
    index, item, state, _ = found
    if state.phase is PUBLISHED:
        run.active -= 1
    elif state.phase is not Phase.PARKED or state.until is None or transition.until >= state.until:
        return NOTHING
    out = Decision()
    state.phase, state.until = Phase.PARKED, transition.until
    out.wake = [(transition.until, Wake(run.id, transition.node, transition.token))]
    data = {"until": transition.until, "resource_tag": run.graph.nodes[index].resource_tag}
    record_item(run, index, item, state, out, now, "node.parked", data)
    advance_map(run, index, out, now, nonce)
    return out


def wake(run: RunState, found: FoundItem, transition: Wake, now: float, nonce: int) -> Decision:
    if found.state.token != transition.token:
        return NOTHING
    index, item, state, _ = found
    if state.until is None or now < state.until:
        return NOTHING
    out = Decision()
    out.changed.append(index)
    state.until = None
    publish_item(run, index, item, state, out)
    return out


def progress(
    run: RunState, found: FoundItem, transition: Progress, now: float, nonce: int
) -> Decision:
    if not is_running(found, transition.token):
        return NOTHING
    out = Decision()
    data = {"fraction": transition.fraction, "message": transition.message}
    record_item(run, found.node_index, found.item, found.state, out, now, "node.progress", data)
    return out


def refuse(run: RunState, name: str, found: FoundItem, token: Token, now: float) -> Decision:
    """Ignore a repeated result; write an event for a stale one. Both as for a node.

    The record of an item that has ended lacks the nonce of its token: a result with the epoch and
    the attempt of the record counts as a repetition.
    """
    state = found.state
    if found.is_in_flight:
        is_same, is_answered = state.token == token, state.answered == token
    else:
        is_same = state.token[:2] == token[:2]
        has_own_end = state.status is not NodeStatus.CANCELLED and state.reason is None
        is_answered = is_same and has_own_end
    if is_answered or not run.logged:
        return NOTHING
    out = Decision()
    run.seq += 1
    why = {"reason": f"node is {state.status}" if is_same else "stale"}
    out.events.append(Event(run.seq, now, "result.refused", token.epoch, name, token.attempt, why))
    return out


ITEM_RULES: dict[type, Callable[[RunState, FoundItem, Any, float, int], Decision]] = {
    Claim: claim,
    Renew: renew,
    Complete: complete,
    Fail: fail,
    Reap: reap,
    Park: park,
    Wake: wake,
    Progress: progress,
    Recall: recall,
}


def apply_to_item(run: RunState, transition: Any, now: float, nonce: int) -> Decision:
    """Apply a transition whose name is not that of a node: it names an item, or nothing."""
    where = run.find_item(transition.node)
    if where is None:
        return NOTHING
    index, item = where
    state = map_of(run, index)[1].in_flight.get(item)
    found = FoundItem(index, item, state or run.node(transition.node), state is not None)
    return ITEM_RULES[type(transition)](run, found, transition, now, nonce)
