"""Cancel and retry: what people do to a run from outside."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Conflict, NotFound
from dovetail.core.step import explain_refusal, retry_plan
from dovetail.core.transitions import Cancel, Retry

from .walk import BROKEN, LEASE, Walk

CHAIN = {"a": [], "b": ["a"], "c": ["b"]}


class TestCancel:
    def test_every_node_that_is_not_finished_is_cancelled_at_once_and_the_run_with_them(
        self,
    ) -> None:
        nodes = {"done": [], "runs": [], "waits": [], "parked": [], "held": [], "later": ["runs"]}
        walk = Walk(nodes, max_concurrency=2, waits={"max_retries": 1})
        walk.run("done")
        walk.start("runs")
        walk.break_("waits")
        walk.park("parked", 60)
        walk.later(1)
        cancelled = walk.cancel()
        assert walk.states == {
            "done": "COMPLETED",
            **dict.fromkeys(["runs", "waits", "parked", "held", "later"], "CANCELLED"),
        }
        assert {walk[name].reason for name in nodes if name != "done"} == {"run_cancelled"}
        assert (walk.status, walk.state.finished_at, cancelled.ended) == (
            "CANCELLED",
            walk.now,
            True,
        )
        assert walk.types()[-1] == "run.cancelled"

    def test_only_running_handlers_get_a_stop_order(self) -> None:
        walk = Walk({"a": [], "b": [], "c": []})
        walk.start("a", "b")
        tokens = [walk.token("a"), walk.token("b")]
        stops = walk.cancel().stop
        assert [(stop.node, stop.token) for stop in stops] == list(zip("ab", tokens, strict=True))

    @pytest.mark.parametrize("how", ["complete", "fail"])
    def test_a_late_result_is_only_an_event(self, how: str) -> None:
        walk = Walk(CHAIN)
        walk.start("a")
        walk.cancel()
        late = walk.complete("a", 1) if how == "complete" else walk.fail("a")
        assert [(event.type, event.node, event.attempt) for event in late.events] == [
            ("result.refused", "a", 1)
        ]
        assert late.events[0].data == {"reason": "node is CANCELLED"}
        assert not late.changed
        assert walk["a"].output is None
        assert walk.status == "CANCELLED"

    def test_nothing_can_be_claimed_woken_renewed_or_reaped_after_it(self) -> None:
        walk = Walk({"a": [], "b": []})
        walk.start("a")
        queued = walk.token("b")
        walk.cancel()
        assert not walk.start("b", token=queued)
        assert not walk.renew("a")
        walk.later(LEASE)
        assert not walk.reap("a")

    def test_under_continue_a_run_with_a_failed_node_ends_failed(self) -> None:
        walk = Walk({"a": [], "b": []}, on_failure="continue")
        walk.break_("a")
        walk.cancel()
        assert (walk.status, walk.states["b"]) == ("FAILED", "CANCELLED")
        assert walk.state.error == {**BROKEN, "node": "a"}
        assert walk.types()[-1] == "run.failed"

    def test_a_failed_run_with_running_nodes_can_be_cancelled_and_stays_failed(self) -> None:
        walk = Walk({"a": [], "b": []})
        walk.start("b")
        walk.break_("a")
        cancelled = walk.cancel()
        assert cancelled.ended
        assert [stop.node for stop in cancelled.stop] == ["b"]
        assert (walk.status, walk.states["b"], walk["b"].reason) == (
            "FAILED",
            "CANCELLED",
            "run_cancelled",
        )
        assert walk.types().count("run.failed") == 1
        assert "run.cancelled" not in walk.types()

    @pytest.mark.parametrize("end", ["COMPLETED", "FAILED", "CANCELLED"])
    def test_a_finished_run_has_nothing_to_cancel(self, end: str) -> None:
        walk = Walk({"a": []})
        {"COMPLETED": walk.run, "FAILED": walk.break_, "CANCELLED": lambda _: walk.cancel()}[end](
            "a"
        )
        assert not walk.cancel()
        refusal = explain_refusal(walk.state, Cancel("r"))
        assert isinstance(refusal, Conflict)
        assert str(refusal) == f"run r is {end} already: there is nothing to cancel"


class TestRetry:
    def test_it_opens_an_epoch_that_runs_only_what_did_not_complete(self) -> None:
        walk = Walk(CHAIN)
        walk.run("a", output={"kept": 1})
        walk.break_("b")
        walk.later(5)
        retried = walk.retry()
        assert walk.dispatched(retried) == ["b"]
        assert (walk.status, walk.state.epoch, walk.state.error) == ("RUNNING", 2, None)
        assert walk.state.finished_at is None
        assert (walk["a"].epoch, walk["a"].output) == (1, {"kept": 1})
        assert [walk[name].epoch for name in "bc"] == [2, 2]
        assert walk.states == {"a": "COMPLETED", "b": "QUEUED", "c": "PENDING"}
        walk.run("b", "c")
        assert walk.status == "COMPLETED"

    def test_a_reset_node_remembers_nothing(self) -> None:
        walk = Walk({"a": [], "b": ["a"]}, a={"max_retries": 1})
        walk.break_("a")
        walk.later(10)
        walk.wake("a")
        walk.break_("a")
        walk.retry()
        node = walk["a"]
        assert (node.attempt, node.crashes, node.error, node.reason) == (0, 0, None, None)
        assert (node.started_at, node.finished_at, node.worker) == (None, None, None)
        assert (walk["b"].reason, walk["b"].cause) == (None, None)
        walk.break_("a")
        assert walk.phase("a") == "backing_off", "its retries are its own again"

    def test_what_carries_a_token_of_the_old_epoch_is_stale(self) -> None:
        walk = Walk({"a": []})
        walk.start("a")
        old = walk.token("a")
        walk.cancel()
        walk.retry()
        assert walk.token("a") != old
        assert not walk.start("a", token=old)
        refused = walk.complete("a", 1, old)
        assert (refused.events[0].epoch, refused.events[0].data) == (1, {"reason": "stale"})
        walk.start("a")
        assert not walk.complete("a", 1, old).changed
        assert walk.states["a"] == "RUNNING"

    def test_a_running_sibling_is_adopted_and_not_started_twice(self) -> None:
        walk = Walk({"a": [], "b": [], "join": ["a", "b"]})
        walk.start("b")
        token = walk.token("b")
        walk.break_("a")
        retried = walk.retry()
        assert walk.dispatched(retried) == ["a"]
        assert not retried.stop
        assert (walk.states["b"], walk.token("b"), walk["b"].epoch) == ("RUNNING", token, 1)
        assert not walk.start("b")
        assert walk.dispatched(walk.complete("b", "late")) == []
        assert walk.dispatched(walk.run("a")) == ["join"]
        walk.run("join")
        assert (walk.status, walk["b"].output) == ("COMPLETED", "late")

    def test_an_adopted_node_that_fails_is_retried_in_its_own_epoch(self) -> None:
        walk = Walk({"a": [], "b": []}, b={"max_retries": 1})
        walk.start("b")
        walk.break_("a")
        walk.retry()
        walk.fail("b")
        assert walk.phase("b") == "backing_off"
        assert walk.token("b")[:2] == (1, 2)
        walk.later(10)
        walk.wake("b")
        walk.run("b", "a")
        assert walk.status == "COMPLETED"

    def test_an_adopted_node_that_fails_for_good_fails_the_new_epoch(self) -> None:
        walk = Walk({"a": [], "b": [], "join": ["a", "b"]})
        walk.start("b")
        walk.break_("a")
        walk.retry()
        walk.fail("b")
        assert walk.status == "FAILED"
        assert walk["join"].cause == "b"
        assert walk.states["a"] == "CANCELLED"

    def test_an_adopted_node_whose_worker_is_lost_runs_again(self) -> None:
        walk = Walk({"a": [], "b": []})
        walk.start("b")
        walk.break_("a")
        walk.retry()
        assert walk.dispatched(walk.lose("b")) == ["b"]

    def test_a_sibling_that_finished_after_the_failure_is_kept(self) -> None:
        walk = Walk({"a": [], "b": [], "join": ["a", "b"]})
        walk.start("b")
        walk.break_("a")
        walk.complete("b", "late")
        assert walk.ended
        assert walk.dispatched(walk.retry()) == ["a"]
        assert walk["b"].output == "late"
        assert walk.dispatched(walk.run("a")) == ["join"]

    def test_a_sibling_that_failed_after_the_failure_runs_again(self) -> None:
        walk = Walk({"a": [], "b": []})
        walk.start("b")
        walk.break_("a")
        walk.fail("b")
        assert walk.dispatched(walk.retry()) == ["a", "b"]

    def test_what_was_skipped_is_decided_anew(self) -> None:
        nodes = {"a": [], "opt": ["a"], "bad": ["a"], "join": ["opt", "bad"]}
        walk = Walk(nodes, opt={"condition": "{{ a.go }}"})
        walk.run("a", output={"go": False})
        walk.break_("bad")
        walk.retry()
        assert (walk.states["opt"], walk["opt"].epoch) == ("SKIPPED", 2)
        assert walk.dispatched(walk.run("bad")) == ["join"]

    def test_under_continue_skipped_dependents_run_again(self) -> None:
        walk = Walk(CHAIN, on_failure="continue")
        walk.break_("a")
        assert walk.states == {"a": "FAILED", "b": "SKIPPED", "c": "SKIPPED"}
        walk.retry()
        walk.run("a", "b", "c")
        assert walk.status == "COMPLETED"

    def test_a_cancelled_run_can_be_retried(self) -> None:
        walk = Walk(CHAIN)
        walk.run("a")
        walk.cancel()
        assert walk.dispatched(walk.retry()) == ["b"]
        walk.run("b", "c")
        assert walk.status == "COMPLETED"

    def test_a_run_can_be_retried_many_times(self) -> None:
        walk = Walk({"a": []})
        for epoch in range(2, 6):
            walk.break_("a")
            walk.retry()
            assert walk.state.epoch == walk["a"].epoch == epoch
        walk.run("a")
        assert walk.status == "COMPLETED"

    def test_a_retry_may_end_at_once(self) -> None:
        walk = Walk({"a": []}, a={"condition": "{{ params.x }}"})
        assert walk.retry().ended
        assert walk.status == "FAILED"
        assert walk.state.epoch == 2

    def test_the_counters_come_from_the_states_not_from_the_failed_epoch(self) -> None:
        nodes = {"a": [], "b": [], "c": [], "join": ["a", "b", "c"]}
        walk = Walk(nodes)
        walk.start("a", "b", "c")
        walk.complete("a")
        walk.fail("b")
        walk.complete("c")
        walk.retry()
        assert walk["join"].waiting == 1
        assert walk.dispatched(walk.run("b")) == ["join"]


class TestRetryFrom:
    def test_a_completed_run_is_rerun_from_a_node_on(self) -> None:
        walk = Walk(CHAIN)
        walk.run("a", output=1)
        walk.run("b", "c")
        assert walk.dispatched(walk.retry("b")) == ["b"]
        assert walk.states == {"a": "COMPLETED", "b": "QUEUED", "c": "PENDING"}
        assert (walk["a"].epoch, walk["a"].output) == (1, 1)
        assert walk.events_of("run.retried")[0].data == {"from": "b"}
        walk.run("b", "c")
        assert (walk.status, walk["c"].epoch) == ("COMPLETED", 2)

    def test_it_resets_the_node_its_descendants_and_what_did_not_complete(self) -> None:
        nodes = {"a": [], "b": ["a"], "c": ["b"], "x": [], "y": ["x"]}
        walk = Walk(nodes, on_failure="continue")
        walk.run("a", "b", "c")
        walk.break_("x")
        walk.retry("b")
        assert walk.states == {
            "a": "COMPLETED",
            "b": "QUEUED",
            "c": "PENDING",
            "x": "QUEUED",
            "y": "PENDING",
        }

    def test_a_running_descendant_is_fenced_and_gets_a_stop_order(self) -> None:
        walk = Walk({"bad": [], "a": [], "b": ["a"], "other": []})
        walk.run("a")
        walk.start("b", "other")
        old = walk.token("b")
        walk.break_("bad")
        retried = walk.retry("a")
        assert [(stop.node, stop.token) for stop in retried.stop] == [("b", old)]
        assert (walk.states["b"], walk.states["other"]) == ("PENDING", "RUNNING")
        assert not walk.complete("b", "stale", old).changed
        walk.run("bad", "a")
        walk.run("b", output="fresh")
        assert walk["b"].output == "fresh"

    def test_the_node_itself_is_fenced_if_it_runs(self) -> None:
        walk = Walk({"bad": [], "a": []})
        walk.start("a")
        walk.break_("bad")
        retried = walk.retry("a")
        assert [stop.node for stop in retried.stop] == ["a"]
        assert walk.dispatched(retried) == ["bad", "a"]
        assert walk["a"].epoch == 2

    def test_from_a_node_behind_a_running_one_waits_for_it(self) -> None:
        walk = Walk({"bad": [], "a": [], "b": ["a"]})
        walk.start("a")
        walk.break_("bad")
        walk.retry("b")
        assert walk.states == {"bad": "QUEUED", "a": "RUNNING", "b": "PENDING"}
        assert walk.dispatched(walk.complete("a")) == ["b"]


class TestRefusals:
    def test_a_run_that_goes_on_cannot_be_retried(self) -> None:
        walk = Walk(CHAIN)
        assert not walk.retry()
        assert not walk.retry("a")
        refusal = explain_refusal(walk.state, Retry("r"))
        assert isinstance(refusal, Conflict)
        assert "RUNNING" in str(refusal)
        assert "ended" in str(refusal)

    def test_a_completed_run_needs_a_node_to_start_from(self) -> None:
        walk = Walk({"a": []})
        walk.run("a")
        assert not walk.retry()
        refusal = explain_refusal(walk.state, Retry("r"))
        assert isinstance(refusal, Conflict)
        assert str(refusal) == "run r is COMPLETED: name the node to rerun it from"

    def test_a_node_that_does_not_exist_is_not_found(self) -> None:
        walk = Walk({"a": []})
        walk.break_("a")
        assert not walk.retry("ghost")
        refusal = explain_refusal(walk.state, Retry("r", "ghost"))
        assert isinstance(refusal, NotFound)
        assert str(refusal) == "run r has no node 'ghost'"

    def test_a_refused_retry_opens_no_epoch(self) -> None:
        walk = Walk({"a": []})
        walk.run("a")
        walk.retry()
        assert (walk.state.epoch, walk.status) == (1, "COMPLETED")

    def test_a_plan_has_what_a_retry_would_reset_and_changes_nothing(self) -> None:
        walk = Walk({"x": [], **CHAIN})
        walk.run("a", "b", "c")
        walk.break_("x")
        before = walk.state.snapshot()
        assert retry_plan(walk.state) == [0]
        assert retry_plan(walk.state, "b") == [0, 2, 3]
        assert walk.state.snapshot() == before
