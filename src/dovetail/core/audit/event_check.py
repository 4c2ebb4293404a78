"""Does a log of events obey the rules? For stores that keep no journal of transitions.

An event says what became of a node, and so which transition must have come before it. That one is
stepped through the core again; what the core makes of it is compared with the log, event by
event, and what it leads to with the run as it is kept. What it must not know: where either came
from.

Some things are not in a log. Where the rules need them, they are taken as they must have been:

- tokens, but for their epoch and attempt: each start gets a nonce of its own;
- leases, and how many lost workers are one too many: a node that was lost had to be;
- when a node that waited was woken: when it was next heard of, if its time had come. Until then
  it may have taken the place of another under `max_concurrency`, so with such nodes only the
  number of those that run is certain, not who of the others was published;
- outputs of earlier epochs: a condition that reads one has the verdict that was recorded. All
  others are asked again.

A store may ask its conditions later than the core does, and others may move the run meanwhile:
what became ready with such a node is decided when the log goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify
from itertools import count
from typing import Any

from dovetail.core.audit.journal_check import compare, same_but_for_words
from dovetail.core.dag import Graph, NodeSpec
from dovetail.core.effects import (
    COMPLETED,
    FAILED,
    HELD,
    PENDING,
    PUBLISHED,
    QUEUED,
    RUNNING,
    Undecided,
    resolve,
)
from dovetail.core.errors import TemplateError
from dovetail.core.events import Event, Token
from dovetail.core.restore import is_restored_start, restore
from dovetail.core.run import NodeState, Phase, RunState, UnreadOutput
from dovetail.core.states import FINAL, FINISHED, NodeStatus, RunStatus
from dovetail.core.step import begin, step
from dovetail.core.templates import Condition
from dovetail.core.text import counted
from dovetail.core.transitions import (
    NOTHING,
    Cancel,
    Claim,
    Complete,
    Decision,
    Fail,
    Park,
    Progress,
    Reap,
    Recall,
    Retry,
    Submit,
    Transition,
    Wake,
)

CLOCKS_APART = 5.0
"""So many seconds before its time a node may be started: on a machine whose clock is ahead."""
LONG_OVER = float("-inf")
_UNKNOWN = UnreadOutput(0)
"""The output of an earlier epoch: it counts for nothing."""
_WAITS = frozenset({"node.parked", "node.retrying"})


def audit(submit: Submit, events: Sequence[Event], run: RunState) -> list[str]:
    """Where a run's log, or the run as it is kept, departs from the rules, as sentences.

    It stops at the first difference in the log: what came after it rests on another state.
    """
    if not events:  # as it should be of a run that was accepted and not made yet
        return [] if run.status is RunStatus.PENDING and not run.seq else ["the log is empty"]
    for expected, event in enumerate(events, 1):
        if event.seq != expected:
            return [f"event {expected} is missing: the log goes on with {event.seq}"]
    if twice := started_twice(submit.graph, events):
        return [twice]
    story = _EventReplay(submit, events, run)
    difference = story.retell()
    return list(_compare_runs(story, run)) if difference is None else [difference]


class RebuiltRun:
    """A run as the rules make it of its log alone, and where that is not what is kept of it."""

    def __init__(self, story: _EventReplay, difference: str | None) -> None:
        self._story = story
        self.difference = difference
        """Where the log itself departs from the rules: then `run` ends before that."""
        self.run: RunState = story.run
        names = [spec.id for spec in self.run.graph.nodes]
        nodes = self.run.nodes
        self.lost = [name for name, node in zip(names, nodes, strict=True) if _is_lost(node)]
        """Completed nodes whose outputs are nowhere."""
        self.undecided = story.undecided()
        """Nodes that are ready and wait for a verdict, in the order in which they became so."""

    def differences(self, kept: RunState) -> list[str]:
        return list(_compare_runs(self._story, kept))


def rebuild(submit: Submit, events: Sequence[Event], outputs: Mapping[str, Any]) -> RebuiltRun:
    """Tell a log again; `outputs` are those of completed nodes, which no log has.

    Leases and the nonces of tokens are in no log either: who writes the run back gives them out.
    """
    believed = RunState(submit.run_id, submit.graph, submit.params, 0.0, submit.version)
    for event in events:
        name = event.node
        if name is not None and name in outputs and event.type in ("node.completed", "node.cached"):
            node = believed.node(name)
            node.status, node.epoch, node.output = COMPLETED, event.epoch, outputs[name]
    story = _EventReplay(submit, events, believed)
    for expected, event in enumerate(events, 1):
        if event.seq != expected:
            story.run, _ = begin(submit, event.time, 1)
            return RebuiltRun(story, f"event {expected} is missing")
    return RebuiltRun(story, story.retell())


def _is_lost(node: NodeState) -> bool:
    return node.status is COMPLETED and node.output is _UNKNOWN


def inconsistencies(run: RunState) -> list[str]:
    """Where a run as it is kept disagrees with itself, as sentences: no rule leads there.

    For whoever cannot read a log each time: a node that somebody changed by hand is found by the
    counts beside it, or by the nodes that wait for it.
    """
    nodes, specs = run.nodes, run.graph.nodes
    # Without its log nobody can tell a run that was restored, and may be over its limit for that;
    # and who looks at the states has not read the outputs.
    found = list(_compare_counts(run, is_settled=False, restored=True, weighed=False))
    for spec, node in zip(specs, nodes, strict=True):
        if node.status is not PENDING:
            continue
        parents = [nodes[place].status for place in spec.parents]
        waits = sum(status not in (COMPLETED, NodeStatus.SKIPPED) for status in parents)
        if node.waiting != waits:
            found.append(
                f"node '{spec.id}' waits for {node.waiting} more of its parents; "
                f"{waits} are not done"
            )
        if FAILED in parents or NodeStatus.CANCELLED in parents:
            found.append(f"node '{spec.id}' waits for a parent that has failed or was cancelled")
    open_nodes = any(node.status not in FINISHED for node in nodes)
    if run.seq and run.finished == open_nodes:
        ended = "has ended, and some of its nodes have not"
        found.append(
            f"the run {ended if run.finished else 'goes on, and all its nodes have ended'}"
        )
    if run.finished and run.status not in FINAL:
        found.append(f"the run has ended, and is {run.status}")
    return found


def started_twice(graph: Graph, events: Iterable[Event]) -> str | None:
    """The first at-most-once node that the log starts a second time in an epoch, as a sentence."""
    first: dict[tuple[str, int], int] = {}
    for event in events:
        if event.type != "node.started" or event.node is None or event.node not in graph.index:
            continue
        if not graph.nodes[graph.index[event.node]].at_most_once:
            continue
        before = first.setdefault((event.node, event.epoch), event.seq)
        if before != event.seq:
            return (
                f"event {event.seq}: '{event.node}', which is at_most_once, was started again in "
                f"epoch {event.epoch}; it had been started by event {before}"
            )
    return None


class _EventReplay:
    """A log, told again by the rules."""

    run: RunState

    def __init__(self, submit: Submit, events: Sequence[Event], kept: RunState) -> None:
        nodes = tuple(
            spec if spec.condition is None else replace(spec, condition=partial(self._ask, spec))
            for spec in submit.graph.nodes
        )
        self._submit = submit._replace(graph=replace(submit.graph, nodes=nodes))
        self._log = events
        self._kept = kept
        self._nonces = count(1)
        waits = any(event.type in _WAITS for event in events)
        asks = any(spec.condition is not None for spec in nodes)
        self.certain = not waits and not asks
        """Nobody waited for a time or a verdict: who was published, and who held, is known."""
        self._undecided: dict[int, int] = {}
        """Nodes that are ready and wait for the verdict on their condition, or on another's; each
        with its number in the order in which they became ready."""
        self._numbers = count()
        self._decided = -1
        """The number of the last one that was not to run."""
        self._told: Event | None = None
        """The event that has the verdict that is asked for."""
        self.restored = False
        """Nodes that were held may have been published before the run was put back."""

    def retell(self) -> str | None:
        """The first difference, if there is one; `run` is where the log leads to."""
        self.run, decision = begin(self._submit, self._log[0].time, next(self._nonces))
        self._leave(self.run.graph.roots)
        at = 0
        while True:
            made = decision.events
            if difference := compare(self._log[at : at + max(1, len(made))], made):
                return difference
            at += len(made)
            if at == len(self._log):
                return None
            event = self._log[at]
            try:
                decision = self._decide(event)
            except _ImpossibleEvent as difference_found:
                return f"event {event.seq}: {difference_found}"
            except (AttributeError, KeyError, TypeError, ValueError) as problem:
                return f"event {event.seq}: '{event.type}' cannot be understood: {problem!r}"

    def undecided(self) -> list[int]:
        waiting = sorted(self._undecided.items(), key=lambda item: item[1])
        nodes = self.run.nodes
        return [i for i, _ in waiting if nodes[i].status is PENDING and not nodes[i].waiting]

    # ── what must have happened ──────────────────────────────────────────────────────────

    def _decide(self, event: Event) -> Decision:
        run = self.run
        node = None if event.node is None else run.node(event.node)
        if node is not None and node.status is PENDING and event.type in _DECIDED:
            return self._settle(event, run.graph.index[event.node or ""])
        if event.type not in _MOVES:
            return NOTHING
        if is_restored_start(event):
            self.restored = True
            return restore(run, LONG_OVER, event.time)
        if node is not None and node.status is QUEUED and _was_published(event, node):
            self._wake(event, node)
        move = _MOVES[event.type](self, event)
        decision = step(run, move, event.time, next(self._nonces))
        if decision.changed and isinstance(move, Complete | Recall):
            self._leave(run.graph.nodes[run.graph.index[move.node]].children)
        elif type(move) is Retry:
            self._undecided.clear()
            self._leave(range(len(run.nodes)))
        return decision

    def subject(self, event: Event) -> tuple[str, str, Token]:
        if event.node is None:
            raise ValueError("it has no node")
        return self.run.id, event.node, self.run.node(event.node).token

    def is_published(self, event: Event) -> bool:
        return self.run.node(event.node or "").phase is Phase.PUBLISHED

    def output(self, event: Event) -> Any:
        """What the node gave in that epoch, which is known of its newest one."""
        kept = self._kept.node(event.node or "")
        if kept.epoch == event.epoch and kept.status is COMPLETED:
            return kept.output
        return _UNKNOWN

    def crashes_allowed(self, event: Event) -> int:
        """That many lost starts, or one more: the log shows whether it was one too many."""
        crashes = self.run.node(event.node or "").crashes + 1
        after = self._log[event.seq] if event.seq < len(self._log) else event
        ended = after.node == event.node and after.type == "node.failed"
        return crashes if ended else crashes + 1

    # ── nodes that waited ────────────────────────────────────────────────────────────────

    def _wake(self, event: Event, node: NodeState) -> None:
        """What happens to a published node only: it was woken before, and there was room for it."""
        run = self.run
        if node.until is not None:
            early = node.until - event.time
            if early >= CLOCKS_APART:
                raise _ImpossibleEvent(f"'{event.node}' was to wait {early:.3f} s longer")
            wake = Wake(*self.subject(event))
            step(run, wake, max(event.time, node.until), next(self._nonces))
        if node.phase is HELD and not self.certain:
            self._give_way(run.graph.index[event.node or ""])

    def _give_way(self, place: int) -> None:
        """There was room for it: some is left, or another was held that is published here."""
        run = self.run
        if run.active < (run.graph.max_concurrency or 0):
            run.active += 1
        else:
            published = (i for i, node in enumerate(run.nodes) if node.phase is PUBLISHED)
            other = next(published, None)
            if other is None:
                return
            run.nodes[other].phase = HELD
            run.held.append(other)
        run.nodes[place].phase = PUBLISHED
        run.held.remove(place)
        heapify(run.held)

    # ── conditions ───────────────────────────────────────────────────────────────────────

    def _leave(self, places: Iterable[int]) -> None:
        """Who of these is ready although a decision was made waits for a verdict, or with one."""
        nodes = self.run.nodes
        for place in places:
            if nodes[place].status is PENDING and not nodes[place].waiting:
                self._undecided[place] = next(self._numbers)

    def _settle(self, event: Event, place: int) -> Decision:
        """The log says what became of a node that was ready."""
        if place not in self._undecided:
            return NOTHING
        ready = _OneByOne([place])
        out = Decision()
        self._told = event
        resolve(self.run, ready, out, event.time, next(self._nonces))
        self._told = None
        number = self._undecided.pop(place)
        self._leave(ready.then)
        if [made.type for made in out.events[:1]] != [event.type]:
            return out  # which is told as the difference that it is
        if event.type == "node.queued":
            self._check_queue(event, place)
        elif number < self._decided:
            raise _ImpossibleEvent(
                f"it was decided about '{event.node}' after one that was ready later"
            )
        else:
            self._decided = number
        return out

    def _check_queue(self, event: Event, place: int) -> None:
        """Nodes are queued in definition order, once all that are ready have their verdict."""
        run = self.run
        after = self._log[event.seq] if event.seq < len(self._log) else event
        then = run.graph.index.get(after.node or "", place)
        if (after.time, after.type) == (event.time, event.type) and then in self._undecided:
            if then < place:
                raise _ImpossibleEvent(f"'{event.node}' was queued before '{after.node}'")
            return
        left = [other for other in self._undecided if run.nodes[other].status is PENDING]
        if left:
            first = run.graph.nodes[min(left)].id
            raise _ImpossibleEvent(
                f"'{event.node}' was queued before it was decided about '{first}'"
            )

    def _ask(self, spec: NodeSpec, run: RunState) -> bool:
        """The condition of a node; `Undecided` until the log tells of it."""
        told = self._told
        if told is None:
            raise Undecided
        condition = spec.condition
        if isinstance(condition, Condition) and self._is_known(condition):
            return condition(run)
        if told.type == "node.failed":
            raise _recorded(spec, told)
        return told.type == "node.queued"

    def _is_known(self, condition: Condition) -> bool:
        index = self.run.graph.index
        places = [index[read.name] for read in condition.reads if read.name in index]
        return all(self.run.nodes[place].output is not _UNKNOWN for place in places)


class _OneByOne(list[int]):
    """For `resolve`: those that become ready are not decided with it, but in their turn."""

    def __init__(self, places: Iterable[int]) -> None:
        super().__init__(places)
        self.then: list[int] = []

    def append(self, place: int) -> None:
        self.then.append(place)


class _ImpossibleEvent(Exception):
    """What an event tells cannot have happened."""


def _recorded(spec: NodeSpec, event: Event) -> TemplateError:
    """Why the condition could not be asked then."""
    error = (event.data or {})["error"]
    problem = TemplateError(error["message"].removeprefix(f"node '{spec.id}': condition "))
    problem.type = error["type"]
    return problem


# ── the transition that an event must have come from ─────────────────────────────────────

_DECIDED = frozenset({"node.queued", "node.skipped", "node.failed"})
"""Of a pending node these say what became of it; otherwise only the last begins a decision."""
_BY_THE_PUBLISHED = frozenset({"node.started", "node.cached", "node.parked", "node.failed"})


def _told(event: Event) -> dict[str, Any]:
    return event.data or {}


def _was_published(event: Event, node: NodeState) -> bool:
    """Whether this happens to a published node only: one that is parked may be so again, if it
    shall come sooner."""
    if event.type == "node.parked" and node.phase is Phase.PARKED and node.until is not None:
        return bool(_told(event)["until"] >= node.until)
    return event.type in _BY_THE_PUBLISHED


def _refused(story: _EventReplay, event: Event) -> Complete:
    """A result that nobody waited for; what was in it was not kept."""
    run_id, name, token = story.subject(event)
    if _told(event).get("reason") == "stale":
        token = Token(event.epoch, event.attempt or 0, -1)
    return Complete(run_id, name, token, None)


_Maker = Callable[[_EventReplay, Event], Transition]
_MOVES: dict[str, _Maker] = {
    "node.started": lambda s, e: Claim(*s.subject(e), _told(e)["worker"], LONG_OVER),
    "node.completed": lambda s, e: Complete(*s.subject(e), s.output(e)),
    "node.cached": lambda s, e: Recall(*s.subject(e), s.output(e)),
    "node.retrying": lambda s, e: Fail(*s.subject(e), _told(e)["error"], after=_told(e)["delay"]),
    "node.failed": lambda s, e: Fail(
        *s.subject(e), _told(e)["error"], permanent=True, unrendered=s.is_published(e)
    ),
    "node.lost": lambda s, e: Reap(*s.subject(e), s.crashes_allowed(e)),
    "node.parked": lambda s, e: Park(*s.subject(e), _told(e)["until"]),
    "node.progress": lambda s, e: Progress(
        *s.subject(e), _told(e)["fraction"], _told(e)["message"]
    ),
    "node.cancelled": lambda s, e: Cancel(s.run.id),
    "run.retried": lambda s, e: Retry(s.run.id, _told(e).get("from")),
    "result.refused": _refused,
}


# ── where it led to ──────────────────────────────────────────────────────────────────────

_OF_A_RUN = ("status", "epoch", "error", "created_at", "started_at", "finished_at", "seq")
_OF_A_NODE = (
    "status",
    "epoch",
    "attempt",
    "crashes",
    "reason",
    "cause",
    "error",
    "worker",
    "started_at",
    "finished_at",
)


def _compare_runs(story: _EventReplay, kept: RunState) -> Iterator[str]:
    made = story.run
    yield from _compare_fields("the run", _OF_A_RUN, made, kept)
    for spec, ruled, node in zip(made.graph.nodes, made.nodes, kept.nodes, strict=True):
        who = f"node '{spec.id}'"
        yield from _compare_fields(who, _OF_A_NODE, ruled, node)
        if ruled.status is node.status:
            yield from _compare_place(who, story, ruled, node)
    is_settled = not any(node.status is PENDING and not node.waiting for node in made.nodes)
    yield from _compare_counts(kept, is_settled, story.restored)


def _compare_fields(who: str, names: Sequence[str], made: object, kept: object) -> Iterator[str]:
    for name in names:
        has, makes = getattr(kept, name), getattr(made, name)
        if has != makes and not same_but_for_words(has, makes):
            yield f"{who} is kept with {name} {_shown(has)}, the log makes it {_shown(makes)}"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _compare_place(
    who: str, story: _EventReplay, made: NodeState, kept: NodeState
) -> Iterator[str]:
    """What a node is about to do, in the state that it is in."""
    for name in ("token", "answered"):
        has, makes = getattr(kept, name)[:2], getattr(made, name)[:2]
        if has != makes:
            yield f"{who} is kept with {name} {has}, the log makes it {makes}"
    if made.output is not _UNKNOWN and made.output != kept.output:
        yield f"{who} is kept with an output, the log gives it none"
    if made.status is PENDING:
        yield from _compare_fields(who, ("waiting", "fed"), made, kept)
    elif made.status is RUNNING and kept.lease_until is None:
        yield f"{who} runs and is kept without a lease"
    elif made.status is QUEUED and not _may_be(made, kept, story.certain):
        has, makes = _shown(kept.phase), _shown(made.phase)
        yield f"{who} is kept as {has} until {_shown(kept.until)}, the log makes it {makes}"


def _may_be(made: NodeState, kept: NodeState, certain: bool) -> bool:
    if kept.phase is made.phase and kept.until == made.until:
        return True
    free = kept.phase in (PUBLISHED, HELD) and kept.until is None
    return free and not certain  # it was woken, or another was before it


def _compare_counts(
    kept: RunState, is_settled: bool, restored: bool, weighed: bool = True
) -> Iterator[str]:
    statuses = [node.status for node in kept.nodes]
    held = [place for place, node in enumerate(kept.nodes) if node.phase is HELD]
    active = sum(node.status is RUNNING or node.phase is PUBLISHED for node in kept.nodes)
    counts = {
        "unfinished": sum(status not in FINISHED for status in statuses),
        "failed": statuses.count(FAILED),
        "cancelled": statuses.count(NodeStatus.CANCELLED),
        "active": active,
    }
    for name, number in counts.items():
        if getattr(kept, name) != number:
            many = counted(getattr(kept, name), f"{name} node")
            yield f"the run counts {many}; there are {number}"
    if kept.max_bytes is not None and weighed:
        weight = sum(node.size for node in kept.nodes)
        if kept.kept_bytes != weight:
            yield f"the run counts {kept.kept_bytes} bytes of outputs; there are {weight}"
        if weight > kept.max_bytes:
            yield f"the run keeps {weight} bytes of outputs; it may keep {kept.max_bytes}"
    if sorted(kept.held) != held:
        yield f"the run holds the nodes {sorted(kept.held)} back; held are {held}"
    limit = kept.graph.max_concurrency
    if limit is not None and active > limit and not restored:
        many = counted(active, "node is", "nodes are")
        yield f"{many} published or running; max_concurrency is {limit}"
    if limit is not None and held and active < limit and is_settled:
        yield f"nodes are held back although {active} of {limit} are published or running"
