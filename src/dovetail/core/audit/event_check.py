"""Checks a log of events against the rules, for stores that keep no journal of transitions.

An event says what happened to a node, and so which transition must have caused it. That transition
goes through `step` again. Its events are compared with the log, and the final state with the run
as the store keeps it.

A log does not have everything that the rules need. What is missing is assumed:

- tokens, but for their epoch and attempt: each start gets a new nonce;
- leases and the limit of crashes: a node that was lost had to be lost;
- the time at which a waiting node was woken: its next event, if its time had come. Until then it
  may have used a slot of `max_concurrency`. So in a run with such nodes only the number of
  published nodes is certain, not which nodes they were;
- outputs of earlier epochs: a condition that reads one gets the recorded verdict. All other
  conditions are evaluated again.

A store may evaluate a condition later than the core does, and other transitions may come first.
So nodes that became ready together with such a node are decided when the log continues with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice, takewhile
from typing import Any

from dovetail.core.audit.journal_check import compare, reported_error, same_but_for_words
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
    count_active,
    count_failures,
    is_done,
    map_of,
    open_map,
    recount_held,
    resolve,
    startable,
)
from dovetail.core.errors import TemplateError
from dovetail.core.events import Event, Token
from dovetail.core.items import MAX_ITEMS, split_name
from dovetail.core.run import NodeState, Phase, RunState, UnreadOutput
from dovetail.core.states import FINAL, FINISHED, NodeStatus, RunStatus
from dovetail.core.step import begin, is_restored_start, restore, step
from dovetail.core.templates import Condition
from dovetail.core.text import counted
from dovetail.core.transitions import (
    NOTHING,
    Cancel,
    Claim,
    Complete,
    Decision,
    Expand,
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

MAX_CLOCK_SKEW_SECONDS = 5.0
"""A node may start this much before its time: on a machine whose clock is ahead."""
_EXPIRED = -math.inf
_UNKNOWN = UnreadOutput(0)
"""The output of an earlier epoch; its size counts as zero."""


class _UnknownList(list[int]):
    """Such an output of a mapped node: as short as a list of so many items can be."""


_WAITS = frozenset({"node.parked", "node.retrying"})
_OUTPUTS = frozenset({"node.cached", "node.reused", "node.completed"})
_ENDING = (Complete, Recall, Fail, Reap, Expand)
"""Transitions after which children may be ready."""


def audit(submit: Submit, events: Sequence[Event], run: RunState) -> list[str]:
    """Where a run's log, or the run as it is kept, differs from the rules, as sentences.

    It stops at the first difference in the log: everything after it depends on another state.
    """
    if not events:  # right for a run that was accepted and not created yet
        return [] if run.status is RunStatus.PENDING and not run.seq else ["the log is empty"]
    for expected, event in enumerate(events, 1):
        if event.seq != expected:
            return [f"event {expected} is missing: the log goes on with {event.seq}"]
    if twice := started_twice(submit.graph, events):
        return [twice]
    replay = _EventReplay(submit, events, run)
    difference = replay.replay()
    return list(_compare_runs(replay, run)) if difference is None else [difference]


class RebuiltRun:
    """A run as the rules make it from its log alone."""

    def __init__(self, replay: _EventReplay, difference: str | None) -> None:
        self._replay = replay
        self.difference = difference
        """Where the log itself differs from the rules; `run` is its state before that."""
        self.run: RunState = replay.run
        names = [spec.id for spec in self.run.graph.nodes]
        nodes = self.run.nodes
        self.lost = [name for name, node in zip(names, nodes, strict=True) if _is_lost(node)]
        """Completed nodes whose outputs were not found."""
        self.undecided = replay.undecided()
        """Ready nodes that wait for the verdict of a condition, in the order they became ready."""

    def differences(self, kept: RunState) -> list[str]:
        return list(_compare_runs(self._replay, kept))


def rebuild(submit: Submit, events: Sequence[Event], outputs: Mapping[str, Any]) -> RebuiltRun:
    """Rebuild a run from its log and the `outputs` of its completed nodes and items, by name.

    A log has neither leases nor the nonces of tokens: the caller makes new ones when it writes the
    run back.
    """
    believed = RunState(submit.run_id, submit.graph, submit.params, 0.0, submit.version)
    believed.forked_from = forked_from(events)
    for event in events:
        name = event.node
        if name is None:
            continue
        if event.type == "node.queued" and "items" in _data(event):
            open_map(believed.node(name), _data(event)["items"])
        elif name in outputs and event.type in _OUTPUTS:
            node = believed.node(name)
            node.status, node.epoch, node.output = COMPLETED, event.epoch, outputs[name]
            if (found := believed.find_item(name)) is not None:
                _, items = map_of(believed, found[0])
                items.begin(found[1], node)
                items.end(found[1], node)
    replay = _EventReplay(submit, events, believed)
    for expected, event in enumerate(events, 1):
        if event.seq != expected:
            replay.run, _ = begin(submit, event.time, 1)
            return RebuiltRun(replay, f"event {expected} is missing")
    return RebuiltRun(replay, replay.replay())


def _is_lost(node: NodeState) -> bool:
    return node.status is COMPLETED and not _is_read(node)


def _is_read(node: NodeState) -> bool:
    """Whether its output is known; of a mapped node, the outputs of all its items."""
    if node.items is not None:
        return all(output is not _UNKNOWN for output in node.items.outputs)
    return node.output is not _UNKNOWN


def inconsistencies(run: RunState) -> list[str]:
    """Where the state of a run contradicts itself, as sentences. No rule leads there.

    Cheaper than a check of the log: a node that was changed by hand no longer fits the run's
    counts or the nodes that wait for it.
    """
    nodes, specs = run.nodes, run.graph.nodes
    # Only the log says whether the run was restored, which allows more than `max_concurrency`.
    # The caller has not read the outputs.
    found = list(_compare_counts(run, is_settled=False, restored=True, weighed=False))
    for spec, node in zip(specs, nodes, strict=True):
        if node.status is not PENDING:
            continue
        parents = [nodes[i].status for i in spec.parents if not is_done(run, i)]
        waits = sum(status is not NodeStatus.SKIPPED for status in parents)
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
        if event.type != "node.started" or event.node is None:
            continue
        index = graph.index.get(split_name(event.node)[0])
        if index is None or not graph.nodes[index].at_most_once:
            continue
        before = first.setdefault((event.node, event.epoch), event.seq)
        if before != event.seq:
            return (
                f"event {event.seq}: '{event.node}', which is at_most_once, was started again in "
                f"epoch {event.epoch}; it had been started by event {before}"
            )
    return None


class _EventReplay:
    """Makes the transitions of a log again."""

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
        """No node waited for a time or a verdict: it is known which were published and held."""
        self._undecided: dict[int, int] = {}
        """Ready nodes that wait for the verdict on their condition or another's, each with its
        number in the order in which they became ready."""
        self._numbers = count()
        self._decided = -1
        """The number of the last node that was skipped or failed."""
        self._verdict: Event | None = None
        """The event that has the verdict on the condition being evaluated."""
        self.restored = False
        """The run was restored: nodes that were held may have been published before."""

    def replay(self) -> str | None:
        """The first difference, if there is one; `run` is the final state."""
        submit = self._submit
        if origin := forked_from(self._log):
            submit = submit._replace(forked_from=origin, reused=self._reused())
        self.run, decision = begin(submit, self._log[0].time, next(self._nonces))
        for node in self.run.nodes:
            if type(node.output) is _UnknownList and node.items is not None:
                node.output, node.items.outputs = _UNKNOWN, [_UNKNOWN] * node.items.total
                self.run.kept_bytes -= node.size
                node.size = 0
        self._leave(range(len(self.run.nodes)) if origin else self.run.graph.roots)
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

    def _reused(self) -> dict[str, Any]:
        """The outputs that a fork began with. Only its creation reuses nodes: their events follow
        the first two of the log."""
        first = takewhile(lambda event: event.type == "node.reused", islice(self._log, 2, None))
        known = self._submit.graph.index
        outputs: dict[str, Any] = {}
        for event in first:
            if event.node is not None and event.node in known:
                outputs[event.node] = output = self.output(event)
                total = _data(event).get("items")
                if output is _UNKNOWN and type(total) is int and 0 <= total <= MAX_ITEMS:
                    outputs[event.node] = _UnknownList([0] * total)
        return outputs

    def undecided(self) -> list[int]:
        waiting = sorted(self._undecided.items(), key=lambda item: item[1])
        nodes = self.run.nodes
        return [i for i, _ in waiting if nodes[i].status is PENDING and not nodes[i].waiting]

    # ── what must have happened ──────────────────────────────────────────────────────────

    def _decide(self, event: Event) -> Decision:
        run = self.run
        node = None if event.node is None else run.node(event.node)
        if node is not None and node.status is PENDING and event.type in _DECIDED:
            index = run.graph.index.get(event.node or "")
            return NOTHING if index is None else self._settle(event, index)
        if event.type not in _TRANSITIONS or (
            event.type == "node.queued" and "items" not in _data(event)
        ):
            return NOTHING
        if is_restored_start(event):
            self.restored = True
            return restore(run, _EXPIRED, event.time)
        if node is not None and node.status is QUEUED and _was_published(event, node):
            self._wake(event, node)
        transition = _TRANSITIONS[event.type](self, event)
        decision = step(run, transition, event.time, next(self._nonces))
        if decision.changed and isinstance(transition, _ENDING):
            index = run.graph.index[split_name(transition.node)[0]]
            self._leave(run.graph.nodes[index].children)
        elif type(transition) is Retry:
            self._undecided.clear()
            self._leave(range(len(run.nodes)))
        return decision

    def subject(self, event: Event) -> tuple[str, str, Token]:
        if event.node is None:
            raise ValueError("it has no node")
        return self.run.id, event.node, self.run.node(event.node).token

    def is_published(self, event: Event) -> bool:
        return self.run.node(event.node or "").phase is Phase.PUBLISHED

    def failure(self, event: Event) -> Fail | Expand:
        """What a node's failure must have come from."""
        error = reported_error(_data(event))
        if self.run.node(event.node or "").phase is Phase.EXPANDING:
            return Expand(*self.subject(event), 0, error)
        return Fail(
            *self.subject(event), error, permanent=True, unrendered=self.is_published(event)
        )

    def output(self, event: Event) -> Any:
        """The node's output in that epoch; known only if it is the newest epoch."""
        try:
            kept = self._kept.node(event.node or "")
        except KeyError:
            return _UNKNOWN  # an item, and its list is not known any more
        if kept.epoch == event.epoch and kept.status is COMPLETED:
            return kept.output
        return _UNKNOWN

    def crashes_allowed(self, event: Event) -> int:
        """The limit of crashes: the node's crashes if it failed by this one, else one more."""
        crashes = self.run.node(event.node or "").crashes + 1
        after = self._log[event.seq] if event.seq < len(self._log) else event
        ended = after.node == event.node and after.type == "node.failed"
        return crashes if ended else crashes + 1

    # ── nodes that waited ────────────────────────────────────────────────────────────────

    def _wake(self, event: Event, node: NodeState) -> None:
        """The event needs a published node: so the node was woken before, and a slot was free."""
        run = self.run
        if node.until is not None:
            early = node.until - event.time
            if early >= MAX_CLOCK_SKEW_SECONDS:
                raise _ImpossibleEvent(f"'{event.node}' was to wait {early:.3f} s longer")
            wake = Wake(*self.subject(event))
            step(run, wake, max(event.time, node.until), next(self._nonces))
        if node.phase is HELD and not self.certain:
            self._publish(node)

    def _publish(self, node: NodeState) -> None:
        """Publish what is held: in a free slot, or instead of something that is published here."""
        run = self.run
        if run.active < (run.graph.max_concurrency or 0):
            run.active += 1
        else:
            published = (one for one in startable(run.nodes) if one.phase is PUBLISHED)
            other = next(published, None)
            if other is None:
                return
            other.phase = HELD
        node.phase = PUBLISHED
        recount_held(run)

    # ── conditions ───────────────────────────────────────────────────────────────────────

    def _leave(self, indices: Iterable[int]) -> None:
        """Nodes of these that are still ready after a decision wait for a verdict."""
        nodes = self.run.nodes
        for index in indices:
            if nodes[index].status is PENDING and not nodes[index].waiting:
                self._undecided[index] = next(self._numbers)

    def _settle(self, event: Event, index: int) -> Decision:
        """The log has the verdict on a ready node."""
        if index not in self._undecided:
            return NOTHING
        ready = _OneByOne([index])
        out = Decision()
        self._verdict = event
        resolve(self.run, ready, out, event.time, next(self._nonces))
        self._verdict = None
        number = self._undecided.pop(index)
        self._leave(ready.then)
        if [made.type for made in out.events[:1]] != [event.type]:
            return out  # `replay` reports the difference
        if event.type == "node.queued":
            self._check_queue(event, index)
        elif number < self._decided:
            raise _ImpossibleEvent(
                f"it was decided about '{event.node}' after one that was ready later"
            )
        else:
            self._decided = number
        return out

    def _check_queue(self, event: Event, index: int) -> None:
        """Nodes are queued in definition order, once all ready nodes have their verdict."""
        run = self.run
        after = self._log[event.seq] if event.seq < len(self._log) else event
        then = run.graph.index.get(after.node or "", index)
        if (after.time, after.type) == (event.time, event.type) and then in self._undecided:
            if then < index:
                raise _ImpossibleEvent(f"'{event.node}' was queued before '{after.node}'")
            return
        left = [other for other in self._undecided if run.nodes[other].status is PENDING]
        if left:
            first = run.graph.nodes[min(left)].id
            raise _ImpossibleEvent(
                f"'{event.node}' was queued before it was decided about '{first}'"
            )

    def _ask(self, spec: NodeSpec, run: RunState) -> bool:
        """Evaluate the condition of a node; `Undecided` until the log has its verdict."""
        verdict = self._verdict
        if verdict is None:
            raise Undecided
        condition = spec.condition
        if isinstance(condition, Condition) and self._is_known(condition):
            return condition(run)
        if verdict.type == "node.failed":
            raise _recorded(spec, verdict)
        return verdict.type == "node.queued"

    def _is_known(self, condition: Condition) -> bool:
        run = self.run
        names = [read.name for read in condition.reads if read.name in run.graph.index]
        return all(_is_read(run.node(name)) for name in names)


