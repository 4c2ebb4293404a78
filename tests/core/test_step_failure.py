"""What a failure does to the rest of the run, under both policies."""

from __future__ import annotations

from itertools import permutations

import pytest

from .walk import BROKEN, Walk

#   a ─ b ─ c        d ─ e (beside it)
NODES = {"a": [], "b": ["a"], "c": ["b"], "d": [], "e": ["d"]}
MIXED = {"ok": [], "bad": [], "join": ["ok", "bad"], "after": ["join"], "side": ["ok"]}


class TestFailFast:
    def test_the_run_is_failed_at_once(self) -> None:
        walk = Walk(NODES)
        walk.start("d")
        walk.break_("a")
        assert walk.status == "FAILED"
        assert walk.state.error == {**BROKEN, "node": "a"}
        assert walk.types()[-1] == "run.failed"

    def test_descendants_fail_with_the_cause_and_bystanders_are_cancelled(self) -> None:
        walk = Walk(NODES)
        walk.break_("a")
        assert walk.states == {
            "a": "FAILED",
            "b": "FAILED",
            "c": "FAILED",
            "d": "CANCELLED",
            "e": "CANCELLED",
        }
        for node in ("b", "c"):
            assert (walk[node].reason, walk[node].cause) == ("dependency_failed", "a")
            assert walk[node].error is None
        for node in ("d", "e"):
            assert (walk[node].reason, walk[node].cause) == ("run_failed", None)
        assert (walk["a"].reason, walk["a"].error) == (None, BROKEN)

    def test_the_run_waits_for_what_is_running_and_keeps_its_output(self) -> None:
        walk = Walk(NODES)
        walk.start("d")
        walk.break_("a")
        assert (walk.states["d"], walk.states["e"]) == ("RUNNING", "CANCELLED")
        assert walk.state.finished_at is None
        assert not walk.last.ended
        walk.later(5)
        late = walk.complete("d", {"late": True})
        assert late.ended
        assert walk.dispatched() == []
        assert (walk["d"].output, walk.state.finished_at) == ({"late": True}, walk.now)
        assert walk.types()[-1] == "node.completed"
        assert walk.types().count("run.failed") == 1

    def test_finished_at_waits_for_the_last_of_several_running_nodes(self) -> None:
        walk = Walk({"a": [], "x": [], "y": []})
        walk.start("x", "y")
        walk.break_("a")
        walk.later(1)
        assert not walk.complete("x").ended
        walk.later(1)
        assert walk.complete("y").ended
        assert walk.state.finished_at == 102.0

    def test_a_running_node_that_fails_later_changes_neither_cause_nor_error(self) -> None:
        walk = Walk(NODES, d={"max_retries": 5})
        walk.start("d")
        walk.break_("a")
        walk.fail("d", {"type": "Later", "message": "too"})
        assert walk.states["d"] == "FAILED"
        assert walk.states["e"] == "CANCELLED"
        assert walk.state.error == {**BROKEN, "node": "a"}
        assert walk.types().count("run.failed") == 1
        assert walk.ended

    def test_a_running_node_is_not_retried_in_a_failed_run(self) -> None:
        walk = Walk({"a": [], "b": []}, b={"max_retries": 3})
        walk.start("b")
        walk.break_("a")
        assert not walk.fail("b").wake
        assert walk.states["b"] == "FAILED"

    def test_what_backs_off_or_is_parked_is_cancelled(self) -> None:
        walk = Walk({"a": [], "b": [], "c": []}, b={"max_retries": 1})
        walk.break_("b")
        walk.park("c", 60)
        token = walk.token("b")
        walk.break_("a")
        assert walk.states == {"a": "FAILED", "b": "CANCELLED", "c": "CANCELLED"}
        assert walk["b"].reason == "run_failed"
        walk.later(1000)
        assert not walk.wake("b", token)
        assert walk.ended

    def test_what_is_published_is_cancelled_and_cannot_be_claimed(self) -> None:
        walk = Walk({"a": [], "b": []})
        token = walk.token("b")
        walk.break_("a")
        assert not walk.start("b", token=token)
        assert walk.states["b"] == "CANCELLED"

    def test_a_descendant_of_two_branches_fails_though_one_of_them_runs_on(self) -> None:
        walk = Walk(MIXED)
        walk.start("ok")
        walk.break_("bad")
        assert walk.states == {
            "ok": "RUNNING",
            "bad": "FAILED",
            "join": "FAILED",
            "after": "FAILED",
            "side": "CANCELLED",
        }
        walk.complete("ok")
        assert walk.states["side"] == "CANCELLED"

    def test_descendants_are_named_before_the_run_in_the_log(self) -> None:
        walk = Walk(NODES)
        walk.break_("a")
        tail = [(event.type, event.node) for event in walk.last.events]
        assert tail == [
            ("node.failed", "a"),
            ("node.failed", "b"),
            ("node.failed", "c"),
            ("node.cancelled", "d"),
            ("node.cancelled", "e"),
            ("run.failed", None),
        ]

    def test_a_failure_is_final_even_if_everything_else_had_completed(self) -> None:
        walk = Walk(NODES)
        walk.run("d", "e", "a", "b")
        walk.break_("c")
        assert walk.status == "FAILED"
        assert walk.states["e"] == "COMPLETED"

    def test_no_running_node_gets_a_stop_order(self) -> None:
        walk = Walk(NODES)
        walk.start("d")
        walk.break_("a")
        assert not walk.last.stop


