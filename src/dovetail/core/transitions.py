"""What may happen to a run, and the shape of what follows.

Eight transitions move a run: submit, claim, renew, complete, fail, reap, cancel, retry. Five
more serve the edges and neither start nor end a handler. `step` holds the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dovetail.core.caching import Caching
from dovetail.core.dag import Graph
from dovetail.core.events import Event, Token
from dovetail.core.run import RunState


class Submit(NamedTuple):
    """A trigger was accepted. (`begin` makes the run; every other transition moves it.)"""

    run_id: str
    graph: Graph
    params: dict[str, Any]
    version: int | None = None
    logged: bool = True
    key: tuple[str, str, str] | None = None
    """An idempotency key: its scope, itself, and the digest of what was asked under it."""
    place: tuple[int, int] | None = None
    """In a batch: the batch's number and the run's place in it."""
    reused: Mapping[str, Any] | None = None
    """Outputs by node of an earlier run: these nodes begin as COMPLETED. Of stores, only memory
    keeps such a run yet."""
    max_bytes: int | None = None
    """What the run's outputs may have together. It is kept with the run: whoever moves the run
    later, or replays it, decides by the same number."""


def bounded_submit(submit: Submit, max_bytes: int | None) -> Submit:
    """With this limit, unless it has one."""
    return submit if submit.max_bytes is not None else submit._replace(max_bytes=max_bytes)


class Claim(NamedTuple):
    """A worker is about to start the node's handler."""

    run_id: str
    node: str
    token: Token
    worker: str
    lease_until: float


class Renew(NamedTuple):
    """The worker still runs the handler."""

    run_id: str
    node: str
    token: Token
    lease_until: float


class Complete(NamedTuple):
    """The handler returned."""

    run_id: str
    node: str
    token: Token
    output: Any
    cache: Caching | None = None
    """How the store keeps the output for other nodes."""


class Fail(NamedTuple):
    """The handler raised or timed out, or the node's config could not be rendered."""

    run_id: str
    node: str
    token: Token
    error: dict[str, Any]
    permanent: bool = False
    after: float | None = None
    at_least: float | None = None
    chance: float = 0.0
    unrendered: bool = False
    """It was not even started."""


class Reap(NamedTuple):
    """The node's lease ran out: its worker is lost."""

    run_id: str
    node: str
    token: Token
    max_crashes: int


class TakeOver(NamedTuple):
    """Whoever drove the run is gone, or lets go of it: what ran is lost, the rest goes on.

    The one transition whose orders are everything that is outstanding, not only what is new:
    nobody else knows them any more.
    """

    run_id: str
    max_crashes: int
    behind: float = 0.0
    """How far the clock stands behind the run's newest event: what waits shall not wait longer
    because somebody set the clock back."""


class Cancel(NamedTuple):
    """Somebody wants the run to stop."""

    run_id: str


class Retry(NamedTuple):
    """Somebody wants the run to go on after its end, `from_node` again if given."""

    run_id: str
    from_node: str | None = None


class Park(NamedTuple):
    """The node's rate limit has no token before `until`: it gives its slot back.

    Of a node that is parked already: it need not wait any longer than that.
    """

    run_id: str
    node: str
    token: Token
    until: float


class Wake(NamedTuple):
    """A parked node or one that backs off has waited long enough."""

    run_id: str
    node: str
    token: Token


class Progress(NamedTuple):
    """The handler told how far it is."""

    run_id: str
    node: str
    token: Token
    fraction: float
    message: str = ""


class Recall(NamedTuple):
    """The node's output was found in the node cache: no start is needed."""

    run_id: str
    node: str
    token: Token
    output: Any


Transition = (
    Claim
    | Renew
    | Complete
    | Fail
    | Reap
    | TakeOver
    | Cancel
    | Retry
    | Park
    | Wake
    | Progress
    | Recall
)


class Dispatch(NamedTuple):
    """An order: publish this QUEUED node."""

    run: RunState
    place: int
    token: Token


class Stop(NamedTuple):
    """An order: tell this running handler to stop."""

    run_id: str
    node: str
    token: Token


class Decision:
    """What a transition changed, and the orders that follow from it."""

    __slots__ = ("changed", "dispatch", "ended", "events", "stop", "wake")

    def __init__(self) -> None:
        self.changed: list[int] = []
        """Nodes that moved, for a store to write down; one may stand here twice. A changed
        `waiting` alone is not listed: it follows from the parents' states."""
        self.events: list[Event] = []
        self.dispatch: list[Dispatch] = []
        """In this order."""
        self.wake: Sequence[tuple[float, Wake]] = ()
        """Transitions to apply at a time."""
        self.stop: Sequence[Stop] = ()
        self.ended = False
        """The run finished: its status is final and nothing of it runs."""

    def __bool__(self) -> bool:
        return bool(self.changed or self.events)


NOTHING = Decision()
"""Refused: late, repeated or lost."""

TAKEN = Decision()
"""A claim or a result that was taken where nobody writes down who moved, and that is all."""
TAKEN.changed.append(0)
