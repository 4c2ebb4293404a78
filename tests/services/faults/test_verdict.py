"""The judges of the storms are judged here: they accept what the rules make, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from dovetail.core.dag import build_graph
from dovetail.core.definition.model import Workflow
from dovetail.core.events import Event
from dovetail.core.run import RunState
from dovetail.core.states import RunStatus
from dovetail.core.step import begin, step
from dovetail.core.transitions import (
    Cancel,
    Claim,
    Complete,
    Decision,
    Fail,
    Park,
    Reap,
    Retry,
    Submit,
    Transition,
    Wake,
)

from .verdict import Evidence, violations
from .workload import FAILING, Plan, draw

MAX_CRASHES = 3
LEASE = 5.0


class RandomRun:
    """A run driven by the core alone, in whatever order chance has it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.plan = draw(self.chance)
        graph = build_graph(Workflow.model_validate(self.plan.definition), {})
        self.now = 1.0
        self.run, out = begin(Submit("r", graph, self.plan.params), self.now, 1)
        self.events: list[Event] = []
        self.executions: list[tuple[str, int, int]] = []
        self.cancelled = False
        self._todo: list[Transition] = []
        self._keep(out)

    def evidence(self) -> Evidence:
        while not self.run.finished:
            self._something()
        if self.chance.random() < 0.5:
            first = self.chance.choice(list(self.plan.nodes))
            again = self.run.status is RunStatus.COMPLETED or self.chance.random() < 0.5
            self._step(Retry("r", first if again else None))
            while not self.run.finished:
                self._something()
        return Evidence(
            self.plan, self.run, self.events, self.executions, MAX_CRASHES, self.cancelled
        )

    def _something(self) -> None:
        if self.chance.random() < 0.01:
            self.cancelled = True
            self._step(Cancel("r"))
            return
        self._step(self._todo.pop(self.chance.randrange(len(self._todo))))

    def _step(self, move: Transition) -> None:
        self.now += 1.0
        if isinstance(move, Wake):
            self.now = max(self.now, self.run.node(move.node).until or 0.0)
        elif isinstance(move, Reap):
            self.now = max(self.now, self.run.node(move.node).lease_until or 0.0)
        out = step(self.run, move, self.now, self.chance.getrandbits(40) | 1)
        if isinstance(move, Claim) and out:
            self._start(move)
        self._keep(out)

    def _start(self, move: Claim) -> None:
        name, token = move.node, move.token
        self.executions.append((name, token.epoch, token.attempt))
        who = ("r", name, token)
        config = self.plan.nodes[name]["config"]
        error = {"type": "x", "message": f"attempt {token.attempt} fails"}
        if self.chance.random() < 0.1:
            self._todo.append(Reap(*who, MAX_CRASHES))
        elif config["way"] in FAILING or token.attempt <= config.get("fails", 0):
            self._todo.append(Fail(*who, error, permanent=config["way"] == "broken"))
        else:
            outputs = {node: self.run.node(node).output for node in self.plan.nodes}
            done = {node: output for node, output in outputs.items() if output}
            number = self.plan.number(name, done)
            self._todo.append(Complete(*who, {"n": number, "attempt": token.attempt}))

    def _keep(self, out: Decision) -> None:
        self.events += out.events
        for dispatch in out.dispatch:
            who = ("r", self.run.graph.nodes[dispatch.node_index].id, dispatch.token)
            parks = self.chance.random() < 0.1
            until = self.now + 3.0
            self._todo.append(Park(*who, until) if parks else Claim(*who, "w", self.now + LEASE))
        self._todo += [wake for _, wake in out.wake]


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in range(0, 200, 40)])
def test_any_evidence_produced_by_the_rules_is_accepted(seeds: range) -> None:
    for seed in seeds:
        found = violations(RandomRun(seed).evidence())
        assert found == [], f"seed {seed}"


Change = Callable[[Evidence], Evidence]


def _events(evidence: Evidence, events: list[Event]) -> Evidence:
    numbered = [event._replace(seq=seq) for seq, event in enumerate(events, 1)]
    return replace(evidence, events=numbered)


def _first(evidence: Evidence, kind: str) -> int:
    return [event.type for event in evidence.events].index(kind)


