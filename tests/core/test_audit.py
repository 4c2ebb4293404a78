"""A log of events obeys the rules or is found out, without a journal of what moved the run."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import count
from random import Random
from time import process_time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.audit.event_check import MAX_CLOCK_SKEW_SECONDS, audit
from dovetail.core.audit.journal_check import compare
from dovetail.core.dag import Graph
from dovetail.core.events import NODE_EVENTS, RUN_EVENTS, Event
from dovetail.core.run import NodeState, RunState
from dovetail.core.states import NodeStatus, Reason, RunStatus
from dovetail.core.step import begin, step
from dovetail.core.transitions import Claim, Complete, Submit, TakeOver

from .drawn import DrawnAction, Meaning, deeds, examples, graphs, limits
from .walk import Walk
from .walk import graph as drawn_graph

Log = list[Event]
REASONS = [reason.value for reason in Reason]


class RecordedRun:
    """A run that is stepped, and the log that a store would keep of it."""

    def __init__(self, compiled: Graph, max_bytes: int | None = None) -> None:
        self.now = 1000.0
        self._nonces = count(1)
        self.submit = Submit("r", compiled, {"p": 1}, max_bytes=max_bytes)
        self.run, decision = begin(self.submit, self.now, next(self._nonces))
        self.log: Log = []
        self.begun: set[int] = set()
        """The first events of decisions."""
        self._keep(decision.events)
        self._meaning = Meaning("r", {})
        self._meaning.learn(self.run)

    def happen(self, deed: DrawnAction) -> None:
        self.now += deed.wait
        transition = self._meaning.of(deed, self.run, self.now)
        if isinstance(transition, TakeOver):  # where clocks go back, a journal is kept
            transition = transition._replace(behind=0.0)
        self._keep(step(self.run, transition, self.now, next(self._nonces)).events)
        self._meaning.learn(self.run)

    def _keep(self, events: Log) -> None:
        self.begun |= {event.seq for event in events[:1]}
        self.log += [Event(*orjson.loads(orjson.dumps(event[:]))) for event in events]


def reported(
    compiled: Graph, story: list[DrawnAction], max_bytes: int | None = None
) -> RecordedRun:
    it = RecordedRun(compiled, max_bytes)
    for deed in story:
        it.happen(deed)
    return it


@examples(150)
@given(graphs(maps=True), deeds, limits)
def test_a_log_produced_by_the_rules_passes_the_audit(
    compiled: Graph, story: list[DrawnAction], max_bytes: int | None
) -> None:
    it = reported(compiled, story, max_bytes)
    assert audit(it.submit, it.log, it.run) == []


# ── what is found out ────────────────────────────────────────────────────────────────────


def renumbered(log: Log) -> Log:
    return [event._replace(seq=seq) for seq, event in enumerate(log, 1)]


def drop(log: Log, at: int, random: Random) -> Log:
    return log[:at] + log[at + 1 :]


def double(log: Log, at: int, random: Random) -> Log:
    return [*log[: at + 1], *log[at:]]


def swap(log: Log, at: int, random: Random) -> Log:
    return [*log[:at], *reversed(log[at : at + 2]), *log[at + 2 :]]


def other_attempt(log: Log, at: int, random: Random) -> Log:
    attempt = log[at].attempt
    if attempt is None:
        return log
    return [*log[:at], log[at]._replace(attempt=attempt + random.choice((-1, 1))), *log[at + 1 :]]


def other_epoch(log: Log, at: int, random: Random) -> Log:
    return [*log[:at], log[at]._replace(epoch=log[at].epoch + 1), *log[at + 1 :]]


def other_reason(log: Log, at: int, random: Random) -> Log:
    data = log[at].data
    if not data or "reason" not in data:
        return log
    reasons = [reason for reason in REASONS if reason != data["reason"]]
    changed = {**data, "reason": random.choice(reasons)}
    return [*log[:at], log[at]._replace(data=changed), *log[at + 1 :]]


def other_type(log: Log, at: int, random: Random) -> Log:
    types = RUN_EVENTS if log[at].node is None else NODE_EVENTS
    kind = random.choice([kind for kind in types if kind != log[at].type])
    return [*log[:at], log[at]._replace(type=kind), *log[at + 1 :]]


Mutation = Callable[[Log, int, Random], Log]
MUTATIONS: tuple[Mutation, ...] = (
    *(drop, double, swap, other_attempt, other_epoch, other_reason, other_type),
)
NOTHING_FOLLOWS = {"node.progress", "result.refused"}


def cannot_be_seen(kind: str, it: RecordedRun, at: int) -> bool:
    """A log that was changed so could have come about by itself, and leads to the same run."""
    event, later = it.log[at], it.log[at + 1 :]
    match kind:
        case "drop" | "double" if event.type in NOTHING_FOLLOWS:
            return True
        case "other_attempt" | "other_epoch":
            # A stale result may be of any start: also of one that the store forgot in a crash.
            return event.type == "result.refused"
        case "drop":
            node = it.run.node(event.node or "")
            if event.type == "node.parked":  # that it waited leaves no trace
                return node.phase != "parked" or node.until != (event.data or {})["until"]
            if event.type == "node.queued":  # cancelled, as if its condition had been undecided
                return "node.cancelled" in [e.type for e in later if e.node == event.node][:1]
            # Nor does it how a node fared in an epoch that is over, if nothing came of it.
            alone = event.seq in it.begun and event.seq + 1 in it.begun
            return alone and node.epoch > event.epoch
        case "swap":
            if {event.type, later[0].type} & NOTHING_FOLLOWS:
                return True
            # Two decisions that have nothing to do with each other. One that ends with what
            # became of ready nodes may end later, where there are conditions.
            asks = any(spec.condition is not None for spec in it.run.graph.nodes)
            ends_later = asks and event.type in ("node.queued", "node.skipped", "node.failed")
            return later[0].seq in it.begun and (event.seq in it.begun or ends_later)
    return False


def test_a_log_that_was_tampered_with_is_detected() -> None:
    tried, missed = 0, 0

    @settings(examples(120), derandomize=True)  # how many are missed is a matter of chance
    @given(graphs(maps=True), deeds, st.randoms(use_true_random=False))
    def tamper(compiled: Graph, story: list[DrawnAction], random: Random) -> None:
        nonlocal tried, missed
        it = reported(compiled, story)
        for mutate in MUTATIONS * 4:
            at = random.randrange(len(it.log))
            log = renumbered(mutate(it.log, at, random))
            if log == it.log:
                continue
            it.run.seq = len(log)  # as a store that counts what it has
            found = audit(it.submit, log, it.run)
            assert found or cannot_be_seen(mutate.__name__, it, at), (mutate, it.log[at : at + 2])
            if it.log[at].type not in NOTHING_FOLLOWS:
                tried += 1
                missed += not found

    tamper()
    assert tried > 2000
    assert missed < 0.05 * tried, f"{missed} of {tried} were not found out"


def other_run_status(run: RunState, random: Random) -> None:
    run.status = random.choice([status for status in RunStatus if status is not run.status])


def other_status(run: RunState, random: Random) -> None:
    node = random.choice(run.nodes)
    node.status = random.choice([status for status in NodeStatus if status is not node.status])


def one_more(name: str) -> Callable[[RunState, Random], None]:
    def change(run: RunState, random: Random) -> None:
        node = random.choice(run.nodes)
        setattr(node, name, (getattr(node, name) or 0) + 1)

    return change


def one_more_of_the_run(name: str) -> Callable[[RunState, Random], None]:
    def change(run: RunState, random: Random) -> None:
        setattr(run, name, (getattr(run, name) or 0) + 1)

    return change


def other_reason_of_a_node(run: RunState, random: Random) -> None:
    node = random.choice(run.nodes)
    node.reason = random.choice([reason for reason in Reason if reason is not node.reason])


KEPT_OTHERWISE = (
    *(other_run_status, other_status, other_reason_of_a_node),
    *map(one_more, ("attempt", "epoch", "crashes", "started_at", "finished_at")),
    *map(
        one_more_of_the_run,
        ("epoch", "seq", "unfinished", "failed", "cancelled", "active", "finished_at"),
    ),
)


@examples(60)
@given(graphs(maps=True), deeds, st.randoms(use_true_random=False))
def test_a_stored_run_that_differs_from_its_log_is_detected(
    compiled: Graph, story: list[DrawnAction], random: Random
) -> None:
    it = reported(compiled, story)
    for change in KEPT_OTHERWISE:
        run = kept(it.run)
        assert audit(it.submit, it.log, run) == []
        change(run, random)
        assert audit(it.submit, it.log, run)


def kept(run: RunState) -> RunState:
    """A copy that may be changed."""
    other = copy(run)
    other.nodes = [copy(node) for node in run.nodes]
    return other


# ── by hand ──────────────────────────────────────────────────────────────────────────────


def differences(walk: Walk, log: Log | None = None) -> list[str]:
    submit = Submit("r", walk.state.graph, walk.state.params)
    return audit(submit, walk.log if log is None else log, walk.state)


def chain() -> Walk:
    walk = Walk({"a": [], "b": ["a"]}, b={"max_retries": 1})
    walk.run("a")
    walk.break_("b")
    walk.later(60)
    walk.wake("b")
    walk.run("b")
    return walk


def changed(walk: Walk, seq: int, **fields: Any) -> Log:
    return [event._replace(**fields) if event.seq == seq else event for event in walk.log]


def place_of(walk: Walk, kind: str, node: str | None = None) -> int:
    return next(event.seq for event in walk.log if event[2::2][:2] == (kind, node))


def test_a_chain_with_a_retry_obeys_the_rules() -> None:
    assert differences(chain()) == []


def test_a_missing_event_is_named() -> None:
    walk = chain()
    without = [event for event in walk.log if event.seq != 5]
    assert differences(walk, without) == ["event 5 is missing: the log goes on with 6"]
    assert differences(walk, []) == ["the log is empty"]


def test_an_accepted_run_that_was_not_created_has_no_log_yet() -> None:
    graph = chain().state.graph
    assert audit(Submit("r", graph, {}), [], RunState("r", graph, {}, 100.0)) == []


@pytest.mark.parametrize(
    ("kind", "node", "fields", "sentence"),
    [
        ("node.started", "a", {"attempt": 2}, "the rules make it node.started of 'a' (attempt 1)"),
        ("node.started", "a", {"node": "b"}, "event 4: the log has node.started of 'b'"),
        ("node.started", "a", {"node": "x"}, "'node.started' cannot be understood: KeyError('x')"),
        ("node.started", "a", {"data": None}, "cannot be understood: KeyError('worker')"),
        ("node.retrying", "b", {"data": [1]}, "'node.retrying' cannot be understood: TypeError("),
        ("node.queued", "a", {"epoch": 2}, "node.queued of 'a' (attempt 0) has epoch 2 in the log"),
        ("node.completed", "a", {"type": "node.skipped"}, "has node.skipped of 'a' (attempt 1)"),
        ("node.completed", "b", {"type": "dance"}, "the log has dance of 'b' (attempt 2), the ru"),
        ("node.retrying", "b", {"type": "node.failed"}, "the rules make it node.failed of 'b'"),
        ("run.created", None, {"data": {}}, "event 1: the log has run.created, the rules make it"),
        ("run.completed", None, {"type": "run.failed"}, "the rules make it run.completed"),
        ("run.completed", None, {"time": 1.0}, "run.completed has time 1.0 in the log, 160.0 by"),
    ],
)
def test_an_impossible_event_is_reported_with_what_would_follow(
    kind: str, node: str | None, fields: dict[str, Any], sentence: str
) -> None:
    walk = chain()
    (difference,) = differences(walk, changed(walk, place_of(walk, kind, node), **fields))
    assert sentence in difference


def test_a_log_that_ends_within_a_decision_is_reported() -> None:
    walk = chain()
    assert differences(walk, walk.log[:-1]) == [
        f"event {walk.log[-1].seq}: the rules make run.completed, the log has nothing"
    ]


def test_each_field_that_differs_from_the_log_is_reported() -> None:
    walk = chain()
    walk.state.status = RunStatus.FAILED
    walk["b"].worker, walk["b"].answered = "other", walk["a"].answered
    assert differences(walk) == [
        "the run is kept with status FAILED, the log makes it COMPLETED",
        "node 'b' is kept with worker other, the log makes it w",
        "node 'b' is kept with answered (1, 1), the log makes it (1, 2)",
    ]


def test_an_output_of_a_node_without_output_is_reported() -> None:
    walk = chain()
    walk.retry(from_node="b")
    walk["b"].output = {"x": 1}
    assert differences(walk) == ["node 'b' is kept with an output, the log gives it none"]


def test_the_audit_requires_a_lease_of_a_running_node() -> None:
    walk = Walk({"a": []})
    walk.start("a")
    walk["a"].lease_until = None
    assert differences(walk) == ["node 'a' runs and is kept without a lease"]


def test_a_waiting_node_is_not_started_before_its_time() -> None:
    walk = Walk({"a": []}, a={"resource_tag": "t"})
    walk.park("a", 60)
    assert differences(walk) == []
    walk.later(60)
    walk.wake("a")
    assert differences(walk) == [], "who is woken writes no event"
    walk.start("a")
    assert differences(walk) == []
    started = place_of(walk, "node.started", "a")
    (difference,) = differences(walk, changed(walk, started, time=160 - MAX_CLOCK_SKEW_SECONDS))
    assert difference == f"event {started}: 'a' was to wait 5.000 s longer"
    walk["a"].started_at = (
        161 - MAX_CLOCK_SKEW_SECONDS
    )  # a clock that is a little ahead is none's fault
    assert differences(walk, changed(walk, started, time=161 - MAX_CLOCK_SKEW_SECONDS)) == []


def test_a_parked_node_may_be_rescheduled_earlier_and_not_later() -> None:
    walk = Walk({"a": [], "b": []}, max_concurrency=1, a={"resource_tag": "t"})
    walk.park("a", 600)
    walk.later(1)
    walk.park("a", 30)
    assert differences(walk) == []
    walk.later(30)
    walk.run("b")
    walk.wake("a")
    walk.run("a")
    assert differences(walk) == []
    again = place_of(walk, "node.parked", "a") + 1
    reported = {"until": 700.5, "resource_tag": "t"}
    (difference,) = differences(walk, changed(walk, again, data=reported))
    assert difference == f"event {again}: 'a' was to wait 599.000 s longer"


def test_a_node_that_crashed_too_often_is_taken_from_the_log() -> None:
    for most in (1, 2, 5):
        walk = Walk({"a": []})
        for _ in range(2):
            if walk.phase("a") == "published":
                walk.start("a")
                walk.later(10)
                walk.reap("a", max_crashes=most)
        assert differences(walk) == []


def test_the_audit_enforces_max_concurrency() -> None:
    walk = Walk({"a": [], "b": [], "c": []}, max_concurrency=2)
    walk.start("a", "b")
    log = [*walk.log, walk.log[-1]._replace(seq=walk.state.seq + 1, node="c")]
    (difference,) = differences(walk, log)
    assert "the log has node.started of 'c' (attempt 1)" in difference
    assert difference.endswith("the rules nothing")


def test_nodes_that_wait_for_a_slot_are_started_in_definition_order() -> None:
    walk = Walk({"a": [], "b": [], "c": []}, max_concurrency=1)
    walk.run("a", "b", "c")
    assert differences(walk) == []
    other = {"b": "c", "c": "b"}
    swapped = [
        event if event.seq <= 5 else event._replace(node=other.get(event.node or "", event.node))
        for event in walk.log
    ]
    (difference,) = differences(walk, swapped)
    assert "node.started of 'c' (attempt 1)" in difference


def test_which_woken_node_found_a_slot_is_taken_from_the_log() -> None:
    walk = Walk({"a": [], "b": [], "c": []}, max_concurrency=1)
    walk.park("a", 5)  # b is published
    walk.later(5)
    walk.wake("a")  # a is held, before c
    walk.run("b", "a")
    walk.start("c")
    assert differences(walk) == []
    log = [*walk.log, walk.log[-1]._replace(seq=walk.state.seq + 1, node="b")]
    (difference,) = differences(walk, log)
    assert difference.endswith("the rules nothing")


def test_counters_stored_beside_the_states_are_verified() -> None:
    walk = Walk({"a": [], "b": [], "c": []}, max_concurrency=2)
    walk.state.held.clear()
    walk["b"].phase = walk["c"].phase
    assert differences(walk) == [
        "node 'b' is kept as held until none, the log makes it published",
        "the run counts 2 active nodes; there are 1",
        "the run holds the nodes [] back; held are [1, 2]",
        "nodes are held back although 1 of 2 are published or running",
    ]
    walk["b"].phase = walk["c"].phase = walk["a"].phase
    assert "3 nodes are published or running; max_concurrency is 2" in differences(walk)


# ── conditions ───────────────────────────────────────────────────────────────────────────

EVEN = {"condition": "{{ a.n % 2 == 0 }}"}


def conditional() -> Walk:
    walk = Walk({"a": [], "x": [], "b": ["a"], "c": ["a"], "d": ["b"]}, b=EVEN)
    walk.start("x")
    walk.run("a", output={"n": 2})
    return walk


def test_a_condition_with_known_inputs_is_evaluated_again() -> None:
    walk = conditional()
    assert differences(walk) == []
    walk["a"].output = {"n": 3}
    (difference,) = differences(walk)
    assert "node.queued of 'b' (attempt 0), the rules make it node.skipped of 'b'" in difference
    walk["a"].output = {}
    (difference,) = differences(walk)
    assert "the rules make it node.failed of 'b'" in difference


@pytest.mark.parametrize("output", [{"n": 2}, {"n": 3}, {}])
def test_a_condition_whose_inputs_were_reset_keeps_its_logged_value(output: dict[str, Any]) -> None:
    walk = Walk({"a": [], "b": ["a"]}, b=EVEN)
    walk.run("a", output=output)
    if walk.ended:
        walk.retry(from_node="a")
    else:
        walk.cancel()
        walk.retry(from_node="a")
    walk.run("a", output={"n": 4})
    assert differences(walk) == []


def reordered(walk: Walk, *order: int) -> Log:
    """The log as a store wrote it that asked its conditions later; `order` of its last events."""
    head, tail = walk.log[: -len(order)], walk.log[-len(order) :]
    return renumbered([*head, *(tail[place] for place in order)])


def test_a_condition_may_be_decided_after_other_transitions_of_the_run() -> None:
    walk = conditional()  # ends with: a completed, b queued, c queued
    walk.later(1)
    walk.complete("x")
    assert differences(walk, reordered(walk, 0, 3, 1, 2)) == []
    assert differences(walk, reordered(walk, 0, 1, 3, 2)) != [], "what is queued is queued at once"


def test_a_node_that_became_ready_with_a_condition_is_queued_after_its_decision() -> None:
    walk = conditional()
    (difference,) = differences(walk, renumbered([*walk.log[:-2], walk.log[-1]]))
    assert difference == "event 8: 'c' was queued before it was decided about 'b'"
    (difference,) = differences(walk, reordered(walk, 0, 2, 1))
    assert difference == "event 8: 'c' was queued before 'b'"


def test_two_nodes_may_wait_for_their_conditions_at_once() -> None:
    walk = Walk(
        {"a": [], "x": [], "b": ["a"], "y": ["x"], "z": ["y"]},
        b={"condition": "{{ a.n > 2 }}"},
        y={"condition": "{{ x.n > 2 }}"},
    )
    walk.start("a", "x")
    walk.complete("a", {"n": 3})
    walk.later(1)
    walk.complete("x", {"n": 1})
    # a completed, b queued | x completed, y skipped, z skipped
    assert differences(walk) == []
    assert differences(walk, reordered(walk, 0, 2, 3, 4, 1)) == []
    (difference,) = differences(walk, reordered(walk, 0, 2, 1, 3, 4))
    assert difference == "event 9: 'b' was queued before it was decided about 'y'"


def test_a_node_with_an_undecided_condition_is_cancelled_without_a_decision() -> None:
    walk = conditional()
    walk.later(1)
    walk.cancel()
    undecided = [e for e in walk.log if not (e.type == "node.queued" and e.node in ("b", "c"))]
    for name in "bc":
        walk[name].token = walk["d"].token
    walk.state.seq -= 2
    assert differences(walk, renumbered(undecided)) == []


def test_a_run_may_be_audited_before_its_conditions_are_decided() -> None:
    walk = Walk({"a": [], "b": ["a"]}, b=EVEN)
    walk.run("a", output={"n": 2})
    run = kept(walk.state)
    run.nodes[1] = NodeState(1, 0)
    run.nodes[1].fed = True
    run.seq, run.active = run.seq - 1, 0
    submit = Submit("r", run.graph, {})
    assert audit(submit, walk.log[:-1], run) == []
    run.nodes[1].waiting = 1
    assert audit(submit, walk.log[:-1], run) == [
        "node 'b' is kept with waiting 1, the log makes it 0"
    ]


def test_a_fan_out_of_ten_thousand_conditions_is_audited_quickly() -> None:
    names = [f"n{place}" for place in range(10_000)]
    always = {name: {"condition": "{{ a.n == 1 }}"} for name in names}
    graph = drawn_graph({"a": [], **{name: ["a"] for name in names}}, **always)
    run, decision = begin(Submit("r", graph, {}), 1.0, 1)
    log = list(decision.events)
    for name in ("a", *names):
        token = run.node(name).token
        for transition in (Claim("r", name, token, "w", 9.0), Complete("r", name, token, {"n": 1})):
            log += step(run, transition, 2.0, 1).events
    began = process_time()
    assert audit(Submit("r", graph, {}), log, run) == []
    assert process_time() - began < 5


def test_a_log_with_an_older_worker_lost_message_obeys_the_rules() -> None:
    earlier = {"type": "worker_lost", "message": "its worker was lost at 3 starts"}
    now = {"type": "worker_lost", "message": "its worker died during 3 attempts"}
    for kept, made in (
        ({"error": earlier, "reason": "worker_lost"}, {"error": now, "reason": "worker_lost"}),
        ({"error": {**earlier, "node": "a"}}, {"error": {**now, "node": "a"}}),
    ):
        one = Event(4, 1.0, "node.failed", 1, "a", 3, kept)
        assert compare([one], [one._replace(data=made)]) is None
        assert compare([one], [one._replace(data=made, attempt=2)]) is not None
    for other in (
        {"error": {**now, "type": "timeout"}, "reason": "worker_lost"},
        {"error": now, "reason": "dependency_failed"},
        {"error": {**now, "node": "b"}, "reason": "worker_lost"},
        {"error": now},
    ):
        one = Event(4, 1.0, "node.failed", 1, "a", 3, {"error": earlier, "reason": "worker_lost"})
        assert compare([one], [one._replace(data=other)]) is not None
    plain = Event(4, 1.0, "node.failed", 1, "a", 3, {"error": {"type": "X", "message": "a"}})
    assert compare([plain], [plain._replace(data={"error": {"type": "X", "message": "b"}})])
