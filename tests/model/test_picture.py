"""The processes of the model do what the engine's do, in the same order.

The engine runs against parts that only note what they are asked for; the same thing is walked
through in the model. What goes out together in the model may go out in any order in the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import pytest

from dovetail.core.dag import Graph
from dovetail.core.run import Phase, RunState
from dovetail.core.states import NodeStatus
from dovetail.core.step import begin, step
from dovetail.core.transitions import (
    NOTHING,
    Claim,
    Complete,
    Dispatch,
    Expand,
    Fail,
    Retry,
    Submit,
    Transition,
    Wake,
)
from dovetail.engine.distributed.orchestrator import DistributedOrchestrator
from dovetail.engine.distributed.task_source import QueueTaskSource
from dovetail.engine.ports import Task

from . import mutants, processes, scenarios
from .processes import Program
from .runs import ERROR, ITEMS, NO_RUN, OUTPUTS, Runs, Start

GRAPH = scenarios.tried_again
# What the engine's parts call what the model has another word for.
WORDS = {
    "create_many": "apply",
    "claim": "apply",
    "settle_pending": "verdicts",
    "load": "look",
    "acknowledge": "ack",
}
STEPS = {"apply", "publish", "delay", "moved", "ended", "lease", "put_off", "released", "woken"}
STEPS |= {"verdicts", "look", "running", "ack"}


class RecordingPart:
    """A part of the engine that notes what it is asked for, and answers as the test says."""

    def __init__(self, reported: list[str], **answers: Callable[..., Any]) -> None:
        self._reported = reported
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def asked(*about: Any, **more: Any) -> Any:
            step_name = WORDS.get(name, name)
            if step_name in STEPS and (name != "released" or list(about[0])):
                self._reported.append(step_name)
            answer = self._answers.get(name)
            return answer(*about, **more) if answer is not None else None

        return asked


class Engine:
    """An orchestrator over one run, and the same run in the model."""

    def __init__(self, graph: Graph = GRAPH) -> None:
        self.reported: list[str] = []
        self.runs = Runs(graph)
        self.number = NO_RUN
        self.due: list[tuple[float, Wake]] = []
        self.expired: list[str] = []
        self.idle: list[tuple[str, float]] = []
        self._clock = count(100, 50).__next__
        self._nonces = count(1).__next__
        self.run: RunState
        self.timers = RecordingPart(
            self.reported,
            due=lambda now, limit: self.due,
            expired=lambda now, limit: self.expired,
            idle=lambda since, limit: self.idle,
        )
        self.store = RecordingPart(
            self.reported,
            apply=self._apply,
            create_many=self._create,
            load=lambda run_id, outputs: self.run,
            running=lambda run_ids: self._running(),
            settle_pending=lambda run_id, now: NOTHING,
            claim=lambda tasks, worker, until, now: [True] * len(tasks),
        )
        self.store.breaks = 0  # type: ignore[assignment, method-assign]
        self.orchestrator = DistributedOrchestrator(
            self.store,  # type: ignore[arg-type]
            RecordingPart(self.reported, publish=self._expansions),  # type: ignore[arg-type]
            self.timers,  # type: ignore[arg-type]
            RecordingPart(self.reported, lost=list),  # type: ignore[arg-type]
            self.clock,
            lease_seconds=10,
            max_crashes=2,
        )

    def clock(self) -> float:
        return float(self._clock())

    def _create(self, submits: list[Submit], now: float) -> list[Any]:
        self.run, decision = begin(submits[0], now, self._nonces())
        return [decision]

    def _apply(self, moves: list[Transition], now: float, **_: Any) -> list[Any]:
        return [step(self.run, move, now, self._nonces()) for move in moves]

    def _expansions(self, dispatches: list[Dispatch]) -> list[Transition]:
        """A list is rendered where its node would be published."""
        return [
            Expand("r", order.name, order.token, ITEMS)
            for order in dispatches
            if order.state is not None and order.state.phase is Phase.EXPANDING
        ]

    def _running(self) -> list[tuple[tuple[str, str, Any], float]]:
        return [
            (("r", spec.id, node.token), node.lease_until)
            for spec, node in zip(GRAPH.nodes, self.run.nodes, strict=True)
            if node.status is NodeStatus.RUNNING and node.lease_until is not None
        ]

    def step(self, *moves: Transition) -> None:
        """Before the part that is compared."""
        for move in moves:
            assert step(self.run, move, 1e6, self._nonces())

    def token(self, node: str) -> Any:
        return self.run.node(node).token

    # ── the same in the model ────────────────────────────────────────────────────────────

    def start(self, node: str) -> Start:
        """The same start there: its tokens have another nonce."""
        return GRAPH.index[node], self.token(node)._replace(nonce=1)

    def also(self, *moves: Any) -> None:
        for move in moves:
            outcome = self.runs.apply(self.number, move)
            assert outcome.run != self.number
            self.number = outcome.run

    def walked(self, program: Program) -> Iterator[set[str]]:
        """What the model does, stage by stage."""
        while program:
            stage, *rest_ = program
            rest = tuple(rest_)
            name, *about = stage[0]
            facts = self.runs.facts[self.number]
            match name:
                case "apply":
                    outcome = self.runs.apply(self.number, about[0])
                    self.number = outcome.run
                    rest = processes.go_on(about[0], about[1], outcome, rest)
                case "publish" if self.runs.is_mapped(about[0][0]):
                    rest = (processes.one("apply", ("expand", *about[0]), "command"), *rest)
                case "verdicts":
                    rest = processes.follow(about[0]) + rest
                case "look":
                    rest = processes.look_after(facts, facts.epoch) + rest
                case "running":
                    rest = processes.reap_in(facts) + rest
            yield {op[0] for op in stage}
            program = rest

    def same(self, program: Program, *, without: str = "ack") -> None:
        """The engine has done what this does; settling a message is not the orchestrator's."""
        left = list(self.reported)
        for stage in self.walked(program):
            wanted = stage - {without, "made", "run"}
            done, left = left[: len(wanted)], left[len(wanted) :]
            assert set(done) == wanted, self.reported
        assert not left