def forked_from(events: Sequence[Event]) -> str | None:
    """The run that this log's run is a fork of, as its first event says."""
    origin = (events[0].data or {}).get("forked_from") if events else None
    return origin if isinstance(origin, str) else None


class _OneByOne(list[int]):
    """The list for `resolve`: nodes that become ready are collected in `then`, not resolved."""

    def __init__(self, indices: Iterable[int]) -> None:
        super().__init__(indices)
        self.then: list[int] = []

    def append(self, index: int) -> None:
        self.then.append(index)

    def extend(self, indices: Iterable[int]) -> None:
        self.then.extend(indices)


class _ImpossibleEvent(Exception):
    """What an event says cannot have happened."""


def _recorded(spec: NodeSpec, event: Event) -> TemplateError:
    """The recorded error of the condition."""
    error = (event.data or {})["error"]
    problem = TemplateError(error["message"].removeprefix(f"node '{spec.id}': condition "))
    problem.type = error["type"]
    return problem


# ── the transition that an event must have come from ─────────────────────────────────────

_DECIDED = frozenset({"node.queued", "node.skipped", "node.failed"})
"""For a pending node these are the verdict; otherwise only the last begins a decision."""
_OF_PUBLISHED = frozenset({"node.started", "node.cached", "node.parked", "node.failed"})


