"""Lines of handlers in Redis: written with results, read by number, handed to the archive.

A chunk is one value, so that it is written and read without a look at its lines. The keys of a log
are in the slot of its run, and a late chunk does not bring a run back that is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import orjson

from dovetail.core.node_logs import LogChunk, StoredChunk, decode_lines, encode_lines
from dovetail.engine.distributed.archiver import (
    LogHead,
    LostLines,
    UnarchivedChunk,
    UnarchivedLog,
)
from dovetail.redis_client.pipelined import Argument, Command, PipelinedRedis
from dovetail.stores.redis.codec import pairs, source

MAX_ON_THEIR_WAY = 16 << 20
MAX_LOOKED_AT = 5000
"""Chunks that one call of a script looks at: others wait meanwhile."""


log = logging.getLogger("dovetail.store")


def log_keys_of(run_id: str) -> list[str]:
    return [f"wf:{{{run_id}}}:logs", f"wf:{{{run_id}}}:logs:seq"]


def _keys(run_id: str) -> list[str]:
    return [f"wf:{{{run_id}}}:meta", *log_keys_of(run_id)]


class LogReading(NamedTuple):
    """Chunks of a run's log in Redis."""

    floor: int
    """Redis may lack lines up to this number."""
    lost: LostLines
    chunks: list[StoredChunk]


class LogAppender:
    """Writes lines of handlers, and waits for nothing."""

    def __init__(
        self, *, max_bytes: int, queueing: Callable[[Iterable[str]], Command] | None = None
    ) -> None:
        """`max_bytes` is what the log of a run may have in Redis; then its oldest lines go. Where
        there is an archive, `queueing` makes the command that queues runs for it."""
        self._max_bytes = max_bytes
        self._queueing = queueing
        self._loaded: dict[PipelinedRedis, int] = {}
        """How often each connection had been lost when its server was given the script."""
        self._on_their_way = 0
        """Bytes."""
        self._has_lost_lines = False

    def write(self, redis: PipelinedRedis, chunks: Sequence[LogChunk], alone: bool = False) -> None:
        """Send these in order with other commands. They are lost if Redis is away for long."""
        commands = self.commands(redis, chunks, alone)
        size = sum(len(word) for one in commands for word in one if isinstance(word, str | bytes))
        if self._on_their_way + size > MAX_ON_THEIR_WAY:
            self._lose("Redis is away, or slow")
            return
        self._on_their_way += size
        redis.enqueue(commands, on_done=partial(self._written, size))

    def _written(self, size: int, error: BaseException | None) -> None:
        self._on_their_way -= size
        if error is not None:
            self._lose(error)

    def _lose(self, why: object) -> None:
        """Said once: while Redis is away, an operator has other things to look at."""
        if not self._has_lost_lines:
            self._has_lost_lines = True
            log.warning("lines of logs are lost: %s", why)

    def commands(
        self, redis: PipelinedRedis, chunks: Iterable[LogChunk], alone: bool = False
    ) -> list[Command]:
        """One for each run. Lines that travel `alone` have no result that queues their run for the
        archive."""
        found: list[Command] = []
        if self._loaded.get(redis) != redis.breaks:  # else a result would arrive before its lines
            self._loaded[redis] = redis.breaks
            found.append(("SCRIPT", "LOAD", source("logs_append")))
        by_run = self._arguments(chunks)
        for run_id, args in by_run.items():
            found.append(redis.script_command(source("logs_append"), _keys(run_id), args))
        if alone and self._queueing is not None:
            found.append(self._queueing(by_run))
        return found

    def commands_by_source(self, chunks: Iterable[LogChunk]) -> list[Command]:
        """The same with the script itself, for a connection that does not look at the replies. Runs
        are always queued: such a connection sends lines one by one, with and without a result."""
        script, by_run = source("logs_append"), self._arguments(chunks)
        found: list[Command] = [
            ("EVAL", script, len(keys := _keys(run_id)), *keys, *args)
            for run_id, args in by_run.items()
        ]
        return found if self._queueing is None else [*found, self._queueing(by_run)]

    def _arguments(self, chunks: Iterable[LogChunk]) -> dict[str, list[Argument]]:
        by_run: dict[str, list[Argument]] = {}
        for chunk in chunks:
            by_run.setdefault(chunk.run_id, [self._max_bytes]).extend(_arguments(chunk))
        return by_run


