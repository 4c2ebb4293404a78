"""One run of the model: `core`'s own state, made hashable, and moved by `core`'s own `step`.

A run is a number here. What it stands for is thawed when a transition is first applied to it, and
the outcome is remembered, so that a million states of the protocol cost a few thousand steps. Each
of these is checked when it is made. Time is abstract: nothing but a lease or a wait looks at the
clock, so a lease is FRESH or EXPIRED, and whatever waits may be woken.

As in Redis, conditions are decided in a second call: the first leaves what became ready `pending`,
and an item of a mapped node has a place beyond those of the nodes. Every list has two items.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import orjson

from dovetail.core import effects, step
from dovetail.core.dag import Graph, NodeSpec
from dovetail.core.events import NO_TOKEN, Token
from dovetail.core.items import WAITING, ItemEnd, MapState, item_name, item_place, split_place
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import FINAL, FINISHED, NodeStatus
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Expand,
    Fail,
    Park,
    Reap,
    Recall,
    Renew,
    Retry,
    Submit,
    Transition,
    Wake,
)

from ..core.invariants import check_run, check_step

NOW, LATER = 0.0, 2.0
EXPIRED, FRESH = 0.0, 1.0
MAX_CRASHES = 2
ITEMS = 2
"""The length of the list of each mapped node."""
OUTPUTS = {"yes": {"go": True}, "no": {"go": False}}
ERROR = {"type": "ValueError", "message": "broken"}
ENDS = ("node.completed", "node.cached", "node.failed", "node.skipped", "node.cancelled")
NODE_FIELDS = NodeState.__slots__
MAP_FIELDS = ("running", "completed", "failed", "total")
RUN_FIELDS = ("status", "epoch", "finished_at", "error", "unfinished", "failed", "cancelled")
REAL_RESOLVE = effects.resolve

Start = tuple[int, Token]
"""A node or an item, by its place, and the token of one start of it."""
Move = tuple[Any, ...]
"""A transition: its kind, then what it is about."""


class Orders(NamedTuple):
    """What a decision asks for; `moved`: the effect says that the run has moved."""

    dispatch: tuple[Start, ...] = ()
    wake: tuple[Start, ...] = ()
    moved: bool = False
    ended: bool = False
    epoch: int = 0


class Outcome(NamedTuple):
    run: int
    taken: bool
    """The run has changed."""
    orders: Orders
    pending: bool
    """Conditions are to be decided before anything follows."""
    wrong: str | None
    """What of the promises is broken."""


class Frozen(NamedTuple):
    """All there is of a run, and, from `starts` on, what only an onlooker knows."""

    fields: tuple[Any, ...]
    nodes: tuple[tuple[Any, ...], ...]
    active: int
    held: tuple[int, ...]
    pending: tuple[int, ...]
    starts: tuple[int, ...]
    """Claims that were granted to each node and item in its epoch, in the order of `places`."""
    granted: tuple[Token, ...]
    """The newest of them."""
    era: int
    """How often Redis lost its newest writes: tokens of different eras have different nonces."""
    remembered: frozenset[Start]
    """What was under way when it last did, as far as it still knows: this may happen again."""


class Facts(NamedTuple):
    """What others ask of a run all the time."""

    known: bool
    epoch: int
    finished: bool
    final: bool
    published: tuple[Start, ...]
    """Mapped nodes whose list must be rendered are among them."""
    waiting: tuple[Start, ...]
    running: tuple[Start, ...]
    expired: tuple[Start, ...]
    """Of the running ones."""
    open: frozenset[Start]
    """Starts that the run still needs a worker for: published or running."""
    pending: tuple[int, ...]
    forgotten: bool
    """Redis once lost its newest writes."""


NO_RUN = 0
ABSENT = Facts(False, 0, False, False, (), (), (), (), frozenset(), (), False)


class PendingRun(RunState):
    """A run as Redis has it: some nodes are ready, and their conditions not decided yet."""

    __slots__ = (*RunState.__slots__, "pending")  # all of them: `snapshot` reads this list


def leave_pending(run: PendingRun, ready: list[int], out: Decision, now: float, nonce: int) -> None:
    """In place of `resolve`: conditions are not for Redis."""
    if not ready or all(spec.condition is None for spec in run.graph.nodes):
        REAL_RESOLVE(run, ready, out, now, nonce)
        return
    run.pending = keep_pending(run.pending, ready)
    out.changed += ready  # so that it is followed even if nothing else was decided


def keep_pending(before: tuple[int, ...], ready: Iterable[int]) -> tuple[int, ...]:
    """What a process left undecided stays so, beside what is new."""
    return tuple(dict.fromkeys((*before, *ready)))


def verdicts_hold(run: PendingRun, epoch: int) -> bool:
    """Whether verdicts that were made in that epoch may be used."""
    return run.epoch == epoch


@contextmanager
def undecided() -> Iterator[None]:
    with (
        patch.object(effects, "resolve", leave_pending),
        patch.object(step, "resolve", leave_pending),
    ):
        yield


class Runs:
    """Every state that the run of one graph was ever seen in."""

    def __init__(self, graph: Graph, *, oracle: bool = True, nonces: bool = True) -> None:
        """`oracle`: compare every step with what the tests of the core expect of it."""
        self.graph = graph
        self.names = {index: spec.id for index, spec in enumerate(graph.nodes)}
        for index, spec in enumerate(graph.nodes):
            if spec.for_each is not None:
                for item in range(ITEMS):
                    self.names[item_place(index, item)] = item_name(spec.id, item)
        self.places = {name: place for place, name in self.names.items()}
        self._slots = {place: slot for slot, place in enumerate(self.names)}
        self.frozen: list[Frozen | None] = [None]
        self.facts: list[Facts] = [ABSENT]
        self._oracle = oracle
        self._nonces = nonces
        self._numbers: dict[Frozen, int] = {}
        self._outcomes: dict[tuple[int, Move], Outcome] = {}
        self._expired: dict[tuple[int, Start], int] = {}

    def apply(self, run: int, move: Move) -> Outcome:
        key = (run, move)
        known = self._outcomes.get(key)
        if known is None:
            known = self._outcomes[key] = self._apply(run, move)
        return known

    def verdicts(self, number: int) -> tuple[tuple[int, bool], ...]:
        """What the conditions of the pending nodes say, as the run is."""
        run = self.thaw(number)
        found = []
        for place in run.pending:
            condition = self.graph.nodes[place].condition
            found.append((place, condition is None or bool(condition(run))))
        return tuple(found)

    def expire(self, number: int, start: Start) -> int:
        """Time passes: the lease of this start is over."""
        known = self._expired.get((number, start))
        if known is None:
            frozen, run = self.frozen[number], self.thaw(number)
            assert frozen is not None
            run.node(self.names[start[0]]).lease_until = EXPIRED
            known = self._number(self.freeze(run, *frozen[STARTS:]))
            self._expired[number, start] = known
        return known

    def spec(self, place: int) -> NodeSpec:
        """The definition of a node, or of the node of an item."""
        return self.graph.nodes[split_place(place)[0]]

    def is_mapped(self, place: int) -> bool:
        """Whether it is a mapped node, and not one of its items."""
        return place < len(self.graph.nodes) and self.graph.nodes[place].for_each is not None

    def forget(self, number: int, lost: int) -> int:
        """Redis comes back as it was at `number`, having been at `lost`."""
        before, after = self.frozen[number], self.frozen[lost]
        assert before is not None
        assert after is not None
        facts = self.facts[number]
        known = facts.open | set(facts.waiting)
        return self._number(before._replace(era=after.era + 1, remembered=known))

    def may_happen_again(self, number: int, start: Start) -> bool:
        """Redis has forgotten what became of this start."""
        frozen = self.frozen[number]
        return frozen is not None and start in frozen.remembered

    # ── one step ─────────────────────────────────────────────────────────────────────────

    def _apply(self, number: int, move: Move) -> Outcome:
        frozen = self.frozen[number]
        if frozen is None:
            if move[0] != "create":
                return Outcome(number, False, Orders(), False, None)
            return self._create()
        if move[0] == "create":
            return Outcome(number, False, Orders(), False, None)
        run = self.thaw(number)
        before = run.snapshot()
        nonce = frozen.era + 1 if self._nonces else 1
        transition: Transition | None = None
        now = LATER if move[0] == "wake" else NOW
        wrong = None
        if move[0] == "settle":
            decision, wrong = self._settle(run, move, nonce)
        else:
            transition = self.transition(move)
            with undecided():
                decision = step.step(run, transition, now, nonce)
        if run.status in FINAL:
            run.pending = ()
        starts, granted = list(frozen.starts), list(frozen.granted)
        if move[0] == "claim" and decision.changed:
            starts[self._slots[move[1]]] += 1
            granted[self._slots[move[1]]] = move[2]
        if move[0] == "retry":
            for slot in self._begins_again(before, run):
                starts[slot], granted[slot] = 0, NO_TOKEN
        after = self.freeze(run, starts, granted, frozen.era, frozen.remembered)
        wrong = wrong or self._judge(frozen, run, after, move, decision)
        if wrong is None and transition is not None and self._oracle:
            wrong = self._compare(before, run, transition, decision, now, frozen)
        return Outcome(
            self._number(after),
            bool(decision.changed),
            self._orders(run, decision),
            bool(run.pending) and bool(decision),
            wrong,
        )

    def _create(self) -> Outcome:
        with undecided(), patch.object(step, "RunState", _new_run):
            run, decision = step.begin(Submit("r", self.graph, {}), NOW, 1)
        assert isinstance(run, PendingRun)
        size = len(self.names)
        frozen = self.freeze(run, [0] * size, [NO_TOKEN] * size, 0, frozenset())
        number = self._number(frozen)
        return Outcome(number, True, self._orders(run, decision), bool(run.pending), None)

    def _settle(self, run: PendingRun, move: Move, nonce: int) -> tuple[Decision, str | None]:
        _, epoch, verdicts = move
        out = Decision()
        if not run.pending or not verdicts_hold(run, epoch):
            return out, None
        reported = dict(verdicts)
        for place, verdict in verdicts:
            condition = self.graph.nodes[place].condition
            if place in run.pending and condition is not None and bool(condition(run)) != verdict:
                return out, f"the condition of {self.names[place]} was decided by other outputs"
        ready = [place for place in run.pending if place in reported]
        run.pending = tuple(place for place in run.pending if place not in reported)
        if ready:
            out.changed += ready
            REAL_RESOLVE(run, ready, out, NOW, nonce)
        return out, None

    def _begins_again(self, before: dict[str, Any], run: PendingRun) -> Iterator[int]:
        """The slots of the nodes and items that a retry has reset."""
        for place, slot in self._slots.items():
            index, item = split_place(place)
            node = run.nodes[index]
            if node.epoch == before["nodes"][index]["epoch"]:
                continue
            # Of a node that keeps its items, those that completed or run stay as they are.
            if item is None or node.items is None or node.items.statuses[item] == WAITING:
                yield slot

    def transition(self, move: Move) -> Transition:
        kind, *about = move
        if kind == "cancel":
            return Cancel("r")
        if kind == "retry":
            return Retry("r", None if about[0] is None else self.names[about[0]])
        name, token = self.names[about[0]], about[1]
        match kind:
            case "claim":
                return Claim("r", name, token, "w", FRESH)
            case "renew":
                return Renew("r", name, token, FRESH)
            case "fail":
                return Fail("r", name, token, ERROR)
            case "reap":
                return Reap("r", name, token, MAX_CRASHES)
            case "park":
                return Park("r", name, token, FRESH)
            case "wake":
                return Wake("r", name, token)
            case "expand":
                return Expand("r", name, token, ITEMS)
            case "recall":
                return Recall("r", name, token, OUTPUTS["yes"])
        return Complete("r", name, token, OUTPUTS[kind])

    def _orders(self, run: PendingRun, decision: Decision) -> Orders:
        return Orders(
            tuple((self.places[order.name], order.token) for order in decision.dispatch),
            tuple((self.places[wake.node], wake.token) for _, wake in decision.wake),
            bool(decision),
            decision.ended,
            run.epoch,
        )

    # ── promises ─────────────────────────────────────────────────────────────────────────

    def _judge(
        self, before: Frozen, run: PendingRun, after: Frozen, move: Move, decision: Decision
    ) -> str | None:
        """What is promised of every step, by any process: seen in states, not in the rules."""
        kind = move[0]
        seqs = [event.seq for event in decision.events]
        if seqs != list(range(1, len(seqs) + 1)) or run.seq != len(seqs):
            return f"events are numbered {seqs}, the run says {run.seq}"
        if not decision.changed and after != before:
            return "a refused transition changed the run"
        was = self.facts[self._numbers[before]]
        if was.finished and kind != "retry" and after != before:
            return "a finished run changed within its epoch"
        if kind == "cancel" and decision.changed and run.unfinished:
            return "a cancel left something unfinished"
        if kind == "claim" and decision.changed and was.final:
            return "a node was started in a run that has failed or ended"
        old = self.thaw(self._numbers[before])
        ended: set[str] = set()
        for event in decision.events:
            if event.node is None or event.type not in ENDS:
                continue
            finished = _state(old, event.node).status in FINISHED and kind != "retry"
            if event.node in ended or finished:
                return f"{event.node} has ended twice in an epoch: {event.type}"
            ended.add(event.node)
        for place, name in self.names.items():
            wrong = self._judge_node(place, _state(old, name), _state(run, name), after, move)
            if wrong is not None:
                return f"{name}: {wrong}"
        if decision.changed and kind in ("reap", *OUTPUTS, "fail"):
            name, token = self.names[move[1]], move[2]
            if before.granted[self._slots[move[1]]] != token:
                return f"{name}: a stale attempt was applied: {token}"
            if kind == "reap" and _state(old, name).lease_until == FRESH:
                return f"{name}: it was taken from a worker that had renewed its lease"
        return None if run.pending else _failing(check_run, run)

    def _judge_node(
        self, place: int, old: NodeState, new: NodeState, after: Frozen, move: Move
    ) -> str | None:
        is_mapped = self.is_mapped(place)
        if move[0] != "retry":
            if old.status in FINISHED and _frozen_node(new) != _frozen_node(old):
                return f"it was {old.status} and changed within its epoch"
        # A mapped node that runs goes on in the epoch of the retry; its items are judged.
        elif old.status is NodeStatus.COMPLETED or (
            old.status is NodeStatus.RUNNING and not is_mapped
        ):
            start, index = move[1], split_place(place)[0]
            below = () if start is None else (start, *self.graph.descendants(start))
            if index not in below and _frozen_node(new) != _frozen_node(old):
                return f"it was {old.status}, and a retry started it again"
        if is_mapped:
            return None
        granted, starts = after.granted[self._slots[place]], after.starts[self._slots[place]]
        if new.status is NodeStatus.RUNNING and new.token != granted:
            return f"a claim was granted that is not of its token {new.token}"
        if starts != new.attempt:
            return f"it was started {starts} times and counts {new.attempt}"
        if self.spec(place).at_most_once and starts > 1:
            return "it was started twice in an epoch, and may be at most once"
        return None

    def _compare(
        self,
        before: dict[str, Any],
        run: PendingRun,
        transition: Transition,
        decision: Decision,
        now: float,
        frozen: Frozen,
    ) -> str | None:
        """With what the tests of the core expect, which know nothing of pending conditions."""
        if frozen.pending or run.pending:
            return None
        return _failing(check_step, before, run, transition, decision, now)

    # ── states as numbers ────────────────────────────────────────────────────────────────

    def thaw(self, number: int) -> PendingRun:
        frozen = self.frozen[number]
        assert frozen is not None
        run = _new_run("r", self.graph, {}, NOW)
        run.started_at = NOW
        for name, value in zip(RUN_FIELDS, frozen.fields, strict=True):
            setattr(run, name, _thawed(value) if name == "error" else value)
        run.nodes = [_thawed_node(values) for values in frozen.nodes]
        run.active, run.held, run.pending = frozen.active, list(frozen.held), frozen.pending
        return run

    def freeze(
        self,
        run: PendingRun,
        starts: Iterable[int],
        granted: Iterable[Token],
        era: int,
        remembered: frozenset[Start],
    ) -> Frozen:
        """Without the number of its newest event, which grows with every refusal."""
        fields = tuple(_frozen(getattr(run, name)) for name in RUN_FIELDS)
        nodes = tuple(map(_frozen_node, run.nodes))
        held = tuple(sorted(run.held))
        known = (run.active, held, run.pending, tuple(starts), tuple(granted), era, remembered)
        return Frozen(fields, nodes, *known)

    def _number(self, frozen: Frozen) -> int:
        number = self._numbers.get(frozen)
        if number is None:
            number = self._numbers[frozen] = len(self.frozen)
            self.frozen.append(frozen)
            self.facts.append(self._facts(number, frozen.era > 0))
        return number

    def _facts(self, number: int, forgotten: bool) -> Facts:
        run = self.thaw(number)
        states = [
            (place, _state(run, name))
            for place, name in self.names.items()
            if not self.is_mapped(place)
        ]
        published = [(place, state) for place, state in states if state.phase is Phase.PUBLISHED]
        published += [
            (i, node) for i, node in enumerate(run.nodes) if node.phase is Phase.EXPANDING
        ]
        running = [(place, state) for place, state in states if state.status is NodeStatus.RUNNING]
        return Facts(
            True,
            run.epoch,
            run.finished,
            run.status in FINAL,
            _starts(published),
            _starts((place, state) for place, state in states if state.until is not None),
            _starts(running),
            _starts((place, state) for place, state in running if state.lease_until == EXPIRED),
            frozenset(_starts((*published, *running))),
            run.pending,
            forgotten,
        )

    def show(self, number: int) -> str:
        if number == NO_RUN:
            return "no run"
        run = self.thaw(number)
        nodes = [
            f"{name} {node.phase or node.status}"
            + (f" {node.token.epoch}.{node.token.attempt}" if node.token != NO_TOKEN else "")
            + (" (lease over)" if node.lease_until == EXPIRED else "")
            for name in self.places
            for node in (_state(run, name),)
        ]
        waits = [self.names[place] for place in run.pending]
        return f"{run.status}: {', '.join(nodes)}" + (f"; undecided {waits}" if waits else "")


STARTS = Frozen._fields.index("starts")


def _new_run(*about: Any) -> PendingRun:
    run = PendingRun(*about)
    run.pending = ()
    return run


def _state(run: PendingRun, name: str) -> NodeState:
    """A node or an item, also one of a list that is not known yet."""
    try:
        return run.node(name)
    except KeyError:
        return NodeState(1, 0)


def _starts(states: Iterable[tuple[int, NodeState]]) -> tuple[Start, ...]:
    return tuple((place, state.token) for place, state in states)


def _frozen_node(node: NodeState) -> tuple[Any, ...]:
    return tuple(_frozen(getattr(node, name)) for name in NODE_FIELDS)


def _thawed_node(values: tuple[Any, ...]) -> NodeState:
    node = NodeState(1, 0)
    for name, value in zip(NODE_FIELDS, values, strict=True):
        setattr(node, name, _thawed(value))
    return node


def _frozen(value: Any) -> Any:
    if isinstance(value, MapState):
        return _frozen_map(value)
    return orjson.dumps(value) if isinstance(value, dict | list) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, FrozenMap):
        return _thawed_map(value)
    return orjson.loads(value) if isinstance(value, bytes) else value


class FrozenMap(NamedTuple):
    """The items of a mapped node."""

    statuses: bytes
    counts: tuple[int, ...]
    in_flight: tuple[tuple[int, tuple[Any, ...]], ...]
    ready: tuple[int, ...]
    outputs: bytes
    ended: tuple[tuple[int, tuple[Any, ...]], ...]


def _frozen_map(items: MapState) -> FrozenMap:
    return FrozenMap(
        bytes(items.statuses),
        tuple(getattr(items, name) for name in MAP_FIELDS),
        tuple((item, _frozen_node(state)) for item, state in sorted(items.in_flight.items())),
        tuple(sorted(items.ready)),
        orjson.dumps(items.outputs),
        tuple((item, tuple(map(_frozen, end))) for item, end in sorted(items.ended.items())),
    )


def _thawed_map(frozen: FrozenMap) -> MapState:
    items = MapState(len(frozen.statuses))
    items.statuses = bytearray(frozen.statuses)
    for name, value in zip(MAP_FIELDS, frozen.counts, strict=True):
        setattr(items, name, value)
    items.in_flight = {item: _thawed_node(values) for item, values in frozen.in_flight}
    items.ready, items.outputs = list(frozen.ready), orjson.loads(frozen.outputs)
    items.ended = {item: ItemEnd(*map(_thawed, end)) for item, end in frozen.ended}
    return items


def _failing(check: Any, *about: Any) -> str | None:
    """What an assertion says, or the line that it stands on."""
    try:
        check(*about)
    except AssertionError as broken:
        line = traceback.extract_tb(broken.__traceback__)[-1]
        return str(broken) or f"it does not hold that {(line.line or '').removeprefix('assert ')}"
    return None