class TestContinue:
    def test_descendants_are_skipped_with_the_cause_and_other_branches_run_on(self) -> None:
        walk = Walk(NODES, on_failure="continue")
        walk.break_("a")
        assert walk.states == {
            "a": "FAILED",
            "b": "SKIPPED",
            "c": "SKIPPED",
            "d": "QUEUED",
            "e": "PENDING",
        }
        for node in ("b", "c"):
            assert (walk[node].reason, walk[node].cause) == ("dependency_failed", "a")
        assert walk.status == "RUNNING"
        assert "run.failed" not in walk.types()
        walk.run("d", "e")
        assert (walk.status, walk.types()[-1]) == ("FAILED", "run.failed")

    def test_a_join_with_one_failed_parent_is_skipped_though_the_other_completed(self) -> None:
        walk = Walk(MIXED, on_failure="continue")
        walk.run("ok")
        walk.break_("bad")
        assert (walk.states["join"], walk.states["after"]) == ("SKIPPED", "SKIPPED")
        assert walk["join"].cause == "bad"
        walk.run("side")
        assert walk.status == "FAILED"

    def test_a_parent_that_completes_after_its_child_was_skipped_changes_nothing(self) -> None:
        walk = Walk(MIXED, on_failure="continue")
        walk.start("ok")
        walk.break_("bad")
        assert walk.dispatched(walk.complete("ok")) == ["side"]
        assert walk.states["join"] == "SKIPPED"

    def test_a_second_failure_above_a_skipped_node_keeps_the_first_cause(self) -> None:
        walk = Walk({"x": [], "y": [], "z": ["x", "y"]}, on_failure="continue")
        walk.start("x", "y")
        walk.fail("y")
        walk.fail("x")
        assert (walk.states["z"], walk["z"].cause) == ("SKIPPED", "y")
        assert walk.types("z") == ["node.skipped"]

    @pytest.mark.parametrize("order", list(permutations(["x", "y", "z"])), ids="".join)
    def test_the_runs_error_is_the_first_failed_nodes_in_the_definition(
        self, order: tuple[str, ...]
    ) -> None:
        walk = Walk({"x": [], "y": [], "z": []}, on_failure="continue")
        walk.start("x", "y", "z")
        for node in order:
            if node == "x":
                walk.complete(node)
            else:
                walk.fail(node, {"type": "E", "message": node})
        assert walk.state.error == {"type": "E", "message": "y", "node": "y"}
        assert walk.events_of("run.failed")[0].data == {"error": walk.state.error}

    def test_a_retry_goes_on_after_another_branch_failed(self) -> None:
        walk = Walk({"a": [], "b": []}, on_failure="continue", b={"max_retries": 1})
        walk.start("b")
        walk.break_("a")
        assert walk.fail("b").wake
        walk.later(60)
        walk.wake("b")
        walk.run("b")
        assert walk.states == {"a": "FAILED", "b": "COMPLETED"}
        assert walk.status == "FAILED"


@pytest.mark.parametrize("policy", ["fail_fast", "continue"])
def test_a_config_that_cannot_be_rendered_fails_the_node_before_its_first_start(
    policy: str,
) -> None:
    walk = Walk({"a": [], "b": ["a"]}, on_failure=policy, a={"max_retries": 3})
    walk.fail("a", {"type": "missing_value", "message": "no x"}, permanent=True, unrendered=True)
    assert walk.states["a"] == "FAILED"
    assert (walk["a"].attempt, walk["a"].started_at) == (0, None)
    assert walk.events_of("node.failed")[0].attempt == 0
    assert walk.status == "FAILED"


@pytest.mark.parametrize("permanent", [False, True])
def test_what_a_handler_raised_is_refused_if_the_store_has_lost_its_start(permanent: bool) -> None:
    walk = Walk({"a": []})
    assert not walk.fail("a", permanent=permanent).changed
    assert walk.states == {"a": "QUEUED"}
    assert walk.events_of("result.refused")[0].data == {"reason": "node is QUEUED"}


def test_a_node_that_runs_was_rendered() -> None:
    walk = Walk({"a": []})
    walk.start("a")
    assert not walk.fail("a", permanent=True, unrendered=True).changed
    assert walk.states == {"a": "RUNNING"}


@pytest.mark.parametrize("policy", ["fail_fast", "continue"])
def test_a_failure_above_ten_thousand_nodes_ends_them_all(policy: str) -> None:
    size = 10_000
    nodes = {f"n{i}": [f"n{i - 1}"] if i else [] for i in range(size)}
    walk = Walk(nodes, on_failure=policy)
    walk.break_("n0")
    assert walk.ended
    assert walk.status == "FAILED"
    assert walk[f"n{size - 1}"].cause == "n0"


def test_many_failures_above_the_same_nodes_skip_each_of_them_once() -> None:
    size = 60
    nodes: dict[str, list[str]] = {f"n{i}": [] for i in range(size)}
    nodes |= {f"m{i}": list(nodes)[:size] for i in range(50)}
    walk = Walk(nodes, on_failure="continue")
    for i in range(size):
        walk.break_(f"n{i}")
    assert walk.states["m49"] == "SKIPPED"
    assert walk["m49"].cause == "n0"
    assert len(walk.events_of("node.skipped")) == 50
