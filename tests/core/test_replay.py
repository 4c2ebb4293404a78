"""A journal is the run: folded it gives the same state, stepped again it gives the same journal."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given

from dovetail.core.audit.journal_check import verify
from dovetail.core.audit.replay import KINDS, JournalEntry, extra_of, published, replay
from dovetail.core.dag import Graph
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.states import NodeStatus
from dovetail.core.step import begin, step
from dovetail.core.transitions import Claim, Complete, Decision, Submit, TakeOver, Transition

from .drawn import DrawnAction, Meaning, deeds, examples, graphs, limits
from .walk import graph

SUBMIT_TIME = 1000.0


class Journalled:
    """A run that is stepped, and the journal that a store would keep of it."""

    def __init__(self, compiled: Graph, max_bytes: int | None = None) -> None:
        self.now = SUBMIT_TIME
        self.submit = Submit("r", compiled, {"p": 1}, max_bytes=max_bytes)
        self.run, decision = begin(self.submit, self.now, 1)
        self.entries: list[JournalEntry] = []
        self._keep(self.submit, decision, 1)
        self.meaning = Meaning("r", {})
        self.meaning.learn(self.run)

    def apply(self, transition: Transition) -> Decision:
        seq = self.run.seq + 1
        decision = step(self.run, transition, self.now, seq)
        if decision:
            self._keep(transition, decision, seq)
        self.meaning.learn(self.run)
        return decision

    def happen(self, deed: DrawnAction) -> None:
        self.now += deed.wait
        self.apply(self.meaning.of(deed, self.run, self.now))

    def happen_to(self, name: str, output: Any) -> None:
        """The node starts and returns this."""
        token = self.run.node(name).token
        self.apply(Claim("r", name, token, "w", self.now + 10))
        self.apply(Complete("r", name, token, output))

    def _keep(self, transition: Submit | Transition, decision: Decision, seq: int) -> None:
        kept = [
            seq,
            self.now,
            KINDS[type(transition)],
            extra_of(transition, decision),
            published(decision.dispatch),
            [event[:] for event in decision.events],
        ]
        *fields, events = orjson.loads(orjson.dumps(kept))
        self.entries.append(JournalEntry(*fields, [Event(*event) for event in events]))

    def refolded(self, at: int | None = None) -> RunState:
        """The run from its journal alone; with `at`, in two pieces."""
        run = RunState("r", self.submit.graph, self.submit.params, SUBMIT_TIME)
        replay(run, self.entries[:at])
        if at is not None:
            replay(run, self.entries[at:])
        return run


def comparable(run: RunState) -> dict[str, Any]:
    snapshot = run.snapshot()
    for node in snapshot["nodes"]:
        if node["status"] is not NodeStatus.PENDING:
            del node["waiting"], node["fed"]  # of no meaning once a node was ready
    return snapshot


@examples(400)
@given(graphs(maps=True), deeds, limits)
def test_a_run_rebuilt_from_its_journal_equals_the_run(
    compiled: Graph, story: list[DrawnAction], max_bytes: int | None
) -> None:
    it = Journalled(compiled, max_bytes)
    for deed in story:
        it.happen(deed)
    assert comparable(it.refolded()) == comparable(it.run)
    assert comparable(it.refolded(len(it.entries) // 2)) == comparable(it.run)


@examples(200)
@given(graphs(maps=True), deeds, limits)
def test_a_journal_produced_by_the_rules_passes_the_check(
    compiled: Graph, story: list[DrawnAction], max_bytes: int | None
) -> None:
    it = Journalled(compiled, max_bytes)
    for deed in story:
        it.happen(deed)
    run, differences = verify(it.submit._replace(max_bytes=None), it.entries)  # the log has it
    assert differences == []
    assert run is not None
    assert comparable(run) == comparable(it.run)


def finished_chain() -> Journalled:
    it = Journalled(graph({"a": [], "b": ["a"]}))
    for name in "ab":
        token = it.run.node(name).token
        it.apply(Claim("r", name, token, "w", 1010.0))
        it.apply(Complete("r", name, token, {"x": name}))
    return it


@pytest.mark.parametrize(
    ("place", "change", "sentence"),
    [
        (1, lambda e: e._replace(events=[]), "'claim' cannot be understood"),
        (2, lambda e: e._replace(dispatch=[]), "'complete' published the nodes []"),
        (2, lambda e: e._replace(events=e.events[:1]), "the rules make node.queued"),
        (4, lambda e: e._replace(kind="cancel"), "the rules make it node.cancelled"),
        (4, lambda e: e._replace(seq=99), "event 8 is missing"),
        (0, lambda e: e._replace(kind="claim"), "begins with 'claim'"),
        (3, lambda e: e._replace(kind="dance"), "'dance' cannot be understood"),
        (3, lambda e: e._replace(kind="complete"), "the rules make it result.refused"),
    ],
)
def test_a_journal_that_was_tampered_with_is_detected(
    place: int, change: Any, sentence: str
) -> None:
    it = finished_chain()
    assert verify(it.submit, it.entries)[1] == []
    it.entries[place] = change(it.entries[place])
    (difference,) = verify(it.submit, it.entries)[1]
    assert sentence in difference


def test_an_empty_journal_is_reported() -> None:
    it = finished_chain()
    assert verify(it.submit, [])[1] == ["the log is empty"]


def test_a_journal_without_its_end_still_gives_a_run() -> None:
    it = finished_chain()
    for length in range(1, len(it.entries) + 1):
        run = RunState("r", it.submit.graph, {}, SUBMIT_TIME)
        replay(run, it.entries[:length])
        assert verify(it.submit, it.entries[:length])[1] == []
        assert run.finished is (length == len(it.entries))


def test_taking_over_a_run_gives_all_outstanding_orders() -> None:
    it = Journalled(graph({"a": [], "b": [], "c": ["a"]}))
    it.apply(Claim("r", "a", it.run.node("a").token, "w", 1010.0))
    decision = it.apply(TakeOver("r", 3))
    assert [order.node_index for order in decision.dispatch] == [0, 1]
    assert it.run.node("a").crashes == 1
    assert it.run.node("a").token.attempt == 2
    assert [event.type for event in decision.events] == ["node.lost", "node.queued"]


def test_a_clock_that_was_set_back_makes_no_node_wait_longer() -> None:
    from dovetail.core.transitions import Fail

    it = Journalled(graph({"a": []}, a={"max_retries": 1}))
    token = it.run.node("a").token
    it.apply(Claim("r", "a", token, "w", 1010.0))
    it.apply(Fail("r", "a", token, {"type": "E", "message": "m"}, after=30.0))
    it.now -= 500
    decision = it.apply(TakeOver("r", 3, behind=500.0))
    assert [at for at, _ in decision.wake] == [SUBMIT_TIME + 30 - 500]
    assert comparable(it.refolded()) == comparable(it.run)
