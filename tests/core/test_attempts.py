"""The attempts of a node follow from the events of its run alone."""

from __future__ import annotations

import pytest
from hypothesis import given

from dovetail.core.attempts import Attempt, attempts_of
from dovetail.core.dag import Graph
from dovetail.core.events import Event
from dovetail.core.run import NodeState
from dovetail.core.states import NodeStatus
from dovetail.core.step import restore

from .drawn import DrawnAction, deeds, examples, graphs, limits
from .test_walks import CheckedRun
from .walk import LEASE, Walk

BROKEN = {"type": "ValueError", "message": "broken", "where": "mine.py:3 in f"}
TRACED = {**BROKEN, "traceback": "Traceback …\nValueError: broken"}
ENDS = {
    NodeStatus.RUNNING: {"RUNNING"},
    NodeStatus.COMPLETED: {"COMPLETED"},
    NodeStatus.FAILED: {"FAILED", "LOST"},
    NodeStatus.CANCELLED: {"CANCELLED", "LOST"},
}
"""How the last attempt ended, by the status of its node."""


def attempts(walk: Walk, node: str) -> list[Attempt]:
    return attempts_of(walk.log, walk.state.graph, node)


def shown(walk: Walk, node: str) -> list[tuple[int, int, str]]:
    return [(one.epoch, one.attempt, one.status.value) for one in attempts(walk, node)]


class TestAttempts:
    def test_a_node_that_was_not_started_has_none(self) -> None:
        assert shown(Walk({"a": [], "b": ["a"]}), "b") == []

    def test_one_that_runs_is_listed(self) -> None:
        walk = Walk({"a": []})
        walk.start("a", worker="w1")
        (one,) = attempts(walk, "a")
        assert one == Attempt(1, 1, one.status, "w1", walk.now)
        assert (one.status, one.finished_at, one.duration, one.error) == (
            "RUNNING",
            None,
            None,
            None,
        )

    def test_each_failure_keeps_its_error_and_traceback(self) -> None:
        walk = Walk({"a": []}, a={"max_retries": 1})
        walk.start("a", worker="w1")
        walk.later(2)
        walk.fail("a", TRACED)
        walk.later(1000)
        walk.wake("a")
        walk.start("a", worker="w2")
        walk.later(3)
        walk.fail("a", BROKEN)
        first, second = attempts(walk, "a")
        assert (first.status, first.worker, first.duration, first.error) == (
            "FAILED",
            "w1",
            2,
            TRACED,
        )
        assert (second.status, second.worker, second.duration) == ("FAILED", "w2", 3)
        assert second.error == {**BROKEN, "traceback": None}

    def test_a_lost_worker_is_no_failure_of_the_attempt(self) -> None:
        walk = Walk({"a": []})
        walk.start("a")
        walk.lose("a")
        walk.start("a")
        walk.complete("a")
        assert shown(walk, "a") == [(1, 1, "LOST"), (1, 2, "COMPLETED")]
        assert attempts(walk, "a")[0].error is None

    def test_at_the_crash_limit_the_last_attempt_is_lost_and_the_node_failed(self) -> None:
        walk = Walk({"a": []}, a={"delivery": "at_most_once"})
        walk.start("a")
        walk.lose("a")
        assert (shown(walk, "a"), walk.states["a"]) == ([(1, 1, "LOST")], "FAILED")

    def test_a_cancelled_run_cancels_what_runs(self) -> None:
        walk = Walk({"a": [], "b": []})
        walk.start("a")
        walk.later(1)
        walk.cancel()
        (one,) = attempts(walk, "a")
        assert (one.status, one.finished_at) == ("CANCELLED", walk.now)
        assert attempts(walk, "b") == []

    def test_attempts_of_earlier_epochs_stay(self) -> None:
        walk = Walk({"a": []})
        walk.break_("a")
        walk.retry()
        walk.run("a")
        assert shown(walk, "a") == [(1, 1, "FAILED"), (2, 1, "COMPLETED")]

    def test_an_adopted_node_keeps_its_epoch(self) -> None:
        walk = Walk({"a": [], "b": []})
        walk.start("a", "b")
        walk.fail("a")
        walk.retry()
        walk.complete("b")
        assert shown(walk, "b") == [(1, 1, "COMPLETED")]

    @pytest.mark.parametrize("start", ["a", "b"])
    def test_a_running_node_that_a_retry_resets_is_cancelled_at_that_time(self, start: str) -> None:
        walk = Walk({"a": [], "b": ["a"], "c": []})
        walk.run("a")
        walk.start("b", "c")
        walk.later(1)
        walk.fail("c")
        walk.retry(start)
        (one,) = attempts(walk, "b")
        assert (one.status, one.finished_at, one.error) == ("CANCELLED", walk.now, None)

    def test_a_retry_from_a_node_beside_it_does_not_end_it(self) -> None:
        walk = Walk({"a": [], "b": [], "c": []})
        walk.start("a", "b", "c")
        walk.fail("c")
        walk.retry("a")
        assert shown(walk, "b") == [(1, 1, "RUNNING")]

    def test_a_config_that_cannot_be_rendered_is_no_attempt(self) -> None:
        walk = Walk({"a": []}, a={"max_retries": 1})
        walk.fail("a", permanent=True, unrendered=True)
        assert attempts(walk, "a") == []

    def test_a_failure_before_the_next_start_does_not_change_the_attempt_before(self) -> None:
        walk = Walk({"a": []}, a={"max_retries": 1})
        walk.break_("a", error=TRACED)
        walk.later(1000)
        walk.wake("a")
        walk.fail("a", permanent=True, unrendered=True)
        (one,) = attempts(walk, "a")
        assert (one.status, one.error) == ("FAILED", TRACED)

    def test_an_output_from_the_cache_is_no_attempt(self) -> None:
        walk = Walk({"a": []})
        walk.recall("a", 1)
        assert attempts(walk, "a") == []

    def test_a_restored_start_is_an_attempt_of_an_unknown_worker(self) -> None:
        walk = Walk({"a": []}, a={"delivery": "at_most_once"})
        walk.log += restore(walk.state, walk.now + LEASE, walk.now).events
        (one,) = attempts(walk, "a")
        assert (one.status, one.worker) == ("RUNNING", "unknown")