def _data(event: Event) -> dict[str, Any]:
    return event.data or {}


def _was_published(event: Event, node: NodeState) -> bool:
    """Whether this event needs a published node. A parked node may be parked again, if it is to
    come sooner."""
    if event.type == "node.parked" and node.phase is Phase.PARKED and node.until is not None:
        return bool(_data(event)["until"] >= node.until)
    return event.type in _OF_PUBLISHED


def _refused(replay: _EventReplay, event: Event) -> Complete:
    """A result that was refused; the log does not keep its output."""
    run_id, name, token = replay.subject(event)
    if _data(event).get("reason") == "stale":
        token = Token(event.epoch, event.attempt or 0, -1)
    return Complete(run_id, name, token, None)


_Maker = Callable[[_EventReplay, Event], Transition]
_TRANSITIONS: dict[str, _Maker] = {
    "node.started": lambda s, e: Claim(*s.subject(e), _data(e)["worker"], _EXPIRED),
    "node.completed": lambda s, e: Complete(*s.subject(e), s.output(e)),
    "node.cached": lambda s, e: Recall(*s.subject(e), s.output(e)),
    "node.retrying": lambda s, e: Fail(
        *s.subject(e), reported_error(_data(e)), after=_data(e)["delay"]
    ),
    "node.failed": lambda s, e: s.failure(e),
    "node.queued": lambda s, e: Expand(*s.subject(e), _data(e)["items"]),
    "node.lost": lambda s, e: Reap(*s.subject(e), s.crashes_allowed(e)),
    "node.parked": lambda s, e: Park(*s.subject(e), _data(e)["until"]),
    "node.progress": lambda s, e: Progress(
        *s.subject(e), _data(e)["fraction"], _data(e)["message"]
    ),
    "node.cancelled": lambda s, e: Cancel(s.run.id),
    "run.retried": lambda s, e: Retry(s.run.id, _data(e).get("from")),
    "result.refused": _refused,
}


