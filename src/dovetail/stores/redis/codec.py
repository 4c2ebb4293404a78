"""Transitions as the scripts in `lua/` take them, and the scripts' replies as decisions of the
core.

A node is its index in the definition. A transition carries the part of the graph that its rule
needs: the children of a completed node, the retries of a failed one. An item of a mapped node has a
place beyond every index (`item_place`), so that its states, events and orders are those of a node
under another number.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import orjson

from dovetail.core.audit.replay import KINDS
from dovetail.core.dag import Graph, NodeSpec
from dovetail.core.effects import failure_data
from dovetail.core.events import Event, Token
from dovetail.core.items import PLACES, item_name, item_place, split_name, split_place
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import NodeStatus, Reason, RunStatus
from dovetail.core.templates import Condition, compile_config
from dovetail.core.transitions import (
    NOTHING,
    Cancel,
    Complete,
    Decision,
    Dispatch,
    Expand,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Renew,
    Retry,
    Stop,
    TakeOver,
    Transition,
    Wake,
)
from dovetail.redis_client.pipelined import load_script
from dovetail.stores.redis.packed import KINDS as PACKED_KINDS
from dovetail.stores.redis.packed import usual_event

BESIDE_A_RUN = ("caller", "logs", "logs:seq", "exported")
"""Keys of a run that its rules do not need. They are deleted with it."""

Fields = dict[str, Any]


def keys_of(run_id: str) -> list[str]:
    return [f"wf:{{{run_id}}}:{part}" for part in PARTS]


def all_keys_of(run_id: str) -> list[str]:
    """Everything that belongs to a run, `meta` first: what is deleted with it."""
    return [f"wf:{{{run_id}}}:{part}" for part in (*PARTS, *BESIDE_A_RUN)]


def pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The fields of a hash, or the members and scores of a sorted set, as Redis replies them."""
    return zip(flat[::2], flat[1::2], strict=True)


def new_nonce() -> int:
    """A random number that tells tokens apart."""
    return int.from_bytes(os.urandom(6), "big") | 1


@cache
def source(*names: str) -> str:
    """A script: these files of `lua/`, joined in this order."""
    return load_script("dovetail.stores.redis", *(f"lua/{name}" for name in names))


_STATUSES = {
    "W": NodeStatus.PENDING,
    "Q": NodeStatus.QUEUED,
    "R": NodeStatus.RUNNING,
    "C": NodeStatus.COMPLETED,
    "F": NodeStatus.FAILED,
    "S": NodeStatus.SKIPPED,
    "X": NodeStatus.CANCELLED,
}
_PHASES = {
    "": None,
    "H": Phase.HELD,
    "P": Phase.PUBLISHED,
    "K": Phase.PARKED,
    "B": Phase.BACKING_OFF,
    "E": Phase.EXPANDING,
}
STATUS_LETTERS = {status: letter for letter, status in _STATUSES.items()}
PHASE_LETTERS = {phase: letter for letter, phase in _PHASES.items()}
SEPARATOR = "|"
PARTS = ("meta", "nodes", "deps", "out", "ends", "events", "held", "maps", "items", "queue")
"""The keys of a run; the last three are for the items of mapped nodes, see items.lua."""
UNIT = 100_000
"""How `deps` counts: so much for a settled parent, one more for a completed one."""
LEFT_PENDING = 6
"""The position, in a decision of the scripts, of the nodes that it leaves pending."""
COUNTS = b"counts"
"""Beside the states of the nodes: see effects.lua."""


def name_at(graph: Graph, place: int) -> str:
    """The name of the node or item at this place."""
    index, item = split_place(place)
    name = graph.nodes[index].id
    return name if item is None else item_name(name, item)


def place_in(graph: Graph, name: str) -> int | None:
    """The reverse of `name_at`; of an item also if there is no such number."""
    index = graph.index.get(name)
    if index is not None:
        return index
    node, item = split_name(name)
    index = graph.index.get(node)
    if item is None or index is None or graph.nodes[index].for_each is None:
        return None
    return item_place(index, item)


def _needs(graph: Graph, spec: NodeSpec) -> tuple[int, ...]:
    reads = [graph.index[name] for name in spec.config.reads if name in graph.index]
    if spec.for_each is not None:  # inputs do not travel with items, and `item` hides a node
        hidden = ("item", "index")
        return tuple(dict.fromkeys(index for index in reads if graph.nodes[index].id not in hidden))
    return tuple(dict.fromkeys([*spec.parents, *reads]))


