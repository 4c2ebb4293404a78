"""The events of a run's log: in order, without gaps, each written with its transition.

The live view, the event stream, the audit trail, metrics and traces all read this log.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from dovetail.core.states import RunStatus

RUN_EVENTS = (
    "run.created",
    "run.started",
    "run.completed",
    "run.failed",
    "run.cancelled",
    "run.retried",
)
NODE_EVENTS = (
    "node.queued",
    "node.started",
    "node.progress",
    "node.cached",
    "node.reused",
    "node.parked",
    "node.retrying",
    "node.lost",
    "node.completed",
    "node.failed",
    "node.skipped",
    "node.cancelled",
    "result.refused",
)
RUN_ENDS = {
    "run.completed": RunStatus.COMPLETED,
    "run.failed": RunStatus.FAILED,
    "run.cancelled": RunStatus.CANCELLED,
}
"""The status of a run by the event that ends it."""


TRACEBACK = "traceback"
"""In the data of `node.retrying` and `node.failed`, beside `error`. Users read it with the attempts
of a node; the events that they see are without it."""


class Event(NamedTuple):
    """One entry of the log. `epoch` is the node's; for a run event the run's."""

    seq: int
    time: float
    type: str
    epoch: int
    node: str | None = None
    attempt: int | None = None
    data: dict[str, Any] | None = None


_TOKEN = re.compile(r"([0-9]{1,15})\.([0-9]{1,15})\.([0-9a-f]{1,16})")


class Token(NamedTuple):
    """Names one start of one node; a message with another token is stale.

    The nonce makes it unique even if a store loses its newest writes and uses an attempt number
    twice.
    """

    epoch: int
    attempt: int
    nonce: int

    def __str__(self) -> str:
        return text_of(self)

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises `ValueError` for a text that is no token of a store."""
        found = _TOKEN.fullmatch(text)
        if found is None:
            raise ValueError(f"no token: {text[:80]!r}")
        epoch, attempt, nonce = found.groups()
        return cls(int(epoch), int(attempt), int(nonce, 16))


@lru_cache(1024)
def text_of(token: Token) -> str:
    """Cached: nodes that become ready together share one token."""
    return f"{token.epoch}.{token.attempt}.{token.nonce:x}"


LATE = 0
"""The nonce of a result from a start that was stopped; no start has such a token."""
NO_START = -2
"""The nonce of a mapped node's token once its items are known: they are started, not the node, so
no message has this token."""
NO_TOKEN = Token(0, 0, 0)
"""The token of a node that was never queued."""