@pytest.fixture
async def engine() -> Engine:
    """Its run is made, and nothing of it has started."""
    made = Engine()
    await made.orchestrator.submit(Submit("r", GRAPH, {}))
    made.same(processes.submit())
    made.reported.clear()
    return made


async def test_a_list_is_rendered_where_its_node_would_be_published() -> None:
    made = Engine(scenarios.mapped)
    await made.orchestrator.submit(Submit("r", scenarios.mapped, {}))
    made.same(processes.submit())
    assert made.reported.count("apply") == 2
    assert sorted(made.run.nodes[0].items.in_flight) == [0, 1]  # type: ignore[union-attr]


async def claimed(engine: Engine, node: str) -> None:
    start = engine.start(node)
    engine.step(Claim("r", node, engine.token(node), "w", 0.0))
    engine.also(("claim", *start))


def result(engine: Engine, node: str) -> Complete:
    return Complete("r", node, engine.token(node), OUTPUTS["yes"])


async def finished(engine: Engine) -> None:
    for node in ("a", "b"):
        await claimed(engine, node)
        engine.also(("yes", *engine.start(node)))
        engine.step(result(engine, node))


async def test_a_result_is_applied_before_its_effects_are_dispatched(engine: Engine) -> None:
    await claimed(engine, "a")
    message = ("result", engine.start("a"), "yes", False)
    await engine.orchestrator.apply_results([result(engine, "a")])
    engine.same(processes.take_in(message))


async def test_the_last_result_removes_the_run_from_the_timer_index(engine: Engine) -> None:
    await claimed(engine, "a")
    engine.also(("yes", *engine.start("a")))
    engine.step(result(engine, "a"))
    await claimed(engine, "b")
    message = ("result", engine.start("b"), "yes", False)
    await engine.orchestrator.apply_results([result(engine, "b")])
    engine.same(processes.take_in(message))