# ── the final state ──────────────────────────────────────────────────────────────────────

_OF_A_RUN = (
    "status",
    "epoch",
    "error",
    "created_at",
    "started_at",
    "finished_at",
    "seq",
    "forked_from",
)
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


def _compare_runs(replay: _EventReplay, kept: RunState) -> Iterator[str]:
    made = replay.run
    yield from _compare_fields("the run", _OF_A_RUN, made, kept)
    for spec, ruled, node in zip(made.graph.nodes, made.nodes, kept.nodes, strict=True):
        subject = f"node '{spec.id}'"
        yield from _compare_fields(subject, _OF_A_NODE, ruled, node)
        if ruled.status is node.status:
            yield from _compare_details(subject, replay, ruled, node)
        yield from _compare_items(subject, replay, ruled, node)
    is_settled = not any(node.status is PENDING and not node.waiting for node in made.nodes)
    yield from _compare_counts(kept, is_settled, replay.restored)


def _compare_fields(
    subject: str, names: Sequence[str], made: object, kept: object
) -> Iterator[str]:
    for name in names:
        has, makes = getattr(kept, name), getattr(made, name)
        if has != makes and not same_but_for_words(has, makes):
            yield f"{subject} is kept with {name} {_shown(has)}, the log makes it {_shown(makes)}"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _compare_details(
    subject: str, replay: _EventReplay, made: NodeState, kept: NodeState
) -> Iterator[str]:
    """Compare the fields that matter in the node's status."""
    for name in ("token", "answered"):
        has, makes = getattr(kept, name)[:2], getattr(made, name)[:2]
        if has != makes:
            yield f"{subject} is kept with {name} {has}, the log makes it {makes}"
    if made.output is not _UNKNOWN and made.output != kept.output:
        yield f"{subject} is kept with an output, the log gives it none"
    if made.status is PENDING:
        yield from _compare_fields(subject, ("waiting", "fed"), made, kept)
    elif made.items is not None:
        pass  # its items have leases, and are held
    elif made.status is RUNNING and kept.lease_until is None:
        yield f"{subject} runs and is kept without a lease"
    elif made.status is QUEUED and not _may_be(made, kept, replay.certain):
        has, makes = _shown(kept.phase), _shown(made.phase)
        yield f"{subject} is kept as {has} until {_shown(kept.until)}, the log makes it {makes}"


