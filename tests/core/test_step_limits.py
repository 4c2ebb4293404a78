"""How much of a run goes on at once: `max_concurrency`, parked nodes, cached nodes, progress."""

from __future__ import annotations

import pytest

from .walk import LEASE, Walk

THREE = {"a": [], "b": [], "c": []}


class TestMaxConcurrency:
    def test_nodes_beyond_the_limit_are_held(self) -> None:
        walk = Walk(THREE, max_concurrency=2)
        assert walk.dispatched() == ["a", "b"]
        assert (walk.states["c"], walk.phase("c")) == ("QUEUED", "held")
        assert not walk.start("c")

    def test_a_place_is_given_on_when_a_node_completes(self) -> None:
        walk = Walk(THREE, max_concurrency=1)
        assert walk.dispatched() == ["a"]
        assert walk.dispatched(walk.run("a")) == ["b"]
        assert walk.dispatched(walk.run("b")) == ["c"]
        assert walk.run("c").ended

    def test_a_place_is_given_on_when_a_node_fails(self) -> None:
        walk = Walk(THREE, max_concurrency=1, on_failure="continue")
        assert walk.dispatched(walk.break_("a")) == ["b"]

    def test_held_nodes_are_released_in_definition_order_not_in_the_order_they_came(self) -> None:
        nodes = {"p": [], "q": [], "z": ["q"], "y": ["p"], "x": ["p"]}
        walk = Walk(nodes, max_concurrency=1)
        walk.run("p")
        assert walk.dispatched(walk.run("q")) == ["z"]
        assert walk.dispatched(walk.run("z")) == ["y"]
        assert walk.dispatched(walk.run("y")) == ["x"]

    def test_a_new_node_does_not_overtake_those_that_are_held(self) -> None:
        walk = Walk({"a": [], "b": [], "c": [], "child": ["a"]}, max_concurrency=1)
        assert walk.dispatched(walk.run("a")) == ["b"]
        assert walk.phase("child") == "held"

    def test_a_lost_node_does_not_overtake_those_that_are_held(self) -> None:
        walk = Walk({"low": [], "high": []}, max_concurrency=1)
        walk.park("low", 1)
        walk.start("high")
        walk.later(1)
        walk.wake("low")
        assert walk.phase("low") == "held"
        assert walk.dispatched(walk.lose("high")) == ["low"]
        assert walk.phase("high") == "held"

    def test_a_waiting_retry_does_not_count(self) -> None:
        walk = Walk({"a": [], "b": []}, max_concurrency=1, a={"max_retries": 1})
        assert walk.dispatched(walk.break_("a")) == ["b"]
        walk.start("b")
        walk.later(10)
        assert walk.dispatched(walk.wake("a")) == []
        assert walk.phase("a") == "held"
        assert walk.dispatched(walk.complete("b")) == ["a"]

    def test_a_parked_node_does_not_count(self) -> None:
        walk = Walk({"a": [], "b": []}, max_concurrency=1)
        assert walk.dispatched(walk.park("a", 10)) == ["b"]
        walk.later(10)
        assert walk.dispatched(walk.wake("a")) == []
        assert walk.dispatched(walk.run("b")) == ["a"]

    def test_a_lost_node_gives_its_place_on_in_definition_order(self) -> None:
        walk = Walk({"late": ["b"], "b": [], "c": [], "d": []}, max_concurrency=2)
        walk.start("b", "c")
        assert walk.phase("d") == "held"
        assert walk.dispatched(walk.lose("c")) == ["c"]
        walk.complete("b")
        assert walk.dispatched() == ["late"]

    def test_a_skip_takes_no_place(self) -> None:
        nodes = {"a": [], "b": ["a"], "c": ["a"]}
        walk = Walk(nodes, max_concurrency=1, b={"condition": False})
        assert walk.dispatched(walk.run("a")) == ["c"]

    def test_under_fail_fast_held_nodes_are_cancelled_with_the_rest(self) -> None:
        walk = Walk(THREE, max_concurrency=1)
        walk.break_("a")
        assert walk.states == {"a": "FAILED", "b": "CANCELLED", "c": "CANCELLED"}
        assert walk.dispatched() == []

    def test_a_cancel_leaves_nothing_held(self) -> None:
        walk = Walk(THREE, max_concurrency=1)
        walk.cancel()
        assert walk.state.held == []
        assert walk.dispatched() == []

    def test_an_adopted_node_counts_in_the_next_epoch(self) -> None:
        walk = Walk({"a": [], "b": [], "c": []}, max_concurrency=2)
        walk.start("b")
        walk.break_("a")
        assert walk.states["b"] == "RUNNING"
        assert walk.dispatched(walk.retry()) == ["a"]
        assert walk.phase("c") == "held"
        assert walk.dispatched(walk.complete("b")) == ["c"]

    def test_a_failed_config_gives_its_place_on(self) -> None:
        walk = Walk(THREE, max_concurrency=1, on_failure="continue")
        assert walk.dispatched(walk.fail("a", permanent=True, unrendered=True)) == ["b"]

    def test_a_cached_node_gives_its_place_on(self) -> None:
        walk = Walk(THREE, max_concurrency=1)
        assert walk.dispatched(walk.recall("a", 1)) == ["b"]

    def test_a_wide_fan_is_never_above_the_limit(self) -> None:
        nodes = {"a": [], **{f"n{i}": ["a"] for i in range(20)}, "z": [f"n{i}" for i in range(20)]}
        walk = Walk(nodes, max_concurrency=3)
        walk.run("a")
        for i in range(20):
            walk.run(f"n{i}")
        walk.run("z")
        assert walk.status == "COMPLETED"


