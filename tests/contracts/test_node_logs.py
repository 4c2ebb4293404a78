"""Lines of handlers: every set-up keeps each once, in order, and says what is missing.

Chunks are made by hand. A set-up is where lines are written and where they are read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from dovetail.core.errors import NotFound
from dovetail.core.node_logs import LogChunk, LogLine, StoredChunk, log_page
from dovetail.core.transitions import Cancel, Submit
from dovetail.engine.ports import Records
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.postgres.pool import PostgresPool
from dovetail.stores.redis.logs import LogAppender, log_keys_of
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.redis.store import RedisStore
from dovetail.stores.sqlite.records import SqliteRecords
from dovetail.stores.sqlite.store import SqliteStore
from dovetail.stores.tiered import TieredRecords

from ..services.archive_world import DIAMOND, World, graph, lose_everything

MIB = 1 << 20
GRAPH = graph(DIAMOND)


class Setup:
    """Where lines are written, and where they are read."""

    records: Records

    async def begin(self) -> str:
        raise NotImplementedError

    async def write(self, *chunks: LogChunk, by: int = 0) -> None:
        """As process number `by`; they are where they are read when this returns."""
        raise NotImplementedError


class Sqlite(Setup):
    def __init__(self, stores: Sequence[SqliteStore]) -> None:
        self.stores = stores
        self.records = SqliteRecords(stores[-1])  # of another process than the first writer

    async def begin(self) -> str:
        run_id = os.urandom(16).hex()
        await self.stores[0].create(Submit(run_id, GRAPH, {}), 1000.0)
        return run_id

    async def write(self, *chunks: LogChunk, by: int = 0) -> None:
        store = self.stores[by % len(self.stores)]
        store.log(chunks)
        await store.apply([], 1000.0, durable=True)


class Redis(Setup):
    def __init__(self, pipes: Sequence[PipelinedRedis]) -> None:
        self.pipes = pipes
        self.pipe = pipes[0]
        self.store = RedisStore(self.pipe)
        self.appender = LogAppender(max_bytes=64 * MIB)
        self.records = RedisRecords(self.pipe)

    async def begin(self) -> str:
        run_id = os.urandom(16).hex()
        await self.store.create(Submit(run_id, GRAPH, {}), 1000.0)
        return run_id

    async def write(self, *chunks: LogChunk, by: int = 0) -> None:
        pipe = self.pipes[by % len(self.pipes)]
        await pipe.call_many(self.appender.commands(pipe, chunks))


class Archived(Redis):
    """Read from the archive alone."""

    def __init__(self, pipes: Sequence[PipelinedRedis], pool: PostgresPool) -> None:
        super().__init__(pipes)
        self.world = World(self.pipe, pool)
        self.records = self.world.records

    async def begin(self) -> str:
        return await self.world.begin(GRAPH)

    async def write(self, *chunks: LogChunk, by: int = 0) -> None:
        await super().write(*chunks, by=by)
        await self.archive(*{chunk.run_id for chunk in chunks})

    async def archive(self, *run_ids: str) -> None:
        await self.world.hints.moved(run_ids)
        await self.world.archiver.archive_what_moved()


class Tiered(Archived):
    """Every second write is archived."""

    def __init__(self, pipes: Sequence[PipelinedRedis], pool: PostgresPool) -> None:
        super().__init__(pipes, pool)
        hot = RedisRecords(self.pipe)
        self.records = TieredRecords(pool, self.pipe, hot, self.world.limits)
        self._writes = 0

    async def write(self, *chunks: LogChunk, by: int = 0) -> None:
        await Redis.write(self, *chunks, by=by)
        self._writes += 1
        if self._writes % 2:
            await self.archive(*{chunk.run_id for chunk in chunks})


class Restored(Tiered):
    """And then Redis loses the run, and it is restored."""

    async def archive(self, *run_ids: str) -> None:
        await super().archive(*run_ids)
        for run_id in run_ids:
            if keys := [key async for key in _keys_of_run(self.pipe, run_id)]:
                await self.pipe.call("DEL", *keys)
            self.world.store.forget(run_id)
            await self.world.restorer.restore_lost([run_id])


async def _keys_of_run(pipe: PipelinedRedis, run_id: str) -> AsyncIterator[bytes]:
    for key in await pipe.call("KEYS", f"wf:{{{run_id}}}:*"):
        yield key


@asynccontextmanager
async def sqlite(*_: str) -> AsyncIterator[Setup]:
    with TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            path = Path(folder) / "runs.db"
            yield Sqlite(
                [
                    await stack.enter_async_context(SqliteStore(path, sync="normal"))
                    for _ in range(3)
                ]
            )


@asynccontextmanager
async def _pipes(redis_url: str) -> AsyncIterator[list[PipelinedRedis]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(PipelinedRedis(redis_url)) for _ in range(3)]


@asynccontextmanager
async def redis(redis_url: str, _: str) -> AsyncIterator[Setup]:
    async with _pipes(redis_url) as pipes:
        yield Redis(pipes)


@asynccontextmanager
async def archived(redis_url: str, postgres_url: str) -> AsyncIterator[Setup]:
    async with _pipes(redis_url) as pipes, PostgresPool(postgres_url) as pool:
        yield Archived(pipes, pool)


@asynccontextmanager
async def tiered(redis_url: str, postgres_url: str) -> AsyncIterator[Setup]:
    async with _pipes(redis_url) as pipes, PostgresPool(postgres_url) as pool:
        yield Tiered(pipes, pool)


@asynccontextmanager
async def restored(redis_url: str, postgres_url: str) -> AsyncIterator[Setup]:
    async with _pipes(redis_url) as pipes, PostgresPool(postgres_url) as pool:
        yield Restored(pipes, pool)


SETUPS: dict[str, Callable[[str, str], AbstractAsyncContextManager[Setup]]] = {
    "sqlite": sqlite,
    "redis": redis,
    "archive": archived,
    "tiered": tiered,
}
"""Where nothing is lost, a chunk may be written again, or dropped, at any time."""
WITH_LOSSES = {**SETUPS, "restored": restored}


@pytest.fixture(params=WITH_LOSSES)
async def setup(
    request: pytest.FixtureRequest, redis_url: str, postgres_url: str
) -> AsyncIterator[Setup]:
    async with WITH_LOSSES[request.param](redis_url, postgres_url) as made:
        yield made


@pytest.fixture(params=SETUPS)
async def steady(
    request: pytest.FixtureRequest, redis_url: str, postgres_url: str
) -> AsyncIterator[Setup]:
    async with SETUPS[request.param](redis_url, postgres_url) as made:
        yield made


def lines(*messages: str, level: str = "INFO") -> list[LogLine]:
    return [LogLine(1000.5 + nth, level, "mine", text) for nth, text in enumerate(messages)]


def chunk(run_id: str, number: int, *messages: str, node: str = "a", **more: Any) -> LogChunk:
    given = {"epoch": 1, "attempt": 1, **more}
    return LogChunk(run_id, node, number=number, lines=lines(*messages), **given)


async def read(setup: Setup, run_id: str, **wanted: Any) -> list[StoredChunk]:
    """Page by page, to the end."""
    found: list[StoredChunk] = []
    after = wanted.pop("after", 0)
    while page := await setup.records.logs(run_id, after, **wanted):
        assert all(one.last_seq > after for one in page)
        found += page
        after = page[-1].last_seq
    return found


async def messages(setup: Setup, run_id: str, **wanted: Any) -> list[str]:
    chunks = await read(setup, run_id, **wanted)
    return [line.message for one in chunks for line in one.chunk.lines]


async def numbered(setup: Setup, run_id: str, **wanted: Any) -> list[tuple[int, str]]:
    page = log_page(await read(setup, run_id, **wanted), limit=10**9)
    return [(item["seq"], item["message"]) for item in page.items]


async def test_lines_are_read_as_they_were_written(setup: Setup) -> None:
    run_id = await setup.begin()
    odd = 'NUL \x00, ANSI \x1b[31m, "quotes", 日本, \U0001f600, \n\ttabs'
    line = LogLine(1700000000.25, "WARNING", "a.b", odd, {"n": [1, None, {"x": odd}]})
    await setup.write(LogChunk(run_id, "a", 2, 3, 0, [line], item=7))
    (found,) = await read(setup, run_id)
    assert found.seq == 1
    assert found.chunk == LogChunk(run_id, "a", 2, 3, 0, [line], item=7)


async def test_a_line_that_is_no_text_is_written_as_far_as_it_is_one(setup: Setup) -> None:
    run_id = await setup.begin()
    half = LogLine(1.0, "INFO", "l", "half \udc80 of a pair", {"huge": 1 << 70})
    await setup.write(LogChunk(run_id, "a", 1, 1, 0, [half]), chunk(run_id, 1, "next"))
    assert await messages(setup, run_id) == ["half ? of a pair", "next"]


async def test_each_line_has_the_next_number_of_its_run(setup: Setup) -> None:
    one, other = await setup.begin(), await setup.begin()
    await setup.write(chunk(one, 0, "1", "2", "3"), chunk(other, 0, "of another"))
    await setup.write(chunk(one, 0, "4", node="b"))
    await setup.write(chunk(one, 1, "5", "6"), chunk(one, 1, "7", node="b"))
    assert await numbered(setup, one) == [(n, str(n)) for n in range(1, 8)]
    assert await numbered(setup, other) == [(1, "of another")]


async def test_a_chunk_that_is_written_twice_is_there_once(steady: Setup) -> None:
    run_id = await steady.begin()
    first, second = chunk(run_id, 0, "one"), chunk(run_id, 1, "two")
    await steady.write(first)
    await steady.write(first, second)
    await steady.write(second, first)
    assert await numbered(steady, run_id) == [(1, "one"), (2, "two")]


async def test_attempts_epochs_and_items_are_told_apart(setup: Setup) -> None:
    run_id = await setup.begin()
    await setup.write(chunk(run_id, 0, "first"))
    await setup.write(chunk(run_id, 0, "again", attempt=2))
    await setup.write(chunk(run_id, 0, "retried", epoch=2))
    await setup.write(chunk(run_id, 0, "item 0", item=0), chunk(run_id, 0, "item 1", item=1))
    await setup.write(chunk(run_id, 0, "of b", node="b"))
    every = ["first", "again", "retried", "item 0", "item 1", "of b"]
    assert await messages(setup, run_id) == every
    assert await messages(setup, run_id, node="b") == ["of b"]
    assert await messages(setup, run_id, node="a", attempt=2) == ["again"]
    assert await messages(setup, run_id, epoch=2) == ["retried"]
    assert await messages(setup, run_id, item=0) == ["item 0"]
    assert await messages(setup, run_id, node="a", item=1, epoch=1, attempt=1) == ["item 1"]
    assert await messages(setup, run_id, node="c") == []
    assert await messages(setup, run_id, node="no such:node \x00") == []
    assert await messages(setup, run_id, attempt=1 << 70) == []


async def test_chunks_give_way_to_those_that_drop_them(steady: Setup) -> None:
    run_id = await steady.begin()
    for number in range(4):
        await steady.write(chunk(run_id, number, f"{number}a", f"{number}b"))
    dropping = chunk(run_id, 4, "4", drops=[1], missing_lines=2, missing_bytes=20)
    await steady.write(dropping)
    await steady.write(chunk(run_id, 0, "of another", attempt=2))
    await steady.write(chunk(run_id, 5, "5", drops=[2, 3], missing_lines=6, missing_bytes=60))
    left = ["0a", "0b", "4", "of another", "5"]
    assert await messages(steady, run_id) == left
    found = await read(steady, run_id)
    assert [(one.chunk.number, one.chunk.missing_lines) for one in found] == [
        *((0, 0), (4, 6)),
        *((0, 0), (5, 0)),
    ]
    assert found[1].chunk.missing_bytes == 60
    # A process that repeats its last writes after a break brings nothing back.
    await steady.write(chunk(run_id, 1, "1a", "1b"), dropping)
    assert await messages(steady, run_id) == left
    assert [one.chunk.missing_lines for one in await read(steady, run_id)] == [0, 6, 0, 0]


async def test_what_a_dropped_chunk_dropped_stays_dropped(steady: Setup) -> None:
    run_id = await steady.begin()
    await steady.write(chunk(run_id, 0, "0"), chunk(run_id, 1, "1"))
    await steady.write(
        chunk(run_id, 2, "2", drops=[1], missing_lines=1, missing_bytes=1),
        chunk(run_id, 3, "3", drops=[2], missing_lines=2, missing_bytes=2),
    )
    assert await messages(steady, run_id) == ["0", "3"]
    assert [one.chunk.missing_lines for one in await read(steady, run_id)] == [0, 2]


async def test_lines_that_were_never_written_are_missing_where_they_would_be(steady: Setup) -> None:
    run_id = await steady.begin()
    await steady.write(chunk(run_id, 0, "0"))
    await steady.write(chunk(run_id, 1, "1", missing_lines=10, missing_bytes=100))
    await steady.write(chunk(run_id, 2, "2", missing_lines=10, missing_bytes=100))
    await steady.write(chunk(run_id, 3, "3", missing_lines=15, missing_bytes=150))
    found = await read(steady, run_id)
    assert [one.chunk.missing_lines for one in found] == [0, 10, 0, 5]
    page = log_page(found, node_log_bytes=1 << 20)
    assert [item["message"] for item in page.items] == [
        "0",
        "… 10 lines (100 bytes) are missing here: DOVETAIL_NODE_LOG_BYTES is 1048576",
        *("1", "2"),
        "… 5 lines (50 bytes) are missing here: DOVETAIL_NODE_LOG_BYTES is 1048576",
        "3",
    ]


async def test_a_reader_goes_on_after_any_number(setup: Setup) -> None:
    run_id = await setup.begin()
    for number in range(3):
        texts = [str(3 * number + nth) for nth in range(1, 4)]
        await setup.write(chunk(run_id, number, *texts))
    for after in range(10):
        found = log_page(await read(setup, run_id, after=after), after).items
        assert [item["seq"] for item in found] == list(range(after + 1, 10))
    assert await read(setup, run_id, after=1 << 70) == []


async def test_a_page_has_at_least_one_chunk_and_no_more_bytes_than_asked_for(
    setup: Setup,
) -> None:
    run_id = await setup.begin()
    for number in range(6):
        await setup.write(chunk(run_id, number, "x" * 1000))
    for most, count in ((1, 1), (1500, 1), (2800, 2)):
        page = await setup.records.logs(run_id, 0, max_bytes=most)
        assert len(page) == count or (len(page) == 1 and isinstance(setup, Restored))
    assert len(await read(setup, run_id, max_bytes=2800)) == 6


async def test_writers_at_once_get_numbers_of_their_own(steady: Setup) -> None:
    run_id = await steady.begin()

    async def one(by: int) -> None:
        for number in range(5):
            await steady.write(
                chunk(run_id, number, f"{by}.{number}", "more", node=f"n{by}"), by=by
            )

    await asyncio.gather(*map(one, range(6)))
    found = await numbered(steady, run_id)
    assert [seq for seq, _ in found] == list(range(1, 61))
    assert {text for _, text in found} == {f"{b}.{n}" for b in range(6) for n in range(5)} | {
        "more"
    }
    for by in range(6):
        mine = await messages(steady, run_id, node=f"n{by}")
        assert mine[::2] == [f"{by}.{number}" for number in range(5)]


async def test_an_unknown_run_has_no_log_and_gets_none(setup: Setup) -> None:
    stranger = os.urandom(16).hex()
    await setup.write(chunk(stranger, 0, "late"))
    for run_id in (stranger, "no run \x00", "x" * 100):
        with pytest.raises(NotFound):
            await setup.records.logs(run_id)


async def test_a_run_without_lines_has_an_empty_log(setup: Setup) -> None:
    run_id = await setup.begin()
    assert await setup.records.logs(run_id) == []


# ── Redis ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def hot(redis_url: str) -> AsyncIterator[Redis]:
    async with _pipes(redis_url) as pipes:
        yield Redis(pipes)


@pytest.fixture
async def world(redis_url: str, postgres_url: str) -> AsyncIterator[Tiered]:
    async with _pipes(redis_url) as pipes, PostgresPool(postgres_url) as pool:
        yield Tiered(pipes, pool)


async def size_in_redis(pipe: PipelinedRedis, run_id: str) -> int:
    values = await pipe.call("HVALS", log_keys_of(run_id)[0])
    return sum(map(len, values))


async def test_the_log_of_a_run_is_bounded_in_redis_and_says_what_is_missing(hot: Redis) -> None:
    hot.appender = LogAppender(max_bytes=20_000)
    run_id = await hot.begin()
    for number in range(100):
        await hot.write(chunk(run_id, number, "x" * 1000, str(number)))
        assert await size_in_redis(hot.pipe, run_id) < 21_000
    gone, *left = await read(hot, run_id)
    assert (gone.chunk.node, gone.chunk.lines) == ("", ())
    assert gone.chunk.missing_lines + sum(len(one.chunk.lines) for one in left) == 200
    assert left[-1].last_seq == 200
    assert left[0].seq == gone.seq + 1
    first, *_ = log_page([gone, *left], run_log_bytes=20_000).items
    assert first["message"].endswith("are missing here: DOVETAIL_RUN_LOG_BYTES is 20000")
    assert (first["node"], first["seq"]) == (None, gone.seq - 1)
    # A reader at the end sees only what is new.
    assert await hot.records.logs(run_id, 200) == []


async def test_dropped_chunks_leave_redis(hot: Redis) -> None:
    run_id = await hot.begin()
    await hot.write(chunk(run_id, 0, "first"))
    for number in range(1, 50):
        gone = [] if number < 3 else [number - 2]
        missing = max(0, number - 2)
        given = {"drops": gone, "missing_lines": missing, "missing_bytes": 1000 * missing}
        await hot.write(chunk(run_id, number, "x" * 1000, **given))
    assert await messages(hot, run_id) == ["first", "x" * 1000, "x" * 1000]
    assert await size_in_redis(hot.pipe, run_id) < 3000 + 50 * 150
    assert [one.chunk.missing_lines for one in await read(hot, run_id)] == [0, 47, 0]


async def test_a_late_chunk_does_not_bring_back_a_run_that_was_removed(hot: Redis) -> None:
    run_id = await hot.begin()
    await hot.write(chunk(run_id, 0, "there"))
    await hot.store.apply([Cancel(run_id)], 1001.0)
    await hot.write(chunk(run_id, 1, "of the last attempt"))
    assert await messages(hot, run_id) == ["there", "of the last attempt"]
    records = RedisRecords(hot.pipe, retention_seconds=10.0)
    await records.refresh([run_id])
    await records.expire(2000.0)
    await hot.write(chunk(run_id, 2, "late"))
    assert [key async for key in _keys_of_run(hot.pipe, run_id)] == []
    with pytest.raises(NotFound):
        await hot.records.logs(run_id)


async def test_a_redis_that_has_forgotten_the_script_gets_it_again(hot: Redis) -> None:
    run_id = await hot.begin()
    await hot.write(chunk(run_id, 0, "one"))
    await hot.pipe.call("SCRIPT", "FLUSH")
    await hot.write(chunk(run_id, 1, "two"))
    assert await messages(hot, run_id) == ["one", "two"]


async def test_a_node_is_found_among_many_chunks_of_others(hot: Redis) -> None:
    run_id = await hot.begin()
    for first in range(0, 6000, 1000):
        some = range(first, first + 1000)
        await hot.write(*(chunk(run_id, number, "of b", node="b") for number in some))
    await hot.write(chunk(run_id, 0, "of a"))
    page = await hot.records.logs(run_id, node="a")
    assert [(one.seq, one.chunk.lines[0].message) for one in page] == [(6001, "of a")]


async def test_a_reader_that_has_everything_costs_one_short_command(hot: Redis) -> None:
    run_id = await hot.begin()
    for number in range(20):
        await hot.write(chunk(run_id, number, "x" * 10_000))
    await hot.records.logs(run_id)
    commands, roundtrips = hot.pipe.commands, hot.pipe.roundtrips
    assert await hot.records.logs(run_id, 20) == []
    assert (hot.pipe.commands - commands, hot.pipe.roundtrips - roundtrips) == (1, 1)


# ── the archive ──────────────────────────────────────────────────────────────────────────


async def test_lines_of_a_finished_run_are_archived_before_redis_drops_it(world: Tiered) -> None:
    it = world.world
    run_id = await world.begin()
    await Redis.write(world, chunk(run_id, 0, "first"))
    await it.finish(run_id)
    await it.archiver.archive_what_moved()
    await Redis.write(world, chunk(run_id, 1, "late"))
    it.now += 1000
    await it.archiver.retire()
    assert await messages(world, run_id) == ["first", "late"], "and Redis still has the run"
    assert await it.snapshots.known([run_id])
    await it.archiver.archive_what_moved()
    it.now += 1000
    await it.archiver.retire()
    assert [key async for key in _keys_of_run(world.pipe, run_id)] == []
    assert await numbered(world, run_id) == [(1, "first"), (2, "late")]


async def test_a_redis_that_was_lost_goes_on_behind_the_archived_lines(world: Tiered) -> None:
    it = world.world
    run_id = await world.begin()
    await Redis.write(world, chunk(run_id, 0, "1", "2"))
    await it.do(run_id, "a")
    await it.archiver.archive_what_moved()
    await Redis.write(world, chunk(run_id, 0, "never archived", node="b"))
    await lose_everything(it)
    assert await messages(world, run_id) == ["1", "2"], "while Redis has nothing"
    await it.restorer.restore_lost([run_id])
    await Redis.write(world, chunk(run_id, 0, "3", node="b"), chunk(run_id, 0, "4", node="c"))
    expected = [(n, str(n)) for n in range(1, 5)]
    assert await numbered(world, run_id) == expected
    await it.finish(run_id)
    await it.archiver.archive_what_moved()
    assert await numbered(world, run_id) == expected
    assert [one.seq for one in await it.records.logs(run_id)] == [1, 3, 4]


async def test_lines_that_got_the_numbers_of_lost_ones_are_numbered_again(world: Tiered) -> None:
    """Redis came back without the end of its log, and no event says so."""
    it = world.world
    run_id = await world.begin()
    await Redis.write(world, chunk(run_id, 0, "1", "2"))
    await world.archive(run_id)
    keys = log_keys_of(run_id)
    before = [await world.pipe.call("DUMP", key) for key in keys]
    await Redis.write(world, chunk(run_id, 1, "3", "4"))
    await world.archive(run_id)
    for key, dumped in zip(keys, before, strict=True):
        await world.pipe.call("RESTORE", key, 0, dumped, "REPLACE")
    await Redis.write(world, chunk(run_id, 0, "5", node="b"), chunk(run_id, 1, "6", node="b"))
    await world.archive(run_id)
    expected = [(n, str(n)) for n in range(1, 7)]
    assert await numbered(world, run_id) == expected
    assert [one.seq for one in await it.records.logs(run_id)] == [1, 3, 5, 6]
    await Redis.write(world, chunk(run_id, 2, "7", node="b"))
    await world.archive(run_id)
    assert await numbered(world, run_id) == [*expected, (7, "7")]


async def test_only_what_the_archive_lacks_is_written_in_parts(
    world: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.engine.distributed import archiver

    monkeypatch.setattr(archiver, "MAX_TRANSACTION_BYTES", 25_000)
    it = world.world
    run_id = await world.begin()
    written: list[list[int]] = []
    write_logs = it.archive.write_logs

    async def noted(logs: Any) -> Any:
        written.append([one.seq for log in logs.values() for one in log.chunks])
        return await write_logs(logs)

    monkeypatch.setattr(it.archive, "write_logs", noted)
    for number in range(5):
        await Redis.write(world, chunk(run_id, number, "x" * 10_000))
    await world.archive(run_id)
    assert written == [[1, 2], [3, 4], [5]]
    await Redis.write(world, chunk(run_id, 5, "new"))
    await world.archive(run_id)
    assert written[3:] == [[6]]
    await world.archive(run_id)
    assert len(written) == 4


async def test_an_archiver_that_dies_before_it_says_so_writes_nothing_twice(
    world: Tiered,
) -> None:
    it = world.world
    run_id = await world.begin()
    await Redis.write(world, chunk(run_id, 0, "1"), chunk(run_id, 1, "2"))
    await it.archiver.archive_what_moved()
    await Redis.write(world, chunk(run_id, 2, "3"))
    heads = await it.archive.log_heads([run_id])
    await it.archive.write_logs(await it.snapshots.logs(heads, MIB))  # and there it dies
    await Redis.write(world, chunk(run_id, 3, "4"))
    await world.archive(run_id)
    expected = [(n, str(n)) for n in range(1, 5)]
    assert await numbered(world, run_id) == expected
    assert [one.seq for one in await it.records.logs(run_id)] == [1, 2, 3, 4]


async def test_chunks_that_were_archived_leave_redis_without_a_loss(world: Tiered) -> None:
    world.appender = LogAppender(max_bytes=20_000)
    run_id = await world.begin()
    for number in range(60):
        await Redis.write(world, chunk(run_id, number, "x" * 1000, str(number)))
        if number % 5 == 4:
            await world.archive(run_id)
    found = await read(world, run_id)
    assert [one.chunk.number for one in found] == list(range(60))
    assert not any(one.chunk.missing_lines for one in found)


async def test_lines_go_with_their_run(world: Tiered, tmp_path: Path) -> None:
    run_id = await world.begin()
    await Redis.write(world, chunk(run_id, 0, "x"))
    await world.archive(run_id)
    await world.world.pool.transact(
        lambda c: c.execute("DELETE FROM dovetail.runs WHERE run_id = $1", run_id)
    )
    orphans = (
        "SELECT COUNT(*) FROM dovetail.logs WHERE run NOT IN (SELECT number FROM dovetail.runs)"
    )
    assert await world.world.pool.transact(lambda c: c.fetchval(orphans)) == 0
    async with SqliteStore(tmp_path / "runs.db") as store:
        file = Sqlite([store])
        mine, other = await file.begin(), await file.begin()
        await file.write(chunk(mine, 0, "mine"), chunk(other, 0, "other"))
        await store.transact(lambda c: c.execute("DELETE FROM runs WHERE run_id = ?", (mine,)))
        assert await messages(file, other) == ["other"]
        left = await store.transact(lambda c: c.execute("SELECT COUNT(*) FROM logs").fetchone())
        assert left == (1,)