def _compare_items(
    subject: str, replay: _EventReplay, made: NodeState, kept: NodeState
) -> Iterator[str]:
    if made.items is None or kept.items is None:
        if made.items is not kept.items:
            has, makes = ("no items" if one.items is None else "items" for one in (kept, made))
            yield f"{subject} is kept with {has}, the log makes it {makes}"
        return
    counts = ("total", "running", "completed", "failed")
    yield from _compare_fields(subject, counts, made.items, kept.items)
    if made.items.statuses != kept.items.statuses:
        yield f"{subject} is kept with other items out and ended than the log makes it"
        return
    for item, state in sorted(made.items.in_flight.items()):
        whose = f"item {item} of {subject}"
        yield from _compare_fields(whose, _OF_A_NODE, state, kept.items.in_flight[item])
        yield from _compare_details(whose, replay, state, kept.items.in_flight[item])
    for item, end in made.items.ended.items():
        if kept.items.ended.get(item) != end:
            yield f"item {item} of {subject} is not kept as the log ends it"


def _may_be(made: NodeState, kept: NodeState, certain: bool) -> bool:
    if kept.phase is made.phase and kept.until == made.until:
        return True
    free = kept.phase in (PUBLISHED, HELD) and kept.until is None
    return free and not certain  # it was woken, or another node took its slot


def _compare_counts(
    kept: RunState, is_settled: bool, restored: bool, weighed: bool = True
) -> Iterator[str]:
    statuses = [node.status for node in kept.nodes]
    held = [index for index, node in enumerate(kept.nodes) if node.phase is HELD]
    active = count_active(kept.nodes)
    counts = {
        "unfinished": sum(status not in FINISHED for status in statuses),
        "failed": count_failures(kept),
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
