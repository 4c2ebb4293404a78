"""`WorkflowExecutor`: the library as the contract shows it, run for real."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from dovetail import (
    InvalidDefinition,
    PermanentError,
    RetryableError,
    RetryPolicy,
    TokenBucketRateLimiter,
    WorkflowDAG,
    WorkflowExecutor,
    WorkflowResult,
)
from dovetail.engine.limits import LATENESS

# A start may come this much early: as much as the one before it may have come late.
EARLY = LATENESS + 0.005
AT_ONCE = RetryPolicy(base_delay_seconds=0)
Ctx = dict[str, Any]


async def run(dag: WorkflowDAG, context: Ctx | None = None, **how: Any) -> WorkflowResult:
    return await asyncio.wait_for(WorkflowExecutor(**how).execute(dag, context=context), 20)


async def test_the_example_of_the_contract_runs() -> None:
    async def extract(ctx: Ctx) -> Ctx:
        return {"doc": ctx["doc_id"], "confidence": 0.9}

    def save_json(ctx: Ctx) -> str:
        return f"doc-{ctx['step_outputs']['extract']['doc']}.json"

    async def review(ctx: Ctx) -> str:
        return "reviewed"

    dag = WorkflowDAG("docs")
    dag.add_step("extract", extract, resource_tag="gemini_api", max_retries=3, timeout_seconds=30)
    dag.add_step("save_json", save_json, depends_on=["extract"])
    dag.add_step(
        "review",
        review,
        depends_on=["save_json"],
        condition=lambda ctx: ctx["step_outputs"]["extract"]["confidence"] < 0.8,
    )
    dag.validate()
    limiter = TokenBucketRateLimiter(rate_per_second=10, burst=1)
    executor = WorkflowExecutor(max_concurrency=4, rate_limiters={"gemini_api": limiter})
    result = await executor.execute(dag, context={"doc_id": 7})
    assert (result.status, result.completed, result.failed, result.skipped) == (
        "COMPLETED",
        2,
        0,
        1,
    )
    assert result.outputs == {
        "extract": {"doc": 7, "confidence": 0.9},
        "save_json": "doc-7.json",
    }
    assert result.duration > 0
    review_step = result.steps["review"]
    assert (review_step.status, review_step.output, review_step.error) == ("SKIPPED", None, None)
    step = result.steps["save_json"]
    assert (step.status, step.output, step.error, step.retry_count) == (
        "COMPLETED",
        "doc-7.json",
        None,
        0,
    )
    assert 0 <= step.duration <= result.duration


def test_the_defaults_are_those_of_the_contract() -> None:
    executor = WorkflowExecutor()
    assert (executor.max_concurrency, executor.on_failure) == (4, "continue")
    limiter = TokenBucketRateLimiter()
    assert (limiter.rate_per_second, limiter.burst) == (10.0, 1)
    dag = WorkflowDAG().add_step("a", print)
    (spec,) = dag._compiled("continue").nodes
    assert (spec.max_retries, spec.timeout_seconds) == (0, 300.0)


def test_a_script_needs_no_event_loop() -> None:
    dag = WorkflowDAG().add_step("a", lambda ctx: ctx["x"] + 1)
    assert WorkflowExecutor().execute_sync(dag, context={"x": 1}).outputs == {"a": 2}


async def test_in_a_running_event_loop_the_error_says_to_await() -> None:
    with pytest.raises(RuntimeError, match="await execute"):
        WorkflowExecutor().execute_sync(WorkflowDAG().add_step("a", print))


async def test_an_invalid_graph_is_refused_before_anything_runs() -> None:
    ran: list[int] = []
    dag = WorkflowDAG().add_step("a", lambda ctx: ran.append(1))
    dag.add_step("b", print, depends_on=["ghost"])
    with pytest.raises(InvalidDefinition):
        await run(dag)
    assert ran == []


class TestFailures:
    def dag(self, policy: Any = None) -> WorkflowDAG:
        async def fail(ctx: Ctx) -> None:
            await asyncio.sleep(0.005)
            raise ValueError("broken")

        async def wait(ctx: Ctx) -> str:
            await asyncio.sleep(0.02)
            return "done"

        dag = WorkflowDAG("f", on_failure=policy)
        dag.add_step("bad", fail)
        dag.add_step("child", print, depends_on=["bad"])
        dag.add_step("grandchild", print, depends_on=["child"])
        dag.add_step("other", wait)
        dag.add_step("after_other", wait, depends_on=["other"])
        return dag

    async def test_by_default_other_branches_continue(self) -> None:
        result = await run(self.dag())
        assert (result.status, result.completed, result.failed, result.skipped) == (
            "FAILED",
            2,
            1,
            2,
        )
        assert result.steps["bad"].error == "ValueError: broken"
        for name in ("child", "grandchild"):
            step = result.steps[name]
            assert (step.status, step.error) == ("SKIPPED", "Dependency failed")
        assert result.outputs == {"other": "done", "after_other": "done"}

    @pytest.mark.parametrize("where", ["executor", "dag"])
    async def test_fail_fast_cancels_the_steps_that_have_not_started(self, where: str) -> None:
        if where == "dag":
            result = await run(self.dag("fail_fast"))
        else:
            result = await run(self.dag(), on_failure="fail_fast")
        assert result.status == "FAILED"
        assert result.steps["child"].status == "FAILED"
        assert result.steps["child"].error == "Dependency failed"
        assert result.steps["other"].output == "done", "what was running may finish"
        assert result.steps["after_other"].status == "CANCELLED"
        assert (result.completed, result.failed, result.skipped) == (1, 3, 0)

    async def test_the_policy_of_the_graph_wins(self) -> None:
        result = await run(self.dag("continue"), on_failure="fail_fast")
        assert result.steps["after_other"].status == "COMPLETED"

    async def test_retries_are_counted(self) -> None:
        calls: list[int] = []

        async def shaky(ctx: Ctx) -> str:
            calls.append(1)
            if len(calls) < 3:
                raise ConnectionError
            return "ok"

        dag = WorkflowDAG().add_step("a", shaky, max_retries=3, retry=AT_ONCE)
        result = await run(dag)
        assert (result.outputs, result.steps["a"].retry_count) == ({"a": "ok"}, 2)
        assert result.steps["a"].error is None

    async def test_a_step_that_never_succeeds_fails_after_its_retries(self) -> None:
        def broken(ctx: Ctx) -> None:
            raise OSError("no")

        dag = WorkflowDAG().add_step("a", broken, max_retries=2, retry=AT_ONCE)
        result = await run(dag)
        assert (result.steps["a"].status, result.steps["a"].retry_count) == ("FAILED", 2)

    async def test_a_permanent_error_is_not_retried_and_a_retryable_one_sets_its_delay(
        self,
    ) -> None:
        async def permanent(ctx: Ctx) -> None:
            raise PermanentError("no use")

        async def busy(ctx: Ctx) -> str:
            if not ctx["seen"]:
                ctx["seen"].append(1)
                raise RetryableError("busy", after=0.001)
            return "ok"

        dag = WorkflowDAG().add_step("p", permanent, max_retries=5)
        dag.add_step("b", busy, max_retries=1)
        result = await run(dag, {"seen": []})
        assert result.steps["p"].retry_count == 0
        assert result.outputs == {"b": "ok"}

    async def test_a_step_that_takes_too_long_fails(self) -> None:
        async def slow(ctx: Ctx) -> None:
            await asyncio.sleep(60)

        dag = WorkflowDAG().add_step("a", slow, timeout_seconds=0.02)
        result = await run(dag)
        error = result.steps["a"].error
        assert error is not None
        assert "did not finish within 0.02 s" in error

    async def test_a_plain_step_that_takes_too_long_is_abandoned(self) -> None:
        release = threading.Event()
        dag = WorkflowDAG().add_step("a", lambda ctx: release.wait(30), timeout_seconds=0.02)
        dag.add_step("b", lambda ctx: "ok")
        result = await run(dag, max_concurrency=1)
        release.set()
        assert result.steps["a"].status == "FAILED"
        assert result.outputs == {"b": "ok"}

    @pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), StopIteration()])
    @pytest.mark.parametrize("is_async", [True, False])
    async def test_any_object_raised_by_a_step_is_only_its_failure(
        self, error: BaseException, is_async: bool
    ) -> None:
        def plain(ctx: Ctx) -> None:
            raise error

        async def asynchronous(ctx: Ctx) -> None:
            raise error

        dag = WorkflowDAG().add_step("a", asynchronous if is_async else plain)
        dag.add_step("b", lambda ctx: "ok")
        result = await run(dag)
        assert (result.steps["a"].status, result.outputs) == ("FAILED", {"b": "ok"})


def broken_step(ctx: Ctx) -> None:
    raise ValueError("broken")


class TestAllowedFailures:
    """`add_step(…, allow_failure=True)`."""

    @pytest.mark.parametrize("policy", ["continue", "fail_fast"])
    async def test_the_steps_after_it_run_and_the_workflow_completes(self, policy: str) -> None:
        dag = WorkflowDAG("w", on_failure=policy)  # type: ignore[arg-type]
        dag.add_step("fetch", broken_step, allow_failure=True)
        dag.add_step("other", lambda ctx: 1)
        dag.add_step(
            "report", lambda ctx: sorted(ctx["step_outputs"]), depends_on=["fetch", "other"]
        )
        result = await run(dag)
        assert (result.status, result.error) == ("COMPLETED", None)
        assert (result.completed, result.failed, result.skipped) == (2, 1, 0)
        assert result.steps["fetch"].error == "ValueError: broken"
        assert result.outputs["report"] == ["other"]

    async def test_a_condition_sees_that_the_output_is_missing(self) -> None:
        dag = WorkflowDAG().add_step("fetch", broken_step, allow_failure=True)
        for name, wanted in (("use", True), ("fall_back", False)):
            dag.add_step(
                name,
                lambda ctx: "ran",
                depends_on=["fetch"],
                condition=lambda ctx, wanted=wanted: ("fetch" in ctx["step_outputs"]) is wanted,
            )
        result = await run(dag)
        assert result.outputs == {"fall_back": "ran"}
        assert (result.status, result.failed, result.skipped) == ("COMPLETED", 1, 1)

    async def test_another_failure_still_fails_the_workflow(self) -> None:
        dag = WorkflowDAG().add_step("fetch", broken_step, allow_failure=True)
        dag.add_step("save", broken_step, depends_on=["fetch"])
        result = await run(dag)
        assert (result.status, result.failed) == ("FAILED", 2)
        assert result.error is not None
        assert result.error["node"] == "save"

    async def test_the_result_travels_as_data(self) -> None:
        dag = WorkflowDAG().add_step("fetch", broken_step, allow_failure=True)
        data = json.loads(json.dumps((await run(dag)).to_dict()))
        again = WorkflowResult.from_dict(data)
        assert (again.status, again.failed, again.completed) == ("COMPLETED", 1, 0)

    async def test_a_resumed_workflow_runs_it_again_and_keeps_the_steps_after_it(self) -> None:
        calls: list[str] = []

        def fetch(ctx: Ctx) -> None:
            calls.append("fetch")
            raise ValueError("broken")

        dag = WorkflowDAG().add_step("fetch", fetch, allow_failure=True)
        dag.add_step("report", lambda ctx: calls.append("report"), depends_on=["fetch"])
        first = await run(dag)
        second = await WorkflowExecutor().execute(dag, resume=first)
        assert calls == ["fetch", "report", "fetch"]
        assert (second.status, second.completed, second.failed) == ("COMPLETED", 1, 1)


class TestAsData:
    async def test_a_result_from_json_is_the_same_result(self) -> None:
        dag = TestFailures().dag()
        dag.add_step("odd", print, condition=lambda ctx: False)
        result = await run(dag)
        again = WorkflowResult.from_dict(json.loads(json.dumps(result.to_dict())))
        assert again.to_dict() == result.to_dict()
        assert (again.status, again.outputs, again.steps) == (
            result.status,
            result.outputs,
            result.steps,
        )
        assert repr(again) == repr(result)
        assert again.error is not None
        assert (again.error["node"], again.error["message"]) == ("bad", "broken")

    async def test_a_completed_result_has_no_error(self) -> None:
        assert (await run(WorkflowDAG().add_step("a", lambda ctx: 1))).to_dict()["error"] is None


class TestConditions:
    async def test_a_skipped_step_is_absent_from_the_outputs_that_its_children_see(self) -> None:
        seen: list[Any] = []
        dag = WorkflowDAG()
        dag.add_step("a", lambda ctx: 1)
        dag.add_step("no", print, depends_on=["a"], condition=lambda ctx: False)
        dag.add_step(
            "join", lambda ctx: seen.append(dict(ctx["step_outputs"])), depends_on=["a", "no"]
        )
        dag.add_step("only", print, depends_on=["no"])
        result = await run(dag)
        assert seen == [{"a": 1}]
        assert result.steps["only"].status == "SKIPPED"
        assert (result.status, result.skipped) == ("COMPLETED", 2)

    async def test_a_condition_that_raises_fails_its_step_without_a_retry(self) -> None:
        dag = WorkflowDAG()
        dag.add_step("a", lambda ctx: 1)
        dag.add_step(
            "b", print, depends_on=["a"], condition=lambda ctx: ctx["nothing"], max_retries=3
        )
        result = await run(dag)
        step = result.steps["b"]
        assert (step.status, step.retry_count) == ("FAILED", 0)
        assert step.error is not None
        assert "KeyError: 'nothing'" in step.error

    async def test_a_condition_whose_answer_has_no_truth_fails_its_step(self) -> None:
        class Column:
            def __bool__(self) -> bool:
                raise ValueError("the truth of a column is ambiguous")

        dag = WorkflowDAG().add_step("a", print, condition=lambda ctx: Column())
        dag.add_step("b", lambda ctx: 1)
        result = await WorkflowExecutor().execute(dag)
        assert result.steps["b"].status == "COMPLETED"
        error = result.steps["a"].error
        assert error is not None
        assert "ValueError: the truth of a column is ambiguous" in error

    async def test_a_condition_sees_the_context(self) -> None:
        dag = WorkflowDAG().add_step("a", lambda ctx: 1, condition=lambda ctx: ctx["go"])
        assert (await run(dag, {"go": True})).completed == 1
        assert (await run(dag, {"go": 0})).skipped == 1

    @pytest.mark.parametrize("name", ["params", "run", "secrets", "step_outputs", "a b", "ü"])
    async def test_a_step_may_have_any_name(self, name: str) -> None:
        dag = WorkflowDAG().add_step(name, lambda ctx: 1)
        dag.add_step("after", lambda ctx: 2, depends_on=[name], condition=lambda ctx: ctx["go"])
        result = await run(dag, {"go": True})
        assert result.outputs == {name: 1, "after": 2}


class TestContext:
    async def test_outputs_are_python_objects_of_any_type(self) -> None:
        marker = object()
        dag = WorkflowDAG().add_step("a", lambda ctx: marker)
        dag.add_step("b", lambda ctx: ctx["step_outputs"]["a"] is marker, depends_on=["a"])
        result = await run(dag)
        assert result.outputs == {"a": marker, "b": True}

    async def test_a_step_cannot_change_the_context_of_another(self) -> None:
        def vandal(ctx: Ctx) -> None:
            ctx["x"] = "vandal"
            ctx.pop("y")

        dag = WorkflowDAG().add_step("v", vandal)
        dag.add_step("a", lambda ctx: (ctx["x"], ctx["y"]), depends_on=["v"])
        given = {"x": 1, "y": 2}
        result = await run(dag, given)
        assert result.outputs["a"] == (1, 2)
        assert given == {"x": 1, "y": 2}

    async def test_a_step_without_an_output_has_none(self) -> None:
        result = await run(WorkflowDAG().add_step("a", lambda ctx: None))
        assert result.outputs == {"a": None}

    async def test_without_a_context_a_step_sees_only_the_outputs(self) -> None:
        result = await run(WorkflowDAG().add_step("a", lambda ctx: list(ctx)))
        assert result.outputs == {"a": ["step_outputs"]}

    async def test_one_graph_can_be_run_many_times_concurrently(self) -> None:
        async def double(ctx: Ctx) -> int:
            await asyncio.sleep(0.001)
            return int(ctx["x"]) * 2

        dag = WorkflowDAG().add_step("a", double)
        dag.add_step("b", lambda ctx: ctx["step_outputs"]["a"] + 1, depends_on=["a"])
        results = await asyncio.gather(*(run(dag, {"x": x}) for x in range(10)))
        assert [result.outputs["b"] for result in results] == [2 * x + 1 for x in range(10)]

    async def test_a_step_can_be_added_after_a_run(self) -> None:
        dag = WorkflowDAG().add_step("a", lambda ctx: 1)
        await run(dag)
        dag.add_step("b", lambda ctx: 2, depends_on=["a"])
        assert (await run(dag)).outputs == {"a": 1, "b": 2}


class TestConcurrency:
    @pytest.mark.parametrize("limit", [1, 4])
    async def test_no_more_steps_than_the_limit_run_at_once(self, limit: int) -> None:
        inside = most = 0

        async def busy(ctx: Ctx) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.002)
            inside -= 1

        dag = WorkflowDAG()
        for i in range(12):
            dag.add_step(f"n{i}", busy)
        await run(dag, max_concurrency=limit)
        assert most == limit

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_limit_below_one_is_refused(self, limit: int) -> None:
        with pytest.raises(ValueError, match="max_concurrency"):
            WorkflowExecutor(max_concurrency=limit)

    async def test_a_cancelled_execution_stops_its_steps(self) -> None:
        state: list[str] = []

        async def slow(ctx: Ctx) -> None:
            state.append("in")
            try:
                await asyncio.sleep(60)
            finally:
                state.append("out")

        dag = WorkflowDAG().add_step("a", slow)
        executing = asyncio.create_task(WorkflowExecutor().execute(dag))
        while not state:
            await asyncio.sleep(0)
        executing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await executing
        assert state == ["in", "out"]


class TestRateLimits:
    async def test_tagged_steps_are_spaced_by_their_rate(self) -> None:
        at: list[float] = []
        dag = WorkflowDAG()
        for i in range(4):
            dag.add_step(f"n{i}", lambda ctx: at.append(time.monotonic()), resource_tag="api")
        began = time.monotonic()
        await run(dag, rate_limiters={"api": TokenBucketRateLimiter(20, 1)})
        assert max(at) - began >= 3 / 20 - EARLY

    async def test_a_tag_without_a_limiter_has_the_default_rate(self) -> None:
        at: list[float] = []
        dag = WorkflowDAG()
        for i in range(3):
            dag.add_step(f"n{i}", lambda ctx: at.append(time.monotonic()), resource_tag="other")
        began = time.monotonic()
        await run(dag)
        assert max(at) - began >= 2 / 10 - EARLY

    async def test_acquire_waits_for_its_turn(self) -> None:
        limiter = TokenBucketRateLimiter(rate_per_second=50, burst=2)
        began = time.monotonic()
        await asyncio.gather(*(limiter.acquire() for _ in range(6)))
        assert time.monotonic() - began >= 4 / 50 - EARLY

    async def test_a_limiter_can_be_shared_by_executors_and_direct_callers(self) -> None:
        limiter = TokenBucketRateLimiter(rate_per_second=20, burst=1)
        at: list[float] = []
        dag = WorkflowDAG().add_step("a", lambda ctx: at.append(time.monotonic()), resource_tag="t")
        began = time.monotonic()
        await limiter.acquire()
        await asyncio.gather(*(run(dag, rate_limiters={"t": limiter}) for _ in range(2)))
        assert max(at) - began >= 2 / 20 - EARLY

    @pytest.mark.parametrize("bad", [(0, 1), (-1, 1), (1, 0)])
    def test_impossible_limits_are_refused(self, bad: tuple[float, int]) -> None:
        with pytest.raises(ValueError):
            TokenBucketRateLimiter(*bad)


def test_statuses_compare_equal_to_plain_strings() -> None:
    result = WorkflowExecutor().execute_sync(WorkflowDAG().add_step("a", lambda ctx: 1))
    assert result.status == "COMPLETED"
    assert f"{result.status}" == "COMPLETED"
    assert result.steps["a"].status == "COMPLETED"


class TestOnEnd:
    @pytest.mark.parametrize(("fn", "status"), [(dict, "COMPLETED"), (int, "FAILED")])
    async def test_on_end_is_called_once_with_the_status(self, fn: Any, status: str) -> None:
        reported: list[str] = []
        dag = WorkflowDAG(on_end=reported.append).add_step("a", fn)
        result = await WorkflowExecutor().execute(dag)
        assert (reported, result.status) == ([status], status)

    async def test_on_end_is_called_for_a_cancelled_run(self) -> None:
        reported: list[str] = []
        started = asyncio.Event()

        async def hang(ctx: dict[str, Any]) -> None:
            started.set()
            await asyncio.Event().wait()

        dag = WorkflowDAG(on_end=reported.append).add_step("a", hang)
        task = asyncio.create_task(WorkflowExecutor().execute(dag))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reported == ["CANCELLED"]

    async def test_a_failure_of_on_end_does_not_affect_the_run(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(status: str) -> None:
            raise RuntimeError("not now")

        result = await WorkflowExecutor().execute(WorkflowDAG(on_end=broken).add_step("a", dict))
        assert result.status == "COMPLETED"
        assert "on_end failed" in caplog.text

    def test_on_end_must_be_a_plain_function(self) -> None:
        async def later(status: str) -> None: ...

        with pytest.raises(TypeError, match="on_end must be a plain function"):
            WorkflowDAG(on_end=later)
