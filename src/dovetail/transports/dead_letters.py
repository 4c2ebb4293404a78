"""Dead letters, shown at `GET /dead-letters`: messages that cannot be read, and nodes that crashed
as many workers as they may. The newest are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import orjson

from dovetail.core.events import Token
from dovetail.core.redaction import Redactor
from dovetail.redis_client.pipelined import Command, PipelinedRedis
from dovetail.transports.messages import shown, stream_of

DEAD = "wf:dead"
MAX_DEAD = 10_000


def burying(
    stream: str, number: str, reason: str, fields: Mapping[str, str], redact: Callable[[str], str]
) -> list[Command]:
    """What keeps a message as a dead letter, without what must not be stored."""

    def text(field: str) -> str:
        return shown(redact(field).encode())

    letter = {
        "stream": stream,
        "id": number,
        "reason": redact(reason),
        "fields": {text(name): text(value) for name, value in fields.items()},
        "time": time.time(),
    }
    return [("LPUSH", DEAD, orjson.dumps(letter)), ("LTRIM", DEAD, 0, MAX_DEAD - 1)]


class DeadLetterQueue:
    """For tasks that are given up."""

    def __init__(self, pipe: PipelinedRedis, redactor: Redactor) -> None:
        self._pipe = pipe
        self._redact = redactor.redact_shown

    async def bury(self, start: tuple[str, str, Token], handler: str, reason: str) -> None:
        run_id, node_id, token = start
        fields = {"run_id": run_id, "node_id": node_id, "token": str(token), "handler": handler}
        # Its messages are acknowledged and have no number any more; its key says what it was.
        number = f"{run_id}:{node_id}:{token.epoch}"
        await self._pipe.call_many(
            burying(stream_of(handler), number, reason, fields, self._redact)
        )
