"""Conditions, and what a skipped node means for those below it."""

from __future__ import annotations

import pytest

from .walk import Walk

NO = {"condition": "{{ false }}"}
YES = {"condition": "{{ true }}"}
BAD = {"condition": "{{ params.missing.deeper }}"}


def test_a_false_condition_skips_the_node_and_a_true_one_queues_it() -> None:
    nodes = {"a": [], "low": ["a"], "high": ["a"]}
    walk = Walk(
        nodes, low={"condition": "{{ a.score < 5 }}"}, high={"condition": "{{ a.score >= 5 }}"}
    )
    walk.run("a", output={"score": 7})
    assert walk.dispatched() == ["high"]
    assert (walk.states["low"], walk["low"].reason) == ("SKIPPED", "condition_false")
    walk.run("high")
    assert walk.status == "COMPLETED"


def test_a_condition_is_decided_only_when_the_parents_are_done() -> None:
    walk = Walk(
        {"a": [], "b": ["a"]}, b={"condition": "{{ params.go and a.go }}"}, params={"go": 1}
    )
    assert walk.states["b"] == "PENDING"
    walk.run("a", output={"go": True})
    assert walk.states["b"] == "QUEUED"


def test_a_root_may_have_a_condition() -> None:
    walk = Walk({"a": [], "b": []}, a={"condition": "{{ params.x > 1 }}"}, params={"x": 1})
    assert walk.states == {"a": "SKIPPED", "b": "QUEUED"}
    assert walk.dispatched(walk.begun) == ["b"]


def test_a_run_with_every_node_skipped_completes_at_its_creation() -> None:
    walk = Walk({"a": [], "b": ["a"]}, a=NO)
    assert (walk.status, walk.ended, walk.begun.ended) == ("COMPLETED", True, True)
    assert walk.types() == [
        "run.created",
        "run.started",
        "node.skipped",
        "node.skipped",
        "run.completed",
    ]


def test_a_child_of_only_skipped_parents_is_skipped_without_evaluating_its_condition() -> None:
    walk = Walk({"a": [], "b": [], "c": ["a", "b"]}, a=NO, b=NO, c=BAD)
    assert (walk.states["c"], walk["c"].reason, walk["c"].cause) == (
        "SKIPPED",
        "dependency_skipped",
        None,
    )


def test_a_child_runs_if_at_least_one_parent_completed() -> None:
    walk = Walk({"a": [], "b": [], "c": ["a", "b"]}, a=NO)
    assert walk.dispatched(walk.run("b")) == ["c"]


def test_a_parent_may_be_skipped_after_another_completed() -> None:
    nodes = {"a": [], "b": [], "c": ["b"], "d": ["a", "c"]}
    walk = Walk(nodes, c=NO)
    walk.run("a")
    assert walk.dispatched(walk.run("b")) == ["d"]
    assert walk.states["c"] == "SKIPPED"


def test_a_skip_does_not_block_other_children() -> None:
    nodes = {"a": [], "opt": ["a"], "after": ["opt"], "join": ["a", "after"]}
    walk = Walk(nodes, opt=NO)
    assert walk.dispatched(walk.run("a")) == ["join"]
    assert walk["after"].reason == "dependency_skipped"
    walk.run("join")
    assert walk.status == "COMPLETED"


def test_nodes_behind_skips_and_beside_them_are_queued_in_definition_order() -> None:
    nodes = {"z": ["skip", "a"], "a": [], "skip": ["a"], "b": ["a"]}
    walk = Walk(nodes, skip=NO)
    assert walk.dispatched(walk.run("a")) == ["z", "b"]


def test_a_skip_propagates_through_ten_thousand_nodes() -> None:
    size = 10_000
    nodes = {f"n{i}": [f"n{i - 1}"] if i else [] for i in range(size)}
    walk = Walk(nodes, n0=NO)
    assert walk.status == "COMPLETED"
    assert set(walk.states.values()) == {"SKIPPED"}
    assert walk[f"n{size - 1}"].reason == "dependency_skipped"


