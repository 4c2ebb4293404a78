"""Events on a Redis stream, of any Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from dovetail.core.errors import StoreError
from dovetail.engine.event_export import SinkError
from dovetail.redis_client.pipelined import Command, PipelinedRedis

PATIENCE_SECONDS = 5.0


class RedisStreamSink:
    """`max_length` is how many of the newest events the stream keeps, about; None for all."""

    def __init__(self, url: str, stream: str, max_length: int | None) -> None:
        self._url = url
        self._stream = stream
        self._max_length = max_length
        self._redis: PipelinedRedis | None = None

    async def write(self, records: Sequence[dict[str, Any]]) -> None:
        bound: Command = ()
        if self._max_length is not None:
            bound = ("MAXLEN", "~", self._max_length)
        commands: list[Command] = [
            (
                *("XADD", self._stream, *bound, "*", "run_id", record["run_id"]),
                *("workflow", record["workflow"], "type", record["type"]),
                *("event", orjson.dumps(record)),
            )
            for record in records
        ]
        try:
            if self._redis is None:
                redis = PipelinedRedis(self._url, patience=PATIENCE_SECONDS)
                self._redis = await redis.__aenter__()
            await self._redis.call_many(commands)
        except StoreError as error:
            await self.close()
            raise SinkError(f"the Redis stream {self._stream}: {error}") from error

    async def close(self) -> None:
        if self._redis is not None:
            redis, self._redis = self._redis, None
            await redis.__aexit__(None, None, None)
