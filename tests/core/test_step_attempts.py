"""Starts of a node: retries with backoff, lost workers, leases, at-most-once nodes."""

from __future__ import annotations

import pytest

from .walk import BROKEN, LEASE, Walk


def a(**fields: object) -> Walk:
    """A run of one node."""
    return Walk({"a": []}, a=fields)


class TestRetries:
    def test_a_failed_node_backs_off_and_runs_again_under_the_next_attempt(self) -> None:
        walk = a(max_retries=1)
        walk.break_("a")
        assert (walk.states["a"], walk.phase("a")) == ("QUEUED", "backing_off")
        assert (walk["a"].until, walk["a"].attempt, walk.status) == (110.0, 1, "RUNNING")
        assert walk.last.wake == [(110.0, ("r", "a", walk.token("a")))]
        walk.later(10)
        assert walk.dispatched(walk.wake("a")) == ["a"]
        walk.start("a")
        assert walk["a"].attempt == 2
        walk.complete("a", "done")
        assert (walk.states["a"], walk["a"].output) == ("COMPLETED", "done")

    def test_a_node_that_completed_after_a_retry_has_no_error(self) -> None:
        walk = a(max_retries=1)
        walk.break_("a")
        assert walk["a"].error == BROKEN
        walk.later(10)
        walk.wake("a")
        walk.run("a")
        assert walk["a"].error is None

    def test_it_fails_after_its_last_retry(self) -> None:
        walk = a(max_retries=2)
        for _ in range(2):
            walk.break_("a")
            walk.later(1000)
            walk.wake("a")
        walk.break_("a")
        assert (walk.states["a"], walk["a"].attempt) == ("FAILED", 3)
        assert walk.types("a").count("node.retrying") == 2

    def test_without_retries_the_first_failure_is_final(self) -> None:
        walk = a()
        walk.break_("a")
        assert (walk.states["a"], walk["a"].attempt) == ("FAILED", 1)

    def test_a_permanent_error_is_never_retried(self) -> None:
        walk = a(max_retries=5)
        walk.break_("a", permanent=True)
        assert (walk.states["a"], walk["a"].attempt) == ("FAILED", 1)

    def test_the_backoff_follows_the_nodes_policy_and_the_chance_it_is_given(self) -> None:
        walk = a(
            max_retries=3, retry={"base_delay_seconds": 4, "max_delay_seconds": 10, "jitter": 0.5}
        )
        waits = []
        for _ in range(3):
            walk.break_("a", chance=0.5)
            until = walk["a"].until
            assert until is not None
            waits.append(until - walk.now)
            walk.later(waits[-1])
            walk.wake("a")
        assert waits == [5, 10, 10]

    def test_the_handlers_own_delay_wins(self) -> None:
        walk = a(max_retries=1)
        walk.break_("a", after=0.5)
        assert walk["a"].until == 100.5

    def test_a_services_retry_after_wins_if_longer(self) -> None:
        walk = a(max_retries=2)
        walk.break_("a", at_least=45)
        assert walk["a"].until == 145.0
        walk.later(45)
        walk.wake("a")
        walk.break_("a", at_least=5)
        assert walk["a"].until == walk.now + 20

    def test_it_is_not_woken_before_its_time(self) -> None:
        walk = a(max_retries=1)
        walk.break_("a")
        walk.later(9.999)
        assert not walk.wake("a")
        walk.later(0.001)
        assert walk.wake("a")

    def test_it_is_woken_once(self) -> None:
        walk = a(max_retries=1)
        walk.break_("a")
        walk.later(10)
        assert walk.wake("a")
        assert not walk.wake("a")

    def test_it_cannot_be_claimed_while_it_backs_off(self) -> None:
        walk = a(max_retries=1)
        walk.break_("a")
        assert not walk.start("a")

    def test_the_old_attempt_is_stale_at_once(self) -> None:
        walk = a(max_retries=1)
        walk.start("a")
        old = walk.token("a")
        walk.fail("a")
        assert walk.token("a") != old
        assert not walk.complete("a", 1, old)
        assert not walk.fail("a", token=old)
        walk.later(10)
        walk.wake("a")
        assert not walk.start("a", token=old)
        walk.start("a")
        assert not walk.complete("a", 1, old).changed
        assert walk.states["a"] == "RUNNING"

    def test_the_event_has_the_delay_the_retry_and_the_error(self) -> None:
        walk = a(max_retries=1)
        walk.break_("a")
        (event,) = walk.events_of("node.retrying")
        assert event.data == {"error": BROKEN, "delay": 10.0, "retry": 1}
        assert event.attempt == 1