def test_a_condition_sees_a_skipped_ancestor_as_none() -> None:
    nodes = {"a": [], "opt": ["a"], "c": ["a", "opt"], "d": ["a", "opt"]}
    walk = Walk(
        nodes,
        opt=NO,
        c={"condition": "{{ opt.x is none and opt.status == 'SKIPPED' }}"},
        d={"condition": "{{ opt.x }}"},
    )
    walk.run("a")
    assert (walk.states["c"], walk.states["d"]) == ("QUEUED", "SKIPPED")


class TestAnErrorInACondition:
    def test_fails_the_node_immediately_without_a_retry(self) -> None:
        walk = Walk({"a": []}, a={**BAD, "max_retries": 5})
        assert walk.states == {"a": "FAILED"}
        error = walk["a"].error
        assert error is not None
        assert error["type"] == "missing_value"
        assert "node 'a'" in error["message"]
        assert "condition" in error["message"]
        assert (walk["a"].attempt, walk.status) == (0, "FAILED")
        assert not walk.begun.wake

    def test_does_not_count_as_false(self) -> None:
        walk = Walk({"a": [], "b": ["a"]}, on_failure="continue", a=BAD)
        assert walk.states == {"a": "FAILED", "b": "SKIPPED"}
        assert (walk["b"].reason, walk["b"].cause) == ("dependency_failed", "a")
        assert walk.status == "FAILED"

    def test_under_fail_fast_cancels_the_nodes_that_the_same_step_would_have_queued(self) -> None:
        walk = Walk({"a": [], "b": ["a"], "c": ["a"], "d": ["b"]}, c=BAD)
        walk.run("a")
        assert walk.states == {
            "a": "COMPLETED",
            "b": "CANCELLED",
            "c": "FAILED",
            "d": "CANCELLED",
        }
        assert walk.dispatched() == []
        assert walk.ended

    def test_under_fail_fast_ends_later_conditions_of_the_same_step_undecided(self) -> None:
        walk = Walk({"a": [], "b": ["a"], "c": ["a"]}, b=BAD, c=BAD)
        walk.run("a")
        assert (walk.states["b"], walk.states["c"]) == ("FAILED", "CANCELLED")

    def test_under_continue_leaves_the_other_branches_alone(self) -> None:
        walk = Walk({"a": [], "b": ["a"], "c": ["a"]}, on_failure="continue", b=BAD)
        assert walk.dispatched(walk.run("a")) == ["c"]
        assert walk.states["b"] == "FAILED"

    def test_twice_in_one_step_is_reported_twice_under_continue(self) -> None:
        walk = Walk({"a": [], "b": [], "c": ["a", "b"]}, on_failure="continue", a=BAD, b=BAD)
        assert walk.states == {"a": "FAILED", "b": "FAILED", "c": "SKIPPED"}
        assert walk["c"].cause == "a"
        assert walk.state.error is not None
        assert walk.state.error["node"] == "a"


@pytest.mark.parametrize(
    ("parents", "becomes", "reason"),
    [
        (("completed", "completed"), "QUEUED", None),
        (("completed", "skipped"), "QUEUED", None),
        (("skipped", "skipped"), "SKIPPED", "dependency_skipped"),
        (("completed", "failed"), "SKIPPED", "dependency_failed"),
        (("skipped", "failed"), "SKIPPED", "dependency_failed"),
        (("failed", "failed"), "SKIPPED", "dependency_failed"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_the_state_of_a_child_follows_from_its_parents(
    parents: tuple[str, str], becomes: str, reason: str | None, turned: bool
) -> None:
    kinds = dict(zip("pq", reversed(parents) if turned else parents, strict=True))
    skips = {
        name: {"condition": "{{ root.no }}"} for name, kind in kinds.items() if kind == "skipped"
    }
    nodes = {"root": [], "p": ["root"], "q": ["root"], "child": ["p", "q"]}
    walk = Walk(nodes, on_failure="continue", **skips)
    walk.run("root", output={"no": False})
    for name, kind in kinds.items():
        if kind == "completed":
            walk.run(name)
        elif kind == "failed":
            walk.break_(name)
    assert (walk.states["child"], walk["child"].reason) == (becomes, reason)
