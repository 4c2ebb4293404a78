"""Who hears what happens: metrics and traces, fed from the events that the stores write.

A store that is listened to tells each event once, when it is written, and only what was moved
through it: so over all processes every event is told by the one that made it. Where nobody
listens a store is not listened to, and pays nothing. What it must not know: what is made of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from dovetail.core.dag import Graph
from dovetail.core.events import Event
from dovetail.core.states import RunStatus
from dovetail.engine.ports import Calls, Sender

REQUEST_ID: ContextVar[str | None] = ContextVar("dovetail_request_id", default=None)
"""Of the request that is being answered, for whatever is logged meanwhile."""

CallersOf = Callable[[Sequence[str]], Awaitable[Sequence[str | None]]]
"""Of each of these runs the `traceparent` that it was asked for under, if there was one."""

_ENDS = {
    "run.completed": RunStatus.COMPLETED,
    "run.failed": RunStatus.FAILED,
    "run.cancelled": RunStatus.CANCELLED,
}


def end_in(events: Sequence[Event]) -> RunStatus | None:
    """How a run ended, if these events end it."""
    return next((_ENDS[event.type] for event in events if event.type in _ENDS), None)


class Listener(Protocol):
    whole_logs: bool
    """Wants the log of a run when the run has ended."""

    def watch_queue(self, depths: Callable[[], Mapping[str, int]]) -> None:
        """Published nodes wait in the memory of this process: `depths` counts them by handler."""
        ...

    def told(self, run_id: str, graph: Graph, events: Sequence[Event]) -> None:
        """These were written just now, in this order."""
        ...

    def took(self, handler: str, seconds: float) -> None:
        """A node ended, so long after its last start."""
        ...

    def caller(self) -> str | None:
        """The `traceparent` of whoever asks for what is being done here at the moment."""
        ...

    def over(self, run_id: str, graph: Graph, log: Sequence[Event], caller: str | None) -> None:
        """A run has ended: all that happened to it, and the `traceparent` it was asked under."""
        ...

    def outputs_wanted(self, graph: Graph) -> Sequence[str] | None:
        """The nodes whose outputs `ended` is to be given; None if it need not be called."""
        ...

    def ended(
        self, run_id: str, graph: Graph, status: RunStatus, outputs: Mapping[str, Any]
    ) -> None:
        """A run has ended so. Of one that completed `outputs` has what was wanted; what can no
        longer be read is not in it. A run that is retried ends again."""
        ...

    def sender(self, sender: Sender, callers_of: CallersOf) -> Sender:
        """One whose tasks say what they belong to, if anybody wants to know."""
        ...

    def calls(self, calls: Calls, caller_of: Callable[[str], str | None] | None = None) -> Calls:
        """Those that tell when a handler ran, if anybody wants to know.

        `caller_of` is where tasks do not say themselves what they belong to.
        """
        ...
