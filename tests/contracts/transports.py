"""Every transport that must keep the transport's promises. The next is one line in `TRANSPORTS`.

A transport has two ends. `Ends` is what the suite needs of both: the orchestrator's, which is the
port, and a worker's, which each transport shapes as it likes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from dovetail.core.events import Token
from dovetail.core.transitions import Dispatch, Stop
from dovetail.engine.ports import Transport
from dovetail.transports.local import LocalTransport

Taken = tuple[str, str, Token]
"""What a worker learns of a published node: its run, its id, its token."""


@dataclass
class Ends:
    transport: Transport
    take: Callable[[int], Awaitable[list[Taken]]]
    """Wait for published nodes and take at most so many."""
    stopped: list[Stop] = field(default_factory=list)
    """The orders to stop that have reached the worker."""


@asynccontextmanager
async def local() -> AsyncIterator[Ends]:
    transport = LocalTransport()

    async def take(limit: int) -> list[Taken]:
        while not (batch := transport.next(limit)):
            await transport.news()
        return [seen(dispatch) for dispatch in batch]

    ends = Ends(transport, take)
    transport.on_stop = ends.stopped.append
    yield ends


def seen(dispatch: Dispatch) -> Taken:
    run, place, token = dispatch
    return run.id, run.graph.nodes[place].id, token


TRANSPORTS: dict[str, Callable[[], AbstractAsyncContextManager[Ends]]] = {
    "local": local,
}