def _list_needs(graph: Graph, spec: NodeSpec) -> tuple[int, ...]:
    if spec.for_each is None or graph.workflow is None:
        return ()
    given = graph.workflow.nodes[spec.index].for_each
    reads = () if given is None else compile_config({"items": given.items}).reads
    return tuple(sorted(graph.index[name] for name in reads if name in graph.index))


def _is_plain(graph: Graph, spec: NodeSpec, needs: Sequence[int]) -> bool:
    return (
        graph.max_concurrency is None  # else whether there is room is for the script to say
        and spec.condition is None
        and spec.for_each is None
        and spec.cache_ttl is None
        and len(needs) == len(spec.parents)
    )


def _asks(graph: Graph, spec: NodeSpec) -> tuple[int, ...]:
    if not isinstance(spec.condition, Condition):  # it has none: functions are in no store
        return ()
    names = dict.fromkeys(read.name for read in spec.condition.reads)
    return tuple(graph.index[name] for name in names if name in graph.index)


WIDE = 8
MAX_NODES_BELOW = 64
"""How many nodes below a skipped node a call describes to Redis: it must not grow with the graph. A
skip that goes beyond them is continued from there."""


class GraphShape:
    """A graph as the scripts see it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        conditional = [int(spec.condition is not None) for spec in graph.nodes]
        self._children = [
            [
                [child, len(graph.nodes[child].parents), conditional[child]]
                for child in spec.children
            ]
            for spec in graph.nodes
        ]
        self._conditional = conditional
        self._whole: bytes | None = None
        flags = "".join("1" if spec.allow_failure else "0" for spec in graph.nodes)
        self.allowed = flags if "1" in flags else ""
        """A digit for each node, 1 if its failure is allowed; empty if that is so of no node."""
        flags = "".join("0" if spec.for_each is None else "1" for spec in graph.nodes)
        self.mapped = flags if "1" in flags else ""
        """A digit for each node, 1 if it is mapped; empty if no node is."""
        self.list_needs = [_list_needs(graph, spec) for spec in graph.nodes]
        """Of each node, the nodes that its list reads, if it is mapped."""
        self.children_text = [
            "?"
            if not all(graph.nodes[child].is_direct for child in spec.children)
            else ",".join(f"{child}:{len(graph.nodes[child].parents)}" for child in spec.children)
            for spec in graph.nodes
        ]
        """As `complete_many.lua` takes them."""
        self.needs = [_needs(graph, spec) for spec in graph.nodes]
        """Of each node, the nodes whose outputs its message needs."""
        self.asks = [_asks(graph, spec) for spec in graph.nodes]
        """Of each node, the nodes that its condition reads."""
        plain = [_is_plain(graph, *both) for both in zip(graph.nodes, self.needs, strict=True)]
        self.predictable = [
            tuple((c, len(graph.nodes[c].parents)) for c in spec.children if plain[c])
            for spec in graph.nodes
        ]
        """Of each node, the children for which the outputs of their parents are enough to make
        their messages, and how many parents they have."""
        self.is_wide = any(len(several) > WIDE for several in (graph.roots, *self._children))
        self.roots_text = ",".join(map(str, graph.roots))
        self.conditional_root = not all(graph.nodes[root].is_direct for root in graph.roots)
        self.predictable_roots = [root for root in graph.roots if plain[root]]
        if self.conditional_root:
            self.predictable_roots = []

    def children(self, index: int) -> list[list[int]]:
        return self._children[index]

    def needs_of(self, order: Dispatch) -> tuple[int, ...]:
        """The nodes whose outputs are needed to publish a node or an item, or to expand a node."""
        _, index, _, item = order
        is_expansion = item is None and self.is_mapped(index)
        return self.list_needs[index] if is_expansion else self.needs[index]

    def is_mapped(self, index: int) -> bool:
        return self.mapped[index : index + 1] == "1"

    def request(self, moves: Sequence[Fields]) -> bytes:
        """These transitions as `apply.lua` takes them."""
        body: Fields = {"moves": moves}
        if self.allowed:
            body["allowed"] = self.allowed
        if self.mapped:
            body["mapped"] = self.mapped
            owners = {split_place(move["i"])[0] for move in moves if "i" in move}
            body["children"] = {str(i): self._children[i] for i in owners if self.is_mapped(i)}
        return orjson.dumps(body)

    def families(self, ready: Iterable[int], skipped: Iterable[int]) -> dict[str, list[Any]]:
        """What `settle.lua` has to know of the graph: of these nodes, and of those near below the
        ones that will be skipped, because a skip may go on there."""
        known = dict.fromkeys(ready)
        todo, most = deque(skipped), len(known) + MAX_NODES_BELOW
        while todo and len(known) < most:
            for child, *_ in self._children[todo.popleft()]:
                if child not in known and len(known) < most:
                    known[child] = None
                    todo.append(child)
        return {str(index): self._family(index) for index in known}

    def _family(self, index: int) -> list[Any]:
        parents = len(self.graph.nodes[index].parents)
        return [parents, self._conditional[index], self._children[index]]

    @property
    def whole(self) -> bytes:
        """Everything a rule may ask for. Made when one does."""
        if self._whole is None:
            nodes = self.graph.nodes
            self._whole = orjson.dumps(
                {
                    "children": [spec.children for spec in nodes],
                    "parents": [spec.parents for spec in nodes],
                    "conditional": self._conditional,
                    "once": [int(spec.at_most_once) for spec in nodes],
                }
            )
        return self._whole


# ── transitions for the scripts ──────────────────────────────────────────────────────────


@lru_cache(64)
def time_text(seconds: float) -> str:
    """Cached, because transitions that are applied together have the same time."""
    return "1e999" if seconds == math.inf else repr(float(seconds))


def encode_transition(move: Transition, shape: GraphShape, now: float, nonce: int) -> Fields:
    """What `apply.lua` takes of a transition whose node the graph has."""
    fields: Fields = {"kind": KINDS[type(move)], "now": time_text(now), "nonce": str(nonce)}
    if isinstance(move, Cancel | TakeOver):
        return fields | _MAKERS[type(move)](move, shape, -1)
    if isinstance(move, Retry):
        return fields | _retry(move, shape)
    place = place_in(shape.graph, move.node)
    assert place is not None  # noqa: S101 - the caller has looked
    epoch, attempt, token_nonce = move.token
    fields |= {"i": place, "te": epoch, "ta": attempt, "n": str(token_nonce)}
    make = _MAKERS.get(type(move))
    return fields if make is None else fields | make(move, shape, split_place(place)[0])


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _complete(move: Complete | Recall, shape: GraphShape, index: int) -> Fields:
    return {"output": _json(move.output), "children": shape.children(index)}


def _fail(move: Fail, shape: GraphShape, index: int) -> Fields:
    spec = shape.graph.nodes[index]
    fields = _error_fields(move.error) | {
        "permanent": move.permanent,
        "unrendered": move.unrendered,
        "max_retries": spec.max_retries,
        "base": spec.retry.base_delay_seconds,
        "cap": spec.retry.max_delay_seconds,
        "jitter": spec.retry.jitter,
        "chance": move.chance,
    }
    if move.after is not None:
        fields["after"] = move.after
    if move.at_least is not None:
        fields["at_least"] = move.at_least
    return fields


def _error_fields(error: dict[str, Any]) -> Fields:
    """The error itself, and the traceback beside it."""
    return {name: _json(value) for name, value in failure_data(error).items()}


def _reap(move: Reap, shape: GraphShape, index: int) -> Fields:
    once = shape.graph.nodes[index].at_most_once
    return {"max_crashes": move.max_crashes, "once": once}


def _retry(move: Retry, shape: GraphShape) -> Fields:
    if move.from_node is None:
        return {}
    return {"from": shape.graph.index[move.from_node], "name": _json(move.from_node)}


def _park(move: Park, shape: GraphShape, index: int) -> Fields:
    tag = shape.graph.nodes[index].resource_tag
    return {"until": time_text(move.until), "tag": _json(tag)}


def _expand(move: Expand, shape: GraphShape, index: int) -> Fields:
    spec = shape.graph.nodes[index].for_each
    if move.error is not None:
        return _error_fields(move.error)
    if spec is None:  # which is refused: it is no mapped node
        return {"total": move.total}
    tolerated = spec.tolerated(move.total)
    return {"total": move.total, "window": spec.window, "tolerated": tolerated}


def _progress(move: Progress, shape: GraphShape, index: int) -> Fields:
    return {"data": _json({"fraction": move.fraction, "message": move.message})}


_MAKERS: dict[type, Callable[[Any, GraphShape, int], Fields]] = {
    Renew: lambda move, shape, index: {"lease": time_text(move.lease_until)},
    Complete: _complete,
    Recall: _complete,
    Fail: _fail,
    Reap: _reap,
    TakeOver: lambda move, shape, _: {
        "max_crashes": move.max_crashes,
        "behind": repr(move.behind),
    },
    Cancel: lambda move, shape, _: {},
    Expand: _expand,
    Park: _park,
    Progress: _progress,
}


# ── decisions and runs from their replies ────────────────────────────────────────────────


def decode_decision(
    answer: Sequence[Any], run: RunState, seq: int, *, usual: bool = True
) -> Decision:
    """`seq` is of the last event before it. Without `usual`, the usual events of items are left
    out."""
    changed, events, dispatch, wake, stop, ended, _ = answer
    if not (changed or events or dispatch):
        return NOTHING
    graph = run.graph
    decision = Decision()
    tokens: dict[tuple[Any, ...], Token] = {}  # siblings share one: they travel together
    decision.changed = [int(place) for place in changed]
    decision.events = [
        event_of(text, n, graph)
        for n, text in enumerate(events, seq + 1)
        if usual or text[:1] not in PACKED_KINDS
    ]
    decision.dispatch = [
        dispatch_of(run, int(place), tokens.setdefault((*token,), _token(token)))
        for place, *token in dispatch
    ]
    decision.wake = [
        (float(order[0]), Wake(run.id, name_at(graph, int(order[1])), _token(order[2:])))
        for order in wake
    ]
    decision.stop = [
        Stop(run.id, name_at(graph, int(order[0])), _token(order[1:])) for order in stop
    ]
    decision.ended = bool(ended)
    return decision


def dispatch_of(run: RunState, place: int, token: Token) -> Dispatch:
    index, item = split_place(place)
    return Dispatch(run, index, token, item)


def joined(first: Decision, then: Decision) -> Decision:
    """Two halves of one decision: a condition had to be asked for in between."""
    if not first:
        return then
    first.changed += then.changed
    first.events += then.events
    first.dispatch += then.dispatch
    first.wake = [*first.wake, *then.wake]
    first.stop = [*first.stop, *then.stop]
    first.ended = first.ended or then.ended
    return first


def _token(parts: Sequence[Any]) -> Token:
    epoch, attempt, nonce = parts
    return Token(int(epoch), int(attempt), int(nonce))


def event_of(text: bytes, seq: int, graph: Graph) -> Event:
    if text[:1] in PACKED_KINDS:
        at, usual, first, item, number, worker = usual_event(text)
        return Event(seq, at, usual, first, name_at(graph, item), number, worker)
    time, kind, epoch, place, attempt, data = orjson.loads(text)
    if data is not None:
        if "at" in data:
            data = {"error": run_error(data, graph)}
        if "cause" in data:
            data = {**data, "cause": graph.nodes[data["cause"]].id}
    name = None if place is None else name_at(graph, place)
    return Event(seq, float(time), kind, epoch, name, attempt, data)


def run_error(failure: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """The error of a run, with the id of its node instead of the index."""
    return {**failure["error"], "node": graph.nodes[failure["at"]].id}


def run_of(
    run: RunState,
    meta: dict[bytes, bytes],
    states: dict[bytes, bytes],
    counts: dict[bytes, bytes],
    outputs: Mapping[int, bytes],
    ends: dict[bytes, bytes],
    seq: int,
) -> RunState:
    """Fill a run that was just made with what its keys say."""
    run.status = RunStatus(meta[b"status"].decode())
    run.epoch = int(meta[b"epoch"])
    run.started_at = float(meta[b"created_at"])
    run.finished_at = float(meta[b"finished_at"]) if meta[b"finished_at"] else None
    run.seq = seq
    run.forked_from = meta[b"forked_from"].decode() if b"forked_from" in meta else None
    run.unfinished, run.active = int(meta[b"unfinished"]), int(meta[b"active"])
    run.failed, run.cancelled = int(meta.get(b"failed", 0)), int(meta.get(b"cancelled", 0))
    if b"max_bytes" in meta:
        run.kept_bytes, run.max_bytes = int(meta[b"kept_bytes"]), int(meta[b"max_bytes"])
    if error := meta.get(b"error"):
        run.error = run_error(orjson.loads(error), run.graph)
    for key, text in states.items():
        if int(key) < PLACES:
            run.nodes[int(key)] = node_of(text.decode())
    for index, (spec, node) in enumerate(zip(run.graph.nodes, run.nodes, strict=True)):
        if node.status is NodeStatus.PENDING:
            settled, completed = divmod(int(counts.get(b"%d" % index, 0)), UNIT)
            node.waiting = len(spec.parents) - settled
            node.fed = completed > 0
    for place, output in outputs.items():
        if place < PLACES:
            run.nodes[place].output = orjson.loads(output)
            if run.max_bytes is not None:
                run.nodes[place].size = len(output)
    for key, ending in ends.items():
        if int(key) < PLACES:
            fill_end(run.nodes[int(key)], ending, run.graph)
    run.held = [i for i, node in enumerate(run.nodes) if node.phase is Phase.HELD]
    return run


def take_counts(states: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """What is counted of a run, out of what Redis has of its nodes."""
    unfinished, active, rest = states.pop(COUNTS).split(SEPARATOR.encode())
    found = {b"unfinished": unfinished, b"active": active}
    _, *weight = rest.split(b":")
    if weight:  # a run that an earlier version made has no limit
        found[b"kept_bytes"], found[b"max_bytes"] = weight
    return found


def weight_text(kept: int, most: int) -> str:
    """Behind the counts of a run that may keep only so many bytes."""
    return f":{kept}:{most}"


def nodes_of(
    graph: Graph,
    indexes: Iterable[int],
    states: Sequence[bytes | None],
    outputs: Sequence[bytes | None],
    ends: Sequence[bytes | None],
) -> dict[int, NodeState]:
    """These nodes from what their hashes answered; one that is not there is untouched."""
    found = {}
    for index, state, output, ending in zip(indexes, states, outputs, ends, strict=True):
        node = NodeState(1, 0) if state is None else node_of(state.decode())
        if output is not None:
            node.output = orjson.loads(output)
        if ending is not None:
            fill_end(node, ending, graph)
        found[index] = node
    return found


def fill_end(node: NodeState, ending: bytes, graph: Graph) -> None:
    """Fill in reason, cause and error of a node or item, as `ends` has them."""
    reason, cause, error = orjson.loads(ending)
    node.reason = Reason(reason) if reason else None
    node.cause = graph.nodes[cause].id if cause >= 0 else None
    node.error = orjson.loads(error) if error else None


def leases_of(states: Sequence[bytes]) -> list[tuple[int, Token, float]]:
    """The nodes or items in a hash of states that run: their places, their tokens, and the ends of
    their leases."""
    found = []
    for place, state in zip(states[::2], states[1::2], strict=True):
        if state.startswith(b"R|") and place.isdigit():  # no mapped node: that has no lease
            node = node_of(state.decode())
            if node.lease_until is not None:
                found.append((int(place), node.token, node.lease_until))
    return found


def node_status(letter: str) -> NodeStatus:
    """The status that the first field of a node stands for."""
    return _STATUSES[letter]


def node_of(text: str) -> NodeState:
    s, e, a, c, ta, n, aa, an, p, u, lease, w, st, fi = text.split(SEPARATOR)
    node = NodeState(int(e), 0)
    node.status = _STATUSES[s]
    node.attempt, node.crashes = int(a), int(c)
    if n != "0":
        node.token = Token(int(e), int(ta), int(n))
    if an != "0":
        node.answered = Token(int(e), int(aa), int(an))
    node.phase = _PHASES[p]
    node.until = float(u) if u else None
    node.lease_until = float(lease) if lease else None
    node.worker = w or None
    node.started_at = float(st) if st else None
    node.finished_at = float(fi) if fi else None
    return node


# ── a state as the scripts keep it ───────────────────────────────────────────────────────


def node_text(node: NodeState) -> str:
    """The reverse of `node_of`."""
    times = (node.until, node.lease_until)
    return SEPARATOR.join(
        (
            STATUS_LETTERS[node.status],
            *map(str, (node.epoch, node.attempt, node.crashes)),
            *map(str, node.token[1:]),
            *map(str, node.answered[1:]),
            PHASE_LETTERS[node.phase],
            *("" if at is None else time_text(at) for at in times),
            node.worker or "",
            "" if node.started_at is None else time_text(node.started_at),
            "" if node.finished_at is None else time_text(node.finished_at),
        )
    )


def end_text(node: NodeState, graph: Graph) -> str | None:
    """Reason, cause and error of a node, if it has one of them; the reverse of `fill_end`."""
    if node.reason is None and node.cause is None and node.error is None:
        return None
    cause = -1 if node.cause is None else graph.index[node.cause]
    error = "" if node.error is None else _json(node.error)
    return _json([node.reason or "", cause, error])


def event_text(event: Event, graph: Graph) -> bytes:
    """The reverse of `event_of`."""
    _, time, kind, epoch, node, attempt, data = event
    if data is not None and "cause" in data:
        data = {**data, "cause": graph.index[data["cause"]]}
    if data is not None and kind == "run.failed":
        data = failure_of(data["error"], graph)
    place = None if node is None else place_in(graph, node)
    return orjson.dumps([time, kind, epoch, place, attempt, data])


def failure_of(error: Mapping[str, Any] | None, graph: Graph) -> dict[str, Any]:
    """The reverse of `run_error`."""
    if error is None:
        return {"error": None}
    own = {name: value for name, value in error.items() if name != "node"}
    return {"error": own, "at": graph.index[error["node"]]}
