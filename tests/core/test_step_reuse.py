"""A run that begins with outputs of an earlier one."""

from __future__ import annotations

from dovetail.core.step import begin
from dovetail.core.transitions import Submit

from .walk import Walk

JOIN = Walk({"a": [], "b": [], "c": ["a", "b"]}).state.graph


def test_a_run_with_reused_outputs_starts_with_them_completed() -> None:
    run, decision = begin(Submit("r", JOIN, {}, reused={"a": 7}), 5.0, 1)
    kept, waits, child = run.nodes
    assert (kept.status, kept.output, kept.attempt) == ("COMPLETED", 7, 0)
    assert (kept.started_at, kept.worker, kept.finished_at) == (None, None, 5.0)
    assert [index for _, index, _, _ in decision.dispatch] == [1]
    assert (waits.status, child.status, child.waiting, child.fed) == ("QUEUED", "PENDING", 1, True)
    types = [event.type for event in decision.events]
    assert types == ["run.created", "run.started", "node.reused", "node.queued"]


def test_a_run_with_only_reused_outputs_ends_immediately() -> None:
    run, decision = begin(Submit("r", JOIN, {}, reused={"a": 1, "b": 2, "c": 3}), 5.0, 1)
    assert (run.status, run.finished, decision.ended) == ("COMPLETED", True, True)
    assert not decision.dispatch
