"""What the failure of a node with `allow_failure` does to its run: as good as nothing."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.step import explain_refusal, retry_plan
from dovetail.core.transitions import Retry, TakeOver

from .walk import BROKEN, MAX_CRASHES, Walk

ALLOWED = {"allow_failure": True}
POLICIES = ["fail_fast", "continue"]
#   a ─ b ─ c        d (beside it)
NODES = {"a": [], "b": ["a"], "c": ["b"], "d": []}


def walk_of(nodes: dict[str, list[str]], policy: str = "fail_fast", **more: Any) -> Walk:
    return Walk(nodes, on_failure=policy, **{"a": ALLOWED, **more})


@pytest.mark.parametrize("policy", POLICIES)
class TestTheRunGoesOn:
    def test_the_children_are_queued_and_the_run_completes(self, policy: str) -> None:
        walk = walk_of(NODES, policy)
        walk.break_("a")
        assert walk.dispatched() == ["b"]
        assert walk.status == "RUNNING"
        walk.run("b", "c", "d")
        assert (walk.status, walk.state.error, walk.state.failed) == ("COMPLETED", None, 0)
        assert walk.states["a"] == "FAILED"
        assert walk["a"].error == BROKEN

    def test_it_ends_even_if_the_failure_comes_last(self, policy: str) -> None:
        walk = walk_of({"a": [], "d": []}, policy)
        walk.run("d")
        assert walk.break_("a").ended
        assert walk.types()[-2:] == ["node.failed", "run.completed"]

    def test_a_join_waits_for_its_other_parents(self, policy: str) -> None:
        walk = walk_of({"a": [], "b": [], "j": ["a", "b"]}, policy)
        walk.break_("a")
        assert walk.dispatched() == []
        walk.run("b")
        assert walk.dispatched() == ["j"]

    def test_an_allowed_failure_feeds_a_child_whose_other_parents_were_skipped(
        self, policy: str
    ) -> None:
        nodes: dict[str, list[str]] = {"a": [], "s": [], "j": ["a", "s"]}
        walk = walk_of(nodes, policy, s={"condition": False})
        assert walk.states["s"] == "SKIPPED"
        walk.break_("a")
        assert walk.dispatched() == ["j"]

    def test_only_its_last_attempt_counts(self, policy: str) -> None:
        walk = walk_of(NODES, policy, a={**ALLOWED, "max_retries": 1})
        walk.break_("a")
        assert walk.phase("a") == "backing_off"
        walk.later(1000)
        walk.wake("a")
        assert walk.dispatched() == ["a"]
        walk.break_("a")
        assert walk.dispatched() == ["b"]

    def test_a_slot_that_it_frees_goes_to_the_first_ready_node(self, policy: str) -> None:
        walk = walk_of({"a": [], "d": [], "b": ["a"]}, policy, max_concurrency=1)
        assert walk.dispatched() == ["a"]
        walk.break_("a")
        assert walk.dispatched() == ["d"]
        assert walk.phase("b") == "held"


class TestItsOwnFailures:
    def test_a_config_that_cannot_be_rendered(self) -> None:
        walk = walk_of(NODES)
        walk.fail("a", permanent=True, unrendered=True)
        assert (walk.status, walk.dispatched()) == ("RUNNING", ["b"])

    def test_an_error_in_its_condition(self) -> None:
        walk = walk_of(NODES, a={**ALLOWED, "condition": "{{ params.nothing.here }}"})
        assert (walk.status, walk.states["a"]) == ("RUNNING", "FAILED")
        assert walk.dispatched(walk.begun) == ["b", "d"]

    def test_an_error_in_the_condition_of_its_child_counts_as_the_childs_own(self) -> None:
        broken = {**ALLOWED, "condition": "{{ a.x.y }}"}
        walk = walk_of({"a": [], "b": ["a"], "c": ["b"]}, b=broken)
        walk.run("a", output={})
        assert walk.states == {"a": "COMPLETED", "b": "FAILED", "c": "QUEUED"}

    def test_an_output_that_its_run_may_not_keep(self) -> None:
        walk = walk_of(NODES, max_bytes=10)
        walk.start("a")
        walk.complete("a", "x" * 20)
        assert walk["a"].error is not None
        assert (walk["a"].error["type"], walk.dispatched()) == ("too_large", ["b"])

    def test_a_cached_output_that_its_run_may_not_keep(self) -> None:
        walk = walk_of(NODES, max_bytes=10)
        walk.recall("a", "x" * 20)
        assert (walk.states["a"], walk.dispatched()) == ("FAILED", ["b"])

    def test_workers_that_it_crashes(self) -> None:
        walk = walk_of(NODES)
        for _ in range(MAX_CRASHES):
            walk.start("a")
            walk.lose("a")
        assert (walk["a"].reason, walk.dispatched()) == ("worker_lost", ["b"])

    def test_the_lost_start_of_an_at_most_once_node_that_is_taken_over(self) -> None:
        once = {**ALLOWED, "delivery": "at_most_once"}
        walk = walk_of({"a": [], "d": [], "b": ["a"]}, a=once)
        walk.start("a", "d")
        walk.apply(TakeOver("r", MAX_CRASHES))
        assert walk.states == {"a": "FAILED", "d": "QUEUED", "b": "QUEUED"}
        assert walk.dispatched() == ["d", "b"]


class TestOtherFailures:
    def test_a_descendant_of_a_failed_node_is_not_allowed_by_itself(self) -> None:
        walk = Walk({"x": [], "a": ["x"], "b": ["a"]}, a=ALLOWED, b=ALLOWED)
        walk.break_("x")
        assert walk.states == dict.fromkeys("xab", "FAILED")
        assert (walk.status, walk.state.failed) == ("FAILED", 3)
        assert walk["a"].reason == "dependency_failed"

    def test_a_cancel_counts_a_node_that_failed_along_with_its_parent(self) -> None:
        walk = Walk({"x": [], "a": ["x"], "own": [], "y": []}, a=ALLOWED, own=ALLOWED)
        walk.start("y")
        walk.break_("own")
        walk.break_("x")
        walk.cancel()
        assert (walk.status, walk.state.failed) == ("FAILED", 2)

    def test_under_continue_it_is_skipped_below_another_failure(self) -> None:
        walk = Walk({"x": [], "a": ["x"], "b": ["a"]}, on_failure="continue", a=ALLOWED)
        walk.break_("x")
        assert walk.states == {"x": "FAILED", "a": "SKIPPED", "b": "SKIPPED"}
        assert walk.status == "FAILED"

    def test_a_failure_beside_it_cancels_it_with_its_children(self) -> None:
        walk = walk_of(NODES)
        walk.break_("d")
        assert walk.states == {**dict.fromkeys("abc", "CANCELLED"), "d": "FAILED"}

    def test_nothing_follows_in_a_run_that_has_failed(self) -> None:
        walk = walk_of(NODES)
        walk.start("a")
        walk.break_("d")
        assert walk.fail("a", {"type": "Later", "message": "too"}).ended
        assert walk.dispatched() == []
        assert walk.states["a"] == "FAILED"
        assert walk.state.error == {**BROKEN, "node": "d"}
        assert (walk.status, walk.state.failed) == ("FAILED", 1)

    def test_the_error_of_a_run_is_of_the_first_node_that_was_not_allowed_to_fail(self) -> None:
        walk = walk_of(NODES, "continue")
        walk.break_("a", error={"type": "Allowed", "message": "first"})
        walk.break_("d")
        walk.run("b", "c")
        assert (walk.status, walk.state.error) == ("FAILED", {**BROKEN, "node": "d"})

    def test_a_cancelled_run_with_an_allowed_failure_is_cancelled(self) -> None:
        walk = walk_of(NODES)
        walk.break_("a")
        walk.cancel()
        assert (walk.status, walk.state.failed) == ("CANCELLED", 0)


class TestWhatTemplatesRead:
    def conditional(self, condition: str) -> Walk:
        walk = walk_of({"a": [], "b": ["a"]}, b={"condition": condition})
        walk.break_("a", error={"type": "Down", "message": "no answer"})
        return walk

    @pytest.mark.parametrize(
        "condition",
        [
            "{{ a.status == 'FAILED' }}",
            "{{ a.error.message == 'no answer' }}",
            "{{ a.error.type == 'Down' }}",
            "{{ a.anything is none }}",
            "{{ a.any.thing is none }}",
            "{{ a.output is none }}",
            "{{ a is not defined }}",
            "{{ a.x | default('none') == 'none' }}",
            "{{ a | default('none') == 'none' }}",
        ],
    )
    def test_the_status_and_the_error_are_set_and_every_key_is_none(self, condition: str) -> None:
        walk = self.conditional(condition)
        assert walk.states["b"] == "QUEUED"

    def test_a_condition_on_success_skips_the_child(self) -> None:
        walk = self.conditional("{{ a.status == 'COMPLETED' }}")
        assert (walk.states["b"], walk.status) == ("SKIPPED", "COMPLETED")


class TestRetry:
    def test_a_completed_run_with_allowed_failures_names_them_and_asks_for_from(self) -> None:
        walk = walk_of({"a": [], "b": ["a"], "z": []}, z=ALLOWED)
        walk.break_("a")
        walk.break_("z")
        walk.run("b")
        assert not walk.retry()
        refusal = explain_refusal(walk.state, Retry("r"))
        assert refusal.type == "conflict"
        assert "COMPLETED with allowed failures (a, z)" in str(refusal)
        assert "`from`" in str(refusal)

    def test_a_completed_run_without_them_says_what_it_always_said(self) -> None:
        walk = walk_of({"a": []})
        walk.run("a")
        assert retry_plan(walk.state) == "run r is COMPLETED: name the node to rerun it from"

    def test_from_an_allowed_failure_runs_it_and_what_is_below_it(self) -> None:
        walk = walk_of({"a": [], "b": ["a"], "d": []})
        walk.break_("a")
        walk.run("b", "d")
        walk.retry("a")
        assert walk.dispatched() == ["a"]
        assert walk.states == {"a": "QUEUED", "b": "PENDING", "d": "COMPLETED"}

    def test_from_elsewhere_runs_it_too_and_its_completed_children_keep_their_outputs(self) -> None:
        walk = walk_of({"a": [], "b": ["a"], "d": []})
        walk.break_("a")
        walk.run("b", "d", output=1)
        walk.retry("d")
        assert walk.dispatched() == ["a", "d"]
        assert (walk.states["b"], walk["b"].output) == ("COMPLETED", 1)
        walk.break_("a")
        assert walk.dispatched() == []
        walk.run("d")
        assert walk.status == "COMPLETED"

    def test_of_a_failed_run_runs_it_again(self) -> None:
        walk = walk_of({"a": [], "b": ["a"], "x": ["b"]}, "continue")
        walk.break_("a")
        walk.run("b")
        walk.break_("x")
        assert walk.status == "FAILED"
        walk.retry()
        assert walk.dispatched() == ["a", "x"]
        assert (walk.states["b"], walk.state.failed) == ("COMPLETED", 0)

    def test_a_node_that_ran_through_a_retry_feeds_its_children_when_it_fails(self) -> None:
        walk = walk_of({"a": [], "b": ["a"], "d": []})
        walk.start("a")
        walk.break_("d")
        assert walk.states["b"] == "CANCELLED"
        walk.retry()
        assert walk.dispatched() == ["d"]
        walk.fail("a")
        assert walk.dispatched() == ["b"]
        walk.run("b", "d")
        assert walk.status == "COMPLETED"
