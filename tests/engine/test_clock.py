"""Clocks that do not jump, and one that is the store's."""

from __future__ import annotations

import logging

import pytest

from dovetail.config import Settings
from dovetail.engine import clock as clocks
from dovetail.engine.clock import NEAR_SECONDS, StoreClock, steady_clock
from dovetail.stores.redis.doctor import set_clock
from dovetail.wiring.distributed import connected

HOUR = 3600.0


class Machine:
    """Its wall clock and its steady counter, both by hand."""

    def __init__(self) -> None:
        self.wall, self.counter = 1000.0, 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.counter

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.counter += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clocks, "time", machine)
    return machine


@pytest.mark.parametrize("make", [steady_clock, StoreClock])
def test_a_clock_that_is_adjusted_does_not_jump(machine: Machine, make: type[StoreClock]) -> None:
    clock = make()
    machine.passes(5)
    machine.wall -= HOUR
    assert clock() == 1005


@pytest.mark.parametrize("apart", [-HOUR, -15.0, 15.0, HOUR])
def test_the_time_of_the_store_counts(
    machine: Machine, apart: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = StoreClock()
    with caplog.at_level(logging.WARNING):
        clock.follow(1000 + apart, 49.9, 50.0)
    assert clock() == pytest.approx(1000.05 + apart)
    (said,) = caplog.messages
    assert ("ahead of" if apart < 0 else "behind") in said


@pytest.mark.parametrize("took", [0.0, 1.0, 20.0])
def test_a_difference_within_the_roundtrip_time_does_not_change_the_clock(
    machine: Machine, took: float
) -> None:
    clock = StoreClock()
    for there in (1000 - NEAR_SECONDS, 1000 + took, 1000 + took + NEAR_SECONDS):
        clock.follow(there, 50.0, 50.0 + took)
        assert clock() == 1000


async def test_a_machine_with_a_wrong_clock_uses_the_time_of_redis(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Machine()
    monkeypatch.setattr(clocks, "time", wrong)
    async with connected(Settings(redis_url=redis_url)) as parts:
        monkeypatch.undo()
        await set_clock(parts.pipe, parts.clock)
        seconds, _ = await parts.pipe.call("TIME")
        assert abs(parts.clock() - int(seconds)) < 5
