"""Instrumented stores report each event once, and a broken listener stops no run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Event
from dovetail.core.states import RunStatus
from dovetail.core.transitions import Cancel, Claim, Complete, Submit
from dovetail.engine.listener import CallersOf
from dovetail.engine.ports import Calls, Sender, Store
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.codec import node_of
from dovetail.stores.redis.store import InstrumentedRedisStore, times_of
from dovetail.stores.sqlite.store import InstrumentedSqliteStore
from dovetail.telemetry.service import Telemetry


class RecordingListener:
    """Records the calls of its hooks."""

    whole_logs = True

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.times: list[tuple[str, float]] = []
        self.logs: list[Sequence[Event]] = []

    def watch_queue(self, depths: Callable[[], Mapping[str, int]]) -> None: ...

    def on_events(
        self, run_id: str, graph: Graph, events: Sequence[Event], version: int | None = None
    ) -> None:
        self.events += events

    def on_duration(self, handler: str, seconds: float) -> None:
        self.times.append((handler, seconds))

    def on_notification(self, outcome: str, seconds: float) -> None: ...

    def on_exported(self, outcome: str, many: int, seconds: float) -> None: ...

    def caller(self) -> str | None:
        return None

    def outputs_wanted(self, graph: Graph) -> None:
        return None

    def on_outcome(self, *_: object) -> None:
        raise AssertionError("no output is wanted")

    def on_run_finished(
        self, run_id: str, graph: Graph, log: Sequence[Event], caller: str | None
    ) -> None:
        self.logs.append(log)

    def sender(self, sender: Sender, callers_of: CallersOf) -> Sender:
        return sender

    def calls(self, calls: Calls, caller_of: Callable[[str], str | None] | None = None) -> Calls:
        return calls


def graph() -> Graph:
    nodes = [{"id": "a", "handler": "h"}, {"id": "b", "handler": "h", "dependencies": ["a"]}]
    return build_graph(Workflow.model_validate({"name": "f", "nodes": nodes}), {})


async def test_a_decision_that_another_process_overtook_is_reported_as_it_was_committed(
    tmp_path: Path,
) -> None:
    driver, other = RecordingListener(), RecordingListener()
    path = tmp_path / "runs.db"
    now = time.time()
    async with (
        InstrumentedSqliteStore(path, driver, drives=True) as mine,
        InstrumentedSqliteStore(path, other, drives=False) as elsewhere,
    ):
        decision = await mine.create(Submit("r", graph(), {}), now)
        (order,) = decision.dispatch
        await mine.apply([Claim("r", "a", order.token, "w", now + 60)], now, durable=True)
        await elsewhere.apply([Cancel("r")], now + 1, durable=True)
        # It does not know yet, and takes the result; the commit finds out, and it is refused.
        (taken,) = await mine.apply([Complete("r", "a", order.token, 1)], now + 2)
        assert [event.type for event in taken.events][:1] == ["node.completed"]
        await mine.apply([], now + 2, durable=True)
        log = [event async for event in mine.watch("r")]
    reported = sorted([*driver.events, *other.events])
    assert [event.seq for event in reported] == [event.seq for event in log]
    assert [event.type for event in reported] == [event.type for event in log]
    assert log[-1].type == "result.refused"
    assert "run.cancelled" in {event.type for event in other.events}
    assert driver.times == []
    assert [event.type for event in other.logs[0]][-1] == "run.cancelled"


async def test_a_node_is_measured_from_its_start_to_its_end(tmp_path: Path) -> None:
    listener = RecordingListener()
    async with InstrumentedSqliteStore(tmp_path / "runs.db", listener, drives=True) as store:
        (order,) = (await store.create(Submit("r", graph(), {}), 100.0)).dispatch
        await store.apply([Claim("r", "a", order.token, "w", 999.0)], 101.0, durable=True)
        await store.apply([Complete("r", "a", order.token, 1)], 103.5, durable=True)
    assert listener.times == [("h", 2.5)]


class BrokenListener(RecordingListener):
    """Every hook raises."""

    def on_events(self, *_: object) -> NoReturn:
        raise RuntimeError("the collector is broken")

    def on_duration(self, *_: object) -> NoReturn:
        raise RuntimeError("the collector is broken")

    def on_run_finished(self, *_: object) -> NoReturn:
        raise RuntimeError("the collector is broken")

    def caller(self) -> NoReturn:
        raise RuntimeError("the collector is broken")

    def outputs_wanted(self, graph: Graph) -> NoReturn:
        raise RuntimeError("the collector is broken")


class BrokenAtTheEnd(RecordingListener):
    """Only the last hook raises."""

    def outputs_wanted(self, graph: Graph) -> Sequence[str]:
        return ("b",)

    def on_outcome(self, *_: object) -> NoReturn:
        raise RuntimeError("the collector is broken")


BROKEN = [
    (
        BrokenListener,
        ["caller", "on_duration", "on_events", "on_run_finished", "outputs_wanted"],
    ),
    (BrokenAtTheEnd, ["on_outcome"]),
]


async def run_to_the_end(store: Store) -> None:
    now = time.time()
    (order,) = (await store.create(Submit("r", graph(), {}), now)).dispatch
    for name in ("a", "b"):
        await store.apply([Claim("r", name, order.token, "w", now + 60)], now, durable=True)
        (done,) = await store.apply([Complete("r", name, order.token, 1)], now + 1, durable=True)
        order = next(iter(done.dispatch), order)
    assert (await store.load("r")).status is RunStatus.COMPLETED


def hooks_logged(caplog: pytest.LogCaptureFixture) -> list[object]:
    return sorted(one.args[0] for one in caplog.records if one.name == "dovetail.telemetry")


@pytest.mark.parametrize(("broken", "hooks"), BROKEN)
async def test_a_listener_that_raises_stops_no_run_in_sqlite_and_is_logged_once_per_hook(
    broken: type[RecordingListener],
    hooks: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with InstrumentedSqliteStore(tmp_path / "runs.db", broken(), drives=True) as store:
        await run_to_the_end(store)
    assert hooks_logged(caplog) == hooks


@pytest.mark.parametrize(("broken", "hooks"), BROKEN)
async def test_a_listener_that_raises_stops_no_run_in_redis_and_is_logged_once_per_hook(
    broken: type[RecordingListener],
    hooks: list[str],
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with PipelinedRedis(redis_url) as pipe:
        store = InstrumentedRedisStore(pipe, broken())
        await run_to_the_end(store)
        await store.close()
    assert hooks_logged(caplog) == hooks


class CountingRunEnds:
    def __init__(self) -> None:
        self.asked = 0

    def outputs_wanted(self, handlers: Mapping[str, str]) -> Sequence[str] | None:
        self.asked += 1
        return tuple(handlers)

    def ended(self, run_id: str, status: str, outputs: Mapping[str, object]) -> None:
        pass


def test_which_outputs_are_wanted_is_decided_once_for_all_runs_of_a_graph() -> None:
    ends = CountingRunEnds()
    telemetry = Telemetry(run_ends=ends)
    first, second = graph(), graph()
    for one in (first, second, first, second):
        assert telemetry.outputs_wanted(one) == ("a", "b")
    assert ends.asked == 2
    del one, first, second
    gc.collect()
    assert not telemetry._wanted, "nothing is kept for a graph that is gone"


@pytest.mark.parametrize(
    "state",
    [
        "C|1|1|0|1|77|1|77||||w|100.25|103.5",
        "R|1|1|0|1|77|0|0|||110.0|w|100.25|",
        "Q|1|0|0|1|77|0|0|P|||||",
    ],
)
def test_the_times_of_a_node_are_those_of_its_state(state: str) -> None:
    node = node_of(state)
    started, finished = times_of(state.encode())
    assert (float(started) if started else None) == node.started_at
    assert (float(finished) if finished else None) == node.finished_at
    assert times_of(None) == (b"", b"")
