"""The tables of states are the contract's, and the page drawn from them is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from dovetail.core.states import (
    ALLOWED,
    ALLOWED_RUN,
    FINAL,
    FINISHED,
    NodeStatus,
    Reason,
    RunStatus,
)

ROOT = Path(__file__).resolve().parents[2]

# Word for word the table of the contract. COMPLETED after QUEUED is its "cached node".
CONTRACT = {
    "PENDING": "QUEUED SKIPPED CANCELLED FAILED",
    "QUEUED": "RUNNING CANCELLED FAILED QUEUED COMPLETED",
    "RUNNING": "COMPLETED FAILED CANCELLED QUEUED",
    "COMPLETED": "",
    "FAILED": "",
    "SKIPPED": "",
    "CANCELLED": "",
}


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("states", ROOT / "tools" / "states_diagram.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nodes_move_as_the_contract_says() -> None:
    assert {before.value: set(after) for before, after in ALLOWED.items()} == {
        before: set(after.split()) for before, after in CONTRACT.items()
    }


def test_every_state_has_a_row() -> None:
    assert set(ALLOWED) == set(NodeStatus)
    assert set(ALLOWED_RUN) == set(RunStatus)


def test_the_finished_states_are_those_that_nothing_follows() -> None:
    assert {status.value for status in FINISHED} == {"COMPLETED", "FAILED", "SKIPPED", "CANCELLED"}
    assert {status.value for status in FINAL} == {"COMPLETED", "FAILED", "CANCELLED"}


def test_a_node_can_reach_every_state_and_a_run_too() -> None:
    for table, start in ((ALLOWED, NodeStatus.PENDING), (ALLOWED_RUN, RunStatus.PENDING)):
        reached, todo = {start}, [start]
        while todo:
            for after in table[todo.pop()]:  # type: ignore[index]
                if after not in reached:
                    reached.add(after)
                    todo.append(after)
        assert reached == set(table)


def test_states_and_reasons_are_plain_text_wherever_they_are_stored() -> None:
    assert f"{NodeStatus.RUNNING} {RunStatus.FAILED} {Reason.RUN_FAILED}" == (
        "RUNNING FAILED run_failed"
    )


def test_the_drawn_page_is_up_to_date(drawing: ModuleType) -> None:
    page = ROOT / "docs" / "states.md"
    assert page.read_text() == drawing.page(), "run: python tools/states_diagram.py"


def test_the_drawn_page_shows_every_move(drawing: ModuleType) -> None:
    text = drawing.page()
    for before, after in ((b, a) for b, transitions in ALLOWED.items() for a in transitions):
        assert f"{before} --> {after}" in text
    for before, after in ((b, a) for b, transitions in ALLOWED_RUN.items() for a in transitions):
        assert f"{before} --> {after}" in text