class RedisLogs:
    def __init__(self, redis: PipelinedRedis) -> None:
        self._redis = redis

    async def read(
        self,
        run_id: str,
        after: int,
        max_bytes: int,
        *,
        node: str | None = None,
        epoch: int | None = None,
        attempt: int | None = None,
        item: int | None = None,
    ) -> LogReading | None:
        """Chunks with lines after a number; None without such a run."""
        wanted = ["" if one is None else one for one in (node, epoch, attempt, item)]
        while True:
            args = [after, max_bytes, *wanted, MAX_LOOKED_AT]
            answer = await self._redis.call_script(source("logs_read"), _keys(run_id), args)
            if not answer:
                return None
            floor, *lost, looked_at, found = answer
            chunks = [_stored(run_id, int(seq), value) for seq, value in pairs(found)]
            if chunks or int(looked_at) < 0:
                return LogReading(int(floor), LostLines(*map(int, lost)), chunks)
            after = int(looked_at)

    async def unarchived(
        self, heads: Mapping[str, LogHead], max_bytes: int
    ) -> dict[str, UnarchivedLog]:
        """See `HotRuns.logs`."""
        share = max_bytes // max(1, len(heads))
        asked = []
        for run_id, head in heads.items():
            args: list[Argument] = [head.last_seq, head.name, head.seq, share]
            asked.append(self._redis.script_command(source("logs_unarchived"), _keys(run_id), args))
        answers = zip(heads, await self._redis.call_many(asked), strict=True)
        return {
            run_id: UnarchivedLog(
                LostLines(*map(int, answer[:3])),
                [_unarchived(run_id, int(seq), value) for seq, value in pairs(answer[3:])],
            )
            for run_id, answer in answers
            if answer
        }


def _arguments(chunk: LogChunk) -> Iterable[Argument]:
    """As `logs_append.lua` takes it."""
    head = orjson.dumps(
        [
            *(chunk.node, chunk.epoch, chunk.attempt, chunk.item, chunk.number),
            *(chunk.missing_lines, chunk.missing_bytes, list(chunk.drops)),
        ]
    )
    return (
        *(chunk.attempt_name, chunk.number, len(chunk.lines)),
        *(chunk.missing_lines, chunk.missing_bytes, ",".join(map(str, chunk.drops))),
        *(head, encode_lines(chunk.lines)),
    )


class _Value(NamedTuple):
    lines: int
    missing_lines: int
    missing_bytes: int
    chunk: LogChunk
    content: bytes


def _read(run_id: str, value: bytes) -> _Value:
    """A damaged chunk has no lines, and does not hide the others."""
    try:
        lines, missing_lines, missing_bytes, size, rest = value.split(b" ", 4)
        head, content = rest[: int(size)], rest[int(size) :]
        node, epoch, attempt, item, number, missing, bytes_, drops = orjson.loads(head)
    except (TypeError, ValueError):
        return _Value(0, 0, 0, LogChunk(run_id, "", 0, 0, 0, ()), b"")
    chunk = LogChunk(run_id, node, epoch, attempt, number, (), item, drops, missing, bytes_)
    return _Value(int(lines), int(missing_lines), int(missing_bytes), chunk, content)


def _stored(run_id: str, seq: int, value: bytes) -> StoredChunk:
    found = _read(run_id, value)
    chunk = found.chunk._replace(
        lines=decode_lines(found.content),
        drops=(),
        missing_lines=found.missing_lines,
        missing_bytes=found.missing_bytes,
    )
    return StoredChunk(seq, chunk)


def _unarchived(run_id: str, seq: int, value: bytes) -> UnarchivedChunk:
    found = _read(run_id, value)
    return UnarchivedChunk(seq, found.chunk, found.lines, found.content or None)
