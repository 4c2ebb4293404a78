"""Lines of handlers on their way: what they cost, and what is there after kill -9."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dovetail.config import Settings
from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Token
from dovetail.core.node_logs import LogChunk, LogLine
from dovetail.core.transitions import Complete, Submit
from dovetail.engine.ports import Records, Result
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.redis_client.sync import SyncRedis, done
from dovetail.stores.redis import logs as redis_logs
from dovetail.stores.redis.archive import UNARCHIVED
from dovetail.stores.redis.logs import LogAppender, log_keys_of
from dovetail.stores.redis.records import RedisRecords
from dovetail.stores.redis.store import RedisStore
from dovetail.transports.streams.reader import LOG_SECONDS, RESULTS, StreamInbox
from dovetail.transports.streams.sender import WORKERS, StreamReader
from dovetail.wiring.celery import result_command
from dovetail.wiring.distributed import commanding, log_appender, orchestrate
from dovetail.wiring.embedded import attached

from ..servers.redis_server import RedisServer

PATIENCE = 30.0
GRAPH = build_graph(
    Workflow.model_validate({"name": "t", "nodes": [{"id": "a", "handler": "h"}]}), {}
)


def ten_lines(run_id: str, number: int = 0) -> LogChunk:
    lines = [LogLine(1.0, "INFO", "mine", f"line {nth}") for nth in range(10)]
    return LogChunk(run_id, "a", 1, 1, number, lines)


def result(run_id: str) -> Result:
    return Complete(run_id, "a", Token(1, 1, 7), {"n": 1})


class End(NamedTuple):
    """The worker's end of the streams."""

    pipe: PipelinedRedis
    blocking: PipelinedRedis
    inbox: StreamInbox
    run_id: str

    def counts(self) -> tuple[int, int]:
        both = (self.pipe, self.blocking)
        return sum(one.roundtrips for one in both), sum(one.commands for one in both)

    async def sent(self, *chunks: LogChunk) -> tuple[int, int]:
        """Roundtrips and commands that a result takes, with these lines before it."""
        roundtrips, commands = self.counts()
        if chunks:
            self.inbox.log(chunks)
        await self.inbox.send([result(self.run_id)])
        await self.inbox._arrived()
        now_roundtrips, now_commands = self.counts()
        return now_roundtrips - roundtrips, now_commands - commands


@pytest.fixture
async def end(redis_url: str) -> AsyncIterator[End]:
    async with PipelinedRedis(redis_url) as pipe, PipelinedRedis(redis_url) as blocking:
        await RedisStore(pipe).create(Submit("r", GRAPH, {}), 1000.0)
        reader = StreamReader(blocking, pipe, WORKERS, "w1")
        appender = LogAppender(max_bytes=1 << 20)
        yield End(pipe, blocking, StreamInbox(reader, pipe, ["h"], logs=appender.write), "r")
        await pipe.call("FLUSHALL")


async def lines_of(records: Records, run_id: str) -> list[str]:
    found = await records.logs(run_id)
    return [line.message for one in found for line in one.chunk.lines]


async def test_a_node_that_logs_ten_lines_costs_one_command_and_no_roundtrip(end: End) -> None:
    await end.sent(ten_lines(end.run_id))  # Redis knows the script from now on
    roundtrips, commands = await end.sent()
    assert await end.sent(ten_lines(end.run_id, 1)) == (roundtrips, commands + 1)
    assert await end.sent(ten_lines(end.run_id, 2), ten_lines(end.run_id, 3)) == (
        roundtrips,
        commands + 1,
    )
    assert await end.sent() == (roundtrips, commands)
    assert len(await lines_of(RedisRecords(end.pipe), end.run_id)) == 40