async def test_a_result_whose_reader_died_makes_the_next_reader_look(engine: Engine) -> None:
    await claimed(engine, "a")
    message = ("result", engine.start("a"), "yes", True)
    late = result(engine, "a")
    engine.also(("yes", *engine.start("a")))
    engine.step(late)
    await engine.orchestrator.apply_results([late], again=True)
    engine.same(processes.take_in(message))


async def test_a_timer_is_removed_after_it_was_applied(engine: Engine) -> None:
    await claimed(engine, "a")
    engine.also(("yes", *engine.start("a")))
    engine.step(result(engine, "a"))
    await claimed(engine, "b")
    engine.also(("fail", *engine.start("b")))
    engine.step(Fail("r", "b", engine.token("b"), ERROR))
    engine.run.node("b").until = 0.0
    engine.due = [(0.0, Wake("r", "b", engine.token("b")))]
    await engine.orchestrator.wake_due()
    engine.same(processes.wake_due(engine.start("b")))


async def test_a_run_leaves_the_lease_index_after_its_lost_nodes_were_reaped(
    engine: Engine,
) -> None:
    await claimed(engine, "a")
    engine.number = engine.runs.expire(engine.number, engine.start("a"))
    engine.expired = ["r"]
    await engine.orchestrator.reap()
    engine.same(processes.reap())


async def test_a_renewed_lease_is_recorded_again(engine: Engine) -> None:
    await claimed(engine, "a")
    engine.run.node("a").lease_until = 1e9
    engine.expired = ["r"]
    await engine.orchestrator.reap()
    engine.same(processes.reap())


@pytest.mark.parametrize("state", ["published", "running", "finished"])
async def test_a_sweep_reconciles_an_idle_run(engine: Engine, state: str) -> None:
    if state == "running":
        await claimed(engine, "a")
    if state == "finished":
        await finished(engine)
    engine.idle = [("r", 0.0)]
    await engine.orchestrator.sweep()
    assert engine.reported.pop(0) == "look"
    facts = engine.runs.facts[engine.number]
    engine.same(processes.look_after(facts, facts.epoch))


async def test_a_retry_is_recorded_before_it_is_applied(engine: Engine) -> None:
    await finished(engine)
    await engine.orchestrator.apply([Retry("r", "b")])
    engine.same(processes.command(("retry", GRAPH.index["b"]), 1))


async def test_a_worker_claims_between_the_index_entry_and_the_acknowledgement(
    engine: Engine,
) -> None:
    task = Task("r", "a", engine.token("a"), "h", {}, {}, {}, 1.0)
    inbox = RecordingPart(engine.reported, tasks=lambda limit: [("message", task)])
    task_source = QueueTaskSource(
        inbox,  # type: ignore[arg-type]
        engine.store,  # type: ignore[arg-type]
        engine.timers,  # type: ignore[arg-type]
        RecordingPart(engine.reported),  # type: ignore[arg-type]
        engine.clock,
        engine.orchestrator.apply,
        worker_id="w",
        lease_seconds=10,
    )
    assert await task_source.take(1) == [task]
    engine.same(processes.take(engine.start("a")), without="")


@pytest.mark.parametrize(
    ("name", "drawn", "compared"),
    [
        (
            "follow",
            mutants.follow_without_publishing,
            test_a_result_is_applied_before_its_effects_are_dispatched,
        ),
        ("command", mutants.command_without_note, test_a_retry_is_recorded_before_it_is_applied),
        ("wake_due", mutants.wake_after_forgetting, test_a_timer_is_removed_after_it_was_applied),
        (
            "take",
            mutants.take_without_index_first,
            test_a_worker_claims_between_the_index_entry_and_the_acknowledgement,
        ),
        (
            "go_on",
            mutants.go_on_alike,
            test_a_result_whose_reader_died_makes_the_next_reader_look,
        ),
    ],
)
async def test_a_wrong_model_step_is_detected(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    drawn: Callable[..., Any],
    compared: Callable[[Engine], Awaitable[None]],
) -> None:
    monkeypatch.setattr(processes, name, drawn)
    with pytest.raises(AssertionError):
        await compared(engine)
