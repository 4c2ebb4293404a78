"""The log of a run: which events, in which order, with which fields."""

from __future__ import annotations

from dovetail.core.events import NODE_EVENTS, RUN_EVENTS
from dovetail.core.step import begin
from dovetail.core.transitions import Submit

from .walk import LEASE, Walk


def busy_walk() -> Walk:
    """A run to which nearly everything happens once."""
    nodes = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "slow": [], "cached": []}
    walk = Walk(nodes, on_failure="continue", b={"max_retries": 1}, c={"condition": "{{ a.go }}"})
    walk.park("slow", 3)
    walk.recall("cached", 1)
    walk.start("a")
    walk.progress("a", 0.5)
    walk.complete("a", {"go": False})
    walk.break_("b")
    walk.later(10)
    walk.wake("b")
    walk.wake("slow")
    walk.start("slow")
    walk.later(LEASE)
    walk.reap("slow")
    walk.break_("b")
    walk.start("slow")
    walk.cancel()
    walk.complete("slow", "late")
    walk.retry()
    walk.run("slow", "b", "d")
    return walk


def test_the_log_counts_from_one_without_gaps_over_every_epoch() -> None:
    walk = busy_walk()
    assert [event.seq for event in walk.log] == list(range(1, len(walk.log) + 1))
    assert walk.state.seq == len(walk.log)
    assert walk.status == "COMPLETED"


def test_every_event_is_of_a_known_type_and_all_node_events_have_an_attempt() -> None:
    walk = busy_walk()
    walk.retry("b")
    walk.cancel()
    for event in walk.log:
        if event.type in RUN_EVENTS:
            assert (event.node, event.attempt) == (None, None)
        else:
            assert event.type in NODE_EVENTS
            assert event.node is not None
            assert event.attempt is not None
    other = Walk({"a": []})
    other.run("a")
    again = Submit("again", other.state.graph, {}, reused={"a": 1})
    reused = [event.type for event in begin(again, 0.0, 1)[1].events]
    seen = {*walk.types(), *other.types(), *reused}
    assert seen == {*RUN_EVENTS, *NODE_EVENTS}


def test_a_plain_run_writes_its_events_in_order() -> None:
    walk = Walk({"a": [], "b": ["a"]})
    walk.run("a", "b")
    assert walk.types() == [
        "run.created",
        "run.started",
        "node.queued",
        "node.started",
        "node.completed",
        "node.queued",
        "node.started",
        "node.completed",
        "run.completed",
    ]
    assert walk.log[0].data == {"workflow": "walk", "version": None}
    assert walk.events_of("node.started")[0].data == {"worker": "w"}


def test_attempts_are_zero_before_the_first_start_and_grow_by_one() -> None:
    walk = Walk({"a": []}, a={"max_retries": 1})
    walk.break_("a")
    walk.later(10)
    walk.wake("a")
    walk.run("a")
    reported = [(event.type, event.attempt) for event in walk.log if event.node]
    assert reported == [
        ("node.queued", 0),
        ("node.started", 1),
        ("node.retrying", 1),
        ("node.started", 2),
        ("node.completed", 2),
    ]


def test_a_node_event_has_the_epoch_of_its_node_and_a_run_event_that_of_the_run() -> None:
    walk = Walk({"a": [], "b": []})
    walk.start("b")
    walk.break_("a")
    walk.retry()
    walk.complete("b")
    walk.run("a")
    epochs = {(event.type, event.node): event.epoch for event in walk.log}
    assert epochs["run.failed", None] == 1
    assert epochs["run.retried", None] == 2
    assert epochs["node.completed", "b"] == 1, "adopted: it keeps its epoch"
    assert epochs["node.completed", "a"] == 2
    assert epochs["run.completed", None] == 2


def test_skips_and_cancels_carry_their_reason() -> None:
    walk = Walk({"a": [], "b": ["a"], "c": []}, on_failure="continue", c={"condition": False})
    walk.break_("a")
    reported = {event.node: event.data for event in walk.events_of("node.skipped")}
    assert reported == {
        "c": {"reason": "condition_false"},
        "b": {"reason": "dependency_failed", "cause": "a"},
    }
    walk = Walk({"a": []})
    walk.cancel()
    assert walk.events_of("node.cancelled")[0].data == {"reason": "run_cancelled"}


def test_a_stale_result_is_logged_each_time_and_a_repeated_one_never() -> None:
    walk = Walk({"a": []})
    walk.start("a")
    lost = walk.token("a")
    walk.lose("a")
    walk.start("a")
    for _ in range(2):
        walk.complete("a", 1, lost)
    walk.complete("a", 2)
    assert not walk.complete("a", 2)
    assert len(walk.events_of("result.refused")) == 2
    assert walk.events_of("result.refused")[0][3:6] == (1, "a", 1)
