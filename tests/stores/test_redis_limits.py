"""Token buckets in Redis: the arithmetic of `engine/limits.py`, shared by many processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.engine.limits import LATENESS, TokenBucket
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.limits import RedisLimits

from ..servers.redis_server import RedisServer


@pytest.fixture
async def pipe(redis_url: str) -> AsyncIterator[PipelinedRedis]:
    async with PipelinedRedis(redis_url) as pipe:
        yield pipe


class Time:
    """A clock that is moved by hand, for callers and for Redis alike."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def on_a_fake_clock(
    pipe: PipelinedRedis, clock: Time, buckets: dict[str, TokenBucket] | None = None
) -> RedisLimits:
    return RedisLimits(pipe, buckets, clock=clock, shared_clock=clock)


# --- the same arithmetic -------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("book"), st.floats(0, 3)),
    st.tuples(st.just("start"), st.floats(0, 3)),
    st.tuples(st.just("unbook"), st.integers(1, 5)),
    st.tuples(st.just("slow"), st.floats(-1, 5)),
    st.tuples(st.just("look"), st.integers(0, 5)),
    st.tuples(st.just("set"), st.tuples(st.floats(0.01, 1000), st.integers(1, 20))),
)


@given(st.floats(0.01, 1000), st.integers(1, 20), st.lists(STEPS, min_size=1, max_size=40))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_redis_bucket_equals_the_bucket_of_one_process_step_by_step(
    redis_url: str, rate: float, burst: int, steps: list[tuple[str, object]]
) -> None:
    asyncio.run(in_lockstep(redis_url, rate, burst, steps))


async def in_lockstep(url: str, rate: float, burst: int, steps: list[tuple[str, object]]) -> None:
    clock = Time()
    model = TokenBucket(rate, burst)
    async with PipelinedRedis(url) as pipe:
        await pipe.call("DEL", "wf:limit:t")
        limits = on_a_fake_clock(pipe, clock, {"t": TokenBucket(rate, burst)})
        for name, given in steps:
            match name, given:
                case "book", float(wait):
                    clock.now += wait
                    assert await limits.book("t", clock.now) == pytest.approx(
                        model.book(clock.now), abs=1e-6
                    )
                case "start", float(wait):
                    clock.now += wait
                    assert await limits.start("t", clock.now) == model.start(clock.now)
                case "unbook", int(count):
                    await limits.unbook("t", count)
                    model.unbook(count)
                case "slow", float(wait):
                    until = clock.now + wait
                    await limits.slow("t", until)
                    # As it travels, a distance: the last bit of a sum may differ.
                    model.slow(clock.now + (until - clock.now))
                case "set", (float(other_rate), int(other_burst)):
                    await limits.set("t", other_rate, other_burst)
                    model.set(other_rate, other_burst, clock.now)
                case "look", int(count):
                    seen = await limits.look("t", clock.now)
                    assert (seen.rate, seen.burst) == (model.rate, model.burst)
                    assert (seen.booked, seen.started) == pytest.approx(
                        (model.booked, model.started), abs=1e-6
                    )
                    seen.rebook(count, clock.now)
                    if seen.booked < model.booked:
                        await limits.pull_back("t", seen.booked, clock.now)
                        model.rebook(count, clock.now)


async def test_a_burst_is_granted_immediately_and_then_the_rate(pipe: PipelinedRedis) -> None:
    clock = Time(0.0)
    limits = on_a_fake_clock(pipe, clock, {"t": TokenBucket(2, 3)})
    booked = [await limits.book("t", 0.0) for _ in range(6)]
    assert booked == pytest.approx([0, 0, 0, 0.5, 1.0, 1.5])
    assert [await limits.start("t", 0.0) for _ in range(4)] == [True, True, True, False]


async def test_an_unconfigured_tag_gets_ten_per_second_with_a_burst_of_one(
    pipe: PipelinedRedis,
) -> None:
    limits = on_a_fake_clock(pipe, Time(0.0))
    assert [await limits.book("new", 0.0) for _ in range(3)] == pytest.approx([0, 0.1, 0.2])
    assert [await limits.start("new", 0.0) for _ in range(2)] == [True, False]


async def test_tags_with_any_name_have_their_own_buckets(
    pipe: PipelinedRedis,
) -> None:
    limits = on_a_fake_clock(pipe, Time())
    for tag in ("a", "b", "", "{a}", "}{", "ä b"):
        assert await limits.start(tag, 0.0)
        assert not await limits.start(tag, 0.0)


# --- on Redis' clock -----------------------------------------------------------------------------


async def test_times_are_in_the_clock_of_the_caller(pipe: PipelinedRedis) -> None:
    limits = RedisLimits(pipe, {"t": TokenBucket(1, 1)})
    assert await limits.book("t", 5.0) == 5.0
    assert await limits.book("t", 5.0) == pytest.approx(6.0, abs=0.5)
    assert await limits.book("t", -900.0) == pytest.approx(-898.0, abs=0.5)