class TestParking:
    def test_a_parked_node_waits_until_its_time_and_keeps_its_token(self) -> None:
        walk = Walk({"a": []}, a={"resource_tag": "api"})
        token = walk.token("a")
        parked = walk.park("a", 5)
        assert (walk.states["a"], walk.phase("a"), walk["a"].until) == ("QUEUED", "parked", 105.0)
        assert parked.wake == [(105.0, ("r", "a", token))]
        assert walk.events_of("node.parked")[0].data == {"until": 105.0, "resource_tag": "api"}
        assert not walk.start("a")
        assert not walk.wake("a")
        walk.later(5)
        assert walk.dispatched(walk.wake("a")) == ["a"]
        assert walk.token("a") == token
        assert walk["a"].attempt == 0
        walk.run("a")
        assert walk.status == "COMPLETED"

    def test_a_running_node_cannot_be_parked(self) -> None:
        walk = Walk({"a": []})
        walk.start("a")
        assert not walk.park("a", 5)

    def test_a_node_can_be_parked_again_after_it_was_woken(self) -> None:
        walk = Walk({"a": []})
        for _ in range(2):
            walk.park("a", 5)
            assert not walk.park("a", 9)
            walk.later(5)
            walk.wake("a")
        walk.run("a")
        assert walk["a"].attempt == 1

    def test_a_parked_node_may_be_rescheduled_earlier_and_never_later(self) -> None:
        walk = Walk({"a": [], "b": []}, max_concurrency=1, a={"resource_tag": "api"})
        token = walk.token("a")
        assert walk.dispatched(walk.park("a", 60)) == ["b"]
        sooner = walk.park("a", 2)
        assert sooner.wake == [(102.0, ("r", "a", token))]
        assert not walk.dispatched(sooner), "it gave its place to another before"
        assert not walk.park("a", 2)
        assert not walk.park("a", 60)
        assert [event.data["until"] for event in walk.events_of("node.parked")] == [160.0, 102.0]
        walk.later(2)
        walk.run("b")
        assert walk.dispatched(walk.wake("a")) == ["a"]

    def test_a_node_that_backs_off_is_not_parked(self) -> None:
        walk = Walk({"a": []}, a={"max_retries": 1})
        walk.start("a")
        walk.fail("a")
        assert not walk.park("a", 0)

    def test_a_parked_node_can_be_cancelled(self) -> None:
        walk = Walk({"a": []})
        walk.park("a", 5)
        walk.cancel()
        walk.later(5)
        assert not walk.wake("a")
        assert walk.states == {"a": "CANCELLED"}


class TestCachedNodes:
    def test_a_cached_node_is_completed_with_attempt_zero(self) -> None:
        walk = Walk({"a": [], "b": ["a"]})
        assert walk.dispatched(walk.recall("a", {"x": 1})) == ["b"]
        node = walk["a"]
        assert (node.status, node.attempt, node.output, node.started_at) == (
            "COMPLETED",
            0,
            {"x": 1},
            None,
        )
        assert walk.types("a") == ["node.queued", "node.cached"]
        assert walk.events_of("node.cached")[0].attempt == 0

    def test_only_a_published_node_is_answered_from_the_cache(self) -> None:
        walk = Walk({"a": [], "b": ["a"]})
        assert not walk.recall("b", 1)
        walk.start("a")
        assert not walk.recall("a", 1)
        walk.complete("a", 2)
        assert not walk.recall("a", 1)
        assert walk["a"].output == 2

    def test_a_cached_answer_to_another_start_is_refused(self) -> None:
        walk = Walk({"a": []})
        old = walk.token("a")
        walk.start("a")
        walk.lose("a")
        assert not walk.recall("a", 1, old)

    def test_the_last_cached_node_ends_the_run(self) -> None:
        walk = Walk({"a": []})
        assert walk.recall("a", 1).ended
        assert walk.status == "COMPLETED"

    def test_a_cached_answer_after_a_failed_attempt_leaves_no_error(self) -> None:
        walk = Walk({"a": []}, a={"max_retries": 1})
        walk.break_("a")
        walk.later(10)
        walk.wake("a")
        walk.recall("a", 1)
        assert (walk["a"].error, walk["a"].attempt) == (None, 1)


class TestProgress:
    def test_progress_is_only_an_event(self) -> None:
        walk = Walk({"a": []})
        walk.start("a")
        before = walk["a"].snapshot()
        walk.progress("a", 0.25)
        assert walk["a"].snapshot() == before
        event = walk.events_of("node.progress")[0]
        assert (event.node, event.attempt) == ("a", 1)
        assert event.data == {"fraction": 0.25, "message": "so far"}

    @pytest.mark.parametrize("when", ["queued", "completed", "lost"])
    def test_progress_of_what_does_not_run_is_refused(self, when: str) -> None:
        walk = Walk({"a": []})
        token = walk.token("a")
        if when != "queued":
            walk.start("a")
        if when == "completed":
            walk.complete("a")
        if when == "lost":
            walk.later(LEASE)
            walk.reap("a")
        assert not walk.progress("a", 0.5, token)
