"""The items of a mapped node: one with `for_each`, whose handler runs once for each item of a list.

A mapped node is one node of the run. Its items are not nodes. The run keeps a status byte for each
item, some counts, and a full state for each item that is *in flight*: begun and not ended. The
window of the node limits how many items are in flight, however long the list is.

In transitions, events and messages an item has a name, such as `summarise[3]`. No node has such a
name, so the two cannot be mixed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.core.errors import one_line
from dovetail.core.events import Token
from dovetail.core.states import NodeStatus, Reason

if TYPE_CHECKING:
    from dovetail.core.run import NodeState

MAX_ITEMS = 100_000
MAX_SHOWN_CHARS = 200
"""Of a template in a message."""
NOT_A_LIST, TOO_LARGE = "not_a_list", "too_large"

WAITING, IN_FLIGHT = 0, 1
ENDED = {NodeStatus.COMPLETED: 2, NodeStatus.FAILED: 3, NodeStatus.CANCELLED: 4}
"""The status bytes: an item waits, is in flight, or has ended with this status."""
_COMPLETED, _FAILED = ENDED[NodeStatus.COMPLETED], ENDED[NodeStatus.FAILED]
_STATUS = {byte: status for status, byte in ENDED.items()}
_REOPENED = bytes(byte if byte in (IN_FLIGHT, _COMPLETED) else WAITING for byte in range(256))
"""The status byte of an item after a retry, by its byte before."""

MAX_DIGITS = len(str(MAX_ITEMS))
"""A number with more digits names no item."""


def item_name(node: str, item: int) -> str:
    return f"{node}[{item}]"


def split_name(name: str) -> tuple[str, int | None]:
    """The id of the node and, in the name of an item, the number of the item."""
    if not name.endswith("]"):
        return name, None
    node, _, number = name[:-1].partition("[")
    is_number = number.isdecimal() and number.isascii() and len(number) <= MAX_DIGITS
    if not is_number or (number[0] == "0" and number != "0") or not node or "]" in node:
        return name, None
    return node, int(number)


def node_id_of(name: str) -> str:
    """The id of the node in the name of an item, in a tenth of the time of `split_name`.

    Nothing is checked: each start of an item calls this.
    """
    return name.partition("[")[0]


PLACES = 1 << 20
"""How many places each node has for its items: more than `MAX_ITEMS`. A place below it is the index
of a node. The scripts of Redis have the same number."""


def item_place(index: int, item: int) -> int:
    """The place of an item: one number for messages and stores, which no node and no other item of
    the run has. The place of a node is its index."""
    return (index + 1) * PLACES + item


def split_place(place: int) -> tuple[int, int | None]:
    """The index of the node and, for the place of an item, the number of the item."""
    if place < PLACES:
        return place, None
    owner, item = divmod(place, PLACES)
    return owner - 1, item


def list_error(value: Any, template: str | None = None) -> dict[str, Any] | None:
    """Why a value cannot be the list of a mapped node; None if it can. `template` made it."""
    if not isinstance(value, list):
        from dovetail.core.templates.operations import kind  # this file is part of a fast start

        what = "this" if template is None else one_line(template, MAX_SHOWN_CHARS)
        is_json = isinstance(value, bool | int | float | str | dict | None)
        found = kind(value) if is_json else f"a Python {type(value).__name__}"
        message = f"for_each needs a list, and {what} is {found}"
        return {"type": NOT_A_LIST, "message": message}
    if len(value) > MAX_ITEMS:
        message = f"for_each has {len(value):,} items; at most {MAX_ITEMS:,} are allowed"
        return {"type": TOO_LARGE, "message": message}
    return None


class ItemEnd(NamedTuple):
    """What is kept of an item that has ended, beside its status and its output."""

    epoch: int
    attempt: int
    worker: str | None
    started_at: float | None
    finished_at: float
    error: dict[str, Any] | None
    reason: Reason | None


class MapState:
    """The items of one mapped node."""

    __slots__ = (
        "completed",
        "ended",
        "failed",
        "in_flight",
        "is_reused",
        "next",
        "outputs",
        "ready",
        "running",
        "statuses",
        "total",
        "values",
    )

    def __init__(self, total: int) -> None:
        self.total = total
        self.statuses = bytearray(total)
        self.next = 0
        """No item before this one waits."""
        self.running = self.completed = self.failed = 0
        self.is_reused = False
        """A fork began with these items: only their outputs are known."""
        self.in_flight: dict[int, NodeState] = {}
        """The items that were begun and have not ended."""
        self.ready: list[int] = []
        """A heap of the items in flight that are held by the run's `max_concurrency`."""
        self.outputs: list[Any] = [None] * total
        """In the order of the items: the output of the node, once the node is completed."""
        self.ended: dict[int, ItemEnd] = {}
        self.values: Sequence[Any] | None = None
        """The list itself, if this process has rendered it. It is no part of the state: any process
        can render it again from what is stored."""

    @classmethod
    def reused(cls, total: int, outputs: Any) -> MapState:
        """The items, all COMPLETED, of a mapped node that a fork reuses."""
        items = cls(total)
        items.is_reused = total > 0
        items.statuses = bytearray([_COMPLETED]) * total
        items.completed = total
        if isinstance(outputs, list):
            items.outputs = outputs
        return items

    def next_waiting(self) -> int | None:
        """The first item that was not begun."""
        found = self.statuses.find(WAITING, self.next)
        self.next = self.total if found < 0 else found
        return None if found < 0 else found

    def begin(self, item: int, state: NodeState) -> None:
        self.statuses[item] = IN_FLIGHT
        self.in_flight[item] = state

    def end(self, item: int, state: NodeState) -> None:
        """The item has ended with the status in `state`; only a compact record of it stays."""
        del self.in_flight[item]
        self.statuses[item] = ENDED[state.status]
        if state.status is NodeStatus.COMPLETED:
            self.completed += 1
            self.outputs[item] = state.output
        elif state.status is NodeStatus.FAILED:
            self.failed += 1
        self.ended[item] = ItemEnd(
            state.epoch,
            state.attempt,
            state.worker,
            state.started_at,
            state.finished_at or 0.0,
            state.error,
            state.reason,
        )

    def first_failed(self) -> int:
        """The failed item with the lowest number, so that timing does not matter."""
        return self.statuses.find(_FAILED)

    def reopen(self) -> None:
        """A retry: every item waits again, unless it is completed or in flight."""
        self.statuses = self.statuses.translate(_REOPENED)
        self.ended = {item: end for item, end in self.ended.items() if self.is_completed(item)}
        self.failed = self.next = 0

    def is_completed(self, item: int) -> bool:
        return self.statuses[item] == _COMPLETED

    def status(self, item: int) -> NodeStatus | None:
        """How the item ended; None if it has not."""
        return _STATUS.get(self.statuses[item])

    def fill_state(self, item: int, state: NodeState) -> NodeState:
        """Fill in the state of an item that is not in flight, from its record; returns it."""
        status, end = self.status(item), self.ended.get(item)
        if status is not None:
            state.status, state.output = status, self.outputs[item]
        if end is not None:
            state.epoch, state.attempt, state.worker, state.started_at = end[:4]
            state.finished_at, state.error, state.reason = end[4:]
            state.token = Token(end.epoch, end.attempt, 0)
        return state

    def counts(self, is_over: bool) -> dict[str, int]:
        """How many items have each status.

        Items that were never begun count as pending, and as cancelled once their node has ended.
        """
        cancelled = self.statuses.count(ENDED[NodeStatus.CANCELLED])
        pending = self.total - self.running - self.completed - self.failed - cancelled
        return {
            "total": self.total,
            "pending": 0 if is_over else pending,
            "running": self.running,
            "completed": self.completed,
            "failed": self.failed,
            "cancelled": cancelled + pending if is_over else cancelled,
        }

    def recount(self) -> None:
        """Derive the counts from the states of the items."""
        self.running = sum(one.status is NodeStatus.RUNNING for one in self.in_flight.values())
        self.completed = self.statuses.count(_COMPLETED)
        self.failed = self.statuses.count(_FAILED)
        self.ready = [item for item, one in self.in_flight.items() if one.phase == "held"]
        heapify(self.ready)

    def snapshot(self) -> dict[str, Any]:
        """Every field, for comparing two stores."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name != "values"}
        kept["in_flight"] = {
            item: state.snapshot() for item, state in sorted(self.in_flight.items())
        }
        kept["statuses"] = bytes(self.statuses)
        kept["ready"], kept["outputs"] = sorted(self.ready), list(self.outputs)
        kept["ended"], kept["next"] = dict(self.ended), self.next_waiting()
        return kept
