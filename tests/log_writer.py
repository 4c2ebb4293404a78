"""Writes lines into the log of a run as a worker would, beside the process that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.core.node_logs import LogChunk, LogLine
from dovetail.redis_client.pipelined import PipelinedRedis
from dovetail.stores.redis.logs import LogAppender
from dovetail.stores.sqlite.store import SqliteStore


def lines(*messages: str, level: str = "INFO", **more: Any) -> list[LogLine]:
    return [LogLine(1000.5 + nth, level, "mine", text, **more) for nth, text in enumerate(messages)]


def chunk(
    run_id: str, number: int, *messages: str, node: str = "a", level: str = "INFO", **more: Any
) -> LogChunk:
    given = {"epoch": 1, "attempt": 1, **more}
    return LogChunk(run_id, node, number=number, lines=lines(*messages, level=level), **given)


def write_to_file(path: Path, chunks: Sequence[LogChunk]) -> None:
    async def write() -> None:
        async with SqliteStore(path, sync="normal") as store:
            store.log(chunks)
            await store.apply([], 1000.0, durable=True)

    asyncio.run(write())


def write_to_redis(url: str, chunks: Sequence[LogChunk]) -> None:
    async def write() -> None:
        async with PipelinedRedis(url) as pipe:
            appender = LogAppender(max_bytes=64 << 20)
            await pipe.call_many(appender.commands(pipe, chunks))

    asyncio.run(write())
