"""Threads for handlers that block: reused, never in the way of an exit."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from dovetail.engine.worker import Threads


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "dovetail" in thread.name}


async def settled(before: set[threading.Thread]) -> bool:
    async with asyncio.timeout(5):
        while workers() - before:
            await asyncio.sleep(0.001)
    return True


async def test_work_runs_in_a_thread_and_returns_its_output() -> None:
    threads = Threads()
    assert await threads.submit(lambda: threading.get_ident()) != threading.get_ident()
    threads.close()


async def test_an_error_in_a_thread_is_raised_unchanged() -> None:
    threads = Threads()

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await threads.submit(fail)
    threads.close()


async def test_a_stop_iteration_is_raised_as_an_error_that_a_future_can_carry() -> None:
    threads = Threads()

    def fail() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.submit(fail)
    threads.close()


async def test_threads_are_reused() -> None:
    threads = Threads()
    names = set()
    for _ in range(20):
        names.add(await threads.submit(lambda: threading.current_thread().name))
        await asyncio.sleep(0.002)
    assert len(names) <= 2
    threads.close()


async def test_there_are_as_many_threads_as_concurrent_calls() -> None:
    threads = Threads()
    barrier = threading.Barrier(8, timeout=10)
    await asyncio.gather(*(threads.submit(barrier.wait) for _ in range(8)))
    threads.close()


async def test_idle_threads_end_when_the_pool_is_closed() -> None:
    before = workers()
    threads = Threads()
    await asyncio.gather(*(threads.submit(lambda: time.sleep(0.001)) for _ in range(4)))
    threads.close()
    assert await settled(before)


async def test_a_busy_thread_ends_after_its_call() -> None:
    before = workers()
    threads = Threads()
    release = threading.Event()
    future = threads.submit(lambda: release.wait(10))
    await asyncio.sleep(0.005)
    threads.close()
    release.set()
    assert await future
    assert await settled(before)


async def test_threads_are_daemons_and_cannot_block_an_exit() -> None:
    threads = Threads()
    assert await threads.submit(lambda: threading.current_thread().daemon)
    threads.close()


async def test_a_result_without_a_waiter_is_dropped() -> None:
    threads = Threads()
    release = threading.Event()
    future = threads.submit(lambda: release.wait(10))
    future.cancel()
    release.set()
    assert await threads.submit(lambda: "still here") == "still here"
    threads.close()


def test_a_thread_outlives_its_event_loop_quietly() -> None:
    release = threading.Event()
    before = workers()

    async def leave_it() -> None:
        Threads().submit(lambda: release.wait(10))
        await asyncio.sleep(0.005)

    asyncio.run(leave_it())
    release.set()
    deadline = time.monotonic() + 5
    while workers() - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not workers() - before
