"""A worker hands in what its handlers log: soon, before their results, and never in their way."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.core.node_logs import LogChunk
from dovetail.core.transitions import Complete, Fail, Progress
from dovetail.engine.local.task_source import LocalTaskSource
from dovetail.engine.worker import LOG_SECONDS

from .harness import PATIENCE, Gate, engine


class HandedIn:
    """What a task source got, in order."""

    def __init__(self) -> None:
        self.chunks: list[LogChunk] = []
        self.order: list[str] = []
        self.calls = 0

    def log(self, chunks: Sequence[LogChunk]) -> None:
        self.calls += 1
        self.chunks += chunks
        self.order += [f"log {chunk.node}" for chunk in chunks]

    def of(self, node: str) -> list[str]:
        return [line.message for c in self.chunks if c.node == node for line in c.lines]

    async def until(self, node: str, count: int) -> list[str]:
        async with asyncio.timeout(PATIENCE):
            while len(found := self.of(node)) < count:
                await asyncio.sleep(0.01)
        return found


@pytest.fixture
def handed_in(monkeypatch: pytest.MonkeyPatch) -> HandedIn:
    it = HandedIn()
    init = LocalTaskSource.__init__

    def made(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        report = self.report

        async def noted(moves: Sequence[Complete | Fail | Progress]) -> Any:
            it.order += [f"result {m.node}" for m in moves if not isinstance(m, Progress)]
            return await report(moves)

        self.report = noted
        self.log = it.log

    monkeypatch.setattr(LocalTaskSource, "__init__", made)
    return it


async def says(config: dict[str, Any], ctx: Any) -> str:
    ctx.log.info("begun", extra={"rows": 3})
    print("printed")
    return "done"


def plain(config: dict[str, Any], ctx: Any) -> None:
    logging.getLogger("shop").warning("from a thread")
    print("no end", end="")


async def raises(config: dict[str, Any], ctx: Any) -> None:
    print("before", file=sys.stderr)
    raise ValueError("no")


async def quiet(config: dict[str, Any], ctx: Any) -> None:
    await asyncio.sleep(0)


async def test_all_lines_of_an_attempt_come_before_its_result(handed_in: HandedIn) -> None:
    async with engine(says, plain, raises) as it:
        await it.run({"a": "says"})
        await it.run({"b": "plain"})
        await it.run({"c": "raises"})
    assert handed_in.order == ["log a", "result a", "log b", "result b", "log c", "result c"]
    first = handed_in.chunks[0]
    assert (first.epoch, first.attempt, first.number) == (1, 1, 0)
    assert [line[1:] for line in first.lines] == [
        ("INFO", "dovetail.handler", "begun", {"rows": 3}),
        ("INFO", "stdout", "printed", None),
    ]
    assert handed_in.of("b") == ["from a thread", "no end"]
    assert handed_in.of("c") == ["before"]


async def test_handlers_that_say_nothing_hand_nothing_in(handed_in: HandedIn) -> None:
    async with engine(quiet) as it:
        await it.run({f"n{i}": "quiet" for i in range(50)})
    assert handed_in.calls == 0


async def test_the_lines_of_a_handler_that_runs_are_handed_in_twice_a_second(
    handed_in: HandedIn,
) -> None:
    gate = asyncio.Event()

    async def slow(config: dict[str, Any], ctx: Any) -> None:
        for number in range(5):
            print("line", number)
            await asyncio.sleep(0)
        print("half a line", end="")
        await gate.wait()
        print(", and its end")

    async with engine(slow) as it:
        run_id = await it.trigger({"a": "slow"})
        began = time.monotonic()
        found = await handed_in.until("a", 5)
        assert found == [f"line {number}" for number in range(5)]
        assert handed_in.calls == 1
        assert time.monotonic() - began < LOG_SECONDS + PATIENCE / 2
        assert handed_in.order == ["log a"]
        calls = handed_in.calls
        await asyncio.sleep(2 * LOG_SECONDS)
        assert handed_in.calls == calls, "nothing new, nothing handed in"
        gate.set()
        await it.wait(run_id)
    assert handed_in.of("a")[5:] == ["half a line, and its end"]
    assert [chunk.number for chunk in handed_in.chunks] == [0, 1]


async def test_lines_of_other_attempts_do_not_come_with_each_result(handed_in: HandedIn) -> None:
    gate = Gate()

    async def chatty(config: dict[str, Any], ctx: Any) -> None:
        for _ in range(50):
            print("chat")
            await asyncio.sleep(0.001)
        await gate.opened.wait()

    async with engine(chatty, gate, quiet) as it:
        run_id = await it.trigger({"a": "chatty"})
        for _ in range(10):
            await it.run({"b": "quiet"})
        assert handed_in.calls <= 1
        gate.opened.set()
        await it.wait(run_id)
    assert handed_in.of("a") == ["chat"] * 50


async def test_each_attempt_has_a_log_of_its_own(handed_in: HandedIn) -> None:
    async def twice(config: dict[str, Any], ctx: Any) -> None:
        print("attempt", ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError

    async with engine(twice) as it:
        await it.run(
            {"a": {"handler": "twice", "max_retries": 1, "retry": {"base_delay_seconds": 0}}}
        )
    assert [(c.attempt, c.number, c.lines[0].message) for c in handed_in.chunks] == [
        (1, 0, "attempt 1"),
        (2, 0, "attempt 2"),
    ]


async def test_handlers_at_once_never_mix_their_lines(handed_in: HandedIn) -> None:
    async def task(config: dict[str, Any], ctx: Any) -> None:
        for number in range(20):
            sys.stdout.write(f"{ctx.node_id} ")
            await asyncio.sleep(0)
            sys.stdout.write(f"{number}\n")
            await asyncio.to_thread(logging.getLogger("x").info, f"{ctx.node_id} {number}")

    def thread(config: dict[str, Any], ctx: Any) -> None:
        for number in range(20):
            print(ctx.node_id, number)
            other = threading.Thread(target=ctx.log.info, args=[f"{ctx.node_id} {number}"])
            other.start()
            other.join()

    async with engine(task, thread) as it:
        nodes = {f"{kind}{n}": kind for kind in ("task", "thread") for n in range(8)}
        await it.run(nodes)
    for name in nodes:
        found = handed_in.of(name)
        assert len(found) == 40
        assert {message.split()[0] for message in found} == {name}


async def test_the_lines_of_a_stopped_handler_are_handed_in(handed_in: HandedIn) -> None:
    entered = asyncio.Event()

    async def waits(config: dict[str, Any], ctx: Any) -> None:
        print("here, ", end="")
        entered.set()
        await asyncio.sleep(3600)

    async with engine(waits) as it:
        run_id = await it.trigger({"a": "waits"})
        await entered.wait()
        await it.commands.cancel(run_id)
        assert await handed_in.until("a", 1) == ["here, "]


async def test_the_lines_of_a_handler_that_is_left_behind_are_handed_in(
    handed_in: HandedIn,
) -> None:
    entered = asyncio.Event()

    async def waits(config: dict[str, Any], ctx: Any) -> None:
        print("here")
        entered.set()
        await asyncio.sleep(3600)

    async with engine(waits) as it:
        await it.trigger({"a": "waits"})
        await entered.wait()
    assert handed_in.of("a") == ["here"]


async def test_what_a_thread_writes_after_its_timeout_is_not_in_the_log(
    handed_in: HandedIn, caplog: pytest.LogCaptureFixture
) -> None:
    release, ended = threading.Event(), threading.Event()

    def stuck(config: dict[str, Any], ctx: Any) -> None:
        print("in time")
        release.wait()
        print("late")
        ended.set()

    async with engine(stuck) as it:
        run = await it.run({"a": {"handler": "stuck", "timeout_seconds": 0.05}})
        release.set()
        await asyncio.to_thread(ended.wait, PATIENCE)
    error = run.node("a").error
    assert error is not None
    assert error["type"] == "timeout"
    first, last = handed_in.of("a")
    assert first == "in time"
    assert re.fullmatch(
        r"still runs in its thread, tests/engine/test_worker_logs.py:\d+ in stuck, beyond its "
        r"timeout of 0.05 s. A thread cannot be stopped: the handler itself has to check "
        r"ctx.cancelled.is_set\(\)",
        last,
    )
    assert handed_in.chunks[-1].lines[-1].level == "WARNING"
    (said,) = [r.getMessage() for r in caplog.records if r.name == "dovetail.worker"]
    assert said == f"run {run.id}, node a: {last.partition('. ')[0]}"


async def test_an_engine_that_has_closed_leaves_print_and_logging_as_they_were(
    handed_in: HandedIn,
) -> None:
    before = sys.stdout, logging.Logger.callHandlers, threading.Thread.start
    async with engine(says) as it:
        assert sys.stdout is not before[0]
        await it.run({"a": "says"})
    assert (sys.stdout, logging.Logger.callHandlers, threading.Thread.start) == before


async def test_nothing_is_captured_that_is_not_the_handlers(
    handed_in: HandedIn, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(says) as it:
        print("of the user's own program")
        logging.getLogger("shop").warning("and its log")
        await it.run({"a": "says"})
        print("and later")
    assert handed_in.of("a") == ["begun", "printed"]
    out = capsys.readouterr().out
    assert out.splitlines() == ["of the user's own program", "printed", "and later"]
