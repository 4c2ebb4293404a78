"""From the first node to the last: how a run goes when nothing goes wrong."""

from __future__ import annotations

from itertools import permutations

import pytest

from dovetail.core.events import NO_TOKEN, Event, Token
from dovetail.core.states import NodeStatus
from dovetail.core.transitions import Claim, Complete, Decision

from .walk import Walk

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


def test_a_trigger_starts_the_run_and_queues_its_roots_in_definition_order() -> None:
    walk = Walk({"b": [], "z": ["b"], "a": []})
    assert walk.dispatched() == ["b", "a"]
    assert walk.states == {"b": "QUEUED", "z": "PENDING", "a": "QUEUED"}
    assert walk.status == "RUNNING"
    assert walk.state.created_at == walk.state.started_at == 100.0


def test_a_chain_runs_node_after_node_and_completes() -> None:
    walk = Walk({"a": [], "b": ["a"], "c": ["b"]})
    for node, after in (("a", ["b"]), ("b", ["c"]), ("c", [])):
        walk.later(1)
        assert not walk.ended
        walk.run(node)
        assert walk.dispatched() == after
    assert walk.states == {"a": "COMPLETED", "b": "COMPLETED", "c": "COMPLETED"}
    assert (walk.status, walk.state.finished_at) == ("COMPLETED", 103.0)
    assert walk.last.ended


def test_a_node_keeps_its_worker_and_its_times() -> None:
    walk = Walk({"a": []})
    walk.later(2)
    walk.start("a", worker="worker-7")
    walk.later(3)
    walk.complete("a", {"x": 1})
    node = walk["a"]
    assert (node.started_at, node.finished_at, node.worker) == (102.0, 105.0, "worker-7")
    assert (node.output, node.attempt, node.epoch, node.error) == ({"x": 1}, 1, 1, None)


def test_a_fan_out_queues_every_child_at_once_in_definition_order() -> None:
    walk = Walk({"a": [], "d": ["a"], "c": ["a"], "b": ["a"]})
    walk.run("a")
    assert walk.dispatched() == ["d", "c", "b"]


@pytest.mark.parametrize("order", list(permutations(["b", "c", "d"])), ids="".join)
def test_a_fan_in_waits_for_its_last_parent_in_whatever_order_they_finish(
    order: tuple[str, ...],
) -> None:
    walk = Walk({"a": [], "b": ["a"], "c": ["a"], "d": ["a"], "e": ["b", "c", "d"]})
    walk.run("a")
    walk.start("b", "c", "d")
    for node in order[:-1]:
        assert walk.dispatched(walk.complete(node)) == []
    assert walk.dispatched(walk.complete(order[-1])) == ["e"]


def test_a_parent_delivered_twice_does_not_fire_the_join_early() -> None:
    walk = Walk(DIAMOND)
    walk.run("a")
    walk.start("b", "c")
    walk.complete("b", 1)
    assert not walk.complete("b", 2)
    assert (walk.states["d"], walk["b"].output) == ("PENDING", 1)
    assert walk.dispatched(walk.complete("c")) == ["d"]


def test_a_join_is_dispatched_once_when_both_parents_are_delivered_twice() -> None:
    walk = Walk(DIAMOND)
    walk.run("a")
    walk.start("b", "c")
    seen = [walk.dispatched(walk.complete(node)) for node in ("b", "c", "b", "c")]
    assert seen == [[], ["d"], [], []]


def test_nodes_made_ready_by_one_completion_are_queued_in_definition_order() -> None:
    # b is listed after c as a child's parent, but stands before it in the definition.
    walk = Walk({"e": ["a"], "a": [], "c": ["a"], "b": ["a", "x"], "x": []})
    walk.run("x", "a")
    assert walk.dispatched() == ["e", "c", "b"]


def test_a_claim_is_granted_once() -> None:
    walk = Walk({"a": []})
    token = walk.token("a")
    assert walk.start("a", token=token)
    assert not walk.start("a", token=token, worker="other")
    assert walk["a"].worker == "w"