def _without(kind: str) -> Change:
    def change(evidence: Evidence) -> Evidence:
        place = _first(evidence, kind)
        return _events(evidence, [*evidence.events[:place], *evidence.events[place + 1 :]])

    return change


def _twice(kind: str) -> Change:
    def change(evidence: Evidence) -> Evidence:
        place = _first(evidence, kind)
        return _events(evidence, [*evidence.events[: place + 1], *evidence.events[place:]])

    return change


def _gap(evidence: Evidence) -> Evidence:
    return replace(evidence, events=[*evidence.events[:3], *evidence.events[4:]])


def _start_before_its_parents(evidence: Evidence) -> Evidence:
    """The start of a node that has parents, before everything else that started."""
    starts = [event for event in evidence.events if event.type == "node.started"]
    late = next(e for e in starts if evidence.plan.nodes[e.node or ""]["dependencies"])
    queued = next(e for e in evidence.events if (e.type, e.node) == ("node.queued", late.node))
    rest = [event for event in evidence.events if event not in (late, queued)]
    return _events(evidence, [*rest[:2], queued, late, *rest[2:]])


def _executed_twice(evidence: Evidence) -> Evidence:
    return replace(evidence, executions=[*evidence.executions, evidence.executions[0]])


def _executed_unknown(evidence: Evidence) -> Evidence:
    node, epoch, attempt = evidence.executions[0]
    return replace(evidence, executions=[*evidence.executions, (node, epoch, attempt + 7)])


def _never_executed(evidence: Evidence) -> Evidence:
    return replace(evidence, executions=[])


def _another_output(evidence: Evidence) -> Evidence:
    run: RunState = evidence.run
    next(node for node in run.nodes if node.output).output = {"n": -1}
    return evidence


def _of_another_attempt(evidence: Evidence) -> Evidence:
    node = next(node for node in evidence.run.nodes if node.output)
    node.output = {**node.output, "attempt": node.attempt + 1}
    return evidence


def _another_status(evidence: Evidence) -> Evidence:
    evidence.run.status = RunStatus.CANCELLED
    return evidence


def _unfinished(evidence: Evidence) -> Evidence:
    evidence.run.finished_at = None
    return evidence


@pytest.mark.parametrize(
    "change",
    [
        _without("run.created"),
        _without("node.queued"),
        _without("node.started"),
        _without("node.completed"),
        _without("run.completed"),
        _twice("run.completed"),
        _twice("node.queued"),
        _twice("node.started"),
        _twice("node.completed"),
        _gap,
        _start_before_its_parents,
        _executed_twice,
        _executed_unknown,
        _never_executed,
        _another_output,
        _of_another_attempt,
        _another_status,
        _unfinished,
    ],
    ids=lambda change: change.__qualname__.strip("_").partition(".")[0],
)
def test_evidence_that_the_rules_cannot_produce_is_detected(change: Change) -> None:
    played = (RandomRun(seed).evidence() for seed in range(1000))
    whole = next(one for one in played if one.run.status == "COMPLETED" and len(one.executions) > 9)
    assert violations(change(whole))


def test_a_second_start_of_an_at_most_once_node_is_detected() -> None:
    plan = Plan(
        {
            "name": "storm",
            "on_failure": "continue",
            "nodes": [
                {
                    "id": "n0",
                    "handler": "act",
                    "dependencies": [],
                    "config": {"adds": 1, "of": [], "seconds": 0, "way": "works"},
                    "delivery": "at_most_once",
                }
            ],
        },
        {"x": 1},
    )
    again = {**plan.definition["nodes"][0], "delivery": "at_least_once"}
    graph = build_graph(Workflow.model_validate({**plan.definition, "nodes": [again]}), {})
    run, out = begin(Submit("r", graph, {}), 1.0, 1)
    events = [*out.events]
    for now, last in ((2.0, False), (9.0, True)):
        who = ("r", "n0", run.node("n0").token)
        events += step(run, Claim(*who, "w", now + 1), now, 2).events
        end = Complete(*who, {"n": 1, "attempt": 2}) if last else Reap(*who, MAX_CRASHES)
        events += step(run, end, now + 2, 3).events
    evidence = Evidence(plan, run, events, [("n0", 1, 1), ("n0", 1, 2)], MAX_CRASHES, False)
    assert any("at_most_once" in sentence for sentence in violations(evidence))
