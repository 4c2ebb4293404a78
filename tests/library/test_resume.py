"""A library's execution that goes on from an earlier one, and one that is watched."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import Event, TokenBucketRateLimiter, WorkflowDAG, WorkflowExecutor, WorkflowResult

Parents = list[set[int]]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Parents, set[int], set[int]]:
    """Steps with earlier ones as parents, steps that fail at first, steps that are skipped then."""
    count = draw(st.integers(1, 7))
    parents = [draw(st.sets(st.integers(0, i - 1)) if i else st.just(set())) for i in range(count)]
    some = st.sets(st.integers(0, count - 1))
    return parents, draw(some), draw(some)


def dag_of(parents: Parents, failing: set[int], skipped: set[int], ran: list[str]) -> WorkflowDAG:
    dag = WorkflowDAG("drawn")
    for i, above in enumerate(parents):

        async def step(ctx: dict[str, Any], i: int = i) -> str:
            ran.append(f"s{i}")
            if i in failing:
                raise ValueError("at first")
            return f"{i}: {sorted(ctx['step_outputs'])}"

        def wanted(ctx: dict[str, Any], i: int = i) -> bool:
            return i not in skipped

        dag.add_step(f"s{i}", step, depends_on=[f"s{j}" for j in above], condition=wanted)
    return dag


@settings(max_examples=150, deadline=None)
@given(graphs(), st.booleans())
def test_resume_runs_only_the_steps_that_did_not_complete(
    drawn: tuple[Parents, set[int], set[int]], through_a_dict: bool
) -> None:
    parents, failing, skipped = drawn
    ran: list[str] = []
    executor = WorkflowExecutor()
    first = executor.execute_sync(dag_of(parents, failing, skipped, ran))
    kept = WorkflowResult.from_dict(first.to_dict()) if through_a_dict else first
    ran.clear()
    again = executor.execute_sync(dag_of(parents, set(), set(), ran), resume=kept)
    assert again.status == "COMPLETED"
    assert sorted(ran) == sorted(set(again.steps) - set(first.outputs))
    assert len(again.outputs) == len(parents)
    assert {name: again.outputs[name] for name in first.outputs} == first.outputs
    assert all(again.steps[name].duration == 0 for name in first.outputs)


def test_a_step_reads_the_resumed_outputs() -> None:
    dag = WorkflowDAG("d").add_step("a", lambda ctx: 1)
    dag.add_step("b", lambda ctx: 10 / ctx["by"] + ctx["step_outputs"]["a"], depends_on=["a"])
    executor = WorkflowExecutor()
    first = executor.execute_sync(dag, {"by": 0})
    assert first.status == "FAILED"
    assert executor.execute_sync(dag, {"by": 5}, resume=first).outputs == {"a": 1, "b": 3.0}


def test_steps_that_the_graph_no_longer_has_are_ignored() -> None:
    first = WorkflowExecutor().execute_sync(WorkflowDAG("d").add_step("old", lambda ctx: 1))
    dag = WorkflowDAG("d").add_step("new", lambda ctx: 2)
    again = WorkflowExecutor().execute_sync(dag, resume=first)
    assert (again.outputs, again.status) == ({"new": 2}, "COMPLETED")


def test_resuming_a_completed_result_gives_the_same_result() -> None:
    dag = WorkflowDAG("d").add_step("a", lambda ctx: object())
    first = WorkflowExecutor().execute_sync(dag)
    again = WorkflowExecutor().execute_sync(dag, resume=first)
    assert (again.status, again.outputs) == ("COMPLETED", first.outputs)


def test_only_a_result_can_be_resumed() -> None:
    dag = WorkflowDAG("d").add_step("a", lambda ctx: 1)
    with pytest.raises(TypeError, match="resume is a WorkflowResult, not dict"):
        WorkflowExecutor().execute_sync(dag, resume={"status": "FAILED"})  # type: ignore[arg-type]


class TestEvents:
    def test_every_event_is_reported_in_order(self) -> None:
        seen: list[Event] = []
        dag = WorkflowDAG("d").add_step("a", lambda ctx: 1).add_step("b", lambda ctx: 1 / 0)
        WorkflowExecutor(on_event=seen.append).execute_sync(dag)
        assert all(isinstance(event, Event) for event in seen)
        assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
        types = [event.type for event in seen]
        assert types[:2] == ["run.created", "run.started"]
        assert types[-1] == "run.failed"
        failed = next(event for event in seen if event.type == "node.failed")
        assert (failed.node, failed.attempt, failed.error["type"]) == ("b", 1, "ZeroDivisionError")
        assert failed.time.startswith("20")

    def test_times_of_events_are_wall_clock_times(self) -> None:
        seen: list[Event] = []
        dag = WorkflowDAG("d")
        for i in range(2):
            dag.add_step(f"s{i}", lambda ctx: 1, resource_tag="slow")
        limits = {"slow": TokenBucketRateLimiter(rate_per_second=50)}
        WorkflowExecutor(rate_limiters=limits, on_event=seen.append).execute_sync(dag)
        parked = next(event for event in seen if event.type == "node.parked")
        assert parked.until[:2] == "20"
        assert parked.until >= parked.time

    def test_resumed_steps_are_reported_as_events(self) -> None:
        seen: list[Event] = []
        dag = WorkflowDAG("d").add_step("a", lambda ctx: 1)
        first = WorkflowExecutor().execute_sync(dag)
        WorkflowExecutor(on_event=seen.append).execute_sync(dag, resume=first)
        types = [event.type for event in seen]
        assert types == ["run.created", "run.started", "node.reused", "run.completed"]

    def test_a_failing_event_function_affects_no_step(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(event: Event) -> None:
            raise RuntimeError("no matter")

        dag = WorkflowDAG("d").add_step("a", lambda ctx: 1)
        assert WorkflowExecutor(on_event=broken).execute_sync(dag).status == "COMPLETED"
        assert "on_event failed at run.created" in caplog.text

    @pytest.mark.parametrize("wrong", [5, asyncio.sleep])
    def test_an_event_function_that_cannot_be_called_is_refused_immediately(
        self, wrong: Any
    ) -> None:
        with pytest.raises(TypeError, match="on_event must be a plain function"):
            WorkflowExecutor(on_event=wrong)
