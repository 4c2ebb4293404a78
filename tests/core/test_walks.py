"""Anything may happen at any time, with any token: what must hold, holds after every step.

`DOVETAIL_EXAMPLES=50 pytest tests/core/test_walks.py` walks fifty times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

from hypothesis import event, given, note
from hypothesis import strategies as st

from dovetail.core.dag import Graph
from dovetail.core.items import split_name
from dovetail.core.run import Phase, RunState
from dovetail.core.states import FINISHED, NodeStatus
from dovetail.core.step import begin, step
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Expand,
    Fail,
    Submit,
    Transition,
    Wake,
)

from .drawn import (
    LEASE,
    DrawnAction,
    Meaning,
    deeds,
    error_of,
    examples,
    expanding,
    graphs,
    length_of,
    limits,
    output_of,
)
from .invariants import Ledger, check_run, check_step, startable


class CheckedRun:
    """A run that is stepped and checked at each step."""

    def __init__(self, graph: Graph, max_bytes: int | None = None) -> None:
        self.now = 1000.0
        self._nonces = count(1)
        self.ledger = Ledger()
        submit = Submit("r", graph, {}, max_bytes=max_bytes)
        self.run, begun = begin(submit, self.now, next(self._nonces))
        check_run(self.run)
        self.ledger.record(self.run, Cancel("r"), begun)
        self.meaning = Meaning("r", {})
        self.meaning.learn(self.run)

    def apply(self, transition: Transition) -> Decision:
        before = self.run.snapshot()
        decision = step(self.run, transition, self.now, next(self._nonces))
        if decision:
            note(f"{self.now}: {transition}")
        check_step(before, self.run, transition, decision, self.now)
        self.ledger.record(self.run, transition, decision)
        self.meaning.learn(self.run)
        return decision

    def happen(self, deed: DrawnAction) -> None:
        self.now += deed.wait
        transition = self.meaning.of(deed, self.run, self.now)
        event(f"{type(transition).__name__} {'taken' if self.apply(transition) else 'refused'}")

    def finish(self, choose: Callable[[list[str]], int], fails: Callable[[str], bool]) -> None:
        """Drive the run fairly to its end: whatever is published is claimed, whatever was
        claimed answers, whatever waits is woken."""
        steps = 200 * len(self.run.nodes) + 100
        while not self.run.finished:
            assert (steps := steps - 1), f"the run does not end: {self.run.snapshot()}"
            able = [
                name
                for name, state in startable(self.run)
                if state.phase is Phase.PUBLISHED or state.status is NodeStatus.RUNNING
            ]
            able += expanding(self.run)
            if not able:
                self._wake_first()
                continue
            self._advance(able[choose(able) % len(able)], fails)

    def _wake_first(self) -> None:
        waits = [
            (state.until, name, state.token)
            for name, state in startable(self.run)
            if state.until is not None
        ]
        assert waits, f"nothing can happen any more: {self.run.snapshot()}"
        until, name, token = min(waits)
        self.now = max(self.now, until)
        assert self.apply(Wake("r", name, token))

    def _advance(self, name: str, fails: Callable[[str], bool]) -> None:
        node = self.run.node(name)
        self.now += 1
        if node.phase is Phase.EXPANDING:
            assert self.apply(Expand("r", name, node.token, length_of(self.run, name)))
        elif node.phase is Phase.PUBLISHED:
            assert self.apply(Claim("r", name, node.token, "w", self.now + LEASE))
        elif fails(name):
            assert self.apply(Fail("r", name, node.token, error_of(name)))
        else:
            assert self.apply(Complete("r", name, node.token, output_of(self.run, name)))


@examples(400)
@given(graphs(maps=True), deeds, limits)
def test_the_rules_hold_for_any_transitions_in_any_order(
    graph: Graph, story: list[DrawnAction], max_bytes: int | None
) -> None:
    stroll = CheckedRun(graph, max_bytes)
    for deed in story:
        stroll.happen(deed)


@examples(200)
@given(graphs(maps=True), deeds, st.sets(st.integers(0, 7)), st.randoms(use_true_random=False))
def test_every_run_ends_after_any_transitions(
    graph: Graph, story: list[DrawnAction], broken: set[int], random: Any
) -> None:
    stroll = CheckedRun(graph)
    for deed in story:
        stroll.happen(deed)
    names = {f"n{place}" for place in broken}
    stroll.finish(lambda able: random.randrange(len(able)), names.__contains__)
    assert all(node.status in FINISHED for node in stroll.run.nodes)


@examples(200)
@given(graphs(maps=True), deeds)
def test_at_most_once_nodes_start_at_most_once_in_an_epoch(
    graph: Graph, story: list[DrawnAction]
) -> None:
    stroll = CheckedRun(graph)
    for deed in story:
        stroll.happen(deed)
    for (name, _), starts in stroll.ledger.starts.items():
        if graph.nodes[graph.index[split_name(name)[0]]].at_most_once:
            assert starts == 1


def finished(graph: Graph, broken: set[str], order: int) -> RunState:
    """The run after its nodes finished in some order, those in `broken` by failing."""
    stroll = CheckedRun(graph)
    chance = Random(order)
    stroll.finish(lambda able: chance.randrange(len(able)), broken.__contains__)
    return stroll.run


orders = st.integers(0, 1000)


@examples(300)
@given(graphs(maps=True), st.sets(st.integers(0, 7)), orders, orders)
def test_the_outcome_does_not_depend_on_the_order_in_which_nodes_finish(
    graph: Graph, broken: set[int], one: int, other: int
) -> None:
    names = {f"n{place}" for place in broken}
    first, second = finished(graph, names, one), finished(graph, names, other)
    outputs = [
        {
            spec.id: node.output
            for spec, node in zip(graph.nodes, run.nodes, strict=True)
            if node.status is NodeStatus.COMPLETED
        }
        for run in (first, second)
    ]
    shared = outputs[0].keys() & outputs[1].keys()
    assert {name: outputs[0][name] for name in shared} == {
        name: outputs[1][name] for name in shared
    }
    assert first.status is second.status
    if graph.fail_fast and first.failed:
        event("fail_fast, failed")
        return
    event(f"{'fail_fast' if graph.fail_fast else 'continue'}, {first.status}")
    assert outputs[0] == outputs[1]
    assert first.error == second.error
    for one_node, other_node in zip(first.nodes, second.nodes, strict=True):
        assert one_node.status is other_node.status
        assert one_node.reason is other_node.reason
        assert one_node.error == other_node.error
