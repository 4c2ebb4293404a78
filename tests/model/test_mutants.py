"""The model notices what is wrong, and only that."""

from __future__ import annotations

import re

import pytest

from .mutants import HARMLESS, MUTANTS, Mutant
from .world import Scenario

# The one of a Redis that forgets takes its time; the long search has it.
SEARCHED = list(dict.fromkeys(one.scenario for one in MUTANTS if one.nonces))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_detected(mutant: Mutant) -> None:
    found = mutant.hunt()
    assert found.violation is not None
    assert re.search(mutant.shows, found.violation), found.story()


@pytest.mark.parametrize("mutant", HARMLESS, ids=lambda mutant: mutant.name)
def test_an_equivalent_mutant_breaks_nothing(mutant: Mutant) -> None:
    found = mutant.hunt()
    assert found.violation is None, found.story()
    assert found.whole


@pytest.mark.parametrize("scenario", SEARCHED, ids=lambda one: f"{one.luck}")
def test_without_the_mutation_nothing_is_found(scenario: Scenario) -> None:
    found = Mutant("", scenario, "", ()).hunt()
    assert found.violation is None, found.story()


def test_the_trace_of_a_violation_is_readable() -> None:
    (mutant,) = (one for one in MUTANTS if one.name == "no process reconciles quiet runs")
    story = mutant.hunt().story().splitlines()
    assert "never ends" in story[0]
    assert [line.split("  ")[0] for line in story[1:]] == [
        "at first",
        "orchestrator moved 0",
        "orchestrator applies create",
        "KILL orchestrator before: publish a 1.1, moved 1",
    ]
    assert story[-1].endswith("RUNNING: a published 1.1")
