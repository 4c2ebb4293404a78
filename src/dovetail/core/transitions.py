"""The transitions of a run, and the decision that follows from one.

Eight transitions drive a run: submit, claim, renew, complete, fail, reap, cancel, retry. Six more
neither start nor end a handler. `step` has the rules. Where a transition names a node, it may name
an item of a mapped node, as `summarise[3]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dovetail.core.caching import Caching
from dovetail.core.dag import Graph
from dovetail.core.events import Event, Token
from dovetail.core.items import item_name
from dovetail.core.run import NodeState, RunState


class Submit(NamedTuple):
    """A trigger was accepted. (`begin` makes the run; every other transition changes it.)"""

    run_id: str
    graph: Graph
    params: dict[str, Any]
    version: int | None = None
    logged: bool = True
    key: tuple[str, str, str] | None = None
    """An idempotency key: its scope, the key, and the digest of the request."""
    place: tuple[int, int] | None = None
    """In a batch: the batch's number and the run's index in it."""
    reused: Mapping[str, Any] | None = None
    """Outputs of an earlier run by node: these nodes begin as COMPLETED."""
    forked_from: str | None = None
    """The run that this one is a fork of. Without `reused`, the outputs are read from there."""
    reuse: Sequence[str] = ()
    """Of a fork: the nodes that `core/fork.py` found reusable when the fork was accepted."""
    max_bytes: int | None = None
    """The limit on all outputs of the run. It is kept with the run, so that each process and each
    replay decides by the same number."""


def bounded_submit(submit: Submit, max_bytes: int | None) -> Submit:
    """The submit with this limit, unless it has one."""
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
    """`type`, `message`, and what is known of `where` and `traceback`."""
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
    """The run has a new driver: running nodes are lost, the rest goes on.

    Its decision has all outstanding orders, not only new ones: the former driver is gone.
    """

    run_id: str
    max_crashes: int
    behind: float = 0.0
    """How far the clock is behind the run's newest event: a clock that was set back must not make
    nodes wait longer."""


class Cancel(NamedTuple):
    """A caller stops the run."""

    run_id: str


class Retry(NamedTuple):
    """A caller continues the run after its end, from `from_node` if given."""

    run_id: str
    from_node: str | None = None


class Park(NamedTuple):
    """The node's rate limit has no capacity before `until`: the node gives its slot back.

    A node that is parked already may only be rescheduled earlier.
    """

    run_id: str
    node: str
    token: Token
    until: float


class Wake(NamedTuple):
    """The time of a node that is parked or backs off has come."""

    run_id: str
    node: str
    token: Token


class Progress(NamedTuple):
    """The handler reported its progress."""

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


class Expand(NamedTuple):
    """The list of a mapped node was rendered. Only its length is kept: the list can be rendered
    again from what is stored."""

    run_id: str
    node: str
    token: Token
    total: int
    error: dict[str, Any] | None = None
    """Why there is no list; `total` does not matter then."""


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
    | Expand
)


class Dispatch(NamedTuple):
    """An order: publish this QUEUED node or item. A node that is EXPANDING is not published: its
    list is rendered, and `Expand` applied."""

    run: RunState
    node_index: int
    token: Token
    item: int | None = None

    @property
    def name(self) -> str:
        """Of the node or item."""
        node_id = self.run.graph.nodes[self.node_index].id
        return node_id if self.item is None else item_name(node_id, self.item)

    @property
    def state(self) -> NodeState | None:
        """Of the node or item; None for an item that is not in flight any more."""
        node = self.run.nodes[self.node_index]
        if self.item is None:
            return node
        return None if node.items is None else node.items.in_flight.get(self.item)


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
        """Nodes that a store must write; a node may be listed twice. A node of which only
        `waiting` changed is not listed: it follows from the parents' states. For an item its node
        is listed."""
        self.events: list[Event] = []
        self.dispatch: list[Dispatch] = []
        """In this order."""
        self.wake: Sequence[tuple[float, Wake]] = ()
        """Transitions to apply at a time."""
        self.stop: Sequence[Stop] = ()
        self.ended = False
        """The run is finished: its status is final and none of its nodes is running."""

    def __bool__(self) -> bool:
        return bool(self.changed or self.events)


class RetryDecision(Decision):
    """Also what the retry reset, for the journal."""

    __slots__ = ("kept", "reset")

    def __init__(self, reset: list[int], kept: list[int]) -> None:
        super().__init__()
        self.reset = reset
        self.kept = kept
        """The mapped nodes among them whose completed items stay completed."""


NOTHING = Decision()
"""The transition was refused: it is late or repeated."""

TAKEN = Decision()
"""An accepted claim or result of a run without a log: the store need not write it."""
TAKEN.changed.append(0)
