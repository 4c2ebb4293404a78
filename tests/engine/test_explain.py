"""Why a node is where it is: one sentence and one code for every unfinished node."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.run import NodeState, RunState
from dovetail.core.states import NodeStatus, Reason
from dovetail.engine.explain import counts, explain
from dovetail.engine.views import run_view

from ..core.walk import BROKEN, Walk


def why(walk: Walk, **how: Any) -> dict[str, dict[str, Any]]:
    asked = {"driven": True, **how}
    return {reported["id"]: reported for reported in explain(walk.state, walk.now, **asked)}


def said(walk: Walk, node: str, **how: Any) -> tuple[str, str]:
    reported = why(walk, **how)[node]
    return reported["code"], reported["why"]


def test_each_unfinished_node_is_explained_with_exactly_the_fields_of_the_contract() -> None:
    walk = Walk({"a": [], "b": ["a"], "c": ["b"]})
    walk.run("a")
    reported = explain(walk.state, walk.now, True)
    assert [entry["id"] for entry in reported] == ["b", "c"]
    assert all(set(entry) == {"id", "status", "code", "why", "details"} for entry in reported)
    assert [entry["status"] for entry in reported] == ["QUEUED", "PENDING"]


def test_a_finished_run_has_nothing_to_explain() -> None:
    walk = Walk({"a": []})
    walk.run("a")
    assert explain(walk.state, walk.now, False) == []


def test_a_node_waits_only_for_the_parents_that_are_not_done() -> None:
    walk = Walk({"x": [], "y": [], "z": [], "join": ["x", "y", "z"]})
    walk.run("z")
    assert said(walk, "join") == ("waiting_for_parents", "waits for parents x, y")
    assert why(walk)["join"]["details"] == {"parents": ["x", "y"]}
    walk.run("x")
    assert said(walk, "join") == ("waiting_for_parents", "waits for parent y")


def test_many_parents_are_counted_in_the_sentence_and_listed_in_the_details() -> None:
    names = [f"n{n}" for n in range(12)]
    walk = Walk({**{name: [] for name in names}, "join": names})
    assert said(walk, "join")[1] == "waits for parents n0, n1, n2, n3, n4 and 7 more"
    assert why(walk)["join"]["details"]["parents"] == names


EACH = {"for_each": {"items": [1, 2, 3, 4], "max_concurrency": 3}}


def test_a_mapped_node_is_explained_by_what_its_items_wait_for() -> None:
    waits = {**EACH, "resource_tag": "api", "max_retries": 1, "retry": {"jitter": 0}}
    walk = Walk({"m": []}, m=waits)
    assert said(walk, "m") == ("queued", "queued: its list is about to be made")
    walk.expand("m", 4)
    assert said(walk, "m") == ("queued", "0 of 4 items completed, 3 are queued")
    nobody = "0 of 4 items completed, 3 are queued, no live worker serves handler 'h'"
    assert said(walk, "m", served=()) == ("no_worker", nobody)
    stopped = said(walk, "m", hindered="Redis is full")
    assert stopped == ("no_worker", "0 of 4 items completed, 3 are queued, but Redis is full")
    interrupted = "interrupted: queued, and no process is running the run"
    assert said(walk, "m", driven=False) == ("no_worker", interrupted)
    for item, seconds in enumerate((30, 20, 10)):
        walk.park(f"m[{item}]", seconds)
    assert said(walk, "m") == ("rate_limited", "0 of 4 items completed, 3 wait for a rate limit")
    details = why(walk)["m"]["details"]
    assert (details["resource_tag"], details["seconds"]) == ("api", 10.0)
    walk.later(10)
    walk.wake("m[2]")
    walk.start("m[2]")
    assert said(walk, "m") == (
        "running",
        "0 of 4 items completed, 1 running, 2 wait for a rate limit",
    )
    walk.fail("m[2]")
    for item in (1, 0):
        walk.later(10)
        walk.wake(f"m[{item}]")
        walk.start(f"m[{item}]")
        walk.complete(f"m[{item}]", 1)
    walk.run("m[3]")
    reported = why(walk)["m"]
    assert (reported["code"], reported["why"]) == (
        "backing_off",
        "3 of 4 items completed, 1 backs off",
    )
    assert reported["details"]["items"]["completed"] == 3
    assert reported["details"]["until"] is not None


def test_items_wait_for_the_limit_of_their_run() -> None:
    walk = Walk({"a": [], "m": []}, m=EACH, max_concurrency=1)
    walk.expand("m", 4)
    expected = ("max_concurrency", "0 of 4 items completed, 3 wait for max_concurrency")
    assert said(walk, "m") == expected


def test_a_mapped_node_that_starts_no_more_items_says_why() -> None:
    walk = Walk({"a": [], "m": []}, m=EACH)
    walk.expand("m", 4)
    walk.start("m[0]", "m[1]")
    walk.fail("m[0]", permanent=True)
    stopped = (
        "0 of 4 items completed, 1 running, 1 failed (item 0: broken), "
        "no more are started: too many failed"
    )
    assert said(walk, "m") == ("running", stopped)
    assert why(walk)["m"]["details"]["failed"] == {"index": 0, "error": BROKEN}
    walk = Walk({"a": [], "m": []}, m=EACH)
    walk.expand("m", 4)
    walk.start("a", "m[1]")
    walk.fail("a", permanent=True)
    stopped = "0 of 4 items completed, 1 running, no more are started: the run has failed"
    assert said(walk, "m") == ("running", stopped)


def test_a_published_node_is_queued_for_a_slot() -> None:
    walk = Walk({"a": []})
    assert said(walk, "a") == ("queued", "queued: waits for a free slot of a worker")


def test_a_running_node_shows_its_duration_and_its_attempt() -> None:
    walk = Walk({"a": []})
    walk.start("a", worker="host-7")
    walk.later(3)
    assert said(walk, "a") == ("running", "has been running for 3 s")
    assert why(walk)["a"]["details"] == {
        "worker": "host-7",
        "attempt": 1,
        "started_at": "1970-01-01T00:01:40.000000Z",
        "seconds": 3.0,
    }
    walk.lose("a")
    walk.start("a")
    assert said(walk, "a") == ("running", "has been running for 0.0 s, attempt 2")


def test_a_parked_node_names_its_rate_limit_and_the_wait() -> None:
    walk = Walk({"a": []}, a={"resource_tag": "gemini_api"})
    walk.park("a", 9.2)
    assert said(walk, "a") == ("rate_limited", "rate limit 'gemini_api': starts in about 9 s")
    details = why(walk)["a"]["details"]
    assert (details["resource_tag"], details["seconds"]) == ("gemini_api", 9.2)
    assert details["until"] == "1970-01-01T00:01:49.200000Z"


def test_a_node_that_backs_off_shows_its_next_attempt_the_delay_and_the_error() -> None:
    walk = Walk({"a": []}, a={"max_retries": 3, "retry": {"base_delay_seconds": 12, "jitter": 0}})
    walk.break_("a")
    assert said(walk, "a") == ("backing_off", "backing off, attempt 2 of 4 in 12 s")
    details = why(walk)["a"]["details"]
    assert (details["attempt"], details["max_attempts"]) == (2, 4)
    assert details["error"] == BROKEN


def test_a_lost_start_does_not_count_as_an_attempt_in_the_explanation() -> None:
    walk = Walk({"a": []}, a={"max_retries": 1, "retry": {"base_delay_seconds": 1, "jitter": 0}})
    walk.start("a")
    walk.lose("a")
    walk.break_("a")
    assert said(walk, "a")[1] == "backing off, attempt 3 of 3 in 1 s"


def test_a_held_node_names_the_limit_of_its_run() -> None:
    walk = Walk({name: [] for name in "abcde"}, max_concurrency=4)
    assert said(walk, "e") == ("max_concurrency", "run at its max_concurrency 4")
    assert why(walk)["e"]["details"] == {"max_concurrency": 4, "active": 4}


def test_a_wait_that_is_over_is_shown_as_zero_seconds() -> None:
    walk = Walk({"a": []}, a={"resource_tag": "t"})
    walk.park("a", 1)
    walk.later(5)
    assert said(walk, "a")[1] == "rate limit 't': starts in about 0.0 s"


def test_without_an_owner_the_missing_process_is_the_only_reason() -> None:
    walk = Walk({"a": [], "b": [], "c": ["a"]}, b={"resource_tag": "t"})
    walk.start("a")
    walk.park("b", 9)
    assert said(walk, "a", driven=False) == (
        "no_worker",
        "interrupted: it was running when its process ended; no process is running it",
    )
    assert said(walk, "b", driven=False) == (
        "no_worker",
        "interrupted: queued, and no process is running the run",
    )
    assert said(walk, "c", driven=False)[0] == "waiting_for_parents"


def test_a_queued_node_without_a_capable_live_worker_says_so() -> None:
    walk = Walk({"a": [], "b": [], "c": [], "d": ["a"]}, c={"resource_tag": "t"})
    walk.start("b")
    walk.park("c", 9)
    sentence = "queued, no live worker serves handler 'h'"
    assert said(walk, "a", served=()) == ("no_worker", sentence)
    assert why(walk, served=())["a"]["details"] == {"handler": "h"}
    assert said(walk, "a", served={"h"})[0] == "queued"
    codes = {name: said(walk, name, served=())[0] for name in "bcd"}
    assert codes == {"b": "running", "c": "rate_limited", "d": "waiting_for_parents"}


def test_a_node_without_anything_to_wait_for_is_about_to_be_queued() -> None:
    walk = Walk({"a": [], "b": ["a"]})
    walk.run("a")
    walk.state.nodes[1] = NodeState(1, 0)  # as between its last parent's end and its condition
    assert said(walk, "b") == ("queued", "is about to be queued")
    accepted = RunState("r", walk.state.graph, {}, 0.0)
    reported = {node["id"]: (node["code"], node["why"]) for node in explain(accepted, 0.0, True)}
    assert reported == {
        "a": ("queued", "accepted: an orchestrator will make the run"),
        "b": ("waiting_for_parents", "waits for parent a"),
    }


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.44, "0.4 s"), (89.6, "90 s"), (150, "2 min"), (7000, "117 min"), (36000, "10 h")],
)
def test_waits_are_shown_with_reasonable_precision(seconds: float, shown: str) -> None:
    walk = Walk({"a": []}, a={"resource_tag": "t"})
    walk.park("a", seconds)
    assert said(walk, "a")[1].endswith(f"about {shown}")


def counted(walk: Walk) -> dict[str, int]:
    return counts(run_view(walk.state)["nodes"])


def test_nodes_are_counted_by_their_outcome() -> None:
    walk = Walk({"a": [], "b": [], "c": ["b"], "d": ["c"], "e": []})
    walk.run("a")
    assert counted(walk) == {"completed": 1, "queued": 2, "pending": 2}
    walk.start("b")
    assert counted(walk) == {
        "completed": 1,
        "running": 1,
        "queued": 1,
        "pending": 2,
    }
    walk.fail("b")
    # `fail_fast`: what comes after it is FAILED as well, and never ran.
    assert counted(walk) == {
        "completed": 1,
        "failed": 1,
        "cancelled": 1,
        "never run": 2,
    }


def test_every_node_of_any_run_is_counted_once() -> None:
    for status in NodeStatus:
        for reason in (None, *Reason):
            walk = Walk({"a": [], "b": ["a"]})
            for node in walk.state.nodes:
                node.status, node.reason = status, reason
            ((word, count),) = counted(walk).items()
            passed_on = status is NodeStatus.FAILED and reason is Reason.DEPENDENCY_FAILED
            assert (word, count) == ("never run" if passed_on else status.lower(), 2)