class TestTracebacks:
    """Only the event of the attempt keeps one: what is read often stays small."""

    @pytest.mark.parametrize("retries", [0, 1])
    def test_the_event_of_the_attempt_has_it_beside_its_error(self, retries: int) -> None:
        walk = Walk({"a": []}, a={"max_retries": retries})
        walk.break_("a", error=TRACED)
        (event,) = walk.events_of("node.retrying" if retries else "node.failed")
        assert event.data is not None
        assert (event.data["error"], event.data["traceback"]) == (BROKEN, TRACED["traceback"])
        assert walk["a"].error == BROKEN

    @pytest.mark.parametrize("policy", ["fail_fast", "continue"])
    def test_the_error_of_the_run_has_none(self, policy: str) -> None:
        walk = Walk({"a": [], "b": ["a"]}, on_failure=policy)
        walk.break_("a", error=TRACED)
        assert walk.state.error == {**BROKEN, "node": "a"}
        (event,) = walk.events_of("run.failed")
        assert event.data == {"error": walk.state.error}

    def test_an_error_without_one_makes_the_event_that_it_always_made(self) -> None:
        walk = Walk({"a": []})
        walk.break_("a")
        assert walk.events_of("node.failed")[0].data == {"error": walk["a"].error}

    def test_a_mapped_node_has_the_traceback_of_its_first_failed_item(self) -> None:
        each = {"for_each": {"items": [1, 2, 3, 4], "max_failures": 1}}
        walk = Walk({"a": []}, a=each)
        walk.expand("a", 4)
        walk.start("a[0]", "a[1]", "a[2]", "a[3]")
        for item in (3, 1, 2):
            walk.fail(f"a[{item}]", {**BROKEN, "traceback": f"of {item}"})
        walk.complete("a[0]")
        (one,) = attempts(walk, "a")
        assert one.error is not None
        assert one.error["message"] == "item 1: broken (3 of 4 items failed, 1 may)"
        assert one.error["traceback"] == "of 1"
        walk.retry()
        walk.expand("a", 4)
        walk.break_("a[3]", error={**BROKEN, "traceback": "of 3"})
        walk.run("a[1]", "a[2]")
        assert [one.error and one.error["traceback"] for one in attempts(walk, "a")] == [
            "of 1",
            None,
        ]


def check(log: list[Event], graph: Graph, name: str, node: NodeState) -> None:
    """What the attempts say of a node is what the run says of it."""
    found = attempts_of(log, graph, name)
    assert [(one.epoch, one.attempt) for one in found] == sorted(
        {(one.epoch, one.attempt) for one in found}
    )
    for one in found[:-1]:
        assert one.status != "RUNNING"
    for one in found:
        assert (one.finished_at is None) is (one.status == "RUNNING")
        assert (one.error is None) is (one.status != "FAILED")
    mine = [one for one in found if one.epoch == node.epoch]
    assert [one.attempt for one in mine] == list(range(1, node.attempt + 1))
    assert sum(one.status == "LOST" for one in mine) == node.crashes
    assert (bool(found) and found[-1].status == "RUNNING") is (node.status is NodeStatus.RUNNING)
    if not mine:
        return
    last = mine[-1]
    assert last.started_at == node.started_at
    if node.token.attempt > node.attempt:  # it was queued again since
        assert last.status in ("FAILED", "LOST")
        return
    assert last.status in ENDS[node.status]
    assert (last.worker, last.finished_at) == (node.worker, node.finished_at)
    if last.error is not None:
        assert node.error is not None
        assert last.error == {"where": None, **node.error, "traceback": last.error["traceback"]}


@examples(300)
@given(graphs(), deeds, limits)
def test_the_attempts_agree_with_the_node_after_any_transitions(
    graph: Graph, story: list[DrawnAction], max_bytes: int | None
) -> None:
    log: list[Event] = []

    class Logged(CheckedRun):
        def apply(self, transition):  # type: ignore[no-untyped-def]
            decision = super().apply(transition)
            log.extend(decision.events)
            return decision

    stroll = Logged(graph, max_bytes)
    for deed in story:
        stroll.happen(deed)
        for spec, node in zip(graph.nodes, stroll.run.nodes, strict=True):
            check(log, graph, spec.id, node)
