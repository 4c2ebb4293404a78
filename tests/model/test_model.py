"""Every state that a few processes and a few faults can lead to, for small graphs.

`python -m tests.model` searches ten times as far.
"""

from __future__ import annotations

import pytest

from dovetail.core import step

from . import scenarios
from .__main__ import main
from .runs import NO_RUN, NOW, Facts, Move, Runs
from .scenarios import LONG, SHORT
from .search import search
from .world import FAULTS, MASK, Scenario, World


@pytest.mark.parametrize("scenario", SHORT, ids=lambda scenario: scenario.name)
def test_no_step_breaks_a_promise_and_every_state_leads_to_an_end(scenario: Scenario) -> None:
    found = search(World(scenario))
    assert found.violation is None, found.story()
    assert found.whole
    assert found.states > 100


def test_every_fault_happens_in_some_scenario() -> None:
    assert {fault for scenario in SHORT for fault in scenario.luck} == set(FAULTS)
    assert set(SHORT) <= set(LONG)


def runs_seen(scenario: Scenario) -> set[object]:
    """Every state of the run itself, whatever surrounds it."""
    world = World(scenario)
    seen, todo = {world.first()}, [world.first()]
    while todo:
        for _, after, _ in world.successors(todo.pop()):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return {world.runs.frozen[state & MASK] for state in seen}


@pytest.mark.parametrize("luck", [{"kill": 1}, {"expire": 1}, {"fail": 1, "retry": 1}])
def test_a_reduced_search_finds_every_run_of_a_full_search(
    luck: dict[str, int],
) -> None:
    reduced = Scenario("", scenarios.side_by_side, luck, workers=1)
    whole = Scenario("", scenarios.side_by_side, luck, workers=1, every_order=True)
    assert runs_seen(reduced) == runs_seen(whole)


# ── conditions, which the model decides in two steps as Redis does ───────────────────────


def settled(runs: Runs, number: int, move: Move) -> int:
    """Apply it, and decide what it leaves undecided before anybody else does something."""
    outcome = runs.apply(number, move)
    assert outcome.wrong is None
    number = outcome.run
    while runs.facts[number].pending:
        verdicts = runs.verdicts(number)
        number = runs.apply(number, ("settle", runs.facts[number].epoch, verdicts)).run
    return number


def moves_of(facts: Facts) -> list[Move]:
    moves: list[Move] = [("claim", *start) for start in facts.published]
    for kind in ("yes", "no", "fail"):
        moves += [(kind, *start) for start in facts.running]
    if facts.final and facts.epoch < 2:
        moves += [("retry", None), ("retry", 0)]
    return [*moves, ("cancel",)]


@pytest.mark.parametrize("name", ["two_conditions", "condition_at_join"])
def test_conditions_decided_in_two_steps_have_the_same_end_as_in_one(name: str) -> None:
    runs = Runs(getattr(scenarios, name))
    first = settled(runs, NO_RUN, ("create",))
    seen, todo = {first}, [first]
    while todo:
        number = todo.pop()
        for move in moves_of(runs.facts[number]):
            after = settled(runs, number, move)
            expected = runs.thaw(number)
            step.step(expected, runs.transition(move), NOW, 1)
            expected.seq = 0
            assert runs.thaw(after).snapshot() == expected.snapshot()
            if after not in seen:
                seen.add(after)
                todo.append(after)
    assert len(seen) > 300


# ── what is printed ──────────────────────────────────────────────────────────────────────


def test_the_command_prints_the_searched_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cancel and retry"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].split("  ")[0] == "cancel and retry"
    assert "0 violations" in said[-1]


def test_the_command_refuses_an_unknown_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing of the kind"]) == 2
    assert "nothing of the kind" in capsys.readouterr().err
