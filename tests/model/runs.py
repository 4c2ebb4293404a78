"""One run of the model: `core`'s own state, made hashable, and moved by `core`'s own `step`.

A run is a number here. What it stands for is thawed when a transition is first applied to it, and
the outcome is remembered, so that a million states of the protocol cost a few thousand steps. Each
of these is checked when it is made. Time is abstract: nothing but a lease or a wait looks at the
clock, so a lease is FRESH or EXPIRED, and whatever waits may be woken.

As in Redis, conditions are decided in a second call: the first leaves what became ready `pending`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import orjson

from dovetail.core import effects, step
from dovetail.core.dag import Graph
from dovetail.core.events import NO_TOKEN, Token
from dovetail.core.run import NodeState, Phase, RunState
from dovetail.core.states import FINAL, FINISHED, NodeStatus
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
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
OUTPUTS = {"yes": {"go": True}, "no": {"go": False}}
ERROR = {"type": "ValueError", "message": "broken"}
ENDS = ("node.completed", "node.cached", "node.failed", "node.skipped", "node.cancelled")
NODE_FIELDS = NodeState.__slots__
RUN_FIELDS = ("status", "epoch", "finished_at", "error", "unfinished", "failed", "cancelled")
REAL_RESOLVE = effects.resolve

Start = tuple[int, Token]
"""A node, by its place, and the token of one start of it."""
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
    """Claims that were granted to each node in its epoch."""
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
        self.names = [spec.id for spec in graph.nodes]
        self.frozen: list[Frozen | None] = [None]
        self.facts: list[Facts] = [ABSENT]
        self._oracle = oracle
        self._nonces = nonces
        self._numbers: dict[Frozen, int] = {}
        self._outcomes: dict[tuple[int, Move], Outcome] = {}

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
        frozen = self.frozen[number]
        assert frozen is not None
        node = list(frozen.nodes[start[0]])
        node[NODE_FIELDS.index("lease_until")] = EXPIRED
        nodes = (*frozen.nodes[: start[0]], tuple(node), *frozen.nodes[start[0] + 1 :])
        return self._number(frozen._replace(nodes=nodes))

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
            starts[move[1]] += 1
            granted[move[1]] = move[2]
        if move[0] == "retry":
            for place, node in enumerate(run.nodes):
                if node.epoch != before["nodes"][place]["epoch"]:
                    starts[place], granted[place] = 0, NO_TOKEN
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
        size = len(run.nodes)
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
            case "recall":
                return Recall("r", name, token, OUTPUTS["yes"])
        return Complete("r", name, token, OUTPUTS[kind])

    def _orders(self, run: PendingRun, decision: Decision) -> Orders:
        return Orders(
            tuple((order.node_index, order.token) for order in decision.dispatch),
            tuple((run.graph.index[wake.node], wake.token) for _, wake in decision.wake),
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
        places = {name: place for place, name in enumerate(self.names)}
        ended: set[int] = set()
        for event in decision.events:
            if event.node is None or event.type not in ENDS:
                continue
            place = places[event.node]
            finished = before.nodes[place][STATUS] in FINISHED and kind != "retry"
            if place in ended or finished:
                return f"{event.node} has ended twice in an epoch: {event.type}"
            ended.add(place)
        for place, (old, new) in enumerate(zip(before.nodes, after.nodes, strict=True)):
            wrong = self._judge_node(place, old, new, after, move)
            if wrong is not None:
                return f"{self.names[place]}: {wrong}"
        if decision.changed and kind in ("reap", *OUTPUTS, "fail"):
            place, token = move[1], move[2]
            if before.granted[place] != token:
                return f"{self.names[place]}: a stale attempt was applied: {token}"
            if kind == "reap" and before.nodes[place][LEASE] == FRESH:
                return f"{self.names[place]}: it was taken from a worker that had renewed its lease"
        return None if run.pending else _failing(check_run, run)

    def _judge_node(
        self, place: int, old: tuple[Any, ...], new: tuple[Any, ...], after: Frozen, move: Move
    ) -> str | None:
        if move[0] != "retry":
            if old[STATUS] in FINISHED and new != old:
                return f"it was {old[STATUS]} and changed within its epoch"
        elif old[STATUS] in (NodeStatus.COMPLETED, NodeStatus.RUNNING) and new != old:
            start = move[1]
            if start is None or place not in {start, *self.graph.descendants(start)}:
                return f"it was {old[STATUS]}, and a retry started it again"
        if new[STATUS] is NodeStatus.RUNNING and new[TOKEN] != after.granted[place]:
            return f"a claim was granted that is not of its token {new[TOKEN]}"
        if after.starts[place] != new[ATTEMPT]:
            return f"it was started {after.starts[place]} times and counts {new[ATTEMPT]}"
        if self.graph.nodes[place].at_most_once and after.starts[place] > 1:
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
        for node, values in zip(run.nodes, frozen.nodes, strict=True):
            for name, value in zip(NODE_FIELDS, values, strict=True):
                setattr(node, name, _thawed(value) if name in ("output", "error") else value)
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
        nodes = tuple(
            tuple(_frozen(getattr(node, name)) for name in NODE_FIELDS) for node in run.nodes
        )
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
        nodes = list(enumerate(run.nodes))
        published = tuple((i, node.token) for i, node in nodes if node.phase is Phase.PUBLISHED)
        running = tuple((i, node.token) for i, node in nodes if node.status is NodeStatus.RUNNING)
        return Facts(
            True,
            run.epoch,
            run.finished,
            run.status in FINAL,
            published,
            tuple((i, node.token) for i, node in nodes if node.until is not None),
            running,
            tuple(start for start in running if run.nodes[start[0]].lease_until == EXPIRED),
            frozenset((*published, *running)),
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
            for name, node in zip(self.names, run.nodes, strict=True)
        ]
        waits = [self.names[place] for place in run.pending]
        return f"{run.status}: {', '.join(nodes)}" + (f"; undecided {waits}" if waits else "")


STATUS = NODE_FIELDS.index("status")
ATTEMPT = NODE_FIELDS.index("attempt")
LEASE = NODE_FIELDS.index("lease_until")
TOKEN = NODE_FIELDS.index("token")


def _new_run(*about: Any) -> PendingRun:
    run = PendingRun(*about)
    run.pending = ()
    return run


def _frozen(value: Any) -> Any:
    return orjson.dumps(value) if isinstance(value, dict) else value


def _thawed(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, bytes) else value


def _failing(check: Any, *about: Any) -> str | None:
    """What an assertion says, or the line that it stands on."""
    try:
        check(*about)
    except AssertionError as broken:
        line = traceback.extract_tb(broken.__traceback__)[-1]
        return str(broken) or f"it does not hold that {(line.line or '').removeprefix('assert ')}"
    return None
