"""Pages of a log, and a log that is followed: what is read, how often, and where it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from dovetail.core.errors import InvalidParams, NotFound
from dovetail.core.node_logs import LogChunk, LogLine, StoredChunk
from dovetail.engine import commands as module
from dovetail.engine.commands import Commands
from dovetail.engine.ports import LogQuery

from .harness import Gate, engine

SECONDS = 15.0


class Fake:
    """Store and records of one run, whose log is a list of chunks."""

    def __init__(self, *messages: Sequence[str]) -> None:
        self.chunks: list[StoredChunk] = []
        self.reads = 0
        self.opened = 0
        self.finished = asyncio.Event()
        self.is_stored = True
        for one in messages:
            self.add(*one)

    def add(self, *messages: str) -> None:
        seq = self.chunks[-1].last_seq + 1 if self.chunks else 1
        lines = [LogLine(1.0, "INFO", "mine", text) for text in messages]
        self.chunks.append(StoredChunk(seq, LogChunk("run", "a", 1, 1, len(self.chunks), lines)))

    async def logs(self, run_id: str, after: int = 0, **_: Any) -> list[StoredChunk]:
        self.reads += 1
        return [one for one in self.chunks if one.last_seq > after][:1]

    async def ended(self, run_id: str) -> None:
        self.opened += 1
        try:
            await self.finished.wait()
        finally:
            self.opened -= 1

    async def summary(self, run_id: str, most: int | None = None) -> dict[str, Any]:
        is_finished = self.finished.is_set() and self.is_stored
        return {"status": "COMPLETED", "finished_at": 1.0 if is_finished else None}


def commands_of(fake: Any) -> Commands:
    others: dict[str, Any] = dict.fromkeys(
        (
            *("run_feed", "orchestrator", "wait", "clock"),
            *("known_handlers", "default_retries", "limits", "rates"),
        )
    )
    return Commands(store=fake, records=fake, max_crashes=3, digest=cast(Any, None), **others)


def messages(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["message"] for item in items]


# ── pages ────────────────────────────────────────────────────────────────────────────────


async def test_a_page_goes_over_as_many_reads_as_it_needs() -> None:
    commands = commands_of(Fake(["1", "2"], ["3", "4"], ["5"]))
    page = await commands.logs("run", LogQuery(limit=3))
    assert (messages(page["items"]), page["next_cursor"]) == (["1", "2", "3"], "3")
    page = await commands.logs("run", LogQuery(after=3, limit=3))
    assert (messages(page["items"]), page["next_cursor"]) == (["4", "5"], None)


@pytest.mark.parametrize("limit", [4, 5])
async def test_a_full_page_has_a_cursor_only_if_something_follows(limit: int) -> None:
    commands = commands_of(Fake(["1", "2"], ["3", "4"], ["5"]))
    page = await commands.logs("run", LogQuery(limit=limit))
    assert page["next_cursor"] == ("4" if limit == 4 else None)


async def test_a_search_that_finds_little_ends_after_so_many_reads_and_goes_on_there() -> None:
    fake = Fake(*([str(number)] for number in range(40)), ["found"])
    commands = commands_of(fake)
    page = await commands.logs("run", LogQuery(q="found"))
    assert (page["items"], page["next_cursor"]) == ([], str(module.MAX_LOG_READS))
    assert fake.reads == module.MAX_LOG_READS
    found = []
    while page["next_cursor"] is not None:
        page = await commands.logs("run", LogQuery(q="found", after=int(page["next_cursor"])))
        found += messages(page["items"])
    assert found == ["found"]


async def test_a_chunk_that_cannot_be_read_hides_no_other() -> None:
    fake = Fake(["1"])
    broken = StoredChunk(2, LogChunk("run", "a", 1, 1, 1, ()))
    last = StoredChunk(5, LogChunk("run", "a", 1, 1, 2, [LogLine(1.0, "INFO", "mine", "5")]))

    async def logs(run_id: str, after: int = 0, **_: Any) -> list[StoredChunk]:
        ends = [(fake.chunks[0], 1), (broken, 4), (last, 5)]  # a store knows how many lines it has
        return [one for one, last_seq in ends if last_seq > after][:1]

    fake.logs = logs  # type: ignore[method-assign]
    page = await commands_of(fake).logs("run")
    assert (messages(page["items"]), page["next_cursor"]) == (["1", "5"], None)


async def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidParams, match="one of DEBUG, INFO, WARNING, ERROR, CRITICAL"):
        await commands_of(Fake()).logs("run", LogQuery(level="LOUD"))


# ── a log that is followed ───────────────────────────────────────────────────────────────


async def test_a_followed_log_has_the_lines_that_come_with_the_end_of_the_run() -> None:
    fake = Fake(["first"])
    fake.is_stored = False
    found: list[str] = []

    async def follow() -> None:
        found.extend([one["message"] async for one in commands_of(fake).follow_logs("run")])

    async with asyncio.timeout(SECONDS):
        following = asyncio.create_task(follow())
        while not fake.opened:
            await asyncio.sleep(0)
        fake.finished.set()  # known in memory, but not committed yet
        await asyncio.sleep(0.1)
        assert not following.done()
        fake.add("last")
        fake.is_stored = True
        await following
    assert found == ["first", "last"]
    assert fake.opened == 0


async def test_a_followed_log_is_not_read_all_the_time() -> None:
    fake = Fake(["first"])
    feed = commands_of(fake).follow_logs("run")
    assert (await anext(feed))["message"] == "first"
    waiting = asyncio.ensure_future(anext(feed))
    await asyncio.sleep(0)
    before = fake.reads
    await asyncio.sleep(1.2)
    assert fake.reads - before <= 4
    fake.add("second")
    assert (await asyncio.wait_for(waiting, SECONDS))["message"] == "second"
    await feed.aclose()
    assert fake.opened == 0, "nothing waits for the run any more"


async def test_a_followed_log_goes_on_when_the_run_is_retried() -> None:
    fake = Fake(["first"])
    feed = commands_of(fake).follow_logs("run")
    assert (await anext(feed))["message"] == "first"
    waiting = asyncio.ensure_future(anext(feed))
    while not fake.opened:
        await asyncio.sleep(0)
    fake.finished.set()
    await asyncio.sleep(0)
    fake.finished.clear()  # opened again before its end was seen
    await asyncio.sleep(0.2)
    fake.add("again")
    assert (await asyncio.wait_for(waiting, SECONDS))["message"] == "again"
    fake.finished.set()
    assert [item async for item in feed] == []


# ── with handlers that print ─────────────────────────────────────────────────────────────


async def test_what_a_handler_prints_is_in_the_log_when_its_run_has_ended() -> None:
    async def talks(config: dict[str, Any], ctx: Any) -> None:
        print("printed")
        ctx.log.warning("logged", extra={"n": ctx.attempt})
        raise ValueError("broken")

    again = {"max_retries": 1, "retry": {"base_delay_seconds": 0}}
    async with engine(talks) as it:
        run_id = await it.trigger({"a": {"handler": "talks", **again}})
        async with asyncio.timeout(SECONDS):
            followed = [item async for item in it.commands.follow_logs(run_id)]
        stored = (await it.commands.logs(run_id))["items"]
    assert followed == stored
    assert [(one["attempt"], one["level"], one["message"], one["fields"]) for one in stored] == [
        (1, "INFO", "printed", None),
        (1, "WARNING", "logged", {"n": 1}),
        (2, "INFO", "printed", None),
        (2, "WARNING", "logged", {"n": 2}),
    ]


async def test_lines_of_a_handler_that_runs_are_there_within_a_second() -> None:
    gate = Gate()

    async def talks(config: dict[str, Any], ctx: Any) -> None:
        print("before the gate")
        await gate(config, ctx)
        print("behind the gate")

    async with engine(talks) as it:
        run_id = await it.trigger({"a": "talks"})
        async with asyncio.timeout(SECONDS):
            feed = it.commands.follow_logs(run_id, LogQuery(node="a"))
            assert (await anext(feed))["message"] == "before the gate"
            assert not gate.opened.is_set()
            gate.opened.set()
            assert messages([item async for item in feed]) == ["behind the gate"]


async def test_a_followed_log_has_what_was_written_before_the_run_was_cancelled() -> None:
    gate = Gate()

    async def talks(config: dict[str, Any], ctx: Any) -> None:
        print("before")
        await gate(config, ctx)

    async with engine(talks) as it:
        run_id = await it.trigger({"a": "talks"})
        async with asyncio.timeout(SECONDS):
            await gate.entered.wait()
            await it.commands.cancel(run_id)  # before the line was handed in
            followed = [item async for item in it.commands.follow_logs(run_id)]
    assert messages(followed) == ["before"]


async def test_a_run_or_node_that_is_not_there_is_not_found() -> None:
    async with engine() as it:
        run = await it.run({"fetch": "input"})
        with pytest.raises(NotFound, match="did you mean 'fetch'"):
            await it.commands.logs(run.id, LogQuery(node="fetsh"))
        with pytest.raises(NotFound):
            await it.commands.logs("none")
        with pytest.raises(NotFound):
            await anext(it.commands.follow_logs("none"))
        assert await it.commands.logs(run.id, LogQuery(node="fetch")) == {
            "items": [],
            "next_cursor": None,
        }
