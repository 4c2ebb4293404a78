"""The same races between real processes: four of them on one file, let go at the same moment.

That several handles in one process agree does not imply this: here locks, caches and pages are
those of different processes. None of them may ever see that the file was busy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..faults.nursery import Child, Nursery

PROCESSES = 4
WIDE: dict[str, list[str]] = {f"n{i}": [] for i in range(40)}
PAIRS: dict[str, list[str]] = {f"p{i}": [] for i in range(40)} | {
    f"c{i}": [f"p{i}"] for i in range(40)
}
LAYERED = {
    f"n{layer}_{i}": [f"n{layer - 1}_{i}", f"n{layer - 1}_{(i + 1) % 6}"] if layer else []
    for layer in range(6)
    for i in range(6)
}


@pytest.fixture(scope="module")
def shared_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    jobs = Path(__file__).with_name("process_jobs.py")
    with Nursery(jobs, tmp_path_factory.mktemp("told")) as nursery:
        yield nursery


@pytest.fixture
def nursery(shared_nursery: Nursery) -> Iterator[Nursery]:
    yield shared_nursery
    shared_nursery.clear()


def race(
    nursery: Nursery, folder: Path, job: str, *, each: bool = False, **given: Any
) -> list[Any]:
    """What each of the processes told after all had begun together."""
    started = folder / "start"
    started.unlink(missing_ok=True)
    children: list[Child] = []
    for number in range(PROCESSES):
        own = {"me": f"w{number}"} if each else {}
        children.append(nursery.start(job, folder=str(folder), **own, **given))
    for child in children:
        assert child.hear() == "ready"
    started.touch()
    for child in children:
        child.done()  # says so if one of them saw an error
    told = [child.told()[1:] for child in children]
    return [one[0] if len(one) == 1 else one for one in told]


def make(nursery: Nursery, folder: Path, nodes: dict[str, list[str]], runs: int = 1) -> list[str]:
    made: list[str] = nursery.start("make", folder=str(folder), nodes=nodes, runs=runs).done()
    return made


def test_of_many_claims_of_one_start_exactly_one_wins(nursery: Nursery, tmp_path: Path) -> None:
    (run_id,) = make(nursery, tmp_path, WIDE)
    granted = race(nursery, tmp_path, "claim", each=True, run_id=run_id)
    assert Counter(name for one in granted for name in one) == Counter(dict.fromkeys(WIDE, 1))


def test_of_many_completions_exactly_one_counts_and_the_child_is_published_once(
    nursery: Nursery, tmp_path: Path
) -> None:
    (run_id,) = make(nursery, tmp_path, PAIRS)
    started = nursery.start("start", folder=str(tmp_path), run_id=run_id).done()
    told = race(nursery, tmp_path, "complete", each=True, run_id=run_id, tokens=started)
    counted = Counter(name for one, _ in told for name in one)
    published = Counter(name for _, one in told for name in one)
    assert counted == Counter({name: 1 for name in PAIRS if name.startswith("p")})
    assert published == Counter({name: 1 for name in PAIRS if name.startswith("c")})


def test_a_crowd_runs_every_node_once_and_agrees_on_the_end(
    nursery: Nursery, tmp_path: Path
) -> None:
    (run_id,) = make(nursery, tmp_path, LAYERED)
    told = race(nursery, tmp_path, "work", each=True, run_id=run_id)
    done = {f"w{number}": names for number, (names, _) in enumerate(told)}
    assert Counter(name for names in done.values() for name in names) == Counter(
        dict.fromkeys(LAYERED, 1)
    )
    ends = [end for _, end in told]
    assert all(end == ends[0] for end in ends)
    status, outputs = ends[0]
    assert status == "COMPLETED"
    assert outputs == {name: who for who, names in done.items() for name in names}


def test_one_key_makes_one_run_and_everybody_finds_it(nursery: Nursery, tmp_path: Path) -> None:
    keys = 25
    make(nursery, tmp_path, WIDE)
    told = race(nursery, tmp_path, "create", each=True, keys=keys)
    made = {run_id.partition("-")[2]: run_id for ours, _ in told for run_id in ours}
    assert sum(len(ours) for ours, _ in told) == len(made) == keys
    for _, found in told:
        assert all(made[number] == run_id for number, run_id in found.items())


@pytest.mark.parametrize("command", ["cancel", "retry"])
def test_an_order_is_granted_once(nursery: Nursery, tmp_path: Path, command: str) -> None:
    run_ids = make(nursery, tmp_path, {"a": [], "b": ["a"]}, runs=25)
    told = race(nursery, tmp_path, "order", run_ids=run_ids, command="cancel")
    if command == "retry":
        told = race(nursery, tmp_path, "order", run_ids=run_ids, command="retry")
    assert Counter(run_id for one in told for run_id in one) == Counter(dict.fromkeys(run_ids, 1))


def test_runs_that_nobody_drives_are_taken_once_and_every_node_is_executed_once(
    nursery: Nursery, tmp_path: Path
) -> None:
    run_ids = make(nursery, tmp_path, {"a": [], "b": ["a"], "c": ["a"]}, runs=25)
    told = race(nursery, tmp_path, "adopt", run_ids=run_ids)
    assert Counter(run_id for taken, _ in told for run_id in taken) == Counter(
        dict.fromkeys(run_ids, 1)
    )
    executed = Counter(line for _, lines in told for line in lines)
    assert executed == Counter({f"{run_id} {node}": 1 for run_id in run_ids for node in "abc"})


def test_a_new_file_can_be_opened_by_everybody_at_once(nursery: Nursery, tmp_path: Path) -> None:
    attempts = 8
    children = [
        nursery.start("open_new", folder=str(tmp_path), attempts=attempts) for _ in range(PROCESSES)
    ]
    for number in range(attempts):
        for child in children:
            child.hear(number + 1)
        (tmp_path / f"start-{number}").touch()
    for child in children:
        assert child.done() == attempts - 1
