"""Stores that are listened to: what they tell is what the log has, each event once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from dovetail.core.dag import Graph, build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Event
from dovetail.core.transitions import Cancel, Claim, Complete, Submit
from dovetail.engine.listener import CallersOf
from dovetail.engine.ports import Calls, Sender
from dovetail.stores.redis.codec import node_of
from dovetail.stores.redis.store import times_of
from dovetail.stores.sqlite.store import InstrumentedSqliteStore


class Ear:
    """Writes down what it is told."""

    whole_logs = True

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.times: list[tuple[str, float]] = []
        self.logs: list[Sequence[Event]] = []

    def watch_queue(self, depths: Callable[[], Mapping[str, int]]) -> None: ...

    def told(self, run_id: str, graph: Graph, events: Sequence[Event]) -> None:
        self.events += events

    def took(self, handler: str, seconds: float) -> None:
        self.times.append((handler, seconds))

    def caller(self) -> str | None:
        return None

    def outputs_wanted(self, graph: Graph) -> None:
        return None

    def over(self, run_id: str, graph: Graph, log: Sequence[Event], caller: str | None) -> None:
        self.logs.append(log)

    def sender(self, sender: Sender, callers_of: CallersOf) -> Sender:
        return sender

    def calls(self, calls: Calls, caller_of: Callable[[str], str | None] | None = None) -> Calls:
        return calls


def graph() -> Graph:
    nodes = [{"id": "a", "handler": "h"}, {"id": "b", "handler": "h", "dependencies": ["a"]}]
    return build_graph(Workflow.model_validate({"name": "f", "nodes": nodes}), {})


async def test_a_decision_that_another_process_overtook_is_told_as_it_was_made_in_the_end(
    tmp_path: Path,
) -> None:
    driver, other = Ear(), Ear()
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
    told = sorted([*driver.events, *other.events])
    assert [event.seq for event in told] == [event.seq for event in log]
    assert [event.type for event in told] == [event.type for event in log]
    assert log[-1].type == "result.refused"
    assert "run.cancelled" in {event.type for event in other.events}
    assert driver.times == []
    assert [event.type for event in other.logs[0]][-1] == "run.cancelled"


async def test_a_node_is_measured_from_its_start_to_its_end(tmp_path: Path) -> None:
    ear = Ear()
    async with InstrumentedSqliteStore(tmp_path / "runs.db", ear, drives=True) as store:
        (order,) = (await store.create(Submit("r", graph(), {}), 100.0)).dispatch
        await store.apply([Claim("r", "a", order.token, "w", 999.0)], 101.0, durable=True)
        await store.apply([Complete("r", "a", order.token, 1)], 103.5, durable=True)
    assert ear.times == [("h", 2.5)]


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
