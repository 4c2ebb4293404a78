"""What the outputs of a run may have together: the node that would pass it fails."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.audit.event_check import audit
from dovetail.core.audit.journal_check import verify
from dovetail.core.audit.replay import JournalEntry, extra_of, replay
from dovetail.core.run import RunState, encoded_size
from dovetail.core.step import begin
from dovetail.core.transitions import Submit

from .test_replay import Journalled
from .walk import Walk, graph

FAN = {"a": [], "b": [], "c": [], "z": ["a", "b", "c"]}
TEN = "x" * 8
"""Ten bytes as JSON."""


def heavy(most: int, **fields: Any) -> Walk:
    return Walk(FAN, on_failure="continue", max_bytes=most, **fields)


def test_outputs_up_to_the_limit_are_stored() -> None:
    walk = heavy(40)
    walk.run("a", "b", "c", "z", output=TEN)
    assert walk.status == "COMPLETED"
    assert walk.state.kept_bytes == 40


def test_the_node_that_would_exceed_the_limit_fails_with_the_excess() -> None:
    walk = heavy(29)
    walk.run("a", "b", "c", output=TEN)
    assert walk["c"].error == {
        "type": "too_large",
        "message": "the run keeps 20 bytes of outputs and this output has 10: together more than "
        "the 29 bytes that a run may keep (DOVETAIL_MAX_RUN_BYTES)",
    }
    assert walk["c"].output is None
    assert walk.state.kept_bytes == 20
    assert walk.states == {"a": "COMPLETED", "b": "COMPLETED", "c": "FAILED", "z": "SKIPPED"}
    assert walk.status == "FAILED"


def test_a_node_with_a_too_large_output_is_not_retried() -> None:
    walk = heavy(9, a={"max_retries": 5})
    walk.run("a", output=TEN)
    assert walk.types("a") == ["node.queued", "node.started", "node.failed"]
    assert not walk.complete("a", TEN), "the same result again is no news"


def test_smaller_outputs_are_stored_after_one_was_too_large() -> None:
    walk = heavy(12)
    walk.run("a", output=TEN)
    walk.run("b", output=TEN)
    walk.run("c", output=1)
    assert walk.states["b"] == "FAILED"
    assert walk.states["c"] == "COMPLETED"
    assert walk.state.kept_bytes == 11


def test_outputs_dropped_by_a_retry_no_longer_count() -> None:
    walk = heavy(40)
    walk.run("a", "b", "c", "z", output=TEN)
    walk.retry("a")
    assert walk.state.kept_bytes == 20
    walk.run("a", output="x" * 18)
    assert walk.state.kept_bytes == 40
    walk.run("z", output=0)
    assert walk.states["z"] == "FAILED"


def test_an_output_from_the_cache_counts_towards_the_limit() -> None:
    walk = heavy(25)
    walk.recall("a", TEN)
    walk.recall("b", TEN)
    walk.recall("c", TEN)
    assert walk["c"].error is not None
    assert walk["c"].error["type"] == "too_large"
    assert walk.types("c") == ["node.queued", "node.failed"]
    assert walk.state.kept_bytes == 20


def test_a_run_without_a_limit_counts_nothing() -> None:
    walk = Walk(FAN)
    walk.run("a", "b", "c", "z", output=object())  # as in the library: nothing is written down
    assert walk.state.kept_bytes == 0
    assert walk["a"].size == 0


@pytest.mark.parametrize("output", [None, "é", [1.5, {"a": []}], "\0", 2**64 - 1])
def test_the_size_of_an_output_is_that_of_its_stored_json(output: Any) -> None:
    import orjson

    assert encoded_size(output) == len(orjson.dumps(output))


def test_a_journal_stores_the_limit_but_no_refused_output() -> None:
    it = Journalled(graph(FAN, on_failure="continue"), 15)
    for name in "ab":
        it.happen_to(name, TEN)
    completions = [entry for entry in it.entries if entry.kind == "complete"]
    assert [entry.extra for entry in completions] == [TEN, 10]
    run, differences = verify(it.submit._replace(max_bytes=None), it.entries)
    assert differences == []
    assert run is not None
    assert run.max_bytes == 15


def test_a_journal_with_a_limit_failure_within_its_limit_is_detected() -> None:
    it = Journalled(graph(FAN, on_failure="continue"), 15)
    for name in "ab":
        it.happen_to(name, TEN)
    first = it.entries[0]
    it.entries[0] = first._replace(extra=20)
    _, differences = verify(it.submit, it.entries)
    assert len(differences) == 1
    assert "node.failed of 'b'" in differences[0]


def test_a_run_of_an_earlier_version_has_no_limit() -> None:
    submit = Submit("r", graph({"a": []}), {}, max_bytes=5)
    _, decision = begin(submit, 1.0, 1)
    before = submit._replace(max_bytes=None)
    entry = JournalEntry(1, 1.0, "submit", extra_of(before, decision), [0], decision.events)
    run = RunState("r", submit.graph, {}, 1.0)
    replay(run, [entry])
    assert run.max_bytes is None


def test_the_audit_finds_a_run_whose_outputs_exceed_its_limit() -> None:
    walk = Walk(FAN, max_bytes=100)
    walk.run("a", "b", "c", "z", output=TEN)
    submit = Submit("r", walk.state.graph, {}, max_bytes=100)
    assert audit(submit, walk.log, walk.state) == []
    walk.state.kept_bytes -= 1
    assert audit(submit, walk.log, walk.state) == [
        "the run counts 39 bytes of outputs; there are 40"
    ]
    walk.state.kept_bytes, walk.state.max_bytes = 40, 35
    reported = audit(submit._replace(max_bytes=35), walk.log, walk.state)
    assert len(reported) == 1
    assert "too_large" in reported[0], "the rules would have failed it"
