"""What holds of a run after every transition, whatever happened to it before.

Read from the nodes' states alone and compared with what the run keeps beside them, so that a
count that drifts is found at the step that made it drift. The
walks by hand, the random ones and the store contract all call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.core.events import NO_START, NO_TOKEN
from dovetail.core.items import IN_FLIGHT, split_name
from dovetail.core.run import NodeState, Phase, RunState, encoded_size
from dovetail.core.states import (
    ALLOWED,
    ALLOWED_RUN,
    FINAL,
    FINISHED,
    NodeStatus,
    Reason,
    RunStatus,
)
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Decision,
    Dispatch,
    Expand,
    Fail,
    Park,
    Reap,
    Recall,
    Retry,
    TakeOver,
    Transition,
    Wake,
)

SETTLED = (NodeStatus.COMPLETED, NodeStatus.SKIPPED)
WAITING = (Phase.PARKED, Phase.BACKING_OFF)
KEPT_BY_RETRY = (NodeStatus.COMPLETED, NodeStatus.RUNNING)
# These follow from the parents' states, so a decision need not list such changes.
DERIVED = ("waiting", "fed")


def check_run(run: RunState) -> None:
    """The counts a run keeps are those of its states, and its status follows from them."""
    statuses = [node.status for node in run.nodes]
    assert run.unfinished == sum(status not in FINISHED for status in statuses)
    failed = [i for i, status in enumerate(statuses) if status is NodeStatus.FAILED]
    failures = [index for index in failed if not _is_allowed(run, index)]
    assert run.failed == len(failures)
    assert run.cancelled == statuses.count(NodeStatus.CANCELLED)
    assert run.active == sum(
        state.status is NodeStatus.RUNNING or state.phase is Phase.PUBLISHED
        for _, state in startable(run)
    )
    held = [index for index, node in enumerate(run.nodes) if node.phase is Phase.HELD]
    assert sorted(run.held) == held
    limit = run.graph.max_concurrency
    if limit is not None:
        assert run.active <= limit
        assert not held or run.active == limit, "a node is held although there is room"
    else:
        assert not held
    if run.max_bytes is None:
        assert run.kept_bytes == 0
    else:
        assert run.kept_bytes == sum(map(encoded_size, _outputs(run)))
        assert run.kept_bytes <= run.max_bytes
    assert (run.finished_at is not None) is (run.unfinished == 0)
    assert run.status is _expected_status(run, statuses, failures)
    assert (run.error is not None) is (run.status is RunStatus.FAILED)
    if run.error is not None:
        shown = [i for i in failures if run.nodes[i].error is not None]
        own = [{**(run.nodes[i].error or {}), "node": run.graph.nodes[i].id} for i in shown]
        assert run.error in (own if run.graph.fail_fast else own[:1])
    for index, node in enumerate(run.nodes):
        if run.graph.nodes[index].for_each is None:
            _check_node(run, index, node)
        else:
            _check_map(run, index, node)


def startable(run: RunState) -> Iterator[tuple[str, NodeState]]:
    """Each node that is not mapped, and each item that is in flight, with its name."""
    for spec, node in zip(run.graph.nodes, run.nodes, strict=True):
        if spec.for_each is None:
            yield spec.id, node
        elif node.items is not None:
            for item, state in sorted(node.items.in_flight.items()):
                yield f"{spec.id}[{item}]", state


def order_name(order: Dispatch) -> str:
    name = order.run.graph.nodes[order.node_index].id
    return name if order.item is None else f"{name}[{order.item}]"


def state_before(before: dict[str, Any], run: RunState, name: str) -> dict[str, Any] | None:
    """A node, or an item that was in flight, as it was."""
    node_id, item = split_name(name)
    index = run.graph.index.get(node_id)
    if index is None:
        return None
    node: dict[str, Any] = before["nodes"][index]
    if item is None:
        return node
    return None if node["items"] is None else node["items"]["in_flight"].get(item)


def _outputs(run: RunState) -> Iterator[Any]:
    for node in run.nodes:
        if node.items is not None and node.token != NO_TOKEN:
            items = node.items
            yield from (items.outputs[i] for i in range(items.total) if items.is_completed(i))
        elif node.status is NodeStatus.COMPLETED:
            yield node.output


def _check_map(run: RunState, index: int, node: NodeState) -> None:
    """A mapped node is one node; its window, its counts and its end follow from its items."""
    spec, items, status = run.graph.nodes[index].for_each, node.items, node.status
    assert spec is not None
    assert node.until is node.lease_until is node.worker is None
    assert node.phase in (None, Phase.EXPANDING, Phase.HELD)
    assert (node.phase is Phase.EXPANDING) <= (status is NodeStatus.QUEUED)
    assert (node.finished_at is not None) is (status in FINISHED)
    assert node.attempt in (0, 1)
    _check_words(node)
    _check_pending(run, index, node)
    if items is None:
        assert status is not NodeStatus.RUNNING
        return
    running = [state.status is NodeStatus.RUNNING for state in items.in_flight.values()]
    assert items.running == sum(running)
    ends = [items.status(item) for item in range(items.total)]
    assert items.completed == ends.count(NodeStatus.COMPLETED)
    assert items.failed == ends.count(NodeStatus.FAILED)
    if node.token != NO_TOKEN:  # else it was reused
        assert items.ended.keys() == {item for item, end in enumerate(ends) if end is not None}
    assert items.in_flight.keys() == {
        i for i, byte in enumerate(items.statuses) if byte == IN_FLIGHT
    }
    assert len(items.in_flight) <= spec.window, "more items are in flight than the window allows"
    assert sorted(items.ready) == sorted(
        item for item, state in items.in_flight.items() if state.phase is Phase.HELD
    )
    assert (node.phase is Phase.HELD) is bool(items.ready)
    for state in items.in_flight.values():
        assert state.status in (NodeStatus.QUEUED, NodeStatus.RUNNING)
        _check_node(run, index, state)
    too_many = items.failed > spec.tolerated(items.total)
    is_open = status in (NodeStatus.QUEUED, NodeStatus.RUNNING)
    if is_open and node.phase is not Phase.EXPANDING:
        assert items.in_flight, "a node whose items all ended goes on"
        if run.status is RunStatus.RUNNING and not too_many:
            full = len(items.in_flight) == spec.window
            assert full or items.next_waiting() is None, "an item waits although there is room"
        else:
            assert all(running), "an item waits in a node that starts none"
    else:
        assert not items.in_flight
    if status is NodeStatus.COMPLETED:
        assert not too_many
        assert items.completed + items.failed == items.total
        assert node.output == items.outputs
    if status is NodeStatus.FAILED and node.error is not None and node.token.nonce == NO_START:
        assert too_many


def _is_allowed(run: RunState, index: int) -> bool:
    """Whether the node failed by itself and is allowed to."""
    node, spec = run.nodes[index], run.graph.nodes[index]
    own = node.status is NodeStatus.FAILED and node.error is not None
    return own and spec.allow_failure


def _expected_status(run: RunState, statuses: list[NodeStatus], failures: list[int]) -> RunStatus:
    if failures and (run.graph.fail_fast or not run.unfinished):
        return RunStatus.FAILED
    if run.unfinished:
        return RunStatus.RUNNING
    return RunStatus.CANCELLED if NodeStatus.CANCELLED in statuses else RunStatus.COMPLETED


def _check_node(run: RunState, index: int, node: NodeState) -> None:
    status = node.status
    assert 1 <= node.epoch <= run.epoch
    assert (node.phase is not None) is (status is NodeStatus.QUEUED)
    assert (node.until is not None) is (node.phase in WAITING)
    assert (node.lease_until is not None) is (status is NodeStatus.RUNNING)
    assert (node.finished_at is not None) is (status in FINISHED)
    assert (node.cause is not None) is (node.reason is Reason.DEPENDENCY_FAILED)
    assert node.crashes <= node.attempt
    if status is NodeStatus.QUEUED:
        assert node.token[:2] == (node.epoch, node.attempt + 1)
    if status is NodeStatus.RUNNING:
        assert node.token[:2] == (node.epoch, node.attempt)
        assert node.worker is not None
    if run.status in FINAL and status not in FINISHED:
        assert status is NodeStatus.RUNNING, "in a failed run only what ran goes on"
    _check_pending(run, index, node)
    _check_words(node)


def _check_pending(run: RunState, index: int, node: NodeState) -> None:
    if node.status is NodeStatus.PENDING:
        above = run.graph.nodes[index].parents
        parents = [run.nodes[i].status for i in above if not _is_allowed(run, i)]
        assert node.waiting == sum(parent not in SETTLED for parent in parents)
        assert node.fed is (NodeStatus.COMPLETED in parents or len(parents) < len(above))
        assert node.waiting, "a node that waits for no parent was left behind"
        assert NodeStatus.FAILED not in parents


def _check_words(node: NodeState) -> None:
    """Reason, error and output belong to the state that the node ended in."""
    match node.status:
        case NodeStatus.COMPLETED:
            assert node.reason is None
            assert node.error is None
        case NodeStatus.SKIPPED:
            assert node.reason in (
                Reason.CONDITION_FALSE,
                Reason.DEPENDENCY_SKIPPED,
                Reason.DEPENDENCY_FAILED,
            )
        case NodeStatus.CANCELLED:
            assert node.reason in (Reason.RUN_FAILED, Reason.RUN_CANCELLED)
        case NodeStatus.FAILED:
            assert node.reason in (None, Reason.DEPENDENCY_FAILED, Reason.WORKER_LOST)
            assert (node.error is None) is (node.reason is Reason.DEPENDENCY_FAILED)
        case _:
            assert node.reason is None
    if node.status is not NodeStatus.COMPLETED:
        assert node.output is None


def check_step(
    before: dict[str, Any], run: RunState, transition: Transition, decision: Decision, now: float
) -> None:
    """One transition moved the run along the tables, and its decision says all that changed."""
    after = run.snapshot()
    assert bool(decision.changed) is may_happen(before, run, transition, now), (
        "taken against the rule"
    )
    if not decision:
        assert after == before, "a refused transition changed the run"
        assert not decision.dispatch
        assert not decision.wake
        assert not decision.stop
        assert not decision.ended
        return
    _check_events(before, run, decision, now)
    if not decision.changed:
        assert [event.type for event in decision.events] == ["result.refused"]
        assert {**after, "seq": 0} == {**before, "seq": 0}
        return
    if after["status"] is not before["status"] and not isinstance(transition, Retry):
        assert after["status"] in ALLOWED_RUN[before["status"]]
    was_open = before["finished_at"] is None or isinstance(transition, Retry)
    assert decision.ended is (was_open and after["finished_at"] is not None)
    # A run without a log need not list its changes.
    moved = set(decision.changed if run.logged else range(len(run.nodes)))
    for index, (old, new) in enumerate(zip(before["nodes"], after["nodes"], strict=True)):
        _check_move(run, transition, index, old, new, listed=index in moved)
    _check_retrying(before, run, transition)
    _check_conditions(before, run)
    _check_orders(before, run, transition, decision)
    check_run(run)


def _check_move(
    run: RunState,
    transition: Transition,
    place: int,
    old: dict[str, Any],
    new: dict[str, Any],
    *,
    listed: bool,
) -> None:
    if isinstance(transition, Retry):
        kept = old["status"] in KEPT_BY_RETRY and place not in _below(run, transition.from_node)
        if kept and old["status"] is NodeStatus.RUNNING and old["items"] is not None:
            _check_adopted(run, old["items"], new)
        elif kept:
            assert new == old, "a retry touched what it must keep"
        else:
            assert new["epoch"] == run.epoch
            assert new["attempt"] == 0
        return
    assert new["epoch"] == old["epoch"]
    if new["status"] is not old["status"]:
        assert new["status"] in ALLOWED[old["status"]]
    if old["status"] in FINISHED:
        assert new == old, "a finished node changed within its epoch"
    assert new["attempt"] >= old["attempt"]
    if not listed and run.logged:  # no store writes down a run without a log
        for name in DERIVED:
            old, new = {**old, name: None}, {**new, name: None}
        assert new == old, "a node changed and a store would not know"


def _check_adopted(run: RunState, old: dict[str, Any], new: dict[str, Any]) -> None:
    """A mapped node goes on in the new epoch: what ran and what completed stays."""
    assert new["status"] is NodeStatus.RUNNING
    assert new["epoch"] == run.epoch
    assert old["in_flight"].items() <= new["items"]["in_flight"].items()
    assert new["items"]["completed"] == old["completed"]
    assert new["items"]["failed"] == 0


def may_happen(before: dict[str, Any], run: RunState, transition: Transition, now: float) -> bool:
    """Whether a transition must be taken, from the state before it: the guards, once more."""
    if isinstance(transition, Cancel | TakeOver):
        return before["finished_at"] is None
    if isinstance(transition, Retry):
        again = (RunStatus.FAILED, RunStatus.CANCELLED)
        known = transition.from_node is None or transition.from_node in run.graph.index
        rerun = before["status"] is RunStatus.COMPLETED and transition.from_node is not None
        return known and (before["status"] in again or rerun)
    node = state_before(before, run, transition.node)
    if node is None or node["token"] != transition.token:
        return False
    published = node["phase"] is Phase.PUBLISHED
    runs = node["status"] is NodeStatus.RUNNING
    match transition:
        case Expand():
            return node["phase"] is Phase.EXPANDING
        case Claim() | Recall():
            return published
        case Park():
            sooner = node["phase"] is Phase.PARKED and transition.until < node["until"]
            return published or sooner
        case Fail():
            return published if transition.unrendered else runs
        case Wake():
            return node["phase"] in WAITING and now >= node["until"]
        case Reap():
            return runs and now >= node["lease_until"]
    return runs


def _below(run: RunState, from_node: str | None) -> set[int]:
    if from_node is None:
        return set()
    start = run.graph.index[from_node]
    return {start, *run.graph.descendants(start)}


def _check_retrying(before: dict[str, Any], run: RunState, transition: Transition) -> None:
    """A failed node is tried again as often as it allows, a lost one up to the crash limit."""
    if not isinstance(transition, Fail | Reap):
        return
    place = run.graph.index[split_name(transition.node)[0]]
    old, spec = state_before(before, run, transition.node), run.graph.nodes[place]
    assert old is not None
    state = run.node(transition.node)
    now_is, goes_on = state.status, before["status"] is RunStatus.RUNNING
    if spec.for_each is not None:
        items = before["nodes"][place]["items"]
        goes_on = goes_on and items["failed"] <= spec.for_each.tolerated(items["total"])
    if isinstance(transition, Fail):  # lost starts are not counted
        left = (
            spec.max_retries - (old["attempt"] - old["crashes"]) >= 0 and not transition.permanent
        )
        assert now_is is (NodeStatus.QUEUED if left and goes_on else NodeStatus.FAILED)
    elif spec.at_most_once or old["crashes"] + 1 >= transition.max_crashes:
        assert now_is is NodeStatus.FAILED
        assert state.reason is Reason.WORKER_LOST
    else:
        assert now_is is (NodeStatus.QUEUED if goes_on else NodeStatus.CANCELLED)


def _check_conditions(before: dict[str, Any], run: RunState) -> None:
    """Nodes were queued and skipped as their conditions say, which depend on outputs alone."""
    for spec, old, node in zip(run.graph.nodes, before["nodes"], run.nodes, strict=True):
        if spec.condition is None or old["status"] is not NodeStatus.PENDING:
            continue
        if node.status is NodeStatus.QUEUED:
            assert spec.condition(run)
        elif node.reason is Reason.CONDITION_FALSE:
            assert not spec.condition(run)


def _check_events(before: dict[str, Any], run: RunState, decision: Decision, now: float) -> None:
    seqs = [event.seq for event in decision.events]
    assert seqs == list(range(before["seq"] + 1, run.seq + 1))
    for event in decision.events:
        assert event.time == now
        if event.type.startswith("run."):
            assert (event.node, event.attempt, event.epoch) == (None, None, run.epoch)
        elif event.type != "result.refused":
            assert event.node is not None
            node = run.node(event.node)
            assert (event.epoch, event.attempt) == (node.epoch, node.attempt)


def _check_orders(
    before: dict[str, Any], run: RunState, transition: Transition, decision: Decision
) -> None:
    places = [order_name(dispatch) for dispatch in decision.dispatch]
    assert len(set(places)) == len(places), "a node was dispatched twice at once"
    for dispatch in decision.dispatch:
        name = order_name(dispatch)
        node, old = run.node(name), state_before(before, run, name)
        mapped = run.graph.nodes[dispatch.node_index].for_each and dispatch.item is None
        assert node.phase is (Phase.EXPANDING if mapped else Phase.PUBLISHED)
        assert node.token == dispatch.token
        again = old is not None and old["phase"] is node.phase and old["token"] == node.token
        assert not again or isinstance(transition, TakeOver)
    for stop in decision.stop:
        old = state_before(before, run, stop.node)
        assert old is not None
        assert old["status"] is NodeStatus.RUNNING
        assert old["token"] == stop.token
        if stop.node not in run.graph.index and run.find_item(stop.node) is None:
            continue  # an item of a node that was reset
        now_is = run.node(stop.node)
        assert now_is.status is not NodeStatus.RUNNING or now_is.token != stop.token
    for until, wake in decision.wake:
        node = run.node(wake.node)
        assert (node.until, node.token) == (until, wake.token)
    if isinstance(transition, TakeOver):  # its decision has all outstanding orders
        expanding = [
            spec.id
            for spec, node in zip(run.graph.nodes, run.nodes, strict=True)
            if node.phase is Phase.EXPANDING
        ]
        published = [name for name, state in startable(run) if state.phase is Phase.PUBLISHED]
        assert sorted(places) == sorted([*expanding, *published])
        waiting = [name for name, state in startable(run) if state.until is not None]
        assert [wake.node for _, wake in decision.wake] == waiting


class Ledger:
    """Nodes dispatched and started over a whole walk: none twice for the same token."""

    def __init__(self) -> None:
        self._open: set[tuple[str, Any]] = set()
        self._started: set[tuple[str, Any]] = set()
        self.starts: dict[tuple[str, int], int] = {}
        """How often a node or item was started, by its name and epoch."""

    def record(self, run: RunState, transition: Transition, decision: Decision) -> None:
        if isinstance(transition, Park) and decision:
            self._open.discard((transition.node, transition.token))
        if isinstance(transition, TakeOver) and decision:
            self._open.clear()  # the former driver's messages are gone
        for order in decision.dispatch:
            key = (order_name(order), order.token)
            assert key not in self._open, "dispatched twice for the same start"
            assert key not in self._started, "dispatched after it had been started"
            self._open.add(key)
        if isinstance(transition, Claim) and decision:
            key = (transition.node, transition.token)
            assert key in self._open, "started without having been dispatched"
            assert key not in self._started, "started twice with the same token"
            self._started.add(key)
            place_and_epoch = (key[0], transition.token.epoch)
            self.starts[place_and_epoch] = self.starts.get(place_and_epoch, 0) + 1