def test_only_the_token_of_this_start_may_claim_renew_complete_or_fail() -> None:
    walk = Walk({"a": []})
    token = walk.token("a")
    forged = Token(token.epoch, token.attempt, token.nonce + 1)
    for wrong in (forged, NO_TOKEN, Token(2, 1, token.nonce), Token(1, 2, token.nonce)):
        assert not walk.start("a", token=wrong)
    walk.start("a")
    for wrong in (forged, Token(1, 0, token.nonce)):
        assert not walk.renew("a", wrong)
        assert not walk.progress("a", 0.5, wrong)
        assert not walk.reap("a", wrong)
        for answer in (walk.complete("a", 1, wrong), walk.fail("a", token=wrong)):
            assert [event.type for event in answer.events] == ["result.refused"]
            assert not answer.changed
    assert walk.states == {"a": "RUNNING"}


def test_a_node_that_was_not_started_cannot_complete() -> None:
    walk = Walk({"a": [], "b": ["a"]})
    refused = walk.complete("a", 1)
    assert [event.data for event in refused.events] == [{"reason": "node is QUEUED"}]
    assert not walk.complete("b", 1, NO_TOKEN).changed
    assert walk.complete("b", 1, Token(1, 1, 5)).events[0].data == {"reason": "stale"}
    assert walk.states == {"a": "QUEUED", "b": "PENDING"}


def test_what_names_a_node_that_does_not_exist_decides_nothing() -> None:
    walk = Walk({"a": []})
    before = walk.state.snapshot()
    token = walk.token("a")
    for transition in (Claim("r", "ghost", token, "w", 1.0), Complete("r", "ghost", token, 1)):
        assert not walk.apply(transition)
    assert walk.state.snapshot() == before


def test_a_chain_of_ten_thousand_nodes_runs_through() -> None:
    size = 10_000
    nodes = {f"n{i}": [f"n{i - 1}"] if i else [] for i in range(size)}
    walk = Walk(nodes)
    state, token = walk.state, walk.token("n0")
    # Without the walk's own checks, which cost O(run) a step.
    from dovetail.core.step import step

    for i in range(size):
        step(state, Claim("r", f"n{i}", token, "w", 1.0), 1.0, 7)
        decision: Decision = step(state, Complete("r", f"n{i}", token, i), 1.0, 7)
        token = decision.dispatch[0].token if decision.dispatch else NO_TOKEN
    assert (walk.status, state.nodes[-1].output) == ("COMPLETED", size - 1)


def test_a_completion_lists_only_its_children_however_large_the_run_is() -> None:
    nodes = {"a": [], **{f"n{i}": ["a"] for i in range(5_000)}, "z": ["n1", "n2"]}
    walk = Walk(nodes)
    walk.run("a")
    walk.start("n1", "n2")
    walk.complete("n1")
    assert walk.last.changed == [walk.state.graph.index["n1"]]
    assert len(walk.complete("n2").changed) == 2


def test_a_run_without_a_log_writes_no_events_and_ends_the_same() -> None:
    walk = Walk(DIAMOND, logged=False)
    walk.run("a")
    walk.start("b", "c")
    walk.complete("b")
    assert not walk.complete("b", token=Token(1, 1, 99))
    walk.complete("c")
    walk.run("d")
    assert walk.log == []
    assert walk.status == "COMPLETED"


def test_a_token_survives_being_written_down() -> None:
    token = Token(3, 12, 0xFFFF_FFFF_FFFF_FFFF)
    assert str(token) == "3.12.ffffffffffffffff"
    assert Token.parse(str(token)) == token


@pytest.mark.parametrize("text", ["", "1.2", "1.2.3.4", "a.b.c", "1.2.xyz"])
def test_what_is_no_token_is_refused_when_read(text: str) -> None:
    with pytest.raises(ValueError):
        Token.parse(text)


def test_an_event_is_small_data() -> None:
    event = Event(1, 2.0, "run.started", 1)
    assert event == (1, 2.0, "run.started", 1, None, None, None)


def test_templates_read_nodes_params_and_the_run_from_the_state() -> None:
    walk = Walk({"a": []}, params={"x": 1})
    walk.run("a", output={"y": 2})
    value = walk.state.get("a")
    assert (value.id, value.status, value.output, value.error) == (
        "a",
        NodeStatus.COMPLETED,
        {"y": 2},
        None,
    )
    assert walk.state.get("params") == {"x": 1}
    assert walk.state.get("run") == {"id": "r", "workflow": "walk"}
    with pytest.raises(KeyError):
        walk.state.get("secrets")
