"""Handlers that take too long, are stopped, or do not listen."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from dovetail.core.errors import Conflict
from dovetail.core.run import RunState
from dovetail.core.transitions import Cancel, Submit
from dovetail.handlers.calls import RegistryCalls
from dovetail.wiring.embedded import LocalEngine

from ..core.walk import graph
from .harness import Engine, Gate, engine, registry_of, statuses


async def noop(config: dict[str, Any], ctx: Any) -> str:
    return "done"


async def forever(config: dict[str, Any], ctx: Any) -> None:
    await asyncio.sleep(3600)


def node(handler: str, **fields: Any) -> dict[str, Any]:
    return {"a": {"handler": handler, "timeout_seconds": 0.02, **fields}}


def error_of(run: RunState, name: str = "a") -> dict[str, Any]:
    error = run.node(name).error
    assert error is not None
    return error


async def started(it: Engine, run_id: str, name: str = "a") -> None:
    async with asyncio.timeout(10):
        while (await it.load(run_id)).node(name).status != "RUNNING":
            await asyncio.sleep(0.001)


class TestTimeouts:
    async def test_an_async_handler_that_exceeds_its_timeout_fails_with_a_timeout(self) -> None:
        async with engine(forever) as it:
            run = await it.run(node("forever"))
        assert run.status == "FAILED"
        error = error_of(run)
        where = error.pop("where")
        assert error == {
            "type": "timeout",
            "message": "did not finish within 0.02 s (timeout_seconds)",
        }
        assert where.endswith(" in forever")

    async def test_a_timed_out_handler_is_cancelled_where_it_waits(self) -> None:
        ended = asyncio.Event()

        async def tidy(config: dict[str, Any], ctx: Any) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                assert ctx.cancelled.is_set()
                ended.set()

        async with engine(tidy) as it:
            await it.run(node("tidy"))
            await asyncio.wait_for(ended.wait(), 5)

    async def test_a_timeout_is_retried_like_any_other_failure(self) -> None:
        attempts: list[int] = []

        async def slow_at_first(config: dict[str, Any], ctx: Any) -> str:
            attempts.append(ctx.attempt)
            if ctx.attempt == 1:
                await asyncio.sleep(3600)
            return "at last"

        async with engine(slow_at_first) as it:
            run = await it.run(
                node("slow_at_first", max_retries=1, retry={"base_delay_seconds": 0})
            )
        assert (run.status, run.node("a").output, attempts) == ("COMPLETED", "at last", [1, 2])
        assert run.node("a").error is None

    async def test_a_timed_out_handler_in_a_thread_is_abandoned_and_frees_its_slot(self) -> None:
        release = threading.Event()
        reported = threading.Event()

        def stuck(config: dict[str, Any], ctx: Any) -> str:
            while not release.wait(0.002):
                if ctx.cancelled.is_set():
                    reported.set()
            return "too late"

        async with engine(stuck, noop, concurrency=1) as it:
            run = await it.run(node("stuck"))
            assert error_of(run)["type"] == "timeout"
            assert (await it.run({"b": "noop"})).status == "COMPLETED"
            assert await asyncio.to_thread(reported.wait, 5), "it was not asked to stop"
            release.set()
            await asyncio.sleep(0.01)
            assert (await it.load(run.id)).node("a").output is None

    async def test_a_handler_that_swallows_its_cancellation_still_frees_its_slot(
        self,
    ) -> None:
        release = asyncio.Event()

        async def stubborn(config: dict[str, Any], ctx: Any) -> str:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return "too late"

        async with engine(stubborn, noop, concurrency=1) as it:
            run = await it.run(node("stubborn"))
            assert error_of(run)["type"] == "timeout"
            assert (await it.run({"b": "noop"})).status == "COMPLETED"
            release.set()
            await asyncio.sleep(0.01)
            late = await it.load(run.id)
            assert (late.node("a").status, late.node("a").output) == ("FAILED", None)

    async def test_a_handler_that_ends_after_its_timeout_does_not_free_a_slot_twice(self) -> None:
        release = asyncio.Event()
        inside = most = 0

        async def stubborn(config: dict[str, Any], ctx: Any) -> str:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return "too late"

        async def busy(config: dict[str, Any], ctx: Any) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

        async with engine(stubborn, busy, concurrency=1) as it:
            await it.run(node("stubborn"))
            release.set()
            await asyncio.sleep(0.01)
            await it.run({f"n{i}": "busy" for i in range(5)})
        assert most == 1

    async def test_the_late_result_of_the_first_attempt_does_not_complete_the_second(self) -> None:
        first_may_end = asyncio.Event()
        second_may_end = asyncio.Event()

        async def clinging(config: dict[str, Any], ctx: Any) -> str:
            if ctx.attempt == 1:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    await first_may_end.wait()
                return "first"
            await second_may_end.wait()
            return "second"

        async with engine(clinging) as it:
            run_id = await it.trigger(
                {
                    "a": {
                        "handler": "clinging",
                        "timeout_seconds": 0.05,
                        "max_retries": 1,
                        "retry": {"base_delay_seconds": 0},
                    }
                }
            )
            async with asyncio.timeout(5):
                while (await it.load(run_id)).node("a").attempt < 2:
                    await asyncio.sleep(0.001)
            first_may_end.set()
            await asyncio.sleep(0.005)
            assert (await it.load(run_id)).node("a").status == "RUNNING"
            second_may_end.set()
            assert (await it.wait(run_id)).node("a").output == "second"

    async def test_each_attempt_has_the_full_timeout(self) -> None:
        async def nearly(config: dict[str, Any], ctx: Any) -> None:
            await asyncio.sleep(0.4)
            if ctx.attempt < 3:
                raise ValueError

        retry = {"max_retries": 2, "retry": {"base_delay_seconds": 0}}
        async with engine(nearly) as it:
            run = await it.run({"a": {"handler": "nearly", "timeout_seconds": 1.0, **retry}})
        assert run.status == "COMPLETED"

    async def test_time_in_the_queue_does_not_count_towards_the_timeout(self) -> None:
        async def brief(config: dict[str, Any], ctx: Any) -> None:
            await asyncio.sleep(0.2)

        async with engine(brief, concurrency=1) as it:
            nodes = {f"n{i}": {"handler": "brief", "timeout_seconds": 1.0} for i in range(6)}
            assert (await it.run(nodes)).status == "COMPLETED"


class TestCancellation:
    async def test_a_running_handler_is_notified_and_cancelled(self) -> None:
        gate = Gate()
        async with engine(gate) as it:
            run_id = await it.trigger({"a": "gate", "b": {"handler": "gate", "after": ["a"]}})
            await gate.entered.wait()
            run = await it.commands.cancel(run_id)
            assert run.status == "CANCELLED"
            assert statuses(run) == {"a": "CANCELLED", "b": "CANCELLED"}
            async with asyncio.timeout(5):
                while gate.inside:
                    await asyncio.sleep(0)

    async def test_a_handler_in_a_thread_sees_the_cancel_event(self) -> None:
        saw = threading.Event()

        def watching(config: dict[str, Any], ctx: Any) -> None:
            for _ in range(5000):
                if ctx.cancelled.is_set():
                    saw.set()
                    return
                time.sleep(0.001)

        async with engine(watching) as it:
            run_id = await it.trigger({"a": "watching"})
            await started(it, run_id)
            await it.commands.cancel(run_id)
            assert await asyncio.to_thread(saw.wait, 5)

    async def test_a_cancel_during_the_start_of_a_thread_stops_its_handler(self) -> None:
        begun: list[Any] = []

        def watching(config: dict[str, Any], ctx: Any) -> None:
            begun.append(ctx)
            for _ in range(60_000):
                if ctx.cancelled.is_set():
                    return
                time.sleep(0.001)

        async with engine(watching, concurrency=1) as it:
            for _ in range(5):
                run_id = await it.trigger({"a": "watching"})
                # The worker has claimed the node; its thread has not been asked for yet.
                while (await it.load(run_id)).node("a").status != "RUNNING":
                    await asyncio.sleep(0)
                await it.commands.cancel(run_id)
                follow_up = await it.trigger({"a": "watching"})
                await started(it, follow_up)  # or the cancelled start kept its slot
                await it.commands.cancel(follow_up)
            async with asyncio.timeout(10):
                while not all(ctx.cancelled.is_set() for ctx in begun):
                    await asyncio.sleep(0.001)

    async def test_a_cancelled_handler_frees_its_slot_immediately(self) -> None:
        async def stubborn(config: dict[str, Any], ctx: Any) -> None:
            for _ in range(3):
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue

        async with engine(stubborn, noop, concurrency=1) as it:
            run_id = await it.trigger({"a": "stubborn"})
            await started(it, run_id)
            await it.commands.cancel(run_id)
            assert (await it.run({"b": "noop"})).status == "COMPLETED"

    async def test_a_late_result_of_a_cancelled_handler_is_only_an_event(self) -> None:
        release = asyncio.Event()

        async def clinging(config: dict[str, Any], ctx: Any) -> str:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await release.wait()
            return "late"

        async with engine(clinging) as it:
            run_id = await it.trigger({"a": "clinging"})
            await started(it, run_id)
            run = await it.commands.cancel(run_id)
            release.set()
            await asyncio.sleep(0.01)
            assert (run.node("a").status, run.node("a").output) == ("CANCELLED", None)
            types = [event.type for event in await it.events(run_id)]
            assert types[-1] == "result.refused"

    async def test_a_late_result_of_a_cancelled_thread_is_only_an_event(self) -> None:
        release = threading.Event()

        def deaf(config: dict[str, Any], ctx: Any) -> str:
            release.wait(10)
            return "late"

        async with engine(deaf) as it:
            run_id = await it.trigger({"a": "deaf"})
            await started(it, run_id)
            run = await it.commands.cancel(run_id)
            assert (run.node("a").status, run.node("a").output) == ("CANCELLED", None)
            release.set()
            async with asyncio.timeout(10):
                while (await it.events(run_id))[-1].type != "result.refused":
                    await asyncio.sleep(0.001)

    async def test_claimed_nodes_that_had_not_started_never_start(self) -> None:
        began: list[str] = []

        async def first(config: dict[str, Any], ctx: Any) -> None:
            began.append(ctx.node_id)
            if ctx.node_id == "n0":
                await it.orchestrator.apply([Cancel(ctx.run_id)])

        # In memory: until a durable cancel is in the file, what was claimed may well begin.
        async with LocalEngine(RegistryCalls(registry_of(first)), concurrency=8) as it:
            nodes: dict[str, list[str]] = {f"n{i}": [] for i in range(8)}
            handlers = {name: {"handler": "first"} for name in nodes}
            await it.orchestrator.submit(Submit("r", graph(nodes, **handlers), {}))
            run = await it.wait("r")
            await asyncio.sleep(0.01)
        assert run.status == "CANCELLED"
        assert began == ["n0"]

    async def test_a_handler_may_cancel_its_own_run(self) -> None:
        async def quits(config: dict[str, Any], ctx: Any) -> str:
            await asyncio.sleep(0)
            await it.commands.cancel(ctx.run_id)
            await asyncio.sleep(0)
            return "never"

        async with engine(quits, noop) as it:
            run = await it.run({"a": "quits"})
            assert (await it.run({"b": "noop"})).status == "COMPLETED"
        assert (run.status, run.node("a").output) == ("CANCELLED", None)

    async def test_cancelling_again_is_a_conflict(self) -> None:
        gate = Gate()
        async with engine(gate) as it:
            run_id = await it.trigger({"a": "gate"})
            await it.commands.cancel(run_id)
            with pytest.raises(Conflict, match="CANCELLED already"):
                await it.commands.cancel(run_id)

    async def test_a_cancelled_run_can_be_retried_while_its_old_handler_still_runs(self) -> None:
        release = asyncio.Event()

        async def clinging(config: dict[str, Any], ctx: Any) -> str:
            if ctx.epoch == 1:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    await release.wait()
            return f"epoch {ctx.epoch}"

        async with engine(clinging) as it:
            run_id = await it.trigger({"a": "clinging"})
            await started(it, run_id)
            await it.commands.cancel(run_id)
            await it.commands.retry(run_id)
            run = await it.wait(run_id)
            assert run.node("a").output == "epoch 2"
            release.set()
            await asyncio.sleep(0.01)
            assert run.node("a").output == "epoch 2"


class TestClosing:
    async def test_closing_stops_the_running_handlers(self) -> None:
        gate = Gate()
        async with engine(gate) as it:
            await it.trigger({f"n{i}": "gate" for i in range(5)})
            await gate.entered.wait()
        assert gate.inside == 0

    async def test_a_handler_that_ignores_cancellation_delays_the_close_only_briefly(self) -> None:
        release = asyncio.Event()

        async def stubborn(config: dict[str, Any], ctx: Any) -> None:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        async with engine(stubborn) as it:
            run_id = await it.trigger({"a": "stubborn"})
            await started(it, run_id)
            began = time.monotonic()
        assert time.monotonic() - began < 10
        release.set()
        await asyncio.sleep(0.01)

    async def test_a_thread_that_ignores_cancellation_is_abandoned(self) -> None:
        release = threading.Event()

        def stuck(config: dict[str, Any], ctx: Any) -> None:
            release.wait(60)

        async with engine(stuck) as it:
            run_id = await it.trigger({"a": "stuck"})
            await started(it, run_id)
            began = time.monotonic()
        assert time.monotonic() - began < 10
        release.set()

    @pytest.mark.parametrize("turns", range(6))
    async def test_the_engine_can_close_at_any_moment_of_a_start(self, turns: int) -> None:
        def blocks(config: dict[str, Any], ctx: Any) -> None:
            time.sleep(0.001)

        async with engine(blocks, noop) as it:
            await it.trigger({"a": "blocks", "b": "noop", "c": "blocks"})
            for _ in range(turns):
                await asyncio.sleep(0)

    async def test_no_task_is_left_after_the_engine_closed(self) -> None:
        async def chatty(config: dict[str, Any], ctx: Any) -> None:
            ctx.progress(0.5)
            await asyncio.sleep(3600)

        before = asyncio.all_tasks()
        async with engine(chatty, noop) as it:
            await it.trigger({"a": "chatty", "b": {"handler": "noop", "resource_tag": "t"}})
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert asyncio.all_tasks() == before