class TestLeases:
    def test_a_lost_node_is_queued_again_at_once_under_the_next_attempt(self) -> None:
        walk = a()
        walk.start("a", worker="w1")
        old = walk.token("a")
        assert walk.dispatched(walk.lose("a")) == ["a"]
        assert (walk.states["a"], walk.phase("a"), walk["a"].worker) == (
            "QUEUED",
            "published",
            None,
        )
        assert walk.types("a") == ["node.queued", "node.started", "node.lost", "node.queued"]
        assert walk.events_of("node.lost")[0].data == {"worker": "w1", "crashes": 1}
        walk.start("a", worker="w2")
        assert (walk["a"].attempt, walk.token("a").attempt) == (2, 2)
        assert not walk.complete("a", "from the grave", old).changed
        walk.complete("a", "alive")
        assert walk["a"].output == "alive"

    def test_only_a_lease_that_has_run_out_is_reaped(self) -> None:
        walk = a()
        walk.start("a")
        walk.later(LEASE - 0.001)
        assert not walk.reap("a")
        walk.later(0.001)
        assert walk.reap("a")

    def test_a_renewed_lease_is_not_reaped(self) -> None:
        walk = a()
        walk.start("a")
        walk.later(LEASE - 1)
        assert walk.renew("a")
        walk.later(LEASE - 1)
        assert not walk.reap("a")
        assert walk.states["a"] == "RUNNING"

    def test_a_lease_is_reaped_once(self) -> None:
        walk = a()
        walk.start("a")
        old = walk.token("a")
        walk.lose("a")
        assert not walk.reap("a", old)
        walk.start("a")
        walk.later(LEASE)
        assert not walk.reap("a", old)

    def test_a_worker_that_lost_its_node_may_not_renew(self) -> None:
        walk = a()
        walk.start("a")
        old = walk.token("a")
        walk.lose("a")
        assert not walk.renew("a", old)
        walk.start("a")
        assert not walk.renew("a", old)

    def test_a_result_counts_though_its_lease_ran_out_if_it_was_not_reaped(self) -> None:
        walk = a()
        walk.start("a")
        walk.later(LEASE * 5)
        assert walk.complete("a", 1)
        assert not walk.reap("a")
        assert walk.states["a"] == "COMPLETED"

    def test_a_lost_worker_does_not_use_up_a_retry(self) -> None:
        walk = a(max_retries=1)
        walk.start("a")
        walk.lose("a")
        walk.start("a")
        walk.lose("a")
        walk.break_("a")
        assert walk.phase("a") == "backing_off"
        assert walk["a"].until == walk.now + 10, "the first retry, not the third"
        walk.later(10)
        walk.wake("a")
        walk.break_("a")
        assert (walk.states["a"], walk["a"].attempt, walk["a"].crashes) == ("FAILED", 4, 2)

    def test_at_the_crash_limit_the_node_fails_as_worker_lost(self) -> None:
        walk = Walk({"a": [], "b": ["a"]}, a={"max_retries": 9})
        for _ in range(2):
            walk.start("a")
            walk.lose("a")
        walk.start("a")
        walk.lose("a")
        assert (walk.states["a"], walk["a"].reason) == ("FAILED", "worker_lost")
        assert walk["a"].error == {
            "type": "worker_lost",
            "message": "its worker died during 3 attempts",
        }
        assert walk["b"].cause == "a"
        assert walk.events_of("node.failed")[0].data == {
            "error": walk["a"].error,
            "reason": "worker_lost",
        }

    def test_one_lost_attempt_is_named_by_its_number(self) -> None:
        walk = Walk({"a": []}, a={"max_retries": 1})
        walk.start("a")
        walk.fail("a")
        walk.later(60)
        walk.wake("a")
        walk.start("a")
        walk.later(60)
        walk.reap("a", max_crashes=1)
        assert walk["a"].error == {
            "type": "worker_lost",
            "message": "its worker died during attempt 2",
        }

    def test_the_crash_limit_is_the_callers(self) -> None:
        walk = a()
        walk.start("a")
        walk.later(LEASE)
        walk.reap("a", max_crashes=1)
        assert walk["a"].reason == "worker_lost"

    def test_crashes_are_counted_per_epoch(self) -> None:
        walk = a()
        for _ in range(3):
            walk.start("a")
            walk.lose("a")
        walk.retry()
        walk.start("a")
        walk.lose("a")
        assert (walk.states["a"], walk["a"].crashes) == ("QUEUED", 1)

    def test_a_node_lost_in_a_failed_run_is_not_started_again(self) -> None:
        walk = Walk({"a": [], "b": []})
        walk.start("b")
        walk.break_("a")
        assert walk.lose("b").ended
        assert (walk.states["b"], walk["b"].reason) == ("CANCELLED", "run_failed")

    def test_a_node_lost_for_the_last_time_in_a_failed_run_fails_as_worker_lost(self) -> None:
        walk = Walk({"a": [], "b": []}, b={"delivery": "at_most_once"})
        walk.start("b")
        walk.break_("a")
        assert walk.lose("b").ended
        assert (walk.states["b"], walk["b"].reason) == ("FAILED", "worker_lost")
        assert walk.state.error == {**BROKEN, "node": "a"}


class TestAtMostOnce:
    def test_a_lost_worker_fails_it_at_once(self) -> None:
        walk = a(delivery="at_most_once")
        walk.start("a")
        walk.lose("a")
        assert (walk.states["a"], walk["a"].reason, walk["a"].attempt) == (
            "FAILED",
            "worker_lost",
            1,
        )

    def test_a_failure_is_final(self) -> None:
        walk = a(delivery="at_most_once")
        walk.break_("a", after=0)
        assert walk.states["a"] == "FAILED"

    def test_only_an_explicit_retry_starts_it_again(self) -> None:
        walk = a(delivery="at_most_once")
        walk.break_("a")
        walk.retry()
        walk.run("a")
        assert (walk["a"].epoch, walk["a"].attempt, walk.status) == (2, 1, "COMPLETED")

    def test_being_parked_is_no_start(self) -> None:
        walk = a(delivery="at_most_once")
        walk.park("a", 5)
        walk.later(5)
        walk.wake("a")
        walk.run("a")
        assert walk["a"].attempt == 1


@pytest.mark.parametrize("policy", ["fail_fast", "continue"])
def test_an_attempt_is_counted_at_the_start_not_at_the_queue(policy: str) -> None:
    walk = Walk({"a": []}, on_failure=policy, a={"max_retries": 1})
    assert (walk["a"].attempt, walk.token("a").attempt) == (0, 1)
    walk.start("a")
    assert walk["a"].attempt == 1
    walk.fail("a")
    assert (walk["a"].attempt, walk.token("a").attempt) == (1, 2)