async def test_a_retry_after_of_a_service_slows_every_process(redis_url: str) -> None:
    early, late = Time(0.0), Time(1_000_000.0)
    async with PipelinedRedis(redis_url) as one, PipelinedRedis(redis_url) as two:
        here, there = RedisLimits(one, clock=early), RedisLimits(two, clock=late)
        await here.slow("t", early.now + 30.0)
        assert not await there.start("t", late.now)
        assert await there.book("t", late.now) == pytest.approx(late.now + 30.0, abs=1.0)
        assert await there.start("other", late.now)


PROCESS = """
import asyncio, sys, time
from dovetail.engine.limits import TokenBucket
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.limits import RedisLimits

async def main(url, rate, burst, seconds):
    async with PipelinedRedis(url) as pipe:
        limits = RedisLimits(pipe, {"t": TokenBucket(float(rate), int(burst))})
        print("ready", flush=True)
        sys.stdin.readline()
        started, until = 0, time.monotonic() + float(seconds)
        while time.monotonic() < until:
            started += await limits.start("t", 0.0)
            await asyncio.sleep(0.002)
        print(started)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(("rate", "burst"), [(20, 1), (50, 10)])
def test_four_processes_share_one_rate(redis_url: str, rate: int, burst: int) -> None:
    seconds = 3.0
    command = [sys.executable, "-c", PROCESS, redis_url, str(rate), str(burst), str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(4)]  # type: ignore[call-overload]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    reported = [process.communicate(timeout=60)[0] for process in processes]
    took = time.monotonic() - began
    started = [int(text) for text in reported]
    assert sum(count > 0 for count in started) > 1, "only one of them ever got a token"
    assert sum(started) <= burst + rate * (took + LATENESS)
    assert sum(started) >= 0.5 * rate * seconds


# --- what is set ---------------------------------------------------------------------------------


async def test_a_set_limit_overrides_the_settings_of_every_process_immediately(
    redis_url: str,
) -> None:
    clock = Time(0.0)
    async with PipelinedRedis(redis_url) as one, PipelinedRedis(redis_url) as two:
        here = on_a_fake_clock(one, clock, {"t": TokenBucket(1, 1)})
        there = on_a_fake_clock(two, clock, {"t": TokenBucket(7, 7)})
        assert await here.start("t", 0.0)
        await there.set("t", 10, 2)
        assert not await here.start("t", 0.0), "what was started counts on"
        clock.now = 1.0
        assert [await here.start("t", 1.0) for _ in range(2)] == [True, True]
        assert await here.all() == await there.all() == {"t": (10.0, 2)}


async def test_invalid_rates_are_refused(pipe: PipelinedRedis) -> None:
    limits = RedisLimits(pipe)
    for rate, burst in ((0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1), (1, 0)):
        with pytest.raises(ValueError, match="must be"):
            await limits.set("t", rate, burst)
    assert await limits.all() == {}


async def test_an_idle_bucket_expires_unless_its_limit_was_set(
    pipe: PipelinedRedis,
) -> None:
    limits = RedisLimits(pipe)
    await limits.start("idle", 0.0)
    assert 0 < await pipe.call("TTL", "wf:limit:idle") <= 3601
    await limits.slow("idle", time.time() + 7200)
    assert await pipe.call("TTL", "wf:limit:idle") > 7200
    await limits.set("idle", 1, 1)
    await limits.start("idle", 0.0)
    assert await pipe.call("TTL", "wf:limit:idle") == -1


async def test_a_bucket_that_fills_in_a_thousand_years_is_kept(pipe: PipelinedRedis) -> None:
    limits = RedisLimits(pipe, {"t": TokenBucket(1e-11, 1)})
    assert await limits.start("t", 0.0)
    assert await pipe.call("TTL", "wf:limit:t") == -1
    assert not await limits.start("t", 0.0)


async def test_limits_work_on_a_cluster_and_after_a_script_flush() -> None:
    with RedisServer(cluster=True) as server:
        async with PipelinedRedis(server.url) as pipe:
            limits = RedisLimits(pipe)
            assert await limits.start("t", 0.0)
            await limits.set("t", 1, 5)
            server.ask("SCRIPT", "FLUSH")
            await limits.book("t", 0.0)
            await limits.unbook("t", 1)
            await limits.slow("t", 0.0)
            assert await limits.all() == {"t": (1.0, 5)}


async def test_returning_reservations_needs_no_known_default_rate(pipe: PipelinedRedis) -> None:
    clock = Time()
    worker = on_a_fake_clock(pipe, clock, {"t": TokenBucket(0.1, 1)})
    orchestrator = on_a_fake_clock(pipe, clock)
    for _ in range(3):
        await worker.book("t", clock.now)
    await orchestrator.pull_back("t", clock.now + 10, clock.now)
    seen = await orchestrator.look("t", clock.now)
    assert (seen.rate, seen.burst, seen.booked) == (0.1, 1, clock.now + 10)
    await orchestrator.pull_back("nobody", clock.now, clock.now)
    assert not await pipe.call("EXISTS", "wf:limit:nobody")
