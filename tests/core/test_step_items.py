"""A mapped node: its list is rendered, its items run like nodes, and the join behind them fires
once."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from dovetail.core.effects import outstanding
from dovetail.core.items import MAX_ITEMS, list_error, split_name
from dovetail.core.step import restore, retry_plan
from dovetail.core.transitions import TakeOver

from .walk import BROKEN, MAX_CRASHES, Walk

#   a ─ m ─ z        s (beside it)
NODES = {"a": [], "m": ["a"], "z": ["m"], "s": []}


def each(window: int = 100, failures: int | str = 0, **more: Any) -> dict[str, Any]:
    items = {"items": "{{ a }}", "max_concurrency": window, "max_failures": failures}
    return {"for_each": items, **more}


def mapped(total: int = 3, **fields: Any) -> Walk:
    """A walk whose mapped node `m` has just got its list."""
    fields.setdefault("m", each())
    walk = Walk(NODES, **fields)
    walk.run("a", output=list(range(total)))
    walk.expand("m", total)
    return walk


def counts(walk: Walk) -> dict[str, int]:
    node = walk["m"]
    assert node.items is not None
    return node.items.counts(node.finished_at is not None)


class TestTheList:
    def test_is_rendered_before_any_item_starts(self) -> None:
        walk = Walk(NODES, m=each())
        walk.run("a", output=[1, 2])
        assert walk.dispatched() == ["m"]
        assert (walk.states["m"], walk.phase("m")) == ("QUEUED", "expanding")
        assert not walk.start("m")  # no worker starts the node itself
        assert walk.dispatched(walk.expand("m", 2)) == ["m[0]", "m[1]"]
        assert walk.states["m"] == "QUEUED"

    def test_takes_effect_once(self) -> None:
        walk = Walk(NODES, m=each())
        walk.run("a")
        token = walk.token("m")
        assert walk.expand("m", 2, token=token)
        assert not walk.expand("m", 3, token=token)
        assert not walk.expand("m", 2)

    def test_takes_no_slot_of_the_run(self) -> None:
        walk = Walk({"m": [], "s": []}, max_concurrency=1, m=each())
        assert walk.dispatched() == ["m", "s"]
        walk.expand("m", 2)
        assert walk.phase("m") == "held"
        walk.run("s")
        assert walk.dispatched() == ["m[0]"]

    def test_may_be_empty(self) -> None:
        walk = mapped(0)
        assert (walk.states["m"], walk["m"].output) == ("COMPLETED", [])
        assert walk.dispatched() == ["z"]
        assert walk["m"].attempt == 0

    def test_that_cannot_be_made_fails_the_node(self) -> None:
        walk = Walk(NODES, m=each())
        walk.run("a")
        walk.expand("m", error={"type": "not_a_list", "message": "no list"})
        assert (walk.states["m"], walk.status) == ("FAILED", "FAILED")
        assert walk["m"].error == {"type": "not_a_list", "message": "no list"}

    @pytest.mark.parametrize(
        ("value", "kind"),
        [
            (None, "none"),
            ("abc", "text"),
            ({"a": 1}, "a mapping"),
            (3, "a number"),
            (1.5, "a number"),
            (True, "a boolean"),
            ((1, 2), "a Python tuple"),
            ({1}, "a Python set"),
        ],
    )
    def test_must_be_a_list(self, value: Any, kind: str) -> None:
        message = f"for_each needs a list, and this is {kind}"
        assert list_error(value) == {"type": "not_a_list", "message": message}

    def test_has_a_longest_length(self) -> None:
        assert list_error([0] * MAX_ITEMS) is None
        error = list_error([0] * (MAX_ITEMS + 1))
        assert error is not None
        assert error["type"] == "too_large"

    def test_the_condition_is_asked_once_for_the_node(self) -> None:
        walk = Walk({"m": [], "z": ["m"]}, m=each(condition=False))
        assert walk.states == {"m": "SKIPPED", "z": "SKIPPED"}


class TestNamesOfItems:
    @pytest.mark.parametrize("name", ["m[00]", "m[-1]", "m[ 1]", "m[x]", "m[1", "m1]", "m[1][2]"])
    def test_are_written_in_one_way(self, name: str) -> None:
        assert split_name(name)[1] is None

    @pytest.mark.parametrize("name", ["m[3]", "m[99999]", "a[0]", "x[0]", "x", "m[01]"])
    def test_that_name_nothing_are_refused(self, name: str) -> None:
        walk = mapped()
        token = walk.token("m[0]")
        for refused in (walk.start(name, token=token), walk.complete(name, 1, token)):
            assert not refused


class TestTheWindow:
    def test_begins_items_in_order_as_earlier_ones_end(self) -> None:
        walk = mapped(5, m=each(2))
        assert walk.dispatched() == ["m[0]", "m[1]"]
        walk.run("m[1]")
        assert walk.dispatched() == ["m[2]"]
        walk.run("m[0]")
        assert walk.dispatched() == ["m[3]"]

    def test_holds_its_place_for_an_item_that_backs_off_or_is_parked(self) -> None:
        walk = mapped(5, m=each(2, max_retries=1, resource_tag="t"))
        walk.break_("m[0]")
        walk.park("m[1]", 5.0)
        assert walk.dispatched() == []
        walk.later(60)
        assert walk.dispatched(walk.wake("m[0]")) == ["m[0]"]
        walk.run("m[0]")
        assert walk.dispatched() == ["m[2]"]

    def test_items_count_towards_the_run_and_their_node_does_not(self) -> None:
        walk = Walk({"m": [], "s": []}, max_concurrency=2, m=each(10))
        walk.expand("m", 4)
        assert walk.dispatched() == ["m[0]"]
        assert walk.state.active == 2
        walk.run("m[0]")
        assert walk.dispatched() == ["m[1]"]
        walk.run("s")
        assert walk.dispatched() == ["m[2]"]

    def test_free_slots_go_to_the_first_node_of_the_definition(self) -> None:
        walk = Walk({"m": [], "s": [], "t": []}, max_concurrency=1, m=each(10))
        walk.expand("m", 2)
        walk.run("s")
        assert walk.dispatched() == ["m[0]"]
        walk.run("m[0]")
        assert walk.dispatched() == ["m[1]"]
        walk.run("m[1]")
        assert walk.dispatched() == ["t"]


class TestTheJoin:
    @pytest.mark.parametrize("order", list(permutations(range(3))))
    def test_fires_when_the_last_item_ends_in_any_order(self, order: tuple[int, ...]) -> None:
        walk = mapped(3)
        for item in order:
            assert walk.states["z"] == "PENDING"
            walk.run(f"m[{item}]", output=item * 10)
        assert walk.dispatched() == ["z"]
        assert walk["m"].output == [0, 10, 20]

    def test_fires_once_under_duplicates_and_late_results(self) -> None:
        walk = mapped(2)
        walk.start("m[0]", "m[1]")
        tokens = [walk.token("m[0]"), walk.token("m[1]")]
        for item, token in enumerate(tokens):
            walk.complete(f"m[{item}]", item, token)
            assert not walk.complete(f"m[{item}]", "again", token)
        for item, token in enumerate(tokens):
            assert not walk.complete(f"m[{item}]", "late", token).changed
            assert not walk.fail(f"m[{item}]", token=token).changed
        assert walk.types("z") == ["node.queued"]
        assert walk["m"].output == [0, 1]

    def test_a_result_of_a_lost_start_is_only_an_event(self) -> None:
        walk = mapped(1)
        walk.start("m[0]")
        old = walk.token("m[0]")
        walk.lose("m[0]")
        late = walk.complete("m[0]", "late", old)
        assert [event.type for event in late.events] == ["result.refused"]
        walk.run("m[0]", output="right")
        assert walk["m"].output == ["right"]
        late = walk.complete("m[0]", "late", old)
        assert [event.data for event in late.events] == [{"reason": "stale"}]

    def test_an_item_from_the_cache_needs_no_start(self) -> None:
        walk = mapped(2)
        walk.recall("m[0]", 1)
        walk.recall("m[1]", 2)
        assert (walk["m"].output, walk["m"].attempt) == ([1, 2], 0)

    def test_the_node_is_started_with_its_first_item(self) -> None:
        walk = mapped(2)
        walk.start("m[1]", worker="w7")
        node = walk["m"]
        assert (node.status, node.attempt, node.worker) == ("RUNNING", 1, None)
        assert walk.types("m").count("node.started") == 1
        walk.start("m[0]")
        assert walk.types("m").count("node.started") == 1


class TestItemsAreTriedAgain:
    def test_after_a_failure(self) -> None:
        walk = mapped(1, m=each(max_retries=1))
        walk.break_("m[0]", chance=0.5)
        assert (walk.phase("m[0]"), walk.states["m"]) == ("backing_off", "RUNNING")
        walk.later(60)
        walk.wake("m[0]")
        walk.run("m[0]", output=1)
        assert walk.states["m"] == "COMPLETED"

    def test_after_a_lost_worker_up_to_the_limit_of_crashes(self) -> None:
        walk = mapped(1)
        for _ in range(MAX_CRASHES):
            walk.start("m[0]")
            walk.lose("m[0]")
        error = walk["m"].error
        assert error is not None
        assert error["type"] == "worker_lost"
        assert walk["m"].reason is None

    def test_but_not_at_most_once(self) -> None:
        walk = mapped(2, m=each(failures=1, delivery="at_most_once"))
        walk.start("m[0]")
        walk.lose("m[0]")
        walk.run("m[1]", output=1)
        assert walk["m"].output == [None, 1]

    def test_after_a_takeover_and_the_rest_goes_on(self) -> None:
        walk = mapped(3, m=each(2))
        walk.start("m[0]")
        decision = walk.apply(TakeOver("r", 3))
        assert walk.dispatched(decision) == ["m[0]", "m[1]", "s"]
        assert walk.token("m[0]").attempt == 2

    @pytest.mark.parametrize("failures", [0, 1, 4])
    def test_items_lost_by_a_takeover_are_lost_one_after_the_other_as_by_reaps(
        self, failures: int
    ) -> None:
        """The log has the same events either way, so the audit cannot tell them apart."""
        taken, reaped = (
            mapped(6, m=each(3, failures=failures, delivery="at_most_once")) for _ in range(2)
        )
        for walk in (taken, reaped):
            for item in ("m[0]", "m[1]", "m[2]"):
                walk.start(item)
        taken.apply(TakeOver("r", MAX_CRASHES))
        for item in ("m[0]", "m[1]", "m[2]"):
            reaped.lose(item)
        events = [[(one.type, one.node) for one in walk.log] for walk in (taken, reaped)]
        assert events[0] == events[1]
        assert counts(taken) == counts(reaped)

    def test_an_item_that_may_have_started_before_a_restore_is_not_started_again(self) -> None:
        walk = mapped(2, m=each(delivery="at_most_once"))
        decision = restore(walk.state, walk.now + 5, walk.now)
        names = [event.node for event in decision.events]
        assert names == ["m[0]", "m", "m[1]"]
        assert [order.item for order in outstanding(walk.state).dispatch] == [None]  # of s


class TestFailures:
    def test_are_tolerated_up_to_the_limit_and_leave_null(self) -> None:
        walk = mapped(3, m=each(failures=1))
        walk.break_("m[1]")
        walk.run("m[0]", "m[2]", output="x")
        assert (walk.states["m"], walk["m"].output) == ("COMPLETED", ["x", None, "x"])
        assert walk.status == "RUNNING"

    def test_one_more_stops_the_node_once_its_running_items_have_ended(self) -> None:
        walk = mapped(6, m=each(4, failures=1))
        walk.start("m[0]", "m[1]", "m[2]")
        walk.fail("m[0]", BROKEN)
        walk.fail("m[2]", BROKEN)
        assert walk.states["m"] == "RUNNING"
        assert walk["m[3]"].reason == "too_many_failures"
        assert not walk.dispatched()
        walk.complete("m[1]", "kept")
        assert walk.states["m"] == "FAILED"
        expected = {"pending": 0, "running": 0, "completed": 1, "failed": 2, "cancelled": 3}
        assert counts(walk) == {"total": 6, **expected}

    def test_the_error_names_the_first_failed_item_whatever_the_order(self) -> None:
        walk = mapped(3, m=each(failures=0))
        walk.start("m[0]", "m[1]", "m[2]")
        walk.fail("m[2]", {"type": "B", "message": "late"})
        walk.complete("m[1]")
        walk.fail("m[0]", {"type": "A", "message": "early", "where": "x.py:1 in f"})
        message = "item 0: early (2 of 3 items failed, 0 may)"
        assert walk["m"].error == {"type": "A", "message": message, "where": "x.py:1 in f"}
        assert walk.state.error == {**walk["m"].error, "node": "m"}

    @pytest.mark.parametrize(
        ("share", "total", "may"), [("5%", 19, 0), ("5%", 20, 1), ("12.5%", 16, 2), ("100%", 7, 7)]
    )
    def test_a_share_is_rounded_down(self, share: str, total: int, may: int) -> None:
        walk = mapped(total, m=each(failures=share))
        spec = walk.state.graph.nodes[1].for_each
        assert spec is not None
        assert spec.tolerated(total) == may

    def test_a_failing_item_is_not_retried_when_its_node_has_failed(self) -> None:
        walk = mapped(2, m=each(max_retries=3))
        walk.start("m[0]", "m[1]")
        walk.fail("m[0]", permanent=True)
        walk.fail("m[1]")
        assert walk.states["m"] == "FAILED"

    def test_of_the_node_may_be_allowed(self) -> None:
        walk = mapped(1, m=each(allow_failure=True))
        walk.break_("m[0]")
        assert walk.dispatched() == ["z"]
        assert walk.status == "RUNNING"

    def test_an_output_beyond_the_limit_of_the_run_fails_the_item(self) -> None:
        walk = mapped(2, max_bytes=30, m=each(failures=1))
        walk.run("m[0]", output="x" * 100)
        walk.run("m[1]", output="y")
        assert walk["m"].output == [None, "y"]


class TestAFailureElsewhere:
    def test_under_fail_fast_nothing_more_starts_and_the_node_is_cancelled_at_its_end(self) -> None:
        walk = mapped(4, m=each(2))
        walk.start("m[0]")
        walk.break_("s")
        assert (walk.states["m"], walk.ended) == ("RUNNING", False)
        assert walk["m[1]"].reason == "run_failed"
        walk.complete("m[0]", "kept")
        assert (walk.states["m"], walk["m"].reason) == ("CANCELLED", "run_failed")
        assert walk.ended

    def test_at_once_if_no_item_runs(self) -> None:
        walk = mapped(4)
        walk.break_("s")
        assert (walk.states["m"], walk.ended) == ("CANCELLED", True)

    def test_does_not_cancel_a_node_whose_last_items_complete(self) -> None:
        walk = mapped(2)
        walk.start("m[0]", "m[1]")
        walk.break_("s")
        walk.complete("m[0]", 1)
        walk.complete("m[1]", 2)
        assert (walk.states["m"], walk["m"].output) == ("COMPLETED", [1, 2])
        assert walk.states["z"] == "CANCELLED"

    def test_under_continue_changes_nothing(self) -> None:
        walk = mapped(2, on_failure="continue")
        walk.break_("s")
        walk.run("m[0]", "m[1]", "z")
        assert (walk.states["m"], walk.status) == ("COMPLETED", "FAILED")

    def test_a_retry_adopts_the_running_items_and_starts_the_rest(self) -> None:
        walk = mapped(4, m=each(2))
        walk.run("m[0]", output="kept")
        walk.start("m[1]")
        token = walk.token("m[1]")
        walk.break_("s")
        walk.retry()
        assert walk.dispatched() == ["s", "m[2]"]
        assert (walk["m"].epoch, walk["m[1]"].epoch, walk["m[2]"].epoch) == (2, 1, 2)
        walk.complete("m[1]", "adopted", token)
        walk.run("m[2]", "m[3]", output="new")
        assert walk["m"].output == ["kept", "adopted", "new", "new"]


class TestCommands:
    def test_a_cancel_stops_running_items(self) -> None:
        walk = mapped(5, m=each(3))
        walk.run("m[0]")
        walk.start("m[1]")
        decision = walk.cancel()
        assert [stop.node for stop in decision.stop] == ["m[1]"]
        assert walk.ended
        assert counts(walk)["cancelled"] == 4
        late = walk.complete("m[1]", 1)
        assert [event.data for event in late.events] == [{"reason": "node is CANCELLED"}]

    def test_a_retry_reruns_only_what_did_not_complete(self) -> None:
        walk = mapped(4, m=each(2))
        walk.run("m[0]", output="kept")
        walk.break_("m[1]")
        walk.complete("m[2]")  # never started: refused
        assert walk.states["m"] == "FAILED"
        walk.retry()
        assert walk.dispatched()[0] == "m"
        walk.expand("m", 4)
        assert walk.dispatched() == ["m[1]", "m[2]"]
        walk.run("m[1]", "m[2]", "m[3]", output="new")
        assert walk["m"].output == ["kept", "new", "new", "new"]

    def test_a_retry_from_the_node_or_above_it_reruns_all_items(self) -> None:
        for start in ("m", "a"):
            walk = mapped(2)
            walk.run("m[0]", "m[1]", "s", "z")
            walk.retry(start)
            if start == "a":
                walk.run("a", output=[1, 2])
            walk.expand("m", 2)
            assert walk.dispatched() == ["m[0]", "m[1]"]

    def test_a_completed_node_keeps_its_nulls(self) -> None:
        walk = mapped(2, m=each(failures=1))
        walk.break_("m[0]")
        walk.run("m[1]", output=1)
        walk.break_("z")
        walk.retry()
        assert walk["m"].output == [None, 1]
        assert walk.dispatched()[0] == "z"

    def test_a_retry_keeps_items_below_a_node_that_is_skipped_again(self) -> None:
        walk = Walk({"k": [], "a": [], "m": ["a", "k"]}, k={"condition": False}, m=each())
        walk.run("a", output=[1, 2])
        walk.expand("m", 2)
        walk.run("m[0]", output="kept")
        walk.break_("m[1]")
        walk.retry()
        walk.expand("m", 2)
        assert walk.dispatched() == ["m[1]"]

    def test_a_retry_drops_items_below_a_node_that_runs_again(self) -> None:
        nodes = {"k": [], "a": [], "m": ["a", "k"]}
        walk = Walk(nodes, k={"allow_failure": True}, m=each())
        walk.run("a", output=[1, 2])
        walk.break_("k")
        walk.expand("m", 2)
        walk.run("m[0]")
        walk.break_("m[1]")
        walk.retry()
        walk.run("k")
        walk.expand("m", 2)
        assert walk.dispatched() == ["m[0]", "m[1]"]

    def test_a_list_of_another_length_starts_anew(self) -> None:
        walk = mapped(2)
        walk.run("m[0]", output="old")
        walk.break_("m[1]")
        walk.retry()
        walk.expand("m", 3)
        assert walk.dispatched() == ["m[0]", "m[1]", "m[2]"]

    def test_the_bytes_of_kept_items_stay_counted(self) -> None:
        walk = mapped(2, max_bytes=100)
        walk.run("m[0]", output="x" * 10)
        walk.break_("m[1]")
        kept = walk.state.kept_bytes
        walk.retry()
        assert walk.state.kept_bytes == kept
        walk.cancel()
        walk.retry("a")
        assert walk.state.kept_bytes == 0

    def test_the_bytes_of_a_list_of_another_length_no_longer_count(self) -> None:
        walk = mapped(2, max_bytes=100)
        before = walk.state.kept_bytes
        walk.run("m[0]", output="x" * 10)
        walk.break_("m[1]")
        walk.retry()
        walk.expand("m", 3)
        assert walk.state.kept_bytes == before
        assert walk.state.node("m").size == 0

    def test_a_plan_names_the_node_and_not_its_items(self) -> None:
        walk = mapped(2)
        walk.break_("m[0]")
        assert retry_plan(walk.state) == [1, 2, 3]
        assert "no node" in str(retry_plan(walk.state, "m[0]"))


def test_what_is_kept_of_a_long_list_is_bounded_by_its_window() -> None:
    walk = mapped(1000, m=each(5))
    items = walk["m"].items
    assert items is not None
    for item in range(500):
        walk.run(f"m[{item}]", output=item)
        assert len(items.in_flight) == 5
    assert [order.item for order in walk.last.dispatch] == [504]


def test_a_window_has_at_most_ten_thousand_items() -> None:
    walk = mapped(10_003, m=each(100_000))
    assert len(walk.last.dispatch) == 10_000
    walk.run("m[0]")
    assert [order.item for order in walk.last.dispatch] == [10_000]