@pytest.mark.parametrize("is_reading", [True, False])
async def test_lines_are_written_before_the_result_behind_them(end: End, is_reading: bool) -> None:
    """In one write, whichever connection carries them."""
    writes: list[bytes] = []
    for pipe in (end.pipe, end.blocking):
        assert pipe._wire is not None
        pipe._wire.transport = Tapped(pipe._wire.transport, writes)  # type: ignore[assignment]
    reading = asyncio.create_task(end.inbox.tasks(1)) if is_reading else None
    await asyncio.sleep(0.05)
    end.inbox.log([ten_lines(end.run_id)])
    await end.inbox.send([result(end.run_id)])
    await end.inbox._arrived()
    (both,) = [write for write in writes if b"XADD" in write]
    assert both.index(b"EVALSHA") < both.index(b"XADD")
    assert len(await lines_of(RedisRecords(end.pipe), end.run_id)) == 10
    if reading is not None:
        await reading


class Tapped:
    """A connection whose writes are noted."""

    def __init__(self, transport: Any, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_lines_without_a_result_are_there_a_moment_later(end: End) -> None:
    for number in range(3):
        end.inbox.log([ten_lines(end.run_id, number)])
    assert await lines_of(RedisRecords(end.pipe), end.run_id) == []
    await asyncio.sleep(4 * LOG_SECONDS)
    assert len(await lines_of(RedisRecords(end.pipe), end.run_id)) == 30


async def test_lines_without_a_result_queue_their_run_for_the_archive(end: End) -> None:
    """A node that runs for an hour, and logs: its lines shall survive a loss of Redis."""
    appender = log_appender(Settings(database_url="postgresql://archive"), lambda: 1234.0)
    end.inbox._write = appender.write
    await end.sent(ten_lines(end.run_id))
    assert await end.pipe.call("ZSCORE", UNARCHIVED, end.run_id) is None
    end.inbox.log([ten_lines(end.run_id, 1)])
    await asyncio.sleep(4 * LOG_SECONDS)
    assert float(await end.pipe.call("ZSCORE", UNARCHIVED, end.run_id)) == 1234.0
    assert len(await lines_of(RedisRecords(end.pipe), end.run_id)) == 20


async def test_a_damaged_chunk_does_not_hide_the_others(end: End) -> None:
    await end.sent(ten_lines(end.run_id), ten_lines(end.run_id, 1))
    await end.pipe.call("HSET", log_keys_of(end.run_id)[0], "1", "9 0 0 5 {damaged")
    assert len(await lines_of(RedisRecords(end.pipe), end.run_id)) == 10


async def test_a_worker_that_closes_writes_its_last_lines(end: End) -> None:
    end.inbox.log([ten_lines(end.run_id)])
    await end.inbox.close()
    assert len(await lines_of(RedisRecords(end.pipe), end.run_id)) == 10


async def test_lines_that_redis_refuses_are_lost_with_one_warning(
    end: End, caplog: pytest.LogCaptureFixture
) -> None:
    await end.pipe.call("SET", log_keys_of(end.run_id)[0], "damaged")
    for number in range(3):
        await end.sent(ten_lines(end.run_id, number))
        await asyncio.sleep(0.05)
    assert await end.pipe.call("XLEN", RESULTS) == 3
    assert caplog.text.count("lines of logs are lost") == 1


async def test_lines_do_not_pile_up_while_redis_is_away(
    end: End, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_logs, "MAX_ON_THEIR_WAY", 5000)
    for number in range(20):
        end.inbox.log([ten_lines(end.run_id, number)])
        end.inbox._write_logs(end.pipe)
    assert caplog.text.count("lines of logs are lost") == 1
    await asyncio.sleep(0.1)
    found = len(await lines_of(RedisRecords(end.pipe), end.run_id))
    assert 0 < found < 200
    end.inbox.log([ten_lines(end.run_id, 20)])
    await asyncio.sleep(4 * LOG_SECONDS)
    assert len(await lines_of(RedisRecords(end.pipe), end.run_id)) == found + 10


async def test_a_process_of_celerys_pool_sends_lines_before_the_result(redis_url: str) -> None:
    async with PipelinedRedis(redis_url) as other:
        await RedisStore(other).create(Submit("c", GRAPH, {}), 1000.0)
    pipe = SyncRedis(redis_url)
    appender = LogAppender(max_bytes=1 << 20)
    done(pipe.call_many([("SCRIPT", "FLUSH"), ("SET", log_keys_of("broken")[0], "damaged")]))
    done(pipe.call_many([("HSET", "wf:{broken}:meta", "status", "RUNNING")]))
    roundtrips = pipe.roundtrips
    chunks = [ten_lines("c"), ten_lines("broken")]
    pipe.send_nowait(appender.commands_by_source(chunks), until_accepted=False)
    pipe.send_nowait([result_command(result("c"))])
    assert pipe.roundtrips == roundtrips, "nothing waits for it"
    pipe.flush_acks()  # what was refused is not sent again
    assert len(done(RedisRecords(pipe).logs("c"))) == 1
    assert done(pipe.call("XLEN", RESULTS)) == 1
    done(pipe.call("FLUSHALL"))
    pipe.close()


# ── kill -9 between the lines and the result ─────────────────────────────────────────────

WORKER = """
import asyncio, sys
from pathlib import Path
from dovetail.config import Settings
from dovetail.core.node_logs import LogChunk, LogLine
from dovetail.engine.distributed.task_source import QueueTaskSource
from dovetail.engine.local.task_source import LocalTaskSource
from dovetail.handlers.registry import Registry, describe
from dovetail.wiring.distributed import working
from dovetail.wiring.embedded import embedded

made = []
for kind in (QueueTaskSource, LocalTaskSource):
    def remember(self, *given, _make=kind.__init__, **more):
        _make(self, *given, **more)
        made.append(self)
    kind.__init__ = remember

async def h(config, ctx):
    line = LogLine(1.0, "INFO", "l", "here")
    made[-1].log([LogChunk(ctx.run_id, "a", 1, ctx.attempt, 0, [line])])
    await asyncio.sleep(0.3)
    print(ctx.run_id, flush=True)
    await asyncio.sleep(1000)

async def main(where):
    registry = Registry()
    registry.add(describe(h, name="h"))
    if where.startswith("redis:"):
        async with working(Settings(redis_url=where), registry):
            await asyncio.Event().wait()
    async with embedded(Settings(db=Path(where)), registry) as commands:
        await commands.trigger({"name": "t", "nodes": [{"id": "a", "handler": "h"}]})
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


@asynccontextmanager
async def killed_while_it_runs(where: str) -> AsyncIterator[asyncio.Future[str]]:
    """A worker; the id of the run that it is at when it is killed."""
    words = [sys.executable, "-c", WORKER, where]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout

        def heard() -> str:
            assert process.stdout
            run_id = process.stdout.readline().strip()
            process.send_signal(signal.SIGKILL)
            process.wait()
            return run_id

        try:
            yield asyncio.ensure_future(asyncio.to_thread(heard))
        finally:
            process.kill()


async def test_lines_in_the_file_survive_a_kill_between_them_and_the_result(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs.db"
    async with killed_while_it_runs(str(path)) as killed:
        run_id = await asyncio.wait_for(killed, PATIENCE)
    async with attached(Settings(db=path)) as commands:
        assert await lines_of(commands.records, run_id) == ["here"]


async def test_lines_in_redis_survive_a_kill_between_them_and_the_result() -> None:
    with RedisServer() as server:
        settings = Settings(redis_url=server.url, lease_seconds=2)
        async with AsyncExitStack() as stack:
            serving = asyncio.create_task(orchestrate(settings))
            stack.callback(serving.cancel)
            killed = await stack.enter_async_context(killed_while_it_runs(server.url))
            commands = await stack.enter_async_context(commanding(settings))
            give_up = time.monotonic() + PATIENCE
            while not await commands.records._redis.call("EXISTS", "wf:workers"):  # type: ignore[attr-defined]
                assert time.monotonic() < give_up
                await asyncio.sleep(0.05)
            made = await commands.trigger({"name": "t", "nodes": [{"id": "a", "handler": "h"}]})
            assert await asyncio.wait_for(killed, PATIENCE) == made.run_id
            assert await lines_of(commands.records, made.run_id) == ["here"]
